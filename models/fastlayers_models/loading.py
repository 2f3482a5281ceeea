"""From a checkpoint to a model: :func:`load_model`, with :func:`check_config` before it is built and weights after.

Nothing is held but the tensor being copied: each rank reads only its slices, and each part goes straight into its place
in a fused parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from fastlayers.errors import CheckpointError
from fastlayers.layer import finalize
from fastlayers.quant.slow_formats import announce_slow_formats
from fastlayers.weights import Slot, slots
from fastlayers_models.agreement import same_checkpoint
from fastlayers_models.cache_scales import fold_cache_scales, scale_names
from fastlayers_models.check_quantization import check_quantization, wrong_words
from fastlayers_models.checkpoint import NAMED, Checkpoint, collapsed
from fastlayers_models.config import DecoderConfig

Model = TypeVar("Model", bound=nn.Module)

# Dtypes of quantised values, as safetensors spells them.
CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# What may become a weight of any floating dtype without a word from config.json.
FLOATS = ("BF16", "F16", "F32", "F64")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Of layers without tensors so many are left to the comparison of all names, which lists what is missing.
FEW_LAYERS = 16
# Rows of two tensors that are compared at once.
CHUNK = 4096


def load_model(
    family: Callable[..., Model], checkpoint: Checkpoint, config: Any, unwanted: Sequence[str] = (), **options: Any
) -> Model:
    """Build the model of a configuration and load a checkpoint's weights, ready to compute.

    Parameters
    ----------
    family : type
        Called with the configuration and ``options``; its ``ignored_tensors`` have no place in the model.
    checkpoint : Checkpoint
        With a ``generation_config.json`` that names the tokens that end a text, those of ``config`` are not asked.
    config : dataclass
    unwanted : sequence of str
        Regular expressions of more tensor names that have no place.

    Raises
    ------
    CheckpointError, ArgumentError
        See :func:`check_config`, :func:`load_weights`, and the family's constructor.
    """
    if isinstance(config, DecoderConfig):
        config = config.ended_by(checkpoint.generation)
    check_config(checkpoint, config)
    model: Any = family(config, **options)
    load_weights(model, checkpoint, ignore=[*model.ignored_tensors, *unwanted])
    finalize(model)
    made: Model = model.eval()
    return made


def check_config(checkpoint: Checkpoint, config: Any) -> None:
    """Compare what a configuration says of sizes with the headers of the tensors, before anything is built.

    Parameters
    ----------
    checkpoint : Checkpoint
    config : dataclass
        With ``sizes()``, see :class:`fastlayers_models.config.Size`; others are not looked at.

    Raises
    ------
    CheckpointError
        The model would be larger than the checkpoint or of other shapes; or the head is tied to the embedding, and the
        checkpoint holds a head of other values.
    """
    if not hasattr(config, "sizes"):
        return
    numbers = [int(found[1]) for name in checkpoint.names() if (found := _LAYER.search(name))]
    there, wanted = max(numbers, default=-1) + 1, config.num_hidden_layers
    drafts = getattr(config, "num_nextn_predict_layers", 0)
    problems = []
    if wanted + drafts > there + FEW_LAYERS:
        words = f"num_hidden_layers is {wanted}" + (f" and num_nextn_predict_layers {drafts}" if drafts else "")
        problems.append(f"{words} in config.json, the tensors are of {there} layers")
    # A byte holds two values at most.
    most = 2 * sum(file.stat().st_size for file in set(checkpoint.file_of.values()))
    for tensor, shape, settings in config.sizes():
        if tensor in checkpoint.file_of:
            if (given := checkpoint.shape(tensor)) != shape:
                said = f"the model wants {shape} ({settings} in config.json)"
                problems.append(f"wrong shapes: {tensor} has shape {given}, {said}")
        elif math.prod(shape) > most:
            problems.append(f"missing tensors: {tensor} {shape} ({settings} in config.json)")
    if problems:
        problems = [*check_quantization(checkpoint, ()), *problems]
        raise CheckpointError(f"{checkpoint.path} does not fit the model; " + "; ".join(problems))
    _check_tied(checkpoint, config)


def _check_tied(checkpoint: Checkpoint, config: Any) -> None:
    head = ".".join(filter(None, (getattr(config, "within", ""), "lm_head.weight")))
    embedding = f"{getattr(config, 'prefix', 'model')}.embed_tokens.weight"
    if not config.tie_word_embeddings or not {head, embedding} <= checkpoint.file_of.keys():
        return
    shape = checkpoint.shape(embedding)
    for first in range(0, shape[0], CHUNK):
        rows = (slice(first, first + CHUNK),)
        if checkpoint.shape(head) != shape or not torch.equal(
            checkpoint.read(head, rows).float(), checkpoint.read(embedding, rows).float()
        ):
            raise CheckpointError(
                f"{checkpoint.path} does not fit the model; tie_word_embeddings is true in config.json, "
                f"but {head} is not {embedding}, see {checkpoint.file_of[head].name}"
            )


def load_weights(model: nn.Module, checkpoint: Checkpoint, *, ignore: Sequence[str] = ()) -> None:
    """Fill ``model``'s parameters from ``checkpoint``.

    Parameters
    ----------
    model : nn.Module
        Its layers say what goes where, see :func:`fastlayers.weights.slots`. Mutated.
    checkpoint : Checkpoint
    ignore : sequence of str
        Regular expressions of tensor names that may be there without a place to go.

    Raises
    ------
    CheckpointError
        Missing, extra or misshapen tensors, or quantised ones where the model holds others, all found before the
        first weight is written; or an unreadable shard.
    CollectiveMismatch
        Ranks of one model read different checkpoints.
    """
    same_checkpoint(checkpoint, getattr(model, "parallel", None))
    wanted: dict[str, list[Slot]] = {}
    read = slots(model, getattr(model, "checkpoint_name", ""))
    for name, slot in in_one_tensor(read, getattr(model, "merged_tensors", {})):
        wanted.setdefault(name, []).append(slot)
    _check_names(checkpoint, wanted, [*ignore, *(f"^{re.escape(name)}$" for name in _cache_scales(model, checkpoint))])
    with torch.inference_mode():
        for name in checkpoint.in_file_order(n for n in wanted if n in checkpoint.file_of):
            for slot in wanted[name]:
                slot.fill(name, checkpoint.read(name, slot.index))
        fold_cache_scales(model, checkpoint)
    announce_slow_formats(model)


def in_one_tensor(found: Iterable[tuple[str, Slot]], merged: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of a model, those of ``merged`` parts as rows of the one tensor that holds them in turn.

    Parameters
    ----------
    found : iterable of (str, Slot)
        Of the whole model, see :func:`fastlayers.weights.slots`.
    merged : mapping
        A module of the checkpoint to the modules that it is here, as ``{"qkv_proj": ("q_proj", "k_proj", "v_proj")}``.
        Weights and biases are merged. Scales are not, nor what is no rows of one tensor: these keep their names, which
        the comparison with the checkpoint lists as missing.
    """
    listed = list(found)
    shapes = {name: tuple(slot.shape) for name, slot in listed}
    place_of = {part: (whole, parts) for whole, parts in merged.items() for part in parts}
    for name, slot in listed:
        prefix, module, kind = ([""] * 3 + name.rsplit(".", 2))[-3:]
        whole, parts = place_of.get(module, ("", ()))
        head = f"{prefix}." if prefix else ""
        given = [shapes.get(f"{head}{part}.{kind}", ()) for part in parts]
        if kind not in ("weight", "bias") or not (given and all(given)) or len({shape[1:] for shape in given}) != 1:
            yield name, slot
            continue
        before = sum(shape[0] for shape in given[: parts.index(module)])
        first, *rest = slot.index or (slice(None),)
        start, stop, _ = first.indices(slot.shape[0])
        shape = (sum(each[0] for each in given), *slot.shape[1:])
        index = (slice(before + start, before + stop), *rest)
        yield f"{head}{whole}.{kind}", replace(slot, shape=shape, index=index)


