"""Settings for the whole suite: Triton's interpreter without a GPU, fixed seeds, and the layer × mutant matrix."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which case caught which planted bug."""
    rows: dict[str, list[str]] = defaultdict(list)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, value in getattr(report, "user_properties", []):
                if key == "caught_by":
                    layer, mutant, case = str(value).split("|")
                    rows[layer].append(f"{mutant}: {'NOT CAUGHT' if case == 'None' else 'caught by ' + case}")
    if rows:
        terminalreporter.section("layer × mutant")
        for layer in sorted(rows):
            for row in sorted(rows[layer]):
                terminalreporter.write_line(f"{layer:16} {row}")
