"""Conversions that must not go wrong in silence: damaged shards, two runs at once, contradictions, MXFP4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastlayers.checkpoint_files import INDEX
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers_models import AutoModel
from fastlayers_models.checkpoint import Checkpoint, collapsed
from fastlayers_models.convert import convert_checkpoint, dequantize_checkpoint
from fastlayers_models.convert.shard_writer import LOCK
from fastlayers_models.find import UNFINISHED
from fastlayers_server.variants import FastlayersRunner

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, interrupted, rewrite, tensors_of
from tiny_models import prompts, relative_rms

GPT_OSS = Path(__file__).parents[2] / "checkpoints" / "tiny_gpt_oss"
ROOTS = [str(Path(__file__).parents[2] / root) for root in ("src", "models", "server")]
CPU = torch.device("cpu")


def test_a_shard_of_the_right_size_with_other_bytes_is_made_again(tmp_path: Path) -> None:
    source, target = rewrite(SHIPPED, tmp_path / "source", shards=4), tmp_path / "made"
    interrupted(source, target, len(tensors_of(source)) // 2 + 2)
    first, second = sorted(target.glob("*.safetensors"))
    good = first.read_bytes()
    first.write_bytes(good[:-100] + bytes(byte ^ 1 for byte in good[-100:]))
    state = json.loads((target / UNFINISHED).read_text())
    assert len(state["finished"][second.name]["sha256"]) == 64
    assert convert_checkpoint(source, target, "int8").resumed == 1
    assert first.read_bytes() == good


HOLD = """
import sys
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert.shard_writer import ShardWriter
with ShardWriter(Checkpoint(sys.argv[1]), sys.argv[2], "int8").held():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_kept_out_and_a_killed_one_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "made"
    command = [sys.executable, "-c", HOLD, str(SHIPPED), str(target)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(ROOTS)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ArgumentError, match=rf"target is .*running now \(process {other.pid}\)"):
            convert_checkpoint(SHIPPED, target, "int8")
        other.kill()
    assert (target / LOCK).exists()
    convert_checkpoint(SHIPPED, target, "int8")
    assert not (target / LOCK).exists() and (target / "config.json").exists()


def stem(shape: str) -> str:
    return f"model.layers.0.mlp.experts.{shape}_proj"


def test_mxfp4_multiplied_out_is_what_stock_transformers_computes_with(tmp_path: Path) -> None:
    dequantize_checkpoint(GPT_OSS, tmp_path / "bf16")
    made, packed = tensors_of(tmp_path / "bf16"), tensors_of(GPT_OSS)
    assert made[stem("gate_up")].shape == (8, 128, 256) and made[stem("gate_up")].dtype == torch.bfloat16
    assert made.keys() == {n.removesuffix("_blocks") for n in packed if not n.endswith("_scales")}
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    from transformers import AutoModelForCausalLM, Mxfp4Config

    expanded = AutoModelForCausalLM.from_pretrained(
        GPT_OSS, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, value in expanded.state_dict().items():
        assert torch.equal(value, made[name]), name
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32).eval()
    ids = prompts(1)[0]
    with torch.inference_mode():
        wanted = stock(torch.tensor([ids])).logits[0]
    for folder in (GPT_OSS, tmp_path / "bf16"):
        assert relative_rms(FastlayersRunner(folder, torch.float32, CPU).logits(ids), wanted) < 1e-5


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_an_mxfp4_scale_that_is_no_number_is_refused_by_name(tmp_path: Path, projection: str) -> None:
    """255 is e8m0's NaN: neither 2^128 nor a warning."""
    name = f"{stem(projection)}_scales"

    def last_byte(to: int) -> Path:
        folder = tmp_path / str(to)
        return rewrite(GPT_OSS, folder, lambda t: t[name].view(-1)[-1:].fill_(to))

    AutoModel.from_pretrained(last_byte(254))
    folder = last_byte(255)
    words = rf"^{name}: a scale is 255, e8m0's NaN; accepted: 0 to 254"
    with pytest.raises(CheckpointError, match=words):
        AutoModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=words):
        dequantize_checkpoint(folder, tmp_path / "x")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_not_multiplied_out(tmp_path: Path, broken: float) -> None:
    convert_checkpoint(SHIPPED, tmp_path / "fp8", "fp8-block")
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    folder = rewrite(tmp_path / "fp8", tmp_path / "odd", lambda t: t[name].view(-1)[-1:].fill_(broken))
    with pytest.raises(CheckpointError, match=rf"^{name}: a scale is NaN or infinite; accepted: finite"):
        dequantize_checkpoint(folder, tmp_path / "x")


