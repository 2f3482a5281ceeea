"""Compare the ways of drafting on the shipped DeepSeek: ``python benchmarks/drafts.py [--out FILE]``.

The server's engine in fp32, captured on a GPU, ticked by hand: six prompts of the kind that the model was trained on,
64 greedy tokens each, and each prompt behind itself and its answer, where lookup finds something. Without drafts, then
three drafts a tick: by lookup, by the model's NextN layer (a chain, a tree, by rejection), and by another model (here
the same). One JSON line a way and set of prompts: ticks, how many times fewer, drafts right by position, and steps that
ran uncaptured by reason. Exits with 1 where a way says other tokens. ``--seconds``: no way begins later.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rows import command

from fastlayers.device import as_device
from fastlayers.tuning.provenance import provenance
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import FromEngine, Sampling, StepOut, Submit, pack_ids
from fastlayers_server.engine.speculation import Speculation
from fastlayers_server.engine.startup import build

K, NEW = 3, 64
# "<|begin|><|user|>Tom is in ..., Mary is in ... Where is ...?<|assistant|>", in the shipped tokenizer's ids.
PROMPTS = [
    [0, 3, 56, 316, 380, 263, *middle, 18, 4]
    for middle in (
        (384, 378, 225, 43, 497, 16, 225, 42, 472, 268, 264, 496, 276, 316),
        (384, 378, 225, 37, 445, 16, 225, 57, 481, 268, 264, 493, 276, 272, 398),
        (384, 378, 225, 51, 447, 16, 225, 42, 472, 268, 264, 489, 276, 83, 277),
        (384, 378, 225, 41, 419, 16, 225, 55, 311, 268, 264, 483, 301, 311, 84),
        (384, 378, 225, 41, 419, 16, 225, 46, 342, 268, 264, 476, 225, 290, 93),
        (384, 378, 225, 40, 285, 16, 225, 57, 481, 268, 264, 489, 225, 290, 93),
    )
]
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "lookup": {"speculative_algorithm": "ngram"},
    "mtp": {"speculative_algorithm": "mtp"},
    "mtp, tree": {"speculative_algorithm": "mtp", "speculative_topk": 3},
    "mtp, rejection": {"speculative_algorithm": "mtp", "speculative_verify": "rejection"},
    "draft": {"speculative_algorithm": "draft", "speculative_draft_model": "tiny"},
    "draft, tree": {"speculative_algorithm": "draft", "speculative_draft_model": "tiny", "speculative_topk": 2},
}


def always(drafts: Speculation) -> None:
    """Have it draft in every tick."""

    def wanted(running: int) -> bool:
        drafts.k = K
        return running > 0

    drafts.wanted = wanted  # type: ignore[method-assign]


def serve(parts: Engine, rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return what is said to each, and the ticks it took."""
    texts: dict[int, list[int]] = {rid: [] for rid in range(1, 1 + len(rows))}

    def deliver(message: FromEngine) -> None:
        for output in message.outputs if isinstance(message, StepOut) else ():
            assert output.finish in ("", "length"), output
            texts[output.rid].extend(output.ids)

    engine = Engine(parts.scheduler, parts.executor, deliver, overlap=parts.overlap, drafts=parts.drafts)
    parts.scheduler.cache.flush()
    before = parts.scheduler.ticks
    for rid, row in enumerate(rows, 1):
        engine.post(Submit(rid, pack_ids(row), Sampling(temperature=0.0), NEW, ignore_eos=True))
    engine.tick()
    while not parts.scheduler.idle or engine._pending is not None:
        engine.tick()
    return list(texts.values()), parts.scheduler.ticks - before


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[str] = []

    def say(row: dict[str, Any]) -> None:
        rows.append(json.dumps(row))
        print(rows[-1], flush=True)
        if arguments.out:
            Path(arguments.out).write_text("\n".join(rows) + "\n")

    run = {"command": command(), "device": str(as_device(torch.device(device))), "torch": torch.__version__}
    say({"run": run | provenance()})
    begin, same = time.monotonic(), True
    wanted: list[tuple[list[list[int]], int]] = []
    prompts: list[list[list[int]]] = [PROMPTS]
    for name in ["none", *(way for way in arguments.ways if way != "none")]:
        if time.monotonic() - begin > arguments.seconds:
            say({"way": name, "left_out": "no time is left"})
            continue
        config = EngineConfig(
            model="tiny", device=device, dtype="fp32", max_model_len=512, max_running_requests=8, no_freeze_gc=True,
            max_num_batched_tokens=1024, speculative_max_k=K, **WAYS[name],
        )  # fmt: skip
        parts = build(config, lambda phase: None)
        if parts.drafts is not None:
            always(parts.drafts)
        else:
            wanted.append(serve(parts, PROMPTS))
            prompts.append([row + text + row for row, text in zip(PROMPTS, wanted[0][0], strict=True)])
            wanted.append(serve(parts, prompts[1]))
        for place, (texts, ticks) in enumerate(wanted):
            told, took = serve(parts, prompts[place])
            equal = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(told, texts, strict=True)]
            same = same and told == texts
            say({
                "way": name, "prompts": ("chats", "repeated")[place], "equal_tokens": equal, "of": NEW, "ticks": took,
                "ticks_without": ticks, "fewer": round(ticks / took, 3), "overlap": parts.overlap,
            })  # fmt: skip
        counters = parts.scheduler.metrics.counters
        said = {name: dict(counters[name]) for name in ("spec_drafts_total", "spec_accepted_tokens_total")}
        say({"way": name, **said, "uncaptured": parts.executor.graph_counts()[1]})  # type: ignore[attr-defined]
    if not same:
        sys.exit("some way said other tokens")


if __name__ == "__main__":
    main()
