"""MXFP4 experts and interleaved rows: Hugging Face's experts, packed memory, slots of ranks, down bias once, errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.moe.fused_moe import weights as formats
from fastlayers.moe.fused_moe.gpt_oss_slots import PackedExpertNames
from fastlayers.moe.fused_moe.layer import ExpertNames, FusedMoEConfig
from fastlayers.moe.fused_moe.torch import TorchFusedMoE
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4, quantize_mxfp4
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.testing.parity import compare
from fastlayers.weights import slots

T, D, INNER, E, K = 9, 64, 96, 4, 2
MXFP4 = QuantSpec("mxfp4")
Tensors = dict[str, torch.Tensor]


def stock_experts(hidden: int = D, inner: int = INNER) -> Any:
    """Return Hugging Face's experts with weights that MXFP4 holds exactly, some gates and ups beyond the limit."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=hidden, intermediate_size=inner, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    experts = GptOssExperts(config).requires_grad_(False)
    for name, parameter in experts.named_parameters():
        parameter.normal_(std=1.0 if name.endswith("bias") else 0.5)
        if not name.endswith("bias"):
            parameter.copy_(dequantize_mxfp4(*quantize_mxfp4(parameter.mT), torch.float32).mT)
    return experts


def checkpoint(experts: Any, packed: bool = True) -> Tensors:
    """Return a module's tensors in either of GPT-OSS's two spellings."""
    found: Tensors = {}
    for name, value in experts.state_dict().items():
        if packed and not name.endswith("bias"):
            found[f"{name}_blocks"], found[f"{name}_scales"] = quantize_mxfp4(value.mT)
        else:
            found[name] = value
    return found


def fill(layer: fl.FusedMoE, tensors: Tensors) -> Tensors:
    """Load a layer as a loader does; return how often each number was read."""
    model = torch.nn.Module()
    model.experts = layer
    counts = {name: torch.zeros(value.shape) for name, value in tensors.items()}
    for name, slot in slots(model):
        name = name.removeprefix("experts.")
        assert slot.shape == tuple(tensors[name].shape), name
        slot.fill(name, tensors[name][slot.index])
        counts[name][slot.index] += 1
    layer.finalize()
    return counts


def layer_of(quant: QuantSpec = MXFP4, hidden: int = D, inner: int = INNER, **options: Any) -> fl.FusedMoE:
    return fl.FusedMoE(
        hidden, inner, E, K, quant=quant, activation="swiglu_oai", bias=True, interleaved=True, **options
    )


def inputs(tokens: int = T, hidden: int = D) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)]).int()
    return torch.randn(tokens, hidden, generator=generator), torch.rand(tokens, K, generator=generator) + 0.1, ids


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("packed", [True, False])
def test_equals_hugging_face(backend: str, packed: bool) -> None:
    theirs = stock_experts()
    layer = layer_of(MXFP4 if packed else NONE, backend=backend)
    counts = fill(layer, checkpoint(theirs, packed))
    assert all((count == 1).all() for count in counts.values())
    x, weights, ids = inputs()
    gate_up = x @ theirs.gate_up_proj[0] + theirs.gate_up_proj_bias[0]
    assert gate_up[:, ::2].max() > 7 and gate_up[:, 1::2].max() > 7 and gate_up[:, 1::2].min() < -7
    compare("experts", layer(x, weights, ids), theirs(x, ids.long(), weights))