def test_a_dequantised_gpt_oss_converts_to_fp8(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"quantised already \(mxfp4\); accepted: .*--format bf16"):
        convert_checkpoint(GPT_OSS, tmp_path / "x", "fp8-block")
    dequantize_checkpoint(GPT_OSS, tmp_path / "bf16")
    done = convert_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "fp8-block")
    assert done.quantised == 16 and len(done.kept["stacked"]) == 8
    AutoModel.from_pretrained(tmp_path / "fp8")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SEE = r", see model\.safetensors"
WORDS: dict[str, tuple[Path, Any, Any, str]] = {
    "mxfp4, not said": (
        GPT_OSS, lambda c: c.pop("quantization_config"), lambda t: None,
        rf"there is no quantization_config, but \S+down_proj_blocks is U8, in MXFP4 \(and 7 more\){SEE}",
    ),
    "mxfp4, called fp8": (
        GPT_OSS, lambda c: c.update(quantization_config=FP8), lambda t: None,
        rf"says quant_method 'fp8', but \S+_blocks is U8, in MXFP4 \(and 7 more\){SEE}",
    ),
    "mxfp4 without scales": (
        GPT_OSS, lambda c: None, lambda t: t.pop(f"{stem('down')}_scales"),
        rf"'mxfp4' \(U8 blocks with scales\), but {stem('down')}_blocks has no {stem('down')}_scales{SEE}",
    ),
    "mxfp4 with other scales": (
        GPT_OSS, lambda c: None,
        lambda t: t.update({f"{stem('down')}_scales": t[f"{stem('down')}_scales"][..., :3].contiguous()}),
        r"\(a scale for each block\), but \S+ has scales \[8, 128, 3\] instead of \[8, 128, 4\]",
    ),
    "mxfp4 with signed scales": (
        GPT_OSS, lambda c: None,
        lambda t: t.update({f"{stem('down')}_scales": t[f"{stem('down')}_scales"].view(torch.int8)}),
        rf"'mxfp4' \(U8 scales\), but {stem('down')}_blocks has scales that are I8{SEE}",
    ),
    "bf16, called mxfp4": (
        GPT_OSS, lambda c: None,
        lambda t: t.update({stem("down"): torch.zeros(8, 128, 128, dtype=torch.bfloat16)}),
        rf"'mxfp4' \(U8 blocks for experts\), but {stem('down')} is BF16{SEE}",
    ),
    "fp8, not said": (
        SHIPPED, lambda c: None,
        lambda t: t.update({n: v.to(torch.float8_e4m3fn) for n, v in t.items() if n.endswith("o_proj.weight")}),
        rf"there is no quantization_config, but \S+o_proj\.weight is F8_E4M3 \(and 3 more\){SEE}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WORDS))
def test_contradictions_stop_a_conversion_and_a_load(case: str, tmp_path: Path) -> None:
    source, config, tensors, message = WORDS[case]
    folder = rewrite(source, tmp_path / "odd", tensors, config)
    said = "quantization_config" in json.loads((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"odd cannot be converted; .*{message}"):
        dequantize_checkpoint(folder, tmp_path / "x") if said else convert_checkpoint(folder, tmp_path / "x", "int8")
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match=message):
        AutoModel.from_pretrained(folder)


def test_a_sharded_checkpoint_without_index_must_be_whole(tmp_path: Path) -> None:
    source = rewrite(SHIPPED, tmp_path / "source", shards=3)
    (source / "model.safetensors.index.json").unlink()
    assert len(Checkpoint(source).file_of) == len(tensors_of(SHIPPED))
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 of 3 shards, and no model\.safetensors\.index\.json: incomplete"):
        convert_checkpoint(source, tmp_path / "x", "int8")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.bool])
