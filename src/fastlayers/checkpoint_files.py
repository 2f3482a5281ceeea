"""Which files of a checkpoint hold its weights: those that transformers reads, or an error.

    transformers_weights in config.json  >  model.safetensors  >  model.safetensors.index.json

Whatever else lies in the directory is not looked at. Where none of the three is there, transformers reads pickled
weights, which nothing here does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from fastlayers.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
# The key of config.json that names other files.
NAMED = "transformers_weights"
_BELOW = "names of files below the directory"
# Returns the file of that name in the checkpoint, or none.
Find = Callable[[str], Path | None]


class WeightFiles(NamedTuple):
    """The files that hold a checkpoint's weights.

    Attributes
    ----------
    files : dict[str, Path]
        By the name that the directory has for each, in order.
    index_file : Path or None
        The index that names them, if there is one.
    weight_map : dict[str, str]
        Of the index: tensor to name of a file.
    """

    files: dict[str, Path]
    index_file: Path | None = None
    weight_map: dict[str, str] = {}  # noqa: RUF012 (of a NamedTuple; nobody writes to it)


def weight_files(where: object, config: Mapping[str, Any], find: Find) -> WeightFiles | None:
    """Return the files that transformers reads the weights from, or ``None`` where it finds no safetensors.

    Parameters
    ----------
    where : object
        The checkpoint, for errors.
    config : mapping
        The parsed ``config.json``.
    find : callable

    Raises
    ------
    CheckpointError
        A name leads out of the directory, a file that is named is not there, an index that cannot be read; or an
        adapter lies beside the weights, which transformers would add where PEFT is installed.
    """
    try:
        if find(ADAPTER) is not None:
            accepted = "the adapter merged into the weights, or moved elsewhere"
            raise CheckpointError(f"{where}: {ADAPTER} beside config.json: an adapter; accepted: {accepted}")
        if (named := _named(where, config)) is not None:
            file = find(_below(f"{where}: {NAMED} in config.json names", named))
            if file is None:
                raise CheckpointError(f"{where}: {NAMED} in config.json names {named!r}, which is not there")
            return _of_index(file, find) if named.endswith(".json") else WeightFiles({named: file})
        if (file := find(SINGLE)) is not None:
            return WeightFiles({SINGLE: file})
        return None if (file := find(INDEX)) is None else _of_index(file, find)
    except (OSError, ValueError) as error:  # of a name that no file can have
        raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error


def _named(where: object, config: Mapping[str, Any]) -> str | None:
    """Return the file that ``config.json`` names."""
    within = config.get("text_config")
    if isinstance(within, Mapping) and within.get(NAMED) is not None:
        raise CheckpointError(f"{where}: config.json has {NAMED} in text_config; accepted: outside of it")
    named = config.get(NAMED)
    if named is None:
        return None
    if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
        accepted = "a safetensors file, or the index of several, below the directory"
        raise CheckpointError(f"{where}: {NAMED} in config.json is {named!r:.200}; accepted: {accepted}")
    return named


def _of_index(index: Path, find: Find) -> WeightFiles:
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(weight_map.values()))
        files = {name: find(_below(f"{index}: names the shard", name)) for name in names}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from error
    if missing := [name for name, file in files.items() if file is None]:
        raise CheckpointError(f"{index}: names shards that are not there: {', '.join(missing)}")
    return WeightFiles({name: file for name, file in files.items() if file is not None}, index, weight_map)


def _below(who: str, name: str) -> str:
    """Return the name of a file; links below the directory may lead anywhere."""
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{who} {name!r}; accepted: {_BELOW}")
    return name
