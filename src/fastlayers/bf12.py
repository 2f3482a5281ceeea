"""Copies of a model's bfloat16 weights in 12 bits each, for steps of one token: :func:`store_bf12`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastlayers.comm.agreement import axis_of
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import gather_objects
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense.layer import Linear
from fastlayers.quant.bf12 import BF12Weights


@dataclass(frozen=True)
class StoredBF12:
    """What :func:`store_bf12` did.

    Attributes
    ----------
    layers : tuple of str
        Names of layers that have copies now.
    nbytes : int
        Of all copies, each counted once.
    refused : dict
        Why others have none, by name.
    """

    layers: tuple[str, ...] = ()
    nbytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([self._stored, *(f"{name}: {why}" for name, why in self.refused.items())])

    @property
    def _stored(self) -> str:
        return f"bf12: {len(self.layers)} layers, {self.nbytes / 2**30:.2f} GiB beside their weights"

    @property
    def summary(self) -> str:
        """Say the same in one line: layers that have none are counted by reason."""
        return f"{self._stored}; without: {self.why_not}" if self.refused else self._stored

    @property
    def why_not(self) -> str:
        """Say why layers have none, the commonest reason first; of those that differ in numbers one is told."""
        alike = {re.sub(r"\b\d+", "N", why): why for why in reversed(self.refused.values())}
        counts = Counter(re.sub(r"\b\d+", "N", why) for why in self.refused.values())
        return "; ".join(f"{count} ({alike[kind]})" for kind, count in counts.most_common())


@torch.no_grad()
def store_bf12(model: nn.Module) -> StoredBF12:
    """Let a model's bfloat16 layers keep a copy of their weights in 12 bits each, which serves steps of one token.

    Such a step takes as long as reading its weights, and reads 0.75 of the bytes; weights are the same to the last bit
    (:mod:`fastlayers.quant.bf12`), sums are added in another order. Steps of more tokens compute with the weights, so
    that copies cost 0.75 of their memory. A layer whose weights change forgets its copy, and a captured step is
    captured again: call it behind loading, and again behind a change. What no layer sees (``.data`` and what else
    :func:`fastlayers.repack` lists) needs ``repack`` before. Linears of transformers: ``patch(..., bf12=True)``.

    Tied weights, one parameter of several linears or the same memory, have one copy, which serves them all, each with
    its own bias and ``out_dtype``. A head that is tied to the embedding multiplies by the copy; the embedding looks its
    rows up in the weight itself. An edit ends the copy's use in all that share a version counter with what was edited
    (a parameter made of another's ``.data`` does not); a layer that is given another weight leaves it to the others.

    Of a model that is split over processes all ranks call this together, and each keeps copies of what it holds. What
    one rank refuses, for its numbers or its memory, none keeps: steps of one token wait for the slowest rank, and what
    ranks compute alike must be added in the same order.

    Parameters
    ----------
    model : nn.Module
        With :class:`~fastlayers.Linear` layers in it, loaded. Experts and small layers have none: they gain nothing.

    Returns
    -------
    StoredBF12
        Which layers have copies, the same on all ranks that hold them; what they take on this one; and why others have
        none, with the rank that refused where not all do alike.

    Raises
    ------
    ArgumentError
        ``model`` is no module.
    RankLostError
        A rank has ended.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> stored = fl.store_bf12(torch.nn.Sequential(fl.Linear(64, 8, dtype=torch.float32)))
    >>> stored.layers, stored.nbytes, list(stored.refused)
    ((), 0, ['0'])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("store_bf12", "model", repr(model), "an nn.Module")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    packed: dict[Any, BF12Weights | None] = {}
    refused = {name: why for name, module in linears.items() if (why := module.store_bf12(packed))}
    refused = _refused_by_any(refused, axis_of(model))
    for name in refused.keys() & linears.keys():
        if linears[name].serving_one_token is not None:
            linears[name].weights_changed()
    layers = tuple(name for name in linears if name not in refused)
    held = [linears[name].serving_one_token.weight for name in layers]
    return StoredBF12(layers, sum({id(each): each.nbytes for each in held}.values()), refused)


def _refused_by_any(refused: dict[str, str], axis: Axis | None) -> dict[str, str]:
    """Return why layers have no copies on all ranks of the axis, given why they have none here; collective."""
    if axis is None:
        return refused
    told = gather_objects(refused, axis, "keeping weights in 12 bits")
    found = {}
    for name in dict.fromkeys(name for each in told for name in each):
        whys = [each.get(name, "") for each in told]
        rank = next(rank for rank, why in enumerate(whys) if why)
        found[name] = whys[rank] if len(set(whys)) == 1 else f"rank {rank}: {whys[rank]}"
    return found
