"""What hardware and which optional packages are here, or would be there.

The only file that asks torch about the hardware. A :class:`Device` is plain data, so backends' predicates can
be asked about any machine from any machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fastlayers import env
from fastlayers.errors import UnknownNameError, check_fields, check_plain, check_positive
from fastlayers.runtime import kernel_cache

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device, present or described.

    Parameters
    ----------
    type : str
        ``"cpu"`` or ``"cuda"``.
    name : str
        Short name such as ``"H200"``; the part of a tuned table's file name.
    capability : tuple[int, int] or None
        CUDA compute capability.
    sm_count : int
        Streaming multiprocessors (CPU: number of threads torch uses).
    memory_bytes : int
    bandwidth : float
        Memory bandwidth in bytes/s, the first floor of a cost model.
    flops : float
        Dense bf16 operations/s, the second floor.
    described : bool
        True if this machine may not have it: then packages are looked up without importing them.
    """

    type: str
    name: str
    capability: tuple[int, int] | None = None
    sm_count: int = 1
    memory_bytes: int = 0
    bandwidth: float = 0.0
    flops: float = 0.0
    described: bool = True

    def __post_init__(self) -> None:
        check_fields("Device", self)
        check_positive("Device", sm_count=self.sm_count)
        check_plain("Device", "int >= 0", memory_bytes=self.memory_bytes)
        check_plain("Device", "float >= 0", bandwidth=self.bandwidth, flops=self.flops)

    @property
    def sm(self) -> str:
        """``"sm_90"``, or the device type where there is no capability."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.type

    @property
    def has_fp8_dot(self) -> bool:
        """Whether matrix units multiply e4m3 (sm_89 and newer)."""
        return self.capability is not None and self.capability >= (8, 9)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one block may use (0 without a capability)."""
        if self.capability is None:
            return 0
        sizes = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}
        return sizes.get(self.capability, 227) * 1024

    def refuses_e4m3(self, what: str) -> str | None:
        """Return why Triton cannot do ``what`` (in the plural) here: it has no e4m3 below sm_89, not even as a cast."""
        if self.type == "cuda" and not self.has_fp8_dot:
            return f"{what} need sm_89 or newer, this is {self.sm}"
        return None

    def refuses_all_but(self, major: int) -> str | None:
        """Return why what is compiled for one generation alone (9: Hopper, 10: Blackwell) cannot run here."""
        wanted = self.capability is not None and self.capability[0] == major
        return None if wanted else f"needs sm_{major}0, this is {self.sm}"

    def __str__(self) -> str:
        return f"{self.name} ({self.sm})" if self.capability else self.name

    def refuses_16_bit_vectors(self, dtype: torch.dtype | None, width: int) -> str | None:
        """Return why a compiled kernel that reads rows of ``width`` 16-bit values, 16 bytes at a time, cannot run."""
        if self.type != "cuda" or self.capability is None or self.capability < (8, 0):
            return f"needs sm_80 or newer, this is {self}"
        if dtype is None or dtype.itemsize != 2:
            return f"dtype {dtype} is not one of float16, bfloat16"
        return f"rows of {width} values are not multiples of 16 bytes" if width % 8 else None


DESCRIBED = {
    d.name: d
    for d in (
        Device("cpu", "cpu", None, 2, 16 * GIB, 20e9, 0.1e12),
        Device("cuda", "A100", (8, 0), 108, 80 * GIB, 2.0e12, 312e12),
        Device("cuda", "L40S", (8, 9), 142, 48 * GIB, 0.86e12, 362e12),
        Device("cuda", "H20", (9, 0), 78, 96 * GIB, 4.0e12, 148e12),
        Device("cuda", "H100", (9, 0), 132, 80 * GIB, 3.35e12, 989e12),
        Device("cuda", "H200", (9, 0), 132, 141 * GIB, 4.8e12, 989e12),
        Device("cuda", "B200", (10, 0), 148, 180 * GIB, 8.0e12, 2250e12),
    )
}


