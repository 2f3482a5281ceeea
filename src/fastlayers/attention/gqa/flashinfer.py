"""Grouped-query attention by FlashInfer's paged prefill kernels, which serve decode too (one query a request).

``fa3`` is written for sm_90 and splits no keys; ``fa2`` runs from sm_80 on and splits them. Both follow a schedule that
the package computes on the host from host lengths: once a step (:meth:`AttentionMeta.plan_of`), into buffers that a
captured graph finds again. The kernels are called directly rather than through the package's wrapper objects, so that
a launch is an operator on tensors. The package masks no left padding and ignores sinks here: a step with padding goes
to another backend, and a sink is folded in by way of the LSE, ``o *= sigmoid(lse - sink)``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from fastlayers.attention.gqa.config import GQAConfig, check_no_padding, split_bytes
from fastlayers.attention.gqa.triton_softmax import LN2
from fastlayers.attention.meta import AttentionMeta
from fastlayers.attention.pinned_copy import Staging
from fastlayers.attention.step_buffers import ALIGNMENT
from fastlayers.device import as_device
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.operators import operator
from fastlayers.runtime.launch import kernel
from fastlayers.runtime.package_builds import Module
from fastlayers.triton_lang import await_inputs, cast, dependent_launch, release_dependents

CAUSAL, TOKENS_BEFORE_HEADS = 1, 0  # the package's codes
SMALLEST_WORKSPACE = 8 << 20  # bytes


def module_of(
    variant: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, windowed: bool, capped: bool
) -> Any:
    """Return the package's kernels for one configuration; compiles them at first use."""
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(*_arguments(variant, dtype, kv_dtype, head_dim, windowed, capped))


def _arguments(
    variant: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, windowed: bool, capped: bool
) -> tuple[Any, ...]:
    # No rotary embedding inside, scores in fp32.
    return variant, dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, capped, False


@kernel
def _pack_kernel(table_ptr, offset_ptr, pages_ptr, table_row, BLOCK: tl.constexpr):
    """Write the pages in use, request after request."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(offset_ptr + request)
    count = tl.load(offset_ptr + request + 1) - first
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table_ptr + request * table_row + index, mask=index < count, other=0)
    tl.store(pages_ptr + first + index, page, mask=index < count)


@kernel
def _finish_kernel(
    o_ptr, binary_ptr, lse_ptr, sinks_ptr, rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bring the LSE from base 2 to base e, and fold the sink into both results; ``o`` in place.

    The LSE is written elsewhere: several warps read one row's, and not at the same time.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    await_inputs(PDL)
    release_dependents(PDL)
    lse = tl.load(binary_ptr + row, mask=row < rows, other=0.0) * LN2
    if SINKS:
        column = tl.arange(0, BLOCK_D)
        at = row[:, None] * HEAD_DIM + column[None, :]
        inside = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
        sink = tl.load(sinks_ptr + row % HEADS, mask=row < rows, other=0.0)
        top = tl.maximum(lse, sink)
        total = tl.exp(lse - top) + tl.exp(sink - top)
        o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
        o = o * (tl.exp(lse - top) / total)[:, None]
        tl.store(o_ptr + at, cast(o, o_ptr.dtype.element_ty), mask=inside)
        lse = top + tl.log(total)
    tl.store(lse_ptr + row, lse, mask=row < rows)


def finish(o: torch.Tensor, binary: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the LSE for the base-2 one of attention without sinks, both ``[T, H]``; fold the sink into ``o``."""
    rows, width, lse = binary.numel(), o.shape[2], torch.empty_like(binary)
    block = 8 if sinks is not None else 256
    _finish_kernel[(cdiv(rows, block),)](
        o, binary, lse, binary if sinks is None else sinks, rows,
        HEADS=o.shape[1], HEAD_DIM=width, SINKS=sinks is not None,
        BLOCK_R=block, BLOCK_D=next_power_of_2(width), **dependent_launch(o.device), num_warps=4,
    )  # fmt: skip
    return lse


