"""bf16 logits of two ranks are as near to fp32's as one device's are: on two GPUs, and in two processes of a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fastlayers.testing.world import Rank, world

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import Feeder
from family_tools import ours, save_random, tiny_config

GPUS = pytest.param(
    "nccl",
    marks=[pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
)  # fmt: skip
CPU = pytest.param("gloo", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU that is one of ours"))
ROWS = [[(37 * i + 11 * j + 5) % 120 + 3 for j in range(9 + 4 * i)] for i in range(6)]
STEPS = [("extend", [len(row) - 2 for row in ROWS]), ("decode", [1] * len(ROWS)), ("decode", [1] * len(ROWS))]
GROUPS = [i % 2 for i in range(len(ROWS))]


def logits(rank: Rank | None, folder: str, dtype: torch.dtype, device: str, options: dict[str, int]) -> torch.Tensor:
    """Return the logits of all tokens of the own rows, row after row; without a rank on one device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    more = {} if rank is None else {"parallel": rank.spec(**options)}
    model = ours(folder, dtype, device=place if rank is None else rank.device, **more)
    feeder = Feeder(model, ROWS, GROUPS if "attn_dp" in options and rank is not None else ())
    found = feeder.run(STEPS)
    return torch.cat([found[i].float().cpu() for i in sorted(found)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median over tokens of ‖found − wanted‖ / ‖wanted‖.

    Not the largest: where two experts' scores are a rounding apart either is taken, and that token's logits are others.
    """
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


@pytest.mark.parametrize("backend", [GPUS, CPU])
@pytest.mark.parametrize(("family", "options"), [
    ("qwen3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"attn_dp": 2, "ep": 2}), ("deepseek_v3", {}),
    ("deepseek_v3", {"attn_dp": 2, "ep": 2}),
], ids=str)  # fmt: skip
def test_bf16_logits_of_two_ranks(tmp_path: Path, family: str, options: dict[str, int], backend: str) -> None:
    """Two ranks round what one device rounds, and two partial sums more for each that one device makes.

    One device rounds at least four times between two such sums (norm, both products, residual), each about as far as a
    partial sum: errors that do not depend on each other grow by √(6/4) at most, and by less where more is rounded.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    folder = str(save_random(tiny_config(family), tmp_path))
    exact = logits(None, folder, torch.float32, device, {})
    one = logits(None, folder, torch.bfloat16, device, {})
    found = world(2, backend).run(logits, folder, torch.bfloat16, device, options)
    if "attn_dp" in options:  # each rank has its group's rows
        lengths = [len(row) for row in ROWS]
        parts = [list(own.split(lengths[group::2])) for group, own in enumerate(found)]
        found = [torch.cat([parts[group].pop(0) for group in GROUPS])]
    usual = error(one, exact)
    assert 2.0**-9 < usual < 0.1  # of bf16, and of nothing else
    for each in found:
        assert torch.equal(each, found[0]) and error(each, exact) < 1.5**0.5 * 1.25 * usual  # and chance
