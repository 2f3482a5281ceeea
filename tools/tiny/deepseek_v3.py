"""The tiny DeepSeek-V3: stock transformers for the main model, a multi-token-prediction (MTP) layer beside it.

Only the MTP layer around one more stock decoder layer is written here. Routing is balanced without an
auxiliary loss: after each step every expert's bias moves by a fixed amount towards an even load (DeepSeek-V3
report, 2.1.2).

Which hidden state the MTP layer takes: the main model's output *after* its final norm. vLLM
(`deepseek_v2.py` returns `self.norm(...)`), SGLang (`deepseek_v2.py` hands the normed states to the logits
processor, which stores them) and transformers (`capture_outputs` ties `hidden_states[-1]` to
`last_hidden_state`) all feed exactly that, and `hnorm` then normalises it again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RMSNorm,
)

from tiny.family import Trainee, dense_routing, per_expert, shipped, use_dense_experts
from tiny.text import BOS, CONTEXT, EOS, PAD, VOCABULARY

# The keys and their spelling are those of the published config.json.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "max_position_embeddings": CONTEXT,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": VOCABULARY,
}


def dense_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute all experts and weight them by the routing, zero where a token did not choose the expert.

    Eight experts of width 128 are so small that this beats sorting; the result is that of the stock code up
    to rounding. The loads are counted for `DeepseekV3Trainee.after_step`. Returns (tokens, hidden).
    """
    tokens, experts = hidden_states.shape[0], self.num_experts
    routing = dense_routing(hidden_states, top_k_index, top_k_weights, experts)
    self.load.add_((routing.detach() != 0).sum(0))
    gate, up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).view(tokens, experts, -1).chunk(2, -1)
    inner = self.act_fn(gate) * up * routing[..., None]
    return F.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


class Mtp(nn.Module):
    """DeepSeek-V3's MTP layer: from the hidden state of t and the embedding of t+1 it predicts t+2."""

    def __init__(self, config: DeepseekV3Config):
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the states that the head turns into logits, shaped like `hidden`."""
        # Embedding first, then the main model's *normed* output: see the top of this file.
        joined = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return self.norm(self.block(joined, attention_mask=None, position_embeddings=rope))


class DeepseekV3Trainee(Trainee):
    """The main model and its MTP layer, with their losses."""

    config = CONFIG
    extra = "mtp"

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        config = DeepseekV3Config.from_dict(CONFIG)
        self.main = DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        use_dense_experts(self.main, dense_experts)
        self.mtp = Mtp(self.main.config)
        for module in self.mtp.modules():
            self.main._init_weights(module)
        for module in self.modules():
            if isinstance(module, DeepseekV3MoE):
                load = torch.zeros(config.n_routed_experts)
                module.experts.register_buffer("load", load, persistent=False)
                # Spread from the start, so that the router is trained against biases that matter: a layer
                # that forgets them then chooses other experts.
                module.gate.e_score_correction_bias.normal_(std=0.1)
        # The weights only: biases and rotary frequencies stay fp32, as `from_pretrained` leaves them.
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()

    def trunk(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the main model's normed output and the rotary tables, without any attention mask."""
        model = self.main.model
        hidden = model.embed_tokens(tokens)
        rope = model.rotary_emb(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for layer in model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
        return model.norm(hidden), rope

    def forward(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean losses of the main model and of the MTP layer over (rows, row + 2) tokens."""
        hidden, rope = self.trunk(tokens[:, :-2])
        logits = self.main.lm_head(hidden).float()
        main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten(), reduction="none")
        main = (main * weights[:, 1:-1].flatten()).sum() / weights[:, 1:-1].sum()
        states = self.mtp(self.main.model.embed_tokens(tokens[:, 1:-1]), hidden, rope)
        draft = F.log_softmax(self.main.lm_head(states).float(), dim=-1)
        # Half the target is the text, half what the main model will say there: a draft is judged by that.
        text = -draft.gather(-1, tokens[:, 2:, None])[:, :-1, 0]
        teacher = logits.detach()[:, 1:].softmax(-1)
        mimic = -(teacher * draft[:, :-1]).sum(-1)
        mtp_weights = weights[:, 2:-1]
        return main, ((text + mimic) / 2 * mtp_weights).sum() / mtp_weights.sum()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the main model's logits for (rows, length) tokens."""
        return self.main.lm_head(self.trunk(tokens)[0])

    def after_step(self, bias_step: float) -> None:
        """Move every expert's selection bias towards an even load, and start counting anew."""
        for module in self.modules():
            if isinstance(module, DeepseekV3MoE):
                load = module.experts.load
                bias = module.gate.e_score_correction_bias
                bias.add_(bias_step * torch.sign(load.mean() - load))
                bias.sub_(bias.mean())  # what all have in common selects nothing and would drift
                load.zero_()

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors under the published names, bf16 but for the fp32 selection biases."""
        last = CONFIG["num_hidden_layers"]
        named = dict(self.main.state_dict())
        mtp = {k.removeprefix("block."): v for k, v in self.mtp.state_dict().items()}
        mtp["shared_head.norm.weight"] = mtp.pop("norm.weight")
        mtp["shared_head.head.weight"] = named["lm_head.weight"]
        mtp["embed_tokens.weight"] = named["model.embed_tokens.weight"]
        named |= {f"model.layers.{last}.{k}": v for k, v in mtp.items()}
        return shipped(per_expert(named))
