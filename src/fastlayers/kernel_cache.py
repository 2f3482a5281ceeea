"""Where compiled kernels are kept, and how they travel: one directory, one archive.

    FASTLAYERS_CACHE_DIR/<versions>/triton, deep_gemm, flashinfer, trtllm

``<versions>`` names torch, CUDA and the kernel packages, so a kernel is never loaded by another version than compiled
it. Without the variable each package keeps its kernels where it always does (their caches are persistent and know
versions, too); only if that place cannot be written a temporary one is taken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastlayers import env
from fastlayers.device import OPTIONAL_PACKAGES
from fastlayers.errors import ArgumentError

log = logging.getLogger(__name__)

MANIFEST = "fastlayers-kernels.json"
TEMPORARY = "fastlayers-kernels-"
# The packages whose versions decide whether a compiled kernel fits.
COMPILERS = ("torch", "triton", "deep_gemm", "flashinfer")
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
    """

    package: str
    variable: str
    usual: str
    compiled: str

    def directory(self) -> Path:
        """Return the directory in use."""
        return Path(env.package_variable(self.variable) or Path(os.path.expanduser("~")) / self.usual)

    def kernels(self) -> set[str]:
        """Return the names of the finished kernels."""
        return {f"{self.package}/{path.name}" for path in self.directory().glob(self.compiled)}


STORES = {
    "triton": KernelStore("triton", "TRITON_CACHE_DIR", ".triton/cache", "*/*.cubin"),
    "deep_gemm": KernelStore("deep_gemm", "DG_JIT_CACHE_DIR", ".deep_gemm", "cache/*"),
    "flashinfer": KernelStore(
        "flashinfer", "FLASHINFER_WORKSPACE_BASE", "", ".cache/flashinfer/*/*/cached_ops/*/*.so"
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


def versions() -> dict[str, str]:
    """Return the versions of torch and of the installed kernel packages."""
    found: dict[str, str] = {}
    for name in COMPILERS:
        for distribution in (OPTIONAL_PACKAGES.get(name, name), name):
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


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
    in the next process.
    """
    asked = env.cache_dir()
    if asked is None:
        lost = [store for store in STORES.values() if not _writable(store.directory())]
        if not lost:
            return None
        root = _temporary(f"{lost[0].directory()} (of {lost[0].package})")
    else:
        root = Path(asked).expanduser() / versions_key()
        if not _writable(root):
            root = _temporary(f"{root} ({env.CACHE_DIR})")
    env.set_kernel_directories({store.variable: str(root / name) for name, store in STORES.items()})
    for name in STORES:
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


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


def _temporary(lost: str) -> Path:
    before = STORES["triton"].directory().parent
    if before.name.startswith(TEMPORARY) and _writable(before):
        return before
    root = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    log.warning("%s cannot be written: kernels are kept in %s, and compiled anew next time", lost, root)
    return root


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
        The archive; overwritten.

    Returns
    -------
    Path
        The same path.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(target, "w:gz", compresslevel=3) as archive:
        manifest = Path(scratch) / MANIFEST
        manifest.write_text(json.dumps({"schema": 1, "versions": versions()}, indent=1) + "\n")
        archive.add(manifest, MANIFEST)
        for name, store in STORES.items():
            # flashinfer's variable is a home directory: of that, its cache only.
            inner = ".cache/flashinfer" if name == "flashinfer" else ""
            folder = store.directory() / inner
            if folder.is_dir():
                archive.add(folder, str(Path(name) / inner), filter=_without_locks)
    return target


def _without_locks(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith((".lock", "/lock")) or "/tmp.pid_" in entry.name else entry


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
        Not such an archive.

    Notes
    -----
    Triton's and deep_gemm's kernels fit any directory. flashinfer builds with ninja, which remembers absolute paths:
    its modules are used as they are where the cache and the package have the same paths as they had, and are rebuilt
    elsewhere.
    """
    if not Path(path).is_file():
        raise ArgumentError("import_cache", "path", str(path), "a file")
    try:
        with tarfile.open(path, "r:gz") as archive, tempfile.TemporaryDirectory() as scratch:
            archive.extractall(scratch, filter="data")
            theirs = json.loads((Path(scratch) / MANIFEST).read_text())["versions"]
            return _take(Path(scratch), theirs)
    except (tarfile.TarError, EOFError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
        given = f"{path}, which cannot be read: {type(error).__name__}: {error}"
        raise ArgumentError("import_cache", "path", given, "an archive of export_cache") from error


def _take(unpacked: Path, theirs: dict[str, str]) -> list[str]:
    ours, taken = versions(), []
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
        for source in sorted((unpacked / name).rglob("*")):
            if source.is_file():
                _install(source, folder / source.relative_to(unpacked / name))
        taken.append(name)
    return taken


def _differ(theirs: dict[str, str], ours: dict[str, str], name: str) -> bool:
    return theirs.get(name) != ours.get(name)


def _install(source: Path, target: Path) -> None:
    """Move one file into place, atomically; Triton's group files get the paths of their new directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    content, times = source.read_bytes(), source.stat()
    if target.name.startswith("__grp__"):
        children = json.loads(content)["child_paths"]
        content = json.dumps({"child_paths": {child: str(target.parent / child) for child in children}}).encode()
    handle, partial = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(partial, times.st_mode & 0o777)
    os.utime(partial, (times.st_atime, times.st_mtime))  # ninja compares them
    os.replace(partial, target)
