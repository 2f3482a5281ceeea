"""``fastlayers tune``: measure backends and kernel parameters for layer shapes, and write the tables ``auto`` reads."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastlayers import env, tuning
from fastlayers.errors import ArgumentError, FastlayersError
from fastlayers.registry import LAYERS
from fastlayers_server.option_values import counts_named, device_named, dtype_named


@dataclass(frozen=True)
class Job:
    """One shape to tune."""

    layer: str
    cfg: Any
    key: str


@dataclass(frozen=True)
class Outcome:
    """What became of a shape: its file and the ladder in words, or why there is none; what could not run, and why."""

    layer: str
    key: str
    state: str
    path: str = ""
    ladder: str = ""
    reason: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)


def jobs_of_models(models: Sequence[str], tp: int, ep: int, layers: Sequence[str], kv_dtype: Any = None) -> list[Job]:
    """Return the shapes of models on one rank of ``tp``; ``layers`` restricts them (empty: all that are tuned)."""
    from fastlayers.registry.spec import spec_of
    from fastlayers_server.known_models import config_of, shapes_of

    found: dict[tuple[str, str], Job] = {}
    for shape in (shape for name in models for shape in shapes_of(config_of(name), tp, ep=ep, kv_dtype=kv_dtype)):
        for cfg in _contexts(shape.cfg):
            key = tuning.key_of(cfg)
            if key is not None and (not layers or shape.layer in layers):
                found.setdefault((shape.layer, key), Job(shape.layer, cfg, key))
    # What a model spends its time in comes first: an interrupted run has done the most useful part.
    return sorted(found.values(), key=lambda job: spec_of(job.layer).heavy or len(LAYERS))


def _contexts(cfg: Any) -> list[Any]:
    """Return a configuration for every context that attention's decode distinguishes; others as they are."""
    from fastlayers.attention.context_buckets import CONTEXTS

    if getattr(cfg, "phase", "") != "decode":
        return [cfg]
    return [replace(cfg, context=context) for context in CONTEXTS]


def jobs_of_shapes(layer: str, shapes: Sequence[str]) -> list[Job]:
    """Return the shapes of one layer that were given on the command line; without one, the layer's first real case."""
    from fastlayers.tuning.sweep import parse_shape

    jobs = []
    for text in shapes or [""]:
        cfg = parse_shape(layer, text)
        key = tuning.key_of(cfg)
        if key is None and hasattr(cfg, "tuning_key"):
            left = ", ".join(field.name for field in fields(cfg) if getattr(cfg, field.name) is None)
            raise ArgumentError("tune", "--shape", repr(text), f"one that says what this leaves open: {left}=…")
        if key is None:
            raise ArgumentError("tune", "--layer", repr(layer), "a layer whose configuration has a tuning_key()")
        jobs.append(Job(layer, cfg, key))
    return jobs


