"""Every public constructor refuses what is not of its parameters' types, and names itself and the argument."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import KVCacheSpec
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.errors import ArgumentError, FastlayersError, check_kind, check_plain
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant
from fastlayers.rotary.scaling import RopeScaling
from fastlayers.sampler.layer import SamplingState

ROTARY, NORM, X = fl.RotaryEmbedding(64, max_position=16), fl.RMSNorm(8), torch.ones(2)
SQUARE: dict[str, Any] = {"in_features": 128, "out_features": 128}
# What is made, and arguments with which it can be.
MAKERS: dict[Callable[..., Any], dict[str, Any]] = {
    fl.Attention: {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "rotary": ROTARY},
    fl.AttentionState: {"max_batch": 2, "max_tokens": 8, "max_pages": 1, "page_size": 16},
    fl.Axis: {"size": 2, "rank": 1, "ranks": (0, 1)},
    fl.Bmm: {"heads": 2, "in_features": 8, "out_features": 8},
    fl.BumpAllocator: {"capacity_bytes": 64},
    fl.Device: {"type": "cuda", "name": "x", "capability": (9, 0)},
    fl.EplbConfig: {},
    ExpertPlacement: {"num_experts": 4, "ep": fl.Axis(), "config": fl.EplbConfig()},
    fl.FP8BlockLinear: SQUARE,
    fl.FP8ScaledLinear: SQUARE,
    fl.FusedMoE: {"hidden_size": 64, "intermediate_size": 128, "num_experts": 4, "top_k": 2},
    fl.Int8Linear: SQUARE,
    fl.WeightOnlyLinear: SQUARE,
    fl.LMHead: {"hidden_size": 64, "vocab_size": 64},
    fl.LayerCommunicator: {
        "parallel": fl.ParallelSpec(), "input_layernorm": NORM, "post_attention_layernorm": NORM,
    },
    fl.Layout: {"place": "full"},
    fl.Linear: SQUARE,
    fl.MLAAttention: {
        "hidden_size": 64, "num_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "rotary": ROTARY,
    },
    MXFP8Quant: {},
    fl.PagePool: {"num_pages": 4, "page_size": 16},
    fl.ParallelSpec: {},
    fl.ParallelSpec.grid: {"world_size": 4, "rank": 1, "attn_dp": 2, "ep": 2},
    fl.QuantSpec: {"format": "fp8_block"},
    fl.Ranks: {"tp": 2, "dp": 2, "ep": 4},
    fl.RMSNorm: {"hidden_size": 64},
    fl.RotaryEmbedding: {"head_dim": 8, "max_position": 16},
    fl.Sampler: {"vocab_size": 8},
    fl.SamplingParams: {},
    fl.Shard: {},
    fl.SiluAndMul: {"size": 8},
    fl.TopKRouter: {"hidden_size": 64, "num_experts": 8, "top_k": 2},
    fl.TorchCompile: {},
    fl.VocabEmbedding: {"vocab_size": 64, "hidden_size": 64},
    KVCacheSpec: {"rows": ((8,),), "page_size": 16, "dtype": torch.float32},
    MLAThresholds: {},
    RopeScaling: {},
    SamplingState: {"max_batch": 2},
}  # fmt: skip
# Made in every step, so only what breaks is looked into; checked where it is registered; needs a GPU.
OTHERS = {"AttentionBatch", "Backend", "CudaGraphs", "FastlayersError", "Hidden", "StepTokens"}
# By what an annotation begins with.
WRONG: dict[str, tuple[Any, ...]] = {
    "bool": ("no", 2, X),
    "str": (3, b"x", X),
    "int": ("1", 1.5, True, math.nan, X),
    "float": ("1", True, math.nan, math.inf, X),
    "torch.dtype": ("float32", 3, torch.int8),
    "tuple": ("x", 3, (1.5,), X),
    **dict.fromkeys(
        ("Axis", "Codes", "EplbConfig", "ExpertPlacement", "MLAThresholds", "Norm", "ParallelSpec", "LayerCommunicator",
         "Moves", "QuantSpec", "RopeScaling", "RotaryEmbedding", "Seam", "Shard", "VocabEmbedding"),
        ("x", 3, X),
    ),
}  # fmt: skip
# Named by the linears inside, by another argument, or not yet.
SKIPPED = {
    ("Attention", "qkv_bias"), ("Attention", "o_bias"), ("Attention", "prefix"), ("FusedMoE", "interleaved"),
    ("FusedMoE", "num_shared"),
}  # fmt: skip
VALUES: list[tuple[Callable[..., Any], str, Any]] = [
    (fl.Axis, "size", 0),
    (fl.Axis, "rank", 2),
    (fl.Axis, "ranks", (0, 1, 2)),
    (fl.Axis, "ranks", (1, 1)),
    (fl.LayerCommunicator, "mlp_kind", "sparse"),
    (fl.LayerCommunicator, "input_layernorm", fl.SiluAndMul(8)),
    (fl.LayerCommunicator, "post_attention_layernorm", torch.nn.LayerNorm(8)),
    (fl.MLAAttention, "alt_stream", "x"),
    (fl.MLAAttention, "norm_eps", -1.0),
    (fl.ParallelSpec, "attn_tp", fl.Axis(2, 0)),
    (fl.ParallelSpec, "moe_tp", fl.Axis(2, 1)),
    (fl.ParallelSpec.grid, "rank", 4),
    (fl.ParallelSpec.grid, "ep", 3),
    (fl.Ranks, "ep", 3),
    (fl.RMSNorm, "eps", -1.0),
    (fl.RotaryEmbedding, "base", 0.0),
    (fl.SamplingParams, "temperature", -1.0),
    (fl.SamplingParams, "top_k", -2),
    (fl.SamplingParams, "top_p", 0.0),
    (fl.SamplingParams, "seed", 2**63),
    (fl.TopKRouter, "renorm_eps", -1.0),
    (RopeScaling, "attention_factor", -1.0),
]


def name_of(make: Callable[..., Any]) -> str:
    return make.__qualname__.split(".")[0]


def cases() -> Iterator[tuple[Callable[..., Any], str, Any]]:
    for make in MAKERS:
        for argument, parameter in inspect.signature(make).parameters.items():
            kind = str(parameter.annotation)
            if argument in ("backend", "device") or (name_of(make), argument) in SKIPPED:
                continue
            optional = kind.endswith("None")
            values = next((values for start, values in WRONG.items() if kind.startswith(start)), None)
            assert values or argument in ("group", "names", "alt_stream"), f"no wrong values for {kind} of {make}"
            yield from ((make, argument, value) for value in (values or ()) + (None,) * (bool(values) and not optional))
    yield from VALUES


@pytest.mark.parametrize(("make", "argument", "value"), list(cases()), ids=lambda v: getattr(v, "__name__", None))
def test_a_wrong_value_is_refused_by_name(make: Callable[..., Any], argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(**{**MAKERS[make], argument: value})
    assert caught.value.layer == name_of(make)
    assert caught.value.argument.partition("[")[0].partition(".")[0] == argument
    assert caught.value.accepted


def test_no_public_constructor_is_forgotten() -> None:
    for make, given in MAKERS.items():
        make(**given)
    public = {name for name in fl.__all__ if isinstance(getattr(fl, name), type)}
    assert public == {name_of(make) for make in MAKERS if name_of(make) in fl.__all__} | OTHERS


@pytest.mark.parametrize("argument", ["query_lens", "prefix_lens", "page_table", "starts"])
def test_step_data_that_breaks_is_named(argument: str) -> None:
    batch = {"query_lens": (3,), "prefix_lens": (0,), "page_table": [[1]]}
    with pytest.raises(ArgumentError, match=f"AttentionBatch: {argument} is None"):
        fl.AttentionBatch(**{**batch, argument: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(np.int64(3),), np.array([3])], ids=["numbers", "array"])
def test_a_page_table_that_breaks_is_named_beside_numpy_lengths(lengths: Any) -> None:
    assert fl.AttentionBatch(lengths, lengths, [[1]]).num_tokens == 3
    with pytest.raises(ArgumentError, match="AttentionBatch: page_table is 5"):
        fl.AttentionBatch(lengths, lengths, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["query_lens", "prefix_lens", "starts"])
@pytest.mark.parametrize("value", [(1.5,), (2.0,), ("1",), np.array([1.5])], ids=str)
def test_lengths_of_a_step_are_integers(argument: str, value: Any) -> None:
    batch = {"query_lens": (3,), "prefix_lens": (0,), "page_table": [[1]]}
    with pytest.raises(ArgumentError, match=f"AttentionBatch: {argument} is .*; accepted: a tuple of integers"):
        fl.AttentionBatch(**{**batch, argument: value})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    params = fl.SamplingParams(np.float32(0.5), top_k=np.int64(5), seed=np.int32(3))  # type: ignore[arg-type]
    assert (params.temperature, params.top_k, params.mode) == (0.5, 5, "filtered")
    state = SamplingState(1)
    state.set(0, params)
    assert [rows.item() for rows in state.rows] == [0.5, 5, 1.0, 0.0, 3, 0]
    norm = fl.RMSNorm(np.int64(8), eps=np.float32(1e-6))  # type: ignore[arg-type]
    assert torch.equal(norm(torch.ones(2, 8)), fl.RMSNorm(8, eps=float(np.float32(1e-6)))(torch.ones(2, 8)))
    for wrong in (np.float32("nan"), np.float64("inf"), np.bool_(True), np.array([0.5])):
        with pytest.raises(ArgumentError, match=r"SamplingParams: temperature is .*; accepted: a finite number"):
            fl.SamplingParams(temperature=wrong)  # type: ignore[arg-type]


def test_sizes_of_numpy_are_sizes_and_configurations_hold_python_numbers() -> None:
    for make in (fl.Linear, fl.FP8BlockLinear, fl.Int8Linear):
        layer = make(np.int64(128), np.int32(256))  # type: ignore[arg-type]
        assert layer(torch.ones(2, 128, dtype=layer.fixed_dtype)).shape == (2, 256)
        assert "np." not in repr(layer.cfg) and layer.cfg == make(128, 256).cfg
    assert repr(fl.RMSNorm(np.int64(8)).cfg) == repr(fl.RMSNorm(8).cfg)  # type: ignore[arg-type]
    router = fl.TopKRouter(np.int64(64), np.int64(8), np.int64(2))  # type: ignore[arg-type]
    assert repr(router.cfg) == repr(fl.TopKRouter(64, 8, 2).cfg)


ALLOCATOR, POOL = fl.BumpAllocator(1024), fl.PagePool(8, 16)
CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (ALLOCATOR.alloc, (3, (2,)), "BumpAllocator: name is 3"),
    *[(ALLOCATOR.alloc, ("a", shape), "BumpAllocator: shape is ") for shape in (3, "ab", None, (1.5,), (True,))],
    *[(ALLOCATOR.alloc, ("a", (2,), dtype), "BumpAllocator: dtype is ") for dtype in ("float32", None)],
    *[(POOL.extend, ([], length, "r"), r"PagePool\.extend: length is ") for length in (1.5, "3", None, -1, True)],
    *[(POOL.extend, (pages, 33, "r"), r"PagePool\.extend: pages is ") for pages in (None, "ab", (1,))],
    *[(POOL.release, (pages,), r"PagePool\.release: pages is ") for pages in (None, 5, [[1]], [1.5])],
    *[(GroupQuant, (eps,), "GroupQuant: eps is ") for eps in ("x", None, math.nan)],
    (SamplingState(2).set, (0, "ab"), r"SamplingState\.set: params is 'ab'"),
    (SamplingState(2).set, ("a", fl.SamplingParams()), "SamplingState: row is 'a'"),
    *[(fl.SamplingParams, (1.0, k), "SamplingParams: top_k is ") for k in (2**31, 2**40, 2**63, -2)],
]


@pytest.mark.parametrize(("call", "arguments", "message"), CALLS)
def test_wrong_arguments_of_calls_are_named(call: Any, arguments: tuple[Any, ...], message: str) -> None:
    used, free = ALLOCATOR.used, POOL.free_pages
    with pytest.raises(ArgumentError, match=message):
        call(eps=arguments[0]) if call is GroupQuant else call(*arguments)
    assert (ALLOCATOR.used, POOL.free_pages) == (used, free)


def test_the_largest_top_k_draws() -> None:
    state = SamplingState(1)
    state.set(0, fl.SamplingParams(top_k=2**31 - 1, seed=0))
    assert 0 <= int(fl.Sampler(8)(torch.zeros(1, 8), state)) < 8


def test_a_cast_that_is_refused_changes_nothing() -> None:
    layer = fl.Attention(**MAKERS[fl.Attention], dtype=torch.bfloat16)
    before = {name: (value.dtype, value.data_ptr()) for name, value in layer.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"dtype is torch\.float16; accepted: torch\.bfloat16, as constructed"):
        layer.half()
    assert {name: (value.dtype, value.data_ptr()) for name, value in layer.state_dict().items()} == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: fl.AttentionState(2**70, 1, 1, 1),
            "max_batch is 1180591620717411303424; accepted: a positive integer below",
        ),
        (lambda: fl.Linear(2**63, 1), r"in_features is 9223372036854775808; accepted: a positive integer below 2\^63"),
        (
            lambda: fl.PagePool(2**40, 4),
            "num_pages is 1099511627776; accepted: at most 2147483648: page tables are int32",
        ),
        (
            lambda: fl.AttentionState(1, 1, 1, 1, device=2**70),
            "device is 1180591620717411303424; accepted: a torch device",
        ),
        (lambda: fl.CudaGraphs(2**70), "CudaGraphs: device is 1180591620717411303424"),
        (lambda: fl.Linear(1, 1, device=2**70), "Linear: device is 1180591620717411303424; accepted: a torch device"),
        (lambda: KVCacheSpec(((1, 2),), 4, torch.float32).allocate(2, -1), "KVCacheSpec.allocate: device is -1"),
        (lambda: KVCacheSpec(((1, 2),), 4, torch.float32).allocate(2, 1.5), "KVCacheSpec.allocate: device is 1.5"),
        (lambda: fl.warmup(NORM, tokens=np.array(2)), r"warmup: tokens is array\(2\); accepted: a sequence of token"),
        (lambda: fl.registry([1]), r"layer \[1\] is unknown"),
        (lambda: fl.backends({}), r"layer \{\} is unknown"),
        (lambda: fl.QuantSpec(np.arange(2)), r"QuantSpec: .* is array\(\[0, 1\]\); accepted: one of"),
        (lambda: fl.QuantSpec.from_config(torch.zeros(2)), "quantization_config is float32.*; accepted: a Mapping"),
        (lambda: fl.Sampler(4)(torch.zeros(1, 4), SamplingState(1), torch.zeros(2)), "mode is .*; accepted: one of"),
        (lambda: fl.Sampler(4)(torch.zeros(1, 4), SamplingState(1), ""), "mode is ''; accepted: one of"),
    ],
)
def test_what_compares_or_counts_like_nothing_else_is_named(call: Any, words: str) -> None:
    """Integers that overflow torch's, and arrays, whose comparison has no truth value."""
    with pytest.raises(FastlayersError, match=words):
        call()