def test_integers_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    folder = rewrite(SHIPPED, tmp_path / "odd", lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"wrong number formats: {name} is \w+, the model holds bfloat16"):
        AutoModel.from_pretrained(folder)


def test_experts_that_miss_the_same_tensor_are_one_line(tmp_path: Path) -> None:
    gone = [n for n in tensors_of(SHIPPED) if ".layers.1.mlp.experts." in n and n.endswith("up_proj.weight")]
    folder = rewrite(SHIPPED, tmp_path / "odd", lambda t: [t.pop(n) for n in gone])
    with pytest.raises(CheckpointError) as caught:
        AutoModel.from_pretrained(folder)
    assert f"missing tensors: model.layers.1.mlp.experts.*.up_proj.weight ({len(gone)} experts)" in str(caught.value)
    assert collapsed(["a.experts.3.w", "b", "b"]) == ["a.experts.3.w", "b"]


def test_a_quantization_config_in_words_is_refused(tmp_path: Path) -> None:
    folder = rewrite(SHIPPED, tmp_path / "odd", config=lambda c: c.update(quantization_config="fp8"))
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config is 'fp8'; accepted: an object"):
        AutoModel.from_pretrained(folder)


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
SCALES: dict[str, tuple[str, Any, str]] = {
    "integers": (
        "fp8-block", lambda t: t.update({f"{O_PROJ}_scale_inv": t[f"{O_PROJ}_scale_inv"].to(torch.uint8)}),
        rf"{O_PROJ}_scale_inv is U8; scales are read from BF16, F16, F32, F64",
    ),
    "too few": (
        "int8", lambda t: t.update({f"{O_PROJ}_scale": t[f"{O_PROJ}_scale"][:7]}),
        rf"{O_PROJ}_scale: \[7\] for {O_PROJ} \[128, 512\]; accepted: one number for a matrix, or one for each",
    ),
    "of no matrix": ("int8", lambda t: t.pop(O_PROJ), rf"{O_PROJ}_scale: there is no {O_PROJ}, which these are"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(SCALES))
def test_scales_that_do_not_fit_stop_a_conversion_back(case: str, tmp_path: Path) -> None:
    format, edit, message = SCALES[case]
    convert_checkpoint(SHIPPED, tmp_path / "made", format)
    folder = rewrite(tmp_path / "made", tmp_path / "odd", edit)
    with pytest.raises(CheckpointError, match=message):
        dequantize_checkpoint(folder, tmp_path / "back")
    assert not (tmp_path / "back" / "config.json").exists()


def test_a_refused_conversion_leaves_no_directory_that_it_made(tmp_path: Path) -> None:
    """What was there stays, empty or not; directories of shards that were finished go, too."""
    source = rewrite(SHIPPED, tmp_path / "source", shards=2)
    index = json.loads((source / INDEX).read_text())
    last = max(index["weight_map"].values())
    name = next(n for n, file in index["weight_map"].items() if file == last and n.endswith("down_proj.weight"))
    (source / "parts").mkdir()
    for file in source.glob("*.safetensors"):
        file.rename(source / "parts" / file.name)
    index["weight_map"] = {n: f"parts/{file}" for n, file in index["weight_map"].items()}
    (source / INDEX).write_text(json.dumps(index))
    tensors = load_file(source / "parts" / last)
    tensors[name][0, 0] = torch.nan
    save_file(tensors, source / "parts" / last, metadata={"format": "pt"})

    room = tmp_path / "room"
    for there, target in ((".", "a/b/c"), ("d", "d/e/f"), ("g/h", "g/h"), (".", "i")):
        (room / there).mkdir(parents=True, exist_ok=True)
        before = sorted(room.rglob("*"))
        with pytest.raises(CheckpointError, match=f"{name}: holds NaN"):
            convert_checkpoint(source, room / target, "int8")
        assert sorted(room.rglob("*")) == before, target


def test_a_target_that_goes_before_it_is_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run that is refused takes back the directory that it made, which another has just seen."""
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    with pytest.raises(ArgumentError, match=r"convert: target is .*made, which another conversion made and took back"):
        convert_checkpoint(SHIPPED, tmp_path / "made", "int8")
