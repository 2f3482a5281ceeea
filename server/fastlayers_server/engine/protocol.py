"""What a front and an engine say to each other.

    front ── Submit, Abort, Grammar, Control ──► engine
    front ◄── StepOut, Stats, Reply, Beat, Died ─────── engine

Every Submit is answered by outputs of its rid, of which exactly one is terminal (``finish`` is not empty), and by
nothing after it; or by the Died of its engine, with which all end that live. All messages are frozen msgspec structs;
between processes they travel as msgpack over a zmq socket. Nothing here imports torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

# How a request ends. "stop": an end token, a stop id, or a stop string that the front found.
FINISHES = ("stop", "length", "abort", "error")
# Why a request ended with "error", and the HTTP status that a front makes of it.
ERROR_CODES: Mapping[str, int] = {
    "invalid_prompt": 400,  # empty, ids outside the vocabulary, parameters outside their ranges
    "context_length_exceeded": 400,
    "invalid_grammar": 400,
    "request_timeout": 408,  # its deadline passed while it waited
    "duplicate_request_id": 409,
    "queue_full": 429,
    "nonfinite_logits": 500,
    "internal_error": 500,
    "draining": 503,  # the server is about to end, or the engine is gone for good
    "engine_restarting": 503,  # it died, and comes back
    "grammar_lost": 503,  # the engine has not the one that was compiled, and is brought it with the next request
}
CONTROLS = (
    "stats", "explain", "backends", "flush_cache", "freeze_gc", "start_profile", "stop_profile", "drain", "resume"
)  # fmt: skip
# Phases of a start, in their order, as Beat and an engine's client tell them; the last two are those of a running one.
PHASES = ("starting", "weights", "warmup", "capture", "serving", "draining", "dead")
# Counters of Stats: name -> what its keys are ("" where the only key is "").
COUNTERS: Mapping[str, str] = {
    "requests_total": "finish",
    "rejections_total": "code",
    "prompt_tokens_total": "source",  # computed, cached, recomputed
    "generation_tokens_total": "",
    "wasted_tokens_total": "reason",  # overlap, abort, stop_string, speculation, error, replay
    "prefix_queries_total": "",  # tokens looked up
    "prefix_hits_total": "",  # tokens found
    "evicted_pages_total": "",
    "preemptions_total": "",
    "nonfinite_rows_total": "",
    "graph_replays_total": "key",
    "eager_steps_total": "why",
    "jit_compiles_total": "kernel",  # since the engine is ready: none is meant to be
    "stalls_total": "where",  # what took a tenth of a second more than it may: host, device, collector, messages
    "spec_drafts_total": "",
    "spec_draft_tokens_total": "",
    "spec_accepted_tokens_total": "position",
}
# Histograms of Stats: name -> upper bounds of its buckets, in seconds; the last bucket of the counts is +Inf.
SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
HISTOGRAMS = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds", "tick_seconds"), SECONDS)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a request's tokens are drawn; the ranges are those of the API, and the engine checks them again.

    Parameters
    ----------
    temperature, top_p, min_p : float
        Temperature 0 is greedy; 1.0 and 0.0 switch the filters off.
    top_k : int
        0 or -1: off.
    seed : int
        Signed 64 bits. The front draws one where the client gave none, and derives those of siblings.
    frequency_penalty, presence_penalty, repetition_penalty : float
        Over the request's output (repetition: over its prompt too); 0, 0 and 1 are off.
    logit_bias : sequence of (token id, float)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request.

    Parameters
    ----------
    rid : int
        Signed 64 bits, made by the front, positive, unique among live requests; the front's index is in the high bits.
    prompt : bytes
        Token ids as :func:`pack_ids` makes them; at least one.
    sampling : Sampling
    max_new_tokens : int
        At least 1; prompt and output together fit the engine's ``max_model_len``.
    min_new_tokens : int
        End tokens and stop ids are not drawn before so many tokens.
    stop_ids : sequence of int
        Token ids that end the request, beside the model's end tokens.
    ignore_eos : bool
        The model's end tokens do not end it; ``stop_ids`` still do.
    priority : int
        Smaller is served first. Always 0 unless the operator enabled priorities.
    arrival, deadline : float
        ``time.monotonic()`` seconds, which processes of one machine share. The deadline bounds waiting only; 0: none.
    namespace : bytes
        Who may share cached prefixes with whom: equal bytes do. At most 32.
    logprobs : int
        -1: none; k >= 0: of the chosen token and of the k likeliest, of the model's unmodified distribution.
    prompt_logprobs : int
        Likewise, for prompt tokens 1 and on; such a request takes no prefix hit.
    grammar : str
        Key of a grammar that a :class:`Grammar` message brought, or "".
    group : int
        rid of sibling 0, for n > 1: wait until that one's prompt is cached. 0: none.
    """

    rid: int
    prompt: bytes
    sampling: Sampling = Sampling()
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    arrival: float = 0.0
    deadline: float = 0.0
    namespace: bytes = b""
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: str = ""
    group: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests now, exact rids; unknown and ended ones are ignored.

    Each live one ends with ``finish``: "stop" where the front found a stop string in its text.
    """

    rids: tuple[int, ...]
    finish: Literal["abort", "stop"] = "abort"


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A compiled grammar, as xgrammar serialises it; sent once a key, before the first Submit that names it."""

    key: str
    serialized: str


