"""Checkpoints of AWQ, GPTQ and compressed-tensors, written here in their published layouts, against dequantised ones.

Nothing of the library packs or unpacks what these tests write: words are put together bit by bit.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fastlayers as fl
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.weight_only.layer import WeightOnlyLinear
from fastlayers.quant.block_quant import E4M3
from fastlayers.quant.spec import QuantSpec
from fastlayers_models.convert import dequantize_checkpoint
from fastlayers_models.experts import quant_of_experts

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Tensors, tensors_of, write
from family_tools import BASE, EP2, TP2, Grid, check_like_hugging_face, check_ranks, ours, save_random, stock
from tiny_models import VARIATIONS, hf_config

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Where AutoAWQ puts eight codes that follow each other: the k-th is in bits 4·PLACE[k] of the word.
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def words(codes: np.ndarray, bits: int, axis: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return int32 words of codes along an axis, one code after the other from the lowest bits, or as ``places``."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    count = 32 // bits
    found = np.zeros((*codes.shape[:-1], codes.shape[-1] // count), np.uint32)
    for at in range(codes.shape[-1]):
        place = places[at % count] if places else at % count
        found[..., at // count] |= codes[..., at] << np.uint32(bits * place)
    return torch.from_numpy(np.moveaxis(found, -1, axis).copy().view(np.int32)).contiguous()


@dataclass(frozen=True)
class Quantised:
    """One matrix: unsigned codes and zero points, scales ``[N, G]``, the group of each input feature."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: torch.Tensor
    group: np.ndarray

    def weight(self) -> torch.Tensor:
        """Return what the codes stand for, fp32."""
        off = torch.from_numpy(self.codes.astype(np.float32) - self.zeros[:, self.group].astype(np.float32))
        return off * self.scales.float()[:, torch.from_numpy(self.group)]


