"""Warm-up: what runs, what is said afterwards; the hook on Triton, by a stand-in for it."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.quant.mxfp8_quant.layer import MXFP8Quant
from fastlayers.registry.spec import LayerSpec, spec_of
from fastlayers.runtime import compile_log, precompile
from fastlayers.runtime.warmup import calls_of


class Triton:
    """As much of Triton as announces a compile."""

    def __init__(self) -> None:
        self.jit_cache_hook: Any = None
        self.compiled: list[str] = []

    def launch(self, name: str) -> None:
        if name not in self.compiled:
            if self.jit_cache_hook is not None:
                self.jit_cache_hook(fn=types.SimpleNamespace(module="m", name=name), already_compiled=False)
            self.compiled.append(name)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    fake = Triton()
    monkeypatch.setattr(compile_log, "_triton_runtime", lambda: fake)
    yield fake
    compile_log.stop_watching()
    assert fake.jit_cache_hook is None


class Kernels(nn.Module):
    """Launches one kernel a token count."""

    def __init__(self, triton: Triton) -> None:
        super().__init__()
        self.triton = triton
        self.ran: list[int] = []

    def warm_up_calls(self, tokens: list[int]) -> Iterator[tuple[str, Any]]:
        for count in tokens:
            yield f"step {count}", lambda n=count: self(n)

    def forward(self, count: int) -> None:
        self.ran.append(count)
        self.triton.launch(f"kernel{count}")


def test_compiles_are_counted_then_warned_of(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    model = Kernels(triton)
    report = fl.warmup(model, tokens=[1, 8, 8, 4])
    assert model.ran == [8, 4, 1]
    assert [(label, kernels) for label, _, kernels in report.steps] == [("step 8", 1), ("step 4", 1), ("step 1", 1)]
    assert (report.kernels, report.seconds > 0) == (3, True)
    with caplog.at_level(logging.WARNING):
        model(8)
        assert caplog.records == []
        model(5)
    assert [record.message[:17] for record in caplog.records] == ["m.kernel5 is comp"]
    assert report.watch.compiled == ["m.kernel5"]
    again = fl.warmup(model, tokens=[5, 6], progress=False)
    assert (again.kernels, report.watch.compiled) == (1, ["m.kernel5"])  # what is warmed up is not warned of
    again.watch.close()
    model(7)
    assert len(caplog.records) == 1 and again.watch.compiled == []


def test_a_compile_inside_a_capture_is_an_error(triton: Triton) -> None:
    model = Kernels(triton)
    report = fl.warmup(model, tokens=[1], progress=False)
    wanted = r"graph 2: Triton kernel m\.kernel2 would be compiled inside"
    with pytest.raises(CaptureError, match=wanted), compile_log.forbidden("graph 2"):
        model(2)
    assert "kernel2" not in triton.compiled
    model(3)
    assert report.watch.compiled == ["m.kernel2", "m.kernel3"]  # the watch is back in its place


def test_caches_that_announce_nothing_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"deep_gemm/a"}
    monkeypatch.setattr(compile_log, "cached_kernels", lambda: set(found))
    watch = compile_log.CompileWatch()
    assert watch.check() == []
    found.add("deep_gemm/b")
    assert watch.check() == ["deep_gemm/b"] == watch.check()
    with compile_log.counted() as seen:
        found.add("flashinfer/c.so")
        assert seen() == ["flashinfer/c.so"]


def rotary() -> Any:
    return fl.RotaryEmbedding(16, max_position=64)


LAYERS = {
    "linear": lambda: fl.Linear(32, 16),
    "fp8_linear": lambda: fl.FP8BlockLinear(128, 128),
    "int8_linear": lambda: fl.Int8Linear(32, 16),
    "fp8_scaled_linear": lambda: fl.FP8ScaledLinear(32, 16),
    "weight_only_linear": lambda: fl.WeightOnlyLinear(128, 16),
    "rms_norm": lambda: fl.RMSNorm(32),
    "embedding": lambda: fl.VocabEmbedding(11, 8),
    "router": lambda: fl.TopKRouter(32, 4, 2),
    "fused_moe": lambda: fl.FusedMoE(32, 16, 4, 2),
    "silu_mul": lambda: fl.SiluAndMul(16),
    "bmm": lambda: fl.Bmm(2, 8, 8),
    "sampler": lambda: fl.Sampler(11),
    "gqa": lambda: fl.Attention(32, 4, 2, 16, rotary=rotary(), page_size=4),
    "mla": lambda: fl.MLAAttention(
        32,
        2,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        rotary=rotary(),
        page_size=4,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_on_each_count(name: str) -> None:
    layer = LAYERS[name]()
    assert spec_of(name).examples is not None and layer.choice.layer == name
    report = fl.warmup(layer, tokens=[5, 1], progress=False)
    assert {label.split()[-1] for label, _, _ in report.steps} == {"5", "1"}


@pytest.mark.parametrize("name", ["gqa", "mla"])
@pytest.mark.parametrize("tokens", [[5, 1], "all"])
def test_debug_mode_refuses_no_step_of_a_warm_up(name: str, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests write one page, which is refused of a step that somebody reads."""
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    assert fl.warmup(LAYERS[name](), tokens=tokens, progress=False).steps


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_layers_run_as_many_tokens_as_their_rotary_embeddings_reach(name: str) -> None:
    for module in (LAYERS[name](), nn.ModuleDict({"norm": fl.RMSNorm(8), "attention": LAYERS[name]()})):
        labels = [label for label, _, _ in fl.warmup(module, max_batch=2, progress=False).steps]
        assert {int(label.split()[-1]) for label in labels[1:]} == {64, 32, 16, 8, 4, 2, 1}, labels


