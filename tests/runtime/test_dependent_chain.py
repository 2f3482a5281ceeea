"""Launches that begin before the one in front has ended compute what others do, 10,000 in a row."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers_server.ablation import _no_dependent_launches

WIDTH, TOKENS, LAUNCHES = 256, 4, 10_000


class Chain:
    """Norm with residual, product, activation, and again: each launch reads what the one before wrote."""

    def __init__(self, device: str, backend: str) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "backend": backend}
        self.norm = fl.RMSNorm(WIDTH, 1e-6, **options)
        self.wide = fl.Linear(WIDTH, 2 * WIDTH, **options)
        self.act = fl.SiluAndMul(WIDTH, **options)
        self.norm.weight.data.normal_(1.0, 0.1)
        self.wide.weight.data.normal_(0.0, WIDTH**-0.5)
        self.start = torch.randn(2, TOKENS, WIDTH, device=device).bfloat16()

    @torch.inference_mode()
    def __call__(self, launches: int = LAUNCHES) -> torch.Tensor:
        """Return what stands at the end, and the sum on the way."""
        x, residual = self.start[0], self.start[1]
        for _ in range(-(-launches // 3)):
            x, residual = self.norm(x, residual)
            x = self.act(self.wide(x))
        return torch.stack((x, residual))


def apart() -> AbstractContextManager[Any]:
    """Launch each kernel when the one in front has ended."""
    off = _no_dependent_launches(SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda"))))  # type: ignore[arg-type]
    assert not isinstance(off, str), off
    return off()


def test_a_chain_depends_on_every_link() -> None:
    chain = Chain("cpu", "torch")
    found = chain(60)
    assert found.isfinite().all() and torch.equal(chain(60), found)
    assert not torch.equal(chain(57), found)
    chain.start[0, 0, 0] += 1
    changed = chain(60) != found
    assert changed[:, 0].float().mean() > 0.5 and not changed[:, 1:].any()


@pytest.mark.gpu
@torch.inference_mode()
def test_a_chain_of_dependent_launches_is_the_plain_one_bit_for_bit_gpu() -> None:
    chain = Chain("cuda", "triton")
    chain(30)  # compiles, prepares
    with apart():
        chain(30)
        plain = chain()
        torch.cuda.synchronize()
    assert plain.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(), plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, plain)
