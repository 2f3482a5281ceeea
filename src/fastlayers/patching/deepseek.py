"""DeepSeek-V2 and V3: which class is replaced by what, and where the two families differ."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.patching import experts, fp8, structure
from fastlayers.patching.matching import Rule, attributes_fit
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.router import FastV2Router, FastV3Router

Output = tuple[torch.Tensor, torch.Tensor | None]


class FastV3MLA(FastMLA):
    """cos and sin come in the model's dtype; even and odd pairs are read, halves are written."""

    _fl_relies = (*FastMLA._fl_relies, "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "rotate_half")

    def _fl_rotate(self, q: torch.Tensor, k: torch.Tensor, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (table.unsqueeze(1) for table in position)
        half = cos.shape[-1] // 2
        if not self.config.rope_interleave:
            return tuple(x * cos + _rotate_half(x) * sin for x in (q, k))
        cos, sin = cos[..., :half], sin[..., :half]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)

        return rotate(q), rotate(k)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Output:
        """Attend; the signature is Hugging Face's."""
        ready = self._fl_may_run(hidden_states, attention_mask, kwargs)
        if not ready:
            original: Output = super().forward(  # type: ignore[misc]
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
            return original
        return self._fl_forward(hidden_states, position_embeddings, attention_mask, past_key_values, kwargs, ready)


class FastV2MLA(FastMLA):
    """One complex fp32 table; rotated in fp32, pairs are read and written."""

    _fl_relies = (*FastMLA._fl_relies, "apply_rotary_emb")

    def _fl_rotate(self, q: torch.Tensor, k: torch.Tensor, position: Any) -> tuple[torch.Tensor, torch.Tensor]:
        table = position.to(q.device).unsqueeze(1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * table).flatten(3).type_as(x)

        return rotate(q), rotate(k)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Output:
        """Attend; the signature is Hugging Face's."""
        ready = self._fl_may_run(hidden_states, attention_mask, kwargs)
        if not ready:
            original: Output = super().forward(  # type: ignore[misc]
                hidden_states, attention_mask, past_key_values, position_embeddings, **kwargs
            )
            return original
        return self._fl_forward(hidden_states, position_embeddings, attention_mask, past_key_values, kwargs, ready)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _mla_fits(module: Any) -> str | None:
    wanted = (
        "config", "layer_idx", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
        "qk_head_dim", "v_head_dim", "scaling", "kv_a_layernorm", "expand_kv",
    )  # fmt: skip
    missing = attributes_fit(module, wanted)
    if missing:
        return missing
    weight = module.kv_b_proj.weight
    if hasattr(weight, "placements"):
        return "dtensor: sharded parameters"
    if type(weight) is not torch.nn.Parameter:
        return f"quantized({type(weight).__name__}): kv_b_proj"
    rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
    if tuple(weight.shape) != (rows, module.kv_lora_rank):
        return f"unknown-class: kv_b_proj is {tuple(weight.shape)}"
    return None


def _router_fits(module: Any) -> str | None:
    wanted = ("weight", "hidden_dim", "num_experts", "num_group", "topk_group", "top_k", "routed_scaling_factor")
    return attributes_fit(module, wanted)


def _v2_router_fits(module: Any) -> str | None:
    if module.topk_method not in ("greedy", "group_limited_greedy"):
        return f"custom-gate: topk_method {module.topk_method}"
    return _router_fits(module)


_MLA_LINEARS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_V2 = "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2"
_V3 = "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3"
_FP8 = "transformers.integrations.finegrained_fp8."

RULES: dict[str, Rule] = {
    **structure.rules(_V2, Rule("attention", FastV2MLA, _mla_fits, _MLA_LINEARS), sparse=True),
    **structure.rules(_V3, Rule("attention", FastV3MLA, _mla_fits, _MLA_LINEARS), sparse=True),
    f"{_V2}TopkRouter": Rule("moe", FastV2Router, _v2_router_fits),
    f"{_V3}TopkRouter": Rule("moe", FastV3Router, _router_fits),
    f"{_FP8}FP8Experts": Rule("moe", experts.FastFP8Experts, experts.why_not, (), experts.verify),
    f"{_FP8}FP8Linear": Rule("linear", fp8.FastFP8Linear, fp8.why_not),
}
