"""Where compiled kernels are kept, and how they travel: one directory, one archive.

    FASTLAYERS_CACHE_DIR/<versions>/triton, deep_gemm, flashinfer, trtllm

``<versions>`` names torch, CUDA and the kernel packages, so a kernel is never loaded by another version than compiled
it. Without the variable each package keeps its kernels where it always does (their caches are persistent and know
versions, too); only if that place cannot be written a temporary one is taken.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO

from fastlayers import env
from fastlayers.errors import ArgumentError, EnvironmentVariableError, check_path
from fastlayers.runtime.held_directory import hold, make, sweep

log = logging.getLogger(__name__)

MANIFEST = "fastlayers-kernels.json"
# 2: with a checksum of each file.
SCHEMA = 2
TEMPORARY = "fastlayers-kernels-"
# Of a name in an archive: bytes of a part, which is what file systems take, and parts.
MOST_NAME, MOST_PARTS = 255, 32
# The packages whose versions decide whether a compiled kernel fits: import name -> name on the package index.
COMPILERS = {
    "torch": "torch",
    "triton": "triton",
    "deep_gemm": "sgl-deep-gemm",
    "flashinfer": "flashinfer-python",
}
NEEDS_NVCC = ("deep_gemm", "flashinfer")


@dataclass(frozen=True)
class KernelStore:
    """Where one package keeps what it compiles.

    Parameters
    ----------
    package : str
        Import name.
    variable : str
        The package's own environment variable for the directory.
    usual : str
        Its directory where the variable is not set, below the home directory.
    compiled : str
        Pattern of finished kernels below the directory.
    within : str
        What is the cache of it: flashinfer's variable is a home directory.
    parts : int
        How many of the last parts of a path tell a kernel from others: Triton's files are called as their functions.
    """

    package: str
    variable: str
    usual: str
    compiled: str
    within: str = "."
    parts: int = 1

    def directory(self) -> Path:
        """Return the directory in use."""
        return Path(env.package_variable(self.variable) or Path(os.path.expanduser("~")) / self.usual)

    def kernels(self) -> set[str]:
        """Return the names of the finished kernels."""
        return {"/".join((self.package, *path.parts[-self.parts :])) for path in self.directory().glob(self.compiled)}


STORES = {
    "triton": KernelStore("triton", "TRITON_CACHE_DIR", ".triton/cache", "*/*.cubin", parts=2),
    "deep_gemm": KernelStore("deep_gemm", "DG_JIT_CACHE_DIR", ".deep_gemm", "cache/*"),
    "flashinfer": KernelStore(
        "flashinfer", "FLASHINFER_WORKSPACE_BASE", "", ".cache/flashinfer/*/*/cached_ops/*/*.so", ".cache/flashinfer"
    ),
    "trtllm": KernelStore("flashinfer", "TRTLLM_DG_CACHE_DIR", ".tensorrt_llm", "cache/*"),
}  # fmt: skip


def find_nvcc() -> Path | None:
    """Return CUDA's compiler: by the variables that name it or its toolkit, on the path, or where it usually is."""
    for variable in ("DG_JIT_NVCC_COMPILER", "FLASHINFER_NVCC"):
        named = env.package_variable(variable)
        if named and Path(named).is_file():
            return Path(named)
    homes = [env.package_variable(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    for folder in map(Path, sys.path):  # the compiler as a Python package
        candidates += folder.glob("nvidia/*/bin/nvcc") if folder.is_dir() else []
    return next((path for path in candidates if path.is_file()), None)


def no_compiler(package: str) -> str | None:
    """Return why ``package`` cannot compile its kernels here, or ``None``; packages that do not compile: ``None``.

    Parameters
    ----------
    package : str
        Import name.
    """
    if package not in NEEDS_NVCC or find_nvcc() is not None:
        return None
    if package == "deep_gemm" and env.package_variable("DG_JIT_USE_NVRTC") == "1":
        return None
    if package == "flashinfer" and importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    return f"{package} compiles its kernels with nvcc, which was not found (install the CUDA toolkit, or set CUDA_HOME)"


@lru_cache
def _installed(distribution: str) -> str | None:
    """Return the version of a distribution; looked up once, which takes a millisecond where every layer asks."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of torch and of the installed kernel packages."""
    either = {name: _installed(usual) or _installed(name) for name, usual in COMPILERS.items()}
    return {name: version for name, version in either.items() if version is not None}


def versions_key() -> str:
    """Return :func:`versions` as a directory's name."""
    return ",".join(f"{name}={version}" for name, version in versions().items()) or "none"


def prepare() -> Path | None:
    """Point the kernel packages to the directory of ``FASTLAYERS_CACHE_DIR``; call before the first of them runs.

    Returns
    -------
    Path or None
        The directory; ``None`` if the packages' usual places are used.

    Notes
    -----
    A directory that cannot be written is replaced by a temporary one, with a warning: kernels are then compiled anew
    in the next process. It is removed when the last process that uses it ends; if that was killed, here, by the next.
    """
    sweep(TEMPORARY)
    asked = env.cache_dir()
    if asked is None:
        inherited = _is_temporary()
        if inherited and hold(STORES["triton"].directory().parent):
            return STORES["triton"].directory().parent
        lost = [store for store in STORES.values() if inherited or not _writable(store.directory())]
        if not lost:
            return None
        root = _temporary(f"{lost[0].directory()} (of {lost[0].package})")
    else:
        try:
            root = Path(asked).expanduser() / versions_key()
        except RuntimeError as error:
            raise EnvironmentVariableError(f"{env.CACHE_DIR}: {asked}: {error}") from error
        if not _writable(root):
            root = _temporary(f"{root} ({env.CACHE_DIR})")
    env.set_kernel_directories({store.variable: str(root / name) for name, store in STORES.items()})
    for name in STORES:
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


def ensure() -> Path | None:
    """Do :func:`prepare` once for each value of the variables that decide; after that it is a look at them."""
    seen = [env.package_variable(variable) for variable in (*(store.variable for store in STORES.values()), "HOME")]
    return _prepared(env.cache_dir(), *seen)


@lru_cache
def _prepared(asked: str | None, *seen: str | None) -> Path | None:
    return prepare()


def _writable(directory: Path) -> bool:
    """Return whether files can be made in ``directory``, which may not exist yet; makes nothing that stays."""
    there = next((path for path in (directory, *directory.parents) if path.exists()), None)
    if there is None or not there.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def _is_temporary() -> bool:
    """Return whether this process, or the one that started it, already took a temporary directory."""
    return STORES["triton"].directory().parent.name.startswith(TEMPORARY)


def _temporary(lost: str) -> Path:
    before = STORES["triton"].directory().parent
    if _is_temporary() and hold(before):
        return before
    root = make(TEMPORARY)
    log.warning("%s cannot be written: kernels are kept in %s, and compiled anew next time", lost, root)
    return root


def write_whole(path: Path, text: str) -> None:
    """Write a small file in one step, its directories with it: a reader sees what was there, or all of it.

    Raises
    ------
    OSError
        It cannot be written; what was begun is gone.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def cached_kernels() -> set[str]:
    """Return the kernels on disk of the packages that do not announce a compile: deep_gemm's and flashinfer's.

    Packages that are not imported are not looked at: they compile nothing.
    """
    quiet = [store for name, store in STORES.items() if name != "triton" and store.package in sys.modules]
    return {name for store in quiet for name in store.kernels()}


def export_cache(path: str | Path) -> Path:
    """Write all kernels compiled so far, of the packages here, into one ``.tar.gz``.

    Parameters
    ----------
    path : str or Path
        The archive; replaced when the new one is complete.

    Returns
    -------
    Path
        The same path.

    Raises
    ------
    ArgumentError
        No place for a file.
    """
    target = check_path("export_cache", "path", path)
    # What is there is replaced, so that a device or a pipe would be lost.
    if not target.parent.is_dir() or not _writable(target.parent) or (target.exists() and not target.is_file()):
        raise ArgumentError("export_cache", "path", str(path), "a file to write, in a directory that exists")
    ensure()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
        manifest, written = Path(scratch) / MANIFEST, Path(scratch) / "archive"
        with tarfile.open(written, "w:gz", compresslevel=3, dereference=True) as archive:
            checksums = dict(_add_kernels(archive))
            # Last, as it holds the checksums of what was read on the way into the archive.
            content = {"schema": SCHEMA, "versions": versions(), "sha256": checksums}
            manifest.write_text(json.dumps(content, indent=1) + "\n")
            archive.add(manifest, MANIFEST)
        os.replace(written, target)
    return target


def _add_kernels(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """Add the files of every package and yield the name and the checksum of each."""
    for name, store in STORES.items():
        root = store.directory()
        inner = root / store.within
        if inner.is_dir():
            archive.add(inner, (Path(name) / inner.relative_to(root)).as_posix(), recursive=False)
        for file in sorted(path for path in inner.rglob("*") if path.is_file()):
            entry = _without_locks(archive.gettarinfo(file, (Path(name) / file.relative_to(root)).as_posix()))
            if entry is not None:
                with file.open("rb") as stream:
                    source = _Hashed(stream)
                    archive.addfile(entry, source)
                yield entry.name, source.digest.hexdigest()


class _Hashed:
    """A file that is read, and the checksum of what was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.digest = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        data = self.stream.read(size)
        self.digest.update(data)
        return data


def _without_locks(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith((".lock", "/lock")) or "/tmp.pid_" in entry.name else entry


# How a damaged archive shows. A full disk, say, is not among these.
_BROKEN = (
    tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, OverflowError,
    RecursionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
)  # fmt: skip


def import_cache(path: str | Path) -> list[str]:
    """Unpack an archive of :func:`export_cache` into the directories in use.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    list[str]
        The packages whose kernels were taken. Kernels of a package in another version, or compiled beside another
        torch, are left out with a warning.

    Raises
    ------
    ArgumentError
        Not such an archive, or a damaged one: each file is compared with its checksum before the first is installed.

    Notes
    -----
    Triton's and deep_gemm's kernels fit any directory. flashinfer builds with ninja, which remembers absolute paths:
    its modules are used as they are where the cache and the package have the same paths as they had, and are rebuilt
    elsewhere.
    """
    source = check_path("import_cache", "path", path)
    if not source.is_file():
        raise ArgumentError("import_cache", "path", str(path), "a file")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            checksums = _unpack(source, Path(scratch))
            theirs = _checked_versions(Path(scratch) / MANIFEST, checksums)
            ensure()
            return _take(Path(scratch), theirs)
    except (*_BROKEN, OSError) as error:
        if not isinstance(error, _BROKEN) and error.errno != errno.ENAMETOOLONG:  # of all parts together
            raise
        given = f"{path}, which cannot be read: {type(error).__name__}: {error!s:.300}"
        raise ArgumentError("import_cache", "path", given, "an archive of export_cache") from error


def _unpack(path: Path, target: Path) -> dict[str, str]:
    """Write the archive's files below ``target`` and return the checksum of each by its name.

    Not ``TarFile.extractall(filter="data")``, which Python has from 3.11.4 on: an archive of ours holds plain files and
    directories with plain relative names, and whatever else is in one makes it another's.
    """
    found: dict[str, str] = {}
    with gzip.open(path) as stream:
        # gzip's own checksum stands behind the last byte, where tarfile does not look.
        while stream.read(1 << 20):
            pass
        stream.seek(0)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for entry in archive:
                name = _member_name(entry)
                if entry.isdir():
                    (target / name).mkdir(parents=True, exist_ok=True)
                    continue
                if name in found:
                    raise ValueError(f"{name} is there twice")
                file, source = target / name, archive.extractfile(entry)
                assert source is not None  # a regular file
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as written:
                    shutil.copyfileobj(source, written)
                os.utime(file, (entry.mtime, entry.mtime))
                file.chmod(entry.mode & 0o755 | 0o600)
                with file.open("rb") as again:
                    found[name] = hashlib.file_digest(again, "sha256").hexdigest()
    return found


def _member_name(entry: tarfile.TarInfo) -> str:
    parts = PurePosixPath(entry.name).parts
    # A sparse file may be of any length, whatever the archive's.
    plain = entry.isdir() or (entry.isfile() and not entry.issparse())
    if not parts or parts[0] == "/" or ".." in parts or not plain:
        raise ValueError(f"{entry.name!r:.200} is not a file below the archive's root")
    if len(parts) > MOST_PARTS or max(len(os.fsencode(part)) for part in parts) > MOST_NAME:
        raise ValueError(f"{entry.name!r:.200} is longer than names of files are")
    return "/".join(parts)


def _checked_versions(manifest: Path, checksums: dict[str, str]) -> dict[str, str]:
    """Return the versions that an unpacked archive is of; its files must be those of the manifest, bit for bit."""
    content = json.loads(manifest.read_text())
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{MANIFEST} is not of schema {SCHEMA} (schema 1 had no checksums: export it again)")
    found, said = content["versions"], content["sha256"]
    if not (isinstance(found, dict) and all(isinstance(version, str) for version in found.values())):
        raise ValueError(f"{MANIFEST}: versions are not strings by package")
    if not isinstance(said, dict):
        raise ValueError(f"{MANIFEST}: sha256 is not a checksum by file")
    there = {name: digest for name, digest in checksums.items() if name != MANIFEST}
    for name in sorted(said.keys() | there.keys()):
        if said.get(name) != there.get(name):
            absent = "is not there" if name not in there else "is not in its manifest" if name not in said else ""
            raise ValueError(f"{name} {absent or 'is damaged: it has another checksum'}")
    return found


def _take(unpacked: Path, theirs: dict[str, str]) -> list[str]:
    ours, taken, moves = versions(), [], []
    for name, store in STORES.items():
        if not (unpacked / name).is_dir():
            continue
        # Triton kernels know no torch; the others are C++ against its headers.
        facts = (store.package,) if store.package == "triton" else (store.package, "torch")
        differ = [
            f"{fact} {theirs.get(fact)} there, {ours.get(fact)} here" for fact in facts if _differ(theirs, ours, fact)
        ]
        if differ:
            log.warning("kernels of %s are left out: %s", name, "; ".join(differ))
            continue
        folder = store.directory()
        files = [source for source in sorted((unpacked / name).rglob("*")) if source.is_file()]
        for source in files:
            place = source.relative_to(unpacked / name)
            if not place.is_relative_to(store.within):
                raise ValueError(f"{name}/{place} is not in the cache of {store.package}")
            moves.append((source, folder / place))
        taken.append(name)
    for source, target in moves:
        if target.name.startswith("__grp__"):
            _rewrite_group(source, target.parent)
    _install(moves)
    return taken


def _differ(theirs: dict[str, str], ours: dict[str, str], name: str) -> bool:
    return theirs.get(name) != ours.get(name)


def _rewrite_group(source: Path, folder: Path) -> None:
    """Give Triton's list of a kernel's files the paths that they will have."""
    children = json.loads(source.read_text())["child_paths"]
    if not isinstance(children, dict) or any(Path(child).name != child or child in ("", "..") for child in children):
        raise ValueError(f"{source.name} does not list files of its own directory")
    times = source.stat()
    source.write_text(json.dumps({"child_paths": {child: str(folder / child) for child in children}}))
    os.utime(source, (times.st_atime, times.st_mtime))


def _install(moves: list[tuple[Path, Path]]) -> None:
    """Copy files beside their places, and when all are there move each into place, atomically."""
    partials: list[tuple[str, Path]] = []
    try:
        for source, target in moves:
            if target.is_dir():  # else found when those before it are in place
                raise IsADirectoryError(f"{target} is a directory here, a file there")
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=target.parent)
            os.close(handle)
            partials.append((partial, target))
            shutil.copy2(source, partial)  # with its times, which ninja compares
        for partial, target in partials:
            os.replace(partial, target)
    finally:
        for partial, _ in partials:
            Path(partial).unlink(missing_ok=True)
