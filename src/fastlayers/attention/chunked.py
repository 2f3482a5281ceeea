"""Attention in chunks: a token sees the keys of its own chunk of positions up to itself, and none before (Llama 4).

    chunk of position p = p // size        sees the positions  chunk · size … p

To a kernel that is full attention over other requests: each chunk that a request's new tokens touch is a request of its
own, whose pages are the chunk's and whose positions count from its beginning. So every backend can compute it, and the
cache, its slots and the rotation by absolute positions stay as they are. Chunks begin where pages do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers.attention.batch import AttentionBatch
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.meta import AttentionMeta, AttentionState, Bucket
from fastlayers.errors import ArgumentError

NAME = "Attention"


def check_chunk(size: int, page_size: int) -> None:
    """Raise :class:`ArgumentError` unless chunks of ``size`` tokens begin where pages do."""
    if size % page_size:
        accepted = f"a divisor of the attention chunk's {size} tokens"
        raise ArgumentError(NAME, "page_size", page_size, accepted)


def in_chunks(batch: AttentionBatch, size: int, page_size: int) -> AttentionBatch:
    """Return the same tokens in the same order, as one request a chunk that new tokens lie in.

    Raises
    ------
    ArgumentError
        The step has left padding or a tree of drafts.
    """
    if any(batch.starts) or batch.parents:
        given = "a tree of drafts" if batch.parents else f"left padding, starts {batch.starts}"
        raise ArgumentError(NAME, "meta.batch", given, "requests without, for attention in chunks")
    pages = size // page_size
    queries: list[int] = []
    prefixes: list[int] = []
    table: list[list[int]] = []
    for count, prefix, row in zip(batch.query_lens, batch.prefix_lens, batch.page_table, strict=True):
        for chunk in range(prefix // size, -(-(prefix + count) // size) if count else 0):
            begin, end = max(prefix, chunk * size), min(prefix + count, (chunk + 1) * size)
            queries.append(end - begin)
            prefixes.append(begin - chunk * size)
            table.append([int(page) for page in row[chunk * pages : (chunk + 1) * pages]])
    return AttentionBatch(tuple(queries), tuple(prefixes), table)


@dataclass
class ChunkedStep:
    """The metadata of a step in chunks, kept with the step's own: planned once a step, also before each replay.

    Attributes
    ----------
    meta : AttentionMeta
        For the core alone; keys and values are written by the step's own.
    """

    size: int
    device: torch.device
    state: AttentionState | None = None
    meta: AttentionMeta | None = None

    def plan(self, meta: AttentionMeta) -> None:
        """Bring :attr:`meta` up to date; buffers grow outside buckets only, whose addresses a graph holds."""
        batch = in_chunks(meta.batch, self.size, meta.page_size)
        bucket, tokens, requests = self._bucket(meta), max(1, meta.num_tokens), max(1, len(batch.query_lens))
        if isinstance(bucket, ExtendBucket):
            tokens, requests = bucket.tokens, bucket.requests
        elif bucket is not None:
            tokens = requests = bucket
        state = self.state
        if state is None or state.max_batch < requests or state.max_tokens < tokens:
            state = AttentionState(requests, tokens, self.size // meta.page_size, meta.page_size, self.device)
            self.state = state
        self.meta = state.plan(batch, bucket=bucket)
        self.meta.vouch()

    def _bucket(self, meta: AttentionMeta) -> Bucket:
        """Return the bucket in chunks: as many requests as its tokens can touch chunks."""
        given = meta.bucket
        if not isinstance(given, ExtendBucket):
            return given
        return ExtendBucket(
            given.tokens, min(given.tokens + given.requests, given.tokens // self.size + 2 * given.requests)
        )


def chunked(meta: AttentionMeta, size: int) -> AttentionMeta:
    """Return the metadata by which a core attends in chunks of ``size``; planned once a step for all layers."""
    found: ChunkedStep = meta.plan_of(("chunked", size), lambda own: ChunkedStep(size, own.positions.device))
    assert found.meta is not None
    return found.meta