def _cache_scales(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """Return the tensors of a checkpoint that are scales of this model's cache."""
    names = [name for name in checkpoint.names() if name.endswith("_scale")]
    return sorted(scale_names(model).intersection(names)) if names else []


def _check_names(checkpoint: Checkpoint, wanted: dict[str, list[Slot]], ignore: Sequence[str]) -> None:
    present = set(checkpoint.names())
    missing = [n for n, found in wanted.items() if n not in present and not all(s.optional for s in found)]
    ignored = re.compile("|".join(f"(?:{rule})" for rule in ignore)) if ignore else None
    extra = [n for n in present if n not in wanted and not (ignored and ignored.search(n))]
    extra = [n for n in extra if 0 not in checkpoint.shape(n)]  # transformers writes empty ones for parts of size 0
    wrong, formats = [], []
    for name in checkpoint.in_file_order(n for n in wanted if n in present):
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        for slot in wanted[name]:
            if not _same_shape(shape, slot):
                wrong.append(f"{name} has shape {shape}, the model wants {tuple(slot.shape)}")
            elif (words := wrong_words(checkpoint, name)) is not None:
                formats.append(words)
            elif not _castable(dtype, slot):
                formats.append(f"{name} is {dtype}, the model holds {str(slot.dest.dtype).removeprefix('torch.')}")
    problems = [
        f"{what}: {_some(sorted(found))}"
        for what, found in (
            ("missing tensors", missing),
            ("unexpected tensors", extra),
            ("wrong shapes", wrong),
            ("wrong number formats", formats),
        )
        if found
    ]
    if problems:
        codes = {n for n, found in wanted.items() if any(s.dest.dtype in CODES.values() for s in found)}
        problems = [*check_quantization(checkpoint, codes), *problems]
        raise CheckpointError(f"{checkpoint.path} does not fit the model; " + "; ".join(problems))


def _same_shape(shape: tuple[int, ...], slot: Slot) -> bool:
    """Whether a tensor has the slot's shape; scales that are converted may have dimensions of 1 more or less."""
    if slot.convert is None or shape == tuple(slot.shape):
        return shape == tuple(slot.shape)
    return [n for n in shape if n != 1] == [n for n in slot.shape if n != 1]


def _castable(dtype: str, slot: Slot) -> bool:
    """Whether :meth:`Slot.fill` will take a tensor of this dtype: codes go into codes of the same kind only."""
    if dtype not in CODES and dtype not in FLOATS:
        return not slot.dest.dtype.is_floating_point
    if slot.convert is not None:
        return dtype not in FLOATS or slot.dest.dtype.is_floating_point or slot.dest.dtype in CODES.values()
    return CODES.get(dtype) == (slot.dest.dtype if slot.dest.dtype in CODES.values() else None)


def _some(names: Sequence[str]) -> str:
    shown = collapsed(names)
    rest = f" and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return ", ".join(shown[:NAMED]) + rest