def as_device(device: Device | torch.device | str | int | None = None) -> Device:
    """Return a :class:`Device` for a description's name, a torch device, or (``None``) torch's default device.

    ``"H200"``, ``"B200"``, ``"A100"``, ``"cpu"``, … are described devices; ``"cuda"``, ``"cuda:1"`` and torch
    devices are what this machine has. A ``meta`` device counts as a CPU.

    Raises
    ------
    UnknownNameError
        Neither a known description nor a torch device of this machine.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and device in DESCRIBED and device != "cpu":
        return DESCRIBED[device]
    import torch

    if device is None:
        device = torch.get_default_device()
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        known = ", ".join(DESCRIBED)
        raise UnknownNameError(
            f"device {device!r} is unknown; described devices: {known}; or a torch device"
        ) from error
    if torch_device.type in ("cpu", "meta"):
        return _this_cpu()
    if torch_device.type != "cuda" or not torch.cuda.is_available():
        raise UnknownNameError(
            f"device {str(torch_device)!r} is not on this machine; described: {', '.join(DESCRIBED)}"
        )
    index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise UnknownNameError(f"device {str(torch_device)!r} is not on this machine, which has {count}")
    return _this_gpu(index)


@lru_cache(maxsize=1)
def _this_cpu() -> Device:
    import torch

    base = DESCRIBED["cpu"]
    return Device("cpu", "cpu", None, torch.get_num_threads(), 0, base.bandwidth, base.flops, described=False)


@lru_cache
def _this_gpu(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    full_name = properties.name
    known = next((d for n, d in DESCRIBED.items() if n in full_name.split() or n in full_name.split("-")), None)
    return Device(
        "cuda",
        known.name if known else full_name.replace(" ", "_"),
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
        known.bandwidth if known else 1e12,
        known.flops if known else 100e12,
        described=False,
    )


@dataclass(frozen=True)
class Package:
    """State of one optional package: ``state`` is ``ok``, ``absent``, ``broken`` or ``disabled``."""

    name: str
    state: str
    version: str | None
    reason: str | None


# import name -> name on the package index
OPTIONAL_PACKAGES = {
    "triton": "triton",
    "transformers": "transformers",
    "deep_gemm": "sgl-deep-gemm",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
    "triton_kernels": "triton-kernels",
    "flash_attn_interface": "tokenspeed-fa3",
}


# What a start spends on packages that backends are chosen from: seconds of the first import that asked for each.
import_seconds: dict[str, float] = {}


def _version(import_name: str) -> str | None:
    for distribution in (OPTIONAL_PACKAGES.get(import_name, import_name), import_name):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def package(import_name: str, *, load: bool) -> Package:
    """Return the state of an optional package; with ``load`` it is imported, which is the only real proof.

    Never raises: an import that fails for whatever reason is a ``broken`` package with the reason in words.
    """
    if import_name in env.disabled_packages():
        return Package(import_name, "disabled", None, f"{import_name} is disabled by {env.DISABLE}")
    return _probe(import_name, load)


@lru_cache
def _probe(import_name: str, load: bool) -> Package:
    try:
        found = importlib.util.find_spec(import_name) is not None
    except (ImportError, ValueError):
        found = False
    version = _version(import_name) if found else None
    if not found:
        hint = OPTIONAL_PACKAGES.get(import_name, import_name)
        return Package(import_name, "absent", None, f"{import_name} is not installed (pip install {hint})")
    if load:
        import torch

        kernel_cache.prepare()
        begin = time.perf_counter()
        try:
            importlib.import_module(import_name)
        except Exception as error:  # a broken package may raise anything; the reason is kept
            first_line = (str(error).splitlines() or [""])[0]
            reason = f"{_named(import_name)} fails to import: {type(error).__name__}: {first_line}"
            return Package(import_name, "broken", version, reason)
        finally:
            import_seconds.setdefault(import_name, time.perf_counter() - begin)
        if torch.cuda.is_available() and (why := kernel_cache.no_compiler(import_name)):
            return Package(import_name, "broken", version, why)
    return Package(import_name, "ok", version, None)


def missing(needs: tuple[str, ...], *, load: bool) -> str | None:
    """Return why the functions in ``needs`` are not available, or ``None`` if all are.

    Parameters
    ----------
    needs : tuple[str, ...]
        ``"package"`` or ``"package.module:attribute.path"``; ``"torch.ops:sgl_kernel.rmsnorm"`` asks for an
        operator (name the package that registers it first).
    load : bool
        Import the packages and look for the attributes. Without it only their presence is checked.
    """
    for need in needs:
        module_name, _, attribute = need.partition(":")
        top = module_name.split(".")[0]
        if top != "torch":
            state = package(top, load=load)
            if state.reason is not None:
                return state.reason
        if load and (reason := _lacks(module_name, attribute)):
            return reason
    return None


def _named(module: str) -> str:
    """Return a module's name with the version of its package, where that is known."""
    return " ".join(filter(None, (module, _version(module.split(".")[0]))))


@lru_cache
def _lacks(module_name: str, attribute: str) -> str | None:
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # as above: any failure of a foreign package is a reason, not a crash
        return f"{_named(module_name)} fails to import: {type(error).__name__}: {error}"
    for piece in filter(None, attribute.split(".")):
        try:
            found = getattr(found, piece)
        except AttributeError:
            return f"{_named(module_name)} has no {attribute}"
    return None


def forget_probes() -> None:
    """Forget what was learnt about packages (after installing or removing one in a running process)."""
    _probe.cache_clear()
    _lacks.cache_clear()
