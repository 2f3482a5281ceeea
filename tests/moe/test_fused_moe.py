"""FusedMoE against Hugging Face's experts, shared fusion, parallel splits, slots, padding, errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fastlayers as fl
from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError
from fastlayers.linear.int8.layer import quantize_channel_weight
from fastlayers.moe.fused_moe.cases import make_inputs, prepare
from fastlayers.moe.fused_moe.layer import FUSED_MOE, FusedMoEConfig, why_not_fuse_shared
from fastlayers.moe.fused_moe.torch import append_shared
from fastlayers.quant.block_quant import dequantize_block_weight, quantize_block_weight
from fastlayers.quant.spec import QuantSpec
from fastlayers.testing.parity import compare
from fastlayers.testing.spec import Case, spec_of
from fastlayers.weights import slots

T, D, INNER, E, K = 11, 48, 32, 8, 4
FP8 = QuantSpec("fp8_block")


def _routing(tokens: int = T, experts: int = E, k: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]).int()
    return torch.rand(tokens, k) + 0.1, ids


def _checkpoint(hidden: int, inner: int, experts: int, shared: int = 0) -> dict[str, torch.Tensor]:
    names = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {f"mlp.experts.{e}.{n}.weight": torch.randn(s) * 0.3 for e in range(experts) for n, s in names.items()}
    for name, (rows, columns) in names.items() if shared else ():
        shape = (rows, columns * shared) if name == "down_proj" else (rows * shared, columns)
        tensors[f"mlp.shared_experts.{name}.weight"] = torch.randn(shape) * 0.3
    return tensors


def _load(layer: fl.FusedMoE, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Fill a layer as a loader does, and return the names that it read."""
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = layer
    read = set()
    for name, slot in slots(model):
        assert tuple(tensors[name].shape) == slot.shape, name
        assert name not in read, f"{name} is yielded twice"
        slot.fill(name, tensors[name][slot.index])
        read.add(name)
    return read


