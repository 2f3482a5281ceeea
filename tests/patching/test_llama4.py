"""A patched Llama 4: what is replaced and what is left alone, tokens and logits of stock, also across chunks."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastlayers as fl
from fastlayers.patching import plan

sys.path.insert(0, str(Path(__file__).parent))
from tiny import prompt

LAYERS = 4


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny model: chunks of 16, experts in every second layer, the fourth without positions."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=199, hidden_size=64, intermediate_size=48, intermediate_size_mlp=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4, interleave_moe_layer_step=2,
        attention_chunk_size=16, floor_scale=8, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.2 * torch.randn_like(value))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.Llama4ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def run(model: Any, batch: int, pads: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a prompt of three chunks and more, and its logits."""
    inputs = prompt(batch, 40, pads=pads)
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokens, model(**inputs).logits


@pytest.mark.parametrize("pads", [(), (3, 0)], ids=["whole", "padded"])
def test_tokens_and_logits_are_those_of_stock(pads: tuple[int, ...]) -> None:
    model = model_of()
    tokens, logits = run(model, 2, pads)
    assert len(set(tokens[0, 40:].tolist())) > 3
    with fl.patched(model) as report:
        found = run(model, 2, pads)
        assert torch.equal(found[0], tokens)
        assert float((found[1] - logits).norm() / logits.norm()) <= 1e-5
        assert report.hits() and all(report.hits().values()) and not any(report.fallbacks().values())
    assert torch.equal(run(model, 2, pads)[1], logits)


def test_bf16_stays_as_near() -> None:
    model, exact = model_of(torch.bfloat16), model_of(torch.bfloat16).float()
    wanted, stock = run(exact, 1)[1], run(model, 1)[1]
    with fl.patched(model):
        found = run(model, 1)[1]
    errors = [float((each.float() - wanted).norm() / wanted.norm()) for each in (found, stock)]
    assert 0 < errors[0] <= 1.25 * errors[1]


def test_what_is_replaced_and_why_the_rest_is_not() -> None:
    report = fl.patch(model_of())
    kinds = [entry.kind for entry in report.replaced if entry.action == "swapped"]
    # Dense MLPs in two layers, a shared expert in the two others.
    assert {kind: kinds.count(kind) for kind in kinds} == {"mlp": LAYERS, "norm": 2 * LAYERS + 1}
    reasons = {(entry.kind, entry.reason) for entry in report.skipped}
    assert reasons == {
        ("attention", "custom-attention: chunks, or queries scaled by position"),
        ("moe", "custom-gate: every expert is given every token, scaled before it"),
    }
    assert len(report.skipped) == LAYERS + 2 * 2


def test_code_of_another_version_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "KNOWN", {})
    report = fl.patch(model_of())
    assert {entry.kind for entry in report.replaced} >= {"norm", "mlp"}


def test_another_activation_is_left_alone() -> None:
    model = model_of()
    model.model.layers[0].feed_forward.activation_fn = torch.nn.GELU()
    reasons = [entry.reason for entry in fl.patch(model).skipped if entry.kind == "mlp"]
    assert reasons == ["custom-gate: activation GELU"]
