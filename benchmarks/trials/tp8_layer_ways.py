"""Try launches of DeepSeek-V3's layer of one rank of eight: ``python benchmarks/trials/tp8_layer_ways.py``, on a GPU.

The chain of ``benchmarks/tp8_layer.py``, captured once a way and replayed by turns, all in one process: as it is; with
norms that write rows, not codes; with the latents' norms on one stream, and in one launch; with absorbed products whose
weight is read before the wait; and the last two together. What each is predicted to gain: ``notes/tp8_layer.md``.
``apart``: how far outputs are from those of the first way, 0: the same bits.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import tp8_layer as chain
from rows import Rows, arguments, finish
from trials.tp8_layer_kernels import mqa, pair

from fastlayers.attention.mla.layer import MLAAttention
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers_server.known_models import KNOWN

WAYS = ("as it is", "norms write rows", "one stream", "norms in one launch", "products", "both")
# Ways that change the order of sums, and how far they may be apart in a norm over all values.
NEAR = {"products": 0.01, "both": 0.01}


@contextmanager
def changed(stack: Any, way: str) -> Iterator[None]:
    """Have the layers go that way."""
    with ExitStack() as held:
        if way == "norms write rows":
            held.enter_context(mock.patch.object(RMSNorm, "coded", lambda *given: None))
        if way == "one stream":
            for layer in stack.layers:
                held.enter_context(mock.patch.object(layer.self_attn, "alt_stream", None))
        if way in ("norms in one launch", "both"):
            held.enter_context(mock.patch.object(MLAAttention, "_both_norms", pair))
        if way in ("products", "both"):
            held.enter_context(mock.patch.object(MLAAttention, "_mqa", mqa))
        yield


def turns(stack: Any, names: list[str], count: int, replays: int) -> dict[str, list[float]]:
    """Return the microseconds a layer of each captured chain, by turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(count + 1):
        for name in names:
            if stack.cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                stack.graphs.replay(name)
                events[0].record()
                for _ in range(replays):
                    stack.graphs.replay(name)
                events[1].record()
                stack.wait()
                took = events[0].elapsed_time(events[1]) * 1e3
            else:
                begin = time.perf_counter()
                for _ in range(replays):
                    stack.graphs.replay(name)
                took = 1e6 * (time.perf_counter() - begin)
            if turn:
                found[name].append(took / replays / len(stack.layers))
    return found


@torch.inference_mode()
def main() -> None:
    """Run all of it."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, bad = Rows(options), list[Any]()
    config = dict(KNOWN["deepseek-ai/DeepSeek-V3"]) | (chain.SMALL if options.small else chain.RANK)
    sizes = chain.Sizes(2, (1, 3), 128, 96, 2) if options.small else chain.Sizes(16, (1, 64, 128), 4096, 4096, 10)
    stack = chain.Stack(config, sizes, options.device, False)
    for batch in sizes.batches:
        if rows.late(batch=batch):
            break
        call = stack.through(stack.decoding(range(batch)))
        outputs: dict[str, list[torch.Tensor]] = {}
        for way in WAYS:
            with changed(stack, way):
                call()
                stack.wait()
                made = chain._tensors(stack.graphs.capture(f"{way} {batch}", call))
                stack.graphs.replay(f"{way} {batch}")
                stack.wait()
                outputs[way] = [each.clone() for each in made]
        found = turns(stack, [f"{way} {batch}" for way in WAYS], 2 if options.small else options.turns, sizes.replays)
        for way in WAYS:
            first, own = (torch.cat([each.float().flatten() for each in outputs[w]]) for w in (WAYS[0], way))
            apart = float((own - first).norm() / first.norm())
            low, us, high = statistics.quantiles(found[f"{way} {batch}"], n=4)
            row = {
                "way": way, "batch": batch, "us": round(us, 2), "quartiles_us": [round(low, 2), round(high, 2)],
                "apart": apart,
            }  # fmt: skip
            rows.put(row)
            bad += [row] * (not apart <= NEAR.get(way, 0.0))
    finish(bad)


if __name__ == "__main__":
    main()
