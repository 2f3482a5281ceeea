"""FP8-block checkpoints made from bf16 ones: what is written, what is read back, and how far the logits move."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.linear.dense.layer import Linear
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers.moe.fused_moe.layer import FusedMoE
from fastlayers_models.convert import KEPT, convert_to_fp8_block, dequantize_checkpoint, quantisable, ragged
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator
from fastlayers_server import tasks

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, Feeder, rewrite, tensors_of
from tiny_models import Variation, hf_model, prompts, relative_rms

E4M3 = torch.float8_e4m3fn
# e4m3 has 3 mantissa bits: a value of a binade [1, 2) is off by up to 1/16, 1/16/sqrt(3) in the root mean square;
# divided by the values themselves (log-uniform in the binade), 2.6% of them.
E4M3_RMS = 0.026
# Every dimension ends in a ragged block; all experts are chosen, so that no rounding flips a route.
RAGGED = Variation(
    "ragged",
    changes=dict(
        hidden_size=160, intermediate_size=200, moe_intermediate_size=96, kv_lora_rank=160, q_lora_rank=136,
        qk_nope_head_dim=48, qk_rope_head_dim=32, v_head_dim=40, n_routed_experts=4, num_experts_per_tok=4,
        initializer_range=0.1,
    ),
)  # fmt: skip
DENSE = Variation("ragged_dense", changes=RAGGED.changes | {"first_k_dense_replace": 3})


def ours(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def logits_of(model: DeepseekForCausalLM, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits of all rows, the last four tokens of each fed one by one (so both MLA paths run)."""
    steps = [("extend", [len(row) - 4 for row in rows]), *[("decode", [1] * len(rows))] * 4]
    return torch.cat(list(Feeder(model, rows).run(steps).values()))


class Made:
    """A bf16 checkpoint, its FP8 versions and what they mean multiplied out."""

    def __init__(self, source: Path, root: Path) -> None:
        self.source, self.root = source, root
        self.kept: dict[bool, list[str]] = {}

    def fp8(self, include_ragged: bool) -> Path:
        folder = self.root / f"fp8_{include_ragged}"
        if not folder.exists():
            self.kept[include_ragged] = convert_to_fp8_block(self.source, folder, include_ragged=include_ragged)
        return folder

    def dequantised(self, include_ragged: bool, dtype: torch.dtype = torch.float32) -> Path:
        folder = self.root / f"dequantised_{include_ragged}_{dtype}"
        if not folder.exists():
            dequantize_checkpoint(self.fp8(include_ragged), folder, dtype)
        return folder


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(SHIPPED, tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="module")
def ragged_moe(tmp_path_factory: pytest.TempPathFactory) -> Made:
    source = tmp_path_factory.mktemp("ragged")
    hf_model(RAGGED, source)
    return Made(source, tmp_path_factory.mktemp("ragged_made"))