def quantise(weight: torch.Tensor, bits: int, size: int, middle: bool, shuffled: bool, seed: int) -> Quantised:
    n, k = weight.shape
    random = np.random.default_rng(seed)
    group = np.arange(k) // size
    if shuffled:  # the same for linears of one input, as GPTQ orders them by their input
        group = np.random.default_rng(k).permutation(group)
    count, levels = k // size, 2**bits - 1
    codes, zeros, scales = np.zeros((n, k), np.int64), np.zeros((n, count), np.int64), torch.zeros(n, count)
    values = weight.numpy()
    for g in range(count):
        of_group = values[:, group == g]
        zero = np.full(n, (levels + 1) // 2) if middle else random.integers(1, levels, n)
        scale = (np.abs(of_group).max(1) / (levels // 2)).astype(np.float16)
        codes[:, group == g] = np.clip(
            np.round(of_group / scale[:, None].astype(np.float32)) + zero[:, None], 0, levels
        )
        zeros[:, g], scales[:, g] = zero, torch.from_numpy(scale.astype(np.float32))
    return Quantised(codes, zeros, scales.to(torch.float16), group)


def awq(name: str, q: Quantised) -> Tensors:
    return {
        f"{name}.qweight": words(q.codes.T, 4, 1, PLACE), f"{name}.qzeros": words(q.zeros.T, 4, 1, PLACE),
        f"{name}.scales": q.scales.t().contiguous(),
    }  # fmt: skip


def gptq(bits: int, less: int) -> Callable[[str, Quantised], Tensors]:
    def tensors(name: str, q: Quantised) -> Tensors:
        return {
            f"{name}.qweight": words(q.codes.T, bits, 0), f"{name}.qzeros": words(q.zeros.T - less, bits, 1),
            f"{name}.scales": q.scales.t().contiguous(), f"{name}.g_idx": torch.from_numpy(q.group.astype(np.int32)),
        }  # fmt: skip

    return tensors


def packed(bits: int, zeros: bool, order: bool = False) -> Callable[[str, Quantised], Tensors]:
    def tensors(name: str, q: Quantised) -> Tensors:
        found = {
            f"{name}.weight_packed": words(q.codes, bits, 1), f"{name}.weight_scale": q.scales.to(torch.float32),
            f"{name}.weight_shape": torch.tensor(q.codes.shape),
        }  # fmt: skip
        found |= {f"{name}.weight_zero_point": words(q.zeros, bits, 0)} if zeros else {}
        return found | ({f"{name}.weight_g_idx": torch.from_numpy(q.group.astype(np.int32))} if order else {})

    return tensors


@dataclass(frozen=True)
class Layout:
    """A published layout: what config.json says, and what becomes of a matrix."""

    config: dict[str, Any]
    tensors: Callable[[str, Quantised], Tensors]
    bits: int = 4
    size: int = 32
    middle: bool = False
    shuffled: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def compressed(weights: dict[str, Any], packing: str = "pack-quantized") -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights, "input_activations": None}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": packing, "ignore": ["lm_head"], "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
LAYOUTS = {
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Layout(GPTQ | {"sym": True}, gptq(4, 1), middle=True),
    "gptq_zeros": Layout(GPTQ, gptq(4, 1)),
    "gptq_v2": Layout(GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 0)),
    "gptq_act_order": Layout(GPTQ | {"desc_act": True}, gptq(4, 1), shuffled=True),
    "gptq_8": Layout(GPTQ | {"bits": 8}, gptq(8, 1), bits=8),
    "packed_4": Layout(
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32}), packed(4, False), middle=True
    ),
    "packed_4_zeros": Layout(
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}), packed(4, True)
    ),
    "packed_4_act_order": Layout(
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}), packed(4, False, True),
        middle=True, shuffled=True,
    ),
    "packed_8": Layout(
        compressed({"num_bits": 8, "strategy": "channel"}), packed(8, False), bits=8, size=0, middle=True
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(transformers.Qwen3Config(**BASE, head_dim=16), tmp_path_factory.mktemp("plain"))


def quantised(
    plain: Path, target: Path, layout: Layout, parts: tuple[str, ...] = PARTS, **said: Any
) -> tuple[Path, Path]:
    """Return a checkpoint in a layout, ``parts`` of it, and one of the weights that its codes stand for."""
    config, weights = json.loads((plain / "config.json").read_text()), tensors_of(plain)
    coded, dense = dict(weights), dict(weights)
    for seed, name in enumerate(sorted(weights)):
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in parts:
            weight = coded.pop(name)
            size = layout.size or weight.shape[1]
            q = quantise(weight, layout.bits, size, layout.middle, layout.shuffled, seed)
            coded |= layout.tensors(module, q)
            dense[name] = q.weight()
    write(target / "coded", config | {"quantization_config": layout.config | said}, coded)
    return target / "coded", write(target / "dense", config, dense)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_hugging_face_on_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    coded, dense = quantised(plain, tmp_path, LAYOUTS[name])
    model = ours(coded)
    held = [module for module in model.modules() if isinstance(module, WeightOnlyLinear)]
    assert len(held) == 4 * BASE["num_hidden_layers"]  # q, k and v are one, gate and up are one
    assert all(module.cfg.act_order == LAYOUTS[name].shuffled for module in held)
    check_like_hugging_face(stock(dense), model, batch=2, steps=16)


@pytest.mark.parametrize("name", ["awq", "gptq_act_order", "packed_4"])
def test_bf16_weights_are_those_of_the_dequantised_bf16_model(name: str, plain: Path, tmp_path: Path) -> None:
    coded, dense = quantised(plain, tmp_path, LAYOUTS[name])
    left, right = ours(coded, torch.bfloat16), ours(dense, torch.bfloat16)
    others = dict(right.named_modules())
    compared = 0
    for path, module in left.named_modules():
        if isinstance(module, WeightOnlyLinear):
            assert torch.equal(module.dequantized(torch.bfloat16), others[path].weight)
            x = torch.randn(5, module.local_in, dtype=torch.bfloat16)
            torch.testing.assert_close(module(x).float(), others[path](x).float(), rtol=1e-2, atol=1e-2)
            compared += 1
    assert compared == 12


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_fp8_weights_alone(strategy: str, plain: Path, tmp_path: Path) -> None:
    """Weights in e4m3 with a scale a matrix or a channel, activations as they are."""
    config, weights = json.loads((plain / "config.json").read_text()), tensors_of(plain)
    coded, dense = dict(weights), dict(weights)
    for name in sorted(weights):
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in PARTS:
            weight = weights[name]
            largest = weight.abs().amax() if strategy == "tensor" else weight.abs().amax(1, keepdim=True)
            coded[name], scale = (weight / (largest / 448)).to(E4M3), largest / 448
            coded[name.replace("weight", "weight_scale")] = scale.reshape(-1)[0] if strategy == "tensor" else scale
            dense[name] = coded[name].float() * scale
    quant = compressed({"num_bits": 8, "type": "float", "strategy": strategy}, "float-quantized")
    write(tmp_path / "coded", config | {"quantization_config": quant}, coded)
    check_like_hugging_face(
        stock(write(tmp_path / "dense", config, dense)), ours(tmp_path / "coded"), batch=2, steps=16
    )


def test_groups_out_of_order_are_refused_where_the_file_says_they_are_not(plain: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["gptq_act_order"]
    coded, _ = quantised(plain, tmp_path, Layout(GPTQ, layout.tensors, shuffled=True))
    message = r"^model\.layers\.\S+\.g_idx: .* not in order of their groups of 32, .* desc_act false"
    with pytest.raises(CheckpointError, match=message):
        ours(coded)


def test_groups_that_do_not_fit_are_refused_with_the_tensors_name(plain: Path, tmp_path: Path) -> None:
    coded, _ = quantised(plain, tmp_path, LAYOUTS["gptq_act_order"])
    part, config = "model.layers.1.self_attn.", json.loads((coded / "config.json").read_text())
    tensors, name = tensors_of(coded), f"{part}k_proj.g_idx"
    for wrong, message in (
        # In the file's order k_proj is read first, and q_proj is the one that differs from it.
        (tensors[name].flip(0), f"^{part}q_proj.g_idx: other groups of input features than of the linear that this"),
        (tensors[name] + 5, rf"^{part}k_proj.g_idx: groups 5 to \d+, but there are \d+$"),
    ):
        with pytest.raises(CheckpointError, match=message):
            ours(write(tmp_path / "mixed", config, tensors | {name: wrong}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_converted_back_are_the_dequantised_weights(name: str, plain: Path, tmp_path: Path) -> None:
    coded, dense = quantised(plain, tmp_path, LAYOUTS[name])
    dequantize_checkpoint(coded, tmp_path / "made", torch.float32)
    made, wanted = tensors_of(tmp_path / "made"), tensors_of(dense)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[each], wanted[each]) for each in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "made" / "config.json").read_text())


def moe_config() -> Any:
    return transformers.Qwen3MoeConfig(
        **BASE | {"intermediate_size": 128}, head_dim=16, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0],
        moe_intermediate_size=64,
    )  # fmt: skip


