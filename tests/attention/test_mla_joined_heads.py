"""Heads of latent attention put together from two parts: a concatenation's values, and nothing beside them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fastlayers.attention.mla import joined_heads
from fastlayers.attention.mla.joined_heads import join_heads
from fastlayers.operators import Operator


def parts(
    tokens: int, heads: int, nope: int, rope: int, value: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts as a layer has them: beside values, and one turned row for all heads inside a cached one."""
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(tokens, heads, nope + value, generator=generator).to(device, dtype)
    rows = torch.randn(tokens, 40 + rope, generator=generator).to(device, dtype)
    return kv[..., :nope], rows[:, 40:].unsqueeze(1).expand(-1, heads, -1)


def wrong(tokens: int, heads: int, nope: int, rope: int, dtype: torch.dtype, device: str = "cpu") -> bool:
    """Return whether anything is not as torch joins it."""
    own, turned = parts(tokens, heads, nope, rope, 16, dtype, device)
    joined = torch.full((tokens, heads, nope + rope), 7.0, dtype=dtype, device=device)
    join_heads(own, turned, joined)
    # Queries: only the turned part, which lies by itself, into rows that lie apart.
    wide = torch.full((tokens, heads, nope + rope + 8), 7.0, dtype=dtype, device=device)
    expected = wide.clone()
    expected[..., nope : nope + rope] = turned
    join_heads(None, turned.contiguous(), wide[..., : nope + rope])
    return not (torch.equal(joined, torch.cat([own, turned], -1)) and torch.equal(wide, expected))


SHAPES = [(1, 16, 128, 64), (13, 3, 24, 8), (33, 5, 128, 64), (0, 4, 16, 16), (70, 1, 48, 20)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_parts_and_the_turned_alone(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert not wrong(*shape, dtype)


@torch.inference_mode()
def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = join_heads.function

    def next_head(nope: torch.Tensor | None, turned: torch.Tensor, out: torch.Tensor) -> None:
        plain(nope, turned.roll(1, 0), out)

    def too_much(nope: torch.Tensor | None, turned: torch.Tensor, out: torch.Tensor) -> None:
        plain(out[..., : out.shape[2] - turned.shape[2]] * 0 if nope is None else nope, turned, out)

    def too_few(nope: torch.Tensor | None, turned: torch.Tensor, out: torch.Tensor) -> None:
        plain(None if nope is None else nope[:-1], turned[:-1], out[:-1])

    for fault in (next_head, too_much, too_few):
        monkeypatch.setitem(globals(), "join_heads", Operator(fault, join_heads.overload))
        assert wrong(13, 3, 24, 8, torch.float32)
    monkeypatch.undo()
    assert not wrong(13, 3, 24, 8, torch.float32)


def test_the_layer_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import fastlayers.attention.mla.layer"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 16, 128, 64), (1000, 128, 128, 64)])
def test_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    joined_heads._launch.cache_clear()
    for dtype in (torch.bfloat16, torch.float32):
        assert not wrong(*shape, dtype, "cuda")
    assert bool(joined_heads._launch.cache_info().currsize) == (shape[0] > 0)  # the kernel did it, where rows were
