"""kv_write in Triton: a program writes keys and values of one token or a few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.kv_write.layer import KVWriteConfig
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import nothing, operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents, to_e4m3


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Return ``x`` in a cache's dtype: e4m3 saturates, everything else is rounded to nearest even."""
    if dtype == tl.float8e4nv:
        return to_e4m3(x.to(tl.float32))
    else:
        return cast(x.to(tl.float32), dtype)


@triton.jit
def _load_heads(source, token, head, inside, token_stride, head_stride, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    rows = source + (token * token_stride + head * head_stride)[:, None] + column[None, :]
    return tl.load(rows, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_heads(target, slot, head, inside, heads, x, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    rows = target + ((slot * heads + head) * HEAD_DIM)[:, None] + column[None, :]
    tl.store(rows, to_cache(x, target.dtype.element_ty), mask=inside[:, None] & (column < HEAD_DIM)[None, :])


@kernel(do_not_specialize=("tokens",))
def _kv_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, loc_ptr, tokens, k_token, k_head, v_token, v_head, heads,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, TOKENS * BLOCK_HEADS)
    token, head = (tl.program_id(0) * TOKENS + row // BLOCK_HEADS).to(tl.int64), row % BLOCK_HEADS
    inside = (token < tokens) & (head < heads)
    await_inputs(PDL)
    release_dependents(PDL)
    # All loads before the stores, which the compiler cannot move loads across.
    slot = tl.load(loc_ptr + token, mask=inside, other=0).to(tl.int64)
    k = _load_heads(k_ptr, token, head, inside, k_token, k_head, HEAD_DIM, BLOCK_DIM)
    v = _load_heads(v_ptr, token, head, inside, v_token, v_head, V_HEAD_DIM, BLOCK_V_DIM)
    _store_heads(k_cache_ptr, slot, head, inside, heads, k, HEAD_DIM, BLOCK_DIM)
    _store_heads(v_cache_ptr, slot, head, inside, heads, v, V_HEAD_DIM, BLOCK_V_DIM)


@operator("kv_write", nothing, writes=("k_cache", "v_cache"))
def _kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, loc: torch.Tensor
) -> None:
    tokens, heads, head_dim = k.shape
    if tokens:
        each = tokens_of_program(tokens)
        _kv_write_kernel[(cdiv(tokens, each),)](
            k, v, k_cache, v_cache, loc, tokens, k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads,
            TOKENS=each, **_blocks(heads, head_dim, v.shape[-1]), **dependent_launch(k.device), num_warps=4,
        )  # fmt: skip


def tokens_of_program(tokens: int) -> int:
    """Return how many tokens a program writes: one where that leaves multiprocessors idle otherwise."""
    return 1 if tokens <= 2048 else 2


def _blocks(heads: int, head_dim: int, v_head_dim: int) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_HEADS": next_power_of_2(heads),
        "BLOCK_DIM": next_power_of_2(head_dim),
        "BLOCK_V_DIM": next_power_of_2(v_head_dim),
    }


class TritonKVWrite:
    """One launch; reads k and v once, wherever they lie in a fused projection's output."""

    def __init__(self, cfg: KVWriteConfig) -> None:
        self.cfg = cfg

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """Write both, in place."""
        _kv_write(k, v, k_cache, v_cache, loc)
