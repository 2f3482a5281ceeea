"""A generator whose model's weights are replaced between two steps: the next token is the new weights'."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
import fastlayers_models
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.attention.mla.layer import MLAAttention
from fastlayers.errors import ArgumentError
from fastlayers.layer import Layer
from fastlayers.moe.fused_moe.layer import FusedMoE
from fastlayers.quant.spec import QuantSpec
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.weights_epoch import WeightsWatch
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator

NO_EXTENDS = ExtendBuckets((), ())
TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"


class Addresses(EagerRuntime):
    """Graphs that read, like real ones, the very tensors that the model held when they were captured."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, Layer)]
        self.captured = 0

    @contextmanager
    def frozen(self, held: list[dict[str, Any]]) -> Iterator[None]:
        own = [dict(layer.__dict__) for layer in self.layers]
        try:
            for layer, then in zip(self.layers, held, strict=True):
                layer.__dict__.update(then)
            yield
        finally:
            for layer, now in zip(self.layers, own, strict=True):
                layer.__dict__.clear()
                layer.__dict__.update(now)

    def capture(self, fn: Callable[[], Any]) -> Any:
        self.captured += 1
        held: list[dict[str, Any]] = []

        def replayed() -> Any:
            if not held:
                return fn()
            with self.frozen(held):
                return fn()

        made = super().capture(replayed)
        for layer in self.layers:
            then: dict[str, Any] = {"_parameters": dict(layer._parameters)}
            if isinstance(layer, MLAAttention) and layer.packed_sources():
                absorbed = layer.absorbed_weights()
                then["_absorbed_weights"] = lambda compiling, absorbed=absorbed: absorbed
            if isinstance(layer, FusedMoE):
                then.update(packed=layer._packed(), _biases=None)
            held.append(then)
        return made


def load(fp8: bool) -> Any:
    model = DeepseekForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for layer in model.decoder.layers if fp8 else ():
        attention = layer.self_attn
        attention.kv_b_proj = quantised(attention.kv_b_proj)
    return fl.finalize(model)


def quantised(source: Any) -> fl.FP8ScaledLinear:
    made = fl.linear(source.in_features, source.out_features, quant=QuantSpec("fp8_channel"), dtype=torch.float32)
    scale = source.weight.abs().amax(1) / 448
    made.weight.copy_(source.weight / scale[:, None])
    made.weight_scale.copy_(scale)
    return made  # type: ignore[return-value]


def negate_experts(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FusedMoE):
            module.load_state_dict({n: -t if n == "w2" else t for n, t in module.state_dict().items()}, assign=True)


def replace_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.roll(7, 0), requires_grad=False)


def edit_scales(model: Any) -> None:
    for layer in model.decoder.layers:
        layer.self_attn.kv_b_proj.weight_scale.mul_(-2)


def edit_in_place(model: Any) -> None:
    model.lm_head.weight.copy_(model.lm_head.weight.roll(7, 0))


CASES = [(negate_experts, False, 2), (replace_head, False, 2), (edit_scales, True, 2), (edit_in_place, False, 1)]


