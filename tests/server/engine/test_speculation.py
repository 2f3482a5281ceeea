"""Drafts change nothing but the number of steps: the same tokens, greedy and drawn; k follows what pays."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.attention.meta import AttentionBatch
from fastlayers.sampler.layer import SamplingParams
from fastlayers_models.step import StepKey
from fastlayers_server.engine.metrics import Metrics
from fastlayers_server.engine.mtp import Growing
from fastlayers_server.engine.protocol import Sampling, Submit
from fastlayers_server.engine.request import Chunk, Request, TickPlan, TickResult, Tree
from fastlayers_server.engine.speculation import PROBE, READ, Lookup, Lookups, Speculation
from fastlayers_server.engine.step import RIGHT, TREE, VERIFY

sys.path.insert(0, str(Path(__file__).parent))
from serving import Bench, chats, made, make_model, plain, prompts


class Told:
    """Drafts of a given text: the right tokens, or some of them wrong; as many as wanted, always."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], k: int, wrong_every: int = 0) -> None:
        self.texts, self.k, self.wrong_every = texts, k, wrong_every
        self.steps = Counter[str]()

    def wanted(self, running: int) -> bool:
        return running > 0

    def prepare(self) -> None:
        """Nothing."""

    def draft(self, request: Request, limit: int) -> list[int]:
        done = len(request.tokens) - request.prompt_len
        text = self.texts[tuple(request.tokens[: request.prompt_len])][done : done + min(self.k, limit)]
        if self.wrong_every:
            text = [(t + 1) % 90 if (done + i) % self.wrong_every == 0 else t for i, t in enumerate(text)]
        return text

    def observe(self, plan: TickPlan, result: TickResult, seconds: float) -> None:
        self.steps["ticks"] += 1
        self.steps["verified"] += len(plan.verify)

    def explain(self) -> None:
        """Nothing."""


def answers(model: Any, count: int, new: int) -> list[list[int]]:
    """Return what the plain loop says to so many prompts, every other one drawn."""
    drawn = [SamplingParams(0.9, 30, 0.95, seed=9 + i) if i % 2 else SamplingParams(0.0) for i in range(count)]
    return plain(model, prompts(count), new, drawn)


