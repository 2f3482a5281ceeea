"""FP8-block models: our linears and experts in Hugging Face's modules, and the loading of ragged blocks."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear
from transformers.utils.quantization_config import FineGrainedFP8Config

import fastlayers as fl
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.patching import loading
from fastlayers.quant.block_quant import dequantize_block_weight, quantize_block_weight

sys.path.insert(0, str(Path(__file__).parent))
from test_contracts import logits, snapshot
from tiny import build, prompt

# kv_a_proj_with_mqa has 176 rows and 2 scale rows: Hugging Face infers blocks of 88 from that.
RAGGED: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "kv_lora_rank": 160, "q_lora_rank": 72,
    "initializer_range": 0.1,
}  # fmt: skip
SKIPPED = ("lm_head", "gate", "norm", "embed_tokens")


def quantised_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors with every matrix of a linear in e4m3 blocks."""
    out: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        linear = key.endswith("proj.weight") or "kv_a_proj_with_mqa" in key
        if linear:
            out[key], out[key + "_scale_inv"] = quantize_block_weight(value)
        else:
            out[key] = value
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (an FP8 checkpoint, its weights dequantised by hand to bf16)."""
    root = tmp_path_factory.mktemp("fp8")
    build("v3", torch.bfloat16, **RAGGED).save_pretrained(root / "plain")
    state = quantised_state(load_file(root / "plain" / "model.safetensors"))
    config = json.loads((root / "plain" / "config.json").read_text())
    exact = {}
    for key, value in state.items():
        if not key.endswith("_scale_inv"):
            scale = state.get(key + "_scale_inv")
            exact[key] = value if scale is None else by_hand(value, scale).to(torch.bfloat16)
    for name, tensors in (("fp8", state), ("exact", exact)):
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
        extra = {}
        if name == "fp8":
            extra["quantization_config"] = {
                "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
            }  # fmt: skip
        (root / name / "config.json").write_text(json.dumps(config | extra))
    return root / "fp8", root / "exact"


def by_hand(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return codes.float() * scale[rows][:, columns]


def test_from_pretrained_reads_ragged_blocks_right(checkpoint: tuple[Path, Path]) -> None:
    fp8, exact = checkpoint
    stock = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16).eval()
    model, report = fl.from_pretrained(AutoModelForCausalLM, fp8, patch={"strict": True}, dtype=torch.bfloat16)
    assert report.skipped == () and not model.training
    assert getattr(model.config, "quantization_config", None) is None
    ours, theirs = model.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    assert ours["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (176, 128)
    fl.unpatch(model)
    assert torch.equal(logits(model), logits(stock))


def test_stock_loading_of_ragged_blocks_is_wrong(checkpoint: tuple[Path, Path]) -> None:
    """The reason for our own reading; if this fails, transformers has mended it."""
    fp8, exact = checkpoint
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    wanted = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16).state_dict()[name]
    try:
        given = AutoModelForCausalLM.from_pretrained(fp8, dtype=torch.bfloat16).state_dict()[name]
    except (RuntimeError, ValueError):
        return
    assert not torch.equal(given, wanted)


def test_from_pretrained_of_a_plain_checkpoint(checkpoint: tuple[Path, Path]) -> None:
    model, report = fl.from_pretrained(
        AutoModelForCausalLM, checkpoint[1], patch={"moe": False}, dtype=torch.float32, attn_implementation="eager"
    )
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"
    assert {entry.kind for entry in report.entries} == {"attention", "norm", "mlp"}


@pytest.mark.parametrize("how", ["path", "object", "quantization_config"])
def test_ragged_blocks_are_right_however_the_configuration_comes(checkpoint: tuple[Path, Path], how: str) -> None:
    fp8, exact = checkpoint
    held = AutoConfig.from_pretrained(fp8)
    said = held.to_dict()
    options: dict[str, Any] = {"quantization_config": FineGrainedFP8Config()}
    if how != "quantization_config":
        options = {"config": str(fp8) if how == "path" else held}
    wanted = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16).state_dict()
    for _ in range(2):
        given = fl.from_pretrained(AutoModelForCausalLM, fp8, dtype=torch.bfloat16, **options)[0].state_dict()
        assert all(torch.equal(given[name], value) for name, value in wanted.items())
    assert held.to_dict() == said, "the caller's configuration stays as it was"


def test_from_pretrained_passes_on_what_finds_the_configuration(
    checkpoint: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    config = json.loads((checkpoint[1] / "config.json").read_text()) | {"model_type": "of_mine"}
    config["auto_map"] = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(checkpoint[1] / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "mine.py").write_text(
        "from transformers import DeepseekV3Config, DeepseekV3ForCausalLM\n"
        "class Mine(DeepseekV3Config):\n    model_type = 'of_mine'\n"
        "class Model(DeepseekV3ForCausalLM):\n    config_class = Mine\n"
    )
    _, report = fl.from_pretrained(AutoModelForCausalLM, tmp_path, trust_remote_code=True, dtype=torch.bfloat16)
    assert {entry.kind for entry in report.replaced} >= {"attention", "norm", "mlp"}
    with pytest.raises(ArgumentError, match="output_loading_info is True; accepted: False"):
        fl.from_pretrained(AutoModelForCausalLM, checkpoint[1], output_loading_info=True)


def test_the_configuration_of_a_gguf_file_is_asked_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama")
    given: list[dict[str, Any]] = []

    def config(name: Path, **options: Any) -> Any:
        given.append(options)
        return model.config

    class Loader:
        @staticmethod
        def from_pretrained(name: Path, **options: Any) -> Any:
            given.append(options)
            return model

    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    loaded, report = fl.from_pretrained(Loader, tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert loaded is model and report.replaced and not report.skipped
    assert given == [{"gguf_file": "model.gguf"}, {"gguf_file": "model.gguf", "dtype": torch.float32}]


def test_bad_scales_are_errors_that_name_the_tensor(tmp_path: Path) -> None:
    codes, scale = quantize_block_weight(torch.randn(176, 128))
    save_file({"a.weight": codes}, tmp_path / "alone.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight: e4m3 without"):
        loading.read_dequantised([tmp_path / "alone.safetensors"], (128, 128), torch.bfloat16)
    save_file({"a.weight": codes, "a.weight_scale_inv": scale[:1].contiguous()}, tmp_path / "short.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight.*scale"):
        loading.read_dequantised([tmp_path / "short.safetensors"], (128, 128), torch.bfloat16)


def test_fp8_blocks_come_from_the_files_that_transformers_reads(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    source = checkpoint[0]
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "old.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loading.checkpoint_files(str(tmp_path), {}) == [tmp_path / "old.safetensors"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})  # goes before an index
    assert loading.checkpoint_files(str(tmp_path), {}) == [tmp_path / "model.safetensors"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "old.safetensors"}))
    assert loading.checkpoint_files(str(tmp_path), {}) == [tmp_path / "old.safetensors"]
    files = [tmp_path / "old.safetensors", tmp_path / "model.safetensors"]
    with pytest.raises(CheckpointError, match=r"is in old\.safetensors, model\.safetensors: one would be lost"):
        loading.read_dequantised(files, (128, 128), torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "../old.safetensors"}))
    with pytest.raises(CheckpointError, match="accepted: names of files below the directory"):
        fl.from_pretrained(AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="variant is 'fp16'; accepted: none"):
        fl.from_pretrained(AutoModelForCausalLM, source, variant="fp16", dtype=torch.bfloat16)


def fp8_pair() -> tuple[Any, Any]:
    """Return (a model with Hugging Face's FP8 modules, a bf16 model with the same weights dequantised)."""
    plain = build("v3", torch.bfloat16, **RAGGED)
    fp8 = copy.deepcopy(plain)
    replace_with_fp8_linear(
        fp8, modules_to_not_convert=["lm_head"], pre_quantized=True,
        quantization_config=FineGrainedFP8Config(weight_block_size=(128, 128)),
    )  # fmt: skip
    fp8.set_experts_implementation("eager")
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for name, module in fp8.named_modules():
            source: Any = modules.get(name)
            if isinstance(module, FP8Linear):
                codes, scale = quantize_block_weight(source.weight)
                module.weight, module.weight_scale_inv = nn.Parameter(codes, False), nn.Parameter(scale)
                source.weight.copy_(dequantize_block_weight(codes, scale, dtype=torch.bfloat16))
            elif type(module).__name__ == "FP8Experts":
                for part in ("gate_up_proj", "down_proj"):
                    weight = getattr(source, part)
                    codes, scale = quantize_block_weight(weight)
                    setattr(module, part, nn.Parameter(codes, requires_grad=False))
                    setattr(module, part + "_scale_inv", nn.Parameter(scale))
                    weight.copy_(dequantize_block_weight(codes, scale, dtype=torch.bfloat16))
    return fp8.eval(), plain.eval()


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantise activations by hand: e4m3 per token and 128 features."""
    width = x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, -width % 128)).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / torch.tensor(448.0)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., :width]


@torch.inference_mode()
def test_fp8_modules_are_replaced_and_right() -> None:
    fp8, plain = fp8_pair()
    before = snapshot(fp8)
    report = fl.patch(fp8, strict=True)
    kinds = {(e.kind, e.original_class) for e in report.replaced}
    assert ("linear", "FP8Linear") in kinds and ("moe", "FP8Experts") in kinds
    assert not any(e.action == "packed" for e in report.entries)
    attention = next(e for e in report.entries if e.name == "model.layers.0.self_attn")
    assert attention.bytes_moved == 4 * (24 + 20) * 160 * 2, "one dequantised kv_b_proj in bf16"

    x = torch.randn(5, 128).bfloat16()
    linear = fp8.model.layers[0].self_attn.kv_a_proj_with_mqa
    weight = plain.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
    exact = rounded_rows(x) @ by_hand(linear.weight, linear.weight_scale_inv).T
    assert float((linear(x).float() - exact).norm() / exact.norm()) < 4e-3
    assert float((by_hand(linear.weight, linear.weight_scale_inv) - weight.float()).norm()) > 0

    ids, share = torch.rand(5, 16).topk(4).indices, torch.rand(5, 4)
    wanted = plain.model.layers[1].mlp.experts(x, ids, share.bfloat16()).float()
    given = fp8.model.layers[1].mlp.experts(x, ids, share).float()
    assert float((given - wanted).norm() / wanted.norm()) < 0.06

    fl.unpatch(fp8)
    assert snapshot(fp8) == before


@torch.inference_mode()
def test_fp8_decode_agrees_with_fp8_prefill() -> None:
    fp8, plain = fp8_pair()
    report = fl.patch(fp8, strict=True)
    ids = prompt(2, 50)["input_ids"]
    whole, wanted = fp8(ids).logits.float(), plain(ids).logits.float()
    out = fp8(ids[:, :40], use_cache=True)
    for step in range(40, 50):
        out = fp8(ids[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
    last = out.logits[:, -1].float()
    # Activations are rounded to 4 bits of mantissa, and some tokens take other experts for it.
    assert float((whole - wanted).norm() / wanted.norm()) < 0.5
    cosine = torch.nn.functional.cosine_similarity(last, whole[:, -1])
    assert bool((cosine > 0.9).all()), cosine
    assert min(report.hits().values()) > 0
    other = copy.deepcopy(fp8)
    assert torch.equal(other(ids).logits.float(), whole)


@pytest.mark.parametrize("how", ["weight", "weight_scale_inv", "replaced", "loaded"])
@torch.no_grad()
def test_the_dequantised_kv_b_proj_follows_its_weights(how: str) -> None:
    fp8, _ = fp8_pair()
    fl.patch(fp8, strict=True)
    ids = prompt(2, 12)["input_ids"]

    def decoded(model: Any) -> torch.Tensor:
        out = model(ids[:, :11], use_cache=True)
        last: torch.Tensor = model(ids[:, 11:], past_key_values=out.past_key_values, use_cache=True).logits.float()
        return last

    before = decoded(fp8)
    for layer in fp8.model.layers:
        projection = layer.self_attn.kv_b_proj
        scale = projection.weight_scale_inv
        if how == "weight":
            projection.weight.copy_(-projection.weight.float())
        elif how == "weight_scale_inv":
            scale.mul_(-3.0)
        elif how == "replaced":
            projection.weight_scale_inv = nn.Parameter(-3.0 * scale)
        else:
            projection.load_state_dict(projection.state_dict() | {"weight_scale_inv": -3.0 * scale})
    after, fresh = decoded(fp8), copy.deepcopy(fp8)
    fl.unpatch(fresh)
    fl.patch(fresh, strict=True)
    assert torch.equal(after, decoded(fresh)) and not torch.equal(after, before)


class Louder(nn.Module):
    """Around a linear, whose weight it shows as adapters do."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = -2.0 * self.base_layer(x)
        return out


@pytest.mark.parametrize("how", ["hooked", "wrapped"])
@torch.no_grad()
def test_a_kv_b_proj_that_somebody_changed_is_called(how: str) -> None:
    pair = fp8_pair()[0], fp8_pair()[0]
    ids, outs = prompt(2, 12)["input_ids"], []
    for model, options in zip(pair, ({}, {"attention": False}), strict=True):
        fl.patch(model, **options)
        for layer in model.model.layers:
            if how == "hooked":
                layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: -2.0 * out)
            else:
                layer.self_attn.kv_b_proj = Louder(layer.self_attn.kv_b_proj)
        out = model(ids[:, :11], use_cache=True)
        outs.append(model(ids[:, 11:], past_key_values=out.past_key_values, use_cache=True).logits.float())
        model.to("cpu")  # packs anew
    assert float((outs[0] - outs[1]).norm() / outs[1].norm()) < 1e-2
