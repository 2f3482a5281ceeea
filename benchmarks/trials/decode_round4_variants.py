"""What ``decode_round4.py`` exchanges, and what each was predicted to gain; why: benchmarks/notes/decode_phases.md.

A variant puts kernels, rules or a configuration in the place of the library's while a step is captured. It promises the
base's bits (``equal``), or names the part of a layer (``probe``) whose results then differ by at most TOLERANCE.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from trials import decode_round4_triton as kernels
from trials import decode_round4_triton_experts as experts

from fastlayers.attention.gqa import triton_decode
from fastlayers.attention.rotary_kv_write import triton as rotation
from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.linear.dense import triton as dense
from fastlayers.linear.triton_gemm import Tile
from fastlayers.moe.fused_moe.triton import backend, grouped_gemm, mxfp4_hopper, pair_vector
from fastlayers.moe.router import triton as router
from fastlayers.runtime.launch import Kernel, Kinds
from fastlayers.triton_lang import dependent_launch
from fastlayers.tuning.samples import Option
from fastlayers_models.blocks import SwiGLU

# Of a part of a layer: sums of bf16 products in another order, rounded to bf16 once or twice.
TOLERANCE = 0.01
B30, B8, OSS = "qwen3_30b_a3b", "qwen3_8b", "gpt_oss_20b"
CACHED = (dense, rotation, triton_decode, router, backend, mxfp4_hopper, pair_vector)
# What launches of captured steps write between themselves: it must outlive them.
KEPT: list[torch.Tensor] = []
# What was called since the last exchange: a kernel that nobody launches would be as fast as the base, with its bits.
CALLED: set[str] = set()


def forget() -> None:
    """Let the next call of every layer make its launches anew."""
    for module in CACHED:
        for found in list(vars(module).values()):
            if getattr(found, "__name__", "").startswith("_launch") and hasattr(found, "cache_clear"):
                found.cache_clear()
    for kept in gc.get_objects():
        if type(kept) is Kinds:
            kept.clear()


@dataclass(frozen=True)
class With:
    """A kernel in a library kernel's place: launched with its constants, and some that the library does not know."""

    kernel: Kernel
    constants: Mapping[str, Any] = field(default_factory=dict)

    def at(self, grid: tuple[int, ...], *numbers: float, **given: Any) -> Callable[..., None]:
        """Return what launches it."""
        CALLED.add(self.kernel.__name__)
        return self.kernel.at(grid, *numbers, **{**given, **self.constants})


# Given the trial's step: what holds while the exchange does.
Swap = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Put:
    """An exchange of a module's attribute."""

    module: Any
    name: str
    value: Any

    def __call__(self, steps: Any) -> AbstractContextManager[Any]:
        return mock.patch.object(self.module, self.name, self.value)


def swap(module: Any, name: str, value: Any, **constants: Any) -> Put:
    """Return an exchange of a module's attribute; of a kernel with further constants."""
    return Put(module, name, With(value, constants) if isinstance(value, Kernel) else value)


def use(path: str, **config: int) -> Swap:
    """Return an exchange of the configuration of a linear or of attention, of all layers: ``path`` in the model."""

    @contextmanager
    def exchanged(steps: Any) -> Iterator[None]:
        place = steps.place(path)
        place.use(Option("triton", tuple(sorted(config.items()))))
        try:
            yield
        finally:
            place.use(None)

    return exchanged


def vector(n: int, k: int, warps: int, ahead: int) -> dict[str, int]:
    """Return a configuration of the matrix-vector kernel."""
    return {"VECTOR": 1, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "AHEAD": ahead}


def tile(m: int, n: int, k: int, stages: int, splits: int = 1) -> dict[str, int]:
    """Return a configuration of the tiled kernel."""
    return {
        "VECTOR": 0, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLITS": splits, "num_warps": 4, "num_stages": stages
    }  # fmt: skip


