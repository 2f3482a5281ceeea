"""The router in Triton: one program a token, of many tokens several; scores in registers, k rounds of a maximum.

The logits of a few tokens are matrix-vector products: every program takes a few experts, whose weights it reads
before it waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.router.layer import GROUP_SCORES, MASKED_SCORES, SCORINGS, WEIGHTS_DTYPES, RouterConfig
from fastlayers.operators import operator
from fastlayers.runtime.launch import Kinds, New, kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# More tokens are a matrix product.
MAX_LOGIT_TOKENS = 16
MAX_HIDDEN = 8192
# As many have a program each. Of more, starting the programs takes the time: a nanosecond each, whatever they do.
FEW_TOKENS = 256


@triton.jit
def _finite(x):
    # NaN routes like the worst logit, infinities like large numbers: no NaN can arise later.
    x = tl.where(x == x, x, -1e30)
    return tl.minimum(tl.maximum(x, -1e30), 1e30)


@triton.jit
def _sigmoid(z):
    tail = tl.exp(-tl.abs(z))  # never overflows
    return tl.where(z >= 0.0, 1.0, tail) / (1.0 + tail)


@kernel(do_not_specialize=("tokens",))
def _logits_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, D, E, x_stride,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits of TOKENS tokens for BLOCK_E experts: fp32 sums, one rounding."""
    expert, column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    known, inside = expert < E, column < D
    here = known[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + expert[:, None] * D + column[None, :], mask=here, other=0.0).to(tl.float32)
    bias = tl.zeros([BLOCK_E], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
    await_inputs(PDL)
    release_dependents(PDL)
    for i in tl.static_range(TOKENS):
        token = (tl.program_id(1) * TOKENS + i).to(tl.int64)
        x = tl.load(x_ptr + token * x_stride + column, mask=inside & (token < tokens), other=0.0).to(tl.float32)
        z = tl.sum(weight * x[None, :], axis=1) + bias
        tl.store(out_ptr + token * E + expert, cast(z, out_ptr.dtype.element_ty), mask=known & (token < tokens))


def _fake_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else x.dtype)


