"""Which kernels and ladders are others today than when the points of docs/performance.md were timed.

``python tools/page_since.py`` reads from git what stood at the commit of these points and records it in
``benchmarks/results/page_kernels.json``; the page's table compares that with the sources as they are. A kernel is
compared by what it does (:mod:`fastlayers.tuning.sources`), wherever it stands and whatever it is called.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from performance_rows import CALLS, DEVICE, RESULTS, ROOT, Row, lines_of, points, read

from fastlayers import tuning
from fastlayers.registry import LAYERS, builtin_registry
from fastlayers.tuning.sources import Sources, _all
from fastlayers.tuning.sweep import parse_shape

RECORD = RESULTS.parent / "page_kernels.json"
SOURCE = "src/fastlayers"
Reader = Callable[[str], str | None]


def on_disk(path: str) -> str | None:
    """Return a file's text as it is, ``None`` where there is none."""
    return (ROOT / path).read_text() if (ROOT / path).is_file() else None


def at(commit: str) -> Reader:
    """Return what reads files as they were at a commit."""

    @lru_cache
    def text(path: str) -> str | None:
        found = subprocess.run(["git", "-C", str(ROOT), "show", f"{commit}:{path}"], capture_output=True, text=True)
        return found.stdout if found.returncode == 0 else None

    return text


def sources(reader: Reader) -> Sources:
    """Return the library's modules as ``reader`` finds them."""

    def module(name: str) -> tuple[str, bool] | None:
        path = "src/" + name.replace(".", "/")
        for file, package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            if (text := reader(file)) is not None:
                return text, package
        return None

    return Sources(module)


def targets() -> dict[str, str]:
    """Return today's backends of all layers with modules of this library, as ``layer/row``, and their targets."""
    rows = [(layer, row) for layer in LAYERS for row in builtin_registry(layer).ranked]
    return {f"{layer}/{row.name}": row.target for layer, row in rows if isinstance(row.target, str)}


def stand(reader: Reader, files: list[str]) -> dict[str, Any]:
    """Return what ``reader`` finds: the hash of each backend's kernels, each kernel's own, and the ladders' rungs."""
    modules = sources(reader)
    backends = {name: modules.kernel_hash(target) for name, target in targets().items() if _there(modules, target)}
    kernels: dict[str, str] = {}
    for file in files:
        if file.endswith(".py"):
            module = modules.module(file.removeprefix("src/").removesuffix(".py").replace("/", "."))
            for each in _all(module) if module is not None else ():
                if each.jitted:
                    modules._digests = {}  # what a circle of definitions hashes to depends on where it was entered
                    kernels[f"{file.removeprefix(f'{SOURCE}/')}::{each.name}"] = modules._digest(each)
    ladders = {}
    for file in files:
        if file.startswith(f"{SOURCE}/tuned/") and file.endswith(f",device_name={DEVICE}.json"):
            rungs = json.loads(reader(file) or "{}")["ladder"]
            name = file.removeprefix(f"{SOURCE}/tuned/").removesuffix(f",device_name={DEVICE}.json")
            ladders[name] = [{key: rung.get(key) for key in ("max_tokens", "backend", "config")} for rung in rungs]
    return {"backends": backends, "kernels": kernels, "ladders": ladders}


def _there(modules: Sources, target: str) -> bool:
    module = modules.module(target.partition(":")[0])
    return module is not None and target.partition(":")[2] in {*module.definitions, *module.imports}


@lru_cache
def today() -> dict[str, Any]:
    """Return what stands in the sources as they are."""
    return stand(on_disk, sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / SOURCE).rglob("*.*")))


def commit_of_points() -> str:
    """Return the commit at which most of the page's points of layers were timed."""
    found = Counter(
        row["run"]["commit"] for part in CALLS for row in lines_of(part) if isinstance(row.get("run"), dict)
    )  # fmt: skip
    return found.most_common(1)[0][0] if found else ""


def recorded() -> dict[str, Any]:
    """Return what stood at the page's commit."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def changed() -> str:
    """A line a layer: which kernels and ladders are others, and how many of the page's points ran by such."""
    old, new = recorded(), today()
    known, kernels = set(old["kernels"].values()), defaultdict[str, list[str]](list)
    for name, digest in new["kernels"].items():
        if digest not in known:
            kernels[_owner(name)].append(name)
    backends = defaultdict[str, list[str]](list)
    for name, digest in new["backends"].items():
        if old["backends"].get(name) != digest:
            layer, _, row = name.partition("/")
            backends[layer].append(f"`{row}`" + ("" if name in old["backends"] else " (new)"))
    ladders = Counter(
        name.partition("/")[0] for name in {*old["ladders"], *new["ladders"]}
        if old["ladders"].get(name) != new["ladders"].get(name)
    )  # fmt: skip
    timed = points_of_layers()
    lines = ["| layer | backends with other kernels | kernels that are other or new | other ladders | points |"]
    lines.append("|---|---|---|---|---|")
    for layer in sorted({*kernels, *backends, *ladders}):
        files = Counter(name.partition("::")[0] for name in kernels.get(layer, ()))
        told = ", ".join(f"`{file}` {count}" for file, count in sorted(files.items()))
        mine = timed.get(layer, [])
        own = sum(otherwise(row, old, new) for row in mine)
        share = f"{own} of {len(mine)}" if mine else "none of its own"
        lines.append(f"| {layer} | {', '.join(backends[layer])} | {told} | {ladders[layer] or ''} | {share} |")
    return "\n".join(lines)


def _owner(kernel: str) -> str:
    """Return the layer of whose backends one is beside a kernel or above it, else the kernel's folder."""
    homes: dict[str, str] = {}
    for name, target in targets().items():
        homes.setdefault(target.partition(":")[0].rpartition(".")[0], name.partition("/")[0])
    folders = kernel.partition("::")[0].split("/")[:-1]
    above = (".".join(["fastlayers", *folders[:count]]) for count in range(len(folders), 0, -1))
    return next((homes[folder] for folder in above if folder in homes), "/".join(folders))


def points_of_layers() -> dict[str, list[Row]]:
    """Return what ``auto`` took at each of the page's points, by layer."""
    found = defaultdict[str, list[Row]](list)
    for part in CALLS:
        for rows in points(read(part)).values():
            for row in [row for row in rows if row["auto"]][:1]:
                found[row["layer"]].append(row)
    return found


def otherwise(row: Row, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether a point's backend has other kernels today, or its shape's ladder another rung for its tokens."""
    name = f"{row['layer']}/{row['backend']}"
    if old["backends"].get(name) != new["backends"].get(name):
        return True
    shape = f"{row['layer']}/{key_of(row['layer'], row['cfg'])}"
    rungs = [each["ladders"].get(shape) for each in (old, new)]
    before, after = (tuning.rung_at(each, row["tokens"]) if each else None for each in rungs)
    parts = [each and (each["backend"], each["config"]) for each in (before, after)]
    return parts[0] != parts[1]


@lru_cache
def key_of(layer: str, cfg: str) -> str | None:
    """Return the key of the table of a shape that a result names by its configuration's ``repr``."""
    return tuning.key_of(parse_shape(layer, cfg))


def main() -> None:
    """Record what stood at the commit of the page's points."""
    commit = commit_of_points()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", commit, SOURCE], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    made = {"command": "python tools/page_since.py", "commit": commit} | stand(at(commit), listed.stdout.splitlines())
    RECORD.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
