"""Two halves in turns: cuts by hand and by search, the bits of halves alone, tokens over Gloo, planted bugs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.symmetric import local_arenas
from fastlayers.comm.triton_exchange import Exchange
from fastlayers.errors import ArgumentError, CollectiveMismatch, LayoutError
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.testing.world import Rank, WorldError, world
from fastlayers.torch_compile import TorchCompile
from fastlayers_models import overlap
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator
from fastlayers_models.overlap import (
    Exchanges,
    Half,
    Halves,
    OneGroup,
    Piece,
    StreamExchanges,
    split,
    take_out,
    token_cut,
)

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import MOE, Variation, save_random
from tiny_models import VARIATIONS as DEEPSEEK
from tiny_models import hf_config, relative_rms

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [3], [20, 21, 22, 23]]
NEW = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {
        "deepseek_v3": hf_config(DEEPSEEK[0]),
        "qwen3_moe": Variation("qwen3_moe", "Qwen3MoeConfig", changes=dict(MOE, head_dim=16)).hf_config(),
    }
    return {name: save_random(config, tmp_path_factory.mktemp(name)) for name, config in configs.items()}


def load(folder: Any, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


# ---- cuts --------------------------------------------------------------------------------------------------------


def partitions(most: int) -> Iterator[tuple[int, ...]]:
    """Yield all lengths of one or more requests of at most so many tokens together."""
    yield from ((n,) for n in range(1, most + 1))
    for n in range(1, most):
        for rest in partitions(most - n):
            yield (n, *rest)


def cut_by_item_60(lengths: Sequence[int]) -> int:
    """Return the cut, by counting."""
    total, half = sum(lengths), sum(lengths) // 2
    left = min((abs(2 * sum(lengths[:i]) - total), -i) for i in range(1, len(lengths))) if len(lengths) > 1 else (0, 0)
    left_sum = sum(lengths[: -left[1]])
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]  # of each token
    requests_of_first = owner[half] + 1
    if (left_sum < 0.48 * total or left_sum > 0.52 * total) and requests_of_first <= half:
        return half
    return left_sum


def test_cuts_by_hand() -> None:
    assert token_cut([3072]) == 1536 and token_cut([30, 3072]) == 1551  # inside the long one
    assert token_cut([100, 100]) == 100 and token_cut([49, 51]) == 49  # between two
    assert token_cut([47, 53]) == 50
    assert [token_cut([1] * n) for n in range(1, 6)] == [0, 1, 2, 2, 3]  # decode is never cut inside a request
    assert token_cut([]) == 0


def test_cuts_of_all_short_steps() -> None:
    every = list(partitions(12))
    assert len(every) == 2**12 - 1
    assert [token_cut(lengths) for lengths in every] == [cut_by_item_60(lengths) for lengths in every]


def test_halves_of_all_cuts_hold_the_step() -> None:
    for lengths in partitions(12):
        prefixes = tuple(range(3, 3 + len(lengths)))
        batch = AttentionBatch(lengths, prefixes, [[i + 1] for i in range(len(lengths))])
        tokens = [(i, p + k) for i, (n, p) in enumerate(zip(lengths, prefixes, strict=True)) for k in range(n)]
        for cut in range(sum(lengths) + 1):
            halves = split(batch, cut)
            assert halves[0].num_tokens == cut
            found = [
                (pages[0] - 1, prefix + k)
                for half in halves
                for pages, prefix, count in zip(half.page_table, half.prefix_lens, half.query_lens, strict=True)
                for k in range(count)
            ]
            assert found == tokens
    with pytest.raises(ArgumentError, match="without left padding or trees"):
        split(AttentionBatch((2,), (0,), [[1]], starts=(1,)), 1)


# ---- one process: the bits ---------------------------------------------------------------------------------------


class Late(Exchanges):
    """Exchanges nothing before it is awaited: whoever does not wait for it reads what was there before."""

    def __init__(self) -> None:
        self.due: dict[Half, Sequence[Piece]] = {}
        self.beside: list[int] = []  # exchanges under way behind each wait, which another half may hide
        Late.last = self

    last: Late

    def start(self, half: Half, pieces: Sequence[Piece]) -> None:
        assert half not in self.due
        self.due[half] = pieces

    def wait(self, half: Half) -> None:
        half.run(self.due.pop(half, ()))
        self.beside.append(len(self.due))


class Careless(Late):
    def start(self, half: Half, pieces: Sequence[Piece]) -> None:
        self.halves = [*getattr(self, "halves", ()), half][:2]
        self.due[half] = pieces


class ForTheOther(Careless):  # right, and nothing overlaps
    def wait(self, half: Half) -> None:
        for other in [each for each in self.due if each is not half]:
            super().wait(other)


class ForTheFirst(Careless):
    def wait(self, half: Half) -> None:
        super().wait(getattr(self, "halves", [half])[0])


class ForNobody(Careless):
    def wait(self, half: Half) -> None:
        self.beside.append(len(self.due))


def second_half_first(layers: Any, halves: Any, exchanges: Any) -> None:
    GOOD(layers, halves[::-1], exchanges)


GOOD: Callable[..., None] = overlap.in_turns


@contextmanager
def exchanging(how: type[Exchanges]) -> Iterator[None]:
    kept, overlap.exchanges_of = overlap.exchanges_of, lambda model: how()
    try:
        yield
    finally:
        overlap.exchanges_of = kept


class Steps:
    """Two steps of three requests, whole or in halves cut anywhere; caches begin as NaN."""

    def __init__(self, model: Any) -> None:
        self.model, self.table = model, whole_pages([40] * 3, model.page_size)
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        self.caches = spec.allocate(1 + sum(map(len, self.table)), model.device)
        for cache in self.caches:
            cache.keys.fill_(float("nan"))
            if cache.values is not None:
                cache.values.fill_(float("nan"))
        make = lambda: AttentionState(3, 64, 4, model.page_size)  # noqa: E731
        self.state, self.halves = make(), Halves(model, make(), "both", (OneGroup(model), OneGroup(model)))

    def ids(self, batch: AttentionBatch) -> torch.Tensor:
        tokens = [7 * p + k for p, n in zip(batch.prefix_lens, batch.query_lens, strict=True) for k in range(n)]
        return (torch.tensor(tokens) * 13 + 5) % self.model.config.vocab_size

    def batch(self, lengths: tuple[int, ...], prefixes: tuple[int, ...]) -> AttentionBatch:
        return AttentionBatch(lengths, prefixes, self.table)

    @torch.inference_mode()
    def whole(self, batch: AttentionBatch) -> torch.Tensor:
        return self.model(self.ids(batch), self.state.plan(batch), self.caches)

    @torch.inference_mode()
    def one_by_one(self, batch: AttentionBatch, cut: int) -> torch.Tensor:
        ids, found = self.ids(batch), []
        for half, part in zip(split(batch, cut), ids.split([cut, len(ids) - cut]), strict=True):
            found.append(self.model(part, self.state.plan(half), self.caches))
        return torch.cat(found)

    @torch.inference_mode()
    def in_turns(self, batch: AttentionBatch, cut: int) -> torch.Tensor:
        meta = self.state.plan(batch)
        self.halves.plan(meta, "decode" if batch.is_decode else "extend", [(batch.num_tokens, cut)])
        planned = self.halves.of(meta)
        assert [half.num_tokens for half, _, _ in planned] == [cut, batch.num_tokens - cut]
        return self.model(self.ids(batch), meta, self.caches, halves=planned)


EXTEND, DECODE = ((5, 3, 4), (0, 0, 0)), ((1, 1, 1), (5, 3, 4))


def check_turns(model: Any, cut: int, exchanges: type[Exchanges]) -> None:
    """Raise unless halves in turns have the bits of the same halves alone, and exchanges are under way meanwhile.

    Of the whole step they have the values only: torch's products round by how many rows they have.
    """
    alone, turns, whole = Steps(model), Steps(model), Steps(model)
    for lengths, prefixes in (EXTEND, DECODE):
        here = min(cut, sum(lengths) - 1)
        wanted = alone.one_by_one(alone.batch(lengths, prefixes), here)
        with exchanging(exchanges):
            found = turns.in_turns(turns.batch(lengths, prefixes), here)
        assert torch.equal(found, wanted)
        assert relative_rms(found, whole.whole(whole.batch(lengths, prefixes))) < 1e-5
        if exchanges is not Exchanges:  # but at first and at last, one exchange is always under way
            assert Late.last.beside == [0, *[1] * (4 * model.config.num_hidden_layers + 2), 0]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_halves_in_turns_have_the_bits_of_halves_alone(folders: dict[str, Path], family: str) -> None:
    model = load(folders[family])
    check_turns(model, 6, Exchanges)
    for cut in (1, 5, 8, 11):  # in each request and between two, the first and the last one possible
        check_turns(model, cut, Late)


@pytest.mark.parametrize("bug", [ForTheOther, ForTheFirst, ForNobody, second_half_first])
def test_planted_bugs_are_caught(folders: dict[str, Path], bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, how = load(folders["qwen3_moe"]), bug
    if bug is second_half_first:
        monkeypatch.setattr(overlap, "in_turns", bug)
        how = Late
    with pytest.raises((AssertionError, LayoutError)):
        check_turns(model, 6, how)  # inside the second request


def test_what_is_not_cut_runs_whole(folders: dict[str, Path]) -> None:
    steps = Steps(load(folders["qwen3_moe"]))
    one = steps.state.plan(AttentionBatch((1,), (3,), steps.table[:1]))
    steps.halves.plan(one, "decode")
    assert not steps.halves.of(one)
    for bucket in (1, 2, 3):
        meta = steps.state.plan(AttentionBatch((1,), (3,), steps.table[:1]), bucket=bucket)
        steps.halves.plan(meta, "decode")
        assert [half.num_tokens for half, _, _ in steps.halves.of(meta)] == [[], [1, 1], [2, 1]][bucket - 1]
        assert [int(count) for _, _, count in steps.halves.of(meta) if count is not None] == [1, 0][: 2 * (bucket > 1)]


# ---- streams -----------------------------------------------------------------------------------------------------


def test_rows_in_the_workspace_are_taken_out() -> None:
    other, arena = (SimpleNamespace(buffer=torch.zeros(64, dtype=torch.uint8)) for _ in range(2))  # type: Any, Any
    inside, outside = arena.buffer.view(torch.float32)[:8].view(2, 4), torch.zeros(2, 4)
    for given, copied in ((inside, True), (outside, False)):
        hidden = Hidden.start(given)
        take_out(hidden, [other, arena])
        assert (hidden.tensor is not given) == copied and torch.equal(hidden.tensor, given)
        take_out(hidden, [])
    hidden = Hidden.start(inside)
    take_out(hidden, [arena])
    inside.fill_(3)  # the next exchange
    assert hidden.tensor.sum() == 0


@pytest.mark.parametrize(("rows", "groups"), [(5, 3), (5, 1), (1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("layout", ["row", "col", "col_tma4"])
def test_codes_in_the_workspace_are_taken_out(layout: str, rows: int, groups: int) -> None:
    exchange = Exchange(local_arenas(2, 1 << 16)[0], 128 * groups, torch.bfloat16, rows, 2)
    codes, scales, _ = exchange._coded(2 * rows, layout)
    codes.view(torch.uint8).random_(0, 100)
    given = CodedRows(codes, scales.normal_())
    hidden = Hidden(given, None, Layout("full"))  # type: ignore[arg-type]
    take_out(hidden, [exchange.arena])
    taken, kept = hidden.tensor, CodedRows(codes.clone(), scales.clone())
    exchange.arena.buffer.fill_(1)  # the next exchange
    assert isinstance(taken, CodedRows) and taken is not given and taken.scales.stride() == scales.stride()
    assert torch.equal(taken.codes.view(torch.uint8), kept.codes.view(torch.uint8))
    assert torch.equal(taken.scales, kept.scales)


class Streams:
    """CUDA's streams and events as far as they are ordered: what each stream has behind it."""

    def __init__(self) -> None:
        self.behind: dict[str, set[str]] = {"current": set(), "other": set()}
        self.now = "current"

    def stream(self, name: str) -> Any:
        def wait(found: set[str]) -> None:
            self.behind[name] |= found

        return SimpleNamespace(
            device=torch.device("cpu"), name=name, wait_event=wait, record_event=lambda: set(self.behind[name]),
            wait_stream=lambda other: wait(self.behind[other.name]),
        )  # fmt: skip

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


