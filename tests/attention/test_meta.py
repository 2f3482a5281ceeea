"""Attention metadata: positions, slots, buckets, static addresses, errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.meta import FEW_TOKENS, check_loc, whole_pages
from fastlayers.attention.step_buffers import Mirrored
from fastlayers.errors import ArgumentError


def as_tensors(meta: fl.AttentionMeta) -> dict[str, torch.Tensor]:
    """Return a step's tensors by name."""
    return {name: value for name, value in vars(meta).items() if isinstance(value, torch.Tensor)}


def test_extend_with_an_idle_request() -> None:
    state = fl.AttentionState(4, 16, 4, 4)
    batch = fl.AttentionBatch((3, 0, 2), (2, 5, 7), [[3, 9], [1, 2], [5, 8, 4]], (1, 0, 0))
    meta = state.plan(batch)
    assert batch.seq_lens == (5, 5, 9) and batch.num_tokens == 5 and not batch.is_decode
    assert meta.positions.tolist() == [2, 3, 4, 7, 8]
    assert meta.out_cache_loc.tolist() == [3 * 4 + 2, 3 * 4 + 3, 9 * 4, 8 * 4 + 3, 4 * 4]
    assert meta.cu_seqlens_q.tolist() == [0, 3, 3, 5] and meta.request_of_token.tolist() == [0, 0, 0, 2, 2]
    assert meta.seq_lens.tolist() == [5, 5, 9] and meta.starts.tolist() == [1, 0, 0]
    assert (meta.max_query_len, meta.max_seq_len, meta.num_tokens, meta.num_requests) == (3, 9, 5, 3)
    assert meta.page_table[2].tolist() == [5, 8, 4, 0]


def test_bucket_pads_with_harmless_rows() -> None:
    state = fl.AttentionState(8, 8, 3, 4)
    meta = state.plan(fl.AttentionBatch((1, 1), (4, 0), [[2, 1], [3]]), bucket=4)
    assert meta.seq_lens.tolist() == [5, 1, 1, 1] and meta.out_cache_loc.tolist() == [4, 12, 0, 0]
    assert meta.positions.tolist() == [4, 0, 0, 0] and meta.page_table[2:].sum() == 0
    assert meta.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert (meta.max_query_len, meta.max_seq_len) == (1, 12)  # capacity, not this step's lengths


def test_a_later_plan_refreshes_the_same_addresses() -> None:
    state = fl.AttentionState(4, 4, 4, 4)
    first = state.plan(fl.AttentionBatch((1, 1), (4, 9), [[2, 1], [3, 4, 5]]), bucket=2)
    second = state.plan(fl.AttentionBatch((1,), (2,), [[6]]), bucket=2)
    assert (first.max_query_len, first.max_seq_len) == (second.max_query_len, second.max_seq_len)
    for name, tensor in as_tensors(first).items():
        assert tensor.data_ptr() == as_tensors(second)[name].data_ptr()
        assert torch.equal(tensor, as_tensors(second)[name])
    assert first.seq_lens.tolist() == [3, 1] and first.page_table[1].tolist() == [0, 0, 0, 0]


STEPS = [
    (fl.AttentionBatch((3, 2), (0, 0), [[5], [2]], (1, 0)), None),
    (fl.AttentionBatch((1, 1), (3, 2), [[5], [2]], (1, 0)), 2),
    (fl.AttentionBatch((1, 1), (4, 3), [[5, 7], [2]], (1, 0)), 4),
    (fl.AttentionBatch((4,), (0,), [[9]]), None),
    (fl.AttentionBatch((1,), (4,), [[9, 1]]), 1),
    (fl.AttentionBatch((1, 1, 1), (0, 5, 3), [[3], [5, 7], [2]]), None),
    (fl.AttentionBatch((), (), []), 2),
]


