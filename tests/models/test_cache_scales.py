"""Scales of an FP8 cache: with them a checkpoint of far too large keys and values says what it said before."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastlayers.errors import CheckpointError
from fastlayers_models import AutoModel
from fastlayers_models.convert import convert_to_fp8_block

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, Feeder, Tensors, edited, tensors_of, write
from family_tools import BASE, Variation, save_random
from test_weight_only import LAYOUTS, quantised
from tiny_models import relative_rms

E4M3 = torch.float8_e4m3fn
KEYS, VALUES = 4096.0, 512.0
ROWS = [[7, 3, 90, 41, 5, 66, 12, 80, 33, 2], [50, 51, 9]]
LLAMA = Variation("llama_biases", "LlamaConfig", 2, {"attention_bias": True})
QWEN = Variation("qwen3_norms", "Qwen3Config", 2, {})


def logits(folder: Path, kv_dtype: torch.dtype = E4M3) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, kv_dtype=kv_dtype, page_size=16)
    found = Feeder(model, ROWS).run([("extend", (7, 2)), ("decode", (1, 1)), ("extend", (2, 0))])
    return torch.cat([found[0], found[1]])


def grow_grouped(tensors: Tensors) -> None:
    """Make keys and values too large for e4m3, and queries and the output projection as much smaller."""
    factors = {"q_proj": 1 / KEYS, "k_proj": KEYS, "v_proj": VALUES, "o_proj": 1 / VALUES}
    normed = any(name.endswith("k_norm.weight") for name in tensors)
    if normed:
        factors |= {"q_proj": 1.0, "k_proj": 1.0, "q_norm": 1 / KEYS, "k_norm": KEYS}
    for name, value in tensors.items():
        part = name.split(".")[-2]
        if part in factors and "self_attn" in name and not name.endswith("o_proj.bias"):
            value.mul_(factors[part])


def grow_latent(tensors: Tensors) -> None:
    for name, value in tensors.items():
        if name.endswith("kv_a_layernorm.weight"):
            value.mul_(KEYS)
        elif name.endswith("kv_b_proj.weight"):
            value.mul_(1 / KEYS)
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            value[512:].mul_(KEYS)
        elif name.endswith("q_b_proj.weight"):
            value.view(4, 128 + 64, -1)[:, 128:].mul_(1 / KEYS)


def scaled(names: tuple[str, str], keys: float = KEYS, values: float = VALUES) -> Callable[[Tensors], None]:
    def add(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("self_attn.o_proj.weight")]:
            layer = name.removesuffix(".o_proj.weight")
            tensors[f"{layer}.{names[0]}"] = torch.tensor(keys)
            tensors[f"{layer}.{names[1]}"] = torch.tensor([values])

    return add


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {v.name: save_random(v.hf_config(), tmp_path_factory.mktemp(v.name)) for v in (LLAMA, QWEN)}
    return made | {"deepseek": SHIPPED}


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
@pytest.mark.parametrize("family", ["llama_biases", "qwen3_norms", "deepseek"])
def test_what_saturates_without_its_scales_is_as_before_with_them(
    folders: dict[str, Path], family: str, names: tuple[str, str], tmp_path: Path
) -> None:
    source, grow = folders[family], grow_latent if family == "deepseek" else grow_grouped
    wanted = logits(source)
    large = edited(source, tmp_path / "large", grow)
    assert relative_rms(logits(large, torch.float32), logits(source, torch.float32)) < 1e-5
    assert relative_rms(logits(large), wanted) > 0.05
    # Any scale of which these are the next powers of two.
    both = edited(large, tmp_path / "scaled", scaled(names, 0.6 * KEYS, 0.9 * VALUES))
    assert relative_rms(logits(both), wanted) < 1e-6
    # A cache that does not round to e4m3 has no use for them.
    assert torch.equal(logits(both, torch.float32), logits(large, torch.float32))


def test_quantised_projections_take_them_up_in_their_scales(folders: dict[str, Path], tmp_path: Path) -> None:
    fp8 = tmp_path / "fp8"
    convert_to_fp8_block(SHIPPED, fp8)
    exact = logits(fp8, torch.float32)
    far = relative_rms(logits(fp8), exact)
    for scale in (0.25, 2.0):
        folder = edited(fp8, tmp_path / f"{scale}", scaled(("k_scale", "v_scale"), scale))
        # A power of two moves only what is subnormal in e4m3, or saturates; a part left out is off by all of it.
        assert 0.5 * far < relative_rms(logits(folder), exact) < 1.5 * far


@pytest.mark.parametrize(
    ("value", "why"), [(0.0, "is 0;"), (-1.0, "is -1;"), (torch.inf, "is inf;"), (torch.nan, "nan")]
)
def test_what_is_no_scale_is_named(value: float, why: str, tmp_path: Path) -> None:
    folder = edited(SHIPPED, tmp_path / "bad", scaled(("k_scale", "v_scale"), value))
    with pytest.raises(CheckpointError, match=f"self_attn.k_scale {why if why.startswith('is') else f'is {why}'}"):
        logits(folder)


def test_several_numbers_and_other_names_are_refused(tmp_path: Path) -> None:
    def several(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(2)

    def other(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.k_scale"] = torch.ones(1)

    with pytest.raises(CheckpointError, match=r"k_scale is 2 numbers; a cache's scale is one positive number"):
        logits(edited(SHIPPED, tmp_path / "several", several))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model.layers.0.mlp.k_scale"):
        logits(edited(SHIPPED, tmp_path / "other", other))


def test_keys_without_values_and_two_scales_of_one_layer_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    layer = "model.layers.1.self_attn"

    def only(part: str) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({f"{layer}.{part}_scale": torch.tensor(2.0)})

    def two(tensors: Tensors) -> None:
        scaled(("k_scale", "v_scale"), 2.0, 2.0)(tensors)
        tensors[f"{layer}.attn.k_scale"] = torch.tensor(64.0)

    for family in ("llama_biases", "qwen3_norms"):
        with pytest.raises(CheckpointError, match=rf"there is {layer}\.k_scale, but no v_scale of {layer}"):
            logits(edited(folders[family], tmp_path / f"{family}_k", only("k")))
    with pytest.raises(CheckpointError, match=rf"there is {layer}\.v_scale, but no k_scale of {layer}"):
        logits(edited(SHIPPED, tmp_path / "v", only("v")))
    with pytest.raises(CheckpointError, match=rf"{layer}\.k_scale is 2, but {layer}\.attn\.k_scale is 64"):
        logits(edited(SHIPPED, tmp_path / "two", two))


def test_layers_without_scales_beside_others_with_them_are_said(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def one(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(2.0)

    logits(edited(SHIPPED, tmp_path / "all", scaled(("k_scale", "v_scale"), 2.0, 2.0)))
    assert "no scales of an FP8 cache" not in caplog.text
    logits(edited(SHIPPED, tmp_path / "one", one))
    assert "3 of 4 layers have no scales of an FP8 cache, first model.layers.1.self_attn: taken as 1" in caplog.text


@pytest.mark.parametrize("layout", ["awq", "packed_8"])
def test_weights_alone_take_them_up_in_their_scales(layout: str, folders: dict[str, Path], tmp_path: Path) -> None:
    coded, _ = quantised(folders["llama_biases"], tmp_path, LAYOUTS[layout])
    config, tensors = json.loads((coded / "config.json").read_text()), tensors_of(coded)
    exact, plain = logits(coded, torch.float32), logits(coded)
    for layer in range(BASE["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.25)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(2.0)
    far = relative_rms(plain, exact)
    found = relative_rms(logits(write(tmp_path / "scaled", config, tensors)), exact)
    # A power of two moves only what is subnormal in e4m3; a part left out, or another axis, is off by all of it.
    assert 0.5 * far < found < 1.5 * far
