"""Many requests of all kinds, and nothing left behind: no page, no slot, no memory, no token that nobody counted.

    python benchmarks/soak.py                                          the tiny model, 300 requests, on a CPU
    python benchmarks/soak.py Qwen/Qwen3-8B --requests 10000 -- --load-format dummy --max-model-len 4096

Starts ``fastlayers serve`` (flags behind ``--`` are the server's) and sends ``--requests`` requests, ``--at-once`` at a
time: lengths log-normal, half of them streamed, 20 % dropped at a random moment, 5 % malformed, 10 % constrained by a
grammar where the model has a tokenizer; with ``--seconds`` those that are left then are not sent. One JSON line; the
exit code is 1 if something is left: pages or slots in use, another status than was to be expected, tokens that the
engine counted and the front did not, or from 1,000 requests on resident memory (and a GPU's, where nvidia-smi tells)
more than 64 MiB above what it was after the first tenth. ``--grammars``: a known model, which has no files here, gets
the tiny model's tokenizer, so that there are grammars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from fastlayers.tuning.provenance import provenance
from fastlayers_models.find import assets
from fastlayers_server.known_models import KNOWN

DROPPED, MALFORMED, CONSTRAINED = 0.20, 0.05, 0.10
LEFT = 64 << 20
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BROKEN: tuple[tuple[bytes, int], ...] = (
    (b'{"model": "MODEL", "prompt": "a", ', 400),
    (b"[1, 2]", 400),
    (b'{"model": "MODEL", "prompt": "a", "max_tokens": 0}', 400),
    (b'{"model": "MODEL", "prompt": "a", "temperature": 9}', 400),
    (b'{"model": "MODEL", "prompt": [-1]}', 400),
    (b'{"model": "MODEL", "prompt": [999999999]}', 400),
    (b'{"model": "MODEL", "prompt": "a", "n": 99}', 400),
    (b'{"model": "another", "prompt": "a"}', 404),
    (b'{"model": "MODEL", "prompt": "a", "no_such_field": 1}', 400),
    (b'{"model": "MODEL", "prompt": "a", "max_tokens": 100000000}', 400),
    (b'{"model": "MODEL", "prompt": "a", "response_format": {"type": "json_schema"}}', 400),
)


class Soak:
    """What is sent, and what came back.

    Parameters
    ----------
    url, model : str
        Of the server, and the model's name there.
    vocabulary, longest : int
        Of the model: ids of prompts, and the most tokens of a request.
    grammars : bool
        Whether the server takes grammars.
    seed : int
    """

    def __init__(self, url: str, model: str, vocabulary: int, longest: int, grammars: bool, seed: int = 0) -> None:
        self.url, self.model = url, model
        self.vocabulary, self.longest, self.grammars = vocabulary, longest, grammars
        self.random, self.seen, self.wrong = random.Random(seed), Counter[str](), []  # type: ignore[var-annotated]
        self.completed_tokens = 0

    def length(self, median: float, most: int) -> int:
        """Draw a length."""
        return max(1, min(most, int(self.random.lognormvariate(0.0, 0.8) * median)))

    def body(self) -> dict[str, Any]:
        """Draw a request that is in order."""
        draw = self.random
        room = self.longest // 2
        prompt = [draw.randrange(3, self.vocabulary) for _ in range(self.length(room / 8, room))]
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": self.length(room / 8, room),
            "temperature": draw.choice((0, 0.8, 1.0)),
            "seed": draw.randrange(2**31), "ignore_eos": draw.random() < 0.5,
        }  # fmt: skip
        if draw.random() < 0.1:
            body |= {"n": 2, "max_tokens": min(body["max_tokens"], 32)}
        if draw.random() < 0.1:
            body |= {"logprobs": 3}
        if self.grammars and draw.random() < CONSTRAINED:
            body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
            body |= {"ignore_eos": False, "max_tokens": 48}
            self.seen["constrained"] += 1
        return body

    async def one(self, session: aiohttp.ClientSession) -> None:
        """Send one request of some kind."""
        draw = self.random
        if draw.random() < MALFORMED:
            raw, status = draw.choice(BROKEN)
            raw = raw.replace(b"MODEL", self.model.encode())
            async with session.post(f"{self.url}/v1/completions", data=raw, headers=JSON) as response:
                await response.read()
                self._expect("malformed", response.status, status, raw)
            return
        body = self.body() | (
            {"stream": True, "stream_options": {"include_usage": True}} if draw.random() < 0.5 else {}
        )
        drops = draw.random() < DROPPED
        work = self._streamed if body.get("stream") else self._whole
        try:
            await asyncio.wait_for(work(session, body), draw.expovariate(4.0) if drops else 600.0)
        except TimeoutError:
            self.seen["dropped" if drops else "late"] += 1
            if not drops:
                self.wrong.append("a request took more than 600 s")

    def _expect(self, kind: str, found: int, wanted: int, said: bytes) -> None:
        self.seen[f"{kind} {found}"] += 1
        if found != wanted:
            self.wrong.append(f"{kind}: status {found} instead of {wanted}: {said[:300]!r}")

    async def _whole(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            raw = await response.read()
            self._expect("whole", response.status, 200, raw)
            if response.status == 200:
                self._count(body, json.loads(raw)["usage"])

    async def _streamed(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        usage = None
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                self._expect("streamed", response.status, 200, await response.read())
                return
            self.seen["streamed 200"] += 1
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.wrong.append(f"streamed: {event['error']}")
                    usage = event.get("usage") or usage
        if usage is None:
            self.wrong.append("a stream ended without usage")
        else:
            self._count(body, usage)

    def _count(self, body: dict[str, Any], usage: dict[str, Any]) -> None:
        self.completed_tokens += usage["completion_tokens"]
        most = body["max_tokens"] * body.get("n", 1)
        exact = body["ignore_eos"]
        if (
            usage["prompt_tokens"] != len(body["prompt"])
            or not (most if exact else 1) <= usage["completion_tokens"] <= most
        ):
            self.wrong.append(f"usage {usage} of {len(body['prompt'])} and {most} tokens")

    async def run(self, requests: int, at_once: int, end: float = math.inf) -> None:
        """Send so many, so many at a time; none after ``end``, of ``time.monotonic()``."""
        places = asyncio.Semaphore(at_once)

        async def placed(session: aiohttp.ClientSession) -> None:
            async with places:
                if time.monotonic() > end:
                    self.seen["not sent"] += 1
                    return
                try:
                    await self.one(session)
                except aiohttp.ClientError as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20) as session:
            await asyncio.gather(*(placed(session) for _ in range(requests)))

    async def left(self, seconds: float = 10.0) -> tuple[list[str], dict[str, float]]:
        """Return what is left on the server when it has had so long to come to rest, and its metrics."""
        async with aiohttp.ClientSession() as session:
            end = time.monotonic() + seconds
            while True:
                async with session.get(f"{self.url}/metrics") as response:
                    found = metrics_of(await response.text())
                found_left = leftovers(found, self.completed_tokens)
                if not found_left or time.monotonic() > end:
                    return found_left, found
                await asyncio.sleep(0.2)


JSON = {"content-type": "application/json"}


def metrics_of(text: str) -> dict[str, float]:
    """Return the samples of Prometheus' text by name and labels."""
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def leftovers(metrics: dict[str, float], completed_tokens: int) -> list[str]:
    """Return in words what a server at rest should not have."""

    def total(name: str) -> float:
        return sum(v for k, v in metrics.items() if re.match(rf"fastlayers_{name}(\{{|$)", k))

    found = [f"{total(n):g} {n}" for n in ("requests_running", "requests_waiting") if total(n)]
    found += [
        f"{value:g} pages {state}" for state in ("private", "locked")
        if (value := metrics.get(f'fastlayers_pages{{state="{state}"}}', 0.0))
    ]  # fmt: skip
    drawn, told = total("generation_tokens_total"), total("front_tokens_total")
    if drawn != told or told < completed_tokens:
        found.append(f"{drawn:g} tokens drawn, {told:g} told, {completed_tokens} of them in whole answers")
    return found


