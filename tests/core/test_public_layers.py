"""The contract of every public layer, through one table: copies, compilation, casts, and what bad input gets.

Layers that have no public name yet (the writes, the quantisers) are in the table too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.activation.silu_mul_quant.layer import SiluMulQuant
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.attention.merge_state.layer import MergeState
from fastlayers.attention.mla_kv_write.layer import MLAKVWrite
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError
from fastlayers.layer import Layer
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant
from fastlayers.registry import LAYERS, registry
from fastlayers.sampler.layer import RowParams, SamplingState
from fastlayers.testing.spec import spec_of

F32 = torch.float32
ATTENTION_KEYS = ("qkv_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight", "sinks")
MLA_KEYS = (
    "q_a_layernorm.weight", "q_b_proj.weight", "qkv_a_proj.weight", "kv_a_layernorm.weight", "kv_b_proj.weight",
    "o_proj.weight",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """One layer: how to make it, valid arguments, the keys of its state, and what it is lenient about.

    ``accepts``: (argument, kind of change) pairs after which the call is still valid.
    """

    make: Callable[[], Layer]
    arguments: Callable[[], dict[str, Any]]
    keys: tuple[str, ...] = ()
    accepts: frozenset[tuple[str, str]] = field(default_factory=frozenset)


def accepts(*pairs: str) -> frozenset[tuple[str, str]]:
    return frozenset((p.split(":")[0], p.split(":")[1]) for p in pairs)


def meta() -> Any:
    return fl.AttentionState(2, 8, 1, 16).plan(fl.AttentionBatch((3, 5), (0, 0), [[1], [2]]))


def attention() -> Layer:
    rotary = fl.RotaryEmbedding(8, max_position=64)
    return fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, dtype=F32, sinks=True, qk_norm=1e-6)


def cache_of(layer: Layer) -> Any:
    """Return a cache of three pages for one attention layer."""
    return fl.kv_cache_spec(layer, page_size=16).allocate(3)[0]


def mla() -> Layer:
    rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)
    return fl.MLAAttention(
        32, 2, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=rotary, page_size=16, dtype=F32,
    )  # fmt: skip


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def pair_of_caches() -> LayerCache:
    return LayerCache(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))


R = torch.randn
ANY_ROWS = accepts("x:more rows", "x:more dims", "x:strided")
SUBJECTS = {
    "RMSNorm": Subject(
        lambda: fl.RMSNorm(8), lambda: {"x": R(3, 8), "residual": R(3, 8)}, ("weight",), accepts("residual:none")
    ),
    "Linear": Subject(lambda: fl.Linear(8, 4, bias=True), lambda: {"x": R(3, 8)}, ("weight", "bias"), ANY_ROWS),
    "LMHead": Subject(lambda: fl.LMHead(8, 4), lambda: {"x": R(3, 8)}, ("weight",), ANY_ROWS),
    "FP8BlockLinear": Subject(
        lambda: fl.FP8BlockLinear(128, 64, bias=True, dtype=F32),
        lambda: {"x": R(3, 128)},
        ("weight", "weight_scale_inv", "bias"),
        ANY_ROWS,
    ),
    "WeightOnlyLinear": Subject(
        lambda: fl.WeightOnlyLinear(64, 16, bias=True, group_size=32, zero_point=True, dtype=F32),
        lambda: {"x": R(3, 64)},
        ("weight", "weight_scale", "weight_zero", "bias"),
        ANY_ROWS,
    ),
    "Int8Linear": Subject(
        lambda: fl.Int8Linear(32, 16, bias=True, dtype=F32),
        lambda: {"x": R(3, 32)},
        ("weight", "weight_scale", "bias"),
        ANY_ROWS,
    ),
    "FP8ScaledLinear": Subject(
        lambda: fl.FP8ScaledLinear(32, 16, bias=True, dtype=F32),
        lambda: {"x": R(3, 32)},
        ("weight", "weight_scale", "bias"),
        ANY_ROWS,
    ),
    "Bmm": Subject(
        lambda: fl.Bmm(2, 8, 4, dtype=F32),
        lambda: {"x": R(2, 3, 8), "weight": R(2, 4, 8)},
        (),
        accepts("weight:strided"),
    ),
    "MXFP8Quant": Subject(
        lambda: MXFP8Quant(64),
        lambda: {"x": R(3, 32)},
        (),
        accepts("x:more rows", "x:more dims", "x:bf16", "x:strided", "x:wider"),
    ),
    "VocabEmbedding": Subject(
        lambda: fl.VocabEmbedding(7, 8),
        lambda: {"ids": ids(1, 2, 6)},
        ("weight",),
        accepts("ids:more rows", "ids:more dims", "ids:strided", "ids:0-dim", "ids:wider"),
    ),
    "SiluAndMul": Subject(
        lambda: fl.SiluAndMul(8), lambda: {"x": R(3, 16)}, (), accepts("x:more rows", "x:more dims", "x:bf16")
    ),
    "SiluMulQuant": Subject(
        lambda: SiluMulQuant(128), lambda: {"x": R(3, 256)}, (), accepts("x:more rows", "x:bf16")
    ),
    "GroupQuant": Subject(lambda: GroupQuant(16), lambda: {"x": R(3, 32)}, (), ANY_ROWS | accepts("x:bf16")),
    "Sampler": Subject(
        lambda: fl.Sampler(8),
        lambda: {"logits": R(2, 8), "state": SamplingState(2).rows},
        (),
        accepts("logits:bf16", *(f"state.{f}:{kind}" for f in RowParams._fields for kind in ("more rows", "wider"))),
    ),
    "RotaryEmbedding": Subject(
        lambda: fl.RotaryEmbedding(8, max_position=16),
        lambda: {"q": R(3, 4, 8), "k": R(3, 2, 8), "positions": ids(0, 1, 5)},
        (),
        accepts("k:none", "positions:strided"),
    ),
    "TopKRouter": Subject(
        lambda: fl.TopKRouter(8, 4, 2, correction_bias=True, bias=True),
        lambda: {"hidden_states": R(3, 8), "num_valid": ids(2, dtype=torch.int32)},
        ("weight", "bias", "e_score_correction_bias"),
        accepts(
            "hidden_states:bf16", "hidden_states:more rows", "hidden_states:strided", "num_valid:none",
            "num_valid:strided",
        ),
    ),
    "FusedMoE": Subject(
        lambda: fl.FusedMoE(8, 16, 4, 2, dtype=F32),
        lambda: {
            "hidden_states": R(3, 8),
            "topk_weights": torch.rand(3, 2),
            "topk_ids": torch.tensor([[0, 1], [2, 3], [-1, 0]], dtype=torch.int32),
        },
        ("w13", "w2"),
        accepts("hidden_states:strided", "topk_weights:strided", "topk_ids:strided"),
    ),
    "MergeState": Subject(
        lambda: MergeState(8),
        lambda: {"o_a": R(3, 2, 8), "lse_a": R(3, 2), "o_b": R(3, 2, 8), "lse_b": R(3, 2)},
        (),
        accepts("lse_a:strided", "lse_b:strided"),
    ),
    "KVWrite": Subject(
        lambda: KVWrite(2, 8, kv_dtype=F32),
        lambda: {
            "k": R(3, 2, 8), "v": R(3, 2, 8), "k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 8),
            "loc": ids(4, 5, 6),
        },
    ),
    "MLAKVWrite": Subject(
        lambda: MLAKVWrite(8, 4, kv_dtype=F32),
        lambda: {"latent": R(3, 8), "rope": R(3, 4), "cache": torch.zeros(3, 4, 12), "loc": ids(4, 5, 6)},
        (),
        accepts("cache:more rows"),
    ),
    "RotaryKVWrite": Subject(
        lambda: RotaryKVWrite(4, 2, 8, kv_dtype=F32),
        lambda: {
            "q": R(3, 4, 8), "k": R(3, 2, 8), "v": R(3, 2, 8), "cos": R(9, 4), "sin": R(9, 4),
            "positions": ids(0, 1, 2), "cache": pair_of_caches(), "loc": ids(4, 5, 6),
        },
    ),
    "Attention": Subject(
        attention,
        lambda: {"hidden": R(8, 32), "meta": meta(), "cache": cache_of(attention())},
        ATTENTION_KEYS,
        accepts("hidden:strided"),
    ),
    "MLAAttention": Subject(
        mla,
        lambda: {"hidden_states": R(8, 32), "meta": meta(), "cache": cache_of(mla())},
        MLA_KEYS,
        accepts("hidden_states:strided", "cache.keys:more rows"),
    ),
}  # fmt: skip
# Moving whole layers between formats: these read their dtype from their weights or their input.
FOLLOWS_DTYPE = {
    "Bmm",
    "MXFP8Quant",
    "RMSNorm", "VocabEmbedding", "SiluAndMul", "SiluMulQuant", "GroupQuant", "Sampler", "RotaryEmbedding",
    "TopKRouter", "MergeState", "KVWrite", "MLAKVWrite", "RotaryKVWrite",
}  # fmt: skip


def filled(layer: Layer) -> Layer:
    """Return ``layer`` with weights that are all different from zero and from each other."""
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator) / 3 + 0.2
        parameter.data.copy_(values if parameter.dtype.is_floating_point else (20 * values).round())
    return layer


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, LayerCache):
        return tensors([value.keys, value.values])
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (tuple, list)) else []


def result(layer: nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return what a call gives and what it leaves in its arguments; ``arguments`` stay as they are."""
    own = copy.deepcopy(arguments)
    with torch.inference_mode():
        return [t.clone().float() for t in (*tensors(layer(**own)), *tensors(own))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def changes(tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    """Yield (kind, another value) for one tensor argument."""
    if tensor.dtype.is_floating_point:
        yield from (("fp64", tensor.double()), ("bf16", tensor.bfloat16()), ("integers", tensor.int()))
    else:
        yield from (("int16", tensor.short()), ("floats", tensor.float()), ("bools", tensor.bool()))
    yield "other device", tensor.to("meta")
    yield "wider", torch.cat([tensor, tensor[..., :1]], -1)
    if tensor.dim() > 1:
        yield "more rows", torch.cat([tensor, tensor[:1]])
    yield "0-dim", tensor.flatten()[0]
    yield "more dims", tensor.unsqueeze(0)
    yield "none", None
    yield "list", tensor.tolist()
    spaced = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    yield "strided", spaced.copy_(tensor)


def bad_calls(arguments: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (argument, kind, arguments with that one changed)."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield from ((name, kind, {**arguments, name: other}) for kind, other in changes(value))
            continue
        yield name, "none", {**arguments, name: None}
        yield name, "text", {**arguments, name: "x"}
        parts = value._asdict() if hasattr(value, "_asdict") else vars(value) if isinstance(value, LayerCache) else {}
        for part, tensor in parts.items():
            if tensor is not None:
                for kind, other in changes(tensor):
                    yield f"{name}.{part}", kind, {**arguments, name: type(value)(**{**parts, part: other})}


@pytest.fixture(params=SUBJECTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_table_holds_every_public_layer() -> None:
    assert public_layers() - set(SUBJECTS) == set()


def public_layers() -> set[str]:
    found = ((n, getattr(fl, n)) for n in fl.__all__)
    return {n for n, value in found if inspect.isclass(value) and issubclass(value, nn.Module)}


def test_copies_compute_the_same(name: str) -> None:
    subject = SUBJECTS[name]
    layer, arguments = filled(subject.make()), subject.arguments()
    expected = result(layer, arguments)
    assert same(result(copy.deepcopy(layer), arguments), expected)
    # torch.save, because torch itself cannot pickle e4m3 tensors any other way.
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert same(result(loaded, arguments), expected) and loaded.choice == layer.choice
    assert set(layer.state_dict()) == set(subject.keys)
    other = subject.make()
    other.load_state_dict(layer.state_dict())
    assert same(result(other, arguments), expected)


def lying_otherwise(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the same values with gaps between numbers, with gaps between rows, and column by column."""
    for gap, step in ((2 * values.shape[-1], 2), (values.shape[-1] + 8, 1)):
        wide = torch.zeros(*values.shape[:-1], gap, dtype=values.dtype)
        yield wide[..., : step * values.shape[-1] : step].copy_(values)
    yield values.transpose(0, -1).contiguous().transpose(0, -1)


def test_parameters_that_lie_otherwise_compute_the_same(name: str) -> None:
    """Kernels read weights as they lie, one number behind the other: what is assigned otherwise is copied."""
    subject = SUBJECTS[name]
    layer, arguments = filled(subject.make()), subject.arguments()
    expected, state = result(layer, arguments), layer.state_dict()
    for variant in zip(*map(lying_otherwise, state.values()), strict=True) if state else ():
        other = subject.make()
        other.load_state_dict(dict(zip(state, variant, strict=True)), assign=True)
        assert all(parameter.is_contiguous() for parameter in other.parameters())
        assert same(result(other, arguments), expected)


def test_compiles_without_a_graph_break(name: str) -> None:
    subject = SUBJECTS[name]
    layer, arguments = filled(subject.make()), subject.arguments()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual, expected = result(compiled, arguments), result(layer, arguments)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_bad_input_raises_our_error_and_changes_nothing(name: str) -> None:
    subject = SUBJECTS[name]
    layer = filled(subject.make())
    arguments = subject.arguments()
    before, state = [t.clone() for t in tensors(arguments)], [p.clone() for p in layer.parameters()]
    wrong = []
    for argument, kind, changed in bad_calls(arguments):
        if (argument, kind) in subject.accepts:
            continue
        try:
            with torch.inference_mode():
                layer(**changed)
            wrong.append(f"{argument} {kind}: no error")
        except ArgumentError as error:
            # Where two arguments contradict each other, either may be named.
            if error.layer != name or error.argument.split(".")[0] not in arguments or not error.accepted:
                wrong.append(f"{argument} {kind}: {error}")
        except Exception as error:  # whatever else it is, it is not ours
            wrong.append(f"{argument} {kind}: {type(error).__name__}: {error}")
        if not same(before, tensors(arguments)):
            pytest.fail(f"{argument} {kind} changed an argument")
    assert wrong == []
    assert same(state, [p.clone() for p in layer.parameters()])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_accepted_is_computed_right(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided argument gives what a contiguous one gives, in the kernels too."""
    monkeypatch.setenv("FASTLAYERS_BACKEND", ",".join(f"{layer}={backend}" for layer in LAYERS))
    subject = SUBJECTS[name]
    layer, arguments = filled(subject.make()), subject.arguments()
    assert layer.choice.name == backend
    expected = result(layer, arguments)
    for argument, kind, changed in bad_calls(arguments):
        if kind != "strided" or (argument, kind) not in subject.accepts:
            continue
        with torch.inference_mode():
            actual = [t.float() for t in tensors(layer(**changed))]
        assert same(actual, expected[: len(actual)]), argument


def test_casts(name: str) -> None:
    """``.to(dtype)`` either works or is refused before anything changes; e4m3, int8 and scales are never cast."""
    layer = filled(SUBJECTS[name].make())
    before = {n: p.clone() for n, p in layer.named_parameters()}
    if name not in FOLLOWS_DTYPE:
        with pytest.raises(ArgumentError, match=r"dtype is torch\.bfloat16; accepted: torch\.float32"):
            layer.to(torch.bfloat16)
        assert all(p.dtype == before[n].dtype for n, p in layer.named_parameters())
        layer.to(torch.float32)
        assert all(torch.equal(p.float(), before[n].float()) for n, p in layer.named_parameters())
        assert all(p.dtype == before[n].dtype for n, p in layer.named_parameters())
    else:
        layer.to(torch.bfloat16)
        kept = {"e_score_correction_bias"}
        assert all(p.dtype == (before[n].dtype if n in kept else torch.bfloat16) for n, p in layer.named_parameters())


def test_another_type_of_device_chooses_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, named = fl.RMSNorm(8), fl.RMSNorm(8, backend="torch")
    for layer in (norm, named):
        # As if built for a GPU: the move to the CPU is what is tested here.
        layer.choice = registry("rms_norm").choose(layer.cfg, DESCRIBED["H200"], layer.choice.requested)
    assert (norm.choice.name, named.choice.name) == ("triton", "torch")
    norm.to("cpu"), named.to("cpu")
    assert norm.choice.device.type == named.choice.device.type == "cpu"
    assert (norm.choice.name, named.choice.name) == ("torch", "torch")
    assert norm.ladder.choice is norm.choice


def test_a_move_that_the_named_backend_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    norm = fl.RMSNorm(8)
    norm.choice = registry("rms_norm").choose(norm.cfg, DESCRIBED["H200"], "triton")
    ladder = norm.ladder
    with pytest.raises(fl.FastlayersError, match="Triton needs a CUDA device"):
        norm.to("cpu")
    assert norm.choice.device.name == "H200" and norm.ladder is ladder


def test_triton_rows_that_hold_e4m3_refuse_an_a100() -> None:
    for layer in ("fp8_linear", "group_quant", "silu_mul_quant"):
        rows = {row.name: row for row in fl.backends(layer, device="A100", cfg=spec_of(layer).cases[0].cfg)}
        assert not rows["triton"].hardware and "need sm_89 or newer, this is sm_80" in rows["triton"].reason
    rows = {row.name: row for row in fl.backends("mla", device="L40S", cfg=deepseek_core())}
    assert "KiB of shared memory, sm_89 has 99" in rows["triton"].reason
    assert {row.name: row for row in fl.backends("mla", device="A100", cfg=deepseek_core())}["triton"].hardware


@pytest.mark.parametrize("name", ["Attention", "MLAAttention"])
def test_pages_outside_the_cache_are_named_in_debug_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    layer, arguments = filled(SUBJECTS[name].make()), SUBJECTS[name].arguments()
    step = arguments["meta"]
    for shift, given in ((9, "pages from 10 to 11"), (-2, "pages from -1 to 0")):
        wrong = dataclasses.replace(step, page_table=step.page_table + shift)
        with pytest.raises(ArgumentError, match=given):
            layer(**{**arguments, "meta": wrong})
    assert not any(t.any() for t in tensors(arguments["cache"]))
    assert layer(**arguments).shape == (8, 32)


@pytest.mark.parametrize("name", ["Attention", "MLAAttention"])
@pytest.mark.parametrize("lengths, table", [((3, 5), [[1], [1]]), ((1, 20), [[1], [2, 2]])])
def test_new_tokens_of_one_slot_are_named_in_debug_mode(
    name: str, lengths: tuple[int, ...], table: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that two requests write, or that stands twice in a row: one token would be read for both."""
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    layer, state = filled(SUBJECTS[name].make()), fl.AttentionState(2, 32, 2, 16)
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(4)[0]
    words = rf"meta.out_cache_loc is slot \d+ of page {table[-1][0]} for several new tokens; accepted: a slot of"
    with pytest.raises(ArgumentError, match=words):
        layer(R(sum(lengths), 32), state.plan(fl.AttentionBatch(lengths, (0, 0), table)), cache)
    assert not any(t.any() for t in tensors(cache))
    shared_prefix = fl.AttentionBatch((3, 1), (16, 16), [[1, 2], [1, 3]])
    assert layer(R(4, 32), state.plan(shared_prefix), cache).shape == (4, 32)
    padded = state.plan(fl.AttentionBatch((), (), []), bucket=2)  # whose rows write to nobody's page
    assert layer(R(2, 32), padded, cache).shape == (2, 32)


def deepseek_core() -> object:
    from fastlayers.attention.mla.config import MLAConfig

    return MLAConfig(16, 512, 64, 128, 128, 0.1)
