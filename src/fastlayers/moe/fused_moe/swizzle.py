"""MXFP4 weights in the order in which Hopper's tensor cores want them: the layout of the triton_kernels package.

    N = rows, K = columns of an expert; a tile is 16 rows, a step 64 columns
    row of a tile       8·b + 2·f + o      b = 0, 1;  f = 0 … 3;  o = 0, 1
    column of a step    16·q + 8·h + 2·t + c      q, t = 0 … 3;  h, c = 0, 1

    codes     [E, N/16, f, K/64, o, t, q] words, each the 8 codes (h, b, c); N and K padded with zeros to 64 and 128
    scales    [E, N/256, w, K/64, a, g, s, b] bytes; row 256·n + 128·a + 16·w + 8·b + g, group 2·step + s; N padded to
              256, K to 64

So the 16 bytes of a thread are the left operands of four products of 16×8×16. In a word the codes (h, b) = (0, 0),
(0, 1), (1, 0), c = 0 in the low and c = 1 in the high half, lie where bf16 has its sign, the low bits of its exponent
and its first mantissa bit, shifted right by 0, 3 and 6; the bits of the fourth fill the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from fastlayers.moe.fused_moe.weights import MoEWeights

# Ordering holds the codes several times over, as int32.
EXPERTS_AT_ONCE = 8


@dataclass(frozen=True)
class SwizzledWeights:
    """Codes ``[E, 2·K, N/4]`` and scales ``[E, K, N/32]`` of both projections (transposed views), fp32 biases.

    Sizes include padding. For triton_kernels these are the storages; its own tensors around them are made in each call.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    # Of other formats: whatever takes experts' weights has a place for them.
    w13_zero: torch.Tensor | None = None
    w2_zero: torch.Tensor | None = None

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of both projections as words, and scales, as they lie in memory."""
        return (
            self.w13.mT.view(torch.int32), self.w2.mT.view(torch.int32), self.w13_scale.mT, self.w2_scale.mT,
        )  # fmt: skip

    @cached_property
    def words(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :attr:`rows`, the scales as words, too: those of a step's two groups and of two rows."""
        w13, w2, scales13, scales2 = self.rows
        return w13, w2, scales13.view(torch.int32), scales2.view(torch.int32)

    def __getstate__(self) -> dict[str, Any]:
        # The same bytes as words are no tensors of their own: torch would not save them twice.
        return {name: value for name, value in vars(self).items() if name not in ("rows", "words")}

    def with_biases(self, weights: MoEWeights) -> SwizzledWeights:
        """Return these with the biases of ``weights``."""
        first, second = (None if b is None else b.float() for b in (weights.w13_bias, weights.w2_bias))
        return replace(self, w13_bias=first, w2_bias=second)


def swizzle_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[E, N/4, 2·K]`` of ``blocks`` ``[E, N, K/32, 16]``."""
    data = blocks.flatten(-2)
    data = F.pad(data, (0, -data.shape[2] % 64, 0, -data.shape[1] % 64))
    experts, rows, width = data.shape
    tiles = data.view(experts, rows // 16, 2, 4, 2, width // 32, 4, 2, 4)
    # [E, tile, b, f, o, step, q, h, t] -> [E, tile, f, step, o, t, q, h, b]
    four = tiles.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).reshape(-1, 4).int()
    low, high = four & 15, four >> 4

    def placed(code: torch.Tensor) -> torch.Tensor:
        return (code & 8) << 12 | (code & 7) << 6

    def fourth(code: torch.Tensor) -> torch.Tensor:
        return (code & 8) << 11 | (code & 6) << 9 | (code & 1) << 13

    halves = []
    for code in (low, high):
        part = placed(code[:, 0]) | placed(code[:, 1]) >> 3 | placed(code[:, 2]) >> 6
        halves.append((part | fourth(code[:, 3])).to(torch.uint16))
    return torch.stack(halves, -1).view(torch.uint8).view(experts, rows // 4, width * 4)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[E, N/32, K]`` of ``scales`` ``[E, N, K/32]``."""
    data = F.pad(scales, (0, -scales.shape[2] % 2, 0, -scales.shape[1] % 256))
    experts, rows, groups = data.shape
    view = data.view(experts, rows // 256, 2, 8, 2, 8, groups // 2, 2)
    # [E, n, a, w, b, g, step, s] -> [E, n, w, step, a, g, s, b]
    return view.permute(0, 1, 3, 6, 2, 5, 7, 4).reshape(experts, rows // 32, groups * 32)


def swizzle(weights: MoEWeights) -> SwizzledWeights:
    """Return ``weights`` (blocks ``[E, N, K/32, 16]``, scales ``[E, N, K/32]``) in this layout."""
    assert weights.w13_scale is not None and weights.w2_scale is not None
    codes = []
    for blocks in (weights.w13, weights.w2):
        parts = [swizzle_codes(part) for part in blocks.split(EXPERTS_AT_ONCE)]
        codes.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    scales = [swizzle_scales(part) for part in (weights.w13_scale, weights.w2_scale)]
    return SwizzledWeights(*(part.mT for part in (*codes, *scales))).with_biases(weights)
