"""Where compiled kernels are kept, and the archive they travel in."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import types
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastlayers as fl
from fastlayers import device, env
from fastlayers.errors import ArgumentError
from fastlayers.registry import Backend, Rung
from fastlayers.runtime import kernel_cache
from fastlayers.runtime.kernel_cache import (
    STORES,
    cached_kernels,
    export_cache,
    import_cache,
    prepare,
    versions,
    versions_key,
)

VARIABLES = [store.variable for store in STORES.values()]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.delenv(env.CACHE_DIR, raising=False)
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def fill(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Point the packages below ``root`` and put one kernel of each there."""
    monkeypatch.setenv(env.CACHE_DIR, str(root))
    where = prepare()
    assert where is not None
    group = where / "triton" / "ABC"
    group.mkdir()
    (group / "k.cubin").write_bytes(b"cubin")
    (group / "__grp__k.json").write_text(json.dumps({"child_paths": {"k.cubin": str(group / "k.cubin")}}))
    (group / "lock").write_text("")
    kernel = where / "deep_gemm" / "cache" / "kernel.gemm.1"
    kernel.mkdir(parents=True)
    (kernel / "kernel.cubin").write_bytes(b"deep")
    module = where / "flashinfer" / ".cache" / "flashinfer" / "0.6" / "90a" / "cached_ops" / "mla"
    module.mkdir(parents=True)
    (module / "mla.so").write_bytes(b"elf")
    os.utime(module / "mla.so", (1e9, 1e9))
    (where / "flashinfer" / "letter.txt").write_text("no part of a cache")


def test_packages_keep_their_own_places_unless_told_otherwise(tmp_path: Path) -> None:
    assert prepare() is None
    assert not any(variable in os.environ for variable in VARIABLES)
    assert STORES["triton"].directory() == tmp_path / "home" / ".triton" / "cache"
    assert list((tmp_path / "home").iterdir()) == []


def test_one_directory_by_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "kernels"))
    root = prepare()
    assert root == tmp_path / "kernels" / versions_key()
    assert {name: STORES[name].directory() for name in STORES} == {name: root / name for name in STORES}
    assert os.environ["TRITON_CACHE_DIR"] == str(root / "triton") and (root / "triton").is_dir()
    assert "torch=" in root.name and "triton=" in root.name
    monkeypatch.setattr(kernel_cache, "versions", lambda: {"torch": "99"})
    assert prepare() == tmp_path / "kernels" / "torch=99"


