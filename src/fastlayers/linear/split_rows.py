"""Rows of which a sum over splits is still due: what a norm takes in place of what a linear returns.

A product of few rows may split its input features, so that all of a GPU reads the weight, and another launch adds the
splits. Where the linear's output goes to a norm and nowhere else, that can add them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlayers.quant.coded_rows import watched


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


def takes_split(module: nn.Module) -> bool:
    """Return whether a call of ``module`` takes ``split``: the class whose ``forward`` it runs has ``splits_rows``."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return bool(vars(owner).get("splits_rows", False))


def rows_of(linear: Any, x: torch.Tensor, *seen: nn.Module) -> Any:
    """Return ``linear(x)``, as :class:`SplitRows` where its backend leaves splits.

    Not where a step records gradients or is compiled, nor where somebody looks at what one of ``seen`` is given or
    returns: the modules through which the rows go to the norm that alone reads them.
    """
    ladder = getattr(linear, "ladder", None)
    if ladder is not None and ladder.leaves_splits and not torch.compiler.is_compiling():
        found = None if torch.is_grad_enabled() or any(map(watched, seen)) else linear.splits(x)
        if found is not None:
            return found
    return linear(x)


def join_and_norm(norm: Any, rows: SplitRows, residual: torch.Tensor) -> Any:
    """Return ``norm(rows.joined(), residual)``, in one launch where the norm can."""
    joining = getattr(norm, "joining", None)
    return norm(rows.joined(), residual) if joining is None else joining(rows, residual)
