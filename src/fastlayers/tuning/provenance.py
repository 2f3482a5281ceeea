"""Which sources made a figure: the commit if git knows it, and a hash of the files themselves, which it need not."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def combined(blobs: Iterable[tuple[str, str]]) -> str:
    """Return the hash of files given as (path, git's hash of the content), in any order.

    ``git ls-tree -r COMMIT`` prints the same pairs, so whoever has the history can check what a result says.
    """
    lines = "".join(f"{blob} {path}\n" for path, blob in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@lru_cache
def source_hash(folder: Path = PACKAGE) -> str:
    """Return the hash of a package's Python files as they are on the disk, committed or not."""
    files = sorted(folder.rglob("*.py"))
    return combined((path.relative_to(folder).as_posix(), _blob(path.read_bytes())) for path in files)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit() -> str:
    """Return the commit that is checked out, shortened; empty without git, or where files differ from it.

    A copy of a tree may come with an older history: then the hash of the sources finds the commit
    (``tools/result_commits.py``).
    """
    git = ["git", "-C", str(PACKAGE)]
    try:
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True)
        if changed.returncode or changed.stdout.strip():
            return ""
        return subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def provenance() -> dict[str, str]:
    """Return what results and tables carry: ``commit`` and ``sources``."""
    return {"commit": commit(), "sources": source_hash()}


def loop_ms(turns: int = 200_000, repeats: int = 5) -> float:
    """Return the least milliseconds of a loop that is Python's alone: hosts differ by two, and what they bound too."""
    least = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        for _turn in range(turns):
            pass
        least = min(least, time.perf_counter() - begin)
    return round(1000 * least, 2)