def folder_for(given: str) -> Path:
    """Return the directory that tables are written to.

    Raises
    ------
    ArgumentError
        It cannot be written.
    """
    folder = Path(given or env.tuned_dir() or tuning.SHIPPED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        accepted = f"a directory that can be written: --out DIR, or {env.TUNED_DIR}=DIR (which is read as well)"
        raise ArgumentError("tune", "--out", f"{folder} ({error.strerror})", accepted) from error
    return folder


def run_tune(
    jobs: Sequence[Job],
    folder: Path,
    place: Any,
    tokens: Sequence[int],
    console: Console,
    *,
    force: bool = False,
    quick: bool = False,
    seconds: float = 0.0,
) -> Iterator[Outcome]:
    """Tune shape after shape, with a progress bar; a shape that cannot be tuned is reported, and the rest go on.

    ``tokens``: empty for each layer's own, or with ``quick`` few of them. ``seconds``: 0 for no limit.
    """
    from fastlayers.device import as_device
    from fastlayers.tuning import search
    from fastlayers.tuning.clock import clock_for
    from fastlayers.tuning.samples import earlier
    from fastlayers.tuning.search import Bench, NothingToTuneError, OutOfTimeError, TuneError, tune_shape
    from fastlayers.tuning.sweep import tokens_of

    until = time.monotonic() + seconds if seconds else math.inf
    device, command = as_device(place), "fastlayers " + " ".join(sys.argv[1:])
    counts = {id(job): tuple(tokens) or tokens_of(job.layer, job.cfg, quick) for job in jobs}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    clock = clock_for(place)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task, before = bar.add_task("tuning", total=sum(map(len, counts.values()))), 0
        for job in jobs:
            path = tuning.path_of(folder, job.layer, job.key, device)
            own = counts[id(job)]
            if (damage := _damage(path, job.layer, device)) is not None:
                console.print(f"{damage}; it is made anew", markup=False, highlight=False, soft_wrap=True)
            most = search.QUICK_CANDIDATES if quick else search.MAX_CANDIDATES
            bench = Bench(job.layer, job.cfg, place, clock, most_candidates=most)
            if not force and path.is_file() and not earlier(path, job.layer, device, bench.able()).lacks(own, most):
                outcome = Outcome(job.layer, job.key, "kept", str(path), _ladder(path, job.layer, device))
            else:

                def said(progress: Any, job: Job = job, before: int = before) -> None:
                    bar.update(
                        task, completed=before + progress.done, description=f"{job.layer} {job.key}: {progress.now}"
                    )

                try:
                    more = {"again": force, "fill": quick and not tokens}
                    made = tune_shape(bench, own, folder, command=command, said=said, until=until, **more)
                    outcome = Outcome(job.layer, job.key, "tuned", str(made), _ladder(made, job.layer, device))
                except TuneError as error:
                    states = {NothingToTuneError: "nothing to tune", OutOfTimeError: "out of time"}
                    outcome = Outcome(job.layer, job.key, states.get(type(error), "failed"), reason=str(error))
            before += len(own)
            bar.update(task, completed=before)
            yield replace(outcome, failed=_grouped(bench.failed))


def _damage(path: Path, layer: str, device: Any) -> str | None:
    """Return why a table that is there cannot be read, if so."""
    try:
        if path.is_file():
            tuning.read(path, layer, device)
    except tuning.TunedTableError as error:
        return str(error)
    return None


def _grouped(failed: Mapping[Any, str]) -> dict[str, str]:
    """Return what failed and why, options of one backend with one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for option, why in failed.items():
        found.setdefault((option.backend, why), []).append(str(option))
    return {names[0] + (f" and {len(names) - 1} more" if names[1:] else ""): why for (_, why), names in found.items()}


def _ladder(path: Path, layer: str, device: Any) -> str:
    rows = tuning.read(path, layer, device)["ladder"]
    words = []
    for row in rows:
        name = row["backend"] + (
            f"[{','.join(f'{k}={v}' for k, v in row['config'].items())}]" if "config" in row else ""
        )
        words.append(f"{name} to {row['max_tokens']}" if row["max_tokens"] is not None else name)
    return ", ".join(words)


def register(app: typer.Typer, out: Console, err: Console, print_json: Any) -> None:
    """Add the command to the command line."""

    @app.command("tune")
    def tune(
        models: Annotated[
            list[str] | None,
            typer.Argument(help="Known models, config.json files, their directories, or hub names; or --layer."),
        ] = None,
        layer: Annotated[list[str] | None, typer.Option(help="A layer; with a model: only these. Repeatable.")] = None,
        shape: Annotated[
            list[str] | None, typer.Option(help="N=2112,K=7168, field names, or a configuration's repr. Repeatable.")
        ] = None,
        tp: Annotated[int, typer.Option(min=1, help="Ranks of the model.")] = 1,
        ep: Annotated[int, typer.Option(min=1, help="Ranks that split the experts.")] = 1,
        kv_dtype: Annotated[str, typer.Option(help="A model's cache: bf16, fp16, fp32, e4m3; default: bf16.")] = "",
        tokens: Annotated[str, typer.Option(help="Token counts (attention: requests); default: 1 to 8192.")] = "",
        folder: Annotated[
            str, typer.Option("--out", help=f"Directory of the tables; default: {env.TUNED_DIR}, or the library's own.")
        ] = "",
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = "",
        quick: Annotated[
            bool,
            typer.Option("--quick", help="Few token counts and 14 configurations, not 40; between them no searches."),
        ] = False,
        seconds: Annotated[float, typer.Option(min=0, help="End after so long; run again to go on. 0: no end.")] = 0,
        force: Annotated[bool, typer.Option("--force", help="Also what has a table of these versions.")] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the shapes.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    ) -> None:
        """Measure every backend and kernel configuration for layer shapes, and write the tables that "auto" reads.

        An interrupted run goes on where it stopped. The exit code is 1 if a shape could not be tuned, or is left.
        """
        names = layer or []
        if unknown := [name for name in names if name not in LAYERS]:
            raise ArgumentError("tune", "--layer", repr(unknown[0]), ", ".join(LAYERS))
        if models and shape:
            raise ArgumentError("tune", "--shape", repr(shape[0]), "models, or shapes of one --layer")
        if not models and len(names) != 1:
            raise ArgumentError("tune", "--layer", repr(names), "models, or exactly one --layer")
        cache = dtype_named("tune", kv_dtype, "--kv-dtype") if kv_dtype else None
        if cache is not None and not models:
            raise ArgumentError("tune", "--kv-dtype", repr(kv_dtype), "a model; in a shape: kv_dtype=float8_e4m3fn")
        for option, ranks in (("--tp", tp), ("--ep", ep)):
            if ranks > 1 and not models:
                raise ArgumentError("tune", option, ranks, "a model; a shape is what one rank has")
        jobs = jobs_of_models(models, tp, ep, names, cache) if models else jobs_of_shapes(names[0], shape or [])
        if not jobs:
            raise FastlayersError(f"tune: {', '.join(models or [])}: no layer that is tuned")
        counts, limits = counts_named("tune", tokens), {"force": force, "quick": quick, "seconds": seconds}
        outcomes: Iterable[Outcome] = (
            [Outcome(job.layer, job.key, "to tune", reason=tuning.shape_text(job.cfg)) for job in jobs]
            if dry_run
            else run_tune(jobs, folder_for(folder), device_named("tune", device), counts, err, **limits)  # type: ignore[arg-type]
        )
        found = []
        for outcome in outcomes:
            found.append(outcome)
            if not as_json:
                text = outcome.ladder or outcome.reason
                lines = [f"{outcome.state}: {outcome.layer} {outcome.key}: {text}"]
                lines += [f"    {option} failed: {why}" for option, why in outcome.failed.items()]
                out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        if as_json:
            print_json([vars(outcome) for outcome in found])
        elif folders := {str(Path(outcome.path).parent.parent) for outcome in found if outcome.path}:
            out.print(f"tables are in {', '.join(folders)}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1 if {outcome.state for outcome in found} & {"failed", "out of time"} else 0)
