"""``fastlayers convert``: make a quantised checkpoint from a bf16 one, or multiply one out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fastlayers.errors import ArgumentError, FastlayersError, check_choice
from fastlayers_models.auto import family_of
from fastlayers_models.checkpoint import Checkpoint, collapsed
from fastlayers_models.convert import FORMATS, convert_checkpoint, dequantize_checkpoint
from fastlayers_models.convert.readme import WHY
from fastlayers_models.loading import check_config

DEQUANTISED = "bf16"
# How many modules of a reason the text shows before it counts the rest.
SHOWN = 4
OURS = "for fastlayers_models only: stock transformers refuses it, or loads it as other weights"


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
    ours, checkpoint = format == "int8" or include_ragged, Checkpoint(source)
    _check_loadable(checkpoint, ours)
    started, total = time.perf_counter(), len(checkpoint.file_of)
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
        "source": str(source), "target": str(target), "for": OURS if ours else "",
    }  # fmt: skip


def _check_loadable(checkpoint: Checkpoint, ours: bool) -> None:
    """Raise, with the loader's own sentence, for a source that it refuses: what is made of it would be refused, too."""
    try:
        config = family_of(checkpoint.config, where=checkpoint.path).config_class.from_hf(checkpoint.config)
    except FastlayersError:
        if ours:
            raise
        return  # of another family, or with settings that only stock transformers knows
    check_config(checkpoint, config)


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
