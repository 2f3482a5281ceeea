"""One query a row over dense keys in one launch, under Triton's interpreter: what the operations of torch give."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.patching.gqa import _plain, attend
from fastlayers.patching.triton_dense import MAX_KEYS, TritonDense

sys.path.insert(0, str(Path(__file__).parent))
from tiny import build, prompt

SCALE = 0.3


def draw(rows: int, heads: int, kv_heads: int, keys: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(keys)
    shapes = (rows, heads, 1, width), (rows, kv_heads, keys, width), (rows, kv_heads, keys, width)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def masks(rows: int, keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    hidden = torch.rand(rows, 1, 1, keys, generator=torch.Generator().manual_seed(9)) < 0.4
    added = torch.zeros(rows, 1, 1, keys, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return {"none": None, "bool": ~hidden, "added": added, "one row": added[:1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 1, 1, 64), (2, 6, 2, 70, 48), (3, 4, 4, 33, 20)])
def test_equals_torch(shape: tuple[int, ...], sinks: bool, dtype: torch.dtype) -> None:
    rows, heads, _, keys, _ = shape
    q, k, v = draw(*shape, dtype)
    sink = torch.randn(heads).to(dtype) if sinks else None
    for name, mask in masks(rows, keys, dtype).items():
        assert TritonDense.serves(q, k, v, mask), name
        given = TritonDense()(q, k, v, mask, sink, SCALE)
        wide = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
        wanted = _plain(q.double(), k.double(), v.double(), wide, SCALE, None if sink is None else sink.double(), None)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(given.double(), wanted, atol=tolerance, rtol=tolerance, msg=name)


def test_reads_views_of_a_larger_cache() -> None:
    q, k, v = draw(2, 4, 2, 40, 32, torch.float32)
    inside = [torch.full((2, 2, 64, 32), float("nan")) for _ in range(2)]
    for whole, part in zip(inside, (k, v), strict=True):
        whole[:, :, 3:43] = part
    cut = [whole[:, :, 3:43] for whole in inside]
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(TritonDense()(turned, *cut, None, None, SCALE), TritonDense()(q, k, v, None, None, SCALE))


def test_a_row_that_sees_nothing() -> None:
    q, k, v = draw(2, 4, 2, 12, 16, torch.float32)
    seen = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    seen[1] = False
    given = attend(q, k, v, seen, SCALE, None, None, False, TritonDense())
    assert torch.equal(given[1], torch.zeros(1, 4, 16)) and given[0].abs().min() > 0
    added = torch.zeros(2, 1, 1, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    evenly = TritonDense()(q, k, v, added, None, SCALE)[1]
    torch.testing.assert_close(evenly, v[1].mean(1).repeat_interleave(2, 0)[None], atol=1e-5, rtol=1e-5)
    alone = TritonDense()(q, k, v, seen, torch.zeros(4), SCALE)
    assert torch.equal(alone[1], torch.zeros(1, 4, 16))


def test_leaves_other_calls_to_torch() -> None:
    q, k, v = draw(2, 4, 2, 12, 16, torch.float32)
    for other in (
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, None),
        (q, k.double(), v, None),
        (q, k, v, torch.zeros(2, 4, 1, 12)),
        (q, k, v, torch.zeros(2, 1, 1, 12, dtype=torch.int8)),
        (q, k[:, :, :0], v[:, :, :0], None),
        (q, *2 * [k[:, :, :1].expand(2, 2, MAX_KEYS + 1, 16)], None),
        (q[..., :0], k[..., :0], v[..., :0], None),
    ):
        assert not TritonDense.serves(*other)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generates_stocks_tokens(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rotary=triton")
    calls: list[int] = []
    run = TritonDense.__call__

    def seen(self: TritonDense, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        return run(self, *arguments)

    monkeypatch.setattr(TritonDense, "__call__", seen)
    model = build("gpt_oss" if attention == "eager" else "llama", torch.float32)
    model.set_attn_implementation(attention)
    stock = copy.deepcopy(model)
    report = fl.patch(model, moe=False)
    inputs = prompt(2, 12, pads=(0, 3))
    given, wanted = (m.generate(**inputs, max_new_tokens=6, do_sample=False) for m in (model, stock))
    assert torch.equal(given, wanted)
    assert not any(report.fallbacks().values())
    # Five steps after the prompt; sdpa has its own fused operation.
    assert len(calls) == (5 * len(model.model.layers) if attention == "eager" else 0)
