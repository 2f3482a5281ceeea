"""The tuner with a clock that knows the times: ladders, halving, journals, failures; and what times on a CPU."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers import tuning
from fastlayers.device import as_device
from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8LinearConfig
from fastlayers.linear.fp8_block.torch import TorchFP8Linear
from fastlayers.registry import Backend
from fastlayers.tuning import search
from fastlayers.tuning.clock import HostClock, Timing, clock_for, measure_enough, rounds_for, take_turns
from fastlayers.tuning.samples import Journal, Option, Sample, earlier
from fastlayers.tuning.search import (
    Bench,
    NothingToTuneError,
    OutOfTimeError,
    TuneError,
    choose_ladder,
    tune_shape,
)

CPU = torch.device("cpu")
CFG = FP8LinearConfig(256, 128)
A, B, TUNED = Option("a"), Option("b"), Option("b", (("BLOCK_N", 64),))


def samples(**times: list[float]) -> list[Sample]:
    """Times of options at 1, 8, 64 and 512 tokens; 0 means not timed."""
    names = {"a": A, "b": B, "tuned": TUNED, "c": Option("c")}
    return [
        Sample(count, names[name], us, 0.0)
        for name, row in times.items()
        for count, us in zip((1, 8, 64, 512), row, strict=True)
        if us
    ]


def ladder(found: list[Sample], **layouts: str) -> list[tuple[int | None, str, float]]:
    chosen = choose_ladder(found, {"a": "x", "b": "x", "c": "x"} | layouts, ["a", "b", "c"])
    return [(step.max_tokens, str(step.option), step.us) for step in chosen]


def test_a_rung_is_kept_where_another_wins_by_less_than_the_noise() -> None:
    assert ladder(samples(a=[10, 10, 10, 10], b=[9.9, 10.1, 9.87, 10])) == [(None, "a", 10)]


def test_real_wins_make_rungs_with_the_time_at_their_last_point() -> None:
    found = ladder(samples(a=[5, 6, 20, 40], b=[8, 9, 15, 30]))
    assert found == [(8, "a", 6), (None, "b", 30)]


def test_fewest_rungs_win_over_the_single_best() -> None:
    # "b" is best at 8 tokens by 1 %: not worth two more rungs. At 64 it is best by 10 %.
    assert ladder(samples(a=[5, 6.06, 20, 40], b=[8, 6, 18, 44])) == [(8, "a", 6.06), (64, "b", 18), (None, "a", 40)]


def test_its_own_rule_is_preferred_to_parameters_that_are_no_faster() -> None:
    assert ladder(samples(b=[5, 5, 5, 5], tuned=[4.95, 4.95, 4.95, 4.95])) == [(None, "b", 5)]
    assert ladder(samples(b=[5, 5, 5, 5], tuned=[4, 4, 4, 4])) == [(None, "b(BLOCK_N=64)", 4)]


def test_noisy_points_are_judged_by_their_own_spread() -> None:
    calm = [Sample(1, A, 10.0, 0.0), Sample(1, B, 9.82, 0.0)]
    noisy = [Sample(1, A, 10.0, 0.5), Sample(1, B, 9.82, 0.48)]
    assert ladder(calm) == [(None, "b", 9.82)]
    assert ladder(noisy) == [(None, "a", 10.0)]


def test_a_ladder_has_one_weight_layout_and_options_serve_only_what_was_timed() -> None:
    found = samples(a=[1, 1, 50, 50], b=[9, 9, 9, 9])
    assert ladder(found) == [(8, "a", 1), (None, "b", 9)]
    assert ladder(found, a="other") == [(None, "a", 50)] or ladder(found, a="other") == [(None, "b", 9)]
    assert ladder(samples(a=[1, 1, 90, 90], b=[9, 9, 9, 9]), a="other") == [(None, "b", 9)]
    assert ladder(samples(a=[1, 0, 0, 0], b=[9, 9, 9, 9])) == [(1, "a", 1), (None, "b", 9)]
    with pytest.raises(TuneError, match="every token count"):
        ladder(samples(a=[1, 0, 1, 1], b=[9, 9, 0, 9]), a="other")


# ---- a shape, with a clock that knows --------------------------------------------------------------------------


class Fast(TorchFP8Linear):
    """A backend with candidates; one of them cannot be built, one computes something else."""

    def __init__(self, cfg: FP8LinearConfig, config: Mapping[str, int] | None = None) -> None:
        super().__init__(cfg)
        self.config = dict(config or {})
        if self.config.get("BLOCK") == 13:
            raise RuntimeError("out of resource: shared memory\nsecond line")

    def __call__(self, *given: Any) -> torch.Tensor:
        y = super().__call__(*given)
        return y / 2 if self.config.get("BLOCK") == 7 else y

    @staticmethod
    def candidates(cfg: FP8LinearConfig, num_tokens: int) -> list[dict[str, int]]:
        return [{"BLOCK": size} for size in (16, 32, 64, 128, 256, 512, 13, 7)]


@dataclass
class Known:
    """A call that takes a known time."""

    us: float

    def run(self) -> float:
        return self.us


class KnownClock:
    """Times by the implementation's name and parameters: torch 9 µs, ours 20, with BLOCK=n a function of n."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.times, self.rounds, self.prepared = times, [], 0

    def prepare(self, call: Callable[[], object]) -> Known:
        self.prepared += 1
        call()
        impl = call.args[0]  # type: ignore[attr-defined]
        if not isinstance(impl, Fast):
            return Known(9.0)
        return Known(self.times[impl.config["BLOCK"]] if impl.config else 20.0)

    def measure(self, calls: Mapping[str, Known], rounds: int, seconds: float = math.inf) -> dict[str, Timing]:
        self.rounds.append((rounds, len(calls)))
        return take_turns(calls, rounds, seconds=seconds)