@lru_cache(maxsize=4096)
def _launch_logits(
    tokens: int, hidden: int, experts: int, stride: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> Callable[..., torch.Tensor]:
    """Return what launches the logits of one shape."""
    block_d, each = next_power_of_2(hidden), 1 if tokens <= 4 else 4
    block_e = 1 if block_d >= 4096 else 2
    return _logits_kernel.at(  # type: ignore[no-any-return]
        (cdiv(experts, block_e), cdiv(tokens, each)), tokens, hidden, experts, stride,
        makes={3: New((tokens, experts), dtype)}, HAS_BIAS=bias, TOKENS=each, BLOCK_E=block_e, BLOCK_D=block_d,
        num_warps=4, **dependent_launch(device),
    )  # fmt: skip


@operator("router_logits", _fake_logits)
def router_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool) -> torch.Tensor:
    """Return ``x @ weight^T + bias`` of a few tokens, fp32 (``wide``) or in the dtype of ``x``."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    x = x if x.stride()[1] == 1 else x.contiguous()
    dtype = torch.float32 if wide else x.dtype
    if not tokens:
        return x.new_empty(tokens, experts, dtype=dtype)
    launch = _launch_logits(tokens, hidden, experts, x.stride()[0], bias is not None, dtype, x.device)
    return launch(x, weight, x if bias is None else bias)


@triton.jit
def _in_integer_order(bits):
    # Bits of fp32 numbers <-> integers in the same order; its own inverse.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_groups(
    choice, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Of a token's scores [group, member]: which groups are kept, by their best member or the sum of their best two.
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    best = tl.max(choice, axis=1)
    if TOP2:
        # Only one copy of the maximum leaves before the second is taken.
        first = tl.min(tl.where(choice == best[:, None], member[None, :], BLOCK_S), axis=1)
        second = tl.max(tl.where(member[None, :] == first[:, None], -float("inf"), choice), axis=1)
        best = tl.where(group < GROUPS, best + second, -float("inf"))
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUPS):
        top = tl.max(best, axis=0)
        winner = tl.min(tl.where(best == top, group, BLOCK_G), axis=0)
        kept = kept | (group == winner)
        best = tl.where(group == winner, -float("inf"), best)
    return kept


@triton.jit
def _rounded(weights, ROUND: tl.constexpr):
    if ROUND == 1:
        weights = cast(weights, tl.bfloat16).to(tl.float32)
    elif ROUND == 2:
        weights = cast(weights, tl.float16).to(tl.float32)
    return weights


@triton.jit
def _route_row(
    logits_ptr, bias_ptr, num_valid_ptr, weights_ptr, ids_ptr, logits_stride, renorm_eps, factor,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SCORING: tl.constexpr, TOP2: tl.constexpr, MASK_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr, RENORMALIZE: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_K)
    out = row * TOP_K + slot
    live = True
    await_inputs(PDL)
    release_dependents(PDL)
    if HAS_VALID:
        live = row < tl.load(num_valid_ptr)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    inside = (group[:, None] < GROUPS) & (member[None, :] < GROUP_SIZE)
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    infinity = float("inf")
    z = _finite(tl.load(logits_ptr + row * logits_stride + expert, mask=inside, other=0.0).to(tl.float32))
    if SCORING == 0:
        shifted = tl.where(inside, z, -infinity)
        power = tl.exp(shifted - tl.max(tl.max(shifted, axis=1), axis=0))
        score = power / tl.sum(tl.sum(power, axis=1), axis=0)
    elif SCORING == 1:
        score = _sigmoid(z)
    else:
        score = z
    choice = score
    if HAS_BIAS:
        choice = _finite(score + tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32))
    choice = tl.where(inside, choice, -infinity)
    if TOPK_GROUPS < GROUPS:
        kept = _best_groups(choice, GROUPS, TOPK_GROUPS, TOP2, BLOCK_G, BLOCK_S)
        eligible = kept[:, None] & inside
        if MASK_ZERO:
            choice = tl.where(inside & (~eligible), 0.0, choice)
            score = tl.where(eligible, score, 0.0)
        else:
            choice = tl.where(eligible, choice, -infinity)
    # Values in integer order (0.0 is -0.0's equal), so that a warp finds the largest with one instruction, and the
    # lowest expert among equals with another. Both leave the tile together, in whatever order it is reshaped.
    ordered = _in_integer_order((choice + 0.0).to(tl.int32, bitcast=True))
    lowest: tl.constexpr = -(1 << 31)
    both = (tl.where(inside, ordered, lowest).to(tl.int64) << 32) | expert.to(tl.int64)
    both = tl.reshape(both, [BLOCK_G * BLOCK_S], can_reorder=True)
    values, experts = (both >> 32).to(tl.int32), (both & 0xFFFF).to(tl.int32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    LOOK_UP: tl.constexpr = MASK_ZERO or (HAS_BIAS and SCORING != 1)
    for k in tl.static_range(TOP_K):
        value = tl.max(values, axis=0)
        winner = tl.min(tl.where(values == value, experts, 0xFFFF), axis=0)
        values = tl.where(experts == winner, lowest, values)
        ids = tl.where(slot == k, winner, ids)
        if LOOK_UP:
            mine = inside & (expert == winner)
            weight = tl.sum(tl.sum(tl.where(mine, score, 0.0), axis=1), axis=0)
        else:
            weight = _in_integer_order(value).to(tl.float32, bitcast=True)
        weights = tl.where(slot == k, weight, weights)
    if HAS_BIAS and not LOOK_UP:
        # The values have the bias: the scores once more, of the chosen experts.
        weights = _sigmoid(_finite(tl.load(logits_ptr + row * logits_stride + ids).to(tl.float32)))
        weights = tl.where(slot < TOP_K, weights, 0.0)
    if SCORING == 2:
        shifted = tl.where(slot < TOP_K, weights, -infinity)
        power = tl.exp(shifted - tl.max(shifted, axis=0))
        weights = power / tl.sum(power, axis=0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + renorm_eps)
    weights = _rounded(weights * factor, ROUND)
    if HAS_VALID:
        ids = tl.where(live, ids, -1)
        weights = tl.where(live, weights, 0.0)
    tl.store(ids_ptr + out, ids, mask=slot < TOP_K)
    tl.store(weights_ptr + out, weights, mask=slot < TOP_K)


@triton.jit
def _in_halves(parts, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    # The sum of COUNT <= WIDTH tensors as a warp sums WIDTH lanes: those half the width apart first, so that a token
    # has the same weights whichever program it is in.
    if WIDTH == 1:
        return parts[0]
    else:
        half: tl.constexpr = WIDTH // 2
        left: tl.constexpr = half if COUNT > half else COUNT
        sums = ()
        for i in tl.static_range(left):
            sums = sums + ((parts[i] + parts[i + half]) if i + half < COUNT else parts[i],)
        return _in_halves(sums, left, half)


@triton.jit
def _route_rows(
    logits_ptr, num_valid_ptr, weights_ptr, ids_ptr, tokens, logits_stride, renorm_eps, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr, HAS_VALID: tl.constexpr,
    RENORMALIZE: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Of ROWS tokens, without groups and correction. What is one number a token is held once in each of its lanes.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < tokens
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < EXPERTS
    start = logits_ptr + row.to(tl.int64)[:, None] * logits_stride
    out = row.to(tl.int64)[:, None] * TOP_K + column
    await_inputs(PDL)
    release_dependents(PDL)
    live = known
    if HAS_VALID:
        live = row < tl.load(num_valid_ptr)
    z = _finite(tl.load(start + column, mask=known[:, None] & inside, other=0.0).to(tl.float32))
    if SCORING == 0:
        shifted = tl.where(inside, z, -float("inf"))
        power = tl.exp(shifted - tl.max(shifted, axis=1)[:, None])
        score = power / tl.sum(power, axis=1)[:, None]
    elif SCORING == 1:
        score = _sigmoid(z)
    else:
        score = z
    lowest: tl.constexpr = -(1 << 31)
    values = tl.where(inside, _in_integer_order((score + 0.0).to(tl.int32, bitcast=True)), lowest)
    ids = tl.zeros([ROWS, BLOCK], tl.int32)
    found = ()
    for k in tl.static_range(TOP_K):
        value = tl.max(values, axis=1)
        winner = tl.min(tl.where(values == value[:, None], column, 0xFFFF), axis=1)
        values = tl.where(column == winner[:, None], lowest, values)
        ids = tl.where(column == k, winner[:, None], ids)
        found = found + (_in_integer_order(value).to(tl.float32, bitcast=True),)
    if SCORING == 2:
        powers = ()
        for k in tl.static_range(TOP_K):
            powers = powers + (tl.exp(found[k] - found[0]),)
        total = _in_halves(powers, TOP_K, WIDTH)
        found = ()
        for k in tl.static_range(TOP_K):
            found = found + (powers[k] / total,)
    if RENORMALIZE:
        divisor = _in_halves(found, TOP_K, WIDTH) + renorm_eps
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = found[k] / divisor if RENORMALIZE else found[k]
        weights = tl.where(column == k, _rounded(weight * factor, ROUND)[:, None], weights)
    if HAS_VALID:
        ids, weights = tl.where(live[:, None], ids, -1), tl.where(live[:, None], weights, 0.0)
    chosen = known[:, None] & (column < TOP_K)
    tl.store(ids_ptr + out, ids, mask=chosen)
    tl.store(weights_ptr + out, weights, mask=chosen)


@kernel(do_not_specialize=("tokens",))
def _router_kernel(
    logits_ptr, bias_ptr, num_valid_ptr, weights_ptr, ids_ptr, tokens, logits_stride, renorm_eps, factor,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SCORING: tl.constexpr, TOP2: tl.constexpr, MASK_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr, RENORMALIZE: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if ROWS > 1:
        tl.static_assert(GROUPS == 1 and not HAS_BIAS)
        _route_rows(
            logits_ptr, num_valid_ptr, weights_ptr, ids_ptr, tokens, logits_stride, renorm_eps, factor,
            GROUP_SIZE, TOP_K, SCORING, HAS_VALID, RENORMALIZE, ROUND, ROWS, BLOCK_S, BLOCK_K, PDL,
        )  # fmt: skip
    else:
        _route_row(
            logits_ptr, bias_ptr, num_valid_ptr, weights_ptr, ids_ptr, logits_stride, renorm_eps, factor,
            GROUPS, GROUP_SIZE, TOPK_GROUPS, TOP_K, SCORING, TOP2, MASK_ZERO, HAS_BIAS, HAS_VALID, RENORMALIZE, ROUND,
            BLOCK_G, BLOCK_S, BLOCK_K, PDL,
        )  # fmt: skip


def _empty(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = logits.shape[0]
    return logits.new_empty(tokens, top_k, dtype=torch.float32), logits.new_empty(tokens, top_k, dtype=torch.int32)


def _rows_and_warps(
    tokens: int, groups: int, size: int, stride: int, top_k: int, scoring: int, bias: bool
) -> tuple[int, int]:
    """Return the tokens and warps of a program, for ``groups`` of ``size`` experts.

    A token's weights have the same bits whichever this is. Scores that are each expert's own may be held by a few lanes
    a token; a softmax over all experts is summed by a whole warp, whose lanes must hold what they would hold alone.
    """
    block = next_power_of_2(groups) * next_power_of_2(size)
    if block > 512:
        return 1, 4
    if tokens <= FEW_TOKENS or groups > 1 or bias or top_k > 16:
        return 1, 1
    if SCORINGS[scoring] != "softmax":
        return (16 if block <= 32 else 4), 4
    alike = block <= 32 or (block == size and stride % 16 == 0)
    return (4, 4) if alike else (1, 1)


@lru_cache(maxsize=4096)
def _launch(
    tokens: int, experts: int, stride: int, top_k: int, scoring: int, groups: int, topk_groups: int, top2: bool,
    mask_zero: bool, renormalize: bool, eps: float, factor: float, rounded: int, bias: bool, valid: bool,
    device: torch.device,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return what launches the router of one shape: weights and ids."""
    size = experts // groups
    block_g, block_s = next_power_of_2(groups), next_power_of_2(size)
    rows, warps = _rows_and_warps(tokens, groups, size, stride, top_k, scoring, bias)
    return _router_kernel.at(  # type: ignore[no-any-return]
        (cdiv(tokens, rows),), tokens, stride, eps, factor,
        makes={3: New((tokens, top_k), torch.float32), 4: New((tokens, top_k), torch.int32)},
        GROUPS=groups, GROUP_SIZE=size, TOPK_GROUPS=topk_groups, TOP_K=top_k, SCORING=scoring, TOP2=top2,
        MASK_ZERO=mask_zero, HAS_BIAS=bias, HAS_VALID=valid, RENORMALIZE=renormalize, ROUND=rounded, ROWS=rows,
        BLOCK_G=block_g, BLOCK_S=block_s, BLOCK_K=next_power_of_2(top_k),
        num_warps=warps, **dependent_launch(device),
    )  # fmt: skip


