"""Draws that need more than temperature and filters: penalties, bias, forbidden tokens, grammars, log-probabilities.

    logits ─► repetition ─► presence ─► frequency ─► bias ─► end tokens forbidden ─► grammar's mask ─► sampler

The history that penalties count lies on the device and is written by the draw itself, so it never lags behind.
Log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastlayers.sampler.layer import Sampler
from fastlayers_models.rows import RowTable
from fastlayers_server.engine.protocol import TokenLogprobs
from fastlayers_server.engine.request import Request
from fastlayers_server.engine.step import finite_or_minus_one, on_device

# (place among the rows, request, tokens drawn before)
Special = Sequence[tuple[int, Request, int]]
SLICE = 256  # rows of logits that are turned into log-probabilities at a time


class Telling:
    """Log-probabilities on their way to the host: of chosen tokens, and of each row's ``counts`` likeliest ones."""

    def __init__(self, counts: Sequence[int], found: Sequence[torch.Tensor]) -> None:
        self._counts = counts
        self._parts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in found]
        for host, tensor in zip(self._parts, found, strict=True):
            host.copy_(tensor, non_blocking=True)

    def rows(self) -> list[TokenLogprobs]:
        """Return one entry a row; the copy has arrived."""
        chosen, top, ids = (part.tolist() for part in self._parts)
        return [
            TokenLogprobs(chosen[i], tuple(zip(ids[i][:count], top[i][:count], strict=True)))
            for i, count in enumerate(self._counts)
        ]


class SpecialDraws:
    """Draws by rows that have wishes.

    Parameters
    ----------
    sampler : Sampler
    table : RowTable
    max_model_len : int
    """

    def __init__(self, sampler: Sampler, table: RowTable, max_model_len: int) -> None:
        self.sampler, self.table = sampler, table
        size = (table.max_batch + 1, max_model_len + 1)
        self.history = torch.zeros(size, dtype=torch.int32, device=table.device)
        self._bias: WeakKeyDictionary[Request, Any] = WeakKeyDictionary()
        self._ends: WeakKeyDictionary[Request, Any] = WeakKeyDictionary()

    def admit(self, request: Request) -> None:
        """Bring what a request's draws will need to the device."""
        s, device = request.submit.sampling, self.table.device
        if request.penalised:
            known = on_device(request.tokens, device, torch.int32)
            self.history[request.slot - 1, : len(request.tokens)] = known
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._bias[request] = (on_device(ids, device), on_device(values, device, torch.float32))
        if request.submit.min_new_tokens:
            self._ends[request] = on_device(sorted(request.ends), device)

    def draw(self, logits: torch.Tensor, rows: Sequence[int], special: Special, mask: Any, mode: str) -> torch.Tensor:
        """Return tokens ``[rows]`` and advance the rows; ``logits`` keep their values.

        Parameters
        ----------
        logits : Tensor ``[rows, vocab]``
        rows : sequence of int
            Of the table. They were noted at the launch: a request may have ended since, and given its slot back.
        special : sequence of (place, request, drawn)
        mask : Tensor int32 ``[rows, ceil(vocab / 32)]``, optional
            Which tokens a row may draw, one bit each.
        mode : str
            Of the sampler.
        """
        x = logits.to(torch.float32, copy=True) if special else logits
        for place, request, drawn in special:
            self._adjust(x[place], request, rows[place], drawn)
        if mask is not None:
            from xgrammar import apply_token_bitmask_inplace

            apply_token_bitmask_inplace(x, mask.to(x.device, non_blocking=True))
        at = on_device(rows, x.device)
        params = self.table.gather(at)
        tokens = self.sampler(x, params, mode)
        self.table.scatter(at, params.offset, tokens)
        for place, request, drawn in special:
            if request.penalised:
                self.history[rows[place], request.prompt_len + drawn] = tokens[place]
        return finite_or_minus_one(logits, tokens)

    def _adjust(self, x: torch.Tensor, request: Request, row: int, drawn: int) -> None:
        """Change one row of logits in place."""
        s = request.submit.sampling
        if request.penalised:
            seen = self.history[row, : request.prompt_len + drawn].long()
            said = seen[request.prompt_len :]
            values = x[seen]
            factor = torch.where(values > 0, 1.0 / s.repetition_penalty, s.repetition_penalty)
            x[seen] = values * factor  # equal ids write equal values
            x[said] = x[said] - s.presence_penalty
            x.index_add_(0, said, torch.full(said.shape, -s.frequency_penalty, device=x.device))
        if request in self._bias:
            ids, bias = self._bias[request]
            x.index_add_(0, ids, bias)
        if drawn + 1 < request.submit.min_new_tokens:
            x[self._ends[request]] = float("-inf")

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, special: Special) -> Telling | None:
        """Start telling the log-probabilities of the tokens drawn, for those of ``special`` who asked."""
        asked = {place: request.submit.logprobs for place, request, _ in special if request.submit.logprobs >= 0}
        if not asked:
            return None
        places, counts = on_device(list(asked), logits.device), list(asked.values())
        chosen = tokens.index_select(0, places).clamp(min=0)
        return Telling(counts, self.sampler.logprobs(logits.index_select(0, places), chosen, max(counts)))

    def prompt_logprobs(self, model: Any, hidden: torch.Tensor, ids: Sequence[int], top: int) -> list[Telling]:
        """Start telling the log-probability of each of ``ids``, which follow the tokens of ``hidden``'s rows."""
        found = []
        for first in range(0, len(ids), SLICE):
            wanted = on_device(ids[first : first + SLICE], hidden.device)
            logits = model.compute_logits(hidden[first : first + wanted.shape[0]])
            found.append(Telling([top] * len(wanted), self.sampler.logprobs(logits, wanted, top)))
        return found
