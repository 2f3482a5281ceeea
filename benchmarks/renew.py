"""Renew committed results of GPUs in one go, part by part: see benchmarks/README.md.

``list`` prints the parts of ``parts.py``, ``run`` runs them in the order of value until the budget is spent, and
``adopt`` takes what is complete into benchmarks/results and renews the tables of the documents.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src")]
import adopt as adoption  # noqa: E402
from adopt import NEW_TABLES, SUMMARY, TIMES, missing, whole_tables  # noqa: E402
from parts import PACKAGES, PARTS, Part  # noqa: E402

from fastlayers.tuning.provenance import provenance  # noqa: E402

# NVLink multicast may not be had, and a program that tries it disturbs others on the host.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
# Of our own variables, what does not change which kernels run.
OURS = ("FASTLAYERS_CACHE_DIR", "FASTLAYERS_TUNED_DIR")
Row = dict[str, Any]


def chosen(patterns: Sequence[str], page: bool = False) -> list[Part]:
    """Return the parts whose names match, as the patterns stand, then in the order of value; all without a pattern.

    ``page``: of the page alone.
    """
    for pattern in patterns:
        if not any(fnmatchcase(part.name, pattern) for part in PARTS):
            raise typer.BadParameter(f"{pattern!r}: no such part; known: {', '.join(part.name for part in PARTS)}")
    found = [part for pattern in patterns or ["*"] for part in PARTS if fnmatchcase(part.name, pattern)]
    return [part for part in dict.fromkeys(found) if part.on_page or not page]


def expected(part: Part) -> int:
    """Return the seconds that the part took when it was adopted last; before, an estimate.

    A suite has more tests since, or packages whose kernels it compiles: of one the larger number counts.
    """
    times: Row = json.loads(TIMES.read_text()) if TIMES.is_file() else {}
    took = round(times[part.name]["seconds"]) if part.name in times else part.seconds
    return max(took, part.seconds) if part.command.startswith("pytest ") else took


def limit(part: Part) -> float:
    """Return the seconds after which it is ended: a machine with fewer cores takes longer than the last one did.

    Packages may have been built when the last one came to it, and may not be now, beside others that build as well.
    """
    return 1.5 * max(expected(part), part.seconds) + (240 if set(part.needs) & set(PACKAGES) else 20)


def command_of(part: Part, folder: Path, workers: int) -> list[str]:
    """Return the process's arguments."""
    places = {"out": folder / Path(part.result).name, "dir": folder, "workers": workers}
    first, *rest = (word.format(**places) for word in shlex.split(part.command))
    starts = {
        "pytest": ["-m", "pytest"], "fastlayers": ["-m", "fastlayers_server"],
        "ranks": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.gpus)],
    }  # fmt: skip
    return [sys.executable, *starts.get(first, [first]), *rest]


def environment(paths: Iterable[Path], cache: Path | None) -> dict[str, str]:
    """Return what every part's process finds in its environment, besides its own."""
    roots = [*paths, *(ROOT / name for name in ("src", "models", "server", "benchmarks"))]
    before = os.environ.get("PYTHONPATH")
    # What a part runs with is written in parts.py; a folder of tables may be given beside it.
    given = {name: value for name, value in os.environ.items() if name in OURS or not name.startswith("FASTLAYERS_")}
    found = given | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*map(str, roots), *([before] if before else [])])}
    return found | ({"FASTLAYERS_CACHE_DIR": str(cache)} if cache else {})


def lacking(parts: Iterable[Part], env: dict[str, str]) -> set[str]:
    """Return the import names that parts need and that are not to be had."""
    names = sorted({name for part in parts for name in part.needs})
    ask = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    told = subprocess.run([sys.executable, "-c", ask, *names], env=env, capture_output=True, text=True, check=True)
    return set(told.stdout.split())


