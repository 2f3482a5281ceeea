"""Qwen2.5-VL from our layers against Hugging Face: the tower, positions, prompts with images, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, world
from fastlayers.weights import slots
from fastlayers_models.blocks import ModelContext
from fastlayers_models.convert import convert_checkpoint
from fastlayers_models.generate import Generator
from fastlayers_models.images import PromptImages, prompt_images, rope_index, step_images
from fastlayers_models.qwen import QwenConfig
from fastlayers_models.qwen_vl import QwenVLForCausalLM
from fastlayers_models.step import Part
from fastlayers_models.vision import VisionConfig, VisionTower

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import per_row_error, rewrite
from family_tools import BASE, BOUND, ours, randomize
from test_config import changes_of
from test_qwen import flat, nested, published
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


def towers(vision: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, VisionTower]:
    """Return Hugging Face's random tower, and ours with its weights."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = hf_config(**vision)
    torch.manual_seed(1)
    reference = randomize(Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)).eval()
    written = json.loads(config.to_json_string(use_diff=False))
    context = ModelContext(QwenConfig.from_hf(written), None, "cpu", dtype, 16, None, "auto")
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
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    if vision.get("rope_parameters") and not hasattr(Qwen2_5_VLVisionConfig(), "rope_parameters"):
        pytest.skip("this transformers has one base of rotations, whatever the file says")
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


def test_tower_of_kernels_equals_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = towers({})
    monkeypatch.setenv("FASTLAYERS_BACKEND", "gqa=triton,rotary_kv_write=triton")
    _, tower = towers({})
    assert tower.blocks[0].attn.choice.name == "triton" and wanted.blocks[0].attn.choice.name == "torch"
    grids = [[1, 6, 10], [2, 4, 2]]
    values = pixels(grids, tower)
    assert relative_rms(tower(values, grids), wanted(values, grids)) <= BOUND