def test_a_pair_is_two_integers_and_hashable() -> None:
    device = fl.Device("cuda", "x", [9, 0])  # type: ignore[arg-type]
    assert device.capability == (9, 0) and hash(device) == hash(fl.Device("cuda", "x", (9, 0)))
    for wrong in ((True, False), (9, 0, 0), (9.0, 0), "90"):
        with pytest.raises(ArgumentError, match=r"Device: capability is .*; accepted: two integers or None"):
            fl.Device("cuda", "x", wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="two strings"):
        check_plain("x", "tuple[str, str]", names=("a", 1))


def test_words_begin_with_the_right_article() -> None:
    for kind, words in ((fl.Axis | None, "an Axis of"), (fl.Shard, "a Shard of")):
        with pytest.raises(ArgumentError, match=f"accepted: {words} "):
            check_kind("x", kind, y=3)


@pytest.mark.parametrize("device", [1.5, "nowhere", X])
@pytest.mark.parametrize("make", [fl.AttentionState, fl.BumpAllocator, SamplingState])
def test_a_device_that_is_none_is_named(make: Callable[..., Any], device: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{make.__name__}: device is "):
        make(**MAKERS[make], device=device)


def test_flags_of_functions_are_checked() -> None:
    for name in ("fuse_projections", "cuda_graph", "strict", "dry_run"):
        with pytest.raises(ArgumentError, match=f"patch: {name} is 'no'; accepted: True or False"):
            fl.patch(torch.nn.Linear(2, 2), **{name: "no"})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="warmup: progress is 2"):
        fl.warmup(NORM, [1], progress=2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ParallelSpec: axis is 'x'"):
        fl.ParallelSpec().column("x")


def test_what_is_given_is_shown_short() -> None:
    caches = fl.kv_cache_spec(fl.Attention(**MAKERS[fl.Attention]), page_size=64).allocate(2)
    for given in (caches * 20, torch.zeros(999).tolist()):
        with pytest.raises(
            ArgumentError, match=r"^BumpAllocator: capacity_bytes is .*…; accepted: a positive integer$"
        ) as e:
            fl.BumpAllocator(given)  # type: ignore[arg-type]
        assert len(str(e.value)) < 500


def test_no_number_where_none_is_not_accepted() -> None:
    for given in (math.inf, None):
        with pytest.raises(ArgumentError, match=r"FusedMoE: scaling_factor is .*; accepted: a finite number$"):
            fl.FusedMoE(**MAKERS[fl.FusedMoE], scaling_factor=given)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "", 2.5])
def test_devices_that_this_machine_lacks_are_named(device: Any) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "Linear": lambda: fl.Linear(8, 8, device=device),
        "Attention": lambda: fl.Attention(**MAKERS[fl.Attention], device=device),
        "AttentionState": lambda: fl.AttentionState(1, 1, 1, 16, device=device),
        "BumpAllocator": lambda: fl.BumpAllocator(16, device=device),
        "KVCacheSpec.allocate": lambda: fl.kv_cache_spec(fl.Attention(**MAKERS[fl.Attention])).allocate(2, device),
    }
    for name, make in makers.items():
        words = rf"^{name}: device is '?{device}'?.*; accepted: a torch device.*, its name, or None$"
        with pytest.raises(ArgumentError, match=words):
            make()


def test_the_state_of_steps_needs_memory() -> None:
    with pytest.raises(ArgumentError, match=r"AttentionState: device is 'meta'; accepted: a device with memory"):
        fl.AttentionState(1, 1, 1, 16, device="meta")
