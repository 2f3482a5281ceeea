"""Small figures of docs/systems.md that no other program has: ``python benchmarks/systems.py [--out FILE]``.

item 19    a rotation by three axes and the cache's write in one launch, against one launch each, at Qwen2.5-VL-7B's
           sizes; its vision tower (four layers at real width, bf16) against Hugging Face's with sdpa
item 32    a quantisation that writes scales as the product reads them, against one whose scales are transposed then
item 35    NVFP4's quantisation of 256 experts' rows and of one's, against a copy of as many bytes
Microseconds of captured calls back to back, operands warm. Ways that compute the same must, or the program ends with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rows import Rows, arguments, finish, microseconds

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.quant.group_quant.layer import GroupQuant
from fastlayers.quant.nvfp4_quant.layer import NVFP4Quant
from fastlayers.rotary.scaling import RopeScaling
from fastlayers.tuning.bench import copy_of
from fastlayers.weights import slots
from fastlayers_models.blocks import ModelContext
from fastlayers_models.qwen import QwenConfig
from fastlayers_models.vision import VisionConfig, VisionTower

Row = dict[str, Any]
BF16 = torch.bfloat16
TEXT = {
    "vocab_size": 163, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}  # fmt: skip
VISION = {
    "depth": 4, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3],
}  # fmt: skip
SMALL_VISION = VISION | {
    "hidden_size": 128, "intermediate_size": 144, "num_heads": 2, "out_hidden_size": 256, "patch_size": 4,
    "window_size": 32,
}  # fmt: skip


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    wide = wanted.double()
    return float((found.double() - wide).norm() / wide.norm())


def three_axes(tokens: int, device: str) -> Row:
    """Time a rotation by three axes with the cache's write, and both apart."""
    heads, kv_heads, dim, section = 28, 4, 128, (16, 24, 24)
    rotary = fl.RotaryEmbedding(
        dim, max_position=4096, scaling=RopeScaling("default", mrope_section=section), device=device
    )
    fused = RotaryKVWrite(heads, kv_heads, dim, mrope_section=section, device=device)
    write = KVWrite(kv_heads, dim, kv_dtype=BF16, device=device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device, dtype=BF16)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    positions = torch.randint(0, 4096, (3, tokens), device=device)
    loc = torch.randperm(2 * tokens, device=device)[:tokens]
    one, other = (
        LayerCache(*torch.zeros(2, -(-tokens // 32), 64, kv_heads, dim, device=device, dtype=BF16)) for _ in "ab"
    )

    def together() -> torch.Tensor:
        turned: torch.Tensor = fused(q, k, v, rotary.cos, rotary.sin, positions, one, loc)
        return turned

    def apart() -> torch.Tensor:
        turned, key = rotary(q, k, positions)
        write(key, v, other.keys, other.values, loc)
        found: torch.Tensor = turned
        return found

    far = max(distance(together(), apart()), distance(one.keys, other.keys))
    times = {"one_launch_us": microseconds(together, device), "apart_us": microseconds(apart, device)}
    return {"item": 19, "what": "three axes", "tokens": tokens, **times, "apart": far, "right": far < 0.005}


def scales(tokens: int, device: str) -> Row:
    """Time scales that are written as the product reads them, and scales that are copied there."""
    straight, first = (GroupQuant(scale_layout=layout, device=device) for layout in ("col", "row"))
    x = torch.randn(tokens, 7168, device=device, dtype=BF16)

    def copied() -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = first(x)
        return codes, scale.t().contiguous().t()

    far = max(distance(a, b) for a, b in zip(straight(x), copied(), strict=True))
    times = {
        "as_read_us": microseconds(lambda: straight(x), device), "transposed_us": microseconds(copied, device)
    }  # fmt: skip
    return {"item": 32, "what": "scales", "tokens": tokens, **times, "apart": far, "right": far < 1e-5}


def nvfp4(counts: tuple[int, ...], width: int, device: str) -> Row:
    """Time the quantisation of experts' rows, and a copy of as many bytes; compared with torch's.

    The reference puts scales in their places one by one, which takes a GPU a minute at these sizes.
    """
    quantise, other_way = (NVFP4Quant(len(counts), "swizzled", device=device, backend=b) for b in ("auto", "torch"))
    x = torch.randn(sum(counts), width, device=device, dtype=BF16)
    offsets = torch.tensor((0, *counts), device=device).cumsum(0).int()
    scale = torch.full((len(counts),), 300.0, device=device)
    other = float((quantise(x, scale, offsets)[0] != other_way(x, scale, offsets)[0]).float().mean())
    moved = x.numel() * 2 + x.numel() // 2 + x.numel() // 16
    return {
        "item": 35, "what": "nvfp4", "experts": len(counts), "tokens": sum(counts), "backend": quantise.choice.name,
        "us": microseconds(lambda: quantise(x, scale, offsets), device),
        "copy_us": microseconds(copy_of(moved, torch.device(device)), device), "other_codes": other,
        "right": other < 1e-3,
    }  # fmt: skip


def waited(call: Callable[[], Any], device: str, times: int = 10) -> float:
    """Return the median milliseconds of a call that is waited for."""
    took = []
    for _ in range(times + 3):
        begin = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(took[3:]), 3)


def towers(device: str, small: bool) -> tuple[Any, Any]:
    """Return our vision tower and Hugging Face's, of the same random weights."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    ids = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=SMALL_VISION if small else VISION, **ids)
    written = json.loads(config.to_json_string(use_diff=False))
    config.vision_config._attn_implementation = "sdpa"
    stock = Qwen2_5_VisionTransformerPretrainedModel(config.vision_config).eval().to(device, BF16)
    context = ModelContext(QwenConfig.from_hf(written), None, device, BF16, 16, None, "auto")
    tower = VisionTower(context, VisionConfig.from_hf(written), "visual")
    tensors = stock.state_dict()
    for name, slot in slots(tower):
        slot.fill(name, tensors[name])
    return tower, stock


def images(tower: Any, stock: Any, grids: list[list[int]], device: str) -> Row:
    """Time both towers on some images, ``[frames, height, width]`` in patches."""
    patch = tower.config.patch_size
    values = torch.randn(sum(t * h * w for t, h, w in grids), 6 * patch**2, device=device)
    where = torch.tensor(grids, device=device)

    def theirs() -> torch.Tensor:
        found: torch.Tensor = stock(values.to(BF16), grid_thw=where).pooler_output
        return found

    far = distance(tower(values, grids), theirs())
    times = {"ours_ms": waited(lambda: tower(values, grids), device), "stock_ms": waited(theirs, device)}
    return {"item": 19, "what": "vision tower", "images": grids, **times, "apart": far, "right": far < 0.03}


@torch.inference_mode()
def main() -> None:
    """Run what was asked for."""
    options: argparse.Namespace = arguments(__doc__, 40.0).parse_args()
    rows, device, small = Rows(options), options.device, options.small
    torch.manual_seed(0)
    calls: list[Callable[[], Row]] = []
    for tokens in (1, 5) if small else (1, 16, 64, 1024):
        calls.append(lambda tokens=tokens: three_axes(tokens, device))  # type: ignore[misc]
    for tokens in (3,) if small else (64, 2048):
        calls.append(lambda tokens=tokens: scales(tokens, device))  # type: ignore[misc]
    for counts in ((2, 0, 1),) if small else ((16,) * 256, (4096,)):
        calls.append(lambda counts=counts: nvfp4(counts, 64 if small else 7168, device))  # type: ignore[misc]
    grids = [[[1, 4, 4]]] if small else [[[1, 74, 74]], [[1, 36, 36]] * 4]
    made = towers(device, small)
    for each in grids:
        calls.append(lambda each=each: images(*made, each, device))  # type: ignore[misc]
    bad = []
    for index, call in enumerate(calls):
        if rows.late(point=index):
            break
        row = call()
        rows.put(row)
        bad += [] if row["right"] else [row]
    finish(bad)


if __name__ == "__main__":
    main()
