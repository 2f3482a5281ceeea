"""The commands tune, bench, cache and doctor --run, on the CPU with small shapes; and which shapes a model has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastlayers import device as device_module
from fastlayers import env, tuning
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, FastlayersError, UnknownModelError
from fastlayers.registry import Backend, plugins, registry
from fastlayers.registry.backend import UnbuiltBackend
from fastlayers_server import known_models
from fastlayers_server.cli import app
from fastlayers_server.random_models import random_model
from fastlayers_server.tune_command import jobs_of_models

SMALL: dict[str, Any] = dict(
    vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=256
)
QWEN = known_models.QWEN3_8B | SMALL | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return str(path)


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fp8_linear have something to choose on a CPU."""
    from fastlayers.linear.fp8_block.layer import FP8_LINEAR

    twin = replace(FP8_LINEAR.named("torch"), name="twin")
    monkeypatch.setattr(FP8_LINEAR, "ranked", [*FP8_LINEAR.ranked, twin])


# ---- the shapes of a model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "keys"),
    [
        (
            "DeepSeek-V3", 8,
            {"N=2112,K=7168,block=128x128", "N=512,K=7168,block=128x128", "N=7168,K=2304,block=128x128"},
        ),
        pytest.param(
            "DeepSeek-V3", 1, {"N=24576,K=1536,block=128x128", "N=36864,K=7168,block=128x128"}, marks=pytest.mark.slow
        ),
        ("Qwen/Qwen3-8B-FP8", 1, {"N=6144,K=4096,block=128x128", "N=24576,K=4096,block=128x128"}),
    ],
)  # fmt: skip
def test_a_model_says_itself_which_shapes_it_constructs(name: str, tp: int, keys: set[str]) -> None:
    jobs = jobs_of_models([name], tp, 1, ["fp8_linear"])
    assert {job.layer for job in jobs} == {"fp8_linear"} and keys <= {job.key for job in jobs}
    assert len({job.key for job in jobs}) == len(jobs)


def test_experts_come_first_and_decode_has_every_context() -> None:
    jobs = jobs_of_models(["deepseek-ai/DeepSeek-V3"], 8, 1, [])
    assert jobs[0].layer == "fused_moe" and jobs[0].cfg.intermediate_size == 256
    contexts = {job.cfg.context for job in jobs if job.layer == "mla" and job.cfg.phase == "decode"}
    assert len(contexts) == 4
    oss = jobs_of_models(["gpt-oss-20b"], 1, 1, ["gqa", "fused_moe"])
    assert {job.cfg.window for job in oss if job.layer == "gqa"} == {128, None}
    decode = [(job.cfg.window, job.cfg.context) for job in oss if job.layer == "gqa" and job.cfg.phase == "decode"]
    # Keys before a window do not count.
    assert sorted(decode, key=str) == [(128, 1024), (None, 1024), (None, 16384), (None, 4096), (None, 65536)]
    assert [job.cfg.quant for job in oss if job.layer == "fused_moe"] == ["mxfp4"]


def test_a_cache_in_eight_bits_has_shapes_of_its_own() -> None:
    jobs = jobs_of_models(["deepseek-ai/DeepSeek-V3"], 8, 1, ["mla"], torch.float8_e4m3fn)
    assert {job.cfg.kv_dtype for job in jobs if job.cfg.phase == "decode"} == {torch.float8_e4m3fn}
    refused = CliRunner().invoke(app, ["tune", "--layer", "mla", "--kv-dtype", "e4m3", "--dry-run"])
    assert "a model; in a shape: kv_dtype=float8_e4m3fn" in str(refused.exception or refused.output)


def test_the_model_that_ships_has_its_name_here_as_in_other_commands() -> None:
    assert known_models.config_of("tiny")["model_type"] == "deepseek_v3"
    with pytest.raises(UnknownModelError, match="'tiny', the one that ships; a config"):
        known_models.config_of("nothing")