class Control(msgspec.Struct, frozen=True, tag="control"):
    """One of :data:`CONTROLS`; answered by a :class:`Reply` with the same id, "stats" by a :class:`Stats` before it."""

    id: int
    what: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Take nothing more, and end what runs and waits; of the client's own: a front drains before."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: its log-probability, and (id, log-probability) of the likeliest ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one request.

    Parameters
    ----------
    rid : int
    ids : sequence of int
        New tokens; the end token or stop id that ended the request is among them.
    finish : str
        "" or one of :data:`FINISHES`: nothing follows.
    code, message : str
        With "error": one of :data:`ERROR_CODES` and a sentence for the client.
    cached_tokens : int
        Prompt tokens found in the cache at the first admission; told once, with the first tokens, else -1.
    logprobs : sequence of TokenLogprobs
        One for each of ``ids``, if asked for.
    prompt_logprobs : sequence of TokenLogprobs
        For prompt tokens 1 and on, if asked for; told once, with the first tokens.
    retry_after : float
        With "queue_full": seconds after which another try is reasonable.
    """

    rid: int
    ids: tuple[int, ...] = ()
    finish: str = ""
    code: str = ""
    message: str = ""
    cached_tokens: int = -1
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    retry_after: float = 0.0


class StepOut(msgspec.Struct, frozen=True, tag="step"):
    """The news of one tick; ``at``: when they were sent, in ``time.monotonic()`` seconds, or 0.0."""

    outputs: tuple[Output, ...]
    at: float = 0.0


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Gauges now, counters and histograms since the engine's start; sent once a second and when asked for.

    Parameters
    ----------
    running, waiting : int
        Requests that have a slot, and those that wait for one.
    waiting_tokens : int
        Prompt tokens of the waiting ones.
    pages : mapping
        "free", "private", "locked", "evictable"; together all pages but the dump.
    counters : mapping
        Name of :data:`COUNTERS` to {key: total}.
    histograms : mapping
        Name of :data:`HISTOGRAMS` to (counts of its buckets, not cumulative; sum of the values).
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages: dict[str, int]
    counters: dict[str, dict[str, float]]
    histograms: dict[str, tuple[tuple[int, ...], float]]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a Control: whether it was done, and what there is to tell, as JSON values."""

    id: int
    ok: bool
    value: Any = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life, once a second, from the engine's I/O thread.

    ``tick_age`` is how long the tick in progress runs already (0.0: none does): a hung step beats, and ages.
    """

    epoch: int
    phase: str
    tick: int
    tick_age: float


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """What a front must know of the model it serves, told once, when the engine is ready."""

    epoch: int
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    max_running: int
    max_queued_requests: int
    max_logprobs: int
    features: tuple[str, ...]  # of "penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar", "speculation"
    model_type: str = ""
    device: str = ""
    startup_seconds: dict[str, float] = {}


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """Keys of grammars that the engine has no room for any more: who names one brings it again before."""

    keys: tuple[str, ...]


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine of this epoch is gone, and with it its live requests: this is the last that is said of them."""

    epoch: int
    reason: str
    restarting: bool


ToEngine = Submit | Abort | Grammar | Control | Shutdown
FromEngine = StepOut | Stats | Reply | Beat | EngineInfo | Forgotten | Died
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
encode = msgspec.msgpack.Encoder().encode


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes of this machine, which both sides share; ``OverflowError``: an id is none."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the ids of :func:`pack_ids`; raises ``ValueError`` if the bytes are no whole number of ids."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()
