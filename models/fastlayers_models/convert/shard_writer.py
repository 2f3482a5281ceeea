"""Rewriting a checkpoint shard by shard, so that an interruption costs one shard: :class:`ShardWriter`.

A shard is written under another name, forced to disk and renamed. What is finished is noted in a state file, with a
checksum of each shard and a fingerprint of the source. Index and ``config.json`` come last, each renamed into place,
then the state file goes: a directory with ``config.json`` is complete. A locked file keeps a second run out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastlayers.checkpoint_files import INDEX, NAMED, SINGLE
from fastlayers.errors import ArgumentError, FastlayersError, check_path
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert.readme import ORIGINAL, originals_readme
from fastlayers_models.find import UNFINISHED

Tensors = dict[str, torch.Tensor]
# Returns what is written for one tensor of the source, and notes that are kept across interruptions.
Handler = Callable[[str], tuple[Tensors, dict[str, str]]]
LOCK = "conversion.lock"
PARTIAL = ".partial"
# Weights in other formats are not copied: they would contradict the new ones.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", PARTIAL)


class ShardWriter:
    """One rewriting of ``checkpoint`` into ``target``.

    Parameters
    ----------
    checkpoint : Checkpoint
    target : str or Path
        New, empty, or left by an interrupted run with the same ``purpose`` over the same source.
    purpose : str
        What makes two runs the same.

    Attributes
    ----------
    files : list[Path]
        Shards of the source.
    resumed : int
        How many of them an earlier run had finished.
    bytes_before, bytes_after : int
        Of all tensors.

    Raises
    ------
    ArgumentError
        The target holds something else.

    Notes
    -----
    :meth:`write` and :meth:`finish` are called within :meth:`held`.
    """

    def __init__(self, checkpoint: Checkpoint, target: str | Path, purpose: str) -> None:
        self.checkpoint, self.target = checkpoint, check_path("convert", "target", target)
        if not str(self.target).isprintable():  # bytes that are no UTF-8 among them
            raise ArgumentError("convert", "target", ascii(str(target)), "a name that its README can tell")
        self.files = sorted(set(checkpoint.file_of.values()))
        # A shard keeps its place below the directory: two may have the same name.
        self._place = {file: file.relative_to(checkpoint.path).as_posix() for file in self.files}
        self.resumed = self.bytes_before = self.bytes_after = 0
        self._identity = {"purpose": purpose, "source": _fingerprint(checkpoint)}
        self._finished: dict[str, Any] = {}
        self._noted()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the directory, keep other runs out of it, and take up what an interrupted one has finished.

        Where the conversion is refused, what was made is gone again, with the directories above it.

        Raises
        ------
        ArgumentError
            Another process is writing there, or the target holds something else by now.
        """
        made = [folder for folder in (self.target, *self.target.parents) if not os.path.exists(folder)]
        try:
            self.target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _remove_empty(made)
            given = f"{self.target}, which cannot be made ({type(error).__name__}: {error})"
            raise ArgumentError("convert", "target", given, _NEW) from error
        try:
            with self._locked():
                yield
        except FastlayersError:
            _remove_empty(made)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = self.target / LOCK
        try:
            opened = file.open("a+")
        except FileNotFoundError as error:
            given = f"{self.target}, which another conversion made and took back at this moment"
            raise ArgumentError("convert", "target", given, _NEW) from error
        with opened as lock:
            try:
                # The kernel drops this lock with the process, so that a killed run leaves none behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not file.exists() or not os.path.samestat(file.stat(), os.fstat(lock.fileno())):
                    raise BlockingIOError("the lock's owner removed it in between")
            except BlockingIOError as error:
                lock.seek(0)
                given = f"{self.target}, where a conversion is running now (process {lock.read().strip() or 'unknown'})"
                raise ArgumentError("convert", "target", given, _NEW) from error
            try:
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
                self._finished = {n: e for n, e in self._noted().items() if _complete(self.target / n, e)}
                try:
                    yield
                except FastlayersError:  # about the source: another run would end like this one
                    self._take_back()
                    raise
            finally:
                file.unlink(missing_ok=True)

    def _noted(self) -> dict[str, Any]:
        """Return what an interrupted run says it has finished."""
        state_file = self.target / UNFINISHED
        if state_file.is_file():
            try:
                state = dict(json.loads(state_file.read_text()))
                finished = dict(state["finished"])
            except (ValueError, KeyError, TypeError) as error:
                raise ArgumentError(
                    "convert", "target", f"{self.target}, whose {UNFINISHED} is damaged ({error})", _NEW
                ) from error
            for key, words in (("purpose", "to another format"), ("source", "of another or a changed source")):
                if state.get(key) != self._identity[key]:
                    given = f"{self.target}, with an unfinished conversion {words}"
                    raise ArgumentError("convert", "target", given, _NEW)
            return finished
        if self.target.exists() and not self.target.is_dir():
            raise ArgumentError("convert", "target", f"{self.target}, a file", _NEW)
        if self.target.exists() and any(file.name != LOCK for file in self.target.iterdir()):
            raise ArgumentError("convert", "target", f"{self.target}, not empty", _NEW)
        return {}

    def write(self, handle: Handler, progress: Callable[[str], Any] | None) -> dict[str, str]:
        """Write every shard that is not finished and return all notes."""
        self._save_state()
        by_file: dict[Path, list[str]] = {file: [] for file in self.files}
        for name in sorted(self.checkpoint.file_of):
            by_file[self.checkpoint.file_of[name]].append(name)
        for file, names in by_file.items():
            place = self._place[file]
            done = place in self._finished
            self.resumed += done
            if not done:
                self._finished[place] = self._write_shard(file, names, handle, progress)
                self._save_state()
            elif progress is not None:
                for name in names:
                    progress(name)
        entries = self._finished.values()
        self.bytes_before = sum(entry["bytes_before"] for entry in entries)
        self.bytes_after = sum(entry["bytes_after"] for entry in entries)
        return {module: note for entry in entries for module, note in entry["notes"].items()}

    def _write_shard(
        self, file: Path, names: list[str], handle: Handler, progress: Callable[[str], Any] | None
    ) -> dict[str, Any]:
        tensors: Tensors = {}
        notes: dict[str, str] = {}
        for name in names:
            if progress is not None:
                progress(name)
            made, noted = handle(name)
            tensors |= made
            notes |= noted
        place = self.target / self._place[file]
        partial = place.with_name(place.name + PARTIAL)
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"format": "pt"})
        shutil.copymode(file, partial)
        _to_disk(partial)
        checksum = _checksum(partial)
        partial.replace(place)
        after = sum(t.numel() * t.element_size() for t in tensors.values())
        return {
            "sha256": checksum, "tensors": sorted(tensors), "notes": notes,
            "bytes_before": file.stat().st_size - len(_header(file)), "bytes_after": after,
        }  # fmt: skip

    def finish(self, config: dict[str, Any], readme: str) -> None:
        """Copy the source's other files, write README, index and ``config.json``, and drop the state file."""
        described = originals_readme(self.checkpoint.path)
        for file in sorted(self.checkpoint.path.iterdir()):
            weights = file.suffix in _OTHER_WEIGHTS or file.name.endswith(
                (".safetensors.index.json", ".bin.index.json")
            )
            other = file.name in ("config.json", UNFINISHED, LOCK) or file.name.lower() == "readme.md"
            if file.is_file() and not weights and not other:
                shutil.copyfile(file, self.target / file.name)
        if described is not None:
            shutil.copyfile(described, self.target / ORIGINAL)
        _write_atomically(self.target / "README.md", readme)
        if list(self._finished) != [SINGLE]:  # the one name that needs no index
            weight_map = {t: name for name, entry in self._finished.items() for t in entry["tensors"]}
            index = {"metadata": {"total_size": self.bytes_after}, "weight_map": dict(sorted(weight_map.items()))}
            _write_atomically(self.target / INDEX, json.dumps(index, indent=2))
        # The new files have the names that are found without being told.
        said = {key: value for key, value in config.items() if key != NAMED}
        _write_atomically(self.target / "config.json", json.dumps(said, indent=2) + "\n")
        (self.target / UNFINISHED).unlink()

    def _take_back(self) -> None:
        """Remove what was written, so that the target is as it was before."""
        for place in self._finished:
            (self.target / place).unlink(missing_ok=True)
            _remove_empty([folder for folder in (self.target / place).parents if self.target in folder.parents])
        (self.target / UNFINISHED).unlink(missing_ok=True)
        self._finished = {}

    def _save_state(self) -> None:
        _write_atomically(self.target / UNFINISHED, json.dumps(self._identity | {"finished": self._finished}))


_NEW = "a new or empty directory, or one that an interrupted run of the same conversion left"


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove these directories, inner ones first, up to the first that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


def _complete(file: Path, entry: Any) -> bool:
    return file.is_file() and _checksum(file) == entry.get("sha256")


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest of what the source is: configuration, and its shards' names, sizes, times and headers."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for file in sorted(set(checkpoint.file_of.values())):
        facts = file.stat()
        digest.update(f"{file.relative_to(checkpoint.path)} {facts.st_size} {facts.st_mtime_ns}".encode())
        digest.update(_header(file))
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """Return what stands before the numbers of a safetensors file: 8 bytes of length, names, dtypes, shapes."""
    with file.open("rb") as opened:
        length = opened.read(8)
        return length + opened.read(int.from_bytes(length, "little"))


def _write_atomically(file: Path, text: str) -> None:
    partial = file.with_name(file.name + PARTIAL)
    partial.write_text(text)
    _to_disk(partial)
    partial.replace(file)
    _to_disk(file.parent)  # the new name


def _to_disk(file: Path) -> None:
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