@pytest.fixture(scope="module")
def ragged_dense(tmp_path_factory: pytest.TempPathFactory) -> Made:
    source = tmp_path_factory.mktemp("dense")
    hf_model(DENSE, source)
    return Made(source, tmp_path_factory.mktemp("dense_made"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED)


def story_rows(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in tasks.stories("held_out", 4, 30_000)]


@pytest.mark.parametrize("include_ragged", [False, True])
@pytest.mark.parametrize("name", ["shipped", "ragged_moe"])
def test_what_is_written(request: pytest.FixtureRequest, name: str, include_ragged: bool) -> None:
    made: Made = request.getfixturevalue(name)
    before, after = tensors_of(made.source), tensors_of(made.fp8(include_ragged))
    config = json.loads((made.fp8(include_ragged) / "config.json").read_text())["quantization_config"]
    for tensor, value in before.items():
        shape = tuple(value.shape)
        if quantisable(tensor, shape) and (include_ragged or not ragged(shape)):
            codes, scale = after.pop(tensor), after.pop(f"{tensor}_scale_inv")
            assert codes.dtype == E4M3 and codes.shape == value.shape and scale.dtype == torch.float32
            assert tuple(scale.shape) == tuple(-(-size // 128) for size in shape)
            # The largest value of every block is 448 in codes, and no value is off by more than half a step.
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
            error = (codes.float() * wide - value.float()).abs()
            assert bool((error <= value.float().abs() / 16 + wide * 2**-10).all())
            assert float(codes.float().abs().max()) == 448
            assert 0.5 * E4M3_RMS < relative_rms(codes.float() * wide, value.float()) < 1.2 * E4M3_RMS
        else:
            assert torch.equal(after.pop(tensor), value), tensor
            if quantisable(tensor, shape):
                assert tensor.removesuffix(".weight") in config["modules_to_not_convert"]
    assert not after
    kept = {n.removesuffix(".weight") for n, v in before.items() if quantisable(n, v.shape) and ragged(v.shape)}
    assert set(made.kept[include_ragged]) == (set() if include_ragged else kept)
    # Stock transformers looks for the module that holds all experts, so that one is listed, too.
    holders = {name.partition(".experts.")[0] + ".experts" for name in made.kept[include_ragged] if ".experts." in name}
    assert set(config["modules_to_not_convert"]) == set(KEPT) | set(made.kept[include_ragged]) | holders
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]


def test_576_rows_have_five_scale_rows(shipped: Made) -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors = tensors_of(shipped.fp8(True))
    assert tensors[name].shape == (576, 128) and tensors[f"{name}_scale_inv"].shape == (5, 1)
    attention = ours(shipped.fp8(True)).model.layers[1].self_attn
    fused = attention.qkv_a_proj
    assert isinstance(fused, FP8BlockLinear) and fused.weight_scale_inv.shape == (6, 1)
    assert torch.equal(fused.weight_scale_inv[1:], tensors[f"{name}_scale_inv"])
    assert torch.equal(fused.weight[128:].view(torch.uint8), tensors[name].view(torch.uint8))
    # Kept in bf16, the two halves have different formats and are not fused.
    separate = ours(shipped.fp8(False)).model.layers[1].self_attn
    assert not separate.fused_a and isinstance(separate.kv_a_proj_with_mqa, Linear)


def quantised_layers(model: DeepseekForCausalLM) -> set[str]:
    """Return the modules of the unquantised model that take part in one or more FP8 products."""
    names = {name for name, module in model.named_modules() if isinstance(module, FP8BlockLinear)}
    # Where a block lies across the seam, this model has gate and up apart; and q_a and kv_a.
    names |= {name.rpartition(".")[0] for name in names if name.endswith(("gate_up_proj.0", "gate_up_proj.1"))}
    names |= {name.replace(".q_a_proj", ".qkv_a_proj") for name in names if name.endswith(".q_a_proj")}
    moe = {name for name, module in model.named_modules() if isinstance(module, FusedMoE)}
    return names | {name for name in moe if model.get_submodule(name).cfg.quant == "fp8_block"}


def change_inputs(model: DeepseekForCausalLM, names: set[str], change: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Apply ``change`` to the activations that enter the named modules; return how many there are."""
    found = [module for name, module in model.named_modules() if name in names]
    for module in found:
        module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    return len(found)


@pytest.mark.parametrize("include_ragged", [False, True])
@pytest.mark.parametrize("name", ["shipped", "ragged_moe", "ragged_dense"])
def test_logits_move_as_activation_rounding_predicts(
    request: pytest.FixtureRequest, tokenizer: Any, name: str, include_ragged: bool
) -> None:
    made: Made = request.getfixturevalue(name)
    rows = story_rows(tokenizer) if name == "shipped" else prompts(3)
    quantised, plain = ours(made.fp8(include_ragged)), ours(made.dequantised(include_ragged))
    found, wanted = logits_of(quantised, rows), logits_of(plain, rows)
    error = relative_rms(found, wanted)
    # The weights are the same, so only activations are rounded. What noise of that size does to these logits:
    count = change_inputs(plain, quantised_layers(quantised), lambda x: x * (1 + E4M3_RMS * torch.randn_like(x)))
    predicted = relative_rms(logits_of(plain, rows), wanted)
    print(f"{name} {include_ragged}: {count} modules, error {error:.4f}, predicted {predicted:.4f}")
    if count:
        # The rounding inside the experts, between their two products, is not in the prediction.
        assert predicted / 1.5 < error < predicted * 1.5
    else:
        assert error < 1e-5 and not include_ragged and name != "shipped"


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return what the codes of ``x`` mean: one scale per row and 128 features, absmax / 448."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scale).to(E4M3).float() * scale).flatten(-2)[..., : x.shape[-1]]


def test_fp8_is_the_dequantised_model_with_rounded_activations(ragged_dense: Made) -> None:
    quantised, plain = ours(ragged_dense.fp8(True)), ours(ragged_dense.dequantised(True))
    rows = prompts(3)
    unrounded = logits_of(plain, rows)
    # q_a and kv_a, q_b, kv_b, o, gate and up, down.
    assert change_inputs(plain, quantised_layers(quantised), round_to_e4m3) == 3 * 6
    found, wanted = logits_of(quantised, rows), logits_of(plain, rows)
    per_row = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # A last-bit difference can turn an activation into the neighbouring code, which costs its row about 1%.
    assert float(per_row.median()) < 1e-5 and relative_rms(found, wanted) < 0.2 * relative_rms(found, unrounded)


def test_stock_transformers_reads_the_variant_without_ragged_matrices(shipped: Made, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    def stock(folder: Path) -> Any:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        assert all(name.startswith("model.layers.3.") for name in report["unexpected_keys"])
        return model.eval()

    quantised, plain = stock(shipped.fp8(False)), stock(shipped.dequantised(False, torch.bfloat16))
    ids = torch.tensor([story_rows(tokenizer)[0]])
    with torch.inference_mode():
        found, wanted = quantised(ids).logits, plain(ids).logits
    assert torch.equal(found, wanted)
    mine = logits_of(ours(shipped.dequantised(False, torch.bfloat16), torch.bfloat16), ids.tolist())
    # Two bf16 computations of the same model.
    assert relative_rms(mine, wanted[0]) < 0.03


@pytest.mark.parametrize("moment", [0, 10, 60])
def test_interrupted_conversion_does_not_look_finished(tmp_path: Path, moment: int) -> None:
    seen: list[str] = []

    def interrupt(name: str) -> None:
        seen.append(name)
        if len(seen) > moment:
            raise KeyboardInterrupt

    target = tmp_path / "made"
    with pytest.raises(KeyboardInterrupt):
        convert_to_fp8_block(SHIPPED, target, progress=interrupt)
    assert len(seen) == moment + 1 and not (target / "config.json").exists()


def test_targets_and_sources_that_do_not_fit_are_named(shipped: Made, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"target.*not empty"):
        convert_to_fp8_block(SHIPPED, tmp_path / "full")
    with pytest.raises(ArgumentError, match=r"target.*not empty"):
        convert_to_fp8_block(SHIPPED, shipped.fp8(True))
    with pytest.raises(ArgumentError, match=r"target.*not empty"):
        dequantize_checkpoint(shipped.fp8(True), tmp_path / "full")
    with pytest.raises(ArgumentError, match="quantised already"):
        convert_to_fp8_block(shipped.fp8(True), tmp_path / "twice")
    with pytest.raises(ArgumentError, match="an FP8-block checkpoint"):
        dequantize_checkpoint(SHIPPED, tmp_path / "plain")
    assert [p.name for p in tmp_path.iterdir()] == ["full"] and len(list((tmp_path / "full").iterdir())) == 1


def test_sharded_source_and_other_files(tmp_path: Path, shipped: Made) -> None:
    sharded = rewrite(SHIPPED, tmp_path / "sharded", shards=3)
    (sharded / "tokenizer.json").write_text("{}")
    seen: list[str] = []
    convert_to_fp8_block(sharded, tmp_path / "fp8", include_ragged=True, progress=seen.append)
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    found, wanted = tensors_of(tmp_path / "fp8"), tensors_of(shipped.fp8(True))
    assert sorted(seen) == sorted(tensors_of(SHIPPED)) and set(index["weight_map"]) == set(found) == set(wanted)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    assert all(torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in found)
    assert (tmp_path / "fp8" / "tokenizer.json").read_text() == "{}"
    ours(tmp_path / "fp8")


def answers(model: DeepseekForCausalLM, tokenizer: Any, problems: list[tasks.Problem]) -> list[str]:
    chats = [[{"role": "user", "content": p.prompt}] for p in problems]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    made = Generator(model, max_batch=len(rows), max_length=512).generate(rows, max_new_tokens=12)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in made]


@pytest.mark.parametrize("variant", ["bf16", "fp8", "fp8_kv", "fp8_and_fp8_kv"])
def test_held_out_answers_are_right_in_every_format(shipped: Made, tokenizer: Any, variant: str) -> None:
    problems = tasks.held_out_problems(20)
    folder = shipped.fp8(True) if variant.startswith("fp8") and variant != "fp8_kv" else SHIPPED
    kv_dtype = E4M3 if variant.endswith("kv") else None
    model = ours(folder, torch.bfloat16, kv_dtype=kv_dtype)
    assert answers(model, tokenizer, problems) == [p.answer for p in problems]


def test_fp8_cache_moves_logits_by_its_rounding(tokenizer: Any) -> None:
    rows = story_rows(tokenizer)
    plain = ours(SHIPPED)
    wanted, found = logits_of(plain, rows), logits_of(ours(SHIPPED, kv_dtype=E4M3), rows)
    error = relative_rms(found, wanted)
    print(f"FP8 cache: {error:.4f}")
    # One rounding of the latent a layer, which reaches the values (and, through the scores, their weights).
    assert 0.02 * E4M3_RMS < error < E4M3_RMS * sqrt(2 * plain.config.num_hidden_layers)
