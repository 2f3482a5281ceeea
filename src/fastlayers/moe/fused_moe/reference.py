"""The experts' oracle: fp32, one expert at a time, weights dequantised."""

from __future__ import annotations

import torch

from fastlayers.linear.weight_only.layer import WeightOnlyLinearConfig
from fastlayers.linear.weight_only.reference import ReferenceWeightOnlyLinear
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import MoEWeights, dequantize, gate_and_up, round_activations
from fastlayers.quant.weight_only_config import WEIGHT_ONLY


class ReferenceFusedMoE:
    """See :mod:`fastlayers.moe.fused_moe.layer` for the formula. Returns fp32."""

    def __init__(self, cfg: FusedMoEConfig) -> None:
        self.cfg = cfg

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Return the weights as they are."""
        return weights

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` fp32 ``[T,D]``."""
        cfg = self.cfg
        values = round_activations(x.float(), cfg.quant, cfg.scale_fmt)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(cfg.num_experts):
            token, slot = torch.where(topk_ids == expert)
            if token.numel():
                out = self._expert(expert, values[token], packed)
                y[token] += cfg.scaling_factor * topk_weights[token, slot].unsqueeze(-1) * out
        real = ((topk_ids >= 0) & (topk_ids < cfg.num_experts)).any(-1)
        for expert in range(cfg.num_experts, cfg.all_experts):
            y[real] += self._expert(expert, values[real], packed)
        return y

    def rounded(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the first product as the activation reads it: here exactly."""
        return gate_up

    def _product(self, x: torch.Tensor, packed: MoEWeights, name: str, expert: int) -> torch.Tensor:
        cfg = self.cfg
        weight, scale, zero = packed.of(name, expert)
        if cfg.quant not in WEIGHT_ONLY or scale is None:
            return x @ dequantize(weight, scale, cfg.quant, 2 if name == "w13" else 1).float().T
        # In fp32 no weight is rounded.
        sizes = x.shape[-1], scale.shape[-1]
        own = WeightOnlyLinearConfig(*sizes, False, torch.float32, cfg.quant, cfg.group_size, cfg.zero_point)
        return ReferenceWeightOnlyLinear(own)(x, weight, scale, zero, None, None)

    def _expert(self, expert: int, x: torch.Tensor, packed: MoEWeights) -> torch.Tensor:
        cfg = self.cfg
        gate_up = self.rounded(self._product(x, packed, "w13", expert))
        if packed.w13_bias is not None:
            gate_up = gate_up + packed.w13_bias[expert].float()
        gate, up = gate_and_up(gate_up, cfg.interleaved)
        if cfg.activation == "silu":
            inner = gate / (1 + torch.exp(-gate)) * up
        else:
            gate, up = gate.clamp(max=cfg.limit), up.clamp(min=-cfg.limit, max=cfg.limit)
            inner = gate / (1 + torch.exp(-cfg.alpha * gate)) * (up + 1)
        out = self._product(round_activations(inner, cfg.quant, cfg.scale_fmt), packed, "w2", expert)
        return out if packed.w2_bias is None else out + packed.w2_bias[expert].float()


class RoundedFusedMoE(ReferenceFusedMoE):
    """The oracle of backends whose first product is rounded to bf16 before the activation is quantised to e4m3.

    Hugging Face's experts and most packages' round there. A code is 16 times coarser than bf16's step, so it moves
    the result by 1%: more than what the backends differ by among themselves, and no error of theirs.
    """

    def rounded(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the first product in the precision of bf16."""
        return gate_up.bfloat16().float() if self.cfg.quant == "fp8_block" else gate_up
