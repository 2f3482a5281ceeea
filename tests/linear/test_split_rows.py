"""Splits of a linear that the norm behind it adds: the bits of two launches, who is asked, and who sees rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense import triton as linear_triton
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton import PARAMETERS, TritonLinear
from fastlayers.linear.dense.triton_wgmma import Plan, WgmmaLinear
from fastlayers.linear.split_rows import SplitRows, bare, is_marked, join_and_norm, leaves, rows_of
from fastlayers.norm.rms_norm import split as split_module
from fastlayers.norm.rms_norm.layer import ROUNDINGS
from fastlayers.norm.rms_norm.triton import TritonRMSNorm
from fastlayers.registry.choice import Ladder
from fastlayers_models.blocks import DecoderLayer, SwiGLU

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from planted_faults import planted
from small_models import GPT_OSS, QWEN3, QWEN3_MOE, small_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")
SPLIT = {"VECTOR": 0, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3, "AHEAD": 0}


def fixed(impl: Any, choice: Any) -> Ladder:
    """Return one implementation for all counts, in place of what was chosen."""
    return Ladder(replace(choice, rungs=choice.rungs[-1:]), (impl,))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether bits are equal, those of NaN as well."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def drawn(
    splits: int, rows: int, width: int, dtype: torch.dtype, bias: bool, device: str = "cpu"
) -> tuple[SplitRows, torch.Tensor, torch.Tensor]:
    """Return splits, a residual whose rows lie apart, and a norm's weight."""
    random = torch.Generator().manual_seed(splits * rows + width)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device)

    # Of very different size, so that the order of sums and each rounding shows.
    parts = values(splits, rows, width) * torch.exp(3 * values(splits, 1, 1))
    if rows > 3:
        parts[:, 1], parts[0, 2, 0], parts[-1, 3, 5] = 0, float("nan"), float("inf")
    added = values(width).to(dtype) if bias else None
    residual = values(rows, width + 64).to(dtype)[:, :width]
    weight = values(width).to(dtype)
    y = linear_triton.New((rows, width), dtype)
    product: Any = None
    launches = linear_triton.adding(product, rows, width, splits, bias, y, parts.device)
    assert launches.add_splits is not None
    return SplitRows(parts, added, dtype, launches.add_splits, weight if added is None else added), residual, weight


def norm_of(width: int, rounding: str, dtype: torch.dtype, weight: torch.Tensor, backend: str = "triton") -> Any:
    norm = fl.RMSNorm(width, 1e-5, rounding=rounding, dtype=dtype, device=weight.device, backend=backend)
    norm.weight.copy_(weight)
    return norm


def alike(rows: SplitRows, residual: torch.Tensor, norm: Any, join: Callable[..., Any]) -> bool:
    found, wanted = join(norm, rows, residual), norm(rows.joined(), residual)
    return all(map(same, found, wanted))


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("splits", "rows", "width", "dtype", "bias"),
    [(2, 5, 96, BF16, False), (3, 1, 128, FP16, True), (8, 4, 200, BF16, True), (2, 33, 64, FP32, False)],
)
def test_bits_are_those_of_two_launches(
    splits: int, rows: int, width: int, dtype: torch.dtype, bias: bool, rounding: str
) -> None:
    parts, residual, weight = drawn(splits, rows, width, dtype, bias)
    assert parts.shape == (rows, width) and parts.joined().dtype == dtype
    assert alike(parts, residual, norm_of(width, rounding, dtype, weight), join_and_norm)


