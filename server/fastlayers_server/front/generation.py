"""From a checked body to requests of the engine: defaults, limits, seeds, namespaces."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict
from starlette.requests import Request

from fastlayers_server.engine.protocol import EngineInfo, Sampling, Submit, pack_ids
from fastlayers_server.front.errors import ApiError, bad
from fastlayers_server.front.link import Link
from fastlayers_server.front.metrics import Metrics
from fastlayers_server.front.rows import Job, Parser, Row
from fastlayers_server.front.schemas import Common
from fastlayers_server.front.tokens import Detokenizer, StopStrings, TokenText

if TYPE_CHECKING:
    from fastlayers_server.engine.grammar import GrammarWorker
    from fastlayers_server.front.parsers import Formats
    from fastlayers_server.serve_config import ServeConfig

log = logging.getLogger("fastlayers.front")

# Shorter texts are encoded where they are: a thread costs more.
INLINE_CHARACTERS = 2000
# What a request may say of how its tokens are drawn, and what counts if neither it nor the model does.
NEUTRAL = {name: value for name, value in asdict(Sampling()).items() if name not in ("seed", "logit_bias")}


@dataclass
class Front:
    """What every handler needs."""

    config: ServeConfig
    link: Link
    tokens: TokenText
    metrics: Metrics
    formats: Formats
    fingerprint: str
    grammars: GrammarWorker | None = None
    compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    jobs: dict[str, Job] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    started: int = field(default_factory=lambda: int(time.time()))

    def ignore(self, name: str) -> None:
        """Be told of an unknown field that is let through."""
        self.metrics.ignored(name)
        if len(self.ignored) < 256 and name not in self.ignored:
            self.ignored.add(name)
            log.warning("unknown field %r is ignored (--lenient-fields)", name[:64])

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a name that is not served."""
        if name is not None and name not in self.config.served_model_name:
            served = ", ".join(map(repr, self.config.served_model_name))
            raise ApiError(404, f"model {name[:200]!r} is not served; served: {served}", "model_not_found", "model")

    async def encode(self, text: str, add_special_tokens: bool, info: EngineInfo) -> list[int]:
        """Return a prompt's ids; a text that cannot fit is refused before it is encoded."""
        if len(text) > self.tokens.longest_token * info.max_model_len:
            raise too_long("prompt", f"a prompt of {len(text)} characters", info)
        if len(text) <= INLINE_CHARACTERS:
            return self.tokens.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokens.encode, text, add_special_tokens)


def too_long(param: str, what: str, info: EngineInfo) -> ApiError:
    """Return the error of a request that the context does not hold."""
    message = f"{what} does not fit the context of {info.max_model_len} tokens"
    return ApiError(400, message, "context_length_exceeded", param)


def sampling_of(body: Common, front: Front, info: EngineInfo, seed: int) -> Sampling:
    """Return how tokens are drawn: what the request says, else the model's own defaults."""
    defaults = front.tokens.defaults if front.config.generation_config == "auto" else {}
    if defaults.get("do_sample") is False:
        defaults = {"temperature": 0.0}

    found: dict[str, Any] = {}
    for name, otherwise in NEUTRAL.items():
        given = getattr(body, name)
        value = defaults.get(name) if given is None else given
        found[name] = otherwise if value is None else type(otherwise)(value)
        if name.endswith("_penalty") and found[name] != otherwise and "penalties" not in info.features:
            raise bad(name, "this engine has no penalties", "unsupported_parameter")
    bias = []
    for key, amount in (body.logit_bias or {}).items():
        # Python refuses to read numbers of thousands of digits.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < info.vocab_size):
            raise bad("logit_bias", f"{key[:40]!r} is no token id; accepted: 0 to {info.vocab_size - 1}")
        bias.append((int(key), float(amount)))
    if bias and "logit_bias" not in info.features:
        raise bad("logit_bias", "this engine has no logit bias", "unsupported_parameter")
    return Sampling(**found, seed=seed, logit_bias=tuple(bias))


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed of a sibling: the request's own for the first, digests of it for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


@dataclass
class Wanted:
    """What a route decides beside the body's common fields."""

    kind: str  # with which the response's id begins
    max_tokens: int | None
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""
    parser: Callable[[Sequence[int]], Parser] | None = None  # of markers, which may be special tokens
    names: Mapping[str, str] = field(default_factory=dict)  # of fields, where the client's are others

    def name(self, field: str) -> str:
        """Return what the client calls a field of a completion."""
        return self.names.get(field, field)


