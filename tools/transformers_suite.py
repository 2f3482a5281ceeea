"""A pytest plugin: transformers' own model tests run on models that ``fastlayers.patch`` patched.

Every model of a patched family is patched when it is put into evaluation mode, which transformers' tests and
``from_pretrained`` do before they run one. Tests that ``transformers_skips.txt`` names are skipped with the reason that
stands there. A session in which no fast path ran fails: it would prove nothing.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.errors import PatchError
from fastlayers.patching.families import RULES

SKIPS = Path(__file__).with_name("transformers_skips.txt")
MODELS = {name.rsplit(".", 1)[0] for name in RULES}


class Suite:
    """Patches models and counts what ran."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reports: list[fl.PatchReport] = []
        self.skips = read_skips(SKIPS)
        self.used: set[str] = set()

    def patch(self, model: torch.nn.Module) -> None:
        """Patch ``model`` if it is of a patched family; a model without layers of known kinds stays as it is."""
        if type(model).__module__ not in MODELS or any(p.device.type == "meta" for p in model.parameters()):
            return
        try:
            report = fl.patch(model)
        except PatchError as error:
            if "nothing can be replaced" not in str(error):
                raise
            self.counts["models that have nothing to patch"] += 1
            return
        self.reports.append(report)
        self.counts["patched models"] += 1

    def settle(self) -> None:
        """Add what ran since the last test."""
        for report in self.reports:
            self.counts["calls of fast paths"] += sum(report.hits().values())
            self.counts["calls that fell back"] += sum(report.fallbacks().values())
        self.reports.clear()

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Skip what the list names."""
        for item in items:
            for glob, reason in self.skips.items():
                if fnmatch.fnmatchcase(item.nodeid.split("::", 1)[-1], glob):
                    self.used.add(glob)
                    item.add_marker(pytest.mark.skip(reason=f"transformers_skips.txt: {reason}"))

    @pytest.hookimpl
    def pytest_runtest_teardown(self) -> None:
        """Count after each test."""
        self.settle()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist counted; one that died tells nothing."""
        counts, used = getattr(node, "workeroutput", {}).get("fastlayers_suite", ({}, ()))
        self.counts.update(counts)
        self.used.update(used)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        """Fail a session that patched nothing; workers of pytest-xdist hand on what they counted."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["fastlayers_suite"] = (dict(self.counts), sorted(self.used))
        elif not self.counts["calls of fast paths"] and not session.config.option.collectonly:
            session.exitstatus = 1

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the counts, and lines of the list that no test matches any more."""
        terminalreporter.write_line(", ".join(f"{count} {what}" for what, count in self.counts.items()) or "no model")
        for glob in sorted(set(self.skips) - self.used):
            terminalreporter.write_line(f"transformers_skips.txt: no test matches {glob}")


def read_skips(path: Path) -> dict[str, str]:
    """Return glob -> reason, from lines ``glob: reason``; the globs are of ``Class::test``."""
    found = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            glob, _, reason = line.rpartition(": ")
            if not glob or not reason.strip():
                raise SystemExit(f"{path.name}: not 'glob: reason': {line}")
            found[glob.strip()] = reason.strip()
    return found


def pytest_configure(config: Any) -> None:
    """Patch from now on."""
    from transformers import PreTrainedModel

    suite, right = Suite(), PreTrainedModel.eval

    def evaluating(self: Any) -> Any:
        result = right(self)
        suite.patch(self)
        return result

    PreTrainedModel.eval = evaluating
    config.pluginmanager.register(suite, "fastlayers-suite")
