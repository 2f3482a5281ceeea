"""What torch.compile makes of patched modules: one product of packed linears, never one of weights that are gone."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from transformers import CompileConfig

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import all_packed, close
from test_replaced import CHANGES, UNSEEN, layer_call
from tiny import build, prompt

FAMILIES = ["llama", "qwen2", "gpt_oss", "v3"]


class Programs:
    """A backend of torch.compile that keeps what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def calls(self) -> Counter[str]:
        """Return the functions that the last program calls."""
        return Counter(str(node.target) for node in self.graphs[-1].graph.nodes if node.op == "call_function")


class Linears(TorchFunctionMode):
    """Counts the products of linears that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is nn.functional.linear
        return function(*args, **(kwargs or {}))


# The test behind this one asks for a packed product of the others, less llama, which has no parts of its own.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gpt_oss")) for n in FAMILIES])
def test_a_compiled_layer_has_one_product_of_packed_linears(name: str) -> None:
    model, twin = build(name).requires_grad_(False), build(name).requires_grad_(False)
    fl.patch(model)
    assert all_packed(model)
    programs = Programs()
    torch._dynamo.reset()
    given = layer_call(torch.compile(model.model.layers[1], backend=programs), model)
    with Linears() as stock:
        wanted = layer_call(twin.model.layers[1], twin)
    assert close(given, wanted)
    calls = programs.calls()
    packed = sum(count for target, count in calls.items() if "packed_linear" in target)
    modules = sum(hasattr(module, "_fl_packed") for module in model.model.layers[1].modules())
    assert packed == modules > 0
    assert sum(count for target, count in calls.items() if "linear" in target) < stock.count


# Experts and latent attention are packed by the code that packs the rest: one change is enough, of whichever family.
NOW = (("qwen2", "new_weight"), ("qwen2", "adapter"), ("v3", "hook"))
STALE = [
    pytest.param(name, change, marks=[pytest.mark.slow] * ((name, change) not in NOW))
    for name in ("qwen2", "v3")
    for change in CHANGES
]


@pytest.mark.parametrize(("name", "change"), STALE)
def test_a_compiled_layer_never_runs_a_stale_product(name: str, change: str) -> None:
    model, twin = build(name).requires_grad_(False), build(name).requires_grad_(False)
    fl.patch(model)
    torch._dynamo.reset()
    programs = Programs()
    compiled: Any = model.model.layers[1]
    if change == "adapter":
        compiled = torch.compile(compiled, backend=programs)
    else:  # what changes is there; whole layers take twice as long to compile
        compiled.self_attn.compile(backend=programs)
    before = layer_call(compiled, model)
    assert any("packed_linear" in target for target in programs.calls())
    for m in (model, twin):
        CHANGES[change](m)
    if change in UNSEEN:
        torch._dynamo.reset()
    wanted = layer_call(twin.model.layers[1], twin)
    assert not close(before, wanted, 1e-3) and close(layer_call(compiled, model), wanted)


ADAPTED: list[Any] = [("v3", "kv_b_proj")]
ADAPTED += [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("llama", "k_proj"), ("qwen3_moe", "q_proj"))]


@pytest.mark.parametrize(("name", "linear"), ADAPTED)
def test_an_adapter_under_the_compiler_that_generate_starts(name: str, linear: str) -> None:
    """``generate`` with a static cache compiles by itself, on a CPU where its configuration says so."""
    peft = pytest.importorskip("peft")
    stock, fast = (build(name, num_hidden_layers=1 if name != "qwen3_moe" else 2) for _ in range(2))
    fl.patch(fast)
    found, programs = [], Programs()
    for model in (stock, fast):
        # Configurations are copied deeply, functions in them are not.
        compiled = CompileConfig(backend=lambda graph, inputs: programs(graph, inputs), mode=None)
        compiled._compile_all_devices = True
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
        if model is fast:  # stock's tokens need no compiler
            options["compile_config"] = compiled
        torch._dynamo.reset()
        plain = model.generate(**prompt(1, 12), **options)
        before = len(programs.graphs)
        assert (before > 0) == (model is fast)
        torch.manual_seed(3)
        # Other vectors than of a fresh adapter, which adds nothing.
        lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[linear], init_lora_weights=False)).eval()
        for key, parameter in lora.named_parameters():
            if "lora_" in key:
                parameter.data *= 30.0
        found.append(lora.generate(**prompt(1, 12), **options))
        assert (len(programs.graphs) > before) == (model is fast) and not torch.equal(found[-1], plain)
    assert torch.equal(found[0], found[1])


def test_a_compiled_model_follows_weights_that_move_and_come_back() -> None:
    model = build("llama").requires_grad_(False)
    fl.patch(model)
    layer = model.model.layers[1]
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, backend="eager")
    wanted = layer_call(compiled, model)
    linear = layer.mlp.up_proj
    held, at = linear.weight.data, linear.weight.data_ptr()
    for factor in (3.0, 0.5):
        linear.weight.data = factor * held
        changed = layer_call(compiled, model)
        assert not close(changed, wanted, 1e-3) and close(changed, layer_call(layer, model))
    linear.weight.data = held
    assert linear.weight.data_ptr() == at and close(layer_call(compiled, model), wanted)
    model.to(torch.float64).to(torch.float32)
    assert all_packed(model) and close(layer_call(compiled, model), wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_were_cut_or_turned_where_they_lie(compiled: bool) -> None:
    model, twin = (build("llama", num_key_value_heads=4).requires_grad_(False) for _ in range(2))
    fl.patch(model)
    assert all_packed(model)
    layer, stock = model.model.layers[1], twin.model.layers[1]
    torch._dynamo.reset()
    run: Any = torch.compile(layer, backend="eager") if compiled else layer
    before = layer_call(run, model)
    for m in (model, twin):
        mlp, attention = m.model.layers[1].mlp, m.model.layers[1].self_attn
        addresses = [linear.weight.data_ptr() for linear in (mlp.up_proj, attention.k_proj)]
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[:40]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :40].contiguous()
        attention.k_proj.weight.data = attention.k_proj.weight.data.t()
        assert addresses == [linear.weight.data_ptr() for linear in (mlp.up_proj, attention.k_proj)]
    if compiled:
        torch._dynamo.reset()  # shapes of weights are constants of a program, stock's, too
    wanted = layer_call(stock, twin)
    assert not close(before, wanted, 1e-3) and close(layer_call(run, model), wanted)


def test_autocast_around_a_compiled_layer() -> None:
    model, twin = build("llama").requires_grad_(False), build("llama").requires_grad_(False)
    fl.patch(model)
    torch._dynamo.reset()
    compiled = model.model.layers[1]
    compiled.self_attn.compile(backend="aot_eager")
    wanted = layer_call(twin.model.layers[1], twin)
    assert close(layer_call(compiled, model), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer_call(twin.model.layers[1], twin)
        assert not close(rounded, wanted, 1e-3) and close(layer_call(compiled, model), rounded)
    assert close(layer_call(compiled, model), wanted)


def _called(module: Any, part: str, model: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 9, 64, generator=generator)
    with torch.no_grad():
        if part == "self_attn":
            table = model.model.rotary_emb(x, position_ids=torch.arange(9)[None])
            module(hidden_states=x, position_embeddings=table, attention_mask=None)
        elif part == "mlp.experts":
            module(x.view(18, 64), torch.randint(0, 4, (18, 4)), torch.rand(18, 4, generator=generator))
        else:
            module(x)


def _same(right: Any) -> Any:
    return lambda *args, **kwargs: right(*args, **kwargs)


def _original(module: Any) -> Any:
    return type(module)._fl_origin[0]


def _modeling(module: Any) -> Any:
    return sys.modules[_original(module).__module__]


# Whose attribute is replaced, by its name: a function by one of somebody's, a number by another.
COVERED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "norm, class": ("input_layernorm", _original, "forward"),
    "norm, number": ("input_layernorm", lambda module: module, "variance_epsilon"),
    "attention, class": ("self_attn", _original, "forward"),
    "attention, method": ("self_attn", lambda module: module, "expand_kv"),
    "attention, number": ("self_attn", lambda module: module, "scaling"),
    "attention, function": ("self_attn", _modeling, "eager_attention_forward"),
    "attention, torch": ("self_attn", lambda module: nn.functional, "softmax"),
    "experts, class": ("mlp.experts", _original, "forward"),
    "experts, method": ("mlp.experts", lambda module: module, "_apply_gate"),
    "experts, torch": ("mlp.experts", lambda module: nn.functional, "silu"),
    "experts, activation": ("mlp.experts", lambda module: module.act_fn, "forward"),
    **{f"{part}, hooks": (part, lambda module: None, "") for part in ("input_layernorm", "self_attn", "mlp.experts")},
}


# Numbers are compared alike, wherever they lie, and so are hooks on all modules.
USUAL = ("class", "input_layernorm, hooks", "norm, number")


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=[pytest.mark.slow] * (not c.endswith(USUAL))) for c in COVERED]
)
def test_a_compiled_module_sees_what_its_guard_covers(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, owner_of, name = COVERED[change]
    model = build("v3").requires_grad_(False)
    fl.patch(model)
    module: Any = model.model.layers[-1].get_submodule(part)
    torch._dynamo.reset()
    run: Any = torch.compile(module, backend="eager")

    def counted() -> tuple[int, int]:
        before = int(module._fl_hits), int(module._fl_falls)
        _called(run, part, model)
        return int(module._fl_hits) - before[0], int(module._fl_falls) - before[1]

    assert counted() == counted() == (1, 0)
    owner = owner_of(module)
    with ExitStack() as undo, monkeypatch.context() as replaced:
        if owner is None:
            undo.callback(torch_module.register_module_forward_hook(lambda *given: None).remove)
        else:
            right = getattr(owner, name)
            replaced.setattr(owner, name, 0.5 * right if isinstance(right, float) else _same(right))
        assert counted() == (0, 1)
    # What monkeypatch undoes on an instance it writes there, too.
    if owner is not None and callable(getattr(owner, name)) and name in vars(owner) and isinstance(owner, nn.Module):
        delattr(owner, name)
    assert counted() == (1, 0)


LOAD = """
import sys
sys.modules["fastlayers"] = None
import torch
if sys.argv[4:]:
    import transformers.integrations.moe  # for an operator that transformers has of its own, and some seconds
