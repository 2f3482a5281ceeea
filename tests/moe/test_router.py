"""TopKRouter against Hugging Face's routers, ties, bad logits, padding, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.moe.router.layer import ROUTER, RouterConfig
from fastlayers.moe.router.torch import stable_topk

T, D, E = 33, 24, 16


def _dense(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Order-free view of a routing: weight of every expert, and NaN where it was not chosen."""
    return torch.full((ids.shape[0], E), float("nan")).scatter(1, ids.long(), weights.float())


def _same_routing(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], tolerance: float
) -> None:
    a, b = _dense(*ours), _dense(*theirs)
    assert torch.equal(a.isnan(), b.isnan())
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _fill(router: fl.TopKRouter, theirs: torch.nn.Module) -> torch.Tensor:
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        tensor.data.copy_(torch.randn(tensor.shape) * (0.1 if name == "e_score_correction_bias" else 1.0))
        dict(router.slots())[name].fill(name, tensor.detach())
    return torch.randn(T, D)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (1, 1), (8, 3)])
def test_deepseek_v3(normalise: bool, groups: int, kept: int) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=4, n_group=groups, topk_group=kept,
        norm_topk_prob=normalise, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = DeepseekV3TopkRouter(config)
    ours = fl.TopKRouter(
        D, E, 4, scoring="sigmoid", num_groups=groups, topk_groups=kept, correction_bias=True,
        renormalize=normalise, scaling_factor=2.5,
    )  # fmt: skip
    x = _fill(ours, theirs)
    _, weights, ids = theirs(x)
    _same_routing(ours(x), (weights, ids), 1e-6)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=D, num_attention_heads=4, n_routed_experts=E, num_experts_per_tok=5, n_group=4,
        topk_group=2, topk_method=method, routed_scaling_factor=16.0, norm_topk_prob=True,
    )  # fmt: skip
    theirs = DeepseekV2TopkRouter(config)
    grouped = {"num_groups": 4, "topk_groups": 2, "group_score": "max", "masked_score": "zero"}
    ours = fl.TopKRouter(D, E, 5, renormalize=False, scaling_factor=16.0, **(grouped if method != "greedy" else {}))
    x = _fill(ours, theirs)
    _, weights, ids = theirs(x)
    _same_routing(ours(x), (weights, ids), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qwen3_moe(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=4, norm_topk_prob=True)
    theirs = Qwen3MoeTopKRouter(config).to(dtype)
    ours = fl.TopKRouter(D, E, 4, logits_dtype=None, dtype=dtype)
    x = _fill(ours, theirs).to(dtype)
    _, weights, ids = theirs(x)
    if dtype == torch.float32:
        _same_routing(ours(x), (weights, ids), 1e-6)
    else:  # bf16 logits tie, and torch.topk leaves ties open: compare the sorted weights
        torch.testing.assert_close(ours(x)[0], weights.float().sort(descending=True).values, rtol=2**-8, atol=0)


def test_gpt_oss() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    theirs = GptOssTopKRouter(GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=4))
    ours = fl.TopKRouter(D, E, 4, scoring="softmax_after_topk", logits_dtype=None, bias=True)
    x = _fill(ours, theirs)
    _, weights, ids = theirs(x)
    _same_routing(ours(x), (weights, ids), 1e-6)


def test_bias_changes_the_choice_but_not_the_weight() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    cfg = RouterConfig(4, 2, "sigmoid", correction_bias=True, renormalize=False)
    weights, ids = ROUTER.named("torch").load()(cfg)(logits, bias, None)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0, 2.0]]).sigmoid())


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_ties_go_to_the_lowest_id_and_one_tie_counts_twice(backend: str) -> None:
    # Group 1 holds the maximum twice; a router that drops all copies of it prefers group 0.
    logits = torch.tensor([[1.0, 0.5, -9.0, 1.0, 1.0, -9.0]])
    cfg = RouterConfig(6, 2, "sigmoid", 2, 1, renormalize=False)
    _, ids = ROUTER.named(backend).load()(cfg)(logits, None, None)
    assert ids.tolist() == [[3, 4]]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_bad_logits_stay_in_range(backend: str, scoring: str) -> None:
    bad = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0])
    logits = bad[torch.randint(0, 4, (40, 12))]
    weights, ids = ROUTER.named(backend).load()(RouterConfig(12, 5, scoring))(logits, None, None)
    assert weights.isfinite().all() and ids.min() >= 0 and ids.max() < 12
    assert all(len(set(row)) == 5 for row in ids.tolist())


def test_padding_rows() -> None:
    router = fl.TopKRouter(D, E, 3)
    router.weight.data.normal_()
    x = torch.randn(5, D)
    weights, ids = router(x, torch.tensor([3], dtype=torch.int32))
    assert (ids[3:] == -1).all() and (weights[3:] == 0).all() and (ids[:3] >= 0).all()
    assert torch.equal(ids[:3], router(x)[1][:3])


