"""Time a decoder layer of DeepSeek-V3 as one rank of eight holds it: ``python benchmarks/tp8_layer.py [--out FILE]``.

Of 128 heads 16, of each expert and of the shared one 256 of 2,048 columns, FP8 in blocks of 128 x 128, a bf16 cache;
sums over ranks are left out. The clock is a chain: 16 layers of the model, with weights, routers and caches of their
own, captured one behind the other, a whole replay over their number, nothing subtracted. Weights and inputs are random;
all requests hold 4,096 tokens, the new one included, in pages of 64 in random order.

A row each: decode of 1, 64 and 128 requests; a prompt of 4,096 tokens, which is not captured: the device is kept
waiting until all of it is queued, and events are around it; and decode attention alone, request after request and layer
after layer, on more caches than L2 could hold. With ``--profile`` also the launches of one layer in their order.

``--build``: also take what packages compile when it is first called, which a model takes after a warm-up. Floors are
the sums of the layers' cost models. ``drawn_experts``: how many of the routed experts a layer's tokens chose.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import profiles
import torch
from rows import Rows, arguments, finish

import fastlayers as fl
from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState
from fastlayers.comm.layouts import BETWEEN, Hidden
from fastlayers.layer import Layer
from fastlayers.registry.spec import spec_of
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.tuning.probe import choices_of
from fastlayers.tuning.sweep import case_at, peak_flops
from fastlayers_models.auto import family_of
from fastlayers_server.known_models import KNOWN
from fastlayers_server.random_models import fill_random

# Embedding and head are there because a model has them; nothing of them is timed.
RANK: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 256, "intermediate_size": 2304,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "vocab_size": 2048,
}  # fmt: skip
SMALL: dict[str, Any] = RANK | {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "max_position_embeddings": 4096,
}  # fmt: skip
# Replays before those that count, and seconds of replays before these.
SKIPPED, SETTLING = 4, 0.5
# A chain is of so many times what L2 holds; and the fastest clock that a device may have, to keep it waiting.
TIMES_L2, CLOCK = 10, 2.2e9
Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """How many layers, which batches, how many cached tokens, how long a prompt, and how often all is timed."""

    layers: int
    batches: tuple[int, ...]
    context: int
    prompt: int
    replays: int


class Stack:
    """Layers with weights and caches of their own, and steps through them."""

    def __init__(self, config: dict[str, Any], sizes: Sizes, device: str, build: bool) -> None:
        self.sizes, self.device, self.cuda = sizes, device, device != "cpu"
        family: Any = family_of(config)
        given = family.config_class.from_hf(config | {"num_hidden_layers": sizes.layers})
        self.model = family(given, device=device, dtype=torch.bfloat16).eval()
        if build:
            for each in self.model.modules():
                if isinstance(each, Layer):
                    each.choose_again(built_only=False)
        fill_random(self.model)
        fl.finalize(self.model)
        self.layers = list(self.model.decoder.layers)
        size = self.model.page_size
        longest = max(sizes.context, sizes.prompt)
        self.width = -(-longest // size)
        self.total = 1 + max(sizes.batches) * self.width
        spec = fl.kv_cache_spec(self.model, page_size=size, dtype=self.model.kv_dtype)
        self.caches = spec.allocate(self.total, device)
        for cache in self.caches:
            cache.keys.normal_()
        order = (torch.randperm(self.total - 1) + 1).tolist()
        self.pages = [order[i * self.width : (i + 1) * self.width] for i in range(max(sizes.batches))]
        self.states: list[AttentionState] = []
        runtime = None if self.cuda else EagerRuntime()
        self.graphs = CudaGraphs(device if self.cuda else None, runtime=runtime, freeze=False)

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> AttentionMeta:
        """Return a step's metadata, in buffers of its own."""
        size = self.model.page_size
        state = AttentionState(len(batch.query_lens), batch.num_tokens, self.width, size, self.device)
        self.states.append(state)
        meta = state.plan(batch, bucket=bucket, num_pages=self.total)
        meta.vouch()
        return meta

    def decoding(self, requests: Sequence[int]) -> AttentionMeta:
        """Return the metadata of a captured decode step of these requests."""
        count, pages = len(requests), [self.pages[i] for i in requests]
        return self.plan(AttentionBatch((1,) * count, (self.sizes.context - 1,) * count, pages), count)

    def through(self, meta: AttentionMeta) -> Call:
        """Return a call of all layers, each of which finds what a layer in front of it would leave."""
        shape = meta.num_tokens, self.model.config.hidden_size
        x, residual = (torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(2))
        step, valid = self.model.single_step(meta), None
        if meta.bucket is not None and meta.num_tokens > 1:  # as captured steps are told which rows are real
            valid = torch.full((1,), meta.num_tokens, dtype=torch.int32, device=self.device)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = Hidden(x, residual, BETWEEN)
            for layer, cache in zip(self.layers, self.caches, strict=True):
                hidden = layer(hidden, meta, cache, step, valid)
            assert hidden.residual is not None
            return hidden.tensor, hidden.residual

        return call

    def attending(self, requests: int) -> Call:
        """Return calls of decode attention of one request, for so many of them in each layer."""
        metas = [self.decoding([i]) for i in range(requests)]
        cfg = self.layers[0].self_attn.cfg
        shape = len(self.layers), 1, cfg.num_heads, cfg.latent_width
        queries = torch.randn(shape, device=self.device).to(torch.bfloat16)

        def call() -> torch.Tensor:
            for meta in metas:
                for layer, cache, q in zip(self.layers, self.caches, queries, strict=True):
                    out, _ = layer.self_attn.core(meta, 1).decode(q, cache.keys, meta)
            return out

        return call

    def many(self) -> int:
        """Return how many requests' caches in all layers are more than L2 holds, by far."""
        held = self.width * self.model.page_size * self.caches[0].keys[0, 0].nbytes * len(self.caches)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else 0
        return max(1, min(len(self.pages), -(-TIMES_L2 * l2 // held)))

    def captured(self, name: str, call: Call, calls: int = 1) -> dict[str, Any]:
        """Capture a call; return a row of its replays, and whether they gave the bits of one that is not captured."""
        begin = time.perf_counter()
        plain = [each.clone() for each in _tensors(call())]
        self.wait()
        first = time.perf_counter() - begin
        outputs = _tensors(self.graphs.capture(name, call))
        found = self.row(self.replays(name), calls)
        same = all(map(torch.equal, plain, outputs))
        finite = all(bool(each.isfinite().all()) for each in outputs)
        return found | {"same_bits": same, "finite": finite, "first_s": round(first, 2)}

    def replays(self, name: str) -> list[float]:
        """Return the microseconds of replays that are queued back to back."""
        count = self.sizes.replays
        if not self.cuda:
            return [_seconds(lambda: self.graphs.replay(name)) * 1e6 for _ in range(count)]
        end = time.perf_counter() + SETTLING
        while time.perf_counter() < end:
            for _ in range(SKIPPED):
                self.graphs.replay(name)
            self.wait()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(SKIPPED + count + 1)]
        events[0].record()
        for event in events[1:]:
            self.graphs.replay(name)
            event.record()
        self.wait()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)][SKIPPED:]

    def queued(self, call: Call, count: int) -> dict[str, Any]:
        """Return the microseconds of a layer in uncaptured calls, all of whose launches wait while one is queued."""
        begin = time.perf_counter()
        outputs = _tensors(call())
        self.wait()
        first, host = time.perf_counter() - begin, _seconds(call)
        self.wait()
        found, ahead, pause = list[float](), list[bool](), 2 * host + 2e-3
        while len(found) < count:
            if not self.cuda:
                found.append(_seconds(call) * 1e6)
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(int(pause * CLOCK))
            events[0].record()
            call()
            ahead.append(not events[0].query())
            events[1].record()
            self.wait()
            if not ahead[-1] and pause < 0.1:  # the host was slower than before: all again, with a longer wait
                pause, found, ahead = 2 * pause, [], []
                continue
            found.append(events[0].elapsed_time(events[1]) * 1e3)
        row = self.row(found) | {"finite": all(bool(each.isfinite().all()) for each in outputs)}
        return row | {"first_s": round(first, 2), "host_ms": round(host * 1e3, 2), "host_ahead": all(ahead)}

    def row(self, found: Sequence[float], calls: int = 1) -> dict[str, Any]:
        """Return median and quartiles of runs, over the layers and what each of them does so often."""
        low, middle, high = (round(each / len(self.layers) / calls, 2) for each in statistics.quantiles(found, n=4))
        return {"us": middle, "quartiles_us": [low, high], "runs": len(found)}

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def drawn(self, call: Call) -> float:
        """Return how many routed experts a layer's tokens choose: the median over layers, whose routers differ."""
        found: list[int] = []

        def count(router: Any, given: Any, made: Any) -> None:
            found.append(int(made[1][made[1] >= 0].unique().numel()))

        hooks = [layer.mlp.gate.register_forward_hook(count) for layer in self.layers]
        call()
        for hook in hooks:
            hook.remove()
        return statistics.median(found)

    def costs(self, tokens: int, phase: str) -> dict[str, Any]:
        """Return a layer's floor by the cost models, the bytes that it must move, and who computes what."""
        us, moved, backends = 0.0, 0.0, {}
        context = self.sizes.context
        for name, module in self.layers[0].named_modules():
            for choice in _of_step(module, phase, context).values():
                spec = spec_of(choice.layer)
                if not spec.heavy:
                    continue
                rung = choice.rung_for(tokens)
                backends[name] = rung.backend.name
                cost = spec.cost(case_at(choice.layer, choice.cfg, tokens, context))
                flops = peak_flops(choice.layer, choice.cfg, choice.device)
                us += 1e6 * max(cost.floors(choice.device.bandwidth, flops))
                moved += cost.min_bytes
        return {"floor_us": round(us, 2), "mb": round(moved / 1e6, 1), "backends": backends}


