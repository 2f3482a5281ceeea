"""The experts in native torch operations.

On a CPU: torch's grouped products over pairs ordered by expert; for quantised weights and rows that those cannot
read, a loop over the experts that occur. Both inside one operator (it reads ids on the host). On CUDA nothing may
wait for the host: pairs are aligned into blocks of one expert, and batched GEMMs run over a number of blocks
that depends on shapes only, a few blocks at a time so that gathered weights stay small. It is the last resort
there: padding and unused blocks are computed too.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fastlayers.moe.align.torch import align
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.weights import MoEWeights, activate, expert_weights, round_activations

# Gathered weights of one step of the blocked path: at most this many elements.
GATHER_LIMIT = 1 << 26
# Tokens of one chunk of grouped products: their rows are held several times.
GROUPED_TOKENS = 1024


def append_shared(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, cfg: FusedMoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the shared experts to every token that has a valid pair, and mark dropped pairs with -1.

    Their weight 1/factor becomes 1 when the factor is applied to the sum.
    """
    valid = (topk_ids >= 0) & (topk_ids < cfg.num_experts)
    ids = torch.where(valid, topk_ids, -1)
    if cfg.num_shared == 0:
        return topk_weights, ids
    shared = torch.arange(cfg.num_experts, cfg.all_experts, dtype=ids.dtype, device=ids.device)
    extra = torch.where(valid.any(-1, keepdim=True), shared, -1)
    weight = topk_weights.new_full(extra.shape, 1.0 / cfg.scaling_factor)
    return torch.cat([topk_weights, weight], -1), torch.cat([ids, extra], -1)


def _expert(x: torch.Tensor, packed: MoEWeights, expert: int, cfg: FusedMoEConfig) -> torch.Tensor:
    b13 = None if packed.w13_bias is None else packed.w13_bias[expert].to(x.dtype)
    b2 = None if packed.w2_bias is None else packed.w2_bias[expert].to(x.dtype)
    gate_up = F.linear(x, expert_weights(packed, "w13", expert, cfg, x.dtype), b13)
    inner = activate(gate_up, cfg.activation, cfg.alpha, cfg.limit, cfg.interleaved)
    inner = round_activations(inner, cfg.quant, cfg.scale_fmt)
    return F.linear(inner, expert_weights(packed, "w2", expert, cfg, x.dtype), b2)


def _groups(x: torch.Tensor, packed: MoEWeights) -> bool:
    """Return whether torch's grouped product reads these weights: rows of whole 16 bytes."""
    if not hasattr(F, "grouped_mm") or packed.w13_scale is not None or packed.w13.element_size() == 1:
        return False
    rows = (packed.w13.shape[1], packed.w13.shape[2], packed.w2.shape[2])
    return all(n * x.element_size() % 16 == 0 for n in rows) and all(
        w.data_ptr() % 16 == 0 for w in (packed.w13, packed.w2)
    )


