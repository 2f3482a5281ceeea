"""``fastlayers convert``: any family, both formats and back, interruptions, what slow or contradictory formats say."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.fp8_scaled.layer import quantize_scaled_weight
from fastlayers.quant import slow_formats
from fastlayers_models import AutoModel
from fastlayers_models.convert import Conversion, convert_checkpoint, dequantize_checkpoint, quantisable
from fastlayers_models.find import UNFINISHED
from fastlayers_server import tasks
from fastlayers_server.cli import app
from fastlayers_server.hugging_face import chat_ids
from fastlayers_server.variants import FastlayersRunner, HuggingFaceRunner

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, interrupted, rewrite, tensors_of, write
from tiny_models import prompts, relative_rms

ROOTS = [str(Path(__file__).parents[2] / root) for root in ("src", "models", "server")]
FORMATS = ("fp8-block", "int8")
INDEX = "model.safetensors.index.json"


class Converted:
    """The shipped checkpoint in each format, and each multiplied out to bf16."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.done: dict[str, Conversion] = {}

    def quantised(self, format: str) -> Path:
        if format not in self.done:
            self.done[format] = convert_checkpoint(SHIPPED, self.root / format, format)
        return self.root / format

    def back(self, format: str) -> Path:
        folder = self.root / f"{format}-back"
        if not folder.exists():
            dequantize_checkpoint(self.quantised(format), folder, torch.float32)
        return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("converted"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED)


