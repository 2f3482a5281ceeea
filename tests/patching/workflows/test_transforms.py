"""Patched models under what records or transforms a call: functorch, forward mode, traces, graphs, counters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close
from test_replaced import layer_call
from tiny import build, prompt

NAMES = ["v3", "qwen3_moe", "gpt_oss", "llama"]


def pair(name: str) -> tuple[Any, Any, Any]:
    stock, fast = build(name).requires_grad_(False), build(name).requires_grad_(False)
    return stock, fast, fl.patch(fast)


def embedded(model: Any) -> torch.Tensor:
    out: torch.Tensor = model.get_input_embeddings()(prompt(2, 10)["input_ids"]).detach()
    return out


def energy(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(inputs_embeds=x, use_cache=False).logits.square().mean()
    return out


@pytest.mark.parametrize("name", NAMES)
def test_grad(name: str) -> None:
    stock, fast, _ = pair(name)
    x = embedded(stock)
    wanted, given = (torch.func.grad(lambda e, m=m: energy(m, e))(x) for m in (stock, fast))
    assert float(wanted.norm()) > 0 and close(given, wanted, 1e-4)


@pytest.mark.parametrize("name", ["v3_dense", "llama"])
def test_forward_mode(name: str) -> None:
    stock, fast, _ = pair(name)
    x = embedded(stock)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    for m in (stock, fast):
        m.set_attn_implementation("eager")  # torch has no forward mode of its fused attention
    wanted, given = (torch.func.jvp(lambda e, m=m: energy(m, e), (x,), (direction,))[1] for m in (stock, fast))
    assert float(wanted.abs()) > 0 and close(given, wanted, 1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        assert close(forward_ad.unpack_dual(energy(fast, dual)).tangent, wanted, 1e-4)


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_vmap_of_layers(name: str) -> None:
    stock, fast, report = pair(name)
    x = torch.randn(3, 4, 64)
    for where in ("model.norm", "model.layers.0.mlp"):
        wanted, given = (torch.func.vmap(m.get_submodule(where))(x) for m in (stock, fast))
        assert close(given, wanted) and close(fast.get_submodule(where)(x), wanted)
        assert report.hits()[where] == 1, "what is transformed is not counted"


@pytest.mark.parametrize("name", ["v3_dense", "gpt_oss", "llama"])
def test_vmap_of_attention(name: str) -> None:
    stock, fast, report = pair(name)
    x = torch.randn(3, 2, 5, 64)
    table = stock.model.rotary_emb(x[0], position_ids=torch.arange(5)[None])
    found = []
    for model in (stock, fast):
        attention = model.model.layers[0].self_attn
        found.append(torch.func.vmap(lambda e, a=attention: a(e, position_embeddings=table, attention_mask=None)[0])(x))
    assert close(found[1], found[0]) and not any(report.hits().values())


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_jit_trace(name: str) -> None:
    stock, fast, _ = pair(name)
    x, other = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    for where in ("model.norm", "model.layers.0.mlp"):
        traced = torch.jit.trace(fast.get_submodule(where), (x,))
        assert close(traced(other), stock.get_submodule(where)(other))
        assert "fastlayers" not in str(traced.graph)


class Logits(torch.nn.Module):
    """Logits of a whole model, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(ids, use_cache=False).logits
        return out


