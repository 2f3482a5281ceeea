"""Routes of an operator: models, tokens, health, metrics, and what is asked of the engine."""

from __future__ import annotations

import asyncio
import platform
import time
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastlayers import __version__
from fastlayers_server.engine.protocol import Output, Sampling, Submit, pack_ids
from fastlayers_server.front.answers import attended
from fastlayers_server.front.chat import prompt_of
from fastlayers_server.front.errors import ApiError, bad, document
from fastlayers_server.front.generation import Front
from fastlayers_server.front.schemas import AbortRequest, DetokenizeRequest, TokenizeRequest
from fastlayers_server.stalls import freeze

GENERATE_SECONDS = 10.0


def model_card(front: Front, name: str) -> dict[str, Any]:
    """Return what /v1/models says of a name."""
    info = front.link.info
    return {
        "id": name, "object": "model", "created": front.started, "owned_by": "fastlayers",
        "root": front.config.model, "parent": None,
        "max_model_len": info.max_model_len if info else None,
    }  # fmt: skip


async def models(request: Request, front: Front) -> Response:
    """List what is served."""
    return document({"object": "list", "data": [model_card(front, n) for n in front.config.served_model_name]})


async def model(request: Request, front: Front) -> Response:
    """Describe one model."""
    name = request.path_params["name"]
    front.check_model(name)
    return document(model_card(front, name))


async def tokenize(request: Request, front: Front, body: TokenizeRequest) -> Response:
    """Return the ids of a prompt, or of messages through the template."""
    info = front.link.check_ready()
    if body.prompt is not None:
        ids = await front.encode(body.prompt, body.add_special_tokens is not False, info)
    else:
        ids = await prompt_of(front, body, info)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
    found["token_strs"] = [front.tokens.fast.id_to_token(i) for i in ids] if body.return_token_strs else None
    return document(found)


async def detokenize(request: Request, front: Front, body: DetokenizeRequest) -> Response:
    """Return the text of ids."""
    info = front.link.check_ready()
    wrong = [i for i in body.tokens if i >= info.vocab_size]
    if wrong:
        raise bad("tokens", f"{wrong[0]} is no token id; accepted: 0 to {info.vocab_size - 1}")
    return document({"prompt": await asyncio.to_thread(front.tokens.decode, body.tokens)})


async def health(request: Request, front: Front) -> Response:
    """Say whether the process and its engine live; it generates nothing."""
    reason = front.link.unhealthy()
    return document({"status": "unhealthy" if reason else "ok", "reason": reason}, status=503 if reason else 200)


async def ready(request: Request, front: Front) -> Response:
    """Say whether requests are taken, or which phase lasts."""
    phase = "draining" if front.link.leaving else front.link.phase
    headers = {} if phase == "serving" else {"retry-after": "1"}
    return document({"phase": phase}, headers, 200 if phase == "serving" else 503)


async def health_generate(request: Request, front: Front) -> Response:
    """Draw one token through the engine; 504 after 10 s."""
    front.link.check_ready()
    told: asyncio.Queue[Output] = asyncio.Queue()
    rid, greedy = front.link.next_rid(), Sampling(temperature=0.0)
    submit = Submit(rid, pack_ids([0]), greedy, 1, ignore_eos=True, arrival=time.monotonic())
    front.link.submit(submit, told.put_nowait)
    try:
        output = await attended(request, asyncio.wait_for(told.get(), GENERATE_SECONDS))
    except TimeoutError as error:
        raise ApiError(504, f"no token within {GENERATE_SECONDS:g} s", "engine_timeout") from error
    finally:
        front.link.abort([rid])
    if output is not None and output.finish == "error":
        raise ApiError(503, output.message or output.code, "not_ready")
    return document({"status": "ok"})


async def metrics(request: Request, front: Front) -> Response:
    """Show Prometheus what there is; the engine is asked for its newest figures, but not waited for long."""
    with suppress(ApiError):
        await front.link.control("stats", timeout=0.5)
    return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request, front: Front) -> Response:
    """Tell versions."""
    return document({"version": __version__, "python": platform.python_version()})


async def server_info(request: Request, front: Front) -> Response:
    """Tell the configuration, keys excepted, and what the engine is."""
    info = front.link.info
    engine = {name: getattr(info, name) for name in info.__struct_fields__} if info else None
    facts = {
        "version": __version__, "config": front.config.shown(), "engine": engine,
        "phase": front.link.phase, "system_fingerprint": front.fingerprint,
        "formats": {"reasoning": front.formats.reasoning, "tools": front.formats.tools},
    }  # fmt: skip
    return document(facts)


async def explain(request: Request, front: Front) -> Response:
    """Tell why: the last ticks, buckets and step times; or what was chosen for every layer, and why not the others."""
    value = await front.link.control(request.url.path[1:])
    if isinstance(value, dict):
        value["front"] = {"stalls": list(front.metrics.stalls.last)}
    return document(value)


async def freeze_gc(request: Request, front: Front) -> Response:
    """Keep what lives now out of the collector's work: in the engine, then here."""
    engine = await front.link.control("freeze_gc")
    return document({"engine": engine, "front": freeze()})


async def control(request: Request, front: Front) -> Response:
    """Pass a control of the route's name on; from "drain" to "resume" no new requests are taken, what runs goes on."""
    what, link = request.url.path[1:], front.link
    if what == "resume" and link.leaving:
        raise ApiError(409, "a signal ends this server; requests that it took now would not be finished", "draining")
    link.draining |= what == "drain"
    value = await front.link.control(what, timeout=60.0)
    link.draining &= what != "resume"
    return document({"done": what, "value": value, "live": link.live})


async def abort(request: Request, front: Front, body: AbortRequest) -> Response:
    """End responses by their exact ids; nothing ends if one is unknown."""
    jobs = {job.id: job for job in front.jobs.values()} | front.jobs
    unknown = [name for name in body.ids if name not in jobs]
    if unknown:
        raise ApiError(404, f"no request {unknown[0]!r} is live", "not_found", "ids")
    for name in body.ids:
        jobs[name].close("operator")
    return document({"aborted": body.ids})
