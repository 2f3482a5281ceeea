"""MXFP4 weights: bit for bit Hugging Face's values, rounding to the grid, scales, errors, the configuration."""

from __future__ import annotations

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.quant.mxfp4.codes import VALUES, dequantize_mxfp4, quantize_mxfp4
from fastlayers.quant.spec import QuantSpec

WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_all_codes_with_all_scales_are_hugging_faces_bits(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # [expert, row, group, byte]: every byte under every scale, overflow, subnormals and signed zeros included.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.contiguous()
    mine = dequantize_mxfp4(blocks, scales, dtype)
    assert mine.shape == (1, 256, 512)
    assert torch.equal(mine.view(WORDS[dtype]), theirs.view(WORDS[dtype]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_a_gpu_decodes_to_the_same_bits_also_in_a_graph(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    given, graph = (blocks.cuda(), scales.cuda()), torch.cuda.CUDAGraph()
    eager = dequantize_mxfp4(*given, dtype)
    with torch.cuda.graph(graph):
        captured = dequantize_mxfp4(*given, dtype)
    graph.replay()
    expected = dequantize_mxfp4(blocks, scales, dtype).view(WORDS[dtype])
    for result in (eager, captured):
        assert torch.equal(result.cpu().view(WORDS[dtype]), expected)


def test_random_experts_are_hugging_faces_bits() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 64, 5, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 64, 5), dtype=torch.uint8)
    # Theirs is transposed, for a product from the left.
    assert torch.equal(dequantize_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales).mT)


def test_low_nibble_comes_first() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[0, 15] = 0x2F, 0x90
    values = dequantize_mxfp4(blocks, torch.tensor([130], dtype=torch.uint8), torch.float32)
    assert values[[0, 1, 31]].tolist() == [-48.0, 8.0, -4.0] and values.count_nonzero() == 3


def nearest(value: float) -> float:
    """Return the grid's value nearest to a positive ``value``, by search; ties to the even code."""
    return min(enumerate(VALUES), key=lambda entry: (abs(entry[1] - value), entry[0] % 2))[1]


def test_rounding_is_to_nearest_with_ties_to_even_codes() -> None:
    # 4 is the largest power of two that a group of absmax below 8 contains: its scale is 1.
    fine = (torch.arange(496) / 64).view(16, 31)
    weight = torch.cat([torch.full((16, 1), 4.0), fine], 1)
    weight[:, 1::2] *= -1
    blocks, scales = quantize_mxfp4(weight)
    assert (scales == 127).all()
    expected = [[nearest(abs(v)) * (-1 if v < 0 else 1) for v in row] for row in weight.tolist()]
    assert dequantize_mxfp4(blocks, scales, torch.float32).tolist() == expected


def test_scale_is_the_power_of_two_below_absmax_over_four() -> None:
    weight = torch.zeros(6, 32)
    weight[:, 3] = torch.tensor([4.0, 7.99, 8.0, 3.99, 2.0**-100, 2.0**127])
    _, scales = quantize_mxfp4(weight)
    assert (scales.flatten().int() - 127).tolist() == [0, 0, 1, -1, -102, 125]
    _, scales = quantize_mxfp4(torch.zeros(1, 32))
    assert scales.item() == 0


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_quantising_what_was_dequantised_changes_nothing(dtype: torch.dtype) -> None:
    weight = (torch.randn(5, 3, 96) * torch.logspace(-2, 2, 96)).to(dtype)
    values = dequantize_mxfp4(*quantize_mxfp4(weight), dtype)
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(values), dtype), values)
    # Half a step between 4 and 6, a quarter of the group's largest power of two; 8 saturates at 6.
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert ((values.float() - weight.float()).unflatten(-1, (-1, 32)).abs() <= 0.25 * largest).all()
    assert 0 < (values.float() - weight.float()).norm() / weight.float().norm() < 0.15


def test_bad_arguments_are_named() -> None:
    for weight, message in (
        (torch.zeros(4, 48), "weight's last dimension is 48; accepted: a multiple of 32"),
        (torch.zeros(4, 0), "weight's last dimension is 0"),
        (torch.zeros(32, dtype=torch.int32), "weight is int32"),
        (torch.full((32,), float("inf")), "weight is not finite everywhere"),
    ):
        with pytest.raises(ArgumentError, match=f"mxfp4: {message}"):
            quantize_mxfp4(weight)
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    for arguments, message in (
        ((blocks[..., :8], scales), r"blocks is of shape \[2, 3, 8\]"),
        ((blocks, scales[:, :2]), r"scales is uint8\[2, 2\]"),
        ((blocks.int(), scales), "blocks is int32"),
        ((blocks, scales, torch.float64), "dtype is torch.float64"),
    ):
        with pytest.raises(ArgumentError, match=f"mxfp4: {message}"):
            dequantize_mxfp4(*arguments)


def test_configuration_covers_experts_only() -> None:
    kept = ["model.layers.*.self_attn", "model.layers.3.mlp.experts"]
    spec = QuantSpec.from_config({"quant_method": "mxfp4", "modules_to_not_convert": kept})
    formats = {
        name: spec.for_module(name).format
        for name in ("model.layers.0.mlp.experts", "model.layers.3.mlp.experts", "model.layers.10.self_attn.q_proj",
                     "model.layers.0.mlp.router", "lm_head")
    }  # fmt: skip
    assert formats.pop("model.layers.0.mlp.experts") == "mxfp4" and set(formats.values()) == {"none"}
    assert QuantSpec.from_config({"quant_method": "mxfp4"}).for_module("model.layers.3.mlp.experts").format == "mxfp4"
    with pytest.raises(ArgumentError, match="'mxfp4'"):
        QuantSpec.from_config({"quant_method": "nvfp4"})
