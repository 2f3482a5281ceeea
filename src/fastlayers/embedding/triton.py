"""The embedding in Triton: one program a piece of a row; rows of other ranks are never read."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.embedding.layer import EmbeddingConfig
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

BLOCK = 2048


@kernel
def _embedding_kernel(
    ids_ptr, weight_ptr, y_ptr, start, rows, hidden_size, weight_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    release_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64) - start
    inside = column < hidden_size
    held = (row >= 0) & (row < rows)
    value = tl.load(weight_ptr + row * weight_stride + column, mask=column < tl.where(held, hidden_size, 0), other=0.0)
    tl.store(y_ptr + token * hidden_size + column, value, mask=inside)


def _fake(ids: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@operator("embedding", _fake)
def _embedding(ids: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    rows, hidden_size = weight.shape
    y = weight.new_empty(*ids.shape, hidden_size)
    if y.numel():
        block = min(BLOCK, next_power_of_2(hidden_size))
        _embedding_kernel[(ids.numel(), cdiv(hidden_size, block))](
            ids.contiguous(), weight, y, start, rows, hidden_size, weight.stride(0),
            BLOCK=block, num_warps=max(1, block // 512), **dependent_launch(weight.device),
        )  # fmt: skip
    return y


class TritonEmbedding:
    """Reads each wanted row once, writes it once."""

    def __init__(self, cfg: EmbeddingConfig) -> None:
        self.start = cfg.start

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``y``, a new tensor of the weight's dtype."""
        y: torch.Tensor = _embedding(ids, weight, self.start)
        return y
