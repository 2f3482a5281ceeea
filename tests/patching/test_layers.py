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
from fastlayers.patching import mla

sys.path.insert(0, str(Path(__file__).parent))
from test_contracts import close
from tiny import build, prompt


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


def attention_call(model: Any, queries: int, cached: int, mask: torch.Tensor | None) -> torch.Tensor:
    layer = model.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, cached + queries, 64, generator=generator)
    cache = DynamicCache()
    output = None
    for first, last, seen in ((0, cached, None), (cached, cached + queries, mask)):
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


def test_bf16_is_as_good_as_stock() -> None:
    errors: dict[str, list[float]] = {"sdpa": [], "eager": [], "fast": []}
    for seed in range(3):
        rounded = build("v3_dense", torch.bfloat16, seed)
        reference = build("v3_dense", torch.float32, seed)
        reference.load_state_dict({key: value.float() for key, value in rounded.state_dict().items()})
        wanted = decode_logits(reference)
        for name in errors:
            model = build("v3_dense", torch.bfloat16, seed, attn="eager" if name == "eager" else "sdpa")
            if name == "fast":
                report = fl.patch(model, strict=True)
            given = decode_logits(model)
            errors[name].append(float((given - wanted).norm() / wanted.norm()))
        assert min(report.hits().values()) > 0
    mean = {name: sum(values) / len(values) for name, values in errors.items()}
    assert mean["fast"] <= 1.25 * max(mean["sdpa"], mean["eager"]), mean
    assert mean["fast"] > 1e-4, "bf16 must show"


def test_a_corrupted_scale_fails_the_bf16_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.attend_latent
    monkeypatch.setattr(mla, "attend_latent", lambda q, r, mask, scale, rank: right(q, r, mask, 1.1 * scale, rank))
    with pytest.raises(AssertionError, match="sdpa"):
        test_bf16_is_as_good_as_stock()


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