TIMES = {16: 12.0, 32: 11.0, 64: 8.0, 128: 10.0, 256: 13.0, 512: 14.0, 7: 1.0}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Backend:
    row = Backend("fast", Fast, auto_on=("cpu",))
    monkeypatch.setattr(FP8_LINEAR, "ranked", [row, *FP8_LINEAR.ranked])
    return row


def test_a_shape_is_tuned_checked_and_halved(fast: Backend, tmp_path: Path) -> None:
    clock, said = KnownClock(TIMES), []
    bench = Bench("fp8_linear", CFG, CPU, clock)
    path = tune_shape(bench, (1, 8), tmp_path, command="fastlayers tune", said=said.append)
    table = json.loads(path.read_text())
    assert path == tmp_path / "fp8_linear" / f"{CFG.tuning_key()},device_name=cpu.json"
    # BLOCK=7 is the fastest, and wrong; BLOCK=13 cannot be built.
    assert table["ladder"] == [{"max_tokens": None, "backend": "fast", "microseconds": 8.0, "config": {"BLOCK": 64}}]
    assert "RuntimeError: out of resource: shared memory" in table["failed"]["fast(BLOCK=13)"]
    assert "ParityError" in table["failed"]["fast(BLOCK=7)"]
    assert table["errors"]["fast(BLOCK=64)"] < 5e-3
    first = clock.rounds[: len(search.ROUNDS)]
    assert [rounds for rounds, _ in first] == [*search.ROUNDS[:-1], 200]  # the fastest takes 1 µs
    assert first[0][1] == 9 and first[0][1] > first[1][1] >= first[2][1]
    about = table["metadata"]
    assert about["versions"]["torch"] == {"torch": torch.__version__} and about["command"] == "fastlayers tune"
    assert len(about["kernels"]["fast"]) == 12 and about["date"].startswith("20")
    assert {row["tokens"] for row in table["measured"]} == {1, 8}
    assert {(r["backend"], r["us"]) for r in table["measured"]} >= {("torch", 9.0), ("fast", 20.0), ("fast", 8.0)}
    assert table["floors"]["8"][1] > 0 and [p.done for p in said] == [0, 1, 2]
    assert list(tmp_path.rglob("*.journal")) == []