class Workspace:
    """Partial results of split keys: of no use after a launch, so one for all steps and layers of a state."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def of(self, size: int) -> torch.Tensor:
        """Return memory of at least ``size`` bytes; a schedule keeps what it got, also when others need more later.

        It grows to powers of two: all that schedules keep takes less than twice the largest.
        """
        if self.memory.numel() < size:
            size = next_power_of_2(max(size, SMALLEST_WORKSPACE))
            self.memory = torch.empty(size, dtype=torch.uint8, device=self.memory.device)
        return self.memory

    def plan(self, meta: AttentionMeta) -> None:
        """Nothing in it depends on the step."""


class Schedule:
    """One step's schedule; the same addresses after every plan of one shape."""

    def __init__(self, core: FlashInferGQA, meta: AttentionMeta) -> None:
        self.core, self.device = core, meta.positions.device
        self.numbers: list[int] = []
        # Rows: requests + 1 offsets of queries, as many of pages, and the length of each last page.
        self.index = self.pages = self.entries = self.workspace = self._rows = torch.empty(0, device="cpu")
        self._shape: tuple[int, ...] = ()
        self._staging = Staging(0, self.device)
        # One for all buckets: asked for as if there was none.
        self._workspace: Workspace = replace(meta, bucket=None).plan_of(
            ("gqa", "flashinfer", "workspace"), lambda _: Workspace(self.device)
        )

    def _allocate(self, meta: AttentionMeta) -> None:
        requests, tokens = meta.num_requests, meta.num_tokens
        shape = (requests, tokens, meta.page_table.shape[1])
        if shape == self._shape:
            return
        self._shape = shape
        cfg, parts = self.core.cfg, 0
        if self.core.splits_keys:
            parts = split_bytes(cfg, as_device(self.device).sm_count, requests, tokens, meta.bucket is not None)
        self.workspace = self._workspace.of(max(16, parts))
        # Up to seven numbers for each tile of 128 tokens of each head (fa3), four for each of 16 rows (fa2).
        few, many = tokens // 128 + requests + 1, tokens * cfg.group // 16 + requests + 300
        size = 28 * cfg.num_heads * few + 16 * many + 8 * (tokens + requests) + 65536
        # Each row begins where Triton's kernels are compiled to know it does, however many requests there are.
        width = cdiv(4 * (requests + 1), ALIGNMENT) * ALIGNMENT // 4
        self._rows = torch.zeros(3, width, dtype=torch.int32, device=self.device)
        self.index = self._rows[:, : requests + 1]
        self.pages = torch.empty(meta.page_table.numel(), dtype=torch.int32, device=self.device)
        self.entries = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._staging = Staging(size, self.device)

    @torch.inference_mode()
    def plan(self, meta: AttentionMeta) -> None:
        """Compute the schedule on the host and copy it; no host synchronisation."""
        check_no_padding(self.core.name, meta)
        self._allocate(meta)
        cfg, requests = self.core.cfg, meta.num_requests
        padded = requests - len(meta.batch.query_lens)
        query = [*meta.batch.query_lens, *[1] * padded]
        lengths = [*meta.batch.seq_lens, *[1] * padded]
        used = [-(-length // meta.page_size) for length in lengths]
        # On the host, which the package reads, whatever torch's default device is.
        first = torch.tensor([0, *accumulate(query)], dtype=torch.int32, device="cpu")
        pages = torch.tensor([0, *accumulate(used)], dtype=torch.int32, device="cpu")
        keys = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        last = keys - (pages.diff() - 1).clamp_min(0) * meta.page_size
        rows = torch.zeros(self._rows.shape, dtype=torch.int32, device="cpu")
        rows[0, : requests + 1], rows[1, : requests + 1], rows[2, :requests] = first, pages, last
        self._rows.copy_(rows)
        block = 256
        _pack_kernel[(requests, cdiv(max(used), block))](
            meta.page_table, self.index[1], self.pages, meta.page_table.stride(0), BLOCK=block, num_warps=4
        )
        window_left = -1 if cfg.window is None else cfg.window - 1
        staged = self._staging.take()
        numbers = self.core.module().plan(
            self.workspace, self.entries, staged, first, pages, keys, meta.num_tokens, requests,
            cfg.num_heads, cfg.num_kv_heads, meta.page_size, meta.bucket is not None, cfg.head_dim, cfg.head_dim,
            True, window_left, *self.core.split_arguments,
        )  # fmt: skip
        self._staging.give(staged)
        self.numbers = [int(number) for number in numbers]


def _fake(q: torch.Tensor, need_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = q.shape[0] if need_lse else 0
    return q.new_empty(*q.shape), q.new_empty(rows, q.shape[1], dtype=torch.float32)


@operator("gqa_flashinfer", _fake, writes=("workspace",))
def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sinks: torch.Tensor | None,
    workspace: torch.Tensor, entries: torch.Tensor, index: torch.Tensor, pages: torch.Tensor, numbers: list[int],
    variant: str, scale: float, window: int, softcap: float, need_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    first, offset, last = index[0], index[1], index[2, :-1]
    o = q.new_empty(*q.shape)
    # A sink is folded in by way of the LSE.
    lse = q.new_empty(q.shape[0] if need_lse or sinks is not None else 0, q.shape[1], dtype=torch.float32)
    module = module_of(variant, q.dtype, k_cache.dtype, q.shape[2], window > 0, softcap > 0)
    # No masks but the causal one, no ALiBi, no scored items; then softcap, scale, three scales of e4m3, rotary's two.
    module.paged_run(
        workspace, entries, numbers, q, k_cache, v_cache, first, offset, pages, last, o, lse if lse.numel() else None,
        CAUSAL, TOKENS_BEFORE_HEADS, window - 1, True, None, None, None, None, None, None, softcap, scale,
        None, None, None, 1.0, 1e4, 0, workspace.numel(),
    )  # fmt: skip
    if lse.numel():
        lse = finish(o, lse, sinks)
    return o, lse if need_lse else lse.new_empty(0, q.shape[1])


class FlashInferGQA:
    """Capture-safe after one call of the step; allocates its outputs."""

    name = variant = ""
    splits_keys = False
    split_arguments: tuple[Any, ...] = ()

    def __init__(self, cfg: GQAConfig) -> None:
        self.cfg = cfg
        # What a schedule depends on: layers with other scales or sinks share it.
        shape = (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.window, cfg.softcap is None)
        self.key = (self.name, *shape, cfg.dtype, cfg.kv_dtype)

    def module(self) -> Any:
        """Return the package's kernels for this configuration."""
        return module_of(*self._of(self.cfg))

    @classmethod
    def modules(cls, cfg: GQAConfig) -> list[Module]:
        """Return what the package compiles for a configuration."""
        return [Module("flashinfer", "flashinfer.jit:gen_batch_prefill_module", _arguments(*cls._of(cfg)))]

    @classmethod
    def _of(cls, cfg: GQAConfig) -> tuple[str, torch.dtype, torch.dtype, int, bool, bool]:
        capped = cfg.softcap is not None
        return cls.variant, cfg.dtype, cfg.kv_dtype, cfg.head_dim, cfg.window is not None, capped

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMeta,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``, both new tensors; without ``cfg.lse`` the second has no rows."""
        cfg = self.cfg
        if not q.shape[0]:
            return q.new_empty(*q.shape), q.new_empty(*q.shape[:2], dtype=torch.float32)
        plan: Schedule = meta.plan_of(self.key, lambda step: Schedule(self, step))
        o, lse = _attend(
            q, k_cache, v_cache, sinks, plan.workspace, plan.entries, plan.index, plan.pages, plan.numbers,
            self.variant, cfg.softmax_scale, cfg.window or 0, cfg.softcap or 0.0, cfg.lse,
        )  # fmt: skip
        return o, lse


class FlashInferFA3(FlashInferGQA):
    """The kernels for sm_90."""

    name, variant = "flashinfer_fa3", "fa3"


class FlashInferFA2(FlashInferGQA):
    """The kernels for sm_80 and newer."""

    name, variant = "flashinfer_fa2", "fa2"
    splits_keys = True
    split_arguments = (-1, False, 0)  # no fixed split, splitting allowed, no blocks set aside for others
