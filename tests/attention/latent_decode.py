"""What the tests of MLA's decode over latents of 512 + 64 share: inputs, an oracle in fp64, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastlayers.integers import cdiv

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CPU, SCALE = torch.device("cpu"), 1.3 * 192**-0.5
# As fp32 sums; and as tensor cores round those of scores, which are up to some thirty, more coarsely than a host does.
BOUND_LSE, BOUND_LSE_GPU = 1e-5, 1e-4
DRAWN = (330, 1, 64, 65, 0, 2, 129, 63, 200)  # lengths


def inputs(
    lengths: Sequence[int], heads: int, page: int, device: torch.device = CPU, dtype: torch.dtype = BF16,
    starts: Sequence[int] = (), kv_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return queries, a cache whose pages are in no order and whose other rows are NaN, table, starts, lengths.

    ``kv_dtype``: the cache's; default: that of the queries.
    """
    generator = torch.Generator(device).manual_seed(len(lengths) * 1000 + heads)
    most, starts = max(1, cdiv(max(lengths), page)), starts or (0,) * len(lengths)
    table = 1 + torch.randperm(most * len(lengths), generator=generator, device=device).view(len(lengths), most)
    rows = torch.randn(1 + table.numel(), page, 576, generator=generator, device=device)
    cache = (rows + torch.linspace(-0.5, 0.5, 576, device=device)).to(kv_dtype or dtype)
    stale = torch.ones(cache.shape[:2], dtype=torch.bool, device=device)
    for request, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        at = torch.arange(start, length, device=device)
        stale[table[request][at // page], at % page] = False
    cache.view(torch.uint8)[stale] = 255  # NaN, of 8 bits and of 16
    # Heads of different size; scores spread by about two. Between the tokens' rows lies what is nobody's.
    sizes = torch.linspace(1, 3, heads, device=device)[:, None]
    q = torch.full((len(lengths), heads + 2, 576), float("nan"), dtype=dtype, device=device)[:, :heads]
    q[:] = torch.randn(q.shape, generator=generator, device=device) * sizes
    numbers = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, lengths))
    return q, cache, table.int(), *numbers


def exact(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's results: one softmax a request, fp64."""
    q, cache, table, starts, lengths = given
    outs, lses = [], []
    for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        at = torch.arange(start, length, device=q.device)
        rows = cache[table[request][at // cache.shape[1]].long(), at % cache.shape[1]].double()
        scores = SCALE * q[request].double() @ rows.T
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ rows[:, :512] if length > start else rows.new_zeros(q.shape[1], 512))
    return torch.stack(outs).float(), torch.stack(lses).float()


def wrong(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], bound_lse: float = BOUND_LSE,
    *, bound_o: float,
) -> str:  # fmt: skip
    """Say what is wrong, by the worst row; rows that saw nothing are zeros and -inf."""
    o, lse = found[0].float(), found[1]
    blind = wanted[1] == float("-inf")
    size = wanted[0].norm(dim=-1).masked_fill(blind, 1.0)
    apart = float(((o - wanted[0]).norm(dim=-1) / size).nan_to_num(9.0).max())
    off = float((lse - wanted[1]).masked_fill(blind, 0.0).abs().nan_to_num(9.0).max())
    said = [f"o is {apart:.1e} off"] * (not apart < bound_o) + [f"lse is {off:.1e} off"] * (not off < bound_lse)
    return ", ".join(said + ["lse of what saw nothing"] * (not bool((lse[blind] == float("-inf")).all())))
