"""The one stream besides the current one: a third makes every launch of a process slower.

Measured on an H200: as soon as a third CUDA stream has had work, each kernel of any graph starts some 0.3 µs later, for
good (`benchmarks/notes/generate.md`). So warm-ups, captures, clocks and compiles share one.
"""

from __future__ import annotations

import threading

import torch

_streams: dict[int, torch.cuda.Stream] = {}
_recorded: dict[int, torch.cuda.Stream] = {}
# Held while something is captured on it: a capture takes whatever another thread launches there.
side_lock = threading.RLock()


def side_stream(device: torch.device | str | None = None) -> torch.cuda.Stream:
    """Return the side stream of a CUDA device (default: the current one); always the same one."""
    index = None if device is None else torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    with side_lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(index)
        return _streams[index]


def other_stream(device: torch.device | str | None = None) -> torch.cuda.Stream:
    """Return a stream to run beside the current one: the side stream; beside that, the default one.

    A capture, which is on the side stream, gets one that work is only recorded on: nothing ever runs there.
    """
    side = side_stream(device)
    if torch.cuda.current_stream(side.device) != side:
        return side
    if not torch.cuda.is_current_stream_capturing():
        return torch.cuda.default_stream(side.device)
    with side_lock:
        if side.device.index not in _recorded:
            _recorded[side.device.index] = torch.cuda.Stream(side.device)
        return _recorded[side.device.index]
