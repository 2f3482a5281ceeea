"""Deterministic mode: equal request and seed, equal bytes, whatever shares the batch, the chunks, the cache, the pages.

Log-probabilities are compared bit by bit, so that a difference shows long before it moves a token.
"""

from __future__ import annotations

import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastlayers_server.engine import running
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.protocol import Abort, Sampling

sys.path.insert(0, str(Path(__file__).parent))
from serving import GREEDY, Bench, made, make_model, prompts

NEW, COUNT = 16, 6
LONG = 32  # until pages run out
PIECE = 16


def asked(count: int, new: int = NEW) -> list[tuple[list[int], dict[str, Any]]]:
    """Return requests of every kind: greedy, drawn, penalised, with the prompt's log-probabilities."""
    found = []
    for index, row in enumerate(prompts(count, 40, seed=7)):
        ways = [
            GREEDY, Sampling(0.9, 30, 0.95, seed=index), Sampling(1.3, seed=-index - 1),
            Sampling(0.8, seed=index, frequency_penalty=0.5, repetition_penalty=1.2),
        ]  # fmt: skip
        options = {"sampling": ways[index % 4], "logprobs": 3, "new": new + 3 * index}
        found.append((row, options | ({"prompt_logprobs": 1} if index % 5 == 4 else {})))
    return found


def told(bench: Bench, rid: int) -> tuple[Any, ...]:
    """Return everything that a client would see of a request."""
    news = [output for output in bench.news if output.rid == rid]
    logprobs = [entry for output in news for entry in output.logprobs]
    return bench.ids(rid), logprobs, [o.prompt_logprobs for o in news if o.prompt_logprobs], news[-1].finish


def alone(model: Any, new: int = NEW, **limits: Any) -> list[tuple[Any, ...]]:
    """Return what each request is told if there is nobody else, and nothing in the cache.

    Each has an engine of its own, unless steps are captured: that is as much work as many requests.
    """
    found, shared = [], Bench(model, prefix_cache=False, **limits)
    for row, options in asked(COUNT, new):
        bench = shared if limits.get("captured") else Bench(model, prefix_cache=False, **limits)
        rid = bench.submit(row, **options)
        bench.run()
        found.append(told(bench, rid))
    return found


@lru_cache(maxsize=1)  # neighbours ask about the same model
def answers(name: str, new: int) -> list[tuple[Any, ...]]:
    """Return what requests to a model are told if nobody else is there."""
    return alone(made(name), new, piece=PIECE)


WAYS: dict[str, dict[str, Any]] = {
    "a batch": {},
    "one at a time": {"max_running": 1},
    "chunks of a piece": {"max_batched_tokens": PIECE},
    "chunks of 40": {"max_batched_tokens": 40, "max_extend_requests": 2},
    "no cache": {"prefix_cache": False},
    "preempted": {"num_pages": 20},
    "preempted, ahead, captured": {"num_pages": 20, "overlap": True, "captured": True},
}


# Most ways of one model, and each model once; of the rest what there is time for.
USUAL = {
    "deepseek": ("chunks of 40",),
    "qwen": ("a batch", "one at a time", "no cache", "preempted, ahead, captured"),
    "gpt_oss": ("preempted",),
}
CASES = [
    pytest.param(name, way, marks=[pytest.mark.slow] * (way not in usual))
    for name, usual in USUAL.items()
    for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_bytes_do_not_depend_on_what_else_runs(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, new = made(name), LONG if "preempted" in way else NEW
    if "preempted" in way:  # whoever fits now is admitted
        monkeypatch.setattr(running, "RATIO_START", 0.0)
        monkeypatch.setattr(running, "RATIO_END", 0.0)
    wanted = alone(model, new, piece=PIECE, captured=True) if WAYS[way].get("captured") else answers(name, new)
    requests, dice = asked(COUNT, new), random.Random(way)
    bench = Bench(model, piece=PIECE, **WAYS[way])
    for _ in range(2):  # the second time, prompts are found in the cache
        order = dice.sample(range(len(requests)), len(requests))
        rids = {}
        for index in order:
            row, options = requests[index]
            rids[index] = bench.submit(row, **options)
            if dice.random() < 0.3:
                bench.engine.post(Abort((bench.submit(dice.sample(range(3, 90), 60), 30),)))
            for _ in range(dice.randrange(4)):
                bench.engine.tick()
        bench.run()
        for index, rid in rids.items():
            assert told(bench, rid) == wanted[index], f"request {index}, {way}"
    counters = bench.scheduler.metrics.counters
    if "preempted" in way:
        assert counters["preemptions_total"][""] > 0 and counters["wasted_tokens_total"]["replay"] > 0
    elif WAYS[way].get("prefix_cache", True):
        assert counters["prompt_tokens_total"]["cached"] > 0


def test_without_the_mode_bits_do_depend_on_the_batch() -> None:
    """Otherwise the test above could not fail."""
    model = made("qwen")
    bench = Bench(model)
    rids = [bench.submit(row, **options) for row, options in asked(COUNT)]
    bench.run()
    assert [told(bench, rid) for rid in rids] != alone(model)


def test_a_request_that_says_other_tokens_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told cannot be taken back: a broken promise is an error, not another text."""
    model = made("qwen")
    monkeypatch.setattr(running, "RATIO_START", 0.0)
    bench = Bench(model, piece=PIECE, num_pages=20)
    rids = [bench.submit(row, 40) for row in prompts(6, 60)]
    victim = None
    for _ in range(400):
        bench.engine.tick()
        waiting = [r for r in bench.scheduler.queue if r.told and not r.inflight]
        if victim is None and waiting:
            victim = waiting[0]
            victim.rewind()
            victim.replay[0] = (victim.replay[0] + 1) % 90
    bench.run()
    assert victim is not None and bench.last(victim.rid).code == "internal_error"
    assert [bench.last(rid).finish for rid in rids if rid != victim.rid] == ["length"] * (len(rids) - 1)


@pytest.mark.slow
def test_on_triton_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over kernels, of small shapes; on a GPU nobody has shown it yet, and the engine refuses."""
    layers = ("embedding", "fused_moe", "gqa", "linear", "rms_norm", "rotary", "rotary_kv_write", "router", "sampler")
    monkeypatch.setenv("FASTLAYERS_BACKEND", ",".join(f"{layer}=triton" for layer in layers))
    model = make_model("qwen")
    rows = [[5, 6, 7, 8, 9] * 4, [7, 3, 9]]

    def serve(rows: list[list[int]]) -> list[tuple[Any, ...]]:
        bench = Bench(model, piece=PIECE)
        rids = [bench.submit(row, 2, logprobs=3) for row in rows]
        bench.run()
        return [told(bench, rid) for rid in rids]

    assert serve(rows) == [serve([row])[0] for row in rows]


def test_rows_are_in_no_extend_of_one_request() -> None:
    limits = SchedulerConfig(vocab_size=8, max_model_len=64, num_pages=9, page_size=16, mixed=True)
    said = "mixed with piece 64; accepted: mixed, or one request a step"
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(limits, piece=64)
    with pytest.raises(ValueError, match=said):  # as what a process is told of its limits
        msgspec.json.decode(msgspec.json.encode(limits).replace(b'"piece":0', b'"piece":64'), type=SchedulerConfig)
