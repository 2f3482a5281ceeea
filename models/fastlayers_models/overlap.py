"""A step's layers, whole or in two halves that take turns: what one sends is under way while the other computes.

    turn     current stream             stream of the exchanges
    0                                   A, B prepare_attn
    1        A attention
             B attention                A prepare_mlp
    2        A mlp                      B prepare_mlp
             B mlp                      A postprocess, prepare_attn of the next layer
    3        A attention                B postprocess, prepare_attn of the next layer          …

A decoder layer names its stages once (``DecoderLayer.STAGES``), and a whole step runs them one after another. Of two
halves every turn is A's, then B's, on all ranks: so their exchanges keep one order, and where both have a part of one
request, B's attention finds in the cache what A's has written there in the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.comm.fabric import agree
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.symmetric import Arena
from fastlayers.errors import ArgumentError, check_choice
from fastlayers.linear.split_rows import is_marked, some_leave
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.runtime.streams import other_stream, side_lock
from fastlayers_models.experts import routed_rows

# Which steps have halves, by setting.
OVERLAPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"off": (), "two_batch": ("decode",), "two_chunk": ("extend",), "both": ("decode", "extend")}
)
# A cut between requests that leaves less than so much of a step's tokens on one side gives way to one inside a request.
THRESHOLD = 0.48
Shares = Sequence[tuple[int, int]]  # tokens of each attention group, and those of its first half
Planned = tuple[AttentionMeta, StepTokens | None, torch.Tensor | None]  # of a step or a half, and which rows are real


class Piece(NamedTuple):
    """One stage of one layer."""

    layer: Any
    cache: LayerCache
    stage: str


class Half:
    """One half of a step, or a whole one, on its way through the layers."""

    def __init__(self, model: Any, input_ids: torch.Tensor, planned: Planned) -> None:
        self.meta, step, valid = planned
        self.step = step if step is not None else model.single_step(self.meta)
        self.hidden = Hidden.start(model.embed(model.decoder.embed_tokens, input_ids, self.step))
        self.rows = routed_rows(model, self.step, self.meta, valid)
        # What is being exchanged, and what is recorded behind that.
        self.under_way: tuple[Hidden, torch.cuda.Event] | None = None

    def run(self, pieces: Sequence[Piece]) -> None:
        """Run stages one after another."""
        for layer, cache, stage in pieces:
            self.hidden = layer.run(stage, self.hidden, self.meta, cache, self.step, self.rows)


class Exchanges:
    """Runs what halves exchange with other ranks: here at once, as on a CPU."""

    def start(self, half: Half, pieces: Sequence[Piece]) -> None:
        """Begin a half's exchange, behind those begun before; its hidden state is nobody's until it is awaited."""
        half.run(pieces)

    def wait(self, half: Half) -> None:
        """Let what follows on the current stream have the half's exchange behind it."""


