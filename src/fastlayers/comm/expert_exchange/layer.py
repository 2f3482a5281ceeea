"""Tokens to the ranks that have their experts, and the sum of what those make of them back.

    n = ranks of the axis, T = tokens of each rank (equal), H = hidden_size, E = experts, K = top_k, e = E / n
    dispatch   rows[r·T + t] = x of rank r, token t;  ids there: id − rank·e where rank·e <= id < (rank + 1)·e, else −1
    combine    y[T,H] = Σ over ranks of partial[rank·T + t]    (fp32, in rank order, rounded once)

A row whose ids are all -1 has no meaning, and its partial row is not read: only what a rank's experts take is sent.
Where ranks bring unequal numbers of tokens, all rows are gathered and sums scattered, by sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import MNNVL, NVSHMEM, RankConfig, RankLayer, rank_registry
from fastlayers.errors import ArgumentError, check_positive, check_tensor
from fastlayers.layer import Layer

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertExchangeConfig(RankConfig):
    """What a backend must know; ``slots``: most tokens of one rank that the workspace was made for."""

    num_experts: int = 0
    top_k: int = 0

    layer, operator = "ExpertExchange", "tokens"
    alike, words = ("hidden_size", "dtype", "top_k"), "tokens of {} values of {}, {} experts each"

    @property
    def way(self) -> str:  # type: ignore[override]
        """Whose ladder serves."""
        return f"{self.top_k} of {self.num_experts}"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("ExpertExchange", num_experts=self.num_experts, top_k=self.top_k)
        if self.num_experts % self.axis.size:
            accepted = f"a multiple of {self.axis.size} ranks"
            raise ArgumentError("ExpertExchange", "num_experts", self.num_experts, accepted)


EXPERT_EXCHANGE = rank_registry(
    "expert_exchange", "ExpertExchange",
    {"deep_ep": "V2 needs NCCL >= 2.30.4, V1 an NVSHMEM build: neither is here", "nvshmem": NVSHMEM, "mnnvl": MNNVL},
)  # fmt: skip


class ExpertExchange(RankLayer):
    """Send tokens to the ranks that have their experts, and sum what comes back.

    Parameters
    ----------
    axis : Axis
        Over which whole experts are dealt out, in equal runs; with a process group.
    hidden_size, num_experts, top_k : int
    workspace : optional
        With ``fabric`` and ``tokens`` (a :class:`~fastlayers.comm.triton_tokens.TokenExchange`). Without: all rows are
        gathered, and all partial rows scattered.
    device, dtype
        Of the rows.
    backend : str

    Notes
    -----
    Every rank makes the same calls, with the same number of tokens or the same ``sizes``. Capture-safe where the
    backend is and numbers are equal. Source: DeepEP's dispatch and combine, with fixed slots instead of counts.
    """

    rows, config = EXPERT_EXCHANGE, ExpertExchangeConfig

    def __init__(
        self,
        axis: Axis,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        workspace: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        Layer.__init__(self)
        cfg = ExpertExchangeConfig(axis, hidden_size, num_experts=num_experts, top_k=top_k)
        self.connect(cfg, workspace, device, dtype, backend)
        self.ragged = EXPERT_EXCHANGE.named("nccl").load()(self.cfg)

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> Tokens:
        """Return rows ``[n * T, H]``, local ids int32 and weights fp32 ``[n * T, K]``, of all ranks' tokens.

        Parameters
        ----------
        x : Tensor ``[T, H]``
        topk_ids : int32 Tensor ``[T, K]``
            Of all experts; -1: none.
        topk_weights : fp32 Tensor ``[T, K]``
        sizes : sequence of int, optional
            Tokens of each rank, where they are not equal: then there are ``sum(sizes)`` rows instead of ``n * T``.
        """
        cfg = self.cfg
        if not self.trusted:
            self.check_rows(x)
            shape, where = (x.shape[0], cfg.top_k), x.device
            check_tensor("ExpertExchange", "topk_ids", topk_ids, shape=shape, dtype=torch.int32, device=where)
            check_tensor("ExpertExchange", "topk_weights", topk_weights, shape=shape, dtype=torch.float32, device=where)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x, topk_weights=topk_weights)
        if sizes is not None and len(set(sizes)) > 1:
            return self.ragged.dispatch(x, topk_ids, topk_weights, sizes)
        self.check_order(x)
        found: Tokens = self.ladder.pick(x.shape[0]).dispatch(x, topk_ids.contiguous(), topk_weights.contiguous())
        return found

    def combine(
        self, partial: torch.Tensor, local_ids: torch.Tensor, topk_ids: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return ``[T, H]`` of the own tokens.

        Parameters
        ----------
        partial : Tensor ``[n * T, H]``
            Anything where all local ids are -1.
        local_ids : int32 Tensor ``[n * T, K]``
            As :meth:`dispatch` returned them.
        topk_ids : int32 Tensor ``[T, K]``
            As given to it.
        sizes : sequence of int, optional
            As given to it.
        """
        cfg, rows = self.cfg, self.cfg.axis.size * topk_ids.shape[0]
        uneven = sizes is not None and len(set(sizes)) > 1
        if not self.trusted:
            rows = sum(sizes) if uneven and sizes is not None else rows
            check_tensor("ExpertExchange", "partial", partial, shape=(rows, cfg.hidden_size), dtype=cfg.dtype)
            check_tensor("ExpertExchange", "local_ids", local_ids, shape=(rows, cfg.top_k), dtype=torch.int32)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(partial=partial)
        if uneven:
            return self.ragged.combine(partial, local_ids, topk_ids, sizes)
        self.check_order(partial)
        impl = self.ladder.pick(topk_ids.shape[0])
        found: torch.Tensor = impl.combine(partial.contiguous(), local_ids, topk_ids.contiguous())
        return found

    def forward(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return what all experts make of the own tokens; ``experts(rows, local ids, weights)`` are this rank's."""
        rows, local_ids, weights = self.dispatch(x, topk_ids, topk_weights, sizes)
        return self.combine(experts(rows, local_ids, weights), local_ids, topk_ids, sizes)
