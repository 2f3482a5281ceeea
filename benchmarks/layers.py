"""Time every backend of a layer on its real-model cases: ``python benchmarks/layers.py [LAYER ...] [--out FILE]``.

Each case is checked against the reference first. How calls are timed: :mod:`fastlayers.tuning.clock`. One JSON line
a row; the first line describes the run. ``fastlayers bench layer`` does the same for any shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from fastlayers.registry import LAYERS
from fastlayers.testing.spec import Case, spec_of
from fastlayers.tuning.bench import describe_run, rows_of
from fastlayers.tuning.clock import clock_for
from fastlayers.tuning.search import Bench


def tokens_of(case: Case) -> int:
    """Return the token count by which a case's ladder is asked."""
    for name in ("num_tokens", "batch"):
        if name in case.shape:
            return int(case.shape[name])
    return sum(case.shape.get("query_lens") or case.shape.get("q_lens") or case.shape.get("tokens") or (1,))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="the small cases too")
    options = parser.parse_args()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, lines = clock_for(place), [describe_run(place)]
    print(json.dumps(lines[0]))
    for layer in options.layers:
        for case in spec_of(layer).cases:
            if not case.small or options.small:
                bench = Bench(layer, case.cfg, place, clock)
                for row in rows_of(bench, case, tokens_of(case), rounds=options.repeats, whole=True):
                    lines.append(row)
                    print(json.dumps(row), flush=True)
                for option, why in bench.failed.items():
                    print(f"{layer}/{option}/{case.name}: {why}", file=sys.stderr)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
