"""Settings for the whole suite: Triton's interpreter without a GPU, fixed seeds, and the layer × mutant matrix."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing.util
import os
import platform
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before CUDA is asked for anything: a worker has one of the GPUs, the next one the next.
if os.environ.get("FASTLAYERS_TESTS_PER_GPU") and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(worker.removeprefix("gw")) % len(visible)]

sys.path.insert(0, str(Path(__file__).parent))
from suite_heap import SuiteHeap

sys.path.pop(0)
HEAP = SuiteHeap()

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# What takes longest (processes that start and wait, compilers, draws), so that no worker begins it when others end.
LONGEST = (
    "server/test_serve_command.py", "server/engine/test_speculation.py", "patching/workflows/test_compiled.py",
    "patching/test_generate.py", "comm/test_ranks.py", "server/test_cli.py", "server/engine/test_deterministic.py",
    "server/engine/test_ranks.py", "patching/test_decode.py", "patching/test_contracts.py",
    "server/engine/test_process.py", "models/test_distributed.py", "patching/workflows/test_replaced.py",
    "moe/test_fused_moe_fp8_vectors.py", "server/engine/test_attention_groups.py", "server/engine/test_grammar.py",
    "runtime/test_package_builds.py", "server/engine/test_scheduler_properties.py", "server/test_accuracy_bounds.py",
    "moe/test_fused_moe_triton.py", "comm/test_protocols_between_processes.py", "server/engine/test_executor.py",
    "patching/test_layers.py", "comm/test_symmetric_kernels.py", "moe/test_fused_moe_swizzled.py",
    "comm/test_lost_ranks.py", "server/front/test_constraints.py", "models/test_generate.py", "comm/test_moves.py",
    "comm/test_transitions.py", "models/test_config.py", "linear/test_fp8_vector.py", "models/test_token_moves.py",
    "benchmarks/test_programs.py", "benchmarks/test_performance.py", "benchmarks/test_renew.py",
    "models/test_qwen_vl.py", "runtime/test_warmup_rungs.py", "server/front/test_wire.py", "core/test_public_layers.py",
    "comm/test_groups_between_ranks.py", "models/test_weight_only.py", "moe/test_fused_moe_strips.py",
    "patching/workflows/test_drawn.py", "core/test_weights_epoch.py", "patching/test_prefill.py",
    "models/test_groups.py", "server/test_tune_and_bench.py", "patching/workflows/test_caches.py",
    "models/test_weights_replaced.py", "comm/test_gpu_faults.py", "patching/workflows/test_transforms.py",
    "server/engine/test_pace.py", "patching/workflows/test_weights.py", "models/test_gpt_oss.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", help="write commit, device, versions, counts and reasons of skips to this JSON file")
    parser.addoption("--commit", default="", help="commit to name in the summary where there is no git")


def pytest_configure(config: pytest.Config) -> None:
    """Where kernels are interpreted, have that go faster (``quick_interpreter.py``); say where an ended run stood.

    Files are begun in the order of :func:`longest_first`.
    """
    if gone := [name for name in LONGEST if not (Path(__file__).parent / name).is_file()]:
        raise pytest.UsageError(f"{__file__}: LONGEST names files that are not there: {', '.join(gone)}")
    if hasattr(config, "workerinput"):
        atexit.register(leave)  # what is registered later comes first
    if hasattr(config.option, "loadscopereorder"):  # workers would be given the files of most tests first
        config.option.loadscopereorder = False
    if config.getoption("--summary"):
        faulthandler.register(signal.SIGTERM, chain=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.path.insert(0, str(Path(__file__).parent))
        from quick_interpreter import hasten

        sys.path.pop(0)
        hasten()


def leave() -> None:
    """End a worker at once: taking its heap of some gigabytes apart, object by object, is half a minute of its time."""
    multiprocessing.util._exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector off meanwhile: all that comes stays, and walking through it is a fifth of the time.

    Afterwards each walk would take a second, mostly through the tests; see ``suite_heap.py``.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        HEAP.begin()


def longest_first(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those of most tests; a file's tests stay as they are."""
    root = Path(__file__).parent
    order = {root / name: place for place, name in enumerate(LONGEST)}
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (order.get(item.path, len(order)), -tests[item.path], item.path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without one, however they were selected; workers begin with what takes longest."""
    if hasattr(config, "workerinput"):
        longest_first(items)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords or "multigpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


UNPOISONED = ("models", "server")  # nobody has looked through these


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without a GPU, fill memory that nobody wrote with NaN, or the largest integer.

    Otherwise the allocator hands out what was freed last, often the right result of the run before: a kernel that
    writes nothing passes, and a planted bug that writes nothing is missed, now and then.
    """
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    poisoned = not torch.cuda.is_available() and folder not in UNPOISONED
    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the line above keeps the formatted stack for devices that may come: half a millisecond for each test
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """Nothing stays frozen behind a test: what the collector does not look at counts in whatever runs next."""
    before = HEAP.frozen_by_others
    yield
    left = HEAP.frozen_by_others - before
    if left > 0:
        gc.unfreeze()
    HEAP.keep()
    assert left <= 0, "the test left objects frozen"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let pools of ranks rest behind each file."""
    worlds = sys.modules.get("fastlayers.testing.world")
    if worlds is not None and (nextitem is None or nextitem.path != item.path):
        worlds.rest()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for sockets, which a test's own may not be."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield Path(folder)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Without a GPU no parity case may be skipped: the manifest promises that all of them ran."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and item.nodeid.split("[")[0].endswith("test_parity.py::test_parity"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped; the manifest says that it runs"


def summary(terminalreporter: pytest.TerminalReporter) -> dict[str, object]:
    """Return what a reader of the results must know about the run."""
    import transformers
    import triton

    skips: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skips[reason.removeprefix("Skipped: ")] += 1
    from fastlayers.tuning.provenance import provenance

    made = provenance()
    cuda = torch.cuda.is_available()
    return {
        "command": "pytest " + " ".join(map(str, terminalreporter.config.invocation_params.args)),
        "commit": terminalreporter.config.getoption("--commit") or made["commit"],
        "sources": made["sources"],
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "triton": triton.__version__, "transformers": transformers.__version__,
        },
        **{k: len(terminalreporter.stats.get(k, [])) for k in ("passed", "failed", "error")},
        "skipped": sum(skips.values()),
        "skipped_because": dict(skips.most_common()),
        "failures": [report.nodeid for report in terminalreporter.stats.get("failed", [])],
        "triples": sorted(
            report.nodeid.split("[")[1][:-1]
            for report in terminalreporter.stats.get("passed", [])
            if "test_parity_gpu[" in report.nodeid
        ),
    }  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which case caught which planted bug."""
    # A worker whose run is ended has a reporter, too, which knows its own tests only.
    here = not hasattr(terminalreporter.config, "workerinput")
    if here and (path := terminalreporter.config.getoption("--summary")):
        Path(path).write_text(json.dumps(summary(terminalreporter), indent=1) + "\n")
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
