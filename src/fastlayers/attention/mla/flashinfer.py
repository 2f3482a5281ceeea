"""MLA by FlashInfer's kernels: paged decode over latents, ragged prefill with heads of 192 and 128.

Both follow schedules that the package computes on the host from host lengths. For decode they are made once a step
(:meth:`AttentionMeta.plan_of`), for prefill once for each :class:`RaggedLengths`; a captured graph finds them in static
buffers. The package's kernels are called directly, not through its wrapper classes, so that buffers are as small as
they can be and a launch sequence is an operator on tensors.

The cache is read in place: its two parts are views, and the flattened page table is the list of page indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import log
from typing import Any

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.mla.config import MLAConfig, RaggedLengths, check_no_padding, empty_decode, empty_prefill
from fastlayers.attention.pinned_copy import Staging
from fastlayers.device import as_device
from fastlayers.operators import operator
from fastlayers.runtime.package_builds import Module

# The package's schedule of one launch holds this many entries and does not check: longer steps go in pieces.
MAX_ENTRIES = 16384
# Query rows (token × head) of an entry; with many heads two blocks of this size work together.
TILE = 64
SCHEDULE_BYTES = 1 << 20
# Query rows of an entry of a prefill's schedule.
PREFILL_TILE = 128
CAUSAL = {False: 0, True: 1}


def _decode_module(backend: str, q: torch.dtype, kv: torch.dtype, rank: int, rope: int) -> Any:
    from flashinfer.mla import get_batch_mla_module

    return get_batch_mla_module(*_of_decode(backend, q, kv, rank, rope))


def _of_decode(backend: str, q: torch.dtype, kv: torch.dtype, rank: int, rope: int) -> tuple[Any, ...]:
    return backend, q, kv, q, torch.int32, rank, rope, False


def _prefill_module(dtype: torch.dtype, width: int, value: int) -> Any:
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(*_of_prefill(dtype, width, value))


def _of_prefill(dtype: torch.dtype, width: int, value: int) -> tuple[Any, ...]:
    # No rotary embedding, window, soft cap or 16-bit scores.
    return "fa3", dtype, dtype, dtype, torch.int32, width, value, 0, False, False, False


class Workspace:
    """Partial results of split requests: of no use after a launch, so one for all steps of a state."""

    def __init__(self, cfg: MLAConfig, device: torch.device) -> None:
        blocks = as_device(device).sm_count if device.type == "cuda" else 1
        self.memory = torch.empty(2 * blocks * TILE * (2 * cfg.kv_lora_rank + 4) + 64, dtype=torch.uint8, device=device)

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing in it depends on the step."""


@dataclass
class Piece:
    """Consecutive tokens of a step that one launch serves."""

    first: int
    last: int
    entries: torch.Tensor
    numbers: list[int]


