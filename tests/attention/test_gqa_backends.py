"""gqa's rows of kernel packages: what they refuse, and their own logic over packages that are played by torch."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.context_buckets import CONTEXTS
from fastlayers.attention.gqa import flashinfer
from fastlayers.attention.gqa.cases import SPEC
from fastlayers.attention.gqa.config import GQA, GQAConfig, split_bytes
from fastlayers.attention.gqa.layer import Attention
from fastlayers.attention.gqa.reference import ReferenceGQA
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.registry import Backend
from fastlayers.runtime.graphs import decode_buckets
from fastlayers.testing.parity import check_parity

LLAMA = GQAConfig(32, 8, 128, 128**-0.5)
MANY_TO_ONE = {"lse": False, "num_heads": 64, "num_kv_heads": 1}


@pytest.mark.parametrize(
    ("name", "device", "change", "words"),
    [
        ("flashinfer_fa3", "H200", {}, None),
        ("flashinfer_fa3", "A100", {}, "needs sm_90"),
        ("flashinfer_fa3", "B200", {}, "for sm_90 only"),
        ("flashinfer_fa3", "H200", {"phase": "decode"}, "serves extend only"),
        ("flashinfer_fa3", "H200", {"phase": "padded"}, "serves extend only"),
        ("flashinfer_fa3", "H200", {"kv_dtype": torch.float8_e4m3fn}, "a cache of torch.float8_e4m3fn"),
        ("flashinfer_fa2", "A100", {"lse": False}, None),
        ("flashinfer_fa2", "A100", {}, "shows in an LSE"),
        ("flashinfer_fa2", "H200", {"kv_dtype": torch.float8_e4m3fn, "lse": False}, None),
        ("flashinfer_fa2", "H200", {"head_dim": 96}, "head_dim 96 is not one of 64, 128, 256"),
        ("flashinfer_fa2", "H200", {"dtype": torch.float32}, "neither float16 nor bfloat16"),
        ("flashinfer_fa2", "H200", {"phase": ""}, "not every phase"),
        ("flashinfer_fa2", "H200", {"lse": False, "num_kv_heads": 2, "head_dim": 256}, None),
        ("flashinfer_fa2", "H200", MANY_TO_ONE, "take 1064 MiB, more than 512"),
        ("flashinfer_fa2", "H20", MANY_TO_ONE, "take 628 MiB, more than 512"),
        ("flashinfer_fa2", "H200", {**MANY_TO_ONE, "phase": "decode"}, "take 532 MiB, more than 512"),
        ("flashinfer_fa2", "H20", {**MANY_TO_ONE, "phase": "decode"}, None),
        ("fa3", "H200", {"softcap": 30.0}, "built without softcap"),
        ("xqa", "H200", {"phase": "decode", "lse": False}, None),
        ("xqa", "H200", {"phase": "decode", "lse": False, "sinks": True, "window": 128}, None),
        ("xqa", "H200", {"phase": "decode"}, "returns no LSE"),
        ("xqa", "H200", {"phase": "decode", "lse": False, "softcap": 30.0}, "no softcap"),
        ("xqa", "H200", {"phase": "decode", "lse": False, "page_size": 1}, "page_size 1"),
        ("xqa", "A100", {"phase": "decode", "lse": False}, "needs sm_90"),
        ("fa3", "H200", {"sinks": True, "lse": False}, None),
        ("fa3", "H200", {"sinks": True}, "rounds sinks"),
        ("fa3", "B200", {}, "for sm_90 only"),
        ("sdpa", "A100", {"lse": False}, None),
        ("sdpa", "H200", {"lse": False, "sinks": True}, "sinks"),
        ("sdpa", "H200", {}, "an LSE"),
        ("trtllm_gen", "B200", {"lse": False, "sinks": True, "window": 128}, None),
        ("trtllm_gen", "B200", {"lse": False, "phase": "decode", "kv_dtype": torch.float8_e4m3fn}, None),
        ("trtllm_gen", "H200", {"lse": False}, "needs sm_100, this is sm_90"),
        ("trtllm_gen", "cpu", {"lse": False}, "needs sm_100, this is cpu"),
        ("trtllm_gen", "B200", {}, "returns no LSE"),
        ("trtllm_gen", "B200", {"lse": False, "page_size": 128}, "page_size 128 is not one of 16, 32, 64"),
        ("trtllm_gen", "B200", {"lse": False, "head_dim": 96}, "head_dim 96"),
        ("trtllm_gen", "B200", {"lse": False, "softcap": 30.0}, "no softcap"),
        ("trtllm_gen", "B200", {"lse": False, "dtype": torch.float32}, "neither float16 nor bfloat16"),
        ("trtllm_gen", "B200", {"lse": False, "phase": "padded"}, "serves decode and extend only"),
        ("triton", "H200", {"phase": "padded"}, None),
        ("triton", "cpu", {}, None),
    ],
)
def test_refusals(name: str, device: str, change: dict[str, Any], words: str | None) -> None:
    why = GQA.named(name).refusal(replace(LLAMA, **{"phase": "extend", **change}), DESCRIBED[device])
    assert why is None if words is None else why is not None and words in why


def test_the_guard_of_trtllm_gen_is_never_chosen() -> None:
    """On the hardware that it is for it is shown, not chosen; asked for by name it says that it has not run."""
    cfg = replace(LLAMA, lse=False, phase="decode", sinks=True)
    row = next(row for row in fl.backends("gqa", device="B200", cfg=cfg) if row.name == "trtllm_gen")
    assert row.hardware and not row.automatic and "not run on this hardware" in row.reason
    assert GQA.choose(cfg, "B200").name != "trtllm_gen"
    with pytest.raises(NoBackendError, match="needs sm_100, this is cpu"):
        GQA.choose(cfg, "cpu", "trtllm_gen")
    with pytest.raises(NoBackendError, match="it has never been run on sm_100 hardware"):
        GQA.named("trtllm_gen").load()(cfg)


def test_left_padding_takes_a_backend_that_masks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with a backend that cannot: the padded step goes elsewhere and is right."""
    taken: list[str] = []

    class Blind:
        def __init__(self, cfg: GQAConfig) -> None:
            self.cfg = cfg

        def __call__(self, q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            taken.append(self.cfg.phase)
            return torch.zeros_like(q), q.new_empty(0)

    row = Backend("blind", Blind, phases=("decode", "extend"), auto_on=("cpu",))
    monkeypatch.setattr(GQA, "ranked", [row, *GQA.ranked])
    rotary = fl.RotaryEmbedding(16, max_position=64)
    layer = Attention(32, 2, 1, 16, rotary=rotary, page_size=16, dtype=torch.float32, backend="blind")
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=3)[0]
    state = AttentionState(2, 8, 1, 16)
    hidden = torch.randn(8, 32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    plain = layer(hidden, state.plan(AttentionBatch((4, 4), (0, 0), [[1], [2]])), cache)
    assert taken == ["extend"] and not plain.any()
    padded = layer(hidden, state.plan(AttentionBatch((4, 4), (0, 0), [[1], [2]], (0, 1))), cache)
    assert taken == ["extend"] and padded[:4].abs().min() > 0
    layer(hidden[:2], state.plan(AttentionBatch((1, 1), (4, 4), [[1], [2]])), cache)
    assert taken == ["extend", "decode"]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last queries [Q, Hq, D] over keys [S, Hkv, D]; the LSE is natural, [Q, Hq]."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = scale * torch.einsum("qhd,shd->hqs", q.float(), k)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    at, place = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (place <= at) & (place > at - (window or len(k)))
    s = s.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqs,shd->qhd", s.softmax(-1), v), s.logsumexp(-1).T


class FakePrefill:
    """Stands for FlashInfer's module: plans nothing, follows offsets and page numbers as the kernels do."""

    def __init__(self, *arguments: Any) -> None:
        self.windowed, self.capped = arguments[8:10]

    def plan(self, workspace: torch.Tensor, entries: torch.Tensor, staged: torch.Tensor, *rest: Any) -> list[int]:
        first, pages, lens, tokens, requests = rest[:5]
        assert {each.device.type for each in (first, pages, lens)} == {"cpu"}
        assert len(first) == len(pages) == requests + 1 == len(lens) + 1 and int(first[-1]) == tokens
        assert staged.numel() == entries.numel() and rest[11] is True
        assert (rest[12] >= 0) == self.windowed
        return [int(rest[8]), requests]

    def paged_run(self, *given: Any) -> None:
        _, _, (_, requests), q, k_cache, v_cache, first, offset, pages, last, o, lse = given[:12]
        assert given[12:14] == (1, 0)
        window_left, softcap, scale = given[14], given[22], given[23]
        assert (softcap > 0) == self.capped
        for b in range(requests):
            own = pages[offset[b] : offset[b + 1]].long()
            length = (len(own) - 1) * k_cache.shape[1] + int(last[b]) if len(own) else 0
            rows = slice(int(first[b]), int(first[b + 1]))
            k, v = (cache[own].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            result = dense(q[rows], k, v, scale, window_left + 1, softcap)
            o[rows] = result[0].to(o.dtype)
            if lse is not None:
                lse[rows] = result[1] / math.log(2.0)


def fake(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Install modules with these attributes; a double underscore stands for a dot."""
    for name, attributes in modules.items():
        made = ModuleType(name.replace("__", "."))
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, made.__name__, made)


def small(phase: str) -> list[Any]:
    found = [case for case in SPEC.cases if case.small and case.cfg.phase == phase and case.name != "empty"]
    return [case for case in found if case.cfg.causal]  # all of the packages' rows refuse the others


@pytest.mark.parametrize("case", small("decode") + small("extend"), ids=lambda case: case.name)
def test_flashinfer_logic(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed pages, padded rows, windows, soft caps, base 2, sinks by way of the LSE."""
    from fastlayers.attention.gqa.flashinfer import FlashInferFA2

    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    assert check_parity("gqa", Backend("fake", FlashInferFA2), case)


def test_flashinfer_refuses_a_padded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.attention.gqa.flashinfer import FlashInferFA2

    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    with pytest.raises(ArgumentError, match="left padding"):
        check_parity("gqa", Backend("fake", FlashInferFA2), "extend_left_padded")


def test_flashinfer_replans_into_the_same_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.attention.gqa.flashinfer import FlashInferFA3

    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    impl, state = FlashInferFA3(LLAMA), AttentionState(4, 4, 3, 64)
    caches = torch.randn(2, 8, 64, 8, 128, dtype=torch.bfloat16)
    q = torch.randn(4, 32, 128, dtype=torch.bfloat16)
    meta = state.plan(AttentionBatch((1, 1), (100, 3), [[1, 2], [3]]), bucket=4)
    impl(q, *caches, meta, None)
    plan = meta.plan_of(impl.key, lambda _: pytest.fail("planned twice"))
    before = (plan.index.data_ptr(), plan.pages.data_ptr(), plan.entries.data_ptr())
    # Whatever torch's default device is, what the package reads lies on the host.
    with torch.device("meta"):
        meta = state.plan(AttentionBatch((1, 1, 1), (0, 64, 130), [[7], [5, 6], [4, 2, 1]]), bucket=4)
    assert (plan.index.data_ptr(), plan.pages.data_ptr(), plan.entries.data_ptr()) == before
    assert [plan.index[0].tolist(), plan.index[1].tolist()] == [[0, 1, 2, 3, 4], [0, 1, 3, 6, 7]]
    assert plan.index[2, :-1].tolist() == [1, 1, 3, 1]
    assert plan.pages[:7].tolist() == [7, 5, 6, 4, 2, 1, 0]


def test_page_offsets_lie_where_kernels_expect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an address divides by 16 is compiled in: it must not depend on the number of requests."""
    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    given: list[Any] = []
    pack = MagicMock()
    pack.__getitem__.return_value = lambda *arguments, **constants: given.append(arguments)
    monkeypatch.setattr(flashinfer, "_pack_kernel", pack)
    impl, state = flashinfer.FlashInferFA3(LLAMA), AttentionState(20, 40, 1, 64)
    for count in range(1, 21):
        meta = state.plan(AttentionBatch((2,) * count, (0,) * count, [[1]] * count))
        plan = flashinfer.Schedule(impl, meta)
        plan.plan(meta)
        assert plan.index.shape == (3, count + 1) and plan.index[1].tolist() == [*range(count + 1)]
    assert len(given) == 20 and all(x.data_ptr() % 16 == 0 for arguments in given for x in arguments[:3])


def bytes_asked_for(cfg: GQAConfig, sms: int, query: list[int], keys: list[int], page: int, captured: bool) -> int:
    """Follow the package's plan: the fewest pages a part with which all tiles of rows get a program."""
    rows, tokens = [count * cfg.group for count in query], sum(query)
    longest = (tokens - len(query) + 1) * cfg.group if captured else sum(rows) // len(rows)
    tile = 128 if longest > 64 and cfg.head_dim < 256 else 64 if longest > 16 else 16
    pages, room = [max(1, -(-count // page)) for count in keys], 2 * sms // cfg.num_kv_heads

    def tiles(size: int) -> int:
        return sum(-(-row // tile) * -(-count // size) for row, count in zip(rows, pages, strict=True))

    least, most = max(1, 128 // page), max(pages)
    size = next((size for size in range(least, most) if tiles(size) <= room), max(least, most))
    if not captured and size >= most:
        return 0
    count = max(room, -(-tokens * cfg.group // tile) + len(query) - 1) if captured else tiles(size)
    return cfg.num_heads * count * tile * (cfg.head_dim + 1) * 4


QWEN = replace(LLAMA, num_kv_heads=4, lse=False)


@pytest.mark.parametrize("cfg", [QWEN, replace(QWEN, num_heads=8, num_kv_heads=8), replace(QWEN, head_dim=256)])
def test_parts_of_split_keys_fit(cfg: GQAConfig) -> None:
    largest = 0
    for query, keys in (
        ([1], [5000]), ([1] * 3, [90, 3000, 700]), ([1] * 512, [130] * 512), ([1] * 70, [1] * 69 + [9000]), ([1], [1]),
        ([9, 300], [4000, 300]), ([3, 1, 1], [5000, 800, 64]), ([2000], [2000]), ([40] * 9, [2000] * 9),
    ):  # fmt: skip
        for captured in (False, True) if max(query) == 1 else (False,):
            asked = bytes_asked_for(cfg, 132, query, keys, 64, captured)
            room = split_bytes(cfg, 132, len(query), sum(query), captured)
            assert asked <= room and (asked == room or not captured)
            largest = max(largest, asked)
    assert largest > 0


def test_room_for_split_keys_follows_the_step() -> None:
    wide = replace(QWEN, num_heads=16, num_kv_heads=1, head_dim=256)
    assert split_bytes(wide, 132, 1, 4096, False) > 128 << 20
    assert split_bytes(QWEN, 132, 64, 64, True) < 32 << 20
    # More tiles than programs: a large bucket needs room for each.
    assert split_bytes(QWEN, 132, 512, 512, True) > 128 << 20 > split_bytes(QWEN, 132, 512, 512, False)


def test_layers_of_a_state_share_the_largest_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured step was given stays where it is when another one needs more."""
    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    state, caches = AttentionState(8, 8, 3, 64), torch.randn(2, 8, 64, 8, 128, dtype=torch.bfloat16)

    def place_of(heads: int, bucket: int) -> int:
        impl = flashinfer.FlashInferFA2(replace(LLAMA, num_heads=heads, lse=False))
        meta = state.plan(AttentionBatch((1, 1), (100, 3), [[1, 2], [3]]), bucket=bucket)
        impl(torch.randn(bucket, heads, 128).bfloat16(), *caches, meta, None)
        plan = meta.plan_of(impl.key, lambda _: pytest.fail("planned twice"))
        assert plan.workspace.numel() >= split_bytes(impl.cfg, 1, bucket, bucket, True)
        return int(plan.workspace.data_ptr())

    sizes = ((32, 8), (8, 8), (32, 2))
    before = [place_of(*size) for size in sizes]
    assert len(set(before)) == 1 and place_of(256, 2) not in before
    assert [place_of(*size) for size in sizes] == before


def test_workspaces_that_are_kept_stay_below_twice_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that are captured when first met, smallest first: each asks for more than the one before."""
    fake(monkeypatch, flashinfer={}, flashinfer__prefill={"get_batch_prefill_module": FakePrefill})
    monkeypatch.setattr(flashinfer, "as_device", lambda _: DESCRIBED["H200"])
    monkeypatch.setattr(flashinfer, "_pack_kernel", MagicMock())
    impl, state = flashinfer.FlashInferFA2(replace(LLAMA, lse=False)), AttentionState(512, 512, 1, 64)

    def workspace_of(bucket: int) -> torch.Tensor:
        meta = state.plan(AttentionBatch((1,), (3,), [[1]]), bucket=bucket)
        plan = meta.plan_of(impl.key, lambda step: flashinfer.Schedule(impl, step))
        return plan.workspace

    given = {bucket: workspace_of(bucket) for bucket in decode_buckets(512)}
    needed = {bucket: split_bytes(impl.cfg, 132, bucket, bucket, True) for bucket in given}
    assert all(memory.numel() >= needed[bucket] for bucket, memory in given.items())
    kept = {memory.data_ptr(): memory.numel() for memory in given.values()}
    assert len(kept) > 1 and sum(kept.values()) < 2 * max(kept.values()) < 4 * max(needed.values())
    assert all(workspace_of(bucket).data_ptr() == memory.data_ptr() for bucket, memory in given.items())


@pytest.mark.parametrize("case", [c for c in small("decode") if not c.cfg.lse], ids=lambda case: case.name)
def test_xqa_logic(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale that the kernel expects, windows, sinks by key head."""
    from fastlayers.attention.gqa.xqa import XQA

    def xqa(q: Any, k_cache: Any, v_cache: Any, table: Any, lens: Any, o: Any, parts: Any, counters: Any, *rest: Any,
            sinks: Any, q_scale: float, sliding_win_size: int) -> None:  # fmt: skip
        kv_heads, page_size = rest
        assert lens.dtype == torch.uint32 and counters.numel() >= len(q) * kv_heads and not counters.int().any()
        for b, length in enumerate(lens[:, 0].tolist()):
            place = torch.arange(length)
            page = table[b].long()[place // page_size]
            k, v = (cache[page, place % page_size] for cache in (k_cache, v_cache))
            result, lse = dense(q[b], k, v, q_scale / q.shape[-1] ** 0.5, sliding_win_size, 0.0)
            if sinks is not None:
                result = result * torch.sigmoid(lse - sinks.flatten())[..., None]
            o[b] = result.to(o.dtype)

    fake(monkeypatch, flashinfer={}, flashinfer__xqa={"xqa": xqa})
    assert check_parity("gqa", Backend("fake", XQA), case)


@pytest.mark.parametrize(
    "case",
    [c for c in small("decode") + small("extend") if not (c.cfg.sinks and c.cfg.lse)],
    ids=lambda case: case.name,
)
def test_fa3_logic(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of its call, and both layouts of its LSE."""
    from fastlayers.attention.gqa.fa3 import FA3

    def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, **given: Any) -> Any:
        it = SimpleNamespace(**{"cu_seqlens_q": None, **given})
        rows = q.flatten(0, 1) if q.dim() == 4 else q
        edges = list(range(len(rows) + 1)) if it.cu_seqlens_q is None else it.cu_seqlens_q.tolist()
        o, lse = torch.empty_like(rows), torch.empty(rows.shape[:2])
        for b, length in enumerate(it.cache_seqlens.tolist()):
            place = torch.arange(length)
            page = it.page_table[b].long()[place // k_cache.shape[1]]
            k, v = (cache[page, place % k_cache.shape[1]] for cache in (k_cache, v_cache))
            mine = slice(edges[b], edges[b + 1])
            part, part_lse = dense(rows[mine], k, v, it.softmax_scale, it.window_size[0] + 1, it.softcap)
            if it.sinks is not None:
                part = part * torch.sigmoid(part_lse - it.sinks.float())[..., None]
                part_lse = torch.logaddexp(part_lse, it.sinks.float())
            o[mine], lse[mine] = part.to(o.dtype), part_lse
        assert it.causal and it.return_softmax_lse
        return (o.unsqueeze(1), lse.unsqueeze(2)) if q.dim() == 4 else (o, lse.T)

    fake(monkeypatch, flash_attn_interface={"flash_attn_with_kvcache": flash_attn_with_kvcache})
    assert check_parity("gqa", Backend("fake", FA3), case)


@pytest.mark.parametrize("seed", [0, 1])
def test_sdpa_ways_agree(seed: int) -> None:
    """One request after the other, and the way under capture: all at once."""
    from fastlayers.attention.gqa.sdpa import SDPA

    case = SPEC.case("extend_no_lse")
    inputs, impl = SPEC.make_inputs(case, torch.device("cpu"), seed), SDPA(case.cfg)
    assert check_parity("gqa", Backend("fake", SDPA), case, seed=seed)
    meta = SPEC.prepare(impl, inputs).meta
    caches = inputs["k_cache"].flatten(0, 1), inputs["v_cache"].flatten(0, 1)
    ways = [way(inputs["q"], caches, meta).float() for way in (impl._one_by_one, impl._padded)]
    torch.testing.assert_close(*ways, rtol=1e-2, atol=2e-2)


def test_tuning_key_names_what_changes_kernels() -> None:
    keys = {
        replace(LLAMA, **change).tuning_key()
        for change in (
            {}, {"phase": "decode"}, {"window": 128}, {"sinks": True}, {"page_size": 16}, {"num_kv_heads": 4},
            {"kv_dtype": torch.float8_e4m3fn}, {"head_dim": 64}, {"softcap": 30.0},
            {"phase": "decode", "context": 1024},
        )
    }  # fmt: skip
    assert len(keys) == 10 and replace(LLAMA, softmax_scale=1.0, lse=False).tuning_key() in keys
    # Keys before a window do not count: contexts beyond it are one.
    assert {replace(LLAMA, window=128, context=context).context for context in CONTEXTS} == {1024}


@pytest.mark.parametrize("cfg", [LLAMA, replace(LLAMA, window=128, head_dim=64), replace(LLAMA, head_dim=256)])
def test_candidates_start_with_the_rule(cfg: GQAConfig) -> None:
    from fastlayers.attention.gqa.launch_config import decode_config
    from fastlayers.attention.gqa.triton import TritonGQA, tile_config

    extend = TritonGQA.candidates(replace(cfg, phase="extend"), 2048)
    assert extend[0] == tile_config(2048, cfg)
    for requests in (1, 16, 128):
        decode = TritonGQA.candidates(replace(cfg, phase="decode"), requests)
        assert decode[0] == decode_config(cfg, requests)
        assert all(1 < len(each) == len({tuple(one.items()) for one in each}) <= 40 for each in (decode, extend))


def test_splits_follow_host_bounds() -> None:
    """(at most, usually): few requests share the GPU, many are cut only where some may be long."""
    from fastlayers.attention.gqa.launch_config import MANY, decode_config, splits_of

    oss = replace(LLAMA, num_heads=64, head_dim=64)
    for cfg, requests, keys, expected in (
        (oss, 1, 576, (9, 9)), (oss, 1, 100_000, (33, 33)), (oss, 16, 1024, (2, 2)), (oss, 32, 640, (1, 1)),
        (oss, 32, 4096, (2, 1)), (LLAMA, 24, 6000, (3, 1)), (LLAMA, 24, 60_000, (4, 1)), (LLAMA, 128, 100_000, (1, 1)),
        (replace(oss, window=128), 1, 128, (1, 1)),
    ):  # fmt: skip
        tiles = requests * cfg.num_kv_heads
        it = decode_config(cfg, requests)
        found = splits_of(tiles, keys, it["PROGRAMS"], it["MIN_KEYS"], it["MAX_KEYS"])
        assert found == expected and tiles * found[0] <= max(tiles, MANY)


def test_a_few_new_tokens_have_shorter_parts() -> None:
    from fastlayers.attention.gqa.triton import _least_part, _num_splits

    # 4 tokens of Qwen3-8B (groups of 4), of Qwen3-30B-A3B (of 8), 16 of the former; behind a window.
    assert [_least_part(4, 4, 0), _least_part(4, 8, 0), _least_part(16, 4, 0), _least_part(4, 8, 128)] == [
        128, 128, 256, 256,
    ]  # fmt: skip
    # Of a tile of 8 key heads: whole where that is a part of the usual length, at most as many as fill the GPU.
    assert [_num_splits(8, keys, 128) for keys in (100, 256, 257, 1024, 4096, 40960)] == [1, 1, 2, 8, 32, 32]
    assert [_num_splits(8, keys) for keys in (256, 257, 1024, 4096, 40960)] == [1, 2, 4, 16, 32]


@pytest.mark.parametrize("cached", [(0, 3), (60, 125), (129, 400), pytest.param((1000, 700), marks=pytest.mark.slow)])
def test_a_verifying_bucket_of_many_parts(cached: tuple[int, ...]) -> None:
    """Parts of which some are empty, as lengths are far below the bucket's; edges of blocks among the new tokens."""
    from fastlayers.attention.gqa.triton import TritonGQA, _num_splits

    cfg = GQAConfig(
        4, 2, 16, 0.25, page_size=16, dtype=torch.float32, kv_dtype=torch.float32, phase="extend", captured=True
    )
    assert _num_splits(1 * 2 * 2, 64 * 16, 128) == 8
    table = [list(range(1 + 64 * b, 65 + 64 * b)) for b in range(2)]
    caches, state = torch.randn(2, 129, 16, 2, 16), AttentionState(2, 16, 64, 16)
    meta = state.plan(AttentionBatch((4, 3), cached, table), bucket=ExtendBucket(8, 2, 4))
    q = torch.randn(8, 4, 16)
    o, lse = TritonGQA(cfg)(q, *caches, meta, None)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0])
    with_sinks, fewer = replace(cfg, sinks=True), slice(0, 7)
    found = TritonGQA(with_sinks)(q, *caches, meta, sinks)
    for one, other in zip(found, ReferenceGQA(with_sinks)(q, *caches, meta, sinks), strict=True):
        torch.testing.assert_close(one[fewer], other[fewer], rtol=1e-5, atol=1e-5)
    for b, rows in enumerate((slice(0, 4), slice(4, 7))):
        length = cached[b] + rows.stop - rows.start
        k, v = (cache[table[b]].flatten(0, 1)[:length] for cache in caches)
        expected, expected_lse = dense(q[rows], k, v, 0.25, 0, 0.0)
        torch.testing.assert_close(o[rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[rows], expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize("packed", [0, 8])
def test_only_the_plan_is_read_before_the_wait(packed: int) -> None:
    from fastlayers.attention.gqa.triton import _gqa_kernel
    from fastlayers.testing.compile_check import KernelBuild, compiled_for

    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
    pointers |= dict.fromkeys(("sinks_ptr", "o_ptr", "lse_ptr", "part_ptr", "part_lse_ptr"), "*fp32")
    pointers |= dict.fromkeys(("table_ptr", "lens_ptr", "starts_ptr", "cu_ptr"), "*i32")
    pointers |= dict.fromkeys(("tree_ptr", "positions_ptr"), "*i64")
    sizes = dict.fromkeys(("q_token", "q_head", "table_row", "requests"), "i32")
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "PAGE": 64, "WINDOW": 0, "SOFTCAP": False, "SINKS": False,
        "TREE": False, "CAUSAL": True, "SPLITS": 8, "LEAST": 128, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 128,
        "BLOCK_B": packed, "PDL": True,
    }  # fmt: skip
    signature = pointers | sizes | dict.fromkeys(("scale", "softcap"), "fp32")
    build = KernelBuild("gqa", _gqa_kernel, signature, constants, 4, 5, ("q_token", "q_head", "table_row"))
    before, wait, after = compiled_for(build).asm["ptx"].partition("griddepcontrol.wait")
    assert wait and "st.global" not in before and "cp.async" not in before
    # Lengths, starts and where tokens begin, whole numbers of 32 bits; queries are read behind the wait.
    loads = re.findall(r"ld\.global\S*", before)
    assert len(loads) >= 4 and all(re.fullmatch(r"ld\.global(\.v[24])?\.b32", load) for load in loads), loads
    assert "ld.global.v4.b32" in after


@pytest.mark.parametrize(
    ("lens", "config"),
    [
        ((1, 1, 1), {}), ((300, 1, 77), {}), ((300, 1, 77), {"MIN_KEYS": 64}), ((300, 1, 77), {"PROGRAMS": 1}),
        ((300, 1, 77), {"PROGRAMS": 1, "MAX_KEYS": 128}), ((2000,), {}), ((2000,), {"PROGRAMS": 8}),
    ],
)  # fmt: skip
def test_parts_cover_every_key_once(lens: tuple[int, ...], config: dict[str, int]) -> None:
    """One part a request, few that the last program adds up, many for the second kernel; counters are zero again."""
    from fastlayers.attention.gqa.triton import TritonGQA

    cfg = GQAConfig(4, 2, 16, 0.25, page_size=16, dtype=torch.float32, kv_dtype=torch.float32, phase="decode")
    table, state = [list(range(1 + 130 * b, 131 + 130 * b)) for b in range(len(lens))], None
    caches = torch.randn(2, 131 + 130 * len(lens), 16, 2, 16)
    state = AttentionState(len(lens), len(lens), 130, 16)
    meta = state.plan(AttentionBatch((1,) * len(lens), tuple(n - 1 for n in lens), table))
    q = torch.randn(len(lens), 4, 16)
    o, lse = TritonGQA(cfg, config)(q, *caches, meta, None)
    for b, length in enumerate(lens):
        k, v = (cache[table[b]].flatten(0, 1)[:length] for cache in caches)
        expected, expected_lse = dense(q[b : b + 1], k, v, 0.25, 0, 0.0)
        torch.testing.assert_close(o[b : b + 1], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-5, atol=1e-5)
    assert not meta.plan_of(("gqa", "triton", 2), lambda _: pytest.fail("no counters")).done.any()
