"""Name the commit of results that only know the hash of their sources: ``python tools/result_commits.py FILE ...``.

The commit is the one that other committed results name beside this hash, or else the newest whose ``src/fastlayers``
has it. What no commit has is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlayers.tuning.provenance import combined

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MOST_COMMITS = 400


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


@lru_cache
def commit_of(sources: str) -> str:
    """Return the commit that committed results name for these sources; else the newest that has them."""
    heads = (line for path in RESULTS.rglob("*.jsonl") for line in path.read_text().splitlines() if sources in line)
    named_so = (head for head in map(json.loads, heads) if head.get("sources") == sources and head.get("commit"))
    known = Counter(head["commit"] for head in named_so)
    if known:
        return known.most_common(1)[0][0]
    commits = git("log", "--format=%h", "-n", str(MOST_COMMITS)).split()
    trees = git("rev-parse", *(f"{commit}:src/fastlayers" for commit in commits)).split()
    # Most commits leave these sources as they were: of each tree the newest one counts.
    newest = dict(zip(reversed(trees), reversed(commits), strict=True))
    for tree, commit in reversed(newest.items()):
        rows = [line.split(maxsplit=3) for line in git("ls-tree", "-r", tree).splitlines()]
        if combined((path, blob) for _, _, blob, path in rows if path.endswith(".py")) == sources:
            return commit
    raise SystemExit(f"no commit has the sources {sources}")


def named(value: Any) -> Any:
    """Return ``value`` with commits where only sources were known."""
    if isinstance(value, list):
        return [named(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: named(each) for key, each in value.items()}
    return (
        found | {"commit": commit_of(found["sources"])} if found.get("sources") and not found.get("commit") else found
    )


def main() -> None:
    """Rewrite each file."""
    for name in sys.argv[1:]:
        path = Path(name)
        if path.suffix == ".jsonl":
            lines = [json.dumps(named(json.loads(line))) for line in path.read_text().splitlines() if line]
            path.write_text("".join(f"{line}\n" for line in lines))
        else:
            path.write_text(json.dumps(named(json.loads(path.read_text())), indent=1) + "\n")


if __name__ == "__main__":
    main()
