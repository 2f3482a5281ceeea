"""When an operator is entered, and when its function is called directly."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayers.operators import Operator, operator

_direct: list[int] = []


def _fake(factor: float, x: torch.Tensor) -> torch.Tensor:
    assert factor == 2.0  # what it names it is given, in whatever order
    return torch.empty_like(x)


@operator("test_scaled", _fake)
def _scaled(x: torch.Tensor, weight: torch.Tensor | None, factor: float) -> torch.Tensor:
    return x * factor if weight is None else x * weight * factor


class Dispatch(TorchDispatchMode):
    """Notes the names of the operators that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class Function(TorchFunctionMode):
    """The same, one level above."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class Sub(torch.Tensor):
    """A subclass."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way calls of ``_scaled`` took."""
    ways: list[str] = []
    function, overload = _scaled.function, _scaled.overload
    monkeypatch.setattr(_scaled, "function", lambda *a: ways.append("function") or function(*a))
    monkeypatch.setattr(_scaled, "overload", lambda *a: ways.append("operator") or overload(*a))
    return ways


X = torch.arange(3.0)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=str)
def test_the_function_is_called_where_nobody_looks_on(entered: list[str], context: Any) -> None:
    with context():
        assert _scaled(X, None, 2.0).tolist() == [0.0, 2.0, 4.0]
        assert _scaled(X, torch.nn.Parameter(X, requires_grad=False), 2.0).tolist() == [0.0, 2.0, 8.0]
    assert entered == ["function", "function"]


def test_modes_see_the_operator_also_when_they_start_between_two_calls(entered: list[str]) -> None:
    _scaled(X, None, 2.0)
    with Dispatch() as dispatch:
        _scaled(X, None, 2.0)
    with Function() as function:
        _scaled(X, None, 2.0)
    with torch.device("cpu"):
        _scaled(X, None, 2.0)
    _scaled(X, None, 2.0)
    assert entered == ["function", "operator", "operator", "operator", "function"]
    assert any("test_scaled" in name for name in dispatch.seen)
    assert any("test_scaled" in name for name in function.seen)


def test_fake_tensors_inside_and_outside_their_mode(entered: list[str]) -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        assert _scaled(fake, None, 2.0).shape == (3,)
    assert type(_scaled(fake, None, 2.0)) is type(fake)
    assert entered == ["operator", "operator"]


def test_make_fx_and_jit_trace_record_the_operator(entered: list[str]) -> None:
    graph = make_fx(lambda x: _scaled(x, None, 2.0))(X)
    assert "test_scaled" in graph.code
    traced = torch.jit.trace(lambda x: _scaled(x, None, 2.0), (X,), check_trace=False)
    assert "test_scaled" in str(traced.graph)
    assert set(entered) == {"operator"}


def test_functorch_levels(entered: list[str]) -> None:
    torch.func.functionalize(lambda x: _scaled(x, None, 2.0))(X)
    rows = torch.func.vmap(lambda x: _scaled(x, None, 2.0))(X[:, None])
    assert rows.tolist() == [[0.0], [2.0], [4.0]]
    assert entered == ["operator", "operator"]


def test_subclasses_and_gradients(entered: list[str]) -> None:
    _scaled(X.as_subclass(Sub), None, 2.0)
    wanting = X.clone().requires_grad_()
    _scaled(X, wanting, 2.0)
    with torch.no_grad():
        _scaled(X, wanting, 2.0)
    assert entered == ["operator", "operator", "function"]


def test_a_compiler_sees_the_operator() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda x: _scaled(x, None, 2.0) + 1, backend=backend, fullgraph=True)
    assert compiled(X).tolist() == [1.0, 3.0, 5.0]
    assert any("test_scaled" in name for name in seen)


def test_asking_costs_about_a_microsecond() -> None:
    assert isinstance(_scaled, Operator)
    quick = Operator(lambda *arguments: None, _scaled.overload)
    took = min(timeit.repeat(lambda: quick(X, None, 2.0), number=200, repeat=50)) / 200
    assert took < 10e-6  # about 0.7 here: the bound is for a busy machine