@pytest.mark.parametrize(("change", "fp8", "captures"), CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_replay_does_not_read_what_is_gone(change: Callable[[Any], None], fp8: bool, captures: int) -> None:
    prompt, steps = [[5, 9, 2, 7, 30]], 12

    def tokens(graphs: Any, model: Any) -> list[int]:
        wanted = False if graphs is None else "auto"
        generator = Generator(model, max_length=64, cuda_graph=wanted, graphs=graphs, extend_buckets=NO_EXTENDS)
        stream = generator.stream(prompt, max_new_tokens=steps, eos_ids=())
        found = [next(stream).id for _ in range(5)]
        change(model)
        return [*found, *(token.id for token in stream)]

    model = load(fp8)
    runtime = Addresses(model)
    captured, unchanged = tokens(CudaGraphs(runtime=runtime), model), load(fp8)
    plain = tokens(None, load(fp8))
    # A captured step was launched ahead of the change; from then on both have the new weights, but another past.
    same = Generator(unchanged, max_length=64, cuda_graph=False).generate(prompt, max_new_tokens=steps, eos_ids=())[0]
    assert captured[:5] == plain[:5] == same[:5] and captured != same and plain != same
    assert runtime.captured == captures


@pytest.mark.parametrize(("fp8", "extends"), [(False, NO_EXTENDS), (True, NO_EXTENDS), (False, ExtendBuckets())])
def test_between_two_calls(fp8: bool, extends: ExtendBuckets) -> None:
    model, fresh = load(fp8), load(fp8)
    runtime, kinds = Addresses(model), 2 if extends.tokens else 1
    graphs = CudaGraphs(runtime=runtime)
    generator = Generator(model, max_batch=2, max_length=64, graphs=graphs, extend_buckets=extends)
    rows = [[5, 9, 2, 7, 30], [4, 4, 8]]
    for change in (None, negate_experts, edit_scales if fp8 else replace_head):
        for each in (model, fresh) if change else ():
            change(each)  # type: ignore[misc]
        wanted = Generator(fresh, max_length=64, cuda_graph=False).generate(rows, max_new_tokens=9, eos_ids=())
        assert generator.generate(rows, max_new_tokens=9, eos_ids=()) == wanted
        assert generator.generate(rows, max_new_tokens=9, eos_ids=()) == wanted
    assert runtime.captured == 3 * kinds and len(graphs) == kinds


def test_a_capture_that_fails_the_second_time_leaves_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(EagerRuntime):
        captured = 0

        def capture(self, fn: Any) -> Any:
            self.captured += 1
            if self.captured > 1:
                raise RuntimeError("no more")
            return super().capture(fn)

    model = load(False)
    graphs = CudaGraphs(runtime=Fails())
    generator = Generator(model, max_length=64, graphs=graphs, extend_buckets=NO_EXTENDS)
    stream = generator.stream([[5, 9, 2]], max_new_tokens=8, eos_ids=())
    found = [next(stream).id for _ in range(3)]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    with caplog.at_level(logging.WARNING):
        found += [token.id for token in stream]
    wanted = Generator(load(False), max_length=64, cuda_graph=False).generate([[5, 9, 2]], max_new_tokens=8, eos_ids=())
    assert found == wanted[0] and "decode runs without CUDA graphs" in caplog.text


def test_a_step_is_refused_as_soon_as_a_weight_before_a_cache_wants_a_gradient() -> None:
    model = load(False)
    cache = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype).allocate(3)
    state, ids = fl.AttentionState(1, 8, 2, model.page_size), torch.tensor([1, 2, 3])

    def step(length: int) -> Any:
        return model(ids, state.plan(fl.AttentionBatch((3,), (length,), [[1]])), cache)

    words = "MLAAttention: kv_a_layernorm.weight is a tensor that requires a gradient"
    with torch.enable_grad():
        step(0)
        attention = model.decoder.layers[1].self_attn
        attention.kv_a_layernorm.weight.requires_grad_()
        with pytest.raises(ArgumentError, match=words):
            step(3)
        with torch.no_grad():
            step(3)
        weight = attention.kv_a_layernorm.weight.detach()
        attention.kv_a_layernorm.weight = nn.Parameter(weight.clone(), requires_grad=False)
        step(6)
        attention.kv_a_layernorm.weight = nn.Parameter(weight.clone())
        with pytest.raises(ArgumentError, match=words):
            step(9)
        attention.kv_a_layernorm.weight.requires_grad_(False)
        # What lies before a later layer's cache, but not in its attention.
        model.decoder.layers[0].self_attn.o_proj.weight.requires_grad_()
        with pytest.raises(ArgumentError, match="MLAAttention: hidden_states is a tensor that requires a gradient"):
            step(12)


def test_absorbed_views_follow_their_weight_and_are_not_copied() -> None:
    model = load(False)
    attention = model.decoder.layers[0].self_attn
    with torch.inference_mode():
        first = attention.absorbed_weights()
        assert attention.absorbed_weights()[0] is first[0]
    weight = attention.kv_b_proj.weight
    for change in (
        lambda: weight.data.mul_(2.0),
        lambda: setattr(weight, "data", weight.data.clone().mul_(3.0)),
        lambda: setattr(attention.kv_b_proj, "weight", nn.Parameter(weight.detach() * 5.0, requires_grad=False)),
        lambda: attention.load_state_dict({n: t * 7.0 for n, t in attention.state_dict().items()}, assign=True),
    ):
        change()
        now = attention.kv_b_proj.weight
        heads = now.view(attention.num_heads, -1, now.shape[1])
        assert torch.equal(torch.cat(attention.absorbed_weights(), 1), heads)
    twin = copy.deepcopy(attention)
    assert (
        twin._views is None
        and len(pickle.dumps(twin))
        < 1.2 * sum(t.numel() * t.element_size() for t in (*twin.parameters(), *twin.buffers())) + 100_000
    )


