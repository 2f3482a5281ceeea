"""The launches of real shapes, recorded: backends run on tensors without memory, with a stub in place of each launch.

What Triton would specialise on (dtypes, constants, sizes that are 1 or divide by 16) is taken from the very call, so
that what compiles here is what runs there. Shapes are those of the layers' own cases that come from real models, and of
:data:`MORE`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import torch

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.gqa import cases as gqa_cases
from fastlayers.attention.gqa import flashinfer as gqa_flashinfer
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla import cases as mla_cases
from fastlayers.attention.mla.joined_heads import join_heads
from fastlayers.attention.mla.triton import rounded_to_e4m3
from fastlayers.comm import triton_exchange, triton_push, triton_tokens
from fastlayers.linear.bmm.layer import BmmConfig
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton_bf12 import linear_bf12
from fastlayers.linear.dense.triton_wgmma import candidates as wgmma_candidates
from fastlayers.linear.fp8_block.layer import FP8LinearConfig
from fastlayers.linear.fp8_scaled.layer import FP8ScaledLinearConfig
from fastlayers.linear.int8.layer import Int8LinearConfig
from fastlayers.linear.split_rows import SplitRows
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.launch_config import candidates
from fastlayers.moe.fused_moe.packages import deep_gemm
from fastlayers.moe.fused_moe.packages.deep_gemm_gathered import DeepGemmGatheredFusedMoE
from fastlayers.moe.fused_moe.swizzle import swizzle
from fastlayers.moe.fused_moe.triton import activation, permute
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.moe.fused_moe.triton.gathered_gate_up import PLANS
from fastlayers.moe.fused_moe.triton.mxfp4 import hopper as mxfp4_hopper
from fastlayers.moe.fused_moe.triton.mxfp4 import plans as mxfp4_plans
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.moe.placement.triton import TritonSlots
from fastlayers.moe.router.triton import router_logits
from fastlayers.norm.rms_norm.coded import coded_norm
from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.norm.rms_norm.split import split_norm
from fastlayers.norm.rms_norm.triton import TritonRMSNorm
from fastlayers.patching.triton_dense import TritonDense
from fastlayers.patching.triton_turn import TritonTurn
from fastlayers.quant.bf12 import BF12Weights
from fastlayers.registry import LAYERS, registry
from fastlayers.registry.spec import Case, spec_of
from fastlayers.runtime import launch
from fastlayers.runtime.launch import Kernel
from fastlayers.sampler.triton_drafts import settle_drafts
from fastlayers.testing.compile_check import KernelBuild
from fastlayers.tuning.sweep import case_at, inputs_of

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TYPES = {
    BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.float64: "fp64", E4M3: "fp8e4nv", torch.uint8: "u8",
    torch.int8: "i8", torch.uint16: "u16", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass
class Recorder:
    """Takes the place of :meth:`Kernel._launch` and keeps each launch once, under the first call that made it."""

    label: str = ""
    builds: dict[Any, KernelBuild] = field(default_factory=dict)

    def add(self, kernel: Kernel, grid: Any, *arguments: Any, **given: Any) -> None:
        constants = {name: value for name, value in given.items() if name in kernel.arg_names}
        if "PDL" in constants:
            constants["PDL"] = True  # as on sm_90, which is compiled for
        signature, aligned = {}, []
        fixed = set(getattr(kernel.jit, "do_not_specialize", ()) or ())
        for name, value in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and name not in fixed:
                constants[name] = 1
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and name not in fixed:
                    aligned.append(name)
        options = (
            given.get("num_warps", 4),
            given.get("num_stages", 3),
            tuple(aligned),
            given.get("enable_fp_fusion", True),
            given.get("maxnreg"),
        )
        key = (kernel.__module__, kernel.__name__, *map(str, (signature, constants, options)))
        name = f"{kernel.__name__}-{self.label}"
        self.builds.setdefault(key, KernelBuild(name, kernel, signature, constants, *options))


class HostGenerator:
    """Makes generators of the host for any device: there are none of "meta", and nothing is drawn there."""

    def __new__(cls, device: object = "cpu", make: Any = torch.Generator) -> Any:
        return make()


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record every launch within; kernels are not run, nor is anything else that would read data."""
    recorder = Recorder()

    def through_triton(self: Kernel, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        recorder.add(self, grid, *arguments, **constants)

    # With a listener nothing is launched but through Triton.
    listening = mock.patch.object(launch, "_LISTENERS", ([recorder], []))
    stub = mock.patch.object(Kernel, "_through_triton", through_triton)
    with listening, stub, mock.patch.object(torch, "Generator", HostGenerator):
        yield recorder


def _at(layer: str, tokens: tuple[int, ...], *cfgs: Any) -> Iterator[Case]:
    for cfg in cfgs:
        for count in tokens:
            yield replace(case_at(layer, cfg, count), name=f"{cfg.tuning_key()},T={count}")


# Shapes of real models at token counts and in dtypes that the layers' cases lack.
GPT_OSS = FusedMoEConfig(2880, 2880, 32, 4, quant="mxfp4", activation="swiglu_oai", bias=True, interleaved=True)
GPT_OSS_TP2 = replace(GPT_OSS, intermediate_size=1440, num_experts=128)
V3_EXPERTS = FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block")
QWEN3_EXPERTS = FusedMoEConfig(2048, 768, 128, 8)


def _more(layer: str) -> Iterator[Case]:
    """Yield further cases of a layer."""
    if layer == "linear":
        for dtype in (BF16, FP16, FP32):
            yield from _at(layer, (1, 64), LinearConfig(7168, 2112, True, dtype))
        yield from _at(layer, (32, 4096), LinearConfig(4096, 6144), LinearConfig(7168, 2112, dtype=FP32))
        yield from _at(layer, (2, 4096), LinearConfig(4096, 24576), LinearConfig(1536, 24576, dtype=FP16))
    elif layer == "fp8_linear":
        sizes = ((7168, 2112), (1536, 24576), (16384, 7168), (7168, 36864))
        yield from _at(layer, (1, 2, 8, 64, 4096), *(FP8LinearConfig(k, n) for k, n in sizes))
        yield from _at(
            layer, (16, 4096), FP8LinearConfig(7168, 2112, dtype=FP32), FP8LinearConfig(7168, 576, dtype=FP32)
        )
    elif layer == "int8_linear":
        yield from _at(layer, (1, 32, 64, 4096), Int8LinearConfig(4096, 6144, True), Int8LinearConfig(7168, 36864))
    elif layer == "fp8_scaled_linear":
        yield from _at(layer, (1, 32, 128, 4096), FP8ScaledLinearConfig(4096, 6144, True))
        yield from _at(layer, (4096,), FP8ScaledLinearConfig(4096, 6144, dtype=FP32))
    elif layer == "bmm":
        for format in ("none", "fp8_tensor", "fp8_block"):
            for k, n in ((128, 512), (512, 128)):
                yield from _at(layer, (32, 64, 4096), BmmConfig(128, k, n, format))
        yield from _at(
            layer, (4096,), BmmConfig(128, 128, 512, dtype=FP32), BmmConfig(128, 512, 128, "fp8_block", FP32)
        )
    elif layer == "mla":
        usual = spec_of(layer).case("deepseek_tp8_decode")
        many, prefill = spec_of(layer).case("deepseek_many"), spec_of(layer).case("deepseek_prefill")
        yield Case("fp16_e4m3", replace(usual.cfg, dtype=FP16, kv_dtype=E4M3), usual.shape)
        yield Case("fp16_many", replace(usual.cfg, dtype=FP16, kv_dtype=FP16), many.shape)
        yield Case("fp16_prefill", replace(prefill.cfg, dtype=FP16, kv_dtype=FP16), prefill.shape)
    elif layer == "gqa":
        usual, few = spec_of(layer).case("qwen3_8b_decode"), spec_of(layer).case("qwen3_30b_prefill")
        for more in ({"kv_dtype": E4M3}, {"dtype": FP32, "kv_dtype": FP32}, {"page_size": 16}, {"page_size": 1}):
            yield Case(str(more), replace(usual.cfg, **more), usual.shape)
        wide = replace(usual.cfg, num_heads=16, num_kv_heads=2, head_dim=256)
        yield Case("qwen3_next", wide, usual.shape)
        yield Case("qwen3_next_fp32", replace(wide, dtype=FP32, kv_dtype=FP32), usual.shape)
        for more in ({}, {"dtype": FP32, "kv_dtype": FP32}):
            prefill = replace(wide, phase=few.cfg.phase, **more)
            yield Case(
                f"qwen3_next_prefill{more}", prefill, {**usual.shape, "query_lens": (2048,), "prefix_lens": (0,)}
            )
        windows = spec_of(layer).case("gpt_oss_prefill")
        dense = spec_of(layer).case("qwen3_8b_prefill").cfg
        drafts = {**few.shape, "query_lens": (4, 3), "prefix_lens": (4000, 90)}
        for name, cfg in (("qwen3_30b", few.cfg), ("qwen3_8b", dense), ("gpt_oss", windows.cfg),
                          ("gpt_oss_full", replace(windows.cfg, window=None)), ("e4m3", replace(dense, kv_dtype=E4M3)),
                          ("fp32", replace(dense, dtype=FP32, kv_dtype=FP32))):  # fmt: skip
            yield Case(f"few_tokens_{name}", cfg, drafts)
        # Too many rows for that kernel: the tiles' own, with the keys' parts.
        yield Case("few_tokens_wide", replace(few.cfg, num_heads=64, num_kv_heads=4), drafts)
    elif layer == "fused_moe":
        experts = (V3_EXPERTS, replace(V3_EXPERTS, quant="int8"), QWEN3_EXPERTS)
        oai = replace(GPT_OSS, quant="none")
        yield from _at(layer, (1, 16, 64, 512, 1024, 4096), *experts, oai, GPT_OSS)
        yield from _at(layer, (1,), replace(V3_EXPERTS, intermediate_size=2048, num_shared=0))
        yield from _at(layer, (64, 4096), GPT_OSS_TP2)
        yield from _at(layer, (64,), replace(GPT_OSS, dtype=FP16), replace(GPT_OSS, dtype=FP32))
        yield from _at(layer, (1024,), replace(GPT_OSS, dtype=FP32))
        packed = replace(QWEN3_EXPERTS, quant="w4a16", group_size=128)
        yield from _at(layer, (512, 1024, 4096), packed)
        yield from _at(layer, (1, 64, 4096), replace(packed, group_size=32, zero_point=True))
        yield from _at(layer, (16, 4096), replace(QWEN3_EXPERTS, quant="fp8_w8a16", dtype=FP16))
        yield from _at(layer, (1, 16), replace(packed, dtype=FP32), replace(QWEN3_EXPERTS, quant="w8a16", bias=True))


# Layers whose kernels compile in no time are recorded at every case; these at those of real sizes.
LARGE = ("linear", "fp8_linear", "int8_linear", "fp8_scaled_linear", "bmm", "fused_moe", "gqa", "mla", "sampler")


def cases(layer: str) -> Iterator[Case]:
    """Yield the cases that a layer's Triton backend is recorded at."""
    yield from (case for case in spec_of(layer).cases if not (case.small and layer in LARGE))
    yield from _more(layer)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gqa_inputs(case: Case) -> dict[str, Any]:
    """Return a step whose lengths are numbers, and whose queries and cache have no memory."""
    cfg, shape = case.cfg, case.shape
    count, rows = len(shape["query_lens"]), shape["bucket"] or sum(shape["query_lens"])
    width = -(-max(map(sum, zip(shape["prefix_lens"], shape["query_lens"], strict=True))) // cfg.page_size)
    cache = _empty(count * width + 1, cfg.page_size, cfg.num_kv_heads, cfg.head_dim, dtype=cfg.kv_dtype)
    return {
        "q": _empty(rows, cfg.num_heads, cfg.head_dim, dtype=cfg.dtype), "k_cache": cache, "v_cache": cache,
        "sinks": _empty(cfg.num_heads, dtype=FP32) if cfg.sinks else None,
        "query_lens": torch.tensor(shape["query_lens"]), "prefix_lens": torch.tensor(shape["prefix_lens"]),
        "starts": torch.tensor(shape["starts"] or (0,) * count),
        "page_table": torch.arange(1, count * width + 1).view(count, width), "bucket": shape["bucket"], "lse": cfg.lse,
    }  # fmt: skip


def _mla_inputs(case: Case) -> dict[str, Any]:
    """Return a step of decode, as :func:`_gqa_inputs`; of prefill, the cases' own."""
    cfg, shape = case.cfg, case.shape
    if shape["mode"] == "prefill":
        return inputs_of("mla", case, "meta")
    count, width = len(shape["query_lens"]), -(-max(shape["seq_lens"]) // cfg.page_size)
    lengths = zip(shape["query_lens"], shape["seq_lens"], shape["starts"], strict=True)
    rows = shape["bucket"] or sum(shape["query_lens"])
    return {
        "case": case, "q": _empty(rows, cfg.num_heads, cfg.latent_width, dtype=cfg.dtype),
        "cache": _empty(count * width + 3, cfg.page_size, cfg.latent_width, dtype=cfg.kv_dtype),
        "lengths": torch.tensor([(query, total - query, start) for query, total, start in lengths]),
        "pages": torch.arange(1, count * width + 1).view(count, width),
    }  # fmt: skip


def _router_inputs(case: Case) -> dict[str, Any]:
    return inputs_of("router", case, "cpu")  # it looks at its numbers, which are few


INPUTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "gqa": _gqa_inputs, "mla": _mla_inputs, "router": _router_inputs
}  # fmt: skip


def _host_state(batch: int, tokens: int, pages: int, page_size: int, device: object = None) -> AttentionState:
    """Plan steps on the host, wherever their queries are."""
    return AttentionState(batch, tokens, pages, page_size, torch.device("cpu"))


def _run(layer: str, impl: Any, case: Case) -> None:
    """Call a backend with a case, on tensors without memory."""
    spec, make = spec_of(layer), INPUTS.get(layer, lambda case: inputs_of(layer, case, "meta"))
    inputs = make(case)
    with (
        mock.patch.multiple(gqa_cases, AttentionState=_host_state),
        mock.patch.object(mla_cases, "AttentionState", _host_state),
    ):
        spec.timed(impl, inputs, spec.prepare(impl, inputs))


class Swizzled(mxfp4_hopper.TritonSwizzledFusedMoE):
    """The experts of a Hopper GPU; their scales are not looked at."""

    def pack(self, weights: MoEWeights) -> Any:
        return swizzle(weights)


def hopper_builds(plans: Iterable[mxfp4_plans.HopperLaunchConfig], *cfgs: FusedMoEConfig) -> list[KernelBuild]:
    """Return the kernels of MXFP4 experts on a Hopper GPU as these plans launch them, both products and more."""
    with recording() as recorder:
        for cfg in cfgs:
            for plan in plans:
                recorder.label = f"{cfg.intermediate_size}-{'_'.join(map(str, plan.numbers()))}"
                (case,) = _at("fused_moe", (4,), cfg)
                _run("fused_moe", Swizzled(cfg, plan.config()), case)
    return list(recorder.builds.values())


def _product(a: torch.Tensor, scale: Any, weight: torch.Tensor, more: Any, rows: Any, *numbers: int) -> torch.Tensor:
    return _empty(rows.total, weight.shape[1], dtype=BF16)


def _rows(recorder: Recorder) -> None:
    """Record what stands around another package's grouped GEMMs: permute, activate, combine."""
    with mock.patch.object(deep_gemm, "grouped_product", _product):
        for masked, backend in enumerate((deep_gemm.DeepGemmFusedMoE, deep_gemm.DeepGemmMaskedFusedMoE)):
            for cfg in (V3_EXPERTS, replace(GPT_OSS, quant="none"))[: 2 - masked]:
                for case in _at("fused_moe", (4, 128, 4096), cfg):
                    recorder.label = f"fused_moe-{backend.__name__}-{case.name}"
                    _run("fused_moe", backend(cfg), case)
        for case in _at("fused_moe", (128, 4096), V3_EXPERTS, replace(QWEN3_EXPERTS, quant="fp8_block")):
            for plan in PLANS:
                recorder.label = f"fused_moe-DeepGemmGatheredFusedMoE-{'_'.join(map(str, plan))}-{case.name}"
                _run("fused_moe", DeepGemmGatheredFusedMoE(case.cfg, plan._asdict()), case)
    packed = replace(QWEN3_EXPERTS, quant="w4a16", group_size=128, zero_point=True)
    for case in _at("fused_moe", (1,), replace(V3_EXPERTS, dtype=BF16), packed):
        vectors = next(config for config in candidates(case.cfg, 1) if config["m"] == 0)
        recorder.label = f"fused_moe-vectors-{case.name}"  # which no rule takes, but tables do
        _run("fused_moe", TritonFusedMoE(case.cfg, vectors), case)
    ids, rows = _empty(128, 8, dtype=torch.int32), _empty(128, 7168, dtype=BF16)
    recorder.label = "fused_moe-rows"
    for layout in (permute.ROW_SCALES, permute.COLUMN_SCALES):
        permute.scatter(
            rows, permute.place(ids, 256, 1, tokens_of_rows=True, sizes=(7168, 256)), "fp8_block", False, layout
        )
    # A prompt's activation: of experts whose rows follow one another, and of a model's with other sizes.
    many = _empty(4096, 8, dtype=torch.int32)
    for cfg in (V3_EXPERTS, replace(QWEN3_EXPERTS, quant="fp8_block"), QWEN3_EXPERTS):
        for align, layout in ((1, permute.ROW_SCALES), (128, permute.COLUMN_SCALES)):
            placed = permute.place(many, cfg.num_experts, cfg.num_shared, align=align)
            halves = _empty(placed.total, 2 * cfg.intermediate_size, dtype=BF16)
            activation.activate(halves, many, None, placed, cfg, layout)
    recorder.label = "expert_placement"
    tables = [_empty(*shape, dtype=torch.int32) for shape in ((256, 9), (256,), (256,))]
    TritonSlots(None)(ids, _empty(128, dtype=torch.int64), *tables)
    recorder.label = "drafts"
    known, largest, drawn = _empty(4, 16, dtype=torch.int64), _empty(16, dtype=BF16), _empty(16, dtype=torch.int64)
    settle_drafts.function(known, drawn, largest, drawn, _empty(4, 66, dtype=torch.int64), 8, -2, -2)
    for dtype, (stride, hidden) in product(
        (BF16, FP16, FP32), ((7168, 7168), (2112, 1536), (4096, 4096), (2048, 2048))
    ):
        recorder.label = f"rms_norm-codes-{hidden}-{TYPES[dtype]}"
        rows, weight = _empty(64, stride, dtype=dtype)[:, :hidden], _empty(hidden, dtype=dtype)
        for residual in (None, _empty(64, hidden, dtype=dtype)):
            coded_norm.function(rows, weight, residual, 1e-6, 0, "col_tma4")
        recorder.label = f"rms_norm-splits-{hidden}-{TYPES[dtype]}"
        norm = TritonRMSNorm(cfg := RMSNormConfig(hidden, dtype=dtype))
        for splits, bias in ((2, None), (4, weight), (8, None)):
            parts = SplitRows(_empty(splits, 64, hidden, dtype=FP32), bias, dtype, _added, weight)
            split_norm(cfg, norm, parts, weight, _empty(64, hidden, dtype=dtype))


def _added(splits: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a norm adds them")


def _bf12_weights(rows: int, k: int, outliers: int) -> BF12Weights:
    """Return weights without memory: a row in some thousand of real ones has several outliers."""
    words, columns = (_empty(rows, width, dtype=torch.int32) for width in (3 * k // 8, outliers))
    return BF12Weights(words, _empty(rows, dtype=FP32), columns, _empty(rows, outliers, dtype=BF16))


def _bf12(recorder: Recorder) -> None:
    """Record what one token launches with weights of 12 bits: every run, each plan, with few and with most outliers."""
    for n, k, outliers in (
        (6144, 4096, 4), (4096, 12288, 8), (5120, 2880, 4), (4096, 4096, 64), (4096, 12288, 64), (2112, 7168, 16),
        (4096, 1152, 1),
    ):  # fmt: skip
        for bias in (None, _empty(n, dtype=BF16)):
            for out_dtype in (BF16, FP32):
                recorder.label = f"linear-bf12-{n}x{k}-{outliers}{'' if bias is None else '-bias'}-{TYPES[out_dtype]}"
                linear_bf12(_empty(1, k, dtype=BF16), _bf12_weights(n, k, outliers), bias, out_dtype)


def _wgmma(recorder: Recorder) -> None:
    """Record what few rows launch where their products are by ``wgmma``: all plans, whole turns of the ring and not."""
    for n, k, rows, dtype, out_dtype in (
        (6144, 4096, 32, BF16, BF16), (4096, 12288, 8, BF16, BF16), (5120, 2880, 33, BF16, BF16),
        (151936, 2048, 16, BF16, FP32), (4096, 4096, 64, FP16, FP16), (200, 512, 2, BF16, BF16),
    ):  # fmt: skip
        cfg = LinearConfig(k, n, False, dtype, out_dtype)
        for plan in wgmma_candidates(cfg, rows):
            for bias in (None, _empty(n, dtype=dtype)):
                recorder.label = f"linear-wgmma-{n}x{k}-{rows}-{TYPES[out_dtype]}{'' if bias is None else '-bias'}"
                registry("linear").named("wgmma").load()(cfg, plan)(
                    _empty(rows, k, dtype=dtype), _empty(n, k, dtype=dtype), bias
                )  # fmt: skip


def _attention(recorder: Recorder) -> None:
    """Record captured extends, and queries that a package takes in e4m3."""
    for name, bucket in (("qwen3_8b_prefill", ExtendBucket(2048, 8)), ("gpt_oss_prefill", ExtendBucket(512, 4))):
        cfg = replace(spec_of("gqa").case(name).cfg, captured=True)
        state = _host_state(8, 2048, 64, cfg.page_size)
        meta = state.plan(AttentionBatch((7, 9), (0, 3), [[1], [2]]), bucket=bucket)
        cache = _empty(64, cfg.page_size, cfg.num_kv_heads, cfg.head_dim, dtype=cfg.kv_dtype)
        sinks = _empty(cfg.num_heads, dtype=FP32) if cfg.sinks else None
        recorder.label = f"gqa-{name}-{bucket.tokens}x{bucket.requests}"
        registry("gqa").named("triton").load()(cfg)(
            _empty(bucket.tokens, cfg.num_heads, cfg.head_dim, dtype=cfg.dtype), cache, cache, meta, sinks
        )
    # Trees of drafts, one request's and eight's: up to 33 tokens each.
    tree, latents = ExtendBucket(64, 1, 33, True), spec_of("mla")
    for name in ("qwen3_8b_prefill", "qwen3_8b_fp8", "gpt_oss_prefill"):
        cfg = replace(spec_of("gqa").case(name).cfg, captured=True, tree=True)
        cache = _empty(64, cfg.page_size, cfg.num_kv_heads, cfg.head_dim, dtype=cfg.kv_dtype)
        for bucket in (tree, replace(tree, tokens=256, requests=8)):
            meta = _host_state(8, 2048, 64, cfg.page_size).plan(AttentionBatch((), (), []), bucket=bucket)
            recorder.label = f"gqa-{name}-tree-{bucket.requests}"
            registry("gqa").named("triton").load()(cfg)(
                _empty(bucket.tokens, cfg.num_heads, cfg.head_dim, dtype=cfg.dtype), cache, cache, meta,
                _empty(cfg.num_heads, dtype=FP32) if cfg.sinks else None,
            )  # fmt: skip
    for name in ("deepseek_tp8_decode", "deepseek_page1", "deepseek_e4m3"):
        cfg = replace(latents.case(name).cfg, phase="ragged", captured=True, tree=True)
        cache = _empty(64, cfg.page_size, cfg.latent_width, dtype=cfg.kv_dtype)
        for bucket in (tree, replace(tree, tokens=256, requests=8)):
            meta = _host_state(8, 2048, 64, cfg.page_size).plan(AttentionBatch((), (), []), bucket=bucket)
            recorder.label = f"mla-{name}-tree-{bucket.tokens}"
            q = _empty(bucket.tokens, cfg.num_heads, cfg.latent_width, dtype=cfg.dtype)
            registry("mla").named("triton").load()(cfg).decode(q, cache, meta)
    # The kernel in Gluon: cut by length, evenly, and alone; pages of one token, and most requests.
    for name, heads, page, lengths in (
        ("deepseek_tp8_e4m3", 16, 64, (4096,) * 128), ("deepseek_e4m3", 128, 64, (4096,) * 64),
        ("deepseek_e4m3", 128, 1, (4096,)), ("deepseek_e4m3", 16, 64, (100,)), ("deepseek_e4m3", 100, 64, (60,) * 512),
        ("deepseek_tp8_e4m3", 32, 16, (4096,) * 1000),
    ):  # fmt: skip
        for dtype in (BF16, FP16):
            cfg = replace(latents.case(name).cfg, num_heads=heads, page_size=page, dtype=dtype)
            recorder.label = f"mla-{name}-heads-{heads}-{page}-{len(lengths)}-{TYPES[dtype]}"
            pages = [[1] * -(-length // page) for length in lengths]
            batch = AttentionBatch((1,) * len(lengths), tuple(length - 1 for length in lengths), pages)
            meta = _host_state(1024, 1024, 4096 // page, page).plan(batch)
            registry("mla").named("gluon").load()(cfg).decode(
                _empty(len(lengths), heads, cfg.latent_width, dtype=dtype),
                _empty(64, page, cfg.latent_width, dtype=cfg.kv_dtype), meta,
            )  # fmt: skip
    # Heads as columns: cut by length, evenly, and alone; few heads, larger pages.
    for name, heads, page, lengths, dtype in (
        ("deepseek_tp8_decode", 16, 64, (4096,) * 128, BF16), ("deepseek_tp8_decode", 16, 64, (4096,), BF16),
        ("deepseek_tp8_decode", 8, 128, (100,), FP16),
    ):  # fmt: skip
        cfg = replace(latents.case(name).cfg, num_heads=heads, page_size=page, dtype=dtype, kv_dtype=dtype)
        recorder.label = f"mla-{name}-columns-{heads}-{page}-{len(lengths)}"
        pages = [[1] * -(-length // page) for length in lengths]
        batch = AttentionBatch((1,) * len(lengths), tuple(length - 1 for length in lengths), pages)
        meta = _host_state(1024, 1024, 4096 // page, page).plan(batch)
        for twin in (False, True):
            columns = registry("mla").named("wgmma").load()(cfg)
            columns.twin = twin
            columns.decode(
                _empty(len(lengths), heads, cfg.latent_width, dtype=dtype),
                _empty(64, page, cfg.latent_width, dtype=dtype), meta,
            )  # fmt: skip
    recorder.label = "mla-heads"
    for heads, dtype in product((16, 128), (BF16, FP32)):
        turned, joined = (_empty(64, heads, width, dtype=dtype) for width in (64, 192))
        join_heads.function(_empty(64, heads, 256, dtype=dtype)[..., :128], turned[:, :1].expand(-1, heads, -1), joined)
        join_heads.function(None, turned, joined)
    recorder.label = "mla-queries"
    rounded_to_e4m3(_empty(64, 128, 576, dtype=BF16))


def _patched(recorder: Recorder) -> None:
    """Record the norms and the rotation of patched attention: Qwen3, Llama, GPT-OSS (tables of half the width)."""
    for name, dtype, (heads, keys, dim, table), norm in (
        ("qwen3_8b", BF16, (32, 8, 128, 128), True), ("llama", FP16, (32, 8, 128, 128), False),
        ("qwen3_fp32", FP32, (16, 8, 128, 128), True), ("gpt_oss", BF16, (64, 8, 64, 32), False),
    ):  # fmt: skip
        for tokens in (1, 64):
            recorder.label = f"patched-{name},T={tokens}"
            position = _empty(1, tokens, table, dtype=dtype), _empty(1, tokens, table, dtype=dtype)
            norms = (_empty(dim, dtype=dtype), _empty(dim, dtype=dtype)) if norm else ()
            x = _empty(tokens, (heads + 2 * keys) * dim, dtype=dtype)
            TritonTurn()(x, position, norms, (heads, keys), dim, 1e-6)
    for heads, keys, dim, masked in ((64, 8, 64, True), (32, 4, 128, False), (32, 8, 256, True)):
        for dtype in (BF16, FP32):
            recorder.label = f"dense-{heads}x{dim}-{dtype}"
            q, k = _empty(2, heads, 1, dim, dtype=dtype), _empty(2, keys, 96, dim, dtype=dtype)
            mask = _empty(2, 1, 1, 96, dtype=torch.bool if dim == 256 else dtype) if masked else None
            TritonDense()(q, k, k, mask, _empty(heads, dtype=dtype) if dim == 64 else None, 0.1)


def _ranks(recorder: Recorder) -> None:
    """Record the kernels between ranks: sums, and exchanges of rows, with and without the norm behind them."""
    table, words = _empty(8, dtype=torch.int64), _empty(64, dtype=torch.int32)
    for hidden, ranks, rows, plain in (
        (7168, 2, 1, False), (7168, 2, 1024, False), (4096, 2, 1, False), (2048, 2, 1, False), (7168, 4, 1, False),
        (7168, 8, 1, False), (7168, 2, 1, True), (7168, 2, 64, "fp8"), (7168, 2, 1024, "fp8"),
    ):  # fmt: skip
        fp8, plain = plain == "fp8", plain is True
        recorder.label = f"push_sum-{hidden}x{ranks}-{rows}{'-plain' * plain}{'-fp8' * fp8}"
        x, rest = _empty(rows, hidden, dtype=BF16), _empty(hidden, dtype=BF16)
        inbox = _empty(2 * ranks * 1024 * hidden, dtype=torch.uint16)
        norm = (None, None) if plain else (x, rest)
        triton_push._push_sum.function(
            x, *norm, table, inbox, words, words, 1e-6, triton_push.NO_NORM if plain else 0, 3, ranks, 2**33, 0,
            triton_push.warps_of(hidden), triton_push.PROGRAMS, "col_tma4" if fp8 else "",
        )  # fmt: skip
    for ranks, scatter, gather, quant, normed in (
        (2, True, False, 0, False), (2, False, True, 0, False), (2, True, True, 0, True), (8, True, True, 0, True),
        (2, False, True, 1, False), (8, False, True, 1, False), (2, True, True, 1, True),
        *((ranks, False, True, quant, True) for ranks in (2, 4, 8) for quant in (0, 1, 2)), (2, False, True, 2, False),
        (8, False, True, 2, False),
    ):  # fmt: skip
        name = f"{'scatter' * scatter}{'norm-' * (normed and not scatter)}{'gather' * gather}"
        name += ("", "-fp8", "-fp8-columns")[quant]
        recorder.label = f"exchange-{ranks}-{name}"
        x, weight = _empty(64, 7168, dtype=BF16), _empty(7168, dtype=BF16)
        y = _empty(64, 56, dtype=torch.float32) if quant else x
        triton_exchange._exchange_rows.function(
            x, x if normed else None, weight if normed else None, y, x, table, x, table, table, words, words, words,
            1e-6, 30, 1023, 3, ranks, 2**33, scatter, gather, 0 if normed else triton_push.NO_NORM, 0,
            triton_exchange.CHUNK, (quant > 0) * 2**20, *((1, 64) if quant == 2 else (56, 1)),
        )  # fmt: skip
    for ranks in (2, 8):
        recorder.label = f"tokens-{ranks}"
        x, ids = _empty(64, 7168, dtype=BF16), _empty(64, 8, dtype=torch.int32)
        weights = _empty(64, 8, dtype=torch.float32)
        triton_tokens._dispatch.function(
            x, ids, weights, table, table, table, table, words, words, words, 32, 3, ranks, 2**33, 0
        )
        triton_tokens._combine.function(
            x, ids, ids, x, table, x, table, words, words, words, 64, 32, 3, ranks, 2**33, 0
        )


def record(recorder: Recorder, layer: str) -> None:
    """Record what a layer's Triton backend launches."""
    backend: Any = registry(layer).named("triton").load()
    for case in cases(layer):
        recorder.label = f"{layer}-{case.name}"
        _run(layer, backend(case.cfg), case)


@cache
def builds() -> list[KernelBuild]:
    """Return each launch that a layer's Triton backend makes at real shapes, once."""
    with recording() as recorder:
        for layer in LAYERS:
            record(recorder, layer)
        # What the tuner may choose, of the kernels with the most freedom.
        linear: Any = registry("linear").named("triton").load()
        for case in _at("linear", (1, 4, 32, 256), LinearConfig(2880, 5120, True)):
            for number, config in enumerate(linear.candidates(case.cfg, case.shape["num_tokens"])):
                recorder.label = f"linear-{case.name}-{number}"
                _run("linear", linear(case.cfg, config), case)
        for experts, hidden, tokens in ((128, 2048, 1), (32, 2880, 4), (256, 7168, 1), (256, 7168, 4)):
            recorder.label = f"router-{experts}x{hidden}-{tokens}"
            x, weight = (_empty(count, hidden, dtype=BF16) for count in (tokens, experts))
            router_logits(x, weight, _empty(experts, dtype=BF16), False)
        _rows(recorder)
        _bf12(recorder)
        _wgmma(recorder)
        _attention(recorder)
        _ranks(recorder)
        _patched(recorder)
        _packages(recorder)
    # The other experts' columns are no whole turns: plans with wgmma run as their twins there.
    plans = [*(mxfp4_plans.plan_for(tokens, 2880, 2880) for tokens in (1, 16, 64, 128, 256)), *mxfp4_plans.HELD]
    plans.append(mxfp4_plans.plan_for(1, mxfp4_plans.MAX_HELD + 1, 2880))
    plans += [plan for plan in mxfp4_plans.plans(128, 2880, 2880) if plan.wgmma and plan.w1 in mxfp4_plans.REGISTERS]
    hopper = hopper_builds(plans, GPT_OSS, GPT_OSS_TP2)
    return [*recorder.builds.values(), *hopper]


def _packages(recorder: Any) -> None:
    """Launch what goes around other packages' kernels."""
    numbers = _empty(4, 40, dtype=torch.int32)
    recorder.label = "flashinfer-pack"
    gqa_flashinfer._pack_kernel[(4, 1)](
        numbers, _empty(5, dtype=torch.int32), _empty(160, dtype=torch.int32), 40, BLOCK=256, num_warps=4
    )
    for heads, width, sinks in ((64, 64, True), (32, 128, False)):
        recorder.label = f"flashinfer-finish-{heads}x{width}"
        o, lse = _empty(16, heads, width, dtype=BF16), _empty(16, heads, dtype=FP32)
        gqa_flashinfer.finish(o, lse, _empty(heads, dtype=FP32) if sinks else None)


def kernels() -> set[tuple[str, str]]:
    """Return every kernel that the library launches, as module and name."""
    found = set()
    for module in pkgutil.walk_packages(fl.__path__, "fastlayers."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, Kernel):
                found.add((each.__module__, each.__name__))
    return found


def launched_without_kernel(sources: Iterable[str]) -> set[str]:
    """Return functions of ``triton.jit`` that sources launch by themselves: what is no ``Kernel`` is not recorded."""
    jitted, launched = set[str](), set[str]()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.FunctionDef):
            how = [ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list]
            jitted |= {node.name} if "jit" in how else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            launched.add(ast.unparse(node.func.value).rpartition(".")[2])
    return jitted & launched
