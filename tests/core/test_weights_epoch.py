"""Packed weights and captured steps follow the weights: replaced, loaded, moved, edited; and what it costs."""

from __future__ import annotations

import copy
import io
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.moe.fused_moe.layer import FusedMoE
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.quant.spec import QuantSpec
from fastlayers.sampler.layer import SamplingState
from fastlayers.weights import slots
from fastlayers.weights_epoch import WeightsWatch, epoch_of

Change = Callable[[nn.Module, dict[str, torch.Tensor]], None]


def values_like(layer: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, old in layer.state_dict().items():
        fresh = torch.randn(old.shape, generator=random)
        if old.dtype == torch.uint8:
            found[name] = (fresh.abs() * 40).clamp(0, 120).to(torch.uint8)
        else:
            found[name] = (fresh.abs() * 0.1 + 0.01 if "scale" in name else fresh).to(old.dtype)
    return found


def load(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    layer.load_state_dict(values)


def load_and_assign(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    layer.load_state_dict(values, assign=True)


def replace(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        module, _, own = name.rpartition(".")
        setattr(layer.get_submodule(module), own, nn.Parameter(value, requires_grad=False))


def edit(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(values[name])


def edit_in_inference_mode(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        edit(layer, values)


def delete_first(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        module = layer.get_submodule(name.rpartition(".")[0])
        delattr(module, name.rpartition(".")[2])
        module.register_parameter(name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))


def load_children(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, child in layer.named_children():
        child.load_state_dict({n.removeprefix(f"{name}."): v for n, v in values.items() if n.startswith(f"{name}.")})
    own = {n: nn.Parameter(v, requires_grad=False) for n, v in values.items() if "." not in n}
    layer._parameters.update(own)
    fl.repack(layer)


def rewire_and_repack(layer: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in layer.named_parameters():
        parameter.data = values[name]
    fl.repack(layer)


CHANGES: list[Change] = [
    load, load_and_assign, replace, edit, edit_in_inference_mode, delete_first, load_children, rewire_and_repack,
]  # fmt: skip


def moe(quant: str = "none", **options: Any) -> FusedMoE:
    return FusedMoE(128, 128, 4, 2, quant=QuantSpec(quant), dtype=torch.float32, **options)


def run_moe(layer: FusedMoE) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 128, generator=random).to(layer.dtype)
    ids = torch.randint(0, 4, (5, 2), generator=random, dtype=torch.int32)
    y: torch.Tensor = layer(x, torch.full((5, 2), 0.5), ids)
    return y


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("quant", ["none", "fp8_block", "int8"])
def test_experts_follow_their_weights(quant: str, change: Change) -> None:
    layer, wanted = moe(quant), moe(quant)
    layer.load_state_dict(values_like(layer, 1))
    fl.finalize(layer)
    before, values = run_moe(layer), values_like(layer, 2)
    change(layer, values)
    wanted.load_state_dict(values)
    expected = run_moe(wanted)
    assert torch.equal(run_moe(layer), expected) and not torch.equal(before, expected)


def swizzled() -> FusedMoE:
    layer = FusedMoE(
        128, 128, 4, 2, quant=QuantSpec("mxfp4"), activation="swiglu_oai", bias=True, interleaved=True,
        dtype=torch.bfloat16, backend="triton_swizzled",
    )  # fmt: skip
    layer.load_state_dict(values_like(layer, 1))
    return layer


@pytest.fixture
def fake_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.moe.fused_moe.layer import FUSED_MOE

    row = FUSED_MOE.named("triton_swizzled")
    monkeypatch.setattr(FUSED_MOE, "ranked", [*FUSED_MOE.ranked])
    FUSED_MOE.ranked[FUSED_MOE.ranked.index(row)] = type(row)(
        row.name, row.target, refuse=lambda cfg, device: None, weight_layout=row.weight_layout
    )


@pytest.mark.usefixtures("fake_hopper")
def test_weights_in_a_layout_of_their_own_are_replaced_together() -> None:
    layer, values = swizzled(), values_like(swizzled(), 2)
    fl.finalize(layer)
    assert layer.w13.numel() == 0 and layer.packed.w13.numel() > 0
    with pytest.raises(CheckpointError, match=r"FusedMoE: finalize\(\) packed its weights .* nothing to load into"):
        list(slots(layer))
    with pytest.raises(CheckpointError, match=r"left nothing for a state_dict; take that before finalize\(\)"):
        nn.Sequential(layer).state_dict()
    codes = {name: values[name] for name in ("w13", "w2", "w13_scale", "w2_scale")}
    for name, value in list(codes.items())[:-1]:
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    with pytest.raises(
        ArgumentError, match=r"FusedMoE: w2_scale is empty, as finalize\(\) left it, while another one was"
    ):
        run_moe(layer)
    layer.w2_scale = nn.Parameter(values["w2_scale"], requires_grad=False)
    wanted = swizzled()
    wanted.load_state_dict(wanted.state_dict() | codes)
    fl.finalize(wanted)
    run_moe(layer)
    assert torch.equal(layer.packed.w13, wanted.packed.w13) and torch.equal(
        layer.packed.w2_scale, wanted.packed.w2_scale
    )


@pytest.mark.usefixtures("fake_hopper")
@pytest.mark.parametrize("in_place", [True, False])
def test_biases_beside_packed_weights_are_copied_again(in_place: bool) -> None:
    layer, watch = swizzled(), None
    fl.finalize(layer)
    codes, fresh = layer.packed.w13, torch.randn(layer.w2_bias.shape).bfloat16()
    watch = WeightsWatch(layer)
    if in_place:
        layer.w2_bias.copy_(fresh)
    else:
        layer.w2_bias = nn.Parameter(fresh, requires_grad=False)
    assert watch.stale
    run_moe(layer)
    assert layer.packed.w13 is codes and torch.equal(layer.packed.w2_bias, fresh.float())
    fl.repack(layer)
    assert layer.packed.w13 is codes  # all that is left of the weights


@pytest.mark.usefixtures("fake_hopper")
def test_a_compiled_layer_adds_the_biases_as_they_are() -> None:
    layer = swizzled()
    fl.finalize(layer)
    run_moe(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    before = run_moe(compiled)
    assert torch.equal(before, run_moe(layer))
    layer.w2_bias.add_(1.0)
    given = run_moe(compiled)
    assert torch.equal(given, run_moe(layer)) and not torch.equal(given, before)


def mla(quant: str) -> fl.MLAAttention:
    return fl.MLAAttention(
        128, 2, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=64,
        rotary=fl.RotaryEmbedding(16, max_position=64, interleaved_in=True), page_size=16, dtype=torch.float32,
        quant=QuantSpec(quant),
    )  # fmt: skip


@torch.no_grad()
def decode(layer: fl.MLAAttention) -> torch.Tensor:
    random = torch.Generator().manual_seed(4)
    cache = LayerCache(torch.randn(3, 16, 144, generator=random), None)
    meta = fl.AttentionState(1, 1, 2, 16).plan(fl.AttentionBatch((1,), (9,), [[1]]))
    assert layer.path(meta) == "mqa"
    y: torch.Tensor = layer(torch.randn(1, 128, generator=random), meta, cache)
    return y


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("quant", ["none", "fp8_block", "fp8_channel", "int8"])
def test_absorbed_weights_follow_kv_b_proj(quant: str, change: Change) -> None:
    layer, wanted = mla(quant), mla(quant)
    layer.load_state_dict(values_like(layer, 1))
    fl.finalize(layer)
    before, values = decode(layer), values_like(layer, 2)
    change(layer, values)
    wanted.load_state_dict(values)
    expected = decode(wanted)
    assert torch.equal(decode(layer), expected) and not torch.equal(before, expected)


@pytest.mark.parametrize("quant", ["fp8_block", "fp8_channel", "int8"])
def test_absorbed_weights_are_codes_times_scales(quant: str) -> None:
    layer = mla(quant)
    layer.load_state_dict(values_like(layer, 1))
    projection = layer.kv_b_proj
    scales = getattr(projection, projection.scale_name).flatten()
    by_row = scales.repeat_interleave(projection.weight.shape[0] // len(scales))
    expected = projection.weight.float() * by_row[:, None]
    assert torch.equal(torch.cat(layer.absorbed_weights(), 1).flatten(0, 1), expected)


@pytest.mark.parametrize("which", ["weight", "weight_scale_inv"])
def test_each_of_the_absorbed_weights_sources_counts(which: str) -> None:
    layer = mla("fp8_block")
    layer.load_state_dict(values_like(layer, 1))
    fl.finalize(layer)
    decode(layer)
    assert layer.absorbed_weights()[0] is layer.absorbed_weights()[0]  # made once, while nothing changes
    source = getattr(layer.kv_b_proj, which)
    source.copy_((source.float() * 2).to(source.dtype))
    again = mla("fp8_block")
    again.load_state_dict(layer.state_dict())
    assert torch.equal(decode(layer), decode(again))


def test_a_childs_own_loading_counts() -> None:
    """Without a word to the layer that holds the child: by its state, by its slots, with assign=True."""
    layer, other = mla("fp8_block"), mla("fp8_block")
    layer.load_state_dict(values_like(layer, 1))
    fl.finalize(layer)
    watch = WeightsWatch(layer)
    for seed, assign in ((2, False), (3, True), (4, False)):
        decode(layer)
        watch.mark()
        other.load_state_dict(values_like(other, seed))
        layer.kv_b_proj.load_state_dict(other.kv_b_proj.state_dict(), assign=assign)
        assert watch.stale and torch.equal(layer.absorbed_weights()[0], other.absorbed_weights()[0])
    watch.mark()
    other.load_state_dict(values_like(other, 5))
    with torch.inference_mode():
        for (_, slot), (_, source) in zip(slots(layer.kv_b_proj), slots(other.kv_b_proj), strict=True):
            slot.dest.copy_(source.dest)
    assert watch.stale and torch.equal(layer.absorbed_weights()[0], other.absorbed_weights()[0])


def test_another_kv_b_proj_counts() -> None:
    layer, other = mla("fp8_block"), mla("fp8_block")
    for each, seed in ((layer, 1), (other, 2)):
        each.load_state_dict(values_like(each, seed))
    fl.finalize(layer)
    layer.kv_b_proj = other.kv_b_proj
    assert torch.equal(layer.absorbed_weights()[0], other.absorbed_weights()[0])
    layer.kv_b_proj.weight = nn.Parameter(torch.zeros_like(layer.kv_b_proj.weight), requires_grad=False)
    assert not layer.absorbed_weights()[0].any() and not other.absorbed_weights()[0].any()


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    made: nn.Module = torch.load(file, weights_only=False)
    return made


@pytest.mark.parametrize("how", [copy.deepcopy, saved_and_loaded])
def test_a_copy_packs_for_itself(how: Any) -> None:
    layer = mla("fp8_block")
    fl.finalize(layer)  # of zeros, at version 0
    layer.load_state_dict(values_like(layer, 1))
    made = how(layer)
    assert torch.equal(decode(made), decode(layer))
    made.kv_b_proj.weight.zero_()
    assert not made.absorbed_weights()[0].any() and layer.absorbed_weights()[0].any()


@pytest.mark.usefixtures("fake_hopper")
@pytest.mark.parametrize(
    ("how", "in_place"),
    [
        (copy.copy, False), (copy.deepcopy, False), (saved_and_loaded, True),
        pytest.param(copy.deepcopy, True, marks=pytest.mark.slow),
        pytest.param(saved_and_loaded, False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_copy_of_packed_weights_follows_its_own_biases(how: Any, in_place: bool) -> None:
    layer = swizzled()
    fl.finalize(layer)
    before = run_moe(layer)
    made = how(layer)
    assert torch.equal(run_moe(made), before)
    if in_place:  # not of a shallow copy, which shares them
        made.w2_bias.add_(1.0)
    else:
        made.w2_bias = nn.Parameter(made.w2_bias + 1, requires_grad=False)
    run_moe(made)
    assert torch.equal(made.packed.w2_bias, made.w2_bias.float())
    assert torch.equal(run_moe(layer), before)


def test_parameters_are_never_inference_tensors() -> None:
    with torch.inference_mode():
        source = nn.Linear(128, 128)
        layers = [moe(), mla("fp8_block"), fl.Linear.from_linear(source), fl.RMSNorm(8), fl.VocabEmbedding(4, 8)]
        layers[2].load_state_dict({"weight": torch.ones(128, 128), "bias": torch.ones(128)}, assign=True)
        moved = fl.RMSNorm(8, dtype=torch.float32).to_empty(device="cpu")
        tied = fl.LMHead(8, 4, tied_to=layers[4])  # type: ignore[arg-type]
    assert tied.weight is layers[4].weight
    for layer in (*layers, moved, tied):
        assert not any(parameter.is_inference() for parameter in layer.parameters())
    assert source.weight.is_inference() and torch.equal(layers[2].weight, torch.ones(128, 128))


def test_caches_and_states_made_under_inference_mode_are_written_outside() -> None:
    with torch.inference_mode():
        layer = fl.Attention(
            32, 4, 2, 8, rotary=fl.RotaryEmbedding(8, max_position=64), page_size=16, dtype=torch.float32
        )  # fmt: skip
        cache = fl.kv_cache_spec(layer, page_size=16).allocate(2)[0]
        state, wishes = fl.AttentionState(1, 4, 1, 16), SamplingState(1)
        placement = ExpertPlacement(3, fl.Axis(), fl.EplbConfig())
    meta = state.plan(fl.AttentionBatch((4,), (0,), [[1]]))
    with torch.no_grad():
        assert layer(torch.ones(4, 32), meta, cache).shape == (4, 32)
        wishes.set(0, fl.SamplingParams(seed=1))
        fl.Sampler(4)(torch.randn(1, 4), wishes)
        placement(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
        placement.place([2, 0, 1])
    assert int(wishes.rows.offset[0]) == 1 and int(placement.load[0]) == 1


@pytest.mark.parametrize("how", ["assigned", "added", "registered", "set_submodule"])
def test_a_child_or_buffer_that_comes_in_another_way_counts(how: str) -> None:
    layer, other = mla("fp8_block"), mla("fp8_block")
    other.load_state_dict(values_like(other, 2))
    fl.finalize(layer)
    watch = WeightsWatch(layer)
    if how == "assigned":
        layer.kv_b_proj = other.kv_b_proj
    elif how == "added":
        layer.add_module("kv_b_proj", other.kv_b_proj)
    elif how == "registered":
        layer.register_module("kv_b_proj", other.kv_b_proj)
    else:
        layer.set_submodule("kv_b_proj", other.kv_b_proj)
    assert watch.stale and torch.equal(layer.absorbed_weights()[0], other.absorbed_weights()[0])
    watch.mark()
    layer.kv_b_proj.weight = nn.Parameter(torch.zeros_like(other.kv_b_proj.weight), requires_grad=False)
    assert watch.stale and not layer.absorbed_weights()[0].any()
    watch.mark()
    layer.rotary.register_buffer("cos", layer.rotary.cos.clone(), persistent=False)
    assert watch.stale


def test_a_watch_tells_what_a_captured_step_must_know() -> None:
    model = nn.Sequential(fl.Linear(128, 128), mla("fp8_block"), moe())
    fl.finalize(model)
    watch = WeightsWatch(model)
    assert not watch.stale and epoch_of(model) is epoch_of(model)
    model.to("cpu").eval()
    model[0].load_state_dict({"weight": torch.ones(128, 128)})
    model[2].w13.fill_(1.0)
    fl.finalize(model)
    assert not watch.stale  # the same addresses, with other values
    seen: list[bool] = []

    def check(change: Callable[[], Any]) -> None:
        change()
        seen.append(watch.stale)
        watch.mark()
        assert not watch.stale

    check(lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(128, 128), requires_grad=False)))
    check(lambda: model[0].load_state_dict({"weight": torch.zeros(128, 128)}, assign=True))
    check(lambda: model[1].kv_b_proj.weight.zero_())
    check(lambda: model[1].absorbed_weights())  # the copy lies elsewhere now
    check(lambda: model[1].rotary.__setattr__("cos", model[1].rotary.cos.clone()))
    check(lambda: model[1].rotary_kv_write.to("cpu") and fl.repack(model))
    check(lambda: model[0].to(torch.device("cpu")).to_empty(device="cpu"))
    assert seen == [True] * 7


def test_a_layer_may_be_in_two_models() -> None:
    shared = fl.Linear(8, 8)
    first, second = nn.Sequential(shared), nn.Sequential(shared, fl.Linear(8, 8))
    watches = [WeightsWatch(first), WeightsWatch(second)]
    shared.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    assert [watch.stale for watch in watches] == [True, True]
    second[1].weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    watches[0].mark()
    assert [watch.stale for watch in watches] == [False, True]


def microseconds(call: Callable[[], Any]) -> float:
    return min(timeit.repeat(call, number=500, repeat=20)) / 500 * 1e6


def all_fp8(layers: int = 61) -> nn.ModuleList:
    model = nn.ModuleList(mla("fp8_block") for _ in range(layers))
    fl.finalize(model)
    return model


def test_a_captured_steps_check_costs_the_same_with_any_number_of_layers() -> None:
    """In the time that one read of a version takes on the same machine, however busy it is."""
    few, many, tensor = WeightsWatch(all_fp8(1)), WeightsWatch(all_fp8(61)), torch.empty(0)
    read = microseconds(lambda: tensor._version)
    assert isinstance(many._counter, torch.Tensor) and not many.stale
    assert microseconds(lambda: many.stale) < 2 * microseconds(lambda: few.stale)
    assert microseconds(lambda: many.stale) < 8 * read  # 0.1 us: a call, a property, and two comparisons


def test_a_layers_check_costs_one_read() -> None:
    """61 layers of a step that is not captured: beyond a call that checks nothing, some 70 ns each."""

    class Unchecked(nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def weights(self, compiling: bool) -> Any:
            held = self.held
            if held is not None and not compiling:
                return held.value
            raise AssertionError

    layers = list(all_fp8())
    unchecked, tensor = [Unchecked(layer._absorbed) for layer in layers], torch.empty(0)
    counters = {id(layer._absorbed.counter) for layer in layers}
    assert counters == {id(layers[0]._absorbed.counter)}
    read = microseconds(lambda: tensor._version)

    def extra() -> float:
        def step() -> None:
            for layer in layers:
                layer._absorbed_weights(False)

        def without() -> None:
            for layer in unchecked:
                layer.weights(False)

        return min(timeit.repeat(step, number=20, repeat=20)) - min(timeit.repeat(without, number=20, repeat=20))

    cost = min(extra() for _ in range(3)) / 20 * 1e6
    assert cost < 61 * 3 * read  # a read and a comparison each; two reads, a sum and a property's call took ten


def test_weights_that_others_look_at_keep_their_own_counters() -> None:
    layer, other = mla("fp8_block"), mla("fp8_block")
    for each in (layer, other):
        each.load_state_dict(values_like(each, 1))
    view, detached = layer.kv_b_proj.weight.view(-1), layer.state_dict()["kv_b_proj.weight_scale_inv"]
    fl.finalize(layer)
    watch = WeightsWatch(layer)
    for edit_one in (lambda: view.zero_(), lambda: detached.mul_(2), lambda: layer.kv_b_proj.weight.fill_(1)):
        assert not watch.stale
        edit_one()
        assert watch.stale
        other.load_state_dict(layer.state_dict())
        assert torch.equal(layer.absorbed_weights()[0], other.absorbed_weights()[0])
        watch.mark()


def test_a_parameter_stays_the_same_object_when_its_edits_are_counted_elsewhere() -> None:
    layer = mla("fp8_block")
    weight, address = layer.kv_b_proj.weight, layer.kv_b_proj.weight.data_ptr()
    weight.loaded_by = "somebody"  # attributes are a user's own
    fl.finalize(layer)
    assert layer.kv_b_proj.weight is weight and weight.data_ptr() == address and weight.loaded_by == "somebody"
    assert type(weight) is nn.Parameter and not weight.requires_grad and weight.dtype == torch.float8_e4m3fn
    view = weight.view(-1)  # taken after: it counts, too
    held = layer._absorbed
    view.fill_(1.0)
    assert held is not None and not held.fresh
    finder = weakref.ref(weight)  # torch exchanges nothing that a weak reference knows
    layer.absorbed_weights()
    assert layer._absorbed is not None and layer._absorbed.fresh and finder() is weight
    weight.zero_()
    assert not layer._absorbed.fresh and not layer.absorbed_weights()[0].any()


def test_an_edit_of_one_layer_packs_each_layer_once_more() -> None:
    model = all_fp8(3)
    model[1].kv_b_proj.weight.fill_(2.0)
    once = [layer.absorbed_weights() for layer in model]
    again = [layer.absorbed_weights() for layer in model]
    assert all(first is second for first, second in zip(once, again, strict=True))
    assert once[1][0].any() and not once[0][0].any()


def test_repack_names_what_is_no_module() -> None:
    with pytest.raises(ArgumentError, match=r"repack: model is 3; accepted: an nn\.Module"):
        fl.repack(3)  # type: ignore[arg-type]


def test_a_weight_of_two_layers_that_packed_apart_is_seen_by_both() -> None:
    rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)

    def make() -> fl.MLAAttention:
        return fl.MLAAttention(
            128, 2, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=64,
            rotary=rotary, page_size=16, dtype=torch.float32, quant=fl.QuantSpec("fp8_block"),
        )  # fmt: skip

    one, other = make(), make()
    other.kv_b_proj = one.kv_b_proj
    for layer in (one, other):
        fl.finalize(layer)
        layer.absorbed_weights()
    for value in (1.0, 2.0):
        with torch.no_grad():
            one.kv_b_proj.weight.copy_(torch.full((256, 128), value).to(torch.float8_e4m3fn))
        assert [layer.absorbed_weights()[0].max().item() for layer in (one, other)] == [value, value]


@pytest.mark.parametrize("quant", ["none", "fp8_block"])
def test_a_weight_that_is_looked_at_can_be_swapped(quant: str) -> None:
    """As ``load_state_dict`` does with ``torch.__future__.set_swap_module_params_on_conversion``."""
    layer, wanted = mla(quant), mla(quant)
    layer.load_state_dict(values_like(layer, 1))
    fl.finalize(layer)
    before, values = decode(layer), values_like(layer, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(values)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    wanted.load_state_dict(values)
    assert torch.equal(decode(layer), decode(wanted)) and not torch.equal(before, decode(layer))


@pytest.mark.parametrize(
    ("make", "run", "name"),
    [
        (moe, run_moe, "w13"),
        (lambda: moe("fp8_block"), run_moe, "w13_scale_inv"),
        (lambda: mla("none"), decode, "kv_b_proj.weight"),
        (lambda: mla("fp8_block"), decode, "kv_b_proj.weight_scale_inv"),
    ],
    ids=["experts", "experts fp8", "latent", "latent fp8"],
)
def test_a_shallow_copy_and_its_source_follow_their_own_weights(make: Any, run: Any, name: str) -> None:
    source = make()
    source.load_state_dict(values_like(source, 1))
    fl.finalize(source)
    run(source)
    twin = copy.copy(source)
    assert torch.equal(run(twin), run(source))

    def check() -> None:
        for each in (source, twin):
            fresh = make()
            fresh.load_state_dict({n: t.clone() for n, t in each.state_dict().items()})
            assert torch.equal(run(each), run(fresh))

    holder, _, own = name.rpartition(".")
    for each, seed in ((twin, 2), (source, 3)):
        setattr(each.get_submodule(holder), own, nn.Parameter(values_like(each, seed)[name], requires_grad=False))
        check()
    for each, seed, assign in ((source, 4, True), (twin, 5, False), (source, 6, False)):
        each.load_state_dict(values_like(each, seed), assign=assign)
        check()
    assert (twin.get_parameter(name) is source.get_parameter(name)) == bool(holder)  # children are the same modules
