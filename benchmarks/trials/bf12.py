"""Try bfloat16 weights stored in 12 bits each: ``python benchmarks/trials/bf12.py [calls] [MODEL …] --out FILE``.

``calls``: single products, cold, against the layer's backends. A model of ``benchmarks/generate.py``: whole captured
steps, with linears exchanged. What is predicted: ``benchmarks/notes/bf12.md``.
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
from fastlayers.linear.dense.triton_bf12 import bf12_kernel, order_kernel
from fastlayers.moe.align.triton import align
from fastlayers.moe.fused_moe.triton.bf12_experts import bf12_in_kernel, bf12_one_kernel, bf12_out_kernel
from fastlayers.moe.fused_moe.triton.reduce import reduce
from fastlayers.quant.bf12 import BF12Weights, pack_bf12
from fastlayers.triton_lang import dependent_launch
from fastlayers.tuning.clock import clock_for

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows, arguments, finish

# Tiles, shares, warps, turns ahead.
Config = tuple[int, int, int, int]
FEW: tuple[Config, ...] = (
    (1, 8, 8, 8), (1, 8, 8, 4), (1, 8, 8, 2), (1, 4, 4, 4), (1, 4, 4, 8), (1, 4, 4, 2), (1, 16, 16, 4), (1, 2, 2, 4),
)  # fmt: skip
MANY: tuple[Config, ...] = (
    (1, 1, 4, 4), (2, 1, 4, 2), (1, 4, 4, 4), (1, 4, 8, 2), (2, 2, 8, 2), (2, 4, 8, 1), (1, 2, 4, 4), (1, 8, 8, 2),
    (2, 1, 4, 1), (1, 1, 8, 2),
)  # fmt: skip
# Shares, warps, turns ahead of the first product; those of the second.
Pair = tuple[tuple[int, int, int], Config]
ONE: tuple[Pair, ...] = (
    ((8, 8, 2), (1, 1, 8, 6)), ((4, 4, 2), (1, 1, 8, 6)), ((4, 4, 4), (1, 1, 8, 4)), ((8, 8, 4), (1, 2, 16, 3)),
    ((16, 16, 2), (1, 2, 16, 6)), ((8, 8, 1), (1, 1, 8, 3)),
)  # fmt: skip
BLOCKS: tuple[Pair, ...] = (
    ((4, 4, 2), (1, 4, 4, 3)), ((4, 4, 4), (1, 2, 4, 3)), ((8, 8, 2), (2, 4, 4, 1)), ((4, 8, 2), (1, 2, 2, 6)),
    ((2, 4, 4), (1, 1, 4, 4)), ((4, 4, 1), (1, 4, 4, 1)), ((2, 4, 2), (1, 1, 4, 2)),
)  # fmt: skip
SHAPES = {
    "30B qkv": (5120, 2048), "30B o": (2048, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288), "oss o": (2880, 4096), "8B qkv": (6144, 4096), "oss qkv": (5120, 2880),
    "30B head": (151936, 2048),
}  # fmt: skip


def launch(x: torch.Tensor, packed: BF12Weights, config: Config, out: torch.dtype) -> torch.Tensor:
    """Return ``x`` times packed weights."""
    tiles, shares, warps, ahead = config
    (m, k), n, steps = x.shape, len(packed.scale), packed.words.shape[1]
    y, pdl, outliers, ordered, beside = x.new_empty(m, n, dtype=out), dependent_launch(x.device), packed.columns.shape[1], x, x
    if m > 8:
        ordered = x.new_empty(cdiv(m, 8) * 8, k)
        beside = x.new_empty(m, n, dtype=torch.float32)
        order_kernel[(m * cdiv(k, 128) + cdiv(n, 128),)](
            x, ordered, beside, packed.columns, packed.values, m, n, x.stride(0), k,
            OUTLIERS=outliers, TOKENS=next_power_of_2(m), BLOCK=128, num_warps=4, **pdl,
        )  # fmt: skip
    bf12_kernel[(cdiv(n, 16 * tiles * warps // shares),)](
        x, ordered, beside, packed.words, packed.scale, packed.columns, packed.values, x, y, m, n, x.stride(0),
        STEPS=steps, HAS_BIAS=False, OUTLIERS=outliers, BLOCKS=cdiv(m, 8), R=tiles, SHARES=shares, W=warps,
        AHEAD=min(ahead, cdiv(steps, shares)), ORDERED=m > 8, num_warps=warps, **pdl,
    )  # fmt: skip
    return y


def experts(layer: Any, first: BF12Weights, second: BF12Weights, how: Pair, x: Any, weights: Any, ids: Any) -> Any:
    """Return what experts make of a few tokens."""
    cfg, (tokens, top_k), pdl = layer.cfg, ids.shape, dependent_launch(x.device)
    number, hidden, inner = cfg.num_experts, cfg.hidden_size, cfg.intermediate_size
    (shares, warps, ahead), (tiles, shares2, warps2, ahead2) = how
    pairs, one = tokens * top_k, tokens == 1
    which = (ids, ids, ids) if one else align(ids, number, 8)
    a, steps, steps2 = x.new_empty(pairs, inner), hidden // 64, inner // 64
    blocks = pairs if one else which[1].numel()
    bf12_in_kernel[(blocks * (inner * shares // (16 * warps)),)](
        x, *first, a, *which, number, pairs, x.stride(0), 1.0, 1.0,
        TOP_K=top_k, INNER=inner, STEPS=steps, OUTLIERS=first.columns.shape[1], OAI=False, SHARES=shares, W=warps,
        AHEAD=min(ahead, cdiv(steps, shares)), PAIRS=one, num_warps=warps, **pdl,
    )  # fmt: skip
    y = torch.empty_like(x)
    sizes = dict(HIDDEN=hidden, STEPS=steps2, OUTLIERS=second.columns.shape[1], SHARES=shares2, W=warps2,
                 AHEAD=min(ahead2, cdiv(steps2, shares2)), num_warps=warps2, **pdl)  # fmt: skip
    if one:
        bf12_one_kernel[(hidden // 16,)](a, *second, weights, y, ids, number, 1.0, TOP_K=top_k, SPAN=top_k, **sizes)
        return y
    rows = x.new_empty(pairs, hidden, dtype=torch.float32)
    grid = (blocks * (hidden * shares2 // (16 * tiles * warps2)),)
    bf12_out_kernel[grid](a, *second, weights, rows, *which, number, pairs, R=tiles, PAIRS=False, **sizes)
    reduce(rows, ids, y, number, 1.0)
    return y


def calls(rows: Rows, bad: list[Any]) -> None:
    """Time single products, cold."""
    clock = clock_for("cuda")
    for name, (n, k) in SHAPES.items():
        weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        packed = pack_bf12(weight)
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


def exchange(layer: Any, packed: BF12Weights, config: Config, plain: Callable[..., Any], x: Any) -> Any:
    """Return a linear's product of few rows by packed weights, of more by what there was."""
    flat = x.view(-1, x.shape[-1])
    if flat.shape[0] > 32:
        return plain(x)
    return launch(flat, packed, config, layer.cfg.y_dtype).view(*x.shape[:-1], -1)


