"""Results of GPUs are renewed part by part: fake parts on a CPU, and what every real part's command says."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from fastlayers.tuning.provenance import provenance, source_hash

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def renew() -> Any:
    return import_module("renew")


@pytest.fixture
def adopting(renew: Any) -> Any:
    return import_module("adopt")


@pytest.fixture
def fake(renew: Any, adopting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return what replaces the parts: each is (name, Python code, seconds, more fields)."""

    def make(*given: tuple[Any, ...]) -> Any:
        parts = []
        for name, code, seconds, *more in given:
            program = tmp_path / f"{name}.py"
            program.write_text(f"import json, sys, time\nout = sys.argv[1]\n{code}")
            about: Row = {"result": f"{name}.jsonl", "target": "t"} | (more[0] if more else {})
            parts.append(renew.Part(name=name, command=f"{program} {{out}}", seconds=seconds, **about))
        for module in (renew, adopting):
            monkeypatch.setattr(module, "PARTS", tuple(parts))
            monkeypatch.setattr(module, "TIMES", tmp_path / "results" / "renewed.json")
        monkeypatch.setattr(adopting, "RESULTS", tmp_path / "results")
        return parts

    return make


HEAD = f"head = {{'command': 'python x.py --out ' + out, **{provenance()!r}}}\n"
WRITES = f"{HEAD}open(out, 'w').write(json.dumps(head) + '\\n' + json.dumps({{'ms': 1}}) + '\\n')\n"


def run(renew: Any, out: Path, *more: str) -> dict[str, Row]:
    """Run all fake parts; return the summary's rows by part."""
    made = CliRunner().invoke(renew.app, ["run", "--out", str(out), *more])
    assert made.exception is None or isinstance(made.exception, SystemExit), made.output
    rows = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()]
    return {row["part"]: row | {"code": made.exit_code} for row in rows if "part" in row}


def test_one_that_fails_leaves_the_others(renew: Any, fake: Any, tmp_path: Path) -> None:
    fake(("bad", "print('the reason'); sys.exit(3)", 1), ("good", WRITES, 1), ("late", "time.sleep(60)", 0))
    renew.limit, limit = lambda part: 2.0 if part.name == "late" else 60.0, renew.limit
    try:
        found = run(renew, tmp_path / "out")
    finally:
        renew.limit = limit
    assert (found["bad"]["state"], found["bad"]["exit_code"]) == ("failed", 3)
    assert found["bad"]["last_lines"] == ["the reason"] and found["good"]["state"] == "complete"
    assert found["late"]["state"] == "ended after 2 s" and 2 <= found["late"]["seconds"] < 50
    assert found["good"]["code"] == 1
    assert json.loads((tmp_path / "out/good/good.jsonl").read_text().splitlines()[1]) == {"ms": 1}


def test_what_ends_well_but_measured_less_is_not_complete(renew: Any, fake: Any, tmp_path: Path) -> None:
    left = f"{WRITES}open(out, 'a').write(json.dumps({{'row': 'x', 'skipped': 'no time is left'}}))"
    down = f"{WRITES}open(out, 'a').write(json.dumps({{'ready_s': None}}))"
    other = "print(json.dumps({'part': 'decode', 'error': 'Traceback'}))\n" + WRITES
    suite = "open(out, 'w').write(json.dumps(head | {'passed': PASSED, 'skipped': 3, 'skipped_because': {'GPUs': 3}}))"
    fake(
        ("left", left, 1), ("down", down, 1), ("none", "open(out, 'w').write('{}')", 1), ("other", other, 1),
        ("suite", HEAD + suite.replace("PASSED", "7"), 1), ("idle", HEAD + suite.replace("PASSED", "0"), 1),
    )  # fmt: skip
    found = run(renew, tmp_path / "out")
    assert found["suite"]["state"] == "complete"  # each skip has its reason
    assert found["idle"]["state"].startswith("left out")
    assert "no time is left" in found["left"]["state"] and "ready_s" in found["down"]["state"]
    assert found["none"]["state"] == "no row names the sources that made it"
    assert found["other"]["state"] == "an error was printed"


