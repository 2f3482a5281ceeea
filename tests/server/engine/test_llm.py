"""``LLM``: the shipped model with its engine in this process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers_models
from fastlayers.errors import FastlayersError
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator
from fastlayers_server import LLM, Params
from fastlayers_server.engine.config import EngineConfig

TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
PROMPTS = ["Once upon a time there was", "The red cat", "What is 3 + 4?"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM("tiny", EngineConfig(device="cpu", max_running_requests=8, max_model_len=512, page_size=16))
    yield found
    found.close()


def test_greedy_text_is_the_generators(llm: LLM) -> None:
    model = AutoModel.from_pretrained(TINY, dtype=torch.float32, device="cpu", page_size=16)
    ids = [llm.tokens.encode(prompt) for prompt in PROMPTS]
    wanted = Generator(model, max_batch=1, max_length=256).generate(ids, max_new_tokens=20)
    found = llm.generate(PROMPTS, Params(temperature=0.0, max_tokens=20))
    assert [completion.outputs[0].token_ids for completion in found] == wanted
    for completion, tokens in zip(found, wanted, strict=True):
        ended = tokens[-1] in llm.info.eos_ids
        assert completion.outputs[0].finish_reason == ("stop" if ended else "length")
        assert completion.outputs[0].text == llm.tokens.decode(tokens, True)


def test_siblings_stop_strings_and_logprobs(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], Params(temperature=0.8, seed=3, n=3, max_tokens=24, ignore_eos=True, logprobs=2))[
        0
    ]
    texts = [answer.text for answer in whole.outputs]
    assert len(set(texts)) == 3
    assert all(len(answer.logprobs) == 24 and len(answer.logprobs[0].top) == 2 for answer in whole.outputs)
    stop = texts[0][len(texts[0]) // 2 :][:3]
    cut = llm.generate(PROMPTS[0], Params(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, stop=stop))[0]
    assert cut.outputs[0].text == texts[0][: texts[0].index(stop)] and cut.outputs[0].finish_reason == "stop"
    assert len(cut.outputs[0].token_ids) < 24


def test_chat_and_the_prefix_cache(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a dog and a tree. " * 4}]
    first, second = (llm.chat(messages, Params(temperature=0.0, max_tokens=8)) for _ in range(2))
    assert first.outputs[0].text == second.outputs[0].text and first.outputs[0].text
    assert second.cached_tokens >= 16 and second.cached_tokens % 16 == 0


def test_what_is_wrong_is_said(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"context_length_exceeded: .* 512 tokens"):
        llm.generate([[5] * 500], Params(max_tokens=100))
    with pytest.raises(ValueError, match="invalid_prompt: prompt: token id 99999"):
        llm.generate([[5, 99999], [6]], Params(max_tokens=2))
    with pytest.raises(ValueError, match="params: 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [Params()])
    assert llm.generate("a", Params(max_tokens=1))[0].outputs[0].token_ids
    with pytest.raises(OverflowError):
        llm.generate([[5, 6], [2**31]], Params(max_tokens=300))
    assert not llm.engine._inbox, "nothing of a call that failed is computed beside the next one"
    with pytest.raises(FastlayersError):
        LLM("no/such/folder/at/all")
    with pytest.raises(RuntimeError, match="max_model_len is 4096, which needs"):
        LLM("tiny", EngineConfig(device="cpu", num_pages=3))


@pytest.mark.parametrize("ask", [
    lambda llm: llm.generate(5), lambda llm: llm.generate(None), lambda llm: llm.generate([5, 6]),
    lambda llm: llm.generate([["a"]]), lambda llm: llm.generate("a", {"max_tokens": 2}),
    lambda llm: next(llm.stream(5)), lambda llm: llm.chat("hi"), lambda llm: llm.chat(["hi"]),
    lambda llm: llm.chat([[{"role": "user", "content": "hi"}]]), lambda llm: llm.chat([{"role": "x", "content": "hi"}]),
    lambda llm: Params(n=0), lambda llm: Params(n="2"), lambda llm: Params(seed="a"), lambda llm: Params(stop=5),
    lambda llm: Params(stop=[""]), lambda llm: Params(stop=""),
])  # fmt: skip
def test_an_argument_of_no_use_is_refused_with_what_is_accepted(llm: LLM, ask: Callable[[LLM], object]) -> None:
    with pytest.raises(ValueError, match=r" is .*; accepted: "):
        ask(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0"), ("max_tokens", None), ("max_tokens", 2.5), ("top_k", 1.5), ("seed", "7"),
        ("stop_token_ids", "ab"), ("stop_token_ids", 3), ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}), ("logit_bias", [5]), ("ignore_eos", "no"), ("temperature", 1j),
        ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 65),
    ],
)  # fmt: skip
def test_a_parameter_that_is_wrong_is_named_before_the_engine_sees_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Params: {name} is .*; accepted: "):
        Params(**{name: value})


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint16])
def test_numbers_of_numpy_are_pythons(llm: LLM, integer: Any) -> None:
    """Also siblings, whose seeds are derived of the request's; nothing of NumPy goes to the engine."""
    ids = llm.tokens.encode(PROMPTS[0])
    plain = Params(
        temperature=0.5, top_p=0.75, top_k=20, seed=7, n=2, max_tokens=6, min_tokens=1, stop_token_ids=(9, 11),
        logit_bias={12: -2.0}, ignore_eos=True, logprobs=1,
    )  # fmt: skip
    way = Params(
        temperature=np.float32(0.5), top_p=np.float64(0.75), top_k=integer(20), seed=integer(7), n=integer(2),
        max_tokens=integer(6), min_tokens=integer(1), stop_token_ids=np.array([9, 11], integer),
        logit_bias={integer(12): np.float16(-2.0)}, ignore_eos=True, logprobs=integer(1),
    )  # type: ignore[arg-type]  # fmt: skip
    kinds = {name: type(value) for name, value in vars(way).items()}
    assert way == plain and kinds == {name: type(value) for name, value in vars(plain).items()}
    assert {type(token) for token in (*way.stop_token_ids, *way.logit_bias)} == {int}
    assert {type(bias) for bias in way.logit_bias.values()} == {float}
    found, wanted = llm.generate([np.array(ids, integer)], way)[0], llm.generate([ids], plain)[0]
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in wanted.outputs]
    assert {type(token) for token in (*found.prompt_token_ids, *found.outputs[0].token_ids)} == {int}
    assert replace(way, n=1) == replace(plain, n=1)


