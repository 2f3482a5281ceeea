"""MLA's absorbed products over FP8 codes: what they compute, what is not held, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla.layer import MLAAttention
from fastlayers.errors import ArgumentError
from fastlayers.quant.block_quant import dequantize_block_weight, quantize_block_weight
from fastlayers.quant.group_quant.layer import quantize_groups

FP8 = fl.QuantSpec("fp8_block")


def layer(absorb: bool, quant: fl.QuantSpec = FP8, nope: int = 128, **options: Any) -> MLAAttention:
    rotary = fl.RotaryEmbedding(64, max_position=64, interleaved_in=True)
    return fl.MLAAttention(
        128, 2, q_lora_rank=None, kv_lora_rank=256, qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=128,
        rotary=rotary, page_size=16, dtype=torch.float32, quant=quant, fp8_absorb=absorb, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> tuple[MLAAttention, MLAAttention]:
    """The same weights with a dequantised copy, and with products over codes."""
    torch.manual_seed(0)
    usual, quantised = layer(False), layer(True)
    for name, linear in usual.named_children():
        if isinstance(linear, fl.FP8BlockLinear):
            codes, scale = quantize_block_weight(torch.randn(linear.weight.shape) / linear.weight.shape[1] ** 0.5)
            for each in (linear, getattr(quantised, name)):
                each.weight.data.copy_(codes)
                each.weight_scale_inv.data.copy_(scale)
    return fl.finalize(usual), fl.finalize(quantised)


def decode(made: MLAAttention, new: tuple[int, ...] = (1, 1)) -> torch.Tensor:
    torch.manual_seed(1)
    cache = fl.kv_cache_spec(made, page_size=16).allocate(num_pages=4)[0]
    cache.keys.normal_()
    meta = AttentionState(2, 8, 2, 16).plan(AttentionBatch(new, (9, 20), [[1], [2, 3]]))
    y: torch.Tensor = made(torch.randn(sum(new), 128), meta, cache)
    return y


@pytest.mark.parametrize("new", [(1, 1), (3, 2)])
def test_as_coarse_as_e4m3_and_no_coarser(pair: tuple[MLAAttention, MLAAttention], new: tuple[int, ...]) -> None:
    usual, quantised = (decode(made, new) for made in pair)
    difference = float((usual - quantised).norm() / usual.norm())
    # Rounding to e4m3 is an error of 0.026; here of the queries, of the latents, and of o_proj's inputs, which follow.
    assert 1e-3 < difference < 3 * 0.026


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return the values of codes that ``x`` is rounded to, a scale for 128 features of a row."""
    codes, scale = quantize_groups(x, eps=1e-12, backend="reference")
    return (codes.view(*scale.shape, 128) * scale[..., None]).view(x.shape)


@pytest.mark.parametrize("room", [False, True])
def test_products_of_codes_by_hand(pair: tuple[MLAAttention, MLAAttention], room: bool) -> None:
    """Rounded inputs times the dequantised weight, both times; the queries between are the absorbed ones."""
    made = pair[1]
    assert made.quantised_absorb is not None
    torch.manual_seed(2)
    q_nope, q_pe, seen = torch.randn(3, 2, 128), torch.randn(3, 2, 64), []
    latent = torch.randn(3, 2, 256)
    where = torch.cat([torch.full((3, 2, 256), float("nan")), q_pe], -1) if room else None

    def attend(queries: torch.Tensor) -> torch.Tensor:
        seen.append(queries)
        return latent

    o = made.quantised_absorb(made.kv_b_proj, q_nope, q_pe, where, attend)
    dense = dequantize_block_weight(made.kv_b_proj.weight, made.kv_b_proj.weight_scale_inv).view(2, 256, 256)
    wanted = torch.einsum("thn,hnl->thl", rounded(q_nope.reshape(6, 128)).view(3, 2, 128), dense[:, :128])
    torch.testing.assert_close(seen[0], torch.cat([wanted, q_pe], -1), rtol=1e-5, atol=1e-5)
    values = torch.einsum("thl,hvl->thv", rounded(latent.reshape(6, 256)).view(3, 2, 256), dense[:, 128:])
    torch.testing.assert_close(o, values, rtol=1e-5, atol=1e-5)


def test_no_copy_of_the_weights_is_held(pair: tuple[MLAAttention, MLAAttention]) -> None:
    usual, quantised = pair
    for made in pair:
        decode(made)
    assert usual._absorbed is not None and quantised._absorbed is None and quantised._views is None
    assert sum(p.numel() for p in quantised.parameters()) == sum(p.numel() for p in usual.parameters())


def test_edited_weights_are_read(pair: tuple[MLAAttention, MLAAttention]) -> None:
    made, before = pair[1], decode(pair[1])
    scale = made.kv_b_proj.weight_scale_inv
    with torch.no_grad():
        scale.mul_(2)
    changed = decode(made)
    with torch.no_grad():
        scale.mul_(0.5)
    assert not torch.allclose(changed, before, rtol=0.1) and torch.equal(decode(made), before)


def test_what_cannot_be_multiplied_in_codes_is_refused() -> None:
    for options in ({"quant": fl.QuantSpec()}, {"nope": 64}, {"quant": fl.QuantSpec("fp8_channel")}):
        with pytest.raises(
            ArgumentError, match=r"MLAAttention: fp8_absorb is True with .*; accepted: with a kv_b_proj"
        ):
            layer(True, **options)
    with pytest.raises(ArgumentError, match="fp8_absorb"):
        layer("yes")  # type: ignore[arg-type]


def test_a_model_passes_it_on() -> None:
    from fastlayers_server.known_models import DEEPSEEK_V3
    from fastlayers_server.random_models import random_model

    small = dict(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=128, q_lora_rank=128,
        kv_lora_rank=128, max_position_embeddings=64,
    )  # fmt: skip
    model = random_model(DEEPSEEK_V3 | small, "cpu", dtype=torch.float32, layers=1, fp8_absorb=True)
    assert model.decoder.layers[0].self_attn.quantised_absorb is not None