def test_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple of 128"):
        jobs_of_models(["Qwen/Qwen3-30B-A3B-FP8"], 8, 1, [])
    with pytest.raises(UnknownModelError, match="DeepSeek-V3"):
        jobs_of_models(["nothing"], 1, 1, [])


# ---- tune ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_backends")
def test_tune_writes_what_auto_reads_and_keeps_what_is_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    command = (
        "tune",
        "--layer",
        "fp8_linear",
        "--shape",
        "N=128,K=256",
        "--tokens",
        "2,1",
        "--json",
        "--device",
        "cpu",
    )
    (first,) = json.loads(run(*command))
    assert first["state"] == "tuned" and {"torch", "twin"} & set(first["ladder"].replace(",", " ").split())
    table = tuning.read(Path(first["path"]), "fp8_linear", as_device("cpu"))
    assert {row["tokens"] for row in table["measured"]} == {1, 2}
    assert json.loads(run(*command))[0]["state"] == "kept"
    assert json.loads(run(*command, "--force"))[0]["state"] == "tuned"
    longer = json.loads(run(*command[:5], "--tokens", "1,3", *command[7:]))[0]
    assert longer["state"] == "tuned"
    table = tuning.read(Path(first["path"]), "fp8_linear", as_device("cpu"))
    assert {row["tokens"] for row in table["measured"]} == {1, 2, 3}
    changed = table | {"metadata": table["metadata"] | {"kernels": {"torch": "0", "twin": "0"}}}
    tuning.write(Path(first["path"]), changed)
    assert json.loads(run(*command))[0]["state"] == "tuned"
    Path(first["path"]).write_text("{")
    anew = CliRunner().invoke(app, list(command))
    assert json.loads(anew.stdout)[0]["state"] == "tuned"
    assert f"tuned table {first['path']} is corrupt" in anew.stderr and "; it is made anew" in anew.stderr


def test_what_has_one_backend_is_not_tuned_and_time_has_an_end(tmp_path: Path) -> None:
    command = ("tune", "--layer", "fp8_linear", "--shape", "N=128,K=256", "--out", str(tmp_path), "--json", "--quick")
    assert json.loads(run(*command, "--device", "cpu"))[0]["state"] == "nothing to tune"


def test_what_failed_is_said_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.linear.fp8_block.layer import FP8_LINEAR
    from fastlayers.linear.fp8_block.torch import TorchFP8Linear

    class Broken(TorchFP8Linear):
        def __init__(self, cfg: Any, config: Any = None) -> None:
            raise RuntimeError("Corrupted JIT cache directory\nmore")

        @staticmethod
        def candidates(cfg: Any, num_tokens: int) -> list[dict[str, int]]:
            return [{"BLOCK": 1}, {"BLOCK": 2}]

    rows = [*FP8_LINEAR.ranked, replace(FP8_LINEAR.named("torch"), name="broken", target=Broken)]
    monkeypatch.setattr(FP8_LINEAR, "ranked", rows)
    command = ("tune", "--layer", "fp8_linear", "--shape", "N=128,K=256", "--tokens", "1", "--device", "cpu", "--out")
    text = run(*command, str(tmp_path / "text"))
    assert (
        "    broken and 2 more failed: RuntimeError: Corrupted JIT cache directory\n" in text and "more\n" not in text
    )
    (row,) = json.loads(run(*command, str(tmp_path / "json"), "--json"))
    assert row["state"] == "tuned" and row["failed"] == {
        "broken and 2 more": "RuntimeError: Corrupted JIT cache directory"
    }


@pytest.mark.usefixtures("two_backends")
def test_a_run_that_is_out_of_time_says_how_to_go_on(tmp_path: Path) -> None:
    command = ("tune", "--layer", "fp8_linear", "--shape", "N=128,K=256", "--out", str(tmp_path), "--json", "--quick")
    (left,) = json.loads(run(*command, "--device", "cpu", "--seconds", "0.000001", code=1))
    assert left["state"] == "out of time" and "0 of 12" in left["reason"]


