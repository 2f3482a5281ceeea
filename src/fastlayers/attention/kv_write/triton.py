"""kv_write in Triton: one program a token writes its keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.kv_write.layer import KVWriteConfig
from fastlayers.operators import nothing, operator
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents, to_e4m3


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Return ``x`` in a cache's dtype: e4m3 saturates, everything else is rounded to nearest even."""
    if dtype == tl.float8e4nv:
        return to_e4m3(x.to(tl.float32))
    else:
        return cast(x.to(tl.float32), dtype)


@triton.jit
def _copy_heads(
    source,
    target,
    head_stride,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    head, column = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
    inside = (head < heads)[:, None] & (column < HEAD_DIM)[None, :]
    x = tl.load(source + head[:, None] * head_stride + column[None, :], mask=inside, other=0.0)
    tl.store(target + head[:, None] * HEAD_DIM + column[None, :], to_cache(x, target.dtype.element_ty), mask=inside)


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, loc_ptr, k_token, k_head, v_token, v_head, heads,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_V_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    slot = tl.load(loc_ptr + token).to(tl.int64)
    _copy_heads(
        k_ptr + token * k_token, k_cache_ptr + slot * heads * HEAD_DIM, k_head, heads,
        HEAD_DIM, BLOCK_HEADS, BLOCK_DIM,
    )  # fmt: skip
    _copy_heads(
        v_ptr + token * v_token, v_cache_ptr + slot * heads * V_HEAD_DIM, v_head, heads,
        V_HEAD_DIM, BLOCK_HEADS, BLOCK_V_DIM,
    )  # fmt: skip


@operator("kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor loc) -> ()", nothing)
def _kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, loc: torch.Tensor
) -> None:
    tokens, heads, head_dim = k.shape
    if tokens:
        _kv_write_kernel[(tokens,)](
            k, v, k_cache, v_cache, loc, k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads,
            **_blocks(heads, head_dim, v.shape[-1]), **dependent_launch(k), num_warps=4,
        )  # fmt: skip


def _blocks(heads: int, head_dim: int, v_head_dim: int) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_HEADS": triton.next_power_of_2(heads),
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_V_DIM": triton.next_power_of_2(v_head_dim),
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


COMPILE = [
    KernelBuild(
        f"kv_write_{heads}x{head_dim}_{dtype}_to_{cache}",
        _kv_write_kernel,
        {
            "k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "k_cache_ptr": f"*{cache}",
            "v_cache_ptr": f"*{cache}", "loc_ptr": "*i64", "heads": "i32",
            **dict.fromkeys(("k_token", "k_head", "v_token", "v_head"), "i64"),
        },
        {**_blocks(heads, head_dim, head_dim), "PDL": True},
        num_warps=4,
    )
    for heads, head_dim, dtype, cache in (
        (8, 128, "bf16", "bf16"), (8, 128, "bf16", "fp8e4nv"), (8, 64, "bf16", "bf16"),
        (8, 128, "fp32", "fp32"),
    )
]  # fmt: skip
