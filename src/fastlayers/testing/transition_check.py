"""One check for every row of a communicator's tables: what comes out, against the rows written down whole.

    rows of all groups, whole ─► what this rank has in the layout given ─► hook ─► what it has in the layout returned

A hook changes where rows lie and what is due; of the rows themselves it makes a norm and a sum, or nothing. So one
function that says what a rank has of rows in a layout gives the input, and is what the output is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.world import Rank

HIDDEN = 8
# What decides a layer's tables, besides the grid: where its MLP's rows lie, and whether it is the last.
LAYERS: tuple[dict[str, Any], ...] = ({"is_last": True}, {"dense_tp": 1}, {"dense_tp": 1, "is_last": True})
Groups = list[torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """Ranks, attention groups among them, and the tokens of each group in each of several steps."""

    name: str
    size: int
    attn_dp: int
    counts: tuple[tuple[int, ...], ...]


_ONE = ((0,), (1,), (5,), (9,))
_TWO = ((0, 0), (0, 5), (5, 1), (3, 3))
_FOUR = ((0, 0, 0, 0), (1, 0, 7, 0), (2, 5, 1, 9))
GRIDS = (
    Grid("tp2", 2, 1, tuple((count,) for count in range(10))),
    Grid("dp2", 2, 2, (*_TWO, *((count, 9 - count) for count in range(1, 10)))),
    Grid("tp4", 4, 1, _ONE),
    Grid("dp2_tp2", 4, 2, _TWO),
    Grid("dp4", 4, 4, _FOUR),
    Grid("tp8", 8, 1, ((0,), (9,))),
    Grid("dp4_tp2", 8, 4, ((1, 0, 7, 0),)),
    Grid("dp2_tp4", 8, 2, ((0, 5), (5, 1))),
)


def steps(counts: tuple[int, ...], attn_tp: int) -> Iterator[StepTokens]:
    """Yield a step of these tokens in both modes, with the residual whole and scattered."""
    rows = tuple(-(-count // attn_tp) * attn_tp for count in counts)
    for mode, padded in (("sum_len", rows), ("max_len", (max(rows) + attn_tp,) * len(rows))):
        for spread in (False, True):
            yield StepTokens(counts, padded, mode, attn_tp, spread)


def of_rank(groups: Groups, place: str, spec: ParallelSpec) -> torch.Tensor:
    """Return what a rank has of rows that lie in ``place``."""
    own = groups[spec.attn_dp.rank]
    if place == "full":
        return torch.cat(groups)
    return own if place == "attn_full" else own[spec.attn_tp.part(len(own), "rows")]


def share(x: torch.Tensor, size: int, rank: int, seed: int) -> torch.Tensor:
    """Return one rank's part of rows that are a sum over ``size`` ranks."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(x.shape, generator=generator) for _ in range(size - 1)]
    return parts[rank - 1] if rank else x - torch.stack([*parts, torch.zeros_like(x)]).sum(0)


def given(layout: Layout, x: Groups, residual: Groups, spec: ParallelSpec) -> Hidden:
    """Return what this rank gives to a hook: rows that are padding are NaN."""
    if layout.pending is not None:
        over = spec.tp if layout.pending == "tp" else spec.attn_tp
        x = [share(each, over.size, over.rank, seed) for seed, each in enumerate(x)]
    left = None if layout.residual is None else of_rank(residual, layout.residual, spec).clone()
    return Hidden(of_rank(x, layout.place, spec).clone(), left, layout)


def compare(what: str, found: torch.Tensor, wanted: Groups, place: str, spec: ParallelSpec) -> None:
    """Compare the rows that are no padding."""
    mine = of_rank(wanted, place, spec)
    assert found.shape == mine.shape, f"{what}: {tuple(found.shape)}, wanted {tuple(mine.shape)}"
    real = ~mine.isnan().any(-1)
    # fp32 sums of at most eight terms of size 1, in another order, and the norm of such a sum.
    torch.testing.assert_close(found[real], mine[real], rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")


def check_transitions(rank: Rank, communicator: type[LayerCommunicator], grid: Grid) -> int:
    """Raise AssertionError unless every row of both tables is right on this rank; return how many were looked at."""
    spec, looked = rank.spec(attn_dp=grid.attn_dp), 0
    norms = (RMSNorm(HIDDEN, backend="torch"), RMSNorm(HIDDEN, backend="torch"))
    for scale, norm in zip((0.5, 2.0), norms, strict=True):
        norm.weight.copy_(scale + torch.arange(HIDDEN) / HIDDEN)
    over = {"tp": collectives(spec.tp), "attn_tp": collectives(spec.attn_tp)}
    for options in LAYERS:
        made = communicator(spec, input_layernorm=norms[0], post_attention_layernorm=norms[1], **options)
        for counts in grid.counts:
            for step in steps(counts, spec.attn_tp.size):
                x, residual = draw(step, 1), draw(step, 2)
                table = made.spread_table if step.spread else made.table
                for (hook, layout), to in table.items():
                    what = f"{grid.name}, {options}, {step}, spread {step.spread}: {hook} of {layout}"
                    found = made.run(hook, given(layout, x, residual, spec), step)
                    assert found.layout == to, what
                    y, h = x, residual
                    if hook != "postprocess":
                        h = x if layout.residual is None else added(x, residual)
                        y = [norms[hook == "prepare_mlp"](each) for each in h]
                    tensor = found.tensor if to.pending is None else over[to.pending].all_reduce_(found.tensor.clone())
                    compare(what, tensor, y, to.place, spec)
                    assert to.residual is not None and found.residual is not None, what
                    compare(f"{what}, residual", found.residual, h, to.residual, spec)
                    looked += 1
                for layout in made.outputs_of(spread=step.spread) if made.is_last else ():
                    what = f"{grid.name}, {options}, {step}, spread {step.spread}: finish of {layout}"
                    done = made.finish(given(layout, x, residual, spec), norms[0], step)
                    compare(what, done, [norms[0](each) for each in added(x, residual)], "attn_full", spec)
                    looked += 1
    return looked


def added(x: Groups, residual: Groups) -> Groups:
    """Return the sums of both."""
    return [one + other for one, other in zip(x, residual, strict=True)]


def draw(step: StepTokens, seed: int) -> Groups:
    """Return rows of each group; those that are padding are NaN."""
    generator, groups = torch.Generator().manual_seed(seed), []
    for real, rows in zip(step.real, step.rows, strict=True):
        values = torch.randn(rows, HIDDEN, generator=generator)
        values[real:] = float("nan")
        groups.append(values)
    return groups
