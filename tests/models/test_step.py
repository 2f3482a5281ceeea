"""Extend steps as a scheduler calls them: padded to buckets and replayed, against the same steps uncaptured."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
import fastlayers_models
from fastlayers.attention.buckets import ExtendBucket, ExtendBuckets
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.comm.parallel import AXES, Axis, ParallelSpec
from fastlayers.errors import ArgumentError, CaptureError
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.sampler.layer import Sampler, SamplingParams
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator
from fastlayers_models.qwen import QwenConfig, QwenForCausalLM
from fastlayers_models.rows import IN_FLIGHT, ExtendInputs, RowTable
from fastlayers_models.step import EXPANDED, ModelStep, Part, Row, StepKey, _capturable

sys.path.insert(0, str(Path(__file__).parent))
from small_models import GPT_OSS, QWEN3, QWEN3_MOE, small_model

TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
FAMILIES: dict[str, Any] = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)


def make(family: str, device: str = "cpu") -> Any:
    if family == "deepseek":
        return DeepseekForCausalLM.from_pretrained(TINY, dtype=torch.float32, device=device)
    return small_model(FAMILIES[family], device)


@pytest.fixture(scope="module", params=[*FAMILIES, "deepseek"])
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


class Requests:
    """A scheduler in small: requests with fixed rows and pages, each fed its prompt in chunks, then its own tokens."""

    def __init__(self, model: Any, captured: bool, *, rows: int = 5, **options: Any) -> None:
        self.model, self.pages_each = model, 6
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        self.pages = rows * self.pages_each + 1
        self.caches = spec.allocate(self.pages, model.device)
        for cache in self.caches:
            cache.keys.fill_(float("nan"))
            if cache.values is not None and cache.values.numel():
                cache.values.fill_(float("nan"))
        state = AttentionState(rows, 256, self.pages_each, model.page_size, model.device)
        runtime = EagerRuntime() if model.device.type == "cpu" else None
        self.graphs = CudaGraphs(runtime=runtime, warm_ups=1, freeze=False) if captured else None
        self.step = ModelStep(
            model, self.caches, state, Sampler(model.config.vocab_size, device=model.device), self.pages,
            cuda_graph="auto" if captured else False, graphs=self.graphs, **options,
        )  # fmt: skip

    def part(self, row: int, ids: list[int], prefix: int, draws: bool, mode: str = "greedy") -> Part:
        first = 1 + row * self.pages_each
        pages = list(range(first, first + self.pages_each))
        return Part(ids, prefix, pages, row if draws else None, mode)


def trace(model: Any, captured: bool, params: list[SamplingParams], **options: Any) -> tuple[list[Any], Requests]:
    """Return all tokens of a schedule of random mixtures: chunks, whole prompts and decode rows in any order."""
    random, served = torch.Generator().manual_seed(7), Requests(model, captured, **options)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    prompts = [[number(0, 90) for _ in range(number(3, 60))] for _ in range(5)]
    served.step.load([Row(0, p, 100 + i, 0) for i, p in enumerate(params)], capture=False)
    prefix, out = [0] * 5, []
    for _ in range(18):
        order = torch.randperm(5, generator=random).tolist()[: number(1, 6)]
        parts = []
        for row in order:
            left = prompts[row][prefix[row] :]
            if left:
                chunk = left[: number(1, len(left) + 1)]
                parts.append(served.part(row, chunk, prefix[row], len(chunk) == len(left), params[row].mode))
                prefix[row] += len(chunk)
            elif prefix[row] < 60:
                parts.append(served.part(row, [], prefix[row], True, params[row].mode))
                prefix[row] += 1
        if parts:
            out.append(served.step.extend(parts, capture=captured).tokens())
    return out, served


def test_a_prefix_worth_it_is_expanded_in_an_uncaptured_step() -> None:
    """And the tokens are those of steps that are never captured."""
    model, told = make("deepseek"), []
    for layer in model.modules():
        if isinstance(layer, fl.MLAAttention):
            layer.thresholds = MLAThresholds(few=8, uncaptured=16 * 40 * layer.num_heads)
    ids = torch.randint(3, 90, (80,), generator=torch.Generator().manual_seed(5)).tolist()
    for captured in (True, False):
        served = Requests(model, captured)
        served.step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)
        tokens = []
        # Nothing cached; 16 tokens behind 24, which are just enough; 12 behind 40, which are not; 28 behind 52.
        for first, last in ((0, 24), (24, 40), (40, 52), (52, 80)):
            part = served.part(0, ids[first:last], first, True)
            tokens += served.step.extend([part], capture=captured).tokens()
        told.append(tokens)
        expanded = served.step.uncaptured[EXPANDED]
        assert expanded == (2 if captured else 0), served.step.uncaptured
    assert told[0] == told[1]


ALL_GREEDY, MIXED = [GREEDY] * 5, [GREEDY, DRAWN, GREEDY, DRAWN, DRAWN]
TRACED = [
    *((family, MIXED) for family in (*FAMILIES, "deepseek")), ("gpt_oss", ALL_GREEDY),
    *(pytest.param(family, ALL_GREEDY, marks=pytest.mark.slow) for family in (*FAMILIES, "deepseek")
      if family != "gpt_oss"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "params"), TRACED, indirect=["model"], ids=lambda v: v if isinstance(v, str) else f"{v.count(GREEDY)}of5"
)
def test_captured_mixtures_draw_the_tokens_of_uncaptured_ones(model: Any, params: list[SamplingParams]) -> None:
    with torch.inference_mode():
        wanted, plain = trace(model, False, params)
        got, served = trace(model, True, params)
    assert got == wanted and sum(map(len, wanted)) > 8
    assert set(plain.step.uncaptured) == {"CUDA graphs are off"} and not plain.step.report()[1:]
    assert served.graphs is not None and not served.step.uncaptured
    keys: Any = served.graphs.keys
    assert {key.kind for key in keys} == {"extend"} and served.graphs.replays == len(wanted)
    assert len({key.requests for key in keys}) > 1 and len({key.tokens for key in keys}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek"])
def test_gpu_captured_mixtures_draw_the_tokens_of_uncaptured_ones(family: str) -> None:
    model = make(family, "cuda")
    for params in ([GREEDY] * 5, [GREEDY, DRAWN, GREEDY, DRAWN, DRAWN]):
        with torch.inference_mode():
            wanted, _ = trace(model, False, params)
            got, served = trace(model, True, params)
        assert got == wanted and served.graphs is not None and served.graphs.replays == len(wanted)
        # Bytes may be none: captures take what the pool has free.
        assert all(record.capture_seconds > 0 and record.bytes >= 0 for record in served.graphs.ledger)


def test_bucket_edges_and_chunks_that_draw_nothing(model: Any) -> None:
    buckets = ExtendBuckets((16, 32, 64), (1, 2))
    found = []
    with torch.inference_mode():
        for captured in (False, True):
            served = Requests(model, captured, extend_buckets=buckets)
            served.step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)
            tokens, prefix = [], 0
            # Exactly a bucket, one less, one more, a single token; the last chunk of 92 tokens draws.
            for length in (16, 15, 17, 1, 32, 11):
                ids = [(3 * i + prefix) % 90 for i in range(length)]
                pending = served.step.extend([served.part(2, ids, prefix, length == 11)], capture=captured)
                prefix += length
                tokens.append(pending.tokens())
            found.append(tokens)
    assert found[0] == found[1] and found[1][:-1] == [[]] * 5 and len(found[1][-1]) == 1
    assert set(served.graphs.keys if served.graphs else ()) == {
        StepKey("extend", 16, 1, "none"), StepKey("extend", 32, 1, "none"), StepKey("extend", 16, 1, "greedy")
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek"])
def test_padding_costs_no_expert_work_and_writes_page_0_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(family)
    experts = next(m.experts for m in model.modules() if hasattr(m, "experts"))
    seen, plain = [], type(experts).forward

    def spy(self: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self is experts:
            seen.append(int((ids >= 0).any(-1).sum()))
        return plain(self, x, weights, ids)

    monkeypatch.setattr(type(experts), "forward", spy)
    with torch.inference_mode():
        served = Requests(model, True)
        served.step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)
        served.step.extend([served.part(1, [5, 6, 7], 0, True), served.part(3, [8], 0, True)], capture=True)
    assert seen[:-1] == [0] * (len(seen) - 1) and seen[-1] == 4  # warm-ups and the capture have nobody's tokens
    for cache in served.caches[: model.config.num_hidden_layers]:
        keys = cache.keys.flatten(1)
        written = {page for page in range(served.pages) if not keys[page].isnan().all()}
        assert written == {0, 1 + served.pages_each, 1 + 3 * served.pages_each}


class FailingExtends(EagerRuntime):
    """Cannot capture anything while told so."""

    broken = True

    def capture(self, fn: Any) -> Any:
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(fn)


def test_why_steps_ran_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    served = Requests(make("qwen3"), True, extend_buckets=ExtendBuckets((16, 32, 96), (1, 2), free=32))
    step, runtime = served.step, FailingExtends()
    assert step.graphs is not None
    step.graphs.runtime = runtime
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)

        def run(lengths: list[int], capture: bool = False) -> None:
            step.extend([served.part(i, [1] * n, 0, True) for i, n in enumerate(lengths)], capture=capture)

        run([8])
        assert list(step.wanted) == [StepKey("extend", 16, 1, "greedy")]
        step.capture_wanted()  # fails: this bucket stays uncaptured, and is not tried again
        run([8])
        step.capture_wanted()
        runtime.broken = False
        run([8], capture=True)
        run([20], capture=True)
        run([60])
        run([60, 60])
        run([2, 2, 2])
    assert sum("extends of 16 tokens run without CUDA graphs" in r.message for r in caplog.records) == 1
    assert step.graphs.keys == (StepKey("extend", 32, 1, "greedy"),) and step.buckets
    reasons = {
        "the first step of 16 tokens and 1 requests": 1,
        "more than 25% of a bucket of 96 tokens would be padding": 1,
        "more than 96 tokens, the largest bucket": 1,
        "more than 2 requests, the largest bucket": 1,
    }
    assert reasons.items() <= step.uncaptured.items()
    (failed,) = step.uncaptured.keys() - reasons.keys()
    assert "not permitted" in failed and step.uncaptured[failed] == 2
    report = "\n".join(step.report())
    assert "extend of 32 tokens, 1 requests, greedy: captured in " in report and "2 extends uncaptured: CUDA" in report
    strict = Requests(make("qwen3"), False)
    strict.step.graphs, strict.step.strict = CudaGraphs(runtime=FailingExtends()), True
    strict.step.extend_buckets = ExtendBuckets()
    with pytest.raises(CaptureError, match="not permitted"):
        strict.step.capture_extends([StepKey("extend", 16, 1, "greedy")])


def test_a_core_that_was_asked_for_and_cannot_be_captured_is_not_replaced() -> None:
    config = QwenConfig.from_hf(QWEN3)
    model = QwenForCausalLM(config, device="cpu", dtype=torch.float32, page_size=16, backend="reference").eval()
    served = Requests(model, True)
    with torch.inference_mode():
        served.step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)
        served.step.extend([served.part(0, [1, 2, 3], 0, True)], capture=True)
    (reason,) = served.step.uncaptured
    assert "reference: captures no extend: its launches follow from lengths on the host" in reason


def test_rows_are_moved_and_replaced_without_their_tokens_on_the_host(model: Any) -> None:
    """Decode of rows that changed places, with a request that came in between, equals each request alone."""
    prompts = [[4, 8, 15, 16], [23, 42], [7, 7, 7]]

    def alone(which: int, steps: int) -> list[int]:
        served = Requests(model, False)
        served.step.load([Row(0, GREEDY, 0, 0)], capture=False)
        out = served.step.extend([served.part(0, prompts[which], 0, True)]).tokens()
        for i in range(steps - 1):
            out = out + served.step.extend([served.part(0, [], len(prompts[which]) + i, True)]).tokens()
        return out

    with torch.inference_mode():
        wanted = [alone(0, 2), alone(1, 4), alone(2, 3)]
        served = Requests(model, True)
        step, table = served.step, served.step.table
        pages = [served.part(i, [1], 0, False).pages for i in range(3)]

        def decode(which: list[int], lengths: list[int]) -> Any:
            return step.launch(AttentionBatch((1,) * len(which), tuple(lengths), [pages[i] for i in which]))

        step.load([Row(0, GREEDY, 0, 0)] * 2)
        first = step.extend([served.part(0, prompts[0], 0, True), served.part(1, prompts[1], 0, True)], capture=True)
        second = decode([0, 1], [4, 2])
        # Request 0 leaves, 1 becomes row 0, request 2 comes as row 1; nothing was read back so far.
        table.arrange([1])
        table.put({1: Row(0, GREEDY, 0, 0)})
        part = Part(prompts[2], 0, pages[2], 1)
        third = step.extend([Part([], 3, pages[1], 0), part], capture=True)
        step.resize(2)
        fourth = decode([1, 2], [4, 3])
        got = [first.tokens(), second.tokens(), third.tokens(), fourth.tokens()]
        last = decode([1, 2], [5, 4]).tokens()
    assert [got[0][0], got[1][0]] == wanted[0]
    assert [got[0][1], got[1][1], got[2][0], got[3][0]] == wanted[1]
    assert [got[2][1], got[3][1], last[1]] == wanted[2]


def test_tokens_that_were_not_read_in_time_are_an_error(model: Any) -> None:
    served = Requests(model, False)
    with torch.inference_mode():
        served.step.load([Row(0, GREEDY, 0, 0)] * 5, capture=False)
        pending = [served.step.extend([served.part(0, [1, 2], 0, True)]) for _ in range(IN_FLIGHT + 1)]
    assert pending[1].tokens() == pending[-1].tokens() == pending[1].tokens()
    with pytest.raises(ArgumentError, match=r"Pending\.tokens: step is overwritten"):
        pending[0].tokens()


def test_explain_says_what_was_captured_with_which_core_and_what_was_not() -> None:
    generator = Generator(
        make("qwen3"), max_batch=2, max_length=64, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    )
    for _ in range(2):
        generator.generate([[1, 2, 3]], max_new_tokens=3, eos_ids=())
    explained = fl.explain(generator)
    assert {each.phase for each in explained if each.layer == "gqa"} >= {"decode", "extend", "extend, captured"}
    captured = next(each for each in explained if each.phase == "extend, captured")
    assert captured.chosen == "torch" and "captures no extend" in captured.refused["sdpa"]
    lines = str(explained).splitlines()[-3:]
    assert lines == list(explained.steps) and all("captured in" in line for line in lines[:2])
    assert [line.split(",")[0] for line in lines[:2]] == ["extend of 16 tokens", "decode of 1 tokens"]
    assert lines[2] == "1 extends uncaptured: the first step of 16 tokens and 1 requests"
    assert fl.explain(generator.model).steps == ()


@pytest.mark.parametrize(("backend", "wanted"), [("cpu:gloo,cuda:nccl", True), ("nccl", True), ("cpu:gloo", False)])
def test_ranks_are_captured_by_themselves_where_they_talk_by_nccl(
    backend: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group(torch.distributed.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backend)
    group = Group()
    spec = ParallelSpec.grid(2, 0)
    given = {name: getattr(spec, name) for name in AXES}
    axes = {n: a if a.size == 1 else Axis(a.size, a.rank, a.ranks, group) for n, a in given.items()}
    assert _capturable(SimpleNamespace(parallel=ParallelSpec(**axes))) is wanted
    # Sizes without groups communicate by nothing; one process needs nothing.
    assert not _capturable(SimpleNamespace(parallel=spec))
    assert _capturable(SimpleNamespace(parallel=ParallelSpec())) and _capturable(SimpleNamespace())


def test_latent_attention_ends_its_buckets_earlier() -> None:
    longest = {}
    for family in ("qwen3", "deepseek"):
        model = make(family)
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        state = AttentionState(2, 4096, 64, model.page_size, model.device)
        graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
        step = ModelStep(model, spec.allocate(2, "cpu"), state, Sampler(model.config.vocab_size), 2, graphs=graphs)
        longest[family] = step.extend_buckets.tokens[-1]
    assert longest == {"qwen3": 2048, "deepseek": DeepseekForCausalLM.captured_tokens}


def test_arguments() -> None:
    served = Requests(make("qwen3"), False)
    with torch.inference_mode():
        with pytest.raises(ArgumentError, match=r"row is 5; accepted: 0 to 4"):
            served.step.extend([Part([1], 0, [1], 5)])
        with pytest.raises(ArgumentError, match=r"row is None; .*a part with ids"):
            served.step.extend([Part([], 0, [1])])
        for wrong in ("foo", None, ["greedy"]):
            with pytest.raises(ArgumentError, match=r"Part: mode is .*; accepted: one of 'greedy', 'sampled', 'f"):
                served.step.extend([Part([1, 2, 3], 0, [1], 0, wrong)])  # type: ignore[arg-type]
        for call in (lambda: served.step.table.put({5: Row(0, GREEDY, 0, 0)}), lambda: served.step.table.arrange([9])):
            with pytest.raises(ArgumentError, match=r"RowTable"):
                call()
    other: Any
    for other in ((16, 8), (0, 4), [16]):
        with pytest.raises(ArgumentError, match="ExtendBuckets: tokens"):
            ExtendBuckets(other)
    with pytest.raises(ArgumentError, match="max_padding"):
        ExtendBuckets(max_padding=2.0)
    with pytest.raises(ArgumentError, match="ExtendBuckets: many is 0"):
        ExtendBuckets(many=0)
    with pytest.raises(ArgumentError, match=r"extend_buckets is .*an ExtendBuckets"):
        Requests(make("qwen3"), True, extend_buckets=(16,))
    assert ExtendBuckets().within(600, 3) == ExtendBuckets((16, 32, 64, 128, 256, 512), (1, 2, 3))
    assert ExtendBuckets((16, 24, 64), (1, 8)).within(64, 20, 16) == ExtendBuckets((16, 64), (1, 8))
    wide = ExtendBuckets((16, 64), (1, 8, 32), free=16, many=8)
    found = [wide.bucket_of(*step) for step in ((16, 1), (60, 1), (60, 9))]
    assert found == [ExtendBucket(16, 1), ExtendBucket(64, 8), ExtendBucket(64, 32)]
    assert wide.within(64, 4).bucket_of(60, 1) == ExtendBucket(64, 4)  # where fewer may run


@pytest.mark.parametrize("rows", [[0], [4, 1], [2, 2, 0], [3, 0, 1, 2, 4]])
def test_a_rows_fields_begin_at_aligned_addresses(rows: list[int]) -> None:
    # Otherwise a sampler's kernels are compiled again for each number of rows.
    table = RowTable(5, torch.device("cpu"))
    table.put(
        {i: Row(i, SamplingParams(temperature=0.1 * i, top_k=i, top_p=0.5, min_p=0.01 * i), 7 * i, i) for i in rows}
    )
    found = table.gather(torch.tensor(rows))
    assert all(field.data_ptr() % 16 == 0 for params in (found, table.params(len(rows))) for field in params)
    assert found.seed.tolist() == [7 * i for i in rows] and found.offset.tolist() == rows
    assert found.min_p.tolist() == pytest.approx([0.01 * i for i in rows]) and found.top_k.tolist() == rows


def test_rows_come_to_the_device_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not pinned is copied while the host waits, and three tensors are three copies."""
    table, sent = RowTable(5, torch.device("cpu")), []
    inbox, send = table._inbox, table._inbox.send
    monkeypatch.setattr(inbox, "send", lambda first=0, last=None: (sent.append((first, last)), send(first, last)))
    rows = [Row(9 + i, SamplingParams(0.1 + i, top_k=i, top_p=0.5, min_p=0.01), 2**61 + i, i, -i) for i in range(3)]
    addresses = [tensor.data_ptr() for tensor in table.tensors]
    table.put({5 - 1: rows[2], 0: rows[1]})
    assert sent == [(0, None)] and table.tokens.tolist() == [10, 0, 0, 0, 11, 0]
    table.load(rows)
    assert sent[1:] == [(0, table._bytes.numel())]
    assert table.tokens.tolist() == [9, 10, 11, 0, 0, 0] and table.rope_deltas.tolist() == [0, -1, -2, 0, 0, 0]
    params = table.params(4)
    assert params.seed.tolist() == [2**61, 2**61 + 1, 2**61 + 2, 0] and params.offset.tolist() == [0, 1, 2, 0]
    assert torch.equal(params.temperature, torch.tensor([0.1, 1.1, 2.1, 0.0]))
    assert params.top_p.tolist() == [0.5, 0.5, 0.5, 1.0] and params.top_k.tolist() == [0, 1, 2, 0]
    assert [tensor.data_ptr() for tensor in table.tensors] == addresses  # captured steps read there
    for host in table._host:
        host.fill_(7)  # the next rows are written while these are read
    assert table.tokens.tolist() == [9, 10, 11, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 5, 6, 16])