@pytest.mark.parametrize("which", ["asked", "usual"])
def test_a_place_that_cannot_be_written(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A file in the way: permissions do not stop a superuser.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.CACHE_DIR if which == "asked" else "DG_JIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        root = prepare()
    assert root is not None and root.is_dir() and os.environ["DG_JIT_CACHE_DIR"] == str(root / "deep_gemm")
    (record,) = caplog.records
    assert "cannot be written" in record.message and str(tmp_path / "file" / "below") in record.message
    assert (env.CACHE_DIR in record.message) == (which == "asked")
    assert prepare() in (root, None) and STORES["triton"].directory() == root / "triton"  # once a process


@pytest.mark.parametrize("writable", [True, False])
def test_every_user_sees_the_same_directory(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive = export_cache(tmp_path / "empty.tar.gz")
    (tmp_path / "file").write_text("")
    base = tmp_path / "kernels" if writable else tmp_path / "file" / "below"
    users = {
        "export": lambda: export_cache(tmp_path / "again.tar.gz"),
        "import": lambda: import_cache(archive),
        "backend": lambda: Rung(None, Backend("x", lambda cfg: cfg, needs=("triton",))).build(None),
        "warm-up": lambda: fl.warmup(fl.RMSNorm(8), tokens=[1], progress=False).watch.close(),
    }
    for name, use in users.items():
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(env.CACHE_DIR, str(base / name))
        caplog.clear()
        use()
        use()
        place = STORES["triton"].directory()
        if writable:
            assert place == base / name / versions_key() / "triton" and place.is_dir() and not caplog.records
        else:
            assert place.parent.name.startswith(kernel_cache.TEMPORARY) and place.is_dir()
            assert [str(base / name) in r.message for r in caplog.records] == [True]  # said once
    monkeypatch.delenv("TRITON_CACHE_DIR")
    Rung(None, Backend("x", lambda cfg: cfg)).build(None)
    assert "TRITON_CACHE_DIR" not in os.environ  # it compiles nothing


def test_kernels_travel_without_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    for variable in VARIABLES:
        monkeypatch.delenv(variable)
    archive = export_cache(tmp_path / "kernels.tar.gz")  # as a new process would
    for variable in VARIABLES:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    import_cache(archive)
    assert (tmp_path / "b" / versions_key() / "triton" / "ABC" / "k.cubin").read_bytes() == b"cubin"
    assert not (tmp_path / "home" / ".triton").exists()


def test_only_imported_packages_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    for name in ("deep_gemm", "flashinfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert cached_kernels() == set()
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    assert cached_kernels() == {"deep_gemm/kernel.gemm.1"}
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    assert cached_kernels() == {"deep_gemm/kernel.gemm.1", "flashinfer/mla.so"}
    assert STORES["triton"].kernels() == {"triton/ABC/k.cubin"}
    other = STORES["triton"].directory() / "DEF"
    other.mkdir()
    (other / "k.cubin").write_bytes(b"another configuration of it")
    assert len(STORES["triton"].kernels()) == 2


def test_an_archive_moves_kernels_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "versions", lambda: {"torch": "2", "triton": "3", "deep_gemm": "1"})
    fill(monkeypatch, tmp_path / "a")
    archive = export_cache(tmp_path / "kernels.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert not any(name.endswith("lock") or "letter" in name for name in names)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    root = prepare()
    assert root is not None
    assert import_cache(archive) == ["triton", "deep_gemm", "flashinfer", "trtllm"]
    group = json.loads((root / "triton" / "ABC" / "__grp__k.json").read_text())["child_paths"]
    assert group == {"k.cubin": str(root / "triton" / "ABC" / "k.cubin")}
    assert Path(group["k.cubin"]).read_bytes() == b"cubin"
    assert (root / "deep_gemm" / "cache" / "kernel.gemm.1" / "kernel.cubin").read_bytes() == b"deep"
    assert STORES["flashinfer"].kernels() == {"flashinfer/mla.so"}
    module = next((root / "flashinfer").rglob("mla.so"))
    assert module.stat().st_mtime == 1e9
    assert [path for path in root.rglob("tmp*")] == []


def test_other_versions_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = {"torch": "2", "triton": "3", "deep_gemm": "1"}
    monkeypatch.setattr(kernel_cache, "versions", lambda: there)
    fill(monkeypatch, tmp_path / "a")
    archive = export_cache(tmp_path / "kernels.tar.gz")
    monkeypatch.setattr(kernel_cache, "versions", lambda: there | {"torch": "3"})
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    prepare()
    with caplog.at_level(logging.WARNING):
        assert import_cache(archive) == ["triton"]
    assert any("kernels of deep_gemm are left out: torch 2 there, 3 here" in r.message for r in caplog.records)
    assert STORES["deep_gemm"].kernels() == set()


def test_not_an_archive(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a file"):
        import_cache(tmp_path / "nothing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ArgumentError, match="an archive of export_cache"):
        import_cache(tmp_path / "text")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "text", "text")
    with pytest.raises(ArgumentError, match="an archive of export_cache"):
        import_cache(tmp_path / "other.tar.gz")
    whole = export_cache(tmp_path / "whole.tar.gz").read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArgumentError, match="an archive of export_cache"):
        import_cache(tmp_path / "half.tar.gz")


GROUP = {"triton/A/__grp__k.json": {"child_paths": {"k.cubin": "there"}}}


@pytest.mark.parametrize(
    ("manifest", "files"),
    [
        ({"versions": {}}, {}),
        ({"schema": 1, "versions": {}}, {}),
        ({"schema": 3, "versions": {}}, {}),
        ([1], {}),
        ({"schema": 2, "versions": ["torch"]}, {}),
        ({"schema": 2, "versions": {"torch": 2}}, {}),
        ({"schema": 2, "versions": {}, "sha256": []}, {}),
        ({"schema": 2, "versions": {}, "sha256": {}}, GROUP),
        ({"schema": 2, "versions": {}, "sha256": {"triton/A/__grp__k.json": "0" * 64}}, GROUP),
        ({"schema": 2, "versions": {}, "sha256": {"triton/A/k.cubin": "0" * 64}}, {}),
        ({"schema": 2, "versions": {}}, {"../k": 1}),
        ({"schema": 2, "versions": {}}, {"/k": 1}),
        ({"schema": 2, "versions": {}}, {"triton": 1, "triton/A/k": 1}),
        ({"schema": 2, "versions": {}}, GROUP | {"triton/B/__grp__k.json": {}}),
        ({"schema": 2, "versions": {}}, GROUP | {"triton/B/__grp__k.json": {"child_paths": ["k"]}}),
        ({"schema": 2, "versions": {}}, GROUP | {"triton/B/__grp__k.json": {"child_paths": {"../k": ""}}}),
    ],
)
def test_an_archive_is_installed_whole_or_not_at_all(
    manifest: object, files: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "versions", dict)
    checksums = {name: hashlib.sha256(json.dumps(content).encode()).hexdigest() for name, content in files.items()}
    if isinstance(manifest, dict):
        manifest = {"sha256": checksums} | manifest
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name, content in {kernel_cache.MANIFEST: manifest, **files}.items():
            entry, data = tarfile.TarInfo(name), json.dumps(content).encode()
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "kernels"))
    with pytest.raises(ArgumentError, match="an archive of export_cache"):
        import_cache(tmp_path / "a.tar.gz")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_an_archive_of_other_things_than_files_is_refused(
    kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "kernels"))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("triton/A/k.cubin")
        entry.type, entry.linkname = kind, "/etc/passwd"
        archive.addfile(entry)
    with pytest.raises(ArgumentError, match=r"'triton/A/k\.cubin' is not a file below the archive's root"):
        import_cache(tmp_path / "a.tar.gz")


