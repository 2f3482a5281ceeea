"""``fastlayers convert``: make a quantised checkpoint from a bf16 one, or multiply one out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fastlayers.errors import ArgumentError, check_choice
from fastlayers_models.checkpoint import Checkpoint, collapsed
from fastlayers_models.convert import FORMATS, convert_checkpoint, dequantize_checkpoint
from fastlayers_models.convert.readme import WHY

DEQUANTISED = "bf16"
# How many modules of a reason the text shows before it counts the rest.
SHOWN = 4
OURS = "for fastlayers_models only: stock transformers loads it, but as other weights"


def run_convert(source: Path, target: Path, format: str, include_ragged: bool, console: Any) -> dict[str, Any]:
    """Convert with a progress bar on ``console`` and return the summary as plain data.

    Raises
    ------
    ArgumentError, CheckpointError
        See :func:`fastlayers_models.convert.convert_checkpoint`.
    """
    check_choice("convert", "--format", format, (*FORMATS, DEQUANTISED))
    if include_ragged and format != "fp8-block":
        raise ArgumentError("convert", "--ragged", f"given with --format {format}", "--format fp8-block")
    started, total = time.perf_counter(), len(Checkpoint(source).file_of)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("converting", total=total)

        def progress(name: str) -> None:
            bar.update(task, advance=1, description=name)

        if format == DEQUANTISED:
            dequantize_checkpoint(source, target, progress=progress)
            return {
                "format": format,
                "source": str(source),
                "target": str(target),
                "seconds": time.perf_counter() - started,
            }
        done = convert_checkpoint(source, target, format, include_ragged=include_ragged, progress=progress)
    return vars(done) | {
        "source": str(source), "target": str(target), "for": OURS if format == "int8" or include_ragged else "",
    }  # fmt: skip


def summary(done: dict[str, Any]) -> str:
    """Return what :func:`run_convert` did, in words."""
    lines = [f"{done['target']}: {done['format']}, {done['seconds']:.1f} s"]
    if "quantised" in done:
        sizes = f"{done['bytes_before'] / 1e9:.3g} GB to {done['bytes_after'] / 1e9:.3g} GB"
        shards = "1 shard" if done["shards"] == 1 else f"{done['shards']} shards"
        lines.append(f"{done['quantised']} matrices quantised in {shards}, {sizes}")
        if done["resumed"]:
            lines.append(f"{done['resumed']} shards were there already")
        for reason, modules in done["kept"].items():
            shown = collapsed(modules)
            rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
            lines.append(f"kept as they were, {WHY[reason]}: {', '.join(shown[:SHOWN])}{rest}")
        if done["for"]:
            lines.append(done["for"])
    return "\n".join(lines)
