"""One step's requests on the host, checked where they are written down: lengths, and the pages of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from fastlayers.errors import ArgumentError, check_plain, describe

MAX_TREE = 62  # new tokens of a request in a tree: bits of a positive int64


def _as_tuple(lengths: Any) -> object:
    # An array is no Sequence, but has dimensions.
    return tuple(lengths) if isinstance(lengths, Sequence) or getattr(lengths, "ndim", False) else lengths


@dataclass(frozen=True)
class AttentionBatch:
    """One step's requests, on the host.

    Parameters
    ----------
    query_lens : tuple[int, ...]
        New tokens of each request; 0 is allowed.
    prefix_lens : tuple[int, ...]
        Tokens of each request that are cached already.
    page_table : Sequence[Sequence[int]] or ndarray
        Pages of each request, at least enough for prefix + new tokens: integers, Python's or NumPy's, and no flags;
        page 0 is nobody's, so a new token has none there. As an array of integers ``[B, P]``, with 0 behind each
        request's pages, many requests cost the host least.
    starts : tuple[int, ...]
        First position of each request that counts (left padding); default 0.
    parents : tuple[tuple[int, ...], ...]
        Of each request's new tokens, the one before it among them, or -1: the prefix. A tree, of at most
        :data:`MAX_TREE` tokens a request, each behind its parent; positions count from the prefix on along each path,
        rows of the cache stand in the order of the tokens. Default: each token follows the one before it.

    Attributes
    ----------
    is_decode : bool
        Whether every request brings exactly one token.
    is_padded : bool
        Whether some request begins with tokens that do not count.
    phase : str
        ``"padded"`` or ``"tree"``, else ``"decode"`` or ``"extend"``.
    """

    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    page_table: Sequence[Sequence[int]] | np.ndarray[Any, Any]
    starts: tuple[int, ...] = ()
    parents: tuple[tuple[int, ...], ...] = ()
    is_decode: bool = field(init=False, repr=False, compare=False)
    is_padded: bool = field(init=False, repr=False, compare=False)
    phase: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            self._check()
        except ArgumentError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # looked into only now: a batch is made in every step
            lengths = {"query_lens": self.query_lens, "prefix_lens": self.prefix_lens, "starts": self.starts}
            check_plain("AttentionBatch", "tuple[int, ...]", **{n: _as_tuple(v) for n, v in lengths.items()})
            raise ArgumentError(
                "AttentionBatch", "page_table", describe(self.page_table), "pages by request"
            ) from error

    def _check(self) -> None:
        count = len(self.query_lens)
        if len(self.prefix_lens) != count or len(self.page_table) != count or len(self.starts) not in (0, count):
            lengths = (count, len(self.prefix_lens), len(self.page_table), len(self.starts))
            raise ArgumentError("AttentionBatch", "lengths", lengths, "one query, prefix, page row (and start) each")
        if count and (min(self.query_lens) < 0 or min(self.prefix_lens) < 0):
            raise ArgumentError(
                "AttentionBatch", "query_lens, prefix_lens", (self.query_lens, self.prefix_lens), ">= 0"
            )
        # What is no integer among them makes the sum none: a fraction, a TypeError; NumPy's numbers become Python's.
        try:
            plain = type(sum(self.query_lens, sum(self.prefix_lens, sum(self.starts)))) is int
        except OverflowError:  # one of Python's that NumPy's small ones cannot hold
            plain = False
        if not plain:
            for name in ("query_lens", "prefix_lens", "starts"):
                object.__setattr__(self, name, tuple(map(index, getattr(self, name))))
        if self.starts and not all(0 <= s <= n for s, n in zip(self.starts, self.seq_lens, strict=True)):
            raise ArgumentError("AttentionBatch", "starts", self.starts, f"0 to each request's length {self.seq_lens}")
        if self.parents:
            self._check_tree()
        # Asked by every layer of a step.
        object.__setattr__(self, "is_decode", not self.parents and all(q == 1 for q in self.query_lens))
        object.__setattr__(self, "is_padded", any(self.starts))
        phase = "tree" if self.parents else "padded" if self.is_padded else "decode" if self.is_decode else "extend"
        object.__setattr__(self, "phase", phase)

    def _check_tree(self) -> None:
        sizes = tuple(map(len, self.parents))
        grows = all(-1 <= parent < place for tree in self.parents for place, parent in enumerate(tree))
        if sizes != self.query_lens or max(sizes) > MAX_TREE or not grows or any(self.starts):
            accepted = f"for each new token one before it, or -1; at most {MAX_TREE} a request, without starts"
            raise ArgumentError("AttentionBatch", "parents", self.parents, accepted)

    def tree(self) -> tuple[list[int], list[int]]:
        """Return of each new token how many are before it on its path, and the set of them and itself, in bits."""
        depths: list[int] = []
        seen: list[int] = []
        for tree in self.parents:
            first = len(depths)
            for place, parent in enumerate(tree):
                depths.append(0 if parent < 0 else depths[first + parent] + 1)
                seen.append(1 << place | (0 if parent < 0 else seen[first + parent]))
        return depths, seen

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Length of each request including the new tokens."""
        return tuple(p + q for p, q in zip(self.prefix_lens, self.query_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """New tokens of the whole step."""
        return sum(self.query_lens)
