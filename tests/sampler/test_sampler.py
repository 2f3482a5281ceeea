"""The sampler's distribution, seeds, filters and edges."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.registry import Backend
from fastlayers.sampler.flashinfer import FlashInferSampler
from fastlayers.sampler.layer import SAMPLER, RowParams, Sampler, SamplerConfig, SamplingParams, SamplingState
from fastlayers.sampler.philox import philox, uniform
from fastlayers.sampler.reference import philox_words
from fastlayers.testing.parity import check_parity

BACKENDS = ["torch", "triton"]
INF, NAN = float("inf"), float("nan")


def state_of(*params: SamplingParams) -> SamplingState:
    state = SamplingState(len(params))
    for row, given in enumerate(params):
        state.set(row, given)
    return state


def rows_of(count: int, params: SamplingParams) -> RowParams:
    """Return the parameters of one request for ``count`` rows with one offset each."""
    return RowParams(
        torch.full((count,), params.temperature),
        torch.full((count,), params.top_k, dtype=torch.int32),
        torch.full((count,), params.top_p),
        torch.full((count,), params.min_p),
        torch.full((count,), params.seed or 0, dtype=torch.int64),
        torch.arange(count),
    )


def assert_distribution(ids: torch.Tensor, logits: torch.Tensor, params: SamplingParams) -> None:
    """Compare 20000 draws from ``logits`` ``[1, 8]`` with Hugging Face's filters."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    expected = scores.softmax(-1)[0] * 20000
    counts = torch.bincount(ids.cpu(), minlength=8).float()
    kept = expected > 0
    assert counts.sum() == 20000
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 24.4  # 7 degrees or fewer, p = 0.001


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


MIXED_LOGITS = torch.tensor([[1.0, -0.5, 2.0, 0.3, 1.9, -1.0, 0.0, 1.2]])
MIXED_PARAMS = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0.5, seed=2),
    SamplingParams(temperature=2.0, top_k=4, seed=3),
    SamplingParams(top_p=0.8, seed=4),
    SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.1, seed=5),
]


@pytest.mark.parametrize("params", MIXED_PARAMS)
def test_chi_square_against_hugging_faces_filters(params: SamplingParams) -> None:
    sampler = Sampler(8, backend="torch")
    assert_distribution(sampler(MIXED_LOGITS.expand(20000, -1), rows_of(20000, params)), MIXED_LOGITS, params)


@pytest.mark.gpu
@pytest.mark.parametrize("params", MIXED_PARAMS)
def test_flashinfer_draws_from_the_distribution(params: SamplingParams) -> None:
    row, cfg = SAMPLER.named("flashinfer"), SamplerConfig(8, "batch")
    if (why := row.why_not(cfg, as_device("cuda"))) is not None:
        pytest.skip(why)
    sampler = Sampler(8, backend="flashinfer", seeds="batch", device="cuda")
    logits = MIXED_LOGITS.cuda().expand(20000, -1).contiguous()
    rows = RowParams(*(tensor.cuda() for tensor in rows_of(20000, params)))
    again = RowParams(*(tensor.clone() for tensor in rows))
    first, second = sampler(logits, rows), sampler(logits, rows)
    assert_distribution(first, MIXED_LOGITS, params)
    assert_distribution(second, MIXED_LOGITS, params)
    assert not torch.equal(first, second), "the counter on the device did not advance"
    assert torch.equal(first, sampler(logits, again)), "equal seeds and offsets must give equal tokens"


def test_flashinfer_is_refused_where_rows_have_seeds_of_their_own() -> None:
    gpu = as_device("H200")
    row, own, shared = SAMPLER.named("flashinfer"), SamplerConfig(8), SamplerConfig(8, "batch")
    assert "first row's seed" in (row.refuse(own, gpu) or "")
    assert row.refuse(shared, gpu) is None
    assert "CUDA" in (row.refuse(shared, as_device("cpu")) or "")
    assert SAMPLER.choose(shared, gpu).name == "triton"
    with pytest.raises(NoBackendError, match="seeds='batch'"):
        Sampler(8, backend="flashinfer", device="cpu")
    with pytest.raises(ArgumentError, match="seeds"):
        Sampler(8, seeds="none")