class StreamExchanges(Exchanges):
    """Runs them on a second CUDA stream, forked and joined by events: so it can be captured.

    Parameters
    ----------
    device : torch device
    arenas : sequence of Arena
        What ranks exchange rows through, if they do. Gathered rows lie there, where the next exchange overwrites them.
    """

    def __init__(self, device: torch.device, arenas: Sequence[Arena] = ()) -> None:
        self.stream, self.arenas = other_stream(device), arenas

    def start(self, half: Half, pieces: Sequence[Piece]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        given = half.hidden  # kept: it is the current stream's memory, which that would use again too early
        with torch.cuda.stream(self.stream):
            half.run(pieces)
            take_out(half.hidden, self.arenas)
            half.under_way = given, self.stream.record_event()

    def wait(self, half: Half) -> None:
        if half.under_way is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(half.under_way[1])
            half.under_way = None


def take_out(hidden: Hidden, arenas: Sequence[Arena]) -> None:
    """Let rows that lie in a workspace of the ranks be a copy: the other half's exchange comes before they are read."""
    rows: Any = hidden.tensor  # or codes and scales, which lie in one place
    place = (rows.codes if isinstance(rows, CodedRows) else rows).untyped_storage().data_ptr()
    if any(place == arena.buffer.untyped_storage().data_ptr() for arena in arenas):
        hidden.tensor = rows.clone()


def exchanges_of(model: Any) -> Exchanges:
    """Return how a model's halves exchange."""
    if model.device.type != "cuda":
        return Exchanges()
    made = (across.workspace for across in (model.seam, model.moves) if across is not None)
    arenas = [workspace.arena for workspace in made if workspace is not None and workspace.arena is not None]
    return StreamExchanges(model.device, arenas)


def turns(layers: Sequence[tuple[Any, LayerCache]]) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """Yield the turns of a half: what it computes (in the first one nothing), and what it exchanges thereafter."""
    computed: list[Piece] = []
    exchanged: list[Piece] = []
    for layer, cache in layers:
        for stage in layer.STAGES:
            if stage in layer.COMPUTED:
                yield computed, exchanged
                computed, exchanged = [Piece(layer, cache, stage)], []
            else:
                exchanged.append(Piece(layer, cache, stage))
    yield computed, exchanged


def in_turns(layers: Sequence[tuple[Any, LayerCache]], halves: Sequence[Half], exchanges: Exchanges) -> None:
    """Run layers with halves that take turns."""
    for computed, exchanged in turns(layers):
        for half in halves:
            exchanges.wait(half)
            half.run(computed)
            exchanges.start(half, exchanged)
    for half in halves:
        exchanges.wait(half)


def run_layers(
    model: Any, input_ids: torch.Tensor, parts: Sequence[Planned], caches: Sequence[LayerCache], checked: bool,
    images: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return the hidden states of a model's step, given whole or as its two halves; see ``CausalLM.forward``.

    ``checked``: whether the whole step was, and its halves with it. ``images``: of a whole step only.
    """
    # Draft layers may stand behind the decoder's.
    count = range(model.config.num_hidden_layers)
    layers = [(layer, cache) for _, layer, cache in zip(count, model.decoder.layers, caches, strict=False)]
    given = [input_ids] if len(parts) == 1 else input_ids.split([meta.num_tokens for meta, _, _ in parts])
    halves = [Half(model, ids, planned) for ids, planned in zip(given, parts, strict=True)]
    if len(halves) == 1:
        (whole,) = halves
        if images is not None:
            whole.hidden.tensor.index_copy_(0, *images)
        asks = checked and some_leave()
        for (layer, cache), (behind, _) in zip(layers, [*layers[1:], (None, None)], strict=True):
            left = layer.leaves_to(behind) if asks and is_marked(layer) else ()
            split = {"split": left} if left else {}
            whole.hidden = layer(whole.hidden, whole.meta, cache, whole.step, whole.rows, **split)
    else:
        if checked:
            for half in halves:
                half.meta.vouch()
        with side_lock:  # a capture of another thread would take what runs on that stream
            in_turns(layers, halves, exchanges_of(model))
    finish = layers[-1][0].communicator.finish
    found = [finish(half.hidden, None, half.step)[: half.meta.num_tokens] for half in halves]
    return found[0] if len(found) == 1 else torch.cat(found)


# ---- which halves ------------------------------------------------------------------------------------------------


def token_cut(lengths: Sequence[int]) -> int:
    """Return how many of a step's new tokens its first half has, given those of each request; 0: it has no halves.

    The cut is between the two requests where it leaves the sides most alike. Where one has less than 48% even so, it is
    in the middle, inside a request, unless that leaves the first half less than one token for each of its requests.
    """
    total, ends = sum(lengths), list(accumulate(lengths))
    between = min(reversed(ends[:-1]), key=lambda end: abs(2 * end - total), default=0)
    if THRESHOLD * total <= between <= (1 - THRESHOLD) * total:
        return between
    within = next((place for place, end in enumerate(ends) if end > total // 2), 0)
    return total // 2 if within + 1 <= total // 2 else between


def split(batch: AttentionBatch, cut: int) -> tuple[AttentionBatch, AttentionBatch]:
    """Return the first ``cut`` new tokens of a step, and the others, which attend to those of their request.

    Raises
    ------
    ArgumentError
        Requests with left padding, or tokens in trees.
    """
    if batch.starts or batch.parents:
        raise ArgumentError("split", "batch", batch.phase, "requests without left padding or trees")
    sides: tuple[list[tuple[int, int, int]], ...] = ([], [])
    for request, (tokens, prefix) in enumerate(zip(batch.query_lens, batch.prefix_lens, strict=True)):
        here = min(tokens, cut)
        cut -= here
        for side, count, start in zip(sides, (here, tokens - here), (prefix, prefix + here), strict=True):
            if count:
                side.append((count, start, request))
    first, second = (
        AttentionBatch(
            tuple(count for count, _, _ in side), tuple(start for _, start, _ in side),
            [batch.page_table[request] for _, _, request in side],
        )
        for side in sides
    )  # fmt: skip
    return first, second


class RealRows(Protocol):
    """Which rows of a half are real, for one attention group or several: :class:`OneGroup`, ``groups.Together``."""

    def plan(self, counts: Sequence[int], *, extend: bool) -> None:
        """Let the next half that is not captured be of so many tokens of each group."""

    def refresh(self, counts: Sequence[int], bucket: int) -> None:
        """Let the next replay of a bucket be of so many tokens of each group."""

    def of(self, meta: AttentionMeta) -> tuple[StepTokens | None, torch.Tensor | None]:
        """Return what a model takes as ``step`` and ``valid``."""


class OneGroup:
    """Of one attention group: the first ones, counted on the device where the step is captured."""

    def __init__(self, model: Any) -> None:
        self._count = torch.zeros(1, dtype=torch.int32, device=model.device)

    def plan(self, counts: Sequence[int], *, extend: bool) -> None:
        """As of :class:`RealRows`: all are real."""

    def refresh(self, counts: Sequence[int], bucket: int) -> None:
        """As of :class:`RealRows`."""
        self._count.fill_(counts[0])

    def of(self, meta: AttentionMeta) -> tuple[StepTokens | None, torch.Tensor | None]:
        """As of :class:`RealRows`; the model counts the step's tokens itself."""
        return None, self._count if meta.bucket is not None else None


class Halves:
    """Plans the halves of a model's steps: each has an :class:`AttentionState` of its own.

    Parameters
    ----------
    model : CausalLM
    state : AttentionState
        Of whole steps.
    overlap : str
        One of :data:`OVERLAPS` but ``"off"``.
    rows : pair of RealRows
    """

    def __init__(self, model: Any, state: AttentionState, overlap: str, rows: tuple[RealRows, RealRows]) -> None:
        self.overlap, self.kinds, self._rows = overlap, OVERLAPS[overlap], rows
        sizes = state.max_batch, state.max_tokens, state.max_pages, state.page_size, model.device
        self._states = AttentionState(*sizes), AttentionState(*sizes)
        self._groups, self._group = model.parallel.attn_dp.size, model.parallel.attn_dp.rank
        # Of captured steps by their bucket; of the last one that is not, by None.
        self._planned: dict[Hashable, list[Planned]] = {}

    @staticmethod
    def make(
        model: Any, state: AttentionState, overlap: str, torch_compile: Any, rows: Callable[[Any], RealRows]
    ) -> Halves | None:
        """Return the halves, or ``None`` with ``"off"``; ``rows(model)``: of each. Collective over the ranks.

        Raises
        ------
        ArgumentError
            One rank, images, or layers that name no stages or are compiled.
        CollectiveMismatch
            Ranks were given different settings.
        """
        check_choice("Generator", "overlap", overlap, tuple(OVERLAPS))
        ranks = getattr(getattr(model, "parallel", None), "tp", None)
        if ranks is not None:
            agree(ranks, {"overlap": overlap})
        if overlap == "off":
            return None
        reason = None
        if ranks is None or ranks.size == 1:
            reason = "on one rank: nothing is sent that computing could hide"
        elif getattr(model, "tower", None) is not None:
            reason = "for a model that takes images, whose rows belong to whole prompts"
        elif not all(hasattr(layer, "STAGES") for layer in model.decoder.layers):
            reason = f"for {type(model).__name__}, whose layers name no stages"
        elif getattr(model, "token_moves", None) is not None:
            reason = "with expert_exchange: tokens go to other ranks inside a stage that computes, on its stream"
        elif torch_compile is not None:
            reason = "with torch_compile, which makes each layer one graph without stages"
        if reason is not None:
            raise ArgumentError("Generator", "overlap", repr(overlap), f"'off' {reason}")
        return Halves(model, state, overlap, (rows(model), rows(model)))

    def plan(self, meta: AttentionMeta, kind: str, shares: Shares | None = None) -> None:
        """Plan the halves of a step that was planned whole.

        Parameters
        ----------
        meta : AttentionMeta
            Of the whole step.
        kind : str
            ``"decode"`` or ``"extend"``, which all groups agree on.
        shares : sequence of (tokens, cut), optional
            Of each attention group its tokens, and those of its first half; default: in each as in this one. A
            captured step is cut where its bucket is.
        """
        bucket = meta.bucket
        self._planned.pop(bucket, None)
        if kind not in self.kinds:
            return
        if shares is None:
            shares = [(meta.batch.num_tokens, token_cut(meta.batch.query_lens))] * self._groups
        sizes: tuple[int | None, int | None] = (None, None)
        if isinstance(bucket, int):
            sizes = first, _ = (bucket + 1) // 2, bucket // 2
            shares = [(tokens, min(tokens, first)) for tokens, _ in shares]
        cuts = [cut for _, cut in shares]
        rests = [tokens - cut for tokens, cut in shares]
        if bucket == 1 or (bucket is None and not (any(cuts) and any(rests))):
            return
        batches, planned = split(meta.batch, cuts[self._group]), []
        for batch, size, counts, state, rows in zip(
            batches, sizes, (cuts, rests), self._states, self._rows, strict=True
        ):
            half = state.plan(batch, bucket=size)
            if size is None:
                rows.plan(counts, extend=kind == "extend")
            else:
                rows.refresh(counts, size)
            planned.append((half, *rows.of(half)))
        self._planned[bucket] = planned

    def of(self, meta: AttentionMeta) -> Sequence[Planned]:
        """Return the halves of a step; none, if it is computed whole."""
        return self._planned.get(meta.bucket, ())
