"""Rows of which a sum over splits is still due: what a norm takes in place of what a linear returns.

A product of few rows may split its input features, so that all of a GPU reads the weight, and another launch adds the
splits. Where the linear's output goes to a norm and nowhere else, that can add them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from fastlayers.quant.coded_rows import watched

# In a backend's configuration: 1 where a norm behind the linear adds its splits, if there is one that can.
LEAVE = "LEAVE"
Forward = TypeVar("Forward", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False, slots=True)
class SplitRows:
    """fp32 ``splits [S, T, D]``, whose sum in their order, behind it ``bias [D]``, is rounded once to ``dtype``.

    ``add(splits, addend)`` is the launch that returns those rows; it reads nothing of ``addend`` without a bias.
    """

    splits: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    add: Callable[..., torch.Tensor]
    addend: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the rows."""
        return self.splits.shape[1:]

    def joined(self) -> torch.Tensor:
        """Return the rows ``[T, D]``: what the linear would have returned, by the launch that it would have made."""
        return self.add(self.splits, self.addend)


# The functions that take ``split``: those of their classes, as they were written.
_FORWARDS: set[Any] = set()
# Until a backend of this process has been told to leave its splits, no step asks which may.
_told = False


def told(leaves_splits: bool) -> bool:
    """Return what a backend was told, and note it."""
    global _told
    _told |= leaves_splits
    return leaves_splits


def some_leave() -> bool:
    """Return whether a backend of this process was told to leave its splits."""
    return _told


def takes_split(forward: Forward) -> Forward:
    """Mark the ``forward`` of a class: with ``split=True`` it may return rows as :class:`SplitRows`."""
    _FORWARDS.add(forward)
    return forward


def is_marked(module: nn.Module) -> bool:
    """Return whether the ``forward`` of this module is a marked one, and not what somebody put in its place."""
    return type(module).forward in _FORWARDS and "forward" not in vars(module)


def bare(module: nn.Module) -> bool:
    """Return whether a call of ``module`` runs a marked ``forward``, and nobody looks at what goes in or out of it."""
    return is_marked(module) and module._compiled_call_impl is None and not watched(module)


def leaves(module: nn.Module, name: str) -> bool:
    """Return whether ``module`` may be called with ``split=True``, of which the linear of this name is the output.

    Its backend leaves splits, and the step records no gradients and is not compiled. Whatever stands in the place of
    the linear or of the module, or wraps it, is called as it always was.
    """
    linear = module._modules.get(name)
    ladder = None if linear is None else linear.__dict__.get("ladder")
    if ladder is None or not ladder.leaves_splits or torch.compiler.is_compiling():
        return False
    return bare(module) and not torch.is_grad_enabled()


def rows_of(linear: Any, x: torch.Tensor) -> Any:
    """Return ``linear(x)``, as :class:`SplitRows` where its backend leaves splits; see :func:`leaves`."""
    found = linear.splits(x)
    return linear(x) if found is None else found


def join_and_norm(norm: Any, rows: SplitRows, residual: torch.Tensor) -> Any:
    """Return ``norm(rows.joined(), residual)``, in one launch where the norm can."""
    joining = getattr(norm, "joining", None)
    return norm(rows.joined(), residual) if joining is None else joining(rows, residual)