def test_tune_of_a_model_lists_its_shapes(qwen: str) -> None:
    found = json.loads(run("tune", qwen, "--dry-run", "--json", "--layer", "linear"))
    assert {row["key"].rsplit(",", 1)[0] for row in found} >= {"N=128,K=64", "N=64,K=64", "N=256,K=64", "N=64,K=128"}
    assert all(row["reason"].startswith("in_features=") for row in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "nothing"], "fp8_linear"),
        ([], "exactly one --layer"),
        (["--layer", "linear", "--layer", "bmm"], "exactly one --layer"),
        (["model", "--layer", "linear", "--shape", "N=1"], "shapes of one --layer"),
        (["--layer", "linear", "--tokens", "1,x"], "positive integers"),
        (["--layer", "linear", "--shape", "Q=1"], "NAME=VALUE"),
        (["--layer", "moe_align"], "tuning_key"),
        (["--layer", "rms_norm", "--shape", "hidden_size=64"], "leaves open: dtype="),
        (["--layer", "linear", "--shape", "N=1,N=2"], "out_features was given before"),
        (["--layer", "linear", "--shape", "Z=1"], "N, K"),
        (["--layer", "linear", "--out", "/proc/nowhere"], "a directory that can be written"),
    ],
)
def test_wrong_usage_of_tune_is_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", "--device", "cpu", *arguments])
    assert isinstance(result.exception, FastlayersError) and message in str(result.exception)


@pytest.mark.usefixtures("two_backends")
def test_a_shape_that_cannot_be_tuned_is_reported_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastlayers.tuning import search

    real = search.tune_shape

    def failing(bench: Any, *given: Any, **named: Any) -> Path:
        if bench.cfg.out_features == 128:
            raise search.TuneError("no backend today")
        return real(bench, *given, **named)

    monkeypatch.setattr(search, "tune_shape", failing)
    shapes = ("--shape", "N=128,K=256", "--shape", "N=64,K=128")
    text = run(
        "tune", "--layer", "fp8_linear", *shapes, "--tokens", "1", "--out", str(tmp_path), "--json", "--device", "cpu",
        code=1,
    )  # fmt: skip
    states = {row["key"].split(",")[0]: (row["state"], row["reason"]) for row in json.loads(text)}
    assert states == {"N=128": ("failed", "no backend today"), "N=64": ("tuned", "")}


# ---- bench -----------------------------------------------------------------------------------------------------


def test_bench_layer_prints_json_lines() -> None:
    text = run(
        "bench", "layer", "fp8_linear", "--shape", "N=128,K=256", "--tokens", "1,3", "--rounds", "3", "--json",
        "--device", "cpu",
    )  # fmt: skip
    head, *rows = [json.loads(line) for line in text.splitlines()]
    assert head["torch"] == torch.__version__ and "out_features=128" in head["cfg"]
    assert [(row["tokens"], row["backend"], row["auto"]) for row in rows] == [(1, "torch", True), (3, "torch", True)]
    assert all(row["us"] > 0 and row["error"] < 5e-3 for row in rows)


def test_bench_layer_against_a_peer_in_one_process() -> None:
    arguments = ("bench", "layer", "fp8_linear", "--shape", "N=128,K=256", "--tokens", "3", "--rounds", "2")
    rows = [
        json.loads(line) for line in run(*arguments, "--against", "triton", "--json", "--device", "cpu").splitlines()
    ]
    assert {row["backend"] for row in rows[1:]} == {"torch", "triton"}
    assert "← auto" in run(*arguments, "--device", "cpu")


def test_bench_says_why_a_named_peer_cannot_run() -> None:
    arguments = ("bench", "layer", "fp8_linear", "--shape", "N=128,K=256", "--tokens", "3", "--rounds", "2")
    text = run(*arguments, "--against", "deep_gemm", "--json", "--device", "cpu")
    rows = [json.loads(line) for line in text.splitlines()[1:]]
    assert [row["backend"] for row in rows] == ["torch", "deep_gemm"]
    assert rows[1]["failed"].startswith("cannot run here: ")


