"""One side stream: nothing in the library makes another, apart from MLA's second one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fastlayers
from fastlayers.runtime.streams import side_stream

SOURCES = Path(fastlayers.__file__).parents[2]


def test_nothing_else_makes_a_stream() -> None:
    makers = [
        path.relative_to(SOURCES).as_posix()
        for folder in ("src", "models", "server")
        for path in sorted((SOURCES / folder).rglob("*.py"))
        if re.search(r"cuda\.Stream\((?!\s*\|)", path.read_text())
    ]
    # DeepSeek's second projection runs beside the first.
    assert makers == ["src/fastlayers/runtime/streams.py", "models/fastlayers_models/deepseek.py"]


@pytest.mark.gpu
def test_one_stream_a_device() -> None:
    assert side_stream() is side_stream("cuda") is side_stream(torch.device("cuda", torch.cuda.current_device()))
    assert side_stream() != torch.cuda.current_stream()
