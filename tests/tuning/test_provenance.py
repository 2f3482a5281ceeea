"""What results and documents say about the sources that made a figure is true, as far as the history here reaches."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastlayers as fl
from fastlayers.tuning.provenance import combined, provenance, source_hash

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def git(*arguments: str) -> str | None:
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return found.stdout if found.returncode == 0 else None


def sources_of(commit: str) -> str | None:
    listed = git("ls-tree", "-r", f"{commit}:src/fastlayers")
    rows = [line.split(maxsplit=3) for line in listed.splitlines()] if listed is not None else []
    return combined((path, blob) for _, _, blob, path in rows if path.endswith(".py")) if rows else None


def descriptions() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every mapping in a result file that names a commit."""

    def inside(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if isinstance(value.get("commit"), str):
                yield value
            for each in value.values():
                yield from inside(each)
        elif isinstance(value, list):
            for each in value:
                yield from inside(each)

    tables = (Path(fl.__file__).parent / "tuned").glob("*/*.json")
    for path in [*sorted(RESULTS.rglob("*.json*")), *tables]:
        text = path.read_text()
        whole = (
            [json.loads(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else json.loads(text)
        )
        for each in inside(whole):
            yield path, each


def test_a_commit_that_a_result_names_has_the_sources_that_it_names() -> None:
    pairs = {(each["commit"], each["sources"]): path for path, each in descriptions() if each.get("sources")}
    assert pairs
    known = {pair: found for pair in pairs if (found := sources_of(pair[0])) is not None}
    if not known:
        pytest.skip("the history that made the results is not here")
    wrong = {str(pairs[pair]): pair for pair, found in known.items() if found != pair[1]}
    assert not wrong


def test_documents_quote_only_commits_that_results_name() -> None:
    named = {str(each["commit"])[:7] for _, each in descriptions()}
    assert len(named) > 3
    wrong = []
    for path in DOCUMENTS:
        for quoted in re.findall(r"(?<![\w#])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,12}(?!\w)", path.read_text()):
            if quoted[:7] not in named:
                wrong.append(f"{path.relative_to(ROOT)} quotes {quoted}")
    assert wrong == []


def test_what_runs_here_is_described_by_its_files() -> None:
    found = provenance()
    assert found["sources"] == source_hash() and len(found["sources"]) == 16
    clean = git("status", "--porcelain", "src/fastlayers") == ""
    if clean and found["commit"]:
        assert found["sources"] == sources_of(found["commit"])
