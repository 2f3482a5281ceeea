"""Static buffers of a step's metadata: on the device, and pinned on the host, copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Mirrored:
    """Bytes on the device and, pinned, on the host; on a CPU both are the same."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host_bytes = self.device_bytes
        if device.type == "cuda":
            self.host_bytes = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def fields(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (device view, host view) of one field after the other, given as (elements, dtype)."""
        found, offset = [], 0
        for count, dtype in wanted:
            part = slice(offset, offset + count * dtype.itemsize)
            on_device = self.device_bytes[part].view(dtype)
            same = self.host_bytes is self.device_bytes
            found.append((on_device, on_device if same else self.host_bytes[part].view(dtype)))
            offset = part.stop
        return found

    def copy(self) -> None:
        """Send everything to the device: one asynchronous copy."""
        if self.host_bytes is not self.device_bytes:
            self.device_bytes.copy_(self.host_bytes, non_blocking=True)


class StepBuffers:
    """The fields of a step's metadata but the page table, each as (on the device, on the host)."""

    def __init__(self, requests: int, tokens: int, device: torch.device) -> None:
        sizes = [(tokens, torch.int64), (tokens, torch.int64)]
        sizes += [(count, torch.int32) for count in (requests, requests, requests + 1, tokens)]
        self.mirrored = Mirrored(sum(count * dtype.itemsize for count, dtype in sizes), device)
        self.positions, self.loc, self.seq_lens, self.starts, self.cu, self.request = self.mirrored.fields(sizes)
        # What a step of one token a request has, and keeps.
        self.cu[1].copy_(torch.arange(requests + 1, device="cpu"))
        self.request[1].copy_(torch.arange(tokens, device="cpu"))
        self.has_starts = False

    def views(self, rows: int, width: int) -> dict[str, Any]:
        """Return the device views that a step of ``rows`` requests and ``width`` tokens reads."""
        return {
            "seq_lens": self.seq_lens[0][:rows], "starts": self.starts[0][:rows],
            "cu_seqlens_q": self.cu[0][: rows + 1], "request_of_token": self.request[0][:width],
            "positions": self.positions[0][:width], "out_cache_loc": self.loc[0][:width],
        }  # fmt: skip