@dataclass(frozen=True)
class GatedUp:
    """Stands for ``SwiGLU.forward``: gate, up and silu in one launch, then down. ``k``: at most the columns there are.

    ``n`` gate rows and as many up rows a program; one row of x by the vector kernel, ``ahead`` tiles ahead; more rows,
    at most ``m``, on matrix units with so many ``stages``.
    """

    n: int
    k: int
    ahead: int = 1
    m: int = 0
    stages: int = 0

    def __call__(self, module: Any, x: torch.Tensor, valid: Any = None) -> torch.Tensor:
        """Return ``[T, D]``."""
        CALLED.add("SwiGLU")
        weight, (rows, columns) = module.gate_up_proj.weight, x.shape
        inner, k = weight.shape[0] // 2, min(self.k, next_power_of_2(columns))
        y = x.new_empty(rows, inner)
        sizes: dict[str, Any] = {"BLOCK_N": self.n, "BLOCK_K": k, "num_warps": 4}
        grid: tuple[int, ...] = (cdiv(inner, self.n),)
        launch: Any
        if self.m:
            assert rows <= self.m and columns % k == 0, (rows, columns)
            launch = kernels.gate_up_silu_tile_kernel[grid]
            numbers = [rows, inner, columns, x.stride(0), weight.stride(0)]
            sizes |= {"BLOCK_M": self.m, "num_stages": self.stages}
        else:
            assert rows == 1, rows
            blocks = cdiv(columns, k)
            launch = kernels.gate_up_silu_vector_kernel[grid]
            numbers = [inner, columns, weight.stride(0)]
            sizes |= {"EVEN_K": columns % k == 0, "BLOCKS": blocks, "AHEAD": min(blocks, self.ahead), "EVICT": ""}
        launch(x, weight, y, *numbers, **sizes, **dependent_launch(x.device))
        down: torch.Tensor = module.down_proj(y)
        return down

    def __get__(self, module: Any, owner: Any) -> Callable[..., torch.Tensor]:
        return functools.partial(self, module)


