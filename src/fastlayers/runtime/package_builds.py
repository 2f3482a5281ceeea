"""Modules that packages compile, built side by side while Triton's kernels are: in a process each, all before a call.

    begin ─► a process a module (build_child), as many at once as cores allow ─► the package's cache
    ready ─► waits for a package's modules; then calls load them

In this process the package would build one module after another, at the first call that needs each, and share the
interpreter with all that Triton compiles. A module that fails is named with what its package said. :meth:`close` ends
every process with its compilers; so does the end of this process, however it comes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fastlayers import env
from fastlayers.device import as_device
from fastlayers.runtime import builds, kernel_cache
from fastlayers.runtime.build_child import MARK

log = logging.getLogger(__name__)
CHILD = Path(__file__).with_name("build_child.py")
MOST_WORDS = 240


@dataclass(frozen=True)
class Module:
    """A module that a package compiles.

    Parameters
    ----------
    package : str
        Import name.
    maker : str
        ``"package.module:function"``, which describes it: what it returns has ``is_aot`` and ``build(verbose)``.
    arguments : tuple
        The function's: numbers, strings, booleans, dtypes of torch.
    """

    package: str
    maker: str
    arguments: tuple[Any, ...] = ()

    @property
    def label(self) -> str:
        """What it is called in words."""
        given = ", ".join(str(each).removeprefix("torch.") for each in self.arguments)
        return f"{self.package} {self.maker.rpartition(':')[2]}({given})"


@dataclass(frozen=True)
class Built:
    """What became of a module: the seconds that took, and of one that failed what its package said."""

    module: Module
    seconds: float
    error: str | None = None

    @property
    def words(self) -> str | None:
        """The line of the error that says most."""
        if self.error is None:
            return None
        lines = [line.strip() for line in self.error.splitlines() if line.strip()] or ["nothing"]
        telling = [line for line in lines if "error:" in line.lower() and not line.startswith("RuntimeError")]
        return f"{self.module.package} says: {(telling or lines)[0][:MOST_WORDS]}"


class PackageBuilds:
    """Builds modules in processes of their own; a context that leaves none behind."""

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(max(1, self._cores // 2), "package-builds")
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._built: dict[Module, Future[Built]] = {}
        self._wanted: list[Module] = []
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, modules: Iterable[Module]) -> None:
        """Begin with those that are not under way; from now on these are what :meth:`ready` waits for."""
        self._wanted = list(dict.fromkeys(modules))
        new = [module for module in self._wanted if module not in self._built]
        if not new:
            return
        kernel_cache.ensure()
        environment = self._environment(len(new))
        for module in new:
            self._built[module] = self._pool.submit(self._build, module, environment)

    def ended(self) -> list[Built]:
        """Wait for all that is wanted, and return what became of it."""
        return [self._built[module].result() for module in self._wanted]

    def ready(self, package: str) -> bool:
        """Wait for a package's modules; False if calls have to do without one: it failed, or nobody waits any more."""
        found = [self._built[module].result() for module in self._wanted if module.package == package]
        return not self._closed.is_set() and all(each.error is None for each in found)

    def waiting(self, package: str) -> str:
        """Return which of a package's modules are not built yet, in words."""
        return ", ".join(
            each.label for each in self._wanted if each.package == package and not self._built[each].done()
        )

    def stop(self) -> None:
        """End every process that is left, and the compilers that it began; who waits for a module waits no longer."""
        with self._lock:
            self._closed.set()
            for child in self._children:  # none of them is waited for yet: its number is nobody else's
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Do so, and wait until all are gone."""
        self.stop()
        self._pool.shutdown()

    def _environment(self, modules: int) -> dict[str, str]:
        """Return the processes' variables: compilers of each as its share of cores, kernels for the devices here."""
        share = -(-self._cores // min(modules, max(1, self._cores // 2)))
        given = {"MAX_JOBS": str(share + 2)}  # two more than cores, as ninja does by itself
        if torch.cuda.is_available():  # so that no process opens a device to ask
            found = {as_device(f"cuda:{index}").capability for index in range(torch.cuda.device_count())}
            given["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(f"{c[0]}.{c[1]}" for c in sorted(filter(None, found)))
        return env.of_child(given)

    def _build(self, module: Module, environment: Mapping[str, str]) -> Built:
        begin = time.perf_counter()
        command = [sys.executable, "-P", str(CHILD)]
        with self._lock:
            if self._closed.is_set():
                return Built(module, 0.0, "the warm-up ended before it began")
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, text=True, errors="replace",
            )  # fmt: skip
            self._children.add(child)
        log.info("%s: building", module.label)
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):  # it ended at once; what it wrote says why
            child.stdin.write(json.dumps(_request(module)) + "\n")
            child.stdin.flush()
        said = child.stdout.read()
        with self._lock:
            self._children.discard(child)
        code = child.wait()
        child.stdout.close()
        with suppress(BrokenPipeError):
            child.stdin.close()
        built = Built(module, time.perf_counter() - begin, _result(said, code))
        if built.error is None:
            log.info("%s: built in %.1f s", module.label, built.seconds)
        elif not self._closed.is_set():
            log.warning("%s cannot be built: %s", module.label, built.error)
        return built


def _request(module: Module) -> dict[str, Any]:
    given = [{"dtype": str(a).removeprefix("torch.")} if isinstance(a, torch.dtype) else a for a in module.arguments]
    folder = builds.record_path(module.package).parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f"fastlayers-{hashlib.sha256(module.label.encode()).hexdigest()[:16]}.lock"
    return {"path": sys.path, "maker": module.maker, "arguments": given, "lock": str(lock)}


def _result(said: str, code: int) -> str | None:
    """Return the error of a process, from all that it wrote; one that did not come to its end says so itself."""
    lines = said.rstrip().splitlines()
    if lines and lines[-1].startswith(MARK):
        error: str | None = json.loads(lines[-1].removeprefix(MARK))
        return error
    return "\n".join([f"its process ended with {code}", *lines[-20:]])