MUTANTS = {
    "first split again": ("(split * M.to(tl.int64) + row)", "row"),
    "last split dropped": ("tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    "splits backwards": ("(split * M", "((SPLITS - 1 - split) * M"),
    "no bias": ("    if HAS_BIAS:", "    if HAS_BIAS and SPLITS < 0:"),
    "sum not rounded": ("x = cast(total, residual.dtype)", "x = total"),
    "residual not added": ("x.to(tl.float32) + residual.to(tl.float32)", "x.to(tl.float32)"),
    "residual's rows without their stride": ("row * residual_stride", "row * hidden_size"),
}


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_show(name: str, tmp_path: Path) -> None:
    module = planted(split_module, tmp_path, MUTANTS[name])
    shown = []
    for dtype in (BF16, FP32):  # the order of sums shows where they are not rounded behind it
        parts, residual, weight = drawn(8, 7, 200, dtype, True)
        norm = norm_of(200, "cast_then_scale", dtype, weight)

        def join(norm: Any, *given: Any, code: Any = module) -> Any:
            return code.split_norm(norm.cfg, norm.ladder.single, given[0], norm.weight, given[1])

        assert alike(parts, residual, norm, partial(join, code=split_module))
        shown.append(not alike(parts, residual, norm, join))
    assert any(shown)


@torch.inference_mode()
@interpreted
def test_who_joins_by_itself_has_the_same_bits() -> None:
    class Other(fl.RMSNorm):
        pass

    parts, residual, weight = drawn(3, 5, 96, BF16, False)
    of_torch = norm_of(96, "cast_then_scale", BF16, weight, "torch")
    assert split_module.split_norm(of_torch.cfg, of_torch.ladder.single, parts, weight, residual) is None
    assert alike(parts, residual, of_torch, join_and_norm)
    other = Other(96, 1e-5, dtype=BF16, backend="triton")
    seen: list[Any] = []
    watched = norm_of(96, "cast_then_scale", BF16, weight)
    watched.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    for norm in (other, watched, lambda x, residual: (x, residual)):
        assert alike(parts, residual, norm, join_and_norm)
    assert len(seen) == 2 and all(type(each) is torch.Tensor for each in seen)


def left(cfg: LinearConfig, backend: str, splits: int = 2, **more: int) -> Any:
    if backend == "wgmma":
        return WgmmaLinear(cfg, Plan(4, splits, 2)._asdict() | {"LEAVE": 1} | more)
    return TritonLinear(cfg, SPLIT | {"SPLITS": splits, "LEAVE": 1} | more)


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("backend", ["triton", "wgmma"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_leaves_what_it_would_add(backend: str, bias: bool) -> None:
    random = torch.Generator().manual_seed(1)
    layer = fl.Linear(256, 96, bias, dtype=BF16, backend="triton")
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random))
    x = torch.randn(9, 256, generator=random).to(BF16)
    assert not layer.ladder.leaves_splits and layer.splits(x) is None
    assert type(rows_of(layer, x)) is torch.Tensor
    layer.ladder = fixed(left(layer.cfg, backend), layer.choice)
    found = layer.splits(x)
    assert found is not None and found.splits.shape == (2, 9, 96) and found.splits.dtype == FP32
    assert same(found.joined(), layer(x))
    # Of three dimensions, of one split, of columns that lie apart, and watched, there are rows.
    assert layer.splits(x[None]) is None and layer.splits(x[:0]) is None
    assert layer.splits(torch.randn(256, 9).to(BF16).t()) is None or backend == "wgmma"
    layer.ladder = fixed(left(layer.cfg, backend, splits=1), layer.choice)
    assert layer.splits(x) is None
    layer.ladder = fixed(left(layer.cfg, backend), layer.choice)
    handle = layer.register_forward_hook(lambda module, given, y: None)
    assert layer.splits(x) is None and type(rows_of(layer, x)) is torch.Tensor
    handle.remove()
    assert type(rows_of(layer, x)) is SplitRows


def test_what_a_configuration_may_say() -> None:
    cfg = LinearConfig(256, 96)
    assert TritonLinear(cfg, {"LEAVE": 1}).leaves_splits and not TritonLinear(cfg, {"LEAVE": 1}).config
    assert not TritonLinear(cfg, SPLIT | {"SPLITS": 2}).leaves_splits
    assert len(TritonLinear(cfg, SPLIT | {"SPLITS": 2, "LEAVE": 1}).config) == len(PARAMETERS)
    for kind in (TritonLinear, WgmmaLinear):
        with pytest.raises(ArgumentError, match="LEAVE"):
            kind(cfg, Plan(4, 2, 2)._asdict() | {"LEFT": 1})


def leave_splits(model: Any, splits: int = 2) -> None:
    """Have all linears that a norm may read leave two splits."""
    for layer in model.decoder.layers:
        for linear in (layer.self_attn.o_proj, getattr(layer.mlp, "down_proj", None)):
            if isinstance(linear, fl.Linear):
                linear.ladder = fixed(left(linear.cfg, "triton", splits), linear.choice)


def keep_splits(model: Any) -> None:
    """Have the same linears add what they leave otherwise."""
    for layer in model.decoder.layers:
        for linear in (layer.self_attn.o_proj, getattr(layer.mlp, "down_proj", None)):
            if isinstance(linear, fl.Linear):
                linear.ladder.leaves_splits = linear.ladder.single.leaves_splits = False


def hidden_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return what a step of two requests gives, whose caches are new."""
    caches = fl.kv_cache_spec(model, page_size=16).allocate(8, model.device)
    meta = AttentionState(2, 16, 2, 16, model.device).plan(AttentionBatch((5, 4), (0, 0), [[1, 2], [3, 4]]))
    hidden: torch.Tensor = model(ids, meta, caches)
    return hidden


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count who joins rows by a launch of its own, and who norms splits."""
    found = {"joined": 0, "normed": 0}

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any) -> Any:
            found[name] += 1
            return call(*given)

        return counting

    monkeypatch.setattr(SplitRows, "joined", count("joined", SplitRows.joined))
    monkeypatch.setattr(split_module, "split_norm", count("normed", split_module.split_norm))
    yield found


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize(("config", "normed"), [(QWEN3, 3), (QWEN3_MOE, 2), (GPT_OSS, 2)])
def test_models_have_the_same_bits(config: dict[str, Any], normed: int, counted: dict[str, int]) -> None:
    """Of two layers: attention's to the second norm, twice; a dense MLP's to the next layer's first norm."""
    model = small_model(config, dtype=BF16)
    for layer in model.decoder.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.ladder = fixed(TritonRMSNorm(norm.cfg), norm.choice)
    leave_splits(model)
    ids = torch.arange(9) + 3
    found = hidden_of(model, ids)
    assert counted == {"joined": 0, "normed": normed}
    keep_splits(model)
    assert same(found, hidden_of(model, ids)) and counted == {"joined": 0, "normed": normed}


@torch.inference_mode()
@interpreted
def test_who_looks_at_a_layer_sees_rows(counted: dict[str, int]) -> None:
    model = small_model(QWEN3, dtype=BF16)
    leave_splits(model)
    ids, seen = torch.arange(9) + 3, []
    wanted = hidden_of(model, ids)
    before = counted["joined"]
    assert before == 3, "these norms are torch's"
    first, second = model.decoder.layers

    def look(module: Any, given: Any, y: Any) -> None:
        seen.append(getattr(y, "tensor", y))

    for module, fewer in ((first, 1), (second, 1), (first.mlp, 1), (first.self_attn, 1), (first.self_attn.o_proj, 1)):
        handle = module.register_forward_hook(look)
        counted["joined"] = 0
        assert same(hidden_of(model, ids), wanted) and counted["joined"] == before - fewer, module
        handle.remove()
    assert len(seen) == 5 and all(type(each) is torch.Tensor for each in seen)


def test_who_takes_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SwiGLU):
        def forward(self, x: torch.Tensor, valid: Any = None) -> torch.Tensor:  # type: ignore[override]
            return x

    class Plain(SwiGLU):
        pass

    made = [each.__new__(each) for each in (SwiGLU, Plain, Own, fl.Attention, fl.MLAAttention, DecoderLayer)]
    assert [is_marked(each) for each in made] == [True, True, False, True, False, True]
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x, valid=None: x)
    assert [is_marked(each) for each in made[:2]] == [False, False], "somebody put something in its place"


