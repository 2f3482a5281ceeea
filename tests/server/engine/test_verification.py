"""Rules of verification: whatever is drafted, tokens are distributed as the model's own."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlayers.sampler.layer import RowParams, Sampler, SamplingParams
from fastlayers.sampler.torch import probabilities
from fastlayers_models.rows import Row, RowTable
from fastlayers_server.engine.protocol import Sampling
from fastlayers_server.engine.request import Chunk
from fastlayers_server.engine.speculation import Speculation
from fastlayers_server.engine.step import DRAFTS, PASSED, RIGHT, SlotStep, finite_or_minus_one

sys.path.insert(0, str(Path(__file__).parent))
from serving import Bench, chats, make_model

VOCAB, K, ROUNDS, ROWS = 7, 3, 40, 500


class Every(Speculation):
    """Drafts in every tick."""

    def wanted(self, running: int) -> bool:
        self.k = self.max_k
        return running > 0


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    kept = p > 0
    assert counts[~kept].sum() == 0, "a token that the filters forbid"
    expected, free = p[kept] * counts.sum(), int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    return (statistic - free) / (2 * free) ** 0.5


def verifier(rows: int, each: int = K + 1, device: str = "cpu", sampler: Any = None) -> Any:
    """Return a step with a table and a sampler, and logits instead of a model."""
    step = SlotStep.__new__(SlotStep)
    step.verify_each, step.scripted = each, None
    step.table, step.nobody = RowTable(rows, torch.device(device)), rows
    step.sampler = sampler or Sampler(VOCAB)
    step.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    step._width = (K + 1) * rows
    step._verify_in = SimpleNamespace(device=torch.zeros(4 * step._width, dtype=torch.int64, device=device))
    return step


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("way", [SamplingParams(1.0), SamplingParams(0.7, 4, 0.9), SamplingParams(1.4, 0, 1.0, 0.2)])
def test_tokens_are_distributed_as_the_targets(rule: str, way: SamplingParams) -> None:
    """The first token, the second behind it, and so on: each of the target's distribution behind those before it."""
    generator = torch.Generator().manual_seed(3)
    # What comes next depends on the last token, of the target and (otherwise) of what drafts.
    target, drafter = (2 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    drafter = (target + drafter) / 2
    step, seen, accepted = verifier(ROWS, K + 1), torch.zeros(K + 1, VOCAB, VOCAB), 0
    starts = torch.arange(ROWS) * (K + 1)
    for turn in range(ROUNDS):
        table = {row: Row(0, way, turn * ROWS + row, 10 * turn) for row in range(ROWS)}
        step.table.put(table)
        rows = torch.arange(ROWS)
        last, ids, proposed = torch.full((ROWS,), 2), [torch.full((ROWS,), RIGHT)], []
        contexts = [last]
        for depth in range(K):
            params = step.table.gather(rows)
            params = params._replace(seed=params.seed ^ DRAFTS, offset=params.offset + depth)
            logits = drafter[last]
            proposed.append(probabilities(logits, params))
            last = step.sampler(logits, params, "filtered") if rule == "rejection" else logits.argmax(-1)
            ids.append(last)
            contexts.append(last)
        chain = torch.arange(K + 1)
        parents = starts[:, None] + (chain - 1).clamp(min=0)
        columns = (rows[:, None].expand(-1, K + 1), chain.expand(ROWS, -1), parents, torch.stack(ids, 1))
        step._verify_in.device.copy_(torch.stack([c.reshape(-1) for c in columns]).flatten())
        logits = target[torch.stack(contexts, 1).flatten()]
        if rule == "match":
            told = step._verify(logits)
        else:
            q = torch.stack([*proposed, torch.zeros_like(proposed[0])], 1).flatten(0, 1)
            told = step.reject(logits, q)
        told = told.view(ROWS, K + 1)
        counts = (told != PASSED).sum(1)
        accepted += int(counts.sum()) - ROWS
        before = torch.full((ROWS,), 2)
        for place in range(K + 1):
            there = counts > place
            assert torch.equal(told[:, place] == PASSED, ~there)
            seen[place].index_put_((before[there], told[there, place]), torch.ones(int(there.sum())), accumulate=True)
            before = torch.where(there, told[:, place], before)
        # The table holds each row's last token, and how many it drew.
        assert torch.equal(step.table.tokens[:ROWS], told.gather(1, counts[:, None] - 1).squeeze(1))
        assert torch.equal(step.table.gather(rows).offset, 10 * turn + counts)
    p = probabilities(target, RowParams(*(t[:1].expand(VOCAB).clone() for t in step.table.params(1))))
    assert accepted > 0.3 * ROUNDS * ROWS
    for place, context in itertools.product(range(K + 1), range(VOCAB)):
        if seen[place, context].sum() > 400:
            assert chi_square(seen[place, context], p[context]) < 5.5, f"token {place} behind {context}"


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Return (parents, ids) of some requests' known token and drafts; siblings differ."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        parents, ids, depths = [-1], [0], [0]
        for _ in range(draw(st.integers(0, 14))):
            last = len(parents) - 1
            parent = draw(st.one_of(st.just(last), st.integers(0, last)))
            free = [t for t in range(VOCAB) if (parent, t) not in zip(parents, ids, strict=True)]
            if depths[parent] < 8 and free:
                ids.append(draw(st.sampled_from(free)))
                parents.append(parent)
                depths.append(depths[parent] + 1)
        found.append((parents, ids))
    return found


WALKS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def walked(forest: list[tuple[list[int], list[int]]], data: Any) -> None:
    """Against a walk by hand from each known token: what is told, what the table keeps, where rows of the cache are."""
    total = sum(len(parents) for parents, _ in forest)
    # Mostly what some draft behind the place says, so that long paths are right, or right but for one place.
    drawn = []
    for parents, ids in forest:
        for place in range(len(ids)):
            behind = [ids[i] for i, parent in enumerate(parents) if parent == place]
            wrong = data.draw(st.integers(0, 5)) == 0 or not behind
            drawn.append(data.draw(st.integers(0, VOCAB - 1) if wrong else st.sampled_from(behind)))
    rows = len(forest)
    step = verifier(rows, 9)
    chunks, slots = [], []
    for row, (parents, ids) in enumerate(forest):
        request = SimpleNamespace(slot=row + 1)
        chunks.append(Chunk(request, 3, ids, len(ids), parents if len(ids) > 1 else ()))  # type: ignore[arg-type]
        slots += [100 * (row + 1) + place for place in range(len(ids))]
    sent: list[int] = []
    step._verify_in = SimpleNamespace(device=torch.zeros(4 * total), send=sent.extend)
    step._send_drafts(chunks, total)
    step._verify_in.device = torch.tensor(sent)
    cells = torch.arange(100.0 * (rows + 1))[:, None, None]
    step.caches, hidden = [SimpleNamespace(keys=cells.clone(), values=None)], torch.arange(float(total))
    params = step.table.gather(torch.arange(rows).repeat_interleave(torch.tensor([len(c.ids) for c in chunks])))
    _, depths, before, ids_at = step._verified(total)
    at = torch.tensor(drawn)
    right = (at.index_select(0, before) == ids_at) | (ids_at == RIGHT)
    told = step._settle(at, right, params.offset + depths + 1)
    step._compact(told, torch.tensor(slots), hidden)
    first = 0
    for row, (parents, ids) in enumerate(forest):
        path = [0]
        while more := [i for i, p in enumerate(parents) if p == path[-1] and ids[i] == drawn[first + path[-1]]]:
            path += more
        mine = told[first : first + len(ids)].tolist()
        assert mine == [drawn[first + i] if i in path else PASSED for i in range(len(ids))]
        assert int(step.table.tokens[row]) == drawn[first + path[-1]]
        assert int(step.table.gather(torch.tensor([row])).offset) == len(path)
        base = 100 * (row + 1)
        assert step.caches[0].keys[base : base + len(path), 0, 0].tolist() == [base + i for i in path]
        assert hidden[first : first + len(path)].tolist() == [first + i for i in path]
        first += len(ids)
    assert torch.equal(step.caches[0].keys[:100], cells[:100])  # nobody else's


@WALKS
@given(forests(), st.data())
def test_a_tree_is_walked_and_its_path_moved_together(forest: list[tuple[list[int], list[int]]], data: Any) -> None:
    walked(forest, data)


@pytest.mark.slow
@settings(WALKS, max_examples=150)
@given(forests(), st.data())
def test_many_trees_are_walked(forest: list[tuple[list[int], list[int]]], data: Any) -> None:
    walked(forest, data)


def test_rejection_keeps_more_drafts_and_one_point_as_many() -> None:
    """The share that counts is Σ min(p, q); of what was not drawn (q = 1) it is p, as where tokens must match."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, VOCAB, generator=generator)
    step = verifier(4000)
    step.table.put({row: Row(0, SamplingParams(1.0), row, 0) for row in range(4000)})
    rows = torch.arange(4000)
    params = step.table.gather(rows)
    params = params._replace(seed=params.seed ^ DRAFTS)
    everywhere = logits[1].expand(4000, -1)
    p, q = logits[0].double().softmax(-1), logits[1].double().softmax(-1)
    drawn = step.sampler(everywhere, params, "sampled")
    for drafts, proposed, expected in (
        (drawn, q.expand(4000, -1), float(torch.minimum(p, q).sum())),
        (torch.full_like(drawn, 3), torch.eye(VOCAB, dtype=torch.float64)[3].expand(4000, -1), float(p[3])),
    ):
        step.table.put({row: Row(0, SamplingParams(1.0), row, 0) for row in range(4000)})
        starts = 2 * rows
        columns = [
            rows.repeat_interleave(2), torch.tensor([0, 1]).repeat(4000), starts.repeat_interleave(2),
            torch.stack((torch.full_like(drafts, RIGHT), drafts), 1).flatten(),
        ]  # fmt: skip
        step._verify_in.device, step._width = torch.cat(columns), len(columns[0])
        told = step.reject(
            logits[0].expand(8000, -1), torch.stack((proposed, torch.zeros_like(proposed)), 1).flatten(0, 1)
        )
        share = float((told.view(-1, 2)[:, 1] != PASSED).double().mean())
        assert share == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("captured", "seeds"),
    [(False, 250), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 500), (True, 200)))],
)
def test_the_draft_layers_tokens_by_rejection(captured: bool, seeds: int) -> None:
    """On the trained model: the first tokens of many seeds are distributed as without drafts; greedy ones are equal."""
    model = make_model("deepseek")
    row, new, batch = chats(1)[0], 3, 40
    both = []
    for drafts in (False, True):
        bench = Bench(
            model, captured=captured, max_running=batch, num_pages=700, drop_last_block=True,
            max_batched_tokens=512, max_extend_requests=16,  # hundreds of prompts in few steps
            verify_each=3 * drafts, mtp=int(drafts), rejection=drafts,
            drafts=(lambda executor, metrics: Every(executor.mtp, 2, metrics)) if drafts else None,
        )  # fmt: skip
        told = bench.generate(
            [row] * seeds, new, [Sampling(0.9, 6, seed=seed + 10**6 * drafts) for seed in range(seeds)]
        )
        both.append(told)
        if drafts:
            counters = bench.scheduler.metrics.counters
            assert counters["spec_accepted_tokens_total"]["1"] > 0.2 * counters["spec_drafts_total"][""]
        greedy = bench.generate([row], 12)
        both.append(greedy)
    assert both[1] == both[3]
    for place in range(new):
        texts = [[tuple(ids[: place + 1]) for ids in told] for told in (both[0], both[2])]
        keys = sorted(set(texts[0]) | set(texts[1]))
        a, b = (torch.tensor([float(text.count(key)) for key in keys]) for text in texts)
        common = (a + b) >= 10
        statistic = float(((a - b) ** 2 / (a + b))[common].sum())  # two samples of one size
        free = max(1, int(common.sum()) - 1)
        assert (statistic - free) / (2 * free) ** 0.5 < 4.5, f"token {place}"


def test_columns_of_drafts_are_as_long_as_the_step_is_wide() -> None:
    """A step of few tokens sends few numbers, however many may run; what a wide one left behind is not read."""
    step = verifier(64)
    sent: list[list[int]] = []
    device = torch.full((5 * step._width + 1,), 10**6)

    def send(values: list[int]) -> None:
        sent.append(values)
        device[: len(values)] = torch.tensor(values)

    step._verify_in = SimpleNamespace(device=device, send=send)
    step.keep_hidden, step._compute = False, lambda ids, meta, valid: (ids, valid)
    chunks = [Chunk(SimpleNamespace(slot=slot), 3, [5, 6, 7], 3) for slot in (2, 4)]  # type: ignore[arg-type]
    for tokens, width in ((6, 128), (6, 8), (0, 16)):
        step._send_drafts(chunks[: tokens // 3], width)
        idle = width - tokens
        rows, depths, parents, drafts = (column.tolist() for column in step._verified(width))
        assert len(sent[-1]) == 5 * width + 1
        ids, valid = step._forward(SimpleNamespace(num_tokens=width, bucket="any"), "verify")
        assert ids.tolist() == [5, 6, 7, 5, 6, 7][:tokens] + [0] * idle
        assert valid.tolist() == [tokens] and valid.dtype == torch.int32
        assert rows == [1, 1, 1, 3, 3, 3][:tokens] + [step.nobody] * idle
        assert depths == [0, 1, 2, 0, 1, 2][:tokens] + [0] * idle
        assert parents == [0, 0, 1, 3, 3, 4][:tokens] + [0] * idle
        assert drafts == [RIGHT, 6, 7, RIGHT, 6, 7][:tokens] + [-1] * idle
        assert [column.tolist() for column in step._verified(2)] == [rows[:2], depths[:2], parents[:2], drafts[:2]]


@pytest.mark.parametrize("drafts", range(1, 9))
def test_one_wrong_draft_ends_the_chain_wherever_it_is(drafts: int) -> None:
    """However few looks back are taken for so many drafts."""
    width = drafts + 1
    for wrong in range(1, width + 1):  # the last: none is
        step = verifier(1, width)
        step._verify_in, step._width = SimpleNamespace(device=torch.zeros(4 * width, dtype=torch.int64)), width
        places = torch.arange(width)
        columns = torch.stack((torch.zeros_like(places), places, (places - 1).clamp(min=0), places))
        step._verify_in.device.copy_(columns.flatten())
        told = step._settle(places + 10, places != wrong, places + 1)
        assert told.tolist() == [place + 10 if place < wrong else PASSED for place in range(width)]
        assert int(step.table.tokens[0]) == 10 + wrong - 1
    assert 1 << step._doublings >= drafts and (drafts == 1 or 1 << step._doublings < 2 * drafts)


def test_logits_that_are_not_finite_draw_nothing() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, 1.0], [nan, 1.0], [inf, 1.0], [-inf, 1.0], [-inf, -inf], [1.0, nan], [-inf, nan], [-inf, inf]]
    for dtype in (torch.float32, torch.bfloat16):
        found = finite_or_minus_one(torch.tensor(rows, dtype=dtype), torch.arange(8))
        assert found.tolist() == [0, -1, -1, 3, -1, -1, -1, -1]


class Told:
    """A backend's sampler that draws what it is told."""

    def __init__(self, backend: str, drawn: torch.Tensor) -> None:
        self.choice, self.drawn = SimpleNamespace(name=backend), drawn

    def __call__(self, logits: torch.Tensor, params: RowParams, mode: str) -> torch.Tensor:
        params.offset.add_(1)
        return self.drawn


def drawn_forest(turn: int) -> tuple[list[Chunk], int, list[int]]:
    """Return chunks to verify, most tokens of each, and what is drawn at each token: mostly a draft."""
    dice, trees = random.Random(turn), turn % 2 == 1
    most = 9 if trees else 1 + turn % 9
    chunks: list[Chunk] = []
    drawn: list[int] = []
    for slot in range(1 + turn % 5, 0, -1):
        parents, here = [-1], [dice.randrange(4)]
        ids = [0]
        for place in range(1, dice.randint(1, most)):
            parent = dice.randrange(place) if trees and dice.random() < 0.5 else place - 1
            taken = {ids[i] for i in range(place) if parents[i] == parent}
            ids.append(here[parent] if dice.random() < 0.7 and here[parent] not in taken else 4 + place)
            parents.append(parent)
            here.append(dice.randrange(4))
        request = SimpleNamespace(slot=slot)
        chunks.append(Chunk(request, 3, ids, len(ids), parents if trees else ()))  # type: ignore[arg-type]
        drawn += here
    return chunks, most, drawn


def verified(backend: str, turn: int, device: str, captured: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a step tells of such chunks, and the table's offsets and tokens behind it."""
    chunks, each, here = drawn_forest(turn)
    width, dice = len(here) + turn % 4, random.Random(turn)
    drawn = torch.tensor(here + [0] * (turn % 4), device=device)
    # Mostly each token has a row of its own there, so that the table shows which of them were the last ones.
    own = turn % 3 > 0
    rows = width if own else len(chunks)
    step = verifier(rows, each, device, Told(backend, drawn))
    if turn % 6 == 2:  # whatever is drawn
        step.scripted = lambda chunk: [dice.choice((RIGHT, RIGHT, -1)) for _ in chunk.ids[1:]]
    buffer = torch.zeros(5 * width + 1, dtype=torch.int64, device=device)
    step._verify_in = SimpleNamespace(
        device=buffer, send=lambda values: buffer[: len(values)].copy_(torch.tensor(values))
    )
    if backend == "triton":
        step._settle = None  # so that nothing comes of another way
    step._send_drafts(chunks, width)
    if own:
        buffer[:width] = torch.arange(width)
    step.table._longs[1] = torch.arange(rows + 1) + 100
    logits = torch.randn(width, VOCAB, generator=torch.Generator().manual_seed(turn)).to(device, torch.bfloat16)
    logits[turn % width, 1] = float("nan") if turn % 4 else float("-inf")
    logits[0] = float("-inf") if turn % 5 == 4 else logits[0]
    before = step.table._longs.clone()
    told = step._verify(logits)
    if captured:  # what ran was compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            later = step._verify(logits)
        step.table._longs.copy_(before)
        graph.replay()
        told = later.clone()  # the graph's memory ends with it
    return told, step.table._longs[1:3, :rows]


def check_one_launch(turns: int, device: str, captured: bool = False) -> None:
    drafts = 0
    with torch.inference_mode():
        for turn in range(turns):
            wanted, found = (verified(name, turn, device, captured) for name in ("torch", "triton"))
            assert torch.equal(wanted[0], found[0]), turn
            assert torch.equal(wanted[1], found[1]), turn
            drafts += int((found[0] != PASSED).sum()) - (1 + turn % 5)
    assert drafts > 2 * turns


def test_one_launch_settles_what_torch_does() -> None:
    """Beside the sampler's kernels: chains and trees, padding, scripted drafts, logits that are not finite."""
    check_one_launch(12, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_gpu_one_launch_settles_what_torch_does(captured: bool) -> None:
    check_one_launch(90, "cuda", captured)