def pieces(lens: Sequence[tuple[int, int]], num_heads: int, entries: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut a step so that no launch has more than ``entries`` schedule entries.

    Parameters
    ----------
    lens : sequence of (new tokens, total length)
    num_heads, entries : int

    Yields
    ------
    list of (request, new tokens, total length)
        Causal as the whole: a request's earlier tokens come with the length up to them.
    """
    part: list[tuple[int, int, int]] = []
    room = entries
    for request, (new, total) in enumerate(lens):
        first = 0
        while first < new or new == 0:
            # Whole tiles of the rows that fit, at least one token.
            fits = max(1, (room - 1) * TILE // num_heads) if room > 1 else 0
            count = min(new - first, fits)
            if count or new == 0:
                part.append((request, count, total - new + first + count))
                room -= -(-count * num_heads // TILE)
                first += count
            if new == 0:
                break
            if first < new:
                yield part
                part, room = [], entries
    if part:
        yield part


class DecodePlan:
    """Schedules of one step's launches; the same addresses after every plan of one shape."""

    def __init__(self, core: FlashInferMLA, meta: AttentionMeta) -> None:
        cfg, device = core.cfg, meta.positions.device
        self.core, self.causal = core, False
        self.pieces: list[Piece] = []
        key = ("flashinfer", "workspace", cfg.kv_lora_rank)
        workspace: Workspace = replace(meta, bucket=None).plan_of(key, lambda _: Workspace(cfg, device))
        self.workspace = workspace.memory

    @torch.inference_mode()
    def plan(self, meta: AttentionMeta) -> None:
        """Compute the schedules on the host and copy them; no host synchronisation."""
        check_no_padding(self.core.name, meta)
        cfg, device = self.core.cfg, meta.positions.device
        self.causal = meta.max_query_len > 1
        lens = list(zip(meta.batch.query_lens, meta.batch.seq_lens, strict=True))
        lens += [(1, 1)] * (meta.num_requests - len(lens))
        blocks = self.workspace.numel() // (2 * TILE * (2 * cfg.kv_lora_rank + 4))
        cut = list(pieces(lens, cfg.num_heads, MAX_ENTRIES - 2 * blocks - len(lens)))
        old, self.pieces, token = self.pieces, [], 0
        for index, part in enumerate(cut):
            entries = (
                old[index].entries
                if index < len(old)
                else torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
            )
            count = sum(new for _, new, _ in part)
            numbers = self._schedule(part, entries, meta.page_table.shape[1])
            self.pieces.append(Piece(token, token + count, entries, numbers))
            token += count

    def _schedule(self, part: list[tuple[int, int, int]], entries: torch.Tensor, max_pages: int) -> list[int]:
        core, cfg, device = self.core, self.core.cfg, entries.device
        cu_q = _ints([0, *accumulate(new for _, new, _ in part)])
        # A request's indices are its row of the page table; only where it begins is read.
        rows = _ints([request * max_pages for request, _, _ in part] + [0])
        totals = _ints([total for _, _, total in part])
        staged = core.staging(device).take()
        module = _decode_module(core.variant, cfg.dtype, cfg.kv_dtype, cfg.kv_lora_rank, cfg.qk_rope_head_dim)
        numbers = module.plan(
            self.workspace, entries, staged, cu_q, rows, totals, cfg.num_heads, cfg.kv_lora_rank, self.causal
        )
        core.staging(device).give(staged)
        return [int(number) for number in numbers]


def _ints(values: list[int]) -> torch.Tensor:
    """Return what the package reads on the host."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")


@operator("mla_flashinfer_decode", empty_decode, writes=("workspace",))
def _decode(
    q: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor, workspace: torch.Tensor, entries: torch.Tensor,
    numbers: list[int], variant: str, rank: int, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = empty_decode(q, rank)
    module = _decode_module(variant, q.dtype, cache.dtype, rank, q.shape[2] - rank)
    # The last numbers: LSE as the natural logarithm, and the scales of an e4m3 cache.
    module.run(
        workspace, entries, numbers, q[..., :rank], q[..., rank:], cache[..., :rank], cache[..., rank:],
        page_table.view(-1), o, lse, CAUSAL[causal], q.shape[1], cache.shape[1], scale, True, 1.0, 1.0,
    )  # fmt: skip
    return o, lse


@dataclass
class PrefillPlan:
    """The schedule for one :class:`RaggedLengths`, and its tokens that see no key."""

    entries: torch.Tensor
    numbers: list[int]
    blind: torch.Tensor | None


def seeing(lens: RaggedLengths) -> tuple[list[int], list[int], list[int]]:
    """Cut requests so that every token either sees keys or belongs to a request without any.

    The kernel's results for tokens that see nothing are undefined.

    Returns
    -------
    (query lengths, key lengths, blind tokens)
        Of the cut requests; key offsets stay what they were.
    """
    q_lens: list[int] = []
    k_lens: list[int] = []
    blind: list[int] = []
    token = 0
    for q_len, k_len in zip(lens.q_lens, lens.k_lens, strict=True):
        unseen = q_len - (min(q_len, k_len) if lens.causal else q_len if k_len else 0)
        if unseen:
            q_lens.append(unseen)
            k_lens.append(0)
            blind += range(token, token + unseen)
        q_lens.append(q_len - unseen)
        k_lens.append(k_len)
        token += q_len
    return q_lens, k_lens, blind


@operator("mla_flashinfer_prefill", empty_prefill)
def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, entries: torch.Tensor,
    blind: torch.Tensor | None, numbers: list[int], scale: float, causal: bool, need_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    o, lse = empty_prefill(q, v, need_lse)
    module = _prefill_module(q.dtype, q.shape[2], v.shape[2])
    # Nothing is split, so no partial results are kept: the schedule stands in for their memory. Then tokens before
    # heads, no window, no dependent launch; of the variants' arguments only the scale.
    module.ragged_run(
        entries, entries, numbers, q, k, v, cu_q, cu_k, o, lse if need_lse else None, CAUSAL[causal], 0, -1, False,
        None, None, None, None, None, None, 0.0, scale, 1.0, 1e4, 0,
    )  # fmt: skip
    if need_lse:
        lse.mul_(log(2.0))  # from base 2
    if blind is not None:
        o.index_fill_(0, blind, 0.0)
        if need_lse:
            lse.index_fill_(0, blind, float("-inf"))
    return o, lse


class FlashInferMLA:
    """Capture-safe after one call of the step; allocates its outputs."""

    name = variant = ""

    @classmethod
    def modules(cls, cfg: MLAConfig) -> list[Module]:
        """Return what the package compiles for a configuration: ``extend`` is computed by :meth:`prefill`."""
        if cfg.phase == "extend":
            of = _of_prefill(cfg.dtype, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, cfg.v_head_dim)
            return [Module("flashinfer", "flashinfer.jit:gen_batch_prefill_module", of)]
        of = _of_decode(cls.variant, cfg.dtype, cfg.kv_dtype, cfg.kv_lora_rank, cfg.qk_rope_head_dim)
        return [Module("flashinfer", "flashinfer.jit:gen_batch_mla_module", of)]

    def __init__(self, cfg: MLAConfig) -> None:
        self.cfg = cfg
        self._staging: dict[torch.device, Staging] = {}
        self.key = (self.name, cfg.num_heads, cfg.dtype, cfg.kv_dtype)

    def staging(self, device: torch.device) -> Staging:
        """Return the host memory for schedules on ``device``: of the layer that plans, which is a model's first."""
        if device not in self._staging:
            self._staging[device] = Staging(SCHEDULE_BYTES, device)
        return self._staging[device]

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o [T,H,L] of q's dtype, lse [T,H] fp32)``."""
        if q.shape[0] == 0:
            return empty_decode(q, self.cfg.kv_lora_rank)
        plan: DecodePlan = meta.plan_of(self.key, lambda m: DecodePlan(self, m))
        results = [
            _decode(
                q[piece.first : piece.last], cache, meta.page_table, plan.workspace, piece.entries, piece.numbers,
                self.variant, self.cfg.kv_lora_rank, self.cfg.softmax_scale, plan.causal,
            )
            for piece in plan.pieces
        ]  # fmt: skip
        if len(results) == 1:
            return results[0]
        return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


class FlashInferFA3(FlashInferMLA):
    """The kernels for sm_90."""

    name, variant = "flashinfer_fa3", "fa3"

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: RaggedLengths, need_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(o [T,H,V] of q's dtype, lse [T,H] fp32 or None)``."""
        if k.shape[0] == 0 or q.shape[0] == 0:
            o = q.new_zeros(*q.shape[:2], v.shape[2])
            return o, q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32) if need_lse else None
        plan: PrefillPlan = lens.plan_of(self.key, lambda of: self._plan_prefill(of, q.device))
        o, lse = _prefill(
            q, k, v, lens.cu_q, lens.cu_k, plan.entries, plan.blind, plan.numbers, self.cfg.softmax_scale,
            lens.causal, need_lse,
        )  # fmt: skip
        return o, lse if need_lse else None

    @torch.inference_mode()
    def _plan_prefill(self, lens: RaggedLengths, device: torch.device) -> PrefillPlan:
        cfg = self.cfg
        width, tokens = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, sum(lens.q_lens)
        q_lens, k_lens, blind = seeing(lens)
        entries = sum(-(-length // PREFILL_TILE) for length in q_lens) * cfg.num_heads
        # Seven numbers of four bytes for each entry, and a short list.
        size = 28 * entries + 8192
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        staging = self.staging(device)
        staged = staging.take(size)
        cu_q, cu_k = (_ints([0, *accumulate(each)]) for each in (q_lens, k_lens))
        module = _prefill_module(cfg.dtype, width, cfg.v_head_dim)
        numbers = module.plan(
            memory, memory, staged, cu_q, cu_k, _ints(k_lens), tokens, len(q_lens), cfg.num_heads,
            cfg.num_heads, 1, False, width, cfg.v_head_dim, lens.causal, -1,
        )  # fmt: skip
        staging.give(staged)
        rows = torch.tensor(blind, dtype=torch.int64, device=device) if blind else None
        return PrefillPlan(memory, [int(number) for number in numbers], rows)


class FlashInferFA2(FlashInferMLA):
    """The kernels for sm_80 and newer; decode only."""

    name, variant = "flashinfer_fa2", "fa2"