def test_a_flipped_bit_is_found_before_anything_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    whole = export_cache(tmp_path / "kernels.tar.gz").read_bytes()
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    content = gzip.decompress(whole)
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        try:  # some bits are no one's: a time and a name in gzip's header, padding behind the last block
            if gzip.decompress(broken) == content:
                continue
        except (OSError, EOFError, zlib.error):
            pass
        (tmp_path / "kernels.tar.gz").write_bytes(broken)
        with pytest.raises(ArgumentError, match="an archive of export_cache"):
            import_cache(tmp_path / "kernels.tar.gz")
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_a_kernel_that_is_not_the_exported_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    with tarfile.open(export_cache(tmp_path / "kernels.tar.gz")) as archive:
        members = [(entry, archive.extractfile(entry)) for entry in archive if entry.isfile()]
        contents = [(entry, source.read()) for entry, source in members if source is not None]
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:  # whole as an archive, gzip's checksum included
        for entry, data in contents:
            archive.addfile(entry, io.BytesIO(b"CUBIN" if entry.name.endswith("k.cubin") else data))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    with pytest.raises(ArgumentError, match=r"triton/ABC/k\.cubin is damaged: it has another checksum"):
        import_cache(tmp_path / "other.tar.gz")
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_a_temporary_cache_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    program = (
        "import os\n"
        "from fastlayers.runtime.kernel_cache import prepare\n"
        "root = prepare()\n"
        "child = os.fork()\n"
        "if child == 0: raise SystemExit  # runs what is registered for the end, too\n"
        "os.waitpid(child, 0)\n"
        "assert root.is_dir()\n"
        "print(root)\n"
    )
    place = {env.CACHE_DIR: str(tmp_path / "file" / "below"), "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | place, capture_output=True, text=True, check=True, timeout=300
    )
    assert Path(done.stdout.strip()).parent == tmp_path / "temporary"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_import_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    archive = export_cache(tmp_path / "kernels.tar.gz")
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    copies = []

    def full(source: Path, target: str) -> None:
        copies.append(target)
        if len(copies) == 3:
            raise OSError("no space left")

    monkeypatch.setattr(kernel_cache.shutil, "copy2", full)
    with pytest.raises(OSError, match="no space left"):
        import_cache(archive)
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_an_export_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, tmp_path / "a")
    target = export_cache(tmp_path / "kernels.tar.gz")
    before = target.read_bytes()

    def fail(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        raise OSError("no space left")

    monkeypatch.setattr(kernel_cache, "_without_locks", fail)
    with pytest.raises(OSError, match="no space left"):
        export_cache(target)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "home", "kernels.tar.gz"]
    for place in (tmp_path / "nowhere" / "kernels.tar.gz", tmp_path):
        with pytest.raises(ArgumentError, match="a directory that exists"):
            export_cache(place)


def test_versions_name_what_compiles() -> None:
    found = versions()
    assert found["torch"].startswith("2.") and "triton" in found


def test_packages_that_compile_need_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "FLASHINFER_NVCC", "DG_JIT_USE_NVRTC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    if kernel_cache.find_nvcc() is None:  # none under /usr/local either
        why = kernel_cache.no_compiler("deep_gemm")
        assert why is not None and why.startswith("deep_gemm compiles its kernels with nvcc")
        assert kernel_cache.no_compiler("sgl_kernel") is None
        monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
        assert kernel_cache.no_compiler("deep_gemm") is None and kernel_cache.no_compiler("flashinfer") is not None
    for place in ("site/nvidia/cu13/bin", "home/bin"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nvcc").write_text("")
        if place.startswith("home"):
            monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
            assert kernel_cache.find_nvcc() == tmp_path / place / "nvcc"
        assert kernel_cache.find_nvcc() is not None and kernel_cache.no_compiler("flashinfer") is None


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of the name deep_gemm, and a GPU that is said to be there."""
    (tmp_path / "site" / "deep_gemm").mkdir(parents=True)
    (tmp_path / "site" / "deep_gemm" / "__init__.py").write_text("import os\nplace = os.environ['DG_JIT_CACHE_DIR']\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "kernels"))
    device.forget_probes()
    yield
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    device.forget_probes()


@pytest.mark.parametrize("compiler", [True, False])
def test_a_probe_prepares_the_cache_and_asks_for_the_compiler(
    compiler: bool, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "find_nvcc", lambda: Path("nvcc") if compiler else None)
    monkeypatch.delenv("DG_JIT_USE_NVRTC", raising=False)
    found = device.package("deep_gemm", load=True)
    assert found.state == ("ok" if compiler else "broken")
    why = device.missing(("deep_gemm:place",), load=True)
    assert why is None if compiler else why is not None and "nvcc, which was not found" in why
    assert str(kernel_cache.STORES["deep_gemm"].directory()) == sys.modules["deep_gemm"].place


def test_a_small_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "record.json"
    kernel_cache.write_whole(target, "first")
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            kernel_cache.write_whole(target, "second")
    assert target.read_text() == "first" and list(target.parent.iterdir()) == [target]