def test_tower_in_bf16_is_as_near_to_fp32_as_stock() -> None:
    reference, _ = towers({})
    _, tower = towers({}, torch.bfloat16)
    grids = [[1, 6, 10], [1, 16, 12]]
    values = pixels(grids, tower)
    exact, stock = (copy.deepcopy(reference).to(torch.bfloat16).to(dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.inference_mode():
        wanted, theirs = (
            model(values.to(model.dtype), grid_thw=torch.tensor(grids)).pooler_output for model in (exact, stock)
        )
    found = tower(values, grids)
    assert found.dtype == torch.bfloat16
    assert 0 < relative_rms(found, wanted) <= 1.25 * relative_rms(theirs, wanted)


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
    rope = getattr(theirs, "rope_parameters", {"rope_theta": 10000.0})  # before 5.17 it was no setting
    assert silent.rope_theta == rope["rope_theta"]
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


# ---- prompts with images ---------------------------------------------------------------------------------------


def prompt_of(grids: list[list[int]], merge: int, seed: int, text: int = 9) -> list[int]:
    """Return distinct text around as many image tokens as the grids say, each image between its two marks."""
    chance = random.Random(seed)
    words = chance.sample(range(3, 150), text * (len(grids) + 1))
    ids: list[int] = []
    for index, (t, h, w) in enumerate(grids):
        ids += words[text * index : text * (index + 1) - chance.randint(0, text)]
        ids += [152, *[150] * (t * h * w // merge**2), 153]
    return ids + words[text * len(grids) :]


def mm_types(ids: list[int]) -> torch.Tensor:
    return torch.tensor([[int(token == 150) for token in ids]])


def test_positions_are_those_of_transformers() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        models = {merge: Qwen2_5_VLForConditionalGeneration(hf_config(spatial_merge_size=merge)) for merge in (1, 2, 3)}
    configs = {
        merge: VisionConfig.from_hf(json.loads(model.config.to_json_string(use_diff=False)))
        for merge, model in models.items()
    }
    deltas = set()
    for seed in range(300):
        merge = 1 + seed % 3
        config = configs[merge]
        grids = drawn_grids(merge, seed, 5) if seed % 7 else []
        ids = prompt_of(grids, merge, seed)
        found, delta, used = rope_index(ids, [(t, h, w) for t, h, w in [*grids, [1, 3, 3]]], config)
        wanted, wanted_delta = models[merge].model.get_rope_index(
            torch.tensor([ids]), mm_types(ids), image_grid_thw=torch.tensor(grids).view(-1, 3)
        )
        assert torch.equal(found, wanted[:, 0]) and delta == int(wanted_delta) and used == len(grids)
        deltas.add(delta)
    assert len(deltas) > 50 and max(deltas) == 0


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("qwen_vl")
    torch.manual_seed(0)
    model = randomize(Qwen2_5_VLForConditionalGeneration(hf_config()))
    model.save_pretrained(folder)
    return model.eval(), folder


STEPS = 24
# Each prompt's images: none, one, and several of odd sizes.
PROMPTS: dict[str, list[list[list[int]]]] = {
    "text alone": [[], []],
    "one image": [[[1, 6, 10]]],
    "several images": [[[1, 2, 18], [1, 10, 2], [1, 8, 8]]],
    "a ragged batch": [[[1, 6, 4]], [], [[1, 2, 2], [1, 4, 14]], [[2, 6, 6]]],
}


@torch.inference_mode()
def stock_greedy(reference: Any, ids: list[int], grids: list[list[int]], values: torch.Tensor) -> list[int]:
    images = {"pixel_values": values, "image_grid_thw": torch.tensor(grids)} if grids else {}
    given = torch.tensor([ids])
    out = reference.generate(
        given, attention_mask=torch.ones_like(given), mm_token_type_ids=mm_types(ids), do_sample=False,
        max_new_tokens=STEPS, min_new_tokens=STEPS, eos_token_id=None, pad_token_id=2, **images,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("chunk", [8192, 7])
@pytest.mark.parametrize("images", PROMPTS.values(), ids=PROMPTS)
def test_greedy_tokens_equal_hugging_face(vl: tuple[Any, Path], images: list[list[list[int]]], chunk: int) -> None:
    reference, folder = vl
    model = ours(folder)
    prompts = [prompt_of(grids, 2, seed, 16) for seed, grids in enumerate(images)]
    flat = [grid for grids in images for grid in grids]
    values = pixels(flat, model.tower) if flat else None
    parts = [values] * len(images) if values is None else values.split([sum(map(math.prod, g)) for g in images])
    wanted = [stock_greedy(reference, *each) for each in zip(prompts, images, parts, strict=True)]
    assert max(len(set(tokens)) for tokens in wanted) > STEPS // 8
    given = {"pixel_values": values, "image_grid_thw": torch.tensor(flat)} if flat else {}
    found = Generator(model, max_batch=3, prefill_tokens=chunk).generate(
        prompts, max_new_tokens=STEPS, eos_ids=(), **given
    )
    assert found == wanted


def test_what_the_processor_gives_is_taken_as_it_is(vl: tuple[Any, Path]) -> None:
    image = pytest.importorskip("PIL.Image", reason="transformers' processor reads images with Pillow")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference, folder = vl
    most = {"shortest_edge": 64, "longest_edge": 4096}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=most)
    drawn = [torch.randint(256, size, dtype=torch.uint8).numpy() for size in ((40, 56, 3), (31, 70, 3))]
    given = dict(processor(images=[image.fromarray(each) for each in drawn], return_tensors="pt"))
    grids = given["image_grid_thw"].tolist()
    ids = prompt_of(grids, 2, 1)
    wanted = stock_greedy(reference, ids, grids, given["pixel_values"])
    assert Generator(ours(folder)).generate([ids], max_new_tokens=STEPS, eos_ids=(), **given) == [wanted]


def images_of(model: Any, ids: list[int], grids: list[list[int]], values: torch.Tensor) -> PromptImages:
    (found,) = prompt_images(model.tower, [ids], values, grids)
    assert found is not None
    return found


@torch.inference_mode()
def logits_in_chunks(model: Any, ids: list[int], images: PromptImages, chunks: list[int]) -> torch.Tensor:
    """Return the logits of all tokens, which come in chunks of so many."""
    caches = fl.kv_cache_spec(model, page_size=16).allocate(16)
    state, logits, done = AttentionState(1, len(ids), 15, 16), [], 0
    for count in chunks:
        part = Part(ids[done : done + count], done, list(range(1, 16)), images=images)
        meta = state.plan(AttentionBatch((count,), (done,), [part.pages]))
        positions, rows = step_images([part], torch.device("cpu"))
        hidden = model(torch.tensor(part.ids), replace(meta, rope_positions=positions), caches, images=rows)
        logits.append(model.compute_logits(hidden))
        done += count
    return torch.cat(logits)


@pytest.mark.parametrize("grids", [[[1, 6, 10]], [[1, 2, 18], [1, 10, 2], [1, 8, 8]]], ids=["one", "several"])
def test_logits_equal_hugging_face(vl: tuple[Any, Path], grids: list[list[int]]) -> None:
    reference, folder = vl
    model = ours(folder)
    prompt, more = prompt_of(grids, 2, 3), [5, 9, 17, 33, 65, 129]
    values = pixels(grids, model.tower, 3)
    ids = prompt + more
    with torch.inference_mode():
        wanted = reference(
            torch.tensor([ids]),
            pixel_values=values,
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=mm_types(ids),
        ).logits[0]
    once, ones = [len(prompt)], [1] * len(more)
    for chunks in ([*once, *ones], [len(prompt) // 2, len(prompt) - len(prompt) // 2, *ones], [1] * len(ids)):
        found = logits_in_chunks(model, ids, images_of(model, prompt, grids, values), chunks)
        assert relative_rms(found, wanted) <= BOUND and per_row_error(found, wanted) <= 5 * BOUND
    # Each of what an image brings shows: its pixels, its shape, and where it lets the text go on.
    other = images_of(model, prompt, grids, values.flip(0))
    turned = images_of(model, prompt, [[t, w, h] for t, h, w in grids], values)
    late = images_of(model, prompt, grids, values)
    late.delta += 1
    for wrong in (other, turned, late):
        found = logits_in_chunks(model, ids, wrong, [*once, *ones])
        assert relative_rms(found[-1], wanted[-1]) > 100 * BOUND


def test_captured_tokens_are_those_of_the_plain_loop(vl: tuple[Any, Path]) -> None:
    model = ours(vl[1])
    captured = Generator(model, max_batch=3, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1))
    plain = Generator(model, max_batch=3)
    for images in (*PROMPTS.values(), *reversed(PROMPTS.values())):
        prompts = [prompt_of(grids, 2, seed, 16) for seed, grids in enumerate(images)]
        flat = [grid for grids in images for grid in grids]
        given = {"pixel_values": pixels(flat, model.tower), "image_grid_thw": flat} if flat else {}
        wanted = plain.generate(prompts, max_new_tokens=8, eos_ids=(), **given)
        assert captured.generate(prompts, max_new_tokens=8, eos_ids=(), **given) == wanted
    step = captured.step
    assert step.graphs.replays > 20 and step.uncaptured["prompts with images"] >= 6
    assert {key.kind for key in step.graphs.keys} == {"decode", "extend"}  # text alone is captured as ever


def generate_on(rank: Rank, folder: str, prompts: Any, values: torch.Tensor, grids: Any) -> list[list[int]]:
    model = ours(folder, parallel=rank.spec())
    return Generator(model, max_batch=2).generate(
        prompts, max_new_tokens=6, eos_ids=(), pixel_values=values, image_grid_thw=grids
    )


def test_ranks_hold_the_whole_tower(vl: tuple[Any, Path]) -> None:
    model, grids = ours(vl[1]), [[1, 6, 4], [1, 4, 4]]
    prompts, values = [prompt_of([grid], 2, 5) for grid in grids], pixels(grids, model.tower)
    wanted = Generator(model).generate(prompts, max_new_tokens=6, eos_ids=(), pixel_values=values, image_grid_thw=grids)
    assert world(2).run(generate_on, str(vl[1]), prompts, values, grids) == [wanted, wanted]


def test_warm_up_runs_the_tower(vl: tuple[Any, Path]) -> None:
    model, seen = ours(vl[1]), []
    model.tower.register_forward_hook(lambda _, given, found: seen.append((given[1], len(found))))
    labels = [label for label, _ in Generator(model).warm_up_calls([1, 7])]
    assert labels == ["decode 1", "prefill 1", "decode 7", "prefill 7", "image 1", "image 7"]
    fl.warmup(model, tokens=[7])
    assert seen == [([(1, 4, 8)], 8)]


def test_a_quantised_language_model_keeps_its_tower(vl: tuple[Any, Path], tmp_path: Path) -> None:
    done = convert_checkpoint(vl[1], tmp_path / "int8", "int8")
    model, plain, grids = ours(tmp_path / "int8"), ours(vl[1]), [[1, 6, 4]]
    assert done.quantised > 10 and any("visual" in name for name in done.kept["encoder"])
    assert type(model.decoder.layers[0].mlp.down_proj) is fl.Int8Linear
    values = pixels(grids, model.tower)
    assert torch.equal(model.tower(values, grids), plain.tower(values, grids))


def test_images_that_are_not_the_prompts_are_refused(vl: tuple[Any, Path]) -> None:
    model = ours(vl[1])
    generator, grid = Generator(model), [1, 6, 4]
    values, prompt = pixels([grid], model.tower), prompt_of([grid], 2, 0)
    two, whole = torch.cat([values, values]), {"pixel_values": values, "image_grid_thw": [grid]}
    for prompts, given, message in (
        ([prompt], {}, r"prompts\[0\] is 6 image tokens from \d+ on; accepted: those of 0 images"),
        ([prompt], {"pixel_values": values}, "image_grid_thw is None; accepted: what the processor gives"),
        ([prompt], {"image_grid_thw": [grid]}, "pixel_values is None; accepted: what the processor gives"),
        ([prompt], {"pixel_values": values[:, 1:], "image_grid_thw": [grid]}, r"pixel_values is .*\[24, 96\]"),
        (
            [[5], [i for i in prompt if i != 150] + [150] * 5],
            {"pixel_values": values, "image_grid_thw": [grid]},
            r"prompts\[1\] is 5 image tokens from \d+ on; accepted: 6, as image_grid_thw\[0\] \[1, 6, 4\] says",
        ),
        ([[*prompt, 150]], whole, r"prompts\[0\] is 1 image tokens from \d+ on; accepted: those of 1 images in image"),
        ([prompt], {"pixel_values": two, "image_grid_thw": [grid] * 2}, "image_grid_thw is 2 images; accepted: 1, as"),
        ([[5, 151, 6]], {}, r"prompts\[0\] is a video's token 151 at 1; accepted: text and images"),
    ):
        with pytest.raises(ArgumentError, match=message):
            generator.generate(prompts, max_new_tokens=2, **given)
    assert len(generator.generate([prompt], max_new_tokens=2, eos_ids=(), **whole)[0]) == 2
    for wrong in (math.nan, -math.inf):
        values[3, 5] = wrong
        with pytest.raises(ArgumentError, match="pixel_values is NaN or infinite in row 3; accepted: finite numbers"):
            generator.generate([prompt], max_new_tokens=2, **whole)


@pytest.mark.parametrize("names", [published, nested], ids=["published", "nested"])
def test_checkpoints_of_both_layouts_have_their_tower(vl: tuple[Any, Path], tmp_path: Path, names: Any) -> None:
    grids = [[1, 6, 4]]
    model = ours(vl[1])
    prompts, given = [prompt_of(grids, 2, 0)], {"pixel_values": pixels(grids, model.tower), "image_grid_thw": grids}
    wanted = Generator(model).generate(prompts, max_new_tokens=6, eos_ids=(), **given)
    model = ours(rewrite(vl[1], tmp_path / "renamed", names, flat if names is published else lambda c: None))
    assert isinstance(model, QwenVLForCausalLM)
    assert model.config.tower == ("visual" if names is published else "model.visual")
    assert Generator(model).generate(prompts, max_new_tokens=6, eos_ids=(), **given) == wanted


def test_towers_that_do_not_fit_their_configuration_are_named(vl: tuple[Any, Path], tmp_path: Path) -> None:
    def without(word: str) -> Any:
        return lambda tensors: [tensors.pop(name) for name in list(tensors) if word in name]

    for number, (change, message) in enumerate(
        (
            ({"depth": 4}, r"vision_config\.depth is 4 in config\.json, the blocks that there are 3"),
            ({"depth": 10**4}, r"vision_config\.depth is 10000"),
            ({"out_hidden_size": 32}, r"out_hidden_size is 32 in config\.json, the language model's hidden_size 64"),
            ({"patch_size": 2, "window_size": 16}, r"patch_embed\.proj\.weight has shape \(32, 3, 2, 4, 4\)"),
            ({"intermediate_size": 40}, r"blocks\.0\.mlp\.gate_proj\.weight has shape"),
            ({"hidden_size": 30}, r"hidden_size is 30; accepted: a multiple of 8"),
        )
    ):
        folder = rewrite(vl[1], tmp_path / str(number), config=lambda c, new=change: c["vision_config"].update(new))
        with pytest.raises((CheckpointError, ArgumentError), match=message):
            ours(folder)
    with pytest.raises(CheckpointError, match=r"missing tensors: \S*visual\.blocks\.1\.attn\.qkv\.bias"):
        ours(rewrite(vl[1], tmp_path / "bias", without("blocks.1.attn.qkv.bias")))


def test_a_checkpoint_without_a_tower_is_the_language_model(vl: tuple[Any, Path], tmp_path: Path) -> None:
    def text(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "visual." in name]:
            del tensors[name]

    model = ours(rewrite(vl[1], tmp_path / "text", text))
    assert model.tower is None
    generator = Generator(model)
    assert generator.generate([[5, 6, 7]], max_new_tokens=6, eos_ids=()) == Generator(ours(vl[1])).generate(
        [[5, 6, 7]], max_new_tokens=6, eos_ids=()
    )
    with pytest.raises(ArgumentError, match="pixel_values is given; accepted: None: this model has no vision tower"):
        generator.generate([[5, 6, 7]], pixel_values=torch.zeros(4, 96), image_grid_thw=[[1, 2, 2]])


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])  # each key is changed in 20 ways
def test_every_setting_of_a_tower_reads_as_in_transformers_or_is_refused(every: int) -> None:
    from transformers import Qwen2_5_VLConfig

    whole = json.loads(hf_config().to_json_string(use_diff=False))
    del whole["text_config"], whole["model_type"]
    refused = compared = 0
    for what, config in itertools.islice(changes_of(whole), None, None, every):
        try:
            found = VisionConfig.from_hf(config)
        except ArgumentError:  # whatever else is raised fails here
            refused += 1
            continue
        try:
            theirs = Qwen2_5_VLConfig(**copy.deepcopy(config)).to_json_string(use_diff=False)
        except Exception:  # of any kind: what transformers raises is not what is tested
            continue
        assert found == VisionConfig.from_hf(json.loads(theirs)), what
        compared += 1
    assert refused > 100 and compared > 100, (refused, compared)