def last_adds(steps: Any) -> AbstractContextManager[Any]:
    """Exchange products with splits: the last program of a tile to finish adds them, not a second launch."""
    usual = dense._launches

    @functools.lru_cache
    def launches(
        m: int, n: int, k: int, x_stride: int, weight_stride: int, dtype: torch.dtype, bias: bool,
        config: tuple[int, ...], device: torch.device,
    ) -> Any:  # fmt: skip
        found = usual(m, n, k, x_stride, weight_stride, dtype, bias, config, device)
        c = dict(zip(dense.PARAMETERS, config, strict=True)) if config else dense.rule(m, n, k, dtype)
        if found.splits == 1 or k % c["BLOCK_K"]:
            return found
        how = Tile(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"], c["num_stages"], c["SPLITS"])
        grid = how.grid(m, n)
        counters = torch.zeros(grid[0], dtype=torch.int32, device=device)
        KEPT.append(counters)
        CALLED.add("split_kernel")
        launch = kernels.split_kernel.at(
            grid, m, n, k, x_stride, weight_stride, HAS_BIAS=bias, SPLITS=how.splits, EVEN_K=True, BLOCK_M=how.m,
            BLOCK_N=how.n, BLOCK_K=c["BLOCK_K"], num_warps=how.warps, num_stages=how.stages, **dependent_launch(device),
        )  # fmt: skip

        def product(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor, y: torch.Tensor) -> None:
            launch(x, weight, addend, y, x.new_empty(how.splits, m, n, dtype=torch.float32), counters)

        return dense._Launches(1, product, product)

    return mock.patch.object(dense, "_launches", launches)


def _logits(times: int) -> Swap:
    """Return an exchange of what launches the logits: ``times`` the experts a program."""

    def launch(tokens: int, hidden: int, of: int, stride: int, bias: bool, device: torch.device) -> Any:
        CALLED.add("logits")
        block_d, each = next_power_of_2(hidden), 1 if tokens <= 4 else 4
        block_e = times * (1 if block_d >= 4096 else 2)
        return router._logits_kernel.at(
            (cdiv(of, block_e), cdiv(tokens, each)), tokens, hidden, of, stride,
            HAS_BIAS=bias, TOKENS=each, BLOCK_E=block_e, BLOCK_D=block_d, num_warps=4, **dependent_launch(device),
        )  # fmt: skip

    return swap(router, "_launch_logits", launch)


@dataclass(frozen=True)
class Variant:
    """One exchange. ``group``: of which the step with all that gain has one. ``predicted``: µs gained, by model.

    ``calls``: what of :data:`CALLED` shows that it took place; none of it where only a configuration is another.
    """

    name: str
    group: str
    many: bool  # of the many rows' step; else one row's
    predicted: Mapping[str, str]
    swaps: Sequence[Swap]
    equal: bool = True
    probe: str = ""
    calls: tuple[str, ...] = ()


def _folded(evict: str, ahead: int) -> Swap:
    return swap(pair_vector, "vector_out_kernel", experts.vector_out_kernel, FOLD=8, EVICT=evict, AHEAD=ahead)


FIRST, OUT = "evict_first", ("vector_out_kernel",)
ROTATION, ROTATED = ("rotary_kv_write_kernel",), {B30: "25", B8: "18", OSS: "12"}
EARLY_ROTATION = swap(rotation, "_rotary_kv_write_kernel", kernels.rotary_kv_write_kernel)
IN_FIRST = swap(pair_vector, "vector_in_kernel", experts.vector_in_kernel, EVICT=FIRST)
HELD = tuple(
    Variant(f"{ahead} of 12 steps ahead", "codes", False, {OSS: predicted}, (
        swap(mxfp4_hopper, "held_gate_up_kernel", experts.ahead_gate_up_kernel, AHEAD=ahead),
        swap(mxfp4_hopper, "held_down_kernel", experts.ahead_down_kernel, AHEAD=ahead),
    ), calls=("ahead_gate_up_kernel", "ahead_down_kernel"))
    for ahead, predicted in ((4, "50"), (5, "45"), (3, "30"), (6, "25"))
)  # fmt: skip
SINGLE = (
    Variant("second product folded", "out", False, {B30: "30…70"}, (_folded("", 1),), False, "mlp", OUT),
    Variant(
        "second product folded, evicted first", "out", False, {B30: "40…90"}, (_folded(FIRST, 1),), False, "mlp", OUT
    ),
    Variant(
        "second product evicted first", "out", False, {B30: "10…20"},
        (swap(pair_vector, "vector_out_kernel", experts.vector_out_kernel, FOLD=1, EVICT=FIRST),), calls=OUT,
    ),
    Variant("first product evicted first", "in", False, {B30: "24"}, (IN_FIRST,), calls=("vector_in_kernel",)),
    *HELD,
    Variant(
        "gate, up, silu 1 + 1", "gate_up", False, {B8: "30…45"},
        (swap(SwiGLU, "forward", GatedUp(1, 1024)),), calls=("SwiGLU",),
    ),
    Variant(
        "gate, up, silu 2 + 2", "gate_up", False, {B8: "20…40"},
        (swap(SwiGLU, "forward", GatedUp(2, 1024)),), calls=("SwiGLU",),
    ),
    Variant(
        "linears evicted first", "linears", False, {B30: "10…20", B8: "10…30", OSS: "10"},
        (swap(dense, "vector_kernel", kernels.vector_kernel, EVICT=FIRST),), calls=("vector_kernel",),
    ),
    Variant(
        "head by the vector kernel", "head", False, {B8: "8…11"}, (use("lm_head", **vector(2, 1024, 4, 1)),), False,
        "lm_head",
    ),
    Variant("rotation reads early", "rotation", False, ROTATED, (EARLY_ROTATION,), calls=ROTATION),
    Variant(
        "first keys asked for", "attention", False, {B30: "25", B8: "18", OSS: "12"},
        (swap(triton_decode, "_decode_kernel", kernels.decode_kernel),), calls=("decode_kernel",),
    ),
)  # fmt: skip
MANY = (
    Variant(
        "own logits", "logits", True, {B30: "100…140", OSS: "50…90"},
        (swap(router, "MAX_LOGIT_TOKENS", 64), _logits(1)), False, "router", ("logits",),
    ),
    Variant(
        "own logits, twice the experts", "logits", True, {B30: "90…140", OSS: "40…90"},
        (swap(router, "MAX_LOGIT_TOKENS", 64), _logits(2)), False, "router", ("logits",),
    ),
    Variant(
        "last program adds", "splits", True, {B30: "30", B8: "50", OSS: "15"}, (last_adds,), calls=("split_kernel",)
    ),
    Variant(
        "second product reads early", "down", True, {B30: "50…70"},
        (swap(grouped_gemm, "down_kernel", experts.down_kernel),), calls=("down_kernel",),
    ),
    Variant(
        "gate, up, silu by tiles, 64 + 64", "gate_up", True, {B8: "20…60"},
        (swap(SwiGLU, "forward", GatedUp(64, 64, m=32, stages=6)),), False, "mlp", ("SwiGLU",),
    ),
    Variant(
        "gate, up, silu by tiles, 32 + 32", "gate_up", True, {B8: "0…40"},
        (swap(SwiGLU, "forward", GatedUp(32, 128, m=32, stages=4)),), False, "mlp", ("SwiGLU",),
    ),
    Variant(
        "gate_up 32x128x64, 6 stages", "gate_up", True, {B8: "0…30"},
        (use("mlp.gate_up_proj", **tile(32, 128, 64, 6)),), False, "mlp",
    ),
    Variant("rotation reads early, many rows", "rotation", True, ROTATED, (EARLY_ROTATION,), calls=ROTATION),
)  # fmt: skip
VARIANTS = (*SINGLE, *MANY)


@contextmanager
def applied(steps: Any, variants: Sequence[Variant]) -> Iterator[None]:
    """Exchange all of these, for what is captured or called inside."""
    with ExitStack() as stack:
        stack.callback(forget)
        for variant in variants:
            for each in variant.swaps:
                stack.enter_context(each(steps))
        forget()
        CALLED.clear()
        yield
