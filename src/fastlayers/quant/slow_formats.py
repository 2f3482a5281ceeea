"""Says once which number formats of a model are slow here, with what they cost and what to do instead.

Factors are the time of a decode step's matrix products against the same weights in bf16. For a CPU they are measured
(one thread of an EPYC, 1 and 8 tokens, medians of 7: a linear of 2048×4096 at the upper end, 8 experts of 1024×1024,
2 a token, at the lower; MXFP4 experts only). For a GPU without e4m3 units they are counted bytes: a weight is read (1
byte), written and read again as fp32 (8 bytes), where bf16 reads 2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.device import Device
from fastlayers.layer import Layer

log = logging.getLogger(__name__)

E4M3, E2M1 = "FP8 (e4m3)", "MXFP4"
CPU_FACTOR = {E4M3: "3 to 15", E2M1: "20 to 30"}
CUDA_FACTOR = "4.5"
# Codes in a byte.
_PACKED = {E4M3: 1, E2M1: 2}


@dataclass(frozen=True)
class Slow:
    """One format that a device cannot run at speed: bytes of its codes, how many modules, times bf16's time."""

    format: str
    device: str
    code_bytes: int
    modules: int
    factor: str
    measured: bool

    def __str__(self) -> str:
        bf16 = 2 * self.code_bytes * _PACKED[self.format]
        how = "measured" if self.measured else "by bytes moved, not measured"
        return (
            f"{self.format} weights in {self.modules} modules: {self.device} has no matrix units for them, so they are "
            f"decoded at each use. They take {_size(self.code_bytes)} instead of {_size(bf16)} in bf16, and a decode "
            f"step's products about {self.factor} times as long as bf16's ({how}). Alternative: "
            f"`fastlayers convert SRC DST --format bf16`, if there is room for {_size(bf16)}."
        )


def slow_formats(model: nn.Module) -> Iterator[Slow]:
    """Yield the formats of ``model``'s layers that their devices cannot run at speed."""
    found: dict[tuple[str, Device], list[int]] = {}
    for module in model.modules():
        if isinstance(module, Layer) and hasattr(module, "choice") and (seen := _codes(module)) is not None:
            found.setdefault((seen[0], module.choice.device), []).append(seen[1])
    for (format, device), sizes in found.items():
        if (cost := _cost(format, device)) is not None:
            yield Slow(format, str(device), sum(sizes), len(sizes), *cost)


def announce_slow_formats(model: nn.Module) -> None:
    """Log one WARNING for each slow format and kind of device of ``model``, once a process."""
    for slow in slow_formats(model):
        if (slow.format, slow.device) not in _announced:
            _announced.add((slow.format, slow.device))
            log.warning("%s", slow)


_announced: set[tuple[str, str]] = set()


def _codes(module: Layer) -> tuple[str, int] | None:
    """Return the format of a layer's own weights and their bytes, or ``None`` for formats that run at speed."""
    weights = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    if getattr(module.cfg, "quant", None) == "mxfp4":
        return E2M1, sum(p.numel() for p in weights if p.dtype == torch.uint8)
    size = sum(p.numel() for p in weights if p.dtype == torch.float8_e4m3fn)
    return (E4M3, size) if size else None


def _cost(format: str, device: Device) -> tuple[str, bool] | None:
    if device.type == "cpu":
        return CPU_FACTOR[format], True
    # MXFP4 is decoded to bf16 in registers, which every GPU can.
    return (CUDA_FACTOR, False) if format == E4M3 and not device.has_fp8_dot else None


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
