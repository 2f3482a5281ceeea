"""mla_kv_write in Triton: a program writes both parts of the rows of one token or a few."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.attention.kv_write.triton import to_cache
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import nothing, operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents


@kernel(do_not_specialize=("tokens",))
def _mla_kv_write_kernel(
    latent_ptr, rope_ptr, cache_ptr, loc_ptr, tokens, latent_stride, rope_stride,
    RANK: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = token < tokens
    part, turned = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    wide, narrow = inside[:, None] & (part < RANK)[None, :], inside[:, None] & (turned < ROPE)[None, :]
    await_inputs(PDL)
    release_dependents(PDL)
    # All loads before the stores, which the compiler cannot move loads across.
    slot = tl.load(loc_ptr + token, mask=inside, other=0).to(tl.int64)
    latent = tl.load(latent_ptr + (token * latent_stride)[:, None] + part[None, :], mask=wide, other=0.0)
    rope = tl.load(rope_ptr + (token * rope_stride)[:, None] + turned[None, :], mask=narrow, other=0.0)
    row = cache_ptr + (slot * (RANK + ROPE))[:, None]
    tl.store(row + part[None, :], to_cache(latent, cache_ptr.dtype.element_ty), mask=wide)
    tl.store(row + RANK + turned[None, :], to_cache(rope, cache_ptr.dtype.element_ty), mask=narrow)


@operator("mla_kv_write", nothing, writes=("cache",))
def _mla_kv_write(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
    tokens = latent.shape[0]
    if tokens:
        each = 1 if tokens <= 1024 else 4
        _mla_kv_write_kernel[(cdiv(tokens, each),)](
            latent, rope, cache, loc, tokens, latent.stride(0), rope.stride(0), TOKENS=each,
            **_blocks(latent.shape[1], rope.shape[1]), **dependent_launch(latent.device),
            num_warps=2 if each == 1 else 4,
        )  # fmt: skip


def _blocks(rank: int, rope: int) -> dict[str, int]:
    powers = next_power_of_2(rank), next_power_of_2(rope)
    return {"RANK": rank, "ROPE": rope, "BLOCK_RANK": powers[0], "BLOCK_ROPE": powers[1]}


class TritonMLAKVWrite:
    """One launch; no concatenated copy."""

    def __init__(self, cfg: MLAKVWriteConfig) -> None:
        self.cfg = cfg

    def __call__(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write, in place."""
        _mla_kv_write(latent, rope, cache, loc)
