"""Ways of MLA over new tokens and prefixes: ``python benchmarks/mla_paths.py [--out FILE]``.

New tokens × prefix, with 16 and 128 heads: microseconds of a layer by absorbed latents (``mqa``) and by keys and values
that are expanded (``mha_one_shot``), captured and warm, and how far their results are apart. Then the chunked way and
the absorbed one against one shot, over 40,000 cached tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from rows import Rows, arguments

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.tuning.clock import Clock, clock_for

WAYS = ("mqa", "mha_one_shot")
HIDDEN = 1024


def layer_of(heads: int, chunk: int, device: str) -> fl.MLAAttention:
    """Return a layer with random weights."""
    rotary = fl.RotaryEmbedding(64, max_position=70000, interleaved_in=True, device=device)
    layer = fl.MLAAttention(
        HIDDEN, heads, q_lora_rank=512, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        rotary=rotary, page_size=64, dtype=torch.bfloat16, device=device,
        thresholds=MLAThresholds(chunk=chunk, few=1),
    )  # fmt: skip
    for parameter in layer.parameters():
        parameter.normal_(0, 0.03) if parameter.dim() > 1 else parameter.fill_(1.0)
    fl.finalize(layer)
    return layer


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative distance."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@torch.inference_mode()
def measure(rows: Rows, options: argparse.Namespace, heads: int, clock: Clock) -> bool:
    """Put the rows of one number of heads; return whether all were made."""
    device, scale = options.device, 64 if options.small else 1
    layer, pages = layer_of(heads, 16384 // scale, device), 1100 // scale
    cache = fl.kv_cache_spec(layer, page_size=64).allocate(num_pages=pages, device=device)[0]
    cache.keys.normal_()
    state, table = AttentionState(1, 4096 // scale, pages - 1, 64, device), [list(range(1, pages))]

    def inputs(new: int, prefix: int) -> tuple[torch.Tensor, fl.AttentionMeta]:
        x = torch.randn(new, HIDDEN, device=device, dtype=torch.bfloat16)
        return x, state.plan(AttentionBatch((new,), (prefix,), table))

    def by(way: str, meta: fl.AttentionMeta) -> fl.AttentionMeta:
        step = replace(meta, path=way)
        step.vouch()
        return step

    for prefix in (8192 // scale, 32768 // scale, 2048 // scale):
        for new in (64 // scale, 256 // scale, 1024 // scale):
            about = {"heads": heads, "prefix": prefix, "new": new}
            if rows.late(**about):
                return False
            x, meta = inputs(new, prefix)
            steps = {way: by(way, meta) for way in WAYS}
            found = {way: layer(x, step, cache) for way, step in steps.items()}
            calls = {way: clock.prepare(partial(layer, x, step, cache)) for way, step in steps.items()}
            times = {f"{way}_us": round(timed.us, 1) for way, timed in clock.measure(calls, 7).items()}
            rows.put(about | times | {"apart": apart(found["mqa"], found["mha_one_shot"])})
    x, meta = inputs(256 // scale, 40000 // scale)
    one, chunked, absorbed = (layer(x, by(way, meta), cache) for way in ("mha_one_shot", "mha_chunked", "mqa"))
    rows.put({
        "heads": heads, "prefix": 40000 // scale, "new": 256 // scale, "chunked_against_one_shot": apart(chunked, one),
        "mqa_against_one_shot": apart(absorbed, one),
    })  # fmt: skip
    return True


def main() -> None:
    """Run what was asked for."""
    options = arguments(__doc__, 75.0).parse_args()
    torch.manual_seed(0)
    rows, clock = Rows(options), clock_for(torch.device(options.device), cold=False)
    for heads in (2,) if options.small else (16, 128):
        if not measure(rows, options, heads, clock):
            return


if __name__ == "__main__":
    main()