def plain(batch: fl.AttentionBatch, rows: int, pages: int, size: int) -> dict[str, list[object]]:
    """What the metadata of a step must be, in plain Python."""
    pad = rows - len(batch.query_lens)
    queries, prefix = [*batch.query_lens, *[1] * pad], [*batch.prefix_lens, *[0] * pad]
    table = [[*row, *[0] * (pages - len(row))] for row in [*batch.page_table, *[[]] * pad]]
    tokens = [(r, prefix[r] + i) for r in range(rows) for i in range(queries[r])]
    return {
        "page_table": table,
        "seq_lens": [q + p for q, p in zip(queries, prefix, strict=True)],
        "starts": [*(batch.starts or [0] * len(batch.query_lens)), *[0] * pad],
        "cu_seqlens_q": [sum(queries[:r]) for r in range(rows + 1)],
        "request_of_token": [r for r, _ in tokens],
        "positions": [at for _, at in tokens],
        "out_cache_loc": [table[r][at // size] * size + at % size for r, at in tokens],
    }


def as_array(batch: fl.AttentionBatch) -> fl.AttentionBatch:
    """The same batch with its pages as an array, which is no wider than it must be."""
    table = np.zeros((len(batch.page_table), max(map(len, batch.page_table), default=0)), np.int32)
    for row, pages in enumerate(batch.page_table):
        table[row, : len(pages)] = pages
    return fl.AttentionBatch(batch.query_lens, batch.prefix_lens, table, batch.starts)


def check_steps(device: str) -> None:
    state = fl.AttentionState(4, 8, 3, 4, device)
    for arrays in ((), (0,), (0, 1), (1, 0), range(7)):  # which of the steps bring one, so that each follows each
        for number, (batch, bucket) in enumerate(STEPS):
            meta = state.plan(as_array(batch) if number % 7 in arrays else batch, bucket=bucket)
            wanted = plain(batch, bucket if bucket is not None else len(batch.query_lens), 3, 4)
            assert {name: tensor.tolist() for name, tensor in as_tensors(meta).items()} == wanted


def test_steps_of_all_kinds_in_turn() -> None:
    check_steps("cpu")


@pytest.mark.gpu
def test_steps_of_all_kinds_in_turn_gpu() -> None:
    check_steps("cuda")


@pytest.mark.gpu
def test_a_step_may_be_planned_before_the_one_before_has_run_gpu() -> None:
    """What the host writes next does not reach copies that are still waiting behind a long kernel."""
    state, found = fl.AttentionState(2, 4, 2, 4, "cuda"), []
    for step in range(12):
        torch.cuda._sleep(20_000_000)
        meta = state.plan(fl.AttentionBatch((1, 1), (step % 4, 1), [[step + 1], [99 - step]]), bucket=2)
        found.append({name: tensor.clone() for name, tensor in as_tensors(meta).items()})
    for step, tensors in enumerate(found):
        batch = fl.AttentionBatch((1, 1), (step % 4, 1), [[step + 1], [99 - step]])
        assert {name: tensor.tolist() for name, tensor in tensors.items()} == plain(batch, 2, 2, 4)


def test_rows_that_move_are_few_operations_on_the_host() -> None:
    """A request in front that ends moves all rows behind it: no work of Torch's by row."""
    rows = 256
    state = fl.AttentionState(rows, rows, 64, 16)
    pages = [list(range(1 + row, 40 + row)) for row in range(rows + 1)]
    calls = []
    for first in (0, 1):
        lengths = tuple(37 * 16 + row % 16 for row in range(rows))
        batch = fl.AttentionBatch((1,) * rows, lengths, pages[first : first + rows])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            meta = state.plan(batch, bucket=rows)
        calls.append(sum(event.count for event in seen.key_averages()))
    assert meta.page_table[:, 0].tolist() == list(range(2, rows + 2)) and max(calls) < 32, calls


def test_a_step_of_few_tokens_copies_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Mirrored, "send", lambda self, *part: sent.append(self.host_bytes.size))
    state, pages = fl.AttentionState(4, 8192, 64, 16), list(range(1, 65))
    for tokens in (4, FEW_TOKENS, FEW_TOKENS + 1, 3):
        for bucket in (None, ExtendBucket(tokens + 1, 2)):
            batch = fl.AttentionBatch((tokens,), (5,), [pages])
            meta = state.plan(batch, bucket=bucket)
            wanted = fl.AttentionState(4, tokens + 1, 64, 16).plan(batch, bucket=bucket)
            for name, tensor in as_tensors(wanted).items():
                assert torch.equal(as_tensors(meta)[name], tensor), (tokens, name)
            del sent[-2:]  # of the other state
            assert (sent[-1] < 20 * (FEW_TOKENS + 16)) == (meta.num_tokens <= FEW_TOKENS)


def test_empty_batch() -> None:
    meta = fl.AttentionState(2, 2, 2, 4).plan(fl.AttentionBatch((), (), []))
    assert (meta.num_tokens, meta.num_requests, meta.max_query_len, meta.max_seq_len) == (0, 0, 0, 0)
    assert meta.cu_seqlens_q.tolist() == [0]


def test_errors() -> None:
    state = fl.AttentionState(2, 4, 2, 4)
    plan = state.plan
    with pytest.raises(ArgumentError, match="AttentionBatch: lengths"):
        fl.AttentionBatch((1,), (1, 2), [[1]])
    with pytest.raises(ArgumentError, match="query_lens, prefix_lens"):
        fl.AttentionBatch((-1,), (1,), [[1]])
    with pytest.raises(ArgumentError, match=r"page_table\[1\] is 1 pages for 5 tokens; accepted: 2 to 2 pages"):
        plan(fl.AttentionBatch((1, 1), (0, 4), [[1], [2]]))
    with pytest.raises(ArgumentError, match="2 pages for 9 tokens; accepted: at most 8 tokens, on 2 pages of 4 tokens"):
        plan(fl.AttentionBatch((1, 1), (0, 8), [[1], [2, 3]]))
    with pytest.raises(ArgumentError, match="at most 2 requests, 4 tokens"):
        plan(fl.AttentionBatch((5,), (0,), [[1, 2]]))
    for query, bucket in (((2,), 2), ((1, 1), 1), ((1,), 3)):
        with pytest.raises(ArgumentError, match="bucket"):
            plan(fl.AttentionBatch(query, (0,) * len(query), [[1]] * len(query)), bucket=bucket)
    with pytest.raises(ArgumentError, match="page_size"):
        fl.AttentionState(1, 1, 1, 0)


NOT_PAGES = [
    ([[-1]], None, r"page_table\[0\] is \[-1\]; accepted: page numbers: integers, 0 or more"),
    ([[2, -2]], 3, r"page_table\[0\] is \[2, -2\]; accepted: pages in \[0, 3\)"),
    ([[1.7]], 3, r"page_table\[0\] is \[1.7\]; accepted: pages in \[0, 3\)"),
    ([[7]], 4, r"page_table\[0\] is \[7\]; accepted: pages in \[0, 4\)"),
    ([[2**31]], None, "accepted: page numbers"),
]


@pytest.mark.parametrize(("table", "num_pages", "words"), NOT_PAGES)
@pytest.mark.parametrize("bucket", [None, 2])
@pytest.mark.parametrize("kind", [list, np.array])
def test_pages_are_checked_before_anything_is_written(
    table: Any, num_pages: int | None, words: str, bucket: int | None, kind: Any
) -> None:
    table = kind(table)
    state = fl.AttentionState(2, 2, 2, 4)
    before = state.plan(fl.AttentionBatch((1,), (3,), [[2]]), bucket=bucket, num_pages=3)
    kept = {name: tensor.clone() for name, tensor in as_tensors(before).items()}
    with pytest.raises(ArgumentError, match=words):
        state.plan(fl.AttentionBatch((1,), (0,), table), bucket=bucket, num_pages=num_pages)
    assert all(torch.equal(kept[name], tensor) for name, tensor in as_tensors(before).items())


NO_STEPS = [
    (dict(page_table=[1]), {}, r"plan: page_table\[0\] is 1; accepted: a sequence of page numbers"),
    (dict(page_table=[torch.tensor(1)]), {}, r"page_table\[0\] is .*; accepted: a sequence of page numbers"),
    (dict(page_table=[[torch.zeros(2), 2]]), {}, r"page_table\[0\] is .*; accepted: page numbers"),
    (dict(page_table=[[np.zeros(2), 2]]), {}, r"page_table\[0\] is .*; accepted: page numbers"),
    (dict(page_table=[torch.ones(2, device="meta")]), {}, r"page_table\[0\] is .*; accepted: page numbers"),
    (dict(query_lens=(np.arange(2),)), {}, "AttentionBatch: query_lens is .* accepted: a tuple of integers"),
    (dict(prefix_lens=torch.ones(1, device="meta")), {}, "AttentionBatch: prefix_lens is .* a tuple of integers"),
    (dict(starts=(-1,)), {}, r"AttentionBatch: starts is \(-1,\); accepted: 0 to each request's length \(4,\)"),
    (dict(starts=(5,)), {}, r"AttentionBatch: starts is \(5,\); accepted: 0 to each request's length \(4,\)"),
    ({}, dict(bucket=np.int64(9)), "plan: bucket is 9; accepted: for decode only, 1 <= bucket <= 2"),
    ({}, dict(bucket=np.int64(0)), "plan: bucket is 0; accepted: for decode only, 1 <= bucket <= 2"),
    ({}, dict(num_pages="3"), "plan: num_pages is '3'; accepted: an integer or None"),
    ({}, dict(num_pages=np.arange(2)), r"plan: num_pages is .*; accepted: an integer or None"),
]


@pytest.mark.parametrize(("batch", "options", "words"), NO_STEPS, ids=str)
def test_what_is_no_step_is_refused_before_anything_is_written(
    batch: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    state = fl.AttentionState(2, 2, 2, 4)
    before = state.plan(fl.AttentionBatch((1,), (3,), [[2, 3]]))
    kept = {name: tensor.clone() for name, tensor in as_tensors(before).items()}
    with pytest.raises(ArgumentError, match=words):
        state.plan(
            fl.AttentionBatch(**{"query_lens": (1,), "prefix_lens": (3,), "page_table": [[1, 2]]} | batch), **options
        )
    assert all(torch.equal(kept[name], tensor) for name, tensor in as_tensors(before).items())
    with pytest.raises(ArgumentError, match="plan: batch is 3; accepted: an AttentionBatch"):
        state.plan(3)  # type: ignore[arg-type]


def test_numpys_numbers_in_a_step_become_pythons() -> None:
    lens, state = np.array([1, 1]), fl.AttentionState(2, 2, 2, 4)
    batch = fl.AttentionBatch(lens, np.array([3, 0]), np.array([[2, 3], [1, 0]]), (np.int64(1), 0))  # type: ignore[arg-type]
    assert batch == fl.AttentionBatch((1, 1), (3, 0), batch.page_table, (1, 0)) and type(batch.query_lens[0]) is int
    meta = state.plan(batch, bucket=np.int64(2), num_pages=np.int64(4))  # type: ignore[arg-type]
    assert meta.bucket == 2 and type(meta.bucket) is int and meta.out_cache_loc.tolist() == [11, 4]


def test_a_row_that_did_not_change_is_checked_against_another_cache() -> None:
    state, batch = fl.AttentionState(1, 1, 1, 4), fl.AttentionBatch((1,), (0,), [[7]])
    assert state.plan(batch, num_pages=8).out_cache_loc.item() == 28
    with pytest.raises(ArgumentError, match=r"pages in \[0, 4\)"):
        state.plan(batch, num_pages=4)


def test_pages_may_be_integers_of_other_libraries() -> None:
    table = [np.array([3]), torch.tensor([2, 1])]
    meta = fl.AttentionState(2, 2, 2, 4).plan(fl.AttentionBatch((1, 1), (1, 5), table), num_pages=4)  # type: ignore[arg-type]
    assert meta.out_cache_loc.tolist() == [13, 5] and meta.page_table.tolist() == [[3, 0], [2, 1]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copied_state_plans_its_own_steps(copied: Any) -> None:
    state = fl.AttentionState(2, 4, 2, 4)
    steps = [((1,), (3,), [[2]]), ((3,), (0,), [[1]]), ((1, 1), (4, 0), [[2, 3], [1]])]
    first = state.plan(fl.AttentionBatch(*steps[0]), bucket=2)
    twin = copied(state)
    for step in steps:
        batch = fl.AttentionBatch(*step)
        bucket = 2 if batch.is_decode else None
        meta, wanted = twin.plan(batch, bucket=bucket), fl.AttentionState(2, 4, 2, 4).plan(batch, bucket=bucket)
        for name, tensor in as_tensors(wanted).items():
            assert torch.equal(as_tensors(meta)[name], tensor), (step, name)
    assert first.positions.tolist() == [3, 0]  # the original's own


def test_a_bucket_is_an_integer() -> None:
    with pytest.raises(ArgumentError, match=r"bucket is 1\.5; accepted: an integer or None"):
        fl.AttentionState(2, 2, 1, 4).plan(fl.AttentionBatch((1,), (0,), [[1]]), bucket=1.5)  # type: ignore[arg-type]


def test_check_loc_reads_only_in_debug_mode() -> None:
    check_loc("x", torch.tensor([99]), 4, debug=False)
    with pytest.raises(ArgumentError, match=r"slots from 1 to 99"):
        check_loc("x", torch.tensor([1, 99]), 4, debug=True)


def test_whole_pages() -> None:
    assert whole_pages([5, 0, 4], 4) == [[1, 2], [], [3]]


@pytest.mark.parametrize("counts", [(1, 3, 5, 2), (0, 7), (4,)])
def test_fields_of_a_step_are_whole_and_aligned(counts: tuple[int, ...]) -> None:
    wanted = [(count, torch.int32 if count % 2 else torch.int64) for count in counts]
    mirrored = Mirrored(wanted, torch.device("cpu"))
    for number, ((count, dtype), (there, here)) in enumerate(zip(wanted, mirrored.fields, strict=True)):
        assert (there.shape, there.dtype) == ((count,), dtype) and there.storage_offset() * dtype.itemsize % 16 == 0
        here[:] = number
    mirrored.send()
    assert [there.tolist() for there, _ in mirrored.fields] == [[n] * count for n, count in enumerate(counts)]
