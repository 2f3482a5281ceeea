"""Reading Hugging Face checkpoints tensor by tensor: :class:`Checkpoint`.

Nothing is held but the tensor being read: shards are memory-mapped, and of a tensor only the part that is asked for is
read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fastlayers.checkpoint_files import INDEX, PICKLED, SINGLE, WeightFiles, weight_files
from fastlayers.errors import CheckpointError, check_path
from fastlayers.moved import renamed

CONFIG, GENERATION = "config.json", "generation_config.json"
_EXPERT = re.compile(r"\.experts\.\d+\.")
# How a sharded checkpoint names its files.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
# How many names an error message lists before it counts the rest.
NAMED = 8


class Checkpoint:
    """A directory with ``config.json`` and safetensors shards.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    ArgumentError
        ``path`` is none.
    CheckpointError
        No such directory, no shards, an index that names a file that is not there or lies outside the directory, or a
        shard that cannot be read; without an index, several files that cannot be told to belong together, or pickled
        ones that transformers would read; a tensor that two files hold; an adapter beside the weights.

    Notes
    -----
    The files are those that transformers takes, or there is an error: what ``transformers_weights`` in ``config.json``
    names; else ``model.safetensors``, whatever lies beside it; else those of ``model.safetensors.index.json``; else,
    where transformers gives up, a whole set of numbered shards or files of which no two hold the same tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = check_path("Checkpoint", "path", path)
        if not self.path.is_dir():
            hint = "a directory with config.json and *.safetensors is expected"
            raise CheckpointError(f"{self.path}: not a directory; {hint}")
        self._open_name: Path | None = None
        self._open: Any = None
        self.file_of = self._files()
        if not self.file_of:
            raise CheckpointError(f"{self.path}: no tensors in its *.safetensors files")

    def _files(self) -> dict[str, Path]:
        """Return the file of each tensor."""
        config = self.path / CONFIG
        chosen = weight_files(self.path, read_json(config) if config.exists() else {}, self._find)
        if chosen is not None:
            return self._held_as_said(chosen)
        if pickled := [name for name in PICKLED if self._find(name)]:
            accepted = f"{SINGLE} or {INDEX} (save_pretrained of transformers writes them)"
            raise CheckpointError(f"{self.path}: transformers would read {pickled[0]}, pickled; accepted: {accepted}")
        files = sorted(file for file in self.path.glob("*.safetensors") if file.is_file())
        if not files:
            raise CheckpointError(f"{self.path}: no *.safetensors files")
        numbered = {file: found for file in files if (found := _SHARD.search(file.name))}
        if numbered:
            sets = {(file.name[: found.start()], int(found[2])) for file, found in numbered.items()}
            if len(sets) > 1 or len(numbered) < len(files):
                raise CheckpointError(f"{self.path}: no {INDEX}, and {_listed(files)} are not shards of one set")
            (_, wanted), numbers = sets.pop(), {int(found[1]) for found in numbered.values()}
            if numbers != set(range(1, wanted + 1)):
                raise CheckpointError(f"{self.path}: {len(numbered)} of {wanted} shards, and no {INDEX}: incomplete")
        return self._held_by(files)

    def _find(self, name: str) -> Path | None:
        return self.path / name if (self.path / name).is_file() else None

    def _held_as_said(self, chosen: WeightFiles) -> dict[str, Path]:
        held = self._held_by(list(chosen.files.values()))
        for name, file in chosen.weight_map.items():
            # The same file: no two hold the same tensor.
            if held.get(name) != chosen.files[file]:
                said = chosen.index_file.name if chosen.index_file else INDEX
                raise CheckpointError(f"{chosen.files[file]}: {name} is not in it, though {said} says so")
        return held

    def _held_by(self, files: Sequence[Path]) -> dict[str, Path]:
        """Return the file of each tensor in ``files``, of which no two may hold the same."""
        held: dict[str, Path] = {}
        for file in files:
            for name in self._shard(file).keys():  # noqa: SIM118 (not iterable)
                if name in held:
                    raise CheckpointError(f"{self.path}: {name} is in {_listed([held[name], file])}: one would be lost")
                held[name] = file
        return held

    def _shard(self, file: Path) -> Any:
        if self._open_name != file:
            try:
                self._open = safe_open(file, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{file}: truncated or corrupt: {error}") from error
            self._open_name = file
        return self._open

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``."""
        file = self.path / CONFIG
        parsed = read_json(file)
        quantization = parsed.get("quantization_config")
        if quantization is not None and not isinstance(quantization, dict):
            accepted = "an object with quant_method, or none"
            raise CheckpointError(f"{file}: quantization_config is {quantization!r}; accepted: {accepted}")
        return parsed

    @property
    def generation(self) -> dict[str, Any]:
        """The parsed ``generation_config.json``, nothing where there is none."""
        file = self.path / GENERATION
        return read_json(file) if file.is_file() else {}

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self.file_of.keys()

    def _slice(self, name: str) -> Any:
        if not isinstance(name, str) or name not in self.file_of:
            raise CheckpointError(f"{self.path}: no tensor {name!r:.200}")
        try:
            return self._shard(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.file_of[name]}: {name}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, read from the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as safetensors spells it (``"BF16"``, ``"F8_E4M3"``), read from the header."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read a tensor, or only the part that ``index`` selects, to host memory."""
        part = self._slice(name)
        try:
            value: torch.Tensor = part[index] if index else part[...]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.file_of[name]}: {name}: cannot be read: {error}") from error
        return value

    def in_file_order(self, names: Iterable[str]) -> Iterator[str]:
        """Yield ``names`` shard by shard, so that each file is opened once."""
        order = {file: number for number, file in enumerate(sorted(set(self.file_of.values())))}
        yield from sorted(names, key=lambda name: (order[self.file_of[name]], name))


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, or raise :class:`CheckpointError` naming the file."""
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file}: cannot be read: nested too deeply") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: holds {type(parsed).__name__}; accepted: an object of names and values")
    return parsed


def _listed(files: Sequence[Path]) -> str:
    names = [file.name for file in files]
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def collapsed(texts: Sequence[str]) -> list[str]:
    """Return ``texts`` with those that differ only in the number of an expert as one, with a count."""
    alike: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        alike.setdefault(_EXPERT.sub(".experts.*.", text), []).append(text)
    return [t[0] if len(t) == 1 else f"{pattern} ({len(t)} experts)" for pattern, t in alike.items()]


__getattr__ = renamed(__name__, {"load_weights": "fastlayers_models.loading.load_weights"})
