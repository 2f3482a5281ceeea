"""Attention layers with the reference core, which returns fp32, in a dtype of 16 bits."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache

STEPS = [((3,), (0,)), ((1,), (3,)), ((2,), (3,))]


def attention(backend: str, dtype: torch.dtype) -> tuple[torch.nn.Module, LayerCache]:
    rotary = fl.RotaryEmbedding(16, max_position=64)
    layer = fl.Attention(32, 2, 1, 16, rotary=rotary, page_size=16, dtype=dtype, backend=backend)
    return layer, LayerCache(*torch.randn(2, 2, 16, 1, 16).to(dtype))


def latent(backend: str, dtype: torch.dtype) -> tuple[torch.nn.Module, LayerCache]:
    layer = fl.MLAAttention(
        32, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=fl.RotaryEmbedding(16, max_position=64, interleaved_in=True), page_size=16, dtype=dtype, backend=backend,
    )  # fmt: skip
    return layer, LayerCache(torch.randn(2, 16, 48).to(dtype), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [attention, latent])
def test_the_reference_serves_every_dtype(make: object, dtype: torch.dtype) -> None:
    for query, prefix in STEPS:
        found = []
        for backend in ("reference", "torch"):
            torch.manual_seed(3)
            layer, cache = make(backend, dtype)  # type: ignore[operator]
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
            meta = fl.AttentionState(1, 3, 1, 16).plan(fl.AttentionBatch(query, prefix, [[1]]))
            found.append(layer(torch.randn(query[0], 32).to(dtype), meta, cache))
        assert found[0].dtype == dtype
        assert torch.linalg.norm((found[0] - found[1]).float()) < 0.02 * torch.linalg.norm(found[1].float())
