"""Which uncaptured steps of an attention layer a warm-up runs: one of each kind, so that no other kind is left.

    kind     the core that a step's ladder picks, and what that core says of the step in ``kernels_of``: constants of
             its kernels, and numbers of which Triton compiles in whether they are 1 or divide by 16
    steps    requests × new tokens of the longest × all new tokens × longest request, of every rung and context

Derived from the ladders that the layer holds, rung by rung, so that a table with other rungs needs no other list. Of a
core that says nothing (a package's, which compiles once a configuration) one step of each phase is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch

from fastlayers.attention.batch import AttentionBatch
from fastlayers.attention.context_buckets import CONTEXTS, context_of
from fastlayers.tuning.probe import choices_of


class Step(NamedTuple):
    """What of a step is known on the host, as its metadata names it; ``keys``: the longest request's.

    ``captured``: decode of a bucket, whose bound is the state's capacity, whatever a request can hold.
    """

    requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    captured: bool = False
    # As of metadata.
    is_extend_bucket: bool = False
    tree: None = None

    @property
    def phase(self) -> str:
        """``"decode"`` or ``"extend"``."""
        return "decode" if self.max_query_len == 1 else "extend"

    @property
    def context(self) -> int:
        """The class of the longest request."""
        return context_of(self.max_seq_len)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request, the most of the first."""
        left, others = self.num_tokens - self.max_query_len, self.requests - 1
        return (self.max_query_len, *(left // others + (place < left % others) for place in range(others)))

    def meta(self, like: Any, device: torch.device) -> Any:
        """Return the metadata of such a step in tables as wide as those of the state ``like``, all of one page."""
        from fastlayers.attention.meta import AttentionState

        state = AttentionState(self.requests, self.num_tokens, like.max_pages, like.page_size, device)
        if self.captured:
            return state.plan(AttentionBatch((), (), []), bucket=self.requests)
        queries = self.query_lens
        prefixes = (self.max_seq_len - queries[0], *[0] * (self.requests - 1))
        ends = [query + prefix for query, prefix in zip(queries, prefixes, strict=True)]
        return state.plan(AttentionBatch(queries, prefixes, [[1] * -(-end // like.page_size) for end in ends]))


def of_each_kind(layer: Any, state: Any, max_tokens: int, max_batch: int, positions: int) -> Iterator[Step]:
    """Yield steps of up to so many tokens and requests which together need the kernels of every uncaptured one.

    Decode of buckets is among them, as one that is met for the first time is captured then.

    Parameters
    ----------
    layer : AttentionCore
    state : AttentionState
        Whose size bounds steps, and is compiled into kernels.
    max_tokens, max_batch : int
    positions : int
        Of the rotary embedding.
    """
    seen: set[Hashable] = set()
    most, reach = most_of(state, max_batch, positions)
    for step in chain(_decodes(layer, state, reach, most), _extends(layer, state, reach, most, max_tokens)):
        if (kind := kind_of(layer, step)) not in seen:
            seen.add(kind)
            yield step


def most_of(state: Any, max_batch: int, positions: int) -> tuple[int, int]:
    """Return the most requests of a step, and the most tokens of one."""
    return min(max_batch, state.max_batch), min(state.capacity, positions)


def kind_of(layer: Any, step: Step) -> Hashable:
    """Return what is equal for steps that need the same kernels; of numbers what Triton compiles in, see launch.py."""
    core, constants, numbers = _launched(layer, step)
    return core, step.phase, constants, *((number == 1, number % 16 == 0) for number in numbers)


def _launched(layer: Any, step: Step) -> tuple[Any, Hashable, tuple[int, ...]]:
    core = layer.core(step, step.num_tokens)
    of = getattr(core, "kernels_of", None)
    constants, numbers = ((), ()) if of is None else of(step.requests, step.max_query_len, step.max_seq_len)
    return core, constants, numbers


def _decodes(layer: Any, state: Any, reach: int, most: int) -> Iterator[Step]:
    # Behind contexts of one class, which share a ladder.
    ends = [0, *(2 * context for context in CONTEXTS[:-1] if 2 * context < reach), reach]
    for requests in range(1, most + 1):
        for low, high in pairwise(ends):
            yield from _changes(partial(Step, requests, requests, 1), layer, low + 1, high)
        if state.capacity > reach:
            yield Step(requests, requests, 1, state.capacity, captured=True)


def _extends(layer: Any, state: Any, reach: int, most: int, max_tokens: int) -> Iterator[Step]:
    longest = min(reach, state.max_tokens, max_tokens)
    # Tiles follow the power of two of the longest, rungs the tokens of all.
    powers = [1 << power for power in range(longest.bit_length())]
    queries = sorted({count for power in powers for count in (power, power + 1, longest) if 1 < count <= longest})
    for each in queries:
        layer.core(Step(1, each, each, each), each)  # builds the ladder of such steps
    edges = [r.max_tokens for choice in choices_of(layer) for r in choice.rungs if r.max_tokens is not None]
    for each in queries:
        for requests in range(1, min(most, state.max_tokens - each + 1) + 1):
            least, all_tokens = each + requests - 1, min(each * requests, state.max_tokens)
            for tokens in sorted({least, *(edge + 1 for edge in edges if least <= edge < all_tokens)}):
                yield from _changes(partial(Step, requests, tokens, each), layer, each, reach)


def _changes(step_of: Callable[[int], Step], layer: Any, low: int, high: int) -> Iterator[Step]:
    """Yield the steps with which what is launched changes, from ``low`` to ``high`` keys: it never changes back."""
    found = {keys: _launched(layer, step_of(keys)) for keys in (low, high)}
    yield step_of(low)
    parts = [(low, high)]
    while parts:
        low, high = parts.pop()
        if high - low > 1 and found[low] != found[high]:
            middle = (low + high) // 2
            found[middle] = _launched(layer, step_of(middle))
            parts += [(low, middle), (middle, high)]
        elif found[low] != found[high]:
            yield step_of(high)


def arguments(layer: Any, step: Step, like: Any, x: torch.Tensor, cache: Any) -> tuple[Any, ...]:
    """Return the arguments of a layer's call; steps of several tokens attend to cached rows as they are."""
    meta = step.meta(like, x.device)
    forced = layer.core_path if not meta.is_decode else ""
    return x, (replace(meta, path=forced) if forced else meta).vouch(), cache
