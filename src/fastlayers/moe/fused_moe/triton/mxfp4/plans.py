"""How MXFP4 experts run over weights in the matrix units' order: which kernels, and the sizes of their programs.

    up to 2 tokens                        each pair by itself            mxfp4/hopper.py
    more                                  blocks, mma.sync               mxfp4/rows.py
    from 40 on, on sm_90, whole turns     blocks, wgmma                  mxfp4/wgmma.py

The last two give the same bits. A plan of the last, also one that a table lends to other experts, runs as its twin of
the second kind where :func:`no_wgmma` says why, and in Triton's interpreter: :meth:`HopperLaunchConfig.here`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import check_keys
from fastlayers.integers import cdiv

# Up to so many columns four warps' codes of one tile may all stay in registers, with enough programs on an SM: each has
# at most so many steps of 64 columns.
MAX_HELD = 4096
ALL_STEPS = MAX_HELD // 64 // 4
# Of the kernels with wgmma: turns of the ring in shared memory, a step of 64 columns each; registers where there are
# eight warps, so that four programs fit an SM. How the first product's rows come: gathered by a launch of their own
# (1), or by the product itself (2).
STAGES = 5
TURN = 64 * STAGES
REGISTERS = {8: 64}
GATHERED, DIRECT = 1, 2


@dataclass(frozen=True)
class HopperLaunchConfig:
    """``tokens`` of a block: 8 to 64, 0: each pair by itself; then tiles, warps and ``s`` of either product.

    Pairs by themselves: warps share ``r`` tiles and take columns in turns, ``s`` stages ahead. ``held``: which products
    (1, 2; 3: both) have codes in registers, from before the wait on, ``s`` steps ahead. Blocks: each warp has ``r``
    tiles of its own, and asks for codes ``s`` steps ahead. ``wgmma``: blocks of 16, 32 or 64 by these instructions,
    rows ``GATHERED`` or ``DIRECT``, ``s`` turns of the ring (``STAGES``).
    """

    tokens: int
    r1: int
    w1: int
    s1: int
    r2: int
    w2: int
    s2: int
    held: int = 0
    wgmma: int = 0

    def numbers(self) -> list[int]:
        """Return the plan as an operator takes it; spelt out, because torch.compile traces it."""
        return [self.tokens, self.r1, self.w1, self.s1, self.r2, self.w2, self.s2, self.held, self.wgmma]

    def config(self) -> dict[str, int]:
        """Return the plan as a table holds it."""
        return asdict(self)

    @classmethod
    def of(cls, config: Mapping[str, int]) -> HopperLaunchConfig:
        """Return the plan of a table's row."""
        names = [field.name for field in fields(cls)]
        check_keys("fused_moe", "config of backend triton_swizzled", config, names, ("held", "wgmma"))
        return cls(**config)

    def twin(self) -> HopperLaunchConfig:
        """Return the plan without ``wgmma`` that gives the same bits: the same blocks, of 32 slots at most."""
        if not self.wgmma:
            return self
        block = min(self.tokens, 32)
        return _both(block, _SHAPES[block][0])

    def here(self, hidden: int, inner: int, device: Device) -> HopperLaunchConfig:
        """Return the plan as it runs for these experts on a device: itself, or its twin."""
        return self.twin() if env.triton_interpret() or no_wgmma(hidden, inner, device) else self


Shape = tuple[int, int, int]


def _both(tokens: int, first: Shape, second: Shape | None = None) -> HopperLaunchConfig:
    return HopperLaunchConfig(tokens, *first, *(second or first))


# One tile a program: with two, Triton brings what is held into the lanes' layout by way of shared memory. Half
# of GPT-OSS's steps ahead leave registers for seven programs an SM, all of them for five; one token's step is faster by
# it, two tokens' has not been measured: benchmarks/notes/decode_phases.md.
HELD = [
    replace(_both(0, (1, 4, 6)), held=3),
    replace(_both(0, (1, 4, ALL_STEPS)), held=3),
    replace(_both(0, (2, 2, 6), (1, 4, ALL_STEPS)), held=2),
]
# Tiles, warps, stages or steps ahead: the best first.
_SHAPES: dict[int, list[Shape]] = {
    0: [(1, 4, 4), (2, 2, 6), (1, 4, 6)],
    8: [(2, 2, 3), (2, 4, 3), (2, 4, 5)],
    16: [(2, 4, 3), (2, 4, 5)],
    32: [(2, 8, 2), (2, 4, 2)],
}
# With wgmma, the best first.
_WGMMA: list[Shape] = [(2, 4, STAGES), (1, 8, STAGES)]
# From so many tokens on a block of 32 is full often enough that few plans are tried.
MANY = 200
# From so many on wgmma pays: its narrowest product is of 16 tokens, and decoding is shared by 64 rows all the same.
FEWEST = 40


