"""Who notices that weights changed after something was made of them.

    what happens to a weight                       who sees it
    replaced, loaded with assign=True, moved       the layer that holds it: the epochs it is told of go up by one
    edited in place, loaded, filled by a loader    the version counter of the few weights that something was copied from
    ``.data =``, raw pointers, functional_call,
    ``swap_tensors`` of a user's own               nobody: :func:`fastlayers.repack`

A layer that packed its weights holds the result as :class:`Packed`, which knows of which weights it is, and packs again
before it computes with a stale one. A captured step holds addresses; :class:`WeightsWatch` tells it that it must be
captured again. The weights of a model that were copied share one version counter, the epoch's: however many they are,
each of both reads one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from copy import copy
from itertools import chain
from operator import attrgetter
from typing import Any, Self

import torch
from torch import nn

from fastlayers.weights import too_large

_version = attrgetter("_version")
with torch.inference_mode(False):  # wherever this is imported: it has a version
    _EMPTY = torch.empty(0, device="cpu")


class WeightsEpoch:
    """How often weights of a module, or of what is in it, were replaced, moved or packed anew.

    Attributes
    ----------
    value : int
    edits : Tensor
        Empty; its version counts edits in place of the weights that :func:`count_in` was called with.
    packed : Packed or None
        What the module itself holds a copy as.
    name : str
        Of no other epoch: weights carry it that count their edits here.
    """

    __slots__ = ("edits", "name", "packed", "value")

    def __init__(self) -> None:
        self.value = 0
        self.packed: Packed | None = None
        self.edits = _EMPTY.data  # has a version counter of its own
        self.name = uuid.uuid4().hex

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightsEpoch, ()  # copied weights are not counted here, and nothing was packed of them

    def changed(self) -> None:
        """Tell that weights were replaced, moved or packed anew; a copy that was made of them is stale."""
        self.value += 1
        if self.packed is not None:
            self.packed.at, self.packed = -1, None


class _Counted(set[str]):
    """What a weight carries that counts its edits in an epoch: of which epoch, and which tensor it was then.

    A copy of the weight may carry it, too, and counts nowhere; pickled it is an empty set.
    """

    def __init__(self, epoch: str, tensor: int) -> None:
        super().__init__()
        self.epoch, self.tensor = epoch, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()


def is_aliased(weight: torch.Tensor) -> bool:
    """Return whether another tensor has the storage of ``weight``: a view, or what was detached."""
    storage = weight.untyped_storage()
    # The weight, and the storage object of this line.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def count_in(epoch: WeightsEpoch, weight: torch.Tensor) -> bool:
    """Let edits in place of ``weight`` raise the version of ``epoch.edits``, too; return whether that could be done.

    What is detached shares its source's version counter and keeps it when ``.data`` is assigned (torch's note "Version
    Counter Sharing"). So the parameter's tensor is exchanged for such a one over the same storage; it stays the same
    object of Python. Not where another tensor looks at the storage: what is written there counts in the old counter.
    """
    edits, name = epoch.edits, epoch.name
    owner = vars(weight).get("_counted_in")
    if type(owner) is _Counted and owner.tensor == weight._cdata:
        # Of a layer with another epoch: its counter stays, and is read as the weight's own.
        return owner.epoch == name
    alike = type(weight) is nn.Parameter and torch._has_compatible_shallow_copy_type(edits, weight)
    if not alike or weight.requires_grad or is_aliased(weight) or torch._C._len_torch_dispatch_stack():
        return False
    with torch.inference_mode(False):
        twin = edits.detach()
        twin.data = weight.data
        twin = nn.Parameter(twin, requires_grad=False)
    vars(twin).update(vars(weight), _counted_in=_Counted(name, twin._cdata))
    try:
        torch.utils.swap_tensors(weight, twin)
    except RuntimeError:  # somebody outside of Python holds it, or a weak reference
        return False
    return True


class Versions:
    """The versions of several tensors as one: in the place of a tensor that has only one."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: tuple[torch.Tensor | Versions, ...]) -> None:
        self._tensors = tensors

    @property
    def _version(self) -> int:
        return sum(map(_version, self._tensors))


