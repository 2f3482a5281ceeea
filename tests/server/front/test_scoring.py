"""Scores over HTTP, as evaluation harnesses take them, are those of ``fastlayers eval``."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from fastlayers_server.engine.client import engine_client
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.evaluate import MAX_ANSWER, evaluate
from fastlayers_server.hugging_face import chat_ids, tokenizer_of
from fastlayers_server.tasks import held_out_problems, stories
from fastlayers_server.variants import VARIANTS

from .harness import EOS, TINY, Server, serving

PROBLEMS, STORIES = 40, 6


async def ask(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with server.client() as client:
        answers = await asyncio.gather(*(client.post(path, json={"model": "tiny", **body}) for body in bodies))
    assert all(answer.status_code == 200 for answer in answers), answers
    return [answer.json()["choices"][0] for answer in answers]


def likeliest(told: dict[str, Any], begin: int) -> bool:
    """lm-eval's rule: each token behind the prompt, but the one that was drawn, is the first of the likeliest."""
    pairs = zip(told["tokens"][begin:-1], told["top_logprobs"][begin:-1], strict=True)
    return all(token == max(top, key=top.get) for token, top in pairs)


def test_accuracy_and_likelihoods_over_http_are_those_of_eval() -> None:
    variant = VARIANTS["fastlayers-fp32"]
    (score,) = evaluate(
        TINY, [variant], torch.device("cpu"), limit=PROBLEMS, num_stories=STORIES, num_hard=0, measure_divergence=False
    )
    assert 0.2 < score.exact_match <= 1.0  # a checkpoint that can count
    config = EngineConfig(model=str(TINY), device="cpu", max_model_len=1024, max_running_requests=16)
    with serving(engine=engine_client(config, in_process=True), wait=False) as server:
        server.do(asyncio.wait_for(server.front.link.started.wait(), 300), 310)
        problems = held_out_problems()[:PROBLEMS]
        bodies = [
            {"messages": [{"role": "user", "content": p.prompt}], "temperature": 0, "max_tokens": MAX_ANSWER}
            for p in problems
        ]
        chats = server.do(ask(server, "/v1/chat/completions", bodies), 300)
        said = [(c["message"]["content"] or "").strip() for c in chats]
        right = sum(text == p.answer for text, p in zip(said, problems, strict=True))
        assert right / PROBLEMS == score.exact_match
        # A harness that scores an answer behind its prompt: it is what greedy decoding says if each token is likeliest.
        tokenizer = tokenizer_of(TINY)
        asked = [chat_ids(tokenizer, p.prompt) for p in problems]
        wanted = [tokenizer(p.answer, add_special_tokens=False)["input_ids"] + [EOS] for p in problems]
        scored = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        bodies = [{"prompt": ids + answer, **scored} for ids, answer in zip(asked, wanted, strict=True)]
        choices = server.do(ask(server, "/v1/completions", bodies), 300)
        greedy = [likeliest(c["logprobs"], len(ids)) for c, ids in zip(choices, asked, strict=True)]
        assert sum(greedy) / PROBLEMS == score.exact_match
        assert greedy == [text == p.answer for text, p in zip(said, problems, strict=True)]
        # The way of a harness that asks how likely a text is: echoed, with the log-probabilities of its tokens.
        texts: list[list[int]] = [tokenizer(text)["input_ids"] for text in stories("held_out", STORIES)]
        echoed = {"max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
        choices = server.do(ask(server, "/v1/completions", [{"prompt": ids, **echoed} for ids in texts]), 120)
        told = [c["logprobs"]["token_logprobs"][: len(ids)] for c, ids in zip(choices, texts, strict=True)]
        assert all(each[0] is None and None not in each[1:] for each in told)
        total, count = -sum(sum(each[1:]) for each in told), sum(len(each) - 1 for each in told)
        assert math.exp(total / count) == pytest.approx(score.perplexity, rel=1e-5)