def test_the_budget_ends_what_runs_and_what_does_not_fit_waits(
    renew: Any, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(("large", WRITES, 900), ("first", "time.sleep(60)", 1), ("small", WRITES, 1))
    begun: list[float] = []

    def clock() -> float:
        """Stand still until the first one runs: what comes before takes any time on a busy machine."""
        if not begun and (tmp_path / "out" / "first" / "output.log").exists():
            begun.append(time.monotonic())
        return time.monotonic() - begun[0] if begun else 0.0

    monkeypatch.setattr(renew, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    found = run(renew, tmp_path / "out", "--budget", "2")
    assert time.monotonic() - begun[0] < 50, "it was not waited for"
    assert found["first"]["state"] == "no time was left" and found["first"]["exit_code"] != 0
    assert found["large"]["state"] == found["small"]["state"] == "no time is left"
    assert found["small"]["exit_code"] is None


def test_a_slow_machine_begins_nothing_that_it_would_cut_off(renew: Any, fake: Any, tmp_path: Path) -> None:
    """Each takes twice as long as expected: the third's 25 seconds would not be enough, of the 38 that are left."""
    late = f"time.sleep(1)\n{WRITES}"
    fake(("first", late, 0.5), ("second", late, 0.5), ("third", WRITES, 25))
    found = run(renew, tmp_path / "out", "--budget", "40")
    assert [found[name]["state"] for name in ("first", "second", "third")] == ["complete"] * 2 + ["no time is left"]
    assert found["third"]["exit_code"] is None


def test_parts_are_taken_in_the_order_that_is_asked_for(renew: Any, fake: Any) -> None:
    fake(("first", WRITES, 1), ("second", WRITES, 1), ("third", WRITES, 1))
    assert [part.name for part in renew.chosen(["third", "*ir*"])] == ["third", "first"]
    assert [part.name for part in renew.chosen([])] == ["first", "second", "third"]


def test_lanes_run_side_by_side_and_two_gpus_wait_for_both(renew: Any, fake: Any, tmp_path: Path) -> None:
    seen = f"import os\n{HEAD}head['gpus'] = os.environ['CUDA_VISIBLE_DEVICES']\nhead['begin'] = time.time()\n"
    seen += "head['dealt'] = 'FASTLAYERS_TESTS_PER_GPU' in os.environ\n"
    # Two of them wait until the other one runs as well: by themselves they might be over before it has begun.
    meets = (
        f"place, last = {str(tmp_path / 'here-')!r}, time.time() + 60\n"
        "open(place + name, 'w').close()\n"
        "while not os.path.exists(place + other) and time.time() < last: time.sleep(0.01)\n"
    )
    rest = "head['end'] = time.time()\nopen(out, 'w').write(json.dumps(head))"
    timed = f"{seen}time.sleep(1)\n{rest}"
    one, other = (f"name, other = {names}\n{seen}{meets}{rest}" for names in ("'a', 'c'", "'c', 'a'"))
    parts = (("a", one, 9), ("both", timed, 1, {"gpus": 2}), ("c", other, 1), ("d", timed, 1, {"noisy": True}),
             ("e", timed, 1, {"quiet": True}), ("wide", timed, 1, {"wide": True}))  # fmt: skip
    fake(*parts)
    assert {row["state"] for row in run(renew, tmp_path / "out", "--lanes", "2").values()} == {"complete"}
    rows = {
        part.name: json.loads((tmp_path / f"out/{part.name}/{part.name}.jsonl").read_text()) for part in renew.PARTS
    }

    def apart(one: str, other: str) -> bool:
        return bool(rows[one]["end"] <= rows[other]["begin"] or rows[other]["end"] <= rows[one]["begin"])

    assert rows["both"]["gpus"] == "0,1" and {rows["a"]["gpus"], rows["c"]["gpus"]} == {"0", "1"}
    assert not apart("a", "c") and apart("d", "e") and all(apart("both", name) for name in "acde")
    assert rows["wide"]["gpus"] == "0,1" and all(apart("wide", name) for name in "acde")
    assert [name for name in "acde" if rows[name]["dealt"]] == [] and rows["wide"]["dealt"]
    alone = run(renew, tmp_path / "one", "both", "wide")
    assert alone["both"]["state"] == "needs 2 GPUs" and alone["wide"]["state"] == "complete"


def test_workers_of_a_wide_suite_are_dealt_out_to_its_gpus(tmp_path: Path) -> None:
    suite = tmp_path / "tests"
    suite.mkdir()
    dealing = (ROOT / "tests/conftest.py").read_text().partition("# Before CUDA")[2].partition("sys.path")[0]
    (suite / "conftest.py").write_text(f"import os\n# Before CUDA{dealing}")  # without torch: imports take long
    (suite / "test_it.py").write_text(
        "import os, pathlib, time\n"
        "import pytest\n"
        "@pytest.mark.parametrize('place', range(8))\n"
        "def test_it(place, worker_id):\n"
        "    time.sleep(0.2)\n"
        f"    pathlib.Path({str(tmp_path)!r}, worker_id).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this worker
    env |= {"CUDA_VISIBLE_DEVICES": "4,7", "FASTLAYERS_TESTS_PER_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-q", "-n", "3", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=suite, check=False)
    assert done.returncode == 0, done.stdout
    assert [(tmp_path / f"gw{number}").read_text() for number in range(3)] == ["4", "7", "4"]


def test_the_environment_of_a_part(renew: Any, fake: Any, tmp_path: Path) -> None:
    asks = (
        "import os\nfrom importlib.util import find_spec\n"
        "assert all(map(find_spec, ('fastlayers', 'fastlayers_models', 'fastlayers_server', 'generate', 'mine')))\n"
        f"{HEAD}head |= {{name: os.environ.get(name) for name in ('FASTLAYERS_CACHE_DIR', 'HF_HUB_OFFLINE', 'OWN')}}\n"
        "print(json.dumps(head))\n"
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.py").touch()
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried-1.0-py3-none-any.whl", "w") as wheel:
        about = {"METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n", "RECORD": ""}
        about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in {"carried.py": "", **{f"carried-1.0.dist-info/{n}": t for n, t in about.items()}}.items():
            wheel.writestr(name, text)
    needs = {"environment": (("OWN", "yes"),), "needs": ("mine", "carried")}
    fake(("a", asks, 5, needs), ("b", asks, 5, {"needs": ("theirs",)}))
    flags = "--path", str(tmp_path / "more"), "--cache", str(tmp_path / "cache"), "--pack", str(tmp_path / "all.tgz")
    found = run(renew, tmp_path / "out", *flags, "--wheels", str(tmp_path / "wheels"))
    assert found["a"]["state"] == "complete", found["a"]
    said = json.loads((tmp_path / "out/a/output.log").read_text())
    assert (said["OWN"], said["HF_HUB_OFFLINE"], said["FASTLAYERS_CACHE_DIR"]) == ("yes", "1", str(tmp_path / "cache"))
    assert found["b"]["state"] == "lacks theirs"
    listed = subprocess.run(
        ["tar", "tzf", str(tmp_path / "all.tgz")], capture_output=True, text=True, check=True
    ).stdout
    assert listed.split() == ["a/output.log", "summary.jsonl"]


def test_what_is_complete_stays_after_a_cut_and_is_not_run_again(renew: Any, fake: Any, tmp_path: Path) -> None:
    fake(("a", WRITES, 1), ("b", "import os\nopen(out + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)", 1))
    program = tmp_path / "cut.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport renew\nfrom parts import Part\n"
        f"renew.PARTS = ({', '.join(map(repr, renew.PARTS))},)\nrenew.app()\n"
    )
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, program, "run", "--out", out], stdout=subprocess.PIPE, text=True) as process:
        pid = out / "b" / "b.jsonl.pid"
        while not (pid.is_file() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    rows = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()]
    assert [(row["part"], row["state"]) for row in rows[1:]] == [("a", "complete"), ("b", "cut off")]
    (tmp_path / "b.py").write_text("import json, sys\nout = sys.argv[1]\n" + WRITES)
    run(renew, out)
    rows = [json.loads(line) for line in (out / "summary.jsonl").read_text().splitlines()][4:]
    assert [row["part"] for row in rows] == ["b"]


def test_adopted_results_replace_their_part_and_name_their_commit(
    renew: Any, adopting: Any, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"result": "performance/both.jsonl"}
    whole = f"{HEAD}open(out, 'w').write(json.dumps(head | {{'passed': 3}}))"
    fake(("a", WRITES, 1, shared), ("b", "sys.exit(1)", 1, shared), ("w", whole, 9, {"result": "whole.json"}))
    out, results = tmp_path / "out", tmp_path / "results"
    run(renew, out)
    for path in out.rglob("*.json*"):
        path.write_text(path.read_text().replace(f'"commit": "{provenance()["commit"]}"', '"commit": ""'))
    monkeypatch.setattr(adopting, "named", lambda row: row | ({"commit": "fff1234"} if row.get("commit") == "" else {}))
    monkeypatch.setattr(adopting, "renew_tables", lambda tuned: None)
    old = [{"commit": "1", "part": "a"}, {"ms": 9}, {"commit": "2", "part": "b"}, {"ms": 8}]
    (results / "performance").mkdir(parents=True)
    (results / "performance/both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    said = CliRunner().invoke(renew.app, ["adopt", str(out)])
    assert said.exit_code == 0, said.output
    assert "b: not adopted: failed" in said.output and "a: fff1234" in said.output
    head, *rest = [json.loads(line) for line in (results / "performance/both.jsonl").read_text().splitlines()]
    assert head == {
        "command": "python x.py --out both.jsonl",
        "commit": "fff1234",
        "sources": source_hash(),
        "part": "a",
    }
    assert rest == [{"ms": 1}, *old[2:]]
    assert json.loads((results / "whole.json").read_text())["passed"] == 3
    times = json.loads((results / "renewed.json").read_text())
    assert set(times) == {"a", "w"} and times["a"]["commit"] == "fff1234"
    assert renew.expected(renew.PARTS[2]) == round(times["w"]["seconds"]) != 9
    # Sources that no commit has: nothing is written.
    before = {path: path.read_text() for path in results.rglob("*.json*")}
    monkeypatch.undo()
    fake(("w", whole, 9, {"result": "whole.json"}))
    (out / "w" / "whole.json").write_text(json.dumps({"commit": "", "sources": "0" * 16, "passed": 4}))
    said = CliRunner().invoke(renew.app, ["adopt", str(out)])
    assert said.exit_code != 0 and before == {path: path.read_text() for path in results.rglob("*.json*")}


def test_a_tuners_copy_does_not_undo_what_another_measured(
    adopting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = import_module("fastlayers.tuning.table")
    shipped = tmp_path / "tuned"
    monkeypatch.setattr(tables, "SHIPPED", shipped)
    monkeypatch.setattr(tables, "measurements", lambda path: tmp_path / "details" / path.parent.name / path.name)
    written: dict[str, Row] = {}
    monkeypatch.setattr(tables, "write", lambda path, table: written.update({path.name: table}))
    (shipped / "layer").mkdir(parents=True)
    for name in ("x.json", "y.json"):
        (shipped / "layer" / name).write_text('{"ms": 1}')
    ran = {tmp_path / part / "layer" / name: {"ms": ms} for part, name, ms in (
        ("a", "x.json", 2), ("b", "x.json", 1), ("a", "y.json", 1), ("b", "y.json", 1),
    )}  # fmt: skip
    assert list(adopting._adopt_tables(ran)) == [f"layer/x.json: {adopting.NEW_TABLE}"]
    assert written == {"x.json": {"ms": 2}}


def test_parts_behind_a_tuner_take_its_ladders_and_say_so(
    renew: Any, adopting: Any, fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = import_module("fastlayers.tuning.table")
    shipped = tmp_path / "tuned"
    monkeypatch.setattr(tables, "SHIPPED", shipped)
    monkeypatch.setattr(tables, "MEASUREMENTS", tmp_path / "details" / "none")
    (shipped / "layer").mkdir(parents=True)
    for name in ("old.json", "new.json"):
        (shipped / "layer" / name).write_text('{"ms": 2}')
    tunes = (
        "from pathlib import Path\nfolder = Path(out).parent / 'layer'\n"
        "assert sorted(path.name for path in folder.glob('*')) == ['new.json', 'old.json']\n"
        "(folder / 'new.json').write_text(json.dumps({'ms': 1}))\n"
    )
    asks = (
        f"{HEAD}import os\nfrom pathlib import Path\nfolder = os.environ.get('FASTLAYERS_TUNED_DIR')\n"
        "found = folder and {p.name: json.loads(p.read_text()) for p in Path(folder).glob('layer/*')}\n"
        "open(out, 'w').write(json.dumps(head) + '\\n' + json.dumps({'found': found}) + '\\n')\n"
    )
    parts = fake(
        ("before", asks, 5), ("retune.idle", "", 5, {"result": "tuned/layer"}), ("between", asks, 5),
        ("retune.x", tunes, 5, {"result": "tuned/layer"}), ("behind", asks, 5),
    )  # fmt: skip
    out = tmp_path / "out"
    ended = run(renew, out)
    assert [ended[part.name]["state"] for part in parts] == ["complete"] * 5, ended
    assert [ended[name].get("tables") for name in ("before", "between", "behind")] == [None, None, ["retune.x"]]
    monkeypatch.setattr(adopting, "named", lambda row: row)
    monkeypatch.setattr(adopting, "renew_tables", lambda tuned: None)
    assert CliRunner().invoke(renew.app, ["adopt", str(out)]).exit_code == 0
    for name, found in (("before", None), ("between", None), ("behind", {"new.json": {"ms": 1}})):
        head, row = [json.loads(line) for line in (tmp_path / f"results/{name}.jsonl").read_text().splitlines()]
        assert row == {"found": found} and head.get("tables") == (found and ["retune.x"])
    assert json.loads((shipped / "layer" / "new.json").read_text()) == {"ms": 1}


# ---- the real parts --------------------------------------------------------------------------------------------


class Parsed(Exception):
    """A program has understood its arguments."""


def names(renew: Any) -> list[Any]:
    return list(import_module("parts").PARTS)


def understood(program: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program up to where its arguments are parsed; raises where they are none of its own."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: Any, given: Any = None, namespace: Any = None) -> Any:
        parse(parser, given, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(program), *arguments])
    module = import_module(program.stem)
    with pytest.raises(Parsed):
        module.main()


def walked(command: Any, arguments: list[str], parent: Any = None) -> None:
    """Parse a command line of click's down to the last sub-command; raises where an argument is unknown."""
    context = command.make_context(command.name, list(arguments), parent=parent)
    if isinstance(command, click.Group) or hasattr(command, "resolve_command"):
        _, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        walked(sub, rest, context)


def test_every_command_is_understood_by_its_program(
    renew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastlayers_server.cli import app

    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    for part in names(renew):
        first, *arguments = renew.command_of(part, tmp_path, 4)[1:]
        if part.command.startswith("ranks "):
            first, *arguments = arguments[4:]
        if part.command.startswith("pytest "):
            assert arguments[0] == "pytest" and any(
                mark.startswith(f"{arguments[arguments.index('-m', 1) + 1]}:") for mark in marks
            )
            paths = [word for word in arguments[1:] if word.startswith("tests")]
            assert paths and all((ROOT / path).exists() for path in paths)
        elif part.command.startswith("fastlayers "):
            walked(typer.main.get_command(app), arguments[1:])
        else:
            with monkeypatch.context() as patched:
                understood(ROOT / first, arguments, patched)


def test_parts_have_names_of_their_own_and_known_needs(renew: Any) -> None:
    parts = import_module("parts")
    given = [part.name for part in parts.PARTS]
    assert len(set(given)) == len(given) > 60
    assert {parts.value(part) for part in parts.PARTS} == set(range(len(parts.VALUE) + 1))
    for part in parts.PARTS:
        assert part.gpus in (1, 2, 4) and 0 < part.seconds < 400 and part.target and not (part.noisy and part.quiet)
        printed = part.command.endswith("--json") or part.name == "torch_compile"
        assert printed or not part.result or "{out}" in part.command or "{dir}" in part.command
        assert not ("{out}" in part.command and not part.result)


def test_programs_do_not_stop_before_their_part_is_expected_to_end(renew: Any) -> None:
    """What a program leaves out for want of time makes its part incomplete, so that nothing of it is adopted."""
    own = 0
    for part in names(renew):
        words = shlex.split(part.command)
        path = ROOT / words[0]
        if path.suffix == ".py" and (told := re.search(r"arguments\(__doc__, ([\d.]+)\)", path.read_text())):
            limit = float(words[words.index("--seconds") + 1] if "--seconds" in words else told[1])
            assert limit >= part.seconds, part.name
            own += 1
    assert own >= 7


def test_the_gpu_suite_is_each_file_with_such_tests_once(renew: Any) -> None:
    parts = {part.name: part.command.split(" -m gpu")[0].split()[1:] for part in names(renew)}
    run = parts["gpu_suite"] + parts["gpu_parity"]
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "gpu" in (text := path.read_text())  # most have no such word, and are not parsed
        and any(isinstance(node, ast.Attribute) and node.attr == "gpu" for node in ast.walk(ast.parse(text)))
    }
    assert len(run) == len(set(run)) and set(run) == marked


def test_parity_with_all_packages_had_them(renew: Any) -> None:
    """A run that a variable had switched packages off for stood there once; a part's environment is its own."""
    results = ROOT / "benchmarks/results"
    found, alone = (json.loads((results / f"gpu_parity{name}.json").read_text()) for name in ("", "_alone"))
    for package in ("flashinfer", "deep_gemm", "flashmla"):
        assert any(f"-{package}" in triple for triple in found["triples"]), package
        assert not any(f"-{package}" in triple for triple in alone["triples"]), package
    assert not any("FASTLAYERS_DISABLE" in why for why in found["skipped_because"])


def test_a_part_has_none_of_our_variables_but_its_own(renew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "BACKEND", "TUNED_DIR"):
        monkeypatch.setenv(f"FASTLAYERS_{name}", "given")
    found = {name for name in renew.environment([], None) if name.startswith("FASTLAYERS_")}
    assert "FASTLAYERS_TUNED_DIR" in found and not found & {"FASTLAYERS_DISABLE", "FASTLAYERS_BACKEND"}


def test_the_page_is_renewed_in_one_go_of_two_gpus(renew: Any) -> None:
    """Half an hour of two GPUs, each with a lane of parts, starts and waiting included."""
    page = renew.chosen([], page=True)
    assert {part.result for part in page} == {part.result for part in names(renew) if part.on_page}
    assert {part.result.partition("/")[0] for part in page} == {"performance"} and {part.gpus for part in page} == {1}
    assert sum(part.seconds for part in page) <= 3500


def test_each_committed_result_of_a_gpu_belongs_to_a_part_or_is_history(adopting: Any) -> None:
    parts = import_module("parts")
    owned = {part.result: {each.name for each in parts.PARTS if each.result == part.result} for part in parts.PARTS}
    on_gpus = set()
    for path in RESULTS.rglob("*.*"):
        name = path.relative_to(RESULTS).as_posix()
        if name.startswith("tuned/"):
            assert name.rpartition("/")[0] in owned, name
        elif (
            re.search("H[12]00", path.read_text())
            and not name.endswith("_training.json")
            and name != "simulated_splits.json"
        ):
            on_gpus.add(name)
    assert {name for name in on_gpus if (name in owned) == (name in parts.HISTORY)} == set()
    assert set(parts.HISTORY) <= on_gpus and all(parts.HISTORY.values())
    for name in on_gpus - set(parts.HISTORY):
        labels = {head.get("part") for row in adopting.rows_of(RESULTS / name) if (head := adopting.head_of(row))}
        if name.endswith(".jsonl"):
            assert labels and labels <= owned[name], name


def test_the_commands_of_the_shell_are_words(renew: Any) -> None:
    for part in names(renew):
        assert shlex.split(part.command) and not set(part.command) & set("|;&<>`$")
