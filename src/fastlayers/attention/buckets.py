"""Buckets of extend steps: the sizes that a captured step of several new tokens a request is padded to.

    T = tokens of the bucket ≥ new tokens of the step        B = requests of the bucket ≥ requests of the step

Padding tokens belong to no request: ``cu_seqlens_q`` ends where they begin. Their position is 0, they write slot 0, and
padding requests have no tokens. Whatever depends on lengths lies on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastlayers.errors import ArgumentError, as_integers, check_fields, check_plain, check_positive

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
REQUESTS = (1, 2, 4, 8)
# Largest bucket of captured extends that attend to latents: 3.4 times the multiply-adds of expanded keys, which beyond
# it is more than the launches that a capture saves (benchmarks/first_token.py).
LATENT_TOKENS = 512
# Steps that verify drafts are captured for contexts up to so many tokens as well, where another backend attends then:
# beyond 1,000 to 1,300 FlashMLA takes no longer than Triton with 32 tokens and 64 or 128 heads
# (benchmarks/results/flashmla_h200.jsonl, on lines between contexts of 500 and 4,096).
SHORT_CONTEXT = 1024


@dataclass(frozen=True)
class ExtendBucket:
    """What a captured extend step is padded to: so many tokens, of so many requests.

    ``each``: the most tokens that one request brings, where that is known; 0: as many as there are. ``tree``: tokens
    are trees of drafts, see :attr:`fastlayers.attention.batch.AttentionBatch.parents`. ``longest``: the most tokens,
    cached and new ones, of a request; 0: as many as the state holds.
    """

    tokens: int
    requests: int
    each: int = 0
    tree: bool = False
    longest: int = 0

    def __post_init__(self) -> None:
        check_positive("ExtendBucket", tokens=self.tokens, requests=self.requests)
        if not (
            type(self.tokens) is type(self.requests) is type(self.each) is type(self.longest) is int
        ):  # made in every step
            check_fields("ExtendBucket", self)
        if not 0 <= self.each <= self.tokens:
            raise ArgumentError("ExtendBucket", "each", self.each, f"0, or 1 to the bucket's {self.tokens} tokens")
        if self.longest < 0:
            raise ArgumentError("ExtendBucket", "longest", self.longest, "0, or the most tokens of a request")

    @property
    def most(self) -> int:
        """Most tokens of a request."""
        return self.each or self.tokens


@dataclass(frozen=True)
class ExtendBuckets:
    """Which extend steps are captured.

    Parameters
    ----------
    tokens, requests : tuple[int, ...]
        Sizes, ascending. Without tokens nothing is captured.
    max_padding : float
        Largest part of a bucket that may be padding, for buckets of more than ``free`` tokens: those cost time by the
        token, so that beyond it a step that is not captured is faster.
    free : int
        Buckets up to so many tokens take any padding: the host's time is what counts there.
    many : int
        Larger ones are of so many requests at least: their time is the tokens', and each size fewer is a graph fewer.
    """

    tokens: tuple[int, ...] = TOKENS
    requests: tuple[int, ...] = REQUESTS
    max_padding: float = 0.25
    free: int = 512
    many: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "requests"):
            sizes = getattr(self, name)
            check_plain("ExtendBuckets", "tuple[int, ...]", **{name: sizes})
            if list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
                raise ArgumentError("ExtendBuckets", name, sizes, "positive sizes, ascending")
        check_fields("ExtendBuckets", self)
        check_plain("ExtendBuckets", "int >= 0", free=self.free)
        check_positive("ExtendBuckets", many=self.many)
        if not 0.0 <= self.max_padding <= 1.0:
            raise ArgumentError("ExtendBuckets", "max_padding", self.max_padding, "0 to 1")

    def within(self, max_tokens: int, max_requests: int, multiple_of: int = 1) -> ExtendBuckets:
        """Return those that a state of this size holds, ``max_requests`` among them if the largest is not smaller.

        ``multiple_of``: the ranks of an attention group, whose parts of a step are equal.
        """
        check_positive("ExtendBuckets", max_tokens=max_tokens, max_requests=max_requests, multiple_of=multiple_of)
        max_tokens, max_requests, multiple_of = as_integers(max_tokens, max_requests, multiple_of)
        tokens = tuple(size for size in self.tokens if size <= max_tokens and size % multiple_of == 0)
        requests = tuple(size for size in self.requests if size < max_requests)
        if self.requests and self.requests[-1] >= max_requests:
            requests = (*requests, max_requests)
        return ExtendBuckets(tokens, requests, self.max_padding, self.free, self.many)

    def bucket_of(self, tokens: int, requests: int) -> ExtendBucket | str:
        """Return the bucket of a step, or in words why it has none."""
        if not self.tokens or not self.requests:
            return "there are no buckets for extends"
        if tokens > self.tokens[-1]:
            return f"more than {self.tokens[-1]} tokens, the largest bucket"
        if requests > self.requests[-1]:
            return f"more than {self.requests[-1]} requests, the largest bucket"
        size = _smallest(self.tokens, tokens)
        if size > self.free and size - tokens > self.max_padding * size:
            return f"more than {self.max_padding:.0%} of a bucket of {size} tokens would be padding"
        least = min(self.many, self.requests[-1]) if size > self.free else 1
        return ExtendBucket(size, _smallest(self.requests, max(requests, least)))

    def every(self, each: int = 1) -> list[ExtendBucket]:
        """Return the buckets that steps take of which each request brings so many tokens at least."""
        fewest = list(zip(self.requests, (0, *self.requests), strict=False))
        found = [(ExtendBucket(t, r), below + 1) for t in self.tokens for r, below in fewest]
        return [one for one, n in found if one.tokens >= each * n and self.bucket_of(one.tokens, n) == one]


def _smallest(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)
