"""Take the results of ``renew.py run`` into benchmarks/results: whole, with their commit, without a machine's paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tools", "src")]
from parts import PARTS, Part  # noqa: E402
from result_commits import named  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TIMES = RESULTS / "renewed.json"
SUMMARY = "summary.jsonl"
# Keys of rows that say themselves that something was not measured.
LEFT_OUT = frozenset({"skipped", "left_out", "stopped"})
TABLES = (
    "page_since.py", "performance_tables.py", "readme_tables.py", "systems_table.py", "distributed_tables.py",
    "simulate_splits.py",
)  # fmt: skip
NEW_TABLE = "a new table"
# Below what `run` wrote: the tables that tuners changed, for the parts behind them.
NEW_TABLES = "new_tables"
Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Return the JSON objects of a file, the whole of it or a line each; other lines are passed over."""

    def parsed(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return None

    text = path.read_text(errors="replace")
    whole = parsed(text)
    return [row for row in ([whole] if whole is not None else map(parsed, text.splitlines())) if isinstance(row, dict)]


def head_of(row: Row) -> Row | None:
    """Return what of a row describes the run that the rows below come from, if it does."""
    inside = row.get("run")
    return next((each for each in (inside, row) if isinstance(each, dict) and "commit" in each), None)


def result_of(part: Part, folder: Path) -> Path:
    """Return the file that holds what a part measured: the JSON file in its folder, else what it printed."""
    made = sorted(path for path in folder.glob("*.json*") if path.is_file())
    if len(made) > 1:
        raise SystemExit(f"{part.name}: several results: {', '.join(path.name for path in made)}")
    return made[0] if made else folder / "output.log"


def missing(part: Part, folder: Path) -> str:
    """Return why a part that ended well is not complete; an empty text: it is."""
    if not part.result or part.result.startswith("tuned/"):
        return ""
    rows = rows_of(result_of(part, folder))
    left = [row for row in rows if (LEFT_OUT & row.keys() and not _told(row)) or row.get("ready_s", 0) is None]
    if any("error" in row and "part" in row for row in rows_of(folder / "output.log")):
        return "an error was printed"
    if not any(map(head_of, rows)):
        return "no row names the sources that made it"
    return f"left out: {json.dumps(left[0])[:200]}" if left else ""


def _told(row: Row) -> bool:
    """Return whether what a row leaves out is its result.

    The ablation says of an optimisation that a model has not got it; a suite's summary has the reason of each skip (a
    backend's refusal, GPUs that the machine has not got), which is adopted with it, where anything ran at all.
    """
    return "items" in row or ("skipped_because" in row and row["passed"] > 0)


def whole_tables(layer: str, folder: Path) -> None:
    """Put the shipped tables of a layer with their measurements into a folder: a tuner then measures what is stale."""
    from fastlayers.tuning.table import SHIPPED, measurements, write

    for path in sorted((SHIPPED / layer).glob("*.json")):
        details = json.loads(measurements(path).read_text()) if measurements(path).is_file() else {}
        write(folder / layer / path.name, json.loads(path.read_text()) | details)


def complete(folder: Path, sources: str | None = None) -> set[str]:
    """Return the parts that a summary calls complete, last; with ``sources`` only runs of these."""
    return {name for name, row in _ended(folder).items() if row["state"] == "complete" and sources in (None, row["by"])}


def _ended(folder: Path) -> dict[str, Row]:
    """Return the last line of each part that ran, with the run that it belongs to."""
    found: dict[str, Row] = {}
    run: Row = {}
    for row in rows_of(folder / SUMMARY) if (folder / SUMMARY).is_file() else []:
        run = row.get("run", run)
        if "part" in row and row["exit_code"] is not None:
            found[row["part"]] = row | {"by": run["sources"], "run": run}
    return found


def commits() -> dict[str, str]:
    """Return the commits that parts' committed rows name; of several, all."""
    found: dict[str, dict[str, None]] = {}
    for part in PARTS:
        path = RESULTS / part.result
        for row in rows_of(path) if path.is_file() else []:
            head = head_of(row)
            if head is not None and head.get("part", part.name) == part.name and head["commit"]:
                found.setdefault(part.name, {})[head["commit"][:7]] = None
    return {name: ", ".join(each) for name, each in found.items()}


def merged(old: Sequence[Row], part: str, new: Sequence[Row]) -> list[Row]:
    """Return rows of a file with a part's own replaced, where they were or behind the others."""
    kept: list[Row] = []
    place, mine = None, False
    for row in old:
        if (head := head_of(row)) is not None:
            mine = head.get("part") == part
        if mine:
            place = len(kept) if place is None else place
        else:
            kept.append(row)
    place = len(kept) if place is None else place
    return [*kept[:place], *new, *kept[place:]]


def labelled(rows: Sequence[Row], part: str, ended: Row) -> list[Row]:
    """Return rows with the name of their part, the commit of their sources, and paths as the repository has them.

    Where the part took ladders that tuners of the same run had just made, their names stand beside the commit.
    """
    found: list[Row] = [named(row) for row in json.loads(_anywhere(json.dumps(rows), part, ended["run"]))]
    for row in found:
        if (head := head_of(row)) is not None:
            head["part"] = part
            head |= {"tables": ended["tables"]} if "tables" in ended else {}
    return found


def _anywhere(text: str, part: str, run: Row) -> str:
    """Return the text of JSON without a run's folders: files of a part are named alone, and the part's own is DIR."""
    for place, name in ((f"{run['out']}/{part}/", ""), (f"{run['out']}/{part}", "DIR"), (f"{run['root']}/", "")):
        text = text.replace(json.dumps(place)[1:-1], name)
    return text


def adopt(folder: Path) -> Iterator[str]:
    """Write all complete results, nothing before all of them are known to be whole; yield what was done."""
    texts: dict[Path, str] = {}
    times: Row = json.loads(TIMES.read_text()) if TIMES.is_file() else {}
    tables: dict[Path, Row] = {}
    for part in PARTS:
        row = _ended(folder).get(part.name)
        if row is None:
            continue
        if part.result.startswith("tuned/"):
            # Of a tuner that was ended, those that it finished.
            for path in (folder / part.name).glob("*/*.json"):
                tables[path] = named(json.loads(_anywhere(path.read_text(), part.name, row["run"])))
        if row["state"] != "complete":
            yield f"{part.name}: not adopted: {row['state']}"
            continue
        if part.result and not part.result.startswith("tuned/"):
            path = RESULTS / part.result
            new = labelled(rows_of(result_of(part, folder / part.name)), part.name, row)
            if path.suffix == ".json":
                texts[path] = json.dumps(new[0], indent=1) + "\n"
            else:
                before = texts.get(path) or (path.read_text() if path.is_file() else "")
                rows = merged([json.loads(line) for line in before.splitlines() if line.strip()], part.name, new)
                texts[path] = "".join(json.dumps(each) + "\n" for each in rows)
        about = named({"commit": row["run"]["commit"], "sources": row["run"]["sources"]})
        times[part.name] = {"seconds": row["seconds"], **about}
        yield f"{part.name}: {about['commit']}, {row['seconds']:.0f} s -> {part.result or 'nothing but its exit code'}"
    yield from _adopt_tables(tables)
    if times:
        texts[TIMES] = json.dumps(dict(sorted(times.items())), indent=1) + "\n"
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _changed(tables: dict[Path, Row]) -> dict[Path, Row]:
    """Return, by where they ship, those tables that a tuner has changed: of others it was given a copy."""
    from fastlayers.tuning.table import SHIPPED, measurements

    changed: dict[Path, Row] = {}
    for path, table in sorted(tables.items()):
        shipped = SHIPPED / path.parent.name / path.name
        details = measurements(shipped)
        before = [json.loads(each.read_text()) if each.is_file() else {} for each in (shipped, details)]
        if table != before[0] | before[1]:
            changed[shipped] = table
    return changed


def _adopt_tables(tables: dict[Path, Row]) -> Iterator[str]:
    """Ship those tables that a tuner has changed."""
    from fastlayers.tuning.table import write

    for shipped, table in _changed(tables).items():
        write(shipped, table)
        yield f"{shipped.parent.name}/{shipped.name}: {NEW_TABLE}"


def offer_tables(folder: Path, target: Path) -> int:
    """Put the tables that a tuner finished and changed where ``FASTLAYERS_TUNED_DIR`` finds them; return how many."""
    from fastlayers.tuning.table import write

    changed = _changed({path: json.loads(path.read_text()) for path in folder.glob("*/*.json")})
    for shipped, table in changed.items():
        write(target / shipped.parent.name / shipped.name, table)
    return len(changed)


def renew_tables(tuned: bool) -> None:
    """Write the documents' tables from the results; with ``tuned`` what tuned tables say of each other, first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server"))}
    for name in (*(["tuned_tables.py summarise"] if tuned else []), *TABLES):
        program, *arguments = name.split()
        subprocess.run([sys.executable, str(ROOT / "tools" / program), *arguments], cwd=ROOT, env=env, check=True)
