"""FP8 down projections behind an activation that quantises: ``python benchmarks/gated.py [--out FILE]``.

For widths of real models: microseconds of the activation and the projection as two launches that meet in bf16, and with
the activation writing FP8 (``FP8BlockLinear.gated``); ``equal``: the same bits. Exits with 1 where they are not.
"""

from __future__ import annotations

import argparse

import torch
from rows import Rows, arguments, finish

import fastlayers as fl
from fastlayers.errors import FastlayersError
from fastlayers.tuning.clock import clock_for

SIZES = ((2048, 7168), (18432, 7168), (12288, 4096))
TOKENS = (1, 2, 4, 16, 64, 256, 2048)


@torch.inference_mode()
def measure(rows: Rows, options: argparse.Namespace, k: int, n: int, backend: str) -> list[dict[str, object]]:
    """Put the rows of one size and backend; return those whose bits differ."""
    device = options.device
    bad: list[dict[str, object]] = []
    clock = clock_for(torch.device(device))
    try:
        down = fl.FP8BlockLinear(k, n, device=device, backend=backend)
    except FastlayersError as error:
        rows.put({"k": k, "n": n, "backend": backend, "refused": str(error)[:200]})
        return []
    down.weight.view(torch.uint8).copy_(torch.randint(0, 120, down.weight.shape, dtype=torch.uint8))
    act = fl.SiluAndMul(k, device=device, dtype=torch.bfloat16)
    quantised = down.quantised_activation(act)
    for tokens in TOKENS[: 3 if options.small else None]:
        about = {"k": k, "n": n, "backend": backend, "tokens": tokens}
        if rows.late(**about):
            break
        x = torch.randn(tokens, 2 * k, device=device, dtype=torch.bfloat16)
        calls = {"two": lambda x=x: down(act(x)), "one": lambda x=x: down.gated(x, act, quantised)}
        equal = torch.equal(calls["two"](), calls["one"]())
        times = clock.measure({name: clock.prepare(call) for name, call in calls.items()}, 15)
        row = about | {"equal": equal, **{f"{name}_us": round(timed.us, 2) for name, timed in times.items()}}
        rows.put(row)
        bad += [] if equal else [row]
    return bad


def main() -> None:
    """Run what was asked for."""
    options = arguments(__doc__, 40.0).parse_args()
    torch.manual_seed(0)
    rows, bad = Rows(options), []
    for k, n in ((256, 256),) if options.small else SIZES:
        for backend in ("torch",) if options.device == "cpu" else ("triton", "deep_gemm"):
            bad += measure(rows, options, k, n, backend)
    finish(bad)


if __name__ == "__main__":
    main()