def test_bench_refuses_a_context_that_the_model_does_not_have(qwen: str) -> None:
    arguments = ("bench", "model", qwen, "--batch", "1", "--device", "cpu", "--context")
    for context in ("256", "100000"):
        found = CliRunner().invoke(app, [*arguments, context]).exception
        assert isinstance(found, ArgumentError) and "max_position_embeddings, 256" in str(found)


@pytest.mark.parametrize("text", ["{", "[1]", "\u0000"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UnknownModelError, match=r"other\.json"):
        known_models.config_of(str(path))


@pytest.mark.parametrize("command", [("bench", "model"), ("tune", "--dry-run")])
@pytest.mark.parametrize("config", [{}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}])
def test_a_config_that_is_incomplete_is_an_error_in_words(
    tmp_path: Path, command: tuple[str, ...], config: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = CliRunner().invoke(app, [*command, str(path), "--device", "cpu"])
    assert isinstance(found.exception, FastlayersError)


def test_bench_refuses_more_layers_than_the_model_has(qwen: str) -> None:
    arguments = ["bench", "model", qwen, "--batch", "1", "--device", "cpu", "--context", "20", "--layers", "99"]
    found = CliRunner().invoke(app, arguments).exception
    assert isinstance(found, ArgumentError) and "--layers is 99; accepted: 0 to" in str(found)


def test_bench_model_times_layer_step_and_generation(qwen: str) -> None:
    arguments = ("bench", "model", qwen, "--batch", "2", "--context", "20", "--rounds", "2", "--dtype", "fp32")
    head, *rows = [json.loads(line) for line in run(*arguments, "--json", "--device", "cpu").splitlines()]
    assert head["layers"] == 2 and [row["what"] for row in rows] == ["decoder layer", "model", "generate"]
    assert 0 < rows[0]["floor_us"] < rows[1]["floor_us"] and rows[2]["tpot_ms"] > 0
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert "decoder layer" in result.stdout and result.stderr.splitlines() == [
        "batch 2: decoder layer, 2 rounds …", "batch 2: model, 2 rounds …", "batch 2: generation …"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"]
)
def test_random_models_give_finite_logits_of_ordinary_size(name: str) -> None:
    changes = SMALL | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    if "oss" in name:
        changes |= dict(num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"])
    if "DeepSeek" in name:
        changes |= dict(
            hidden_size=128, moe_intermediate_size=128, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=128,
            num_experts_per_tok=2, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
            first_k_dense_replace=1, num_key_value_heads=4,
        )  # fmt: skip
    model = random_model(known_models.config_of(name) | changes, "cpu", dtype=torch.bfloat16)
    from fastlayers_server.bench_command import decode_calls

    with torch.inference_mode():
        layer_call, _ = decode_calls(model, 3, 10)
        assert layer_call().tensor.isfinite().all()
    from fastlayers_models.generate import Generator

    tokens = Generator(model, max_batch=1, max_length=64).generate([[1, 2, 3]], max_new_tokens=5, eos_ids=())
    assert len(tokens[0]) == 5


def test_what_a_random_model_takes_is_told_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    config = known_models.config_of("Qwen/Qwen3-8B") | SMALL
    random_model(config, "cpu", layers=1, said=said.append)
    built = "layers built, backends chosen, packages imported"
    assert [part.partition(": ")[0] for part in said] == [
        "code of the model's family", "device opened", built, "weights drawn",
    ]  # fmt: skip
    # A package that a choice asks for is imported once, and named where that was.
    (tmp_path / "played_kernels.py").write_text("import time\ntime.sleep(0.05)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(device_module, "import_seconds", seconds := dict(device_module.import_seconds))
    assert device_module.package("played_kernels", load=True).reason is None
    assert 0.04 < seconds["played_kernels"] < 45  # were they milliseconds it would be more


# ---- doctor and cache ------------------------------------------------------------------------------------------


def test_doctor_runs_every_backend_that_can_run_here() -> None:
    report = json.loads(run("doctor", "--run", "--layer", "rms_norm", "--layer", "bmm", "--json"))
    ran = {(trial["layer"], trial["backend"]) for trial in report["trials"]}
    assert {("rms_norm", "triton"), ("rms_norm", "torch"), ("bmm", "torch")} <= ran
    assert all(trial["ok"] for trial in report["trials"]) and report["ok"]


def test_doctor_neither_runs_a_guard_nor_calls_it_working(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = registry("bmm").ranked
    guard = replace(ranked[0], name="played", target=UnbuiltBackend, needs=(), refuse=lambda cfg, device: None)
    monkeypatch.setattr(registry("bmm"), "ranked", [guard, *ranked])
    report = json.loads(run("doctor", "--run", "--layer", "bmm", "--json"))
    assert "played" not in {trial["backend"] for trial in report["trials"]}
    assert "played" not in report["layers"]["bmm"]["works"] and "played" in report["layers"]["bmm"]["disabled"]


@pytest.mark.usefixtures("two_backends")
def test_doctor_counts_tuned_tables_and_names_a_corrupt_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tables() -> list[tuple[str, str]]:
        facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["facts"]
        return [(fact["state"], fact["reason"]) for fact in facts if fact["name"].startswith("tuned table")]

    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    assert tables() == [("ok", "none for cpu")]
    command = ("tune", "--layer", "fp8_linear", "--shape", "N=128,K=256", "--tokens", "1", "--json", "--device", "cpu")
    path = Path(json.loads(run(*command))[0]["path"])
    assert tables() == [("ok", "1 for cpu")]
    table = json.loads(path.read_text())
    tuning.write(path, table | {"metadata": {"kernels": {"torch": "0", "twin": "0"}}})
    assert tables() == [("ok", "1 for cpu, 1 of them made with other versions")]
    path.write_text("{")
    (_, (state, reason)) = tables()
    assert state == "broken" and str(path) in reason


def test_doctor_says_whose_tables_serve_a_device_without_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fastlayers_server.doctor import _tuned_tables

    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    names = "H20", "H100", "H200", "B200"
    lent, few, own, none = (str(_tuned_tables(device_module.DESCRIBED[name])[0].reason) for name in names)
    some, many = (int(reason.split()[0]) for reason in (few, own))
    assert 0 < some < many
    assert lent == f"none for H20; {some} of H100 and {many} of H200, also sm_90, serve instead"
    assert few.endswith(f"; {many} of H200, also sm_90, serve what else") and "serve" not in own
    assert none == "none for B200"


TWICE = """
import sys
from fastlayers_server.cli import main
codes = []
for command in sys.argv[1:]:
    sys.argv[1:] = command.split()
    try:
        main()
        codes.append(0)
    except SystemExit as end:
        codes.append(end.code or 0)
assert codes == [0, 1], codes
"""


def test_piped_output_is_not_wrapped() -> None:
    command = [sys.executable, "-c", TWICE, "backends mla --device H200", "bench layer nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "flashinfer_fa3" in line]
    assert "flashinfer is not installed (pip install flashinfer-python)" in line or "yes" in line.split("│")[4]
    text = done.stderr
    assert len(text.splitlines()) == 1 and "fused_moe" in text and text.startswith("error: ")


def test_doctor_flags_a_directory_of_tables_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path / "absent"))
    report = json.loads(run("doctor", "--json", code=1))
    (fact,) = [fact for fact in report["facts"] if fact["name"] == env.TUNED_DIR]
    assert not fact["ok"] and str(tmp_path / "absent") in fact["reason"]
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    assert not [fact for fact in json.loads(run("doctor", "--json"))["facts"] if fact["name"] == env.TUNED_DIR]


def test_doctor_names_a_backend_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.norm.rms_norm import torch as module

    monkeypatch.setattr(module.TorchRMSNorm, "__call__", lambda self, *given: 1 / 0)
    report = json.loads(run("doctor", "--run", "--layer", "rms_norm", "--json", code=1))
    (bad,) = [trial for trial in report["trials"] if not trial["ok"]]
    assert bad["backend"] == "torch" and bad["reason"] == "ZeroDivisionError: division by zero"


def test_kernels_travel_as_one_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    (tmp_path / "here" / "abc").mkdir(parents=True)
    (tmp_path / "here" / "abc" / "kernel.cubin").write_bytes(b"code")
    archive = tmp_path / "kernels.tar.gz"
    assert json.loads(run("cache", "export", str(archive), "--json"))["bytes"] == archive.stat().st_size
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    assert "triton" in json.loads(run("cache", "import", str(archive), "--json"))["taken"]
    assert (tmp_path / "there" / "abc" / "kernel.cubin").read_bytes() == b"code"


def test_doctor_names_variables_and_packages_that_nothing_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKENDS", "mla=torch")
    monkeypatch.setenv(env.DISABLE, "tritn,triton")
    report = json.loads(run("doctor", "--json", code=1))
    facts = {fact["name"]: fact for fact in report["facts"]}
    assert facts["FASTLAYERS_BACKENDS"]["state"] == "broken" and env.BACKEND in facts["FASTLAYERS_BACKENDS"]["reason"]
    assert "'tritn' is no package" in facts[env.DISABLE]["reason"] and facts[env.DISABLE]["ok"]


def test_doctor_loads_what_plugins_added(monkeypatch: pytest.MonkeyPatch) -> None:
    table = registry("rms_norm")
    row = Backend("mine", "fastlayers.norm.rms_norm.torch:Nope", auto_on=("cpu",))
    monkeypatch.setattr(table, "ranked", [row, *table.ranked])
    monkeypatch.setattr(plugins, "plugin_backends", [("my_package", "rms_norm", row)])
    report = json.loads(run("doctor", "--json", code=1))
    (fact,) = (fact for fact in report["facts"] if fact["name"] == "plug-in my_package")
    assert fact["state"] == "broken" and "rms_norm: backend 'mine': target is" in fact["reason"]
    assert "mine" in report["layers"]["rms_norm"]["disabled"] and "mine" not in report["layers"]["rms_norm"]["works"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope=torch", "layer 'nope' is unknown"),
        ("mla=nope", "mla: backend 'nope' is unknown"),
        ("mla=triton:64", "a ladder like"),
        ("mla", "not of the form layer=backend"),
    ],
)
def test_doctor_names_a_wish_that_no_layer_can_fulfil(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv(env.BACKEND, text)
    report = json.loads(run("doctor", "--json", code=1))
    (fact,) = (fact for fact in report["facts"] if fact["name"] == env.BACKEND)
    assert fact["state"] == "broken" and words in fact["reason"] and report["environment"][env.BACKEND] == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--layer", "mla"], "together with --run"),
        (["tune", "--layer", "linear", "--shape", "N=8,K=8", "--tp", "8", "--dry-run"], "--tp is 8; accepted: a model"),
        (["tune", "--layer", "linear", "--shape", "N=8,K=8", "--ep", "2", "--dry-run"], "--ep is 2; accepted: a model"),
        (["bench", "layer", "silu_mul", "--context", "5"], "--context is 5; accepted: attention"),
        (["bench", "model", "Qwen/Qwen3-8B", "--batch", "0"], "--batch is '0'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_bench_says_which_context_it_measures() -> None:
    shape = "num_heads=2,num_kv_heads=1,head_dim=16,phase=decode,dtype=float32,kv_dtype=float32"
    arguments = ["bench", "layer", "gqa", "--shape", shape, "--tokens", "1", "--rounds", "1", "--against", "torch"]
    shown = run(*arguments, "--context", "128", "--device", "cpu")
    assert "measured with 128 cached tokens a request" in shown
    assert "measured with" not in run(*arguments, "--device", "cpu")
