"""docs/systems.md says where each of the 66 systems is: what it names exists, and "done" has something behind it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.moe.placement.triton import TritonSlots
from fastlayers.registry import COLLECTIVES, LAYERS, PARTS, builtin_registry, registry
from fastlayers.registry.spec import spec_of
from fastlayers_server.ablation import SWITCHES

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "systems.md"
RESULTS = REPO / "benchmarks" / "results"
GUARD = "not run on this hardware"


@dataclass(frozen=True)
class System:
    """One row of the page."""

    item: int
    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    evidence: str
    state: str


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows() -> list[System]:
    """Return the 66 rows, as they stand on the page."""
    found = []
    for line in PAGE.read_text().partition("\n## Ablation")[0].splitlines():
        if re.match(r"\| \d+ \|", line):
            item, name, files, tests, evidence, state = _cells(line)
            code = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in (files, tests)]
            found.append(System(int(item), name, code[0], code[1], evidence, state))
    return found


ROWS = rows()


def path_of(name: str) -> Path:
    """Return the file that the page means: below the library, or below the repository's other roots."""
    return REPO / name if name.split("/")[0] in ("models", "server", "benchmarks") else REPO / "src/fastlayers" / name


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def guards() -> Iterator[tuple[str, str]]:
    """Yield (layer, row) of the page's guards."""
    for row in ROWS:
        yield from re.findall(r"guard: ([a-z0-9_]+)/([a-z0-9_]+)", row.evidence)


def test_every_item_has_one_row() -> None:
    assert [row.item for row in ROWS] == list(range(1, 67))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.item))
def test_what_a_row_names_exists(row: System) -> None:
    missing = [name for name in row.files if not path_of(name).is_file()]
    for test in row.tests:
        file, _, function = test.partition("::")
        path = REPO / "tests" / file
        if not path.is_file() or function not in functions(path):
            missing.append(test)
    for result in re.findall(r"`([^`]+\.jsonl?(?:#[^`]+)?)`", row.evidence):
        file, _, word = result.partition("#")
        path = RESULTS / file
        # A word, and none that any file has: of "absorbed" or "flashmla" a part is not enough.
        whole = rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])"
        if not path.is_file() or (word and (len(word) < 3 or not re.search(whole, path.read_text()))):
            missing.append(result)
    assert missing == []


