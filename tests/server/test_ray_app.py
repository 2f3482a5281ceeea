"""Replicas behind Ray Serve: what a replica passes on and tells of its server; with Ray, two of them on this CPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from fastlayers.errors import ArgumentError
from fastlayers_server.ray_app import Replica, arguments_of, build

NAME = "tiny_deepseek_v3"
QUESTION = {"model": NAME, "messages": [{"role": "user", "content": "What is 127 + 45?"}], "temperature": 0}


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    made = Replica(["tiny", "--api-key", "secret", "--in-process"], "first")  # one process less
    yield made
    made.stop()


def ask(replica: Replica, method: str, path: str, **options: Any) -> httpx.Response:
    """Ask a replica as Ray's proxy does: with a request of starlette's."""

    async def run() -> httpx.Response:
        replica._session = None  # each loop has its own
        route = Route("/{path:path}", replica.__call__, methods=["GET", "POST", "DELETE"])
        transport = httpx.ASGITransport(Starlette(routes=[route]))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            found = await client.request(method, path, **options)
        await replica._session.close()
        return found

    return asyncio.run(run())


KEY = {"authorization": "Bearer secret"}


def test_answers_are_the_servers_own(replica: Replica) -> None:
    base = f"http://127.0.0.1:{replica.port}"
    direct = httpx.post(f"{base}/v1/chat/completions", json=QUESTION, headers=KEY, timeout=60)
    through = ask(replica, "POST", "/v1/chat/completions", json=QUESTION, headers=KEY)
    assert through.status_code == direct.status_code == 200
    assert through.json()["choices"] == direct.json()["choices"]
    assert through.headers["x-replica"] == "first" and "x-replica" not in direct.headers
    assert through.headers["content-type"] == direct.headers["content-type"]
    # Errors, keys and queries, too: nothing is decided on the way.
    nothing = "/nothing?x=1%202&y"
    for method, path, headers in (
        ("GET", "/v1/models", {}), ("GET", "/v1/models", KEY), ("GET", nothing, KEY), ("POST", "/v1/models", KEY),
        ("GET", "/health", {}),
    ):  # fmt: skip
        direct = httpx.request(method, base + path, headers=headers)
        through = ask(replica, method, path, headers=headers)
        assert through.status_code == direct.status_code, path
        assert lasting(through.text) == lasting(direct.text), path


def lasting(text: str) -> str:
    """Return an answer without what differs from one request to the next."""
    return re.sub(r'"(created|request|request_id|seconds|uptime\w*)": ?("[^"]*"|[\d.]+)', r'"\1": 0', text)


def test_streams_come_as_they_are_made(replica: Replica) -> None:
    events = ask(replica, "POST", "/v1/chat/completions", json={**QUESTION, "stream": True}, headers=KEY)
    assert events.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in events.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and len(data) > 3
    text = "".join(json.loads(each)["choices"][0]["delta"].get("content") or "" for each in data[:-1])
    assert text == "172"


def test_a_server_that_is_gone_is_told(replica: Replica) -> None:
    """The last test that asks this replica."""
    replica.check_health()
    replica.process.kill()
    replica.process.wait()
    with pytest.raises(RuntimeError, match="exit code -9"):
        replica.check_health()
    answer = ask(replica, "GET", "/health")
    assert answer.status_code == 503 and "does not answer" in answer.json()["error"]["message"]
    assert answer.json()["error"] | {"message": ""} == {
        "message": "", "type": "server_error", "param": None, "code": "engine_restarting"
    }  # fmt: skip
    assert answer.headers["retry-after"] == "1"


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code [1-9](.|\n)*nowhere"):
        Replica([str(tmp_path / "nowhere")], "lost")


def test_a_server_ends_with_its_replica() -> None:
    # As if whoever started it was another process than the one that is its parent now.
    command = [sys.executable, "-m", "fastlayers_server.ray_app", str(os.getppid()), "tiny", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    assert process.wait(60) in (-signal.SIGTERM, 0, 143)


def test_arguments() -> None:
    arguments, options = arguments_of({"model": "tiny", "num_replicas": "3", "tp": 2, "no_prefix_cache": "true"})
    assert arguments == ["--model=tiny", "--tp=2", "--no-prefix-cache"]
    assert options["num_replicas"] == 3 and options["max_ongoing_requests"] == 4096
    assert options["ray_actor_options"]["num_cpus"] == 1
    assert arguments_of({"model": "tiny", "num_gpus": "2"})[1]["ray_actor_options"]["num_gpus"] == 2
    assert arguments_of({"no-prefix-cache": False})[0] == []


@pytest.mark.parametrize(("given", "named"), [
    ({"port": "1"}, "'port'"), ({"config": "x"}, "'config'"), ({"models": "x"}, "'models'"),
    ({"num_replicas": "0"}, "num_replicas"), ({"num_replicas": "two"}, "num_replicas"),
    ({"num_gpus": "-1"}, "num_gpus"),
    ({"no_prefix_cache": "perhaps"}, "no_prefix_cache"), ({"page_size": "0"}, "page-size"), ({"tp": "x"}, "--tp"),
    ("model=tiny", "args"),
])  # fmt: skip
def test_wrong_arguments_are_named(given: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        build(given)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_two_replicas_behind_ray() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fastlayers[ray]'")
    from ray import serve

    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    ray.init(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"model": "tiny", "num_replicas": "2"}))
        first = answering(url, set())
        assert len(first) == 2
        # One server is killed: its replica is started again, and the other one answers meanwhile.
        os.kill(servers()[0], signal.SIGKILL)
        after = answering(url, first)
        assert len(after - first) == 1
    finally:
        serve.shutdown()
        ray.shutdown()
    deadline = time.monotonic() + 60
    while servers() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert servers() == []


def answering(url: str, known: set[str]) -> set[str]:
    """Return the replicas that answer: two, of which one is new."""
    names: set[str] = set()
    deadline = time.monotonic() + 120
    while (len(names) < 2 or names == known) and time.monotonic() < deadline:
        answer = httpx.post(url, json=QUESTION, timeout=60)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["message"]["content"] == "172"
            names = {*list(names - known)[:1], *names, answer.headers["x-replica"]}
    return names


def servers() -> list[int]:
    """Return the processes of servers that Ray's replicas started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if " -m fastlayers_server.ray_app " in line and " --model=tiny " in line:
            found.append(int(folder.name))
    return found
