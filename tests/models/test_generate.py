"""The generator's decode loop: captured, ahead of its tokens, requests that leave; against its plain loop."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import sys
from enum import IntEnum
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers as fl
import fastlayers_models
from fastlayers.errors import AllocatorOverflowError, ArgumentError, CaptureError
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.sampler.layer import SamplingParams
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator
from fastlayers_models.requests import wrong_ids
from fastlayers_models.step import Part, Row, StepKey

sys.path.insert(0, str(Path(__file__).parent))
from small_models import GPT_OSS, QWEN3_MOE, small_model

TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=5)


def prompts(count: int, longest: int = 24) -> list[list[int]]:
    random = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, longest, (count,), generator=random).tolist()
    return [torch.randint(0, 94, (n,), generator=random).tolist() for n in lengths]


@pytest.fixture(scope="module", params=[QWEN3_MOE, GPT_OSS], ids=lambda hf: hf["model_type"])
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


class Counting(EagerRuntime):
    """Remembers nothing but how many graphs there are."""

    captured = 0

    def capture(self, fn: Any) -> Any:
        self.captured += 1
        return super().capture(fn)


def frequent(model: Any, rows: list[list[int]], steps: int) -> list[int]:
    """Return two tokens that end requests at different times."""
    found = Generator(model, max_batch=len(rows), cuda_graph=False).generate(rows, max_new_tokens=steps, eos_ids=())
    return [found[0][steps // 3], found[-1][steps // 2]]


@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "filtered"])
def test_captured_tokens_are_those_of_the_plain_loop(model: Any, params: SamplingParams | None) -> None:
    rows, steps = prompts(5), 14
    stop = frequent(model, rows, steps)
    plain = Generator(model, max_batch=5, max_length=64, cuda_graph=False)
    runtime = Counting()
    graphs = CudaGraphs(runtime=runtime)
    captured = Generator(model, max_batch=5, max_length=64, graphs=graphs)
    assert not plain.ahead and captured.ahead
    for eos in ((), stop):
        wanted = plain.generate(rows, params, max_new_tokens=steps, eos_ids=eos)
        assert captured.generate(rows, params, max_new_tokens=steps, eos_ids=eos) == wanted
    assert len({len(out) for out in wanted}) > 1  # requests did leave early
    free = captured.pool.free_pages
    assert free == captured.pool.num_pages - 1
    mode = "greedy" if params is None else "filtered"
    decodes = {key for key in graphs.keys if key[0] == "decode"}
    assert decodes <= {StepKey("decode", n, n, mode) for n in captured.step.buckets} and runtime.captured == len(graphs)
    # The first prefill of its size ran uncaptured, the second was replayed.
    assert [key for key in graphs.keys if key[0] == "extend"] == [StepKey("extend", 64, 5, mode)]
    assert graphs.replays >= steps


def test_mixed_sampling_and_more_prompts_than_rows(model: Any) -> None:
    rows, steps = prompts(7), 9
    params = [SAMPLED if i % 2 else SamplingParams(temperature=0.0) for i in range(7)]
    wanted = [
        Generator(model, max_batch=1, max_length=64, cuda_graph=False).generate([r], [p], max_new_tokens=steps)[0]
        for r, p in zip(rows, params, strict=True)
    ]
    got = Generator(model, max_batch=3, max_length=64, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1))
    assert got.generate(rows, params, max_new_tokens=steps) == wanted


def test_a_request_without_seed_keeps_the_one_it_drew(model: Any) -> None:
    rows = prompts(3)
    generator = Generator(model, max_batch=3, max_length=64, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1))
    params = SamplingParams(temperature=0.8)
    out = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out.append(generator.generate(rows, params, max_new_tokens=8, eos_ids=()))
    assert out[0] == out[1] != out[2]


def test_capture_beforehand_largest_first(model: Any) -> None:
    graphs, done = CudaGraphs(runtime=EagerRuntime(), warm_ups=1), []  # type: ignore[var-annotated]
    generator = Generator(model, max_batch=5, max_length=64, graphs=graphs)
    assert generator.step.buckets == (1, 2, 4, 5)
    generator.capture(progress=done.append)
    assert done == [StepKey("decode", n, n, "greedy") for n in (5, 4, 2, 1)]
    wanted = Generator(model, max_length=64, cuda_graph=False).generate(prompts(5), max_new_tokens=6, eos_ids=())
    assert generator.generate(prompts(5), max_new_tokens=6, eos_ids=()) == wanted
    assert len(graphs) == 5 and list(generator.step.wanted) == []


def test_few_graphs_at_a_time(model: Any) -> None:
    rows = prompts(4)
    stop = frequent(model, rows, 12)

    class Costly(EagerRuntime):
        left = 1 << 20

        def free_bytes(self) -> int:
            self.left -= 1000
            return self.left

    graphs = CudaGraphs(runtime=Costly(), max_bytes=1500)
    generator = Generator(model, max_batch=4, max_length=64, graphs=graphs)
    wanted = Generator(model, max_batch=4, max_length=64, cuda_graph=False).generate(
        rows, max_new_tokens=12, eos_ids=stop
    )
    for _ in range(2):
        assert generator.generate(rows, max_new_tokens=12, eos_ids=stop) == wanted
    assert len(graphs) == 1 and graphs.evicted > 0


def test_a_scarce_cache_is_not_spent_on_steps_ahead(model: Any) -> None:
    (row,) = prompts(1)
    row = (row * 16)[:15]
    wanted = Generator(model, max_batch=1, max_length=64, cuda_graph=False).generate(
        [row], max_new_tokens=2, eos_ids=()
    )
    # The first token ends the request; its place is the 16th: one page of 16 is enough.
    tight = Generator(
        model, max_batch=1, max_length=64, num_pages=2, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    )
    assert tight.generate([row], max_new_tokens=2, eos_ids=()) == wanted
    stopped = tight.generate([row], max_new_tokens=40, eos_ids=[wanted[0][1]])
    assert stopped == [wanted[0]] and tight.pool.free_pages == 1


@pytest.mark.parametrize("captured", [False, True])
def test_requests_that_do_not_fit_together_run_in_turns(model: Any, captured: bool) -> None:
    rows, new = prompts(5), 12
    wanted = Generator(model, max_batch=5, max_length=64, cuda_graph=False).generate(
        rows, max_new_tokens=new, eos_ids=()
    )
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1) if captured else None
    # Three pages of 16 hold the longest of them, and never all that are in a batch of five.
    few = Generator(model, max_batch=5, max_length=64, num_pages=4, graphs=graphs)
    assert few.generate(rows, max_new_tokens=new, eos_ids=()) == wanted
    assert few.pool.free_pages == 3
    with pytest.raises(AllocatorOverflowError, match="request 1 needs 1 more pages for 49 tokens; 0 of 3 are free"):
        few.generate([rows[0], [5] * 40], max_new_tokens=20, eos_ids=())
    assert few.pool.free_pages == 3


def test_an_abandoned_stream_gives_its_pages_back(model: Any) -> None:
    generator = Generator(model, max_batch=2, max_length=64, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1))
    wanted = generator.generate(prompts(2), max_new_tokens=9, eos_ids=())
    stream = generator.stream(prompts(2), max_new_tokens=9, eos_ids=())
    for _ in range(5):
        next(stream)
    stream.close()
    assert generator.pool.free_pages == generator.pool.num_pages - 1
    assert generator.generate(prompts(2), max_new_tokens=9, eos_ids=()) == wanted


class Failing(EagerRuntime):
    """Cannot capture."""

    def capture(self, fn: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_runs_uncaptured_and_says_so(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    wanted = Generator(model, max_length=64, cuda_graph=False).generate(prompts(2), max_new_tokens=5)
    with caplog.at_level(logging.WARNING):
        generator = Generator(model, max_length=64, graphs=CudaGraphs(runtime=Failing()))
        assert generator.generate(prompts(2), max_new_tokens=5) == wanted
    assert sum("decode runs without CUDA graphs" in record.message for record in caplog.records) == 1
    strict = Generator(model, max_length=64, cuda_graph=True, graphs=CudaGraphs(runtime=Failing()))
    with pytest.raises(CaptureError, match=r"kind='extend', .*requests=2, mode='greedy'.*not permitted"):
        strict.generate(prompts(2), max_new_tokens=5)
    with pytest.raises(CaptureError, match=r"kind='decode', .*requests=2, mode='greedy'.*not permitted"):
        strict.capture([2])
    assert strict.pool.free_pages == strict.pool.num_pages - 1


# To compile takes longest; that of another family is the same.
compiled = pytest.mark.parametrize(
    "model",
    [QWEN3_MOE, pytest.param(GPT_OSS, marks=pytest.mark.slow)],
    indirect=True,
    ids=lambda hf: hf["model_type"],
)


@compiled
def test_small_operators_compiled_up_to_a_batch(model: Any) -> None:
    how = fl.TorchCompile(max_batch=2, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    generator = Generator(
        model, max_batch=5, max_length=64, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1), torch_compile=how
    )
    generator.capture()
    # Two buckets, and in each the first layer apart from the other.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    for rows in (prompts(2), prompts(5)):
        wanted = Generator(model, max_length=64, cuda_graph=False).generate(rows, SAMPLED, max_new_tokens=6)
        assert generator.generate(rows, SAMPLED, max_new_tokens=6) == wanted


@compiled
def test_what_cannot_be_compiled_raises(model: Any) -> None:
    how = fl.TorchCompile(backend="aot_eager")
    graphs = CudaGraphs(runtime=Failing())
    with pytest.raises(CaptureError, match="not permitted"):
        Generator(model, max_length=64, graphs=graphs, torch_compile=how).generate(prompts(2), max_new_tokens=5)
    for other, accepted in ((True, "a TorchCompile"), (how, "None where decode is not captured")):
        with pytest.raises(ArgumentError, match=rf"torch_compile is .*{accepted}"):
            Generator(model, torch_compile=other)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [None, fl.TorchCompile(backend="aot_eager")], ids=["captured", "compiled"])
def test_latent_attention_is_captured_and_compiled(how: fl.TorchCompile | None) -> None:
    model = DeepseekForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rows = [[5, 9, 2, 7], [11, 3, 8]]
    wanted = Generator(model, max_length=64, cuda_graph=False).generate(rows, max_new_tokens=6, eos_ids=())
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    captured = Generator(model, max_length=64, graphs=graphs, torch_compile=how)
    assert captured.generate(rows, max_new_tokens=6, eos_ids=()) == wanted
    assert graphs.replays > 0


def test_a_step_that_fails_before_it_is_compiled_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(QWEN3_MOE)

    def broken(x: torch.Tensor, valid: Any = None) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.decoder.layers[1].mlp, "forward", broken)
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    generator = Generator(model, max_length=64, graphs=graphs, torch_compile=fl.TorchCompile(backend="aot_eager"))
    with pytest.raises(CaptureError, match=r"model\.layers\.1\.mlp \(QwenMoE\): RuntimeError: out of memory"):
        generator.capture([2])


def test_warm_up_of_a_generator_and_of_a_model(model: Any) -> None:
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1)
    generator = Generator(model, max_batch=5, max_length=64, graphs=graphs)
    report = fl.warmup(generator, tokens=[3, 20], progress=False)
    alone = "prefill 20 (no decode: max_batch is 5)"
    assert [label for label, _, _ in report.steps] == [alone, "decode 4", "prefill 3"]
    both = ("greedy", "filtered")
    assert {key for key in graphs.keys if key[0] == "decode"} == {StepKey("decode", 4, 4, mode) for mode in both}
    assert {key for key in graphs.keys if key[0] == "extend"} == {
        StepKey("extend", tokens, 1, mode) for tokens in (16, 32) for mode in both
    }
    assert generator.pool.free_pages == generator.pool.num_pages - 1
    labels = [label for label, _, _ in fl.warmup(model, tokens=[6, 1], progress=False).steps]
    assert labels == ["decode 6", "prefill 6", "decode 1", "prefill 1"]


def test_warm_up_says_what_cannot_run(model: Any) -> None:
    generator = Generator(model, max_batch=5, max_length=4)
    labels = [label for label, _, _ in fl.warmup(generator, tokens=[4], progress=False).steps]
    assert labels == ["decode 4 (no prefill: max_length is 4)"]
    for target, largest in ((generator, 5), (model, 256)):
        wanted = rf"tokens is 1000000000; .*fewer: max_batch is {largest}, max_length is"
        with pytest.raises(ArgumentError, match=wanted):
            fl.warmup(target, tokens=[1, 10**9], progress=False)
    small = Generator(model, max_batch=5, max_length=64, num_pages=4)
    labels = [label for label, _, _ in fl.warmup(small, tokens=[3, 4, 48], progress=False).steps]
    no_prompt, no_batch = "(no decode: max_batch is 5)", "(no decode: the cache has 4 pages)"
    assert labels == [f"prefill 48 {no_prompt}", f"prefill 4 {no_batch}", "decode 3", "prefill 3"]
    with pytest.raises(ArgumentError, match="max_batch is 5, the cache has 4 pages"):
        fl.warmup(small, tokens=[49], progress=False)
    short = Generator(model, max_batch=5, max_length=2)
    labels = [label for label, _, _ in fl.warmup(short, tokens=[1], progress=False).steps]
    assert labels == ["prefill 1 (no decode: max_length is 2)"]


def test_warm_up_of_a_hugging_face_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64))
    with pytest.raises(ArgumentError, match=r"LlamaForCausalLM that is not patched.*fastlayers\.patch"):
        fl.warmup(model, tokens=[3], progress=False)
    fl.patch(model)
    monkeypatch.setattr(importlib.import_module("fastlayers.runtime.warmup"), "WIDEST", 4)
    labels = [label for label, _, _ in fl.warmup(model, tokens=[3, 61], progress=False).steps]
    assert labels == ["prompt of 61 (no batch: at most 4 requests)", "3 requests", "prompt of 3"]
    with pytest.raises(ArgumentError, match=r"tokens is 62; .*1 to 61.*64 positions"):
        fl.warmup(model, tokens=[3, 62], progress=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_nothing_of_its_original(copied: Any) -> None:
    original = small_model(QWEN3_MOE)
    wanted = Generator(original, max_batch=2, max_length=32).generate([[1, 2, 3]], max_new_tokens=6)
    twin = copied(original)
    for parameter in original.parameters():
        parameter.zero_()
    assert Generator(twin, max_batch=2, max_length=32).generate([[1, 2, 3]], max_new_tokens=6) == wanted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_generator_begins_anew(copied: Any) -> None:
    made = Generator(small_model(QWEN3_MOE), max_batch=2, max_length=48)
    rows = [[1, 2, 3], [7] * 20]
    wanted = made.generate(rows, max_new_tokens=9, eos_ids=())
    stream = made.stream([[4, 4]], max_new_tokens=9, eos_ids=())
    next(stream)
    twin = copied(made)
    assert twin.generate(rows, max_new_tokens=9, eos_ids=()) == wanted and twin.model is not made.model
    with pytest.raises(ArgumentError, match="Generator: graphs is given; accepted: None for a generator that is"):
        copied(Generator(made.model, max_length=48, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1)))


@pytest.mark.parametrize("captured", [False, True])
def test_one_stream_at_a_time(model: Any, captured: bool) -> None:
    graphs = CudaGraphs(runtime=EagerRuntime(), warm_ups=1) if captured else None
    made = Generator(model, max_batch=2, max_length=64, cuda_graph="auto" if captured else False, graphs=graphs)
    rows = prompts(2)
    wanted = [made.generate([row], max_new_tokens=8, eos_ids=())[0] for row in rows]
    first, second = (made.stream([row], max_new_tokens=8, eos_ids=()) for row in rows)
    found = [next(first).id]
    free, words = made.pool.free_pages, "called while a stream of this generator is running; accepted: one at a time"
    for refused in (lambda: next(second), lambda: made.generate(rows, max_new_tokens=8), made.capture):
        with pytest.raises(ArgumentError, match=words):
            refused()
    assert made.pool.free_pages == free
    assert [*found, *(token.id for token in first)] == wanted[0]
    third = made.stream([rows[1]], max_new_tokens=8, eos_ids=())
    next(third)
    third.close()
    assert made.generate([rows[1]], max_new_tokens=8, eos_ids=())[0] == wanted[1]


def test_threads_take_turns_or_are_refused(model: Any) -> None:
    made = Generator(model, max_batch=2, max_length=64, cuda_graph=False)
    rows = prompts(2)
    wanted = [made.generate([row], max_new_tokens=20, eos_ids=())[0] for row in rows]
    both = Barrier(2)
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        both.wait()
        try:
            found[index] = made.generate([rows[index]], max_new_tokens=20, eos_ids=())[0]
        except ArgumentError as error:
            found[index] = str(error)

    threads = [Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served = [found[index] == wanted[index] for index in range(2)]
    assert any(served) and all(
        ok or "stream of this generator is running" in str(found[i]) for i, ok in enumerate(served)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": 0}, "params is 0; accepted: SamplingParams, one or one per prompt, or None"),
        ({"params": {}}, r"params is \{\}; accepted: SamplingParams"),
        ({"params": [SamplingParams(), None]}, r"params\[1\] is None; accepted: SamplingParams"),
        ({"params": torch.zeros(2)}, "params is float32.*; accepted: SamplingParams"),
        ({"prompts": torch.zeros(1, 2, device="meta")}, "prompts is .*; accepted: a sequence of prompts"),
        ({"prompts": [torch.zeros(2, device="meta")]}, r"prompts\[0\] is .*; accepted: a sequence of prompts"),
        ({"prompts": [b"ab"]}, r"prompts\[0\] is b'ab'; accepted: a sequence of prompts"),
    ],
)
def test_what_a_generator_cannot_read_is_named(model: Any, options: dict[str, Any], words: str) -> None:
    made = Generator(model, max_length=32, cuda_graph=False)
    with pytest.raises(ArgumentError, match=f"Generator: {words}"):
        made.generate(**{"prompts": [[1], [2]], "max_new_tokens": 2} | options)
    assert len(made.generate([[1], [2]], max_new_tokens=2, eos_ids=())) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "model is .*; accepted: a CausalLM of fastlayers_models"),
        ({"max_length": "3"}, "max_length is '3'; accepted: an integer or None"),
        ({"max_length": True}, "max_length is True; accepted: an integer or None"),
        ({"num_pages": 1}, "num_pages is 1; accepted: 2 or more, or None: page 0 is nobody's"),
        ({"num_pages": -1}, "num_pages is -1; accepted: 2 or more"),
        ({"num_pages": "8"}, "num_pages is '8'; accepted: an integer or None"),
        ({"max_length": torch.zeros(2)}, "max_length is float32.*; accepted: an integer or None"),
    ],
)
def test_what_no_generator_can_be_made_of_is_named(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"Generator: {words}"):
        Generator(**{"model": model} | options)


@pytest.mark.parametrize("wrong", [5, "</s>", b"x", {1: 2}, [1.5], [None], torch.zeros(2, device="meta")], ids=str)
def test_stop_ids_are_integers(model: Any, wrong: Any) -> None:
    made = Generator(model, max_length=32, cuda_graph=False)
    with pytest.raises(ArgumentError, match=r"Generator: eos_ids is .*; accepted: a sequence of token ids"):
        made.generate([[1]], max_new_tokens=2, eos_ids=wrong)
    assert made.generate([[1]], max_new_tokens=2, eos_ids=torch.tensor([200])) == made.generate([[1]], max_new_tokens=2)  # type: ignore[arg-type]


class Id(IntEnum):
    """Integers of another type."""

    ONE, MANY = 1, 32


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ([0, 31, 7], []), ([], []), ([3, -1, 32, 2**70], [-1, 32, 2**70]), ([1, True, False], [True, False]),
        ([1, 2.0, "3", None], [2.0, "3", None]), ([Id.ONE, 5], []), ([Id.MANY, 5], [Id.MANY]),
    ],
)  # fmt: skip
def test_ids_outside_a_vocabulary_are_found_among_all_kinds(prompt: Any, wrong: list[Any]) -> None:
    assert list(map(repr, wrong_ids(prompt, 32))) == list(map(repr, wrong))


@pytest.mark.parametrize("bad", [96, -1])
def test_a_model_names_ids_outside_its_vocabulary_on_a_cpu(model: Any, bad: int) -> None:
    meta = fl.AttentionState(1, 2, 1, 16).plan(fl.AttentionBatch((2,), (0,), [[1]]))
    caches = fl.kv_cache_spec(model, page_size=16, dtype=torch.float32).allocate(2, "cpu")
    with pytest.raises(ArgumentError, match=rf"VocabEmbedding: ids is .*{bad}.*; accepted: 0 to 95"):
        model(torch.tensor([0, bad]), meta, caches)


def test_arguments(model: Any) -> None:
    other: Any
    for other in ("sometimes", 1, 0, None, 1.0):
        with pytest.raises(ArgumentError, match=r"cuda_graph is .*one of 'auto', True, False"):
            Generator(model, cuda_graph=other)
    for other in (3, "graphs", EagerRuntime()):
        with pytest.raises(ArgumentError, match=r"graphs is .*a CudaGraphs"):
            Generator(model, graphs=other)
    with pytest.raises(ArgumentError, match="the model is on cpu"):
        Generator(model, cuda_graph=True)
    assert Generator(model, cuda_graph=False, graphs=CudaGraphs(runtime=EagerRuntime(), warm_ups=1)).step.buckets == ()


def test_a_capture_that_was_asked_for_raises_where_there_are_no_graphs(model: Any) -> None:
    plain, off = Generator(model, max_length=64), Generator(model, max_length=64, cuda_graph=False)
    failed = Generator(model, max_length=64, graphs=CudaGraphs(runtime=Failing()))
    labels = [label for label, _, _ in fl.warmup(failed, tokens=[2, 1], progress=False).steps]
    assert labels == ["decode 2", "prefill 2", "decode 1", "prefill 1"] and failed.step.graphs is None
    cases = (plain, "'auto', and the model is on cpu"), (off, "False"), (failed, "'auto', and a capture failed: ")
    for made, words in cases:
        made.step.load([Row(0, SamplingParams(temperature=0.0), 0, 0)])  # captures only where that can be done
        made.step.capture_wanted()
        for name, call in {
            "Generator.capture": made.capture,
            "ModelStep.capture": partial(made.step.capture, [1]),
            "ModelStep.capture_extends": partial(made.step.capture_extends, [StepKey("extend", 16, 1, "greedy")]),
            "ModelStep.extend": partial(made.step.extend, [Part([1], 0, [1], 0)], capture=True),
        }.items():
            with pytest.raises(ArgumentError, match=rf"{name}: cuda_graph is {words}.*; accepted: 'auto' or True for"):
                call()


@pytest.mark.gpu
@pytest.mark.parametrize("hf", [QWEN3_MOE, GPT_OSS], ids=lambda hf: hf["model_type"])
def test_gpu_captured_tokens_equal_uncaptured(hf: dict[str, Any]) -> None:
    # fp32: a padded batch takes other GEMM kernels, whose bf16 roundings may turn a near tie.
    model, rows, steps = small_model(hf, "cuda"), prompts(11), 24
    stop = frequent(model, rows, steps)
    plain = Generator(model, max_batch=11, max_length=64, cuda_graph=False)
    captured = Generator(model, max_batch=11, max_length=64, cuda_graph=True)
    for params in (None, SAMPLED):
        for eos in ((), stop):
            wanted = plain.generate(rows, params, max_new_tokens=steps, eos_ids=eos)
            assert captured.generate(rows, params, max_new_tokens=steps, eos_ids=eos) == wanted
    assert captured.step.graphs is not None and captured.step.graphs.replays >= 2 * steps
    how = fl.TorchCompile(mode="default")
    compiled = Generator(model, max_batch=11, max_length=64, cuda_graph=True, torch_compile=how)
    wanted = plain.generate(rows, max_new_tokens=steps, eos_ids=())
    assert compiled.generate(rows, max_new_tokens=steps, eos_ids=()) == wanted


@pytest.mark.parametrize(
    ("given", "argument"),
    [([5, 6], r"prompts\[0\] is 5"), (torch.tensor([5, 6]), r"prompts\[0\] is 5"), ("hi", "prompts is 'hi'"),
     (["hi"], r"prompts\[0\] is 'hi'"), (torch.tensor(5), "prompts is 5"), ([[5], None], r"prompts\[1\] is None")],
)  # fmt: skip
def test_prompts_are_rows_of_token_ids(model: Any, given: Any, argument: str) -> None:
    generator = Generator(model, max_batch=1, max_length=64)
    with pytest.raises(ArgumentError, match=rf"Generator: {argument}; accepted: a sequence of prompts"):
        generator.generate(given, max_new_tokens=2)
    with pytest.raises(ArgumentError, match=argument):
        next(generator.stream(given, max_new_tokens=2))


def test_a_tensor_stands_for_its_rows(model: Any) -> None:
    generator = Generator(model, max_batch=2, max_length=64)
    wanted = generator.generate([[5, 6], [7, 8]], max_new_tokens=3, eos_ids=())
    assert generator.generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=3, eos_ids=()) == wanted
    rows = np.array([[5, 6], [7, 8]])
    kinds: tuple[Any, ...] = ([torch.tensor([5, 6]), [7, 8]], rows, list(rows), [list(row) for row in rows])
    for given in kinds:
        assert generator.generate(given, max_new_tokens=3, eos_ids=()) == wanted
    with pytest.raises(ArgumentError, match=r"prompts\[0\] is token id 5.0; accepted: token ids in \[0, 96\)"):
        generator.generate(rows.astype(float), max_new_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"prompts\[1\] is token id 96; accepted: token ids in \[0, 96\)"):
        generator.generate([[5], [np.int32(96)]], max_new_tokens=3)  # type: ignore[list-item]
