"""Norms and rotation of patched attention in one launch, where torch takes up to ten: what comes after q, k and v.

    x[T, (H + 2K) · D]      the packed product's rows: heads of q, of k, of v
    cos, sin[R, D or D/2]   Hugging Face's tables; token t reads row t mod R
    y[T, H + K, D]          heads of q and k, normed where there are weights, and turned, halves with halves

It rounds where Hugging Face's operations round: the norm before and after its weight, each product and their sum.
So no product and sum may become one operation, which the compiler does unless it is told (``enable_fp_fusion``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton.language as tl

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

# Values that a program holds.
MAX_VALUES = 2048


@kernel
def _turn_kernel(
    x_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, y_ptr, x_token, table_rows, q_heads, heads, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    head = block * HEADS + tl.arange(0, HEADS)
    HALF: tl.constexpr = DIM // 2
    f = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (f < HALF)[None, :]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    await_inputs(PDL)
    release_dependents(PDL)
    rows = x_ptr + token * x_token + head[:, None] * DIM + f[None, :]
    a = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(rows + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        of_q = inside & (head < q_heads)[:, None]
        of_k = inside & (head >= q_heads)[:, None]
        here = f[None, :] + 0 * head[:, None]
        first = tl.load(q_weight_ptr + here, mask=of_q, other=0.0) + tl.load(k_weight_ptr + here, mask=of_k, other=0.0)
        here += HALF
        second = tl.load(q_weight_ptr + here, mask=of_q, other=0.0) + tl.load(k_weight_ptr + here, mask=of_k, other=0.0)
        a = cast(first.to(tl.float32) * cast(a * inverse, dtype).to(tl.float32), dtype).to(tl.float32)
        b = cast(second.to(tl.float32) * cast(b * inverse, dtype).to(tl.float32), dtype).to(tl.float32)
    table = (token % table_rows) * (DIM if WIDE else HALF) + f
    c = tl.load(cos_ptr + table, mask=f < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin_ptr + table, mask=f < HALF, other=0.0).to(tl.float32)[None, :]
    left = cast(a * c, dtype).to(tl.float32) - cast(b * s, dtype).to(tl.float32)
    if WIDE:
        c = tl.load(cos_ptr + table + HALF, mask=f < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin_ptr + table + HALF, mask=f < HALF, other=0.0).to(tl.float32)[None, :]
    right = cast(b * c, dtype).to(tl.float32) + cast(a * s, dtype).to(tl.float32)
    out = y_ptr + (token * heads + head[:, None]) * DIM + f[None, :]
    tl.store(out, cast(left, dtype), mask=inside)
    tl.store(out + HALF, cast(right, dtype), mask=inside)


@lru_cache(maxsize=4096)
def _launch(
    tokens: int, stride: int, table_rows: int, table_width: int, q_heads: int, heads: int, dim: int, eps: float,
    norm: bool, device: torch.device,
) -> Callable[..., None]:  # fmt: skip
    """Return what launches one shape."""
    each = max(1, min(next_power_of_2(heads), MAX_VALUES // next_power_of_2(dim)))
    blocks = cdiv(heads, each)
    return _turn_kernel.at(
        (tokens * blocks,), stride, table_rows, q_heads, heads, eps, DIM=dim, WIDE=table_width == dim, NORM=norm,
        HEADS=each, BLOCKS=blocks, BLOCK=next_power_of_2(dim // 2), **dependent_launch(device), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def _fake(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], heads, dim)


@operator("patched_turn", _fake)
def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, q_heads: int, heads: int, dim: int, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Return new ``[T, heads, dim]``, see the file's head; ``heads``: of q and k together."""
    tokens = x.shape[0]
    y = x.new_empty(tokens, heads, dim)
    if tokens:
        width = cos.shape[-1]
        launch = _launch(
            tokens, x.stride()[0], cos.numel() // width, width, q_heads, heads, dim, eps, q_weight is not None, x.device
        )
        launch(x, cos, sin, x if q_weight is None else q_weight, x if k_weight is None else k_weight, y)
    return y


class TritonTurn:
    """What attention modules hold; none of it is pickled."""

    def __call__(
        self, x: torch.Tensor, position: tuple[torch.Tensor, torch.Tensor], norms: tuple[torch.Tensor, ...],
        heads: tuple[int, int], dim: int, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        """Return the heads of q and k ``[T, H + K, dim]`` of rows ``x [T, …]``; ``norms``: two weights, or none."""
        q_weight, k_weight = norms or (None, None)
        y: torch.Tensor = turn(x, *position, q_weight, k_weight, heads[0], heads[0] + heads[1], dim, eps)
        return y
