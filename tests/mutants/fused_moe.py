"""Planted bugs of the experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.torch import TorchFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights


class SwappedExperts(TorchFusedMoE):
    """Swaps the first two experts."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        swapped = torch.where(topk_ids == 0, 1, torch.where(topk_ids == 1, 0, topk_ids))
        return super().__call__(x, topk_weights, swapped, packed)


class SwappedHalves(TorchFusedMoE):
    """Takes up rows for gate rows."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Exchange the halves of the first weight."""
        gate, up = weights.w13.chunk(2, dim=1)
        return replace(weights, w13=torch.cat([up, gate], 1))


class DoubledFactor(TorchFusedMoE):
    """Applies the scaling factor twice."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        return super().__call__(x, topk_weights * self.cfg.scaling_factor, topk_ids, packed)


class ScaledShared(TorchFusedMoE):
    """Applies the factor to everything, shared experts too."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        y = super().__call__(x, topk_weights / self.cfg.scaling_factor, topk_ids, packed)
        return y * self.cfg.scaling_factor


class MissingSlot(TorchFusedMoE):
    """Forgets the last of the k experts."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        ids = topk_ids.clone()
        ids[:, -1:] = -1
        return super().__call__(x, topk_weights, ids, packed)


class HalfScale(TorchFusedMoE):
    """Halves the scales of the second weight."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Scale the scales."""
        if weights.w2_scale is None or self.cfg.quant == "mxfp4":
            return weights
        return replace(weights, w2_scale=weights.w2_scale * 0.5)


class ShiftedScaleRows(TorchFusedMoE):
    """Reads the scale rows of the other half."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Roll the rows of the first weight's scales."""
        if weights.w13_scale is None:
            return weights
        return replace(weights, w13_scale=weights.w13_scale.roll(weights.w13_scale.shape[1] // 2, 1))


class MinusOneWraps(TorchFusedMoE):
    """Indexes with -1: dropped pairs reach the last expert."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        wrapped = torch.where(topk_ids < 0, self.cfg.num_experts - 1, topk_ids)
        return super().__call__(x, topk_weights, wrapped, packed)


class Unweighted(TorchFusedMoE):
    """Gives every expert the same weight."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        return super().__call__(x, torch.full_like(topk_weights, 1.0 / self.cfg.top_k), topk_ids, packed)


class Overwrites(TorchFusedMoE):
    """Writes the result into its input."""

    def __call__(self, x, topk_weights, topk_ids, packed):  # type: ignore[no-untyped-def]
        return x.copy_(super().__call__(x, topk_weights, topk_ids, packed))


class NoBias(TorchFusedMoE):
    """Forgets the second bias."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Drop it."""
        return replace(weights, w2_bias=None)


class SwappedNibbles(TorchFusedMoE):
    """Reads the high nibble first."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Exchange the nibbles of the second weight."""
        if self.cfg.quant != "mxfp4":
            return weights
        return replace(weights, w2=(weights.w2 >> 4) | (weights.w2 << 4))


class ScaleExponent(TorchFusedMoE):
    """Takes 128 for the scales' bias, where it is 127."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Lower the exponents of the first weight by one."""
        if self.cfg.quant != "mxfp4" or weights.w13_scale is None:
            return weights
        return replace(weights, w13_scale=weights.w13_scale - 1)


class ForgottenInterleave(TorchFusedMoE):
    """Takes the first half of interleaved rows for gates."""

    def __init__(self, cfg: FusedMoEConfig) -> None:
        super().__init__(replace(cfg, interleaved=False))


class NeighbouringScales(TorchFusedMoE):
    """Reads each group's scale from the next group."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Roll the scales along K."""
        if self.cfg.quant != "mxfp4" or weights.w13_scale is None:
            return weights
        return replace(weights, w13_scale=weights.w13_scale.roll(1, -1))


class CodesSwapped(TorchFusedMoE):
    """Reads the high halves of packed codes first."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Exchange the nibbles of the first weight."""
        if self.cfg.quant != "w4a16":
            return weights
        return replace(weights, w13=(weights.w13 >> 4) | (weights.w13 << 4))


class ZeroOneOff(TorchFusedMoE):
    """Takes zero points as GPTQ's files have them, one less."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Lower the second weight's."""
        return weights if weights.w2_zero is None else replace(weights, w2_zero=weights.w2_zero - 1)


class NextGroup(TorchFusedMoE):
    """Takes the scales of the next group of inputs."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Roll the first weight's along the groups."""
        if not self.cfg.group_size or weights.w13_scale is None:
            return weights
        return replace(weights, w13_scale=weights.w13_scale.roll(1, 1))


class AnotherExpertsScales(TorchFusedMoE):
    """Takes the scales and zero points of the expert beside."""

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Roll the second weight's."""
        if self.cfg.quant != "w8a16" or weights.w2_scale is None:
            return weights
        zero = None if weights.w2_zero is None else weights.w2_zero.roll(1, 0)
        return replace(weights, w2_scale=weights.w2_scale.roll(1, 0), w2_zero=zero)


MUTANTS = {
    "swapped_experts": SwappedExperts,
    "swapped_halves": SwappedHalves,
    "doubled_factor": DoubledFactor,
    "scaled_shared": ScaledShared,
    "missing_slot": MissingSlot,
    "half_scale": HalfScale,
    "shifted_scale_rows": ShiftedScaleRows,
    "minus_one_wraps": MinusOneWraps,
    "unweighted": Unweighted,
    "overwrites_input": Overwrites,
    "no_bias": NoBias,
    "swapped_nibbles": SwappedNibbles,
    "scale_exponent": ScaleExponent,
    "forgotten_interleave": ForgottenInterleave,
    "neighbouring_scales": NeighbouringScales,
    "codes_swapped": CodesSwapped,
    "zero_one_off": ZeroOneOff,
    "next_group": NextGroup,
    "another_experts_scales": AnotherExpertsScales,
}
