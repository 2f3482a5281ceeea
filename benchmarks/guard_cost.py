"""What it costs to ask whether a patched module still is what was patched, and whether a captured step may be replayed.

Microseconds on the host, the least of many short runs: other programs only add to them. For each family one decoder
layer's modules by class: ``guard`` is everything that may have been changed since the patch (with the buffer of packed
linears), ``check`` all that a call asks before our code runs. ``replay`` is what a captured step asks before it is
replayed, with the graph itself and the copies into its inputs left out.

    python benchmarks/guard_cost.py --json benchmarks/results/guard_cost.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from patch_cpu_families import FAMILIES, build

import fastlayers as fl
from fastlayers.patching import decode
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime

# Calls a run, and runs: a run is shorter than a time slice of the scheduler.
CALLS, RUNS = 200, 500


def least(call: Callable[[], object]) -> float:
    """Return microseconds of a call."""
    return round(1e6 * min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS, 2)


def least_of(function: Any, argument: Any) -> float:
    """Return microseconds of ``function(argument)``."""
    return least(lambda: function(argument))


def modules(model: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each class of patched modules in the last layer."""
    seen: set[str] = set()
    for module in model.model.layers[-1].modules():
        name = type(module).__name__.removeprefix("Fast")
        if not hasattr(module, "_fl_guard") or name in seen:
            continue
        seen.add(name)
        weight = next(module.parameters())
        x = torch.zeros(1, weight.shape[-1], dtype=weight.dtype)
        packed: Any = getattr(module, "_fl_packed", None)
        together = packed is not None and packed.weight is not None
        guard: Any = packed.whole if together else module._fl_guard.stands
        check: Any = module._fl_ready if packed is not None else module._fl_usable
        if not guard(module) or int(check(x)) != 1 + together:
            raise SystemExit(f"{name}: the guard does not hold")
        yield {
            "module": name, "packed": len(module._fl_parts()) if together else 0,
            "guard": least_of(guard, module), "check": least_of(check, x),
        }  # fmt: skip


def replay(model: Any) -> float:
    """Return what a captured decode step asks, on a driver whose graphs are plain calls."""
    with ExitStack() as undo:
        driver = decode.attach(model, undo, lambda device: CudaGraphs(runtime=EagerRuntime(), freeze=False), "torch")
        found: list[float] = []
        right = driver._decode

        def asked(cache: Any, inputs: dict[str, Any]) -> torch.Tensor:
            if driver.replays and not found:
                driver._decode = lambda cache, inputs: None  # type: ignore[method-assign,assignment,return-value]
                found.append(least(lambda: driver.call(None, **inputs)))
                driver._decode = asked  # type: ignore[method-assign]
            return right(cache, inputs)

        driver._decode = asked  # type: ignore[method-assign]
        ids = torch.randint(2, 500, (1, 20), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    replays: dict[str, float] = {}
    for family in args.families:
        model = build(family, torch.bfloat16)
        fl.patch(model, strict=True)
        with torch.inference_mode():
            for row in modules(model):
                rows.append({"family": family, **row})
                print(rows[-1], flush=True)
        replays[family] = replay(model)
        print({"family": family, "replay": replays[family]}, flush=True)
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        head = {
            "command": shlex.join(["python", *sys.argv]), "commit": commit.stdout.strip(), "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(), "unit": "us, least",
            "call_of_an_empty_function": least(lambda: None),
        }  # fmt: skip
        args.json.write_text(json.dumps(head | {"replay": replays, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