def no_wgmma(hidden: int, inner: int, device: Device | None = None) -> str | None:
    """Return why the kernels with ``wgmma`` do not take experts of these sizes, or a device; ``None``: they do."""
    if hidden % TURN or inner % TURN:
        return f"wgmma takes multiples of {TURN} columns, {STAGES} steps of 64, not {hidden} and {inner}"
    if device is not None and device.capability not in (None, (9, 0)):
        return f"wgmma needs sm_90, which alone has it; this is {device.sm}"
    return None


def about(cfg: Any, device: Device) -> str:
    """Return in words which kernels serve blocks of tokens; of experts in another format, which are asked about."""
    if cfg.quant != "mxfp4":
        return f"wgmma from {FEWEST} tokens on, on sm_90 and of multiples of {TURN} columns; else mma.sync"
    why = no_wgmma(cfg.hidden_size, cfg.intermediate_size, device)
    return f"wgmma from {FEWEST} tokens on, mma.sync below" if why is None else f"mma.sync for any number: {why}"


def steps_ahead(columns: int, warps: int, ahead: int) -> int:
    """Return how many of a warp's steps over so many columns are ahead: ``ahead``, or all there are."""
    return min(ahead, cdiv(cdiv(columns, 64), warps))


def _wgmma_block(tokens: int) -> int:
    """Return the slots of a block with ``wgmma`` that suit so many tokens."""
    return 16 if tokens <= 96 else 32 if tokens <= 192 else 64


def plan_for(tokens: int, hidden: int, inner: int) -> HopperLaunchConfig:
    """Return how ``tokens`` tokens run without a table, of experts with so many columns in either product."""
    if tokens <= 2:
        return HELD[0 if tokens == 1 else 1] if max(hidden, inner) <= MAX_HELD else _both(0, (1, 4, 4))
    if tokens >= FEWEST and no_wgmma(hidden, inner) is None:
        block = _wgmma_block(tokens)
        return replace(_both(block, _WGMMA[0]), wgmma=GATHERED if block == 64 else DIRECT)
    block = 8 if tokens <= 48 else 16 if tokens <= 96 else 32
    return _both(block, _SHAPES[block][0])


def _wgmma_plans(tokens: int) -> list[HopperLaunchConfig]:
    """Return at most five plans with ``wgmma``, the likeliest first."""
    block = _wgmma_block(tokens)
    wide, narrow = (replace(_both(block, shape), wgmma=DIRECT) for shape in _WGMMA)
    other = replace(wide, tokens=16 if block == 32 else 32)
    if tokens > MANY:
        return [replace(wide, wgmma=GATHERED), wide, replace(other, wgmma=GATHERED), other]
    return [wide, replace(wide, wgmma=GATHERED), replace(narrow, wgmma=GATHERED), other]


def plans(tokens: int, hidden: int, inner: int) -> list[HopperLaunchConfig]:
    """Return the rule's plan, and what else may be best, the likeliest first: at most 14."""
    found = [plan_for(tokens, hidden, inner)]
    if tokens >= FEWEST and no_wgmma(hidden, inner) is None:
        found += _wgmma_plans(tokens)
    if tokens > MANY:
        return list(dict.fromkeys(found))
    blocks = [0] if tokens <= 2 else [8, 0] if tokens <= 4 else [8] if tokens <= 32 else [16, 32]
    for block in blocks:
        if block == 0 and max(hidden, inner) <= MAX_HELD:
            found += HELD
        shapes = _SHAPES[block]
        found += [_both(block, shape) for shape in shapes]
        found += [_both(block, a, b) for a in shapes[:2] for b in shapes[:2] if a != b]
    return list(dict.fromkeys(found))