def test_the_factor_is_applied_here_or_not_at_all() -> None:
    here, there = (fl.TopKRouter(D, E, 3, scaling_factor=2.5, apply_scaling=a) for a in (True, False))
    x = torch.randn(4, D)
    torch.testing.assert_close(here(x)[0].sum(-1), torch.full((4,), 2.5))
    torch.testing.assert_close(there(x)[0].sum(-1), torch.ones(4))


def test_stable_topk_orders_signed_zero_and_infinity() -> None:
    values = torch.tensor([[-0.0, 0.0, -1.0, float("-inf"), 1e-45, 3.0, -1e-45]])
    assert stable_topk(values, 7).tolist() == [[5, 4, 0, 1, 6, 2, 3]]


def test_bf16_checkpoint_gives_the_fp32_linear() -> None:
    router = fl.TopKRouter(D, E, 3, dtype=torch.bfloat16)
    weight, x = torch.randn(E, D).bfloat16(), torch.randn(4, D).bfloat16()
    dict(router.slots())["weight"].fill("weight", weight)
    logits = router.logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"top_k": 17}, "top_k"),
        ({"num_groups": 3}, "num_groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups"),
        ({"num_groups": 16, "topk_groups": 8}, "num_groups"),
        ({"scoring": "tanh"}, "scoring"),
        ({"logits_dtype": torch.float16}, "logits_dtype"),
    ],
)
def test_bad_configurations_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        fl.TopKRouter(D, E, **{"top_k": 4, **arguments})
    assert (error.value.layer, error.value.argument) == ("TopKRouter", named)


@pytest.mark.parametrize(
    ("x", "num_valid", "named"),
    [
        (torch.zeros(2, D + 1), None, "hidden_states"),
        (torch.zeros(2, D, dtype=torch.int32), None, "hidden_states"),
        (torch.zeros(2, 1, D), None, "hidden_states"),
        (torch.zeros(2, D), torch.tensor([1]), "num_valid"),
    ],
)
def test_bad_inputs_are_named(x: torch.Tensor, num_valid: torch.Tensor | None, named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        fl.TopKRouter(D, E, 4)(x, num_valid)
    assert error.value.argument == named


def test_config_round_trips() -> None:
    cfg = fl.TopKRouter(D, E, 4, scoring="sigmoid", num_groups=4, topk_groups=2).cfg
    assert eval(repr(cfg)) == cfg


def test_traceable_without_graph_breaks() -> None:
    router = fl.TopKRouter(D, E, 4, scoring="sigmoid", num_groups=4, topk_groups=2, correction_bias=True)
    router.weight.data.normal_()
    x = torch.randn(6, D)
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    for a, b in zip(compiled(x), router(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_after_topk", "sigmoid"])
def test_weights_are_rounded_to_the_dtype_that_is_asked_for(backend: str, scoring: str, dtype: torch.dtype) -> None:
    cfg = RouterConfig(24, 4, scoring, scaling_factor=1.5)
    logits = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    wanted, chosen = ROUTER.choose(cfg, "cpu", backend).build().pick(5)(logits, None, None)
    rounded = replace(cfg, weights_dtype=dtype)
    weights, ids = ROUTER.choose(rounded, "cpu", backend).build().pick(5)(logits, None, None)
    assert torch.equal(ids, chosen) and weights.dtype == torch.float32
    assert torch.equal(weights, wanted.to(dtype).float()) and not torch.equal(weights, wanted)
    with pytest.raises(ArgumentError, match="weights_dtype"):
        replace(cfg, weights_dtype=torch.int32)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_few_tokens_by_a_kernel(tokens: int, wide: bool, bias: bool) -> None:
    from fastlayers.moe.router.triton import MAX_LOGIT_TOKENS, TritonRouter

    core = TritonRouter(RouterConfig(E, 4))
    x, weight = torch.randn(tokens, 2 * D)[:, ::2].bfloat16(), torch.randn(E, D).bfloat16()
    b = torch.randn(E).bfloat16() if bias else None
    dtype = torch.float32 if wide else None
    z = core.logits(x, weight, b, dtype)
    assert z is not None and z.dtype == (torch.float32 if wide else torch.bfloat16)
    exact = x.double() @ weight.double().T + (0.0 if b is None else b.double())
    assert z.shape == exact.shape
    assert torch.allclose(z.double(), exact, rtol=1e-5 if wide else 2**-8, atol=1e-5)
    assert core.logits(x.float(), weight, b, dtype) is None
    assert core.logits(x.new_zeros(MAX_LOGIT_TOKENS + 1, D), weight, b, dtype) is None