def memory_of(pids: list[int]) -> dict[str, int]:
    """Return the resident bytes of processes, and the bytes that they hold on a GPU, if nvidia-smi says."""
    found = {}
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[f"resident {pid}"] = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))
    try:
        # What other programs do on the host's other GPUs is not ours.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        only = ["-i", visible] if visible else []
        command = ["nvidia-smi", *only, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return found
    rows = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
    return found | {f"gpu {pid.strip()}": int(used) << 20 for pid, used in rows if used.strip().isdigit()}


def processes(pid: int) -> list[int]:
    """Return a process and its descendants."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return [pid, *(each for child in children for each in processes(child))]


async def until_ready(session: aiohttp.ClientSession, url: str, seconds: float) -> None:
    """Return when the server says that it is ready, or has not for so long."""
    for _ in range(int(10 * seconds)):
        try:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)


async def soaked(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """Wait for the server, send the requests, and say what is left."""
    async with aiohttp.ClientSession() as session:
        await until_ready(session, url, 600.0)
        async with session.get(f"{url}/server_info") as response:
            engine = (await response.json())["engine"]
        async with session.get(f"{url}/v1/models") as response:
            name = (await response.json())["data"][0]["id"]
    soak = Soak(url, name, engine["vocab_size"], engine["max_model_len"], "grammar" in engine["features"], given.seed)
    first = max(1, given.requests // 10)
    begin = time.monotonic()
    await soak.run(first, given.at_once)
    left, _ = await soak.left()
    before = memory_of(processes(pid))
    await soak.run(given.requests - first, given.at_once, begin + given.seconds)
    took = time.monotonic() - begin
    more, metrics = await soak.left()
    after = memory_of(processes(pid))
    grown = {name: used - before[name] for name, used in after.items() if name in before}
    left += more
    left += [f"{name}: {more >> 20} MiB more" for name, more in grown.items() if more > LEFT and first >= 100]
    wasted = {k: v for k, v in metrics.items() if k.startswith("fastlayers_wasted_tokens_total")}
    return {
        "requests": given.requests - soak.seen["not sent"], "seconds": round(took, 1), "seen": dict(soak.seen),
        "wrong": soak.wrong[:5], "left": left, "wasted": wasted,
        "grown_mib": {name: round(more / 2**20, 1) for name, more in grown.items()},
    }  # fmt: skip


def main() -> int:
    """Read the command line, and soak."""
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, flags = sys.argv[1:place], sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no more requests are sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grammars", action="store_true", help="a known model gets the tiny model's tokenizer")
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    given = parser.parse_args(arguments)
    if given.grammars:
        with tempfile.TemporaryDirectory() as folder:
            return run(given, folder_of(given.model, Path(folder)), flags)
    return run(given, given.model, flags)


def folder_of(model: str, folder: Path) -> str:
    """Write a known model's configuration and the tiny model's tokenizer into a folder; return it."""
    for path in (assets() / "tiny_deepseek_v3").glob("tokenizer*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(dict(KNOWN[model])))
    return str(folder)


def run(given: argparse.Namespace, model: str, flags: list[str]) -> int:
    """Start the server, soak it, and tell."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "fastlayers_server", "serve", model, "--port", str(port), *flags]
    server = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        said = asyncio.run(soaked(f"http://127.0.0.1:{port}", server.pid, given))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait()
    said["server_exit_code"] = code
    print(json.dumps(said))
    if given.out:
        given.out.write_text(json.dumps({"command": "python " + " ".join(sys.argv), **provenance(), **said}) + "\n")
    return int(bool(said["wrong"] or said["left"] or code))


if __name__ == "__main__":
    raise SystemExit(main())
