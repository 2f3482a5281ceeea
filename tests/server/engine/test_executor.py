"""The engine on tiny models: the tokens are those of the library's plain loop, whatever shares the batch."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.attention.buckets import ExtendBucket, ExtendBuckets
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.sampler.layer import SamplingParams
from fastlayers_models.step import StepKey
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.executor import TorchExecutor
from fastlayers_server.engine.protocol import Abort, Control, Reply, Sampling, Shutdown
from fastlayers_server.engine.step import LOGITS, VERIFY

sys.path.insert(0, str(Path(__file__).parent))
from serving import GREEDY, Bench, made, make_model, mixed_steps, plain, prompts

NEW = 9


def decodes_beside_chunks(bench: Bench) -> list[bool]:
    """Return what will hold, of each plan with chunks and rows, whether the rows were a step of their own."""
    found: list[bool] = []
    launch, decode, asked = bench.executor.launch, bench.executor.decoding.decode, [False]

    def launched(plan: Any) -> Any:
        asked[0] = False
        step = launch(plan)
        if plan.rows and plan.chunks:
            found.append(asked[0])
        return step

    def decoded(*args: Any) -> Any:
        asked[0] = True
        return decode(*args)

    bench.executor.launch, bench.executor.decoding.decode = launched, decoded  # type: ignore[method-assign]
    return found


AHEAD: dict[str, Any] = {"overlap": True, "captured": True}
MODELS = ("deepseek", "qwen", "gpt_oss")


def each_of(ways: dict[str, dict[str, Any]], usual: Sequence[str]) -> pytest.MarkDecorator:
    """Run every way of one model; of the others those whose steps differ by the kind of attention, the rest slowly."""
    cases = [
        pytest.param(name, way, marks=[pytest.mark.slow] * (name != "qwen" and key not in usual), id=f"{name}-{key}")
        for name in MODELS
        for key, way in ways.items()
    ]
    return pytest.mark.parametrize(("model", "way"), cases, indirect=["model"])


# What is done to logits and to requests does not depend on the model.
of_one_model = pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen")) for name in MODELS], indirect=True
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "captured": AHEAD, "mixed": {"mixed": True}, "mixed, captured": {"mixed": True} | AHEAD,
}  # fmt: skip
each_way = each_of(WAYS, ["mixed, captured"])


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return plain(model, prompts(9), NEW)


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks": {"max_batched_tokens": 7},
    "no cache": {"prefix_cache": False, "max_extend_requests": 1},
    "captured, ahead": {"overlap": True, "captured": True},
    "captured, preempted": {"overlap": True, "captured": True, "num_pages": 20, "max_running": 4},
    "preempted": {"num_pages": 18, "max_batched_tokens": 20},
    "mixed": {"mixed": True, "max_batched_tokens": 20},
    "mixed, captured, preempted": {
        "mixed": True, "overlap": True, "captured": True, "num_pages": 20, "max_running": 4,
    },
}  # fmt: skip


@each_of(SERVED, ["captured, ahead", "mixed, captured, preempted"])
def test_tokens_are_those_of_the_plain_loop(model: Any, wanted: list[list[int]], way: dict[str, Any]) -> None:
    bench = Bench(model, **way)
    decodes = decodes_beside_chunks(bench)
    assert bench.generate(prompts(9), NEW) == wanted
    assert decodes and set(decodes) == {not way.get("mixed", False)}
    # Again: now prompts are found in the cache.
    assert bench.generate(prompts(9), NEW) == wanted
    counters = bench.scheduler.metrics.counters
    if way.get("num_pages"):
        assert counters["preemptions_total"] or bench.scheduler.cache.evicted_pages
    if way.get("prefix_cache", True):
        assert counters["prompt_tokens_total"]["cached"] > 0
    if way.get("captured"):
        replays, _ = bench.executor.graph_counts()
        assert sum(replays.values()) > 10 and any(count and "extend" in key for key, count in replays.items())


@pytest.mark.parametrize("name", ["deepseek", "qwen"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_other_page_sizes(name: str, page_size: int) -> None:
    model = made(name, page_size)
    rows = prompts(5)
    bench = Bench(model, num_pages=6 * 256 // page_size + 1)
    assert bench.generate(rows, NEW) == plain(model, rows, NEW)
    assert bench.generate(rows, NEW) == plain(model, rows, NEW)
    assert bench.scheduler.cache.block == max(16, page_size)


@each_way
def test_seeds_decide_whatever_else_runs(model: Any, way: dict[str, Any]) -> None:
    rows = prompts(6)
    ways = [Sampling(0.9, 20, 0.9, 0.02, seed=i * 7 - 5) if i % 2 else GREEDY for i in range(6)]
    plain_ways = [SamplingParams(w.temperature, w.top_k, w.top_p, w.min_p, seed=w.seed) for w in ways]
    bench = Bench(model, num_pages=22, max_running=4, **way)
    together = mixed_steps(bench)
    assert bench.generate(rows, NEW, ways) == plain(model, rows, NEW, plain_ways)
    seeded = {2, 4, 6}  # the first request's rid is 1
    assert any(seeded & decoding for decoding, _ in together) == way.get("mixed", False)


def reference_logits(model: Any, row: list[int]) -> torch.Tensor:
    import fastlayers as fl
    from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages

    pages = -(-len(row) // model.page_size)
    caches = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype).allocate(pages + 1, "cpu")
    state = AttentionState(1, len(row), pages, model.page_size, "cpu")
    batch = AttentionBatch((len(row),), (0,), whole_pages([len(row)], model.page_size))
    with torch.inference_mode():
        return model.compute_logits(model(torch.tensor(row), state.plan(batch), caches)).float()


@each_way
def test_logprobs_are_of_the_unmodified_logits(model: Any, way: dict[str, Any]) -> None:
    rows = prompts(3)
    bench = Bench(model, **way)
    together = mixed_steps(bench)
    bias = Sampling(0.7, seed=3, logit_bias=((4, 3.0),))
    first = bench.submit(rows[0], 6, bias, logprobs=3)
    other = bench.submit(rows[1], 6)
    second = bench.submit(rows[2], 5, logprobs=0, prompt_logprobs=2)
    again = bench.submit(rows[0], 2, prompt_logprobs=1)
    bench.run()
    assert bench.ids(other) == plain(model, rows[1:2], 6)[0]
    # Log-probabilities of what decodes and of another one's prompt are of the same step.
    assert any({first, second} & decoding and again in computed for decoding, computed in together) == bool(together)
    assert bool(together) == way.get("mixed", False)
    for rid, row, top in ((first, rows[0], 3), (second, rows[2], 0)):
        told = [entry for output in bench.news if output.rid == rid for entry in output.logprobs]
        logprobs = reference_logits(model, row + bench.ids(rid)).log_softmax(-1)
        assert len(told) == len(bench.ids(rid))
        for place, (entry, token) in enumerate(zip(told, bench.ids(rid), strict=True)):
            wanted = logprobs[len(row) - 1 + place]
            assert entry.chosen == pytest.approx(float(wanted[token]), abs=1e-4)
            assert [round(value, 3) for _, value in entry.top] == [
                pytest.approx(value, abs=2e-3) for value in wanted.topk(top).values.tolist()
            ]
    for rid, row, top in ((second, rows[2], 2), (again, rows[0], 1)):
        (told,) = [output.prompt_logprobs for output in bench.news if output.rid == rid and output.prompt_logprobs] or [
            ()
        ]
        logprobs = reference_logits(model, row).log_softmax(-1)
        assert len(told) == len(row) - 1
        for place, entry in enumerate(told):
            assert entry.chosen == pytest.approx(float(logprobs[place, row[place + 1]]), abs=1e-4)
            assert len(entry.top) == top
    assert bench.last(again).cached_tokens <= 0


@of_one_model
def test_penalties_bias_and_least_tokens(model: Any) -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    row = prompts(1, 30, seed=4)[0] + [7, 7, 9, 12, 30]
    penalties = {"frequency_penalty": 0.6, "presence_penalty": 0.9, "repetition_penalty": 1.4}
    sampling = Sampling(0.0, logit_bias=((11, 1.5),), **penalties)  # type: ignore[arg-type]
    expected: list[int] = []
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    for step in range(8):
        logits = reference_logits(model, row + expected)[-1:]
        logits = processors(torch.tensor([row + expected]), logits)[0]
        counts = torch.bincount(torch.tensor(expected, dtype=torch.int64), minlength=logits.shape[0])
        logits = logits - 0.9 * (counts > 0) - 0.6 * counts
        logits[11] += 1.5
        if step < 3:
            logits[[5, model.config.eos_token_ids[0]]] = float("-inf")
        expected.append(int(logits.argmax()))
    late = prompts(1, seed=5)[0] + prompts(2, 120, seed=6)[0]
    for way in WAYS.values():
        bench = Bench(model, **way)
        together = mixed_steps(bench)
        others = [bench.submit(other, 8) for other in prompts(3)]
        rid = bench.submit(row, 8, sampling, min_new_tokens=4, stop_ids=(5,), ignore_eos=False)
        beside = bench.submit(late, 2)
        bench.run()
        assert any(rid in decoding and beside in computed for decoding, computed in together) == way.get("mixed", False)
        assert bench.ids(beside) == plain(model, [late], 2)[0]
        ends = {5, model.config.eos_token_ids[0]}
        cut = next((i + 1 for i, token in enumerate(expected) if token in ends), 8)
        assert bench.ids(rid) == expected[:cut]
        assert [bench.ids(other) for other in others] == plain(model, prompts(3), 8)


def test_a_row_that_is_not_finite_ends_alone() -> None:
    model = make_model("qwen")
    with torch.no_grad():
        model.decoder.embed_tokens.weight[50] = float("nan")
    rows = [[t if t != 50 else 51 for t in row] for row in prompts(5)]
    wanted = plain(model, rows, NEW)
    for overlap in (False, True):
        bench = Bench(model, overlap=overlap, captured=overlap, num_pages=30)
        bench.generate([[3, 4, 50, 6] * 8], NEW)  # alone: the next plan is empty, and is not launched
        bad = bench.submit([3, 4, 50, 6] * 8)
        rids = [bench.submit(row, NEW) for row in rows]
        bench.run()
        assert (bench.last(bad).finish, bench.last(bad).code) == ("error", "nonfinite_logits")
        assert [bench.ids(rid) for rid in rids] == wanted
        # Its pages are handed out again, and hold nothing of it.
        assert bench.generate(rows, NEW) == wanted
        assert bench.scheduler.cache.match(b"", [3, 4, 50, 6] * 8, 32) == []
        assert all(part.isfinite().all() for cache in bench.executor.caches for part in (cache.keys, cache.values))


@of_one_model
def test_an_abort_is_done_within_two_ticks(model: Any) -> None:
    bench = Bench(model, overlap=True, captured=True)
    rids = [bench.submit(row, 24) for row in prompts(4)]
    for _ in range(6):
        bench.engine.tick()
    held = bench.scheduler.cache.free + bench.scheduler.cache.evictable
    bench.engine.post(Abort((rids[0], rids[2])))
    bench.engine.tick()
    assert [bench.last(rid).finish for rid in rids] == ["abort", "", "abort", ""]
    bench.engine.tick()
    assert bench.scheduler.cache.free + bench.scheduler.cache.evictable > held
    bench.run()
    assert [bench.ids(rid) for rid in (rids[1], rids[3])] == [
        plain(model, prompts(4), 24)[i] for i in (1, 3)
    ]  # fmt: skip


def test_controls_are_answered_while_requests_run(tmp_path: Path) -> None:
    """None waits until nothing runs, none says yes without an effect, and no token changes."""
    model, rows = made("qwen"), prompts(4)
    bench = Bench(model, **AHEAD)
    replies: list[Reply] = []
    tell = bench.engine.deliver
    bench.engine.deliver = lambda message: replies.append(message) if isinstance(message, Reply) else tell(message)
    with pytest.raises(RuntimeError, match=r"no folder for profiles .* \(--profile-folder\)"):
        bench.executor.profile(True)
    bench.executor.profile_folder = folder = tmp_path / "profiles"
    folder.mkdir()

    def asked(what: str) -> tuple[bool, Any]:
        bench.engine.post(Control(len(replies), what))
        bench.engine.tick()
        assert replies[-1].id == len(replies) - 1 and len(bench.scheduler.live) == 4, "at once, while all run"
        return replies[-1].ok, replies[-1].value

    rids = [bench.submit(row, 30) for row in rows]
    bench.engine.tick()
    try:
        assert asked("stop_profile") == (False, "no profile is running")
        for number in (0, 1):
            assert asked("start_profile") == (True, str(folder))
            assert asked("start_profile") == (False, "a profile is running")
            ok, frozen = asked("freeze_gc")
            assert ok and min(frozen["frozen"], gc.get_freeze_count()) > 10_000 and len(frozen["before"]) == 3
            assert asked("flush_cache")[0] and asked("explain")[0]
            ok, path = asked("stop_profile")
            assert (ok, path) == (True, str(folder / f"engine-{number}.json"))
            assert any(e.get("name") == "aten::embedding" for e in json.loads(Path(path).read_text())["traceEvents"])
        asked("start_profile")
        for old in folder.iterdir():
            old.unlink()
        folder.rmdir()
        ok, said = asked("stop_profile")
        assert not ok and said.startswith("the profile cannot be written to ")
    finally:
        gc.unfreeze()
        if bench.executor._profiler is not None:  # it failed: torch's would end the whole run of tests
            bench.executor.profile(False)
    bench.run()
    assert [bench.ids(rid) for rid in rids] == plain(model, rows, 30)
    folder.mkdir()
    for message in (Control(0, "start_profile"), Shutdown()):
        bench.engine.post(message)
    bench.engine.run()
    assert (folder / "engine-0.json").is_file(), "whoever ends with a profile running writes it"


class Failing(EagerRuntime):
    """Cannot capture."""

    def capture(self, fn: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("runtime", [None, Failing()], ids=["no graphs", "failing"])
def test_a_start_goes_on_where_nothing_can_be_captured(runtime: EagerRuntime | None) -> None:
    limits = SchedulerConfig(94, 256, 8, 64, (1,), max_running=2, max_batched_tokens=16)
    graphs = None if runtime is None else CudaGraphs(runtime=runtime)
    executor = TorchExecutor(made("qwen", 64), limits, graphs=graphs, extend_buckets=ExtendBuckets((16,), (1,)))
    executor.capture()
    assert executor.decoding.graphs is None and executor.decoding.ledger == []


@pytest.mark.parametrize("verify_each", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_every_extend_up_to_the_largest_bucket_has_a_graph(verify_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SchedulerConfig(94, 256, 8, 64, (1,), max_running=48, max_batched_tokens=2048, mixed=True)
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    executor = TorchExecutor(made("qwen", 64), limits, graphs=graphs, verify_each=verify_each)
    keys: list[StepKey] = []
    monkeypatch.setattr(executor.decoding, "capture", lambda **options: None)
    monkeypatch.setattr(executor.extending, "capture_extends", lambda found, progress: keys.extend(found))
    executor.capture()
    buckets = executor.extending.extend_buckets
    assert len(set(keys)) == len(keys) and buckets.tokens[-1] == 2048 and buckets.requests[-1] == 48
    steps = [(tokens, requests, LOGITS) for tokens in range(1, 2049) for requests in range(1, min(tokens, 48) + 1)]
    steps += [(2 * requests, requests, VERIFY) for requests in range(1, 49) if verify_each]
    steps += [(verify_each * requests, requests, VERIFY) for requests in range(1, 49) if verify_each]
    for tokens, requests, mode in steps:
        found = buckets.bucket_of(tokens, requests)
        assert isinstance(found, ExtendBucket)
        assert StepKey("extend", found.tokens, found.requests, mode) in keys
    # Sizes that cost time by the token are not captured for each number of requests.
    assert {key.requests for key in keys if key.tokens > buckets.free and key.mode == LOGITS} == {32, 48}
    assert {key.requests for key in keys if key.tokens == 512 and key.mode == LOGITS} == {1, 8, 32, 48}
