"""How MXFP4 experts run over weights in the matrix units' order: which kernels, and the sizes of their programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from fastlayers.errors import check_keys

# Up to so many columns a warp's codes of one tile stay in registers, and enough programs on an SM.
MAX_HELD = 4096


@dataclass(frozen=True)
class HopperLaunchConfig:
    """``tokens`` of a block: 8, 16 or 32, 0: each pair by itself; then tiles, warps and ``s`` of either product.

    Pairs by themselves: warps share ``r`` tiles and take columns in turns, ``s`` stages ahead. ``held``: which products
    (1, 2; 3: both) hold all codes of a program in registers, from before the wait on. Blocks: each warp has ``r`` tiles
    of its own, and asks for codes ``s`` steps ahead.
    """

    tokens: int
    r1: int
    w1: int
    s1: int
    r2: int
    w2: int
    s2: int
    held: int = 0

    def numbers(self) -> list[int]:
        """Return the plan as an operator takes it; spelt out, because torch.compile traces it."""
        return [self.tokens, self.r1, self.w1, self.s1, self.r2, self.w2, self.s2, self.held]

    def config(self) -> dict[str, int]:
        """Return the plan as a table holds it."""
        return asdict(self)

    @classmethod
    def of(cls, config: Mapping[str, int]) -> HopperLaunchConfig:
        """Return the plan of a table's row."""
        names = [field.name for field in fields(cls)]
        check_keys("fused_moe", "config of backend triton_swizzled", config, names, ("held",))
        return cls(**config)


Shape = tuple[int, int, int]


def _both(tokens: int, first: Shape, second: Shape | None = None) -> HopperLaunchConfig:
    return HopperLaunchConfig(tokens, *first, *(second or first))


# One tile a program: with two, Triton brings what is held into the lanes' layout by way of shared memory.
HELD = [
    replace(_both(0, (1, 4, 4)), held=3),
    replace(_both(0, (2, 2, 6), (1, 4, 6)), held=2),
]
# Tiles, warps, stages or steps ahead: the best first.
_SHAPES: dict[int, list[Shape]] = {
    0: [(1, 4, 4), (2, 2, 6), (1, 4, 6)],
    8: [(2, 2, 3), (2, 4, 3), (2, 4, 5)],
    16: [(2, 4, 3), (2, 4, 5)],
    32: [(2, 8, 2), (2, 4, 2)],
}
# From so many tokens on a block of 32 is full often enough that only the rule's plan is tried.
MANY = 200


def plan_for(tokens: int, columns: int) -> HopperLaunchConfig:
    """Return how ``tokens`` tokens run without a table; ``columns``: of the longer product."""
    if tokens <= 2:
        return HELD[0] if columns <= MAX_HELD else _both(0, (1, 4, 4))
    block = 8 if tokens <= 48 else 16 if tokens <= 96 else 32
    return _both(block, _SHAPES[block][0])


def plans(tokens: int, columns: int) -> list[HopperLaunchConfig]:
    """Return the rule's plan, and what else may be best, the likeliest first: at most 14."""
    found = [plan_for(tokens, columns)]
    if tokens > MANY:
        return found
    blocks = [0] if tokens <= 2 else [8, 0] if tokens <= 4 else [8] if tokens <= 32 else [16, 32]
    for block in blocks:
        if block == 0 and columns <= MAX_HELD:
            found += HELD
        shapes = _SHAPES[block]
        found += [_both(block, shape) for shape in shapes]
        found += [_both(block, a, b) for a in shapes[:2] for b in shapes[:2] if a != b]
    return list(dict.fromkeys(found))