class Wrapper(torch.nn.Module):
    """Calls what it holds, with what that was called with so far, and looks at what comes back; has its attributes."""

    def __init__(self, held: torch.nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Any, *more: Any) -> Any:
        y = self.held(x, *more)
        assert type(getattr(y, "tensor", y)) is torch.Tensor and type(getattr(x, "tensor", x)) is torch.Tensor
        return y

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "held" else getattr(super().__getattr__("held"), name)


def wrap_forward(module: Any) -> None:
    """Replace the ``forward`` of one module by a function of what it took so far."""
    forward = module.forward
    module.forward = lambda x, *more: forward(x, *more)


WAYS: dict[str, Callable[[Any], None]] = {
    "mlp": lambda layers: setattr(layers[0], "mlp", Wrapper(layers[0].mlp)),
    "attention": lambda layers: setattr(layers[0], "self_attn", Wrapper(layers[0].self_attn)),
    "linear": lambda layers: setattr(layers[0].mlp, "down_proj", Wrapper(layers[0].mlp.down_proj)),
    "output": lambda layers: setattr(layers[0].self_attn, "o_proj", Wrapper(layers[0].self_attn.o_proj)),
    "layer": lambda layers: layers.__setitem__(0, Wrapper(layers[0])),
    "next layer": lambda layers: layers.__setitem__(1, Wrapper(layers[1])),
    "forward of an mlp": lambda layers: wrap_forward(layers[0].mlp),
    "forward of an attention": lambda layers: wrap_forward(layers[0].self_attn),
    "forward of a layer": lambda layers: wrap_forward(layers[0]),
    "forward of the next layer": lambda layers: wrap_forward(layers[1]),
    "next layer compiled": lambda layers: setattr(layers[1], "_compiled_call_impl", layers[1]._call_impl),
}


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_in_a_modules_place_is_called_as_it_was(way: str, left: bool, counted: dict[str, int]) -> None:
    """Wrappers know of no ``split``; neither they nor what they hand on sees splits."""
    model = small_model(QWEN3, dtype=BF16)
    ids = torch.arange(9) + 3
    wanted = hidden_of(model, ids)
    if left:
        leave_splits(model)
        wanted = hidden_of(model, ids)
    all_of_them = counted["joined"]
    assert all_of_them == 3 * left
    counted["joined"] = 0
    WAYS[way](model.decoder.layers)
    assert same(hidden_of(model, ids), wanted)
    # A layer that is called as it was leaves nothing, and nothing is left to it.
    fewer = 2 if way in ("layer", "next layer", "forward of a layer", "forward of the next layer") else 1
    assert counted["joined"] == (all_of_them - fewer) * left


