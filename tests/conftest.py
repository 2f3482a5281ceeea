"""Settings for the whole suite: Triton's interpreter on machines without a GPU, one thread, fixed seeds."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
