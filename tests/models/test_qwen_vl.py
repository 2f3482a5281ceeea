"""Qwen2.5-VL from our layers against Hugging Face: the tower, positions, prompts with images, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError
from fastlayers.weights import slots
from fastlayers_models.blocks import ModelContext
from fastlayers_models.qwen import QwenConfig
from fastlayers_models.vision import VisionConfig, VisionTower

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import BASE, BOUND, randomize
from tiny_models import relative_rms

SECTION = [2, 3, 3]
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTION}
IDS = dict(image_token_id=150, video_token_id=151, vision_start_token_id=152, vision_end_token_id=153)
# Windows of 4 × 4 rows; the second block sees whole frames.
VISION: dict[str, Any] = dict(
    depth=3, hidden_size=32, intermediate_size=36, num_heads=2, out_hidden_size=64, patch_size=4, window_size=32,
    fullatt_block_indexes=[1], initializer_range=0.15,
)  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "two neighbours a side": {},
    "windows of one row, other heads": {"window_size": 15, "num_heads": 4, "in_channels": 1},
    "three neighbours a side, windows of 2": {"spatial_merge_size": 3, "window_size": 30, "temporal_patch_size": 1},
    "no neighbours, all whole": {"spatial_merge_size": 1, "fullatt_block_indexes": [0, 1, 2], "rope_parameters": None},
    "all windows": {"fullatt_block_indexes": [], "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
}


def hf_config(**vision: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(text_config=BASE | {"rope_parameters": ROPE}, vision_config=VISION | vision, **IDS)


def towers(vision: dict[str, Any]) -> tuple[Any, VisionTower]:
    """Return Hugging Face's random tower, and ours with its weights."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = hf_config(**vision)
    torch.manual_seed(1)
    reference = randomize(Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)).eval()
    written = json.loads(config.to_json_string(use_diff=False))
    context = ModelContext(QwenConfig.from_hf(written), None, "cpu", torch.float32, 16, None, "auto")
    tower = VisionTower(context, VisionConfig.from_hf(written), "visual")
    tensors = reference.state_dict()
    for name, slot in slots(tower):
        slot.fill(name, tensors.pop(name))
    assert not tensors
    return reference, tower


def pixels(grids: list[list[int]], tower: VisionTower, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), tower.config.patch_width, generator=generator)


def drawn_grids(merge: int, seed: int, most: int = 4) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.choice((1, 1, 1, 2)), *(merge * chance.randint(1, 9) for _ in "hw")]
        for _ in range(chance.randint(1, most))
    ]


@pytest.mark.parametrize("vision", TOWERS.values(), ids=TOWERS)
def test_tower_equals_hugging_face(vision: dict[str, Any]) -> None:
    reference, tower = towers(vision)
    seen = set()
    for seed in range(8):
        grids = drawn_grids(tower.config.spatial_merge_size, seed)
        values = pixels(grids, tower, seed)
        with torch.inference_mode():
            wanted = reference(values, grid_thw=torch.tensor(grids)).pooler_output
        found = tower(values, torch.tensor(grids))
        assert found.shape == wanted.shape and relative_rms(found, wanted) <= BOUND
        assert torch.equal(found, tower(values, grids))
        seen |= {(n // tower.config.spatial_merge_size) % tower.config.window_side for _, *hw in grids for n in hw}
    assert len(seen) == tower.config.window_side  # windows cut by the edge, and whole ones


def test_an_image_depends_on_no_other_and_on_its_place() -> None:
    _, tower = towers({})
    grids = [[1, 6, 10], [1, 8, 8], [1, 2, 4]]
    values = pixels(grids, tower)
    together = tower(values, grids).split([15, 16, 2])
    for grid, part, whole in zip(grids, values.split([60, 64, 8]), together, strict=True):
        torch.testing.assert_close(tower(part, [grid]), whole, rtol=1e-5, atol=1e-6)
    turned = tower(values[:60], [[1, 10, 6]])
    assert relative_rms(turned, together[0]) > 0.05


def test_pixels_and_grids_that_do_not_fit_are_refused() -> None:
    _, tower = towers({})
    good = pixels([[1, 4, 4]], tower)
    for values, grids, message in (
        (good[:, :-1], [[1, 4, 4]], r"pixel_values is .*accepted: a floating tensor \[16, 96\]"),
        (good[:-1], [[1, 4, 4]], r"pixel_values is .*\[16, 96\]"),
        (good.long(), [[1, 4, 4]], "pixel_values is .*a floating tensor"),
        (None, [[1, 4, 4]], "pixel_values is None"),
        (good, None, "image_grid_thw is None; accepted: for each image frames, height and width"),
        (good, [[1, 4, 4, 4]], r"image_grid_thw is \[1, 4, 4, 4\]"),
        (good, [[1, 2, 8], [1, 3, 4]], r"image_grid_thw is \[1, 3, 4\]; .*multiples of 2"),
        (good, [[0, 4, 4]], r"image_grid_thw is \[0, 4, 4\]"),
        (good, torch.tensor([[1.0, 4.0, 4.0]]), r"image_grid_thw is \[1\.0, 4\.0, 4\.0\]"),
        (good[:0], [], "pixel_values is .*at least one"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tower(values, grids)


def test_the_towers_settings_are_those_of_transformers() -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    theirs, silent = Qwen2_5_VLVisionConfig(), VisionConfig.from_hf({})
    names = {each.name for each in fields(silent)} - {"quant", "rope_theta", "image_token_id", "video_token_id"}
    assert len(names) == 11
    for name in names:
        found = getattr(theirs, name)
        assert getattr(silent, name) == (tuple(found) if isinstance(found, (list, tuple)) else found), name
    assert silent.rope_theta == theirs.rope_parameters["rope_theta"]
    whole = hf_config()
    assert (silent.image_token_id, silent.video_token_id) == (151655, 151656)
    read = VisionConfig.from_hf(json.loads(whole.to_json_string(use_diff=False)))
    assert (read.image_token_id, read.video_token_id) == (150, 151) and read.fullatt_block_indexes == (1,)


def test_settings_that_no_tower_is_built_from_are_named() -> None:
    for change, message in (
        ({"hidden_size": 36}, r"hidden_size is 36; accepted: a multiple of 64"),
        ({"window_size": 27}, r"window_size is 27; accepted: at least 28"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"patch_size": [14, 14]}, r"patch_size is \(14, 14\); accepted: a positive integer"),
        ({"depth": 0}, "depth is 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type is 'default'; accepted: 'axial'"),
        ({"rope_parameters": 3}, "rope_parameters is 3; accepted: an object"),
    ):
        with pytest.raises(ArgumentError, match=message):
            VisionConfig.from_hf({"vision_config": change})
    with pytest.raises(ArgumentError, match="vision_config is 'x'; accepted: an object"):
        VisionConfig.from_hf({"vision_config": "x"})
