"""One token's experts by bf12 weights: sums against float64, dropped pairs, planted faults, layers and whole models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastlayers as fl
from fastlayers import env
from fastlayers.integers import cdiv
from fastlayers.moe.fused_moe.triton import pair_vector_bf12
from fastlayers.moe.fused_moe.triton.pair_vector_bf12 import PLAN, Plan, experts_bf12
from fastlayers.quant.bf12 import LEAST, TOO_MANY, BF12Weights, pack_bf12
from fastlayers.quant.spec import QuantSpec
from fastlayers.registry.choice import FirstRung
from fastlayers.weights_epoch import Versions, WeightsWatch
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from planted_faults import planted
from small_models import QWEN3, QWEN3_MOE, small_model

BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
interpreted = DEVICES[0].marks[0]
ALPHA, LIMIT, FACTOR = 1.702, 7.0, 2.5
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(hidden: int, inner: int, experts: int, top_k: int) -> Operands:
    """Return x, weights and ids of experts, and both weights, some of whose rows have outliers."""
    random = torch.Generator().manual_seed(hidden + inner + top_k)
    x = torch.randn(1, hidden, generator=random).bfloat16()
    w13 = (torch.randn(experts, 2 * inner, hidden, generator=random) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, generator=random) * inner**-0.5).bfloat16()
    w13[:, 3, 5], w13[:, inner + 1, hidden - 1], w2[:, 2, 4], w2[:, -1, -1] = 2.0**12, -(2.0**10), 2.0**11, -(2.0**13)
    w13[0, 2, :2] = 2.0**-40
    ids = torch.randperm(experts, generator=random)[:top_k].to(torch.int32).view(1, top_k)
    return x, torch.rand(1, top_k, generator=random) + 0.1, ids, w13, w2


def packed_of(weight: torch.Tensor) -> BF12Weights:
    packed = pack_bf12(weight.flatten(0, 1))
    assert packed is not None
    return packed


def computed(given: Operands, oai: bool = False, plan: Plan | None = None, where: Any = pair_vector_bf12) -> Any:
    x, weights, ids, w13, w2 = given
    packed = packed_of(w13), packed_of(w2)
    return where.experts_bf12(x, weights, ids, *packed, len(w13), oai, ALPHA, LIMIT, FACTOR, plan)


def activated(gate: torch.Tensor, up: torch.Tensor, oai: bool) -> torch.Tensor:
    if not oai:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def exact_and_bound(given: Operands, oai: bool = False, plan: Plan = PLAN) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' sum in fp64, and how far fp32 sums with one rounding to bf16 between may be from it.

    Sums of n fp32 numbers are off by n / (2^24 - n) of the sum of magnitudes. Activations: what errors of gate and up,
    and sixteen roundings in fp32, can do to them (no slope is above 1.1 of SiLU, 1.3 of the other); then one to bf16.
    """
    x, weights, ids, w13, w2 = (each.cpu() for each in given)
    hidden, inner = w13.shape[2], w2.shape[2]

    def gamma(k: int, groups: int, more: int) -> float:
        n = 8 * cdiv(k // 8, groups) + groups + 64 + more
        return n / (2**24 - n)

    y, bound = torch.zeros(1, hidden, dtype=torch.float64), torch.zeros(1, hidden, dtype=torch.float64)
    for weight, expert in zip(weights[0].double(), ids[0].tolist(), strict=True):
        if not 0 <= expert < len(w13):
            continue
        first, second = w13[expert].double(), w2[expert].double()
        both = first @ x[0].double()
        off = (first.abs() @ x[0].double().abs()) * gamma(hidden, plan.g1, 0)
        (gate, up), (gate_off, up_off) = both.split(inner), off.split(inner)
        a = activated(gate, up, oai)
        slope, one = 1.3, float(oai)
        near_gate, near_up = gate.abs() + gate_off, up.abs() + one + up_off
        if oai:
            near_gate, near_up = near_gate.clamp(max=1e30), near_up.clamp(max=LIMIT + one)
        a_off = slope * gate_off * near_up + near_gate * up_off + 16 * 2.0**-24 * near_gate * near_up
        a_off = a_off + (a.abs() + a_off) * 2.0**-8 + 2.0**-133
        y += FACTOR * weight * (second @ a)
        sums = second.abs() @ (a.abs() + a_off)
        bound += FACTOR * weight * (second.abs() @ a_off + sums * gamma(inner, plan.g2, 2 * len(ids[0]) + 3))
    return y, bound + (y.abs() + bound) * 2.0**-8 + 2.0**-133


def outside(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return ~((y.double().cpu() - exact).abs() <= bound)


SHAPES = {
    "run 8 and 8": (192, 64, 5, 2), "run 16 and 8": (128, 64, 6, 3), "run 32 and 16": (256, 128, 4, 2),
    "top 1": (64, 320, 3, 1), "top 5": (64, 64, 9, 5), "top 8": (64, 64, 10, 8),
}  # fmt: skip
# Few programs, which is what interpreting takes time for.
FAST = Plan(4, 32, 1, 1, 8, 8, 1, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("oai", [False, True], ids=["silu", "oai"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sums_are_those_of_fp32(shape: tuple[int, int, int, int], oai: bool, device: str) -> None:
    given = operands(*shape)
    y = computed(tuple(each.to(device) for each in given), oai)  # type: ignore[arg-type]
    assert y.shape == (1, shape[0]) and y.dtype == BF16
    exact, bound = exact_and_bound(given, oai)
    assert not bool(outside(y, exact, bound).any()), ((y.double().cpu() - exact).abs() / bound).max()
    # It says something: of most outputs more than the last bits.
    assert float((bound / exact.abs()).median()) < 0.25


PLANS = [Plan(2, 16, 1, 1, 4, 4, 1, 1), Plan(4, 8, 1, 3, 8, 2, 2, 3), Plan(16, 64, 2, 9, 32, 8, 1, 5)]


@interpreted
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_whatever_a_program_takes(plan: Plan) -> None:
    given = operands(192, 64, 4, 3)  # 24 groups, then 8
    exact, bound = exact_and_bound(given, plan=plan)
    assert not bool(outside(computed(given, plan=plan), exact, bound).any())


@interpreted
@pytest.mark.parametrize("dropped", [-1, -7, 6, 1000], ids=str)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_dropped_experts_add_nothing(dropped: int, place: int) -> None:
    x, weights, ids, w13, w2 = operands(192, 64, 6, 3)
    whole = computed((x, weights, ids, w13, w2), plan=FAST)
    ids[0, place] = dropped
    given = x, weights, ids, w13, w2
    y = computed(given, plan=FAST)
    exact, bound = exact_and_bound(given, plan=FAST)
    assert not bool(outside(y, exact, bound).any()) and bool(outside(whole, exact, bound).any())
    left = [j for j in range(3) if j != place]
    alone = x, weights[:, left], ids[:, left], w13, w2
    assert not bool(outside(computed(alone, plan=FAST), exact, bound).any())
    weights[0, place] = torch.nan  # nobody's
    assert torch.equal(computed((x, weights, ids, w13, w2), plan=FAST), y)
    ids[:] = dropped
    assert not computed((x, weights, ids, w13, w2), plan=FAST).any()


@interpreted
def test_one_expert_twice_counts_twice_and_strided_rows_are_read() -> None:
    x, weights, ids, w13, w2 = operands(192, 64, 5, 3)
    ids[0, 2] = ids[0, 0]
    given = x, weights, ids, w13, w2
    exact, bound = exact_and_bound(given, plan=FAST)
    y = computed(given, plan=FAST)
    assert not bool(outside(y, exact, bound).any())
    wide = [torch.zeros(1, 2 * each.shape[1], dtype=each.dtype) for each in (x, weights, ids)]
    for there, each in zip(wide, (x, weights, ids), strict=True):
        there[:, ::2] = each
    assert torch.equal(computed((wide[0][:, ::2], wide[1][:, ::2], wide[2][:, ::2], w13, w2), plan=FAST), y)


FAULTS: dict[str, Callable[[BF12Weights, BF12Weights, int], torch.Tensor]] = {
    "word of a gate": lambda w13, w2, e: w13.words[e * 128 + 9, :8],
    "last words of an up": lambda w13, w2, e: w13.words[e * 128 + 127, -16:],
    "word of an output": lambda w13, w2, e: w2.words[e * 192 + 191, :1],
    "outlier of a gate": lambda w13, w2, e: w13.values[e * 128 + 3],
    "outlier of an up": lambda w13, w2, e: w13.values[e * 128 + 65],
    "outlier of an output": lambda w13, w2, e: w2.values[e * 192 + 2],
    "scale of a gate": lambda w13, w2, e: w13.scale[e * 128 + 9 : e * 128 + 10],
    "scale of an up": lambda w13, w2, e: w13.scale[e * 128 + 64 + 7 : e * 128 + 64 + 8],
    "scale of an output": lambda w13, w2, e: w2.scale[e * 192 + 5 : e * 192 + 6],
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_each_number_that_is_stored_counts(fault: str) -> None:
    x, weights, ids, w13, w2 = operands(192, 64, 5, 2)
    if "outlier" not in fault:  # beside which a word counts for little
        w13, w2 = (each.clamp(-0.5, 0.5) for each in (w13, w2))
    given = x, weights, ids, w13, w2
    packed = packed_of(w13), packed_of(w2)
    more = 5, False, ALPHA, LIMIT, FACTOR, FAST
    exact, bound = exact_and_bound(given, plan=FAST)
    assert not bool(outside(experts_bf12(x, weights, ids, *packed, *more), exact, bound).any())
    for expert in range(5):
        where = FAULTS[fault](*packed, expert)
        before = where.clone()
        if where.dtype == torch.int32:
            where ^= -0x7F7F7F80  # signs and high bits of what a word holds
        else:
            where *= -2.0
        y = experts_bf12(x, weights, ids, *packed, *more)
        assert bool(outside(y, exact, bound).any()) == (expert in ids[0].tolist()), expert
        where.copy_(before)


MUTANTS = {
    "gate for up": ("up_row = gate_row + I", "up_row = gate_row"),
    "the first expert": ("gate_row = expert * 2 * I", "gate_row = expert * I"),
    "outputs of another expert": ("expert * D + column, 0)", "expert * G + column, 0)"),
    "first tile again": ("held[i], a_rows", "held[0], a_rows"),
    "first gates again": ("gates[i], x_ptr", "gates[0], x_ptr"),
    "no factor": ("axis=1) * factor", "axis=1)"),
    "not weighed": ("values)) * weight", "values))"),
    "no outliers of gates": ("gate_scale + outlying_sum(gate_x, gate_values)", "gate_scale"),
    "outliers of up for gates": ("outlying_sum(gate_x, gate_values)", "outlying_sum(up_x, up_values)"),
    "no outliers of outputs": (" + outlying_sum(gathered, values)", ""),
}


@interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_shows(name: str, tmp_path: Path) -> None:
    again = ('operator("fused_moe_bf12"', f'operator("fused_moe_bf12_{name.replace(" ", "_")}"')
    mutant = planted(pair_vector_bf12, tmp_path, MUTANTS[name], again)
    x, weights, ids, w13, w2 = operands(192, 64, 4, 3)
    ids[0, 1] = -1
    given, plan = (x, weights, ids, w13, w2), Plan(4, 16, 1, 1, 4, 4, 1, 1)
    exact, bound = exact_and_bound(given, plan=plan)
    assert not bool(outside(computed(given, plan=plan), exact, bound).any())
    y = computed(given, plan=plan, where=mutant)
    assert bool(outside(y, exact, bound).any())


# ---- layers


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of few weights be stored, too."""
    monkeypatch.setattr("fastlayers.quant.bf12.LEAST", 1)


def experts(seed: int = 0, dtype: torch.dtype = BF16, **options: Any) -> fl.FusedMoE:
    layer = fl.FusedMoE(128, 64, 6, 2, dtype=dtype, **options)
    random = torch.Generator().manual_seed(seed)
    for weight in (layer.w13, layer.w2):
        if weight.is_floating_point() and weight.element_size() > 1:
            weight.copy_(torch.randn(weight.shape, generator=random) * 0.05)
    return layer


def routed(tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, 128, generator=random).bfloat16()
    weights, ids = torch.rand(tokens, 6, generator=random).topk(2)
    return x, weights, ids.to(torch.int32)


class Counted:
    """What serves one token, and how often it did."""

    def __init__(self, layer: Any) -> None:
        self.impl, self.calls = layer.ladder.impl, 0
        layer.ladder.impl = self

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self.impl(*given)


def by_weights(layer: fl.FusedMoE, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What a layer without a copy computes with the same parameters."""
    other = experts(scaling_factor=layer.cfg.scaling_factor)
    other.load_state_dict(layer.state_dict())
    y: torch.Tensor = other(x, weights, ids)
    return y


def within(layer: fl.FusedMoE, y: torch.Tensor, given: tuple[torch.Tensor, ...]) -> bool:
    x, weights, ids = given
    factor = layer.cfg.scaling_factor / FACTOR
    exact, bound = exact_and_bound((x, weights * factor, ids, layer.w13, layer.w2))
    return not bool(outside(y, exact, bound + exact.abs() * 2.0**-22).any())


@interpreted
def test_one_token_goes_by_copies_and_several_do_not(small: None) -> None:
    layer, names = experts(scaling_factor=2.5), set(experts().state_dict())
    one, many = routed(), routed(3)
    before = layer(*many)
    stored = fl.store_bf12(layer)
    assert stored.layers == ("",) and stored.refused == {} and set(layer.state_dict()) == names
    held = layer.ladder.held.value
    tensors = [each for packed in held for each in packed]
    assert stored.nbytes == sum(each.untyped_storage().nbytes() for each in tensors)
    sizes = [(6 * 128, 128), (6 * 128, 64)]
    assert stored.nbytes == sum(
        n * (k * 3 // 2 + 4 + 6 * packed.columns.shape[1]) for (n, k), packed in zip(sizes, held, strict=True)
    )
    counted = Counted(layer)
    y = layer(*one)
    assert counted.calls == 1 and within(layer, y, one)
    assert torch.equal(layer(*many), before) and counted.calls == 1
    one[2][0, 0] = -1
    assert within(layer, layer(*one), one) and counted.calls == 2
    assert torch.equal(layer(*(each[:0] for each in many)), before[:0]) and counted.calls == 2


@interpreted
def test_copies_are_counted_where_the_weights_are(small: None) -> None:
    """No view of the weights is left while they are looked at: a step asks one counter for all layers."""
    model = nn.ModuleList([experts(), experts(1)])
    fl.finalize(model)
    fl.store_bf12(model)
    counters = {id(layer.ladder.held.counter) for layer in model}
    assert len(counters) == 1 and not isinstance(model[0].ladder.held.counter, Versions)


@interpreted
def test_experts_of_another_rank_are_dropped(small: None) -> None:
    layer = experts(ep=fl.Axis(2, 1))
    layer.store_bf12()
    counted = Counted(layer)
    x, weights, ids = routed()
    ids[0] = torch.tensor([4, 1], dtype=torch.int32)
    y = layer(x, weights, ids)
    assert counted.calls == 1 and within(layer, y, (x, weights, ids - 3))


@interpreted
def test_which_layers_and_why_not(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "not plain routed experts without biases, gate rows, then up rows"
    many = fl.FusedMoE(256, 64, 4, 2, dtype=BF16)
    many.w2[3], many.w13[3] = 1.0, 1.0
    many.w13[3, 5, ::3], many.w13[3, 5, 1::3] = 2.0**30, 2.0**-30
    odd = fl.FusedMoE(128, 96, 2, 1, dtype=BF16)
    model = nn.ModuleDict(
        {
            "a": experts(), "fp32": experts(dtype=FP32), "bias": experts(bias=True), "shared": experts(num_shared=1),
            "interleaved": experts(interleaved=True), "fp8": experts(quant=QuantSpec("fp8_block")), "odd": odd,
            "many": many, "linear": fl.Linear(64, 8, dtype=BF16), "oai": experts(activation="swiglu_oai"),
        }
    )  # fmt: skip
    stored = fl.store_bf12(model)
    assert stored.layers == ("a", "linear", "oai")
    assert stored.refused == {
        "fp32": "weights are float32, not bfloat16", "bias": plain, "shared": plain, "interleaved": plain,
        "fp8": plain, "odd": "96 input features are no multiple of 64 up to 32768", "many": TOO_MANY,
    }  # fmt: skip
    monkeypatch.setattr("fastlayers.quant.bf12.LEAST", LEAST)
    assert experts().store_bf12() == f"{6 * 128 * 128} weights are fewer than {LEAST}"


def edit(layer: fl.FusedMoE) -> None:
    layer.w2.add_(0.5)


def edit_part(layer: fl.FusedMoE) -> None:
    layer.w13[:, 3, 5] = 7.0


def load(layer: fl.FusedMoE) -> None:
    layer.load_state_dict(experts(1).state_dict())


def load_and_assign(layer: fl.FusedMoE) -> None:
    layer.load_state_dict(experts(1).state_dict(), assign=True)


def assign(layer: fl.FusedMoE) -> None:
    layer.w13 = nn.Parameter(torch.full_like(layer.w13, 0.25), requires_grad=False)


def behind_its_back(layer: fl.FusedMoE) -> None:
    layer.w2.data = torch.full_like(layer.w2, 0.5)
    fl.repack(layer)


@interpreted
@pytest.mark.parametrize("change", [edit, edit_part, load, load_and_assign, assign, behind_its_back])
def test_changed_weights_are_computed_with(change: Callable[[fl.FusedMoE], None], small: None) -> None:
    layer = experts()
    fl.finalize(layer)
    one = routed()
    layer.store_bf12()
    counted, watch = Counted(layer), WeightsWatch(layer)
    layer(*one)
    assert counted.calls == 1 and not watch.stale
    change(layer)
    assert torch.equal(layer(*one), by_weights(layer, *one)) and counted.calls == 1 and watch.stale
    assert layer.store_bf12() == ""
    again = Counted(layer)
    assert within(layer, layer(*one), one) and again.calls == 1


@interpreted
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copied_layer_has_no_copy_of_weights(how: Callable[[Any], Any], small: None) -> None:
    layer, one = experts(), routed()
    layer.store_bf12()
    made = how(layer)
    assert isinstance(layer.ladder, FirstRung) and not isinstance(made.ladder, FirstRung)
    assert torch.equal(made(*one), by_weights(layer, *one))
    made.w2 = nn.Parameter(torch.zeros_like(made.w2), requires_grad=False)
    assert not made(*one).any()
    counted = Counted(layer)
    assert layer(*one).any() and counted.calls == 1


@interpreted
def test_another_choice_keeps_copies(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, one = experts(), routed()
    fl.finalize(layer)
    layer.store_bf12()
    counted = Counted(layer)
    chosen = fl.registry("fused_moe").choose(layer.cfg, "cpu", "reference")
    monkeypatch.setattr(layer, "choices_for", lambda *given, **more: [chosen])
    watch = WeightsWatch(layer)
    assert layer.choose_again() and layer.choice.name == "reference" and watch.stale
    y = layer(*one)
    assert counted.calls == 1 and within(layer, y, one)
    edit(layer)
    layer(*one)
    assert counted.calls == 1


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@interpreted
def test_weights_that_are_computed_are_not_stored(small: None) -> None:
    layer = experts()
    parametrize.register_parametrization(layer, "w2", Doubled())
    assert layer.store_bf12() == "weights are computed, pruned or parametrized"


# ---- models

MODELS = {
    name: hf | dict(num_hidden_layers=1, vocab_size=64, eos_token_id=63, moe_intermediate_size=64)
    for name, hf in (("qwen3", QWEN3), ("qwen3_moe", QWEN3_MOE))
}


def written(model: Any) -> tuple[list[int], torch.Tensor]:
    """Return some tokens behind a prompt, and the logits of each."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, x, y: found.append(y.float().view(-1, y.shape[-1])[-1:]))
    generator = Generator(model, max_batch=1, max_length=32, cuda_graph=False)
    (tokens,) = generator.generate([[3, 17, 5, 60]], max_new_tokens=4, eos_ids=())
    hook.remove()
    return tokens, torch.cat(found)


@interpreted
@pytest.mark.parametrize("name", MODELS)
def test_a_model_writes_the_same(name: str, small: None) -> None:
    model = small_model(MODELS[name], dtype=BF16)
    before, first = written(model)
    names = set(model.state_dict())
    stored = fl.store_bf12(model)
    layers = [n for n, each in model.named_modules() if isinstance(each, fl.Linear | fl.FusedMoE)]
    assert sorted(stored.layers) == sorted(layers) and set(model.state_dict()) == names
    counted = [Counted(model.get_submodule(each)) for each in stored.layers]
    after, second = written(model)
    assert after == before and min(each.calls for each in counted) >= 3
    # The prompt's by the weights; then two orders of fp32 sums, each rounded to bf16: some last bits.
    assert first.shape == second.shape and len(first) == 4 and torch.equal(first[0], second[0])
    assert float((first - second).abs().max()) <= 0.05 * float(first.std())
    calls = counted[0].calls
    for each in stored.layers:
        if isinstance(layer := model.get_submodule(each), fl.Linear):
            layer.weight.mul_(-3.0)
    again, third = written(model)
    assert counted[0].calls == calls and not torch.equal(third[0], first[0])
