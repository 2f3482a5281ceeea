"""Several new tokens a request in one attention step: ``python benchmarks/several_tokens.py [tree] [flashmla]``.

``tree``: attention over trees of drafts (bf16; GQA, with a window and sinks, latents; pages of 64, 16 and 1), captured,
then replayed with other trees and lengths: the error against the torch backend, and microseconds of 9 tokens of eight
requests and of 33 of one, beside a chain of as many, one decoded token, and torch's own tree. ``flashmla``: FlashMLA
with 2 to 8 new tokens a request, uniform, uneven and in a padded bucket: its errors, and its time beside Triton's.
Exits with 1 where an error is above 0.01.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rows import Rows, arguments, finish, microseconds

from fastlayers.attention.buckets import SHORT_CONTEXT, ExtendBucket
from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.device import as_device
from fastlayers.registry import Registry
from fastlayers.runtime import precompile

BOUND = 0.01
BF16 = torch.bfloat16
# New tokens a request, requests, cached tokens.
VERIFIED: tuple[tuple[int, int, int], ...] = (
    (4, 8, 4096), (4, 1, 4096), (4, 64, 2048), (2, 8, 1000), (8, 8, 4096), (3, 5, 70), (4, 6, 4096), (4, 8, 500),
    (4, 64, 500), (4, 32, 500), (4, 8, 1000),
)  # fmt: skip
# Pages of 64 for each request.
WIDTH = 66


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error."""
    return round(float((found.float() - wanted.float()).norm() / wanted.float().norm()), 5)


def trees(sizes: tuple[int, ...], draw: torch.Generator) -> tuple[tuple[int, ...], ...]:
    """Return drawn parents of so many tokens each; the first is the root."""
    return tuple(
        tuple(int(torch.randint(-1, at, (), generator=draw)) if at else -1 for at in range(size)) for size in sizes
    )


def tables(count: int, width: int) -> list[list[int]]:
    """Return page tables of requests that share nothing."""
    return [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(count)]


def built(registry: Registry, cfg: Any, device: str, name: str) -> Any:
    """Return a named backend of a configuration."""
    return registry.choose(cfg, device, name).build().pick(1)


