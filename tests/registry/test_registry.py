"""The registry: ranking, refusal in words, names, ladders, environment, plug-ins."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import logging
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.attention.gqa.config import GQA
from fastlayers.device import DESCRIBED, Device, as_device
from fastlayers.errors import ArgumentError, EnvironmentVariableError, FastlayersError, NoBackendError, UnknownNameError
from fastlayers.norm.rms_norm.layer import RMS_NORM, RMSNormConfig
from fastlayers.registry import LAYERS, Backend, Registry, registry, torch_backend
from fastlayers.testing.spec import spec_of
from fastlayers.tuning.ladder import Rung

plugins_module = importlib.import_module("fastlayers.registry.plugins")


class Echo:
    """A backend that returns its own configuration."""

    def __init__(self, cfg: object) -> None:
        self.cfg = cfg

    def __call__(self) -> object:
        return self.cfg


def refuses(cfg: object, device: Device) -> str:
    return f"needs sm_100, this is {device.sm}"


def toy(*extra: Backend) -> Registry:
    return Registry("toy", [*extra, torch_backend("unused:unused")])


H200, CPU = DESCRIBED["H200"], as_device("cpu")


def test_best_ranked_backend_that_accepts_is_chosen_and_losers_keep_their_reasons() -> None:
    table = toy(Backend("fast", Echo, refuse=refuses), Backend("ours", Echo))
    choice = table.choose("cfg", H200)
    assert choice.name == "ours"
    assert choice.refused == {"fast": "needs sm_100, this is sm_90"}
    assert choice.build().pick(5)() == "cfg"


def test_named_backend_that_cannot_run_raises_with_its_reason() -> None:
    table = toy(Backend("fast", Echo, refuse=refuses), Backend("ours", Echo))
    with pytest.raises(NoBackendError, match="needs sm_100, this is sm_90"):
        table.choose("cfg", H200, "fast")


def test_auto_never_takes_the_reference() -> None:
    for layer in LAYERS:
        assert "reference" in [backend.name for backend in registry(layer).ranked]
        reference = registry(layer).named("reference")
        assert reference.auto_on == () and reference.last_resort_on == ()


def test_torch_is_the_last_resort_on_cuda_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    table = toy(Backend("fast", Echo, refuse=refuses))
    with caplog.at_level(logging.WARNING):
        first, second = table.choose("cfg", H200), table.choose("cfg", H200)
    assert first.name == second.name == "torch"
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert "needs sm_100" in caplog.records[0].message


def test_nothing_accepts_lists_every_reason() -> None:
    table = Registry("toy", [Backend("a", Echo, refuse=refuses), torch_backend("x:y", lambda c, d: "odd shape")])
    with pytest.raises(NoBackendError) as caught:
        table.choose("cfg", H200)
    assert "a: needs sm_100" in str(caught.value) and "torch: odd shape" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).refused == caught.value.refused


def test_missing_package_is_a_reason() -> None:
    table = toy(Backend("absent", Echo, needs=("no_such_package_anywhere:f",)))
    with pytest.raises(NoBackendError, match="no_such_package_anywhere is not installed"):
        table.choose("cfg", CPU, "absent")


def test_function_missing_from_a_package_is_a_reason() -> None:
    table = toy(Backend("old", Echo, needs=("safetensors:no_such_function",), auto_on=("cpu",)))
    choice = table.choose("cfg", CPU)
    assert choice.name == "torch" and "has no no_such_function" in choice.refused["old"]


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="known: triton, sgl_kernel, flashinfer, torch, reference"):
        fl.RMSNorm(8, backend="tritn")
    with pytest.raises(UnknownNameError, match="rms_norm"):
        registry("rmsnorm")
    with pytest.raises(UnknownNameError, match="H200"):
        fl.backends("rms_norm", device="H2000")


def test_duplicate_names_are_rejected_and_nothing_changes() -> None:
    table = toy(Backend("ours", Echo))
    with pytest.raises(ArgumentError, match="ours"):
        table.add(Backend("ours", Echo))
    assert [b.name for b in table.ranked] == ["ours", "torch"]
    table.add(Backend("new", Echo), before="torch")
    assert [b.name for b in table.ranked] == ["ours", "new", "torch"]


def test_ladder_bisects_on_tokens() -> None:
    table = toy(Backend("small", Echo), Backend("large", Echo))
    ladder = table.choose("cfg", H200, "small:64|large").build()
    assert [ladder.pick(n) is ladder.impls[0] for n in (0, 1, 64, 65, 9999)] == [True, True, True, False, False]


@pytest.mark.parametrize(
    "want", ["small:64", "small|large", "small:64|large:8", "small:9|large:9|small", "small:x|large"]
)
def test_malformed_ladders_raise(want: str) -> None:
    table = toy(Backend("small", Echo), Backend("large", Echo))
    with pytest.raises((ArgumentError, UnknownNameError)):
        table.choose("cfg", H200, want)


def test_rungs_of_one_backend_and_configuration_share_what_is_built() -> None:
    wide = (("BLOCK_M", 64),)
    backend = Backend("any", lambda cfg, config=None: [config])
    limits = ((1, ()), (4, wide), (16, ()), (64, wide), (None, ()))
    rungs = tuple(Rung(limit, backend, None, config) for limit, config in limits)
    impls = replace(RMS_NORM.choose(RMSNormConfig(8), "cpu", "torch"), rungs=rungs).build().impls
    assert [impl is impls[0] for impl in impls] == [True, False, True, False, True]
    assert impls[1] is impls[3] and impls[0] == [None] and impls[1] == [dict(wide)]


def test_ladder_never_mixes_weight_layouts() -> None:
    table = toy(Backend("small", Echo, weight_layout="swizzled"), Backend("large", Echo))
    with pytest.raises(ArgumentError, match="one weight layout"):
        table.choose("cfg", H200, "small:64|large")


def test_environment_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.BACKEND, "rms_norm=reference")
    assert fl.RMSNorm(8).choice.name == "reference"
    assert "FASTLAYERS_BACKEND" in fl.RMSNorm(8).choice.evidence
    assert fl.RMSNorm(8, backend="torch").choice.name == "torch"


@pytest.mark.parametrize("text", ["rms_norm", "rms_norm=", "=torch", "rms_norm=torch,rms_norm=torch", "no_layer=torch"])
def test_environment_grammar_is_strict(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(env.BACKEND, text)
    with pytest.raises(EnvironmentVariableError):
        fl.RMSNorm(8)


def test_environment_with_unknown_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.BACKEND, "rms_norm=cuda")
    with pytest.raises(UnknownNameError, match="known: triton, sgl_kernel, flashinfer, torch, reference"):
        fl.RMSNorm(8)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("nope", r"backend 'nope' is unknown; known: .* \(from FASTLAYERS_BACKEND\)$"),
        ("torch:64", r"'torch:64', of which nothing serves more than 64 tokens \(from FASTLAYERS_BACKEND\); acc"),
        ("torch:x|torch", r"'torch:x\|torch' \(from FASTLAYERS_BACKEND\); accepted: a name, or a ladder like"),
        ("sgl_kernel", r"backend='sgl_kernel' \(from FASTLAYERS_BACKEND\) on cpu"),
    ],
)
def test_what_is_wrong_with_a_backend_says_that_the_environment_named_it(
    monkeypatch: pytest.MonkeyPatch, named: str, words: str
) -> None:
    monkeypatch.setenv(env.BACKEND, f"rms_norm={named}")
    with pytest.raises(FastlayersError, match=f"rms_norm: .*{words}"):
        fl.RMSNorm(8, device="cpu")
    monkeypatch.delenv(env.BACKEND)
    with pytest.raises(FastlayersError) as caught:
        fl.RMSNorm(8, device="cpu", backend=named)
    assert "FASTLAYERS_BACKEND" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_page_lists_what_the_debug_variable_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{env.DEBUG}` |"))
    words = row.split("|")[2]
    taken = [word for word in re.findall(r"`(\w+)`", words) if env.debug({env.DEBUG: word}) is not None]
    assert taken == ["1", "true", "on", "yes", "0", "false", "off", "no"]


def test_what_has_no_effect_in_the_environment_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugins_module, "_plugins_loaded", False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    for name, value in (("FASTLAYERS_BACKENDS", "mla=torch"), (env.DISABLE, "nope,triton"), (env.TUNED_DIR, "/nope")):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        fl.RMSNorm(8)
    said = [record.getMessage() for record in caplog.records if record.name == "fastlayers.registry.environment"]
    assert [words.partition(":")[0] for words in said] == ["FASTLAYERS_BACKENDS", env.DISABLE, env.TUNED_DIR]
    assert "'nope' is no package" in said[1] and "/nope is not a directory; its tables are not used" in said[2]


def test_plugins_register_and_a_broken_one_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, name: str, load: object) -> None:
            self.name, self._load = name, load

        def load(self) -> object:
            return self._load

    def register(add: object) -> None:
        add("rms_norm", Backend("plugged", Echo))  # type: ignore[operator]

    def broken(add: object) -> None:
        raise RuntimeError("wrong version")

    monkeypatch.setattr(plugins_module, "_plugins_loaded", False)
    monkeypatch.setattr(plugins_module, "plugin_errors", {})
    monkeypatch.setattr(RMS_NORM, "ranked", list(RMS_NORM.ranked))
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Entry("good", register), Entry("bad", broken)]
    )
    assert RMS_NORM.choose(RMSNormConfig(8), "H200").name == "plugged"
    assert plugins_module.plugin_errors == {"bad": "RuntimeError: wrong version"}


def test_a_plugin_whose_class_does_not_load_is_not_called_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "mine"

        def load(self) -> object:
            return self.register

        def register(self, add: Any) -> None:
            add("rms_norm", Backend("wrong", "fastlayers.norm.rms_norm.torch:Nope", auto_on=("cpu",)))
            add("rms_norm", Backend("raises", "this:missing", needs=("no_such_package:f",), auto_on=("cpu",)))
            add("rms_norm", Backend("right", Echo, auto_on=("cpu",)))

    monkeypatch.setattr(plugins_module, "_plugins_loaded", False)
    monkeypatch.setattr(plugins_module, "plugin_backends", [])
    monkeypatch.setattr(RMS_NORM, "ranked", list(RMS_NORM.ranked))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    rows = {row.name: row for row in fl.backends("rms_norm", device="cpu")}
    assert rows["right"].installed and not rows["wrong"].installed and not rows["raises"].installed
    assert "rms_norm.torch:Nope', which cannot be loaded: AttributeError" in rows["wrong"].reason
    assert "no_such_package" in rows["raises"].reason and rows["torch"].installed
    described = {row.name: row for row in fl.backends("rms_norm", device="A100")}
    assert described["wrong"].installed, "nothing is imported for another machine's device"


def test_threads_wait_for_plugins_that_are_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, seen = threading.Event(), threading.Event(), []

    class Entry:
        name = "slow"

        def load(self) -> object:
            return self.register

        def register(self, add: Any) -> None:
            seen.append(registry("silu_mul").named("torch").name)  # a plug-in that looks at what there is
            begun.set()
            go_on.wait(60)
            add("rms_norm", Backend("plugged", Echo))
            add("rms_nrom", Backend("plugged", Echo))

    monkeypatch.setattr(plugins_module, "_plugins_loaded", False)
    monkeypatch.setattr(plugins_module, "plugin_errors", {})
    monkeypatch.setattr(RMS_NORM, "ranked", list(RMS_NORM.ranked))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(registry, "rms_norm")
        begun.wait(60)
        second = pool.submit(lambda: registry("rms_norm").named("plugged").name)
        assert wait([second], 0.2).not_done and seen == ["torch"]
        go_on.set()
        assert second.result(60) == "plugged" and first.result(60) is RMS_NORM
    assert "layer 'rms_nrom' is unknown; known: linear, " in plugins_module.plugin_errors["slow"]


def test_predicates_answer_for_described_devices_everywhere() -> None:
    for layer in LAYERS:
        for device in ("H200", "B200", "A100", "cpu"):
            rows = fl.backends(layer, device=device)
            assert {"triton", "torch", "reference"} <= {row.name for row in rows}
            assert all(row.hardware or row.reason for row in rows)


def test_without_a_configuration_a_row_is_judged_by_all_shapes_and_phases() -> None:
    runs = {
        "mla": ("flashmla", "flashinfer_fa3", "flashinfer_fa2"),
        "gqa": ("flashinfer_fa3", "xqa", "flashinfer_fa2", "sdpa"),
        "fused_moe": ("triton_kernels", "deep_gemm", "sgl_kernel", "deep_gemm_masked", "deep_gemm_gathered"),
        "rms_norm": ("sgl_kernel", "flashinfer"),
    }
    for layer, names in runs.items():
        rows = {row.name: row for row in fl.backends(layer, device="H200")}
        assert [name for name in names if not rows[name].hardware] == []
    # On a CPU none of them runs, and the reason is about the device, not about a phase.
    rows = {row.name: row for row in fl.backends("gqa", device="cpu")}
    assert not rows["xqa"].hardware and "phase" not in rows["xqa"].reason and "serves" not in rows["xqa"].reason
    toy = {row.name: row for row in fl.backends("mla", device="H200", cfg=spec_of("mla").cases[0].cfg)}
    assert not toy["flashmla"].hardware and toy["flashmla"].reason


@pytest.mark.parametrize("name", ["triton_kernels", "sgl_kernel", "deep_gemm_masked"])
def test_a_card_that_no_configuration_suits_is_the_reason(name: str) -> None:
    (row,) = [row for row in fl.backends("fused_moe", device="B200") if row.name == name]
    assert not row.hardware and row.reason.startswith("needs sm_90, this is sm_100")
    (hopper,) = [row for row in fl.backends("fused_moe", device="H200") if row.name == name]
    assert hopper.hardware  # of its own configurations, which these are


def test_explain_names_choice_evidence_and_bytes() -> None:
    norm = fl.RMSNorm(16)
    (found,) = fl.explain(norm)
    assert (found.layer, found.chosen, found.evidence, found.bytes) == ("rms_norm", "torch", "rank", 64)
    assert "rms_norm=torch" in str(fl.explain(norm))
    assert fl.explain("rms_norm")[0].layer == "rms_norm"


def test_explain_says_which_phase_a_choice_serves() -> None:
    rotary = fl.RotaryEmbedding(8, max_position=64)
    layer = fl.Attention(32, 4, 2, 8, rotary=rotary, page_size=16, dtype=torch.float32)
    layer._ladders["padded", 0] = GQA.choose_phases(layer.cfg, ("padded",), "cpu", "auto")[0].build()
    found = fl.explain(layer)
    own = [row for row in found if row.layer == "gqa"]
    assert {row.phase for row in own} == {"decode", "extend", "padded"}
    assert "gqa[decode]=torch" in str(found) and "gqa[extend]=torch" in str(found)
    assert [row.phase for row in fl.explain(fl.RMSNorm(16))] == [""]


def test_hints_name_packages_that_have_the_module() -> None:
    rows = {row.name: row for row in fl.backends("gqa", device="H200")}
    assert "pip install tokenspeed-fa3" in rows["fa3"].reason


def test_layers_survive_deepcopy_and_pickle() -> None:
    norm = fl.RMSNorm(16)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert twin.choice == norm.choice and twin.choice.name == "torch"


def test_configs_rebuild_from_their_repr() -> None:
    import torch

    from fastlayers.testing.spec import spec_of

    for layer in LAYERS:
        for case in spec_of(layer).cases:
            namespace = {type(case.cfg).__name__: type(case.cfg), "torch": torch}
            for value in vars(case.cfg).values():
                namespace[type(value).__name__] = type(value)
            assert eval(repr(case.cfg), namespace) == case.cfg


def test_senseless_rows_are_refused_by_name() -> None:
    table = toy(Backend("ours", Echo))
    for bad, words in (
        ("str", "a Backend"),
        (Backend("auto", Echo), "not 'auto'"),
        (Backend("a:b|c", Echo), "letters"),
    ):
        with pytest.raises(ArgumentError, match=words):
            table.add(bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a tuple of strings"):
        table.add(Backend("d", Echo, needs="foo:bar"))  # type: ignore[arg-type]
    for name in ("needs", "auto_on", "last_resort_on", "phases"):
        for value in ("cuda", ["cuda"], (1,)):
            with pytest.raises(ArgumentError, match=f"{name} of 'e' is .*a tuple of strings"):
                table.add(Backend("e", Echo, **{name: value}))  # type: ignore[arg-type]
    assert [b.name for b in table.ranked] == ["ours", "torch"]


def test_a_foreign_row_that_breaks_is_a_reason_or_a_named_error() -> None:
    def raises(cfg: object, device: Device) -> str | None:
        raise ZeroDivisionError("oops")

    table = toy(Backend("bad", Echo, refuse=raises), Backend("lost", "nope.nothing:Impl"))
    choice = table.choose("cfg", H200)
    assert choice.name == "lost" and choice.refused["bad"] == "its refuse() raised ZeroDivisionError: oops"
    with pytest.raises(ArgumentError, match=r"backend 'lost': target is 'nope\.nothing:Impl', which cannot be loaded"):
        choice.build()


@pytest.mark.parametrize("said", [False, True, "", 0])
def test_a_refusal_without_a_sentence_is_a_reason(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Backend("bad", Echo, refuse=lambda cfg, device: said, auto_on=("cpu",))
    why = f"its refuse() returned {said!r}"
    choice = toy(bad).choose("cfg", "cpu")
    assert choice.name == "torch" and choice.refused == {"bad": why}
    monkeypatch.setattr(RMS_NORM, "ranked", [bad, *RMS_NORM.ranked])
    row = fl.backends("rms_norm", device="cpu")[0]
    assert (row.name, row.hardware, row.reason) == ("bad", False, why)


def test_environment_names_are_checked_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.BACKEND, "mla=nope")
    with pytest.raises(UnknownNameError, match="mla: backend 'nope' is unknown"):
        fl.RMSNorm(8)


def test_wrong_kinds_of_argument_get_a_sentence() -> None:
    for call, words in (
        (lambda: fl.RMSNorm(8, backend=None), "backend is None"),  # type: ignore[arg-type]
        (lambda: fl.RMSNorm(8, device="H200"), "described devices are for fl.backends"),
        (lambda: fl.RMSNorm(8, float("nan")), "eps is nan"),
        (lambda: fl.RMSNorm(8, "x"), "eps is 'x'"),  # type: ignore[arg-type]
        (lambda: fl.RMSNorm(8, dtype="bf16"), "dtype is 'bf16'"),  # type: ignore[arg-type]
        (lambda: fl.explain(3), "target is 3"),
        (lambda: fl.backends("mla", device="H200", cfg=3), "backends: cfg is int 3; accepted: a MLAConfig, or None"),
        (lambda: fl.finalize(3), "model is 3"),
        (lambda: fl.kv_cache_spec(None), "model is None"),
        (lambda: fl.unpatch("str"), "model is str"),
        (lambda: fl.FusedMoE(8, 16, 2, 3), "top_k is 3; accepted: at most num_experts 2"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


@pytest.mark.parametrize(
    "layer, name", [("mla", "trtllm_gen"), ("mla", "cutlass"), ("fused_moe", "trtllm_gen"), ("fp8_linear", "trtllm")]
)
def test_rows_for_hardware_not_at_hand_are_guards(layer: str, name: str) -> None:
    rows = {
        device: {row.name: row for row in fl.backends(layer, device=device)}[name] for device in ("H200", "B200", "cpu")
    }
    assert not rows["H200"].hardware and "needs sm_100, this is sm_90" in rows["H200"].reason
    assert "needs sm_100" in rows["cpu"].reason and "needs sm_100" not in rows["B200"].reason
    assert all("not run on this hardware" in row.reason and not row.automatic for row in rows.values())
    with pytest.raises(NoBackendError, match="never been run on sm_100"):
        registry(layer).named(name).load()(spec_of(layer).cases[0].cfg)


def test_a_guard_asked_for_by_name_is_refused_as_it_was_asked_for() -> None:
    case = next(case for case in spec_of("fused_moe").cases if case.name == "fp8")
    row = registry("fused_moe").named("flashinfer_cutlass")
    able = replace(row, needs=(), refuse=lambda cfg, device: None)
    layer = replace(registry("fused_moe"), ranked=[able])
    with pytest.raises(NoBackendError, match="backend='flashinfer_cutlass'") as raised:
        layer.choose(case.cfg, "cpu", "flashinfer_cutlass")
    assert raised.value.refused == {"flashinfer_cutlass": row.guard} and "this row is a guard" in row.guard
    assert not registry("fused_moe").named("triton").guard
