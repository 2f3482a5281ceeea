"""One answer of ``fastlayers generate``, token by token: from an engine, or from a model split over processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastlayers.errors import ArgumentError
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.llm import LLM, Params

Drawn = Iterator[tuple[int, str | None]]  # tokens, and why the last one is the last


def on_engine(model: Any, path: Path, ids: list[int], params: Any, max_new_tokens: int) -> Drawn:
    """Yield the answer of an engine in this process."""
    longest, wanted = model.config.max_position_embeddings, len(ids) + max_new_tokens
    if wanted > longest:
        given = f"{len(ids)} tokens and {max_new_tokens} new ones"
        raise ArgumentError("generate", "the prompt", given, f"at most max_length {longest}")
    config = EngineConfig(
        max_model_len=max(2, wanted), max_running_requests=1, page_size=model.page_size, no_freeze_gc=True
    )  # fmt: skip
    llm = LLM(str(path), config, loaded=model, tokens=TokenText(path, invent=True))
    way = Params(params.temperature, params.top_p, params.top_k, seed=params.seed, max_tokens=max_new_tokens)
    told = 0
    for answer in llm.stream(ids, way):
        for token in answer.token_ids[told:]:
            yield token, answer.finish_reason or None
        told = len(answer.token_ids)


def on_ranks(model: Any, path: Path, ids: list[int], params: Any, max_new_tokens: int) -> Drawn:
    """Yield the answer of a model that is split over processes."""
    from fastlayers_models.generate import Generator

    longest = min(len(ids) + max_new_tokens, model.config.max_position_embeddings)
    generator = Generator(model, max_batch=1, max_length=longest)
    for token in generator.stream([ids], params, max_new_tokens=max_new_tokens):
        yield token.id, token.finished
    generator.close()