def absorbing() -> MLAAttention:
    rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)
    layer = fl.MLAAttention(
        128, 2, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=64,
        rotary=rotary, page_size=16, dtype=torch.float32, quant=QuantSpec("fp8_block"),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.full(parameter.shape, 0.5).to(parameter.dtype))
    return layer


def decoded(layer: Any, owner: MLAAttention) -> float:
    cache = fl.kv_cache_spec(owner, page_size=16).allocate(num_pages=2)[0]
    meta = fl.AttentionState(1, 1, 1, 16).plan(fl.AttentionBatch((1,), (0,), [[1]]))
    with torch.no_grad():
        return float(layer(torch.ones(1, 128), meta, cache)[0, 0])


@pytest.mark.parametrize("finalized", [False, True])
def test_a_compiled_layer_computes_with_the_weights_as_they_are(finalized: bool) -> None:
    layer = absorbing()
    if finalized:
        fl.finalize(layer)
    before, compiled = decoded(layer, layer), torch.compile(layer, backend="eager", fullgraph=True)
    assert decoded(compiled, layer) == before > 0
    weight = torch.zeros_like(layer.kv_b_proj.weight)
    layer.load_state_dict(layer.state_dict() | {"kv_b_proj.weight": weight}, assign=True)
    assert decoded(compiled, layer) == 0.0
    with torch.no_grad():
        layer.kv_b_proj.weight.copy_(torch.ones(weight.shape).to(weight.dtype))
    assert decoded(compiled, layer) == decoded(layer, layer) == 2 * before


def stored(value: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def replace_by_a_file(layer: MLAAttention) -> None:
    layer.kv_b_proj = stored(layer.kv_b_proj, False)


def assign_from_a_file(layer: MLAAttention) -> None:
    layer.kv_b_proj.load_state_dict(stored(dict(layer.kv_b_proj.named_parameters()), True), assign=True)


def replace_by_a_copy(layer: MLAAttention) -> None:
    layer.kv_b_proj.weight = copy.copy(layer.kv_b_proj.weight)


@pytest.mark.parametrize("change", [replace_by_a_file, assign_from_a_file, replace_by_a_copy])
def test_a_weight_that_was_stored_or_copied_counts_its_own_edits(change: Callable[[MLAAttention], None]) -> None:
    layer = absorbing()
    layer.absorbed_weights()
    change(layer)
    before = layer.absorbed_weights()[0].clone()
    weight = layer.kv_b_proj.weight
    with torch.no_grad():
        weight.copy_((weight.float() * 2).to(weight.dtype))
    assert torch.equal(layer.absorbed_weights()[0], 2 * before) and before.min() > 0


@pytest.mark.gpu
def test_weights_on_a_gpu_share_one_counter_and_an_edit_there_is_seen() -> None:
    place = "cuda"

    def latent() -> MLAAttention:
        rotary = fl.RotaryEmbedding(64, max_position=64, interleaved_in=True, device=place)
        return fl.MLAAttention(
            512, 16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            rotary=rotary, page_size=64, dtype=torch.bfloat16, quant=QuantSpec("fp8_block"), device=place,
        )  # fmt: skip

    layers = [latent() for _ in range(3)]
    model = nn.ModuleList(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, device=place) * 0.1 + 0.01)
    addresses = [layer.kv_b_proj.weight.data_ptr() for layer in layers]
    fl.finalize(model)
    watch = WeightsWatch(model)
    assert len({id(layer._absorbed.counter) for layer in layers if layer._absorbed is not None}) == 1
    assert [layer.kv_b_proj.weight.data_ptr() for layer in layers] == addresses
    cache = fl.kv_cache_spec(layers[0], page_size=64, dtype=torch.bfloat16).allocate(3, place)[0]
    cache.keys.zero_()
    state = fl.AttentionState(1, 1, 2, 64, place)
    x = torch.randn(1, 512, device=place, dtype=torch.bfloat16)

    @torch.no_grad()
    def step(layer: MLAAttention) -> torch.Tensor:
        meta = state.plan(fl.AttentionBatch((1,), (9,), [[1]]))
        return layer(x, meta, cache).clone()

    before = step(layers[1])
    assert not watch.stale
    with torch.no_grad():
        layers[1].kv_b_proj.weight_scale_inv.mul_(2)
    assert watch.stale
    after = step(layers[1])
    assert not torch.equal(before, after)
    model.to("cpu").to(place)
    watch.mark()
    assert torch.equal(step(layers[1]), after) and watch.stale
