"""Time every backend of a layer on its real-model cases: ``python benchmarks/layers.py [LAYER ...] [--out FILE]``.

Each case is checked against the reference first. On a GPU a call is captured in a CUDA graph and replayed over a
flushed L2 cache, backends interleaved; the row gives the median and the spread of the runs, and both floors of the
layer's cost model. One JSON line a row; the first line describes the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastlayers as fl
from fastlayers.device import Device, as_device
from fastlayers.errors import NoBackendError
from fastlayers.registry import LAYERS, registry
from fastlayers.testing.parity import ParityError, check_parity
from fastlayers.testing.spec import Case, LayerSpec, spec_of


def describe_run() -> dict[str, Any]:
    """Return what the numbers depend on: command, commit, versions, device."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = as_device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "command": "python " + " ".join(sys.argv), "commit": commit, "torch": torch.__version__,
        "fastlayers": fl.__version__, "device": str(device), "threads": torch.get_num_threads(),
    }  # fmt: skip


def graphed(spec: LayerSpec, impl: Any, case: Case) -> Callable[[], None]:
    """Return a function that replays one captured call."""
    inputs = spec.make_inputs(case, torch.device("cuda"), 0)
    context = spec.prepare(impl, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            spec.run(impl, inputs, context)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = spec.run(impl, inputs, context)

    def replay(keep: Any = (inputs, context, outputs)) -> None:
        """Replay; what the graph reads and writes lives as long as this function."""
        graph.replay()

    return replay


def time_cuda(replay: Callable[[], None], flush: torch.Tensor) -> float:
    """Return the microseconds of one replay after the L2 cache was overwritten."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def time_cpu(call: Callable[[], Any]) -> float:
    """Return the microseconds of one call."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def rows_of(layer: str, case: Case, device: Device, repeats: int) -> list[dict[str, Any]]:
    """Check and time every automatic backend of one case, interleaved."""
    spec = spec_of(layer)
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    for backend in registry(layer).ranked:
        if device.type not in backend.auto_on + backend.last_resort_on:
            continue
        try:
            errors[backend.name] = max(check_parity(layer, backend, case, device.type).values(), default=0.0)
        except NoBackendError:
            continue
        except ParityError as error:
            print(f"{layer}/{backend.name}/{case.name}: {error}", file=sys.stderr)
            continue
        impl = backend.load()(case.cfg)
        if device.type == "cuda":
            calls[backend.name] = graphed(spec, impl, case)
        else:
            inputs = spec.make_inputs(case, torch.device("cpu"), 0)
            context = spec.prepare(impl, inputs)
            calls[backend.name] = lambda i=impl, x=inputs, c=context: spec.run(i, x, c)
    times: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if device.type == "cuda" else torch.empty(0)
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(time_cuda(call, flush) if device.type == "cuda" else time_cpu(call))
    arithmetic, memory = spec.cost(case).floors(device.bandwidth, device.flops)
    return [
        {
            "layer": layer, "case": case.name, "backend": name, "us": round(statistics.median(found), 2),
            "spread_us": round(max(found) - min(found), 2), "arithmetic_floor_us": round(arithmetic * 1e6, 3),
            "memory_floor_us": round(memory * 1e6, 3), "error": errors[name],
        }
        for name, found in times.items()
    ]  # fmt: skip


@torch.inference_mode()
def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="the small cases too")
    options = parser.parse_args()
    device = as_device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [describe_run()]
    print(json.dumps(lines[0]))
    for layer in options.layers:
        for case in spec_of(layer).cases:
            if not case.small or options.small:
                for row in rows_of(layer, case, device, options.repeats):
                    lines.append(row)
                    print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