def test_streams_are_forked_and_joined_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage has its half's behind it, exchanges keep one order, and none is awaited where it may be hidden."""
    streams = Streams()
    seen: dict[str, set[str]] = {}
    made: dict[str, weakref.ref[torch.Tensor]] = {}
    monkeypatch.setattr(overlap, "other_stream", lambda device: streams.stream("other"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.stream(streams.now))
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)

    class Layer:
        STAGES, COMPUTED = ("in", "attention", "out", "mlp", "after"), ("attention", "mlp")

        def __init__(self, number: int) -> None:
            self.number = number

        def run(self, stage: str, hidden: Any, name: str, *_: Any) -> Any:
            done = f"{name} {self.number} {stage}"
            assert streams.now == ("current" if stage in self.COMPUTED else "other")
            seen[done] = set(streams.behind[streams.now])
            streams.behind[streams.now].add(done)
            hidden = Hidden.start(torch.empty(1, 1))
            if stage in self.COMPUTED:  # what the other half exchanges now is somebody's
                assert all(tensor() is not None for half, tensor in made.items() if half != name)
                made[name] = weakref.ref(hidden.tensor)
            return hidden

    def half(name: str) -> Half:
        made = Half.__new__(Half)
        made.meta, made.step, made.rows, made.under_way = name, None, None, None  # type: ignore[assignment]
        made.hidden = Hidden.start(torch.empty(1, 1))
        return made

    halves = [half("A"), half("B")]
    overlap.in_turns([(Layer(n), None) for n in (0, 1)], halves, StreamExchanges(torch.device("cpu")))  # type: ignore[misc, arg-type]
    order = [f"{n} {stage}" for n in (0, 1) for stage in Layer.STAGES]
    for name in "AB":
        for place, stage in enumerate(order):
            assert {f"{name} {before}" for before in order[:place]} <= seen[f"{name} {stage}"]
    for n in (0, 1):
        assert f"A {n} attention" in seen[f"B {n} attention"] and f"A {n} out" in seen[f"B {n} out"]
        # What hides what: B computes beside A's exchange, and A's next stage beside B's.
        assert f"A {n} out" not in seen[f"B {n} attention"] and f"B {n} out" not in seen[f"A {n} mlp"]
        assert f"A {n} after" not in seen[f"B {n} mlp"]
    assert "B 0 after" not in seen["A 1 attention"]
    assert streams.behind["current"] == set(seen)  # all is joined at last
    assert all(each.under_way is None for each in halves)


