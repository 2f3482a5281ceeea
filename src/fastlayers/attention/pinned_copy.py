"""Host memory from which a step's schedules are copied to the device."""

from __future__ import annotations

from typing import Any

import torch


class Staging:
    """Pinned buffers of one usual size; none is handed out again before the copy from it has been made."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device, self._pinned = size, device, device.type == "cuda"
        self._busy: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of a layer start without buffers."""
        return Staging, (self._size, self._device)

    def take(self, size: int = 0) -> torch.Tensor:
        """Return a buffer that nobody reads, uint8, of at least ``size``; a new one if the device has not caught up."""
        for index, (copied, buffer) in enumerate(self._busy):
            if buffer.numel() >= size and copied.query():
                del self._busy[index]
                return buffer
        return torch.empty(max(size, self._size), dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back, after the copies from it were queued on the current stream."""
        if self._pinned:
            copied = torch.cuda.Event()
            copied.record()
            self._busy.append((copied, buffer))
