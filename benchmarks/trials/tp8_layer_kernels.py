"""Candidates of ``tp8_layer_ways.py``: both latent norms in one launch, and absorbed products that start early."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from fastlayers.attention.mla.layer import MLAAttention
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.triton_gemm import dot
from fastlayers.norm.rms_norm.row import normalised, quantised_row
from fastlayers.quant.coded_rows import CodedRows, empty_codes, layout_of_codes
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents


@kernel(do_not_specialize=("s_row", "s_group"))
def _pair_kernel(
    x_ptr, q_weight_ptr, l_weight_ptr, q_ptr, s_ptr, l_ptr, x_stride, s_row, s_group, eps, Q: tl.constexpr,
    L: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        weight = tl.load(q_weight_ptr + column, mask=column < Q, other=0.0)
        release_dependents(PDL)
        await_inputs(PDL)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < Q, other=0.0)
        y = cast(normalised(x, weight, Q, eps, 0), x.dtype)
        if CODES:
            codes, scale = quantised_row(y, BLOCK)
            group = tl.arange(0, BLOCK // 128)
            place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            tl.store(q_ptr + row * Q + place, codes, mask=place < Q)
            tl.store(s_ptr + row * s_row + group.to(tl.int64) * s_group, scale, mask=group * 128 < Q)
        else:
            tl.store(q_ptr + row * Q + column, y, mask=column < Q)
    else:
        weight = tl.load(l_weight_ptr + column, mask=column < L, other=0.0)
        release_dependents(PDL)
        await_inputs(PDL)
        x = tl.load(x_ptr + row * x_stride + Q + column, mask=column < L, other=0.0)
        tl.store(l_ptr + row * L + column, cast(normalised(x, weight, L, eps, 0), x.dtype), mask=column < L)


def pair(layer: MLAAttention, q_a: torch.Tensor, latent: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Stand in for ``MLAAttention._both_norms``: ``latent`` lies behind ``q_a`` in the same rows."""
    rows, size = q_a.shape
    rank, query, other = latent.shape[1], layer.q_a_layernorm, layer.kv_a_layernorm
    assert query.cfg.rounding == other.cfg.rounding == "cast_then_scale" and latent.data_ptr() > q_a.data_ptr()
    layout = layout_of_codes(layer.q_b_proj, rows)
    q, *scales = [q_a.new_empty(rows, size)] if layout is None else empty_codes(q_a, layout)
    normed, s = latent.new_empty(rows, rank), scales[0] if scales else q_a
    _pair_kernel[(rows, 2)](
        q_a, query.weight, other.weight, q, s, normed, q_a.stride(0), *s.stride(), query.cfg.eps, Q=size, L=rank,
        CODES=bool(scales), BLOCK=max(128, next_power_of_2(max(size, rank))), num_warps=4, **dependent_launch(q.device),
    )  # fmt: skip
    return CodedRows(q, s) if scales else q, normed


@kernel(do_not_specialize=("T",))
def _absorb_kernel(
    x_ptr, w_ptr, y_ptr, T, x_head, x_token, w_head, w_k, w_n, y_head, y_token, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, depth = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, K)
    # All of the program's weight before the wait: nothing of the step writes it.
    weight = tl.load(w_ptr + head * w_head + depth[:, None] * w_k + column[None, :] * w_n)
    release_dependents(PDL)
    await_inputs(PDL)
    inside = (row < T)[:, None]
    x = tl.load(x_ptr + head * x_head + row.to(tl.int64)[:, None] * x_token + depth[None, :], mask=inside, other=0.0)
    y = dot(x, weight, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    place = y_ptr + head * y_head + row.to(tl.int64)[:, None] * y_token + column[None, :]
    tl.store(place, cast(y, y_ptr.dtype.element_ty), mask=inside)


def absorbed(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    """Write ``x[T,H,K] · weight[H,K,N]`` into ``out[T,H,N]``; both may be parts of something wider."""
    (tokens, heads, k), n = x.shape, weight.shape[2]
    block = min(64, max(16, next_power_of_2(tokens)))
    _absorb_kernel[(n // columns, heads, cdiv(tokens, block))](
        x, weight, out, tokens, x.stride(1), x.stride(0), *weight.stride(), out.stride(1), out.stride(0), K=k,
        BLOCK_M=block, BLOCK_N=columns, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip


def mqa(layer: Any, q_nope: torch.Tensor, q_pe: torch.Tensor, q: Any, cache: torch.Tensor, meta: Any) -> torch.Tensor:
    """Stand in for ``MLAAttention._mqa``."""
    cfg, (w_kc, w_vc) = layer.cfg, layer.absorbed_weights()
    absorbed(q_nope, w_kc, q[..., : cfg.kv_lora_rank], max(16, cfg.kv_lora_rank // 8))
    latent, _ = layer.core(meta, q.shape[0]).decode(q, cache, meta)
    o = q.new_empty(q.shape[0], layer.num_heads, cfg.v_head_dim)
    absorbed(latent.to(q.dtype), w_vc.transpose(1, 2), o, max(16, cfg.v_head_dim // 8))
    return o