@pytest.fixture(scope="module", params=["deepseek", "qwen", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


# Which buckets there are does not depend on the family.
@pytest.mark.parametrize(
    "model", ["qwen", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek", "gpt_oss"))], indirect=True
)
@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 5])
def test_every_step_that_verifies_is_captured_in_little_padding(model: Any, count: int) -> None:
    """However many verify together, down to one draft each."""
    rows = prompts(count)
    texts = {tuple(row): text for row, text in zip(rows, plain(model, rows, 12), strict=True)}
    for k in (1, 3):
        bench = Bench(
            model, captured=True, own_buckets=True, overlap=True, drafts=Told(texts, k), verify_each=4,
            max_extend_requests=6, max_batched_tokens=32, prefix_cache=False,
        )  # fmt: skip
        assert bench.generate(rows, 12) == list(texts.values())
        replays, eager = bench.executor.graph_counts()
        verified = {name: number for name, number in replays.items() if name.endswith("verify") and number}
        assert not eager and verified
        if count == 1:
            tokens = 1 + k
            assert {int(name.split()[1].split("x")[0]) for name in verified} == {next(t for t in (4, 8) if t >= tokens)}


# A captured step is told of right drafts and of wrong ones in the same way: where some are wrong it is told of both.
@pytest.mark.parametrize(
    ("wrong_every", "captured"),
    [
        (0, False),
        (3, False),
        (3, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in (0, 1)),
    ],
)
def test_tokens_are_those_without_drafts(model: Any, captured: bool, wrong_every: int) -> None:
    rows, new = prompts(5), 12
    ways = [Sampling(0.9, 30, 0.95, seed=9 + i) if i % 2 else Sampling(0.0) for i in range(5)]
    wanted = answers(model, 5, new)
    drafts = Told({tuple(r): w for r, w in zip(rows, wanted, strict=True)}, 3, wrong_every)
    bench = Bench(model, captured=captured, overlap=captured, drafts=drafts, verify_each=4)
    assert bench.generate(rows, new, ways) == wanted
    assert drafts.steps["verified"] > 0
    if not wrong_every:
        plain_ticks = Bench(model)
        plain_ticks.generate(rows, new, ways)
        assert bench.scheduler.ticks < 0.6 * plain_ticks.scheduler.ticks
    if captured:
        replays, _ = bench.executor.graph_counts()
        assert any(count and "verify" in key for key, count in replays.items())
    assert bench.scheduler.cache.private == bench.scheduler.cache.locked == 0


def test_tokens_are_those_without_drafts_where_only_some_ticks_draft() -> None:
    """Ticks without drafts are launched ahead of their tokens, but not of what a step that verifies keeps."""
    model, rows, new = made("qwen"), prompts(4), 24
    wanted = plain(model, rows, new)

    class Seldom(Told):
        def wanted(self, running: int) -> bool:
            return running > 0 and bench.scheduler.ticks % 3 == 0

    drafts = Seldom({tuple(r): w for r, w in zip(rows, wanted, strict=True)}, 3, 2)
    bench = Bench(model, captured=True, overlap=True, drafts=drafts, verify_each=4)
    assert bench.generate(rows, new) == wanted
    assert drafts.steps["verified"] > 0 and bench.scheduler.cache.private == 0


class Trees(Told):
    """The right tokens among wrong ones: each depth has two that are wrong, and paths behind those."""

    def draft(self, request: Request, limit: int) -> list[int]:
        right, tree, last, wrong = super().draft(request, limit), Tree([], []), -1, -1
        for token in right:
            tree += [(token + 7) % 90, token, (token + 9) % 90]
            tree.parents += [last, last, wrong]
            last, wrong = len(tree) - 2, len(tree) - 3
        return Tree(tree[:limit], tree.parents[:limit])


@pytest.mark.parametrize(
    ("wrong_every", "captured"), [(0, False), (2, False), (2, True), pytest.param(0, True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "page_size"), [("deepseek", 16), ("qwen", 1), ("gpt_oss", 16)])
def test_a_tree_gives_the_same_tokens(name: str, page_size: int, wrong_every: int, captured: bool) -> None:
    model, rows, new = made(name, page_size), prompts(4), 16
    ways = [Sampling(0.9, 30, 0.95, seed=9 + i) if i % 2 else Sampling(0.0) for i in range(4)]
    wanted = answers(model, 4, new)
    drafts = Trees({tuple(r): w for r, w in zip(rows, wanted, strict=True)}, 3, wrong_every)
    bench = Bench(
        model, captured=captured, overlap=captured, own_buckets=True, drafts=drafts, verify_each=10,
        num_pages=80 * 16 // page_size, max_batched_tokens=64,
    )  # fmt: skip
    if captured:
        bench.executor.extending.capture_extends(
            [StepKey("extend", t, r, TREE) for t in (4, 8, 16, 32, 64) for r in (1, 6)]
        )
    for _ in range(2):  # the second time, what was moved together may be found in the cache
        assert bench.generate(rows, new, ways) == wanted
    counters = bench.scheduler.metrics.counters
    assert drafts.steps["verified"] < (0.45 if not wrong_every else 0.9) * 2 * len(rows) * new
    assert counters["wasted_tokens_total"]["speculation"] > drafts.steps["verified"]
    replays, eager = bench.executor.graph_counts()
    trees = sum(count for name, count in replays.items() if name.endswith(TREE))
    assert (trees > 0 and not eager) if captured else eager["CUDA graphs are off"] > 0, eager
    assert bench.scheduler.cache.private == bench.scheduler.cache.locked == 0


@pytest.mark.parametrize(("name", "layer"), [("qwen", "gqa"), ("gpt_oss", "gqa"), ("deepseek", "mla")])
def test_a_tree_gives_the_same_tokens_through_the_kernels(
    name: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter, uncaptured and (where that does not take a minute) captured, against torch without drafts."""
    rows, new = [row[:20] for row in prompts(2)], 7
    wanted = plain(made(name), rows, new)
    monkeypatch.setenv("FASTLAYERS_BACKEND", f"{layer}=triton")
    model = make_model(name)
    texts = {tuple(r): w for r, w in zip(rows, wanted, strict=True)}
    for captured in (False, True)[: 1 + (layer == "gqa")]:
        bench = Bench(
            model, captured=captured, drafts=Trees(texts, 3), verify_each=10, max_batched_tokens=48, max_running=2,
        )  # fmt: skip
        if captured:
            keys = [StepKey("extend", t, r, TREE) for t in (16, 32) for r in (1, 2)]
            bench.executor.extending.capture_extends(keys)
        assert bench.generate(rows, new) == wanted
        assert bench.scheduler.ticks < 6
        replays, _ = bench.executor.graph_counts()
        assert bool(sum(count for name, count in replays.items() if name.endswith(TREE))) == captured
    attention = [m for m in model.modules() if hasattr(m, "decode_choice")]
    taken = {key: ladder.choice.name for key, ladder in attention[0]._ladders.items() if "tree" in key[0]}
    phases = ("tree", "captured tree") if layer == "gqa" else ("tree",)
    assert taken == {(phase, 0): "triton" for phase in phases}


# What a model draws does not count here.
@pytest.mark.parametrize(
    "model", ["qwen", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek", "gpt_oss"))], indirect=True
)
@pytest.mark.parametrize("captured", [False, True])
def test_acceptance_can_be_scripted_for_benchmarks(model: Any, captured: bool) -> None:
    """Position i of a tick's drafts is right with a given probability, whatever the model draws there."""
    random, rate, k, new = torch.Generator().manual_seed(5), 0.7, 3, 120

    def scripted(chunk: Chunk) -> list[int]:
        return [RIGHT if float(torch.rand((), generator=random)) < rate else -1 for _ in chunk.ids[1:]]

    class Anything(Told):
        def draft(self, request: Request, limit: int) -> list[int]:
            return [7] * min(self.k, limit)

    bench = Bench(model, captured=captured, drafts=Anything({}, k), verify_each=4)
    bench.executor.extending.scripted = scripted
    told = bench.generate(prompts(3, 30), new)
    assert [len(ids) for ids in told] == [new] * 3
    spent = sum(bench.scheduler.metrics.counters["wasted_tokens_total"].values())
    steps = bench.engine.drafts.steps["verified"]  # type: ignore[union-attr]
    assert steps > 80 and spent > 0
    expected = sum(rate**i for i in range(k + 1))
    assert 3 * (new - 1) / steps == pytest.approx(expected, rel=0.12)
    bench.executor.extending.scripted = None
    assert bench.generate(prompts(2), 8) == plain(model, prompts(2), 8)


def test_requests_with_wishes_are_not_drafted_for(model: Any) -> None:
    rows = prompts(2)
    wanted = plain(model, rows, 8)
    drafts = Told({tuple(r): w for r, w in zip(rows, wanted, strict=True)}, 3)
    bench = Bench(model, drafts=drafts, verify_each=4)
    rid = bench.submit(rows[0], 8, logprobs=1)
    other = bench.submit(rows[1], 8)
    bench.run()
    assert [bench.ids(rid), bench.ids(other)] == wanted
    assert sum(len(output.logprobs) for output in bench.news if output.rid == rid) == 8


def test_lookup_finds_what_followed_the_longest_suffix() -> None:
    lookup = Lookup()
    tokens = [1, 2, 3, 4, 9, 2, 3, 7, 8, 1, 2, 3]
    assert list(lookup.draft(tokens, 3)) == [4, 9, 2]  # 1 2 3 rather than 2 3
    assert list(lookup.draft([*tokens, 7], 2)) == [8, 1]
    assert list(Lookup().draft([5], 3)) == [] and list(Lookup().draft([5, 6, 7], 3)) == []
    assert list(Lookup().draft([5, 5, 5], 3)) == [5]


def test_a_repetitive_prompt_takes_fewer_steps() -> None:
    model = made("qwen")
    row = prompts(1, 12, seed=2)[0][:4] * 1 + [8, 9, 10, 11] * 10
    wanted = plain(model, [row], 60)
    metrics = Metrics()
    # Each step takes as long as any other: on a busy machine one that verifies may seem not to pay.
    speculation = Speculation(Lookups(), 4, metrics, itertools.count(0.0, 0.001).__next__)
    bench = Bench(model, drafts=speculation, verify_each=5)
    assert bench.generate([row], 60) == wanted
    if len(set(wanted[0][-20:])) <= 6:  # the model does repeat itself
        assert bench.scheduler.ticks < 50
    assert metrics.counters["spec_drafts_total"][""] > 0


class Known:
    """A request as far as lookup looks at it."""

    def __init__(self, tokens: list[int], general: bool = False) -> None:
        self.tokens, self.general = tokens, general


def tick(k: int, accepted: int, rows: int = 1, found: bool = True) -> tuple[TickPlan, TickResult]:
    plan = TickPlan(1, drafts=k)
    if not k or not found:
        plan.rows = [Known([1]) for _ in range(rows)]  # type: ignore[misc]
        return plan, TickResult([[5]] * rows)
    plan.verify = [Chunk(None, 0, [5] * (k + 1), k + 1)] * rows  # type: ignore[arg-type]
    return plan, TickResult([[5] * (accepted + 1)] * rows)


@pytest.mark.parametrize(("right", "cost", "drafts"), [(1.0, 1.1, True), (0.0, 1.1, False), (0.6, 3.0, False)])
def test_k_is_what_pays(right: float, cost: float, drafts: bool) -> None:
    now = [0.0]
    speculation = Speculation(Lookups(), 4, Metrics(), lambda: now[0])
    random, used = torch.Generator().manual_seed(0), []
    for _ in range(600):
        k = speculation.k if speculation.wanted(1) else 0
        used.append(k)
        accepted = 0
        while accepted < k and float(torch.rand((), generator=random)) < right:
            accepted += 1
        now[0] += 0.010 * (cost if k else 1.0)
        speculation.observe(*tick(k, accepted), 0.0)
    late = used[200:]
    share = sum(k > 0 for k in late) / len(late)
    assert share > 0.9 if drafts else share <= 1.5 / PROBE
    assert not drafts or max(late) == 4


def test_what_nobody_finds_is_given_up_and_taken_up_when_text_repeats_itself() -> None:
    """Nothing repeats: drafts end, so that ticks overlap; then it does, and drafts begin without a trial."""
    now, rows = [0.0], [Known([100 * i, 100 * i + 1]) for i in range(1, 9)]
    speculation = Speculation(Lookups(), 4, Metrics(), lambda: now[0])
    wanted = []
    for number in range(500):
        k = speculation.k if speculation.wanted(len(rows)) else 0
        wanted.append(k > 0)
        plan, result = tick(k, 0, len(rows), found=False)
        plan.rows = rows  # type: ignore[assignment]
        for request in rows:  # eight that follow each other, or never one that was there
            request.tokens.append(number % 8 if number >= 300 else 1000 * number + request.tokens[0])
        # Where drafts are wanted nothing overlaps: that is no measure of ticks without drafts.
        now[0] += 0.015 if k else 0.010
        speculation.observe(plan, result, 0.0)
    assert not any(wanted[40:300]), [i for i, each in enumerate(wanted) if each]
    assert any(wanted[300:340])
    assert speculation._seconds[4, 0] == pytest.approx(0.010)


def test_a_few_requests_are_watched_and_each_once() -> None:
    lookups, rows = Lookups(), [Known([5, 6, 7, 5, 6]) for _ in range(9)]
    assert [lookups.watch(rows) for _ in range(6)] == [(0, 0)] * 6  # type: ignore[arg-type]
    for request in rows:
        request.tokens.append(7)
    assert lookups.watch(rows) == (4, 0)  # type: ignore[arg-type]
    rows[0].tokens.append(9)
    rows[1].tokens += [5, 9]
    assert lookups.watch(rows[:3]) == (1, 1)  # type: ignore[arg-type]
    assert lookups.watch(rows[4:]) == (0, 0)  # type: ignore[arg-type]
    # Who may not draft says nothing of drafts.
    others = [Known([5, 6, 7, 5, 6], general=True)]
    assert lookups.watch(others) == (0, 0) and others[0] not in lookups._expected  # type: ignore[arg-type]


def test_a_long_prompt_is_read_over_several_ticks_before_it_is_watched() -> None:
    lookups, long = Lookups(), Known([*range(2 * READ), 0, 1])
    reads = []
    for _ in range(4):
        lookups.watch([long])  # type: ignore[arg-type]
        reads.append((lookups._lookups[long]._done, long in lookups._expected))  # type: ignore[index]
    assert reads == [(1 + READ, False), (1 + 2 * READ, True), *[(1 + 2 * READ, True)] * 2]
    assert lookups._expected[long][1] == [2]  # type: ignore[index]


def test_prompts_longer_than_their_answers_are_watched_too() -> None:
    lookups, seen = Lookups(), 0
    for _ in range(6):  # requests that come and go: prompts of 20,000 tokens, answers of 30
        rows = [Known([*range(10_000), *range(10_000)]) for _ in range(8)]
        for _ in range(30):
            seen += sum(lookups.watch(rows))  # type: ignore[arg-type]
            for request in rows:
                request.tokens.append(request.tokens[-10_000])
    assert seen > 200


def test_where_enough_are_watched_nobody_else_is_looked_at() -> None:
    class Unseen(Known):
        @property
        def general(self) -> bool:  # type: ignore[override]
            raise AssertionError("four are watched")

        @general.setter
        def general(self, value: bool) -> None:
            pass

    lookups, rows = Lookups(), [Known([5, 6, 7, 5, 6]) for _ in range(4)]
    for _ in rows:
        lookups.watch(rows)  # type: ignore[arg-type]
    rows[3].tokens.append(7)
    assert lookups.watch([*rows, Unseen([5, 6])]) == (1, 0)  # type: ignore[list-item]


class Always(Speculation):
    """Drafts in every tick."""

    def wanted(self, running: int) -> bool:
        self.k = self.max_k
        return running > 0


@pytest.mark.parametrize(
    ("k", "captured"),
    [(1, True), (3, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False), (3, True)))],
)
def test_the_models_own_draft_layer(captured: bool, k: int) -> None:
    model, new = made("deepseek"), 20
    rows = chats(3)
    wanted = plain(model, rows, new)
    bench = Bench(
        model, captured=captured, overlap=captured, verify_each=k + 1, mtp=1, drop_last_block=True,
        drafts=lambda executor, metrics: Always(executor.mtp, k, metrics),
    )  # fmt: skip
    for turn in range(2):  # the second time, prompts are found in the cache
        before = bench.scheduler.ticks
        assert bench.generate(rows, new) == wanted
        ticks = bench.scheduler.ticks - before
        assert ticks * 1.6 <= new + 3, f"turn {turn}: {ticks} ticks"
    counters = bench.scheduler.metrics.counters
    share = counters["spec_accepted_tokens_total"]["1"] / counters["spec_drafts_total"][""]
    assert share > 0.6
    ways = [Sampling(0.8, 30, 0.95, seed=i) for i in range(3)]
    plain_ways = [SamplingParams(0.8, 30, 0.95, seed=i) for i in range(3)]
    assert bench.generate(rows, new, ways) == plain(model, rows, new, plain_ways)
    # A start that measures steps of prompts leaves hidden rows that nobody takes.
    with torch.inference_mode():
        bench.executor.extending._forward(bench.executor.extending.state.plan(AttentionBatch((5,), (0,), [[1]])))
    assert bench.generate([[1, 2, 3]], 3) == plain(model, [[1, 2, 3]], 3)


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tree_of_the_draft_layer_takes_fewer_steps_than_a_chain(captured: bool) -> None:
    # Drafts end where a request's pages do, and those of a tree sooner.
    model, rows, new, k = made("deepseek", 64), chats(3), 60, 3
    ways = [Sampling(1.1, seed=i) for i in range(3)]
    wanted = plain(model, rows, new, [SamplingParams(1.1, seed=i) for i in range(3)])
    likeliest, steps = plain(model, rows, new), {}
    for topk in (1, 3):
        bench = Bench(
            model, captured=captured, overlap=captured, own_buckets=True, verify_each=topk * k + 1,
            mtp=topk, drop_last_block=True, prefix_cache=False, max_batched_tokens=64,
            drafts=lambda executor, metrics: Always(executor.mtp, k, metrics),
        )  # fmt: skip
        assert bench.generate(rows, new, ways) == wanted
        assert bench.generate(rows, new) == likeliest
        steps[topk] = bench.scheduler.metrics.counters["spec_drafts_total"][""]
        if captured:
            replays, eager = bench.executor.graph_counts()
            rule = TREE if topk > 1 else VERIFY
            assert not eager and sum(count for name, count in replays.items() if name.endswith(rule)) > 0
    assert steps[3] < steps[1]


@pytest.mark.parametrize(
    ("same", "topk"),
    [(True, 2), (False, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, 1), (False, 2)))],
)
def test_another_model_drafts(topk: int, same: bool) -> None:
    """A model that drafts for itself is always right; one that was made of other dice hardly ever. Tokens are equal."""
    model, rows, new, k = made("qwen", 64), prompts(4), 16, 3
    drafter = make_model("qwen", 64)
    if not same:
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.3)
        for module in drafter.modules():
            if hasattr(module, "finalize"):
                module.finalize()
    bench = Bench(
        model, verify_each=topk * k + 1, mtp=topk, draft_model=drafter, num_pages=24, max_running=3,
        drafts=lambda executor, metrics: Always(executor.mtp, k, metrics),
    )  # fmt: skip
    wanted = plain(model, rows, new)
    for _ in range(2):  # the second time, prompts are found in the cache
        assert bench.generate(rows, new) == wanted
    counters = bench.scheduler.metrics.counters
    share = counters["spec_accepted_tokens_total"].get("1", 0) / counters["spec_drafts_total"][""]
    assert share > 0.98 if same else share < 0.5
    ways = [Sampling(0.8, 30, 0.95, seed=seed) for seed in range(4)]
    params = [SamplingParams(0.8, 30, 0.95, seed=seed) for seed in range(4)]
    assert bench.generate(rows, new, ways) == plain(model, rows, new, params)
    assert bench.scheduler.cache.private == bench.scheduler.cache.locked == 0