@dataclass
class Runner:
    """Runs parts side by side, each in a process group of its own, and writes down how each ended."""

    parts: list[Part]
    out: Path
    env: dict[str, str]
    gpus: list[str]
    end: float
    lacks: set[str] = field(default_factory=set)
    pack: Path | None = None
    running: dict[str, tuple[Part, subprocess.Popen[bytes], list[str], float]] = field(default_factory=dict)
    took: list[tuple[float, float]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)  # the tuners whose ladders the next parts take

    def __post_init__(self) -> None:
        """Count the GPUs, of which none is in use yet."""
        self.count, self.order = len(self.gpus), tuple(self.gpus)

    def run(self) -> None:
        """Run all; whatever ends this, processes are ended and it is said which."""
        waiting = list(self.parts)
        try:
            while waiting or self.running:
                while (part := self.next_of(waiting)) is not None:
                    waiting.remove(part)
                    self.start(part)
                if not self.running:
                    break
                time.sleep(0.05)
                self.look()
            for part in waiting:
                self.tell(part, self.why_not(part) or "no time is left")
        finally:
            for name in list(self.running):
                self.stop(name, "cut off")

    def why_not(self, part: Part) -> str:
        """Return why a part cannot run here at all."""
        lacks = sorted(self.lacks & set(part.needs))
        few = f"needs {part.gpus} GPUs" if part.gpus > self.count else ""
        return f"lacks {', '.join(lacks)}" if lacks else few

    def takes(self, part: Part) -> int:
        """Return how many GPUs a part is given."""
        return self.count if part.wide else part.gpus

    @property
    def slowness(self) -> float:
        """By how much parts took longer here than expected, at least 1: what would be cut off is better not begun."""
        seconds, wanted = (sum(each) for each in zip((0.0, 0.0), *self.took, strict=True))
        return max(1.0, seconds / wanted) if wanted else 1.0

    def next_of(self, waiting: list[Part]) -> Part | None:
        """Return what to start now; behind one that waits for all GPUs, nothing that would make it wait longer."""
        now, most = time.monotonic(), (self.end - time.monotonic()) / self.slowness
        busy = [part for part, *_ in self.running.values()]
        for part in waiting:
            if expected(part) > most or self.why_not(part):
                continue
            if self.takes(part) > len(self.gpus):
                most = min(most, max(begin + expected(each) - now for each, _, _, begin in self.running.values()))
            elif not any((each.noisy and part.quiet) or (each.quiet and part.noisy) for each in busy):
                return part
        return None

    def start(self, part: Part) -> None:
        """Start a part's process."""
        folder = self.out / part.name
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.*"):  # of an earlier run: some programs append
            path.unlink()
        if part.result.startswith("tuned/"):
            whole_tables(part.result.partition("/")[2], folder)
        own = [self.gpus.pop(0) for _ in range(self.takes(part))]
        env = self.env | dict(part.environment) | {"CUDA_VISIBLE_DEVICES": ",".join(own)}
        if part.wide:
            env |= {"FASTLAYERS_TESTS_PER_GPU": "1"}
        if self.tables and not part.result.startswith("tuned/"):
            env |= {"FASTLAYERS_TUNED_DIR": str(self.out / NEW_TABLES)}
        workers = max(1, (os.cpu_count() or 2) - 2)
        with (folder / "output.log").open("wb") as log:
            process = subprocess.Popen(
                command_of(part, folder, workers), cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.running[part.name] = part, process, own, time.monotonic()

    def look(self) -> None:
        """See what has ended, or must end."""
        for name, (part, process, _, begin) in list(self.running.items()):
            now = time.monotonic()
            if process.poll() is not None:
                self.took.append((now - begin, float(expected(part))))
                self.stop(name, "failed" if process.returncode else missing(part, self.out / name) or "complete")
            elif now > self.end:
                self.stop(name, "no time was left")
            elif now - begin > limit(part):
                self.stop(name, f"ended after {limit(part):.0f} s")

    def stop(self, name: str, state: str) -> None:
        """End what is left of a part's processes, and write down how it ended."""
        part, process, own, begin = self.running.pop(name)
        for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            try:
                os.killpg(process.pid, number)
                process.wait(wait)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.gpus = sorted([*self.gpus, *own], key=self.order.index)
        self.tell(part, state, time.monotonic() - begin, process.returncode)
        if part.result.startswith("tuned/") and adoption.offer_tables(self.out / name, self.out / NEW_TABLES):
            self.tables.append(name)

    def tell(self, part: Part, state: str, seconds: float = 0.0, code: int | None = None) -> None:
        """Append a part's line to the summary, and pack what there is."""
        log = self.out / part.name / "output.log"
        tail = log.read_text(errors="replace").splitlines()[-12:] if log.is_file() and code is not None else []
        row: Row = {"part": part.name, "state": state, "seconds": round(seconds, 1), "exit_code": code}
        row |= {"tables": [*self.tables]} if self.tables and not part.result.startswith("tuned/") else {}
        append(self.out / SUMMARY, row | {"last_lines": [line[:300] for line in tail]})
        print(
            f"{part.name}: {state}, {seconds:.0f} s" + "".join(f"\n    {line[:160]}" for line in tail[-3:]), flush=True
        )
        if self.pack is not None:
            half = self.pack.with_suffix(".half")
            with tarfile.open(half, "w:gz") as archive:
                for path in sorted(self.out.rglob("*")):
                    if path.is_file() and path.stat().st_size < 1 << 24:
                        archive.add(path, path.relative_to(self.out).as_posix())
            half.replace(self.pack)


def append(path: Path, row: Row) -> None:
    """Append a line that is on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
Patterns = Annotated[list[str] | None, typer.Argument(help="Names of parts, or patterns of them; default: all.")]
Paths = Annotated[list[Path] | None, typer.Option("--path", help="Folder with more packages. Repeatable.")]
Page = Annotated[bool, typer.Option("--page", help="Only what docs/performance.md is made of.")]


@app.command("list")
def list_parts(patterns: Patterns = None, path: Paths = None, page: Page = False) -> None:
    """Print the parts in the order of value, what they need and how long they take."""
    parts = chosen(patterns or [], page)
    absent = lacking(parts, environment(path or [], None))
    table = Table("part", "s", "GPUs", "needs (absent)", "result", "of", "answers (issue: row)")
    measured = adoption.commits()
    for part in parts:
        needs = ", ".join(f"({name})" if name in absent else name for name in part.needs)
        table.add_row(
            part.name, str(expected(part)), str(part.gpus), needs, part.result, measured.get(part.name), part.target
        )
    table.add_row("of all GPUs", str(sum(part.gpus * expected(part) for part in parts)), *[""] * 5)
    Console(width=None if sys.stdout.isatty() else 190).print(table)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of results, logs and the summary.")],
    patterns: Patterns = None,
    budget: Annotated[float, typer.Option(help="Seconds after which everything has ended.")] = 560.0,
    lanes: Annotated[int, typer.Option(min=1, help="GPUs; parts that need one run side by side.")] = 1,
    cache: Annotated[Path | None, typer.Option(help="FASTLAYERS_CACHE_DIR of all parts.")] = None,
    wheels: Annotated[Path | None, typer.Option(help="Folder of wheels to install below OUT first.")] = None,
    path: Paths = None,
    page: Page = False,
    pack: Annotated[Path | None, typer.Option(help="Also write an archive of OUT after each part.")] = None,
    again: Annotated[bool, typer.Option(help="Also what OUT says is complete, by the same sources.")] = False,
) -> None:
    """Run parts, each in a process of its own, until all have run or the budget is spent."""
    end, paths, out = time.monotonic() + budget, list(path or []), out.resolve()
    parts, run_by = chosen(patterns or [], page), provenance()
    out.mkdir(parents=True, exist_ok=True)
    if wheels is not None:
        paths.append(site := out.with_name(f"{out.name}-site"))
        flags = "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target"
        if not (found := sorted(map(str, wheels.glob("*.whl")))):
            raise typer.BadParameter(f"{wheels} holds no wheels")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *flags, str(site), *found], check=True)
    done = adoption.complete(out, run_by["sources"]) if not again else set()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = (given.split(",") if given else [str(index) for index in range(lanes)])[:lanes]
    env = environment(map(Path.resolve, paths), cache and cache.resolve())
    append(out / SUMMARY, {"run": {"out": str(out), "root": str(ROOT), "lanes": lanes, "budget": budget, **run_by}})
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    left = [part for part in parts if part.name not in done]
    runner = Runner(left, out, env, gpus, end, lacking(left, env), pack and pack.resolve())
    runner.run()
    raise typer.Exit(int(bool({part.name for part in parts} - adoption.complete(out, run_by["sources"]))))


@app.command()
def adopt(folder: Annotated[Path, typer.Argument(help="What `run` wrote, unpacked.", exists=True)]) -> None:
    """Take complete results into benchmarks/results, name their commit, and renew the documents' tables."""
    lines = list(adoption.adopt(folder))
    print(*lines, sep="\n")
    # Whole steps have a say in ladders, see tools/step_ladders.py.
    adoption.renew_tables(any(line.endswith(adoption.NEW_TABLE) or line.startswith("whole_steps.") for line in lines))


if __name__ == "__main__":
    app()
