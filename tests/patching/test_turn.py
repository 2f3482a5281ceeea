"""Norms and rotation of patched attention in one launch, under Triton's interpreter: the original's bits."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import NoBackendError

sys.path.insert(0, str(Path(__file__).parent))
from tiny import build, prompt

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "llama", "qwen2")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rotary=triton")


def patched(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Any, Any, fl.PatchReport]:
    model = build(name, dtype).to(device)
    stock = copy.deepcopy(model)
    report = fl.patch(model, moe=False)
    entries = [entry for entry in report.replaced if (entry.kind, entry.action) == ("attention", "swapped")]
    assert {entry.implementation for entry in entries} == {"gqa=torch, rotary=triton, q_proj+k_proj+v_proj"}
    return model, stock, report


def projections(model: Any, position: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        found: tuple[torch.Tensor, ...] = model.model.layers[1].self_attn._fl_project(x, position)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (2, 7)])
@pytest.mark.parametrize("name", FAMILIES)
def test_rounds_where_hugging_face_rounds(name: str, rows: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    model, _, _ = patched(name, dtype, device)
    x = torch.randn(*rows, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    positions = (torch.arange(5, 5 + rows[1]).expand(rows) + torch.arange(rows[0])[:, None]).to(device)
    position = model.model.rotary_emb(x, positions)
    given = projections(model, position, x)
    for layer in model.model.layers:
        layer.self_attn._fl_turn = None
    wanted = projections(model, position, x)
    for g, w in zip(given, wanted, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(g, w, atol=2e-6, rtol=2e-6)
        else:
            # A norm's sum in another order may round a value the other way; nothing else differs.
            assert float((g != w).float().mean()) <= (0.01 if "qwen3" in name else 0.0)
            torch.testing.assert_close(g, w, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_generates_stocks_tokens(name: str) -> None:
    model, stock, report = patched(name)
    inputs = prompt(2, 12, pads=(0, 3))
    given, wanted = (m.generate(**inputs, max_new_tokens=6, do_sample=False) for m in (model, stock))
    assert torch.equal(given, wanted)
    assert not any(report.fallbacks().values()) and min(report.hits().values()) > 0


def test_tables_of_its_own_halves_count() -> None:
    model, stock, _ = patched("llama")
    x, generator = torch.randn(1, 4, 64), torch.Generator().manual_seed(3)
    width = model.model.layers[1].self_attn.head_dim
    position = tuple(torch.randn(1, 4, width, generator=generator) for _ in range(2))
    outs = []
    for m in (model, stock):
        with torch.inference_mode():
            outs.append(m.model.layers[1].self_attn(x, position_embeddings=position, attention_mask=None)[0])
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("change", ["hook", "epsilon", "weight"])
def test_norms_that_changed_are_called(change: str) -> None:
    model, stock, _ = patched("qwen3")
    calls: list[int] = []

    def larger(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return 1.5 * out

    for m in (model, stock):
        norm = m.model.layers[0].self_attn.k_norm
        if change == "hook":
            norm.register_forward_hook(larger)
        elif change == "epsilon":
            norm.variance_epsilon = 0.3
        else:
            norm.weight = nn.Parameter(2 * norm.weight.detach(), requires_grad=False)
    outs = []
    for m in (model, stock):
        with torch.inference_mode():
            outs.append(m(**prompt()).logits)
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
    assert len(calls) == (2 if change == "hook" else 0)


def test_copies_and_pickles_turn_as_well() -> None:
    model, stock, _ = patched("llama")
    wanted = stock.generate(**prompt(), max_new_tokens=4, do_sample=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.layers[0].self_attn._fl_turn is not None
        assert torch.equal(other.generate(**prompt(), max_new_tokens=4, do_sample=False), wanted)


def test_another_rotary_raises_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rotary=reference")
    model = build("qwen3", torch.float32)
    before = [type(module) for module in model.modules()]
    with pytest.raises(NoBackendError, match=r"(?s)rotary.*reference.*rotates by Triton's kernel, or as the original"):
        fl.patch(model)
    assert [type(module) for module in model.modules()] == before


def test_what_runs_without_a_choice_is_explained() -> None:
    model, _, _ = patched("qwen3")
    explained = fl.explain(model)
    assert len(explained.patched) == 2  # the norms and gates have a choice
    assert "model.layers.1.self_attn: gqa=torch, rotary=triton, q_proj+k_proj+v_proj" in str(explained).splitlines()
    assert fl.explain(build("qwen3", torch.float32)).patched == ()
