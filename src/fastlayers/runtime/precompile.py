"""What a warm-up compiles side by side: one layer of each kind, at token counts that together stand for all.

token counts of a layer      powers of two and what lies between, both sides of its ladder's edges
captured extends             attention in each bucket, with bounds from the bucket and from the state's size
other steps of attention     one of each kind that its ladders and backends tell apart, in tables as wide as the
                             state's: see attention_steps.py; without a state, decode in every class of context
prefixes in chunks           expanded behind a cached page, if steps may be as long as that takes (MLA)
what a package asks          counts that its backend names (``token_counts``): its kernels follow rules of its own
threads                      Triton's compiler lets others run while it works; other packages have one thread each,
                             after the modules that they say they need: see package_builds.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fastlayers import env
from fastlayers.attention.buckets import ExtendBucket, ExtendBuckets
from fastlayers.attention.context_buckets import CONTEXTS
from fastlayers.attention.examples import long_prefix_example
from fastlayers.layer import Layer
from fastlayers.registry import Backend, Choice
from fastlayers.runtime import builds
from fastlayers.runtime.attention_steps import Step, arguments, most_of, of_each_kind
from fastlayers.runtime.package_builds import PackageBuilds
from fastlayers.runtime.streams import side_stream
from fastlayers.tuning.probe import choices_of

# Calls of more tokens run one after another: several at once may not fit beside the model.
SIDE_BY_SIDE, THREADS = 4096, 8
# Multiples of it, without their whole parts, are spread evenly over 0 to 1.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Job:
    """One call of one layer: what it is, what it runs, and the package that may have to compile for it."""

    label: str
    tokens: int
    package: str
    call: Callable[[], Any]


def cover(most: int, edges: Iterable[int] = (), named: Iterable[int] = ()) -> list[int]:
    """Return token counts up to ``most`` which together need what every count does, the largest first.

    Parameters
    ----------
    most : int
    edges : iterable of int
        Thresholds of ladders: a count on each side.
    named : iterable of int
        These, too.
    """
    found = {1, 2, 3, most, *named}
    power = 4
    while power <= most:
        found |= {power, power + 1, power + power // 2}
        power *= 2
    for edge in edges:
        found |= {edge, edge + 1}
    return sorted((count for count in found if 1 <= count <= most), reverse=True)


def representatives(module: Any) -> list[tuple[str, Layer]]:
    """Return one layer of each kind inside ``module``: same class, same configuration, same choices."""
    found: dict[Any, tuple[str, Layer]] = {}
    for name, layer in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(layer, Layer) and hasattr(layer, "choice"):
            kind = (type(layer), repr(layer.cfg), *((c.layer, c.name, repr(c.cfg)) for c in choices_of(layer)))
            found.setdefault(kind, (name or type(layer).__name__, layer))
    return list(found.values())


def packages_at(choices: Sequence[Choice], tokens: int) -> str:
    """Return the package that may compile for this many tokens; ``"triton"`` if none does."""
    for choice in choices:
        for package in builds.compiling(choice.rung_for(tokens).backend):
            return package
    return "triton"


def jobs_of(
    label: str,
    layer: Layer,
    examples: Callable[[Any, int], list[tuple[Any, ...]]],
    max_tokens: int,
    max_batch: int,
    step: Any = None,
) -> Iterator[Job]:
    """Yield the calls of one layer; ``examples(layer, count)`` returns its arguments.

    ``step`` has what captures extends: its ``extend_buckets``, and the ``state`` whose size their kernels depend on.
    """
    state, attention, core = getattr(step, "state", None), hasattr(layer, "decode_choice"), cast("Any", layer)
    positions = getattr(getattr(layer, "rotary", None), "max_position", max_tokens)
    kinds: list[Step] = []
    if attention and state is not None:
        kinds += of_each_kind(layer, state, max_tokens, max_batch, positions)
    contexts = [context for context in CONTEXTS if context < positions] or [positions - 1]
    for context in contexts if attention and state is None else ():
        core.core(Step(1, 1, 1, context + 1), 1)
    choices = list(choices_of(layer))  # only now: ladders of all contexts and phases were built for the kinds
    rungs = [(rung, choice.cfg) for choice in choices for rung in choice.rungs]
    edges = [rung.max_tokens for rung, _ in rungs if rung.max_tokens is not None]
    named = [count for rung, cfg in rungs for count in _named(rung.backend, cfg, max_tokens)]

    def calls(count: int) -> None:
        for inputs in examples(layer, count):
            layer(*inputs)

    for count in cover(min(max_tokens, positions), edges, named):
        yield Job(f"{label} {count}", count, packages_at(choices, count), lambda n=count: calls(n))  # type: ignore[misc]
    if not attention:
        return
    requests, reach = (max_batch, positions) if state is None else most_of(state, max_batch, positions)
    if path := core.long_prefix(requests * reach):
        size = core.cfg.page_size
        for count in cover(min(max_tokens, reach - size), edges, named):
            call = partial(_call, layer, long_prefix_example, count, path)
            yield Job(f"{label} {count} behind chunks", count, packages_at(choices, count), call)
    if state is None:
        for context in contexts:
            for count in cover(max_batch, edges):
                call = partial(_call, layer, _decode, count, context)
                yield Job(f"{label} {count} × {context}", count, packages_at(choices, count), call)
        return
    for kind in kinds:
        words = f"{label} {kind.requests} × {kind.max_query_len} to {kind.max_seq_len}"
        call = partial(_call, layer, _of_kind, kind, state)
        yield Job(words, kind.num_tokens, packages_at(choices, kind.num_tokens), call)
    for bucket in _buckets(step, max_tokens, max_batch):
        call = partial(_call, layer, _extend, bucket, state)
        words = f"{label} {bucket.tokens} of {bucket.requests} requests"
        yield Job(words, bucket.tokens, packages_at(choices, bucket.tokens), call)


def _named(backend: Backend, cfg: Any, most: int) -> Iterable[int]:
    """Return the counts at which a backend's launches differ by rules that are not ours, where it knows them."""
    of = getattr(backend.load(), "token_counts", None)
    found: Iterable[int] = () if of is None else of(cfg, most)
    return found


