"""How rows get from one layout to the next: the moves of a rank, and the two tables of transitions made from them.

    d = attention groups (attn_dp), n = ranks of one group (attn_tp), world = tp = d * n
    places as drawn in layouts.py; "Σ axis" = a sum over that axis is pending

    hook           from                       what happens                                              to
    prepare_attn   attn_full [Σ]              [all-reduce,] add residual (layer 0: none), norm          attn_full
                   scattered                  add residual, norm (own rows), all-gather over attn_tp    attn_full
    prepare_mlp    attn_full Σ attn_tp, d=1   all-reduce, add residual, norm                            full
      (full MLP)   attn_full [Σ of 1], d>1    add residual, norm (own rows), gather                     full
                   attn_full Σ attn_tp, n>1   rank 0 of each group adds the residual to its partial     full
                                              sum, gather-partial, norm (all rows); residual: own slice
                   the same, with a Seam      all-reduce, add residual, norm, gather of own rows        full
                   and Moves
    prepare_mlp    attn_full Σ attn_tp        reduce-scatter over attn_tp, add residual, norm           scattered
      (scattered)  attn_full                  own slice, add residual, norm                             scattered
    postprocess    full Σ tp, d=1             nothing: the sum stays due until the next norm            attn_full Σ
                   full Σ tp, d>1             reduce-scatter [, all-gather in the group] (max_len);     attn_full
                                              one of the two forms of postprocess_sum (sum_len)
                   full                       own slice of the group                                    attn_full
                   scattered, last layer      all-gather over attn_tp                                   attn_full
                   scattered                  nothing                                                   scattered

Spread steps (``StepTokens.spread``), of many rows: the residual stays scattered from the first layer to the last

    prepare_attn   attn_full [Σ], layer 0     [reduce-scatter,] norm, all-gather; residual: own rows    attn_full
                   attn_full [Σ], d=1         reduce-scatter or own slice, add residual, norm (own      attn_full
                                              rows), all-gather
                   scattered                  add residual, norm (own rows), all-gather over attn_tp    attn_full
    prepare_mlp    attn_full [Σ attn_tp]      reduce-scatter or own slice over attn_tp, add residual,   full
      (full MLP)                              norm (own rows), all-gather over tp
      (scattered)  as above                                                                             scattered
    postprocess    full [Σ tp], d=1           nothing: the sum stays due until the next norm            attn_full [Σ]
                   full Σ tp, d>1             reduce-scatter over tp                                    scattered
                   full, d>1                  own rows                                                  scattered
                   scattered                  nothing                                                   scattered
    finish         attn_full [Σ], scattered   sum and norm of own rows, all-gather over attn_tp         (a tensor)

Where a model has a Seam, sums over a group are its, and "all-reduce, add residual, norm" is one operator; where it has
Moves, rows cross groups by these, and "add residual, norm (own rows), gather" over tp is one. With both, so is the same
over attn_tp, and the moves over tp are of each rank's own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.layouts import Hidden, Layout, Norm, add_and_norm, keep, normed
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Moves, Seam

Rows = tuple[torch.Tensor, "torch.Tensor | None"]
Move = Callable[[Hidden, "StepTokens | None"], Rows]
# In which layout of scales what a hook returns may be codes instead, given its name and how many rows they are.
Codes = Callable[[str, int], "str | None"]


class Transition(NamedTuple):
    """One row of a table: at which hook, from which layout to which, by which function, and that in words."""

    hook: str
    given: Layout
    to: Layout
    move: Move
    how: str


class RankOps:
    """The collectives of one rank along the axes the communicator uses, and the moves built from them."""

    # What sums over the ranks of a group in fewer launches, where there is one.
    seam: Seam | None = None
    # What gathers and scatters rows between groups, where there is something quicker.
    moves: Moves | None = None

    def __init__(self, parallel: ParallelSpec) -> None:
        self.attn_tp, self.attn_dp, self.tp = map(collectives, (parallel.attn_tp, parallel.attn_dp, parallel.tp))
        self.many_groups = self.attn_dp.size > 1
        self.alone = self.attn_tp.size == self.attn_dp.size == self.tp.size == 1

    def reduce_(self, x: torch.Tensor, axis: str | None) -> torch.Tensor:
        """Return ``x`` with the sum due over ``axis`` (``None``: none) done; may overwrite ``x``."""
        if axis is None:
            return x
        if self.seam is not None:
            return self.seam.all_reduce(x)
        return (self.tp if axis == "tp" else self.attn_tp).all_reduce_(x)

    def gather_replicate(self, x: torch.Tensor, step: StepTokens, codes: str | None = None) -> Any:
        """``attn_full`` → ``full``, values whole on each rank of a group; ``codes``: with :attr:`moves`, as codes."""
        if self.moves is not None:
            return self.moves.gather(self.attn_tp.own_slice(x), self._ragged(step), codes)
        if step.mode == "max_len":
            return self.attn_dp.all_gather(x)
        mine = x if self.attn_tp.rank == 0 else None
        return self.tp.gather_by_sum(mine, x, step.full_rows, step.offsets[self.attn_dp.rank])

    def gather_partial(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``attn_full`` → ``full``, values being partial sums over the group."""
        if step.mode == "max_len":
            return self.tp.all_gather(self.attn_tp.reduce_scatter(x))
        return self.tp.gather_by_sum(x, x, step.full_rows, step.offsets[self.attn_dp.rank])

    def add_residual_once(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return partial sums whose sum over the group holds ``residual`` once: rank 0 adds it, others do not."""
        return x + residual if self.attn_tp.rank == 0 else x

    def own_group(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``full`` → ``attn_full`` without a sum: a view of the own group's rows."""
        return x[step.group_slice(self.attn_dp.rank)]

    def postprocess_sum(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``full`` with a sum over tp due → ``attn_full``: each rank gets its slice of the sum, summed once."""
        if self.moves is not None:
            return self.gather_group(self.moves.scatter(x, self._ragged(step)))
        if step.mode == "max_len":
            return self.attn_tp.all_gather(self.tp.reduce_scatter(x))
        if self.attn_tp.size == 1:
            return self.tp.reduce_scatter_variable(x, step.rows)
        return self.own_group(self.tp.all_reduce_(x), step)

    def own_rows(self, hidden: Hidden) -> torch.Tensor:
        """``attn_full`` → ``scattered``: this rank's rows, summed over the group where a sum is due."""
        x, due = hidden.tensor, hidden.layout.pending
        if self.attn_tp.size == 1:
            return x
        if not due:
            return self.attn_tp.own_slice(x)
        if self.seam is not None and self.seam.scatter is not None:
            return self.seam.scatter(x)
        return self.attn_tp.reduce_scatter(x)

    def gather_group(self, x: torch.Tensor) -> torch.Tensor:
        """``scattered`` → ``attn_full``: the rows of the own group's ranks."""
        if self.seam is not None and self.seam.gather is not None:
            found: torch.Tensor = self.seam.gather(x)
            return found
        return self.attn_tp.all_gather(x)

    def gather_own(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``scattered`` → ``full``: the rows of all ranks."""
        if self.moves is not None:
            found: torch.Tensor = self.moves.gather(x, self._ragged(step))
            return found
        return self.tp.all_gather(x) if step.mode == "max_len" else self.tp.all_gather_variable(x, self._sizes(step))

    def scatter_sum(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``full`` with a sum over tp due → ``scattered``."""
        if self.moves is not None:
            return self.moves.scatter(x, self._ragged(step))
        if step.mode == "max_len":
            return self.tp.reduce_scatter(x)
        return self.tp.reduce_scatter_variable(x, self._sizes(step))

    def _ragged(self, step: StepTokens) -> list[int] | None:
        """Return the rows of each rank where these are scattered, if they may differ."""
        return None if step.mode == "max_len" else self._sizes(step)

    def _sizes(self, step: StepTokens) -> list[int]:
        """Return the rows of each rank where they are scattered."""
        return [rows // self.attn_tp.size for rows in step.rows for _ in range(self.attn_tp.size)]


HOOKS = "prepare_attn", "prepare_mlp"
SCATTERED = Layout("scattered", None, "scattered")
WHOLE, SPREAD = Layout("attn_full", None, "attn_full"), Layout("attn_full", None, "scattered")


class Tables:
    """The transitions of one layer: of steps whose residual is whole, and of those where it is spread.

    Parameters
    ----------
    ops : RankOps
    norms : tuple of norms
        In front of the attention and of the MLP.
    place : str
        Of the MLP's rows.
    is_last : bool
    codes : callable, optional
        See :data:`Codes`.
    """

    def __init__(
        self, ops: RankOps, norms: tuple[Norm, Norm], place: str, is_last: bool, codes: Codes | None = None
    ) -> None:
        self.ops, self.norms, self.place, self.is_last, self.codes = ops, norms, place, is_last, codes
        # Several groups never leave a sum over tp due: their rows differ.
        self.sums = (None, "attn_tp") if ops.many_groups else (None, "attn_tp", "tp")

    def fused(self, norm: Norm, *, spread: bool = False) -> tuple[Move, str] | None:
        """Return what sums over ranks, adds the residual and norms in one operator, if there is such a thing."""
        seam = self.ops.seam
        made = seam.sum_norm(norm, spread=spread) if seam is not None else None
        if seam is None or made is None:
            return None
        layer, module, hook = made, norm, HOOKS[0] if norm is self.norms[0] else HOOKS[1]

        def summed(hidden: Hidden, step: StepTokens | None) -> Rows:
            layout = self._layout(hook, hidden.tensor.shape[0], step) if seam.codes else None
            found: tuple[torch.Tensor, torch.Tensor] = layer(hidden.tensor, hidden.residual, module.weight, layout)  # type: ignore[attr-defined]
            return found

        return summed, f"{layer.choice}{' of own rows' if spread else ''}{self.coded}"

    @property
    def coded(self) -> str:
        """In words, whether rows may be codes."""
        return ", as codes and scales where FP8 products read them" if self.codes is not None else ""

    def _layout(self, hook: str, rows: int, step: StepTokens | None) -> str | None:
        """Return the layout of scales in which so many rows of the own group may be codes.

        Rows that pad a step are cut off before they are read.
        """
        codes = self.codes
        if codes is None or step is None or step.real[self.ops.attn_dp.rank] != rows:
            return None
        return codes(hook, rows)

    def _layout_of_all(self, step: StepTokens) -> str | None:
        """Return the layout of scales in which an MLP takes the rows of all groups, those that pad them too."""
        moves, codes = self.ops.moves, self.codes
        if moves is None or codes is None or not moves.codes:
            return None
        return codes(HOOKS[1], step.full_rows)

    def whole(self) -> Iterator[Transition]:
        """Yield the table of steps whose residual is whole."""
        yield from self._attn()
        yield from self._mlp_full() if self.place == "full" else self._mlp_scattered(("attn_full", "scattered"))
        yield from self._postprocess()

    def spread(self) -> Iterator[Transition]:
        """Yield the table of steps whose residual is scattered; of one rank nothing is."""
        if self.ops.alone:
            yield from self.whole()
            return
        yield from self._spread_attn()
        yield from self._spread_mlp() if self.place == "full" else self._mlp_scattered(("scattered",))
        yield from self._spread_postprocess()

    # Each move gets what the layout promises, and returns (tensor, residual).

    def _attn(self) -> Iterator[Transition]:
        ops, norm = self.ops, self.norms[0]

        def whole(hidden: Hidden, _: StepTokens | None) -> Rows:
            return normed(norm, ops.reduce_(hidden.tensor, hidden.layout.pending), hidden.residual)

        fused = self.fused(norm)
        for residual in (None, "attn_full"):
            for pending in self.sums:
                given = Layout("attn_full", pending, residual)
                if ops.alone or pending is None:
                    yield Transition("prepare_attn", given, WHOLE, partial(add_and_norm, norm), "norm")
                else:
                    yield Transition("prepare_attn", given, WHOLE, *(fused or (whole, "all-reduce, norm")))
        yield self._attn_of_own_rows()

    def _attn_of_own_rows(self) -> Transition:
        ops, norm = self.ops, self.norms[0]

        def gathered(hidden: Hidden, _: StepTokens | None) -> Rows:
            y, residual = normed(norm, hidden.tensor, hidden.residual)
            return ops.attn_tp.all_gather(y), residual

        made = self._gathered_in_group(norm) or (gathered, "norm of own rows, all-gather")
        return Transition("prepare_attn", SCATTERED, SPREAD, *made)

    def _gathered_in_group(self, norm: Norm) -> tuple[Move, str] | None:
        """Return what adds the residual to own rows, norms them and gathers the group's, if that is one operator."""
        seam = self.ops.seam
        if seam is None or seam.gather is None or not seam.norms(norm):
            return None
        gather, size = seam.gather, self.ops.attn_tp.size

        def gathered(hidden: Hidden, step: StepTokens | None) -> Rows:
            layout = self._layout(HOOKS[0], hidden.tensor.shape[0] * size, step) if seam.codes else None
            return gather.normed(norm, hidden.tensor, hidden.residual, None, layout)

        return gathered, f"{gather.choice} behind the norm of own rows{self.coded}"

    def _mlp_full(self) -> Iterator[Transition]:
        ops, norm = self.ops, self.norms[1]

        def one_group(hidden: Hidden, _: StepTokens | None) -> Rows:
            return normed(norm, ops.reduce_(hidden.tensor, hidden.layout.pending), self._residual_of(hidden))

        fused = None if ops.many_groups else self.fused(norm)
        for residual in ("attn_full", "scattered"):
            for pending in (None, "attn_tp"):
                given = Layout("attn_full", pending, residual)
                made: tuple[Move, str]
                if ops.many_groups:
                    made = self._gather_of_groups(pending)
                elif fused is not None and pending is not None and residual == "attn_full":
                    made = fused
                else:
                    made = (
                        (partial(add_and_norm, norm), "norm")
                        if ops.alone
                        else (one_group, f"{'all-reduce, ' * bool(pending)}norm")
                    )
                yield Transition("prepare_mlp", given, Layout("full", None, "attn_full"), *made)

    def _residual_of(self, hidden: Hidden) -> torch.Tensor:
        """Return the residual of all rows of the own group."""
        assert hidden.residual is not None
        scattered = hidden.layout.residual == "scattered"
        return self.ops.attn_tp.all_gather(hidden.residual) if scattered else hidden.residual

    def _gather_of_groups(self, pending: str | None) -> tuple[Move, str]:
        """Return what adds the residual to the rows of each group, norms them, and gathers those of all groups."""
        ops, norm = self.ops, self.norms[1]
        several = ops.attn_tp.size > 1

        def gathered(y: torch.Tensor, step: StepTokens) -> Any:
            return ops.gather_replicate(y, step, self._layout_of_all(step))

        def norm_first(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            y, residual = normed(norm, hidden.tensor, self._residual_of(hidden))
            return gathered(y, step), residual

        def sum_first(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None and layer is not None
            y, residual = layer(hidden.tensor, self._residual_of(hidden), norm.weight)  # type: ignore[attr-defined]
            return gathered(y, step), residual

        def gather_first(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            full = ops.gather_partial(ops.add_residual_once(hidden.tensor, self._residual_of(hidden)), step)
            return normed(norm, full, None)[0], ops.own_group(full, step)

        moves, due = ops.moves, pending is not None and several
        layer = ops.seam.sum_norm(norm) if due and moves is not None and ops.seam is not None else None
        if not several and (at_once := self._normed_and_gathered(norm)) is not None:
            return at_once
        if due and layer is None:
            return gather_first, "gather of partial sums, norm"
        if moves is None:
            return norm_first, "norm, gather"
        words = f"{moves.gather.choice}{' of own rows' * several}{self.coded}"
        return (norm_first, f"norm, {words}") if layer is None else (sum_first, f"{layer.choice}, {words}")

    def _normed_and_gathered(self, norm: Norm) -> tuple[Move, str] | None:
        """Return what adds the residual to own rows, norms them and gathers all ranks', if that is one operator.

        The sum over a group, where one is due, comes before.
        """
        ops, moves = self.ops, self.ops.moves
        if moves is None or not moves.norms(norm):
            return None
        gather = moves.gather

        def at_once(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            sizes, layout = ops._ragged(step), self._layout_of_all(step)
            return gather.normed(norm, ops.own_rows(hidden), hidden.residual, sizes, layout)

        return at_once, f"{gather.choice} behind the norm of own rows{self.coded}"

    def _mlp_scattered(self, residuals: tuple[str, ...]) -> Iterator[Transition]:
        ops, norm = self.ops, self.norms[1]

        def scatter(hidden: Hidden, _: StepTokens | None) -> Rows:
            assert hidden.residual is not None
            whole = hidden.layout.residual == "attn_full"
            residual = ops.attn_tp.own_slice(hidden.residual) if whole else hidden.residual
            return normed(norm, ops.own_rows(hidden), residual)

        for residual in residuals:
            for pending, how in ((None, "own rows, norm"), ("attn_tp", "reduce-scatter, norm")):
                yield Transition("prepare_mlp", Layout("attn_full", pending, residual), SCATTERED, scatter, how)

    def _postprocess(self) -> Iterator[Transition]:
        ops = self.ops

        def gather(hidden: Hidden, _: StepTokens | None) -> Rows:
            assert hidden.residual is not None
            return ops.attn_tp.all_gather(hidden.tensor), ops.attn_tp.all_gather(hidden.residual)

        def summed(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            return ops.postprocess_sum(hidden.tensor, step), hidden.residual

        def sliced(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            return ops.own_group(hidden.tensor, step), hidden.residual

        if self.place == "scattered":
            if self.is_last:
                yield Transition("postprocess", SCATTERED, WHOLE, gather, "all-gather")
            else:
                yield Transition("postprocess", SCATTERED, SCATTERED, keep, "nothing")
            return
        how, made, seam = "sum of own group's rows", ops.moves, ops.seam
        if made is not None:
            inner = f", {seam.gather.choice} in the group" if seam is not None and seam.gather is not None else ""
            how = f"{made.scatter.choice} of own rows{inner or ', all-gather in the group' * (ops.attn_tp.size > 1)}"
        moves = (sliced, "own group's rows"), (summed, how)
        yield from self._behind_full_mlp("attn_full", WHOLE, *moves)

    def _behind_full_mlp(
        self, residual: str, to: Layout, own: tuple[Move, str], summed: tuple[Move, str]
    ) -> Iterator[Transition]:
        """Yield what several groups do with rows of all, whole or with a sum due; one group leaves them to the norm."""
        for pending, move in ((None, own), ("tp", summed)):
            given = Layout("full", pending, residual)
            if self.ops.many_groups:
                yield Transition("postprocess", given, to, *move)
            else:
                yield Transition("postprocess", given, Layout("attn_full", pending, residual), keep, "nothing")

    def _spread_attn(self) -> Iterator[Transition]:
        ops, norm = self.ops, self.norms[0]

        def first(hidden: Hidden, _: StepTokens | None) -> Rows:
            return normed(norm, hidden.tensor, None)[0], ops.attn_tp.own_slice(hidden.tensor)

        for residual in (None,) if ops.many_groups else (None, "scattered"):
            for pending in self.sums:
                made = self._norm_of_own_rows(norm, pending)
                if pending is None and residual is None:
                    made = first, "norm; own rows of the residual"
                yield Transition("prepare_attn", Layout("attn_full", pending, residual), SPREAD, *made)
        yield self._attn_of_own_rows()

    def _spread_mlp(self) -> Iterator[Transition]:
        for pending in (None, "attn_tp"):
            made = self._norm_of_own_rows(self.norms[1], pending, wide=self.ops.many_groups)
            given, to = Layout("attn_full", pending, "scattered"), Layout("full", None, "scattered")
            yield Transition("prepare_mlp", given, to, *made)

    def _norm_of_own_rows(self, norm: Norm, pending: str | None, *, wide: bool = False) -> tuple[Move, str]:
        """Return what adds and norms own rows and gathers them from the group, or (``wide``) from all ranks."""
        ops, summed = self.ops, pending is not None and self.ops.attn_tp.size > 1

        def of_own_rows(hidden: Hidden, step: StepTokens | None) -> Rows:
            y, residual = normed(norm, ops.own_rows(hidden), hidden.residual)
            if not wide:
                return ops.attn_tp.all_gather(y), residual
            assert step is not None
            return ops.gather_own(y, step), residual

        if wide:
            made = self._normed_and_gathered(norm)
            scatter = ops.seam.scatter if ops.seam is not None else None
            if made is not None:
                before = f"{scatter.choice if scatter is not None else 'reduce-scatter'}, " if summed else ""
                return made[0], before + made[1]
        fused = self.fused(norm, spread=True) if pending is not None and not wide else None
        return fused or (of_own_rows, f"{'reduce-scatter, ' * bool(pending)}norm of own rows, all-gather")

    def _spread_postprocess(self) -> Iterator[Transition]:
        ops = self.ops

        def summed(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            return ops.scatter_sum(hidden.tensor, step), hidden.residual

        def sliced(hidden: Hidden, step: StepTokens | None) -> Rows:
            assert step is not None
            return ops.attn_tp.own_slice(ops.own_group(hidden.tensor, step)), hidden.residual

        if self.place == "scattered":
            yield Transition("postprocess", SCATTERED, SCATTERED, keep, "nothing")
            return
        how = f"{ops.moves.scatter.choice} of own rows" if ops.moves is not None else "reduce-scatter"
        moves = (sliced, "own rows"), (summed, how)
        yield from self._behind_full_mlp("scattered", SCATTERED, *moves)
