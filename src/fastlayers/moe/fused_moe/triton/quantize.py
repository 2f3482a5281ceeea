"""Rows for the experts' products in codes: FP8 in groups of 128 columns, int8 in whole rows; scales are rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from fastlayers.integers import cdiv, next_power_of_2
from fastlayers.moe.fused_moe.triton.grouped_gemm import quantize_rows_kernel
from fastlayers.moe.fused_moe.weights import EPS, GROUP
from fastlayers.triton_lang import dependent_launch

CODES = {"fp8_block": torch.float8_e4m3fn, "int8": torch.int8}


@lru_cache(maxsize=4096)
def _launch_quantize(
    rows: int, width: int, stride: int, skip: bool, experts: int, quant: str, ue8m0: bool, device: torch.device
) -> tuple[int, Callable[..., None]]:
    """Return the groups of a row, and what quantises so many rows."""
    fp8 = quant == "fp8_block"
    block = GROUP if fp8 else next_power_of_2(width)
    groups = cdiv(width, block)
    parts, warps = _parts(rows * groups, block)
    return groups, quantize_rows_kernel.at(
        (cdiv(rows * groups, parts),), rows * groups, groups, stride, width, width, experts, EPS,
        SKIP=skip, MAX=448.0 if fp8 else 127.0, UE8M0=ue8m0, INT8=not fp8, PARTS=parts, BLOCK=block, num_warps=warps,
        **dependent_launch(device),
    )  # fmt: skip


def quantize(
    x: torch.Tensor, ids: torch.Tensor | None, experts: int, quant: str, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[R, K]`` and scales ``[R, groups]``; with ``ids`` (one a row) dropped rows are skipped."""
    rows, width = x.shape
    groups, launch = _launch_quantize(rows, width, x.stride()[0], ids is not None, experts, quant, ue8m0, x.device)
    q, s = x.new_empty(rows, width, dtype=CODES[quant]), x.new_empty(rows, groups, dtype=torch.float32)
    launch(x, x if ids is None else ids, q, s)
    return q, s


def _parts(count: int, block: int) -> tuple[int, int]:
    """Return (groups a program takes, its warps): many small programs if few groups."""
    if block > GROUP:
        return 1, max(1, min(8, block // 512))
    return (1, 1) if count <= 512 else (4, 1) if count <= 8192 else (16, 4)
