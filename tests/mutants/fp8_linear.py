"""Planted bugs of ``fp8_linear``."""

from __future__ import annotations

import torch

from fastlayers.linear.fp8_block.torch import TorchFP8Linear

Bias = torch.Tensor | None


class _HalfScale(TorchFP8Linear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale * 0.5, bias)


class _BlocksFromGrid(TorchFP8Linear):
    """Infers the block from the scale grid, as some loaders do: 136 rows, 2 scale rows, blocks of 68."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        rows = -(-weight.shape[0] // scale.shape[0])
        wrong = torch.arange(weight.shape[0]) // rows
        right = torch.arange(weight.shape[0]) // self.cfg.block_size[0]
        fixed = [
            super(_BlocksFromGrid, self).__call__(x, weight, scale[[g]].expand_as(scale), None)
            for g in range(len(scale))
        ]
        y = torch.stack(fixed)[wrong, ..., torch.arange(weight.shape[0])] if x.shape[0] else None
        if y is None or torch.equal(wrong, right):
            return super().__call__(x, weight, scale, bias)
        y = y.movedim(0, -1)
        return y if bias is None else y + bias


class _NextColumnBlock(TorchFP8Linear):
    """Takes the weight scale of the neighbouring block of K."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale.roll(1, 1), bias)


class _PerTensorActivations(TorchFP8Linear):
    """Uses the first token's scales for all tokens."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        quantize = self.quantize

        def first(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, s = quantize(rows)
            return q, s[:1].expand_as(s)

        self.quantize = first  # type: ignore[assignment]
        return super().__call__(x, weight, scale, bias)


class _ScalesWithoutPadding(TorchFP8Linear):
    """Reads scales whose rows are padded to 4 as if they were not: what a GEMM does that is told another layout."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        quantize = self.quantize

        def misread(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, s = quantize(rows)
            padded = torch.nn.functional.pad(s.t(), (0, -s.shape[0] % 4)).flatten()
            return q, padded[: s.numel()].view(s.shape[1], s.shape[0]).t()

        self.quantize = misread  # type: ignore[assignment]
        return super().__call__(x, weight, scale, bias)


class _NotQuantized(TorchFP8Linear):
    """Leaves the activations in their dtype: better numbers, another function."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        (rows, columns), (n, k) = self.cfg.block_size, weight.shape
        wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        y = (x.float() @ (weight.float() * wide).T).to(x.dtype)
        return y if bias is None else y + bias


class _RaggedBlockDropped(TorchFP8Linear):
    """Stops at the last whole block of K."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        whole = weight.shape[1] // self.cfg.block_size[1] * self.cfg.block_size[1]
        kept = torch.arange(weight.shape[1]) < whole
        return super().__call__(x * kept, weight, scale, bias)


class _NoBias(TorchFP8Linear):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Bias) -> torch.Tensor:
        return super().__call__(x, weight, scale, None)


MUTANTS = {
    "half_scale": _HalfScale,
    "blocks_from_grid": _BlocksFromGrid,
    "next_column_block": _NextColumnBlock,
    "per_tensor_activations": _PerTensorActivations,
    "scales_without_padding": _ScalesWithoutPadding,
    "not_quantized": _NotQuantized,
    "ragged_block_dropped": _RaggedBlockDropped,
    "no_bias": _NoBias,
}