# ---- two processes -----------------------------------------------------------------------------------------------


def generate(rank: Rank, folder: str, options: dict[str, int], setting: str, graphs: bool, prompts: Any) -> Any:
    model = load(folder, parallel=rank.spec(**options))
    kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if graphs else None
    generator = Generator(model, max_batch=3, max_length=64, prefill_tokens=9, graphs=kept, overlap=setting)
    turns: list[int] = []

    def counted(*given: Any) -> None:
        turns.append(len(given[1]))
        GOOD(*given)

    overlap.in_turns = counted  # type: ignore[assignment]
    try:
        with exchanging(Late):
            found = generator.generate(prompts, max_new_tokens=NEW, eos_ids=())
    finally:
        overlap.in_turns = GOOD
    return found, len(turns), set(turns), generator.report()[:1], generator.pool.free_pages


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {
        name: Generator(load(folder), max_batch=3, max_length=64, prefill_tokens=9).generate(
            PROMPTS, max_new_tokens=NEW, eos_ids=()
        )
        for name, folder in folders.items()
    }


@pytest.mark.parametrize(("family", "options", "setting", "graphs"), [
    ("qwen3_moe", {"ep": 2}, "both", False),
    pytest.param("qwen3_moe", {"ep": 2}, "two_batch", True, marks=pytest.mark.slow),
    ("qwen3_moe", {"attn_dp": 2, "ep": 2}, "both", True), ("qwen3_moe", {"attn_dp": 2}, "two_chunk", False),
    ("deepseek_v3", {}, "two_chunk", True),
    pytest.param("deepseek_v3", {"ep": 2}, "both", True, marks=pytest.mark.slow),
    ("deepseek_v3", {"attn_dp": 2, "ep": 2}, "both", False),
], ids=str)  # fmt: skip
def test_tokens_are_those_of_one_process(
    folders: dict[str, Path], wanted: Any, family: str, options: dict[str, int], setting: str, graphs: bool
) -> None:
    # With two groups the prompts are ragged between them; then the second group is idle, and both its halves are empty.
    for prompts in (PROMPTS, PROMPTS[:1]):
        first, second = world(2).run(generate, str(folders[family]), options, setting, graphs, prompts)
        assert first[0] == second[0] == wanted[family][: len(prompts)]
        assert first[1] == second[1] and first[4] == second[4]
        # One request is cut in its prompt only.
        assert (first[1] > 0) == (len(prompts) > 1 or setting != "two_batch")
        assert first[2] <= {2}
        kinds = {"both": "decode and extend", "two_batch": "decode", "two_chunk": "extend"}[setting]
        assert first[3] == [f"{kinds} steps: two halves in turns"]