def _grouped(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig
) -> torch.Tensor:
    """Return the fp32 sums of weighted pairs ``[T,D]`` by two grouped products; dropped pairs have id -1."""
    (tokens, per_token), experts = ids.shape, packed.w13.shape[0]
    # Dropped pairs come first, and are cut off.
    owner, order = ids.flatten().sort(stable=True)
    counts = torch.bincount(owner.clamp_min(-1) + 1, minlength=experts + 1)
    kept = slice(int(counts[0]), None)
    owner, order = owner[kept], order[kept]
    offsets = counts[1:].cumsum(0, dtype=torch.int32)
    h = F.grouped_mm(x[order // per_token], packed.w13.mT, offs=offsets)
    if packed.w13_bias is not None:
        h = h + packed.w13_bias[owner].to(h.dtype)
    inner = activate(h, cfg.activation, cfg.alpha, cfg.limit, cfg.interleaved)
    out = F.grouped_mm(inner, packed.w2.mT, offs=offsets).float()
    if packed.w2_bias is not None:
        out = out + packed.w2_bias[owner]
    pairs = out.new_zeros(tokens * per_token, out.shape[1])
    pairs[order] = out * weights.flatten()[order].unsqueeze(-1)
    return pairs.view(tokens, per_token, -1).sum(1)


@experts_operator("moe_experts_loop")
def _loop(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    if x.shape[0] and _groups(x, packed):
        sums = [
            _grouped(rows, shares, ids, packed, cfg)
            for rows, shares, ids in zip(
                x.split(GROUPED_TOKENS),
                (topk_weights * cfg.scaling_factor).split(GROUPED_TOKENS),
                topk_ids.split(GROUPED_TOKENS),
                strict=True,
            )
        ]
        return torch.cat(sums).to(x.dtype)
    values = round_activations(x, cfg.quant, cfg.scale_fmt)
    per_token = topk_ids.shape[1]
    owner, order = topk_ids.flatten().sort(stable=True)
    token, weight = order // per_token, (topk_weights.flatten()[order] * cfg.scaling_factor).unsqueeze(-1)
    present, counts = owner.unique_consecutive(return_counts=True)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        run = slice(start, start + count)
        start += count
        if expert >= 0:
            rows = values[token[run]]
            out = _expert(rows, packed, expert, cfg)
            # A token occurs once per expert, and experts come in order: the sum has a fixed order.
            y.index_add_(0, token[run], out.float() * weight[run])
    return y.to(x.dtype)


class TorchFusedMoE(ExpertsBackend):
    """CPU: only experts that occur are touched. CUDA: static shapes, no host sync."""

    experts = _loop

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` ``[T,D]`` in the dtype of ``x``."""
        cfg = self.cfg
        topk_weights, topk_ids = append_shared(topk_weights, topk_ids, cfg)
        if x.is_cuda:
            return self.blocked(x, topk_weights, topk_ids, packed)
        return super().__call__(x, topk_weights, topk_ids, packed)

    def blocked(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: MoEWeights
    ) -> torch.Tensor:
        """Return ``y`` by batched GEMMs over aligned blocks; shapes do not depend on the ids."""
        cfg = self.cfg
        (tokens, per_token), pairs = topk_ids.shape, topk_ids.numel()
        block = 16 if pairs <= 32 * cfg.all_experts else 64
        sorted_ids, expert_ids, _ = align(topk_ids, cfg.all_experts, block)
        values = round_activations(x, cfg.quant, cfg.scale_fmt)
        values = F.pad(values, (0, 0, 0, 1))  # the row of padding
        sorted_ids = sorted_ids.long().view(-1, block)
        rows = torch.where(sorted_ids < pairs, sorted_ids // per_token, tokens)
        partial = torch.zeros(pairs + 1, cfg.hidden_size, dtype=torch.float32, device=x.device)
        step = max(1, GATHER_LIMIT // (2 * cfg.intermediate_size * cfg.hidden_size))
        for start in range(0, sorted_ids.shape[0], step):
            chunk = slice(start, start + step)
            out = self._blocks(values[rows[chunk]], expert_ids[chunk].long().clamp_min(0), packed)
            partial.index_copy_(0, sorted_ids[chunk].flatten(), out.float().flatten(0, 1))
        weight = (topk_weights * cfg.scaling_factor).unsqueeze(-1)
        # Dropped pairs were never written: their rows are zero. In the order of j, like everywhere.
        partial = partial[:pairs].view(tokens, per_token, cfg.hidden_size)
        y = partial.new_zeros(x.shape)
        for j in range(per_token):
            y = y + partial[:, j] * torch.where(topk_ids[:, j, None] >= 0, weight[:, j], 0.0)
        return y.to(x.dtype)

    def _blocks(self, x: torch.Tensor, experts: torch.Tensor, packed: MoEWeights) -> torch.Tensor:
        cfg = self.cfg
        b13, b2 = (None if tensor is None else tensor[experts] for tensor in (packed.w13_bias, packed.w2_bias))
        gate_up = torch.bmm(x, expert_weights(packed, "w13", experts, cfg, x.dtype).mT)
        if b13 is not None:
            gate_up = gate_up + b13.unsqueeze(1).to(x.dtype)
        inner = activate(gate_up, cfg.activation, cfg.alpha, cfg.limit, cfg.interleaved)
        inner = round_activations(inner, cfg.quant, cfg.scale_fmt)
        out = torch.bmm(inner, expert_weights(packed, "w2", experts, cfg, x.dtype).mT)
        return out if b2 is None else out + b2.unsqueeze(1).to(x.dtype)
