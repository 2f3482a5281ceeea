"""Generators after drawn sequences of streams, copies and changed weights, against new ones of a new model.

Two generators that capture nothing and one whose replays read what was there at the capture share one model. Streams
are opened, read a little, closed, dropped, broken off and read from threads; between them weights change. What a
stream yields is what a new generator of the same weights gives; what cannot be served is refused in words.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.runtime.graphs import CudaGraphs
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from test_weights_replaced import NO_EXTENDS, Addresses, edit_in_place, edit_scales, load, negate_experts, replace_head

NEW, CAPTURED = 6, 2
REFUSED = "called while a stream of this generator is running"
WEIGHTS: list[Callable[[Any], None]] = [negate_experts, edit_in_place, replace_head, edit_scales]


class Played:
    """The generators of one draw, their open streams, and the tokens that these still owe."""

    def __init__(self, seed: int) -> None:
        self.random, self.fp8 = random.Random(seed), seed % 2 == 0
        self.model = load(self.fp8)
        self.prompts = [[self.random.randrange(3, 40) for _ in range(self.random.randrange(1, 20))] for _ in range(4)]
        graphs = CudaGraphs(runtime=Addresses(self.model), warm_ups=1)
        self.made = [self.generator(), self.generator(), self.generator(graphs=graphs, extend_buckets=NO_EXTENDS)]
        self.open: list[tuple[Any, list[int]] | None] = [None, None, None]
        self.expect()

    def generator(self, **options: Any) -> Generator:
        if not options:
            options["cuda_graph"] = False
        return Generator(self.model, max_batch=2, max_length=64, **options)

    def expect(self) -> None:
        fresh = load(self.fp8)
        fresh.load_state_dict(self.model.state_dict())
        made = Generator(fresh, max_batch=2, max_length=64, cuda_graph=False)
        self.wanted = [made.generate([row], max_new_tokens=NEW, eos_ids=())[0] for row in self.prompts]

    def stream(self, index: int, which: int) -> Any:
        return self.made[index].stream([self.prompts[which]], max_new_tokens=NEW, eos_ids=())

    def read(self, index: int) -> None:
        """Read from the stream that is open there, or open one."""
        held = self.open[index]
        if held is None:
            which = self.random.randrange(4)
            held = self.open[index] = self.stream(index, which), list(self.wanted[which])
        stream, owed = held
        for _ in range(self.random.randrange(1, 4)):
            if owed:
                assert next(stream).id == owed.pop(0)
        if not owed:
            assert next(stream, None) is None
            self.open[index] = None

    def end(self, index: int) -> None:
        held, self.open[index] = self.open[index], None
        if held is not None:
            how = self.random.randrange(3)
            if how == 0:
                held[0].close()
            elif how == 1:
                with pytest.raises(ValueError, match="from outside"):
                    held[0].throw(ValueError("from outside"))
            del held  # or dropped

    def generate(self, index: int) -> None:
        """Generate whole answers; refused, with nothing changed, while a stream of the same generator is open."""
        rows = self.random.sample(range(4), self.random.randrange(1, 4))

        def run() -> Any:
            return self.made[index].generate([self.prompts[i] for i in rows], max_new_tokens=NEW, eos_ids=())

        if self.open[index] is not None:
            with pytest.raises(ArgumentError, match=REFUSED):
                run()
        else:
            for row, tokens in zip(rows, run(), strict=True):
                assert tokens == self.wanted[row]

    def in_threads(self, index: int) -> None:
        """Read two generators at once, each from a thread of its own, and from two threads the same one."""
        del index
        which = [self.random.randrange(4) for _ in range(3)]

        def run(call: tuple[int, int]) -> Any:
            try:
                return [token.id for token in self.stream(*call)]
            except ArgumentError as error:
                return str(error)

        calls = [(0, which[0]), (1, which[1]), (0, which[2])]
        with ThreadPoolExecutor(3) as threads:
            for (index, row), found in zip(calls, threads.map(run, calls), strict=True):
                assert found == self.wanted[row] or REFUSED in found, (index, found)

    def copy(self, index: int) -> None:
        """Put a copy in the generator's place; the model of its own it has is given up for the common one."""
        if index != CAPTURED:
            made = self.made[index]
            deep = self.fp8 or self.random.random() < 0.5  # torch cannot restore e4m3 from a plain pickle
            twin = copy.deepcopy(made) if deep else pickle.loads(pickle.dumps(made))
            row = self.random.randrange(4)
            assert twin.generate([self.prompts[row]], max_new_tokens=NEW, eos_ids=())[0] == self.wanted[row]
            if self.open[index] is None:
                self.made[index] = self.generator()

    def change_weights(self, index: int) -> None:
        del index
        for each in range(3):
            self.end(each)
        self.random.choice(WEIGHTS if self.fp8 else WEIGHTS[:3])(self.model)
        if self.random.random() < 0.2:
            fl.repack(self.model)
        self.expect()

    def warm(self, index: int) -> None:
        if index == CAPTURED and self.open[index] is None:
            self.made[index].capture()


ACTIONS = [
    "read",
    "read",
    "read",
    "end",
    "generate",
    "generate",
    "in_threads",
    "copy",
    "change_weights",
    "change_weights",
    "warm",
]


def play(seed: int) -> set[str]:
    """Return the names of what was played."""
    played, log = Played(seed), []
    for _ in range(10):
        action, index = played.random.choice(ACTIONS), played.random.choice((0, 1, CAPTURED, CAPTURED))
        log.append(f"{action} {index}")
        try:
            getattr(played, action)(index)
        except Exception as error:
            raise AssertionError(f"draw {seed}: {log}: {error}") from error
    for index in range(3):
        played.end(index)
        assert played.made[index].pool.free_pages == played.made[index].pool.num_pages - 1, f"draw {seed}: {log}"
    del played
    gc.collect()  # graphs without a GPU hold their functions, and those the steps that hold the graphs
    return {entry.split()[0] for entry in log}


def drawn(first: int, count: int) -> None:
    assert set().union(*(play(seed) for seed in range(first, first + count))) == set(ACTIONS)


@torch.no_grad()
def test_drawn_streams() -> None:
    drawn(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 504, 50))
@torch.no_grad()
def test_many_drawn_streams(first: int) -> None:
    drawn(first, 50)


@torch.no_grad()
def test_draws_notice_a_replay_of_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlayers.weights_epoch.WeightsWatch.stale", False)
    with pytest.raises(AssertionError, match=r"draw \d+: .*change_weights"):
        for seed in range(2, 10):  # the first two notice nothing
            play(seed)
