"""The temporary cache directory goes with the last process that uses it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

from fastlayers import env
from fastlayers.runtime import held_directory

PREPARE = "import os, subprocess, sys, time\nfrom fastlayers.runtime.kernel_cache import prepare\n"
WAIT = PREPARE + "print(prepare(), flush=True)\ntime.sleep(600)\n"
VARIABLES = ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TRTLLM_DG_CACHE_DIR")


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment in which the cache cannot be written, with a temporary folder of its own."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return clean | {env.CACHE_DIR: str(tmp_path / "file" / "below"), "TMPDIR": str(tmp_path / "temporary")}


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "temporary").iterdir())


def start(program: str, place: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], env=place, stdout=subprocess.PIPE, text=True)


def run(program: str, place: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], env=place, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout.strip()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_process_removes_what_a_killed_one_left(
    how: signal.Signals, tmp_path: Path, place: dict[str, str]
) -> None:
    alive, killed = start(WAIT, place), start(WAIT, place)
    assert alive.stdout is not None and killed.stdout is not None
    names = [Path(each.stdout.readline().strip()).name for each in (alive, killed)]
    killed.send_signal(how)
    assert killed.wait(120) == -how
    assert left(tmp_path) == sorted(names)
    run(PREPARE + "prepare()", place)
    assert left(tmp_path) == names[:1]  # what is used stays
    alive.terminate()
    alive.wait(120)
    # Where the cache can be written again, too.
    run(PREPARE + "prepare()", place | {env.CACHE_DIR: str(tmp_path / "good")})
    assert left(tmp_path) == []


def test_a_forked_process_that_lives_longer_keeps_it_and_removes_it(tmp_path: Path, place: dict[str, str]) -> None:
    program = PREPARE + (
        "root = prepare()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.close(write)\n"
        "    os.read(read, 1)  # until the parent is gone\n"
        "    time.sleep(0.2)\n"
        "    print('there' if root.is_dir() else 'gone', flush=True)\n"
    )
    assert run(program, place) == "there"
    assert left(tmp_path) == []


def test_a_forked_process_that_ends_at_once_leaves_it_to_its_parent(tmp_path: Path, place: dict[str, str]) -> None:
    program = PREPARE + (
        "root = prepare()\n"
        "import multiprocessing\n"
        "for leave in (sys.exit, os._exit):\n"
        "    child = multiprocessing.get_context('fork').Process(target=leave, args=(0,))\n"
        "    child.start(); child.join()\n"
        "    assert root.is_dir()\n"
        "forked = os.fork()\n"
        "if forked == 0: raise SystemExit\n"
        "os.waitpid(forked, 0)\n"
        "print(root.is_dir())\n"
    )
    assert run(program, place) == "True"
    assert left(tmp_path) == []


@pytest.mark.parametrize("asked", [True, False])
def test_a_started_process_uses_and_keeps_its_parents(asked: bool, tmp_path: Path, place: dict[str, str]) -> None:
    child = PREPARE + (
        "mine = prepare(); os.write(int(sys.argv[1]), b'1'); sys.stdin.read(); print(mine, mine.is_dir(), flush=True)"
    )
    forget = "" if asked else f"os.environ.pop({env.CACHE_DIR!r})\n"
    program = PREPARE + (
        f"root = prepare()\n{forget}"
        "read, write = os.pipe()\n"
        f"words = [sys.executable, '-c', {child!r}, str(write)]\n"
        "child = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[write])\n"
        "os.read(read, 1)\n"
        "print(root, flush=True)\n"  # and this process ends before the other
    )
    first, second = run(program, place).splitlines()
    assert second == f"{first} True"
    deadline = time.monotonic() + 120
    while left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(tmp_path) == []


def test_a_process_whose_parents_is_gone_makes_its_own(tmp_path: Path, place: dict[str, str]) -> None:
    gone = tmp_path / "temporary" / "fastlayers-kernels-gone"
    started = {name: str(gone / name) for name in VARIABLES}
    without = {name: value for name, value in place.items() if name != env.CACHE_DIR}
    found = Path(run(PREPARE + "print(prepare())", without | started))
    assert found != gone and found.parent == tmp_path / "temporary"
    assert left(tmp_path) == []


def test_sweep_takes_only_free_directories_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_directory.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine-file").write_text("")
    (tmp_path / "mine-free" / "below").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "mine-link").symlink_to(tmp_path / "other")
    made = held_directory.make("mine-")
    assert held_directory.hold(made) and not held_directory.hold(tmp_path / "mine-none")
    held_directory.sweep("mine-")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([made.name, "mine-file", "mine-link", "other"])
    held_directory.release(made)
    held_directory.release(made)
    assert not made.exists() and held_directory.make("mine-").is_dir()


@pytest.mark.parametrize("line", ["os.open(path", "fcntl.flock(handle", "if hold(path)", "return path"])
def test_what_interrupts_the_making_leaves_nothing(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler raises between any two lines."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = Path(held_directory.__file__).read_text().splitlines()

    def interrupt(frame: FrameType, event: str, argument: object) -> object:
        here = frame.f_code.co_filename == held_directory.__file__ and line in lines[frame.f_lineno - 1]
        if here and event == "line" and any(tmp_path.iterdir()):
            sys.settrace(None)
            raise SystemExit(143)
        return interrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(SystemExit):
            held_directory.make("fastlayers-test-")
    finally:
        sys.settrace(None)
    assert not any(tmp_path.iterdir())