class WatchedModule(nn.Module):
    """A module that tells its epochs when a parameter, buffer or child of it is replaced.

    Its parameters are never inference tensors, which have no version, and always contiguous, as kernels read them. What
    was made under ``torch.inference_mode``, or lies in memory in another way, is copied when it becomes a parameter.
    """

    _epochs: tuple[WeightsEpoch, ...] = ()

    def weights_changed(self) -> None:
        """Tell that the weights are other tensors now, or lie elsewhere; a layer that packs forgets what it packed."""
        for epoch in self._epochs:
            epoch.changed()

    def __copy__(self) -> Self:
        """Return a module over the same weights, which are replaced in each by itself and packed for each by itself."""
        made = type(self).__new__(type(self))
        made.__dict__.update({n: copy(v) if isinstance(v, Packed) else v for n, v in self.__dict__.items()})
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            made.__dict__[name] = self.__dict__[name].copy()
        made.__dict__.pop("_weights_epoch", None)
        made.__dict__["_epochs"] = ()
        made.weights_changed()
        return made

    def packed_sources(self) -> tuple[torch.Tensor, ...]:
        """Return the weights that a copy in use was made of: editing them in place makes it stale."""
        return ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Hold a parameter, as a contiguous tensor with a version; assignment comes here, too."""
        if param is not None and (param.is_inference() or not param.is_contiguous()):
            with torch.inference_mode(False), torch.no_grad():
                values = param.clone(memory_format=torch.contiguous_format)
                param = nn.Parameter(values, requires_grad=param.requires_grad)
        super().register_parameter(name, param)
        self.weights_changed()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Hold a module that is not assigned but registered."""
        super().add_module(name, module)
        self._holds(module)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Hold a buffer that is not assigned but registered."""
        super().register_buffer(name, tensor, persistent)
        self.weights_changed()

    def _holds(self, module: nn.Module | None) -> None:
        if module is not None:
            for epoch in self._epochs:
                _tell(module, epoch)
        self.weights_changed()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self._holds(value)
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

    def _too_large(self, state_dict: Any, prefix: str) -> list[str]:
        given = ((prefix + name, dest, state_dict.get(prefix + name)) for name, dest in self._parameters.items())
        held = ((name, value, dest.dtype) for name, dest, value in given if dest is not None and value is not None)
        found = ((name, too_large(value, dtype)) for name, value, dtype in held if isinstance(value, torch.Tensor))
        return [f"{name}: up to {largest:.6g}, which float16 cannot hold" for name, largest in found if largest]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Load as ``nn.Module`` does; values that a parameter's dtype cannot hold are an error like a wrong shape."""
        if wrong := [] if local_metadata.get("assign_to_params_buffers") else self._too_large(state_dict, prefix):
            error_msgs.extend(wrong)
            return
        before = self.storages()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
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
    module : WatchedModule
        Replaced or moved weights in it make ``value`` stale.
    sources : tuple of Tensor
        So do edits in place of these: those that ``value`` is a copy of.

    Attributes
    ----------
    counter, at
        ``value`` is fresh while ``counter._version == at``; forwards compare it themselves, without a call. Weights of
        the same model may share a counter: what is stale is the truth or, after an edit of another layer, caution.
    """

    __slots__ = ("at", "counter", "value")

    def __init__(self, value: Any, module: WatchedModule, sources: tuple[torch.Tensor, ...]) -> None:
        epoch = epoch_of(module)
        first = module._epochs[0]  # the model's, where it was asked for before its layers pack
        shared = first.edits
        apart = tuple(source for source in sources if not count_in(first, source))
        self.value = value
        self.counter: torch.Tensor | Versions = Versions((shared, *apart)) if apart else shared
        self.at = self.counter._version
        epoch.packed = self

    @property
    def fresh(self) -> bool:
        """Whether it is still of the weights as they are."""
        return self.counter._version == self.at

    def renew(self, module: WatchedModule) -> None:
        """Tell that it is of the weights as they are: what ``module`` told of last were not these."""
        self.at = self.counter._version
        epoch_of(module).packed = self

    def __reduce__(self) -> tuple[Any, ...]:
        # Versions of copied tensors start anew: a copied or restored layer packs for itself.
        return _of_other_weights, ()


def _of_other_weights() -> Packed:
    """Return what a copy of a layer holds until it packs: never fresh."""
    made = Packed.__new__(Packed)
    made.value, made.counter, made.at = None, Versions(()), -1
    return made


class WeightsWatch:
    """Tells a captured step of ``model`` whether it reads weights that are gone.

    :meth:`mark` is called after a capture, :attr:`stale` before each replay: two comparisons of integers, however many
    layers hold copies; more only where copies are of weights that another tensor looks at, one read for each of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mark()

    def mark(self) -> None:
        """Take the weights as they are now for known."""
        self._epoch = epoch_of(self._model)
        epochs = (each.__dict__.get("_weights_epoch") for each in _watched(self._model))
        held = (epoch.packed for epoch in epochs if epoch is not None and epoch.packed is not None)
        counters = {id(counter): counter for counter in (self._epoch.edits, *(packed.counter for packed in held))}
        self._counter = Versions((*counters.values(),)) if len(counters) > 1 else self._epoch.edits
        self._at, self._versions = self._epoch.value, self._counter._version

    @property
    def stale(self) -> bool:
        """Whether weights were replaced, moved, packed anew, or edited under a copy, since :meth:`mark`."""
        return self._epoch.value != self._at or self._counter._version != self._versions
