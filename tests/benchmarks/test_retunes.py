"""Parts that tune: together they measure every ladder that is shipped for the page's device."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from fastlayers.tuning.table import SHIPPED
from fastlayers_server.cli import app
from fastlayers_server.tune_command import Job, jobs_of_models, jobs_of_shapes

ROOT = Path(__file__).parents[2]


def jobs(command: str) -> list[Job]:
    """Return the shapes that a part's ``fastlayers tune`` times, its arguments read as the command line reads them."""
    commands: Any = typer.main.get_command(app)
    given = commands.commands["tune"].make_context("tune", shlex.split(command)[2:]).params
    (layer,) = given["layer"]
    if not given["models"]:
        return jobs_of_shapes(layer, given["shape"] or [])
    kv_dtype = torch.float8_e4m3fn if given["kv_dtype"] == "e4m3" else None
    return jobs_of_models(given["models"], given["tp"], given["ep"], [layer], kv_dtype)


def test_every_shipped_ladder_has_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts: Any = import_module("parts")
    tuners = [part for part in parts.PARTS if part.result.startswith("tuned/")]
    found = {(job.layer, job.key): part.name for part in tuners for job in jobs(part.command)}
    shipped = {
        (path.parent.name, json.loads(path.read_text())["key"]) for path in SHIPPED.glob("*/*device_name=H200.json")
    }
    assert len(shipped) > 80 and shipped - found.keys() == set()
    assert {part.result.partition("/")[2] for part in tuners} == {layer for layer, _ in found}
