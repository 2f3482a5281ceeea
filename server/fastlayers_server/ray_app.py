"""Replicas of a server behind Ray Serve: ``serve run fastlayers_server.ray_app:build model=tiny num_replicas=2``.

    Ray's proxy ─► a replica (an actor of Ray's) ─► its own ``fastlayers serve`` on a port of this host ─► engine

A replica is a whole server with its own engine, or torchrun's group of ranks; Ray starts it where its GPUs are, sends
each request to one of two that has less to do, and starts it again when it has died. This file only passes bytes on.
Needs the extra ``fastlayers[ray]``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from fastlayers.errors import ArgumentError, UnknownNameError, check_kind
from fastlayers_server.front.errors import ApiError
from fastlayers_server.serve_config import NAMES, parse

READY = re.compile(r" is served at http://127\.0\.0\.1:(\d+) ")
# Of one connection, not of the message: RFC 9110, 7.6.1. The length is the forwarder's business, too.
HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length")
)  # fmt: skip
PROXY = HOP | {"date", "server"}  # of an answer; whoever sends it says these itself
STOP_SECONDS = 60.0
# Whose values a replica sets itself: each has a port of its own that only it calls.
OWN = ("host", "port", "config")


class Replica:
    """``fastlayers serve`` in a process of this host, and what passes requests on to it; Ray makes one a replica.

    The constructor waits until it takes requests.

    Parameters
    ----------
    arguments : sequence of str
        Of ``fastlayers serve``, but for host and port.
    name : str
        Told with every answer; default: Ray's own.

    Raises
    ------
    RuntimeError
        It ended before it was ready; with its last lines.
    """

    def __init__(self, arguments: Sequence[str], name: str = "") -> None:
        if not name:
            from ray import serve

            name = str(serve.get_replica_context().replica_id.unique_id)
        self.name, self._session = name, None  # type: str, Any
        command = [sys.executable, "-m", "fastlayers_server.ray_app", str(os.getpid()), *arguments]
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"], stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._last = deque[str](maxlen=20)
        found = next(filter(None, map(READY.search, self._lines())), None)
        if found is None:
            self.process.wait()
            self.check_health()
        else:
            self.port = int(found[1])
        self._reader = threading.Thread(target=deque, args=(self._lines(), 0), name="server-log", daemon=True)
        self._reader.start()

    def _lines(self) -> Iterator[str]:
        """Yield what the server says, and say it, too."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last.append(line)
            print(line, end="", file=sys.stderr)
            yield line

    def check_health(self) -> None:
        """Tell Ray, by raising :class:`RuntimeError`, that this replica is to be started again: its process ended."""
        if (code := self.process.poll()) is not None:
            raise RuntimeError(f"fastlayers serve ended with exit code {code}: {''.join(self._last).strip()}")

    def stop(self) -> None:
        """Let it finish what runs, and end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()

    def __del__(self) -> None:
        if hasattr(self, "_reader"):
            self.stop()

    async def __call__(self, request: Any) -> Any:
        """Return the server's answer to a request (of starlette's), as it comes."""
        import aiohttp
        from starlette.responses import StreamingResponse

        if self._session is None:
            # Neither a limit of time nor of connections: the server has its own.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        url = str(request.url.replace(scheme="http", netloc=f"127.0.0.1:{self.port}"))
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP]
        body = await request.body()
        try:
            answer = await self._session.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        except aiohttp.ClientConnectionError as error:
            said, name = f"this replica's server does not answer: {error}", {"x-replica": self.name}
            gone = ApiError(503, said, "engine_restarting", retry_after=1.0, headers=name)  # others are there at once
            return gone.response()
        made = StreamingResponse(_chunks(answer), answer.status)
        made.raw_headers = [
            (name.lower().encode(), value.encode())
            for name, value in answer.headers.items()
            if name.lower() not in PROXY
        ]
        made.raw_headers.append((b"x-replica", self.name.encode()))
        return made


async def _chunks(answer: Any) -> AsyncIterator[bytes]:
    # Closed when the client is gone: the server sees it, and stops generating.
    with contextlib.closing(answer):
        async for chunk in answer.content.iter_any():
            yield chunk


def arguments_of(given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the command line of ``fastlayers serve``, and what Ray must know: replicas, and the GPUs of one.

    Raises
    ------
    ArgumentError
        A value that is not accepted, there or here.
    """
    check_kind("ray_app", Mapping, args=given)
    left = {name.replace("-", "_"): str(value) for name, value in given.items()}
    numbers = {name: left.pop(name, default) for name, default in (("num_replicas", "1"), ("num_gpus", ""))}
    for name in left:
        if name in OWN or name not in NAMES:
            accepted = "num_replicas, num_gpus, and flags of fastlayers serve but for host, port and config"
            raise ArgumentError("ray_app", "args", repr(name), accepted)
    arguments = []
    for name, value in left.items():
        flag = "--" + name.replace("_", "-")
        switch = isinstance(NAMES[name].default, bool)
        if switch and value.lower() not in ("true", "false"):
            raise ArgumentError("ray_app", name, repr(value), "true or false")
        arguments += ([flag] if value.lower() == "true" else []) if switch else [f"{flag}={value}"]
    config, _ = parse(arguments)
    if not re.fullmatch(r"[1-9]\d{0,3}", numbers["num_replicas"]):
        raise ArgumentError("ray_app", "num_replicas", repr(numbers["num_replicas"]), "a number from 1 on")
    if not re.fullmatch(r"\d{0,2}", numbers["num_gpus"]):
        raise ArgumentError("ray_app", "num_gpus", repr(numbers["num_gpus"]), "a number of GPUs, 0: on the CPU")
    if not numbers["num_gpus"]:
        import torch

        numbers["num_gpus"] = str(config.tp * config.attn_dp_size * torch.cuda.is_available())
    # Waiting requests are the server's business, which refuses some; Ray's own default would hold back the sixth.
    options = {"num_replicas": int(numbers["num_replicas"]), "max_ongoing_requests": config.limit_concurrency}
    return arguments, {**options, "ray_actor_options": {"num_cpus": 1, "num_gpus": int(numbers["num_gpus"])}}


def build(args: Mapping[str, Any]) -> Any:
    """Return the application for ``serve run`` or ``serve.run``.

    Parameters
    ----------
    args : mapping
        Flags of ``fastlayers serve`` by name (``model``, ``tp``, ``api_key``, …), ``num_replicas``, and ``num_gpus`` of
        each (default: a GPU a rank, none where this host has none).

    Raises
    ------
    ArgumentError
        A value that is not accepted; nothing was started.
    UnknownNameError
        Ray is not installed.
    """
    arguments, options = arguments_of(args)
    try:
        from ray import serve
    except ImportError as error:
        raise UnknownNameError(f"ray_app: {error}; accepted: an environment with fastlayers[ray]") from error
    deployment = serve.deployment(
        Replica, name="fastlayers", health_check_period_s=2.0, graceful_shutdown_timeout_s=STOP_SECONDS, **options
    )
    return deployment.bind(arguments)


def _end_with(parent: int) -> None:
    """Ask this process to end when the replica's is gone, which may be killed without a word."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run the server of a replica: ``python -m fastlayers_server.ray_app PARENT ARGUMENTS``."""
    from fastlayers_server.serve_command import serve

    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), name="replica-watch", daemon=True).start()
    return serve(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