@dataclass
class Attention:
    """A shape, its caches, and how a backend of it is called."""

    name: str
    cfg: Any
    page: int
    device: str
    length: int

    def __post_init__(self) -> None:
        """Draw the cache."""
        self.latent = isinstance(self.cfg, MLAConfig)
        self.registry: Registry = MLA if self.latent else GQA
        self.width = -(-(self.length + 64) // self.page)
        size = 8 * self.width + 1, self.page
        tail = (self.cfg.latent_width,) if self.latent else (self.cfg.num_kv_heads, self.cfg.head_dim)
        self.caches = [self.drawn(*size, *tail) for _ in range(1 if self.latent else 2)]
        self.sinks = torch.randn(self.cfg.num_heads, device=self.device) if getattr(self.cfg, "sinks", False) else None

    def drawn(self, *shape: int) -> torch.Tensor:
        """Return random values."""
        return torch.randn(*shape, device=self.device).to(BF16)

    def queries(self, tokens: int) -> torch.Tensor:
        """Return random queries."""
        return self.drawn(tokens, self.cfg.num_heads, self.cfg.latent_width if self.latent else self.cfg.head_dim)

    def call(self, impl: Any, q: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Return what a backend says."""
        found = impl.decode(q, *self.caches, meta) if self.latent else impl(q, *self.caches, meta, self.sinks)
        attended: torch.Tensor = found[0]
        return attended

    def state(self) -> AttentionState:
        """Return new buffers of metadata."""
        return AttentionState(8, 128, self.width, self.page, self.device)


def shapes(small: bool, device: str) -> Iterator[Attention]:
    """Yield the shapes: Qwen3-8B's, GPT-OSS's with a window, DeepSeek-V3's on 8 ranks and on one."""
    length = 64 if small else 4096

    def gqa(heads: int, kv: int, width: int, scale: float, page: int, **more: Any) -> GQAConfig:
        sizes = (4, 2, 16) if small else (heads, kv, width)
        return GQAConfig(*sizes, scale, page_size=page, dtype=BF16, kv_dtype=BF16, phase="extend", lse=False, **more)

    def mla(heads: int, page: int) -> MLAConfig:
        sizes = (heads // 8, 32, 16, 16, 16) if small else (heads, 512, 64, 128, 128)
        return MLAConfig(*sizes, 0.1, page, BF16, BF16, "ragged", lse=False)

    for page in (64, 16, 1):
        yield Attention("gqa qwen3-8b", gqa(32, 8, 128, 0.09, page), page, device, length)
        yield Attention("mla 16 heads", mla(16, page), page, device, length)
    window = gqa(64, 8, 64, 0.125, 64, window=128, sinks=True)
    yield Attention("gqa gpt-oss window", window, 64, device, length)
    yield Attention("mla 128 heads", mla(128, 64), 64, device, length)


def captured(call: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """Return a call that replays what was captured; on a CPU the call itself."""
    if device == "cpu":
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return found

    return replay


def tree(on: Attention, each: int, requests: int, draw: torch.Generator) -> dict[str, Any]:
    """Return the row of trees of one size."""
    cfg, device = replace(on.cfg, captured=True, tree=True), on.device
    impl = built(on.registry, cfg, device, "triton")
    plain = built(on.registry, replace(on.cfg, tree=True), device, "torch")
    bucket, state = ExtendBucket(64 if requests == 1 else 128, requests, each, True), on.state()
    q, pages = on.queries(bucket.tokens), tables(requests, on.width)
    meta = state.plan(AttentionBatch((), (), []), bucket=bucket)
    replay = captured(lambda: on.call(impl, q, meta), device)
    errors = []
    for _ in range(3):
        new = tuple(int(torch.randint(1, each + 1, (), generator=draw)) for _ in range(requests))
        cached = tuple(int(torch.randint(0, on.length, (), generator=draw)) for _ in range(requests))
        batch = AttentionBatch(new, cached, pages, (), trees(new, draw))
        wanted = on.call(plain, q[: sum(new)], on.state().plan(batch))
        meta = state.plan(batch, bucket=bucket)
        errors.append(error(replay()[: sum(new)], wanted))
    # All requests full, over the longest context.
    new, cached = (each,) * requests, (on.length,) * requests
    full = state.plan(AttentionBatch(new, cached, pages, (), trees(new, draw)), bucket=bucket)
    row = {"what": "tree", "name": on.name, "page": on.page, "rows": each, "requests": requests, "errors": errors}
    row["tree_us"] = microseconds(lambda: on.call(impl, q, full), device)
    if requests == 1:
        slow = built(on.registry, cfg, device, "torch")
        row["torch_us"] = microseconds(lambda: on.call(slow, q, full), device, 3)
    chain = state.plan(AttentionBatch(new, cached, pages), bucket=replace(bucket, tree=False))
    chained = built(on.registry, replace(on.cfg, captured=True), device, "triton")
    row["chain_us"] = microseconds(lambda: on.call(chained, q, chain), device)
    one = state.plan(AttentionBatch((1,) * requests, cached, pages), bucket=requests)
    decode = built(on.registry, replace(on.cfg, phase="decode"), device, "triton")
    row["decode_us"] = microseconds(lambda: on.call(decode, q[:requests], one), device)
    return row


def verifying(heads: int) -> MLAConfig:
    """Return latent attention of DeepSeek-V3's sizes, of a few new tokens a request."""
    return MLAConfig(heads, 512, 64, 128, 128, 0.1, 64, BF16, BF16, "ragged", lse=False, few=True)


def captured_for(heads: int, each: int, requests: int, length: int, device: str) -> int:
    """Return the longest request that a server captures such a step for.

    A step over short contexts has a graph of its own where another backend attends then.
    """
    capacity, tokens, taken = 64 * WIDTH, max(4, requests * each), set()
    for longest in (SHORT_CONTEXT, capacity):
        cfg = replace(verifying(heads), captured=True, context=context_of(longest))
        taken.add(MLA.choose(cfg, device).rung_for(tokens).backend.name)
    return SHORT_CONTEXT if length + each <= SHORT_CONTEXT and len(taken) > 1 else capacity


def cache_of(requests: int, device: str) -> torch.Tensor:
    """Return pages for so many requests."""
    return torch.randn(requests * WIDTH + 1, 64, 576, device=device).to(BF16)


def full_step(
    heads: int, each: int, requests: int, length: int, cache: torch.Tensor, device: str
) -> Callable[[str], Callable[[], torch.Tensor]]:
    """Return what makes the call of a backend by name: a bucket in which every request brings ``each`` tokens."""
    cfg, longest = replace(verifying(heads), captured=True), captured_for(heads, each, requests, length, device)
    bucket = ExtendBucket(max(4, requests * each), requests, each, longest=longest)
    state = AttentionState(requests + 2, 1024, WIDTH, 64, device)
    batch = AttentionBatch((each,) * requests, (length,) * requests, tables(requests, WIDTH))
    meta = state.plan(batch, bucket=bucket)
    q = torch.randn(meta.num_tokens, heads, 576, device=device).to(BF16)
    return lambda name: partial(decoded, built(MLA, cfg, device, name), q, cache, meta)


def compile_ahead(sizes: Sequence[tuple[int, int, int, int]], device: str) -> None:
    """Call Triton's kernels at all sizes once: they are compiled side by side, which one by one takes a minute."""

    def first(size: tuple[int, int, int, int]) -> None:
        full_step(*size, cache_of(size[2], device), device)("triton")()

    jobs = [precompile.Job(str(size), size[1] * size[2], "triton", partial(first, size)) for size in sizes]
    precompile.run(jobs, lambda label: None)


def flashmla(heads: int, each: int, requests: int, length: int) -> dict[str, Any]:
    """Return the row of FlashMLA verifying so many tokens of each request."""
    cfg, draw = verifying(heads), torch.Generator().manual_seed(heads + each)
    pages, cache = tables(requests, WIDTH), cache_of(requests, "cuda")
    oracle = built(MLA, replace(cfg, few=False), "cuda", "torch")

    def state() -> AttentionState:
        return AttentionState(requests + 2, 1024, WIDTH, 64, "cuda")

    uneven = (*(int(torch.randint(1, each + 1, (), generator=draw)) for _ in range(requests - 1)), each)
    row: dict[str, Any] = {"what": "flashmla", "heads": heads, "new": each, "requests": requests, "context": length}
    row["capacity"] = captured_for(heads, each, requests, length, "cuda")
    padded = ExtendBucket(max(16, requests * each), requests + 2, each)
    for name, new, cached, bucket in (
        ("uniform", (each,) * requests, (length,) * requests, None),
        ("uneven", uneven, (length,) * (requests - 1) + (17,), None),
        # The last request has nothing cached: it is shorter than the others' drafts.
        ("padded", (*uneven[:-1], 1), (*(length - i for i in range(requests - 1)), 0), padded),
    ):
        impl = built(MLA, replace(cfg, captured=bucket is not None), "cuda", "flashmla")
        own, batch = state(), AttentionBatch(new, cached, pages)
        meta = own.plan(batch, bucket=bucket)
        q = torch.randn(meta.num_tokens, heads, 576, device="cuda").to(BF16)
        replay = captured(partial(decoded, impl, q, cache, meta), "cuda")
        if bucket is not None:  # replayed with other lengths than were captured
            batch = AttentionBatch(new, tuple(max(0, c - 9) for c in cached), pages)
            own.plan(batch, bucket=bucket)
        found = replay()[: sum(new)]
        row[name] = error(found, oracle.decode(q[: sum(new)], cache, state().plan(batch))[0])
    call_of = full_step(heads, each, requests, length, cache, "cuda")
    for name in ("flashmla", "triton"):
        row[f"{name}_us"] = microseconds(call_of(name), "cuda")
    return row


def decoded(impl: Any, q: torch.Tensor, cache: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """Return the attention over latents of one step."""
    found: torch.Tensor = impl.decode(q, cache, meta)[0]
    return found


def refusal_of_flashmla(options: argparse.Namespace) -> str | None:
    """Return why FlashMLA cannot be asked here."""
    return MLA.named("flashmla").why_not(verifying(16), as_device(options.device))


@torch.inference_mode()
def main() -> None:
    """Run what was asked for."""
    parser = arguments(__doc__, 70.0)
    parser.add_argument("parts", nargs="*", default=["tree", "flashmla"])
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, draw = Rows(options), torch.Generator().manual_seed(0)
    bad: list[Any] = []
    if "tree" in options.parts:
        for on in shapes(options.small, options.device):
            for each, requests in ((9, 8), (33, 1)):
                if rows.late(what="tree", name=on.name, page=on.page):
                    return finish(bad)
                rows.put(row := tree(on, each, requests, draw))
                bad += [row] if not max(row["errors"]) <= BOUND else []
    if "flashmla" in options.parts:
        if (why := refusal_of_flashmla(options)) is not None:
            rows.put({"what": "flashmla", "refused": why})
            return finish([*bad, why])
        sizes = [(heads, *size) for heads in (16, 128, 64, 32) for size in VERIFIED]
        compile_ahead(sizes, options.device)
        for size in sizes:
            if rows.late(what="flashmla", heads=size[0]):
                return finish(bad)
            rows.put(row := flashmla(*size))
            bad += [row] if not max(row["uniform"], row["uneven"], row["padded"]) <= BOUND else []
    finish(bad)


if __name__ == "__main__":
    main()