def _of_step(module: Any, phase: str, context: int) -> dict[str, Any]:
    """Return by layer what of a module's choices a step takes: of attention's those of its phase and context."""
    found: dict[str, Any] = {}
    for choice in choices_of(module):
        cfg = choice.cfg
        usual = getattr(cfg, "phase", phase) == phase
        if usual and (phase != "decode" or getattr(cfg, "context", None) in (None, context_of(context))):
            found.setdefault(choice.layer, choice)
    return found


def _tensors(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def clocks() -> dict[str, str]:
    """Return the clocks and the power of the device as nvidia-smi tells them; empty where it does not."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = ["-i", visible] if visible else []
    asked = "clocks.sm,clocks.mem,power.draw"
    try:
        command = ["nvidia-smi", *only, f"--query-gpu={asked}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in said[0].split(",")] if said else []
    return dict(zip(asked.split(","), values, strict=False)) if len(values) == 3 else {}


def profiled(stack: Stack, what: str, call: Call, times: int) -> dict[str, Any]:
    """Return the launches of one layer in their order, and the sums of all."""
    events = profiles.events_of(call, times) if stack.cuda else []
    layers = times * len(stack.layers)
    return {"profile": what, "order": profiles.one_layer(events, layers), **profiles.summary(events, layers, 10)}


@torch.inference_mode()
def main() -> None:
    """Run all of it."""
    parser = arguments(__doc__, 60.0)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 128])
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="also the launches of one layer")
    parser.add_argument("--build", action="store_true", help="also take what packages compile when it is first called")
    options = parser.parse_args()
    rows, device, bad = Rows(options), options.device, list[Any]()
    config = dict(KNOWN["deepseek-ai/DeepSeek-V3"]) | (SMALL if options.small else RANK)
    usual = Sizes(options.layers, tuple(options.batches), 4096, 4096, options.replays)
    sizes = Sizes(3, (1, 3), 128, 96, 5) if options.small else usual
    begin = time.perf_counter()
    stack = Stack(config, sizes, device, options.build)
    stack.wait()
    experts = stack.layers[0].mlp.experts
    gib = sum(each.nbytes for each in stack.model.parameters()) / 2**30
    rows.put({
        "what": "built", "layers": sizes.layers, "gib": round(gib, 2), "seconds": round(time.perf_counter() - begin, 2),
        "shared_experts": "among the routed" if experts.cfg.num_shared else "apart", "clocks": clocks(),
    })  # fmt: skip
    replays: dict[str, Call] = {}

    def put(row: dict[str, Any]) -> None:
        rows.put(row)
        bad.extend([row] * (not row["finite"]))

    for batch in sizes.batches:
        if not rows.late(what="decode", batch=batch):
            call, name = stack.through(stack.decoding(range(batch))), f"decode {batch}"
            head = {"what": "decode", "batch": batch, "context": sizes.context} | stack.captured(name, call)
            put(head | {"drawn_experts": stack.drawn(call)} | stack.costs(batch, "decode"))
            replays[name] = partial(stack.graphs.replay, name)
    if not rows.late(what="prefill"):
        call = stack.through(stack.plan(AttentionBatch((sizes.prompt,), (0,), [stack.pages[0]])))
        head = {"what": "prefill", "tokens": sizes.prompt} | stack.queued(call, max(4, sizes.replays // 8))
        put(head | {"drawn_experts": stack.drawn(call)} | stack.costs(sizes.prompt, "extend"))
        replays["prefill"] = call
    if not rows.late(what="attention"):
        many = stack.many()
        head = {"what": "attention", "batch": 1, "context": sizes.context, "calls": many * sizes.layers}
        put(head | stack.captured("attention", stack.attending(many), many))
    for name, call in replays.items() if options.profile else ():
        if not rows.late(what="profile", of=name):
            rows.put(profiled(stack, name, call, 2 if name == "prefill" else 4))
    rows.put({"what": "end", "clocks": clocks()})
    finish(bad)


if __name__ == "__main__":
    main()