@torch.inference_mode()
@interpreted
def test_who_asks_for_gradients_has_rows() -> None:
    model = small_model(QWEN3, dtype=BF16)
    leave_splits(model)
    first = model.decoder.layers[0]
    assert leaves(first.mlp, "down_proj") and leaves(first.self_attn, "o_proj") and bare(first)
    assert not leaves(first.mlp, "gate_up_proj") and not leaves(first.mlp, "nothing")
    with torch.inference_mode(False), torch.enable_grad():
        assert not leaves(first.mlp, "down_proj")


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("splits", "rows", "width"), [(4, 32, 4096), (2, 1, 2048), (8, 64, 2880), (3, 17, 7168)])
def test_bits_on_a_gpu(splits: int, rows: int, width: int, dtype: torch.dtype) -> None:
    for bias in (False, True):
        parts, residual, weight = drawn(splits, rows, width, dtype, bias, "cuda")
        for rounding in ROUNDINGS:
            assert alike(parts, residual, norm_of(width, rounding, dtype, weight), join_and_norm)


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_repeat_bits_behind_a_product_and_other_rows() -> None:
    """A hundred replays of product and norm, with another number of rows in between; those of two launches, too."""
    random = torch.Generator().manual_seed(2)
    cfg = LinearConfig(4096, 4096, dtype=BF16)
    layer = fl.Linear(4096, 4096, dtype=BF16, device="cuda", backend="triton")
    layer.weight.copy_(torch.randn(4096, 4096, generator=random) / 64)
    layer.ladder = fixed(WgmmaLinear(cfg, Plan(4, 4, 8)._asdict() | {"LEAVE": 1}), layer.choice)
    weight = torch.randn(4096, generator=random).to("cuda", BF16)
    norm = norm_of(4096, "cast_then_scale", BF16, weight)
    given = [torch.randn(2, rows, 4096, generator=random).to("cuda", BF16) for rows in (32, 7)]

    def step(x: torch.Tensor, residual: torch.Tensor) -> Any:
        rows = rows_of(layer, x)
        assert type(rows) is SplitRows
        return join_and_norm(norm, rows, residual)

    wanted = [norm(layer(x), residual) for x, residual in given]
    for pair, right in zip(given, wanted, strict=True):
        assert all(map(same, step(*pair), right))
    graphs: list[Any] = []
    for pair in given:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(*pair)
        graphs.append((graph, found))
    for _ in range(100):
        for (graph, found), right in zip(graphs, wanted, strict=True):
            for each in found:
                each.zero_()
            graph.replay()
            assert all(map(same, found, right))
