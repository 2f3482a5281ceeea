"""Try bfloat16 weights stored in 12 bits each: ``python benchmarks/trials/packed_bf16.py [calls] [MODEL …] --out FILE``.

``calls``: single products, cold, against the layer's backends. A model of ``benchmarks/generate.py``: whole captured
steps, with linears exchanged. What is predicted: ``benchmarks/notes/packed_bf16.md``.
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
from fastlayers.integers import cdiv
from fastlayers.linear.dense.layer import LinearConfig
from fastlayers.linear.dense.triton import TritonLinear
from fastlayers.linear.dense.triton_packed import packed_kernel
from fastlayers.quant.packed_bf16 import PackedBF16, pack_bf16, why_unpacked
from fastlayers.triton_lang import dependent_launch
from fastlayers.tuning.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows, arguments, finish

# Tiles, shares, warps, turns ahead.
Config = tuple[int, int, int, int]
FEW: tuple[Config, ...] = (
    (1, 4, 4, 2), (1, 4, 4, 4), (1, 8, 8, 2), (1, 8, 8, 1), (1, 2, 4, 4), (2, 4, 4, 2), (1, 2, 2, 4), (1, 1, 4, 8),
    (1, 4, 4, 8), (1, 4, 4, 1),
)  # fmt: skip
MANY: tuple[Config, ...] = (
    (1, 4, 4, 4), (1, 4, 4, 2), (1, 2, 4, 4), (1, 1, 4, 4), (1, 4, 8, 2), (1, 2, 8, 2), (1, 8, 8, 2), (1, 1, 8, 2),
)  # fmt: skip
SHAPES = {
    "30B qkv": (5120, 2048), "30B o": (2048, 4096), "30B head": (151936, 2048),
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288),
    "oss qkv": (5120, 2880), "oss o": (2880, 4096),
}  # fmt: skip


def launch(x: torch.Tensor, packed: PackedBF16, config: Config, out: torch.dtype) -> torch.Tensor:
    """Return ``x`` times packed weights."""
    tiles, shares, warps, ahead = config
    m, n, steps = x.shape[0], len(packed.scale), packed.words.shape[1]
    y = x.new_empty(m, n, dtype=out)
    packed_kernel[(cdiv(n, 16 * tiles * warps // shares),)](
        x, packed.words, packed.scale, packed.columns, packed.values, x, y, m, n, x.stride(0), STEPS=steps,
        HAS_BIAS=False, OUTLIERS=packed.columns.shape[1], BLOCKS=cdiv(m, 8), R=tiles, SHARES=shares, W=warps,
        AHEAD=min(ahead, cdiv(steps, shares)), num_warps=warps, **dependent_launch(x.device),
    )  # fmt: skip
    return y


def calls(rows: Rows, bad: list[Any]) -> None:
    """Time single products, cold."""
    clock = clock_for("cuda")
    for name, (n, k) in SHAPES.items():
        weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        packed = pack_bf16(weight)
        assert packed is not None
        for tokens, configs in ((1, FEW), (32, MANY), (8, FEW)):
            if rows.late(shape=name, tokens=tokens):
                return
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            triton = TritonLinear(LinearConfig(k, n))
            ways: dict[str, Callable[[], Any]] = {
                "torch": partial(F.linear, x, weight), "triton": partial(triton, x, weight, None)
            }  # fmt: skip
            wanted = F.linear(x.float(), weight.float())
            for config in configs:
                ways[str(config)] = partial(launch, x, packed, config, torch.bfloat16)
                far = float((ways[str(config)]().float() - wanted).abs().max() / wanted.abs().max())
                if not far < 4e-3:
                    bad.append({"shape": name, "tokens": tokens, "config": config, "far": far})
            ready = {key: clock.prepare(call) for key, call in ways.items()}
            for key, timing in clock.measure(ready, 20).items():
                rows.put({"shape": name, "n": n, "k": k, "tokens": tokens, "way": key, "us": round(timing.us, 2),
                          "outliers": packed.columns.shape[1]})  # fmt: skip


def exchange(layer: Any, packed: PackedBF16, config: Config, plain: Callable[..., Any], x: Any) -> Any:
    """Return a linear's product of few rows by packed weights, of more by what there was."""
    flat = x.view(-1, x.shape[-1])
    if flat.shape[0] > 32:
        return plain(x)
    return launch(flat, packed, config, layer.cfg.y_dtype).view(*x.shape[:-1], -1)


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
    generator = Generator(model, max_batch=32, max_length=1024)
    linears = [(key, m) for key, m in model.named_modules() if isinstance(m, fl.Linear)]
    packed = {
        key: pack_bf16(m.weight) for key, m in linears
        if m.local_out > 512 and not why_unpacked(m.local_out, m.local_in, m.weight.dtype)
    }  # fmt: skip
    rows.put({"model": name, "packed": len(packed), "of": len(linears),
              "outliers": sorted({p.columns.shape[1] for p in packed.values() if p})})  # fmt: skip
    shapes = sorted({(m.local_out, m.local_in) for key, m in linears if key in packed})

    def timed(batch: int, way: str, choose: Callable[[int, int], Config | None]) -> float:
        for key, m in linears:
            m.__dict__.pop("forward", None)
            found = choose(m.local_out, m.local_in) if packed.get(key) is not None else None
            if found is not None:
                m.forward = partial(exchange, m, packed[key], found, m.forward)
        step.graphs.clear()
        step.capture([batch])
        key = decode_key(generator, batch)
        took = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(8):
                step.graphs.replay(key)
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) / 8)
        rows.put({"model": name, "batch": batch, "way": way, "ms": round(statistics.median(took), 4)})
        return statistics.median(took)

    for batch, configs in ((1, FEW[:8]), (32, MANY)):
        prompts = [list(range(1, 129)) for _ in range(batch)]
        list(generator.generate(prompts, max_new_tokens=8))
        step = generator.step
        base = timed(batch, "as it is", lambda n, k: None)
        best: dict[tuple[int, int], tuple[float, Config | None]] = {shape: (base, None) for shape in shapes}
        for config in configs:
            for shape in shapes:
                if rows.late(model=name, batch=batch, config=config):
                    break
                ms = timed(batch, f"{shape}: {config}", lambda n, k, s=shape, c=config: c if (n, k) == s else None)
                best[shape] = min(best[shape], (ms, config))
        timed(batch, f"best {best}", lambda n, k: best[n, k][1])
        timed(batch, "as it is", lambda n, k: None)


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