class FakeSampling(ModuleType):
    """FlashInfer's four calls in torch: one seed and counter, a subsequence a row."""

    def __init__(self) -> None:
        super().__init__("flashinfer.sampling")
        self.counters: list[int] = []

    @staticmethod
    def softmax(logits: torch.Tensor, temperature: torch.Tensor, enable_pdl: bool) -> torch.Tensor:
        assert not logits.isnan().any() and (temperature > 0).all()
        return (logits / temperature.unsqueeze(-1)).softmax(-1)

    @staticmethod
    def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        assert (top_k > 0).all() and (top_k <= probs.shape[1]).all() and top_k.dtype == torch.int32
        smallest = probs.sort(-1, descending=True).values.gather(-1, top_k.long().unsqueeze(-1) - 1)
        kept = probs.masked_fill(probs < smallest, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    @staticmethod
    def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        ranked, order = probs.sort(-1, descending=True)
        dropped = ranked.cumsum(-1) - ranked >= top_p.unsqueeze(-1)
        kept = probs.scatter(-1, order, ranked.masked_fill(dropped, 0.0))
        return kept / kept.sum(-1, keepdim=True)

    def min_p_sampling_from_probs(
        self, probs: torch.Tensor, min_p: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        assert seed.shape == offset.shape == (1,)
        self.counters.append(int(offset))
        kept = probs.masked_fill(probs < min_p.unsqueeze(-1) * probs.amax(-1, keepdim=True), 0.0).double()
        running = kept.cumsum(-1)
        rows = torch.arange(len(probs))
        target = uniform(seed.expand(len(rows)), offset + (rows << 32)).unsqueeze(-1) * running[:, -1:]
        return torch.searchsorted(running, target, right=True).squeeze(-1).int()


def with_fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeSampling:
    fake, package = FakeSampling(), ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", fake)
    return fake


def test_flashinfers_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = with_fake_flashinfer(monkeypatch)
    row = Backend("played", FlashInferSampler, auto_on=())
    assert check_parity("sampler", row, "one_kept")
    assert len(fake.counters) == 4  # two runs of two calls
    assert fake.counters[1] - fake.counters[0] == 4
    for params in MIXED_PARAMS:
        rows, sampler = rows_of(20000, params), FlashInferSampler(SamplerConfig(8, "batch"))
        ids = sampler(MIXED_LOGITS.expand(20000, -1), rows, "filtered")
        assert_distribution(ids, MIXED_LOGITS, params)
        assert rows.offset.tolist() == list(range(1, 20001))
    special = torch.tensor([[NAN, -INF, NAN], [0.0, INF, NAN], [NAN, 0.0, -INF]])
    ids = FlashInferSampler(SamplerConfig(3, "batch"))(special, rows_of(3, SamplingParams(seed=1)), "filtered")
    assert ids.tolist() == [0, 1, 1]


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


GAUSS = torch.randn(3, 9000, generator=torch.Generator().manual_seed(4))
RARE = torch.rand(3, 9000, generator=torch.Generator().manual_seed(5)) > 0.05


@pytest.mark.parametrize(
    ("logits", "temperature", "top_k", "top_p"),
    [
        pytest.param(6 * GAUSS, 1.0, 40, 0.9, id="few kept"),
        pytest.param(GAUSS, 1.0, 2000, 0.7, id="packed by the thousand"),
        pytest.param(GAUSS, 1.0, 6000, 1.0, id="one slice of top-k"),
        pytest.param(GAUSS, 1.0, 6000, 0.7, id="the whole row, twice"),
        pytest.param(0.1 * GAUSS, 1.0, 0, 0.9, id="slices around top-p"),
        pytest.param(GAUSS, 1e-6, 0, 0.9, id="cold"),
        pytest.param(GAUSS, 1e4, 0, 0.5, id="hot"),
        pytest.param(GAUSS.masked_fill(RARE, -3e38), 1.0, 1000, 0.9, id="top-k of what has no weight"),
        pytest.param(GAUSS.masked_fill(RARE, -INF), 1.0, 50, 0.9, id="masked"),
        pytest.param((GAUSS * 0.5).round(), 1.0, 0, 0.9, id="ties"),
        pytest.param(torch.zeros(3, 9000), 1.0, 50, 0.5, id="equal"),
        pytest.param(GAUSS * 1e-3 + 1000.0 * (torch.arange(9000) == 7), 1.0, 300, 0.9, id="one far above"),
    ],
)
def test_thresholds_of_long_rows(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature, top_k, top_p, seed=9)
    drawn = [Sampler(9000, backend=name)(logits, rows_of(3, params)).tolist() for name in ("triton", "reference")]
    assert drawn[0] == drawn[1]


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


def test_logprobs_of_infinite_logits() -> None:
    inf = float("inf")
    x = torch.tensor([[0.0, inf, 1.0, inf], [inf, -inf, 0.0, torch.nan], [-inf] * 4])
    found = Sampler(4).logprobs(x, torch.tensor([1, 2, 0]), top=2)
    assert torch.allclose(found.chosen, torch.tensor([-0.6931472, -inf, -inf]))
    assert torch.allclose(found.top[:2], torch.tensor([[-0.6931472, -0.6931472], [0.0, -inf]]))
    assert found.top_ids[0].tolist() == [1, 3] and found.top_ids[1, 0] == 0


def test_arguments_of_the_wrong_type_are_named() -> None:
    sampler, state, x = Sampler(4), SamplingState(2), torch.zeros(2, 4)
    ids, params = torch.zeros(2, dtype=torch.int64), SamplingParams()
    wrong: list[tuple[Any, str]] = [
        (lambda: sampler.logprobs(x, ids, 1.5), "Sampler: top is 1.5"),  # type: ignore[arg-type]
        (lambda: sampler.logprobs(x, ids, None), "Sampler: top is None"),  # type: ignore[arg-type]
        (lambda: sampler.logprobs(x, ids + 4), "Sampler: ids is 4 to 4; accepted: 0 to 3"),
        (lambda: sampler.logprobs(x, ids - 1), "Sampler: ids is -1 to -1; accepted: 0 to 3"),
        (lambda: sampler([0.0], state), "Sampler: logits is"),  # type: ignore[arg-type]
        (lambda: sampler(x, None), "Sampler: state is None"),  # type: ignore[arg-type]
        (lambda: state.set("a", params), "SamplingState: row is 'a'"),  # type: ignore[arg-type]
        (lambda: state.set(0, None), "SamplingState.set: params is None"),  # type: ignore[arg-type]
        (lambda: state.set(0, params, "a"), "SamplingState.set: offset is 'a'"),  # type: ignore[arg-type]
        (lambda: state.mode("a"), "SamplingState: batch is 'a'"),  # type: ignore[arg-type]
        (lambda: state.view(-1), "SamplingState: batch is -1"),
        (
            lambda: SamplingParams(top_k=2**40),
            "SamplingParams: top_k is 1099511627776; accepted: a positive",
        ),
        (lambda: SamplingParams(temperature=1e300), "SamplingParams: temperature is 1e.300"),
    ]
    for call, words in wrong:
        with pytest.raises(ArgumentError, match=words):
            call()
    state.set(0, SamplingParams(top_k=2**31 - 1, temperature=3e38))
    assert sampler(x, state).shape == (2,)