def launch(front: Front, body: Common, prompts: list[list[int]], wanted: Wanted, request: Request) -> Job:
    """Submit all choices of all prompts and return their job.

    Raises
    ------
    ApiError
        Nothing was submitted.
    """
    info = front.link.check_ready()
    choices = body.n or 1
    if choices > front.config.max_n:
        raise bad("n", f"given {choices}; accepted: 1 to {front.config.max_n}")
    # All of them come at once, to one attention group; of more, another try would be refused as well.
    most = min(64, (info.max_queued_requests + info.max_running) // front.config.attn_dp_size)
    if choices * len(prompts) > most:
        why = "" if most == 64 else " (--max-queued-requests and --max-running-requests)"
        raise bad("n", f"{len(prompts)} prompts of {choices} choices; accepted: {most} in all{why}")
    if body.priority and not front.config.enable_priority:
        raise bad("priority", "the server was started without --enable-priority", "unsupported_parameter")
    for name, count in (("logprobs", wanted.logprobs), ("prompt_logprobs", wanted.prompt_logprobs)):
        most = min(front.config.max_logprobs, info.max_logprobs)
        if count > most:
            raise bad(wanted.name(name), f"given {count}; accepted: 0 to {most}")
        if count >= 0 and name not in info.features:
            raise bad(name, f"this engine has no {name}", "unsupported_parameter")
    if wanted.grammar and (body.ignore_eos or body.min_tokens):
        raise bad("ignore_eos" if body.ignore_eos else "min_tokens", "a constrained answer ends where its grammar does")
    limits = [_limit(prompt, wanted, body, info) for prompt in prompts]
    if body.request_id and body.request_id in front.jobs:
        raise ApiError(409, f"request_id {body.request_id!r} is in use", "duplicate_request_id", "request_id")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sampling = [sampling_of(body, front, info, sibling_seed(seed, i)) for i in range(choices)]
    arrival, namespace = request.state.arrival, namespace_of(request.state.key, body.cache_salt)
    job_id = f"{wanted.kind}{body.request_id or secrets.token_hex(12)}"
    key = body.request_id or job_id
    job = Job(job_id, front.link, front.metrics, arrival, int(time.time()), prompts, seed=seed, key=key)
    skip = body.skip_special_tokens is not False
    end_ids = frozenset(info.eos_ids) | frozenset(body.stop_token_ids or ())
    hidden = frozenset(front.tokens.special) if skip else frozenset()
    timeout = front.config.request_timeout  # from now on: to compile a grammar has a limit of its own
    deadline = time.monotonic() + timeout if timeout else 0.0
    for prompt, limit in zip(prompts, limits, strict=True):
        first = 0
        for index in range(choices):
            rid = front.link.next_rid()
            detokenizer = Detokenizer(front.tokens, prompt, skip and wanted.parser is None)
            parser = Parser() if wanted.parser is None else wanted.parser(prompt)
            stops = StopStrings(body.stop or (), bool(body.include_stop_str_in_output), body.min_tokens or 0)
            row = Row(job, rid, prompt, detokenizer, parser, stops, end_ids, hidden)
            submit = Submit(
                rid, pack_ids(prompt), sampling[index], limit, body.min_tokens or 0, tuple(body.stop_token_ids or ()),
                bool(body.ignore_eos), body.priority or 0, arrival, deadline,
                namespace, wanted.logprobs, wanted.prompt_logprobs, wanted.grammar, first,
            )  # fmt: skip
            first = first or rid
            front.link.submit(submit, row.feed)
    front.jobs[job.key] = job
    if front.config.log_prompts:
        texts = [front.tokens.decode(prompt) for prompt in prompts]
        log.info("asked", extra={"facts": {"response": job_id, "prompts": texts}})
    return job


def namespace_of(key: bytes, salt: str | None) -> bytes:
    """Return who may share cached prefixes: those of one key, and of one salt."""
    if not key and salt is None:
        return b""
    return hashlib.blake2b((salt or "").encode(), key=key[:64], digest_size=16).digest()


def _limit(prompt: list[int], wanted: Wanted, body: Common, info: EngineInfo) -> int:
    """Return a prompt's max_new_tokens, after checking the prompt."""
    param = wanted.name("prompt")
    if not prompt:
        raise ApiError(400, "the prompt is empty", "invalid_prompt", param)
    if max(prompt) >= info.vocab_size:
        raise ApiError(400, f"token id {max(prompt)}; accepted: 0 to {info.vocab_size - 1}", "invalid_prompt", param)
    room = info.max_model_len - len(prompt)
    if room < 1:
        raise too_long(param, f"a prompt of {len(prompt)} tokens and an answer", info)
    if wanted.max_tokens is not None and wanted.max_tokens > room:
        asked = f"{wanted.name('max_tokens')} = {wanted.max_tokens}"
        raise too_long(param, f"a prompt of {len(prompt)} tokens and {asked}", info)
    limit = wanted.max_tokens or room
    if (body.min_tokens or 0) > limit:
        raise bad("min_tokens", f"given {body.min_tokens}, more than the {limit} that the answer may have")
    wrong = [i for i in body.stop_token_ids or () if i >= info.vocab_size]
    if wrong:
        raise bad("stop_token_ids", f"{wrong[0]} is no token id; accepted: 0 to {info.vocab_size - 1}")
    return limit