def test_between_counts_far_apart_rules_and_winners_are_timed(fast: Backend, tmp_path: Path) -> None:
    """What wins at 1 and at 16 and loses at 4 does not serve 4: as attention's splits did for a few requests."""

    class Few(KnownClock):
        def prepare(self, call: Callable[[], object]) -> Known:
            known = super().prepare(call)
            rows = next(value for value in call.args[1].values() if isinstance(value, torch.Tensor)).shape[0]
            return Known(known.us + 9) if rows in (2, 4) and known.us < 9 else known

    clock, said = Few(TIMES), []
    bench = Bench("fp8_linear", CFG, CPU, clock, most_candidates=4)
    path = tune_shape(bench, (1, 16), tmp_path, command="x", said=said.append, fill=True)
    table = json.loads(path.read_text())
    assert table["tokens"] == [1, 2, 4, 8, 16] and table["candidates"] == {"1": 4, "2": 0, "4": 0, "8": 0, "16": 4}
    assert [(row["max_tokens"], row["backend"]) for row in table["ladder"]] == [
        (1, "fast"),
        (4, "torch"),
        (None, "fast"),
    ]
    assert [p.now for p in said if p.done == 2] == ["2 tokens", "4 tokens", "8 tokens", "checking the winners"]
    assert all(rounds == (search.ROUNDS[-1], 5) for rounds in clock.rounds[-3:])  # torch, fast, its best three
    # Asked for, they are searched like any other.
    known = earlier(path, "fp8_linear", bench.device, bench.able())
    assert known.lacks((1, 2, 16), 4) == [2]
    # And measured again where all is.
    said.clear()
    tune_shape(bench, (1, 16), tmp_path, command="x", said=said.append, fill=True, again=True)
    assert [p.now for p in said] == [f"{n} tokens" for n in (1, 16, 2, 4, 8)] + ["checking the winners"]


def test_a_run_that_ends_between_counts_goes_on_there_and_has_searched_nothing_in_between(
    fast: Backend, tmp_path: Path
) -> None:
    bench, said = Bench("fp8_linear", CFG, CPU, KnownClock(TIMES), most_candidates=4), []  # type: ignore[var-annotated]
    now = iter([0.0, 0.0, 0.0, 9.0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda: next(now)))
        with pytest.raises(OutOfTimeError, match="what lies between them is not; run again"):
            tune_shape(bench, (1, 8), tmp_path, command="x", until=5.0, fill=True)
    assert not list(tmp_path.rglob("*.json"))
    path = tune_shape(bench, (1, 2, 8), tmp_path, command="x", said=said.append, fill=True)
    assert [p.now for p in said] == ["2 tokens", "4 tokens", "checking the winners"]
    assert json.loads(path.read_text())["candidates"] == {"1": 4, "2": 4, "4": 0, "8": 4}


