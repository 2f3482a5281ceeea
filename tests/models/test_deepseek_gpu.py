"""The shipped checkpoint on a GPU: fp32 against the CPU, a whole decode step captured and replayed, FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
import fastlayers_models
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers_models.convert import convert_to_fp8_block
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.generate import Generator
from fastlayers_server.tasks import held_out_problems

pytestmark = pytest.mark.gpu
TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"


def load(path: Path = TINY, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(path, **{"device": "cuda", "dtype": torch.bfloat16} | options)


def prompts(count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chats = [f"<|bos|><|user|>{p.prompt}<|assistant|>" for p in held_out_problems(count)]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


def test_fp32_on_the_gpu_equals_the_cpu() -> None:
    rows = prompts(12)
    on_cpu = Generator(load(device="cpu", dtype=torch.float32), max_length=128).generate(rows, max_new_tokens=12)
    assert Generator(load(dtype=torch.float32), max_length=128).generate(rows, max_new_tokens=12) == on_cpu


OPTIONS: list[dict[str, Any]] = [{}, {"kv_dtype": torch.float8_e4m3fn}, {"page_size": 1}, {"backend": "torch"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_right(options: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer, problems = AutoTokenizer.from_pretrained(TINY), held_out_problems(60)
    outputs = Generator(load(**options), max_batch=60, max_length=128).generate(prompts(60), max_new_tokens=16)
    answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in outputs]
    assert sum(a == p.answer for a, p in zip(answers, problems, strict=True)) >= 58


def test_fp8_checkpoint_answers(tmp_path: Path) -> None:
    convert_to_fp8_block(TINY, tmp_path / "fp8", include_ragged=True)
    model = load(tmp_path / "fp8")
    chosen = {row.chosen for row in fl.explain(model) if row.layer == "fp8_linear"}
    assert chosen and not chosen & {"torch", "reference"}
    from transformers import AutoTokenizer

    tokenizer, problems = AutoTokenizer.from_pretrained(TINY), held_out_problems(60)
    outputs = Generator(model, max_batch=60, max_length=128).generate(prompts(60), max_new_tokens=16)
    answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in outputs]
    assert sum(a == p.answer for a, p in zip(answers, problems, strict=True)) >= 58


@torch.inference_mode()
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_whole_decode_step_is_captured_and_replayed_with_new_metadata(fp8_kv: bool) -> None:
    model = load(kv_dtype=torch.float8_e4m3fn if fp8_kv else torch.bfloat16)
    bucket, page = 4, model.page_size
    spec = fl.kv_cache_spec(model, page_size=page, dtype=model.kv_dtype)
    table = whole_pages([200, 150, 90, 130], page)
    caches = spec.allocate(1 + sum(map(len, table)), "cuda")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 500, (n,), generator=generator).tolist() for n in (180, 130, 60, 100)]
    prefill = AttentionState(4, 512, 4, page, "cuda").plan(AttentionBatch(tuple(map(len, rows)), (0,) * 4, table))
    model(torch.tensor([t for row in rows for t in row], device="cuda"), prefill, caches)
    state = AttentionState(bucket, bucket, 4, page, "cuda")
    ids = torch.zeros(bucket, dtype=torch.int64, device="cuda")

    def batch(order: list[int], step: int) -> AttentionBatch:
        return AttentionBatch((1,) * len(order), tuple(len(rows[i]) + step for i in order), [table[i] for i in order])

    def step_with(order: list[int], step: int, tokens: list[int]) -> Any:
        meta = state.plan(batch(order, step), bucket=bucket)
        ids.zero_()
        ids[: len(tokens)] = torch.tensor(tokens, device="cuda")
        return meta

    meta = step_with([0, 1, 2, 3], 0, [11, 12, 13, 14])
    saved = [cache.keys.clone() for cache in caches]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.compute_logits(model(ids, meta, caches))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.compute_logits(model(ids, meta, caches))
    for order, step, tokens in (([0, 1, 2, 3], 0, [11, 12, 13, 14]), ([2, 0], 1, [77, 88]), ([3], 1, [99])):
        for cache, keys in zip(caches, saved, strict=True):
            cache.keys.copy_(keys)
        step_with(order, step, tokens)
        graph.replay()
        replayed = logits[: len(order)].clone()
        for cache, keys in zip(caches, saved, strict=True):
            cache.keys.copy_(keys)
        eager_meta = AttentionState(4, 4, 4, page, "cuda").plan(batch(order, step))
        eager = model.compute_logits(model(torch.tensor(tokens, device="cuda"), eager_meta, caches))
        error = ((replayed - eager).double().norm() / eager.double().norm()).item()
        assert error < 0.03 and torch.equal(replayed.argmax(-1), eager.argmax(-1)), (order, error)
