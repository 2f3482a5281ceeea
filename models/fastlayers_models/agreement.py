"""What ranks compare before a model's first step, so that one that differs is named instead of waited for.

meet             before anything between ranks is made: versions, GPU, configuration, ladders between ranks; and what
                 is built counts only where all ranks have it built
same_checkpoint  before weights are read: the files
same_choices     when the model stands: the backend of each layer, its tuned thresholds and launch settings
same_settings    when a generator is made: what steps it makes of prompts depends on them
same_requests    before a generator's first step of what it is asked for
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.comm import ladders
from fastlayers.comm.agreement import chosen
from fastlayers.comm.collectives import Collectives
from fastlayers.comm.fabric import agree
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.device import as_device
from fastlayers.registry.layers import COLLECTIVES
from fastlayers.runtime import builds
from fastlayers.tuning.provenance import source_hash
from fastlayers_models.checkpoint import Checkpoint

_SAMPLE = 4096  # bytes of a file that are compared


def meet(context: Any) -> None:
    """Compare what a model is built from, given its :class:`~fastlayers_models.blocks.ModelContext`; collective."""
    axis = context.parallel.tp
    if axis.size == 1:
        return
    facts: dict[str, Any] = {"fastlayers": f"{fl.__version__} ({source_hash()})", "torch": torch.__version__}
    facts |= {"device": as_device(context.device).name, "dtype": context.dtype, "kv_dtype": context.kv_dtype}
    parallel = context.parallel
    split = {"tp": parallel.attn_tp, "dp": parallel.attn_dp, "ep": parallel.ep}  # as of fastlayers.Ranks
    facts |= {"page_size": context.page_size, "split": ", ".join(f"{name}={axis.size}" for name, axis in split.items())}
    facts |= {"eplb": parallel.eplb, "expert_exchange": parallel.expert_exchange}
    facts |= {"ladders between ranks": ladders.digest()}
    named = {layer: name for layer, name in sorted(env.backend_overrides().items()) if layer in COLLECTIVES}
    # Who checks each call waits for what the others say of theirs.
    facts |= {env.DEBUG: env.debug(), f"{env.BACKEND} of layers between ranks": named}
    config = {f"config.{name}": value for name, value in vars(context.config).items() if name != "quant"}
    agree(axis, facts | {"config": type(context.config).__name__} | config)
    builds.meet(axis)


def same_checkpoint(checkpoint: Checkpoint, parallel: ParallelSpec | None) -> None:
    """Compare the files that ranks are about to read: names, sizes, tensors, and of each file what lies in its middle.

    Folders may differ. Weights of another training differ in the middle of each file.
    """
    if parallel is None or parallel.tp.size == 1:
        return
    files = sorted(set(checkpoint.file_of.values()))
    found = hashlib.sha256(repr(sorted(checkpoint.file_of)).encode())
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(size // 2)
            found.update(f"{path.name} {size} ".encode() + file.read(_SAMPLE))
    agree(parallel.tp, {"checkpoint": f"{len(files)} files, {found.hexdigest()[:16]}"})


def same_choices(model: Any) -> None:
    """Compare what computes each layer; layers of equal names but for their number are one fact."""
    if model.parallel.tp.size > 1:
        agree(model.parallel.tp, {"model": type(model).__name__} | chosen(model) | _across(model))


def _across(model: Any) -> dict[str, str]:
    across = [each.chosen for each in (model.seam, model.moves, model.token_moves) if each is not None]
    return {f"backend of {name}": value for chosen in across for name, value in chosen.items()}


def same_settings(parallel: ParallelSpec | None, settings: Mapping[str, Any]) -> None:
    """Compare what a generator is made with; collective."""
    if parallel is not None and parallel.tp.size > 1:
        agree(parallel.tp, settings)


def same_requests(
    ranks: Collectives, model: Any, requests: Sequence[Any], asked: Mapping[str, Any], refused: str | None = None
) -> None:
    """Compare what a generator is asked for; collective, before a step is made of it.

    Ranks whose prompts or limits differ would bring other numbers of rows to a sum, which then never ends, or wait for
    steps that the others do not make. One number of each is compared; where it differs the error says what it is of.
    ``refused``: why this rank takes none of it, which the others would not know.

    Raises
    ------
    CollectiveMismatch
        On every rank alike.
    """
    if ranks.size == 1:
        return
    lengths = [len(request.prompt) for request in requests]
    ids = _digest(repr(lengths).encode(), *(array("q", request.prompt).tobytes() for request in requests))
    ways = [str(request.params) for request in requests]
    kinds = set(ways)
    params = kinds.pop() if len(kinds) == 1 else f"{len(kinds)} kinds, {_digest(repr(ways).encode())}"
    facts = {
        "what they refuse": refused,
        "prompts": f"{len(lengths)} of {sum(lengths)} tokens, {ids}",
        "params": params,
        **asked,
    }
    mine = torch.tensor([int(_digest(repr(facts).encode()), 16)], dtype=torch.int64, device=model.device)
    if len(set(ranks.all_gather(mine).tolist())) > 1:
        agree(model.parallel.tp, facts)


def _digest(*parts: bytes) -> str:
    """Return 60 bits."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:15]
