"""Attention: the core against a dense oracle, the layer against Hugging Face, sharding, errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastlayers as fl
from fastlayers.attention.gqa import triton
from fastlayers.attention.gqa.cases import SPEC
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.gqa.layer import Attention, key_axis
from fastlayers.attention.gqa.reference import ReferenceGQA
from fastlayers.attention.gqa.torch import TorchGQA
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.weights import slots

IMPLS = [TorchGQA, ReferenceGQA]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One request through torch's attention with an explicit mask: q [Q, Hq, D], k and v [S, Hkv, D]."""
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    place = torch.arange(len(k))[None, :]
    mask = place <= at
    if window is not None:
        mask &= place > at - window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=scale).transpose(0, 1)


def step(
    cfg: GQAConfig, query: tuple[int, ...], prefix: tuple[int, ...], **plan: Any
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor, Any]:
    """Return q, the keys and values of each request, both caches, and the metadata."""
    lengths = [p + n for p, n in zip(prefix, query, strict=True)]
    table = whole_pages(lengths[::-1], cfg.page_size)[::-1]  # the first request has the last pages
    pages = 1 + sum(map(len, table))
    caches = [torch.zeros(pages, cfg.page_size, cfg.num_kv_heads, cfg.head_dim) for _ in "kv"]
    rows = []
    for b, length in enumerate(lengths):
        pair = torch.randn(2, length, cfg.num_kv_heads, cfg.head_dim)
        for j in range(length):
            for cache, x in zip(caches, pair, strict=True):
                cache[table[b][j // cfg.page_size], j % cfg.page_size] = x[j]
        rows.append((pair[0], pair[1]))
    state = AttentionState(len(query) + 2, 64, max(map(len, table)) + 1, cfg.page_size)
    meta = state.plan(AttentionBatch(query, prefix, table), **plan)
    q = torch.randn(meta.num_tokens, cfg.num_heads, cfg.head_dim)
    return q, rows, *caches, meta


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("query", [(1, 1, 1), (4, 0, 9)])
def test_equals_dense(impl: Any, page_size: int, window: int | None, query: tuple[int, ...]) -> None:
    cfg = GQAConfig(6, 2, 16, 0.3, window, page_size=page_size, dtype=torch.float32, kv_dtype=torch.float32)
    q, rows, k_cache, v_cache, meta = step(cfg, query, (20, 3, 0))
    o, _ = impl(cfg)(q, k_cache, v_cache, meta, None)
    parts = q.split(query)
    expected = torch.cat([dense(part, k, v, 0.3, window) for part, (k, v) in zip(parts, rows, strict=True)])
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("query", [(1, 4, 1), (4, 0, 9)])
def test_without_causal_every_token_sees_what_the_last_one_does(impl: Any, query: tuple[int, ...]) -> None:
    cfg = GQAConfig(4, 2, 16, 0.3, page_size=4, dtype=torch.float32, kv_dtype=torch.float32, causal=False)
    q, rows, k_cache, v_cache, meta = step(cfg, query, (20, 3, 0))
    o, _ = impl(cfg)(q, k_cache, v_cache, meta, None)
    expected = []
    for part, (k, v) in zip(q.split(query), rows, strict=True):
        k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        expected.append(F.scaled_dot_product_attention(part.transpose(0, 1), k, v, scale=0.3).transpose(0, 1))
    torch.testing.assert_close(o, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_without_causal_windows_and_causal_rows_are_refused() -> None:
    for more in ({"window": 8}, {"tree": True}):
        with pytest.raises(ArgumentError, match=r"causal is False with .*accepted: True for windows and trees"):
            GQAConfig(4, 2, 64, 0.3, causal=False, **more)
    cfg = GQAConfig(4, 2, 64, 0.3, causal=False, lse=False)
    devices = [as_device(name) for name in ("H200", "B200")]
    refused = {row.name for row in GQA.ranked for d in devices if "masks later tokens" in str(row.refuse(cfg, d))}
    assert refused == {row.name for row in GQA.ranked} - {"triton", "torch", "reference"}


def test_padded_extend_equals_one_by_one() -> None:
    """The way taken on CUDA, without reading lengths on the host."""
    cfg = GQAConfig(4, 2, 16, 0.25, 7, 20.0, True, 16, torch.float32, torch.float32)
    q, _, k_cache, v_cache, meta = step(cfg, (4, 0, 9, 1), (20, 3, 0, 30))
    impl, sinks = TorchGQA(cfg), torch.randn(4)
    caches = (k_cache.flatten(0, 1), v_cache.flatten(0, 1))
    for a, b in zip(impl._padded(q, caches, meta, sinks), impl._one_by_one(q, caches, meta, sinks), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_query_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = GQAConfig(4, 2, 16, 0.25, dtype=torch.float32, kv_dtype=torch.float32, page_size=16)
    q, _, k_cache, v_cache, meta = step(cfg, (23, 5), (8, 0))
    whole = TorchGQA(cfg)(q, k_cache, v_cache, meta, None)
    monkeypatch.setattr("fastlayers.attention.gqa.torch.MAX_SCORES", 500)
    for a, b in zip(TorchGQA(cfg)(q, k_cache, v_cache, meta, None), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_sink_is_a_column_without_value(impl: Any) -> None:
    cfg = GQAConfig(2, 1, 8, 0.5, sinks=True, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    q, ((k, v),), k_cache, v_cache, meta = step(cfg, (1,), (11,))
    sinks = torch.tensor([0.7, -1.0])
    o, lse = impl(cfg)(q, k_cache, v_cache, meta, sinks)
    for h in range(2):
        scores = torch.cat([0.5 * (k[:, 0] @ q[0, h]), sinks[h : h + 1]])  # the sink is not scaled
        torch.testing.assert_close(o[0, h], scores.softmax(0)[:-1] @ v[:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[0, h], scores.logsumexp(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_sinks(impl: Any) -> None:
    cfg = GQAConfig(2, 1, 8, 0.5, sinks=True, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    q, _, k_cache, v_cache, meta = step(cfg, (1, 3), (11, 0))
    plain = impl(replace(cfg, sinks=False))(q, k_cache, v_cache, meta, None)
    none = impl(cfg)(q, k_cache, v_cache, meta, torch.full((2,), -torch.inf))
    for a, b in zip(plain, none, strict=True):
        torch.testing.assert_close(a, b)
    o, lse = impl(cfg)(q, k_cache, v_cache, meta, torch.full((2,), 80.0))
    assert o.abs().max() < 1e-20 and torch.equal(lse, torch.full_like(lse, 80.0))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_token_that_sees_nothing(impl: Any) -> None:
    cfg = GQAConfig(2, 1, 8, 0.5, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    state = AttentionState(1, 8, 1, 16)
    meta = state.plan(AttentionBatch((4,), (0,), [[1]], (2,)))
    cache = torch.randn(2, 16, 1, 8)
    q = torch.randn(4, 2, 8)
    o, lse = impl(cfg)(q, cache, cache, meta, None)
    assert torch.equal(o[:2], torch.zeros(2, 2, 8)) and torch.equal(lse[:2], torch.full((2, 2), -torch.inf))
    assert o[2:].abs().min() > 0 and lse[2:].isfinite().all()
    sunk = impl(replace(cfg, sinks=True))(q, cache, cache, meta, torch.tensor([0.5, 2.0]))
    assert torch.equal(sunk[0][:2], torch.zeros(2, 2, 8)) and sunk[1][0].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_an_idle_request_without_keys(impl: Any) -> None:
    cfg = GQAConfig(2, 1, 8, 0.5, sinks=True, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    cache, q, sinks = torch.randn(3, 16, 1, 8), torch.randn(4, 2, 8), torch.tensor([0.5, 2.0])
    both, alone = (
        AttentionState(2, 8, 1, 16).plan(AttentionBatch((4, 0)[:rows], (3, 0)[:rows], [[1], [2]][:rows]))
        for rows in (2, 1)
    )
    for found, wanted in zip(
        impl(cfg)(q, cache, cache, both, sinks), impl(cfg)(q, cache, cache, alone, sinks), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_another_requests_nan_stays_there() -> None:
    """A page that once held NaN may lie behind a shorter request's last key."""
    cfg = GQAConfig(2, 1, 8, 0.5, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    q, _, k_cache, v_cache, meta = step(cfg, (1, 1), (30, 2))
    first = meta.page_table[0, 0].item()
    k_cache[first], v_cache[first] = torch.nan, torch.nan
    o, _ = TorchGQA(cfg)(q, k_cache, v_cache, meta, None)
    assert o[0].isnan().any() and o[1].isfinite().all()


def test_bucket_rows_are_finite() -> None:
    cfg = GQAConfig(2, 1, 8, 0.5, page_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    q, _, k_cache, v_cache, meta = step(cfg, (1, 1), (30, 2), bucket=4)
    o, lse = TorchGQA(cfg)(q, k_cache, v_cache, meta, None)
    assert o.shape == (4, 2, 8) and o.isfinite().all() and lse.isfinite().all()


def test_small_cases_cover_all_page_sizes() -> None:
    assert {case.cfg.page_size for case in SPEC.cases if case.small} == {1, 16, 64}


# --- the layer -------------------------------------------------------------------------------------------------


def run_layer(layer: Attention, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Feed hidden [B, S, E] in pieces through the paged cache; return [B, S, E]."""
    batch, length, _ = hidden.shape
    table = whole_pages([length] * batch, layer.cfg.page_size)
    state = AttentionState(batch, batch * length, len(table[0]), layer.cfg.page_size)
    cache = fl.kv_cache_spec(layer, page_size=layer.cfg.page_size, dtype=torch.float32).allocate(table[-1][-1] + 1)[0]
    pieces, edges = [], [0, *cuts, length]
    for a, b in itertools.pairwise(edges):
        meta = state.plan(AttentionBatch((b - a,) * batch, (a,) * batch, table))
        pieces.append(layer(hidden[:, a:b].flatten(0, 1), meta, cache).unflatten(0, (batch, b - a)))
    return torch.cat(pieces, 1)


def load(layer: Attention, source: torch.nn.Module) -> None:
    """Fill the layer's slots from a module with checkpoint names."""
    state = dict(source.state_dict())
    for name, slot in slots(layer):
        value = state.pop(name)
        assert tuple(value.shape) == slot.shape, name
        slot.fill(name, value[slot.index] if slot.index else value)
    assert not state
    fl.finalize(layer)


def causal(length: int, window: int | None = None) -> torch.Tensor:
    at, place = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = (place <= at) & (place > at - (window or length))
    return torch.zeros(length, length).masked_fill(~seen, -torch.inf)[None, None]


@torch.inference_mode()
def test_layer_equals_hugging_face_qwen3() -> None:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16, attention_bias=True,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    theirs = Qwen3Attention(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    rotary = fl.RotaryEmbedding.from_config(config)
    ours = Attention(
        48,
        6,
        2,
        16,
        rotary=rotary,
        qkv_bias=True,
        o_bias=True,
        qk_norm=config.rms_norm_eps,
        page_size=16,
        dtype=torch.float32,
    )
    load(ours, theirs)
    hidden = torch.randn(2, 21, 48)
    position = Qwen3RotaryEmbedding(config)(hidden, torch.arange(21)[None])
    expected, _ = theirs(hidden, position, causal(21))
    for cuts in ([], [20], [5, 6, 7]):
        torch.testing.assert_close(run_layer(ours, hidden, cuts), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 6])
def test_layer_equals_hugging_face_gpt_oss(window: int | None) -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=16, sliding_window=window,
        num_hidden_layers=2, max_position_embeddings=4096, attn_implementation="eager",
    )  # fmt: skip
    theirs = GptOssAttention(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    rotary = fl.RotaryEmbedding.from_config(config, max_position=64)
    ours = Attention(
        32,
        4,
        1,
        16,
        rotary=rotary,
        qkv_bias=True,
        o_bias=True,
        window=window,
        sinks=True,
        page_size=16,
        dtype=torch.float32,
    )
    load(ours, theirs)
    hidden = torch.randn(2, 19, 32)
    position = GptOssRotaryEmbedding(config)(hidden, torch.arange(19)[None])
    expected, _ = theirs(hidden, position, causal(19, window))
    for cuts in ([], [18], [3, 9, 10]):
        torch.testing.assert_close(run_layer(ours, hidden, cuts), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (2, 4), (1, 2), (2, 8)])
def test_shards_add_up(kv_heads: int, ranks: int) -> None:
    def build(axis: fl.Axis) -> Attention:
        rotary = fl.RotaryEmbedding(8, max_position=32)
        return Attention(
            24,
            8,
            kv_heads,
            8,
            rotary=rotary,
            qkv_bias=True,
            o_bias=True,
            sinks=True,
            axis=axis,
            page_size=16,
            dtype=torch.float32,
        )

    weights = {name: torch.randn(slot.shape) * 0.3 for name, slot in slots(build(fl.Axis()))}

    def fill(layer: Attention) -> Attention:
        for name, slot in slots(layer):
            slot.fill(name, weights[name][slot.index] if slot.index else weights[name])
        return layer

    hidden = torch.randn(1, 9, 24)
    expected = run_layer(fill(build(fl.Axis())), hidden, [8])
    parts = []
    for rank in range(ranks):
        layer = fill(build(fl.Axis(ranks, rank, tuple(range(ranks)))))
        assert layer.kv_row == (max(1, kv_heads // ranks), 8)
        parts.append(run_layer(layer, hidden, [8]))
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


def test_key_axis() -> None:
    axis = fl.Axis(8, 5, tuple(range(8)))
    assert key_axis(16, axis) is axis
    assert (key_axis(2, axis).size, key_axis(2, axis).rank) == (2, 1)
    with pytest.raises(ArgumentError, match="num_kv_heads is 3 over 8 ranks"):
        key_axis(3, axis)


def test_fp8_cache_is_close() -> None:
    rotary = fl.RotaryEmbedding(16, max_position=64)
    torch.manual_seed(1)
    exact = Attention(32, 4, 2, 16, rotary=rotary, page_size=16, dtype=torch.float32)
    small = Attention(32, 4, 2, 16, rotary=rotary, page_size=16, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    for _, slot in slots(exact):
        torch.nn.init.normal_(slot.dest, 0.0, 0.2)
    small.load_state_dict(exact.state_dict())
    hidden, state = torch.randn(20, 32), AttentionState(1, 20, 2, 16)
    meta = state.plan(AttentionBatch((20,), (0,), [[2, 1]]))
    results = [
        layer(hidden, meta, fl.kv_cache_spec(layer, page_size=16, dtype=layer.cfg.kv_dtype).allocate(3)[0])
        for layer in (exact, small)
    ]
    error = ((results[0] - results[1]).norm() / results[0].norm()).item()
    assert 1e-4 < error < 0.05


def test_errors_name_the_argument_and_change_nothing() -> None:
    rotary = fl.RotaryEmbedding(8, max_position=32)
    layer = Attention(16, 2, 1, 8, rotary=rotary, page_size=16, dtype=torch.float32)
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(2)[0]
    meta = AttentionState(1, 4, 1, 16).plan(AttentionBatch((3,), (0,), [[1]]))
    other = AttentionState(1, 4, 4, 4).plan(AttentionBatch((3,), (0,), [[1]]))
    half = fl.kv_cache_spec(layer, page_size=16, dtype=torch.bfloat16).allocate(2)[0]
    hidden = torch.randn(3, 16)
    for call, words in (
        ((hidden[:2], meta, cache), "hidden"),
        ((hidden.half(), meta, cache), "hidden"),
        ((hidden, other, cache), "meta.page_size is 4"),
        ((hidden, meta, half), "cache.keys"),
    ):
        with pytest.raises(ArgumentError, match=words):
            layer(*call)
    assert not cache.keys.any() and not half.keys.any()
    for arguments, words in (
        (dict(num_heads=3, num_kv_heads=2), "num_heads"),
        (dict(window=0), "window"),
        (dict(softcap=-1.0), "softcap"),
        (dict(head_dim=4), "rotary.head_dim"),
    ):
        given = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, **arguments}
        with pytest.raises(ArgumentError, match=words):
            Attention(**given, rotary=rotary)  # type: ignore[arg-type]


def test_config_round_trips() -> None:
    cfg = GQAConfig(8, 2, 64, 0.125, 128, None, True, 16, torch.bfloat16, torch.float8_e4m3fn)
    assert eval(repr(cfg)) == cfg


@torch.inference_mode()
def test_layer_compiles_whole_and_follows_the_metadata() -> None:
    rotary = fl.RotaryEmbedding(8, max_position=64)
    layer = Attention(
        16, 2, 1, 8, rotary=rotary, qk_norm=1e-6, window=9, page_size=16, dtype=torch.float32, backend="torch"
    )  # fmt: skip
    fl.finalize(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(5)[0]
    state, table = AttentionState(4, 16, 2, 16), [[1, 2], [3, 4]]
    for length in (3, 11, 12):
        meta = state.plan(AttentionBatch((1, 1), (length, length + 2), table), bucket=4)
        hidden = torch.randn(4, 16)
        torch.testing.assert_close(compiled(hidden, meta, cache), layer(hidden, meta, cache))


def test_attention_in_one_part_is_one_variant_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    least = set()

    def at(grid: Any, *numbers: Any, **constants: Any) -> Any:
        if constants["SPLITS"] == 1:
            least.add(constants["LEAST"])
        # What these cases compute, tests/test_parity.py looks at.
        return lambda *tensors: [torch.zeros(new.shape, dtype=new.dtype) for new in constants["makes"].values()]

    monkeypatch.setattr(triton._gqa_kernel, "at", at)
    triton._launches.cache_clear()
    rows = set()
    for case in SPEC.cases:
        if case.small and case.cfg.phase == "extend" and GQA.named("triton").refuse(case.cfg, as_device("cpu")) is None:
            ours, inputs = GQA.named("triton").load()(case.cfg), SPEC.make_inputs(case, torch.device("cpu"), 0)
            SPEC.run(ours, inputs, SPEC.prepare(ours, inputs))
            rows.add(case.name)
    triton._launches.cache_clear()
    assert len(rows) > 3 and least == {triton.MIN_SPLIT}
