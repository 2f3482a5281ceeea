"""Name the commit of results that only know the hash of their sources: ``python tools/result_commits.py FILE ...``.

Looks through the history for a commit whose ``src/fastlayers`` has this hash, and writes it into the file. What no
commit has is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlayers.tuning.provenance import combined

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


@lru_cache
def commit_of(sources: str) -> str:
    """Return the newest commit whose sources have this hash."""
    for commit in git("log", "--format=%h", "-n", "400").split():
        rows = [line.split(maxsplit=3) for line in git("ls-tree", "-r", f"{commit}:src/fastlayers").splitlines()]
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