def test_the_tables_ladder_is_what_auto_builds(fast: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_shape(Bench("fp8_linear", CFG, CPU, KnownClock(TIMES)), (1, 8), tmp_path, command="x")
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    built = FP8_LINEAR.choose(CFG).build()
    assert built.single.config == {"BLOCK": 64}


def test_what_the_nearest_ladder_would_run_is_timed_too(
    fast: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fewer(Fast):
        @staticmethod
        def candidates(cfg: FP8LinearConfig, num_tokens: int) -> list[dict[str, int]]:
            return [{"BLOCK": 32}]

    tune_shape(Bench("fp8_linear", CFG, CPU, KnownClock(TIMES)), (1, 8), tmp_path, command="x")
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    other = replace(CFG, out_features=2 * CFG.out_features)
    assert tuning.borrowed_ratios("fp8_linear", as_device("cpu")) == {}
    monkeypatch.setattr(FP8_LINEAR, "ranked", [replace(fast, target=Fewer), *FP8_LINEAR.ranked[1:]])
    # BLOCK=64, the neighbour's winner, is no candidate here; it is not the best either.
    clock = KnownClock(TIMES | {64: 8.5, 32: 8.0})
    table = json.loads(tune_shape(Bench("fp8_linear", other, CPU, clock), (1, 8), tmp_path, command="x").read_text())
    assert {(r["tokens"], r["us"]) for r in table["measured"] if r.get("config") == {"BLOCK": 64}} == {
        (1, 8.5),
        (8, 8.5),
    }
    ratios = tuning.borrowed_ratios("fp8_linear", as_device("cpu"))
    assert ratios[other.tuning_key() or ""] == [8.5 / 8.0] * 2


def test_what_won_at_few_tokens_is_not_tried_where_it_does_not_serve(
    fast: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose rows are unrolled, of 64 rows: the compiler takes a minute for each of four winners."""
    ran: list[tuple[dict[str, int], int]] = []

    class FewRows(Fast):
        def __call__(self, *given: Any) -> torch.Tensor:
            ran.append((self.config, given[0].shape[0]))
            return super().__call__(*given)

        @staticmethod
        def candidates(cfg: FP8LinearConfig, num_tokens: int) -> list[dict[str, int]]:
            return [{"BLOCK": size} for size in ((64, 32, 16) if num_tokens <= 4 else (128,))]

        @staticmethod
        def serves(config: Mapping[str, int], num_tokens: int) -> bool:
            return config["BLOCK"] > 64 or num_tokens <= 4

    monkeypatch.setattr(FP8_LINEAR, "ranked", [replace(fast, target=FewRows), *FP8_LINEAR.ranked[1:]])
    clock = KnownClock(TIMES | {128: 7.0})
    path = tune_shape(Bench("fp8_linear", CFG, CPU, clock), (1, 16), tmp_path, command="x", fill=True)
    assert {rows for config, rows in ran if config.get("BLOCK", 0) in (16, 32, 64)} == {1, 2, 4}
    assert {rows for config, rows in ran if config.get("BLOCK") == 128} >= {5, 8, 16}
    table = json.loads(path.read_text())
    assert table["failed"] == {} and [row["max_tokens"] for row in table["ladder"]] == [1, None]
    # What serves few tokens is checked with so many.
    bench, option = Bench("fp8_linear", CFG, CPU, clock), Option("fast", (("BLOCK", 64),))
    ran.clear()
    assert bench.check(option) < 5e-3 and {rows for _, rows in ran} == {4}


def test_an_interrupted_run_goes_on_where_it_stopped(fast: Backend, tmp_path: Path) -> None:
    class Interrupted(KnownClock):
        def measure(self, calls: Mapping[str, Known], rounds: int) -> dict[str, Timing]:
            if len(self.rounds) == len(search.ROUNDS):
                raise KeyboardInterrupt
            return super().measure(calls, rounds)

    with pytest.raises(KeyboardInterrupt):
        tune_shape(Bench("fp8_linear", CFG, CPU, Interrupted(TIMES)), (1, 8), tmp_path, command="x")
    (journal,) = tmp_path.rglob("*.journal")
    assert [json.loads(line).get("tokens") for line in journal.read_text().splitlines()] == [None, 1]
    clock = KnownClock(TIMES)
    path = tune_shape(Bench("fp8_linear", CFG, CPU, clock), (1, 8), tmp_path, command="x")
    assert len(clock.rounds) == len(search.ROUNDS)  # of 8 tokens only
    assert {row["tokens"] for row in json.loads(path.read_text())["measured"]} == {1, 8}


def test_a_journal_of_other_kernels_or_cut_in_a_line_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path, {"kernels": 1}).add(1, [Sample(1, A, 2.0, 0.1)])
    assert Journal(path, {"kernels": 1}).samples == {1: [Sample(1, A, 2.0, 0.1)]}
    with path.open("a") as file:
        file.write('{"tokens": 8, "sam')
    assert set(Journal(path, {"kernels": 1}).samples) == {1}
    assert Journal(path, {"kernels": 2}).samples == {}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"tokens": 8}',
        b'{"tokens": 8, "samples": [{"tokens": 8, "backend": "a", "us": "x", "spread_us": 0}]}',
        b'{"tokens": 8, "samples": 3}',
        b"[1, 2]",
        b"7",
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_journal_is_cut_there(tmp_path: Path, damage: bytes) -> None:
    path, header = tmp_path / "j", {"kernels": 1}
    Journal(path, header).add(1, [Sample(1, A, 2.0, 0.1)])
    path.write_bytes(path.read_bytes() + damage + b"\n")
    found = Journal(path, header)
    assert set(found.samples) == {1}
    found.add(8, [Sample(8, A, 2.0, 0.1)])
    assert set(Journal(path, header).samples) == {1, 8}
    path.write_bytes(damage + b"\n" + path.read_bytes())
    assert Journal(path, header).samples == {}


def test_what_a_table_lacks_is_measured_and_the_rest_kept(fast: Backend, tmp_path: Path) -> None:
    def tune(counts: tuple[int, ...], clock: KnownClock, **named: Any) -> dict[str, Any]:
        bench = Bench("fp8_linear", CFG, CPU, clock, **named)
        path = tune_shape(bench, counts, tmp_path, command="x", again=False)
        found: dict[str, Any] = json.loads(path.read_text())
        known = earlier(path, "fp8_linear", bench.device, bench.able())
        assert known.lacks(counts, bench.most_candidates) == []
        return found

    first = tune((1, 8), KnownClock(TIMES), most_candidates=4)
    assert first["candidates"] == {"1": 4, "8": 4}
    # 64 tokens only: another option wins there, and a rung is added.
    clock = KnownClock(TIMES | {64: 30.0, 512: 5.0})
    more = tune((1, 64), clock, most_candidates=4)
    assert len(clock.rounds) == len(search.ROUNDS)
    assert {row["tokens"] for row in more["measured"]} == {1, 8, 64} and len(more["ladder"]) == 2
    assert more["ladder"][0]["max_tokens"] == 8 and set(more["failed"]) >= set(first["failed"])
    # Few candidates are not all: what is asked for is timed again.
    clock = KnownClock(TIMES)
    full = tune((1, 8), clock)
    assert len(clock.rounds) == 2 * len(search.ROUNDS)
    assert full["candidates"] == {"1": search.MAX_CANDIDATES, "8": search.MAX_CANDIDATES, "64": 4}
    path = tuning.path_of(tmp_path, "fp8_linear", CFG.tuning_key(), as_device("cpu"))
    # A table that does not say how many is one of a quick run.
    tuning.write(path, {name: value for name, value in full.items() if name != "candidates"})
    unsaid = earlier(path, "fp8_linear", as_device("cpu"), [fast])
    assert unsaid.lacks((1, 8), search.QUICK_CANDIDATES) == [] and unsaid.lacks((1,), search.MAX_CANDIDATES) == [1]
    # A backend that was not there when the table was made.
    new = [replace(fast, name="new"), *FP8_LINEAR.ranked]
    assert earlier(path, "fp8_linear", as_device("cpu"), new[1:2]).samples
    assert not earlier(path, "fp8_linear", as_device("cpu"), new[:2]).samples


def test_what_cannot_be_tuned_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("rms_norm", object(), CPU, HostClock())
    with pytest.raises(TuneError, match=r"no tuning_key"):
        tune_shape(bench, (1,), tmp_path, command="x")
    monkeypatch.setattr(FP8_LINEAR, "ranked", [replace(b, auto_on=()) for b in FP8_LINEAR.ranked])
    with pytest.raises(TuneError, match="no backend"):
        tune_shape(Bench("fp8_linear", CFG, CPU, HostClock()), (1,), tmp_path, command="x")


def test_a_shape_whose_every_option_fails_its_check_says_why(fast: Backend, tmp_path: Path) -> None:
    bench = Bench("fp8_linear", CFG, CPU, KnownClock(TIMES))

    def fail(option: Option, case: object = None) -> float:
        raise RuntimeError(f"no luck with {option.backend}")

    bench.check = fail  # type: ignore[method-assign]
    with pytest.raises(TuneError, match=r"nothing ran and agreed.*fast: RuntimeError: no luck with fast"):
        tune_shape(bench, (1,), tmp_path, command="x")


def test_many_candidates_are_thinned_and_the_rules_own_stays(fast: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fast, "candidates", staticmethod(lambda cfg, tokens: [{"BLOCK": n} for n in range(100)]))
    blocks = [dict(option.config).get("BLOCK") for option in Bench("fp8_linear", CFG, CPU, HostClock()).options(1)]
    assert len(blocks) == 1 + search.MAX_CANDIDATES + 1 and blocks[1] == 0 and blocks[-2] == 99
    few = Bench("fp8_linear", CFG, CPU, HostClock(), most_candidates=3).options(1)
    assert [dict(option.config).get("BLOCK") for option in few] == [None, 0, 50, 99, None]


def test_one_backend_without_parameters_needs_no_table(tmp_path: Path) -> None:
    with pytest.raises(NothingToTuneError, match="only torch, by its own rule"):
        tune_shape(Bench("fp8_linear", CFG, CPU, HostClock()), (1,), tmp_path, command="x")
    assert list(tmp_path.rglob("*.json")) == []


def test_a_run_ends_when_its_time_is_over_and_keeps_its_journal(fast: Backend, tmp_path: Path) -> None:
    bench = Bench("fp8_linear", CFG, CPU, KnownClock(TIMES))
    with pytest.raises(OutOfTimeError, match="0 of 2"):
        tune_shape(bench, (1, 8), tmp_path, command="x", until=time.monotonic() - 1)
    (journal,) = tmp_path.rglob("*.journal")
    assert len(journal.read_text().splitlines()) == 1


def test_a_cuda_error_is_not_a_candidates_failure() -> None:
    bench = Bench("fp8_linear", CFG, CPU, HostClock())
    with bench.noting(A):
        raise ValueError("no such tile")
    assert bench.failed == {A: "ValueError: no such tile"}
    with pytest.raises(RuntimeError, match="illegal"), bench.noting(B):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(KeyboardInterrupt), bench.noting(B):
        raise KeyboardInterrupt


# ---- timing ----------------------------------------------------------------------------------------------------


def test_timing_is_the_median_and_half_the_distance_of_the_quartiles() -> None:
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(3.0, 25.25, 5)


def test_short_calls_are_measured_more_often() -> None:
    assert [rounds_for(us) for us in (1e9, 100.0, 50.0, 10.0, 1.0)] == [15, 15, 30, 150, 200]
    clock = KnownClock({})
    assert measure_enough(clock, {"a": Known(50.0), "b": Known(90.0)})["b"].runs == 30
    assert measure_enough(clock, {"a": Known(900.0)})["a"].runs == 15
    assert measure_enough(clock, {}) == {}
    assert clock.rounds == [(15, 2), (30, 2), (15, 1), (15, 0)]


def test_a_slow_call_is_not_run_as_often_as_a_short_one() -> None:
    clock = KnownClock({})
    found = measure_enough(clock, {"slow": Known(3e5), "a": Known(10.0), "b": Known(19.0), "c": Known(21.0)})
    assert {name: timing.runs for name, timing in found.items()} == {"slow": 15, "a": 150, "b": 150, "c": 15}
    assert list(found) == ["slow", "a", "b", "c"] and clock.rounds == [(15, 4), (150, 2)]
    # A copy that is faster than all that it stands beside leaves them their rounds.
    found = measure_enough(clock, {"copy": Known(2.0), "a": Known(10.0)}, beside=("copy",))
    assert (found["copy"].runs, found["a"].runs) == (150, 150)


def test_further_rounds_end_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    @dataclass
    class Slow:
        """Says 6 µs, takes a sixteenth of a second."""

        def run(self) -> float:
            nonlocal now
            now += 0.0625
            return 6.0

    monkeypatch.setattr("fastlayers.tuning.clock.time.perf_counter", lambda: now)
    assert measure_enough(KnownClock({}), {"a": Slow()})["a"].runs == 33
    assert take_turns({"a": Slow()}, 200, seconds=0)["a"].runs == 15
    assert take_turns({"a": Slow()}, 3, seconds=0)["a"].runs == 3


def test_calls_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    @dataclass
    class Noted:
        name: str

        def run(self) -> float:
            order.append(self.name)
            return float(len(order))

    found = take_turns({"a": Noted("a"), "b": Noted("b")}, 3, skip=1, before=lambda: order.append("-"))
    assert "".join(order) == "-ab-ba-ab"
    assert found["a"] == Timing.of([6.0, 8.0]) and found["b"].runs == 2


def test_the_host_clock_times_real_calls() -> None:
    clock = clock_for("cpu")
    x = torch.ones(64, 64)
    found = clock.measure({"mm": clock.prepare(lambda: x @ x)}, 5)
    assert 0 < found["mm"].us < 1e6 and found["mm"].runs == 5


@pytest.mark.gpu
def test_the_cuda_clock_subtracts_its_flushes() -> None:
    clock = clock_for("cuda")
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16)
    calls = {
        "nothing": clock.prepare(lambda: None),
        "one": clock.prepare(lambda: torch.mm(x, w, out=out)),
        "two": clock.prepare(lambda: (torch.mm(x, w, out=out), torch.mm(x, w, out=out))),
    }
    found = clock.measure(calls, 11)
    assert abs(found["nothing"].us) < 2
    # 33.5 MB of weights from memory that is cold; the second product finds them in the cache.
    assert found["one"].us > 33.5e6 / as_device("cuda").bandwidth * 1e6
    assert found["one"].us < found["two"].us < 2 * found["one"].us


@pytest.mark.gpu
def test_tuning_on_a_gpu_writes_a_ladder_that_auto_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("cuda")
    cfg = FP8LinearConfig(512, 256)
    path = tune_shape(Bench("fp8_linear", cfg, place, clock_for(place)), (1, 64), tmp_path, command="x")
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    choice = FP8_LINEAR.choose(cfg, "cuda", built_only=False)
    assert choice.evidence == f"tuned table {path.name}" and choice.rungs[0].microseconds
    assert tuning.changes(json.loads(path.read_text()), [rung.backend for rung in choice.rungs]) == ()
