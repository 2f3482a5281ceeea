"""Operators of ``torch.ops.fastlayers``: what torch.compile sees of a kernel.

Registered through :class:`torch.library.Library`, whose call overhead is a fraction of ``custom_op``'s. Kernel
backends wrap one launch sequence each; torch backends need no operator, the compiler traces through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("fastlayers", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as ``torch.ops.fastlayers.<name>`` and return that operator.

    Parameters
    ----------
    schema : str
        ``"name(Tensor x, float eps) -> Tensor"``; mark what is written with ``Tensor(a!)``.
    fake : callable
        Same signature; returns empty tensors of the right shape, dtype and stride. For operators that return
        nothing: a function that does nothing.

    Notes
    -----
    Inference only: there is no backward.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastlayers::{name}", fake, lib=_library)
        found: Callable[..., Any] = getattr(torch.ops.fastlayers, name).default
        return found

    return register


def nothing(*args: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


@operator("count(Tensor(a!) counter) -> ()", nothing)
def count(counter: torch.Tensor) -> None:
    """Add one to ``counter`` (int64 ``[1]`` on the host) each time the surrounding code really runs.

    An operator, not a Python integer on the module: module integers trip torch.compile's recompile limit, and
    the compiler may not drop an operator that writes.
    """
    counter.add_(1)
