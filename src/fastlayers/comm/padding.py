"""Token bookkeeping of one step under data-parallel attention: who holds how many rows.

    d = attention groups (attn_dp), n = ranks of one group (attn_tp)
    real[d]   tokens that requests ask for            rows[d]   rows of the group's tensors, pads at the tail

    lengths are first rounded up to multiples of n, then

    mode        rows[i]        gather                                   taken for
    "max_len"   max(lengths)   all_gather (equal sizes)                 graphs; 2 * sum >= max * d
    "sum_len"   lengths[i]     zero-filled buffer, summed over ranks    prefill with d > 1; skewed decode

Source: SGLang's DP attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index

import torch

from fastlayers.errors import (
    ArgumentError,
    check_choice,
    check_fields,
    check_plain,
    check_positive,
    describe,
)

MODES = ("max_len", "sum_len")


def padding_mode(lengths: Sequence[int], *, extend: bool, graph: bool = False) -> str:
    """Return ``"max_len"`` or ``"sum_len"`` for the (rounded) token counts of all attention groups.

    Parameters
    ----------
    lengths : sequence of int
        One count per group.
    extend : bool
        Whether any group prefills in this step: then with more than one group ``"sum_len"``.
    graph : bool
        Whether the step is captured or replayed: always ``"max_len"``, because sizes must not depend on data.
    """
    if graph:
        return "max_len"
    if extend and len(lengths) > 1:
        return "sum_len"
    return "max_len" if 2 * sum(lengths) >= max(lengths) * len(lengths) else "sum_len"


@dataclass(frozen=True)
class StepTokens:
    """Token counts of one step, equal on every rank (host integers; nothing here reads a device).

    Build it with :meth:`plan`. The caller pads the input of its group to ``rows[dp_rank]`` once per step; no layer
    pads again.

    Parameters
    ----------
    real : tuple[int, ...]
        Tokens of each attention group that are not padding.
    rows : tuple[int, ...]
        Rows of each attention group's tensors; multiples of ``attn_tp``.
    mode : str
        ``"max_len"`` or ``"sum_len"``.
    attn_tp : int
        Ranks of one attention group.
    spread : bool
        Whether each rank adds and norms only its own rows between the layers: for steps of many rows, see
        :mod:`fastlayers.comm.transitions`.

    Examples
    --------
    >>> StepTokens.plan([3, 1], attn_tp=2, extend=False)
    StepTokens(real=(3, 1), rows=(4, 4), mode='max_len', attn_tp=2)
    >>> StepTokens.plan([3, 0], attn_tp=2, extend=True).offsets
    (0, 4)
    """

    real: tuple[int, ...]
    rows: tuple[int, ...]
    mode: str = "max_len"
    attn_tp: int = 1
    spread: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, RuntimeError):  # looked into only now: made in every step
            check_plain("StepTokens", "tuple[int, ...]", real=self.real, rows=self.rows)
            raise

    def _check(self) -> None:
        check_choice("StepTokens", "mode", self.mode, MODES)
        check_positive("StepTokens", attn_tp=self.attn_tp)
        if not self.real or len(self.real) != len(self.rows):
            raise ArgumentError("StepTokens", "rows", self.rows, f"one count for each of {self.real}, at least one")
        # NumPy's integers become Python's; made in every step, where they are Python's.
        if {type(self.attn_tp), *map(type, self.real), *map(type, self.rows)} != {int}:
            check_fields("StepTokens", self)
        for real, rows in zip(self.real, self.rows, strict=True):
            if not 0 <= real <= rows or rows % self.attn_tp:
                accepted = f"multiples of attn_tp {self.attn_tp}, at least the real counts {self.real}, none negative"
                raise ArgumentError("StepTokens", "rows", self.rows, accepted)
        if self.mode == "max_len" and len(set(self.rows)) != 1:
            raise ArgumentError("StepTokens", "rows", self.rows, "equal counts in mode max_len")

    @staticmethod
    def plan(
        real: Sequence[int],
        *,
        attn_tp: int = 1,
        extend: bool,
        graph: bool = False,
        bucket: int | None = None,
        spread: bool = False,
    ) -> StepTokens:
        """Return the step for the token counts of all attention groups.

        Parameters
        ----------
        real : sequence of int
            Tokens of each group, in order of ``attn_dp`` rank; zero for an idle group.
        attn_tp : int
            Ranks of one attention group.
        extend, graph : bool
            See :func:`padding_mode`.
        bucket : int, optional
            Rows of every group under a graph: at least the largest count.
        spread : bool
            Whether the residual is scattered over the ranks of each group.

        Raises
        ------
        ArgumentError
            A count is negative, there is none, or ``bucket`` is too small or not for a graph.
        """
        check_positive("StepTokens", attn_tp=attn_tp)
        if {type(extend), type(graph), type(spread)} != {bool}:  # made in every step
            check_plain("StepTokens", "bool", extend=extend, graph=graph, spread=spread)
        if bucket is not None:
            check_plain("StepTokens", "int", bucket=bucket)
        attn_tp, bucket = index(attn_tp), None if bucket is None else index(bucket)
        try:
            if isinstance(real, bytes | bytearray):  # characters, not counts
                raise TypeError
            counts = tuple(int(index(count)) for count in real)
        except TypeError as error:
            raise ArgumentError("StepTokens", "real", describe(real), "counts, one for each group") from error
        if not counts or min(counts) < 0:
            raise ArgumentError("StepTokens", "real", counts, "one count >= 0 for each attention group")
        lengths = tuple(-(-count // attn_tp) * attn_tp for count in counts)
        mode = padding_mode(lengths, extend=extend, graph=graph)
        if bucket is not None:
            if not graph or bucket < max(lengths) or bucket % attn_tp:
                accepted = f"None, or under a graph a multiple of attn_tp {attn_tp} that is >= {max(lengths)}"
                raise ArgumentError("StepTokens", "bucket", bucket, accepted)
            lengths = (bucket,) * len(lengths)
        rows = (max(lengths),) * len(lengths) if mode == "max_len" else lengths
        return StepTokens(counts, rows, mode, attn_tp, spread)

    @property
    def full_rows(self) -> int:
        """Rows of a tensor in place ``"full"``."""
        return sum(self.rows)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each attention group in place ``"full"``."""
        return tuple(sum(self.rows[:i]) for i in range(len(self.rows)))

    def group_slice(self, dp_rank: int) -> slice:
        """Return the rows of one attention group in place ``"full"``."""
        if type(dp_rank) is not int or not 0 <= dp_rank < len(self.rows):  # asked in every step
            _check_rank("StepTokens.group_slice", "dp_rank", dp_rank, len(self.rows))
        start = self.offsets[dp_rank]
        return slice(start, start + self.rows[dp_rank])

    def num_token_non_padded(self, dp_rank: int, attn_rank: int) -> int:
        """Return how many of one rank's rows in place ``"scattered"`` are real: ``clamp(real - q*r, 0, q)``.

        ``q`` is rows per rank, ``r`` the rank in its attention group: rows are split contiguously and pads are at
        the tail, so the first ranks are full and the last ones may hold nothing but pads.
        """
        _check_rank("StepTokens.num_token_non_padded", "dp_rank", dp_rank, len(self.rows))
        _check_rank("StepTokens.num_token_non_padded", "attn_rank", attn_rank, self.attn_tp)
        q = self.rows[dp_rank] // self.attn_tp
        return min(max(self.real[dp_rank] - q * attn_rank, 0), q)

    def valid_rows(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a bool tensor ``[full_rows]``: which rows in place ``"full"`` are real.

        Written into ``out`` if given (how a captured step is refreshed, outside the graph).
        """
        flags = [i < real for real, rows in zip(self.real, self.rows, strict=True) for i in range(rows)]
        fresh = torch.tensor(flags, dtype=torch.bool)
        return fresh if out is None else out.copy_(fresh)


def _check_rank(who: str, argument: str, rank: int, ranks: int) -> None:
    check_plain(who, "int >= 0", **{argument: rank})
    if rank >= ranks:
        raise ArgumentError(who, argument, rank, f"less than {ranks}")