x, *table = torch.load(sys.argv[2])
found = torch.export.load(sys.argv[1]).module()(x, attention_mask=None, position_embeddings=table)
torch.save(found, sys.argv[3])
"""


# Another process takes seconds to import torch, and its compiler.
EXPORTED: list[Any] = [("llama", False)]
EXPORTED += [pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "gpt_oss", "v3")]


@pytest.mark.parametrize(("name", "elsewhere"), EXPORTED)
def test_exported_files_load_where_fastlayers_is_not_installed(
    name: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = build(name).requires_grad_(False), build(name).requires_grad_(False)
    fl.patch(model)
    x = torch.randn(1, 5, 64)
    table = model.model.rotary_emb(x, position_ids=torch.arange(5)[None])
    options = {"attention_mask": None, "position_embeddings": list(table)}
    files = [str(tmp_path / name) for name in ("program.pt2", "inputs.pt", "found.pt")]
    with torch.no_grad():
        torch.export.save(torch.export.export(model.model.layers[0], (x,), options), files[0])
        wanted = twin.model.layers[0](x, **options)
    if not elsewhere:
        for module in [key for key in sys.modules if key.partition(".")[0] == "fastlayers"]:
            monkeypatch.setitem(sys.modules, module, None)
        program = torch.export.load(files[0])
        assert not any("fastlayers" in str(node.target) for node in program.graph.nodes), "ours are registered here"
        assert close(program.module()(x, **options), wanted)
        return
    torch.save([x, *table], files[1])
    experts = ["experts"] if name != "llama" else []
    done = subprocess.run([sys.executable, "-c", LOAD, *files, *experts], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert close(torch.load(files[2]), wanted)


def test_a_parameter_that_shares_the_buffer_is_nobodys() -> None:
    model = build("llama")
    names = dict(model.named_parameters()).keys()
    fl.patch(model)
    assert dict(model.named_parameters()).keys() == names
    packed = model.model.layers[0].mlp._fl_packed
    assert isinstance(packed.weight, nn.Parameter) and not packed.weight.requires_grad
    assert not any(packed.weight is parameter for parameter in model.parameters())
