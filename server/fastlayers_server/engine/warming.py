"""What runs before requests come, so that nothing is compiled or met for the first time later; how long it takes."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.buckets import TOKENS
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.runtime import precompile
from fastlayers.runtime.kernel_cache import STORES, cached_kernels
from fastlayers.sampler.layer import Sampler
from fastlayers_server.engine.budget import Seconds
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.executor import BETWEEN, TorchExecutor
from fastlayers_server.engine.grammar import GrammarMasks
from fastlayers_server.engine.protocol import Sampling, Submit
from fastlayers_server.engine.request import Chunk, Request
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.engine.step import GREEDY, LOGITS

log = logging.getLogger(__name__)
LONG = 0.02  # seconds that steps are run again for, twice at most
BASE = 1024  # tokens of an extend with rows
STRIDE = 7919  # from one id of a measured step to the next: tokens that have nothing in common


@torch.inference_mode()
def measure(executor: TorchExecutor, scheduler: Scheduler) -> tuple[Seconds, Seconds, Seconds]:
    """Return the seconds of extends by tokens, of decode steps by rows, and what rows add to an extend, if they may.

    All over pages that nobody has yet. Each token differs and each row has pages of its own, as far as there are any:
    the same one would choose the same experts, and the same page would be read from the device's cache.
    """
    config, table, tokens = scheduler.config, executor.decoding.pages, executor.decoding.table.tokens
    extends, decodes, besides = {}, {}, {}
    columns = np.arange((config.max_running + 1) * table.shape[1]).reshape(-1, table.shape[1])
    table[1:] = 1 + columns[: len(table) - 1] % (config.num_pages - 1)
    spread = torch.arange(tokens.shape[0]) * STRIDE % config.vocab_size
    sizes = sorted({*TOKENS, *BETWEEN, 4096, 8192, 16384})  # what steps are padded to, and beyond
    longest = config.max_model_len - 1
    # Of several prompts, at most as many as may run.
    for size in [size for size in sizes if size <= min(config.max_batched_tokens, config.max_running * longest)]:
        count = -(-size // longest)
        parts = [_nobodys(size // count, 1 + part % config.max_running, config.vocab_size) for part in range(count)]
        chunks = [Chunk(request, 0, request.tokens, 1) for request in parts]
        extends[size] = _seconds(lambda chunks=chunks: executor.extending.extend_chunks(chunks, LOGITS))  # type: ignore[misc]
    if executor.verify_tokens and executor.extending.graphs is None:  # captured ones ran before
        request = _nobodys(3, 1, config.vocab_size)
        parents = (-1, 0, 0) if executor.mtp is not None and executor.mtp.topk > 1 else ()
        executor.extending.extend_chunks([Chunk(request, 0, request.tokens, 3, parents)], executor.rule)
    base = max((size for size in extends if size <= min(BASE, config.max_model_len - 1)), default=0)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    for size in sorted({min(size, config.max_running) for size in sizes}):
        rows = [_nobodys(1, 1 + row, config.vocab_size) for row in range(size)]
        starts = [min(1024, config.max_model_len // 2)] * size
        tokens.copy_(spread)
        decodes[size] = _seconds(lambda rows=rows, starts=starts: executor.decoding.decode(rows, starts, GREEDY))  # type: ignore[misc]
        if config.mixed and base and config.max_running > 1:
            rows, starts = rows[: config.max_running - 1], starts[: config.max_running - 1]
            request = _nobodys(max(1, base - size), config.max_running, config.vocab_size)
            both = [Chunk(request, 0, request.tokens, 1)], LOGITS, rows, starts
            took = _seconds(lambda both=both: executor.extending.extend_chunks(*both))  # type: ignore[misc]
            besides[size] = max(0.0, took - extends[base])
    table[:] = 0
    executor.extending.uncaptured.clear()
    executor.decoding.uncaptured.clear()
    for what, found in (("extends by tokens", extends), ("decode steps by rows", decodes), ("rows in them", besides)):
        log.info("start: ms of %s: %s", what, ", ".join(f"{size}: {1e3 * took:.1f}" for size, took in found.items()))
    return extends, decodes, besides


def tails(config: SchedulerConfig) -> list[tuple[int, int]]:
    """Return (new tokens, length) of extends which together need the kernels of every short one behind a prefix.

    How many programs share a row's keys follows from both, and each such number is a kernel of its own.
    """
    lengths = [512 << power for power in range(32) if 512 << power < config.max_model_len]
    counts = [count for count in (2, 4, 8, 16, 32, 64) if count <= config.max_batched_tokens]
    return [(count, length) for length in (*lengths, config.max_model_len) for count in counts if count < length]


class Kernels:
    """What :func:`fastlayers.warmup` is given instead of the model: its layers and the sampler, each kind alone.

    Whole steps run before they are captured, and what is not captured when it is measured.
    """

    def __init__(self, model: Any, limits: SchedulerConfig) -> None:
        self.model = nn.ModuleDict({"model": model, "sampler": Sampler(limits.vocab_size, device=model.device)})
        self._limits, self.max_length = limits, limits.max_model_len

    def warm_up_calls(self, tokens: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what layers do not run by themselves."""
        yield "extends behind prefixes", lambda: behind_prefixes(self, self._limits)