def _mlp(x: torch.Tensor, tensors: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate, up, down = (tensors[f"{prefix}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _quantise(tensors: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a quantised checkpoint and the same weights dequantised."""
    quantised, plain = {}, {}
    for name, weight in tensors.items():
        if kind == "fp8_block":
            q, s = quantize_block_weight(weight)
            quantised[name], quantised[f"{name}_scale_inv"] = q, s
            plain[name] = dequantize_block_weight(q, s)
        else:
            q, s = quantize_channel_weight(weight)
            quantised[name], quantised[f"{name}_scale"] = q, s
            plain[name] = q.float() * s[:, None]
    return quantised, plain


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_equals_hugging_face(backend: str) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    config = DeepseekV3Config(hidden_size=D, moe_intermediate_size=INNER, n_routed_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    theirs = DeepseekV3Experts(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = fl.FusedMoE(D, INNER, E, K, backend=backend)
    ours.w13.copy_(theirs.gate_up_proj.detach())
    ours.w2.copy_(theirs.down_proj.detach())
    x, (weights, ids) = torch.randn(T, D), _routing()
    ids[ids == 3] = 5  # an empty expert, and one chosen twice by a token
    with torch.no_grad():
        expected = theirs(x, ids.long(), weights)
    error = (ours(x, weights, ids) - expected).norm() / expected.norm()
    assert error < 1e-6


def test_gpt_oss_activation_equals_hugging_face() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=D, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    theirs = GptOssExperts(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=1.0)  # large enough to reach the limit
    ours = fl.FusedMoE(D, INNER, E, K, activation="swiglu_oai", bias=True)
    w13 = theirs.gate_up_proj.detach().mT
    ours.w13.copy_(torch.cat([w13[:, ::2], w13[:, 1::2]], 1))
    b13 = theirs.gate_up_proj_bias.detach()
    ours.w13_bias.copy_(torch.cat([b13[:, ::2], b13[:, 1::2]], 1))
    ours.w2.copy_(theirs.down_proj.detach().mT)
    ours.w2_bias.copy_(theirs.down_proj_bias.detach())
    x, (weights, ids) = torch.randn(T, D), _routing()
    with torch.no_grad():
        expected = theirs(x, ids.long(), weights)
    assert (ours(x, weights, ids) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_fused_shared_experts_equal_separate_ones(shared: int, factor: float, backend: str) -> None:
    tensors = _checkpoint(D, INNER, E, shared)
    fused = fl.FusedMoE(D, INNER, E, K, num_shared=shared, scaling_factor=factor, backend=backend)
    alone = fl.FusedMoE(D, INNER, E, K, scaling_factor=factor)
    assert _load(fused, tensors) == set(tensors)
    _load(alone, tensors)
    x, (weights, ids) = torch.randn(T, D), _routing()
    expected = alone(x, weights, ids) + _mlp(x, tensors, "mlp.shared_experts")
    torch.testing.assert_close(fused(x, weights, ids), expected, rtol=1e-5, atol=1e-5)


def test_the_factor_in_router_or_experts_gives_the_same_sum() -> None:
    tensors = _checkpoint(D, INNER, E, 1)
    here, there = (fl.FusedMoE(D, INNER, E, K, num_shared=1, scaling_factor=f) for f in (2.5, 1.0))
    for layer in (here, there):
        _load(layer, tensors)
    x, (weights, ids) = torch.randn(T, D), _routing()
    torch.testing.assert_close(here(x, weights, ids), there(x, weights * 2.5, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_expert_parallel_ranks_sum_to_one(ranks: int, backend: str) -> None:
    tensors = _checkpoint(D, INNER, E)
    whole = fl.FusedMoE(D, INNER, E, K, scaling_factor=2.5)
    _load(whole, tensors)
    x, (weights, ids) = torch.randn(T, D), _routing()
    ids[2], ids[5, 1] = -1, -1
    total = torch.zeros(T, D)
    for rank in range(ranks):
        part = fl.FusedMoE(D, INNER, E, K, scaling_factor=2.5, ep=Axis(ranks, rank), backend=backend)
        read = _load(part, tensors)
        assert len(read) == 3 * E // ranks and part.w13.shape[0] == E // ranks
        total += part(x, weights, ids)
    assert (total[2] == 0).all()
    torch.testing.assert_close(total, whole(x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "fp8_block", "int8"])
@pytest.mark.parametrize("shared", [0, 2])
def test_tensor_parallel_ranks_sum_to_one(kind: str, shared: int) -> None:
    hidden, inner, experts, k, ranks = 64, 256, 3, 2, 2
    tensors = plain = _checkpoint(hidden, inner, experts, shared)
    if kind != "none":
        tensors, plain = _quantise(tensors, kind)
    spec = QuantSpec(kind)
    x, (weights, ids) = torch.randn(5, hidden), _routing(5, experts, k)
    total = torch.zeros(5, hidden)
    for rank in range(ranks):
        part = fl.FusedMoE(hidden, inner, experts, k, num_shared=shared, quant=spec, tp=Axis(ranks, rank))
        assert part.w2.shape[-1] == inner // ranks
        assert _load(part, tensors) == set(tensors)
        total += part(x, weights, ids)
    expected = torch.zeros(5, hidden)
    for token in range(5):
        for j in range(k):
            expected[token] += weights[token, j] * _mlp(x[token], plain, f"mlp.experts.{ids[token, j]}")
        if shared:
            expected[token] += _mlp(x[token], plain, "mlp.shared_experts")
    # Quantised activations: 3 mantissa bits (fp8) or 7 (int8) in both GEMMs.
    bound = {"none": 1e-6, "fp8_block": 0.05, "int8": 0.02}[kind]
    assert (total - expected).norm() / expected.norm() < bound


def test_the_second_bias_is_added_by_one_rank() -> None:
    x, (weights, ids) = torch.zeros(3, D), _routing(3)
    total = torch.zeros(3, D)
    for rank in range(2):
        part = fl.FusedMoE(D, INNER, E, K, bias=True, tp=Axis(2, rank))
        part.w2_bias.fill_(1.0)
        total += part(x, weights, ids)
    torch.testing.assert_close(total, weights.sum(-1, keepdim=True).expand(3, D))


@pytest.mark.parametrize("name", [c.name for c in spec_of("fused_moe").cases if c.small])
def test_blocked_path_of_cuda(name: str) -> None:
    """What the torch backend does on CUDA, run on a CPU through the same comparison."""
    case: Case = spec_of("fused_moe").case(name)
    inputs = make_inputs(case, torch.device("cpu"), 1)
    impl, oracle = (FUSED_MOE.named(n).load()(case.cfg) for n in ("torch", "reference"))
    packed = prepare(impl, inputs)
    extended = append_shared(inputs["topk_weights"], inputs["topk_ids"], case.cfg)
    actual = impl.blocked(inputs["x"], *extended, packed)
    expected = oracle(inputs["x"], inputs["topk_weights"], inputs["topk_ids"], packed)
    assert actual.dtype == inputs["x"].dtype
    compare(name, actual, expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padding_tokens_may_hold_anything(backend: str) -> None:
    layer = fl.FusedMoE(D, INNER, E, K, num_shared=1, backend=backend)
    _load(layer, _checkpoint(D, INNER, E, 1))
    x, (weights, ids) = torch.randn(4, D), _routing(4)
    x[1:3], ids[1:3] = float("nan"), -1
    y = layer(x, weights, ids)
    assert (y[1:3] == 0).all() and y.isfinite().all()
    torch.testing.assert_close(y[3:], layer(x[3:], weights[3:], ids[3:]), rtol=1e-5, atol=1e-6)


def test_ranks_read_only_their_slices() -> None:
    layer = fl.FusedMoE(256, 512, 4, 2, quant=FP8, ep=Axis(2, 1), tp=Axis(2, 1))
    found = dict(layer.slots())
    assert {name.split(".")[0] for name in found} == {"2", "3"}
    assert found["2.up_proj.weight"].index == (slice(256, 512),)
    assert found["2.down_proj.weight"].index[1] == slice(256, 512)
    assert found["2.up_proj.weight_scale_inv"].index == (slice(2, 4),)
    assert found["2.up_proj.weight_scale_inv"].shape == (4, 2)
    # The up half has scale rows of its own.
    assert found["3.up_proj.weight_scale_inv"].dest.data_ptr() == layer.w13_scale_inv[1, 2:].data_ptr()


def test_config_round_trips_and_finalize_is_idempotent() -> None:
    layer = fl.FusedMoE(D, INNER, E, K, num_shared=1, scaling_factor=2.5)
    assert eval(repr(layer.cfg)) == layer.cfg
    x, (weights, ids) = torch.randn(3, D), _routing(3)
    _load(layer, _checkpoint(D, INNER, E, 1))
    before = layer(x, weights, ids)
    layer.finalize()
    layer.finalize()
    assert torch.equal(layer(x, weights, ids), before)
    assert layer.packed is not None and layer.packed.w13.data_ptr() == layer.w13.data_ptr()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_traceable_without_graph_breaks_and_traced_once(backend: str) -> None:
    layer = fl.FusedMoE(D, INNER, E, K, num_shared=1, backend=backend)
    _load(layer, _checkpoint(D, INNER, E, 1))
    x, (weights, ids) = torch.randn(3, D), _routing(3)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(x, weights, ids), layer(x, weights, ids))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_shared": 1, "ep": Axis(2, 0)}, "num_shared"),
        ({"num_shared": 1, "bias": True}, "num_shared"),
        ({"activation": "relu"}, "activation"),
        ({"scaling_factor": 0.0}, "scaling_factor"),
        ({"quant": FP8, "tp": Axis(2, 0)}, "intermediate_size"),
        ({"quant": QuantSpec("fp8_block", (64, 64))}, "quant.block_size"),
        ({"ep": Axis(3, 0)}, "size"),
    ],
)
def test_bad_configurations_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        fl.FusedMoE(D, INNER, E, K, **arguments)
    assert error.value.argument == named


@pytest.mark.parametrize("which", ["hidden_states", "topk_weights", "topk_ids"])
def test_bad_inputs_are_named_and_change_nothing(which: str) -> None:
    layer = fl.FusedMoE(D, INNER, E, K)
    weights, ids = _routing(2)
    inputs = {"hidden_states": torch.zeros(2, D), "topk_weights": weights, "topk_ids": ids}
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for bad in (inputs[which][:, 1:], inputs[which].double()):
        with pytest.raises(ArgumentError) as error:
            layer(**{**inputs, which: bad})
        assert (error.value.layer, error.value.argument) == ("FusedMoE", which)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_debug_mode_checks_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    layer = fl.FusedMoE(D, INNER, E, K)
    weights, ids = _routing(2)
    ids[0, 0] = E
    with pytest.raises(ArgumentError, match="topk_ids"):
        layer(torch.zeros(2, D), weights, ids)


def test_reasons_in_words() -> None:
    assert why_not_fuse_shared(Axis()) is None
    assert why_not_fuse_shared(Axis(4, 1)) == "experts are split over 4 ranks"
    table = fl.backends("fused_moe", device="A100", cfg=FusedMoEConfig(128, 128, 4, 2, quant="fp8_block"))
    assert "sm_89" in next(row.reason for row in table if row.name == "triton")
