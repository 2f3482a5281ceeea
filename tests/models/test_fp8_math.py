"""``fp8_math`` reaches latent attention from models, the command line and the server, and is refused elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers_models import AutoModel, Generator
from fastlayers_models.find import TINY, assets
from fastlayers_server.cli import app
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.startup import load_model

E4M3 = torch.float8_e4m3fn


def math_of(model: Any) -> set[bool]:
    return {module.cfg.fp8_math for module in model.modules() if isinstance(module, fl.MLAAttention)}


def test_models_pass_it_on() -> None:
    models = [
        AutoModel.from_pretrained(assets() / TINY, dtype=torch.float32, kv_dtype=E4M3, fp8_math=math)
        for math in (False, True)
    ]
    assert [math_of(model) for model in models] == [{False}, {True}]
    # What allows rounding does not demand it: torch's way rounds nothing more, so tokens are the same here.
    tokens = [
        Generator(model, max_batch=1).generate([[0, 3, 56, 316]], max_new_tokens=8, eos_ids=()) for model in models
    ]
    assert tokens[0] == tokens[1]


def test_without_an_fp8_cache_or_latents_it_is_refused() -> None:
    with pytest.raises(ArgumentError, match="fp8_math is True; accepted: a cache of float8_e4m3fn"):
        AutoModel.from_pretrained(assets() / TINY, dtype=torch.float32, fp8_math=True)
    config = EngineConfig(model="Qwen/Qwen3-8B", load_format="dummy", device="cpu", layers=1, fp8_math=True)
    with pytest.raises(ArgumentError, match="option is 'fp8_math'; accepted: "):
        load_model(config)


def test_servers_and_the_command_line_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="tiny", device="cpu", kv_cache_dtype="e4m3", fp8_math=True)
    assert math_of(load_model(config)) == {True}
    seen: list[dict[str, Any]] = []
    build = AutoModel.from_pretrained

    def noted(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return build(*given, **options)

    monkeypatch.setattr(AutoModel, "from_pretrained", noted)
    flags = ["--kv-dtype", "e4m3", "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", "4", "--json"]
    for more in ([], ["--fp8-math"]):
        said = CliRunner().invoke(app, ["generate", "What is 127 + 45?", *flags, *more])
        assert said.exit_code == 0, said.output
        assert '"text": ' in said.output
    assert ["fp8_math" in options for options in seen] == [False, True]
