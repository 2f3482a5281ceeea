"""Try bfloat16 weights stored in 12 bits each: ``python benchmarks/trials/packed_bf16.py [calls] [MODEL …] --out FILE``.

``calls``: single products of one row, cold, against the vector kernel and cuBLAS. A model of ``benchmarks/generate.py``:
whole captured steps, with linears exchanged. What is predicted: ``benchmarks/notes/packed_bf16.md``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import fastlayers as fl
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton import TritonLinear
from fastlayers.linear.dense.triton_packed import packed_vector_kernel
from fastlayers.quant.packed_bf16 import PackedBF16, pack_bf16, run_of
from fastlayers.triton_lang import dependent_launch
from fastlayers.tuning.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows, arguments, finish

# Outputs and groups of a program, warps, tiles ahead.
Config = tuple[int, int, int, int]
CONFIGS: tuple[Config, ...] = (
    (4, 512, 4, 1), (2, 512, 4, 1), (8, 512, 8, 1), (4, 256, 2, 1), (2, 256, 2, 1), (4, 256, 4, 1), (2, 256, 2, 2),
    (4, 128, 2, 2), (2, 128, 1, 2), (4, 128, 1, 1), (2, 128, 1, 4), (1, 512, 4, 1), (2, 1024, 8, 1), (1, 256, 2, 2),
)  # fmt: skip
SHAPES = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288),
    "30B qkv": (5120, 2048), "30B o": (2048, 4096), "30B head": (151936, 2048), "8B head": (151936, 4096),
    "oss qkv": (5120, 2880), "oss o": (2880, 4096),
}  # fmt: skip


def launch(x: torch.Tensor, packed: PackedBF16, config: Config, out: torch.dtype, evict: str = "") -> torch.Tensor:
    """Return ``x`` times packed weights."""
    outputs, groups, warps, ahead = config
    m, k = x.shape
    n, total = packed.words.shape[0], k // 8
    blocks = cdiv(total, groups)
    y = x.new_empty(m, n, dtype=out)
    sizes = dict(EVEN=total % groups == 0, BLOCKS=blocks, AHEAD=min(ahead, blocks), ROWS=next_power_of_2(m))
    packed_vector_kernel[(cdiv(n, outputs),)](
        x, packed.words, packed.scale, packed.columns, packed.values, x, y, m, n, total, x.stride(0),
        HAS_BIAS=False, **sizes, OUTLIERS=packed.columns.shape[1], RUN=run_of(k), BLOCK_N=outputs, BLOCK_G=groups,
        EVICT=evict, num_warps=warps, **dependent_launch(x.device),
    )  # fmt: skip
    return y


def calls(rows: Rows, bad: list[Any]) -> None:
    """Time single products, cold."""
    clock = clock_for("cuda")
    for name, (n, k) in SHAPES.items():
        if rows.late(shape=name):
            return
        weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        x = torch.randn(1, k, device="cuda").bfloat16()
        packed = pack_bf16(weight)
        assert packed is not None
        triton = TritonLinear(LinearConfig(k, n))
        ways: dict[str, Callable[[], Any]] = {
            "torch": partial(F.linear, x, weight), "vector": partial(triton, x, weight, None)
        }  # fmt: skip
        wanted = x.double() @ weight.double().t()
        for config in CONFIGS:
            if config[1] >= 2 * k // 8 * 2:
                continue
            ways[str(config)] = partial(launch, x, packed, config, torch.bfloat16)
            far = (ways[str(config)]().double() - wanted).abs().max() / wanted.abs().max()
            if not far < 4e-3:
                bad.append({"shape": name, "config": config, "far": float(far)})
        ready = {key: clock.prepare(call) for key, call in ways.items()}
        for key, timing in clock.measure(ready, 30).items():
            rows.put({"shape": name, "n": n, "k": k, "way": key, "us": round(timing.us, 2),
                      "outliers": packed.columns.shape[1]})  # fmt: skip


def exchange(layer: Any, packed: PackedBF16, config: Config, evict: str, plain: Callable[..., Any], x: Any) -> Any:
    """Return a linear's product of a few rows by packed weights, of more by what there was."""
    flat = x.view(-1, x.shape[-1])
    if flat.shape[0] > 1:
        return plain(x)
    return launch(flat, packed, config, layer.cfg.y_dtype, evict).view(*x.shape[:-1], -1)


@torch.inference_mode()
def steps(name: str, rows: Rows) -> None:
    """Time whole steps."""
    from generate import MODELS, decode_key, randomize

    from fastlayers_models.auto import family_of
    from fastlayers_models.generate import Generator

    config = MODELS[name]
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cuda").eval()
    randomize(model)
    generator = Generator(model, max_batch=1, max_length=1024)
    list(generator.generate([list(range(128))], max_new_tokens=8))
    step = generator.step
    linears = [(key, m) for key, m in model.named_modules() if isinstance(m, fl.Linear)]
    packed = {key: pack_bf16(m.weight) for key, m in linears if run_of(m.local_in) and m.local_out > 512}
    rows.put({"model": name, "packed": len(packed), "of": len(linears),
              "outliers": sorted({p.columns.shape[1] for p in packed.values() if p})})  # fmt: skip

    def timed(way: str, choose: Callable[[int, int], Config | None], evict: str = "") -> None:
        for key, m in linears:
            m.__dict__.pop("forward", None)
            found = choose(m.local_out, m.local_in) if packed.get(key) is not None else None
            if found is not None:
                m.forward = partial(exchange, m, packed[key], found, evict, m.forward)
        step.graphs.clear()
        step.capture([1])
        key = decode_key(generator, 1)
        took = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                step.graphs.replay(key)
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) / 10)
        rows.put({"model": name, "way": way, "ms": round(statistics.median(took), 4), "least": round(min(took), 4)})

    timed("as it is", lambda n, k: None)
    for n, k in sorted({(m.local_out, m.local_in) for key, m in linears if key in packed}):
        for config in ((4, 512, 4, 1), (2, 512, 4, 1), (4, 256, 2, 1), (2, 256, 2, 1), (4, 256, 2, 2), (2, 128, 1, 2)):
            if config[1] < 2 * k // 8 and not rows.late(model=name, n=n, k=k):
                timed(f"{n}x{k}: {config}", lambda a, b, n=n, k=k, config=config: config if (a, b) == (n, k) else None)
    for config in ((4, 512, 4, 1), (2, 512, 4, 1), (4, 256, 2, 1), (2, 256, 2, 1)):
        for evict in ("", "evict_first"):
            timed(f"all: {config} {evict}", lambda a, b, config=config: config if config[1] < b // 4 else (4, 256, 2, 1), evict)
    timed("as it is", lambda n, k: None)


def main() -> None:
    """Time what is asked for."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("what", nargs="+")
    options = parser.parse_args()
    rows, bad = Rows(options), []
    for what in options.what:
        calls(rows, bad) if what == "calls" else steps(what, rows)
        torch.cuda.empty_cache()
    finish(bad)


if __name__ == "__main__":
    main()
