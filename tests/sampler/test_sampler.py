"""The sampler's distribution, seeds, filters and edges."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fastlayers.errors import ArgumentError
from fastlayers.sampler.layer import RowParams, Sampler, SamplingParams, SamplingState
from fastlayers.sampler.philox import philox, uniform
from fastlayers.sampler.reference import philox_words

BACKENDS = ["torch", "triton"]
INF, NAN = float("inf"), float("nan")


def state_of(*params: SamplingParams) -> SamplingState:
    state = SamplingState(len(params))
    for row, given in enumerate(params):
        state.set(row, given)
    return state


def draw(logits: torch.Tensor, count: int, params: SamplingParams) -> torch.Tensor:
    """Draw ``count`` tokens for one request as a batch with one offset a row."""
    rows = RowParams(
        torch.full((count,), params.temperature),
        torch.full((count,), params.top_k, dtype=torch.int32),
        torch.full((count,), params.top_p),
        torch.full((count,), params.min_p),
        torch.full((count,), params.seed or 0, dtype=torch.int64),
        torch.arange(count),
    )
    return Sampler(logits.shape[-1], backend="torch")(logits.expand(count, -1), rows)


def test_philox_known_answers() -> None:
    # The published answers of Random123 with counter and key all zero and all ones (upper counter words
    # aside).
    assert philox_words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seeds = torch.randint(-(2**63), 2**63 - 1, (50,))
    offsets = torch.randint(2**62, (50,))
    words = torch.stack(philox(seeds, offsets), -1).tolist()
    assert words == [philox_words(s, o) for s, o in zip(seeds.tolist(), offsets.tolist(), strict=True)]


def test_uniform_is_uniform() -> None:
    u = uniform(torch.full((20000,), 5), torch.arange(20000))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 20000)
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    assert abs(torch.corrcoef(torch.stack((u[1:], u[:-1])))[0, 1]) < 0.03


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, top_k=4, seed=3),
        SamplingParams(top_p=0.8, seed=4),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.1, seed=5),
    ],
)
def test_chi_square_against_hugging_faces_filters(params: SamplingParams) -> None:
    logits = torch.tensor([[1.0, -0.5, 2.0, 0.3, 1.9, -1.0, 0.0, 1.2]])
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    expected = scores.softmax(-1)[0] * 20000
    counts = torch.bincount(draw(logits, 20000, params), minlength=8).float()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 24.4  # 7 degrees or fewer, p = 0.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_is_the_raw_argmax_lowest_id_first(backend: str) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0], [-INF, -2.0, -1.0, -1.0]])
    # Closer than any temperature or softmax in the logits' dtype would tell apart.
    close = torch.tensor([[1.0, 1.0 + 2**-23, 1.0, 0.0]])
    sampler, greedy = Sampler(4, backend=backend), SamplingParams(temperature=0.0, top_k=1, top_p=0.1)
    assert sampler(logits, state_of(greedy, greedy, greedy)).tolist() == [1, 0, 2]
    assert sampler(close, state_of(greedy)).tolist() == [1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["greedy", "sampled", "filtered"])
def test_nan_and_infinities(backend: str, mode: str) -> None:
    logits = torch.tensor(
        [
            [NAN, NAN, NAN],
            [-INF, -INF, -INF],
            [NAN, -INF, NAN],
            [NAN, -5.0, -INF],
            [0.0, INF, NAN],
            [NAN, 0.0, -INF],
        ]
    )
    params = SamplingParams(temperature=0.0 if mode == "greedy" else 0.7, top_k=2, top_p=0.9, seed=3)
    ids = Sampler(3, backend=backend)(logits, state_of(*[params] * 6), mode)
    assert ids.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_seeds_equal_tokens_in_any_batch(backend: str) -> None:
    sampler, logits = Sampler(50, backend=backend), torch.randn(6, 50)
    params = [SamplingParams(0.9, top_k=5 * (r % 3), top_p=1 - 0.1 * (r % 2), seed=100 + r) for r in range(6)]
    together = sampler(logits, state_of(*params)).tolist()
    alone = [sampler(logits[r : r + 1], state_of(params[r])).item() for r in range(6)]
    backwards = sampler(logits.flip(0), state_of(*params[::-1])).flip(0).tolist()
    assert together == alone == backwards
    others = [SamplingParams(0.9, seed=seed) for seed in range(40)]
    assert len(set(sampler(logits[:1].expand(40, -1), state_of(*others)).tolist())) > 5


def test_backends_agree_over_many_steps() -> None:
    logits = 2 * torch.randn(5, 200)
    params = [SamplingParams(0.8, top_k=7 * r, top_p=1 - 0.15 * r, min_p=0.01 * r, seed=r) for r in range(5)]
    runs = []
    for backend in ("torch", "triton", "reference"):
        sampler, state = Sampler(200, backend=backend), state_of(*params)
        runs.append([sampler(logits, state).tolist() for _ in range(6)])
        assert state.rows.offset.tolist() == [6] * 5
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(ids) for ids in runs[0]}) > 1


def test_offset_resumes_a_stream() -> None:
    sampler, logits, params = Sampler(100), torch.randn(1, 100), SamplingParams(seed=11)
    state, resumed = state_of(params), state_of(params)
    stream = [sampler(logits, state).item() for _ in range(8)]
    resumed.set(0, params, offset=5)
    assert [sampler(logits, resumed).item() for _ in range(3)] == stream[5:]
    assert len(set(stream)) > 1


def test_only_the_batchs_rows_are_touched() -> None:
    state = SamplingState(4)
    Sampler(8)(torch.randn(2, 8), state)
    assert state.rows.offset.tolist() == [1, 1, 0, 0]


def test_modes() -> None:
    state = SamplingState(3)
    assert state.mode(3) == "greedy"
    state.set(1, SamplingParams(0.5, min_p=0.1))
    assert (state.mode(1), state.mode(3)) == ("greedy", "sampled")
    state.set(2, SamplingParams(0.5, top_k=4))
    assert (state.mode(2), state.mode(3)) == ("sampled", "filtered")
    logits = torch.randn(2, 30)
    ids = []
    for mode in (None, "sampled", "filtered"):
        state.rows.offset.zero_()
        ids.append(Sampler(30)(logits, state, mode).tolist())
    assert ids[0] == ids[1] == ids[2]


def test_unset_seeds_differ_but_follow_torch() -> None:
    torch.manual_seed(3)
    first = state_of(SamplingParams(), SamplingParams()).rows.seed.tolist()
    torch.manual_seed(3)
    assert state_of(SamplingParams(), SamplingParams()).rows.seed.tolist() == first
    assert first[0] != first[1]


def test_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, NAN], [-INF, -INF, NAN, -INF]])
    found = Sampler(4).logprobs(logits, torch.tensor([2, 0]), top=2)
    expected = torch.log_softmax(torch.tensor([1.0, 3.0, 2.0]), -1)
    torch.testing.assert_close(found.chosen, torch.stack((expected[2], torch.tensor(-INF))))
    torch.testing.assert_close(found.top[0], expected[[1, 2]])
    assert found.top_ids[0].tolist() == [1, 2]
    assert found.top[1].tolist() == [-INF, -INF]
    assert Sampler(4).logprobs(logits, torch.tensor([2, 0])).top.shape == (2, 0)


def test_errors_change_nothing() -> None:
    sampler, state = Sampler(8), SamplingState(2)
    for logits, mode, argument in (
        (torch.zeros(2, 9), None, "logits"),
        (torch.zeros(2, 8, dtype=torch.float64), None, "logits"),
        (torch.zeros(8, 2).t(), None, "logits"),
        (torch.zeros(3, 8), None, "state"),
        (torch.zeros(2, 8), "loud", "mode"),
    ):
        with pytest.raises(ArgumentError) as caught:
            sampler(logits, state, mode)
        assert (caught.value.layer, caught.value.argument) == ("Sampler", argument)
    assert state.rows.offset.tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="row"):
        state.set(2, SamplingParams())
    with pytest.raises(ArgumentError, match="top"):
        sampler.logprobs(torch.zeros(1, 8), torch.zeros(1, dtype=torch.long), 9)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("temperature", -0.1),
        ("temperature", INF),
        ("temperature", NAN),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_parameters_are_checked(argument: str, value: float) -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**{argument: value})  # type: ignore[arg-type]
    assert (caught.value.layer, caught.value.argument) == ("SamplingParams", argument)


def test_traceable() -> None:
    sampler, logits = Sampler(20, backend="torch"), torch.randn(2, 20)
    compiled = torch.compile(sampler, backend="eager", fullgraph=True)
    results = []
    for function in (compiled, sampler):
        rows = state_of(SamplingParams(seed=1, top_k=9), SamplingParams(seed=2)).view(2)
        results.append((function(logits, rows), rows.offset))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].tolist() == results[1][1].tolist() == [1, 1]
