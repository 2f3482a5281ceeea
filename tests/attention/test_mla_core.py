"""The MLA core: absorption, masks and merging against independent computations; bounds, refusals, errors."""

from __future__ import annotations

import pytest
import torch

import fastlayers.attention.mla.torch as mla_torch
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.attention.mla.cases import CASES, SPEC
from fastlayers.attention.mla.config import MLA, MLAConfig, RaggedLengths
from fastlayers.attention.mla.launch_config import MAX_SPLITS, LaunchConfig, decode_config, num_splits
from fastlayers.attention.mla.torch import TorchMLA, request_rows
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, NoBackendError

CPU = torch.device("cpu")
BACKENDS = ("reference", "torch", "triton")
CFG = MLAConfig(3, 32, 16, 24, 20, 0.31, 16, torch.float32, torch.float32)


def build(backend: str, cfg: MLAConfig = CFG):
    return MLA.named(backend).load()(cfg)


def plan(batch: AttentionBatch, state: AttentionState | None = None, bucket: int | None = None) -> AttentionMeta:
    return (state if state is not None else AttentionState(4, 32, 4, 16)).plan(batch, bucket=bucket)


def paged(rows: list[torch.Tensor], table: list[list[int]], pages: int = 12) -> torch.Tensor:
    """Put each request's rows into its pages; NaN everywhere else."""
    cache = torch.full((pages, 16, rows[0].shape[-1]), float("nan"))
    for request, mine in zip(rows, table, strict=True):
        for position, row in enumerate(request):
            cache[mine[position // 16], position % 16] = row
    return cache


@pytest.mark.parametrize("backend", BACKENDS)
def test_absorbed_equals_expanded(backend: str) -> None:
    core = build(backend)
    q_lens, k_lens, table = (5, 1, 3), (20, 33, 3), [[7, 2], [4, 1, 9], [3]]
    w_k, w_v = torch.randn(3, 24, 32) / 5, torch.randn(3, 20, 32) / 5
    rows = [torch.randn(k, 48) for k in k_lens]
    q = torch.randn(sum(q_lens), 3, 40)
    stacked = torch.cat(rows)
    latent, rope = stacked[:, :32], stacked[:, 32:]
    k = torch.cat([torch.einsum("sl,hnl->shn", latent, w_k), rope[:, None].expand(-1, 3, -1)], -1)
    v = torch.einsum("sl,hvl->shv", latent, w_v)
    o, lse = core.prefill(q, k, v, RaggedLengths.of(q_lens, k_lens, True, CPU))
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q[..., :24], w_k), q[..., 24:]], -1)
    prefix = tuple(k - n for n, k in zip(q_lens, k_lens, strict=True))
    o_latent, lse_latent = core.decode(absorbed, paged(rows, table), plan(AttentionBatch(q_lens, prefix, table)))
    torch.testing.assert_close(torch.einsum("thl,hvl->thv", o_latent, w_v), o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_latent, lse, rtol=1e-5, atol=1e-5)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor) -> torch.Tensor:
    """Dense attention as model code writes it: an additive mask, softmax over the last dimension, in fp64."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * scale
    scores = scores + torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))[:, None]
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_left_padded_extend_equals_dense_attention(backend: str) -> None:
    batch, total, new, pads = 3, 19, 4, (0, 6, 2)
    rows, q = torch.randn(batch, total, 48), torch.randn(batch, new, 3, 48)
    index = torch.arange(total)
    mask = (index[None, None] <= torch.arange(total - new, total)[None, :, None]) & (
        index[None, None] >= torch.tensor(pads)[:, None, None]
    )
    shared = rows[:, :, None].expand(-1, -1, 3, -1)
    expected = eager(q, shared, shared[..., :32], CFG.softmax_scale, mask)
    table = [[5, 1], [2, 8], [11, 3]]
    meta = plan(AttentionBatch((new,) * 3, (total - new,) * 3, table, pads))
    o, _ = build(backend).decode(q.reshape(-1, 3, 48), paged(list(rows), table), meta)
    torch.testing.assert_close(o.reshape(expected.shape).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lse_merges_chunks_to_the_whole(backend: str) -> None:
    core = build(backend)
    q, k, v = torch.randn(4, 3, 40), torch.randn(37, 3, 40), torch.randn(37, 3, 20)
    whole, whole_lse = core.prefill(q, k, v, RaggedLengths.of((4,), (37,), False, CPU))
    parts = []
    for part in (slice(0, 30), slice(30, 37)):
        lens = RaggedLengths.of((4,), (part.stop - part.start,), False, CPU)
        parts.append(core.prefill(q, k[part].contiguous(), v[part].contiguous(), lens))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(o * (s - lse).exp().unsqueeze(-1) for o, s in parts)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_lse_the_output_is_the_same(backend: str) -> None:
    core, lens = build(backend), RaggedLengths.of((6, 2), (6, 9), True, CPU)
    q, k, v = torch.randn(8, 3, 40), torch.randn(15, 3, 40), torch.randn(15, 3, 20)
    (o, lse), (plain, nothing) = core.prefill(q, k, v, lens), core.prefill(q, k, v, lens, need_lse=False)
    assert nothing is None and lse.shape == (8, 3)
    assert torch.equal(o, plain) and o.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing(backend: str) -> None:
    core = build(backend)
    o, lse = core.prefill(
        torch.randn(5, 3, 40), torch.randn(2, 3, 40), torch.randn(2, 3, 20), RaggedLengths.of((5,), (2,), True, CPU)
    )
    assert (o[:3] == 0).all() and (lse[:3] == float("-inf")).all()
    assert lse[3:].isfinite().all() and (o[3:] != 0).any()


def test_host_and_tensor_metadata_give_the_same() -> None:
    core = TorchMLA(CFG)
    rows = [torch.randn(25, 48), torch.randn(3, 48)]
    table = [[2, 3], [7]]
    cache, q = paged(rows, table), torch.randn(7, 3, 48)
    meta = plan(AttentionBatch((4, 3), (21, 0), table, (6, 1)))
    (o, lse), (other, other_lse) = core.decode_host(q, cache, meta), core.decode_batched(q, cache, meta)
    torch.testing.assert_close(o, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-6)
    assert lse[4].eq(float("-inf")).all()


@pytest.mark.parametrize("causal", [True, False])
def test_fused_and_plain_prefill_give_the_same(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_torch, "MAX_SCORES", 3 * 40)  # several pieces
    for q_len, k_len in ((6, 6), (5, 40), (7, 3), (4, 0), (1, 1)):
        q, k, v = torch.randn(q_len, 3, 40), torch.randn(k_len, 3, 40), torch.randn(k_len, 3, 48)
        fused, plain = (form(q, k, v, 0.2, causal) for form in (mla_torch.fused_prefill, mla_torch.prefill_pieces))
        for ours, other in zip(fused, plain, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_consecutive_pages_are_read_in_place() -> None:
    cache = torch.arange(6 * 4 * 2.0).view(6, 4, 2)
    view, copy = request_rows(cache, [2, 3, 4], 5, 11), request_rows(cache, [2, 4, 3], 5, 11)
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    assert torch.equal(view, cache.view(-1, 2)[13:19])
    assert torch.equal(copy, torch.cat([cache[4, 1:], cache[3, :3]]))


def test_replanned_metadata_is_read_through_the_old_views() -> None:
    core, state = build("triton"), AttentionState(4, 4, 3, 16)
    rows, table = [torch.randn(40, 48), torch.randn(40, 48)], [[5, 2, 8], [1, 9, 4]]
    cache, q = paged(rows, table), torch.randn(4, 3, 48)
    cache[0] = 0.0
    meta = plan(AttentionBatch((1, 1), (39, 3), table), state, bucket=4)
    again = plan(AttentionBatch((1, 1), (7, 30), table), state, bucket=4)
    assert (meta.max_seq_len, meta.max_query_len) == (again.max_seq_len, again.max_query_len) == (48, 1)
    o, _ = core.decode(q, cache, meta)
    expected, _ = build("reference").decode(q, cache, again)
    torch.testing.assert_close(o[:2], expected[:2], rtol=1e-5, atol=1e-5)


def test_splits_follow_host_bounds() -> None:
    small, large = LaunchConfig(16, 64, 4, 2), LaunchConfig(64, 64, 8, 2, per_sm=1)
    assert num_splits(1, 100, small, 132) == 1
    assert num_splits(500, 100_000, small, 132) == 1
    assert (num_splits(1, 2048, small, 132), num_splits(1, 2048, large, 132)) == (32, 16)
    assert num_splits(1, 1 << 20, small, 132) == MAX_SPLITS
    assert (num_splits(32, 1 << 20, small, 132), num_splits(32, 1 << 20, large, 132)) == (8, 4)
    assert all(num_splits(p, 1 << 16, small, 132) * p <= 264 for p in (2, 3, 7, 50, 132))
    for rows in (1, 16, 17, 64, 500):
        plain, direct = (decode_config(rows, torch.bfloat16, torch.bfloat16, 16, d) for d in (False, True))
        assert plain.block_m == direct.block_m >= min(rows, 64)


def test_operators_have_shapes_without_data() -> None:
    build("triton")
    meta = plan(AttentionBatch((1, 2), (3, 9), [[1], [2]]))
    args = (
        torch.randn(3, 3, 48), torch.zeros(4, 16, 48), meta.page_table, meta.starts, meta.cu_seqlens_q, meta.positions,
        meta.seq_lens, None, 32, 0.3, 2, 11, True, [],
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor")
    decode = torch.library.opcheck(torch.ops.fastlayers.mla_decode.default, args, test_utils=checks)
    lens = RaggedLengths.of((3,), (5,), True, CPU)
    args = (
        torch.randn(3, 3, 40), torch.randn(5, 3, 40), torch.randn(5, 3, 20), lens.cu_q, lens.cu_k, 24, 0.3, 3,
        True, False, [],
    )  # fmt: skip
    prefill = torch.library.opcheck(torch.ops.fastlayers.mla_prefill.default, args, test_utils=checks)
    assert set(decode.values()) | set(prefill.values()) == {"SUCCESS"}


def test_config_errors_name_the_argument() -> None:
    with pytest.raises(ArgumentError, match="MLAAttention: kv_lora_rank is 0"):
        MLAConfig(4, 0, 16, 16, 16, 1.0)
    with pytest.raises(ArgumentError, match=r"MLAAttention: kv_dtype is torch\.int8; accepted: one of .*e4m3"):
        MLAConfig(4, 32, 16, 16, 16, 1.0, kv_dtype=torch.int8)
    assert eval(repr(CFG), {"MLAConfig": MLAConfig, "torch": torch}) == CFG


def test_refusals_in_words() -> None:
    triton, a100, h200 = MLA.named("triton"), as_device("A100"), as_device("H200")
    e4m3 = MLAConfig(16, 512, 64, 128, 128, 0.1, kv_dtype=torch.float8_e4m3fn)
    assert triton.refuse(e4m3, h200) is None
    assert triton.refuse(e4m3, a100) == "e4m3 caches need sm_89 or newer, this is sm_80"
    assert "powers of two" in str(triton.refuse(MLAConfig(16, 96, 64, 128, 128, 0.1), h200))
    assert "at least 16" in str(triton.refuse(MLAConfig(16, 512, 8, 128, 128, 0.1), h200))
    for name in ("trtllm_gen", "cutlass"):
        assert MLA.named(name).refuse(e4m3, h200) == "needs sm_100, this is sm_90"
        with pytest.raises(NoBackendError, match=name):
            MLA.choose(e4m3, "cpu", name)


def test_costs() -> None:
    for case in CASES:
        cost = SPEC.cost(case)
        assert 0 <= cost.min_bytes <= cost.dataflow_bytes
    cost = SPEC.cost(SPEC.case("deepseek_single"))
    assert cost.flops == 2 * 8192 * (576 + 512)
    assert cost.min_bytes == 8192 * 576 * 2 + (576 + 512) * 2 + 4
