"""The thin base of every layer module: holds what was chosen and shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from fastlayers import device as device_module
from fastlayers import env
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, UnknownNameError, check_fields
from fastlayers.gradients import refuse
from fastlayers.moved import renamed
from fastlayers.registry import Choice, Ladder, Registry
from fastlayers.registry import registry as registry_named
from fastlayers.registry.first_rung import FirstRung
from fastlayers.weights import FP16_OVERFLOWS, too_large
from fastlayers.weights_epoch import Packed, WatchedModule, epoch_of

_CORE = "fastlayers.attention.core"
__getattr__ = renamed(
    __name__, {"before_the_cache": f"{_CORE}.AttentionCore.before_the_cache", "PHASES": f"{_CORE}.PHASES"}
)


def check_asked(layer: nn.Module, cfg: Any, device: torch.device | str | None) -> None:
    """Raise :class:`ArgumentError` unless a layer can be made with this configuration, on a device of this machine."""
    check_fields(type(layer).__name__, cfg)
    if isinstance(device, str) and device != "cpu" and device in DESCRIBED:
        accepted = "a device of this machine; described devices are for fl.backends"
        raise ArgumentError(type(layer).__name__, "device", repr(device), accepted)
    try:
        device_module.as_device(device)
    except UnknownNameError as error:
        given = repr(str(device) if isinstance(device, torch.device) else device)
        accepted = "a torch device of this machine, its name, or None"
        raise ArgumentError(type(layer).__name__, "device", given, accepted) from error


class Layer(WatchedModule):
    """A module whose computation is done by backends of one registry.

    ``choice`` and ``ladder`` are set once, by :meth:`choose` in the constructor; ``forward`` of a subclass only
    picks the rung and calls it. A module that is moved to another type of device (``.cuda()``) chooses once more,
    there, with the same wish.

    A ``forward`` reads ``self._parameters["weight"]`` and ``self._modules["o_proj"]``: ``self.weight`` is the same by
    way of ``nn.Module.__getattr__``, a call of Python's for each name, half a microsecond.
    """

    choice: Choice
    ladder: Ladder
    # Whether inputs come from a caller that vouches for them, see trust().
    trusted = False
    # Whether what is chosen when a step first needs it leaves out what is not built yet, as outside of a warm-up.
    built_only = True
    # Parameters that stay as they are when the module is cast to another dtype.
    kept_in_fp32: tuple[str, ...] = ()

    def choose(self, registry: Registry, cfg: Any, device: torch.device | str | None, backend: str) -> None:
        """Choose and build the backend for ``cfg`` on ``device`` (``None``: torch's default device)."""
        check_asked(self, cfg, device)
        self.cfg = cfg
        self.use([registry.choose(cfg, device, backend).build()])

    @property
    def choices(self) -> list[Choice]:
        """What was chosen: one choice, or of an attention layer one for each usual phase."""
        return [self.choice]

    def choices_for(self, cfg: Any, device: Any, requested: str, built_only: bool = True) -> list[Choice]:
        """Choose for another configuration or device, as the constructor did."""
        return [registry_named(self.choice.layer).choose(cfg, device, requested, built_only=built_only)]

    def use(self, ladders: Sequence[Ladder]) -> None:
        """Compute with these ladders from now on, in the order of :attr:`choices`."""
        first, self.ladder = self.__dict__.get("ladder"), ladders[-1]
        self.choice = self.ladder.choice
        if isinstance(first, FirstRung):
            self.ladder = first.before(self.ladder)

    def serve_one_token(self, impl: Callable[..., Any], *sources: torch.Tensor) -> None:
        """Compute one token by ``impl``, which has copies of these weights, until they change."""
        self.weights_changed()
        self.ladder = FirstRung(Packed(None, self, sources), impl, self.ladder)

    @property
    def serving_one_token(self) -> Any:
        """What serves one token with a copy of the weights; ``None``: nothing does."""
        return self.ladder.impl if isinstance(self.ladder, FirstRung) else None

    def weights_changed(self) -> None:
        """Tell, and forget what served one token with a copy."""
        if isinstance(ladder := self.__dict__.get("ladder"), FirstRung):
            self.ladder = ladder.behind
        super().weights_changed()

    def choose_again(self, built_only: bool = True) -> bool:
        """Choose once more what was chosen automatically, and return whether that is something else now.

        Another weight layout is not taken: the weights stay as they are packed. Captured steps are captured again.
        """
        if not hasattr(self, "choice") or self.choice.requested != "auto":
            return False
        before, chosen = self.choices, self.choices_for(self.cfg, self.choice.device, "auto", built_only)
        layouts = {rung.backend.weight_layout for choice in before for rung in choice.rungs}
        if [each.rungs for each in chosen] == [each.rungs for each in before]:
            return False
        if {rung.backend.weight_layout for choice in chosen for rung in choice.rungs} != layouts:
            return False
        self.use([choice.build() for choice in chosen])
        held = self.ladder.held if isinstance(self.ladder, FirstRung) and self.ladder.held.fresh else None
        for epoch in self._epochs:
            epoch.changed()
        if held is not None:
            held.renew(self)
        return True

    @property
    def device_type(self) -> torch.device:
        """The type of device that the backend was chosen for; inputs of layers without weights must be there."""
        return torch.device(self.choice.device.type)

    @property
    def fixed_dtype(self) -> torch.dtype | None:
        """The dtype that is part of the configuration; ``None`` if the layer follows its weights or its input."""
        return self.__dict__.get("dtype")

    def refuse_grad(self, **tensors: torch.Tensor | None) -> None:
        """Raise :class:`ArgumentError` if autograd would record this call of a layer that is for inference only.

        Called in grad mode and at a level of forward-mode AD only, see :mod:`fastlayers.gradients`. Looks at
        ``tensors`` and at the layer's own parameters.
        """
        refuse(type(self).__name__, (*tensors.items(), *self._parameters.items()))

    def finalize(self) -> None:
        """Let the backend pack the loaded weights; idempotent, zero-copy where layouts agree."""

    def repack(self) -> None:
        """Pack again, after weights were changed in a way that nobody sees: see :func:`repack`."""
        self.weights_changed()
        self.finalize()

    def extra_repr(self) -> str:
        """Return the configuration and the chosen backend."""
        if not hasattr(self, "choice"):
            return ""
        return f"{self.cfg}, backend={self.choice.name}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast as ``nn.Module`` does (``.to()``, ``.cuda()``, ``.half()``, ``.to_empty()``).

        Raises
        ------
        ArgumentError
            Another dtype for a layer whose dtype is part of its configuration, or fp16 for weights that it cannot hold.
            Nothing was changed.
        NoBackendError
            The backend that was asked for cannot run on the other device. Nothing was changed.

        Notes
        -----
        A container that is none of ours (``nn.Sequential``) casts child by child and knows nothing of what the next one
        will say: what stood before a layer that refuses stays cast. :func:`check_move` asks all of them first.
        """
        # Outside inference mode, whoever asks: parameters stay tensors with a version.
        with torch.inference_mode(False):
            before = self.storages()
            self._move(fn, recurse)
            if self.storages() != before:
                self.weights_changed()
        if self.__dict__.get("packed") is not None:
            self.finalize()  # what was packed may be of the old tensors
        return self

    def _keeps(self, name: str) -> bool:
        """Return whether a parameter stays as it is when the module is cast."""
        return self.fixed_dtype is not None or name in self.kept_in_fp32

    def _choices_after(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, list[Choice]]:
        """Return the configuration and the choices after a move or cast (none: those that are here stay).

        Raises what :meth:`_apply` does, and changes nothing.
        """
        fixed = self.fixed_dtype
        device = next((p.device for p in self.parameters()), self.device_type)
        known = getattr(self.cfg, "dtype", None)
        if not isinstance(known, torch.dtype) or known.itemsize == 1:
            known = None  # a name, or the dtype of the codes that a quantiser writes: a cast is not about them
        probe = fn(torch.empty(0, dtype=known if fixed is None else fixed, device=device))
        if fixed is not None and probe.dtype != fixed:
            raise ArgumentError(type(self).__name__, "dtype", probe.dtype, f"{fixed}, as constructed")
        cfg = self.cfg if known in (None, probe.dtype) else replace(self.cfg, dtype=probe.dtype)
        where = self.choice.device.type if probe.device.type == "meta" else probe.device
        if torch.device(where).type == self.choice.device.type and cfg is self.cfg:
            return cfg, []
        return cfg, self.choices_for(cfg, where, self.choice.requested)

    def _move(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
        for each in self.modules() if recurse else (self,):
            _check_move(each, fn)  # of the layers within, too: a refusal must not come half way
        if not hasattr(self, "choice"):
            super()._apply(fn, recurse)
            return
        cfg, chosen = self._choices_after(fn)
        moved = [choice.build() for choice in chosen]
        kept = {id(p) for n, p in self.named_parameters(recurse=False) if self._keeps(n)}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if id(tensor) in kept and result.dtype != tensor.dtype else result

        super()._apply(keep, recurse)
        if moved:
            self.cfg = cfg
            self.use(moved)


def trust(*modules: nn.Module | None) -> None:
    """Let the layers in ``modules`` take their inputs unchecked: their caller checks its own, and passes what fits.

    For what a module calls inside itself; layers that a user calls check. With ``FASTLAYERS_DEBUG`` all go on checking.
    """
    if env.debug():
        return
    for module in modules:
        for layer in module.modules() if module is not None else ():
            if isinstance(layer, Layer):
                layer.trusted = True


def check_move(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise what a layer within ``model`` would raise while it is moved or cast with ``fn``; changes nothing.

    For the ``_apply`` of modules that hold layers, and before a plain container is cast: torch casts child by child,
    and would stop in between. ``fn`` as of torch's ``_apply``: ``lambda tensor: tensor.half()``.
    """
    for module in model.modules():
        _check_move(module, fn)


def _check_move(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if not isinstance(module, Layer):
        return
    if hasattr(module, "choice"):
        module._choices_after(fn)
    for name, weight in module.named_parameters(recurse=False):
        if weight.is_floating_point() and not module._keeps(name):
            dtype = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
            if largest := too_large(weight, dtype):
                accepted = f"values below {FP16_OVERFLOWS:.0f}, the first that is infinite in float16"
                raise ArgumentError(type(module).__name__, name, f"up to {largest:.6g}", accepted)


def finalize(model: nn.Module) -> nn.Module:
    """Call :meth:`Layer.finalize` on every layer of ``model``, one at a time, and return the model."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("finalize", "model", repr(model), "an nn.Module")
    epoch_of(model)
    for module in model.modules():
        if isinstance(module, Layer):
            module.finalize()
    return model


def repack(model: nn.Module) -> nn.Module:
    """Have every layer of ``model`` pack its weights again, and captured steps be captured again; return the model.

    Needed only after changes that nobody sees: ``parameter.data = …`` and writes through ``.data``, through raw
    pointers or into ``module._parameters`` (``torch.func.functional_call``), ``parameter.set_``,
    ``torch.utils.swap_tensors``, and a whole submodule put into a module that is no :class:`Layer`. What is assigned,
    loaded, moved or edited in place is seen without it.

    Raises
    ------
    ArgumentError
        ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("repack", "model", repr(model), "an nn.Module")
    epoch_of(model).changed()
    for module in model.modules():
        if isinstance(module, Layer):
            module.repack()
    return model