# The router and the experts of qwen3_moe are traced as v3's, its attention as llama's.
@pytest.mark.parametrize("name", ["v3", pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss", "llama"])
def test_whole_models_are_traced_as_stock_is(name: str) -> None:
    stock, fast, report = pair(name)
    ids, other = (prompt(1, 8, seed=seed)["input_ids"] for seed in (1, 3))
    traced = [torch.jit.trace(Logits(m), ids, check_trace=False) for m in (stock, fast)]
    assert close(traced[1](other), traced[0](other)) and "fastlayers" not in str(traced[1].graph)
    found: list[Any] = []
    for model in (stock, fast):
        try:
            found.append([node.target for node in make_fx(Logits(model))(ids).graph.nodes])
        except RuntimeError as error:
            found.append(str(error))  # what make_fx cannot record of a stock model, it cannot record of ours
    assert found[0] == found[1] and not any("fastlayers" in str(each) for each in found[1])
    assert not any(report.hits().values())


@pytest.mark.parametrize("name", NAMES)
def test_make_fx_records_the_originals_operations(name: str) -> None:
    stock, fast, report = pair(name)
    where = "model.layers.0.mlp" if name != "gpt_oss" else "model.layers.0.self_attn.q_proj"
    x, other = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    graphs = [make_fx(m.get_submodule(where))(x) for m in (stock, fast)]
    assert [n.target for n in graphs[0].graph.nodes] == [n.target for n in graphs[1].graph.nodes]

    def first(out: Any) -> torch.Tensor:
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    assert close(first(graphs[1](other)), first(stock.get_submodule(where)(other)))
    assert not any(report.hits().values())


class Rounded(TorchFunctionMode):
    """Rounds each linear's weight to seven steps of its largest entry, as a study of quantisation would."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            x, weight, *rest = args
            step = weight.abs().amax() / 7
            args = (x, (weight / step).round() * step, *rest)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_function_modes_see_what_the_original_calls(name: str) -> None:
    stock, fast, report = pair(name)
    with torch.no_grad():
        plain = stock(**prompt(1, 12)).logits
        with Rounded():
            wanted, given = (model(**prompt(1, 12)).logits for model in (stock, fast))
        assert close(given, wanted) and not close(wanted, plain, 1e-2)
        assert not any(report.hits().values())
        with torch.device("cpu"):  # a function mode, too, which changes none of our calls
            assert close(fast(**prompt(1, 12)).logits, plain)
    assert min(report.hits().values()) > 0


@pytest.mark.parametrize("name", [pytest.param("v3", marks=pytest.mark.slow), "llama"])
def test_function_modes_around_a_compiled_layer(name: str) -> None:
    stock, fast, _ = pair(name)
    torch._dynamo.reset()
    layers = [stock.model.layers[0], torch.compile(fast.model.layers[0], backend="eager")]
    wanted = [layer_call(layer, model) for layer, model in zip(layers, (stock, fast), strict=True)]
    with Rounded():
        rounded = [layer_call(layer, model) for layer, model in zip(layers, (stock, fast), strict=True)]
    assert close(wanted[1], wanted[0]) and close(rounded[1], rounded[0]) and not close(rounded[0], wanted[0], 1e-2)


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_operations_are_counted_as_stocks(name: str) -> None:
    stock, fast, _ = pair(name)
    counted = []
    for model in (stock, fast):
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            model(**prompt(1, 16))
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


class Linears(torch.fx.Tracer):
    """Looks into everything but linears and activations."""

    def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
        return type(m) is torch.nn.Linear or "Activation" in type(m).__name__


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["v3", "qwen3_moe", "llama"])
def test_symbolic_traces_are_of_the_original(name: str, grad: bool) -> None:
    stock, fast, _ = pair(name)
    x = torch.randn(2, 5, 64)
    with torch.set_grad_enabled(grad):
        for where in ("model.norm", "model.layers.0.mlp", "model.layers.0.self_attn.o_proj"):
            made = [Linears().trace(m.get_submodule(where)).nodes for m in (stock, fast)]
            kinds = [[(node.op, str(node.target)) for node in nodes] for nodes in made]
            assert kinds[0] == kinds[1] and len(kinds[0]) > 2
        norm = fast.model.layers[0].input_layernorm
        assert close(torch.fx.symbolic_trace(norm)(x), norm(x))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_alone(name: str, grad: bool) -> None:
    found = []
    for model in pair(name)[:2]:
        model.to(torch.bfloat16).to("meta")
        with torch.set_grad_enabled(grad):
            out = model(torch.zeros(2, 70, dtype=torch.long, device="meta"), output_hidden_states=True)
        found.append([out.logits, *out.hidden_states])
    for fast, stock in zip(*found, strict=True):
        assert fast.is_meta and (fast.shape, fast.dtype, fast.stride()) == (stock.shape, stock.dtype, stock.stride())


def test_a_norm_that_is_scripted_is_the_originals() -> None:
    stock, fast, report = pair("llama")
    x = torch.randn(2, 5, 64)
    scripted = [torch.jit.script(m.model.norm) for m in (stock, fast)]
    assert torch.equal(scripted[1](x), scripted[0](x)) and str(scripted[1].graph) == str(scripted[0].graph)
    with torch.no_grad():
        fast.model.norm(x)
    assert report.hits()["model.norm"] == 1 and next(scripted[1].parameters()) is fast.model.norm.weight
