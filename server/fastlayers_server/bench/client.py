"""One request to a server, timed: when each event came, what it said, what it cost.

TTFT = first event with choices (of a chat: the one with the role alone does not count); ITL = one sample a later event;
latency = until the last event. Output tokens are the server's own count, from ``usage``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Ask:
    """A prompt and how many tokens its answer should have."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


@dataclass
class Answer:
    """What came back, in seconds; ``error`` is empty if it was whole."""

    prompt_len: int = 0
    output_len: int = 0
    cached: int = 0
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer was whole."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0.0 if there is none."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """Where requests go, and what each says besides its prompt.

    Parameters
    ----------
    url : str
        Of the route.
    chat : bool
        Prompts become a user's message.
    """

    url: str
    model: str
    chat: bool
    fields: Mapping[str, Any]

    def body(self, ask: Ask) -> bytes:
        """Return the body of a request; the same bytes for every engine."""
        size = "max_completion_tokens" if self.chat else "max_tokens"
        said = {"messages": [{"role": "user", "content": ask.prompt}]} if self.chat else {"prompt": ask.prompt}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({"model": self.model, **said, size: ask.output_len, **streamed, **self.fields})


async def send(session: aiohttp.ClientSession, target: Target, ask: Ask, body: bytes) -> Answer:
    """Send a request and time its events; whatever goes wrong is in the answer's ``error``."""
    answer = Answer(prompt_len=ask.prompt_len)
    answer.start = last = time.perf_counter()
    counted = False
    try:
        async with session.post(target.url, data=body, headers=JSON) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:500]}"
                return answer
            async for line in response.content:
                # Lines are the library's; of the events' fields only data is used by this API.
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                now = time.perf_counter()
                event = msgspec.json.decode(line[5:])
                if "error" in event:
                    answer.error = str(event["error"])[:500]
                    return answer
                choices = event.get("choices") or []
                if choices and not _only_role(choices[0]):
                    answer.text += _text(choices[0])
                    if answer.ttft == 0.0:
                        answer.ttft = now - answer.start
                    else:
                        answer.itl.append(now - last)
                    last = now
                    answer.latency = now - answer.start
                if event.get("usage"):
                    counted = True
                    _count(answer, event["usage"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.error and (answer.ttft == 0.0 or not counted):
        answer.error = "no usage at the stream's end" if answer.ttft else "no event with choices"
    return answer


def _only_role(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    return delta is not None and "role" in delta and not any(v for k, v in delta.items() if k != "role")


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or ""


def _count(answer: Answer, usage: Mapping[str, Any]) -> None:
    answer.output_len = usage["completion_tokens"]
    answer.prompt_len = usage.get("prompt_tokens", answer.prompt_len)
    answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
