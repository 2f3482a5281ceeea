"""``POST /v1/completions``: prompts as they are, in text or ids."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastlayers_server.engine.protocol import TokenLogprobs
from fastlayers_server.front.answers import Writer, answer
from fastlayers_server.front.generation import Front, Wanted, launch
from fastlayers_server.front.grammars import constraint_of
from fastlayers_server.front.rows import Job, Row
from fastlayers_server.front.schemas import CompletionRequest
from fastlayers_server.front.tokens import TokenText


async def completions(request: Request, front: Front, body: CompletionRequest) -> Response:
    """Serve the route."""
    info = front.link.check_ready()
    special = body.add_special_tokens is not False
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    prompts = [await front.encode(p, special, info) if isinstance(p, str) else p for p in given]
    logprobs = -1 if body.logprobs is None else body.logprobs
    asked = body.prompt_logprobs if body.prompt_logprobs is not None else logprobs if body.echo else -1
    grammar = await constraint_of(body, front)
    wanted = Wanted("cmpl-", body.max_tokens, logprobs, asked, grammar)
    job = launch(front, body, prompts, wanted, request)
    return await answer(request, front, job, bool(body.stream), _Writer(front, body))


class _Writer(Writer):
    kind = "text_completion"

    def __init__(self, front: Front, body: CompletionRequest) -> None:
        super().__init__(front, body)
        self._tokens, self._offsets = front.tokens, defaultdict[int, _Offsets](_Offsets)
        self._begun: set[int] = set()

    def whole(self, job: Job) -> dict[str, Any]:
        return self._document(job, [self._choice(row) for row in job.rows], True)

    def _news(self, job: Job, row: Row) -> Iterator[bytes]:
        yield self._chunk(job, self._choice(row))

    def _choice(self, row: Row) -> dict[str, Any]:
        first = row.index not in self._begun
        self._begun.add(row.index)
        deltas, logprobs, ids = row.take()
        text = "".join(delta.text for delta in deltas)
        prompt = row.prompt
        echoes = first and bool(self._body.echo)
        echoed = self._tokens.decode(prompt, self._body.skip_special_tokens is not False) if echoes else ""
        told: dict[str, Any] | None = None
        if self._body.logprobs is not None:
            told = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            entries = [(prompt[0], None), *zip(prompt[1:], row.prompt_logprobs, strict=False)] if echoes else []
            hidden = self._tokens.special if self._body.skip_special_tokens is not False else set()
            _append(told, [*entries, *logprobs], self._tokens, self._offsets[row.index], hidden)
        choice = {"index": row.index, "text": echoed + text, "logprobs": told, "finish_reason": row.finish or None}
        if self._body.prompt_logprobs is not None and first:
            choice["prompt_logprobs"] = [None, *(_by_id(e, t, self._tokens) for t, e in zip(prompt[1:], row.prompt_logprobs, strict=False))]  # fmt: skip  # noqa: E501
        if self._body.return_token_ids:
            choice |= {"token_ids": ids} | ({"prompt_token_ids": prompt} if first else {})
        return choice


def spelled(tokens: TokenText, token: int) -> str:
    """Return a token as text; bytes that are no character of their own become U+FFFD."""
    return tokens.token_bytes(token).decode(errors="replace")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON has a number for."""
    return max(logprob, -9999.0)


class _Offsets:
    """Where each token begins in a text, of which a character may be several tokens."""

    def __init__(self) -> None:
        self._decoder, self._end = getincrementaldecoder("utf-8")("replace"), 0

    def next(self, raw: bytes) -> int:
        """Return where the token of these bytes begins."""
        begin = self._end
        self._end += len(self._decoder.decode(raw))
        return begin


def _append(told: dict[str, Any], entries: Any, tokens: TokenText, offsets: _Offsets, hidden: Set[int]) -> None:
    for token, entry in entries:
        text = spelled(tokens, token)
        told["tokens"].append(text)
        # A special token that the text leaves out takes no place in it.
        told["text_offset"].append(offsets.next(b"" if token in hidden else tokens.token_bytes(token)))
        pairs = [] if entry is None else [*reversed(entry.top), (token, entry.chosen)]
        top = {spelled(tokens, i): finite(p) for i, p in pairs}
        told["token_logprobs"].append(top.get(text))
        told["top_logprobs"].append(top or None)


def _by_id(entry: TokenLogprobs, token: int, tokens: TokenText) -> dict[str, Any]:
    pairs = {token: entry.chosen} | dict(entry.top)
    ranks = {i: rank for rank, (i, _) in enumerate(entry.top, 1)}
    return {
        str(i): {"logprob": finite(p), "rank": ranks.get(i), "decoded_token": spelled(tokens, i)}
        for i, p in pairs.items()
    }
