"""Time launches of the router, those of before against those of now.

    python benchmarks/trials/router_launch.py --out FILE              on a GPU, all in one process and in turns
    ... --small --device cpu                                          every line of it, on few tokens

All points that ``performance.py --part small_ops`` times of it, and some around the edges between two launches. One
JSON line a variant: ``same`` says whether its outputs have the bits of ``before``, the launch that there was; ``now``
is missing where nothing else is launched today. What is predicted, and what decides: ``benchmarks/notes/small_ops.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fastlayers.moe.router import triton as router_triton
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.registry.spec import Case, spec_of
from fastlayers.tuning.clock import clock_for
from fastlayers.tuning.sweep import case_at, inputs_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from performance import small_ops
from rows import Rows, arguments, finish
from small_peers import small_peers

# Tokens and warps of a program.
Variant = tuple[int, int] | None
OSS = RouterConfig(32, 4, "softmax_after_topk", renormalize=False)
QWEN = RouterConfig(128, 8)
ROUTED: dict[RouterConfig, dict[str, Variant]] = {
    OSS: {"8x2": (8, 2), "32x4": (32, 4), "32x8": (32, 8), "4x4": (4, 4), "8x8": (8, 8)},
    QWEN: {"2x2": (2, 2), "8x8": (8, 8)},
}  # fmt: skip
ROUNDS = 30


@contextmanager
def routing(variant: Variant) -> Iterator[None]:
    """Route with programs of these tokens and warps; ``None``: as the library chooses."""

    def given(*shape: Any) -> Variant:
        return variant

    chosen = router_triton._rows_and_warps if variant is None else given
    with mock.patch.object(router_triton, "_rows_and_warps", chosen):
        router_triton._launch.cache_clear()
        yield
    router_triton._launch.cache_clear()


class Trial:
    """Makes calls ready within what changes their launch, times them in turns, and says whose bits differ."""

    def __init__(self, rows: Rows, device: str) -> None:
        self.rows, self.device, self.clock = rows, device, clock_for(device)
        self.rounds = 1 if device == "cpu" else ROUNDS
        self.bad: list[dict[str, Any]] = []

    def same(self, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these are the same bits; on a CPU, where the interpreter sums in its own order, nearly."""
        if self.device == "cpu":
            return all(torch.allclose(found[key].float(), x.float(), rtol=1e-5) for key, x in wanted.items())
        return all(torch.equal(found[key], x) for key, x in wanted.items())

    def __call__(
        self,
        what: Mapping[str, Any],
        call: Callable[[], Any],
        results: Callable[[], dict[str, torch.Tensor]],
        variants: Mapping[str, Callable[[], Any]],
        peers: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        """Time a point; ``variants``: contexts, the first of which is what others' bits are compared with."""
        ready, same, wanted = {}, {}, None
        for name, context in variants.items():
            with context():
                found = {key: x.clone() for key, x in results().items()}
                wanted = found if wanted is None else wanted
                same[name] = self.same(found, wanted)
                ready[name] = self.clock.prepare(call)
        for name, peer in (peers or {}).items():
            ready[name] = self.clock.prepare(peer)
        for name, timing in self.clock.measure(ready, self.rounds).items():
            row = {**what, "variant": name, "us": round(timing.us, 2), "spread_us": round(timing.spread_us, 2)}
            row |= {"same": same[name]} if name in same else {"peer": True}
            self.rows.put(row)
            if not row.get("same", True):
                self.bad.append(row)


def route(trial: Trial, model: str, case: Case) -> None:
    """Time a choice of experts."""
    spec, cfg, tokens = spec_of("router"), case.cfg, case.shape["num_tokens"]
    inputs = inputs_of("router", case, trial.device)
    impl = router_triton.TritonRouter(cfg)
    size = cfg.num_experts // (cfg.num_groups if cfg.grouped else 1)
    groups = cfg.num_experts // size
    shape = (tokens, groups, size, cfg.num_experts, cfg.top_k, impl.arguments[1], cfg.correction_bias)
    chosen, one = router_triton._rows_and_warps(*shape), (1, 4 if cfg.num_experts > 512 else 1)
    variants: dict[str, Variant] = {"before": one}
    if chosen != one:
        variants |= {"now": None, **ROUTED.get(cfg, {})}
    peers = {
        name: partial(spec.timed, backend(cfg), inputs, None)
        for name, backend in small_peers("router", cfg).items() if name.startswith("sgl_kernel")
    }  # fmt: skip
    what = {"op": "router", "model": model, "experts": cfg.num_experts, "tokens": tokens}
    trial(
        what | {"dtype": str(case.shape["dtype"]).removeprefix("torch."), "program": list(chosen)},
        partial(spec.timed, impl, inputs, None), partial(spec.run, impl, inputs, None),
        {name: partial(routing, variant) for name, variant in variants.items()}, peers,
    )  # fmt: skip


def points(small: bool) -> Iterator[tuple[Callable[[Trial], None], dict[str, Any]]]:
    """Yield what is timed, the most wanted first, and what it is called."""
    seen = set()

    def of(model: str, cfg: Any, tokens: int, **more: Any) -> Any:
        count = tokens if not small else 2 if tokens < 512 else 17
        if small and (cfg, count, *more) in seen:
            return
        seen.add((cfg, count, *more))
        case = case_at("router", cfg, count)
        case = Case(case.name, cfg, dict(case.shape) | more, small=False)
        yield partial(route, model=model, case=case), {"op": "router", "model": model, "tokens": tokens}

    table = [(item.model, item.cfg, count) for item in small_ops() if item.layer == "router" for count in item.tokens]
    table.sort(key=lambda point: (point[1] != OSS, point[1] != QWEN, -point[2]))
    for point in table:
        yield from of(*point)
    yield from of("openai/gpt-oss-20b tp1", OSS, 4096, dtype=torch.bfloat16)
    for model, cfg in (("openai/gpt-oss-20b tp1", OSS), ("Qwen/Qwen3-30B-A3B tp1", QWEN)):
        for tokens in (257, 512, 1024, 16384):
            yield from of(model, cfg, tokens)


def main() -> None:
    """Time what there is time for."""
    options = arguments(__doc__, 40.0).parse_args()
    rows = Rows(options)
    trial = Trial(rows, options.device)
    few = 2 if options.small else router_triton.FEW_TOKENS
    with mock.patch.object(router_triton, "FEW_TOKENS", few):
        for run, what in points(options.small):
            if not rows.late(**what):
                run(trial)
    finish(trial.bad)


if __name__ == "__main__":
    main()
