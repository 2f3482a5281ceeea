"""benchmarks/soak.py in small: requests of all kinds, many dropped, over a scripted engine; and what it notices."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from .wire import on_the_wire, wait_for


@pytest.fixture(scope="module")
def soak() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_left_behind(soak: Any) -> None:
    with on_the_wire(tick_seconds=0.001) as server:
        load = soak.Soak(server.url, "tiny", 512, 512, grammars=False, seed=3)

        async def run() -> tuple[list[str], dict[str, float]]:
            await load.run(200, 48)
            return await load.left()

        left, metrics = asyncio.run(run())
        assert load.wrong == [] and left == []
        assert load.seen["dropped"] >= 10 and load.seen["streamed 200"] >= 30 and load.seen["whole 200"] >= 30
        assert load.seen["malformed 400"] >= 3
        assert metrics["fastlayers_front_tokens_total"] >= load.completed_tokens > 1000
        asyncio.run(load.run(20, 4, end=time.monotonic() - 1.0))
        assert load.seen["not sent"] == 20
        scheduler = server.engine._engine.scheduler
        assert wait_for(lambda: not scheduler.running.requests) and scheduler.cache.private == 0


def test_what_is_left_is_said(soak: Any) -> None:
    text = """# HELP fastlayers_requests_running Now
fastlayers_requests_running 1.0
fastlayers_requests_waiting{class="0"} 2.0
fastlayers_pages{state="free"} 90.0
fastlayers_pages{state="locked"} 3.0
fastlayers_pages{state="private"} 0.0
fastlayers_generation_tokens_total 12.0
fastlayers_front_tokens_total 11.0
"""
    metrics = soak.metrics_of(text)
    assert soak.leftovers(metrics, 5) == [
        "1 requests_running", "2 requests_waiting", "3 pages locked",
        "12 tokens drawn, 11 told, 5 of them in whole answers",
    ]  # fmt: skip
    rest = {"fastlayers_generation_tokens_total": 7.0, "fastlayers_front_tokens_total": 7.0}
    assert soak.leftovers(rest, 7) == []
    assert soak.leftovers(rest, 8) == ["7 tokens drawn, 7 told, 8 of them in whole answers"]
