"""The experts' configuration goes through their operator as a text, which is read and never run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastlayers as fl
from fastlayers.moe.fused_moe.experts_operator import _config_of
from fastlayers.registry.spec import spec_of


@pytest.mark.parametrize("case", spec_of("fused_moe").cases, ids=lambda case: case.name)
def test_a_configuration_comes_back_from_its_text(case: object) -> None:
    assert _config_of(repr(case.cfg)) == case.cfg  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["print('run')", "__import__('os').getpid()", "torch.save", "[x for x in ()]"])
def test_nothing_in_a_text_is_run(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="malformed"):
        _config_of(f"FusedMoEConfig(hidden_size={value}, intermediate_size=8, num_experts=2, top_k=1)")
    assert capsys.readouterr().out == ""


class Names(TorchDispatchMode):
    """Notes the operators of ours that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("fastlayers."):
            self.seen.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_weights_go_as_they_are_unless_somebody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fl.FusedMoE(32, 16, 4, 2, dtype=torch.float32, backend="torch")
    for weight in layer.parameters():
        weight.data.normal_()
    backend, given = layer.ladder.single, []
    function = vars(backend.experts.function)["whole"]

    def whole(*arguments: Any) -> torch.Tensor:
        given.append(arguments)
        return function(*arguments)

    monkeypatch.setitem(vars(backend.experts.function), "whole", whole)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.randint(0, 4, (5, 2), dtype=torch.int32)
    with torch.inference_mode():
        direct = layer(x, weights, ids)
    assert given[0][4] is backend.cfg and given[0][3].w13 is layer.w13
    with torch.no_grad(), Names() as names:
        watched = layer(x, weights, ids)
    assert names.seen == [backend.experts.overload._schema.name.split("::")[1]] and len(given) == 1
    with torch.no_grad():
        assert torch.equal(direct, watched) and torch.equal(direct, layer(x, weights, ids))
    assert len(given) == 2
    with pytest.raises(fl.errors.ArgumentError, match="gradient"):
        layer(x.requires_grad_(), weights, ids).sum().backward()
    assert len(given) == 2
