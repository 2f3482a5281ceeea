"""Nothing between ranks has a gradient, and says so before it sends anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import fastlayers as fl
from fastlayers.comm.all_reduce.layer import AllReduce
from fastlayers.comm.collectives import collectives, gather_logits, reduce_embedding
from fastlayers.comm.expert_exchange.layer import ExpertExchange
from fastlayers.comm.gather_rows.layer import GatherRows
from fastlayers.comm.scatter_rows.layer import ScatterRows
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.errors import ArgumentError
from fastlayers.testing.world import Rank, world

Calls = dict[str, Callable[[torch.Tensor], Any]]


def wanting() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


def weighing(weight: torch.Tensor) -> Any:
    """Return what has the weight of a norm, and is called as one."""
    norm = fl.RMSNorm(8)
    return type("Norm", (), {"weight": weight, "__call__": lambda self, *given: norm(*given)})()


def layers(axis: Any) -> Calls:
    reduce, gather, scatter, norm = (cls(axis, 8) for cls in (AllReduce, GatherRows, ScatterRows, SumNorm))
    exchange = ExpertExchange(axis, 8, num_experts=4, top_k=1)
    ids, ones = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    return {
        "AllReduce: x": reduce, "GatherRows: x": gather, "ScatterRows: x": scatter,
        "ScatterRows: x ": lambda x: scatter(x, [1, 3]),
        "GatherRows: x ": lambda x: gather.normed(fl.RMSNorm(8), x, None),
        "GatherRows: residual": lambda x: gather.normed(fl.RMSNorm(8), torch.randn(4, 8), x),
        "GatherRows: weight": lambda x: gather.normed(weighing(x[0]), torch.randn(4, 8), None),
        "SumNorm: x": lambda x: norm(x, None, torch.ones(8)),
        "SumNorm: residual": lambda x: norm(torch.randn(4, 8), x, torch.ones(8)),
        "SumNorm: weight": lambda x: norm(torch.randn(4, 8), None, x[0]),
        "ExpertExchange: x": lambda x: exchange.dispatch(x, ids, ones),
        "ExpertExchange: topk_weights": lambda x: exchange.dispatch(torch.randn(4, 8), ids, x[:, :1].contiguous()),
        "ExpertExchange: partial": lambda x: exchange.combine(torch.cat([x, x]), ids.repeat(2, 1), ids),
    }  # fmt: skip


def functions(axis: Any) -> Calls:
    over = collectives(axis)
    return {
        "all_reduce_ over 2 ranks: x": over.all_reduce_,
        "all_reduce_ over 2 ranks: x ": lambda x: reduce_embedding(x, over),
        "all_gather over 2 ranks: x": over.all_gather, "all_gather over 2 ranks: x ": lambda x: gather_logits(x, over),
        "over 2 ranks: x": over.reduce_scatter,
        "over 2 ranks: x ": lambda x: over.all_gather_variable(x, [4, 4]),
        "over 2 ranks: x  ": lambda x: over.reduce_scatter_variable(x, [1, 3]),
        "all_reduce_ over 2 ranks: x  ": lambda x: over.gather_by_sum(x, x, 8, 0),
    }  # fmt: skip


def hooks(spec: Any) -> Calls:
    def prepare_attn(x: torch.Tensor, weight: torch.nn.Parameter | None = None) -> Any:
        first, second = fl.RMSNorm(8), fl.RMSNorm(8)
        if weight is not None:
            first.weight = weight
        comm = fl.LayerCommunicator(spec, input_layernorm=first, post_attention_layernorm=second)
        hidden = comm.prepare_attn(fl.Hidden.start(x))
        return comm.prepare_mlp(hidden.partial(hidden.tensor * 2, "attn_tp"))

    def weighted(x: torch.Tensor) -> Any:
        return prepare_attn(torch.randn(4, 8), torch.nn.Parameter(torch.ones(8)))

    return {"all_reduce_ over 2 ranks: x": prepare_attn, "all_reduce_ over 2 ranks: x ": weighted}


def check(rank: Rank) -> int:
    """Every call refuses on every rank; what is called without a gradient runs, so the ranks are in step."""
    spec, refused = rank.spec(), 0
    for calls in (layers(spec.tp), functions(spec.tp), hooks(spec)):
        for name, call in calls.items():
            with pytest.raises(
                ArgumentError, match=f"{name.rstrip()} is a tensor that requires a gradient; accepted: "
            ):
                call(wanting())
            with torch.no_grad():
                call(wanting())
            if "weight" not in getattr(call, "__name__", "") and "weight" not in name:
                call(wanting().detach())
                with forward_ad.dual_level(), pytest.raises(ArgumentError, match="a tensor with a tangent"):
                    call(forward_ad.make_dual(torch.randn(4, 8), torch.ones(4, 8)))
            refused += 1
    return refused


def test_two_ranks_refuse_gradients() -> None:
    assert world(2).run(check) == [23, 23]


def test_one_rank_has_the_norms_own_gradient() -> None:
    x = wanting()
    norms = fl.RMSNorm(8), fl.RMSNorm(8)
    comm = fl.LayerCommunicator(fl.ParallelSpec(), input_layernorm=norms[0], post_attention_layernorm=norms[1])
    found = torch.autograd.grad(comm.prepare_attn(fl.Hidden.start(x)).tensor.square().sum(), x)[0]
    assert torch.equal(found, torch.autograd.grad(norms[0](x).square().sum(), x)[0])
