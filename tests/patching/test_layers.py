"""Single patched modules against their originals: routers, experts, norms, MLPs, attention under any mask; bf16."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import fastlayers as fl
from fastlayers.patching import gqa, mla

sys.path.insert(0, str(Path(__file__).parent))
from test_contracts import close
from tiny import DENSE, GQA, build, prompt


def pair(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """Return a stock model and a patched one with the same weights."""
    stock = build(name, dtype, **changes)
    fast = copy.deepcopy(stock)
    fl.patch(fast, strict=True)
    return stock, fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["v3", "v3_yarn_bias", "v2", "v2_lite"])
@torch.no_grad()
def test_routers_are_bit_equal_even_with_ties(name: str, dtype: torch.dtype) -> None:
    stock, fast = pair(name, dtype)
    x = torch.randn(50, 64).to(dtype)
    for tied in (False, True):
        for model in (stock, fast):
            gate = model.model.layers[1].mlp.gate
            if tied:
                gate.weight[3], gate.weight[9] = gate.weight[5], gate.weight[5]
                if hasattr(gate, "e_score_correction_bias"):
                    gate.e_score_correction_bias[[3, 9]] = gate.e_score_correction_bias[5].clone()
        wanted, given = (model.model.layers[1].mlp.gate(x) for model in (stock, fast))
        assert torch.equal(given[2].sort(-1).values, wanted[2].sort(-1).values)
        assert given[1].dtype == torch.float32 and given[2].dtype == torch.int64
        assert all(torch.equal(g, w) for g, w in zip(given, wanted, strict=True))
        assert bool((wanted[0][:, 3] == wanted[0][:, 5]).all()) == tied


@pytest.mark.parametrize("name", ["v3", "v2"])
@torch.no_grad()
def test_routers_on_the_backends_of_the_registry(name: str) -> None:
    stock = build(name)
    fast = copy.deepcopy(stock)
    fl.patch(fast, moe="torch")
    x = torch.randn(60, 64)
    wanted, given = (model.model.layers[2].mlp.gate(x) for model in (stock, fast))
    assert torch.equal(given[0], wanted[0])
    assert torch.equal(given[2].sort(-1).values, wanted[2].sort(-1).values)
    spread = [torch.zeros_like(w[0]).scatter(1, w[2], w[1]) for w in (given, wanted)]
    torch.testing.assert_close(spread[0], spread[1], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@torch.no_grad()
def test_experts_with_fixed_routing(tokens: int, dtype: torch.dtype) -> None:
    stock, fast = pair("v3", dtype)
    x = torch.randn(tokens, 64).to(dtype)
    # Expert 7 gets nothing.
    ids = (torch.rand(tokens, 15).topk(4).indices + 8) % 16
    weights = torch.rand(tokens, 4)
    wanted, given = (model.model.layers[1].mlp.experts(x, ids, weights) for model in (stock, fast))
    assert given.shape == wanted.shape
    assert close(given.float(), wanted.float(), 1e-6 if dtype == torch.float32 else 2e-2)


@torch.no_grad()
def test_expert_sentinels_of_expert_parallelism_add_nothing() -> None:
    _, fast = pair("v3")
    experts = fast.model.layers[1].mlp.experts
    x, weights = torch.randn(5, 64), torch.rand(5, 4)
    ids = torch.rand(5, 16).topk(4).indices
    cut = ids.clone()
    cut[:, 2:] = 16
    assert close(experts(x, cut, weights), experts(x, ids[:, :2], weights[:, :2]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_norms_are_bit_equal_and_mlps_close(dtype: torch.dtype) -> None:
    stock, fast = pair("v3", dtype)
    x = torch.randn(3, 7, 64).to(dtype)
    assert torch.equal(fast.model.norm(x), stock.model.norm(x))
    wanted, given = (model.model.layers[0].mlp(x) for model in (stock, fast))
    assert close(given.float(), wanted.float(), 1e-6 if dtype == torch.float32 else 8e-3)


def attention_call(
    model: Any, queries: int, cached: int, mask: torch.Tensor | None, first_mask: torch.Tensor | None = None
) -> torch.Tensor:
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, cached + queries, 64, generator=generator).to(model.dtype)
    cache = DynamicCache()
    output = None
    for first, last, seen in ((0, cached, first_mask), (cached, cached + queries, mask)):
        if last > first:
            position = torch.arange(first, last)[None].expand(2, -1)
            table = model.model.rotary_emb(x, position_ids=position)
            output = layer(
                hidden_states=x[:, first:last], position_embeddings=table, attention_mask=seen, past_key_values=cache
            )[0]
    assert output is not None
    return output


def masks(kind: str, queries: int, total: int) -> torch.Tensor | None:
    """A mask with a hole in the middle and left padding of another length in each row."""
    position = torch.arange(total)
    seen = position[None, :] <= torch.arange(total - queries, total)[:, None]
    seen = seen.expand(2, 1, queries, total).clone()
    seen[0, ..., :3] = False
    seen[1, ..., 9:12] = False
    if kind == "bool":
        return seen
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return additive if kind == "float" else additive + 0.3 * torch.randn(seen.shape)


@pytest.mark.parametrize("kind", ["bool", "float", "biased", "none"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", ["v3", "v2", "v3_yarn_bias"])
@torch.no_grad()
def test_attention_honours_any_mask(monkeypatch: pytest.MonkeyPatch, name: str, queries: int, kind: str) -> None:
    if kind == "none" and queries > 1:
        # Without a mask several queries over a longer cache follow the kernel: that goes the original's way.
        monkeypatch.setattr(mla, "attend_latent", None)
    stock, fast = pair(name, attn="eager" if kind in ("float", "biased") else "sdpa")
    mask = None if kind == "none" else masks(kind, queries, 40 + queries)
    absorbed: list[int] = []
    right = mla.FastMLA._fl_absorbed
    monkeypatch.setattr(mla.FastMLA, "_fl_absorbed", lambda *a: absorbed.append(1) or right(*a))
    wanted, given = (attention_call(model, queries, 40, mask) for model in (stock, fast))
    assert close(given, wanted, 1e-5)
    assert bool(absorbed) == (kind != "none" or queries == 1)


@torch.no_grad()
def test_rows_that_see_nothing_are_finite() -> None:
    _, fast = pair("v3")
    mask = torch.zeros(2, 1, 1, 41, dtype=torch.bool)
    mask[1] = True
    given = attention_call(fast, 1, 40, mask)
    assert bool(given.isfinite().all())
    assert bool((given[0] == 0).all()) and float(given[1].norm()) > 0


def test_the_cheaper_form_is_taken() -> None:
    v3 = (512, 64, 128, 128)
    assert mla.absorbed_is_cheaper(1, 64, *v3) and mla.absorbed_is_cheaper(8, 4096, *v3)
    assert not mla.absorbed_is_cheaper(4096, 4096, *v3) and not mla.absorbed_is_cheaper(512, 1024, *v3)


@torch.no_grad()
def test_long_score_tensors_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, rows = torch.randn(2, 3, 10, 12), torch.randn(2, 20, 12)
    mask = torch.rand(2, 1, 10, 20) < 0.5
    wanted = [mla.attend_latent(q, rows, m, 0.3, 8) for m in (mask, None, mask[:, :, :1])]
    monkeypatch.setattr(mla, "MAX_SCORES", 2 * 3 * 20 * 4)
    given = [mla.attend_latent(q, rows, m, 0.3, 8) for m in (mask, None, mask[:, :, :1])]
    assert all(close(g, w, 1e-6) for g, w in zip(given, wanted, strict=True))


@torch.no_grad()
def decode_logits(model: Any) -> torch.Tensor:
    """Logits of each step after a prefill, tokens given."""
    ids = prompt(2, 60)["input_ids"]
    out = model(ids[:, :40], use_cache=True)
    found = [out.logits]
    for step in range(40, 60):
        out = model(ids[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1).double()


# The cores of latent attention and of grouped queries, these behind norms: in no other way do the three differ.
@pytest.mark.parametrize(
    "name", ["v3_dense", *(pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3")) for n in DENSE)]
)
def test_bf16_is_as_good_as_stock(name: str) -> None:
    errors: dict[str, list[float]] = {"sdpa": [], "eager": [], "fast": []}
    for seed in range(3):
        rounded = build(name, torch.bfloat16, seed)
        wanted = decode_logits(copy.deepcopy(rounded).float())
        for kind in errors:
            model = copy.deepcopy(rounded)
            model.set_attn_implementation("eager" if kind == "eager" else "sdpa")
            if kind == "fast":
                report = fl.patch(model, strict=True)
            given = decode_logits(model)
            errors[kind].append(float((given - wanted).norm() / wanted.norm()))
        assert min(report.hits().values()) > 0
    mean = {kind: sum(values) / len(values) for kind, values in errors.items()}
    assert mean["fast"] <= 1.25 * max(mean["sdpa"], mean["eager"]), mean
    assert mean["fast"] > 1e-4, "bf16 must show"


def test_a_corrupted_scale_fails_the_bf16_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.attend_latent
    monkeypatch.setattr(mla, "attend_latent", lambda q, r, mask, scale, rank: right(q, r, mask, 1.1 * scale, rank))
    with pytest.raises(AssertionError, match="sdpa"):
        test_bf16_is_as_good_as_stock("v3_dense")


@torch.no_grad()
def test_gpt_oss_attention_in_bf16_is_as_good_as_stock() -> None:
    stock, fast = pair("gpt_oss", torch.bfloat16)
    exact = copy.deepcopy(stock).float()
    for kind in ("bool", "float"):
        mask = masks("float", 3, 43)
        assert mask is not None
        seen = masks("bool", 3, 43)
        assert seen is not None
        hidden = torch.finfo(torch.bfloat16).min
        given_mask = torch.zeros(seen.shape).masked_fill(~seen, hidden) if kind == "bool" else mask.clamp_min(hidden)
        wanted = attention_call(exact, 3, 0, causal_rows(mask))
        results = [attention_call(m, 3, 0, causal_rows(k)) for m, k in ((stock, mask.bfloat16()), (fast, given_mask))]
        errors = [float((r.float() - wanted).norm() / wanted.norm()) for r in results]
        assert 1e-4 < errors[1] <= 1.25 * errors[0]


def causal_rows(mask: Any) -> Any:
    """The part of a mask for three tokens without a cache."""
    return mask[..., -3:]


# Attention of qwen2_moe is qwen2's without a window, that of qwen3 is qwen3_moe's without biases.
IN_OTHERS = ("qwen2_moe", "qwen3")
ATTENTION = [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_OTHERS)) for name in GQA]


@pytest.mark.parametrize("kind", ["bool", "float", "biased", "none"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", ATTENTION)
@torch.no_grad()
def test_grouped_attention_honours_any_mask(name: str, queries: int, kind: str) -> None:
    stock, fast = pair(name)
    cached = 0 if kind == "none" and queries > 1 else 40
    mask = None if kind == "none" else masks(kind, queries, cached + queries)
    if stock.config._attn_implementation == "eager" and mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if cached:
        first = torch.zeros(1, 1, cached, cached).masked_fill(~gqa.causal(cached, cached, torch.device("cpu")), -1e30)
    wanted, given = (
        attention_call(model, queries, cached, m, first if cached else None)
        for model, m in ((stock, mask), (fast, mask))
    )
    assert close(given, wanted, 1e-5)


@pytest.mark.parametrize("way", ["fast", "excluded", "weights", "gradients"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["v3", "v2", *ATTENTION])
def test_a_bool_mask_of_the_caller_means_what_it_means_to_stock(name: str, attn: str, way: str) -> None:
    if name == "gpt_oss" and attn == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    # A window's cache is shorter than one mask for all layers.
    stock = build(name, attn=attn, **({"sliding_window": 64} if name in ("qwen2", "gpt_oss") else {}))
    fast = copy.deepcopy(stock)
    report = fl.patch(fast, exclude="model.layers.0.self_attn" if way == "excluded" else None)
    options = {"output_attentions": True} if way == "weights" else {}
    ids, seen = prompt(2, 41)["input_ids"], masks("bool", 41, 41)
    assert seen is not None
    found = []
    for model in (stock, fast):
        with torch.set_grad_enabled(way == "gradients"):
            out = model(ids[:, :40], attention_mask=seen[..., :40, :40], use_cache=True, **options)
            last = model(ids[:, 40:], attention_mask=seen[..., 40:, :], past_key_values=out.past_key_values, **options)
            found.append(torch.cat((out.logits, last.logits), 1).detach())
    rows = seen.any(-1)[:, 0]
    assert bool((~rows).any()) and close(found[1][rows], found[0][rows], 1e-5)
    if attn == "eager":
        assert not close(found[0][rows], seen_only(stock, ids, seen)[rows], 1e-2), "eager adds 0 and 1"
    runs = way in ("fast", "excluded") or (way, attn) == ("weights", "sdpa")
    assert report.hits()["model.layers.1.self_attn"] == (2 if runs else 0)


def seen_only(model: Any, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Logits where True means seen."""
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: torch.Tensor = model(ids, attention_mask=mask).logits
    return logits