@pytest.fixture(scope="session")
def plain_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(moe_config(), tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not LAYOUTS[name].shuffled])
def test_experts_equal_hugging_face_on_dequantised_weights(name: str, plain_experts: Path, tmp_path: Path) -> None:
    coded, dense = quantised(plain_experts, tmp_path, LAYOUTS[name])
    names = tensors_of(coded)
    assert any(f"model.layers.1.mlp.experts.3.up_proj.{word}" in names for word in ("qweight", "weight_packed"))
    model = ours(coded)
    held = [module for module in model.modules() if isinstance(module, fl.FusedMoE)]
    assert [module.cfg.quant for module in held] == [f"w{LAYOUTS[name].bits}a16"] * (BASE["num_hidden_layers"] - 1)
    check_like_hugging_face(stock(dense), model, batch=2, steps=16)


@pytest.mark.parametrize("fused", [False, True])
def test_deepseek_experts_beside_and_among_shared_ones(fused: bool, tmp_path: Path) -> None:
    """Routers, the head and attention are as they were; two shared experts are one MLP in the file."""
    variation = next(each for each in VARIATIONS if each.name == "v3_two_shared_all_moe")
    sized = replace(variation, changes=variation.changes | {"vocab_size": BASE["vocab_size"]})
    plain = save_random(hf_config(sized), tmp_path / "plain")
    coded, dense = quantised(
        plain, tmp_path, LAYOUTS["packed_4_zeros"], PARTS[4:], ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    )
    model = ours(coded, fuse_shared=fused)
    held = [module for module in model.modules() if isinstance(module, fl.FusedMoE)]
    assert [(each.cfg.quant, each.cfg.num_shared) for each in held] == 3 * [("w4a16", 2 * fused)]
    check_like_hugging_face(stock(dense), model, batch=2, steps=8)


