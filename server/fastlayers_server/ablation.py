"""``fastlayers bench ablation``: a decode step of a few layers with each optimisation off and on, one at a time.

A switch replaces one part of the layers by what it would be without the optimisation (two products instead of one
fused, a pass of its own instead of an epilogue), while a step is captured or called; nothing else changes. Both ways
are timed in turns, and what they compute is compared. ``quoted`` is what the source of the item reports, for a whole
model on its own machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.kv_write.layer import KVWrite
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.attention.mla.fp8_absorb import QuantisedAbsorb
from fastlayers.attention.mla_kv_write.layer import MLAKVWrite
from fastlayers.comm.layouts import Hidden
from fastlayers.errors import ArgumentError
from fastlayers.registry import registry
from fastlayers.runtime import launch
from fastlayers.runtime.launch import Kernel
from fastlayers.tuning.bench import describe_run
from fastlayers.tuning.clock import clock_for, measure_captures
from fastlayers_models.blocks import SwiGLU
from fastlayers_server.ablation_models import check, stack_of

_NONE = object()
CAPTURED = "54"  # the item of captured steps
# Captures of one step differ by up to 4 % of a short one, by where their buffers lie: the median of so many counts.
CAPTURES = 5
Off = Callable[[], AbstractContextManager[Any]]


def _place(owner: Any, name: str, value: Any) -> dict[str, Any]:
    """Return where an attribute is held: layers read parameters and submodules past ``nn.Module``'s look-up."""
    if not isinstance(owner, nn.Module) or name in vars(owner):
        return vars(owner)
    held: list[dict[str, Any]] = [owner._parameters, owner._modules]
    new = owner._modules if isinstance(value, nn.Module) else vars(owner)
    return next((place for place in held if name in place), new)


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give objects other attributes (modules and methods, too) while the block runs."""
    places = [(_place(*change), change[1]) for change in changes]
    held = [(place, name, place.get(name, _NONE)) for place, name in places]
    for (place, name), (_, _, value) in zip(places, changes, strict=True):
        place[name] = value
    try:
        yield
    finally:
        for place, name, value in held:
            if value is _NONE:
                del place[name]
            else:
                place[name] = value


@dataclass
class Stack:
    """A few decoder layers of a model, and a decode step of ``batch`` requests with ``context`` tokens each."""

    model: Any
    batch: int
    context: int
    valid: torch.Tensor | None = None
    _step: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        model, batch, context = self.model, self.batch, self.context
        pages = whole_pages([context + 1] * batch, model.page_size)
        total = 1 + batch * len(pages[0])
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        caches, random = spec.allocate(total, model.device), torch.Generator(model.device).manual_seed(0)
        for cache in caches:
            for each in (cache.keys, cache.values):
                if each is not None:
                    each.copy_(torch.empty(each.shape, device=each.device).normal_(generator=random).to(each.dtype))
        state = AttentionState(batch, batch, len(pages[0]), model.page_size, model.device)
        meta = state.plan(AttentionBatch((1,) * batch, (context,) * batch, pages), bucket=batch, num_pages=total)
        ids = torch.randint(model.config.vocab_size, (batch,), device=model.device, generator=random)
        step = model.single_step(meta)
        self._step = model.embed(model.decoder.embed_tokens, ids, step), meta, caches, step

    @property
    def layers(self) -> Sequence[Any]:
        """The decoder layers."""
        layers: Sequence[Any] = self.model.decoder.layers
        return layers

    def of(self, kind: type[nn.Module]) -> list[Any]:
        """Return the modules of a kind."""
        return [module for layer in self.layers for module in layer.modules() if isinstance(module, kind)]

    def __call__(self) -> torch.Tensor:
        """Run the step; the hidden states behind the last layer."""
        embedded, meta, caches, step = self._step
        hidden = Hidden.start(embedded)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, meta, cache, step, self.valid)
        finished: torch.Tensor = layer.communicator.finish(hidden, None, step)
        return finished


@dataclass(frozen=True)
class Switch:
    """One optimisation: what it is, whose numbers are quoted, and the way without it.

    ``off(stack)`` returns what makes the way without it, or a sentence that says why there is none here; ``on``
    likewise where the layers do not have it by themselves. ``other``: the two ways compute different things.
    """

    what: str
    items: str
    quoted: str
    off: Callable[[Stack], Off | str]
    on: Callable[[Stack], Off | str] | None = None
    other: bool = False


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    wide = wanted.double()
    return float((found.double() - wide).norm() / wide.norm())


def _latent(stack: Stack) -> list[Any]:
    return stack.of(fl.MLAAttention)


def _needs(found: Sequence[Any], what: str) -> str | None:
    return None if found else f"no {what} in these layers"


def _usual(stack: Stack) -> Off:
    return nullcontext


def _copied_queries(stack: Stack) -> Off | str:
    layers = _latent(stack)

    def without_room(layer: Any) -> Any:
        return lambda nope, q_pe, room, cache, meta: type(layer)._mqa(layer, nope, q_pe, None, cache, meta)

    def held(layer: Any) -> Any:  # without room a program is taken for one that is traced, which holds no weights
        return lambda compiling: type(layer)._absorbed_weights(layer, False)

    ways = {"_mqa": without_room, "_absorbed_weights": held}
    return _needs(layers, "latent attention") or (
        lambda: replaced(*((layer, name, way(layer)) for layer in layers for name, way in ways.items()))
    )


def _expanded(stack: Stack) -> Off | str:
    layers = _latent(stack)

    def expanding(layer: Any) -> Any:
        def forward(hidden: Any, meta: Any, cache: Any) -> Any:
            other = replace(meta, path="mha_one_shot")
            other.vouch()
            return type(layer).forward(layer, hidden, other, cache)

        return forward

    return _needs(layers, "latent attention") or (
        lambda: replaced(*((layer, "forward", expanding(layer)) for layer in layers))
    )


def _two_products(stack: Stack) -> Off | str:
    layers = [layer for layer in _latent(stack) if layer.fused_a]
    changes: list[tuple[Any, str, Any]] = []
    for layer in layers:
        fused, first = layer.qkv_a_proj, layer.qkv_a_proj.part_sizes[0]
        parts = []
        for rows in (slice(0, first), slice(first, None)):
            weight, bias = fused.weight[rows], None if fused.bias is None else fused.bias[rows]
            if isinstance(fused, fl.FP8BlockLinear):
                block = fused.cfg.block_size
                scale = fused.weight_scale_inv[rows.start // block[0] : -(-first // block[0]) if rows.stop else None]
                parts.append(
                    fl.FP8BlockLinear.from_checkpoint(weight, scale, bias, block_size=block, dtype=layer.cfg.dtype)
                )
            else:
                dense = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
                dense.weight = nn.Parameter(weight, requires_grad=False)
                if bias is not None:
                    dense.bias = nn.Parameter(bias, requires_grad=False)
                parts.append(fl.Linear.from_linear(dense))
        changes += [(layer, "fused_a", False), (layer, "q_a_proj", parts[0])]
        changes += [(layer, "kv_a_proj_with_mqa", parts[1])]
    return _needs(layers, "fused q_a and kv_a") or (lambda: replaced(*changes))


def _separate_write(stack: Stack) -> Off | str:
    changes: list[tuple[Any, str, Any]] = []
    for layer in _latent(stack):
        cfg = layer.cfg
        write = MLAKVWrite(cfg.kv_lora_rank, cfg.qk_rope_head_dim, kv_dtype=cfg.kv_dtype, device=stack.model.device)

        def latent(q, k, v, cos, sin, positions, cache, loc, *, out, rotary=layer.rotary, write=write):
            turned, key = rotary(q, k, positions)
            write(v[:, 0], key[:, 0], cache.keys, loc)
            return out.copy_(turned)

        changes.append((layer, "rotary_kv_write", latent))
    for layer in stack.of(fl.Attention):
        both = KVWrite(layer.num_kv_heads, layer.head_dim, kv_dtype=layer.cfg.kv_dtype, device=stack.model.device)

        def grouped(q, k, v, cos, sin, positions, cache, loc, *, rotary=layer.rotary, write=both):
            turned, key = rotary(q, k, positions)
            write(key, v, cache.keys, cache.values, loc)
            return turned

        changes += [(layer, "write", grouped), (layer, "side_by_side", False)]
    return lambda: replaced(*changes)


def _one_stream(stack: Stack) -> Off | str:
    if stack.model.device.type != "cuda":
        return "streams are CUDA's"
    layers = [layer for layer in _latent(stack) if layer.alt_stream is not None]
    return _needs(layers, "layers with a second stream") or (
        lambda: replaced(*((layer, "alt_stream", None) for layer in layers))
    )


def _chosen(stack: Stack, kind: type[nn.Module], backend: str, **changes: Any) -> Off | str:
    """Return a switch to other ladders of the same layers: another backend's by name, or another configuration's."""
    layers = stack.of(kind)
    if (why := _needs(layers, kind.__name__)) is not None:
        return why
    if stack.model.device.type == "cpu" and backend == "triton":
        return "Triton would be interpreted"
    swaps = []
    for layer in layers:
        usual, cfg = layer.choice, replace(layer.cfg, **changes)
        if (why := registry(usual.layer).named(backend).why_not(cfg, usual.device)) is not None:
            return f"{backend}: {why}"
        choice = registry(usual.layer).choose(cfg, usual.device, backend)
        if {r.backend.weight_layout for r in choice.rungs} != {r.backend.weight_layout for r in usual.rungs}:
            return f"{backend} packs its weights in another way"
        swaps.append((layer, "ladder", choice.build()))
    return lambda: replaced(*swaps)


def _activation_apart(stack: Stack) -> Off | str:
    blocks = [block for block in stack.of(SwiGLU) if block.act_quant is not None]
    return _needs(blocks, "activations that write FP8") or (
        lambda: replaced(*((block, "act_quant", None) for block in blocks))
    )


def _factor_apart(stack: Stack) -> Off | str:
    layers = [layer for layer in stack.of(fl.FusedMoE) if layer.cfg.scaling_factor != 1.0]
    if (why := _needs(layers, "routed factor")) is not None:
        return why
    changes: list[tuple[Any, str, Any]] = []
    for layer in layers:
        factor = layer.cfg.scaling_factor
        ladder = registry("fused_moe").choose(replace(layer.cfg, scaling_factor=1.0), layer.choice.device).build()

        def forward(x: Any, weights: Any, ids: Any, layer: Any = layer, factor: float = factor) -> Any:
            return type(layer).forward(layer, x, weights, ids).mul_(factor)

        changes += [(layer, "ladder", ladder), (layer, "forward", forward)]
    return lambda: replaced(*changes)


def _factor_in_gate(stack: Stack) -> Off | str:
    blocks = [layer.mlp for layer in stack.layers if isinstance(getattr(layer.mlp, "gate", None), fl.TopKRouter)]
    blocks = [block for block in blocks if block.experts.cfg.scaling_factor != 1.0 and not block.gate.cfg.apply_scaling]
    changes: list[tuple[Any, str, Any]] = []
    for block in blocks:
        for layer, cfg in (
            (block.gate, replace(block.gate.cfg, apply_scaling=True)),
            (block.experts, replace(block.experts.cfg, scaling_factor=1.0)),
        ):
            changes.append((layer, "ladder", registry(layer.choice.layer).choose(cfg, layer.choice.device).build()))
    return _needs(blocks, "routed factor") or (lambda: replaced(*changes))


def _codes_absorbed(stack: Stack) -> Off | str:
    layers = _latent(stack)
    if (why := _needs(layers, "latent attention")) is not None:
        return why
    try:
        made = [QuantisedAbsorb(layer.cfg, layer.kv_b_proj, layer.choice.device.type) for layer in layers]
    except ArgumentError as error:
        return str(error)
    return lambda: replaced(*((layer, "quantised_absorb", each) for layer, each in zip(layers, made, strict=True)))


def _shared_fused(stack: Stack) -> Off | str:
    blocks = [layer.mlp for layer in stack.layers if getattr(layer.mlp, "shared_experts", None) is not None]
    if (why := _needs(blocks, "shared experts")) is not None:
        return why
    changes: list[tuple[Any, str, Any]] = []
    for block in blocks:
        usual, gate_up, down = block.experts, block.shared_experts.gate_up_proj, block.shared_experts.down_proj
        cfg = usual.cfg
        if usual.choice.rungs[-1].backend.weight_layout != "checkpoint":
            return "the experts are packed in another way"
        quant = stack.model.config.quant if cfg.quant != "none" else fl.QuantSpec()
        fused = fl.FusedMoE(
            cfg.hidden_size, cfg.intermediate_size, cfg.num_experts, cfg.top_k, num_shared=1, quant=quant,
            scaling_factor=cfg.scaling_factor, device=stack.model.device, dtype=usual.dtype,
        )  # fmt: skip
        parts = {"w13": gate_up.weight, "w2": down.weight}
        if cfg.quant == "fp8_block":
            parts |= {"w13_scale_inv": gate_up.weight_scale_inv, "w2_scale_inv": down.weight_scale_inv}
        for name, shared in parts.items():
            both = getattr(fused, name).data
            both[:-1].copy_(getattr(usual, name))
            both[-1].copy_(shared)
        fused.finalize()
        changes += [(block, "experts", fused), (block, "shared_experts", None)]
    return lambda: replaced(*changes)


def _half_valid(stack: Stack) -> Off | str:
    if stack.batch < 2:
        return "one row has no padding"
    count = torch.full((1,), stack.batch // 2, dtype=torch.int32, device=stack.model.device)
    return lambda: replaced((stack, "valid", count))


def _no_sinks(stack: Stack) -> Off | str:
    layers = [layer for layer in stack.of(fl.Attention) if layer.sinks is not None]
    return _needs(layers, "sinks") or (lambda: replaced(*((layer, "sinks", None) for layer in layers)))


class _Undependent:
    """A driver whose prepared launches wait for the kernels in front of them."""

    def __init__(self, usual: Any) -> None:
        self.device, self.stream, self.maker = usual.device, usual.stream, usual.maker
        self._prepare = usual.prepare

    def prepare(self, compiled: Any) -> Any:
        """Prepare a launch without the attribute of a dependent one."""
        launcher = compiled.run
        held, launcher.launch_pdl = launcher.launch_pdl, False
        try:
            return self._prepare(compiled)
        finally:
            launcher.launch_pdl = held


def _no_dependent_launches(stack: Stack) -> Off | str:
    if stack.model.device.type != "cuda" or not launch.PREPARED:
        return "needs CUDA and launches that are prepared"
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("fastlayers.")]
    kernels = {id(each): each for m in modules for each in vars(m).values() if isinstance(each, Kernel)}.values()

    # What they launched without stays with them from call to call; a launch is prepared when it comes again.
    known = [(kernel, "_known", dict[Any, Any]()) for kernel in kernels]
    driver = _Undependent(launch.driver)
    return lambda: replaced(*known, (launch, "driver", driver))


SWITCHES = (
    Switch("sinks inside attention", "2", "+2.1 % (1 request), -0.3 % (32), GPT-OSS-20B", _no_sinks, other=True),
    Switch("absorbed queries written in place", "10", "an image", _copied_queries),
    Switch("latents attended to instead of expanded keys", "11", "an image", _expanded),
    Switch("q_a and kv_a in one product", "14", "+4.2 % (1 request), +3.8 % (32)", _two_products),
    Switch("RoPE and the cache's write in one launch", "15, 17", "+3 %, GPT-OSS-120B TP4", _separate_write),
    Switch("norms of q and latent on two streams", "20", "an image", _one_stream),
    Switch("router in one kernel", "24", "+5 to 8 %", lambda stack: _chosen(stack, fl.TopKRouter, "torch")),
    Switch("shared expert among the routed", "25", "an image", _usual, on=_shared_fused),
    Switch("tuned experts", "26", "2 x at 512 tokens", lambda stack: _chosen(stack, fl.FusedMoE, "triton")),
    Switch("routed factor in the sum over experts", "27", "an image", _factor_apart),
    Switch("factor in the gate's weights, not in the sum", "28", "an image", _usual, on=_factor_in_gate),
    Switch(
        "absorbed products of FP8 codes, not of a bf16 copy", "44, 45, 46", "an image", _usual, on=_codes_absorbed,
        other=True,
    ),
    Switch(
        "padding kept out of the experts, half of the rows", "36", "+7.6 %", _usual, on=_half_valid, other=True,
    ),
    Switch("tuned FP8 products", "37", "+5 %, +10 %", lambda stack: _chosen(stack, fl.FP8BlockLinear, "triton")),
    Switch("activation that writes FP8 rows", "40", "an image", _activation_apart),
    Switch("dependent launches", "58", "+3 % (1 request), GPT-OSS-120B TP4", _no_dependent_launches),
)  # fmt: skip


def numbers_of(items: str) -> set[int]:
    """Return the items that a row answers."""
    return set(map(int, items.split(", ")))


ITEMS = numbers_of(CAPTURED).union(*(numbers_of(switch.items) for switch in SWITCHES))


def rows(
    name: str, config: Mapping[str, Any], batches: Sequence[int], context: int, layers: int, place: Any, dtype: Any,
    rounds: int, items: Collection[int] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the run's description, then a row a switch and batch: microseconds off and on, and the ratio.

    ``items``: of these alone; empty: of all.
    """

    def asked(numbers: str) -> bool:
        return not items or not numbers_of(numbers).isdisjoint(items)

    check(name, config, place, context)
    sizes = "small" if torch.device(place).type == "cpu" else "real"
    head = {"model": name, "sizes": sizes, "layers": layers, "context": context, "dtype": str(dtype)}
    yield describe_run(place) | head
    model = stack_of(name, config, place, dtype, layers)
    with torch.inference_mode():
        for batch in batches:
            stack = Stack(model, batch, context)
            stack()  # packs, compiles and plans
            if asked(CAPTURED):
                yield {"model": name, "batch": batch, **captured_row(stack, rounds)}
            for switch in SWITCHES:
                if asked(switch.items):
                    yield {"model": name, "batch": batch, **switch_row(switch, stack, rounds)}