def test_inputs_of_an_extend_have_room_for_all_whatever_their_size(size: int) -> None:
    inputs = ExtendInputs(size, size, torch.device("cpu"))
    inputs.write([([7] * size, size - 1)], [size], None)
    assert inputs.ids(size, torch.zeros(size + 1, dtype=torch.int64)).tolist() == [7] * size
    assert inputs.count.item() == size and inputs.rows.shape == inputs.last.shape == (size,)
    assert inputs.rows[0].item() == size - 1


def test_no_more_of_an_extends_inputs_is_sent_than_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ExtendInputs(64, 4, torch.device("cpu"))
    fields, inputs._host = inputs._mirrored.fields, tuple(host.copy() for host in inputs._host)
    ends = []

    def send(first: int = 0, last: int | None = None) -> None:
        """Copy as to a device: what is here lies somewhere else."""
        ends.append(last)
        for (there, _), here in zip(fields, inputs._host, strict=True):
            begin = there.storage_offset()
            part = slice(max(0, first // 8 - begin), max(0, (10**6 if last is None else last // 8) - begin))
            there[part] = torch.from_numpy(here[part])

    monkeypatch.setattr(inputs._mirrored, "send", send)
    last_tokens = torch.tensor([11, 12, 13, 14, 0])
    steps: list[tuple[list[tuple[list[int], int | None]], list[int]]] = [
        ([([5, 6, 7], 2), ([8], None)], [5, 6, 7, 8]), ([([], 3), ([9], 0), ([], 1)], [14, 9, 12]),
        ([([6, 6], 1)], [6, 6]),
    ]  # fmt: skip
    for parts, wanted in steps:
        for bucket in (None, ExtendBucket(8, 4)):
            inputs.write(parts, [max(1, len(ids)) for ids, _ in parts], bucket)
            width = len(wanted) if bucket is None else 8
            assert inputs.ids(width, last_tokens).tolist() == wanted + [0] * (width - len(wanted))
            assert inputs.count.item() == len(wanted)
            assert inputs.rows[: len(parts)].tolist() == [4 if row is None else row for _, row in parts]
            assert (ends[-1] is None) == any(not ids for ids, _ in parts)
    assert ends[0] is not None and ends[0] < inputs._mirrored.host_bytes.size / 2
