"""The language-model head: logits over this rank's slice of the vocabulary.

    T = tokens, D = hidden_size, V = vocab_size, n ranks, V' = ceil(V / n) rows on each rank
    logits[T, V'] = hidden[T, D] · weight[V', D]ᵀ (+ bias)

A dense :class:`Linear`, sharded along the vocabulary like :class:`VocabEmbedding`: slices are equal, and the
last ones are padded with zero rows where n does not divide V.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.embedding.layer import VocabEmbedding, vocab_slice, vocab_slot
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_float,
    check_kind,
    check_plain,
    check_positive,
)
from fastlayers.linear.dense.layer import LINEAR, Linear
from fastlayers.weights import Slot


class LMHead(Linear):
    """Hidden states to logits.

    Parameters
    ----------
    hidden_size, vocab_size : int
        Of the whole layer.
    bias : bool
    shard : Shard
        ``replicated``, or ``column``: this rank computes the logits of its slice of the vocabulary.
    tied_to : VocabEmbedding, optional
        Share its weight instead of having one. A ``lm_head.weight`` in the checkpoint is then read and
        dropped.
    device, dtype
        Of the parameters (with ``tied_to``: the embedding's).
    backend : str
        ``"auto"``, a name, or a ladder.
    out_dtype : torch.dtype, optional
        ``torch.float32`` keeps the fp32 sum; default: ``dtype``.

    Notes
    -----
    Capture-safe; allocates its output. Gathering the slices is the communicator's work;
    :meth:`trim` then drops the padding. Gradients: as for :class:`fastlayers.Linear`.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> embed = fl.VocabEmbedding(3, 2)
    >>> _ = embed.weight.copy_(torch.arange(6.0).view(3, 2))
    >>> fl.LMHead(2, 3, tied_to=embed)(torch.ones(1, 2)).tolist()
    [[1.0, 5.0, 9.0]]
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        shard: Shard = REPLICATED,
        tied_to: VocabEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_positive("LMHead", hidden_size=hidden_size, vocab_size=vocab_size)
        hidden_size, vocab_size = as_integers(hidden_size, vocab_size)
        check_plain("LMHead", "bool", bias=bias)
        check_kind("LMHead", Shard, shard=shard)
        check_float("LMHead", dtype=dtype, out_dtype=out_dtype)
        check_kind("LMHead", VocabEmbedding | None, tied_to=tied_to)
        check_choice("LMHead", "shard.kind", shard.kind, ("replicated", "column"))
        ids, rows = vocab_slice(vocab_size, shard)
        if tied_to is not None:
            _check_tied(tied_to, vocab_size, hidden_size, shard)
            device, dtype = tied_to.weight.device, tied_to.weight.dtype
        padded = rows * (1 if shard.kind == "replicated" else shard.axis.size)
        # A tied head must not allocate a second weight of this size, not even for a moment.
        table_device = "meta" if tied_to is not None else device
        asked = "torch" if tied_to is not None else backend
        super().__init__(
            hidden_size,
            padded,
            bias,
            shard=shard,
            device=table_device,
            dtype=dtype,
            backend=asked,
            out_dtype=out_dtype,
        )
        self.vocab_size, self.ids, self.tied = vocab_size, ids, tied_to is not None
        if tied_to is not None:
            self.choose(LINEAR, self.cfg, device, backend)
            self.weight = tied_to.weight
            if self.bias is not None:
                self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype), requires_grad=False)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensors ``weight`` and ``bias``: this rank's rows of them."""
        if self.tied:
            dropped = torch.empty(self.vocab_size, self.in_features, dtype=self.weight.dtype, device="meta")
            yield "weight", Slot(dropped, (self.vocab_size, self.in_features), optional=True)
        else:
            yield "weight", vocab_slot(self.weight, self.vocab_size, self.ids)
        if self.bias is not None:
            yield "bias", vocab_slot(self.bias, self.vocab_size, self.ids)

    def trim(self, logits: torch.Tensor) -> torch.Tensor:
        """Return gathered logits ``[..., n · V']`` without the padding: a view ``[..., V]``."""
        return logits[..., : self.vocab_size]


def _check_tied(embedding: VocabEmbedding, vocab_size: int, hidden_size: int, shard: Shard) -> None:
    given = (embedding.vocab_size, embedding.hidden_size, embedding.shard)
    if given != (vocab_size, hidden_size, shard):
        raise ArgumentError(
            "LMHead", "tied_to", f"an embedding of {given}", f"one of {(vocab_size, hidden_size, shard)}"
        )
