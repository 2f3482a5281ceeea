"""After a warm-up no step launches a kernel of a kind that is new: kernels are recorded in place of launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.packages.openai_triton_kernels import TritonKernelsFusedMoE
from fastlayers.runtime import precompile
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers_models.generate import Generator
from fastlayers_server import known_models
from fastlayers_server.random_models import random_model

from .kinds import Kinds

SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=64, max_position_embeddings=256)
LENGTH, BATCH = 256, 10


def test_no_step_of_a_generator_needs_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKEND", "gqa=triton")
    kinds, run, later = Kinds(monkeypatch), precompile.run, []
    # What nothing computes is zero, so that sampling meets no NaN.
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: empty(x, *size, **more).zero_())

    def run_some(jobs: Sequence[precompile.Job], advance: Callable[[str], None], **more: Any) -> dict[str, float]:
        later.extend(job for job in jobs if " to " in job.label)
        return run([job for job in jobs if job not in later], advance)

    monkeypatch.setattr(precompile, "run", run_some)
    model = random_model(known_models.QWEN3_8B | SMALL, "cpu", dtype=torch.bfloat16, layers=1)
    graphs = CudaGraphs(runtime=EagerRuntime())
    generator = Generator(model, max_batch=BATCH, max_length=LENGTH, cuda_graph=True, graphs=graphs)
    fl.warmup(generator, max_tokens=LENGTH - 8, max_batch=BATCH, progress=False).watch.close()
    without = set(kinds.seen)
    run(later, lambda label: None)
    warm = set(kinds.seen)
    kinds.seen.clear()
    for lengths in ([1], [247], [130, 3], [2] * 5, [2] * 10, [1, 3] * 5, [7] * 9, [13, 5] * 5, [24] * 10, [45, 1] * 5):
        generator.generate([[1] * length for length in lengths], max_new_tokens=3, eos_ids=())
    assert kinds.seen and not kinds.seen - warm
    assert kinds.seen - without  # uneven extends are needed


def test_token_counts_of_triton_kernels_stand_for_all() -> None:
    """Against the package's rule for the height of its tiles: the power of two of an expert's rows."""
    experts, taken, most = 32, 4, 3000
    cfg = FusedMoEConfig(experts, 64, 64, taken, quant="mxfp4", activation="swiglu_oai")

    def kind(tokens: int) -> tuple[object, ...]:
        rows = tokens * taken
        each = max(1, rows // experts)
        height = min(1 << (2 * each - 1).bit_length(), 64) if each <= 64 else min(1 << (each - 1).bit_length(), 128)
        height = max(16, height)
        tiles = rows if rows <= experts else -(-(rows - experts + 1) // height) + experts - 1
        return height, tiles == 1, tiles % 16 == 0, tiles >= 96

    counts = TritonKernelsFusedMoE.token_counts(cfg, most)
    assert {kind(count) for count in counts} == {kind(count) for count in range(1, most + 1)}
    assert max(counts) == most and len(counts) < 150
    job = [job for job in precompile.cover(100, named=counts) if job in counts]
    assert set(job) >= {count for count in counts if count <= 100}
