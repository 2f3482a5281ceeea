"""Fingerprints of the code that our classes replace; see ``matching.fingerprint``. Other code is verified."""

from __future__ import annotations

_V2 = "transformers.models.deepseek_v2.modeling_deepseek_v2."
_V3 = "transformers.models.deepseek_v3.modeling_deepseek_v3."
_FP8 = "transformers.integrations.finegrained_fp8."
_Q2 = "transformers.models.qwen2.modeling_qwen2.Qwen2"
_Q2M = "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2Moe"
_Q3 = "transformers.models.qwen3.modeling_qwen3.Qwen3"
_Q3M = "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3Moe"
_OSS = "transformers.models.gpt_oss.modeling_gpt_oss.GptOss"
_LLAMA = "transformers.models.llama.modeling_llama.Llama"
_LLAMA4 = "transformers.models.llama4.modeling_llama4.Llama4"

# transformers 5.17.0
KNOWN: dict[str, tuple[str, ...]] = {
    f"{_V2}DeepseekV2Attention": ("a09f83d2140a47e4",),
    f"{_V3}DeepseekV3Attention": ("7d7124fdfa721117",),
    f"{_V2}DeepseekV2TopkRouter": ("cd261833a7649fad",),
    f"{_V3}DeepseekV3TopkRouter": ("b70233da004197b2",),
    f"{_V2}DeepseekV2Experts": ("66c82c1f3cd0b847",),
    f"{_V3}DeepseekV3Experts": ("66c82c1f3cd0b847",),
    f"{_V2}DeepseekV2RMSNorm": ("9635bcd843f309a0",),
    f"{_V3}DeepseekV3RMSNorm": ("9635bcd843f309a0",),
    f"{_V2}DeepseekV2MLP": ("7d2027d4464e3e71",),
    f"{_V3}DeepseekV3MLP": ("7d2027d4464e3e71",),
    f"{_FP8}FP8Experts": ("301c97df24ec3a41",),
    f"{_FP8}FP8Linear": ("ad392c2a4b387963",),
    f"{_Q2}Attention": ("813ecccaad6bed13",),
    f"{_Q2M}Attention": ("91ace9a0c4aa01ce",),
    f"{_Q3}Attention": ("3946be42b297b0c4",),
    f"{_Q3M}Attention": ("3946be42b297b0c4",),
    f"{_OSS}Attention": ("d191859d105e5eb9",),
    f"{_LLAMA}Attention": ("91ace9a0c4aa01ce",),
    f"{_LLAMA4}TextAttention": ("5844335bc38b4f37",),
    f"{_LLAMA4}TextL2Norm": ("cba6ba41dc15234a",),
    f"{_LLAMA4}TextMoe": ("6f9863fcc8313ee9",),
    f"{_LLAMA4}TextExperts": ("5f66bc719c393081",),
    f"{_LLAMA4}Router": ("e67ac26ae72620fe",),
    f"{_LLAMA4}TextDecoderLayer": ("41d20714d5a49a10",),
    f"{_LLAMA4}TextRMSNorm": ("08e8868b5ae38af3",),
    f"{_LLAMA4}TextMLP": ("c4447c48b0f9ccf3",),
    f"{_Q2M}Experts": ("66c82c1f3cd0b847",),
    f"{_Q3M}Experts": ("66c82c1f3cd0b847",),
    f"{_OSS}Experts": ("5263b0c58434fc2d",),
    f"{_Q2M}TopKRouter": ("0b6a7b1ab2be0f92",),
    f"{_Q3M}TopKRouter": ("0b6a7b1ab2be0f92",),
    f"{_OSS}TopKRouter": ("471f06ea0bac9fc6",),
    f"{_OSS}RMSNorm": ("eef4e978a32aa4a4",),
    **{f"{family}RMSNorm": ("9635bcd843f309a0",) for family in (_Q2, _Q2M, _Q3, _Q3M, _LLAMA)},
    f"{_V2}DeepseekV2Moe": ("a26bd320fa075e68",),
    f"{_V3}DeepseekV3MoE": ("a26bd320fa075e68",),
    f"{_Q2M}SparseMoeBlock": ("a229bab296e899d7",),
    f"{_Q3M}SparseMoeBlock": ("99cc8ec3bb8e23aa",),
    f"{_OSS}MLP": ("78305e689641703c",),
    f"{_OSS}DecoderLayer": ("a6e4ee9acdf9615c",),
    **{
        f"{family}DecoderLayer": ("1a8125909341e389",)
        for family in (f"{_V2}DeepseekV2", f"{_V3}DeepseekV3", _Q2, _Q2M, _Q3, _Q3M, _LLAMA)
    },
    **{f"{family}MLP": ("7d2027d4464e3e71",) for family in (_Q2, _Q2M, _Q3, _Q3M, _LLAMA)},
    **{
        f"{family}ForCausalLM": ("30455d0ea27cee0c",)
        for family in (f"{_V2}DeepseekV2", f"{_V3}DeepseekV3", _Q2, _Q3, _LLAMA)
    },
    **{f"{family}ForCausalLM": ("83f8eb78ac5b57b3",) for family in (_Q2M, _Q3M, _OSS)},
    f"{_LLAMA4}ForCausalLM": ("5bd5ad78fe2fb5c2",),
}