def test_gpt_oss_width_needs_no_padding() -> None:
    # 2880 = 22.5 · 128 and 45 · 64: no tile may end inside a row.
    theirs = stock_experts(hidden=2880, inner=32)
    layer = layer_of(hidden=2880, inner=32, backend="triton")
    fill(layer, checkpoint(theirs))
    x, weights, ids = inputs(3, 2880)
    x *= 0.1
    compare("experts", layer(x, weights, ids), theirs(x, ids.long(), weights))
    assert layer.w13.shape == (E, 64, 90, 16) and layer.w2.shape == (E, 2880, 1, 16)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_weights_stay_packed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = checkpoint(stock_experts())
    layer = layer_of(backend=backend)
    fill(layer, tensors)
    decoded: list[tuple[int, ...]] = []

    def watch(blocks: torch.Tensor, *rest: Any) -> torch.Tensor:
        decoded.append(tuple(blocks.shape))
        return dequantize_mxfp4(blocks, *rest)

    monkeypatch.setattr(formats, "dequantize_mxfp4", watch)
    x, weights, ids = inputs()
    ids[ids == 2] = -1
    layer(x, weights, ids)
    # torch decodes the experts that occur, one at a time; Triton none.
    expected = 3 * [(2 * INNER, D // 32, 16), (D, INNER // 32, 16)] if backend == "torch" else []
    assert decoded == expected
    assert layer.packed is not None and layer.packed.w13.data_ptr() == layer.w13.data_ptr()
    assert sum(p.nbytes for p in layer.parameters()) == sum(t.nbytes for t in tensors.values())
    assert torch.equal(layer.w13, tensors["gate_up_proj_blocks"])


def test_cuda_path_of_torch_equals_the_loop() -> None:
    layer = layer_of(backend="torch")
    fill(layer, checkpoint(stock_experts()))
    x, weights, ids = inputs()
    ids[0, 0] = -1
    found = TorchFusedMoE(layer.cfg).blocked(x, weights, ids, layer.weights())
    compare("blocked", found, layer(x, weights, ids))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("axes", [(1, 2), (1, 3), (2, 1), (2, 2), (4, 1)], ids=str)
def test_partial_sums_of_ranks_add_up(axes: tuple[int, int], packed: bool) -> None:
    ep, tp = axes
    tensors = checkpoint(stock_experts(), packed)
    whole = layer_of(MXFP4 if packed else NONE)
    fill(whole, tensors)
    x, weights, ids = inputs()
    total, read = torch.zeros_like(x), {name: torch.zeros(t.shape) for name, t in tensors.items()}
    widths = []
    for expert_rank in range(ep):
        for rank in range(tp):
            layer = layer_of(MXFP4 if packed else NONE, ep=Axis(ep, expert_rank), tp=Axis(tp, rank))
            for name, count in fill(layer, tensors).items():
                read[name] += count
            total += layer(x, weights, ids)
            widths.append(layer.cfg.intermediate_size)
    compare("sum over ranks", total, whole(x, weights, ids))
    # Every number is read by one rank; the down bias by all that split an expert, but only one adds it.
    assert all((count == (tp if name == "down_proj_bias" else 1)).all() for name, count in read.items())
    if packed and tp == 2:
        assert widths[:2] == [64, 32]  # three groups of 32


def widths(inner: int, size: int) -> Iterable[int]:
    return [layer_of(inner=inner, tp=Axis(size, rank)).cfg.intermediate_size for rank in range(size)]


def test_ranks_take_whole_groups() -> None:
    # GPT-OSS's 2880 are 90 groups, which four ranks do not share evenly.
    assert widths(2880, 4) == [736, 736, 704, 704] and widths(2880, 2) == [1440, 1440]
    assert widths(160, 4) == [64, 32, 32, 32]
    with pytest.raises(ArgumentError, match=r"FusedMoE: intermediate_size is 64 over 4 ranks"):
        layer_of(inner=64, tp=Axis(4, 0))


def test_bad_arguments_are_named() -> None:
    for change, message in (
        ({"hidden": 80}, "hidden_size is 80; accepted: a multiple of 32 for MXFP4"),
        ({"inner": 48}, "intermediate_size is 48; accepted: a multiple of 32 for MXFP4"),
        ({"quant": QuantSpec("int8")}, "interleaved is True with int8"),
        ({"quant": QuantSpec("fp8_block"), "hidden": 128, "inner": 128}, "interleaved is True with fp8_block"),
        ({"names": ExpertNames()}, "names is ExpertNames with interleaved=True"),
    ):
        with pytest.raises(ArgumentError, match=f"FusedMoE: {message}"):
            layer_of(**change)
    with pytest.raises(ArgumentError, match="FusedMoE: interleaved is False; accepted: True for mxfp4"):
        fl.FusedMoE(D, INNER, E, K, quant=MXFP4)
    with pytest.raises(ArgumentError, match="FusedMoE: names is PackedExpertNames with interleaved=False"):
        fl.FusedMoE(D, INNER, E, K, names=PackedExpertNames())
    with pytest.raises(ArgumentError, match="FusedMoE: num_shared is 1 with mxfp4"):
        FusedMoEConfig(D, INNER, E, K, num_shared=1, quant="mxfp4")


def test_codes_are_never_cast() -> None:
    tensors = checkpoint(stock_experts())
    tensors["gate_up_proj_blocks"] = tensors["gate_up_proj_blocks"].float()
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks: dtype torch\.float32 in the checkpoint"):
        fill(layer_of(), tensors)


def test_configuration_can_be_read_back() -> None:
    cfg = layer_of().cfg
    assert eval(repr(cfg)) == cfg and cfg.interleaved and cfg.quant == "mxfp4"


def test_compiles_without_a_graph_break() -> None:
    layer = layer_of()
    fill(layer, checkpoint(stock_experts()))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, weights, ids = inputs()
    assert torch.equal(compiled(x, weights, ids), layer(x, weights, ids))