def test_drafts_grow_from_the_likeliest_paths() -> None:
    """Against all paths of a depth, by hand: the best four of the two that grow."""
    grow = Growing(Request(Submit(1, b"\0" * 8), 1, [1, 2], frozenset(), 0), torch.zeros(1, 4), 1)
    grow.add([[-0.1, -2.0]], [[10, 11]], 2)
    assert (grow.front, grow.spine, grow.before()) == ([0, 1], [0, 1], (-1, -1))
    grow.states = torch.zeros(2, 4)
    grow.add([[-0.5, -0.7], [-0.1, -3.0]], [[20, 21], [22, 23]], 2)
    assert (grow.ids, grow.parents) == ([10, 11, 20, 21, 22, 23], [-1, -1, 0, 0, 1, 1])
    assert grow.front == [2, 3] and grow.before() == (-1, -1, 0, 0)
    best = grow.best(4)
    assert (list(best), best.parents) == ([10, 11, 20, 21], [-1, -1, 0, 0])
    # A child is never kept without its parent, whatever ties there are.
    grow.scores = [-1.0] * 6
    assert all(parent < place for place, parent in enumerate(grow.best(3).parents))


def test_a_draft_layer_that_rests_is_not_asked_for_those_who_ran() -> None:
    model, new = made("deepseek"), 26
    rows = prompts(4)
    wanted = plain(model, rows, new)

    class Sometimes(Always):
        def wanted(self, running: int) -> bool:
            self._ticks += 1
            self.k = 2 if self._ticks % 12 < 8 else 0
            if not self.k:
                self.source.rest()
            return self.k > 0

    bench = Bench(
        model, verify_each=3, mtp=1, drop_last_block=True, num_pages=30, max_running=3,
        drafts=lambda executor, metrics: Sometimes(executor.mtp, 2, metrics),
    )  # fmt: skip
    assert bench.generate(rows, new) == wanted
    assert bench.scheduler.metrics.counters["spec_drafts_total"][""] > 0


