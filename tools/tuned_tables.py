"""Keep the shipped tuned tables what their measurements and their sources say.

    python tools/tuned_tables.py summarise [--check]    alternatives, times and what a neighbour's ladder would cost
    python tools/tuned_tables.py stamp [--check]        the kernels' hashes by today's rule, from the tables' sources

``summarise`` computes from ``benchmarks/results/tuned`` what a table says beside its ladder, and the ladder too where
whole steps were timed (``tools/step_ladders.py``), or steps of drawn lengths (``tools/drawn_lengths.py``). For
``stamp``:
A table names the commit that made it, and the hash of its sources. That commit is checked out; a table that was made
from other sources is refused (one that has no hash of them: if its kernels' hashes are other than the commit's own code
computes). The new hashes are those of the commit's sources. Whether today's kernels are the same is for the tables'
reader to find. Needed when the rule of :mod:`fastlayers.tuning.sources` changes, not when kernels do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastlayers.device import DESCRIBED
from fastlayers.registry import registry
from fastlayers.tuning import rules
from fastlayers.tuning.ladder import borrowed_ratios
from fastlayers.tuning.provenance import combined
from fastlayers.tuning.rungs import Step, TuneError, alternatives, as_rows, best_times, choose_ladder
from fastlayers.tuning.samples import Option, Sample
from fastlayers.tuning.sources import Sources
from fastlayers.tuning.staleness import removable_packages
from fastlayers.tuning.sweep import parse_shape
from fastlayers.tuning.table import SHIPPED, read_whole, write

sys.path.insert(0, str(Path(__file__).parent))
from drawn_lengths import drawn_of, with_drawn
from step_ladders import in_steps, steps_of

ROOT = Path(__file__).parents[1]
# Of what a table holds.
ORDER = ("schema", "layer", "device", "key", "cfg", "ladder", "alternatives", "tokens", "times", "borrowed", "steps")
# Run by the old tree: its rows' targets, and their hashes as it computes them.
ASK = """
import hashlib, json, sys
from fastlayers.registry import registry
try:
    from fastlayers.fingerprint import kernel_hash
except ImportError:
    from fastlayers.tuning.staleness import kernel_hash
rows = {layer: {b.name: (b.target, kernel_hash(b.target)) for b in registry(layer).ranked if isinstance(b.target, str)}
        for layer in sys.argv[1:]}
try:
    from fastlayers.testing.sweep import parse_shape
except ImportError:
    from fastlayers.tuning.sweep import parse_shape
rules = {}
for path, layer, cfg, names, counts in json.load(sys.stdin):
    for name in names:
        candidates = getattr(registry(layer).named(name).load(), "candidates", None)
        if candidates is not None:
            chosen = [candidates(parse_shape(layer, cfg), count)[:1] for count in counts]
            digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]
            rules.setdefault(path, {})[name] = digest
print(json.dumps([rows, rules]))
"""


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


def sources_of(commit: str) -> str:
    """Return what :func:`fastlayers.tuning.provenance.source_hash` gives at a commit, from git alone."""
    rows = [line.split(maxsplit=3) for line in git("ls-tree", "-r", f"{commit}:src/fastlayers").splitlines()]
    return combined((path, blob) for _, _, blob, path in rows if path.endswith(".py"))


def reader(src: Path) -> Any:
    """Return what reads the modules below a directory, for :class:`Sources`."""

    def read(name: str) -> tuple[str, bool] | None:
        path = src.joinpath(*name.split("."))
        for file, package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.is_file():
                return file.read_text(encoding="utf-8"), package
        return None

    return read


def _relied_on(table: dict[str, Any]) -> list[str]:
    rungs = [row for rows in (table["ladder"], *table["alternatives"]) for row in rows]
    return sorted({row["backend"] for row in rungs if not row.get("config")})


def hashes_at(commit: str, tables: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, dict[str, str]]]:
    """Return the new hashes of tables that one commit made; raises if one was made from other sources."""
    layers = sorted({table["layer"] for table in tables.values()})
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        git("worktree", "add", "-q", "--detach", str(tree), commit)
        try:
            env = {"PYTHONPATH": str(tree / "src"), "PATH": "/usr/bin:/bin"}
            told = json.dumps([
                (str(path), table["layer"], table["cfg"], _relied_on(table), table["tokens"])
                for path, table in tables.items()
            ])  # fmt: skip
            command = [sys.executable, "-c", ASK, *layers]
            asked = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=place, input=told)
            (rows, rules), sources = json.loads(asked.stdout), Sources(reader(tree / "src"))
            found: dict[Path, dict[str, dict[str, str]]] = {}
            for path, table in tables.items():
                then = table["metadata"]["kernels"]
                made = table["metadata"].get("sources")
                wrong = [name for name, kept in then.items() if rows[table["layer"]][name][1] != kept]
                if made is not None:
                    wrong = [] if made == sources_of(commit) else sorted(then)
                if wrong:
                    raise SystemExit(
                        f"{path}: the kernels of {', '.join(wrong)} at {commit} are not what it was made of"
                    )
                kernels = {name: sources.kernel_hash(rows[table["layer"]][name][0]) for name in then}
                found[path] = {"kernels": kernels, "rules": rules.get(str(path), {})}
            return found
        finally:
            git("worktree", "remove", "--force", str(tree))


def stamp(check: bool) -> None:
    """Write the hashes of all tables' kernels; or only see that they can be had."""
    made: dict[str, dict[Path, dict[str, Any]]] = {}
    for path in sorted(SHIPPED.glob("*/*.json")):
        table = json.loads(path.read_text())
        made.setdefault(table["metadata"]["commit"], {})[path] = table
    for commit, tables in made.items():
        for path, hashes in hashes_at(commit, tables).items():
            table = tables[path]
            if not check:
                about = table["metadata"] | hashes | {"sources": sources_of(commit)}
                write(path, table | {"metadata": about})
        print(f"{commit}: {len(tables)} tables")


