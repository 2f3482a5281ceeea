"""Packages' modules built side by side, in processes of their own: a played flashinfer whose compiler is a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import device
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.attention.gqa.flashinfer import FlashInferFA2, FlashInferFA3
from fastlayers.attention.gqa.xqa import XQA
from fastlayers.attention.mla import flashinfer as mla
from fastlayers.attention.mla.config import MLAConfig
from fastlayers.norm.rms_norm.layer import RMS_NORM
from fastlayers.registry import Backend
from fastlayers.runtime import builds, precompile
from fastlayers.runtime.package_builds import Built, Module, PackageBuilds

JIT = """
import os, subprocess, sys
from pathlib import Path

ROOT = Path(os.environ["FLASHINFER_WORKSPACE_BASE"], ".cache/flashinfer/1/90a/cached_ops")
COMPILER = '''
import os, sys, time
from pathlib import Path
kind, folder = sys.argv[1], Path(sys.argv[2])
with (folder.parent / "compilers").open("a") as log:
    log.write(f"{os.getpid()} {folder.name}\\\\n")
if kind == "bad":
    sys.exit("kernel.cu(3): error: identifier \\\\"tile\\\\" is undefined")
if kind == "slow":
    time.sleep(600)
if kind == "meets":  # another one at the same time
    end = time.monotonic() + 120
    while len((folder.parent / "compilers").read_text().splitlines()) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
(folder / f"{folder.name}.so").write_text("code")
'''