def warm_up(model: Any, limits: SchedulerConfig, said: Callable[[str], None]) -> None:
    """Build, compile or load what the model's layers need for steps of any size; ``said`` is told what that was."""
    kernels, store = Kernels(model, limits), STORES["triton"]
    before = cached_kernels() | store.kernels()
    report = fl.warmup(kernels, max_tokens=limits.most_tokens, max_batch=limits.max_running, progress=False)
    report.watch.close()
    for label, seconds, kernels in report.steps:
        log.info("start: %6.2f s of them: %s, %d kernels compiled or loaded", seconds, label, kernels)
    new = len((cached_kernels() | store.kernels()) - before)
    said(f"kernels: {report.kernels}, {new} of them compiled, {len(report.probed)} shapes probed")


@torch.inference_mode()
def behind_prefixes(steps: Any, config: SchedulerConfig) -> None:
    """Run prompts and the :func:`tails` through each kind of attention in ``steps.model``, as uncaptured steps do."""
    pages = -(-config.max_model_len // config.page_size)  # kernels may know how long a request can become
    most = min(config.max_batched_tokens, config.max_model_len)
    prompts = {1 << power for power in range(most.bit_length())} | {most}
    attention: list[Any] = [
        each for _, each in precompile.representatives(steps.model) if hasattr(each, "decode_choice")
    ]
    for layer in attention:
        device = next(layer.parameters()).device
        cache = fl.kv_cache_spec(layer, page_size=config.page_size, dtype=layer.cfg.kv_dtype).allocate(2, device)[0]
        state = AttentionState(1, most, pages, config.page_size, device)
        for count, length in [*((count, count) for count in sorted(prompts, reverse=True)), *tails(config)]:
            x = torch.zeros(count, layer.hidden_size, dtype=layer.cfg.dtype, device=device)
            batch = AttentionBatch((count,), (length - count,), [[1] * -(-length // config.page_size)])
            layer(x, state.plan(batch).vouch(), cache)


@torch.inference_mode()
def draw_specially(executor: TorchExecutor, grammars: GrammarMasks | None) -> None:
    """Draw with every wish that a request may have, for one, few and many: the first who has it should not wait.

    A grammar's mask is a kernel of its package for each of these; others are loaded when they are first launched.
    """
    config, special, model = executor.config, executor.special, executor.model
    wishes = Sampling(0.7, 5, 0.9, 0.01, 0, 0.1, 0.1, 1.1, ((0, 1.0),))
    told = config.max_logprobs
    request = Request(Submit(0, b"", wishes, 4, 2, logprobs=told), 0, [0, 1, 2], frozenset({0}), 0)
    request.slot = 1
    special.admit(request)
    first = next(model.parameters())  # of the embedding
    hidden = torch.zeros(16, model.config.hidden_size, dtype=first.dtype, device=first.device)
    for count in sorted({min(count, config.max_running) for count in (1, 2, 16)}):
        asked = [(place, request, 0) for place in range(count)]
        logits = model.compute_logits(hidden[:count])
        masks = None if grammars is None else grammars.open(count)
        for mode in (GREEDY, "filtered"):  # of logits in fp32, which those without wishes are not
            tokens = special.draw(logits, [executor.decoding.nobody] * count, asked, masks, mode)
            special.logprobs(logits, tokens, asked)
    special.prompt_logprobs(model, hidden[:3], [0, 1, 2], told)
    special.history.zero_()


def _nobodys(length: int, slot: int, vocab_size: int) -> Request:
    """Return a request that nobody made, in a slot that is given anew before it counts."""
    ids = [(slot * length + place) * STRIDE % vocab_size for place in range(length)]
    request = Request(Submit(0, b"", Sampling(temperature=0.0)), 0, ids, frozenset(), 0)
    request.slot = slot
    return request


def _seconds(run: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()
    wait()
    took: list[float] = []
    while len(took) < 3 and sum(took) < LONG:
        begin = time.perf_counter()
        run()
        wait()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)
