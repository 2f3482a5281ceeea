"""merge_state: split anywhere equals one shot, edge rows, errors."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.merge_state.layer import MergeState, MergeStateConfig
from fastlayers.errors import ArgumentError


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention of q [T,H,D] over k, v [S,H,D] in double precision, with its natural LSE."""
    scores = torch.einsum("thd,shd->ths", q.double(), k.double())
    return torch.einsum("ths,shd->thd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


def test_split_anywhere_equals_one_shot() -> None:
    q, k, v = torch.randn(4, 3, 16), torch.randn(23, 3, 16), torch.randn(23, 3, 16)
    expected_o, expected_lse = attention(q, k, v)
    for cut in range(1, 23):
        o_a, lse_a = attention(q, k[:cut], v[:cut])
        o_b, lse_b = attention(q, k[cut:], v[cut:])
        o, lse = fl.merge_state(o_a.float(), lse_a.float(), o_b.float(), lse_b.float())
        torch.testing.assert_close(o, expected_o.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)


def test_many_parts_in_any_order() -> None:
    q, k, v = torch.randn(2, 2, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    parts = [attention(q, k[i : i + 5], v[i : i + 5]) for i in (15, 0, 10, 5)]
    o, lse = parts[0][0].float(), parts[0][1].float()
    for o_b, lse_b in parts[1:]:
        o, lse = fl.merge_state(o, lse, o_b.float(), lse_b.float())
    torch.testing.assert_close(o, attention(q, k, v)[0].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, attention(q, k, v)[1].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_unseen_rows(backend: str) -> None:
    inf, nan = torch.inf, torch.nan
    o_a = torch.tensor([1.0, nan, 3.0, nan, 5.0])[:, None, None]
    lse_a = torch.tensor([0.5, -inf, 0.25, inf, -700.0])[:, None]
    o_b = torch.tensor([nan, 2.0, nan, nan, 7.0])[:, None, None]
    lse_b = torch.tensor([-inf, -1.5, inf, -inf, 700.0])[:, None]
    o, lse = fl.merge_state(o_a, lse_a, o_b, lse_b, backend=backend)
    assert o.flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 7.0]
    assert lse.flatten().tolist() == [0.5, -1.5, 0.25, -inf, 700.0]


def test_rounds_once_to_the_outputs_dtype() -> None:
    o = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    lse = torch.randn(3, 2)
    merged, total = fl.merge_state(o, lse, o, lse)
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, o)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, lse + 0.6931472)


def test_errors_name_the_argument() -> None:
    layer = MergeState(8)
    o, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    for argument, call in {
        "lse_a": (o, lse.half(), o, lse),
        "lse_b": (o, lse, o, lse.T),
        "o_b": (o, lse, o.half(), lse),
        "o_a": (o[..., :4], lse, o, lse),
    }.items():
        with pytest.raises(ArgumentError, match=f"MergeState: {argument} "):
            layer(*call)
    with pytest.raises(ArgumentError, match="head_dim"):
        MergeState(0)


def test_config_round_trips() -> None:
    cfg = MergeStateConfig(128)
    assert eval(repr(cfg)) == cfg
