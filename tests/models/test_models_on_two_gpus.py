"""Whole models on two GPUs, captured, give the tokens of one: split by tensors, by requests, and by experts as well.

Tokens get to their experts as rows that all ranks gather, or are sent to the ranks that have them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import save_random, tiny_config

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# Long ones fill several extends; more prompts than rows leave one group with a round less.
PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 4, [12, 13], [14, 15, 16, 17, 18], [3], [20, 21, 22, 23]]
NEW = 8
ROOT = Path(__file__).parents[2]
TRAINED = {
    "deepseek_v3": str(ROOT / "models/fastlayers_models/assets/tiny_deepseek_v3"),
    "qwen3_moe": str(ROOT / "checkpoints/tiny_qwen3_moe"), "gpt_oss": str(ROOT / "checkpoints/tiny_gpt_oss"),
}  # fmt: skip


@torch.inference_mode()
def generate(
    rank: Rank | None, folder: str, options: dict[str, int] | None, new: int = NEW, way: str = "auto"
) -> tuple[list[list[int]], int]:
    """Return the tokens, and how many steps were replayed; without a rank on one GPU alone."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0) if rank is None else rank.device
    more = {} if rank is None else {"parallel": replace(rank.spec(**(options or {})), expert_exchange=way)}
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, device=device, **more)
    generator = Generator(model, max_batch=2, max_length=56 + new, prefill_tokens=16, cuda_graph=True)
    found = generator.generate(PROMPTS, max_new_tokens=new, eos_ids=())
    return found, generator.step.graphs.replays if generator.step.graphs is not None else 0


def random(family: str, folder: Path) -> str:
    more: dict[str, Any] = dict(num_hidden_layers=2, initializer_range=0.2) if family == "gpt_oss" else {}
    return str(save_random(tiny_config(family, **more), folder))


@pytest.mark.parametrize("options", [{}, {"attn_dp": 2}, {"attn_dp": 2, "ep": 2}, {"ep": 2}], ids=str)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3"])
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path, family: str, options: dict[str, int]) -> None:
    if family == "qwen3" and "ep" in options:
        pytest.skip("has no experts")
    folder = random(family, tmp_path)
    wanted, alone = generate(None, folder, None)
    (first, one), (second, other) = world(2, "nccl").run(generate, folder, options)
    assert first == second == wanted
    assert one == other > 0 and alone > 0


@pytest.mark.parametrize(("family", "options"), [
    ("deepseek_v3", {"attn_dp": 2, "ep": 2}), ("qwen3_moe", {"attn_dp": 2, "ep": 2}),
    ("gpt_oss", {"attn_dp": 2, "ep": 2}), ("qwen3_moe", {"ep": 2}),
], ids=str)  # fmt: skip
def test_tokens_sent_to_their_experts_give_the_tokens_of_one_gpu(
    tmp_path: Path, family: str, options: dict[str, int]
) -> None:
    """The same on a CPU: ``test_token_moves.py``."""
    folder = random(family, tmp_path)
    wanted, _ = generate(None, folder, None)
    (first, one), (second, other) = world(2, "nccl").run(generate, folder, options, NEW, "exchange")
    assert first == second == wanted and one == other > 0


@pytest.mark.parametrize("options", [{}, {"attn_dp": 2}, {"attn_dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_give_the_same_tokens_for_long(name: str, options: dict[str, int]) -> None:
    wanted, _ = generate(None, TRAINED[name], None, 64)
    (first, one), (second, other) = world(2, "nccl").run(generate, TRAINED[name], options, 64)
    assert first == second == wanted and {len(tokens) for tokens in wanted} == {64}
    assert one == other > 60