def test_layers_inside_a_module_and_their_own_examples() -> None:
    module = nn.ModuleDict({"norm": fl.RMSNorm(8), "attention": LAYERS["gqa"](), "other": nn.Linear(2, 2)})
    labels = [label for label, _ in calls_of(module, [3])]
    assert labels == ["norm 3", "norm 3", "attention 3", "attention 3"]

    class Own(fl.RMSNorm):
        def example_inputs(self, num_tokens: int) -> list[tuple[torch.Tensor]]:
            return [(torch.zeros(2, num_tokens, 8),)]

    assert len(list(calls_of(Own(8), [3, 4]))) == 2


def test_bad_calls() -> None:
    with pytest.raises(ArgumentError, match="at least one token count"):
        fl.warmup(fl.RMSNorm(8), tokens=[])
    with pytest.raises(ArgumentError, match=r"tokens\[0\] is -1"):
        fl.warmup(fl.RMSNorm(8), tokens=[-1])
    with pytest.raises(ArgumentError, match="module is 3"):
        fl.warmup(3, tokens=[1])
    with pytest.raises(ArgumentError, match="a module with layers of fastlayers inside"):
        fl.warmup(nn.Linear(2, 2), tokens=[1])
    for layer in (rotary(), MXFP8Quant()):
        for module in (layer, nn.Sequential(layer)):
            with pytest.raises(ArgumentError, match=r"which does not know the .*example_inputs\(num_tokens\)"):
                fl.warmup(module, tokens=[1])
    with pytest.raises(ArgumentError, match=r"tokens is 65; .*at most 64 \(max_position"):
        fl.warmup(LAYERS["gqa"](), tokens=[65])
    tokens: Any
    for tokens in (8, None, "8", [1.5], ["8"], [True]):
        with pytest.raises(ArgumentError, match="tokens"):
            fl.warmup(fl.RMSNorm(8), tokens=tokens)


def test_whom_a_warm_up_waited_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "run", lambda jobs, advance, modules: {"triton": 31.2, "xqa": 75.54})
    report = fl.warmup(fl.RMSNorm(8), max_tokens=4, progress=False)
    assert re.fullmatch(
        r"\d+ calls side by side, the last of triton after 31.2 s, of xqa after 75.5 s", report.steps[0][0]
    )
    monkeypatch.setattr(precompile, "run", lambda jobs, advance, modules: {"triton": 31.2})
    report = fl.warmup(fl.RMSNorm(8), max_tokens=4, progress=False)
    assert re.fullmatch(r"\d+ calls side by side", report.steps[0][0])


def test_layers_inside_that_cannot_be_called_are_named(caplog: pytest.LogCaptureFixture) -> None:
    report = fl.warmup(nn.Sequential(rotary(), fl.RMSNorm(8)), tokens=[2], progress=False)
    assert [label for label, _, _ in report.steps] == ["1 2", "1 2"]
    assert report.left_out == ["0 (RotaryEmbedding) is not warmed up: it does not know the number of heads"]
    assert [record.message for record in caplog.records] == report.left_out


@pytest.mark.parametrize("format", ["none", "fp8_tensor", "fp8_block"])
def test_bmm_formats(format: str) -> None:
    assert len(fl.warmup(fl.Bmm(2, 130, 140, format=format), tokens=[3], progress=False).steps) == 2


def test_every_layer_has_examples_or_a_sentence() -> None:
    usual = LayerSpec.__dataclass_fields__["unknown"].default
    alone = {name for name in fl.layers() if spec_of(name).examples is not None}
    inside = {name for name in fl.layers() if spec_of(name).unknown != usual}
    assert alone | inside | {"moe_align"} == set(fl.layers())  # moe_align: no module of its own
    assert not alone & inside


@pytest.mark.gpu
def test_gpu_nothing_compiles_after_the_warm_up() -> None:
    x = torch.zeros(3, 1072, dtype=torch.bfloat16, device="cuda")
    norm = fl.RMSNorm(1072, device="cuda", dtype=torch.bfloat16, backend="triton")
    report = fl.warmup(norm, tokens=[3], progress=False)
    assert report.kernels >= 1
    norm(x)
    norm(x, x)
    assert report.watch.check() == []
    fl.RMSNorm(2080, device="cuda", dtype=torch.bfloat16, backend="triton")(torch.zeros_like(x).repeat(1, 2)[:, :2080])
    assert any("rms_norm" in name for name in report.watch.compiled)
    report.watch.close()
