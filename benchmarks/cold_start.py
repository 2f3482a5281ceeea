"""Time a first use with empty caches: ``python benchmarks/cold_start.py MODEL [--prompts 40] [--out FILE]``.

All kernel caches are an empty directory: that of ``FASTLAYERS_CACHE_DIR``, if it is one, and whoever runs next with it
finds them filled, or else a new one. Seconds from this program's start to the first token of a prompt of 512 tokens
(random weights at real dimensions, made on the GPU), part by part, then of ``fl.warmup`` with its defaults (the model's
context, 256 requests), then prompts of random lengths and numbers: how many kernels were compiled or loaded for any of
them (wanted: none), and their longest first token. One JSON line a row; the first describes the run.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

CACHES = "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TRTLLM_DG_CACHE_DIR"
GIVEN = Path(os.environ.get("FASTLAYERS_CACHE_DIR") or tempfile.mkdtemp())
EMPTY = tempfile.mkdtemp() if GIVEN.is_dir() and any(GIVEN.iterdir()) else str(GIVEN)
if __name__ == "__main__":  # before anything that has a cache is imported
    for name in CACHES:
        os.environ.pop(name, None)
    os.environ["FASTLAYERS_CACHE_DIR"] = EMPTY

PARTS: dict[str, float] = {}


def said(part: str) -> None:
    """Take the seconds since the last part, or since the program's start, for this one; the device's work included."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.synchronize()
    PARTS[part] = time.perf_counter() - BEGIN - sum(PARTS.values())


import torch  # noqa: E402

said("torch imported")
from generate import MODELS, prompts_of, randomize  # noqa: E402

import fastlayers as fl  # noqa: E402
from fastlayers.device import as_device, import_seconds, package  # noqa: E402
from fastlayers.runtime import compile_log  # noqa: E402
from fastlayers.tuning.provenance import loop_ms, provenance  # noqa: E402
from fastlayers_models.auto import family_of  # noqa: E402
from fastlayers_models.generate import Generator  # noqa: E402

said("libraries imported")
CACHED_TOKENS = 1 << 17  # of all requests together


def first_tokens(generator: Generator, prompts: list[list[int]]) -> float:
    """Return seconds until every prompt has its first token."""
    begin = time.perf_counter()
    generator.generate(prompts, max_new_tokens=1, eos_ids=())
    return time.perf_counter() - begin


def draw(count: int, longest: int, max_batch: int) -> Iterator[tuple[int, int]]:
    """Yield so many (requests, tokens of each), log-uniform, that fit the cache."""
    chance = random.Random(7)
    while count:
        batch, length = (int(2 ** chance.uniform(0, most.bit_length() - 1)) for most in (max_batch, longest))
        if batch * (length + 64) <= CACHED_TOKENS:
            count -= 1
            yield batch, length


@torch.inference_mode()
def bench(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    config = MODELS[name] | ({"num_hidden_layers": options.layers} if options.layers else {})
    family: Any = family_of(config)
    torch.zeros(1, device=options.device)
    said("device opened")
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device=options.device).eval()
    said("layers built, backends chosen")
    randomize(model)
    said("weights drawn and packed")
    built = time.perf_counter()
    pages = CACHED_TOKENS // model.page_size + 1
    generator = Generator(model, max_batch=options.max_batch, num_pages=pages)
    said("cache and captured steps laid out")
    first = first_tokens(generator, prompts_of(1, 512, model.config.vocab_size))
    said("first token")
    yield {
        "model": name, "what": "cold", "import_to_first_token_s": round(time.perf_counter() - BEGIN, 2),
        "built_at_s": round(built - BEGIN, 2), "first_token_s": round(first, 2),
        "parts_s": {part: round(seconds, 2) for part, seconds in PARTS.items()},
        "packages_imported_s": {name: round(seconds, 2) for name, seconds in import_seconds.items()},
    }  # fmt: skip
    begin = time.perf_counter()
    report = fl.warmup(generator, max_batch=options.max_batch, progress=False)
    yield {
        "model": name, "what": "warm-up", "seconds": round(time.perf_counter() - begin, 2), "kernels": report.kernels,
        "max_tokens": generator.max_length, "max_batch": options.max_batch,
        "slowest": [[label, round(took, 2)] for label, took, _ in sorted(report.steps, key=lambda s: -s[1])[:6]],
        "modules": [[built.module.label, round(built.seconds, 2), built.words] for built in report.modules],
    }  # fmt: skip
    shapes = list(draw(options.prompts, generator.max_length - 2, options.max_batch))
    late: dict[str, list[str]] = {}
    for batch, length in shapes:
        with compile_log.counted() as seen:
            first_tokens(generator, prompts_of(batch, length, model.config.vocab_size))
        if seen():
            late[f"{batch}x{length}"] = seen()
    yield {
        "model": name, "what": "after warm-up", "prompts": len(shapes), "with_compiles": len(late),
        "longest": max(length for _, length in shapes), "largest_batch": max(batch for batch, _ in shapes),
        "compiled": {shape: names[:4] for shape, names in list(late.items())[:8]},
    }  # fmt: skip


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--layers", type=int, help="fewer decoder layers, to try things out")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    # Found, not imported: who needs them imports them, on the clock.
    installed = [name for name in ("deep_gemm", "flashinfer", "sgl_kernel") if not package(name, load=False).reason]
    rows: list[dict[str, Any]] = [{
        "command": "python " + " ".join(sys.argv), **provenance(), "loop_ms": loop_ms(), "torch": torch.__version__,
        "packages": installed, "device": str(as_device(options.device)),
    }]  # fmt: skip
    print(json.dumps(rows[0]), flush=True)
    said("run described")
    for row in bench(options.model, options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
