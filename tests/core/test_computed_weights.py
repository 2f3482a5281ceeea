"""What layers compute with where torch computes a weight when it is asked for: pruned and parametrized ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import fastlayers as fl

Make, Run = Callable[[], nn.Module], Callable[[Any], torch.Tensor]
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
ROTARY = fl.RotaryEmbedding(16, max_position=64)
PAGED: dict[str, Any] = {"rotary": ROTARY, "page_size": 16, "dtype": torch.float32}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def attend(layer: Any) -> torch.Tensor:
    meta = fl.AttentionState(2, 8, 1, 16).plan(fl.AttentionBatch((3,), (0,), [[1]]))
    y: torch.Tensor = layer(X, meta, fl.kv_cache_spec(layer, page_size=16).allocate(2)[0])
    return y


def expert_sum(layer: Any) -> torch.Tensor:
    y: torch.Tensor = layer(X, torch.ones(3, 2), torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32))
    return y


SUBJECTS: dict[str, tuple[Make, Run]] = {
    "Linear": (lambda: fl.Linear(32, 8, bias=True), lambda layer: layer(X)),
    "LMHead": (lambda: fl.LMHead(32, 8, bias=True), lambda layer: layer(X)),
    "RMSNorm": (lambda: fl.RMSNorm(32), lambda layer: layer(X)),
    "VocabEmbedding": (lambda: fl.VocabEmbedding(9, 32), lambda layer: layer(torch.tensor([1, 8, 2]))),
    "TopKRouter": (
        lambda: fl.TopKRouter(32, 4, 2, scoring="sigmoid", bias=True, correction_bias=True),
        lambda layer: torch.cat(layer(X)),
    ),
    "TopKRouter, Triton": (
        lambda: fl.TopKRouter(32, 4, 2, scoring="sigmoid", bias=True, correction_bias=True, backend="triton"),
        lambda layer: torch.cat(layer(X)),
    ),
    "FusedMoE": (lambda: fl.FusedMoE(32, 16, 4, 2, bias=True), expert_sum),
    "Attention": (
        lambda: fl.Attention(32, 4, 2, 16, qk_norm=1e-6, sinks=True, qkv_bias=True, o_bias=True, **PAGED), attend,
    ),
    "MLAAttention": (lambda: fl.MLAAttention(32, 2, bias=True, **LATENT, **PAGED), attend),
}  # fmt: skip


class Halved(nn.Module):
    """Every other entry is zero."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * mask_of(weight)


def mask_of(weight: torch.Tensor) -> torch.Tensor:
    return (torch.arange(weight.numel(), device=weight.device) % 2).view(weight.shape)


@pytest.mark.parametrize("name", SUBJECTS)
def test_pruned_and_parametrized_weights_count(name: str) -> None:
    make, run = SUBJECTS[name]
    layer, generator = make(), torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    whole = run(layer)
    for path, weight in list(layer.named_parameters()):
        owner, _, own = path.rpartition(".")
        edited, pruned, computed = (copy.deepcopy(layer) for _ in range(3))
        edited.get_parameter(path).mul_(mask_of(weight))
        wanted = run(edited)
        assert not torch.equal(wanted, whole), path
        prune.custom_from_mask(pruned.get_submodule(owner), own, mask_of(weight))
        parametrize.register_parametrization(computed.get_submodule(owner), own, Halved())
        for found in (run(pruned), run(computed)):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda text, path=path: f"{path}: {text}")
