"""Ways of MLA over new tokens and prefixes: ``python benchmarks/mla_paths.py [--out FILE]``.

New tokens × prefix, with 16 and 128 heads: microseconds of a layer by absorbed latents (``mqa``) and by keys and values
that are expanded (``mha_one_shot``), captured and warm, and how far their results are apart; ``chosen`` is what the
layer would take. Then both and the chunked way, of two chunks, behind 32,768 cached tokens on pages of 1, 16 and 64.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rows import Rows, arguments

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla.prefix_chunks import MLAThresholds, select_path
from fastlayers.tuning.clock import Clock, clock_for

WAYS = ("mqa", "mha_one_shot")
HIDDEN = 1024
MOST_APART = 0.02


def layer_of(heads: int, chunk: int, device: str, page: int = 64) -> fl.MLAAttention:
    """Return a layer with random weights, the same for each size of pages."""
    torch.manual_seed(heads)
    rotary = fl.RotaryEmbedding(64, max_position=70000, interleaved_in=True, device=device)
    layer = fl.MLAAttention(
        HIDDEN, heads, q_lora_rank=512, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        rotary=rotary, page_size=page, dtype=torch.bfloat16, device=device,
        thresholds=MLAThresholds(chunk=chunk, few=1),
    )  # fmt: skip
    for parameter in layer.parameters():
        parameter.normal_(0, 0.03) if parameter.dim() > 1 else parameter.fill_(1.0)
    fl.finalize(layer)
    return layer


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative distance."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def checked(row: dict[str, Any], **distances: float) -> dict[str, Any]:
    """Return the row with distances; ends the program where they are more than roundings to bf16."""
    if max(distances.values()) > MOST_APART:
        sys.exit(f"wrong: {row | distances}")
    return row | distances


def by(way: str, meta: fl.AttentionMeta) -> fl.AttentionMeta:
    """Return the step as it is by one of the ways."""
    step = replace(meta, path=way)
    step.vouch()
    return step


def timed(
    layer: fl.MLAAttention,
    x: torch.Tensor,
    meta: fl.AttentionMeta,
    cache: LayerCache,
    ways: tuple[str, ...],
    clock: Clock,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return what each way computes, and its microseconds."""
    steps = {way: by(way, meta) for way in ways}
    found = {way: layer(x, step, cache) for way, step in steps.items()}
    calls = {way: clock.prepare(partial(layer, x, step, cache)) for way, step in steps.items()}
    return found, {f"{way}_us": round(timed.us, 1) for way, timed in clock.measure(calls, 7).items()}


@torch.inference_mode()
def pages(rows: Rows, options: argparse.Namespace, heads: int, clock: Clock) -> bool:
    """Put a row for each size of pages; the cached rows lie in the same places."""
    device, scale = options.device, 64 if options.small else 1
    prefix, new = 32768 // scale, 512 // scale
    held = (prefix + new + 127) // 64 * 64 + 64
    x = torch.randn(new, HIDDEN, device=device, dtype=torch.bfloat16)
    latents, first = None, None
    for page in (64, 16, 1):
        about = {"heads": heads, "prefix": prefix, "new": new, "page": page}
        if rows.late(**about):
            return False
        layer, begin = layer_of(heads, 16384 // scale, device, page), 64 // page  # page 0 belongs to nobody
        cache = fl.kv_cache_spec(layer, page_size=page).allocate(num_pages=held // page, device=device)[0]
        latents = torch.randn_like(cache.keys) if latents is None else latents
        cache.keys.copy_(latents.view_as(cache.keys))
        state, table = AttentionState(1, new, held // page - begin, page, device), [list(range(begin, held // page))]
        meta = state.plan(AttentionBatch((new,), (prefix,), table))
        found, times = timed(layer, x, meta, cache, ("mha_one_shot", "mha_chunked", "mqa"), clock)
        one = found["mha_one_shot"]
        first = one if first is None else first
        rows.put(checked(
            about | times, chunked_against_one_shot=apart(found["mha_chunked"], one),
            mqa_against_one_shot=apart(found["mqa"], one), against_pages_of_64=apart(one, first),
        ))  # fmt: skip
    return True


@torch.inference_mode()
def measure(rows: Rows, options: argparse.Namespace, heads: int, clock: Clock) -> bool:
    """Put the rows of one number of heads; return whether all were made."""
    device, scale = options.device, 64 if options.small else 1
    layer, held = layer_of(heads, 16384 // scale, device), 34816 // scale // 64 + 2
    cache = fl.kv_cache_spec(layer, page_size=64).allocate(num_pages=held, device=device)[0]
    cache.keys.normal_()
    state, table = AttentionState(1, 4096 // scale, held - 1, 64, device), [list(range(1, held))]
    for prefix in (8192 // scale, 32768 // scale, 2048 // scale):
        for new in (64 // scale, 256 // scale, 1024 // scale):
            about: dict[str, Any] = {"heads": heads, "prefix": prefix, "new": new}
            if rows.late(**about):
                return False
            x = torch.randn(new, HIDDEN, device=device, dtype=torch.bfloat16)
            batch = AttentionBatch((new,), (prefix,), table)
            found, times = timed(layer, x, state.plan(batch), cache, WAYS, clock)
            about |= {"chosen": select_path(batch, MLAThresholds(), heads)}
            rows.put(checked(about | times, apart=apart(found["mqa"], found["mha_one_shot"])))
    return True


def main() -> None:
    """Run what was asked for."""
    options = arguments(__doc__, 55.0).parse_args()
    rows, clock = Rows(options), clock_for(torch.device(options.device), cold=False)
    every = (2,) if options.small else (128, 16)
    for heads in every:
        if not measure(rows, options, heads, clock):
            return
    pages(rows, options, every[0], clock)


if __name__ == "__main__":
    main()
