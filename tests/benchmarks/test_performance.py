"""The performance driver on the CPU, and the page's tables and plots from made-up results."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import time
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastlayers.attention.context_buckets import context_of
from fastlayers.registry import registry
from fastlayers.testing.spec import spec_of
from fastlayers.tuning.bench import auto_option, rows_of
from fastlayers.tuning.clock import clock_for
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import case_at, parse_shape

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    return load("benchmarks/performance.py")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = load("tools/performance_tables.py")
    monkeypatch.setattr(sys.modules["performance_rows"], "RESULTS", tmp_path)
    return module


# ---- the driver ------------------------------------------------------------------------------------------------


def test_parts_that_share_a_result_measure_each_point_once(driver: ModuleType) -> None:
    asked: dict[str, list[str]] = {}
    for part in load("benchmarks/parts.py").PARTS:
        words = shlex.split(part.command)
        if words[0] == "benchmarks/performance.py" and "_alone" not in part.name:
            only = words[words.index("--only") + 1] if "--only" in words else ""
            asked.setdefault(words[words.index("--part") + 1], []).append(only)
    assert len(asked["gqa"]) == 3 and len(asked["small_ops"]) == 2
    for name, patterns in asked.items():
        for item in driver.MEASURED[name]():
            about = f"{item.model} {item.layer} {item.cfg}"
            assert sum(re.search(only, about) is not None for only in patterns) == 1, about


def test_every_measured_part_has_points_for_its_models(driver: ModuleType) -> None:
    made = {part: make() for part, make in driver.MEASURED.items()}
    models = {part: {item.model for item in items} for part, items in made.items()}
    assert {"deepseek-ai/DeepSeek-V3 tp8", "deepseek-ai/DeepSeek-V3 tp1", "Qwen/Qwen3-30B-A3B-FP8 tp1"} <= models[
        "fp8_linear"
    ]
    assert {"openai/gpt-oss-20b tp1", "Qwen/Qwen3-30B-A3B tp1"} <= models["fused_moe"]
    heads = {(item.cfg.num_heads, str(item.cfg.kv_dtype), item.cfg.phase) for item in driver.mla()}
    assert {(16, "torch.float8_e4m3fn", "decode"), (128, "torch.bfloat16", "decode")} <= heads
    assert any(item.cfg.sinks for item in driver.gqa()) and any(not item.cfg.sinks for item in driver.gqa())
    for items in made.values():
        keys = [key for item in items for key, _, _ in item.points()]
        assert len(set(keys)) == len(keys) > 20


def test_points_have_fp8_caches_drawn_lengths_pages_and_the_models_shapes(driver: ModuleType) -> None:
    for items in (driver.mla(), driver.gqa()):
        decode = [item for item in items if item.cfg.phase == "decode"]
        assert {item.cfg.page_size for item in decode} == {1, 16, 64}
        drawn = [item for item in decode if item.ragged]
        assert len(drawn) >= 4
        for item in drawn:
            (count,), (mean,) = item.tokens, item.contexts
            case, even = item.case(count, mean), case_at(item.layer, item.cfg, count, mean)
            name = "seq_lens" if "seq_lens" in case.shape else "prefix_lens"
            found = case.shape[name]
            assert len(found) == count == len(even.shape[name]) and case.shape["query_lens"] == (1,) * count
            # Log-normal: the median lies below the mean, which the longest exceeds by far.
            assert sorted(found)[count // 2] < 0.8 * mean < 1.3 * sum(found) / count and max(found) > 2 * mean
            assert item.cfg.context == context_of(max(found) + (name == "prefix_lens"))
            assert item.case(count, mean) == case
    fp8 = [item.cfg for items in (driver.mla(), driver.gqa()) for item in items if "float8" in str(item.cfg.kv_dtype)]
    assert any(getattr(cfg, "fp8_math", False) for cfg in fp8) and any(hasattr(cfg, "sinks") for cfg in fp8)
    models: dict[str, set[str]] = {}
    for item in driver.small_ops():
        models.setdefault(item.layer, set()).add(repr(item.cfg))
    counts = {layer: len(models[layer]) for layer in ("rms_norm", "router", "rotary", "rotary_kv_write", "silu_mul")}
    assert counts == {"rms_norm": 7, "router": 3, "rotary": 3, "rotary_kv_write": 4, "silu_mul": 3}


def test_a_part_is_resumed_and_half_a_point_measured_again(driver: ModuleType, tmp_path: Path) -> None:
    cfg = parse_shape("fp8_linear", "N=128,K=256")
    items, path = [driver.Item("toy", "fp8_linear", cfg, (1, 2))], tmp_path / "part.jsonl"
    first = driver.Record(path, {"command": "x"}, False)
    assert driver.measure(items, first, clock_for(CPU), CPU, time.monotonic() - 1) == 2
    assert driver.measure(items[:1], first, clock_for(CPU), CPU, time.monotonic() + 600) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("tokens") for row in rows] == [None, 1, 2] and rows[1]["last"] and rows[1]["backend"] == "torch"
    cut = path.read_text().splitlines()
    path.write_text("\n".join([*cut[:2], json.dumps({"key": rows[2]["key"], "us": 1}), '{"key": "x']))
    again = driver.Record(path, {"command": "y"}, False)
    assert again.done == {rows[1]["key"]}
    assert driver.measure(items, again, clock_for(CPU), CPU, time.monotonic() + 600) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("tokens") for row in rows] == [None, 1, None, 2]
    assert driver.Record(path, {}, True).done == set()


def test_our_kernels_are_called_ahead_of_their_points(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point's, once; not those of packages, nor layers whose operands would not fit side by side."""
    cfg = parse_shape("int8_linear", "N=48,K=64")
    kernel, called = registry("int8_linear").named("triton").load(), list[int]()
    usual = kernel.__call__

    def noted(self: Any, x: torch.Tensor, *rest: Any) -> Any:
        called.append(x.shape[0])
        return usual(self, x, *rest)

    monkeypatch.setattr(kernel, "__call__", noted)
    item = driver.Item("toy", "int8_linear", cfg, (1, 5), (0,), ("triton", "torch"))
    points = [(item, *point) for point in item.points()]
    driver.compile_ahead(points, CPU, clock_for(CPU))
    assert sorted(called) == [1, 5]
    monkeypatch.setattr(driver, "LARGE", {"int8_linear"})
    driver.compile_ahead(points, CPU, clock_for(CPU))
    assert sorted(called) == [1, 5]
    monkeypatch.setattr(driver, "LARGE", set())
    monkeypatch.setattr(kernel, "__call__", lambda *given: 1 / 0)
    driver.compile_ahead(points, CPU, clock_for(CPU))  # what fails is told where it is timed


