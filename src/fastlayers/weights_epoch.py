"""Who notices that weights changed after something was made of them.

    what happens to a weight                       who sees it
    replaced, loaded with assign=True, moved       the layer that holds it: the epochs it is told of go up by one
    edited in place, loaded, filled by a loader    ``tensor._version`` of the few weights that something was copied from
    ``.data =``, raw pointers, functional_call     nobody: :func:`fastlayers.repack`

A layer that packed its weights holds the result as :class:`Packed`, which knows of which weights it is, and packs again
before it computes with a stale one. A captured step holds addresses; :class:`WeightsWatch` tells it by one integer, and
the sum of those few versions, that it must be captured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

_version = attrgetter("_version")


class WeightsEpoch:
    """How often weights of a module, or of what is in it, were replaced, moved or packed anew."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class WatchedModule(nn.Module):
    """A module that tells its epochs when a parameter, buffer or child of it is replaced.

    Its parameters are never inference tensors, which have no version: one that was made under
    ``torch.inference_mode`` is copied when it becomes a parameter.
    """

    _epochs: tuple[WeightsEpoch, ...] = ()

    def weights_changed(self) -> None:
        """Tell that the weights are other tensors now, or lie elsewhere; a layer that packs forgets what it packed."""
        for epoch in self._epochs:
            epoch.value += 1

    def packed_sources(self) -> tuple[torch.Tensor, ...]:
        """Return the weights that a copy in use was made of: editing them in place makes it stale."""
        return ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Hold a parameter, as a tensor with a version; assignment comes here, too."""
        if param is not None and param.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                param = nn.Parameter(param.clone(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)
        self.weights_changed()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            for epoch in self._epochs:
                _tell(value, epoch)
            self.weights_changed()
        elif name in self.__dict__.get("_buffers", ()):
            self.weights_changed()

    def __delattr__(self, name: str) -> None:
        held = name in self._parameters or name in self._buffers or name in self._modules
        super().__delattr__(name)
        if held:
            self.weights_changed()

    def storages(self) -> list[Any]:
        """Return what tells whether a parameter or buffer of this module lies elsewhere than before."""
        held = chain(self._parameters.values(), self._buffers.values())
        return [(t.untyped_storage()._cdata, t.dtype) for t in held if t is not None]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        before = self.storages()
        super()._load_from_state_dict(*args, **options)
        if self.storages() != before:  # swapped; what is copied in place changes versions instead
            self.weights_changed()


def _watched(module: nn.Module) -> Iterator[WatchedModule]:
    return (each for each in module.modules() if isinstance(each, WatchedModule))


def _tell(module: nn.Module, epoch: WeightsEpoch) -> None:
    for each in _watched(module):
        if epoch not in each._epochs:
            each._epochs = (*each._epochs, epoch)


def epoch_of(module: nn.Module) -> WeightsEpoch:
    """Return the one epoch of ``module``, which every layer in it tells of changes; made at the first call."""
    epoch: WeightsEpoch | None = module.__dict__.get("_weights_epoch")
    if epoch is None:
        epoch = module.__dict__["_weights_epoch"] = WeightsEpoch()
    _tell(module, epoch)
    return epoch


class Packed:
    """What ``module`` made of its weights, and of which.

    Parameters
    ----------
    value
        What was made.
    module : nn.Module
        Replaced or moved weights in it make ``value`` stale.
    sources : tuple of Tensor
        So do edits in place of these: those that ``value`` is a copy of.
    """

    __slots__ = ("_at", "_epoch", "_sources", "_versions", "value")

    def __init__(self, value: Any, module: nn.Module, sources: tuple[torch.Tensor, ...]) -> None:
        self.value, self._epoch, self._sources = value, epoch_of(module), sources
        self._at, self._versions = self._epoch.value, sum(map(_version, sources))

    @property
    def fresh(self) -> bool:
        """Whether it is still of the weights as they are."""
        return self._epoch.value == self._at and sum(map(_version, self._sources)) == self._versions

    def __reduce__(self) -> tuple[Any, ...]:
        # Versions of copied tensors start anew: a copied or restored layer packs for itself.
        return type(None), ()


class WeightsWatch:
    """Tells a captured step of ``model`` whether it reads weights that are gone.

    :meth:`mark` is called after a capture, :attr:`stale` before each replay: one comparison of integers, and one read
    for each weight that a layer holds a copy of (two a layer for MLA with a quantised ``kv_b_proj``; otherwise none).
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mark()

    def mark(self) -> None:
        """Take the weights as they are now for known."""
        self._epoch = epoch_of(self._model)
        self._sources = tuple(chain.from_iterable(each.packed_sources() for each in _watched(self._model)))
        self._at, self._versions = self._epoch.value, sum(map(_version, self._sources))

    @property
    def stale(self) -> bool:
        """Whether weights were replaced, moved, packed anew, or edited under a copy, since :meth:`mark`."""
        return self._epoch.value != self._at or sum(map(_version, self._sources)) != self._versions
