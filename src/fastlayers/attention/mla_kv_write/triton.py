"""mla_kv_write in Triton: one program a token writes both parts of its row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.attention.kv_write.triton import to_cache
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.operators import nothing, operator
from fastlayers.testing.compile_check import KernelBuild


@triton.jit
def _copy(source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(source + column, mask=column < WIDTH, other=0.0)
    tl.store(target + column, to_cache(x, target.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _mla_kv_write_kernel(
    latent_ptr, rope_ptr, cache_ptr, loc_ptr, latent_stride, rope_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = cache_ptr + tl.load(loc_ptr + token).to(tl.int64) * (RANK + ROPE)
    _copy(latent_ptr + token * latent_stride, row, RANK, BLOCK_RANK)
    _copy(rope_ptr + token * rope_stride, row + RANK, ROPE, BLOCK_ROPE)


@operator("mla_kv_write(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor loc) -> ()", nothing)
def _mla_kv_write(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
    if latent.shape[0]:
        _mla_kv_write_kernel[(latent.shape[0],)](
            latent, rope, cache, loc, latent.stride(0), rope.stride(0),
            **_blocks(latent.shape[1], rope.shape[1]), num_warps=2,
        )  # fmt: skip


def _blocks(rank: int, rope: int) -> dict[str, int]:
    powers = triton.next_power_of_2(rank), triton.next_power_of_2(rope)
    return {"RANK": rank, "ROPE": rope, "BLOCK_RANK": powers[0], "BLOCK_ROPE": powers[1]}


class TritonMLAKVWrite:
    """One launch; no concatenated copy."""

    def __init__(self, cfg: MLAKVWriteConfig) -> None:
        self.cfg = cfg

    def __call__(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write, in place."""
        _mla_kv_write(latent, rope, cache, loc)


COMPILE = [
    KernelBuild(
        f"mla_kv_write_{dtype}_to_{cache}",
        _mla_kv_write_kernel,
        {
            "latent_ptr": f"*{dtype}", "rope_ptr": f"*{dtype}", "cache_ptr": f"*{cache}", "loc_ptr": "*i64",
            "latent_stride": "i64", "rope_stride": "i64",
        },
        _blocks(512, 64),
        num_warps=2,
    )
    for dtype, cache in (("bf16", "bf16"), ("bf16", "fp8e4nv"), ("fp32", "fp32"), ("fp32", "fp8e4nv"))
]  # fmt: skip