@pytest.mark.parametrize("name", ["awq", "gptq_zeros"])
def test_qwen2_moe_keeps_the_gate_of_its_shared_expert(name: str, tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        **BASE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64
    )
    coded, dense = quantised(save_random(config, tmp_path / "plain"), tmp_path, LAYOUTS[name])
    check_like_hugging_face(stock(dense), ours(coded), batch=2, steps=8)


@pytest.mark.parametrize("grid", [TP2, EP2], ids=str)
def test_ranks_share_packed_experts(grid: Grid, plain_experts: Path, tmp_path: Path) -> None:
    coded, _ = quantised(plain_experts, tmp_path, LAYOUTS["gptq_zeros"])
    check_ranks(coded, grid)


def test_experts_of_one_layer_have_one_format(plain_experts: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["awq"]
    rules = ["mlp.gate", "model.layers.2.mlp.experts.3"]
    coded, _ = quantised(plain_experts, tmp_path, layout, modules_to_not_convert=rules)
    with pytest.raises(
        ArgumentError, match=r"none for model\.layers\.2\.mlp\.experts\.3\.gate_proj, w4a16 for .* one format"
    ):
        ours(coded)


NAME = "model.layers.2.mlp.experts"
MIXED = QuantSpec("w4a16", group_size=32, layout="awq")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (("down_proj",), rf"none for {NAME}\.0\.down_proj, w4a16 for {NAME}\.0\.gate_proj"),
        (("gate_proj",), rf"w4a16 for {NAME}\.0\.up_proj, none for {NAME}\.0\.gate_proj"),
        ((f"{NAME}.7.up_proj",), rf"none for {NAME}\.7\.up_proj"),
        (("mlp.experts.7.up_proj",), rf"none for {NAME}\.7\.up_proj"),
        (("7.up_proj",), rf"none for {NAME}\.7\.up_proj"),
        (("re:experts.7$", r"re:layers\.2\..*\.7\.up"), rf"none for {NAME}\.7\.up_proj"),
    ],
)
def test_rules_that_keep_parts_of_a_layers_experts_are_named(rules: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"{words}.* one format"):
        quant_of_experts(replace(MIXED, skip=rules), NAME, 8)


@pytest.mark.parametrize(
    ("rules", "format"),
    [
        (("model.layers.2",), "none"), ((NAME,), "none"), (("re:experts",), "none"), (PARTS, "none"),
        (tuple(f"{NAME}.{e}" for e in range(8)), "none"), (("mlp.gate", "lm_head", "8.up_proj", "proj", "re:gate$",
        f"{NAME}.8", "layers.2", "experts", "model.layers.1.mlp.experts.3.up_proj", ""), "w4a16"),
    ],
)  # fmt: skip
def test_rules_that_keep_all_or_none_give_one_format(rules: tuple[str, ...], format: str) -> None:
    assert quant_of_experts(replace(MIXED, skip=rules), NAME, 8).format == format


