"""The environment variables of fastlayers: the only file that reads them.

=========================  ==============================================================================
``FASTLAYERS_BACKEND``     ``layer=backend`` pairs, comma separated: ``mla=triton,fp8_linear=triton:64|torch``
``FASTLAYERS_DISABLE``     optional packages to treat as absent, comma separated: ``deep_gemm,flashinfer``
``FASTLAYERS_DEBUG``       ``1``: check token ids, page tables and slots on the host (costs a sync); or ``0``
``FASTLAYERS_TUNED_DIR``   extra directory with tuned tables, searched before the shipped ones
``FASTLAYERS_CACHE_DIR``   directory for compiled kernels, see :mod:`fastlayers.runtime.kernel_cache`
=========================  ==============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fastlayers.errors import EnvironmentVariableError

BACKEND, DISABLE, DEBUG, TUNED_DIR, CACHE_DIR = (
    "FASTLAYERS_BACKEND",
    "FASTLAYERS_DISABLE",
    "FASTLAYERS_DEBUG",
    "FASTLAYERS_TUNED_DIR",
    "FASTLAYERS_CACHE_DIR",
)
KNOWN = (BACKEND, DISABLE, DEBUG, TUNED_DIR, CACHE_DIR)


def unknown_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the variables that begin like ours and are none of :data:`KNOWN`: most likely misspelt."""
    given = os.environ if environ is None else environ
    return tuple(sorted(name for name in given if name.startswith("FASTLAYERS_") and name not in KNOWN))


def backend_text(environ: Mapping[str, str] | None = None) -> str:
    """Return ``FASTLAYERS_BACKEND`` as it is written."""
    return (os.environ if environ is None else environ).get(BACKEND, "")


def backend_overrides(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ``{layer: backend}`` from ``FASTLAYERS_BACKEND``.

    The grammar is checked here; whether the names exist is checked by the registry.

    Raises
    ------
    EnvironmentVariableError
        An entry is not ``layer=backend``, or a layer is named twice.
    """
    text = backend_text(environ)
    overrides: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        layer, separator, backend = (piece.strip() for piece in entry.partition("="))
        if not (layer and separator and backend):
            raise EnvironmentVariableError(f"{BACKEND}: {entry!r} is not of the form layer=backend")
        if layer in overrides:
            raise EnvironmentVariableError(f"{BACKEND}: {layer!r} is given twice")
        overrides[layer] = backend
    return overrides


def disabled_packages(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the import names that ``FASTLAYERS_DISABLE`` tells us to treat as absent."""
    text = (os.environ if environ is None else environ).get(DISABLE, "")
    return frozenset(filter(None, (part.strip() for part in text.split(","))))


def debug(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``FASTLAYERS_DEBUG`` asks for checks of data (not only of shapes)."""
    text = (os.environ if environ is None else environ).get(DEBUG, "0").strip().lower()
    if text in ("1", "true", "on", "yes"):
        return True
    if text in ("", "0", "false", "off", "no"):
        return False
    raise EnvironmentVariableError(f"{DEBUG}: {text!r} is not one of 1, true, on, yes, 0, false, off, no")


def tuned_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the extra directory with tuned tables, or ``None``."""
    return (os.environ if environ is None else environ).get(TUNED_DIR) or None


def cache_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the directory for compiled kernels, or ``None``."""
    return (os.environ if environ is None else environ).get(CACHE_DIR) or None


def package_variable(variable: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a variable of a kernel package or of CUDA (``TRITON_CACHE_DIR``, ``CUDA_HOME``), or ``None``."""
    return (os.environ if environ is None else environ).get(variable) or None


def set_kernel_directories(directories: Mapping[str, str]) -> None:
    """Set kernel packages' variables for their caches: the only way to tell them, before their first kernel."""
    os.environ.update(directories)


def of_child(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that this one begins: its own, and ``given`` where it has none."""
    return {**given, **os.environ}


def disable_multicast() -> None:
    """Keep torch, NCCL and NVSHMEM from NVLink multicast, unless told otherwise: before the first of their groups."""
    for name, value in (
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NCCL_NVLS_ENABLE", "0"), ("NVSHMEM_DISABLE_NVLS", "1")
    ):  # fmt: skip
        os.environ.setdefault(name, value)


def torchrun_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int, int] | None:
    """Return ``(rank, processes, rank on this host)`` as torchrun gives them, or ``None``.

    Raises
    ------
    EnvironmentVariableError
        One of the three is no number, or only some are set.
    """
    given = os.environ if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = [given.get(name) for name in names]
    if found[0] is None or found[1] is None:
        return None
    try:
        rank, world, local = (int(str(value)) for value in found)
    except ValueError as error:
        text = ", ".join(f"{name}={value}" for name, value in zip(names, found, strict=True))
        raise EnvironmentVariableError(f"{text}: torchrun sets all three to numbers") from error
    return rank, world, local


def triton_interpret(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether Triton runs its kernels in its interpreter (Triton's own ``TRITON_INTERPRET``)."""
    return (os.environ if environ is None else environ).get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