@operator("router", _empty)
def _router(
    logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None, top_k: int, scoring: int,
    groups: int, topk_groups: int, top2: bool, mask_zero: bool, renormalize: bool, eps: float, factor: float,
    rounded: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens, experts = logits.shape
    if not tokens:
        return _empty(logits, top_k)
    logits = logits if logits.stride()[1] == 1 else logits.contiguous()
    launch = _launch(
        tokens, experts, logits.stride()[0], top_k, scoring, groups, topk_groups, top2, mask_zero, renormalize, eps,
        factor, rounded, bias is not None, num_valid is not None, logits.device,
    )  # fmt: skip
    return launch(logits, logits if bias is None else bias, logits if num_valid is None else num_valid)


class TritonRouter:
    """One launch, and one more for the logits of a few tokens; reads the logits once."""

    def __init__(self, cfg: RouterConfig) -> None:
        # Without group selection the tile is one row of all experts.
        groups, topk_groups = (cfg.num_groups, cfg.topk_groups) if cfg.grouped else (1, 1)
        self.arguments = (
            cfg.top_k, SCORINGS.index(cfg.scoring), groups, topk_groups, cfg.group_score == GROUP_SCORES[0],
            cfg.masked_score == MASKED_SCORES[1], cfg.renormalize, cfg.renorm_eps, cfg.factor,
            WEIGHTS_DTYPES.index(cfg.weights_dtype),
        )  # fmt: skip
        # Both launches, for kinds of tokens that came before.
        self._ready = Kinds()

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None,
        correction: torch.Tensor | None, num_valid: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Return what a call with :meth:`logits` does, by both launches; ``None``: do that, for whoever looks on."""
        if x.shape[0] > MAX_LOGIT_TOKENS or not _router.unwatched(x, weight, bias, correction, num_valid):
            return None
        kind = (
            x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.dtype, None if bias is None else bias.dtype,
            dtype, correction is None, num_valid is None,
        )  # fmt: skip
        found = self._ready.get(kind) or self._ready.keep(
            kind, self._launches(x, weight, bias, dtype, correction, num_valid)
        )
        compute, choose = found
        if compute is None:
            return None
        z = compute(x, weight, x if bias is None else bias)
        chosen: tuple[torch.Tensor, torch.Tensor] = choose(
            z, z if correction is None else correction, z if num_valid is None else num_valid
        )
        return chosen

    def _launches(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None,
        correction: torch.Tensor | None, num_valid: torch.Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return what launches the logits and the choice; no tokens: neither."""
        (tokens, hidden), experts = x.shape, weight.shape[0]
        if not tokens or not self._takes(x, weight, bias) or x.stride()[1] != 1:
            return None, None
        out = torch.float32 if dtype is torch.float32 else x.dtype
        compute = _launch_logits(tokens, hidden, experts, x.stride()[0], bias is not None, out, x.device)
        valid = num_valid is not None
        choose = _launch(tokens, experts, experts, *self.arguments, correction is not None, valid, x.device)
        return compute, choose

    @staticmethod
    def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return whether there is a kernel for the logits of these tokens."""
        same = x.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
        return same and x.shape[0] <= MAX_LOGIT_TOKENS and x.shape[1] <= MAX_HIDDEN

    def logits(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Return the logits of a few tokens in ``dtype`` (``None``: that of ``x``); ``None`` for other calls."""
        if not self._takes(x, weight, bias):
            return None
        z: torch.Tensor = router_logits(x, weight, bias, dtype is torch.float32)
        return z

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(topk_weights fp32 [T,k], topk_ids int32 [T,k])``."""
        weights, ids = _router(logits, bias, num_valid, *self.arguments)
        return weights, ids