def differ(rank: Rank, folder: str) -> Any:
    Generator(load(folder, parallel=rank.spec()), max_length=64, overlap=("off", "two_batch")[rank.rank])


def test_ranks_have_one_setting(folders: dict[str, Path]) -> None:
    with pytest.raises(WorldError, match="ranks differ in overlap: rank 0 has off; rank 1 has two_batch") as caught:
        world(2).run(differ, str(folders["qwen3_moe"]))
    assert CollectiveMismatch.__name__ in str(caught.value)


def refusals(rank: Rank, folder: str) -> list[str]:
    model, found = load(folder, parallel=rank.spec()), []
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False)
    nameless = SimpleNamespace(decoder=SimpleNamespace(layers=[object()]), parallel=model.parallel)
    for call in (
        lambda: Generator(model, max_length=64, overlap="both", torch_compile=TorchCompile(), graphs=graphs),
        lambda: Halves.make(nameless, None, "two_chunk", None, OneGroup),  # type: ignore[arg-type]
        lambda: Halves.make(SimpleNamespace(**vars(nameless), tower=1), None, "two_chunk", None, OneGroup),  # type: ignore[arg-type]
    ):
        try:
            call()
        except ArgumentError as error:
            found.append(str(error))
    return found


def test_what_cannot_overlap_is_refused(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_moe"])
    with pytest.raises(ArgumentError, match="overlap is 'two_batch'; accepted: 'off' on one rank: nothing is sent"):
        Generator(model, max_length=64, overlap="two_batch")
    with pytest.raises(
        ArgumentError, match="overlap is 'on'; accepted: one of 'off', 'two_batch', 'two_chunk', 'both'"
    ):
        Generator(model, max_length=64, overlap="on")
    assert Generator(model, max_length=64).step.halves is None
    for messages in world(2).run(refusals, str(folders["qwen3_moe"])):
        wanted = ("with torch_compile, which", "whose layers name no stages", "a model that takes images")
        assert len(messages) == 3 and all(words in each for words, each in zip(wanted, messages, strict=True))
