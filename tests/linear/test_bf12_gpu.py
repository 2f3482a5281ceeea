"""bf12 products on a GPU: the bound of fp32 sums, and equal bits of replays, of eager calls and beside other shapes."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.linear.dense.triton_bf12 import linear_bf12
from fastlayers.quant.bf12 import pack_bf12, unpack_bf12

pytestmark = pytest.mark.gpu

# Qwen3-8B's, GPT-OSS's qkv, whose rows have runs of 8 words, and odd sizes.
SHAPES = ((6144, 4096), (4096, 12288), (5120, 2880), (1003, 704))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_exact_to_fp32_sums_and_repeat_their_bits(n: int, k: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
    weight[0, 3], weight[n - 1, k - 1], weight[1, :64] = 1000.0, 1e-30, 0.0
    packed = pack_bf12(weight)
    assert packed is not None and torch.equal(unpack_bf12(packed), weight)
    x, other = torch.randn(2, 1, k, device="cuda").bfloat16()
    y = linear_bf12(x, packed, None, torch.float32)
    exact = x.double() @ weight.double().t()
    # K roundings of fp32 at most, of sums that are no larger than all magnitudes together.
    bound = k * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    assert bool(((y.double() - exact).abs() <= bound).all())

    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        replayed = linear_bf12(held, packed, None, torch.float32)
    for turn in range(100):
        held.copy_(other if turn % 3 == 1 else x)
        graph.replay()
        if turn % 3 != 1:
            assert torch.equal(replayed, y)


def test_a_layer_takes_its_copy_for_one_token_alone() -> None:
    layer = fl.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    layer.weight.normal_(0.0, 0.02)
    x = torch.randn(3, 4096, device="cuda").bfloat16()
    several, one = layer(x), layer(x[:1])
    assert fl.store_bf12(layer).layers == ("",)
    assert torch.equal(layer(x), several)
    copied = layer(x[:1])
    assert (copied.float() - one.float()).abs().max() <= 2**-7 * one.float().abs().max()
    layer.weight.mul_(2.0)  # the copy is of the weights before
    assert torch.equal(layer(x[:1]), one * 2)
