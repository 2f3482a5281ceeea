"""Tiny models, an engine that is ticked by hand, and what a plain loop says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerFast

import fastlayers_models
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.sampler.layer import SamplingParams
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator
from fastlayers_server import tasks
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.executor import TorchExecutor
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import FromEngine, Output, Sampling, StepOut, Submit, pack_ids
from fastlayers_server.engine.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
from small_models import GPT_OSS, QWEN3_MOE, small_model

TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
GREEDY = Sampling(temperature=0.0)


def make_model(name: str, page_size: int = 16) -> Any:
    """Return "deepseek" (the shipped one), or a random "qwen" or "gpt_oss"."""
    if name == "deepseek":
        return AutoModel.from_pretrained(TINY, dtype=torch.float32, device="cpu", page_size=page_size)
    return small_model(QWEN3_MOE if name == "qwen" else GPT_OSS, page_size=page_size)


made = cache(make_model)  # for tests that leave its weights and backends as they are


def prompts(count: int, longest: int = 70, seed: int = 11, vocab: int = 94) -> list[list[int]]:
    """Return rows of random tokens; every third begins like the first, and the last is one token."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=random).tolist()
    rows = [torch.randint(3, vocab, (n,), generator=random).tolist() for n in lengths]
    head = torch.randint(3, vocab, (40,), generator=random).tolist()
    return [*[head + row if i % 3 == 0 else row for i, row in enumerate(rows)][:-1], [5]]


def chats(count: int) -> list[list[int]]:
    """Return prompts that the shipped model was trained to answer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    said = islice(tasks.iter_story_chats("held_out", 30_000), count)
    messages = [[{"role": "user", "content": chat[0]}] for chat in said]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return [tokenizer.apply_chat_template(message, **options)[:90] for message in messages]


_said: WeakKeyDictionary[Any, dict[Any, list[int]]] = WeakKeyDictionary()


def plain(model: Any, rows: Sequence[Sequence[int]], new: int, params: Any = None) -> list[list[int]]:
    """Return what the library's plain loop says, request by request; what it said before is not computed again."""
    said = _said.setdefault(model, {})
    ways = params or [SamplingParams(temperature=0.0)] * len(rows)
    asked = [(tuple(row), repr(way)) for row, way in zip(rows, ways, strict=True)]
    generator = None
    for key, way in zip(asked, ways, strict=True):
        if len(said.get(key, ())) < new:
            generator = generator or Generator(model, max_batch=1, max_length=256, cuda_graph=False)
            (said[key],) = generator.generate([list(key[0])], [way], max_new_tokens=new, eos_ids=())
    return [said[key][:new] for key in asked]


class Cold(EagerRuntime):
    """Graphs without a GPU that are captured at once: here nothing compiles, and a warm-up is one more whole step."""

    def warm_up(self, fn: Callable[[], Any], times: int) -> None:
        """Call nothing; the capture computes, too, and has to leave nothing behind either."""


class Bench:
    """An engine on a model, ticked by hand."""

    def __init__(
        self, model: Any, *, num_pages: int = 80, overlap: bool = False, captured: bool = False, drafts: Any = None,
        verify_each: int = 0, mtp: int = 0, rejection: bool = False, draft_model: Any = None,
        grammars: Any = None, own_buckets: bool = False, **limits: Any,
    ) -> None:  # fmt: skip
        options = dict(max_running=6, max_batched_tokens=48, max_extend_requests=4, prefix_cache=True) | limits
        vocab, eos = model.config.vocab_size, tuple(model.config.eos_token_ids)
        self.config = SchedulerConfig(vocab, 256, num_pages, model.page_size, eos, **options)  # type: ignore[arg-type]
        graphs = CudaGraphs(runtime=Cold(), warm_ups=1) if captured else None
        buckets = ExtendBuckets((16, 32), (1, 4)) if captured and not own_buckets else None
        self.executor = TorchExecutor(
            model,
            self.config,
            graphs=graphs,
            extend_buckets=buckets,
            verify_each=verify_each,
            mtp=mtp,
            rejection=rejection,
            draft_model=draft_model,
        )
        if captured:
            self.executor.capture()
        self.scheduler = Scheduler(self.config)
        self.news: list[Output] = []
        if callable(drafts):
            drafts = drafts(self.executor, self.scheduler.metrics)
        self.engine = Engine(
            self.scheduler, self.executor, self._deliver, overlap=overlap, drafts=drafts, grammars=grammars
        )
        self.rids = 0

    def _deliver(self, message: FromEngine) -> None:
        if isinstance(message, StepOut):
            self.news += message.outputs

    def submit(self, prompt: Sequence[int], new: int = 12, sampling: Sampling = GREEDY, **options: Any) -> int:
        self.rids += 1
        options = {"ignore_eos": True} | options
        self.engine.post(Submit(self.rids, pack_ids(prompt), sampling, new, **options))
        return self.rids

    def run(self) -> None:
        ticks = 0
        self.engine.tick()
        while not self.scheduler.idle or self.engine._pending is not None:
            self.engine.tick()
            ticks += 1
            assert ticks < 2000

    def ids(self, rid: int) -> list[int]:
        return [token for output in self.news if output.rid == rid for token in output.ids]

    def last(self, rid: int) -> Output:
        return [output for output in self.news if output.rid == rid][-1]

    def generate(self, rows: Sequence[Sequence[int]], new: int, samplings: Sequence[Sampling] | None = None) -> Any:
        ways = samplings or [GREEDY] * len(rows)
        rids = [self.submit(row, new, way) for row, way in zip(rows, ways, strict=True)]
        self.run()
        return [self.ids(rid) for rid in rids]


def mixed_steps(bench: Bench) -> list[tuple[set[int], set[int]]]:
    """Return what will hold, of each mixed step, who decoded and whose prompts were computed."""
    found: list[tuple[set[int], set[int]]] = []
    launch = bench.executor.launch

    def launched(plan: Any) -> Any:
        if plan.mixed:
            found.append(({row.rid for row in plan.rows}, {chunk.request.rid for chunk in plan.chunks}))
        return launch(plan)

    bench.executor.launch = launched  # type: ignore[method-assign]
    return found
