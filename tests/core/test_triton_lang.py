"""Triton's casts against torch's, on every e4m3 code, every midpoint and beyond."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastlayers.triton_lang import cast, to_e4m3


@triton.jit
def _cast_kernel(x_ptr, bf16_ptr, e4m3_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0)
    tl.store(bf16_ptr + index, cast(x, tl.bfloat16), mask=index < n)
    tl.store(e4m3_ptr + index, to_e4m3(x), mask=index < n)


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bf16 = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    e4m3 = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    _cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, bf16, e4m3, x.numel(), BLOCK=1024)
    return bf16, e4m3


def test_e4m3_codes_and_midpoints() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[~codes.isnan()].sort().values
    midpoints = (finite[1:] + finite[:-1]) / 2
    nudged = torch.cat([torch.nextafter(midpoints, midpoints + s) for s in (1.0, -1.0)])
    beyond = torch.tensor([449.0, 1e9, -500.0, float("inf"), -float("inf"), 1e-30, -1e-30])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.cat([finite, midpoints, nudged, beyond]).to(device)
    _, e4m3 = _launch(x)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(e4m3.view(torch.uint8), expected.view(torch.uint8))
    _, nan = _launch(torch.tensor([float("nan")], device=device))
    assert nan.float().isnan().all()


def test_bf16_rounds_to_even() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bits = torch.arange(0x3F800000, 0x3F800000 + (1 << 18), 17, dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.randn(4096) * 1e3, torch.tensor([0.0, -0.0, 3e38])]).to(device)
    bf16, _ = _launch(x)
    assert torch.equal(bf16.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))
