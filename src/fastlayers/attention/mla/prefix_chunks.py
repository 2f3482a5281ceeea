"""Which way an MLA layer takes for a batch, and how a long prefix is cut into chunks.

    "mqa"          absorbed: attention over the cached latents. L+R + L multiply-adds a query-key pair, but a key is
                   one short row for all heads. Decode, and short extends of a prefix.
    "mha"          expanded: keys and values of the new tokens from kv_b_proj. N+R + V multiply-adds a pair.
                   Prefill without a prefix.
    "mha_one_shot" expanded over prefix and new tokens together, one causal pass with k_len > q_len.
    "mha_chunked"  expanded chunk by chunk: a causal pass over the new tokens, then one non-causal pass per chunk of
                   the prefix, merged by their LSE. Bounds the memory of the expanded keys.

What an expansion costs a key and head, L · (N+V) multiply-adds, it saves once (L+R + L) - (N+R + V) for each of some
170 queries of DeepSeek-V3 that meet the key, however many keys there are. So what decides is how many new tokens a key
meets in the mean, and not how long prefixes are: drafts to verify and the ends of prompts attend to latents, longer
pieces of prompts expand. On an H200 both ways would take equally long at about 140 new tokens with 128 heads and 255
with 16, behind 2,048 tokens as behind 32,768: read between 64 and 256, which were measured
(``benchmarks/results/mla_paths_h200.jsonl``). All thresholds are arguments of the layer; what production engines take
for DeepSeek-V3 on Hopper is ``MLAThresholds(prefix=8192, few=1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

import torch

from fastlayers.attention.meta import AttentionBatch, AttentionMeta
from fastlayers.attention.mla.config import RaggedLengths
from fastlayers.errors import check_fields, check_positive

# Measured with 128 heads and with 16.
MANY_HEADS = 64
# What 256 tokens behind 8,192 have with 128 heads, in round numbers: expanded they took a layer 1.7 ms of an H200, to
# attend to latents 2.6. From there on a device is thought to take longer for a layer than a host to launch it.
WORTH_LAUNCHING = 1 << 28
PATHS = ("mqa", "mha", "mha_one_shot", "mha_chunked")


@dataclass(frozen=True)
class MLAThresholds:
    """Where the path changes, in tokens summed over the batch.

    Parameters
    ----------
    prefix : int
        From this many cached tokens on, an extend may expand its prefix instead of attending to latents.
    one_shot : int
        Up to this many tokens (prefix and new) are expanded at once; more go chunk by chunk.
    chunk : int
        Expanded prefix tokens held at a time.
    few : int, optional
        Up to this many new tokens that a cached or new token meets in the mean over the batch (where all requests have
        as many: of each), an extend attends to latents however long its prefix is. Default: as measured for the heads.
    uncaptured : int
        From so many pairs of a new token and one that it may meet on, times heads, an extend that would expand its
        prefix runs uncaptured, where it can: captured ones attend to latents.
    """

    prefix: int = 1
    one_shot: int = 131072
    chunk: int = 131072
    few: int | None = None
    uncaptured: int = WORTH_LAUNCHING

    def __post_init__(self) -> None:
        check_fields("MLAThresholds", self)
        check_positive("MLAThresholds", prefix=self.prefix, one_shot=self.one_shot, chunk=self.chunk)
        check_positive("MLAThresholds", few=1 if self.few is None else self.few)
        check_positive("MLAThresholds", uncaptured=self.uncaptured)

    def few_of(self, heads: int) -> int:
        """Return ``few`` for so many heads: expanded keys of few heads are small, and their products slow."""
        return (128 if heads >= MANY_HEADS else 256) if self.few is None else self.few


def select_path(batch: AttentionBatch, thresholds: MLAThresholds, heads: int) -> str:
    """Return the path for a batch: one of :data:`PATHS`. Pure, host data only.

    Batches with left padding (``starts``) or trees go to ``"mqa"``, the only path that masks them.
    """
    if batch.is_decode or batch.is_padded or batch.parents:
        return "mqa"
    prefix = sum(batch.prefix_lens)
    if prefix == 0:
        return "mha"
    tokens = sum(batch.seq_lens)
    met = sum(map(mul, batch.query_lens, batch.seq_lens))
    if prefix < thresholds.prefix or met <= tokens * thresholds.few_of(heads):
        return "mqa"
    return "mha_one_shot" if tokens <= thresholds.one_shot else "mha_chunked"


def outweighs_capture(batch: AttentionBatch, thresholds: MLAThresholds, heads: int) -> bool:
    """Return whether a batch had better expand its prefix in an uncaptured step. Pure, host data only."""
    pairs = sum(map(mul, batch.query_lens, batch.seq_lens))
    if pairs * heads < thresholds.uncaptured:
        return False
    return select_path(batch, thresholds, heads) in ("mha_one_shot", "mha_chunked")


def prefix_chunks(prefix_lens: tuple[int, ...], capacity: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the prefixes of a batch into chunks of at most ``capacity`` tokens over the whole batch.

    Returns
    -------
    list of (starts, lengths)
        Chunk i of a request is ``[i·c, min(prefix, (i+1)·c))`` with ``c = capacity // batch`` (at least 1); lengths
        are 0 for requests that ended. Edges need not be page-aligned: rows are gathered by token.
    """
    if not prefix_lens:
        return []
    step = max(1, capacity // len(prefix_lens))
    chunks = []
    for first in range(0, max(prefix_lens), step):
        starts = tuple(min(first, prefix) for prefix in prefix_lens)
        lengths = tuple(max(0, min(prefix, first + step) - first) for prefix in prefix_lens)
        chunks.append((starts, lengths))
    return chunks


@dataclass(frozen=True)
class Part:
    """Tokens that are expanded at once.

    ``slots``: int64 ``[S]``, the cached row of each token attended to. ``lens``: the ragged lengths of the pass.
    """

    slots: torch.Tensor
    lens: RaggedLengths


class Expansion:
    """What an expanded path reads in one step: host work done once for all layers, see ``AttentionMeta.plan_of``."""

    def __init__(self, path: str, chunk: int) -> None:
        self.path, self.chunk = path, chunk
        self.parts: tuple[Part, ...] = ()

    def plan(self, meta: AttentionMeta) -> None:
        """Compute slots and lengths; copies a few short tensors to the device."""
        batch, device = meta.batch, meta.page_table.device
        new, none = batch.query_lens, (0,) * len(batch.query_lens)
        if self.path == "mha_one_shot":
            lens = RaggedLengths.of(new, batch.seq_lens, True, device)
            self.parts = (Part(token_slots(meta, none, batch.seq_lens), lens),)
            return
        parts = [Part(meta.out_cache_loc, RaggedLengths.of(new, new, True, device))]
        for starts, lengths in prefix_chunks(batch.prefix_lens, self.chunk) if self.path == "mha_chunked" else ():
            parts.append(Part(token_slots(meta, starts, lengths), RaggedLengths.of(new, lengths, False, device)))
        self.parts = tuple(parts)


def token_slots(meta: AttentionMeta, starts: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the slots, int64 ``[sum(lengths)]``, of each request's tokens ``[start, start + length)``."""
    device, host = meta.page_table.device, torch.device("cpu")
    counts, first = (torch.tensor(each, dtype=torch.int64, device=host) for each in (lengths, starts))
    request = torch.repeat_interleave(torch.arange(len(lengths), device=host), counts)
    offsets = torch.cumsum(counts, 0) - counts
    position = torch.arange(sum(lengths), device=host) + (first - offsets)[request]
    request, position = request.to(device), position.to(device)
    page = meta.page_table[request, position // meta.page_size].long()
    return page * meta.page_size + position % meta.page_size
