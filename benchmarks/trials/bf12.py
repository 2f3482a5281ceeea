"""Try plans of products with bf12 weights: ``python benchmarks/trials/bf12.py MODEL … --out FILE``.

Whole captured steps of one token of a model of ``benchmarks/generate.py``, in turns: its 16-bit weights, and bf12
copies with a plan exchanged for one shape at a time. What is predicted: ``benchmarks/notes/bf12.md``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fastlayers as fl
from fastlayers.linear.dense import triton_bf12
from fastlayers.registry.first_rung import FirstRung

sys.path.insert(0, str(Path(__file__).parents[1]))
from generate import MODELS, decode_key, prompts_of, randomize
from rows import Rows, arguments

Linear = triton_bf12.Plan
LINEARS = tuple(Linear(*each) for each in (
    (2, 128, 1, 2), (4, 128, 1, 1), (4, 512, 4, 1), (2, 256, 2, 2), (4, 128, 1, 2), (2, 128, 1, 1), (1, 128, 1, 2),
    (1, 256, 1, 1), (4, 256, 2, 1), (2, 256, 1, 1), (2, 128, 1, 4), (8, 128, 2, 1),
))  # fmt: skip


@contextmanager
def planned(shape: Any, plan: Any) -> Iterator[None]:
    """Run a shape by another plan."""
    launch = triton_bf12._launch

    def launched(n: int, k: int, outliers: int, bias: bool, out_dtype: Any, chosen: Linear, device: Any) -> Any:
        return launch(n, k, outliers, bias, out_dtype, plan if (n, k) == shape else chosen, device)

    with mock.patch.object(triton_bf12, "_launch", launched):
        yield


class Steps:
    """A model's captured steps of one token."""

    def __init__(self, name: str, rows: Rows) -> None:
        from fastlayers_models.auto import family_of
        from fastlayers_models.generate import Generator

        config = MODELS[name]
        family: Any = family_of(config)
        model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cuda").eval()
        randomize(model)
        self.name, self.rows, self.model = name, rows, model
        self.generator = Generator(model, max_batch=1, max_length=1024)
        self.prompts = prompts_of(1, 128, model.config.vocab_size)

    def tokens(self) -> list[int]:
        """Return what is generated."""
        found: list[int] = next(iter(self.generator.generate(self.prompts, max_new_tokens=24)))
        return found

    def timed(self, what: Any, plan: Any) -> float:
        """Return the milliseconds of a step that is captured now."""
        step, graphs = self.generator.step, self.generator.step.graphs
        assert graphs is not None
        graphs.clear()
        step.capture([1])
        key, took = decode_key(self.generator, 1), []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(8):
                graphs.replay(key)
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) / 8)
        ms = statistics.median(took)
        self.rows.put({"model": self.name, "what": what, "plan": plan, "ms": round(ms, 4)})
        return ms


@torch.inference_mode()
def main() -> None:
    """Time what there is time for."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("models", nargs="+")
    options = parser.parse_args()
    rows = Rows(options)
    for name in options.models:
        steps = Steps(name, rows)
        plain = steps.tokens()
        steps.timed("16 bits", None)
        begin = time.perf_counter()
        stored = fl.store_bf12(steps.model)
        torch.cuda.synchronize()
        found = {type(m).__name__ for m in steps.model.modules() if isinstance(getattr(m, "ladder", None), FirstRung)}
        rows.put({
            "model": name, "stored": len(stored.layers), "gib": round(stored.nbytes / 2**30, 2), "kinds": sorted(found),
            "seconds": round(time.perf_counter() - begin, 1), "refused": stored.refused,
        })  # fmt: skip
        base = steps.timed("bf12", None)
        coded = steps.tokens()
        rows.put(
            {"model": name, "same_tokens": sum(a == b for a, b in zip(plain, coded, strict=True)), "of": len(plain)}
        )
        shapes: dict[Any, Any] = {
            (m.local_out, m.local_in): LINEARS for m in steps.model.modules()
            if isinstance(m, fl.Linear) and isinstance(m.ladder, FirstRung)
        }  # fmt: skip
        best: dict[Any, Any] = dict.fromkeys(shapes, (base, None))
        for place in range(len(LINEARS)):
            for shape, plans in shapes.items():
                if rows.late(model=name, place=place):
                    break
                with planned(shape, plans[place]):
                    best[shape] = min(best[shape], (steps.timed(shape, plans[place]), plans[place]))
        rows.put({"model": name, "best": {str(shape): found for shape, found in best.items()}})
        steps.timed("bf12", None)
        rows.end += options.seconds
        del steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
