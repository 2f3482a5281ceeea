"""``fastlayers warmup``: a model of each kind of layer, every count, and what the record then says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastlayers as fl
from fastlayers_models.generate import Generator
from fastlayers_server import known_models, warmup_command
from fastlayers_server.cli import app
from fastlayers_server.random_models import random_model
from fastlayers_server.warmup_command import kinds_of_layers

SMALL: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4, max_position_embeddings=64
)
QWEN = known_models.QWEN3_8B | SMALL | dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)


@pytest.mark.parametrize(
    ("name", "layers"), [("Qwen/Qwen3-8B", 1), ("openai/gpt-oss-20b", 2), ("deepseek-ai/DeepSeek-V3", 4)]
)
def test_one_decoder_layer_of_each_kind(name: str, layers: int) -> None:
    assert kinds_of_layers(known_models.config_of(name), torch.bfloat16) == layers


def test_a_model_is_warmed_up(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    arguments = ["warmup", str(path), "--device", "cpu", "--max-tokens", "9", "--max-batch", "2", "--dtype", "fp32"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["layers"], found["device"], found["left_out"], found["builds"]) == (1, "cpu", [], {})
    result = CliRunner().invoke(app, [*arguments, "--no-build"])
    assert result.exit_code == 0 and "kernels compiled or loaded" in result.stdout
    result = CliRunner().invoke(app, ["warmup", str(path), "--device", "cpu", "--max-tokens", "65"])
    assert result.exit_code and "max_position_embeddings, 64" in str(result.exception)


def test_the_model_that_ships_is_warmed_up_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    found = {"kernels": 0, "seconds": 0.0, "built": []}
    monkeypatch.setattr(warmup_command, "warm_up", lambda name, *_, **__: named.append(name) or found)
    assert CliRunner().invoke(app, ["warmup", "--device", "cpu"]).exit_code == 0 and named == ["tiny"]
    for command in (["warmup"], ["bench", "model"]):
        assert "'tiny', the model that ships" in CliRunner().invoke(app, [*command, "--help"]).stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"])
def test_gpu_nothing_compiles_for_any_prompt_and_batch_after_a_warm_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    config, draw = known_models.config_of(name), random.Random(0)
    model = random_model(config, "cuda", layers=kinds_of_layers(config, torch.bfloat16))
    generator = Generator(model, max_batch=64, max_length=4096)
    report = fl.warmup(generator, max_tokens=4000, max_batch=64, progress=False)
    late: list[str] = []
    watching = triton.knobs.runtime.jit_cache_hook

    def note(**details: Any) -> Any:
        late.append(f"{rows and [len(row) for row in rows]}: {details['repr']} {details['compile']['constants']}")
        return watching(**details)

    rows: list[list[int]] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    for _ in range(12):
        count = draw.choice((1, 1, 2, 5))
        rows = [[1] * draw.randint(1, 4000 // count) for _ in range(count)]  # as many tokens as were announced
        generator.generate(rows, max_new_tokens=3, eos_ids=())
    generator.generate([[1, 2]] * draw.randint(30, 64), max_new_tokens=3, eos_ids=())
    assert report.watch.check() == [], "\n".join(late)
    report.watch.close()