def steps(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Return how far apart the two codes around each number of ``weight`` are."""
    wide = weight.float()
    if format == "int8":
        return (wide.abs().amax(1, keepdim=True) / 127).expand_as(wide)
    blocks = wide.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).expand_as(blocks).reshape(wide.shape)
    # Eight codes a binade; below 2^-6 they are 2^-9 apart.
    exponent = (wide / scale).abs().clamp_min(2.0**-6).log2().floor()
    return scale * 2.0 ** (exponent - 3)


def predicted_error(weight: torch.Tensor, format: str) -> float:
    """Return the relative root mean square error: a number between two codes is off by step / sqrt(12)."""
    return float((steps(weight, format).square().mean() / 12).sqrt() / weight.float().square().mean().sqrt())


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_off_by_what_the_format_predicts(converted: Converted, format: str) -> None:
    before, after = tensors_of(SHIPPED), tensors_of(converted.back(format))
    assert before.keys() == after.keys()
    kept = {module for modules in converted.done[format].kept.values() for module in modules}
    changed = 0
    for name, weight in before.items():
        if quantisable(name, tuple(weight.shape)) and name.removesuffix(".weight") not in kept:
            found, predicted = relative_rms(after[name], weight), predicted_error(weight, format)
            assert 0.93 * predicted < found < 1.07 * predicted, (name, found, predicted)
            changed += 1
        else:
            assert torch.equal(after[name].to(weight.dtype), weight), name
    assert changed == converted.done[format].quantised == 100


def stock(folder: Path) -> Any:
    return HuggingFaceRunner(folder, torch.float32, torch.device("cpu"), patch=False)


@pytest.mark.parametrize("format", FORMATS)
def test_stock_transformers_gives_the_predicted_logits_and_right_answers(
    converted: Converted, tokenizer: Any, format: str
) -> None:
    ids = tokenizer(next(iter(tasks.stories("held_out", 1, 30_000))))["input_ids"][:160]
    back = stock(converted.back(format))
    plain = stock(SHIPPED)
    wanted = plain.logits(ids)
    error = relative_rms(back.logits(ids), wanted)
    # Noise of the predicted size on the same weights, evenly between the two codes.
    torch.manual_seed(0)
    noisy: dict[str, torch.Tensor] = {}
    after = tensors_of(converted.back(format))
    for name, value in tensors_of(SHIPPED).items():
        noisy[name] = value.float()
        if not torch.equal(after[name].float(), noisy[name]):
            noisy[name] += steps(value, format) * (torch.rand(value.shape) - 0.5)
    config = json.loads((SHIPPED / "config.json").read_text())
    disturbed = write(converted.root / f"{format}-noise", config, noisy)
    (disturbed / "generation_config.json").write_text((SHIPPED / "generation_config.json").read_text())
    predicted = relative_rms(stock(disturbed).logits(ids), wanted)
    print(f"{format}: logits {error:.4f}, predicted {predicted:.4f}")
    assert predicted / 1.5 < error < predicted * 1.5
    problems = tasks.held_out_problems(20)
    rows = [chat_ids(tokenizer, p.prompt) for p in problems]
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in back.generate(rows, 12)]
    assert texts == [p.answer for p in problems]


def test_int8_checkpoint_runs_in_our_model(converted: Converted, tokenizer: Any) -> None:
    runner = FastlayersRunner(converted.quantised("int8"), torch.bfloat16, torch.device("cpu"))
    attention = runner.model.model.layers[1].self_attn
    assert attention.o_proj.weight.dtype == torch.int8 and attention.kv_b_proj.weight.dtype == torch.bfloat16
    assert runner.model.model.layers[1].mlp.experts.w13.dtype == torch.int8
    assert converted.done["int8"].kept == {"absorbed": [f"model.layers.{i}.self_attn.kv_b_proj" for i in range(4)]}
    problems = tasks.held_out_problems(20)
    made = runner.generate([chat_ids(tokenizer, p.prompt) for p in problems], 12)
    assert [tokenizer.decode(row, skip_special_tokens=True).strip() for row in made] == [p.answer for p in problems]


def family(name: str, folder: Path) -> Path:
    """Save a random model of a family with whole and ragged matrices."""
    import transformers as hf

    common: dict[str, Any] = dict(
        vocab_size=160, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.1, eos_token_id=1,
    )  # fmt: skip
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1)
    config = {
        "llama": lambda: hf.LlamaConfig(**common | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        "qwen2_moe": lambda: hf.Qwen2MoeConfig(**common, **moe, shared_expert_intermediate_size=256),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**common, **moe | {"moe_intermediate_size": 96}),
        "gpt_oss": lambda: hf.GptOssConfig(
            **common | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2
        ),
    }[name]()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.15, 0.15)
    model.save_pretrained(folder)
    return folder


KEPT = {
    "llama": {},
    # Key and value projections have 64 rows.
    "qwen2_moe": {"ragged": 2 * 2},
    # 96 features inside an expert: three matrices of four experts.
    "qwen3_moe": {"ragged": 2 * (2 + 4 * 3)},
    "gpt_oss": {"ragged": 2 * 2, "stacked": 2 * 2},
}


@pytest.mark.parametrize("name", list(KEPT))
def test_every_family_converts_and_stock_transformers_reads_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = family(name, tmp_path / "bf16")
    done = convert_checkpoint(source, tmp_path / "fp8", "fp8-block")
    assert {reason: len(modules) for reason, modules in done.kept.items()} == KEPT[name] and done.quantised > 0
    after = tensors_of(tmp_path / "fp8")
    for tensor, value in tensors_of(source).items():
        standing = any(
            part in tensor for part in ("norm", "embed", "lm_head", "router", ".gate.", "shared_expert_gate", "bias")
        )
        assert not standing or torch.equal(after[tensor], value), tensor
    rows = torch.tensor(prompts(1))
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back")
    logits = []
    for folder in ("fp8", "back", "bf16"):
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))
        with torch.inference_mode():
            logits.append(model.eval()(rows).logits.float())
    assert torch.equal(logits[0], logits[1]) and 0.001 < relative_rms(logits[0], logits[2]) < 0.3


@pytest.mark.parametrize("name", list(KEPT))
@pytest.mark.parametrize(("format", "ragged"), [("fp8-block", True), ("int8", False)])
def test_our_loader_reads_what_stock_does_not(name: str, format: str, ragged: bool, tmp_path: Path) -> None:
    source = family(name, tmp_path / "bf16")
    done = convert_checkpoint(source, tmp_path / "made", format, include_ragged=ragged)
    assert set(done.kept) == set(KEPT[name]) - {"ragged"} and done.bytes_after < done.bytes_before
    dequantize_checkpoint(tmp_path / "made", tmp_path / "back")
    ids = prompts(1)[0]
    runners = [FastlayersRunner.__new__(FastlayersRunner) for _ in range(2)]
    for runner, folder in zip(runners, ("made", "back"), strict=True):
        runner.model = AutoModel.from_pretrained(tmp_path / folder, dtype=torch.float32)
    found, wanted = (runner.logits(ids) for runner in runners)
    # The weights are the same: what differs is the rounding of activations.
    assert 1e-4 < relative_rms(found, wanted) < 0.2


def same(one: Path, other: Path) -> bool:
    left, right = tensors_of(one), tensors_of(other)
    return left.keys() == right.keys() and all(
        torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left if left[n].dim()
    )


def test_an_interrupted_conversion_is_taken_up(tmp_path: Path) -> None:
    source = rewrite(SHIPPED, tmp_path / "source", shards=4)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    count = len(tensors_of(source))
    target = tmp_path / "made"
    interrupted(source, target, count // 2 + 2)
    assert not (target / "config.json").exists() and not (target / INDEX).exists()
    finished = sorted(target.glob("*.safetensors"))
    stamps = [file.stat().st_mtime_ns for file in finished]
    assert len(finished) == 2
    with pytest.raises(CheckpointError):
        AutoModel.from_pretrained(target)
    # A shard cut short behind our back is made again.
    finished[0].write_bytes(finished[0].read_bytes()[:1000])
    seen: list[str] = []
    done = convert_checkpoint(source, target, "int8", progress=seen.append)
    assert (done.shards, done.resumed) == (4, 1) and sorted(seen) == sorted(tensors_of(source))
    assert finished[1].stat().st_mtime_ns == stamps[1] and finished[0].stat().st_mtime_ns != stamps[0]
    whole = convert_checkpoint(source, tmp_path / "at_once", "int8")
    assert same(target, tmp_path / "at_once") and (whole.kept, whole.quantised) == (done.kept, done.quantised)
    names = {file.name for file in target.iterdir()}
    shards = (file.name for file in source.glob("*.safetensors"))
    assert names == {"config.json", "README.md", INDEX, "tokenizer.json", *shards}
    assert (target / "config.json").read_text() == (tmp_path / "at_once" / "config.json").read_text()
    assert (target / INDEX).read_text() == (tmp_path / "at_once" / INDEX).read_text()


def test_only_the_same_conversion_is_taken_up(converted: Converted, tmp_path: Path) -> None:
    source = rewrite(SHIPPED, tmp_path / "source", shards=3)
    target = tmp_path / "made"
    interrupted(source, target, 60)
    with pytest.raises(ArgumentError, match=r"target is .*to another format"):
        convert_checkpoint(source, target, "fp8-block")
    with pytest.raises(ArgumentError, match=r"target is .*of another or a changed source"):
        convert_checkpoint(SHIPPED, target, "int8")
    shard = sorted(source.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArgumentError, match="changed source"):
        convert_checkpoint(source, target, "int8")
    (target / UNFINISHED).write_text("{")
    with pytest.raises(ArgumentError, match="damaged"):
        convert_checkpoint(source, target, "int8")
    with pytest.raises(ArgumentError, match="format is 'int4'"):
        convert_checkpoint(source, tmp_path / "x", "int4")
    with pytest.raises(ArgumentError, match="quantised already"):
        convert_checkpoint(converted.quantised("int8"), tmp_path / "x", "int8")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("named", ["README.md", pytest.param("readme.md", marks=pytest.mark.slow), None])
def test_a_converted_checkpoint_describes_itself_and_keeps_the_originals_readme(
    named: str | None, tmp_path: Path
) -> None:
    source = rewrite(SHIPPED, tmp_path / "models--org--name" / "snapshots" / "0123")
    if named:
        (source / named).write_text("# The original\n")
    for format in FORMATS:
        convert_checkpoint(source, tmp_path / format, format)
    dequantize_checkpoint(tmp_path / "int8", tmp_path / "bf16")
    dequantize_checkpoint(tmp_path / "int8", tmp_path / "fp32", torch.float32)
    convert_checkpoint(source, tmp_path / "ragged", "fp8-block", include_ragged=True)
    texts = {f.name: (f / "README.md").read_text() for f in tmp_path.iterdir() if (f / "config.json").is_file()}
    assert texts.keys() == {*FORMATS, "bf16", "fp32", "ragged"}
    for folder, text in texts.items():
        kept = tmp_path / folder / "README.original.md"
        assert text.startswith(f"# {folder}\n") and "The original\n" not in text and str(tmp_path) not in text
        assert (kept.read_text() == "# The original\n") if named else not kept.exists()
        assert ("README.original.md" in text) == bool(named)
        assert len(list((tmp_path / folder).glob("[Rr][Ee][Aa]*"))) == 1 + bool(named)
    assert "fastlayers convert org/name fp8-block --format fp8-block\n" in texts["fp8-block"]
    assert "--format fp8-block --ragged\n" in texts["ragged"] and "104 matrices" in texts["ragged"]
    assert "100 matrices" in texts["int8"] and "`model.layers.*.self_attn.kv_b_proj` (4)" in texts["int8"]
    assert "fastlayers convert int8 bf16 --format bf16\n" in texts["bf16"]
    assert "rounded to float32" in texts["fp32"] and "torch.float32)" in texts["fp32"]
    ours = {folder for folder, text in texts.items() if "`fastlayers_models` only" in text}
    assert ours == {"int8", "ragged"}


def test_broken_weights_are_named_and_nothing_remains(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for number, value in enumerate((float("nan"), float("inf"))):
        source = rewrite(SHIPPED, tmp_path / f"s{number}", lambda t, v=value: t[name].view(-1)[7:8].fill_(v))
        for format in FORMATS:
            with pytest.raises(CheckpointError, match=rf"{name}: holds NaN or infinity"):
                convert_checkpoint(source, tmp_path / "target", format)
            assert not (tmp_path / "target").exists()


WATCHED = """
import re, sys, threading, torch
from pathlib import Path
from fastlayers.linear.int8.layer import quantize_channel_weight
from fastlayers_models.convert import convert_checkpoint

def own() -> int:
    # Memory of this process alone: mapped files and what libraries share do not count.
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watch() -> None:
    while not done.wait(0.0005):
        seen.append(own())

quantize_channel_weight(torch.zeros(1024, 2048))
before, seen, done = own(), [], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
convert_checkpoint(sys.argv[1], sys.argv[2], "int8")
done.set()
watcher.join()
print(max(seen) - before)
"""


def test_peak_memory_does_not_grow_with_the_shards(tmp_path: Path) -> None:
    shard = {
        f"model.layers.{{}}.mlp.{part}_proj.weight": torch.zeros(1024, 2048, dtype=torch.bfloat16) for part in "abcd"
    }
    shards, size = 12, 4 * 1024 * 2048 * 2
    tensors = {name.format(f"{layer:02d}"): value.clone() for layer in range(shards) for name, value in shard.items()}
    source = tmp_path / "source"
    write(source, {"model_type": "llama"}, tensors, shards=shards)
    command = [sys.executable, "-c", WATCHED, str(source), str(tmp_path / "made")]
    seen = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(ROOTS)}, check=True)
    # What is made of a shard, that again while it is written, and one matrix in fp32 with what quantising makes of it:
    # some 4.3 shards of these few matrices. Whoever kept what was made would hold six more.
    assert int(seen.stdout) < 7 * size


def test_command_line(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["convert", "tiny", str(tmp_path / "fp8"), "--json"])
    found = json.loads(made.stdout)
    assert (found["format"], found["quantised"], found["shards"], found["resumed"]) == ("fp8-block", 100, 1, 0)
    assert found["kept"] == {"ragged": [f"model.layers.{i}.self_attn.kv_a_proj_with_mqa" for i in range(4)]}
    assert found["bytes_after"] < 0.6 * found["bytes_before"]
    text = CliRunner().invoke(app, ["convert", "tiny", str(tmp_path / "int8"), "--format", "int8"]).stdout
    assert (
        "100 matrices quantised" in text and "kv_b_proj" in text and "multiplied into queries" in " ".join(text.split())
    )
    ragged = CliRunner().invoke(app, ["convert", "tiny", str(tmp_path / "ragged"), "--ragged", "--json"])
    assert json.loads(ragged.stdout)["quantised"] == 104
    back = CliRunner().invoke(app, ["convert", str(tmp_path / "int8"), str(tmp_path / "bf16"), "--format", "bf16"])
    assert back.exit_code == 0 and tensors_of(tmp_path / "bf16").keys() == tensors_of(SHIPPED).keys()
    assert isinstance(
        CliRunner().invoke(app, ["convert", "tiny", str(tmp_path / "x"), "--format", "q"]).exception, ArgumentError
    )


def test_hugging_faces_fp8_per_tensor_checkpoint_loads(tmp_path: Path) -> None:
    source = family("llama", tmp_path / "bf16")
    settings = {
        "quant_method": "fp8",
        "weight_block_size": None,
        "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head"],
    }

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n, v in tensors.items() if quantisable(n, tuple(v.shape))]:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_scaled_weight(tensors[name], "tensor")
            tensors[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor([0.05])

    rewrite(source, tmp_path / "fp8", quantise, lambda c: c.update(quantization_config=settings))
    dequantize_checkpoint(tmp_path / "fp8", tmp_path / "back")
    runners = [FastlayersRunner.__new__(FastlayersRunner) for _ in range(2)]
    for runner, folder in zip(runners, ("fp8", "back"), strict=True):
        runner.model = AutoModel.from_pretrained(tmp_path / folder, dtype=torch.float32)
    projections = [m for m in runners[0].model.modules() if type(m).__name__ == "FP8ScaledLinear"]
    assert projections and all(float(m.input_scale.min()) == pytest.approx(0.05) for m in projections)
    found, wanted = (runner.logits(prompts(1)[0]) for runner in runners)
    assert 1e-4 < relative_rms(found, wanted) < 0.3


def _finer_blocks(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name].repeat_interleave(2, 0)


def _no_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def _keep_o_proj(config: dict[str, Any]) -> None:
    config["quantization_config"]["modules_to_not_convert"].append("o_proj")


def _unchanged(_: Any) -> None: ...


CONTRADICTIONS: dict[str, tuple[str | None, Any, Any, str]] = {
    "codes that nothing speaks of": (
        "fp8-block", lambda c: c.pop("quantization_config"), _unchanged,
        r"there is no quantization_config, but model\.\S+ is F8_E4M3 \(and 99 more\)",
    ),
    "int8 for fp8": (
        "int8", lambda c: c["quantization_config"].update(quant_method="fp8"), _unchanged,
        r"quant_method 'fp8' \(F8_E4M3 codes\), but model\.\S+ is I8",
    ),
    "bf16 for int8": (
        None, lambda c: c.update(quantization_config={"quant_method": "int8"}), _unchanged,
        r"quant_method 'int8' \(I8 codes\), but model\.\S+ is BF16",
    ),
    "other blocks": (
        "fp8-block", _unchanged, _finer_blocks,
        r"weight_block_size \[128, 128\], but \S+up_proj\.weight \[256, 128\] has scales \[4, 1\] instead of \[2, 1\]",
    ),
    "no scales": (
        "fp8-block", _unchanged, _no_scales,
        r"F8_E4M3 with scales\), but model\.layers\.0\.mlp\.up_proj\.weight has no \S+_scale_inv",
    ),
    "a module kept in words only": (
        "int8", _keep_o_proj, _unchanged,
        r"keeps this module out of it, but model\.layers\.0\.self_attn\.o_proj\.weight is I8 \(and 3 more\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CONTRADICTIONS))
def test_a_configuration_that_contradicts_its_tensors(converted: Converted, tmp_path: Path, case: str) -> None:
    format, config, tensors, words = CONTRADICTIONS[case]
    source = SHIPPED if format is None else converted.quantised(format)
    folder = rewrite(source, tmp_path / "odd", tensors, config)
    with pytest.raises(CheckpointError, match=words):
        AutoModel.from_pretrained(folder)


def test_a_slow_format_is_announced_once(converted: Converted, caplog: pytest.LogCaptureFixture) -> None:
    slow_formats._announced.clear()
    with caplog.at_level(logging.WARNING, logger="fastlayers.quant.slow_formats"):
        for _ in range(2):
            AutoModel.from_pretrained(converted.quantised("fp8-block"))
        AutoModel.from_pretrained(converted.quantised("int8"))
        AutoModel.from_pretrained(SHIPPED)
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert "FP8 (e4m3)" in said and "cpu" in said and "MB instead of" in said and "3 to 15 times" in said
    assert "fastlayers convert SRC DST --format bf16" in said


def test_what_a_gpu_without_fp8_units_is_told(converted: Converted) -> None:
    from fastlayers.device import DESCRIBED

    assert (
        slow_formats._cost(slow_formats.E4M3, DESCRIBED["H200"]) is None
        and slow_formats._cost(slow_formats.E2M1, DESCRIBED["A100"]) is None
    )
    cost = slow_formats._cost(slow_formats.E4M3, DESCRIBED["A100"])
    assert cost is not None
    said = str(slow_formats.Slow(slow_formats.E4M3, str(DESCRIBED["A100"]), 7 * 10**9, 100, *cost))
    assert "A100 (sm_80)" in said and "7 GB instead of 14 GB" in said and "not measured" in said
