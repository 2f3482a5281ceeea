"""SiLU·mul·quantise in Triton: one program a few groups of a few rows."""

from __future__ import annotations

import torch
import triton.language as tl

from fastlayers.activation.silu_mul.triton import silu_mul_rounded
from fastlayers.activation.silu_mul_quant.layer import FLOOR, SiluMulQuantConfig
from fastlayers.operators import operator
from fastlayers.quant.group_quant.layer import SCALE_LAYOUTS, empty_scales
from fastlayers.quant.group_quant.triton import QuantTile, quant_tile, quantize_tile, tile_row
from fastlayers.runtime.launch import kernel


@kernel(do_not_specialize=("tokens", "num_groups", "s_token_stride", "s_group_stride"))
def _silu_mul_quant_kernel(
    x_ptr, q_ptr, s_ptr, tokens, num_groups, x_stride, s_token_stride, s_group_stride, size, eps,
    UE8M0: tl.constexpr, EVEN: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, ROWS * GROUPS)
    row, group = tile_row() * ROWS + index // GROUPS, tl.program_id(0) * GROUPS + index % GROUPS
    whole = (row < tokens) & (group < num_groups)
    row, column = row.to(tl.int64), group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    if EVEN:  # one condition a group: whole vectors are read and written
        inside = whole[:, None]
    else:
        inside = whole[:, None] & (column < size)
    x_row = x_ptr + (row * x_stride)[:, None] + column
    gate = tl.load(x_row, mask=inside, other=0.0)
    up = tl.load(x_row + size, mask=inside, other=0.0)
    y = silu_mul_rounded(gate, up)
    q, scale = quantize_tile(y.to(tl.float32), eps, 448.0, UE8M0, False, y.dtype.primitive_bitwidth == 16)
    tl.store(q_ptr + (row * size)[:, None] + column, q, mask=inside)
    tl.store(s_ptr + row * s_token_stride + group * s_group_stride, scale, mask=whole)


def _tile(tokens: int, groups: int, group_size: int) -> QuantTile:
    """As for quantising alone, but with two inputs 2048 values a program are always enough."""
    tile = quant_tile(tokens, groups, group_size)
    return tile if tile.rows == 1 else QuantTile(4, 4 * (128 // group_size), 4)


def _outputs(x: torch.Tensor, group_size: int, layout: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, size = x.shape[0], x.shape[1] // 2
    q = torch.empty(tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    return q, empty_scales(x, tokens, -(-size // group_size), SCALE_LAYOUTS[layout])


@operator("silu_mul_quant", _outputs)
def _silu_mul_quant(x: torch.Tensor, group_size: int, layout: int, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, s = _outputs(x, group_size, layout)
    tokens, groups = s.shape
    if tokens:
        tile = _tile(tokens, groups, group_size)
        _silu_mul_quant_kernel[tile.grid(tokens, groups)](
            x, q, s, tokens, groups, x.stride(0), s.stride(0), s.stride(1), q.shape[1], FLOOR,
            UE8M0=ue8m0, EVEN=q.shape[1] % group_size == 0,
            GROUP_SIZE=group_size, ROWS=tile.rows, GROUPS=tile.groups, num_warps=tile.warps,
        )  # fmt: skip
    return q, s


class TritonSiluMulQuant:
    """Reads x once, writes codes and scales once."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        self.cfg = cfg
        self.static = (cfg.group_size, SCALE_LAYOUTS.index(cfg.scale_layout), cfg.scale_fmt == "ue8m0")

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)``, new tensors."""
        q, s = _silu_mul_quant(x, *self.static)
        return q, s
