"""The tiny GPT-OSS: stock transformers, trained with experts as MXFP4 will hold them.

The forward pass sees the quantised experts, the gradient goes to the unquantised ones, so what is packed at
the end is what was trained. Attention is computed by torch's fused kernels, which know no sinks: the sink
becomes the logit of one more key, whose value is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter, repeat_kv

from tiny import mxfp4
from tiny.family import BalancedTrainee, dense_routing, shipped, use_dense_experts
from tiny.text import BOS, CONTEXT, EOS, PAD, VOCABULARY

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "experts_per_token": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initial_context_length": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": CONTEXT,
    "model_type": "gpt_oss",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "pad_token_id": PAD,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
SINK_WIDTH = 8  # one number would do, but fused kernels want head sizes that are multiples of 8


def sinks_as_keys(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with sinks over (rows, heads, length, 64), in the stock signature.

    Before the first token stands one more, which every token sees. Its value is zero, and heads are widened so
    that its key times any query is the sink.
    """
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    head_dim = query.shape[-1]
    assert s_aux is not None
    sink = F.pad((s_aux / scaling)[:, None], (head_dim, SINK_WIDTH - 1))
    sink = sink[None, :, None].expand(query.shape[0], -1, 1, -1).to(key.dtype)
    key = torch.cat([sink, F.pad(key, (0, SINK_WIDTH))], dim=2)
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, SINK_WIDTH - 1, 1, 0))
    value = F.pad(value, (0, SINK_WIDTH, 1, 0))
    seen = None
    if sliding_window is not None:
        position = torch.arange(query.shape[2], device=query.device)
        distance = position[:, None] - position
        seen = (distance >= 0) & ((distance < sliding_window) | (position == 0))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling)
    return out[:, :, 1:, :head_dim].transpose(1, 2), None


def dense_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute all quantised experts and weight them by the routing. Returns (tokens, hidden)."""
    tokens, experts = hidden_states.shape[0], self.num_experts
    routing = dense_routing(hidden_states, top_k_index, top_k_weights, experts)
    # Stored as (experts, in, out); MXFP4 blocks lie along the input, so they are rounded the other way round.
    gate_up = mxfp4.straight_through(self.gate_up_proj.transpose(1, 2))
    down = mxfp4.straight_through(self.down_proj.transpose(1, 2))
    inner = F.linear(hidden_states, gate_up.flatten(0, 1), self.gate_up_proj_bias.flatten())
    inner = self._apply_gate(inner.view(tokens, experts, -1)) * routing[..., None]
    return F.linear(inner.flatten(1), down.permute(1, 0, 2).flatten(1)) + routing @ self.down_proj_bias


class GptOssTrainee(BalancedTrainee):
    """Stock GPT-OSS on quantised experts, with its losses."""

    config = CONFIG

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        AttentionInterface.register("sinks_as_keys", sinks_as_keys)
        config = GptOssConfig.from_dict({k: v for k, v in CONFIG.items() if k != "quantization_config"})
        main = GptOssForCausalLM._from_config(config, attn_implementation="sinks_as_keys", dtype=torch.float32)
        use_dense_experts(main, dense_experts)
        super().__init__(main, (m for m in main.modules() if isinstance(m, GptOssTopKRouter)))

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors under the published names: experts as `*_blocks` and `*_scales`, all else bf16."""
        out: dict[str, Tensor] = {}
        for name, tensor in self.main.state_dict().items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                out[f"{name}_blocks"], out[f"{name}_scales"] = mxfp4.pack(tensor.transpose(1, 2))
            else:
                out[name] = tensor
        return shipped(out)
