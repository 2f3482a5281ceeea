"""What options of several commands mean; ``command`` is the one that the error of a bad value names."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fastlayers.errors import ArgumentError, CheckpointError


def device_named(command: str, name: str) -> Any:
    """Return the torch device of this name; of an empty one a GPU if there is one."""
    import torch

    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(command, "--device", repr(name), "cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ArgumentError(command, "--device", repr(name), "cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(command, "--device", repr(name), "cpu (this machine has no usable NVIDIA GPU)")
    return device


def dtype_named(command: str, name: str, option: str = "--dtype") -> Any:
    """Return the dtype of this name; only caches may hold e4m3."""
    import torch

    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if option == "--kv-dtype":
        known["e4m3"] = torch.float8_e4m3fn
    if name not in known:
        raise ArgumentError(command, option, repr(name), ", ".join(known))
    return known[name]


def checkpoint_named(command: str, name: str, option: str = "checkpoint") -> Path:
    """Return the directory of a checkpoint: the one that ships, a local one, or one from the hub."""
    from fastlayers_models.find import TINY, assets, find

    if name in ("tiny", TINY):
        return assets() / TINY
    try:
        return find(name)
    except CheckpointError as error:
        raise CheckpointError(f"{command}: {option}: {error}, or 'tiny', the one that ships") from error


def counts_named(command: str, text: str, option: str = "--tokens") -> tuple[int, ...]:
    """Return counts from ``"1,8,64"``; empty for an empty text."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not all(piece.isdigit() and int(piece) for piece in pieces):
        raise ArgumentError(command, option, repr(text), "positive integers, comma separated")
    return tuple(sorted({int(piece) for piece in pieces}))


def check_text(command: str, option: str, text: str) -> None:
    """Raise :class:`ArgumentError` for an argument that is no UTF-8: tokenizers take nothing else."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(command, option, ascii(text), "text in UTF-8") from error


def expanded(command: str, argument: str, name: str) -> Path:
    """Return a path in which ``~`` is somebody's home, as for what is read."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ArgumentError(command, argument, f"{name!r}: {error}", "a path") from error


def check_output(command: str, option: str, name: str) -> Path:
    """Return where a result goes, or raise :class:`ArgumentError`, before the work that it costs."""
    path = expanded(command, option, name)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with path.open("r+b"):
                pass
    except OSError as error:
        given = f"{name!r}, which cannot be written ({type(error).__name__})"
        raise ArgumentError(command, option, given, "a file in a directory that exists") from error
    return path