def test_a_bool_is_the_number_that_it_is() -> None:
    assert type(Params(seed=True).seed) is int and Params(ignore_eos=1).ignore_eos is True  # type: ignore[arg-type]


def test_a_conversation_that_the_template_refuses_is_an_argument_of_no_use(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"LLM\.chat: the chat template refuses the messages"):
        llm.chat([{"role": "user"}])


def test_more_prompts_than_a_server_would_let_wait_are_all_answered() -> None:
    llm = LLM("tiny", EngineConfig(device="cpu", max_running_requests=4, max_queued_requests=2, max_queued_tokens=40))
    found = llm.generate(["Once upon a time"] * 12, Params(max_tokens=1, temperature=0.0))
    assert len({completion.outputs[0].text for completion in found}) == 1 and found[-1].outputs[0].token_ids
    llm.close()


def test_a_stream_grows_and_may_be_left(llm: LLM) -> None:
    way = Params(temperature=0.0, max_tokens=20, ignore_eos=True)
    whole = llm.generate(PROMPTS[0], way)[0].outputs[0]
    seen = [(len(answer.token_ids), answer.text) for answer in llm.stream(PROMPTS[0], way)]
    assert [count for count, _ in seen] == list(range(1, 21)) and seen[-1][1] == whole.text
    assert all(whole.text.startswith(text) for _, text in seen)
    for answer in llm.stream(PROMPTS[0], replace(way, max_tokens=400)):
        if len(answer.token_ids) == 3:
            break
    cache = llm.engine.scheduler.cache
    again = llm.generate(PROMPTS, way)  # what was left behind runs no more, and disturbs nobody
    assert again[0].outputs[0].token_ids == whole.token_ids and llm.engine.scheduler.idle
    assert cache.private == cache.locked == 0


def test_a_model_that_is_loaded_already(llm: LLM) -> None:
    model = AutoModel.from_pretrained(TINY, dtype=torch.float32, device="cpu", page_size=16)
    config = EngineConfig(max_running_requests=2, max_model_len=256, page_size=16, no_freeze_gc=True)
    mine = LLM("tiny", config, loaded=model)
    way = Params(temperature=0.0, max_tokens=6)
    found, wanted = mine.generate(PROMPTS, way), llm.generate(PROMPTS, way)
    assert [c.outputs[0].text for c in found] == [c.outputs[0].text for c in wanted]
    assert mine.engine.executor.model is model  # type: ignore[attr-defined]


def test_what_the_guide_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    names: dict[str, Any] = {}
    exec(guide.split("### From Python")[1].split("```python\n")[1].split("```")[0], names)
    assert gc.get_freeze_count() > 10_000, "the collector walks through the model"
    names["llm"].close()
    with pytest.raises(RuntimeError, match="it is closed"):
        names["llm"].generate("Once")
    assert gc.get_freeze_count() < 10_000, "what is left of it would never be collected"
    assert len(capsys.readouterr().out.splitlines()) > 2  # both answers, and a third as it grows


def test_who_leaves_a_stream_open_is_told_so(llm: LLM) -> None:
    """Instead of waiting for itself; other threads wait for the stream."""
    way, found = Params(temperature=0.0, max_tokens=20, ignore_eos=True), []  # type: ignore[var-annotated]
    stream = llm.stream(PROMPTS[0], way)
    next(stream)
    with pytest.raises(RuntimeError, match="a stream of this thread is still open; accepted: to read it to its end"):
        llm.generate("a", Params(max_tokens=1))
    with pytest.raises(RuntimeError, match="still open"):
        next(llm.stream("a"))
    other = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[0], way)))
    other.start()
    assert len(list(stream)) == 19
    other.join(60)
    assert len(found[0].outputs[0].token_ids) == 20
    assert llm.generate("a", Params(max_tokens=1))[0].outputs[0].token_ids
