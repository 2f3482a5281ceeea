"""Layers at any shape: cases, inputs and configurations from text."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, UnknownNameError
from fastlayers.testing.spec import spec_of
from fastlayers.tuning import shape_text
from fastlayers.tuning.bench import auto_option, chosen_options, describe_run, rows_of
from fastlayers.tuning.clock import clock_for
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import case_at, drawn_on, inputs_of, parse_shape, peak_flops, tokens_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("layer", fl.layers())
def test_every_layer_runs_at_a_token_count_that_no_case_has(layer: str) -> None:
    spec = spec_of(layer)
    cfg = next(case.cfg for case in spec.cases if case.small)
    case = case_at(layer, cfg, 11, context=37)
    inputs = inputs_of(layer, case, CPU)
    impl = fl.registry(layer).named("torch").load()(cfg)
    outputs = spec.run(impl, inputs, spec.prepare(impl, inputs))
    assert outputs and spec.cost(case).min_bytes > spec.cost(case_at(layer, cfg, 3, context=37)).min_bytes


@pytest.mark.parametrize("layer", fl.layers())
def test_shapes_survive_the_command_line(layer: str) -> None:
    for case in spec_of(layer).cases:
        assert parse_shape(layer, repr(case.cfg)) == case.cfg
        assert parse_shape(layer, shape_text(case.cfg)) == case.cfg


def test_short_names_and_defaults() -> None:
    for said, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert parse_shape("rms_norm", f"D=96,dtype={said}").dtype == dtype
    assert parse_shape("gqa", "kv_dtype=e4m3").kv_dtype == torch.float8_e4m3fn
    cfg = parse_shape("fp8_linear", "N=2112, K=7168, dtype=float16")
    assert (cfg.out_features, cfg.in_features, cfg.dtype, cfg.bias) == (2112, 7168, torch.float16, False)
    assert parse_shape("fp8_linear", "N=128,K=256,block_size=(32, 64)").block_size == (32, 64)


@pytest.mark.parametrize("text", ["Q=3", "N", "N=a", "in_features=x y"])
def test_bad_shapes_are_refused_in_words(text: str) -> None:
    with pytest.raises(ArgumentError, match="--shape"):
        parse_shape("fp8_linear", text)


def test_decode_is_swept_over_requests() -> None:
    cfg = next(case.cfg for case in spec_of("gqa").cases)
    from dataclasses import replace

    decode = replace(cfg, phase="decode")
    assert max(tokens_of("gqa", decode)) < max(tokens_of("gqa", replace(cfg, phase="extend")))
    shape = case_at("gqa", decode, 3, context=100).shape
    assert shape["query_lens"] == (1, 1, 1) and shape["prefix_lens"] == (99, 99, 99)


def test_eight_bit_layers_have_twice_the_peak() -> None:
    h200 = DESCRIBED["H200"]
    assert peak_flops("fp8_linear", parse_shape("fp8_linear", "N=128,K=128"), h200) == 2 * h200.flops
    assert peak_flops("linear", parse_shape("linear", "N=128,K=128"), h200) == h200.flops


def test_rows_have_both_floors_and_say_which_is_auto() -> None:
    cfg = parse_shape("fp8_linear", "N=128,K=256")
    bench = Bench("fp8_linear", cfg, CPU, clock_for(CPU))
    assert auto_option(bench, 4) == Option("torch") and chosen_options(bench) == [Option("torch")]
    (row,) = rows_of(bench, case_at("fp8_linear", cfg, 4), 4, rounds=3)
    assert row["auto"] and row["backend"] == "torch" and row["error"] < 5e-3
    assert row["of_memory"] == pytest.approx(row["memory_floor_us"] / row["us"], rel=0.02, abs=6e-5)  # rounded
    assert row["tflops"] == pytest.approx(2 * 4 * 128 * 256 / row["us"] / 1e6, abs=2e-3)
    assert rows_of(bench, case_at("fp8_linear", cfg, 4), 4, rounds=3, against=["deep_gemm"])[0]["backend"] == "torch"
    with pytest.raises(UnknownNameError, match="deep_gemm"):
        chosen_options(bench, ["nothing"])
    assert describe_run(CPU)["device"] == "cpu" and describe_run(CPU)["packages"]["transformers"]
    assert describe_run(CPU)["loop_ms"] > 0


def test_inputs_are_drawn_on_the_device_whatever_torch_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after transformers loaded a model: while it does, torch.linspace is another function."""
    from torch.utils import _device

    true = torch.linspace
    with monkeypatch.context() as patch:
        patch.setattr(torch, "linspace", lambda *given, **named: true(*given, **named))
        known = _device._device_constructors.__wrapped__()
    monkeypatch.setattr(_device, "_device_constructors", lambda: known)
    with torch.device("meta"):
        assert torch.linspace(0, 1, 3).device.type == "cpu"  # torch's own doing
    with drawn_on("meta"):
        assert torch.linspace(0, 1, 3).device.type == "meta"
        assert torch.randn(3, generator=torch.Generator()).device.type == "meta"
