"""What a warm-up of a generator runs, see :func:`fastlayers.warmup`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastlayers.attention.buckets import ExtendBucket
from fastlayers.errors import ArgumentError, as_integers, check_positive, describe
from fastlayers.runtime.graphs import bucket_of
from fastlayers_models.parts import StepKey

if TYPE_CHECKING:
    from fastlayers_models.generate import Generator

MODES = ("greedy", "filtered")  # that are captured


def warm_up_calls(generator: Generator, tokens: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the calls, see :meth:`fastlayers_models.generate.Generator.warm_up_calls`."""
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
        raise ArgumentError("warm_up_calls", "tokens", describe(tokens), "a sequence of token counts")
    for count in tokens:
        check_positive("warm_up_calls", tokens=count)
        (count,) = as_integers(count)
        bucket = bucket_of(generator.step.buckets, count)
        no_decode, no_prefill = _no_decode(generator, count, bucket), _no_prefill(generator, count)
        if no_decode and no_prefill:
            raise ArgumentError("warmup", "tokens", count, f"fewer: {no_decode}, {no_prefill}")
        if not no_decode:
            beside = f" (no prefill: {no_prefill})" if no_prefill else ""
            if bucket is not None:
                yield f"decode {bucket}{beside}", partial(_capture, generator, bucket)
            else:
                yield f"decode {count}{beside}", partial(_run, generator, [1] * count, 2)
        if not no_prefill:
            beside = f" (no decode: {no_decode})" if no_decode else ""
            yield f"prefill {count}{beside}", partial(_prefill, generator, count)
    if (tower := getattr(generator.model, "tower", None)) is not None:
        yield from tower.warm_up_calls(as_integers(*tokens))


def _no_decode(generator: Generator, count: int, bucket: int | None) -> str:
    """Return why a decode step of ``count`` requests cannot be warmed up, or nothing."""
    if count > generator.max_batch:
        return f"max_batch is {generator.max_batch}"
    # A capture needs no pages; without one, requests of one token generate two.
    if bucket is None and generator.max_length < 3:
        return f"max_length is {generator.max_length}"
    if bucket is None and count * -(-3 // generator.pool.page_size) >= generator.pool.num_pages:
        return f"the cache has {generator.pool.num_pages} pages"
    return ""


def _no_prefill(generator: Generator, count: int) -> str:
    """Return why a prompt of ``count`` tokens cannot be warmed up, or nothing."""
    if count >= generator.max_length:
        return f"max_length is {generator.max_length}"
    if -(-count // generator.pool.page_size) >= generator.pool.num_pages:
        return f"the cache has {generator.pool.num_pages} pages"
    return ""


def _capture(generator: Generator, bucket: int) -> None:
    """Capture a bucket of decode, unless the capture before it failed: its warning says how decode runs."""
    if generator.step.graphs is not None:
        generator.capture([bucket], MODES)


def _run(generator: Generator, lengths: list[int], new: int) -> None:
    generator.generate([[0] * length for length in lengths], max_new_tokens=new, eos_ids=())


@torch.inference_mode()
def _prefill(generator: Generator, count: int) -> None:
    """Run a prompt of so many tokens, and capture the buckets of its steps."""
    _run(generator, [count], 1)
    last = (count - 1) % generator.prefill_tokens + 1
    for tokens in {min(count, generator.prefill_tokens), last}:
        bucket = generator.step.extend_buckets.bucket_of(tokens, 1)
        if isinstance(bucket, ExtendBucket):
            keys = [StepKey("extend", bucket.tokens, bucket.requests, mode) for mode in MODES]
            with generator._alone("warm_up_calls"):
                generator.step.capture_extends(keys)