class Model:
    """A model of ``benchmarks/generate.py`` and its layers' weights in 12 bits: of the first of each shape, copied."""

    def __init__(self, name: str, rows: Rows, most: int) -> None:
        from generate import MODELS, randomize

        from fastlayers_models.auto import family_of
        from fastlayers_models.generate import Generator

        config = MODELS[name]
        family: Any = family_of(config)
        self.model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cuda").eval()
        randomize(self.model)
        self.generator = Generator(self.model, max_batch=most, max_length=1024)
        self.name, self.rows, self.packed, first = name, rows, {}, {}
        for module in self.model.modules():
            if isinstance(module, fl.Linear) and module.local_out > 512:
                weights = {"weight": module.weight}
            elif isinstance(module, fl.FusedMoE) and module.cfg.quant == "none":
                weights = {"w13": module.w13.flatten(0, 1), "w2": module.w2.flatten(0, 1)}
            else:
                continue
            found = []
            for key, weight in weights.items():
                at = (key, *weight.shape)
                if at not in first:
                    first[at] = pack_bf12(weight)
                    rows.put({"model": name, "shape": list(at), "outliers": first[at].columns.shape[1]})
                    found.append(first[at])
                else:
                    found.append(BF12Weights(*(each.clone() for each in first[at])))
            self.packed[module] = found
        self.shapes = sorted({(m.local_out, m.local_in) for m in self.packed if isinstance(m, fl.Linear)})

    def timed(self, batch: int, way: str, linears: Any, pair: Pair | None) -> float:
        """Return the milliseconds of a captured step; ``linears``: the configuration of a shape, or ``None``."""
        from generate import decode_key

        for module, found in self.packed.items():
            module.__dict__.pop("forward", None)
            if isinstance(module, fl.FusedMoE):
                if pair is not None:
                    module.forward = partial(experts, module, *found, pair)
            elif (config := linears(module.local_out, module.local_in)) is not None:
                module.forward = partial(exchange, module, found[0], config, module.forward)
        step = self.generator.step
        step.graphs.clear()
        step.capture([batch])
        key, took = decode_key(self.generator, batch), []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(8):
                step.graphs.replay(key)
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) / 8)
        ms = statistics.median(took)
        self.rows.put({"model": self.name, "batch": batch, "way": way, "ms": round(ms, 4)})
        return ms