def test_experts_formats_are_those_of_their_modules_whatever_the_rules() -> None:
    """Drawn rules: prefixes and ends of names, of this layer's and others'."""
    random, outcomes = np.random.default_rng(0), set()
    for _ in range(600):
        rules = []
        for _ in range(random.integers(1, 4)):
            name = f"model.layers.{random.integers(1, 3)}.mlp.experts.{random.integers(2)}.{random.choice(PARTS[4:])}"
            words = name.split(".")
            start, stop = int(random.integers(len(words))), int(random.integers(1, len(words) + 1))
            rule = ".".join(words[start:] if random.random() < 0.6 else words[:stop])
            rules.append(f"re:{re.escape(rule)}" if random.random() < 0.2 else rule)
        quant = replace(MIXED, skip=tuple(rules))
        wanted = {quant.for_module(f"{NAME}.{e}.{part}").format for e in range(2) for part in PARTS[4:]}
        try:
            found = {quant_of_experts(quant, NAME, 2).format}
        except ArgumentError:
            found = {"none", "w4a16"}
        assert found == wanted, rules
        outcomes.add(frozenset(found))
    assert len(outcomes) == 3


def test_many_rules_cost_no_time_for_each_expert() -> None:
    """Of a checkpoint that lists each module: 58 layers within a second, where each rule was met by each expert."""
    listed = tuple(f"model.layers.{i}.self_attn.{part}" for i in range(61) for part in PARTS[:4])
    listed += tuple(
        f"model.layers.{i}.mlp.experts.{e}.{part}" for i in (3, 4) for e in range(256) for part in PARTS[4:]
    )
    quant, start = replace(MIXED, skip=listed), time.process_time()
    formats = [quant_of_experts(quant, f"model.layers.{i}.mlp.experts", 256).format for i in range(3, 61)]
    assert formats == 2 * ["none"] + 56 * ["w4a16"]
    assert time.process_time() - start < 1.0


def test_packed_experts_run_once_converted_too(plain_experts: Path, tmp_path: Path) -> None:
    coded, dense = quantised(plain_experts, tmp_path, LAYOUTS["awq"])
    dequantize_checkpoint(coded, tmp_path / "made", torch.float32)
    check_like_hugging_face(stock(dense), ours(tmp_path / "made"), batch=2, steps=4)


def test_a_tensor_that_is_not_there_is_named_in_a_conversion(plain: Path, tmp_path: Path) -> None:
    coded, _ = quantised(plain, tmp_path, LAYOUTS["gptq"])
    tensors, config = tensors_of(coded), json.loads((coded / "config.json").read_text())
    lacking = {key: value for key, value in tensors.items() if key != "model.layers.0.mlp.up_proj.scales"}
    with pytest.raises(CheckpointError, match=r"there is no model\.layers\.0\.mlp\.up_proj\.scales"):
        dequantize_checkpoint(write(tmp_path / "lacking", config, lacking), tmp_path / "made")
    tensors["model.layers.0.mlp.up_proj.scales"] = tensors["model.layers.0.mlp.up_proj.scales"][:, :8].contiguous()
    with pytest.raises(CheckpointError, match=r"up_proj\.scales: shape \(2, 8\), but .* wants \(2, 96\)"):
        dequantize_checkpoint(write(tmp_path / "short", config, tensors), tmp_path / "made2")


