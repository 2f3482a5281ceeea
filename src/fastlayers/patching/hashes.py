"""Fingerprints of the code that our classes replace; see ``matching.fingerprint``. Other code is verified."""

from __future__ import annotations

_V2 = "transformers.models.deepseek_v2.modeling_deepseek_v2."
_V3 = "transformers.models.deepseek_v3.modeling_deepseek_v3."
_FP8 = "transformers.integrations.finegrained_fp8."

# transformers 5.17.0
KNOWN: dict[str, tuple[str, ...]] = {
    f"{_V2}DeepseekV2Attention": ("a3563f72b59d334b",),
    f"{_V3}DeepseekV3Attention": ("957fc504d06b3329",),
    f"{_V2}DeepseekV2TopkRouter": ("cd261833a7649fad",),
    f"{_V3}DeepseekV3TopkRouter": ("b70233da004197b2",),
    f"{_V2}DeepseekV2Experts": ("e7aef0c2abf5f6a2",),
    f"{_V3}DeepseekV3Experts": ("e7aef0c2abf5f6a2",),
    f"{_V2}DeepseekV2RMSNorm": ("9635bcd843f309a0",),
    f"{_V3}DeepseekV3RMSNorm": ("9635bcd843f309a0",),
    f"{_V2}DeepseekV2MLP": ("7d2027d4464e3e71",),
    f"{_V3}DeepseekV3MLP": ("7d2027d4464e3e71",),
    f"{_FP8}FP8Experts": ("92155423e9fd004d",),
    f"{_FP8}FP8Linear": ("ad392c2a4b387963",),
}