def undecided(ratio: float, noise: float) -> bool:
    """Say whether a ratio is no further from 1 than captures of one step lie apart: it decides nothing then."""
    return 0 < noise >= abs(ratio - 1)


def switch_row(switch: Switch, stack: Stack, rounds: int) -> dict[str, Any]:
    """Time a step with a switch off and on, in turns, and compare what both compute.

    ``noise``: how far captures of one way lie apart, a share; a ratio that is no further from 1 decides nothing.
    """
    row: dict[str, Any] = {"what": switch.what, "items": switch.items, "quoted": switch.quoted}
    off, on = switch.off(stack), switch.on(stack) if switch.on is not None else nullcontext
    for way in (off, on):
        if isinstance(way, str):
            return row | {"skipped": way}

    def call_of(way: Any) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with way():
                return stack()

        return call

    calls = {"off": call_of(off), "on": call_of(on)}
    difference = relative_rms(calls["off"](), calls["on"]())
    times = measure_captures(calls, stack.model.device, CAPTURES, rounds)
    found = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    row |= {f"{name}_us": round(us, 2) for name, us in found.items()}
    row |= {f"{name}_captures_us": [round(us, 2) for us in each] for name, each in times.items()}
    apart = max(max(each) / min(each) - 1 for each in times.values())
    row |= {"ratio": round(found["off"] / found["on"], 4), "noise": round(apart, 4)}
    return row if switch.other else row | {"difference": difference}


def captured_row(stack: Stack, rounds: int) -> dict[str, Any]:
    """Time a step that is launched from Python against its captured graph, nothing cold."""
    row: dict[str, Any] = {"what": "captured steps", "items": CAPTURED, "quoted": "about 5 x (1 request, whole model)"}
    if stack.model.device.type != "cuda":
        return row | {"skipped": "graphs are CUDA's"}
    timing = clock_for(stack.model.device, cold=False)
    captured = timing.measure({"on": timing.prepare(stack)}, rounds)["on"].us
    runs = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        stack()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - begin) * 1e6)
    eager = sorted(runs)[len(runs) // 2]
    return row | {"off_us": round(eager, 2), "on_us": round(captured, 2), "ratio": round(eager / captured, 4)}