def test_hidden_rows_of_drafts_that_did_not_count_make_room_for_those_that_do() -> None:
    """As where a tick without drafts follows one that verified some: four rows were noted, two positions count."""
    drafts = Bench(made("deepseek"), mtp=1, drop_last_block=True).executor.mtp
    assert drafts is not None
    request, rows = Request(Submit(1, b"\0" * 8), 1, [1, 2], frozenset(), 0), torch.arange(8.0)[:, None]
    drafts.begin(request, 10)
    drafts.note(request, 10, rows[:4])
    drafts.note(request, 12, rows[4:5])
    drafts.note(request, 13, rows[5:8])
    drafts.note(request, 14, rows[:1])
    assert torch.cat(drafts._news[request]).flatten().tolist() == [0.0, 1.0, 4.0, 5.0, 0.0]
    drafts.note(request, 16, rows)
    assert sum(map(len, drafts._news[request])) == 5, "some between them are missing"


def test_a_draft_layer_keeps_no_more_hidden_rows_than_it_computes_at_once() -> None:
    model, rows = made("deepseek"), prompts(6)
    bench = Bench(model, verify_each=3, mtp=1, drop_last_block=True, max_running=2)

    class Never(Always):
        def wanted(self, running: int) -> bool:
            held = sum(len(part) for news in self.source._news.values() for part in news)  # type: ignore[union-attr]
            most.append(held)
            return False

    most: list[int] = []
    bench.engine.drafts = Never(bench.executor.mtp, 2, Metrics())  # type: ignore[arg-type]
    for _ in range(3):
        bench.generate(rows, 8)
    assert bench.executor.mtp is not None and 0 < max(most) <= bench.executor.mtp._tokens