def gpu_tests(row: System) -> Iterator[str]:
    """Yield the files of a row's tests that are marked for a GPU."""
    for test in row.tests:
        file, _, name = test.partition("::")
        for node in ast.parse((REPO / "tests" / file).read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                if any(".gpu" in ast.unparse(each) for each in node.decorator_list):
                    yield f"tests/{file}"
            elif isinstance(node, ast.Assign) and re.match(r"pytestmark = .*mark\.gpu", ast.unparse(node)):
                yield f"tests/{file}"


def test_a_run_of_tests_that_is_evidence_passed_and_ran_those_of_the_row() -> None:
    rows = [row for row in ROWS if "gpu_suite.json" in row.evidence and row.state == "done"]
    found = json.loads((RESULTS / "gpu_suite.json").read_text())
    ran = re.findall(r"tests/\S+\.py", found["command"])  # none: all of them
    for row in rows:
        wanted = set(gpu_tests(row))
        assert wanted and found["failed"] == found["error"] == 0, row.item
        assert not ran or wanted <= set(ran), f"{row.item}: {sorted(wanted - set(ran))} were not in that run"


def test_an_ablation_that_is_evidence_has_a_ratio() -> None:
    lines = [json.loads(line) for line in (RESULTS / "ablation_h200.jsonl").read_text().splitlines() if line]
    for row in ROWS:
        for word in re.findall(r"`ablation_h200\.jsonl#([^`]+)`", row.evidence):
            assert any("ratio" in line for line in lines if word in line.get("what", "")), f"{row.item}: {word}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.item))
def test_a_state_has_something_behind_it(row: System) -> None:
    reason = re.fullmatch(r"none: (.+)", row.evidence)
    has_figure, has_guard = ".json" in row.evidence, "guard: " in row.evidence
    assert reason or has_figure or has_guard, f"{row.item}: evidence {row.evidence!r}"
    assert re.fullmatch(r"done|guard|not done: .{10,}", row.state), f"{row.item}: state {row.state!r}"
    if row.state == "done":
        assert row.files and row.tests
        assert reason or has_figure, f"{row.item} is done, and all that it has is a guard"
        assert not (reason and re.match(r"(not|nothing|no )", reason[1])), f"{row.item} is done without evidence"
    if row.state == "guard":
        assert has_guard and row.tests
    if not row.files:
        assert row.state.startswith("not done: nothing")


def test_guards_refuse_in_words_and_are_never_chosen() -> None:
    """Each is meant for one of two generations, refuses the other, and says that it was not run."""
    for layer, name in guards():
        found = [next(r for r in fl.backends(layer, device=d) if r.name == name) for d in ("H200", "B200")]
        meant, other = sorted(found, key=lambda row: not row.hardware)
        wanted = "needs sm_100, this is sm_90" if found[1].hardware else "needs sm_90, this is sm_100"
        assert not other.hardware and wanted in other.reason, f"{layer}/{name}"
        assert meant.hardware and not meant.automatic and GUARD in meant.reason
        with pytest.raises(NoBackendError, match="this row is a guard"):
            registry(layer).named(name).load()(spec_of(layer).cases[0].cfg)


def test_no_guard_of_the_registry_is_left_out() -> None:
    named = set(guards())
    notes = {(layer, row.name) for layer in LAYERS for row in registry(layer).ranked if GUARD in row.note}
    assert notes == named


def listed() -> dict[str, tuple[str, list[str]]]:
    """Return what the page's last table of layers says: items and rows of each."""
    found = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| ((?:`\w+` ?)+) \|$", PAGE.read_text(), re.MULTILINE)
    return {layer: (items, re.findall(r"\w+", rows)) for layer, items, rows in found}


def test_every_layer_belongs_to_an_item() -> None:
    assert set(listed()) == {*LAYERS, *COLLECTIVES, *PARTS}
    wrong = [layer for layer, (items, _) in listed().items() if not all(0 < int(i) < 67 for i in items.split(","))]
    assert wrong == []


@pytest.mark.parametrize("layer", [*LAYERS, *COLLECTIVES, *PARTS])
def test_the_page_names_the_registrys_rows_in_their_order(layer: str) -> None:
    assert listed()[layer][1] == [row.name for row in builtin_registry(layer).ranked]


def test_parts_that_are_no_layer_have_rows() -> None:
    for part in PARTS:
        for device in ("H200", "cpu"):
            rows = fl.backends(part, device=device)
            assert rows and all(row.layer == part and row.reason for row in rows)
            assert any(row.hardware and row.installed and row.automatic for row in rows)
    (kernels,) = [row for row in fl.backends("communicator", device="cpu") if row.name == "triton_symm_mem"]
    assert not kernels.hardware and "this is cpu" in kernels.reason
    assert next(row for row in fl.backends("communicator", device="H200") if row.name == "triton_symm_mem").hardware
    first = {part: builtin_registry(part).ranked[0].load() for part in PARTS}
    wanted = {"bump_allocator": fl.BumpAllocator, "communicator": fl.LayerCommunicator}
    assert first == wanted | {"expert_placement": TritonSlots}


@pytest.fixture
def tool() -> Any:
    found = importlib.util.spec_from_file_location("systems_table", REPO / "tools" / "systems_table.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_ablations_table_is_what_was_measured(tool: Any) -> None:
    """Written by tools/systems_table.py; each optimisation that is on the page stands beside what its item quotes."""
    assert tool.written(PAGE.read_text()) == PAGE.read_text(), "run: python tools/systems_table.py"
    measured = {row["what"] for row in tool.rows(tool.RESULTS)[1]}
    left = {line.split(" | ")[1] for line in tool.table().splitlines() if line.endswith(f"| {tool.MISSING} |")}
    assert not measured & left
    assert set(tool.REASONS) <= measured and measured | left == {"captured steps", *(each.what for each in SWITCHES)}


def test_models_may_be_measured_at_commits_with_other_switches(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"items": "1", "quoted": "an image", "batch": 1}
    lines = [
        {"command": "c", "commit": "d", "device": "H200", "torch": "2"},
        about | {"model": "a/A", "what": "old", "ratio": 1.25},
        about | {"model": "b/B", "what": "old", "ratio": 1.5}, about | {"model": "b/B", "what": "new", "ratio": 2.0},
    ]  # fmt: skip
    (tmp_path / "ablation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "ablation.jsonl")
    assert "| 1 | old | an image | 1.250 | 1.500 |  |\n| 1 | new | an image |  | 2.000 |  |" in tool.table()


def test_the_last_run_of_a_point_counts_and_its_commit_is_named(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table and in the figures; a run of which nothing counts any more is not named."""
    gate = {"items": "28", "quoted": "an image", "model": "a/A", "what": "factor in the gate"}
    codes = gate | {"items": "44, 45, 46", "what": "absorbed products of FP8 codes, not of a bf16 copy"}
    runs = [{"command": f"c{n}", "commit": f"abc{n}", "device": "H200", "torch": "2"} for n in range(3)]

    def put(*lines: dict[str, Any]) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "ablation_h200.jsonl").write_text(text)

    monkeypatch.setattr(tool, "RESULTS", tmp_path / "ablation_h200.jsonl")
    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)
    put(runs[0], gate | {"batch": 1, "ratio": 0.5}, runs[1], gate | {"batch": 1, "ratio": 0.97},
        gate | {"batch": 2, "ratio": 1.0}, codes | {"batch": 1, "ratio": 0.9}, codes | {"batch": 2, "ratio": 0.99},
        runs[2], gate | {"batch": 2, "skipped": "no gate"}, gate | {"batch": 2, "ratio": 1.5})  # fmt: skip
    assert "Made by `c1` at abc1, `c2` at abc2, on H200" in tool.table()
    assert "| 28 | factor in the gate | an image | 0.970 | 1.500 |  |" in tool.table()
    text, states = tool.figures()
    assert "| 28 | routed factor in the gate | A, 1: 0.970 ×; A, 2: 1.500 × |  |" in text and states[28][1] == "done"
    # What nobody gets unasked may lose, if the page says how much, and what it is for.
    assert text.count("| A, 1: 0.900 ×; A, 2: 0.990 × | loses 1.0 to 10.0 % of a step: off by default (`fp8_abs") == 3
    assert states[45][1] == "done"
    put(runs[0], gate | {"batch": 1, "ratio": 1.5}, runs[1], gate | {"batch": 1, "ratio": 0.969})
    assert tool.figures()[1][28][1] == "not done: a step is slower with it: A, 1"
    put(runs[1], codes | {"batch": 1, "ratio": 0.89})
    assert tool.figures()[1][45][1] == "not done: a step is slower with it: A, 1", "more than it may"


def test_several_runs_of_a_commit_count_alike_and_captures_say_what_decides_nothing(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"items": "1", "quoted": "an image", "model": "a/A", "batch": 1}

    def row(what: str, ratio: float, on: float) -> dict[str, Any]:
        return {**about, "what": what, "ratio": ratio, "on_us": on}

    run = {"command": "c", "commit": "abc", "device": "H200", "torch": "2"}
    codes = "absorbed products of FP8 codes, not of a bf16 copy"
    lines = [run, row("x", 1.03, 100.0), row("y", 1.5, 102.0), row(codes, 0.94, 106.0),
             run | {"command": "again"}, row("x", 1.01, 101.0), row(codes, 0.98, 103.0)]  # fmt: skip
    (tmp_path / "ablation_h200.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tool, "RESULTS", tmp_path / "ablation_h200.jsonl")
    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)
    table = tool.table()
    # One step's captures lie 2 % apart; those of the step with codes, which is another one, 2.9 %.
    assert "A, 1: 100.0 to 102.0 µs, 2.9%" in table and "Made by `c` at abc, `again` at abc" in table
    assert "| 1 | x | an image | 1.020 ± 2.9% | decides nothing: A 1 |" in table
    assert "| 1 | y | an image | 1.500 ± 2.9% |  |" in table
    assert f"| 1 | {codes} | an image | 0.960 ± 2.9% | slower with it: A 1; off by default" in table
    assert "| A, 1: 0.960 × ± 2.9% | loses 4.0 % of a step" in tool.figures()[0]


def test_what_captures_differ_by_is_no_gain_and_no_silence(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a ratio within noise, a figure of the page says so, also where it is a loss; its item stays as it is."""
    gate = {"items": "28", "quoted": "an image", "model": "a/A", "what": "factor in the gate", "batch": 1}
    run = {"command": "c", "commit": "abc", "device": "H200", "torch": "2"}
    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)
    words = "no further from 1 than captures differ, which decides nothing: A, 1"
    for ratio, told, state in (
        (0.975, words, "done"), (1.035, words, "done"), (1.05, "", "done"),
        (0.94, "a step is slower with it: A, 1", "not done: a step is slower with it: A, 1"),
    ):  # fmt: skip
        lines = [run, gate | {"ratio": ratio, "on_us": 100.0}, gate | {"what": "x", "ratio": 2.0, "on_us": 103.6}]
        (tmp_path / "ablation_h200.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        text, states = tool.figures()
        assert f"| 28 | routed factor in the gate | A, 1: {ratio:.3f} × ± 3.6% | {told} |" in text
        assert states[28][1] == state


def test_where_ratios_are_quoted_that_was_not_run_is_said(tool: Any) -> None:
    batches = {row["batch"] for row in tool.rows(tool.RESULTS)[1]}
    (quoted,) = {int(size) for each in SWITCHES for size in re.findall(r"at (\d+) tokens", each.quoted)}
    assert quoted not in batches, "it ran: say what it gained"
    assert f"quoted at {quoted} tokens, which no run here has" in tool.REASONS["tuned experts"]


def test_what_is_off_by_default_is_off_and_what_loses_has_a_reason(tool: Any) -> None:
    module = sys.modules["systems_figures"]
    for what, why in module.OFF_BY_DEFAULT.items():
        assert tool.REASONS[what] == why and what in {each.what for each in SWITCHES}
        (name,) = re.findall(r"off by default \(`(\w+)=False`\): .{20,}", why)
        assert inspect.signature(fl.MLAAttention).parameters[name].default is False
    for line in tool.table().splitlines():
        ratios = [float(cell.split(" ± ")[0]) for cell in _cells(line)[3:-1] if re.match(r"\d\.\d+( ± |$)", cell)]
        assert not ratios or min(ratios) > 0.99 or len(_cells(line)[-1]) > 20, line


def test_losses_beside_packages_are_listed(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That ``auto`` takes a package's product says nothing of ours, and points of one format nothing of another's."""
    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)

    def lines(*rows: tuple[str, str, str, float], item: int) -> list[str]:
        common = {"config": {}, "auto": False, "model": "m"}
        made = [
            common | {"layer": layer, "cfg": cfg, "key": f"{layer} {cfg}", "backend": name, "us": us}
            for layer, cfg, name, us in rows
        ]
        for row in made:
            row["auto"] = row["us"] == min(each["us"] for each in made if each["key"] == row["key"])
        (tmp_path / "products_h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        return [line for line in tool.figures()[0].splitlines() if line.startswith(f"| {item} |")]

    for item, layer in ((42, "fp8_scaled_linear"), (47, "int8_linear")):
        taken, ours = lines((layer, "c", "triton", 2.0), (layer, "c", "sgl_kernel", 1.0), item=item)
        assert "1 of 1 points not slower" in taken and taken.endswith("|  |")
        assert "0 of 1 points not slower than sgl_kernel; median 2.00 ×, worst 2.00 ×" in ours
        assert "| slower than sgl_kernel at 1 of 1 points: `auto` takes sgl_kernel's" in ours
        assert tool.figures()[1][item][1] == "done"
        _, ours = lines((layer, "c", "triton", 0.5), (layer, "c", "sgl_kernel", 1.0), item=item)
        assert "worst 0.50 ×" in ours and ours.endswith("|  |")
    wide, narrow = "format='none'", "format='fp8_tensor'"
    *_, codes, plain = lines(
        ("bmm", wide, "triton", 1.2), ("bmm", wide, "torch", 1.0), ("bmm", narrow, "triton", 1.0),
        ("bmm", narrow, "sgl_kernel", 2.0), ("bmm", narrow, "torch", 0.1), item=46,
    )  # fmt: skip
    assert "1 of 1 points not slower than sgl_kernel; median 0.50 ×" in codes
    assert (
        "what `auto` takes: 0 of 1 points" in plain and "worst 1.20 × | slower than the best of ours and tor" in plain
    )


def test_pages_points_beside_each_package(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)
    (tmp_path / "performance").mkdir()

    def put(file: str, *rows: dict[str, Any]) -> None:
        (tmp_path / "performance" / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def timed(layer: str, **times: float) -> list[dict[str, Any]]:
        common = {"layer": layer, "key": "k", "cfg": "c", "model": "m", "config": {}}
        return [common | {"backend": name, "us": us, "auto": name == "triton"} for name, us in times.items()]

    def lines(item: int) -> list[str]:
        return [line for line in tool.figures()[0].splitlines() if line.startswith(f"| {item} |")]

    assert all(tool.MISSING in line for item in (37, 41, 43, 63, 64) for line in lines(item))
    put("fp8_linear.jsonl", *timed("fp8_linear", triton=1.2, torch=0.1, cublas=1.5, deep_gemm=1.0, flashinfer=2.0))
    assert "0 of 1 points" in lines(37)[0] and "worst 1.20 × | slower than the best peer at 1 of 1" in lines(37)[0]
    assert "1 of 1 points not slower than flashinfer; median 0.60 ×" in lines(43)[0] and lines(43)[0].endswith("|  |")
    put("small_ops.jsonl", *timed("group_quant", triton=1.2, torch=9.0, flashinfer=1.0, sgl_kernel=1.1))
    assert "0 of 1 points not slower than sgl_kernel; median 1.09 ×" in lines(41)[0]
    assert tool.figures()[1][41][1] == "not done: slower than sgl_kernel at 1 of 1 points"
    steps = [{"model": "gpt_oss_20b", "batch": batch, "tpot_ms": ms} for batch, ms in ((1, 1.5), (32, 9.0))]
    put("generate.jsonl", steps[0])
    assert tool.MISSING in lines(63)[0], "both are wanted"
    put("generate.jsonl", *steps)
    assert "gpt_oss_20b, 1: 1.50 ms a token (vLLM 2.98)" in lines(63)[0] and tool.MISSING in lines(64)[0]
    assert tool.figures()[1][63][1] == "not done: slower than vLLM: gpt_oss_20b at 32"


def test_an_fp8_cache_of_latents_is_compared_with_bf16(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the page's results, and of points that only one of both has, or that round operands as well."""
    caches = sys.modules["systems_caches"]
    slower, count = [ratio for ratio in caches.beside_bf16() if ratio > 1.03], len(caches.beside_bf16())
    assert count > 20
    told = f"slower than over bf16 at {len(slower)} of {count} points, {min(slower):.2f} to {max(slower):.2f} ×"
    assert any(line.startswith("| 5 |") and told in line for line in PAGE.read_text().splitlines())
    # What docs/serving.md says without a number.
    words = "takes longer than over bf16 at nearly all points that were timed"
    assert (words in (REPO / "docs/serving.md").read_text()) == (len(slower) > 0.9 * count)
    assert words in (REPO / "docs/serving.md").read_text()

    monkeypatch.setattr(sys.modules["systems_figures"], "RESULTS", tmp_path)
    (tmp_path / "performance").mkdir()
    cfg = "num_heads=16, kv_dtype=torch.{}, phase='{}', fp8_math={}"
    made = [("bfloat16", "decode", False, 1, 10.0), ("float8_e4m3fn", "decode", False, 1, 15.0),
            ("float8_e4m3fn", "decode", True, 1, 8.0), ("float8_e4m3fn", "decode", False, 2, 9.0),
            ("bfloat16", "extend", False, 1, 1.0), ("float8_e4m3fn", "extend", False, 1, 1.0)]  # fmt: skip
    rows = [
        {"auto": auto, "cfg": cfg.format(dtype, phase, math), "tokens": tokens, "context": 4096, "us": factor * us}
        for dtype, phase, math, tokens, us in made for auto, factor in ((True, 1), (False, 0.1))
    ]  # fmt: skip
    (tmp_path / "performance/mla.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert caches.beside_bf16() == [1.5]


def test_words_of_rows_are_true() -> None:
    """What the page's hand says beside the name of a system, where code or a figure can say that it is so."""
    name = {row.item: row.name for row in ROWS}
    assert "`patch` has no `fp8_math`" in name[5] and "docs/patching.md" in name[5]
    with pytest.raises(ArgumentError, match="fp8_math"):
        fl.patch(torch.nn.Identity(), fp8_math=True)
    assert "`fp8_math`" in (REPO / "docs/patching.md").read_text()
    assert "for few rows and for memory" in name[26]
    approximate = {path.parent.name for path in (REPO / "src").rglob("*.py") if ".approx." in path.read_text()}
    assert "SiLU alone takes approximate instructions" in name[41] and approximate == {"silu_mul"}
    assert all("off by default (`fp8_absorb`)" in name[item] for item in (44, 45, 46))
    assert "quantisers and `merge_state` have none" in name[58] and "benchmarks/notes/small_ops.md" in name[58]
    without = [*(REPO / "src/fastlayers/quant").rglob("triton.py"), path_of("attention/merge_state/triton.py")]
    without.append(path_of("activation/silu_mul_quant/triton.py"))
    assert len(without) >= 5 and not any("dependent_launch" in path.read_text() for path in without)
    assert "quantisers and merge_state do without" in (REPO / "benchmarks/notes/small_ops.md").read_text()
    page = PAGE.read_text()
    assert "| 13 | a layer's time, which is no TTFT, of" in page
    # What the titles of two figures say of their peers.
    small = [json.loads(line) for line in (RESULTS / "performance/small_ops.jsonl").read_text().splitlines() if line]
    early = {row["layer"] for row in small if row.get("backend", "").endswith("PDL")}
    assert "| 18 | rotation, launched dependently, beside peers launched plainly |" in page and "rotary" not in early
    assert "| 24 | router, beside peers, FlashInfer's launched dependently as well |" in page and "router" in early


def test_results_that_do_not_say_how_they_were_made_are_listed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins = sys.modules["result_origins"]
    told = origins.listed(PAGE.read_text())
    assert told and PAGE.read_text().count(told) == 1
    assert "`cutlass_boundary_h200.jsonl`: `6_boundary.py`, which is not in the tree" in told
    assert "`drafts_h200.jsonl`: no command (part `drafts` of `benchmarks/renew.py`)" in told
    assert "mla.jsonl" not in told and "gpu_suite.json" not in told
    monkeypatch.setattr(origins, "RESULTS", tmp_path)
    for name, rows in {
        "a.jsonl": [{"command": "python benchmarks/slice.py --out a"}, {"us": 1.0}],
        "b.jsonl": [{"run": {"command": "slice.py"}}, {"run": {"commit": "abc", "part": "x"}}],
        "c.jsonl": [{"command": "gone.py --fast", "commit": "abc"}],
        "d.jsonl": [{"command": "by turns", "commit": "abc"}, {"command": "fastlayers bench layer mla"}],
    }.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert origins.listed("| `a.jsonl#us` `b.jsonl` `c.jsonl#x` | `d.jsonl` `absent.jsonl` |") == (
        "Results named on this page that do not say how they were made: `b.jsonl`: no command (part `x` of "
        "`benchmarks/renew.py`); `c.jsonl`: `gone.py`, which is not in the tree; `d.jsonl`: words instead of a command."
    )


def test_an_item_waits_for_each_of_its_figures(tool: Any) -> None:
    """Where one is missing, the page's hand says why it is not done; where all are there, the figures say."""
    states = tool.figures()[1]
    for row in ROWS:
        own = [figure for figure in tool.FIGURES if figure.item == row.item]
        if own and row.item not in states:
            assert row.state.startswith("not done: "), row.item
        assert row.item not in states or row.state == states[row.item][1]


def test_states_follow_from_figures(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["systems_figures"]
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "performance").mkdir()

    known = {item: "none: not measured" for item in range(1, 67)} | {11: "`ablation_h200.jsonl#x`"}
    page = "".join(f"| {item} | a | `f` | `t` | {told} | not done: by hand |\n" for item, told in known.items())

    def state(item: int) -> tuple[str, str]:
        text = tool.stated(f"{page}\n## Ablation\n| 11 | a | b | c | d | e |", tool.figures()[1])
        assert text.endswith("| 11 | a | b | c | d | e |")
        line = next(line for line in text.splitlines() if line.startswith(f"| {item} |"))
        evidence, found = line.removesuffix(" |").split(" | ")[-2:]
        return evidence, found

    def put(file: str, *rows: dict[str, Any]) -> None:
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert tool.figures()[1] == {} and state(13)[1] == "not done: by hand"
    ways = {"mqa_us": 3e3, "mha_one_shot_us": 2e3, "mha_chunked_us": 2.1e3}
    put("mla_paths_h200.jsonl", *({"page": page, **ways} for page in (64, 16)))
    assert "not done" in state(13)[1]
    put("mla_paths_h200.jsonl", *({"page": page, **ways} for page in (64, 16, 1)), 
        {"chosen": "mqa", "heads": 128, "prefix": 32768, "new": 64, **ways})  # fmt: skip
    assert "not done" in state(13)[1]
    firsts = [{"what": "first token", "prefix": 9, "new": 2, "layers": 6, "way": way, "ms": ms}
              for way, ms in (("one shot", 50.0), ("two chunks", 52.0), ("latents", 90.0))]  # fmt: skip
    put("prefix_first_token_h200.jsonl", *firsts)
    assert state(13) == ("`mla_paths_h200.jsonl#page` `prefix_first_token_h200.jsonl#first token`", "done")
    assert "one shot 50.0 ms, two chunks 52.0 ms, latents 90.0 ms |" in tool.figures()[0]
    late = {"page": 1, **ways, "mha_chunked_us": 2.2e3}
    put("mla_paths_h200.jsonl", *({"page": page, **ways} for page in (64, 16)), late,
        {"chosen": "mqa", "heads": 128, "prefix": 32768, "new": 64, **ways})  # fmt: skip
    assert state(13)[1] == "not done: chunks take over 1.05 × one shot with pages of 1"
    evidence, found = state(11)
    assert found == "not done: slower than the other way at 1 of 1 points"
    assert evidence == "`ablation_h200.jsonl#x` `mla_paths_h200.jsonl#chosen`"
    settings = [(True, False, 1.2), (False, False, 1.2), (True, True, 1.2), (False, True, 5.0)]
    captures = [{"frozen": a, "force_cudagraph_gc": b, "capture_s": s, "runs_s": [s]} for a, b, s in settings]
    put("performance/capture.jsonl", *captures)
    assert state(56)[1] == "done"
    assert "up to 0.05 s longer counts as no longer: runs of the first way take 1.20 |" in tool.figures()[0]
    put("performance/capture.jsonl", captures[0] | {"capture_s": 2.1}, *captures[1:])
    assert state(56)[1] == "not done: slower frozen: 2.10 s against 1.20"
    verified = {"what": "flashmla", "heads": 16, "new": 4, "context": 4096, "flashmla_us": 9.0, "triton_us": 10.0}
    put("flashmla_h200.jsonl", verified | {"requests": 5})
    assert "slower than the best of Triton's and FlashMLA at 1 of 1 points" in state(7)[1]
    put("flashmla_h200.jsonl", verified | {"requests": 8, "context": 500})
    assert "slower than the best of Triton's and FlashMLA at 1 of 1 points" in state(7)[1]
    put("flashmla_h200.jsonl", verified | {"requests": 8})
    put("drafts_h200.jsonl", {"way": "mtp", "prompts": "chats", "fewer": 2.0, "ticks": 9,
                               "equal_tokens": [64, 63], "of": 64})  # fmt: skip
    assert state(7)[1] == "done" and state(61)[1] == "not done: 1 ways say other tokens"
    timed = {"layer": "rotary", "backend": "triton", "config": {}, "auto": True}
    shapes = [timed | {"key": f"s{n}", "cfg": f"s{n}", "us": 2.0 + 0.2 * n} for n in range(3)]
    peers = [row | {"backend": "flashinfer", "auto": False, "us": 2.0} for row in shapes]
    (tmp_path / "performance").mkdir(exist_ok=True)
    put("performance/small_ops.jsonl", *shapes, *peers)
    assert state(18)[1] == "not done: slower than the best peer at 2 of 3 points"
    chain = {"op": "norm, rotary, norm, rotary", "model": "m", "launch": "now early", "us": 4.0}
    for plain, told in ((4.6, "not done: slower than the best peer at 2 of 3 points"), (5.0, "done")):
        put("rotary_launch_h200.jsonl", chain, chain | {"launch": "now plain", "us": plain})
        assert state(18)[1] == told  # 0.4 µs more alone, 0.3 and 0.5 less in a chain
    way = {"way": "mtp", "prompts": "chats", "fewer": 2.0, "ticks": 20, "equal_tokens": [64], "of": 64}
    for eager, told in ((2.0, "done"), (3.0, "not done: 3 steps of 20 ticks ran uncaptured")):
        put("drafts_h200.jsonl", way, {"way": "mtp", "uncaptured": {"no graph for greedy": eager}})
        assert state(61)[1] == told
    put("gated_h200.jsonl", {"one_us": 5.0, "two_us": 6.0}, {"backend": "deep_gemm", "refused": "is disabled"})
    assert state(40)[1] == "done"
    row = {"key": "a", "layer": "int8_linear", "config": {}, "us": 2.0}
    put("products_h200.jsonl", row | {"backend": "triton"})
    assert "not done" in state(47)[1]
    theirs = row | {"backend": "sgl_kernel", "us": 1.0}
    put("products_h200.jsonl", row | {"backend": "triton", "auto": True}, theirs)
    assert state(47)[1] == "not done: slower than the best of ours and sgl_kernel at 1 of 1 points"
    put("products_h200.jsonl", row | {"backend": "triton"}, theirs | {"auto": True})
    assert state(47)[1] == "done"
    # Without tuned tables what ranks first today counts, whatever ranked first then.
    row |= {"layer": "fp8_scaled_linear"}
    for us, told in ((1.0, "done"), (2.1, "not done: slower than the best of ours and sgl_kernel at 1 of 1 points")):
        put("products_h200.jsonl", row | {"backend": "triton", "auto": True}, row | {"backend": "sgl_kernel", "us": us})
        assert state(42)[1] == told
    codes = {"model": "a", "auto": True, "backend": "triton", "config": {}, "tokens": 4}
    linears = [codes | {"key": "a", "layer": "linear", "cfg": "bf16", "us": 8.0},
               codes | {"key": "b", "layer": "weight_only_linear", "cfg": "'w4a16'", "us": 9.0}]  # fmt: skip
    put("weight_only_h200.jsonl", *linears)
    assert state(26)[1] == "not done: by hand"
    for layer, name in (("int8_linear", "N=1"), ("weight_only_linear", "N=1,w4a16,32"), ("fused_moe", "E=1,w4a16,128")):
        (tmp_path / "tuned" / layer).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tuned" / layer / f"{name},device_name=H100.json").touch()
        assert state(26)[1] == "not done: by hand"  # of another device
        (tmp_path / "tuned" / layer / f"{name},device_name=H200.json").touch()
    assert state(26)[1] == "not done: by hand"  # without experts
    experts = {"layer": "fused_moe", "model": "b"}
    both = [codes | experts | {"key": "c", "cfg": "quant='none'", "us": 8.0},
            codes | experts | {"key": "d", "cfg": "quant='w4a16'", "us": 4.0}]  # fmt: skip
    put("weight_only_h200.jsonl", *linears, *both)
    assert state(26)[1] == "not done: w4a16 slower than bf16 at 1 points of at most 16 rows"
    linears[1]["us"] = 7.0
    many = [
        row | {"key": f"many {row['key']}", "tokens": 64, "us": us}
        for row, us in zip(linears, (8.0, 12.0), strict=True)
    ]
    floats = [row | {"key": f"fp8 {row['key']}", "cfg": "'fp8_w8a16'", "us": 12.0} for row in (linears[1], many[1])]
    put("weight_only_h200.jsonl", *linears, *both, *many, *floats)
    (line,) = [line for line in tool.figures()[0].splitlines() if "linears of weights alone" in line]
    assert state(26)[1] == "done" and "w4a16: 1 of 2 points not slower than bf16; × by rows 4: 0.88, 64: 1.50" in line
    assert "| 1 points of more than 16 rows take 1.50 × bf16's time: weights alone are for few rows" in line
    assert "; fp8_w8a16 is slower than bf16 at 2 of 2 points: what it gains is memory |" in line
    step = {"what": "decode", "batch": 1, "tpot_ms": 5.0}
    load = {"what": "load", "gib": 9.0, "seconds": 2.0}
    put("slice_h200.jsonl", load, {"what": "prefill", "tokens": 2048, "ms": 9.0}, step, {"what": "tokens"})
    assert "not done" in state(62)[1]
    put("bench_model_h200.jsonl", {"layers": 7}, {"what": "model", "batch": 1, "us": 5e3, "of_floor": 0.5})
    assert state(62)[1] == "done"
    assert "a slice of 1 dense layer and 5 with 32 of 256 experts: 9.0 GiB" in tool.figures()[0]
    assert "another model, `bench model` of 3 dense layers and 4 with all 256: 1: 5.00 ms" in tool.figures()[0]
    axes = {"item": 19, "what": "three axes", "one_launch_us": 4.0, "apart_us": 9.0}
    tower = {"item": 19, "what": "vision tower", "images": [[1, 74, 74]], "ours_ms": 28.0, "stock_ms": 17.0}
    scales = {"item": 32, "as_read_us": 4.0, "transposed_us": 5.0}
    codes = {"item": 35, "tokens": 4, "experts": 1, "copy_us": 4.0}
    for us, told in ((4.1, ""), (5.0, "1.2 × a copy of as many bytes: products that read such codes need sm_100")):
        put("systems_h200.jsonl", axes, tower, scales, codes | {"us": us})
        (line,) = [line for line in tool.figures()[0].splitlines() if line.startswith("| 35 |")]
        assert state(35)[1] == "done" and line.split(" | ")[3].startswith(told or " |")
    assert state(19)[1] == "not done: the vision tower is slower than stock's"
    assert "not done" in state(32)[1]  # without the points at the edge
    edges = [
        row | {"layer": "fused_moe", "model": "top 1", "tokens": tokens, "key": f"edge {tokens}", **how}
        for tokens in (2047, 2049)
        for how in (
            {"backend": "triton", "us": 1.0, "auto": tokens > 2048},
            {"backend": "sgl_kernel", "us": 1.2, "auto": tokens < 2048},
        )
    ]
    put("products_h200.jsonl", *edges)
    assert state(32)[1] == "done"
    assert "2047 rows: sgl_kernel, 1.20 × triton's time; 2049 rows: triton, 1.00 ×" in tool.figures()[0]
    assert "| slower than the best at 2047 rows: so few experts have no table" in tool.figures()[0]
    ran = {"failed": 0, "error": 1, "passed": 9, "commit": "abc", "device": "NVIDIA H100 80GB HBM3", "sources": "x"}
    (tmp_path / "gpu_suite.json").write_text(json.dumps(ran))
    assert state(21)[1] == "not done: 1 tests fail"
    cfg = "num_heads={}, kv_dtype=torch.float8_e4m3fn, fp8_math={}"
    put("performance/mla.jsonl", *(
        {"auto": True, "tokens": t, "context": 4096, "cfg": cfg.format(h, m), "us": us, "error": 0.03}
        for h, t, m, us in ((16, 64, False, 100), (16, 128, False, 190), (128, 128, False, 500), (16, 128, True, 90))
    ))  # fmt: skip
    assert "16 heads, 128 × 4k, FP8 arithmetic: 90 µs (115 wanted, error 0.03)" in tool.figures()[0]
    assert "longer than wanted: 128 heads, 128 × 4k |" in tool.figures()[0] and state(5)[1] == "not done: by hand"
    held = {"what": "capacity", "kv_dtype": "bfloat16", "tokens": 1000}
    put("slice_h200.jsonl", held, held | {"kv_dtype": "float8_e4m3fn", "tokens": 1899})
    assert state(5)[1].endswith("longer than wanted: 128 heads, 128 × 4k; 1.899 × the tokens, 1.9 wanted")
    put("slice_h200.jsonl", held, held | {"kv_dtype": "float8_e4m3fn", "tokens": 1900})
    assert state(5)[1] == "not done: longer than wanted: 128 heads, 128 × 4k"
    rates = [(2, 100.0, 90.0), (128, 1150.0, 1000.0)]
    less = "not done: at 128 requests 1.149 × the tokens/s of `tp=2`, 1.15 wanted"
    for beside, told in ((1000.0, "done"), (1001.0, less)):
        rates[1] = 128, 1150.0, beside
        put("two_gpus_slice_h200.jsonl", *(
            {"what": "decode_groups", "dp": dp, "requests": n, "tokens_per_s": rate, "cache_tokens": 10 * dp}
            for n, *both in rates for dp, rate in zip((2, 1), both, strict=True)
        ))  # fmt: skip
        assert state(53)[1] == told
    gaps = [{"frozen": each, "median_ms": 6.0, "longest_ms": most} for each, most in ((False, 500.0), (True, 50.0))]
    (tmp_path / "pauses.json").write_text(json.dumps({"objects": 10, "rows": gaps}))
    assert state(65)[1] == "not done: frozen, a full collection still shows"
    gaps[1]["longest_ms"] = 9.0
    (tmp_path / "pauses.json").write_text(json.dumps({"objects": 10, "rows": gaps}))
    assert state(65) == ("`pauses.json#full_collection_ms`", "done")