def test_a_program_keeps_the_json_it_prints(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "works.py").write_text(
        'import sys; print(\'noise\'); print(\'{"a": 1, "commit": "x"}\'); print(sys.argv[1:])'
    )
    (tmp_path / "fails.py").write_text("print('{\"b\": 2}'); raise SystemExit(3)")
    monkeypatch.setattr(driver, "HERE", tmp_path)
    monkeypatch.setitem(driver.PROGRAMS, "toy", [["works.py", "x"], ["fails.py"], ["absent.py"]])
    record = driver.Record(tmp_path / "toy.jsonl", {}, False)
    assert driver.run_program("toy", record, [], {"commit": "abc"}) == 2
    rows = [json.loads(line) for line in (tmp_path / "toy.jsonl").read_text().splitlines()]
    assert [(row.get("a"), row.get("b"), row.get("number")) for row in rows[1:]] == [(1, None, 0), (None, 2, 1)]
    assert [row.get("commit") for row in rows[1:]] == ["abc", None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_nothing_is_measured_unless_asked_for(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    item = driver.Item("toy", "fp8_linear", parse_shape("fp8_linear", "N=128,K=256"), (1,))
    monkeypatch.setitem(driver.MEASURED, "fp8_linear", lambda: [item])
    command = ["--part", "fp8_linear", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stopped:
        driver.main(command)
    assert stopped.value.code == 2 and "--device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stopped:
        driver.main([*command, "--device", "cpu"])
    assert stopped.value.code == 0 and (tmp_path / "out" / "fp8_linear.jsonl").is_file()


class Peer:
    """What a peer's class looks like; ``factor`` other than 1: it computes something else."""

    def __init__(self, cfg: Any, factor: float = 1.0) -> None:
        self.reference, self.factor = registry("fused_moe").named("reference").load()(cfg), factor

    def pack(self, weights: Any) -> Any:
        return weights

    def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return (self.reference(x, *rest) * self.factor).to(x.dtype)


def test_a_peer_is_checked_and_timed_beside_the_backends_and_never_chosen() -> None:
    cfg = parse_shape("fused_moe", "E=4,D=64,I=32,top_k=2")
    bench = Bench("fused_moe", cfg, CPU, clock_for(CPU), peers={"other": Peer})
    rows = rows_of(bench, case_at("fused_moe", cfg, 3), 3, rounds=3)
    assert {(row["backend"], row["auto"], row.get("peer")) for row in rows} == {
        ("torch", True, None), ("other", False, True),
    }  # fmt: skip
    own = next(row for row in rows if row.get("peer"))
    assert own["us"] > 0 and 0 < own["error"] < 0.01 and own["tokens"] == 3
    assert auto_option(bench, 3) == Option("torch")


def test_a_peer_that_computes_something_else_is_not_timed() -> None:
    cfg = parse_shape("fused_moe", "E=4,D=64,I=32,top_k=2")
    bench = Bench("fused_moe", cfg, CPU, clock_for(CPU), peers={"other": partial(Peer, factor=1.05), "good": Peer})
    rows = rows_of(bench, case_at("fused_moe", cfg, 3), 3, rounds=3)
    assert {row["backend"] for row in rows} == {"torch", "good"}
    assert "(bound 0.04)" in bench.failed[Option("other")]


def test_sglang_is_a_peer_only_where_it_is_installed_and_runs_the_format(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[driver.peers.__module__]
    known = {item.cfg for item in driver.fused_moe()}
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert all(module.peers("fused_moe", cfg) == {} for cfg in known)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    for cfg in known:
        assert set(module.peers("fused_moe", cfg)) == (set() if cfg.quant == "mxfp4" else {"sglang"})
        assert (module.refusal(cfg) is None) == (cfg.quant != "mxfp4")
    assert module.peers("fp8_linear", None) == {}


# ---- tables and plots ------------------------------------------------------------------------------------------


def point(tokens: int, backend: str, us: float, **more: Any) -> dict[str, Any]:
    cfg = "FP8LinearConfig(in_features=7168, out_features=36864, bias=False, block_size=(128, 128))"
    row = {
        "layer": "fp8_linear", "tokens": tokens, "backend": backend, "config": {}, "auto": False, "us": us,
        "spread_us": 0.1, "tflops": 1000.0 / us, "gb_per_s": 4000.0 / us, "arithmetic_floor_us": 1.0,
        "memory_floor_us": 5.0, "of_arithmetic": 1 / us, "of_memory": 5 / us, "error": 0.0016, "last": True,
        "key": f"fp8 {tokens}", "model": "deepseek-ai/DeepSeek-V3 tp1", "cfg": cfg, "context": 4096,
    }  # fmt: skip
    return row | more


def write(folder: Path, part: str, rows: list[dict[str, Any]]) -> None:
    head = {"run": {"command": "performance.py --part x", "commit": "abc", "torch": "2.11", "device": "H200 (sm_90)"}}
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))


def test_targets_come_from_the_rows(tables: Any, tmp_path: Path) -> None:
    assert tables.targets().count(tables.MISSING) == 18
    rows = [
        point(1, "triton", 6.0, auto=True), point(1, "deep_gemm", 10.0),
        point(64, "triton", 12.0), point(64, "deep_gemm", 10.0, auto=True),
        point(4096, "deep_gemm", 22.0, auto=True), point(4096, "flashinfer", 20.0),
        point(4096, "deep_gemm", 21.0, auto=True, tflops=1289.0),
    ]  # fmt: skip
    write(tmp_path, "fp8_linear", rows)
    # Of the point measured twice the later row counts: 21 over 20.
    assert tables.never_slower("fp8_linear").startswith("2 of 3 points; median 1.00 ×, worst 1.05 ×")
    assert "T=4096" in tables.never_slower("fp8_linear")
    assert tables.never_slower("fp8_linear").endswith("; 1 by our kernels, 2 by a package's or torch's")
    assert tables.best_tflops() == "1,289 TFLOP/s by deep_gemm"
    table = tables.layer_table("fp8_linear")
    assert "| fp8_linear N36864 K7168 | 1 |  | triton | 6.0 | deep_gemm | 10.0 | 0.60 |" in table
    assert "commit abc" in tables.targets() and "](plots/fp8_linear_fp8_linear_N36864_K7168.svg)" in table


def test_a_point_measured_again_has_nothing_of_the_earlier_run(tables: Any, tmp_path: Path) -> None:
    """What was fastest then, by a configuration that nobody chooses any more, is neither ours nor a peer's time."""
    write(tmp_path, "fp8_linear", [
        point(1, "triton", 9.0, auto=True, config={"BLOCK_M": 16}), point(1, "deep_gemm", 5.0), point(4, "triton", 1.0),
        {"run": {"device": "H200 (sm_90)", "torch": "2.11", "command": "c", "commit": "d"}},
        point(1, "triton", 6.0, auto=True, config={"BLOCK_M": 64}), point(1, "flashinfer", 10.0),
    ])  # fmt: skip
    kept = [(row["tokens"], row["backend"], row["us"]) for row in tables.read("fp8_linear") if "key" in row]
    assert kept == [(4, "triton", 1.0), (1, "triton", 6.0), (1, "flashinfer", 10.0)]


def test_a_peer_counts_as_the_best_peer_and_its_absence_is_said(tables: Any, tmp_path: Path) -> None:
    assert tables.experts() == tables.MISSING
    rows = [point(1, "triton", 10.0, auto=True), point(1, "deep_gemm", 20.0)]
    write(tmp_path, "fused_moe", rows)
    assert "1 of 1 points" in tables.experts() and "sglang not installed: not compared" in tables.experts()
    assert "sglang not installed: not compared" in tables.layer_table("fused_moe")
    write(tmp_path, "fused_moe", [rows[0] | {"failed": {"sglang": "ImportError: no sgl_kernel"}}, rows[1]])
    assert "sglang not compared: ImportError: no sgl_kernel" in tables.experts()
    write(tmp_path, "fused_moe", [*rows, point(1, "sglang", 8.0, peer=True), point(2, "triton", 1.0, auto=True)])
    assert tables.experts().startswith("0 of 1 points; median 1.25 ×")
    assert tables.experts().endswith("sglang timed at 1 of 2 points")
    assert "| 1 |  | triton | 10.0 | sglang | 8.0 | 1.25 |" in tables.layer_table("fused_moe")
    write(tmp_path, "small_ops", [point(1, "triton", 2.0, auto=True), point(1, "flashinfer in place", 1.0, peer=True)])
    assert tables.never_slower("small_ops").startswith("0 of 1 points; median 2.00 ×")


def test_rows_of_other_devices_are_left_out(tables: Any, tmp_path: Path) -> None:
    write(tmp_path, "fp8_linear", [point(1, "triton", 6.0, auto=True), point(1, "deep_gemm", 10.0)])
    ours = tables.points(tables.read("fp8_linear"))
    assert len(ours) == 1
    with (tmp_path / "fp8_linear.jsonl").open("a") as file:
        rows = [{"run": {"device": "cpu"}}, point(1, "triton", 99.0), point(2, "triton", 99.0)]
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    assert tables.points(tables.read("fp8_linear")) == ours


def test_help_and_wrong_options_write_nothing(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAGE", tmp_path / "absent.md")
    for given, code in ((["--help"], 0), (["--chekc"], 2)):
        with pytest.raises(SystemExit) as stopped:
            tables.main(given)
        assert stopped.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_small_operators_are_compared_with_a_copy_of_their_bytes(
    driver: ModuleType, tables: Any, tmp_path: Path
) -> None:
    cfg = next(case.cfg for case in spec_of("silu_mul").cases if case.small)
    bench, case = Bench("silu_mul", cfg, CPU, clock_for(CPU)), case_at("silu_mul", cfg, 4)
    assert all(row["copy_us"] > 0 for row in rows_of(bench, case, 4, rounds=2, copy=True))
    assert all("copy_us" not in row for row in rows_of(bench, case, 4, rounds=2))
    assert {"silu_mul", "rotary"} <= driver.MOVERS and "router" not in driver.MOVERS
    rows = [
        point(64, "triton", 9.0, auto=True, copy_us=1.0, key="a"),
        point(4096, "triton", 10.0, auto=True, copy_us=9.0, key="b"),
        point(4096, "triton", 10.0, auto=True, copy_us=5.0, key="c", layer="rotary"),
        point(4096, "triton", 10.0, auto=True, key="d", layer="router"),
    ]
    write(tmp_path, "small_ops", rows)
    assert tables.bandwidth() == "1 of 2 points; lowest 50% by rotary at T=4096"


def test_programs_rows(tables: Any, tmp_path: Path) -> None:
    ms = {"stock": 45.0, "stock_best": 8.0, "graph": 4.5}
    write(tmp_path, "patch_qwen3_30b", [{"model": "qwen3_30b", "batch": 1, "ms": ms}])
    assert tables.patched("qwen3_30b", 1) == "4.50 ms a step, 10.00 × stock (45.00 ms), 1.78 × stock's best (8.00 ms)"
    assert tables.patched("qwen3_30b", 16) == tables.MISSING
    row = {"model": "qwen3_8b", "batch": 1, "tpot_ms": 4.9, "device_ms": 4.6, "floor_ms": 3.4}
    write(tmp_path, "generate", [row])
    assert tables.generated("qwen3_8b", 1) == "4.90 ms (replay 4.60, floor 3.40)"
    captures = [
        {"capture_s": 8.0, "frozen": True, "force_cudagraph_gc": False},
        {"capture_s": 40.0, "frozen": False, "force_cudagraph_gc": True},
    ]
    write(tmp_path, "capture", captures)
    assert tables.captured() == "frozen: 8.0 s; not frozen, forced collections: 40.0 s"
    write(tmp_path, "first_token", [{"import_to_first_token_s": 60.0}, {"import_to_first_token_s": 19.5}])
    assert tables.first_token() == "19.5 s"


def test_plots_are_svg_with_a_line_a_backend(tables: Any, tmp_path: Path) -> None:
    rows = [
        point(t, name, us * t, auto=name == "triton")
        for t in (1, 64, 4096)
        for name, us in (("triton", 6.0), ("deep_gemm", 9.0))
    ]
    write(tmp_path, "fp8_linear", rows)
    drawn = tables.plots()
    assert set(drawn) == {"fp8_linear_roofline.svg", "fp8_linear_fp8_linear_N36864_K7168.svg"}
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.tag.endswith("svg") and "nan" not in text
    lines = drawn["fp8_linear_fp8_linear_N36864_K7168.svg"]
    assert lines.count("<polyline") == 3 and "deep_gemm" in lines and "floor" in lines


def test_ticks_and_labels() -> None:
    plots = load("tools/svg_plots.py")
    assert plots.ticks(1, 8192, 2) == [1, 4, 16, 64, 256, 1024, 4096]
    assert plots.ticks(3, 300, 10) == [1, 10, 100, 1000]
    assert [plots.label(v) for v in (0.1, 5, 9999, 16384, 2e6)] == ["0.1", "5", "9999", "16.4k", "2M"]
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.svg(plots.Plot("empty", "x", "y", {}))


def test_what_a_server_does_without_something(
    tables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_of: Any = load("benchmarks/serve_rows.py")
    servers: list[tuple[str, ...]] = []

    class Server:
        port = 1

        def __init__(self, model: str, log: Path, more: tuple[str, ...]) -> None:
            servers.append(more)

        def ready(self, end: float) -> dict[str, Any]:
            return {"ready_s": 1.0 if "--no-prefix-cache" not in servers[-1] else None}

        def stop(self) -> None:
            servers.append(("stopped",))

    def bench(port: int, end: float, *flags: object) -> dict[str, Any]:
        if "--disable-cuda-graph" in servers[-1]:
            return {"skipped": "no time is left"}
        names = {name for told in rows_of.LOADS.values() for name in told} | {"request_throughput", "duration"}
        about = {"runs": [1.0], "valid": True, "client_cpu_share": 0.1}
        about |= {"client_lag_p99_ms": 1.0, "client_lag_max_ms": 2.0}
        value = 1000.0 * (1 + len(servers[-1])) + flags.count("--request-rate")
        return dict.fromkeys(names, value) | {"failed": 0, "fastlayers": about}

    monkeypatch.setattr(rows_of, "Server", Server)
    monkeypatch.setattr(rows_of, "bench", bench)
    monkeypatch.setattr(sys, "argv", ["serve_rows.py", "Qwen/Qwen3-8B", "--switches", "--device", "cpu",
                                      "--out", str(tmp_path / "serve.jsonl")])  # fmt: skip
    rows_of.main()
    assert servers[1::2] == [("stopped",)] * 5
    assert servers[::2] == [(), *(flags for flags, _ in rows_of.SWITCHES.values())]
    capsys.readouterr()
    lines = tables.serving().splitlines()[2:]
    servers.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--switches", "lookup"])
    rows_of.main()
    assert servers[::2] == [(), rows_of.ADDED["lookup"][0]] * 2
    added = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()][-4:]
    counts = [{len(values) for values in row[side]["of"].values()} for row in added for side in ("on", "off")]
    assert counts == [{2}, {2}, {2}, {2}, {24}, {24}, {4}, {4}]
    drafted = [line for line in tables.serving().splitlines()[2:] if line not in lines]
    assert drafted == [
        f"| qwen3_8b, lookup on / off, {told} | at most 2 % {worse} on |"
        for told, worse in (
            ("64 prompts at once | 3,000 tokens/s / 1,000 tokens/s", "less"),
            ("one request, a token | 3000.00 ms / 1000.00 ms", "more"),
            (
                "64 prompts sharing 2,048 tokens, first token (mean) | 3,000 ms / 1,000 ms; 24 pairs: +2000.0 ± 0.0",
                "more",
            ),
            ("arrivals, 99 % of gaps between tokens | 3001.0 ms / 1001.0 ms", "more"),
        )
    ]
    assert lines == [
        "| qwen3_8b, overlap on / off, 64 prompts at once | 1,000 tokens/s / 2,000 tokens/s | no more off |",
        "| qwen3_8b, overlap on / off, one request, a token | 1000.00 ms / 2000.00 ms | no less off |",
        "| qwen3_8b, CUDA graphs on / off, 64 prompts at once | 1,000 tokens/s / not measured yet | no more off |",
        "| qwen3_8b, CUDA graphs on / off, one request, a token | 1000.00 ms / not measured yet | no less off |",
        "| qwen3_8b, chunks on / off, 64 prompts at once | 1,000 tokens/s / 3,000 tokens/s | no more off |",
        "| qwen3_8b, chunks on / off, arrivals, 99 % of gaps between tokens | 1001.0 ms / 3001.0 ms | no less off |",
    ]


def test_the_median_run_of_a_load_counts() -> None:
    rows_of: Any = load("benchmarks/serve_rows.py")
    runs = [{"p99_itl_ms": value, "failed": place} for place, value in enumerate((9.0, 1.0, 5.0))]
    of = {"p99_itl_ms": [9.0, 1.0, 5.0], "failed": [0, 1, 2]}
    assert rows_of.median_of(runs, ("p99_itl_ms", "failed")) == {"p99_itl_ms": 5.0, "failed": 2, "of": of}
    assert rows_of.median_of([*runs, {"skipped": "no time is left"}], ["p99_itl_ms"]) == {"skipped": "no time is left"}
    flags = [rows_of.load_of("shared prefix", 0.0, False, run) for run in range(2)]
    assert flags[0] != flags[1] and flags[0][:-1] == flags[1][:-1]


def test_stalls_are_what_takes_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of: Any = load("benchmarks/serve_rows.py")
    metrics = """
fastlayers_tick_seconds_bucket{le="0.06"} 5.0
fastlayers_tick_seconds_bucket{le="0.125"} 7.0
fastlayers_tick_seconds_bucket{le="+Inf"} 9.0
fastlayers_tick_seconds_count 9.0
fastlayers_itl_seconds_bucket{le="0.125"} 4.0
fastlayers_itl_seconds_bucket{le="+Inf"} 4.0
fastlayers_gc_pause_seconds_bucket{generation="1",le="0.125"} 3.0
fastlayers_gc_pause_seconds_bucket{generation="1",le="+Inf"} 3.0
fastlayers_gc_pause_seconds_bucket{generation="2",le="0.125"} 0.0
fastlayers_gc_pause_seconds_bucket{generation="2",le="+Inf"} 1.0
"""
    monkeypatch.setattr(rows_of, "get", lambda port, path: metrics)
    assert rows_of.stalls(1) == {"tick": 2.0, "itl": 0.0, "gc_pause": 1.0}


def test_the_committed_page_is_fresh() -> None:
    tables: Any = load("tools/performance_tables.py")
    assert tables.fill(tables.PAGE.read_text()) == tables.PAGE.read_text(), "run: python tools/performance_tables.py"
    assert {path.name: path.read_text() for path in tables.PLOTS.glob("*.svg")} == tables.plots()


def test_counts_of_the_page_stand_in_tables_alone() -> None:
    """What a person typed would stay as it is when results are renewed."""
    text = load("tools/performance_tables.py").PAGE.read_text()
    typed = re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    assert re.findall(r".*\b\d[\d,]* of \d.*", typed) == []
    assert len(typed) < len(text) / 2 and "99 of 102" not in typed


def test_points_that_something_else_beat_are_listed(tables: Any, tmp_path: Path) -> None:
    """Packages' by more than "never slower" allows, and rows of our own by more than runs differ."""
    slower = sys.modules["slower_points"]
    config = {"BLOCK": 64}
    write(tmp_path, "fp8_linear", [
        point(1, "deep_gemm", 10.0, auto=True), point(1, "triton", 5.0), point(1, "triton", 4.0, config=config),
        point(4, "triton", 10.4, auto=True, config=config), point(4, "triton", 10.0), point(4, "deep_gemm", 10.0),
        point(16, "triton", 5.0, auto=True), point(16, "deep_gemm", 6.0), point(64, "torch", 9.0, auto=True),
    ])  # fmt: skip
    own, others = tables.TABLES["own_rows"](), tables.TABLES["slower"]()
    assert "| fp8_linear N36864 K7168 | 1 |  | deep_gemm | 10.0 | triton (BLOCK: 64) | 4.0 | 2.50 |" in own
    assert own.count("| fp8_linear") == 1 and own.endswith("1 of 2 points where another of our own rows was timed.")
    assert "| 4 |  | triton (BLOCK: 64) | 10.4 | deep_gemm | 10.0 | 1.04 |" in others
    assert others.count("| fp8_linear") == 1 and others.endswith("1 of 4 points with a peer.")
    write(tmp_path, "fp8_linear", [point(1, "triton", 10.5, auto=True), point(1, "gluon", 10.0)])
    assert tables.TABLES["own_rows"]() == "0 of 1 points where another of our own rows was timed."
    assert slower.BEATEN == 1.05


def test_the_page_says_which_kernels_are_others_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what was recorded from git at the commit of its points; that git still says so is the tool's to check."""
    load("tools/performance_tables.py")
    since = sys.modules["page_since"]
    old, new = since.recorded(), since.today()
    assert old["commit"] == since.commit_of_points(), "run: python tools/page_since.py"
    section = load("tools/performance_tables.py").PAGE.read_text().partition("\n## Since that commit\n")[2]
    prose = section.partition("<!-- /changed -->")[2].partition("\n## ")[0]
    fresh = {name.partition("/")[2] for name in new["backends"].keys() - old["backends"].keys()}
    assert [name for name in sorted(fresh) if name not in prose] == [], "say what came since"
    # Rows that moved or came since have no counterpart; most have.
    assert len(old["backends"].keys() & new["backends"].keys()) > 0.8 * len(new["backends"])
    monkeypatch.setattr(since, "recorded", lambda: new)
    assert since.changed().splitlines()[2:] == []
    timed = since.points_of_layers()
    row = next(row for row in timed["gqa"] if row["backend"] == "triton" and row["tokens"] == 64)
    shape = f"gqa/{since.key_of(row['layer'], row['cfg'])}"
    kernel = next(name for name in new["kernels"] if name.startswith("norm/rms_norm/"))
    other = json.loads(json.dumps(new))
    other["backends"]["router/triton"] = "other"
    del other["backends"]["fused_moe/triton"]
    other["kernels"][kernel] = "other"
    other["ladders"][shape] = [{"max_tokens": None, "backend": "torch", "config": None}]
    monkeypatch.setattr(since, "recorded", lambda: other)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in since.changed().splitlines()[2:]}
    count = len(timed["router"])
    assert lines["router"] == f"| router | `triton` |  |  | {count} of {count} |"
    assert lines["fused_moe"].startswith("| fused_moe | `triton` (new) |  |  | ")
    ran = sum(each["backend"] == "triton" for each in timed["fused_moe"])
    assert lines["fused_moe"].endswith(f"| {ran} of {len(timed['fused_moe'])} |") and ran > 0
    assert f"| rms_norm |  | `{kernel.partition('::')[0]}` 1 |  | 0 of {len(timed['rms_norm'])} |" == lines["rms_norm"]
    assert lines["gqa"].startswith("| gqa |  |  | 1 | ") and since.otherwise(row, other, new)
    assert set(lines) == {"router", "fused_moe", "rms_norm", "gqa"}


def test_a_kernel_is_compared_by_what_it_does(tmp_path: Path) -> None:
    load("tools/performance_tables.py")
    since = sys.modules["page_since"]
    text = "import triton\n\nSIZE = 4\n\n\n@triton.jit\ndef _kernel(x):\n    y = x + SIZE\n    return y\n"

    def kernels(file: str, source: str) -> set[str]:
        files = {f"src/fastlayers/{file}": source}
        return set(since.stand(files.get, sorted(files))["kernels"].values())

    usual = kernels("norm/a.py", text)
    assert len(usual) == 1 and kernels("linear/b.py", text.replace("_kernel", "_other")) == usual
    assert kernels("norm/a.py", f"{text}\n\ndef host():\n    return 1\n") == usual
    for other in (text.replace("x + SIZE", "x - SIZE"), text.replace("SIZE = 4", "SIZE = 8")):
        assert len(kernels("norm/a.py", other)) == 1 and kernels("norm/a.py", other) != usual
