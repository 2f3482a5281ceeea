"""``make test-transformers``: what it says where there is nothing to run, and its committed list."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

REPO = Path(__file__).parents[3]


def run(tmp_path: Path, *source: str) -> subprocess.CompletedProcess[str]:
    # An environment's folder is all that the script asks for.
    environment = Path(sys.executable).parents[1]
    command = ["bash", str(REPO / "tools" / "test_transformers.sh"), str(environment), *source]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def checkout(folder: Path, version: str) -> Path:
    package = folder / "src" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder


def test_without_a_source_it_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("skipped: no source of transformers; make test-transformers")


def test_a_source_of_another_version_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, str(checkout(tmp_path / "old", "4.0.0")))
    assert done.returncode == 2
    assert f"SOURCE is transformers 4.0.0, installed is {transformers.__version__}" in done.stdout + done.stderr
    assert run(tmp_path, str(tmp_path / "nowhere")).returncode == 2


def test_the_archive_of_the_package_is_not_enough(tmp_path: Path) -> None:
    done = run(tmp_path, str(checkout(tmp_path / "sdist", transformers.__version__)))
    assert done.returncode == 0 and "has no tests/test_modeling_common.py" in done.stdout


def test_packages_that_its_tests_import_are_asked_for(tmp_path: Path) -> None:
    source = checkout(tmp_path / "tag", transformers.__version__)
    for file in ("tests/test_modeling_common.py", "tests/generation/test_utils.py"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).touch()
    # Python finds this folder first, and in it a package that cannot be imported.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "datasets.py").write_text("raise ImportError('not here')\n")
    command = ["bash", str(REPO / "tools" / "test_transformers.sh"), str(Path(sys.executable).parents[1]), str(source)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "skipped: the package datasets is not installed" in done.stdout


@pytest.fixture
def plugin() -> Iterator[Any]:
    sys.path.insert(0, str(REPO / "tools"))
    try:
        import transformers_suite

        yield transformers_suite
    finally:
        sys.path.pop(0)


def test_what_workers_counted_is_added(plugin: Any) -> None:
    def ended(suite: Any, **config: Any) -> SimpleNamespace:
        option = SimpleNamespace(collectonly=False)
        session = SimpleNamespace(config=SimpleNamespace(option=option, **config), exitstatus=0)
        suite.pytest_sessionfinish(session)
        return session

    workers, whole = [plugin.Suite(), plugin.Suite(), plugin.Suite()], plugin.Suite()
    for worker, calls in zip(workers, (3, 4, 0), strict=True):
        worker.counts["calls of fast paths"] += calls
        worker.used.add(f"glob {calls}")
        session = ended(worker, workeroutput={})
        assert session.exitstatus == 0, "one worker may have no test that patches"
        whole.pytest_testnodedown(session.config)
    whole.pytest_testnodedown(SimpleNamespace())  # one that died
    assert ended(whole).exitstatus == 0 and whole.counts["calls of fast paths"] == 7
    assert whole.used == {"glob 3", "glob 4", "glob 0"}
    assert ended(plugin.Suite()).exitstatus == 1, "where nothing ran fast, nothing was proved"


def test_each_line_of_the_list_has_a_reason(tmp_path: Path, plugin: Any) -> None:
    found = plugin.read_skips(plugin.SKIPS)
    assert found and all(glob and len(reason) > 8 for glob, reason in found.items())
    bad = tmp_path / "list.txt"
    bad.write_text("*::test_without_a_reason\n")
    with pytest.raises(SystemExit, match="not 'glob: reason'"):
        plugin.read_skips(bad)