def test_a_layout_without_its_tensors_names_them(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    write(tmp_path, config | {"quantization_config": LAYOUTS["awq"].config}, tensors_of(plain))
    with pytest.raises(CheckpointError, match=r"missing tensors: .*down_proj\.qweight"):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "dtype", "why"),
    [
        ("awq", "qweight", torch.float32, r"up_proj\.qweight is F32, its codes are read from I32 words"),
        ("gptq", "qzeros", torch.uint8, r"up_proj\.qzeros is U8, its codes are read from I32 words"),
        ("packed_4_zeros", "weight_packed", torch.int64, r"up_proj\.weight_packed is I64, its codes are read from I32"),
        ("packed_4_zeros", "weight_zero_point", torch.int8, r"up_proj\.weight_zero_point is I8, its codes are read"),
        ("gptq_act_order", "g_idx", torch.float32, r"up_proj\.g_idx is F32, the model holds int32"),
    ],
)
def test_tensors_of_another_number_format_are_named(
    name: str, part: str, dtype: torch.dtype, why: str, plain: Path, tmp_path: Path
) -> None:
    """Values that another dtype happens to hold, or cuts off, are not taken for words of codes."""
    coded, _ = quantised(plain, tmp_path, LAYOUTS[name])
    tensors, config = tensors_of(coded), json.loads((coded / "config.json").read_text())
    tensors[f"model.layers.1.mlp.up_proj.{part}"] = tensors[f"model.layers.1.mlp.up_proj.{part}"].to(dtype)
    with pytest.raises(CheckpointError, match=f"wrong number formats: model.layers.1.mlp.{why}"):
        ours(write(tmp_path / "other", config, tensors))
    if part != "g_idx":
        with pytest.raises(CheckpointError, match=why):
            dequantize_checkpoint(tmp_path / "other", tmp_path / "made")


# W8A8 in compressed-tensors' layout, as llm-compressor writes it: both sides symmetric, inputs scaled at each call.
INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "output_activations": None,
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False,
                "group_size": None, "actorder": None,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
                "group_size": None,
            },
        }
    },
}  # fmt: skip


def test_int8_weights_and_inputs(plain: Path, tmp_path: Path) -> None:
    """Codes int8 and scales bf16 ``[N, 1]``; the layers differ from the dequantised ones by their inputs' rounding."""
    config, weights = json.loads((plain / "config.json").read_text()), tensors_of(plain)
    coded, dense = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in PARTS:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
            codes = (weight.float() / scale.float()).round().clamp(-127, 127)
            coded |= {name: codes.to(torch.int8), name.replace("weight", "weight_scale"): scale}
            dense[name] = codes * scale.float()
    left = ours(write(tmp_path / "coded", config | {"quantization_config": INT8}, coded))
    right = ours(write(tmp_path / "dense", config, dense))
    others, compared = dict(right.named_modules()), 0
    for path, module in left.named_modules():
        if isinstance(module, fl.Int8Linear):
            assert torch.equal(module.dequantized(), others[path].weight)
            x = torch.randn(5, module.local_in)
            expected = others[path](x)
            assert float((module(x) - expected).norm() / expected.norm()) < 0.02
            compared += 1
    assert compared == 4 * BASE["num_hidden_layers"] and not isinstance(left.lm_head, fl.Int8Linear)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("weights", {"symmetric": False}, "weights.symmetric is False; accepted: true"),
        ("weights", {"strategy": "group", "group_size": 128}, "weights.strategy is 'group'; accepted: 'channel'"),
        ("weights", {"strategy": "tensor"}, "weights.strategy is 'tensor'; accepted: 'channel'"),
        ("input_activations", {"symmetric": False}, "input_activations.symmetric is False; accepted: true"),
        ("input_activations", {"dynamic": False}, "input_activations.dynamic is False; accepted: true"),
        ("input_activations", {"strategy": "tensor"}, "input_activations.strategy is 'tensor'; accepted: 'token'"),
        ("input_activations", {"num_bits": 4}, "one group of 8-bit"),
        ("", {"targets": ["re:.*mlp.*"]}, "targets is .*; accepted: \\['Linear'\\]"),
        ("", {"output_activations": {"num_bits": 8}}, "output_activations is .*; accepted: null"),
    ],
)
def test_other_int8_schemes_are_refused_in_words(part: str, changes: dict[str, Any], words: str) -> None:
    group = INT8["config_groups"]["group_0"]
    group = group | ({part: group[part] | changes} if part else changes)
    with pytest.raises(ArgumentError, match=words):
        fl.QuantSpec.from_config(INT8 | {"config_groups": {"group_0": group}})
    with pytest.raises(ArgumentError, match="format is 'pack-quantized'; accepted: 'int-quantized'"):
        fl.QuantSpec.from_config(INT8 | {"format": "pack-quantized"})