def summary(path: Path) -> dict[str, Any]:
    """Return what a table says beside its ladder, from its measurements."""
    layer = path.parent.name
    device = DESCRIBED[path.stem.rpartition("device_name=")[2]]
    table = read_whole(path, layer, device)
    samples = [Sample.from_json(row) for row in table["measured"]]
    drawn = drawn_of(layer, str(table["key"]), table["device"])
    counted = with_drawn(samples, drawn)
    rows = [row for row in registry(layer).ranked if row.name in table["metadata"]["versions"]]
    layouts, rank = {row.name: row.weight_layout for row in rows}, [row.name for row in rows]
    steps, note, left = steps_of(layer, str(table["key"]), table["device"])
    for each in left:
        print(f"not applied: {each}")

    offered = [row.name for row in rows if not removable_packages(row)]

    def choose(names: frozenset[str]) -> list[Step] | None:
        try:
            return choose_ladder(in_steps(counted, steps, names, offered), layouts, rank)
        except TuneError:
            return None

    ladder = [Step(r["max_tokens"], Option.of(r), r["microseconds"]) for r in table["ladder"]]
    found: dict[str, Any] = {}
    if (steps or drawn) and (chosen := choose(frozenset(rank))) is not None:
        ladder, found = chosen, {"ladder": as_rows(chosen)} | ({"steps": note} if steps else {})
    elif left and "steps" in table:  # as stale as the table's times
        found = {"steps": table["steps"]}
    others = alternatives(ladder, {row.name: removable_packages(row) for row in rows}, choose)
    found |= {"alternatives": [as_rows(steps) for steps in others], **best_times(samples)}
    ratios = borrowed_ratios(layer, device, whole=True).get(str(table["key"]))
    return found | ({"borrowed": round(statistics.median(ratios), 3)} if ratios else {})


def _rules_now(table: dict[str, Any]) -> dict[str, str]:
    rows = [registry(table["layer"]).named(name) for name in table["metadata"]["versions"]]
    return rules(table, parse_shape(table["layer"], table["cfg"]), rows)


def summarise(check: bool) -> list[Path]:
    """Bring every table up to date; return those that were not (with ``check`` nothing is written)."""
    stale = []
    for path in sorted(SHIPPED.glob("*/*.json")):
        table = json.loads(path.read_text())
        kept = {name: value for name, value in table.items() if name not in ("alternatives", "borrowed", "steps")}
        new = kept | summary(path)
        new = {name: new[name] for name in (*ORDER, *(name for name in new if name not in ORDER)) if name in new}
        if new != table:
            stale.append(path)
            if not check:
                if new["ladder"] != table["ladder"]:  # it may rely on another backend's own rule: today's was timed
                    then = table["metadata"].get("rules", {})
                    rules_now = {name: then.get(name, now) for name, now in _rules_now(new).items()}
                    new["metadata"] = table["metadata"] | {"rules": rules_now}
                write(path, new)
    return stale


def main() -> None:
    """Run one of the two."""
    check = "--check" in sys.argv
    if sys.argv[1:2] == ["stamp"]:
        stamp(check)
    elif sys.argv[1:2] == ["summarise"]:
        stale = summarise(check)
        print(f"{len(stale)} tables are not what their measurements say" if check else f"{len(stale)} tables written")
        if check and stale:
            raise SystemExit(1)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