def _call(layer: Layer, inputs: Callable[..., tuple[Any, ...]], *of: Any) -> Any:
    return layer(*inputs(layer, *of))


def _buckets(step: Any, max_tokens: int, max_batch: int) -> list[ExtendBucket]:
    """Return the buckets that steps of so many tokens and requests may take."""
    buckets: ExtendBuckets = getattr(step, "extend_buckets", None) or ExtendBuckets((), ())

    def reached(sizes: Sequence[int], most: int) -> set[int]:
        return {size for size, smaller in zip(sizes, (0, *sizes), strict=False) if smaller < most}

    tokens, requests = reached(buckets.tokens, max_tokens * max_batch), reached(buckets.requests, max_batch)
    return [bucket for bucket in buckets.every() if bucket.tokens in tokens and bucket.requests in requests]


def _decode(layer: Any, requests: int, context: int) -> tuple[Any, ...]:
    """Return the arguments of a decode step; all requests read the same pages."""
    from fastlayers.attention.meta import AttentionBatch, AttentionState

    size = layer.cfg.page_size
    pages = -(-(context + 1) // size)
    x, cache = _rows_and_cache(layer, requests, pages)
    device = x.device
    batch = AttentionBatch((1,) * requests, (context,) * requests, [list(range(1, pages + 1))] * requests)
    return x, AttentionState(requests, requests, pages, size, device).plan(batch).vouch(), cache


def _extend(layer: Any, bucket: ExtendBucket, like: Any) -> tuple[Any, ...]:
    """Return the arguments of an extend in a bucket, in which nobody asks anything; ``like``: the state to resemble."""
    from fastlayers.attention.meta import AttentionBatch, AttentionState

    x, cache = _rows_and_cache(layer, bucket.tokens, 0)
    state = AttentionState(like.max_batch, like.max_tokens, like.max_pages, like.page_size, x.device)
    return x, state.plan(AttentionBatch((), (), []), bucket=bucket), cache


def _of_kind(layer: Any, step: Step, like: Any) -> tuple[Any, ...]:
    """Return the arguments of a step; all requests read and write the same page."""
    x, cache = _rows_and_cache(layer, step.num_tokens, 1)
    return arguments(layer, step, like, x, cache)


def _rows_and_cache(layer: Any, tokens: int, pages: int) -> tuple[torch.Tensor, Any]:
    from fastlayers.attention.kv_cache.spec import kv_cache_spec

    device = next((p.device for p in layer.parameters()), layer.device_type)
    spec = kv_cache_spec(layer, page_size=layer.cfg.page_size, dtype=layer.cfg.kv_dtype)
    x = torch.zeros(tokens, layer.hidden_size, dtype=layer.cfg.dtype, device=device)
    return x, spec.allocate(pages + 1, device)[0]


def run(
    jobs: Sequence[Job],
    advance: Callable[[str], None],
    *,
    threads: int = THREADS,
    modules: PackageBuilds | None = None,
) -> dict[str, float]:
    """Run jobs: those of few tokens side by side, the rest one after another; the first error ends it.

    Jobs of one package are never at work at the same time, except Triton's; with Triton's interpreter, whose place in a
    grid is one for all threads, no two jobs are. Neighbours need the same kernels, and who needs one that is being
    compiled waits: so jobs come from all over the list. Those of a package wait for its ``modules``, which are built
    meanwhile, and are left out where one of these failed; whatever ends this early ends those builds.

    Returns
    -------
    dict[str, float]
        For each package the seconds after which its last job of few tokens had ended: whom a warm-up waited for.
    """
    begin, ended = time.perf_counter(), {}
    small = [
        job for _, job in sorted(enumerate(jobs), key=lambda job: job[0] * GOLDEN % 1) if job.tokens <= SIDE_BY_SIDE
    ]
    packages = dict.fromkeys(job.package for job in small)
    one = ThreadPoolExecutor(1) if env.triton_interpret() else None
    pools = {name: one or ThreadPoolExecutor(threads if name == "triton" else 1) for name in packages}
    stopped: list[BaseException] = []
    cuda = torch.cuda.is_available()
    device = torch.cuda.current_device() if cuda else -1

    def stop(error: BaseException) -> None:
        stopped.append(error)
        if modules is not None:
            modules.stop()

    def work(job: Job) -> None:
        if stopped:
            return
        waits = modules.waiting(job.package) if modules is not None else ""
        advance(f"{job.label}, which waits for {waits}" if waits else job.label)
        try:
            if modules is not None and not modules.ready(job.package):
                return
            with torch.inference_mode():
                if cuda:
                    # A new thread is on the first GPU, whichever the caller is on.
                    with torch.cuda.device(device), torch.cuda.stream(side_stream()):
                        job.call()
                else:
                    job.call()
        except BaseException as error:
            stop(error)
            raise
        if job.tokens <= SIDE_BY_SIDE:
            ended[job.package] = time.perf_counter() - begin

    if cuda:
        torch.cuda.synchronize()  # weights are there before other streams read them
    try:
        done = [pools[job.package].submit(work, job) for job in small]
        for each in done:
            each.result()
    except BaseException as error:  # an interrupt, too: what is not begun yet is left
        stop(error)
        raise
    finally:
        for pool in pools.values():
            pool.shutdown()
    for job in jobs:
        if job.tokens > SIDE_BY_SIDE:
            work(job)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return ended
