"""Layers compute where their inputs lie, whatever torch's default device is.

Who calls ``torch.set_default_device("cuda")`` gets every tensor there that does not say where it goes: also those that
a package's scheduler reads on the host, by their addresses. The device "meta" has no values, so it tells.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastlayers as fl
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.registry import registry
from fastlayers.registry.spec import spec_of
from fastlayers.sampler.layer import SamplingState

SOURCES = Path(fl.__file__).parent
FOLDERS = ("activation", "attention", "embedding", "linear", "moe", "norm", "quant", "rotary", "sampler")
FACTORIES = {
    "Generator", "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def follows_the_default(source: str) -> Iterator[str]:
    """Yield the calls that make a tensor on torch's default device, with their lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                placed = any(keyword.arg in ("device", None) for keyword in node.keywords)
                on_its_device = name == "Generator" and node.args
                if not placed and not on_its_device:
                    yield f"{node.lineno}: torch.{name}"


def test_every_tensor_of_a_layer_says_where_it_lies() -> None:
    paths = [path for folder in FOLDERS for path in sorted((SOURCES / folder).rglob("*.py"))]
    assert len(paths) > 200
    # Inputs of cases are drawn wherever who asks for them has set.
    computing = [path for path in paths if path.name not in ("cases.py", "case_inputs.py")]
    assert [(path, call) for path in computing for call in follows_the_default(path.read_text())] == []


def test_the_rule_sees_what_it_is_about() -> None:
    lines = ("zeros(3)", "zeros(3, device=where)", "Generator('cpu')", "Generator()", "zeros(3, **like)")
    found = follows_the_default("\n".join(f"torch.{line}" for line in lines) + "\nx.new_zeros(3)")
    assert list(found) == ["1: torch.zeros", "4: torch.Generator"]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("layer", ["fused_moe", "gqa", "int8_linear", "mla", "moe_align", "router", "sampler"])
def test_no_computation_follows_the_default_device(layer: str, backend: str) -> None:
    spec, where = spec_of(layer), torch.device("cpu")
    for case in (case for case in spec.cases if case.small):
        core = registry(layer).choose(case.cfg, where, backend).build().pick(4)
        inputs = spec.make_inputs(case, where, 1)
        with torch.device("meta"), torch.no_grad():
            outputs = spec.run(core, inputs, spec.prepare(core, inputs))
        assert {name: tensor.device for name, tensor in outputs.items()} == dict.fromkeys(outputs, where), case.name


def test_state_is_made_and_written_where_it_was_asked_for() -> None:
    with torch.device("meta"):
        state = SamplingState(2, "cpu")
        state.set(0, fl.SamplingParams())  # draws a seed on the host
        placement = ExpertPlacement(3, fl.Axis(), fl.EplbConfig(), "cpu")
        placement.place([2, 0, 1])
    assert int(state.rows.seed[0]) != 0
    assert placement.physical_to_logical.tolist() == [2, 0, 1]
