"""Rows of a program: printed and written as they are made, behind a line that describes the run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastlayers.tuning.bench import describe_run


def arguments(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser of what such programs have in common; ``seconds``: after which nothing more begins."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--seconds", type=float, default=seconds, help="after which no other point begins")
    parser.add_argument("--small", action="store_true", help="small sizes, to try things out")
    parser.add_argument("--device", default="cuda", help="cpu: to try things out")
    return parser


def command() -> str:
    """Return what was called, for programs that describe their run themselves."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


class Rows:
    """Prints rows and appends them to a file that begins anew; an early end keeps what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path | None = options.out
        self.end = time.monotonic() + options.seconds
        if self.out is not None:
            self.out.write_text("")
        self.put(describe_run(torch.device(options.device)))

    def put(self, row: dict[str, Any]) -> None:
        """Print and keep one row."""
        print(json.dumps(row), flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def late(self, **what: Any) -> bool:
        """Return whether no time is left, and say what is left out then."""
        if time.monotonic() < self.end:
            return False
        self.put(what | {"left_out": "no time is left"})
        return True


def microseconds(call: Callable[[], Any], device: str, rounds: int = 20) -> float:
    """Return the microseconds of a call, ten of them captured and replayed back to back; 0 on a CPU."""
    if device == "cpu":
        call()
        return 0.0
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(100 * begin.elapsed_time(end) / rounds, 2)


def finish(bad: list[Any]) -> None:
    """End the program with 1 if something was wrong, after saying what."""
    if bad:
        sys.exit(f"wrong: {json.dumps(bad)}")