@torch.inference_mode()
def check(model: Model, bad: list[Any]) -> None:
    """Compare the first experts' outputs with what there was."""
    for module, found in model.packed.items():
        if isinstance(module, fl.FusedMoE):
            for tokens, pair in ((1, ONE[0]), (32, BLOCKS[0]), (32, BLOCKS[2])):
                x = torch.randn(tokens, module.cfg.hidden_size, device="cuda").bfloat16()
                scores = torch.rand(tokens, module.cfg.num_experts, device="cuda")
                weights, ids = scores.topk(module.cfg.top_k)
                wanted, mine = module(x, weights, ids.int()), experts(module, *found, pair, x, weights, ids.int())
                far = float((wanted.float() - mine.float()).abs().max() / wanted.float().abs().max())
                if not far < 1e-2:
                    bad.append({"experts": tokens, "pair": pair, "far": far})
            return


@torch.inference_mode()
def steps(name: str, rows: Rows, bad: list[Any], batches: list[int]) -> None:
    """Time whole steps."""
    model = Model(name, rows, max(batches))
    check(model, bad)
    for batch in batches:
        list(model.generator.generate([list(range(1, 129)) for _ in range(batch)], max_new_tokens=8))
        base = model.timed(batch, "as it is", lambda n, k: None, None)
        best: dict[Any, tuple[float, Any]] = {shape: (base, None) for shape in (*model.shapes, "experts")}
        moe = any(isinstance(each, fl.FusedMoE) for each in model.packed)
        for place in range(10):
            if moe and place < len(pairs := ONE if batch == 1 else BLOCKS) and not rows.late():
                ms = model.timed(batch, f"experts {pairs[place]}", lambda n, k: None, pairs[place])
                best["experts"] = min(best["experts"], (ms, pairs[place]))
            for shape in model.shapes:
                if place < len(configs := FEW if batch <= 8 else MANY) and not rows.late():
                    config = configs[place]
                    ms = model.timed(batch, f"{shape} {config}", lambda n, k, s=shape: config if (n, k) == s else None, None)
                    best[shape] = min(best[shape], (ms, config))
        model.timed(batch, f"best {best}", lambda n, k: best[n, k][1], best["experts"][1])
        model.timed(batch, "as it is", lambda n, k: None, None)
        rows.end += rows.begun


def main() -> None:
    """Time what is asked for."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("what", nargs="+")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    options = parser.parse_args()
    rows, bad = Rows(options), []
    rows.begun = options.seconds
    for what in options.what:
        calls(rows, bad) if what == "calls" else steps(what, rows, bad, options.batch)
        torch.cuda.empty_cache()
    finish(bad)


if __name__ == "__main__":
    main()
