"""Vocabulary embedding, possibly this rank's slice of the vocabulary only.

    T = tokens, V = vocab_size, D = hidden_size, n ranks, V' = ceil(V / n) rows on each rank
    start    = rank · V'
    y[T, D]  = weight[ids - start]      where start ≤ ids < start + V'
               0                        elsewhere: the sum over ranks is the whole embedding

The last ranks' slices are padded with zero rows where n does not divide V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers import env
from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_float,
    check_kind,
    check_positive,
    check_tensor,
    free_to_look,
)
from fastlayers.layer import Layer
from fastlayers.memory import allocate
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot


@dataclass(frozen=True)
class EmbeddingConfig:
    """What a backend must know: rows and columns on this rank, and the id of the first row.

    ``partial``: ids outside give zeros, because another rank holds them.
    """

    rows: int
    hidden_size: int
    start: int = 0
    partial: bool = False

    def __post_init__(self) -> None:
        check_positive("VocabEmbedding", rows=self.rows, hidden_size=self.hidden_size)
        if self.start < 0:
            raise ArgumentError("VocabEmbedding", "start", self.start, "0 or more")


_HERE = "fastlayers.embedding"
EMBEDDING = Registry(
    "embedding",
    [
        triton_backend(f"{_HERE}.triton:TritonEmbedding"),
        torch_backend(f"{_HERE}.torch:TorchEmbedding"),
        reference_backend(f"{_HERE}.reference:ReferenceEmbedding"),
    ],
    cases=f"{_HERE}.cases",
)


def vocab_slice(vocab_size: int, shard: Shard) -> tuple[slice, int]:
    """Return which ids this rank holds, and how many rows it has with padding.

    Slices are equal (``ceil(V / n)`` rows), so that gathered logits line up; the last ones may hold fewer
    ids.
    """
    if shard.kind == "replicated":
        return slice(0, vocab_size), vocab_size
    rows = -(-vocab_size // shard.axis.size)
    start = min(shard.axis.rank * rows, vocab_size)
    return slice(start, min(start + rows, vocab_size)), rows


class VocabEmbedding(Layer):
    """Rows of a table by token id.

    Parameters
    ----------
    vocab_size, hidden_size : int
        Of the whole layer.
    shard : Shard
        ``replicated``, or ``column``: this rank holds a slice of the vocabulary, and its output is a partial
        sum that the communicator reduces.
    device, dtype
        Of the weight.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Parameter: ``weight`` ``[V', D]``, zeros until loaded. Capture-safe; allocates its output.
    Gradients are right with the backends ``torch`` and ``reference``; a backward pass through another one raises.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> embed = fl.VocabEmbedding(3, 2)
    >>> _ = embed.weight.copy_(torch.arange(6.0).view(3, 2))
    >>> embed(torch.tensor([2, 0])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        shard: Shard = REPLICATED,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive("VocabEmbedding", vocab_size=vocab_size, hidden_size=hidden_size)
        vocab_size, hidden_size = as_integers(vocab_size, hidden_size)
        check_kind("VocabEmbedding", Shard, shard=shard)
        check_float("VocabEmbedding", dtype=dtype)
        check_choice("VocabEmbedding", "shard.kind", shard.kind, ("replicated", "column"))
        self.vocab_size, self.hidden_size, self.shard = vocab_size, hidden_size, shard
        self.ids, rows = vocab_slice(vocab_size, shard)
        first = 0 if shard.kind == "replicated" else shard.axis.rank * rows
        cfg = EmbeddingConfig(rows, hidden_size, first, shard.kind == "column" and shard.axis.size > 1)
        self.choose(EMBEDDING, cfg, device, backend)
        self.debug = env.debug()
        weight = allocate("VocabEmbedding", "weight", (rows, hidden_size), dtype, device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensor ``weight``: this rank's rows of it."""
        yield "weight", vocab_slot(self.weight, self.vocab_size, self.ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``y`` ``[..., D]`` for ``ids`` ``[...]`` (int32 or int64).

        Raises
        ------
        ArgumentError
            Wrong dtype or device; under ``FASTLAYERS_DEBUG``, and on a CPU, also ids outside the vocabulary. Elsewhere
            looking would synchronise, and the Triton backend gives zeros for them.
        """
        check_tensor("VocabEmbedding", "ids", ids, dtype=(torch.int32, torch.int64), device=self.weight.device)
        if (self.debug or free_to_look(ids)) and ids.numel():
            self._check_range(ids)
        y: torch.Tensor = self.ladder.pick(ids.numel())(ids, self.weight)
        return y

    def _check_range(self, ids: torch.Tensor) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ArgumentError("VocabEmbedding", "ids", f"{low} to {high}", f"0 to {self.vocab_size - 1}")


def vocab_slot(weight: torch.Tensor, vocab_size: int, ids: slice) -> Slot:
    """Return the slot of rows ``ids`` of a checkpoint tensor with one row (or value) per token."""
    return Slot(weight[: ids.stop - ids.start], (vocab_size, *weight.shape[1:]), (ids,))
