"""Results that only know the hash of their sources are named after the newest commit that has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastlayers.tuning.provenance import source_hash

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import result_commits

    monkeypatch.setattr(result_commits, "ROOT", tmp_path)
    monkeypatch.setattr(result_commits, "RESULTS", tmp_path / "results")
    result_commits.commit_of.cache_clear()
    yield result_commits
    result_commits.commit_of.cache_clear()
    sys.modules.pop("result_commits")


def test_the_newest_commit_of_the_sources(tool: Any, tmp_path: Path) -> None:
    package, names, hashes = tmp_path / "src/fastlayers", [], []
    package.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for file, text in (("a.py", "1"), ("README", "other"), ("a.py", "2"), ("notes.txt", "no source"), ("a.py", "1")):
        (package / file if file.endswith(".py") else tmp_path / file).write_text(text)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", file], check=True)
        names.append(tool.git("rev-parse", "--short", "HEAD").strip())
        hashes.append(source_hash.__wrapped__(package))  # it is kept by folder
    assert len(set(hashes)) == 2
    assert tool.commit_of(hashes[2]) == names[3] and tool.commit_of(hashes[0]) == names[4]
    with pytest.raises(SystemExit, match="no commit has the sources 0000"):
        tool.commit_of("0000")
    # What committed results say comes first; it fills in what is empty, and nothing else.
    tool.commit_of.cache_clear()
    (tmp_path / "results").mkdir()
    (tmp_path / "results/x.jsonl").write_text(json.dumps({"commit": "abc", "sources": hashes[0]}) + "\n")
    rows = [{"sources": hashes[0], "commit": ""}, {"sources": hashes[2], "commit": "kept"}, {"ms": 1}]
    assert [row.get("commit") for row in tool.named(rows)] == ["abc", "kept", None]
