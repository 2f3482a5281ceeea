"""FP8 products behind an activation or a norm that quantises: ``python benchmarks/gated.py [--out FILE]``.

For widths of real models: microseconds of the activation and the projection as two launches that meet in bf16, and with
the activation writing FP8 (``FP8BlockLinear.gated``); likewise of norms, with a residual where models have one
(``RMSNorm.coded``; where the product quantises by itself there is no row). ``equal``: the same bits. Exits with 1 where
they are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rows import Rows, arguments, finish

import fastlayers as fl
from fastlayers import env
from fastlayers.errors import FastlayersError
from fastlayers.layer import trust
from fastlayers.quant.coded_rows import layout_of_codes
from fastlayers.tuning.clock import clock_for

SIZES = ((2048, 7168), (18432, 7168), (12288, 4096))
# Behind norms: features in, out, and whether the norm adds a residual first.
NORMED = ((7168, 2112, True), (1536, 3072, False), (4096, 6144, True))
TOKENS = (1, 2, 4, 16, 64, 256, 2048)


@torch.inference_mode()
def measure(rows: Rows, options: argparse.Namespace, k: int, n: int, backend: str) -> list[dict[str, object]]:
    """Put the rows of one size and backend; return those whose bits differ."""
    device = options.device
    bad: list[dict[str, object]] = []
    down = projection(rows, options, k, n, backend)
    if down is None:
        return []
    act = fl.SiluAndMul(k, device=device, dtype=torch.bfloat16)
    quantised = down.quantised_activation(act)
    for tokens in TOKENS[: 3 if options.small else None]:
        about = {"k": k, "n": n, "backend": backend, "tokens": tokens}
        if rows.late(**about):
            break
        x = torch.randn(tokens, 2 * k, device=device, dtype=torch.bfloat16)
        calls = {"two": lambda x=x: down(act(x)), "one": lambda x=x: down.gated(x, act, quantised)}
        bad += compared(rows, options, about, calls)
    return bad


def projection(rows: Rows, options: argparse.Namespace, k: int, n: int, backend: str) -> fl.FP8BlockLinear | None:
    """Return a product with random weights; ``None``, and a row, where its backend refuses."""
    try:
        found = fl.FP8BlockLinear(k, n, device=options.device, backend=backend)
    except FastlayersError as error:
        rows.put({"k": k, "n": n, "backend": backend, "refused": str(error)[:200]})
        return None
    found.weight.view(torch.uint8).copy_(torch.randint(0, 120, found.weight.shape, dtype=torch.uint8))
    return found


def compared(
    rows: Rows, options: argparse.Namespace, about: dict[str, object], calls: Mapping[str, Callable[..., Any]]
) -> list[dict[str, object]]:
    """Put a row of ``calls``, "one" and "two"; return it where their bits differ."""
    clock = clock_for(torch.device(options.device))
    equal = torch.equal(calls["two"](), calls["one"]())
    times = clock.measure({name: clock.prepare(call) for name, call in calls.items()}, 1 if options.small else 15)
    row = about | {"equal": equal, **{f"{name}_us": round(timed.us, 2) for name, timed in times.items()}}
    rows.put(row)
    return [] if equal else [row]


@torch.inference_mode()
def measure_norm(
    rows: Rows, options: argparse.Namespace, k: int, n: int, add: bool, backend: str
) -> list[dict[str, object]]:
    """Put the rows of one size and backend behind a norm; return those whose bits differ."""
    bad: list[dict[str, object]] = []
    product = projection(rows, options, k, n, backend)
    if product is None:
        return []
    norm = fl.RMSNorm(k, device=options.device, dtype=torch.bfloat16, backend="triton")
    trust(product, norm)
    for tokens in TOKENS[: 3 if options.small else None]:
        about = {"norm": True, "k": k, "n": n, "backend": backend, "tokens": tokens}
        layout = layout_of_codes(product, tokens)
        if layout is None:
            continue
        if rows.late(**about):
            break
        x = torch.randn(tokens, k, device=options.device, dtype=torch.bfloat16)
        residual = torch.randn_like(x) if add else None

        def two(x: torch.Tensor = x, residual: torch.Tensor | None = residual) -> torch.Tensor:
            y: torch.Tensor = product(norm(x) if residual is None else norm(x, residual)[0])
            return y

        def one(x: torch.Tensor = x, residual: torch.Tensor | None = residual, layout: str = layout) -> torch.Tensor:
            y: torch.Tensor = product(norm.coded(x, residual, layout)[0])
            return y

        bad += compared(rows, options, about, {"two": two, "one": one})
    return bad


def main() -> None:
    """Run what was asked for."""
    options = arguments(__doc__, 40.0).parse_args()
    torch.manual_seed(0)
    rows, bad = Rows(options), []
    on_cpu = ("triton",) if env.triton_interpret() else ("torch",)
    for backend in on_cpu if options.device == "cpu" else ("triton", "deep_gemm"):
        for k, n in ((256, 256),) if options.small else SIZES:
            bad += measure(rows, options, k, n, backend)
        for k, n, add in ((256, 256, True),) if options.small else NORMED:
            bad += measure_norm(rows, options, k, n, add, backend)
    finish(bad)


if __name__ == "__main__":
    main()