class Spec:
    def __init__(self, kind, width, is_aot=False):
        self.kind, self.is_aot, self.folder = kind, is_aot, ROOT / f"{kind}_{width}"
    def build(self, verbose):
        assert verbose is False
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / f"{self.folder.name}.so").exists():
            done = subprocess.run([sys.executable, "-c", COMPILER, self.kind, str(self.folder)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise RuntimeError("Ninja build failed. Ninja output:\\n[1/9] nvcc -c kernel.cu\\n" + done.stdout)

def describe(kind, width, *rest):
    return Spec(kind, width, *rest)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    (tmp_path / "site" / "flashinfer" / "__init__.py").write_text("")
    (tmp_path / "site" / "flashinfer" / "jit.py").write_text(JIT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    device.forget_probes()
    builds.refresh()
    yield tmp_path / ".cache/flashinfer/1/90a/cached_ops"
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    device.forget_probes()
    builds.refresh()
    builds.try_again()


def module(kind: str, width: int = 8, *rest: Any) -> Module:
    return Module("flashinfer", "flashinfer.jit:describe", (kind, width, *rest))


def compilers(cache: Path) -> list[tuple[int, str]]:
    path = cache / "compilers"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(pid), name) for pid, name in rows]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(condition: Any, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(met)


def test_modules_are_built_at_the_same_time_and_once(cache: Path) -> None:
    two = [module("meets", 1), module("meets", 2)]
    with PackageBuilds(cores=4) as building:
        building.begin([*two, two[0]])
        assert building.waiting("flashinfer").startswith("flashinfer describe(meets, 1)")
        assert building.ready("flashinfer") and building.ready("triton") and not building.waiting("flashinfer")
        building.begin(two)  # the same again
        assert [built.error for built in building.ended()] == [None, None]
    assert sorted(name for _, name in compilers(cache)) == ["meets_1", "meets_2"]


def test_compilers_share_the_cores_and_comes_built_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    with PackageBuilds(cores=16) as building:
        shares = [building._environment(count)["MAX_JOBS"] for count in (1, 2, 3, 100)]
        building.begin([module("good", 1, True)])
        assert building.ready("flashinfer") and compilers(cache) == []
        monkeypatch.setenv("MAX_JOBS", "5")
        assert building._environment(1)["MAX_JOBS"] == "5"  # what the user says
    assert shares == ["18", "10", "8", "4"]


def test_processes_are_told_the_devices_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.runtime import package_builds

    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    here = {"cuda:0": device.DESCRIBED["H200"], "cuda:1": device.DESCRIBED["A100"], "cuda:2": device.DESCRIBED["H100"]}
    monkeypatch.setattr(package_builds, "as_device", here.__getitem__)
    with PackageBuilds(cores=2) as building:
        assert building._environment(1)["FLASHINFER_CUDA_ARCH_LIST"] == "8.0 9.0"


def test_what_fails_is_named_with_the_packages_words(cache: Path) -> None:
    with PackageBuilds(cores=4) as building:
        building.begin([module("bad"), module("good"), Module("flashinfer", "flashinfer.jit:gone")])
        assert not building.ready("flashinfer")
        bad, good, gone = building.ended()
    assert good == Built(module("good"), good.seconds, None) and good.words is None
    assert bad.words == 'flashinfer says: kernel.cu(3): error: identifier "tile" is undefined'
    assert gone.error == "AttributeError: module 'flashinfer.jit' has no attribute 'gone'"
    crashed = Built(module("bad"), 0.0, "its process ended with -11\nSegmentation fault")
    assert crashed.words == "flashinfer says: its process ended with -11"


class Jit:
    """RMS norm by a module of the package for each width: those of 16 are ill."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    @staticmethod
    def modules(cfg: Any) -> list[Module]:
        return [module("bad" if cfg.hidden_size == 16 else "good", cfg.hidden_size)]

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        from flashinfer import jit  # type: ignore[import-not-found]

        name = f"good_{x.shape[-1]}"
        assert (jit.ROOT / name / f"{name}.so").exists(), "a call that has to build"
        return RMS_NORM.named("torch").load()(self.cfg)(x, *rest)


@pytest.mark.parametrize("tokens", ["all", [4]])
def test_a_warm_up_does_without_what_fails_and_takes_the_rest(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tokens: Any
) -> None:
    row = Backend("jit", Jit, ("flashinfer.jit:describe",), auto_on=("cpu",))
    monkeypatch.setattr(RMS_NORM, "ranked", [row, *RMS_NORM.ranked])
    model = torch.nn.Sequential(fl.RMSNorm(8), fl.RMSNorm(16), fl.RMSNorm(24))
    report = fl.warmup(model, tokens=tokens, max_tokens=4, progress=False)
    report.watch.close()
    assert [layer.choice.name for layer in model] == ["jit", "torch", "jit"]
    assert {built.module.arguments: built.words for built in report.modules} == {
        ("good", 8): None,
        ("bad", 16): 'flashinfer says: kernel.cu(3): error: identifier "tile" is undefined',
        ("good", 24): None,
    }
    assert "3 modules built by packages: flashinfer describe(good, 8)" in report.steps[0][0]
    assert len(report.built) == 2 and len(compilers(cache)) == 3
    why = fl.explain(model)[1].refused["jit"]
    assert why.startswith(f"{builds.UNBUILT}: flashinfer says: kernel.cu(3): error: ")
    again = fl.warmup(model, tokens=tokens, max_tokens=4, progress=False)  # the next one tries again
    again.watch.close()
    assert [built.module.arguments for built in again.modules] == [("bad", 16)] and again.built == []
    fl.warmup(model, tokens=tokens, max_tokens=4, build=False, progress=False).watch.close()
    assert len(compilers(cache)) == 4 and [layer.choice.name for layer in model] == ["jit", "torch", "jit"]


def test_a_cancelled_warm_up_leaves_no_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    later: list[str] = []

    def interrupt() -> None:
        assert soon(lambda: compilers(cache))
        raise KeyboardInterrupt

    jobs = [precompile.Job("of the package", 1, "flashinfer", lambda: later.append("ran"))]
    jobs += [precompile.Job("interrupted", 1, "triton", interrupt)]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), PackageBuilds(cores=4) as building:
        building.begin([module("slow"), *(module("slow", width) for width in range(9, 14))])  # more than at once
        precompile.run(jobs, lambda label: None, modules=building)
    assert time.monotonic() - begin < 300 and later == []  # the compilers take ten minutes
    begun = compilers(cache)
    assert 1 <= len(begun) <= 2 and soon(lambda: not any(runs(pid) for pid, _ in begun))


PARENT = """
import sys, time
from fastlayers.runtime.package_builds import Module, PackageBuilds
building = PackageBuilds(cores=4)
building.begin([Module("flashinfer", "flashinfer.jit:describe", (sys.argv[1], 8))])
print([built.error for built in building.ended()], flush=True)
building.close()
"""


def begin(kind: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", PARENT, kind], stdout=subprocess.PIPE, text=True, env=env)


def test_a_killed_process_leaves_no_compiler(cache: Path) -> None:
    parent = begin("slow")
    assert soon(lambda: compilers(cache))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    ((pid, _),) = compilers(cache)
    assert soon(lambda: not runs(pid))


def test_two_processes_build_a_module_once(cache: Path) -> None:
    both = [begin("good"), begin("good")]
    assert [json.loads(each.communicate(timeout=300)[0].replace("None", "null")) for each in both] == [[None], [None]]
    assert len(compilers(cache)) == 1


RECORD = """
import sys
from fastlayers.device import DESCRIBED
from fastlayers.registry import Backend
from fastlayers.runtime import builds
row = Backend("jit", "a:b", ("flashinfer.jit:describe",))
for number in range(20):
    builds.record([("rms_norm", row, f"{sys.argv[1]} {number}", DESCRIBED["H200"])], 4)
"""


def test_processes_that_note_at_the_same_time_lose_nothing(cache: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [subprocess.Popen([sys.executable, "-c", RECORD, name], env=env) for name in ("a", "b")]
    assert [each.wait(300) for each in both] == [0, 0]
    builds.refresh()
    assert len(builds.built("flashinfer")) == 40


def test_what_is_noted_already_is_not_written_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Backend("jit", Jit, ("flashinfer.jit:describe",))
    done = [("rms_norm", row, None, device.DESCRIBED["H200"])]
    assert len(builds.record(done, 4)) == 1
    monkeypatch.setattr(builds, "_alone", lambda path: pytest.fail("a cache that nobody may write"))
    assert builds.record(done, 4) == []


def test_backends_name_the_modules_that_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []
    for where, name in (("flashinfer.prefill", "get_batch_prefill_module"), ("flashinfer.mla", "get_batch_mla_module")):
        played = ModuleType(where)
        setattr(played, name, lambda *given, name=name: asked.append((name.replace("get", "gen"), given)))
        monkeypatch.setitem(sys.modules, where, played)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    half, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    named: list[Module] = []
    for row in (FlashInferFA3, FlashInferFA2):
        for more in ({}, {"window": 128}, {"softcap": 30.0}):
            cfg = GQAConfig(32, 8, 128, 128**-0.5, dtype=half, kv_dtype=half, **more)  # type: ignore[arg-type]
            row(cfg).module()
            named += row.modules(cfg)
    latent = MLAConfig(16, 512, 64, 128, 128, 192**-0.5, kv_dtype=e4m3, phase="decode")
    mla._decode_module("fa3", half, e4m3, 512, 64)
    mla._prefill_module(half, 192, 128)
    named += mla.FlashInferFA3.modules(latent)
    named += mla.FlashInferFA3.modules(MLAConfig(16, 512, 64, 128, 128, 192**-0.5, phase="extend"))
    assert [(each.maker.partition(":")[2], each.arguments) for each in named] == asked and len(asked) == 8
    (xqa,) = XQA.modules(GQAConfig(64, 8, 64, 0.125, page_size=64, window=128, dtype=half, kv_dtype=half))
    assert (xqa.maker, xqa.arguments) == ("flashinfer.jit.xqa:gen_xqa_module", (half, half, 64, 64, 8, True, half, 1))
    assert xqa.label == "flashinfer gen_xqa_module(bfloat16, bfloat16, 64, 64, 8, True, bfloat16, 1)"
