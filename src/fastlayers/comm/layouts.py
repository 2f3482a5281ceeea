"""Where the rows of a hidden state lie, as a static type: :class:`Layout` and :class:`Hidden`.

    world of 4 = 2 attention groups × 2 ranks; tokens a b belong to group 0, tokens c d to group 1

    place            rank 0   rank 1   rank 2   rank 3
    "scattered"      a        b        c        d         each rank its own rows
    "attn_full"      ab       ab       cd       cd        all rows of the own attention group
    "full"           abcd     abcd     abcd     abcd      all rows of the world

``pending`` names the axis over which a sum is still due: then the values on each rank are partial sums, and only
the communicator may read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fastlayers.errors import check_choice, check_kind

Norm = Callable[..., Any]
PLACES = ("scattered", "attn_full", "full")
PENDING = (None, "attn_tp", "tp")


@dataclass(frozen=True)
class Layout:
    """The static part of a :class:`Hidden`.

    Parameters
    ----------
    place : str
        Where the rows of the tensor lie: ``"scattered"``, ``"attn_full"`` or ``"full"`` (table above).
    pending : str, optional
        Axis of :class:`ParallelSpec` over which a sum of the tensor is due: ``"attn_tp"`` or ``"tp"``.
        The layout says so at world size 1 too, where the sum is over one rank.
    residual : str, optional
        Where the rows of the residual lie (``"scattered"`` or ``"attn_full"``); ``None``: there is no residual.
    """

    place: str
    pending: str | None = None
    residual: str | None = None

    def __post_init__(self) -> None:
        check_choice("Layout", "place", self.place, PLACES)
        check_choice("Layout", "pending", self.pending, PENDING)
        check_choice("Layout", "residual", self.residual, (None, "scattered", "attn_full"))

    def __str__(self) -> str:
        due = f", sum over {self.pending} due" if self.pending else ""
        return f"{self.place}{due}, " + (f"residual {self.residual}" if self.residual else "no residual")


_LAYOUTS = {
    (place, pending, residual): Layout(place, pending, residual)
    for place in PLACES for pending in PENDING for residual in (None, "scattered", "attn_full")
}  # fmt: skip
# Between two layers of one group.
BETWEEN = _LAYOUTS["attn_full", "tp", "attn_full"]


@dataclass(slots=True)
class Hidden:
    """What flows between decoder blocks: a tensor, the residual not yet added to it, and their layout.

    A pytree node: the children are ``tensor`` and, where there is one, ``residual``; the layout is static.

    Parameters
    ----------
    tensor : Tensor ``[T, D]``
        Rows as ``layout.place`` says; partial sums if ``layout.pending``.
    residual : Tensor ``[R, D]`` or None
        Rows as ``layout.residual`` says; never pending.
    layout : Layout

    Examples
    --------
    >>> import torch
    >>> hidden = Hidden.start(torch.zeros(3, 4))
    >>> hidden.partial(torch.ones(3, 4), "attn_tp").layout
    Layout(place='attn_full', pending='attn_tp', residual=None)
    """

    tensor: torch.Tensor
    residual: torch.Tensor | None
    layout: Layout

    @staticmethod
    def start(embedded: torch.Tensor, pending: str | None = None) -> Hidden:
        """Return the input of the first layer: ``embedded [T, D]`` of the own attention group, no residual.

        ``pending="attn_tp"`` if the embedding is sharded over the vocabulary and not yet summed.
        """
        if not isinstance(embedded, torch.Tensor):
            check_kind("Hidden.start", torch.Tensor, embedded=embedded)
        return Hidden(embedded, None, Layout("attn_full", pending))

    def partial(self, tensor: torch.Tensor, axis: str) -> Hidden:
        """Return this with ``tensor``, of the same rows, as partial sums over ``axis`` (a row-parallel output)."""
        try:
            layout = _LAYOUTS[self.layout.place, axis, self.layout.residual]
        except (KeyError, TypeError):
            check_choice("Hidden.partial", "axis", axis, PENDING[1:])
            raise
        return Hidden(tensor, self.residual, layout)

    def complete(self, tensor: torch.Tensor) -> Hidden:
        """Return this with ``tensor``, of the same rows, on which no sum is due (replicated, or summed already)."""
        return Hidden(tensor, self.residual, _LAYOUTS[self.layout.place, None, self.layout.residual])


def add_and_norm(norm: Norm, hidden: Hidden, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised, new residual) of rows of which no sum is due; ranks without rows launch nothing."""
    x, residual = hidden.tensor, hidden.residual
    if x.shape[0] == 0:
        return x, x if residual is None else residual
    return (norm(x), x) if residual is None else norm(x, residual)


def normed(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`add_and_norm` of ``x`` and ``residual``, wherever their rows lie."""
    return add_and_norm(norm, Hidden(x, residual, _LAYOUTS["attn_full", None, None]), None)


def keep(hidden: Hidden, _: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows and the residual as they are."""
    return hidden.tensor, hidden.residual


def _flatten(hidden: Hidden) -> tuple[list[Any], Layout]:
    if hidden.layout.residual is None:
        return [hidden.tensor], hidden.layout
    return [hidden.tensor, hidden.residual], hidden.layout


def _flatten_with_keys(hidden: Hidden) -> tuple[list[Any], Layout]:
    children, layout = _flatten(hidden)
    keys = [pytree.GetAttrKey("tensor"), pytree.GetAttrKey("residual")]
    return list(zip(keys, children, strict=False)), layout


def _unflatten(children: Any, layout: Layout) -> Hidden:
    tensor, *rest = children
    return Hidden(tensor, rest[0] if rest else None, layout)


pytree.register_pytree_node(
    Hidden,
    _flatten,
    _unflatten,
    serialized_type_name="fastlayers.comm.layouts.Hidden",
    flatten_with_keys_fn=_flatten_with_keys,
)
