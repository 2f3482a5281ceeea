"""The tiny Qwen3-MoE: stock transformers, every second layer with experts, the others dense."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tiny.family import BalancedTrainee, dense_routing, per_expert, shipped, use_dense_experts
from tiny.text import BOS, CONTEXT, EOS, PAD, VOCABULARY

# Widths are multiples of 128, so that FP8 blocks fit; four layers with experts of that width would pass 3 MB.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "decoder_sparse_step": 2,
    "eos_token_id": EOS,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}


def dense_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute all experts and weight them by the routing, zero where a token did not choose the expert.

    The result is that of the stock code up to rounding. Returns (tokens, hidden).
    """
    tokens, experts = hidden_states.shape[0], self.num_experts
    routing = dense_routing(hidden_states, top_k_index, top_k_weights, experts)
    gate, up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).view(tokens, experts, -1).chunk(2, -1)
    inner = self.act_fn(gate) * up * routing[..., None]
    return F.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


class Qwen3MoeTrainee(BalancedTrainee):
    """Stock Qwen3-MoE with its losses."""

    config = CONFIG

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig.from_dict(CONFIG)
        main = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        use_dense_experts(main, dense_experts)
        super().__init__(main, (m for m in main.modules() if isinstance(m, Qwen3MoeTopKRouter)))

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors under the published names, one tensor for each projection of each expert."""
        return shipped(per_expert(dict(self.main.state_dict())))
