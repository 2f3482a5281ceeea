"""The bounds of ``fastlayers eval`` for checkpoints that round inputs of their linears, format by format."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.linear.fp8_scaled.layer import quantize_scaled_weight
from fastlayers.linear.int8.layer import LARGEST
from fastlayers.linear.int8.torch import TorchInt8Linear
from fastlayers.moe.fused_moe import torch as torch_experts
from fastlayers.quant.block_quant import quantize_block_weight
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.reference import ReferenceGroupQuant
from fastlayers_models.convert import convert_checkpoint
from fastlayers_models.find import TINY, assets
from fastlayers_server import divergence, evaluate, tasks
from fastlayers_server.divergence import Yardstick
from fastlayers_server.hugging_face import tokenizer_of
from fastlayers_server.variants import E4M3, FP32, VARIANTS, FastlayersRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from checkpoint_tools import edited, rewrite

CPU = torch.device("cpu")
OURS = ("fastlayers", "fastlayers-fp32", "fp8-kv", "fp8-kv-fp32")


def yardstick(path: Path, texts: int) -> Yardstick:
    tokenizer = tokenizer_of(assets() / TINY)
    return Yardstick(path, [tokenizer(text)["input_ids"] for text in tasks.stories("held_out", texts)], CPU)


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Yardstick]:
    folder = tmp_path_factory.mktemp("int8") / "int8"
    convert_checkpoint(assets() / TINY, folder, "int8")
    return folder, yardstick(folder, 32)


def holds(path: Path, stick: Yardstick, variant: str, runner: Any) -> bool:
    """Say whether it is within the bounds of this variant of this checkpoint, as ``eval`` does."""
    roundings = evaluate._roundings(VARIANTS[variant], runner, path)
    assert roundings is not None
    far, (mean, p99) = stick.of(runner.logits), stick.bound(roundings)
    return far.mean <= mean and far.p99 <= p99


def test_sound_variants_of_int8_hold_bounds_that_count_its_inputs(int8: tuple[Path, Yardstick]) -> None:
    path, stick = int8
    assert divergence.own_roundings(path) == ("int8-inputs",)
    judged = [v.name for v in VARIANTS.values() if v.roundings is not None and v.why_not(path, CPU) is None]
    assert judged == list(OURS)
    assert [name for name in judged if not holds(path, stick, name, VARIANTS[name].build(path, CPU))] == []
    # Without them there is fp32's floor alone, which nothing holds that rounds to 8 bits.
    assert stick.of(FastlayersRunner(path, FP32, CPU).logits).mean > 1e6 * stick.bound(())[0]


@pytest.mark.parametrize("module", ["layers.2.self_attn.o_proj", "layers.0.mlp.down_proj"])
def test_one_wrong_scale_of_an_int8_row_breaks_the_bound(
    module: str, int8: tuple[Path, Yardstick], tmp_path: Path
) -> None:
    def doubled(weights: dict[str, torch.Tensor]) -> None:
        weights[f"model.{module}.weight_scale"][5] *= 2  # of one output in 128

    path, stick = int8
    wrong = edited(path, tmp_path / "wrong", doubled)
    assert not holds(path, stick, "fastlayers-fp32", FastlayersRunner(wrong, FP32, CPU))


def of_the_call(x: torch.Tensor) -> torch.Tensor:
    """One scale for all tokens, as of formats whose scales belong to tensors."""
    return (x.abs().amax() / LARGEST).expand(*x.shape[:-1], 1)


def of_seven_bits(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True) / 63


def ignored(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x[..., :1])


Scale = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("scale", "linears", "experts"),
    [(of_the_call, True, False), (of_the_call, False, True), (of_seven_bits, True, True), (ignored, True, False)],
)
def test_a_wrong_scale_of_int8_inputs_breaks_the_bound(
    scale: Scale, linears: bool, experts: bool, int8: tuple[Path, Yardstick], monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantised(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used = scale(rows.float())
        return (rows.float() / used).round().clamp(-LARGEST, LARGEST).to(torch.int8), used

    def rounded(x: torch.Tensor, quant: str, scale_fmt: str) -> torch.Tensor:
        codes, used = quantised(None, x)
        return codes.float() * used

    path, stick = int8
    if linears:
        monkeypatch.setattr(TorchInt8Linear, "quantize", quantised)
    if experts:
        monkeypatch.setattr(torch_experts, "round_activations", rounded)
    assert not holds(path, stick, "fastlayers-fp32", FastlayersRunner(path, FP32, CPU))


def test_codes_that_are_cut_off_break_the_bound(int8: tuple[Path, Yardstick], monkeypatch: pytest.MonkeyPatch) -> None:
    def quantised(self: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = rows.float().abs().amax(-1, keepdim=True) / LARGEST
        return (rows.float() / scale).to(torch.int8), scale

    path, stick = int8
    monkeypatch.setattr(TorchInt8Linear, "quantize", quantised)
    assert not holds(path, stick, "fastlayers-fp32", FastlayersRunner(path, FP32, CPU))


@pytest.mark.parametrize(("dtype", "group"), [(E4M3, 128), (E4M3, 64), (torch.int8, 128)])
def test_stocks_inputs_are_rounded_as_groups_are(dtype: torch.dtype, group: int) -> None:
    x = torch.randn(7, 3 * group, generator=torch.Generator().manual_seed(0))
    x[0, :group] = 0
    codes, scales = ReferenceGroupQuant(GroupQuantConfig(group, dtype))(x)
    inputs = divergence._Inputs(dtype=dtype, group=group)
    assert torch.equal(inputs.rounded(x), codes * scales.repeat_interleave(group, 1))
    # A row that is one group, and all rows of a call as one.
    of_rows, of_call = (divergence._Inputs(dtype=dtype, group=kind) for kind in ("row", "call"))
    assert torch.equal(of_rows.rounded(x[:, :group]), inputs.rounded(x[:, :group]))
    assert torch.equal(of_call.rounded(x).flatten(), of_rows.rounded(x.flatten()))
    # What is left of a row is a group of its own.
    assert torch.equal(inputs.rounded(x[:, : group + 5])[:, :group], inputs.rounded(x)[:, :group])


COMPRESSED = {"type": "float", "num_bits": 8, "strategy": "tensor"}
FORMATS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "rows": ({"quant_method": "fbgemm_fp8"}, "_scale", lambda w: quantize_scaled_weight(w, "channel")),
    "tensor, rows": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"},
        "_scale_inv",
        lambda w: quantize_scaled_weight(w, "tensor"),
    ),
    "tensor, call": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"0": {"weights": COMPRESSED, "input_activations": COMPRESSED | {"dynamic": True}}},
        },
        "_scale",
        lambda w: quantize_scaled_weight(w, "tensor"),
    ),
    "blocks of 64": (
        {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic"},
        "_scale_inv",
        lambda w: quantize_block_weight(w, (128, 64)),
    ),
}


@cache
def plain_modules(path: Path) -> tuple[str, ...]:
    """Return the matrices that stay as they are: those of experts, which have none of these formats, among them."""
    coded = ("self_attn.o_proj.weight", "0.mlp.gate_proj.weight", "0.mlp.up_proj.weight", "0.mlp.down_proj.weight")
    names = divergence.Checkpoint(path).names()
    kept = (name for name in names if name.endswith(".weight") and not name.endswith(coded))
    return tuple(name.removesuffix(".weight") for name in kept)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_of_fp8_inputs_has_a_bound(kind: str, tmp_path: Path) -> None:
    config, ending, quantise = FORMATS[kind]
    kept = list(plain_modules(assets() / TINY))

    def encode(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight")]:
            if name.removesuffix(".weight") not in kept:
                tensors[name], tensors[f"{name}{ending}"] = quantise(tensors[name])

    words = config | {"ignore" if "config_groups" in config else "modules_to_not_convert": kept}
    path = rewrite(assets() / TINY, tmp_path / "made", encode, lambda c: c.update(quantization_config=words))
    assert divergence.own_roundings(path) == ("fp8-inputs",)
    stick, name = yardstick(path, 8), f"model.layers.2.self_attn.o_proj.weight{ending}"
    sound = FastlayersRunner(path, FP32, CPU)
    assert holds(path, stick, "fastlayers-fp32", sound) and stick.of(sound.logits).mean > 1e6 * stick.bound(())[0]

    def doubled(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name] * 2

    wrong = FastlayersRunner(rewrite(path, tmp_path / "wrong", doubled), FP32, CPU)
    assert not holds(path, stick, "fastlayers-fp32", wrong)


def test_scales_of_inputs_that_a_checkpoint_holds_have_no_bound(tmp_path: Path) -> None:
    static = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    path = rewrite(assets() / TINY, tmp_path / "made", config=lambda c: c.update(quantization_config=static))
    assert divergence.own_roundings(path) is None
