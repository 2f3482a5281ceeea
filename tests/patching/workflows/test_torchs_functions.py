"""Functions of torch that somebody replaced in the process: profilers, calibrators, packages of attention kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits
from tiny import build, prompt


@pytest.mark.parametrize("name", ["v3", "gpt_oss", "llama"])
def test_calls_of_modules_that_somebody_wraps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model)
    right, calls = nn.Module._call_impl, []
    called: list[str] = []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__.removeprefix("Fast"))
        return right(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_call_impl", noted)
    for m in (twin, model):
        logits(m)
        calls.append(list(called))
        called.clear()
    assert calls[0] == calls[1] and len(calls[0]) > 20
    assert "Module.__call__ was replaced" in report.summary()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("function", ["linear", "silu", "softmax", "dropout", "scaled_dot_product_attention"])
@pytest.mark.parametrize("name", ["v3", "qwen2_moe", "gpt_oss", "llama"])
def test_functions_of_torch_that_somebody_replaced_run(
    monkeypatch: pytest.MonkeyPatch, name: str, function: str, when: str
) -> None:
    model, twin = build(name), build(name)
    ids, wanted = prompt(1, 40)["input_ids"], []
    plain = logits(twin)
    report = fl.patch(model) if when == "after" else None
    right, seen = getattr(nn.functional, function), []

    def mine(x: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(args[0].shape) if function == "linear" else x.shape[0])
        return right(0.7 * x, *args, **kwargs)

    monkeypatch.setattr(nn.functional, function, mine)
    report = report or fl.patch(model)
    calls = []
    for m in (twin, model):
        with torch.no_grad():
            cache = m(ids[:, :38], use_cache=True).past_key_values
            wanted.append(m(ids[:, 38:39], past_key_values=cache).logits)
        calls.append(list(seen))
        seen.clear()
    assert close(wanted[1], wanted[0]) and calls[0] == calls[1]
    used = bool(calls[0])
    assert used or (name, function) in [
        ("gpt_oss", "silu"), ("gpt_oss", "scaled_dot_product_attention"), ("llama", "softmax"), ("v3", "softmax"),
        ("llama", "dropout"), ("v3", "dropout"), ("qwen2_moe", "dropout"),
    ]  # fmt: skip
    if used:
        assert f"torch.nn.functional.{function} was replaced" in report.summary()
    monkeypatch.undo()
    assert close(logits(model), plain)