@pytest.mark.parametrize(
    "extra", [{}, {"sinks": torch.randn(4)}, {"softcap": 3.0}, {"softcap": 3.0, "sinks": torch.randn(4)}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_against_the_formula(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, extra: dict[str, Any]) -> None:
    monkeypatch.setattr(gqa, "MAX_SCORES", 2 * 4 * 11 * 2)
    for queries in (1, 5):
        q, k, v = (torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, queries), (2, 11), (2, 11)))
        mask = torch.rand(2, 1, queries, 11) < 0.5
        mask[0, :, 0] = False
        scores = torch.einsum("bhqd,bhsd->bhqs", q.double(), k.double().repeat_interleave(2, 1)) * 0.3
        if "softcap" in extra:
            scores = 3.0 * torch.tanh(scores / 3.0)
        scores = scores.exp() * mask
        sink = extra["sinks"].double().exp().view(1, 4, 1, 1) if "sinks" in extra else 0.0
        weights = scores / (scores.sum(-1, keepdim=True) + sink).clamp_min(1e-30)
        wanted = torch.einsum("bhqs,bhsd->bqhd", weights, v.double().repeat_interleave(2, 1))
        given = gqa.attend(q, k, v, mask, 0.3, **extra)
        assert given.shape == wanted.shape and bool(given.isfinite().all())
        assert close(given.double(), wanted, 1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", GQA)
@torch.no_grad()
def test_padding_rows_that_see_nothing_are_finite(name: str) -> None:
    _, fast = pair(name)
    mask = torch.zeros(2, 1, 3, 43, dtype=torch.bool)
    mask[1] = True
    assert bool(attention_call(fast, 3, 40, mask).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_experts_of_other_families(name: str, tokens: int, dtype: torch.dtype) -> None:
    stock, fast = pair(name, dtype)
    named = copy.deepcopy(stock)
    fl.patch(named, moe="torch")
    x = 3.0 * torch.randn(tokens, 64).to(dtype)
    ids, weights = (torch.rand(tokens, 15).topk(4).indices + 8) % 16, torch.rand(tokens, 4).to(dtype)
    if name == "gpt_oss":
        assert tokens < 2 or bool(((x @ stock.model.layers[1].mlp.experts.gate_up_proj[8]).abs() > 7.0).any())
    outs = [model.model.layers[1].mlp.experts(x, ids, weights) for model in (stock, fast, named)]
    for out in outs[1:]:
        assert out.shape == outs[0].shape and out.dtype == dtype
        assert close(out.float(), outs[0].float(), 2e-6 if dtype == torch.float32 else 2e-2)
    if tokens:
        cut = ids.clone()
        cut[:, 2:] = 16
        short = fast.model.layers[1].mlp.experts(x, ids[:, :2], weights[:, :2])
        assert close(fast.model.layers[1].mlp.experts(x, cut, weights).float(), short.float(), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "width"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")])
@torch.no_grad()
def test_experts_whose_rows_are_no_whole_16_bytes(name: str, width: str, dtype: torch.dtype) -> None:
    # torch's grouped product does not take them, and stock's eager loop does.
    for inner in (27, 28, 4):
        stock = build(name, dtype, **{width: inner})
        stock.set_experts_implementation("eager")
        fast = copy.deepcopy(stock)
        report = fl.patch(fast)
        x, ids = torch.randn(9, 64).to(dtype), torch.rand(9, 16).topk(4).indices
        weights = torch.rand(9, 4).to(dtype)
        wanted, given = (model.model.layers[1].mlp.experts(x, ids, weights).float() for model in (stock, fast))
        assert close(given, wanted, 2e-6 if dtype == torch.float32 else 2e-2)
        assert report.hits()["model.layers.1.mlp.experts"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GQA)
@torch.no_grad()
def test_norms_and_routers_of_other_families_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    stock, fast = pair(name, dtype)
    x = 5.0 * torch.randn(60, 64).to(dtype)
    assert torch.equal(fast.model.norm(x), stock.model.norm(x))
    blocks = [model.model.layers[1].mlp for model in (stock, fast)]
    if not hasattr(blocks[0], "experts"):
        return
    gates = [getattr(block, "gate", None) or block.router for block in blocks]
    assert all(torch.equal(g, w) for g, w in zip(gates[1](x), gates[0](x), strict=True))
    named = copy.deepcopy(stock)
    fl.patch(named, moe="torch")
    ours, wanted = (
        named.get_submodule("model.layers.1.mlp." + ("router" if name == "gpt_oss" else "gate"))(x),
        gates[0](x),
    )
    spread = [torch.zeros_like(w[0]).scatter(1, w[2], w[1]) for w in (ours, wanted)]
    assert ours[1].dtype == dtype and close(
        spread[0].float(), spread[1].float(), 1e-6 if dtype == torch.float32 else 5e-2
    )


@torch.no_grad()
def test_kernels_get_transposed_experts_in_their_order() -> None:
    stock = build("gpt_oss")
    fast = copy.deepcopy(stock)
    x, ids, weights = torch.randn(3, 64), torch.rand(3, 16).topk(4).indices, torch.rand(3, 4)
    fl.patch(fast, moe="triton", include="model.layers.0.mlp.experts")
    experts = fast.model.layers[0].mlp.experts
    assert experts.gate_up_proj.mT.is_contiguous() and experts.down_proj.mT.is_contiguous()
    assert close(experts(x, ids, weights), stock.model.layers[0].mlp.experts(x, ids, weights), 1e-5)
    assert int(experts._fl_hits) == 1 and int(experts._fl_falls) == 0
    fl.unpatch(fast)
    assert experts.gate_up_proj.is_contiguous() and experts.down_proj.is_contiguous()
    assert torch.equal(experts(x, ids, weights), stock.model.layers[0].mlp.experts(x, ids, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_paged_core_on_a_gpu(dtype: torch.dtype) -> None:
    stock = build("v3_dense", dtype, kv_lora_rank=64).cuda()
    fast = copy.deepcopy(stock)
    report = fl.patch(fast, strict=True)
    ids = prompt(3, 50)["input_ids"].cuda()
    outputs = []
    for model in (stock, fast):
        out = model(ids[:, :40], use_cache=True)
        steps = []
        for step in range(40, 50):
            out = model(ids[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits.float())
        outputs.append(torch.cat(steps, 1))
    assert close(outputs[1], outputs[0], 1e-4 if dtype == torch.float32 else 5e-2)
    assert min(report.hits().values()) > 0
