"""The kernels that address other ranks, in Triton's interpreter: n ranks in one process, all push, then all read."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.gather_rows.triton_symm_mem import TritonGatherRows
from fastlayers.comm.parallel import Axis
from fastlayers.comm.symmetric import Arena, local_arenas
from fastlayers.comm.triton_exchange import Exchange
from fastlayers.comm.triton_push import PushSum
from fastlayers.comm.triton_tokens import TokenExchange
from fastlayers.errors import ArgumentError
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Eight ranks take four times as long as four, and nothing is otherwise but how often a loop over ranks runs.
# Each kernel runs on them once.
EIGHT = pytest.param(8, marks=pytest.mark.slow)


def summed(parts: list[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return fp32 sums in rank order, rounded once, then the residual added and rounded."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    h = total.to(parts[0].dtype)
    return h if residual is None else (h.float() + residual.float()).to(h.dtype)


def normed(h: torch.Tensor, weight: torch.Tensor, eps: float, rounding: str) -> torch.Tensor:
    unit = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    if rounding == "cast_then_scale":
        return (weight.float() * unit.to(h.dtype).float()).to(h.dtype)
    return ((weight.float() + (rounding == "one_plus")) * unit).to(h.dtype)


def push_operators(n: int, hidden: int, dtype: torch.dtype, slots: int) -> list[PushSum]:
    arenas = local_arenas(n, PushSum.nbytes_for(n, hidden, dtype, slots))
    return [PushSum(arena, hidden, dtype, slots) for arena in arenas]


def on_all(
    operators: list[PushSum], xs: list[torch.Tensor], *args: object, **how: object
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    for op, x in zip(operators, xs, strict=True):
        op(x, *args, part=1, **how)  # type: ignore[arg-type]
    return [op(x, *args, part=2, **how) for op, x in zip(operators, xs, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((n, dtype) for n in (2, 4) for dtype in DTYPES), (8, torch.bfloat16),
        *(pytest.param(8, dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:]),
    ],
    ids=str,
)  # fmt: skip
def test_push_sum_over_changing_counts(n: int, dtype: torch.dtype) -> None:
    hidden, slots = 24, 8
    operators = push_operators(n, hidden, dtype, slots)
    weight, eps = (1 + 0.3 * torch.randn(hidden)).to(dtype), 1e-6
    for rounding in ("cast_then_scale", "scale_then_cast", "one_plus"):
        for rows in (1, 5, 3, 0, 5) if n < 8 else (1, 3, 2):
            xs = [torch.randn(rows, hidden).to(dtype) for _ in range(n)]
            residual = torch.randn(rows, hidden).to(dtype)
            wanted = summed(xs, residual)
            found = on_all(operators, xs, residual, weight, eps, rounding)
            for y, h in found:
                assert torch.equal(h, wanted)
                torch.testing.assert_close(
                    y.float(), normed(wanted, weight, eps, rounding).float(), rtol=1e-2, atol=1e-5
                )
                assert torch.equal(y, found[0][0])
    empty = torch.tensor(-0.0, dtype=dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
    for op in operators:  # every slot is ready for its next word
        assert bool((op.inbox.tensor.view(empty.dtype) == empty).all())
        assert op.arena.failed() is None


@pytest.mark.parametrize("n", [2, 4, 8])
def test_push_sum_without_norm_or_residual_of_special_values(n: int) -> None:
    hidden = 16
    operators = push_operators(n, hidden, torch.bfloat16, 4)
    values = torch.tensor(
        [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3e38], dtype=torch.bfloat16
    )
    xs = [values.repeat(2).roll(i)[None].expand(2, hidden).contiguous() for i in range(n)]
    wanted = summed(xs)
    for _ in range(3):
        for y, h in on_all(operators, xs):
            assert torch.equal(h.isnan(), wanted.isnan())
            assert torch.equal(h.nan_to_num(), wanted.nan_to_num()) and y is h


def test_push_sum_counters_wrap() -> None:
    operators = push_operators(2, 8, torch.bfloat16, 2)
    for op in operators:
        op.epoch.fill_(2**31 - 2)
    for _ in range(5):
        xs = [torch.randn(2, 8).bfloat16() for _ in range(2)]
        assert all(torch.equal(h, summed(xs)) for _, h in on_all(operators, xs))


def test_strided_rows_and_more_rows_than_programs() -> None:
    operators = push_operators(2, 24, torch.bfloat16, 8)
    for op in operators:
        op.programs = 3
    for rows in (8, 2, 7):
        xs = [torch.randn(rows, 40).bfloat16()[:, :24] for _ in range(2)]
        residual = torch.randn(rows, 32).bfloat16()[:, :24]
        assert all(torch.equal(h, summed(xs, residual)) for _, h in on_all(operators, xs, residual))


def exchanges(n: int, hidden: int, dtype: torch.dtype, slots: int, programs: int = 3) -> list[Exchange]:
    nbytes = Exchange.nbytes_for(n, hidden, dtype, slots, programs)
    return [Exchange(arena, hidden, dtype, slots, programs) for arena in local_arenas(n, nbytes)]


def in_parts(method: str, operators: list[Exchange], xs: list[torch.Tensor], residuals: list[torch.Tensor] | None,
             *args: object, **how: object) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    each = residuals or [None] * len(xs)  # type: ignore[list-item]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept: list[torch.Tensor] = []
    for part in (1, 2, 3):
        calls = [partial(getattr(op, method), x, r, *args) for op, x, r in zip(operators, xs, each, strict=True)]
        found = [call(part=part, **how) for call in calls]
        if part == 2:  # own rows are written here; part 3 only waits, with new tensors
            kept = [h for _, h in found]
            ys = [y for y, _ in found]
    return list(zip(ys, kept, strict=True))


@pytest.mark.parametrize(
    ("n", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (4, torch.bfloat16), (8, torch.float16)]
)
def test_exchange(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlayers.comm.triton_exchange.CHUNK", 2)
    hidden, slots = 24, 9
    operators = exchanges(n, hidden, dtype, slots, 2)
    weight, eps = (1 + 0.3 * torch.randn(hidden)).to(dtype), 1e-6
    for share in (1, 9, 0, 5, 9) if n < 8 else (1, 0, 5):
        xs = [torch.randn(n * share, hidden).to(dtype) for _ in range(n)]
        residual = torch.randn(n * share, hidden).to(dtype)
        own = list(residual.split(share)) if share else [residual] * n
        wanted = summed(xs)
        for rank, (_, h) in enumerate(in_parts("scatter", operators, xs, None)):
            assert torch.equal(h, wanted[rank * share : (rank + 1) * share])
        h_all = summed(xs, residual)
        y_all = normed(h_all, weight, eps, "cast_then_scale")
        whole = in_parts("scatter_gather", operators, xs, own, weight, eps)
        for rank, (y, h) in enumerate(whole):
            assert torch.equal(h, h_all[rank * share : (rank + 1) * share])
            torch.testing.assert_close(y.float(), y_all.float(), rtol=1e-2, atol=1e-5)
            assert torch.equal(y, whole[0][0])
        pieces = [torch.randn(share, hidden).to(dtype) for _ in range(n)]
        for y, _ in in_parts("gather", operators, pieces, None):
            assert torch.equal(y, torch.cat(pieces))
    assert all(op.arena.failed() is None for op in operators)


@pytest.mark.parametrize("n", [2, 4, EIGHT])
def test_nobody_looks_where_nothing_was_sent(n: int) -> None:
    """Memory that a call has no business with holds NaN, and still does afterwards."""
    hidden, slots, rows = 16, 4, 2
    operators = push_operators(n, hidden, torch.bfloat16, slots)
    for rank, op in enumerate(operators):
        op.inbox.tensor[:, rank] = op.inbox.tensor[:, :, rows:] = float("nan")
    for _ in range(3):
        xs = [torch.randn(rows, hidden).bfloat16() for _ in range(n)]
        assert all(torch.equal(h, summed(xs)) for _, h in on_all(operators, xs))
    for rank, op in enumerate(operators):
        assert bool(op.inbox.tensor[:, rank].isnan().all()) and bool(op.inbox.tensor[:, :, rows:].isnan().all())
    moves = exchanges(n, hidden, torch.bfloat16, slots)
    for move in moves:
        move.inbox.tensor.fill_(float("nan"))
        move.outbox.tensor.fill_(float("nan"))
    for _ in range(3):
        xs = [torch.randn(n * rows, hidden).bfloat16() for _ in range(n)]
        for rank, (y, h) in enumerate(in_parts("scatter_gather", moves, xs, None)):
            wanted = summed(xs)
            assert torch.equal(y, wanted) and torch.equal(h, wanted[rank * rows : (rank + 1) * rows])
    for rank, move in enumerate(moves):
        assert bool(move.inbox.tensor[:, rank].isnan().all()) and bool(move.inbox.tensor[:, :, rows:].isnan().all())
        assert bool(move.outbox.tensor[n * rows :].isnan().all())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_tokens_of_changing_counts_whose_slots_hold_nan(n: int) -> None:
    hidden, slots, experts, top_k = 16, 3, 2 * n, 2
    nbytes = TokenExchange.nbytes_for(n, hidden, top_k, torch.float32, slots, 2)
    moves = [TokenExchange(arena, hidden, experts, top_k, torch.float32, slots, 2) for arena in local_arenas(n, nbytes)]
    for move in moves:
        for shared in (move.rows, move.weights, move.inbox):
            shared.tensor.fill_(float("nan"))
        for counter in (move.there.tensor, move.back.tensor, move.states):
            counter.fill_(2**31 - 2)  # which wraps on the way
    for count in (2, 0, 3, 1):
        x, weights = torch.randn(n, count, hidden), torch.rand(n, count, top_k)
        ids = torch.rand(n, count, experts).topk(top_k).indices.int()
        ids[:, 1:] = torch.where(
            ids[:, 1:] == ids[0, 0, 0] if count else ids[:, 1:] < 0, -1, ids[:, 1:]
        )  # some of none
        for part in (1, 2, 3):
            sent = [m.dispatch(x[r], ids[r], weights[r], part=part) for r, m in enumerate(moves)]
        partials = []
        for rank, (rows, local, gates) in enumerate(sent):
            took = local >= 0
            scale = torch.where(took, gates * (1 + local + 2 * rank), 0.0).sum(-1, keepdim=True)
            # Rows that nobody here took were never stored: they are NaN, or stale, and so is what comes of them.
            partials.append(torch.where(took.any(-1, keepdim=True), rows * scale, float("nan")))
        for part in (1, 2):
            outs = [m.combine(partials[r], sent[r][1], ids[r], part=part) for r, m in enumerate(moves)]
        for rank, out in enumerate(outs):
            scale = torch.where(ids[rank] >= 0, weights[rank] * (1 + ids[rank]), 0.0).sum(-1, keepdim=True)
            torch.testing.assert_close(out, x[rank] * scale)
    assert all(move.arena.failed() is None for move in moves)


def test_late_ranks_are_named_and_nothing_hangs() -> None:
    # In the interpreter the clock stands still, so the deadline is reached at once: rank 1 never pushes.
    arenas = local_arenas(2, PushSum.nbytes_for(2, 8, torch.bfloat16, 2), deadline_s=0.0)
    operators = [PushSum(arena, 8, torch.bfloat16, 2) for arena in arenas]
    _, h = operators[0](torch.ones(2, 8, dtype=torch.bfloat16))
    assert arenas[0].failed() == 1 and bool(h.isnan().all())
    _, again = operators[0](torch.ones(2, 8, dtype=torch.bfloat16))
    assert bool(again.isnan().all())


@pytest.mark.parametrize("scatter", [False, True])
def test_who_comes_too_late_to_an_exchange_takes_no_rows_of_later_calls(scatter: bool) -> None:
    arenas = local_arenas(2, Exchange.nbytes_for(2, 8, torch.bfloat16, 2, 1), deadline_s=0.0)
    moves = [Exchange(arena, 8, torch.bfloat16, 2, 1) for arena in arenas]

    def call(rank: int, value: float) -> torch.Tensor:
        x = torch.full((4 if scatter else 2, 8), value, dtype=torch.bfloat16)
        return moves[rank].scatter(x)[0] if scatter else moves[rank].gather(x)[0]

    for value in (10.0, 20.0, 30.0):  # the first gives rank 1 up
        call(0, value)
    assert arenas[0].failed() == 1 and arenas[1].failed() is None
    found = call(1, 1.0)  # what was sent to it before is there still
    assert bool((found == 11.0).all()) if scatter else found[:, 0].tolist() == [10.0, 10.0, 1.0, 1.0]
    call(1, 1.0)
    assert arenas[1].failed() == 0


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_exchanges_behind_a_lost_rank_are_nan_and_send_nothing(normed: bool, residual: bool) -> None:
    arenas = local_arenas(2, Exchange.nbytes_for(2, 128, torch.bfloat16, 3, 2))
    moves = [Exchange(arena, 128, torch.bfloat16, 3, 2) for arena in arenas]
    for each in moves:
        each.outbox.tensor.fill_(5.0)
    arenas[0].status.fill_(2)
    theirs = [box.tensor.clone() for box in (moves[1].inbox, moves[1].outbox, moves[1].flags)]
    added = torch.ones(3, 128, dtype=torch.bfloat16) if residual else None
    weight = torch.ones(128, dtype=torch.bfloat16) if normed else None
    x, more = torch.ones(6, 128, dtype=torch.bfloat16), {"weight": weight, "eps": 1e-6}
    for method in ("scatter", "scatter_gather", "gather"):
        y, h = getattr(moves[0], method)(x if "scatter" in method else x[:3], added, **more)
        assert bool(y.isnan().all()), method
        assert bool(h.isnan().all()) if "scatter" in method or residual else bool((h == 1.0).all())
    (_, scales), h = moves[0].gather_quantised(x[:3], added, **more)
    assert scales.shape == (6, 1) and bool(scales.isnan().all()) and bool(h.isnan().all()) == residual
    coded, h = moves[0].scatter_gather(x, added, **more, codes="col_tma4")
    assert bool(coded.scales.isnan().all()) and bool(h.isnan().all())
    assert bool((x == 1.0).all())
    for box, before in zip((moves[1].inbox, moves[1].outbox, moves[1].flags), theirs, strict=True):
        assert torch.equal(box.tensor, before)


def test_arena_never_grows() -> None:
    arena = local_arenas(2, 1024)[0]
    assert isinstance(arena, Arena)
    arena.carve((100,), torch.bfloat16)
    with pytest.raises(ArgumentError, match="at most 768 of 1,024 bytes"):
        arena.carve((512,), torch.bfloat16)


@pytest.mark.parametrize(("n", "share"), [(2, 2), (4, 2), (8, 2), (2, 21)])
def test_quantised_gather_behind_a_norm(n: int, share: int) -> None:
    """Some programs have no rows, others several times as many as lie beside each other, and not a multiple of them."""
    hidden = 384
    arenas = local_arenas(n, Exchange.nbytes_for(n, hidden, torch.bfloat16, share + 1, 2))
    moves = [Exchange(arena, hidden, torch.bfloat16, share + 1, 2) for arena in arenas]
    weight = (1 + 0.3 * torch.randn(hidden)).to(torch.bfloat16)
    for layout in ("row", "col_tma4"):
        xs = [torch.randn(share, hidden).to(torch.bfloat16) for _ in range(n)]
        residuals = [torch.randn(share, hidden).to(torch.bfloat16) for _ in range(n)]
        xs[0][1, 3] = float("inf")
        for part in (1, 2, 3):
            found = [
                move.gather_quantised(x, residual, weight, 1e-6, layout=layout, part=part)
                for move, x, residual in zip(moves, xs, residuals, strict=True)
            ]
        rows = torch.cat([x + r for x, r in zip(xs, residuals, strict=True)])
        y = normed(rows, weight, 1e-6, "cast_then_scale")
        wanted, wanted_scales = quantize_groups(y, scale_layout=layout)
        for (codes, scales), _ in found:
            assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(scales.nan_to_num(-1), wanted_scales.nan_to_num(-1))
            assert scales.stride() == wanted_scales.stride()


@pytest.mark.parametrize("n", [2, 4, EIGHT])
def test_the_layer_behind_a_norm_has_the_bits_of_each(n: int) -> None:
    """Of the norm alone, and of codes that are made of its rows; with and without a residual, in any order of calls."""
    hidden, slots = 256, 3
    ranks = []
    for rank, exchange in enumerate(exchanges(n, hidden, torch.bfloat16, slots, 2)):
        workspace = Workspace(Fabric(n), exchange.arena, None, exchange)
        ranks.append(TritonGatherRows(GatherRowsConfig(Axis(n, rank), hidden, slots=slots, workspace=workspace)))
    for turn, (share, rounding) in enumerate(((1, "cast_then_scale"), (3, "one_plus"), (0, "scale_then_cast"))):
        norm = RMSNorm(hidden, rounding=rounding, dtype=torch.bfloat16, backend="triton")
        norm.weight.copy_(1 + 0.3 * torch.randn(hidden))
        xs = torch.randn(n, share, hidden).bfloat16()
        residuals = torch.randn(n, share, hidden).bfloat16()
        for layout in (None, "row", "col_tma4")[:: 1 - 2 * (turn % 2)]:
            for added in (True, False):
                sums: list[torch.Tensor] = []
                for part in (1, 2, 3):
                    found = [
                        rank.normed(norm, x, residual if added else None, codes=layout, part=part)
                        for rank, x, residual in zip(ranks, xs, residuals, strict=True)
                    ]
                    sums = [own for _, own in found] if part == 2 else sums  # written in the second
                h = (xs.float() + residuals.float()).bfloat16() if added else xs
                y = norm(h.flatten(0, 1)) if share else h.flatten(0, 1)
                codes, scales = quantize_groups(y, scale_layout=layout or "row")
                for (rows, _), own, wanted in zip(found, sums, h, strict=True):
                    assert torch.equal(own, wanted)
                    if layout is None:
                        assert torch.equal(rows, y)
                        continue
                    assert isinstance(rows, CodedRows) and torch.equal(rows.scales, scales)
                    assert torch.equal(rows.codes.view(torch.uint8), codes.view(torch.uint8))
    for part in (1, 2, 3):
        plain = [rank(x, part=part) for rank, x in zip(ranks, torch.ones(n, 2, hidden).bfloat16(), strict=True)]
    assert all(bool((rows == 1).all()) and rows.shape == (2 * n, hidden) for rows in plain)


@pytest.mark.parametrize("n", [2, 4, EIGHT])
def test_a_sum_and_its_norm_are_gathered_as_codes(n: int) -> None:
    hidden, share = 384, 3
    moves = exchanges(n, hidden, torch.bfloat16, share, 2)
    weight = (1 + 0.3 * torch.randn(hidden)).to(torch.bfloat16)
    for layout in ("row", "col", "col_tma4"):
        xs = [torch.randn(n * share, hidden).to(torch.bfloat16) for _ in range(n)]
        residuals = [torch.randn(share, hidden).to(torch.bfloat16) for _ in range(n)]
        xs[0][1, 3] = float("inf")
        plain = in_parts("scatter_gather", moves, xs, residuals, weight, 1e-6)
        wanted, wanted_scales = quantize_groups(plain[0][0], scale_layout=layout)  # the next call overwrites the rows
        coded = in_parts("scatter_gather", moves, xs, residuals, weight, 1e-6, codes=layout)
        for (_, h), (y, own) in zip(plain, coded, strict=True):
            assert isinstance(y, CodedRows) and torch.equal(h, own)
            assert torch.equal(y.codes.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(y.scales.nan_to_num(-1), wanted_scales.nan_to_num(-1)) and bool(y.scales.isnan().any())
            assert y.scales.stride() == wanted_scales.stride()
    assert all(move.arena.failed() is None for move in moves)


@pytest.mark.parametrize("n", [2, 4, EIGHT])
def test_a_push_leaves_codes(n: int) -> None:
    hidden = 384
    operators = push_operators(n, hidden, torch.bfloat16, 6)
    weight = (1 + 0.3 * torch.randn(hidden)).to(torch.bfloat16)
    for rows, layout, programs in ((3, "row", 132), (5, "col", 2), (6, "col_tma4", 132)):
        xs = [torch.randn(rows, hidden).to(torch.bfloat16) for _ in range(n)]
        residual = torch.randn(rows, hidden).to(torch.bfloat16)
        xs[0][1, 3] = float("nan")
        for operator in operators:
            operator.programs = programs
        plain = on_all(operators, xs, residual, weight, 1e-6)
        wanted, scales = quantize_groups(plain[0][0], scale_layout=layout)
        for (_, h), (y, summed) in zip(plain, on_all(operators, xs, residual, weight, 1e-6, codes=layout), strict=True):
            assert isinstance(y, CodedRows) and torch.equal(h.view(torch.int16), summed.view(torch.int16))
            assert torch.equal(y.codes.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(y.scales.nan_to_num(-1), scales.nan_to_num(-1)) and bool(y.scales.isnan().any())
            assert y.scales.stride() == scales.stride()
