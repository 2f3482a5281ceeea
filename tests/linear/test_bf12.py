"""One token by bf12 weights: sums against float64, planted faults, and a layer that keeps such a copy."""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from triton.runtime.errors import InterpreterError

import fastlayers as fl
from fastlayers import env
from fastlayers.errors import ArgumentError
from fastlayers.integers import cdiv
from fastlayers.linear.dense import triton_bf12
from fastlayers.linear.dense.triton_bf12 import SHORT, WHOLE, Plan, linear_bf12, plan_of
from fastlayers.quant import bf12_tiles
from fastlayers.quant.bf12 import LEAST, TOO_MANY, BF12Weights, pack_bf12
from fastlayers.registry.first_rung import FirstRung
from fastlayers.weights_epoch import WeightsWatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
interpreted = DEVICES[0].marks[0]


def operands(n: int, k: int, outliers: int = 2, bias: bool = True) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return x, a weight some of whose rows have outliers, and a bias."""
    random = torch.Generator().manual_seed(n * 7 + k)
    x = torch.randn(1, k, generator=random).bfloat16()
    weight = (torch.randn(n, k, generator=random) * 0.02).bfloat16()
    weight[0, torch.randperm(k, generator=random)[:outliers]] = 2.0**13
    weight[n // 2, k - 1] = -3.0 * 2.0**12 if outliers else 0.5
    weight[-1, 5] = 0.0
    return x, weight, torch.randn(n, generator=random).bfloat16() if bias else None


def packed_of(weight: torch.Tensor) -> BF12Weights:
    packed = pack_bf12(weight)
    assert packed is not None
    return packed


def exact_and_bound(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product in fp64, and how far fp32 sums may be from it, in whatever order a tile's lanes are added.

    Products of two bf16 numbers are exact in fp32. A lane adds eight columns of each of its groups, then the lanes are
    added, the outliers, and the bias; n additions are off by up to n / (2^24 - n) of the sum of magnitudes.
    """
    exact, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    additions = 8 * cdiv(weight.shape[1] // 8, groups) + groups + 64 + 2
    bound = sizes * additions / (2**24 - additions)
    rounding = 2.0**-24 if out_dtype == FP32 else 2.0**-8
    return exact, bound + (exact.abs() + bound) * rounding + 2.0**-133


def outside(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return which outputs are further from the exact ones than they may be; what is no number is, too."""
    return ~((y.double().cpu() - exact).abs() <= bound)


SHAPES = {
    "run 8, masked": (7, 192), "run 8, wide": (5, 2880), "run 16": (9, 1152), "run 32": (33, 2048), "one row": (1, 64),
    "long": (6, 12288), "whole tiles": (8, 4096),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES.values(), ids=SHAPES)
def test_sums_are_those_of_fp32(n: int, k: int, bias: bool, out_dtype: torch.dtype, device: str) -> None:
    x, weight, b = operands(n, k, bias=bias)
    packed = packed_of(weight.to(device))
    y = linear_bf12(x.to(device), packed, None if b is None else b.to(device), out_dtype)
    assert y.shape == (1, n) and y.dtype == out_dtype
    exact, bound = exact_and_bound(x, weight, b, out_dtype, plan_of(k).g)
    assert not bool(outside(y, exact, bound).any()), ((y.double().cpu() - exact).abs() / bound).max()


PLANS = [Plan(1, 16, 1, 1), Plan(2, 32, 2, 2), Plan(4, 64, 1, 3), Plan(8, 128, 4, 9), SHORT, WHOLE]


@interpreted
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_whatever_a_program_takes(plan: Plan) -> None:
    x, weight, bias = operands(11, 832)  # run 8: 104 groups, of which every plan leaves some of a tile empty
    y = linear_bf12(x, packed_of(weight), bias, FP32, plan)
    exact, bound = exact_and_bound(x, weight, bias, FP32, plan.g)
    assert not bool(outside(y, exact, bound).any())
    # What is held ahead adds in the same order.
    assert torch.equal(y, linear_bf12(x, packed_of(weight), bias, FP32, plan._replace(ahead=2)))


@interpreted
@pytest.mark.parametrize("outliers", [0, 1, 3, 64])
def test_outliers_are_added_and_empty_places_add_nothing(outliers: int) -> None:
    x, weight, _ = operands(4, 512, outliers, bias=False)
    weight = torch.where(weight.abs() < 2.0**-13, 2.0**-7, weight)  # so that there are no others
    packed = packed_of(weight)
    assert packed.values.shape[1] == {0: 1, 1: 1, 3: 4, 64: 64}[outliers]
    y = linear_bf12(x, packed, None, FP32)
    exact, bound = exact_and_bound(x, weight, None, FP32, SHORT.g)
    assert not bool(outside(y, exact, bound).any())
    # Column 0, which empty places name, is infinite: where no weight is 0, no result becomes NaN.
    x[0, 0] = torch.inf
    y = linear_bf12(x, packed, None, FP32)
    assert torch.equal(y[0, weight[:, 0] > 0], torch.full((int((weight[:, 0] > 0).sum()),), torch.inf))


@interpreted
def test_weights_of_very_different_sizes_and_subnormal_ones() -> None:
    x, weight, _ = operands(6, 256, 0, bias=False)
    scaled = (weight.double() * (2.0 ** torch.tensor([-110.0, -60, 0, 40, 70, 84]))[:, None]).bfloat16()
    scaled[2, 7] = 2.0**-130
    packed = packed_of(scaled)
    y = linear_bf12(x, packed, None, FP32)
    exact, bound = exact_and_bound(x, scaled, None, FP32, SHORT.g)
    assert not bool(outside(y, exact, bound).any()), (y, exact)


@interpreted
def test_small_and_large_inputs() -> None:
    _, weight, _ = operands(4, 256, bias=False)
    for size in (2.0**62, 2.0**-60):
        x = (torch.randn(1, 256).clamp(-1.9, 1.9) * size).bfloat16()
        exact, bound = exact_and_bound(x, weight, None, FP32, SHORT.g)
        assert not bool(outside(linear_bf12(x, packed_of(weight), None, FP32), exact, bound).any()), size


@interpreted
def test_rows_of_any_shape_and_place() -> None:
    x, weight, bias = operands(5, 192)
    packed = packed_of(weight)
    y = linear_bf12(x, packed, bias, BF16)
    assert linear_bf12(x[0], packed, bias, BF16).shape == (5,)
    assert linear_bf12(x.view(1, 1, -1), packed, bias, BF16).shape == (1, 1, 5)
    apart = torch.zeros(1, 2 * 192 + 1, dtype=BF16)
    apart[:, 1::2] = x
    for given in (x[0], x.view(1, 1, -1), apart[:, 1::2], torch.cat((x[:, :1], x), 1)[:, 1:]):
        assert torch.equal(linear_bf12(given, packed, bias, BF16).flatten(), y.flatten())


FAULTS: dict[str, Callable[[BF12Weights], tuple[torch.Tensor, int]]] = {
    "signs": lambda w: (w.words[5, 5:6], 5),
    "codes": lambda w: (w.words[2, 2 * 8 + 1 : 2 * 8 + 2], 2),
    "last word": lambda w: (w.words[4, -1:], 4),
    "outlier": lambda w: (w.values[0, 1:2], 0),
    "outlier's column": lambda w: (w.columns[0, 0:1], 0),
    "scale": lambda w: (w.scale[1:2], 1),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_each_number_that_is_stored_counts(fault: str) -> None:
    x, weight, bias = operands(7, 192)
    packed = packed_of(weight)
    exact, bound = exact_and_bound(x, weight, bias, FP32, SHORT.g)
    assert not bool(outside(linear_bf12(x, packed, bias, FP32), exact, bound).any())
    where, row = FAULTS[fault](packed)
    if where.dtype == torch.int32:
        where ^= 1 if "column" in fault else 0x01010101
    else:
        where *= 1.0 + 2.0**-7
    wrong = outside(linear_bf12(x, packed, bias, FP32), exact, bound)
    assert wrong.nonzero()[:, 1].tolist() == [row]


MUTANTS = {
    "first tile again": (triton_bf12, "held[i], x_ptr", "held[0], x_ptr"),
    "last tile dropped": (triton_bf12, "if i + AHEAD < BLOCKS:", "if i + AHEAD < BLOCKS - 1:"),
    "no outliers": (triton_bf12, " + outlying_sum(gathered, values)", ""),
    "no bias": (triton_bf12, " + bias\n    tl.store", "\n    tl.store"),
    "edge stored": (triton_bf12, "tl.minimum(column, N - 1)", "tl.minimum(column, N - 2)"),
    "edge read": (triton_bf12, "MASKED=groups % plan.g != 0", "MASKED=False"),
    "another run": (triton_bf12, "RUN=run_of(k)", "RUN=2 * run_of(k)"),
    "second pair not turned": (bf12_tiles, "_turned(first, 8), _turned(codes, 4)", "first, _turned(codes, 4)"),
    "codes turned too far": (bf12_tiles, "_turned(codes, 12)", "_turned(codes, 16)"),
    "one column twice": (bf12_tiles, "group, here, 7, RUN", "group, here, 6, RUN"),
    "halves swapped": (bf12_tiles, "(pair << 16)", "(pair & 0xFFFF0000)"),
    "not raised": (bf12_tiles, "x.to(tl.float32) * _RAISED", "x.to(tl.float32)"),
    "second run twice": (bf12_tiles, "tl.load(place + RUN, mask", "tl.load(place, mask"),
}


@interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before, after = MUTANTS[name]
    again = ('operator("linear_bf12"', f'operator("linear_bf12_{name.replace(" ", "_")}"')
    if module is bf12_tiles:
        monkeypatch.setitem(sys.modules, bf12_tiles.__name__, planted(bf12_tiles, tmp_path, (before, after)))
        mutant = planted(triton_bf12, tmp_path, again)
    else:
        mutant = planted(triton_bf12, tmp_path, (before, after), again)
    x, weight, bias = operands(7, 832)
    packed = packed_of(weight)
    # Behind the words lie others, which no result may hold.
    behind = torch.full((packed.words.numel() + 4096,), 0x7F7F7F7F, dtype=torch.int32)
    behind[: packed.words.numel()] = packed.words.flatten()
    packed = packed._replace(words=behind[: packed.words.numel()].view_as(packed.words))
    x = torch.cat((x, torch.full((1, 4096), 7.0).bfloat16()), 1)[:, :832]
    exact, bound = exact_and_bound(x, weight, bias, FP32, 32)
    plan = Plan(2, 32, 1, 1)
    assert not bool(outside(linear_bf12(x, packed, bias, FP32, plan), exact, bound).any())
    try:
        y = mutant.linear_bf12(x, packed, bias, FP32, mutant.Plan(*plan))
    except InterpreterError:  # a tile is asked for that is not held
        assert name == "last tile dropped"
        return
    assert bool(outside(y, exact, bound).any())


# ---- layers


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of few weights be stored, too."""
    monkeypatch.setattr("fastlayers.quant.bf12.LEAST", 1)


def linear(seed: int = 0, **options: Any) -> fl.Linear:
    layer = fl.Linear(256, [40, 24], bias=True, names=["a", "b"], dtype=BF16, **options)
    random = torch.Generator().manual_seed(seed)
    layer.weight.copy_(torch.randn(64, 256, generator=random) * 0.02)
    layer.bias.copy_(torch.randn(64, generator=random))
    return layer


def row(tokens: int = 1, k: int = 256) -> torch.Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(9)).bfloat16()


def of_weights(layer: fl.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias)


def parameters(layer: Any) -> list[torch.Tensor]:
    """Return weight and bias in the output's dtype."""
    return [each.to(layer.cfg.y_dtype) for each in (layer.weight, layer.bias)]


def has_copy(layer: Any) -> bool:
    return isinstance(layer.ladder, FirstRung)


class Counted:
    """What serves one token, and how often it did."""

    def __init__(self, layer: Any) -> None:
        self.impl, self.calls = layer.ladder.impl, 0
        layer.ladder.impl = self

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self.impl(*given)


def assert_by_weights(layer: fl.Linear) -> None:
    """One token has the very bits of the weights' own product."""
    x = row()
    assert torch.equal(layer(x), of_weights(layer, x))


@interpreted
def test_one_token_goes_by_the_copy_and_several_do_not(small: None) -> None:
    layer = linear()
    x, many = row(), row(3)
    before = layer(many)
    assert layer.store_bf12() == "" and has_copy(layer)
    counted = Counted(layer)
    for count, given in ((1, x), (2, x[0]), (3, x.view(1, 1, -1)), (3, many), (3, many[:0]), (3, many.view(3, 1, -1))):
        y = layer(given)
        assert counted.calls == count and y.shape == (*given.shape[:-1], 64)
    assert torch.equal(layer(many), before)
    exact, bound = exact_and_bound(x, layer.weight, layer.bias, BF16, SHORT.g)
    assert not bool(outside(layer(x), exact, bound).any())
    with pytest.raises(ArgumentError, match="x"):
        layer(x.float())


@interpreted
def test_which_layers_why_not_and_how_many_bytes(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    many = fl.Linear(192, 8, dtype=BF16)
    for place, size in enumerate((2.0**-100, 1.0, 2.0**30)):  # 64 of each
        many.weight[:, place::3] = size
    many.weight[3, 0] = 0.0
    model = nn.ModuleDict(
        {
            "a": linear(), "fp32": fl.Linear(256, 8), "odd": fl.Linear(96, 8, dtype=BF16), "many": many,
            "head": fl.LMHead(128, 64, dtype=BF16), "norm": fl.RMSNorm(64), "meta": fl.Linear(64, 8, dtype=BF16),
            "plain": nn.Linear(64, 8), "fp8": fl.FP8BlockLinear(256, 128, dtype=BF16), 
            "fp16": fl.Linear(64, 8, dtype=torch.float16),
        }
    )  # fmt: skip
    model["meta"].to_empty(device="meta")
    names = set(model.state_dict())
    stored = fl.store_bf12(model)
    assert stored.layers == ("a", "head")
    assert stored.refused == {
        "fp32": "weights are float32, not bfloat16",
        "fp16": "weights are float16, not bfloat16",
        "odd": "96 input features are no multiple of 64 up to 32768",
        "many": TOO_MANY,
        "meta": "weights have no values yet",
    }
    assert [has_copy(model[name]) for name in ("a", "head", *stored.refused)] == [True, True, *[False] * 5]
    held = [model[name].ladder.impl.weight for name in stored.layers]
    tensors = [each for packed in held for each in packed]
    assert stored.nbytes == sum(each.untyped_storage().nbytes() for each in tensors)
    assert stored.nbytes == sum(
        n * (k * 3 // 2 + 4 + 6 * e.columns.shape[1]) for (n, k), e in zip([(64, 256), (64, 128)], held, strict=True)
    )
    assert str(stored).startswith("bf12: 2 layers, 0.00 GiB beside their weights\n")
    assert all(f"\n{name}: {why}" in str(stored) for name, why in stored.refused.items())
    assert set(model.state_dict()) == names and len(list(model.parameters())) == len(set(model.parameters()))
    monkeypatch.setattr("fastlayers.quant.bf12.LEAST", LEAST)
    assert fl.store_bf12(linear()).refused == {"": f"{64 * 256} weights are fewer than {LEAST}"}
    with pytest.raises(ArgumentError, match=r"store_bf12.*nn\.Module"):
        fl.store_bf12("model")  # type: ignore[arg-type]


def edit(layer: fl.Linear) -> None:
    layer.weight.add_(1.0)


def edit_part(layer: fl.Linear) -> None:
    layer.weight[3, 5] = 7.0


def edit_in_inference_mode(layer: fl.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(0.5)


def load(layer: fl.Linear) -> None:
    layer.load_state_dict(linear(1).state_dict())


def load_and_assign(layer: fl.Linear) -> None:
    layer.load_state_dict(linear(1).state_dict(), assign=True)


def assign(layer: fl.Linear) -> None:
    layer.weight = nn.Parameter(torch.ones_like(layer.weight), requires_grad=False)


def by_slots(layer: fl.Linear) -> None:
    for _, slot in layer.slots():
        slot.dest.fill_(0.25)


def behind_its_back(layer: fl.Linear) -> None:
    layer.weight.data = torch.full_like(layer.weight, 0.5)
    fl.repack(layer)


CHANGES = [edit, edit_part, edit_in_inference_mode, load, load_and_assign, assign, by_slots, behind_its_back]


@interpreted
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_computed_with(change: Callable[[fl.Linear], None], inside: bool, small: None) -> None:
    layer = linear()
    other = linear(2)
    model = nn.ModuleList([layer, other]) if inside else nn.ModuleList([layer])
    if inside:
        fl.finalize(model)
    fl.store_bf12(model)
    counted, watch = Counted(layer), WeightsWatch(model)
    layer(row())
    assert counted.calls == 1 and not watch.stale
    change(layer)
    assert_by_weights(layer)
    assert counted.calls == 1 and watch.stale
    # Stored again it is of the weights as they are.
    fl.store_bf12(model)
    again = Counted(layer)
    x = row()
    exact, bound = exact_and_bound(x, layer.weight, layer.bias, BF16, SHORT.g)
    assert not bool(outside(layer(x), exact, bound).any()) and again.calls == 1
    assert layer.ladder.behind.__class__ is not FirstRung


@interpreted
def test_a_copy_that_is_not_made_again_leaves_no_captured_step_behind(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList([linear()])
    fl.store_bf12(model)
    watch = WeightsWatch(model)
    monkeypatch.setattr("fastlayers.quant.bf12.LEAST", LEAST)
    assert fl.store_bf12(model).refused and not has_copy(model[0]) and watch.stale
    watch.mark()
    assert fl.store_bf12(model).refused and not watch.stale


@interpreted
def test_replaced_weights_are_forgotten_and_a_bias_is_read_as_it_is(small: None) -> None:
    layer = linear()
    layer.store_bf12()
    counted = Counted(layer)
    layer.bias.fill_(3.0)
    x = row()
    exact, bound = exact_and_bound(x, layer.weight, layer.bias, BF16, SHORT.g)
    assert not bool(outside(layer(x), exact, bound).any()) and counted.calls == 1
    assign(layer)
    assert not has_copy(layer)


def restored(layer: fl.Linear) -> fl.Linear:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    made: fl.Linear = torch.load(file, weights_only=False)
    return made


COPIES = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "save": restored,
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("how", COPIES)
def test_a_copied_layer_has_no_copy_of_weights(how: str, small: None) -> None:
    layer = linear()
    size = len(pickle.dumps(layer))
    layer.store_bf12()
    made = COPIES[how](layer)
    assert has_copy(layer) and not has_copy(made)
    assert_by_weights(made)
    # Neither in what is written, nor in memory that nothing would read.
    assert len(pickle.dumps(layer)) < size + 2000
    made.weight = nn.Parameter(torch.zeros_like(made.weight), requires_grad=False)
    assert_by_weights(made)
    counted = Counted(layer)
    layer(row())
    assert counted.calls == 1 and made.store_bf12() == ""


def tied_parameter() -> tuple[nn.Module, Any, Any]:
    one, other = linear(), linear()
    other.weight = one.weight
    return nn.ModuleList([one, other]), one, other


def tied_memory() -> tuple[nn.Module, Any, Any]:
    one = linear()
    other = fl.Linear.from_linear(one)
    return nn.ModuleList([one, other]), one, other


def tied_head() -> tuple[nn.Module, Any, Any]:
    embedding = fl.VocabEmbedding(64, 256, dtype=BF16)
    embedding.weight.copy_(linear().weight)
    heads = [fl.LMHead(256, 64, True, tied_to=embedding, out_dtype=out_dtype) for out_dtype in (None, FP32)]
    return nn.ModuleList([embedding, *heads]), *heads


@interpreted
@pytest.mark.parametrize("tied", [tied_parameter, tied_memory, tied_head])
def test_tied_weights_have_one_copy(tied: Callable[[], tuple[nn.Module, Any, Any]], small: None) -> None:
    model, *both = tied()
    both[0].bias.fill_(0.5)
    stored = fl.store_bf12(model)
    assert len(stored.layers) == 2 and not stored.refused
    one, other = (each.ladder.impl.weight for each in both)
    assert one is other and stored.nbytes == one.nbytes == fl.store_bf12(nn.Sequential(linear())).nbytes
    x = row()
    counted = [Counted(each) for each in both]
    for each in both:
        exact, bound = exact_and_bound(x, each.weight, each.bias, each.cfg.y_dtype, SHORT.g)
        assert each(x).dtype == each.cfg.y_dtype and not bool(outside(each(x), exact, bound).any())
    assert [each.calls for each in counted] == [2, 2]
    if isinstance(embedding := model[0], fl.VocabEmbedding):  # type: ignore[index]
        assert torch.equal(embedding(torch.tensor([3])), embedding.weight[3:4])
    edit(both[1])
    for each in both:
        assert torch.equal(each(x), nn.functional.linear(x.to(each.cfg.y_dtype), *parameters(each)))
    assert [each.calls for each in counted] == [2, 2]


@interpreted
def test_a_tied_layer_that_is_given_another_weight_leaves_the_copy_to_the_other(small: None) -> None:
    model, one, other = tied_parameter()
    fl.store_bf12(model)
    assign(one)
    counted = Counted(other)
    other(row())
    assert not has_copy(one) and counted.calls == 1
    assert_by_weights(one)
    assert fl.store_bf12(model).nbytes == 2 * other.ladder.impl.weight.nbytes


@interpreted
def test_a_shallow_copy_and_its_source_have_the_same_weights(small: None) -> None:
    layer = linear()
    layer.store_bf12()
    made = copy.copy(layer)
    assert made.store_bf12() == ""
    edit(made)
    assert_by_weights(made)
    assert_by_weights(layer)


@interpreted
def test_a_layer_that_is_moved_or_chosen_again(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear()
    layer.store_bf12()
    layer.to("cpu")
    layer.to(BF16)
    assert has_copy(layer)  # nothing was moved
    with pytest.raises(ArgumentError):
        layer.to(torch.float16)
    assert has_copy(layer)
    # Another choice for more tokens leaves the copy where it is.
    chosen = fl.registry("linear").choose(layer.cfg, "cpu", "reference")
    monkeypatch.setattr(layer, "choices_for", lambda *given, **more: [chosen])
    assert layer.choose_again() and layer.choice is chosen and layer.choice.name == "reference"
    assert has_copy(layer) and layer.ladder.choice is chosen
    counted = Counted(layer)
    layer(row())
    assert counted.calls == 1
    exact, _ = exact_and_bound(row(3), layer.weight, layer.bias, BF16, SHORT.g)
    assert torch.equal(layer(row(3)).bfloat16(), exact.bfloat16())
    edit(layer)
    layer(row())
    assert counted.calls == 1  # forgotten
    layer.to_empty(device="cpu")
    assert not has_copy(layer)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@interpreted
def test_a_weight_that_is_computed_is_not_stored(small: None) -> None:
    layer = linear()
    layer.store_bf12()
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert not has_copy(layer)
    assert layer.store_bf12() == "the weight is computed, pruned or parametrized" and not has_copy(layer)
    layer.parametrizations.weight.original.data.fill_(0.25)
    assert_by_weights(layer)


@interpreted
def test_a_traced_program_computes_with_the_weights(small: None) -> None:
    layer = linear()
    layer.store_bf12()
    counted = Counted(layer)
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    x = row()
    assert torch.equal(traced(x), of_weights(layer, x)) and counted.calls == 0


@interpreted
def test_a_gradient_is_refused_in_words(small: None) -> None:
    layer = linear()
    layer.store_bf12()
    x = row().requires_grad_()
    with pytest.raises(ArgumentError, match="linear_bf12"):
        layer(x).sum().backward()
    many = row(2).requires_grad_()
    layer(many).sum().backward()
    assert many.grad is not None


@interpreted
def test_a_row_parallel_ranks_bias_is_not_added_twice(small: None) -> None:
    layer = linear()
    layer.adds_bias = False  # as of every rank but the first
    layer.store_bf12()
    x = row()
    exact, bound = exact_and_bound(x, layer.weight, None, BF16, SHORT.g)
    assert not bool(outside(layer(x), exact, bound).any())


@interpreted
def test_the_copy_takes_three_quarters(small: None) -> None:
    layer = fl.Linear(4096, 32, dtype=BF16)
    layer.weight.normal_(0, 0.02)
    stored = fl.store_bf12(layer)
    weight = layer.weight.numel() * 2
    assert math.isclose(stored.nbytes / weight, 0.75, rel_tol=0.06)
