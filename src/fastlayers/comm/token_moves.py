"""How tokens get to the ranks that have their experts, chosen once for all layers of a model: :class:`TokenMoves`.

    way          before the experts                                  behind them                    shared experts
    "gather"     rows of all ranks to all ranks                      sums scattered                 split over ranks
    "exchange"   a token to the ranks that have one of its experts   the ranks' sums to its own     whole on each rank
    "auto"       "exchange" where measured ladders of both say that it is quicker at each number of tokens

With the exchange an MLP's rows are scattered: each rank routes its own and gets them back whole. A rank's experts sum
what they make of a token and round that once; both ways then add the ranks' sums, so that results are equal bit by bit
where both add in one order, as between two ranks, and a row's product does not depend on the rows beside it. Shared
experts see own rows only: that sum rounds otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastlayers.comm import ladders
from fastlayers.comm.expert_exchange.layer import ExpertExchange, ExpertExchangeConfig
from fastlayers.comm.fabric import Workspace
from fastlayers.comm.gather_rows.layer import GatherRowsConfig
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.scatter_rows.layer import ScatterRowsConfig
from fastlayers.comm.seam import SHARE, Moves, Seam, connected, evidence_of, status_of
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.layer import trust


class Way(NamedTuple):
    """Whether tokens are exchanged, and why."""

    exchange: bool
    why: str

    @property
    def words(self) -> str:
        """Both, as ``fl.explain`` of a model shows them."""
        return f"tokens to experts: {'exchange' if self.exchange else 'gather'}: {self.why}"


def why_not(parallel: ParallelSpec, num_experts: int) -> str | None:
    """Return why tokens of such a model cannot be exchanged between these ranks, or ``None``."""
    if parallel.tp.size == 1:
        return "one rank has nobody to exchange with"
    if not num_experts:
        return "the model has no experts that take tokens of other ranks so"
    if parallel.moe_tp.size > 1:
        split = f"each expert is split over {parallel.moe_tp.size} ranks"
        return f"{split}, which would all need the same tokens; with ep={parallel.tp.size} it is whole on one"
    return None


def way_of(
    parallel: ParallelSpec, hidden_size: int, num_experts: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> Way:
    """Return how tokens get to their experts; from what all ranks have alike.

    Raises
    ------
    ArgumentError
        ``parallel.expert_exchange`` asks for what cannot be; the reason is in words.
    """
    asked, cannot = parallel.expert_exchange, why_not(parallel, num_experts)
    if asked == "exchange" and cannot is not None:
        raise ArgumentError("ParallelSpec", "expert_exchange", f"'exchange', while {cannot}", "'gather' or 'auto'")
    if asked != "auto":
        return Way(asked == "exchange", "asked for")
    if cannot is not None:
        return Way(False, cannot)
    if parallel.attn_dp.size == 1:
        return Way(False, "the ranks of one attention group have all rows already")
    axis, place = parallel.tp, as_device(device)
    there = ladders.times(
        "expert_exchange", ExpertExchangeConfig(axis, hidden_size, dtype, num_experts=num_experts, top_k=top_k), place
    )
    gathers = ladders.times("gather_rows", GatherRowsConfig(axis, hidden_size, dtype), place)
    scatters = ladders.times("scatter_rows", ScatterRowsConfig(axis, hidden_size, dtype), place)
    both = sorted(there.keys() & gathers.keys() & scatters.keys())
    if not both:
        what = f"{top_k} of {num_experts} experts, rows of {hidden_size} {str(dtype).removeprefix('torch.')}"
        return Way(False, f"both ways were not measured for {axis.size} ranks, {place.name}, {what}")
    exchanged, gathered = (
        " / ".join(f"{found(count):.1f}" for count in both)
        for found in (there.__getitem__, lambda count: gathers[count] + scatters[count])
    )
    quicker = all(there[count] < gathers[count] + scatters[count] for count in both)
    counts = " / ".join(map(str, both))
    return Way(quicker, f"measured for {counts} tokens a rank: {exchanged} us exchanged, {gathered} us gathered")


class TokenMoves:
    """The exchange of tokens of all MoE layers of a model, one at a time.

    Parameters
    ----------
    parallel : ParallelSpec
        With whole experts on each rank, and process groups.
    workspace : Workspace or None
        Made with ``tokens``; without, all rows are gathered and partial rows scattered by the axis' group.
    hidden_size, num_experts, top_k : int
        ``num_experts``: slots of all ranks.
    dtype, device
        Of hidden states.
    """

    def __init__(
        self, parallel: ParallelSpec, workspace: Workspace | None, hidden_size: int, num_experts: int, top_k: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.workspace, self.axis = workspace, parallel.tp
        self.exchange = ExpertExchange(
            parallel.tp, hidden_size, num_experts, top_k, workspace=workspace, device=device, dtype=dtype
        )
        trust(self.exchange)

    @staticmethod
    def slots(num_experts: int, top_k: int) -> tuple[int, int, int]:
        """Return what a workspace is asked for."""
        return num_experts, top_k, SHARE

    @staticmethod
    def make(
        parallel: ParallelSpec, across: Seam | Moves | None, hidden_size: int, num_experts: int, top_k: int,
        dtype: torch.dtype, device: torch.device,
    ) -> TokenMoves:  # fmt: skip
        """Return the exchange of a model, in the workspace of ``across`` where there is that; collective where not."""
        workspace = across.workspace if across is not None else None
        if across is None and connected(parallel, device):
            tokens = TokenMoves.slots(num_experts, top_k)
            workspace = Workspace.make(parallel.tp, hidden_size, dtype, device, rows=1, tokens=tokens)
        return TokenMoves(parallel, workspace, hidden_size, num_experts, top_k, dtype, device)

    @property
    def refusal(self) -> str | None:
        """Why tokens do not go to the ranks of their experts only, but rows to all; ``None`` if they do."""
        choice = self.exchange.choice
        return choice.refused.get("triton_symm_mem") if choice.name != "triton_symm_mem" else None

    @property
    def status(self) -> torch.Tensor | None:
        """As of :class:`~fastlayers.comm.seam.Seam`."""
        return status_of(self.workspace)

    @property
    def chosen(self) -> dict[str, str]:
        """As of :class:`~fastlayers.comm.seam.Seam`."""
        return {"expert_exchange": self.exchange.choice.name}

    @property
    def evidence(self) -> list[str]:
        """As of :class:`~fastlayers.comm.seam.Seam`."""
        return evidence_of(self.axis, None, self.exchange)
