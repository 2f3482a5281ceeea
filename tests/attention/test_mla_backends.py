"""The foreign MLA cores: guards on described devices, and what our side does, with stand-ins for their kernels."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
import fastlayers.attention.mla.flashinfer as mla_flashinfer
import fastlayers.attention.mla.prefix_chunks as mla_paths
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.context_buckets import CONTEXTS, context_of
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.attention.mla.config import MLA, MLAConfig, RaggedLengths
from fastlayers.attention.mla.flashinfer import FlashInferFA3, pieces, seeing
from fastlayers.attention.mla.flashmla import FlashMLA
from fastlayers.attention.mla.launch_config import KNOBS, decode_config
from fastlayers.attention.mla.torch import TorchMLA
from fastlayers.attention.mla.triton import TritonMLA
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.registry import Backend

REAL = MLAConfig(16, 512, 64, 128, 128, 0.1, phase="decode")
TINY = MLAConfig(3, 32, 16, 24, 20, 0.31, 16, torch.float32, torch.float32, "decode")
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "changes", "device", "reason"),
    [
        ("flashmla", {}, "H200", None),
        ("flashmla", {}, "A100", "needs sm_90, this is sm_80"),
        ("flashmla", {}, "B200", "needs sm_90, this is sm_100"),
        ("flashmla", {"page_size": 16}, "H200", "pages of 16 tokens are not of 64"),
        ("flashmla", {"kv_dtype": E4M3}, "H200", "which fp8_math would allow"),
        ("flashmla", {"kv_dtype": E4M3, "fp8_math": True}, "H200", None),
        ("flashmla", {"kv_dtype": torch.float16}, "H200", "is not of the queries' torch.bfloat16"),
        ("flashmla", {"kv_lora_rank": 256}, "H200", r"latents of 256 \+ 64 are not 512 \+ 64"),
        ("flashmla", {"phase": "ragged"}, "H200", "of several new tokens a request it takes few alone"),
        *(
            ("flashmla", {"phase": "ragged", "few": True, "num_heads": heads}, "H200", None)
            for heads in (16, 32, 64, 128)
        ),
        ("flashmla", {"phase": "ragged", "few": True, "captured": True}, "H200", None),
        ("flashmla", {"phase": "ragged", "few": True, "tree": True}, "H200", "masks no trees of drafts"),
        ("flashmla", {"phase": "padded"}, "H200", "serves decode and ragged only, not padded"),
        ("flashinfer_fa3", {"page_size": 1}, "H200", None),
        ("flashinfer_fa3", {"kv_dtype": E4M3}, "H200", None),
        ("flashinfer_fa3", {"kv_dtype": E4M3, "dtype": torch.float16}, "H200", "are not bfloat16"),
        ("flashinfer_fa3", {}, "A100", "needs sm_90, this is sm_80"),
        ("flashinfer_fa3", {"phase": "extend"}, "H200", None),
        ("flashinfer_fa3", {"phase": "extend", "v_head_dim": 64}, "H200", "heads of 192 and 64 are not of 192 and 128"),
        ("flashinfer_fa3", {"phase": "padded"}, "H200", "serves decode and ragged and extend only, not padded"),
        ("flashinfer_fa3", {"dtype": torch.float32, "kv_dtype": torch.float32}, "H200", "is not float16 or bfloat16"),
        ("flashinfer_fa2", {}, "A100", "its LSE is off by 1e-5"),
        ("flashinfer_fa2", {"lse": False}, "A100", None),
        ("flashinfer_fa2", {"lse": False, "kv_dtype": E4M3}, "A100", "has no e4m3 cache"),
    ],
)
def test_guards(name: str, changes: dict[str, Any], device: str, reason: str | None) -> None:
    cfg, row = replace(REAL, **changes), MLA.named(name)
    why = row.why_not(cfg, as_device(device)) if not row.takes(cfg) else row.refuse(cfg, as_device(device))
    assert (why is None) == (reason is None)
    if reason is not None:
        import re

        assert re.search(reason, str(why))


def test_a_padded_step_has_a_backend_on_every_gpu() -> None:
    for device in ("H200", "A100"):
        able = [
            row.name for row in MLA.ranked
            if row.auto_on == ("cuda",) and row.serves("padded")
            and row.refuse(replace(REAL, phase="padded"), as_device(device)) is None
        ]  # fmt: skip
        assert able == ["triton"]


def test_configuration() -> None:
    with pytest.raises(ArgumentError, match="fp8_math is True; accepted: a cache of float8_e4m3fn"):
        replace(REAL, fp8_math=True)
    with pytest.raises(ArgumentError, match="phase"):
        replace(REAL, phase="prefill")
    keys = [
        replace(REAL, **changes).tuning_key()
        for changes in (
            {}, {"num_heads": 128}, {"context": 1024}, {"kv_dtype": E4M3}, {"kv_dtype": E4M3, "fp8_math": True},
            {"phase": "extend"}, {"page_size": 1},
        )
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert keys[0] == replace(REAL, softmax_scale=0.2, lse=False).tuning_key()


def test_phases_and_contexts() -> None:
    def phase(query: tuple[int, ...], starts: tuple[int, ...] = ()) -> str:
        found = AttentionBatch(query, (5,) * len(query), [[1]] * len(query), starts).phase
        return fl.MLAAttention.several_tokens if found == "extend" else found

    assert phase((1, 1)) == "decode" == phase((1, 1), (0, 0))
    assert phase((1, 0)) == phase((2, 2)) == "ragged"
    assert phase((1, 1), (0, 3)) == phase((4,), (1,)) == "padded"
    assert [context_of(n) for n in (1, 2048, 2049, 8192, 40_000, 1 << 20)] == [1024, 1024, 4096, 4096, 65536, 65536]
    assert all(context_of(context) == context for context in CONTEXTS)


def paged(cfg: MLAConfig, pages: int) -> torch.Tensor:
    return torch.randn(pages, cfg.page_size, cfg.latent_width)


class FakeDecode:
    """Stands in for FlashInfer's decode module: a schedule is a list of requests, run from raw page indices."""

    def __init__(self) -> None:
        self.plans: list[list[tuple[int, int, int, int]]] = []
        self.causal: list[bool] = []

    def plan(self, workspace: Any, entries: Any, staged: Any, cu_q: Any, rows: Any, totals: Any, *rest: Any) -> Any:
        heads, rank, causal = rest
        assert {each.device.type for each in (cu_q, rows, totals)} == {"cpu"}
        assert staged.numel() >= entries.numel() and (heads, rank) == (TINY.num_heads, TINY.kv_lora_rank)
        bounds = cu_q.tolist()
        self.plans.append(list(zip(bounds, bounds[1:], rows.tolist(), totals.tolist(), strict=False)))
        self.causal.append(causal)
        return [len(self.plans) - 1]

    def run(
        self, workspace: Any, entries: Any, numbers: Any, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, indices: Any,
        o: Any, lse: Any, mask: int, heads: int, page_size: int, scale: float, natural: bool, *scales: float,
    ) -> None:  # fmt: skip
        assert natural and scales == (1.0, 1.0) and mask == int(self.causal[numbers[0]])
        for first, last, row, total in self.plans[numbers[0]]:
            pages = indices[row : row + -(-total // page_size)].long()
            keys = torch.cat([ckv, kpe], -1)[pages].flatten(0, 1)[:total]
            for i, token in enumerate(range(first, last)):
                seen = keys[: total - (last - first) + i + 1] if mask else keys
                scores = scale * torch.cat([q_nope, q_pe], -1)[token] @ seen.T
                o[token], lse[token] = scores.softmax(-1) @ seen[:, : o.shape[-1]], scores.logsumexp(-1)


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeDecode:
    fake = FakeDecode()
    monkeypatch.setattr(mla_flashinfer, "_decode_module", lambda *args: fake)
    return fake


def steps(state: AttentionState) -> Iterator[tuple[AttentionMeta, int]]:
    """Yield decode in a bucket, decode again with other lengths, and a ragged step, each with its rows that count."""
    yield state.plan(AttentionBatch((1, 1), (39, 3), [[5, 2, 8], [1, 9, 4]]), bucket=4), 2
    yield state.plan(AttentionBatch((1, 1, 1), (7, 30, 16), [[5], [9, 1], [3, 7]]), bucket=4), 3
    yield state.plan(AttentionBatch((4, 0, 9), (21, 6, 0), [[2, 3], [4], [7]])), 13


@pytest.mark.parametrize("limit", [mla_flashinfer.MAX_ENTRIES, 9])
def test_flashinfer_decode(fake_flashinfer: FakeDecode, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_flashinfer, "MAX_ENTRIES", limit)
    monkeypatch.setattr(mla_flashinfer, "TILE", 4)
    core, plain, state = FlashInferFA3(TINY), TorchMLA(TINY), AttentionState(4, 16, 3, 16)
    cache = paged(TINY, 12)
    for meta, real in steps(state):
        q = torch.randn(meta.num_tokens, 3, 48)
        (o, lse), (expected, expected_lse) = core.decode(q, cache, meta), plain.decode(q, cache, meta)
        torch.testing.assert_close(o[:real], expected[:real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:real], expected_lse[:real], rtol=1e-5, atol=1e-5)
    assert len(fake_flashinfer.plans) > 3 if limit == 9 else len(fake_flashinfer.plans) == 3


def test_flashinfer_plans_once_a_step_for_all_layers(fake_flashinfer: FakeDecode) -> None:
    first, second, state = FlashInferFA3(TINY), FlashInferFA3(TINY), AttentionState(4, 16, 3, 16)
    cache, q = paged(TINY, 12), torch.randn(2, 3, 48)
    meta = state.plan(AttentionBatch((1, 1), (39, 3), [[5, 2, 8], [1]]), bucket=2)
    for core in (first, second, first):
        core.decode(q, cache, meta)
    assert len(fake_flashinfer.plans) == 1
    state.plan(AttentionBatch((1, 1), (9, 3), [[5], [1]]), bucket=2)
    assert [total for *_, total in fake_flashinfer.plans[-1]] == [10, 4]


@pytest.mark.parametrize("entries", [6, 8, 50])
def test_pieces_cover_every_token_once(entries: int) -> None:
    lens = [(5, 9), (0, 4), (1, 1), (40, 47), (3, 3)]
    heads, cut = 100, list(pieces(lens, 100, entries))
    assert all(sum(-(-new * heads // mla_flashinfer.TILE) for _, new, _ in part) <= entries for part in cut)
    for request, (new, total) in enumerate(lens):
        mine = [(count, length) for part in cut for r, count, length in part if r == request]
        assert sum(count for count, _ in mine) == new
        done = 0
        for count, length in mine:
            done += count
            assert length == total - new + done


def test_a_core_can_be_copied_after_use(fake_flashinfer: FakeDecode) -> None:
    core, state, cache = FlashInferFA3(TINY), AttentionState(4, 16, 3, 16), paged(TINY, 12)
    meta, q = state.plan(AttentionBatch((1, 1), (39, 3), [[5, 2, 8], [1]])), torch.randn(2, 3, 48)
    o, _ = core.decode(q, cache, meta)
    for other in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert torch.equal(other.decode(q, cache, meta)[0], o)


def test_flashinfer_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[list[int], list[int]]] = []

    def plan(memory: Any, same: Any, staged: Any, cu_q: Any, cu_k: Any, k_lens: Any, tokens: int, *rest: Any) -> Any:
        assert memory.data_ptr() == same.data_ptr() and tokens == cu_q[-1]
        assert {each.device.type for each in (cu_q, cu_k, k_lens)} == {"cpu"}
        planned.append((cu_q.tolist(), k_lens.tolist()))
        return [7]

    def ragged_run(memory: Any, same: Any, numbers: Any, q: Any, k: Any, v: Any, *rest: Any) -> None:
        cu_q, cu_k, o, lse, mask, *_, scale, _, _, _ = rest
        assert numbers == [7]
        core, bounds = TorchMLA(replace(TINY, softmax_scale=scale)), (cu_q.diff().tolist(), cu_k.diff().tolist())
        lens = RaggedLengths.of(tuple(bounds[0]), tuple(bounds[1]), bool(mask), q.device)
        result, natural = core.prefill(q, k, v, lens)
        o.copy_(result.masked_fill((natural == float("-inf")).unsqueeze(-1), 3.0))
        natural = natural.masked_fill(natural == float("-inf"), 5.0)
        if lse is not None:
            lse.copy_(natural / math.log(2.0))

    module = SimpleNamespace(plan=plan, ragged_run=ragged_run)
    monkeypatch.setattr(mla_flashinfer, "_prefill_module", lambda *args: module)
    core, plain = FlashInferFA3(TINY), TorchMLA(TINY)
    q, k, v = torch.randn(8, 3, 40), torch.randn(15, 3, 40), torch.randn(15, 3, 20)
    lens = RaggedLengths.of((6, 2), (6, 9), True, q.device)
    for need_lse in (True, False):
        o, lse = core.prefill(q, k, v, lens, need_lse)
        expected, expected_lse = plain.prefill(q, k, v, lens, need_lse)
        torch.testing.assert_close(o, expected)
        assert (lse is None) == (not need_lse)
        if need_lse:
            torch.testing.assert_close(lse, expected_lse)
    FlashInferFA3(TINY).prefill(q, k, v, lens)
    assert planned == [([0, 6, 8], [6, 9])], "one plan for all calls with the same lengths"
    blind = RaggedLengths.of((6, 2), (4, 11), True, q.device)
    for ours, theirs in zip(core.prefill(q, k, v, blind), plain.prefill(q, k, v, blind), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert planned.pop() == ([0, 2, 6, 8], [0, 4, 11])
    o, lse = core.prefill(q, k[:0], v[:0], RaggedLengths.of((6, 2), (0, 0), False, q.device))
    assert (o == 0).all() and (lse == float("-inf")).all() and len(planned) == 1


@pytest.fixture
def fake_flashmla(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Stands in for sgl_kernel.flash_mla: the schedule is a copy of the lengths."""
    seen: list[torch.Tensor] = []

    def get_mla_metadata(seq_lens: torch.Tensor, rows: int, kv_heads: int, is_fp8_kvcache: bool) -> Any:
        assert rows % TINY.num_heads == 0 and kv_heads == 1
        schedule = torch.stack([seq_lens, torch.full_like(seq_lens, rows // TINY.num_heads)])
        return schedule, torch.zeros(seq_lens.numel() + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        q: Any, cache: Any, table: Any, seq_lens: Any, rank: int, schedule: Any, splits: Any, scale: float, *,
        causal: bool, **fp8: Any,
    ) -> Any:  # fmt: skip
        seen.append(schedule)
        requests, each, heads = q.shape[:3]
        assert schedule[1].tolist() == [each] * requests and causal == (each > 1), "the schedule is of other queries"
        o, lse = torch.full((requests, each, heads, rank), torch.nan), torch.full((requests, heads, each), torch.nan)
        for row, length in enumerate(schedule[0].tolist()):
            for query in range(each):  # the last one sees all, each before it one fewer
                seen_by = max(0, length - (each - 1 - query))
                keys = cache[table[row].long(), :, 0].flatten(0, 1)[:seen_by]
                scores = scale * q[row, query] @ keys.T
                o[row, query], lse[row, :, query] = scores.softmax(-1) @ keys[:, :rank], scores.logsumexp(-1)
        return o, lse

    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_mla")
    module.__dict__.update(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", module)
    return seen


def test_flashmla_keeps_its_schedule_in_place(fake_flashmla: list[torch.Tensor]) -> None:
    core, plain, state, cache = FlashMLA(TINY), TorchMLA(TINY), AttentionState(4, 4, 3, 16), paged(TINY, 12)
    addresses = set()
    for lengths in ((39, 3), (7, 30), (0, 40)):
        meta = state.plan(AttentionBatch((1, 1), lengths, [[5, 2, 8], [1, 9, 4]]), bucket=4)
        q = torch.randn(4, 3, 48)
        (o, lse), (expected, expected_lse) = core.decode(q, cache, meta), plain.decode(q, cache, meta)
        torch.testing.assert_close(o[:2], expected[:2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:2], expected_lse[:2], rtol=1e-5, atol=1e-5)
        addresses.add(fake_flashmla[-1].data_ptr())
    assert len(addresses) == 1
    with pytest.raises(ArgumentError, match="steps without left padding: flashmla was chosen"):
        state.plan(AttentionBatch((1, 1), (9, 9), [[5], [1]], (0, 4)), bucket=4)


@pytest.mark.parametrize("new", [(4, 4), (2, 5), (8, 1), (0, 3)])
@pytest.mark.parametrize("bucket", [None, ExtendBucket(16, 2, 8), ExtendBucket(16, 3, 8)])
def test_flashmla_verifies(
    fake_flashmla: list[torch.Tensor], new: tuple[int, int], bucket: ExtendBucket | None
) -> None:
    """Several tokens a request, of requests that bring other numbers of them, the first of them a short one."""
    core, plain, state, cache = FlashMLA(TINY), TorchMLA(TINY), AttentionState(4, 16, 3, 16), paged(TINY, 12)
    for turn, cached in enumerate(((30, 3), (0, 20), (5, 1))):
        counts = new if turn < 2 else new[::-1]
        batch = AttentionBatch(counts, cached, [[5, 2, 8], [1, 9, 4]])
        meta, tokens = state.plan(batch, bucket=bucket), sum(new)
        q = torch.randn(meta.num_tokens, 3, 48)
        o, lse = core.decode(q, cache, meta)
        expected, expected_lse = plain.decode(q[:tokens], cache, AttentionState(4, 16, 3, 16).plan(batch))
        torch.testing.assert_close(o[:tokens], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:tokens], expected_lse, rtol=1e-5, atol=1e-5)
    assert bucket is None or len({schedule.data_ptr() for schedule in fake_flashmla}) == 1


def test_captured_steps_that_verify_have_a_ladder_for_each_context() -> None:
    row = Backend(
        "verifies", Named, auto_on=("cpu",), phases=("decode", "ragged"), few_only=True, captures_extend=True,
        auto_phases=("decode",), auto_from=lambda cfg: 9 if cfg.captured and cfg.context > CONTEXTS[0] else None,
    )  # fmt: skip
    MLA.add(row)
    try:
        layer = attention()
        found = {}
        for width in (4, 200):
            meta = AttentionState(2, 32, width, 16).plan(AttentionBatch((), (), []), bucket=ExtendBucket(16, 2, 8))
            found[width] = [type(layer.core(meta, tokens)) for tokens in (8, 9)]
        assert found == {4: [TorchMLA, TorchMLA], 200: [TorchMLA, Named]}
        # One state, and buckets for short contexts and for all: each with its own ladder.
        state, each = AttentionState(2, 32, 200, 16), {}
        for longest in (0, 1024, 3000, 5000):
            meta = state.plan(AttentionBatch((), (), []), bucket=ExtendBucket(16, 2, 8, longest=longest))
            each[longest] = meta.max_seq_len, type(layer.core(meta, 9))
        assert each == {0: (3200, Named), 1024: (1024, TorchMLA), 3000: (3000, Named), 5000: (3200, Named)}
        assert layer.tells_contexts(9, (1024, 3200)) and not layer.tells_contexts(8, (1024, 3200))
        assert not layer.tells_contexts(9, (3200, 4000))
        fits = AttentionBatch((2,), (1022,), [list(range(1, 65))])
        assert state.plan(fits, bucket=ExtendBucket(16, 2, 8, longest=1024)).context == 1024
        with pytest.raises(ArgumentError, match="longest >= 1025, or 0"):
            state.plan(replace(fits, prefix_lens=(1023,)), bucket=ExtendBucket(16, 2, 8, longest=1024))
    finally:
        MLA.ranked.remove(row)


def test_steps_that_verify_have_a_ladder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to eight new tokens a request; beyond, and for trees, it is another backend's."""
    monkeypatch.setattr(Named, "calls", [], raising=False)
    row = Backend("verifies", Named, auto_on=(), phases=("decode", "ragged"), few_only=True, captures_extend=True)
    MLA.add(row)
    try:
        layer = attention(backend="verifies")
        cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=30)[0]
        cache.keys.zero_()
        state = AttentionState(2, 32, 14, 16)
        for new, bucket, verified in (
            ((8, 2), None, True), ((9, 2), None, False), ((8, 2), ExtendBucket(16, 2, 8), True),
            ((8, 2), ExtendBucket(16, 2, 9), False), ((8, 2), ExtendBucket(16, 2), False),
        ):  # fmt: skip
            Named.calls.clear()
            meta = state.plan(AttentionBatch(new, (30, 3), [[1, 2, 3], [4]]), bucket=bucket)
            y = layer(torch.randn(meta.num_tokens, 32), meta, cache)
            assert (Named.calls != []) == verified and y[: sum(new)].isfinite().all()
        Named.calls.clear()
        tree = AttentionBatch((2,), (30,), [[1, 2]], (), ((-1, -1),))
        layer(torch.randn(2, 32), state.plan(tree), cache)
        assert Named.calls == []
    finally:
        MLA.ranked.remove(row)


def test_auto_verifies_by_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(REAL, phase="ragged", few=True, lse=False)
    row = MLA.named("flashmla")
    assert row.auto_phases == ("decode",) and row.takes(cfg) and not row.takes(replace(cfg, few=False))
    assert MLA.choose(cfg, "H200").refused["flashmla"] == "taken by name only in ragged"
    captured = replace(cfg, captured=True)
    assert "sgl_kernel" in MLA.choose(captured, "H200").refused["flashmla"]  # the package alone is missing
    monkeypatch.setattr(Backend, "why_not", lambda row, cfg, device, ahead=None: row.refusal(cfg, device))
    for changes, wanted in (
        ({}, "triton:23|flashmla"), ({"num_heads": 128, "context": 65536}, "triton:23|flashmla"),
        ({"context": 1024}, "triton"), ({"context": 1024, "num_heads": 32}, "triton:191|flashmla"),
        ({"context": 1024, "num_heads": 64}, "triton:95|flashmla"),
        ({"context": 1024, "num_heads": 128}, "triton:95|flashmla"), ({"num_heads": 8}, "triton"),
        ({"few": False}, "triton"),
        ({"tree": True}, "triton"), ({"kv_dtype": E4M3, "fp8_math": True}, "triton"), ({"page_size": 16}, "triton"),
    ):  # fmt: skip
        assert MLA.choose(replace(captured, **changes), "H200").name == wanted, changes
    assert MLA.choose(captured, "A100").name == "triton"
    assert MLA.choose(cfg, "H200").name == "flashinfer_fa3"  # steps that are not captured: not timed against it
    with pytest.raises(NoBackendError, match="flashmla: of several new tokens a request it takes few alone"):
        MLA.choose(replace(cfg, few=False), "H200", "flashmla")


class Named(TorchMLA):
    """Notes which core decodes."""

    calls: list[str]

    def decode(self, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(f"{self.cfg.phase}@{self.cfg.context}")
        return super().decode(q, cache, meta)


def attention(**more: Any) -> fl.MLAAttention:
    rotary = fl.RotaryEmbedding(16, max_position=20_000, interleaved_in=True)
    return fl.MLAAttention(
        32, 2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=rotary, page_size=16, dtype=torch.float32, **more,
    )  # fmt: skip


def test_a_layer_takes_the_core_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Named, "calls", [], raising=False)
    row = Backend("few_steps", Named, auto_on=(), phases=("decode", "ragged"))
    MLA.add(row)
    try:
        layer = attention(backend="few_steps")
        assert layer.decode_choice.name == "few_steps" and layer.choice.name == "torch"
        cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=300)[0]
        cache.keys.zero_()
        state, long = AttentionState(2, 8, 300, 16), list(range(1, 290))
        for batch, expected in (
            (AttentionBatch((1, 1), (3000, 3), [long, [1]]), ["decode@4096"]),
            (AttentionBatch((1, 1), (30, 3), [[1, 2], [3]]), ["decode@1024"]),
            (AttentionBatch((2, 1), (30, 3), [[1, 2, 4], [3]]), ["ragged@1024"]),
            (AttentionBatch((1, 1), (30, 3), [[1, 2], [3]], (2, 0)), []),
        ):
            Named.calls.clear()
            y = layer(torch.randn(batch.num_tokens, 32), state.plan(batch), cache)
            assert Named.calls == expected and y.isfinite().all()
        # A captured bucket's context is its capacity.
        layer(torch.randn(2, 32), state.plan(AttentionBatch((1, 1), (3, 3), [[1], [2]]), bucket=2), cache)
        assert Named.calls == ["decode@4096"]
    finally:
        MLA.ranked.remove(row)


def test_prefill_lengths_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    of = RaggedLengths.of

    def counted(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, device: torch.device) -> RaggedLengths:
        made.append(k_lens)
        return of(q_lens, k_lens, causal, device)

    monkeypatch.setattr(mla_paths.RaggedLengths, "of", counted)
    thresholds = mla_paths.MLAThresholds(prefix=4, one_shot=5, chunk=16, few=1)
    first, second = attention(thresholds=thresholds), attention(thresholds=thresholds)
    caches = [fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=6)[0] for layer in (first, second)]
    state, x = AttentionState(2, 8, 3, 16), torch.randn(5, 32)
    for prefix in (20, 24):
        meta = state.plan(AttentionBatch((3, 2), (prefix, 5), [[1, 2], [4]]))
        assert first.path(meta) == "mha_chunked"
        made.clear()
        for layer, cache in zip((first, second), caches, strict=True):
            cache.keys.normal_()
            layer(x, meta, cache)
        assert len(made) == 1 + -(-prefix // 8)


def test_tuned_kernels_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(TINY, page_size=32)
    own = TritonMLA.candidates(REAL, 8)
    best = decode_config(16, REAL.dtype, REAL.kv_dtype, 64)
    assert own[0] == {name: getattr(best, name) for name in KNOBS} and len(own) <= 40
    assert len({tuple(each.items()) for each in own}) == len(own)
    assert 1 < len(TritonMLA.candidates(replace(REAL, phase="extend"), 4096)) <= 40
    with pytest.raises(ArgumentError, match="the keys block_m, block_n, num_warps, num_stages, per_sm"):
        TritonMLA(cfg, {"block_m": 16})
    state = AttentionState(2, 2, 6, 32)
    meta = state.plan(AttentionBatch((1, 1), (150, 70), [[5, 2, 8, 1, 3], [9, 4, 6]], (40, 0)))
    cache, q = paged(cfg, 12), torch.randn(2, 3, 48)
    expected, expected_lse = TorchMLA(cfg).decode(q, cache, meta)
    for block_n in (16, 32, 64):
        tuned = TritonMLA(cfg, dict(zip(KNOBS, (16, block_n, 4, 1, 1), strict=True)))
        o, lse = tuned.decode(q, cache, meta)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal", "expected"),
    [
        ((3, 2), (3, 9), True, ([3, 2], [3, 9], [])),
        ((5, 2), (2, 0), True, ([3, 2, 2, 0], [0, 2, 0, 0], [0, 1, 2, 5, 6])),
        ((5, 2, 1), (2, 0, 4), False, ([5, 2, 0, 1], [2, 0, 0, 4], [5, 6])),
        ((0, 2), (7, 2), True, ([0, 2], [7, 2], [])),
    ],
)
def test_tokens_that_see_nothing_are_set_apart(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, expected: tuple[list[int], ...]
) -> None:
    cut = seeing(RaggedLengths.of(q_lens, k_lens, causal, torch.device("cpu")))
    assert cut == expected
    assert sum(cut[0]) == sum(q_lens) and sum(cut[1]) == sum(k_lens)
