"""What only a socket shows: clients that leave, dawdle or send nonsense; time-outs; draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from .harness import ScriptedEngine, script_of, tokens_of, with_features
from .wire import Wire, on_the_wire, wait_for

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}


def body(**fields: Any) -> bytes:
    return json.dumps(LONG | fields).encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_at_once(stream: bool) -> None:
    with on_the_wire(tick_seconds=0.02) as wire:
        connection = wire.send("/v1/completions", body(stream=stream))
        assert wait_for(lambda: wire.live)
        if stream:
            assert connection.recv(4096)
        connection.close()
        assert wait_for(lambda: not wire.live), "the engine works for nobody"  # 4000 ticks take eighty seconds
        assert wait_for(lambda: not wire.front.jobs and wire.front.link.live == 0)
        text = httpx.get(f"{wire.url}/metrics", timeout=60).text
        assert 'fastlayers_aborts_total{cause="disconnect"} 1.0' in text


def test_a_client_that_leaves_while_its_first_token_is_waited_for() -> None:
    with on_the_wire(tick_seconds=0.5) as wire:
        connection = wire.send("/v1/completions", body(stream=True))
        assert wait_for(lambda: wire.front.link.live == 1)
        connection.close()
        assert wait_for(lambda: not wire.front.jobs)
        assert wait_for(lambda: not wire.live)


def test_a_client_that_takes_nothing_is_given_up() -> None:
    with on_the_wire(tick_seconds=0.0, write_timeout=0.3) as wire:
        slow = wire.send("/v1/completions", body(stream=True, logprobs=20, n=8), receive_buffer=2048)
        assert wait_for(lambda: wire.front.jobs)
        # Others are served meanwhile and afterwards; the engine writes as fast as it can, and takes turns with them.
        ask: dict[str, Any] = {"json": LONG | {"max_tokens": 2}, "timeout": 60}
        assert httpx.post(f"{wire.url}/v1/completions", **ask).status_code == 200
        assert wait_for(lambda: not wire.front.jobs), "the slow client is kept"
        assert wait_for(lambda: not wire.live), "the engine works for nobody"
        text = httpx.get(f"{wire.url}/metrics", timeout=60).text
        assert 'fastlayers_aborts_total{cause="disconnect"} 8.0' in text, "it was not given up"
        assert httpx.post(f"{wire.url}/v1/completions", **ask).status_code == 200
        slow.close()


def test_the_end_of_an_answer_is_not_held_back() -> None:
    """Until its beginning is acknowledged, which takes 40 ms on a connection that is used again."""
    with on_the_wire() as wire, httpx.Client(base_url=wire.url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        (connection,) = wire.runner.server_state.connections
        held: socket.socket = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_headers_that_do_not_come_are_not_waited_for() -> None:
    with on_the_wire(header_timeout=0.5) as wire:
        silent, half = wire.connect(), wire.connect()
        half.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        begin = time.monotonic()
        assert silent.recv(10) == b"" and half.recv(10) == b""
        assert time.monotonic() - begin < 9.5  # ten are the default
        # Between requests a connection may rest longer.
        kept = wire.connect()
        for rest in (0.7, 0.0):
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer(kept)[0] == 200
            time.sleep(rest)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [(HEAD + b"X: ", b"a" * 65536), (HEAD, b"X: a\r\n" * 10_000), (CHUNKED + b"0\r\n", b"X: a\r\n" * 10_000),
     (CHUNKED + b"0\r\nX: ", b"a" * 65536), (CHUNKED, b"1;" + b"a" * 65536 + b"\r\n \r\n")],
    ids=["one header", "many", "trailers", "one trailer", "extensions of chunks"],
)  # fmt: skip
def test_headers_without_end_are_not_kept(begin: bytes, more: bytes) -> None:
    """Otherwise anybody, without a key, fills the memory in the seconds that headers may take."""
    with on_the_wire() as wire:
        connection = wire.connect()
        connection.sendall(begin)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200 * len(more):
                connection.sendall(more)
                sent += len(more)
        assert sent < 200 * len(more), "all of it was taken"
        assert httpx.get(f"{wire.url}/health", timeout=60).status_code == 200


def test_large_headers_and_small_chunks_are_served() -> None:
    with on_the_wire(tick_seconds=0.0) as wire:
        raw = body(max_tokens=2)
        large = wire.send("/v1/completions", raw, f"X: {'a' * 60_000}")
        small = wire.send("/v1/completions", b"", "Transfer-Encoding: chunked")
        for byte in raw:
            small.sendall(b"1\r\n" + bytes([byte]) + b"\r\n")
        small.sendall(b"0\r\n\r\n")
        assert answer(large)[0] == answer(small)[0] == 200
        # What comes whole in one read counts as well.
        for size, told in ((30_000, b" 200 "), (66_000, b" 400 ")):
            connection = wire.connect()
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"a" * size))
            assert told in connection.recv(4096), size


def answer(connection: socket.socket) -> tuple[int, Any]:
    response = b""
    while b"\r\n\r\n" not in response:
        response += connection.recv(4096)
    head, _, rest = response.partition(b"\r\n\r\n")
    length = int(next(h.split(b":")[1] for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")))
    while len(rest) < length:
        rest += connection.recv(4096)
    return int(head.split()[1]), json.loads(rest)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with on_the_wire(body_timeout=0.2) as wire:
        status, found = answer(wire.send("/v1/completions", b"{", "Content-Length: 100"))
        assert (status, found["error"]["code"]) == (408, "request_timeout")


def test_a_body_that_is_too_large_is_refused_while_it_comes() -> None:
    with on_the_wire(max_body_mb=1000 / 2**20) as wire:
        declared = wire.send("/v1/completions", b"{", "Content-Length: 1001")
        counted = wire.send("/v1/completions", b"800\r\n" + b"x" * 2048 + b"\r\n", "Transfer-Encoding: chunked")
        for connection in (declared, counted):
            status, found = answer(connection)
            assert (status, found["error"]["code"]) == (413, "request_too_large")
            assert found["error"]["type"] == "invalid_request_error"
            connection.close()  # otherwise it is waited for


@pytest.mark.parametrize("path", ["/v1/completions", "/flush_cache"])
def test_who_still_sends_a_body_that_is_refused_gets_the_answer(path: str) -> None:
    """Closing while the body comes would reset the connection before the client has read why."""
    size, kept = 8_000_000, []
    with on_the_wire(max_body_mb=1000 / 2**20) as wire:
        for way in ("close", "keep-alive"):
            connection = wire.send(path, b"x" * size, f"Connection: {way}")
            status, found = answer(connection)
            assert (status, found["error"]["code"]) in ((413, "request_too_large"), (403, "admin_disabled"))
            kept.append(connection)
        assert kept[0].recv(1) == b""
        kept[1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(kept[1])[0] == 200
        told = httpx.post(f"{wire.url}{path}", content=b"x" * size, headers={"connection": "close"}, timeout=60)
        assert told.status_code in (413, 403)


def test_more_requests_than_the_limit_are_refused() -> None:
    with on_the_wire(limit_concurrency=1) as wire:
        first = wire.send("/v1/completions", body(stream=True))
        assert first.recv(100)
        status, found = answer(wire.send("/v1/completions", body()))
        assert (status, found["error"]["code"]) == (429, "queue_full")
        # Who looks after the server must not take it for dead while it does all it may.
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(f"{wire.url}{path}", timeout=60).status_code == 200, path
        first.close()


def test_who_offers_another_protocol_is_answered_in_ours() -> None:
    """As Java's client does, whose request would be taken without its body."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with on_the_wire(tick_seconds=0.0) as wire:
        raw = body(max_tokens=2)
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw)
        whole = wire.send("/v1/completions", raw, *offer)
        chunked = wire.send("/v1/completions", chunks, *offer, "Transfer-Encoding: chunked")
        later = wire.send("/v1/completions", b"", *offer, f"Content-Length: {len(raw)}")
        time.sleep(0.05)
        later.sendall(raw)
        for made in (whole, chunked, later):
            status, told = answer(made)
            assert status == 200 and told["usage"]["completion_tokens"] == 2, told
        # The connection goes on, with and without an offer.
        for lines in (offer, ("X: 1",), ("Connection: Upgrade", "Upgrade: websocket")):
            whole.sendall("\r\n".join(["GET /health HTTP/1.1", "Host: x", *lines, "", ""]).encode())
            assert answer(whole)[0] == 200, lines


def test_bytes_that_are_no_http_end_their_connection_and_nothing_else() -> None:
    source = random.Random(0)
    good = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    payload = json.dumps({"model": "tiny", "prompt": "ab", "max_tokens": 2, "stop": ["x"], "n": 2}).encode()
    statuses: dict[bytes, int] = {}
    with on_the_wire(header_timeout=0.05, body_timeout=0.05, tick_seconds=0.0) as wire:
        end = time.monotonic() + 15
        for turn in range(400):
            if turn > 100 and time.monotonic() > end:
                break
            text = bytearray(good % len(payload) + payload)
            for _ in range(source.randrange(1, 6)):
                at = source.randrange(len(text)) if turn % 2 else source.randrange(len(text) - len(payload), len(text))
                text[at : at + source.randrange(2)] = source.randbytes(source.randrange(3))
            with wire.connect() as connection:
                connection.sendall(bytes(text))
                connection.settimeout(5.0)
                try:
                    first = connection.recv(100)
                except (TimeoutError, ConnectionError):
                    first = b""
            status = first.split()[1] if first.startswith(b"HTTP/1.1 ") else b"-"
            statuses[status] = statuses.get(status, 0) + 1
        assert not [s for s in statuses if s.startswith(b"5")], statuses
        assert statuses.get(b"400", 0) > 5, statuses
        assert wait_for(lambda: not wire.front.jobs)
        assert httpx.get(f"{wire.url}/health", timeout=60).status_code == 200


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    finish = threading.Event()

    def script(prompt: Any, seed: int, position: int) -> int:
        """Go on behind the first token when the test has asked all that it asks meanwhile."""
        assert position == 0 or finish.wait(60)
        return 5

    with on_the_wire(script, tick_seconds=0.0, drain_delay=0.2, shutdown_timeout=30.0, open_admin=True) as wire:
        running = wire.send("/v1/completions", body(max_tokens=200))
        assert wait_for(lambda: wire.live)
        wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        assert wait_for(lambda: httpx.get(f"{wire.url}/ready", timeout=60).status_code == 503)
        assert httpx.get(f"{wire.url}/ready", timeout=60).json() == {"phase": "draining"}
        assert httpx.get(f"{wire.url}/health", timeout=60).status_code == 200
        assert wait_for(lambda: wire.front.link.draining)
        refused = httpx.post(f"{wire.url}/v1/completions", json=LONG, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        back = httpx.post(f"{wire.url}/resume", timeout=60)
        assert (back.status_code, back.json()["error"]["code"]) == (409, "draining") and wire.front.link.draining
        finish.set()
        status, found = answer(running)
        assert status == 200 and found["usage"]["completion_tokens"] == 200
        assert wait_for(lambda: wire.runner.should_exit) and wire.runner.exit_code == 0


def test_draining_ends_what_takes_too_long_with_an_error() -> None:
    with on_the_wire(tick_seconds=0.02, shutdown_timeout=0.3) as wire:
        running = wire.send("/v1/completions", body(stream=True))
        whole = wire.send("/v1/completions", body())
        assert wait_for(lambda: wire.front.link.live == 2)
        wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        text = b""
        while piece := running.recv(65536):
            text += piece
            if b"[DONE]" in text:
                break
        # Nothing is restarted here: whoever comes back finds another server, or none.
        assert b'"message":"the server ended before the request did"' in text and b'"code":"draining"' in text
        assert b"data: [DONE]" in text
        status, found = answer(whole)
        assert (status, found["error"]["code"]) == (503, "draining")
        assert wait_for(lambda: wire.runner.should_exit)


def test_a_second_signal_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("fastlayers_server.front.server.os._exit", left.append)
    with on_the_wire(tick_seconds=0.02, shutdown_timeout=60.0) as wire:
        running = wire.send("/v1/completions", body(stream=True))
        assert wait_for(lambda: wire.live)
        wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        assert wait_for(lambda: wire.front.link.draining) and not left
        wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        assert wait_for(lambda: left == [1])
        running.close()


def test_a_second_signal_ends_each_stream_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr("fastlayers_server.front.server.os._exit", left.append)
    said = [{"role": "user", "content": "a"}]
    asked = {
        "/v1/completions": body(stream=True),
        "/v1/chat/completions": json.dumps({"model": "tiny", "messages": said, "stream": True}).encode(),
        "/v1/responses": json.dumps({"model": "tiny", "input": "a", "stream": True}).encode(),
    }
    with on_the_wire(tick_seconds=0.02, shutdown_timeout=60.0, drain_delay=60.0) as wire:
        streams = {path: wire.send(path, sent) for path, sent in asked.items()}
        whole, deaf = wire.send("/v1/completions", body()), wire.send("/v1/completions", body(stream=True))
        begun = {path: stream.recv(65536) for path, stream in streams.items()}
        assert wait_for(lambda: wire.front.link.live == 5)
        wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        assert wait_for(lambda: wire.front.link.leaving) and wire.front.link.live == 5
        for _ in range(2):  # a third one changes nothing
            wire.loop.call_soon_threadsafe(wire.runner.on_signal)
        for path, stream in streams.items():
            text = begun[path]
            while not text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                text += (piece := stream.recv(65536))
                assert piece, (path, text[-200:])
            last = text[: text.index(b"data: [DONE]")].rstrip().rpartition(b"data: ")[2]
            error = json.loads(last.split(b"\n")[0])
            error = error.get("error", error)
            assert (error["code"], error["message"]) == ("draining", "the server ended before the request did"), path
        status, found = answer(whole)
        assert (status, found["error"]["code"]) == (503, "draining")
        assert wait_for(lambda: left == [1])
        deaf.close()


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    async def compile(self, source: str) -> str:
        self.begun.set()
        await asyncio.to_thread(self.go.wait, 60)
        return "{}"


def test_a_client_that_leaves_while_its_grammar_is_compiled() -> None:
    engine, compiler = ScriptedEngine(tick_seconds=0.002), SlowCompiler()
    with_features(engine, ["grammar"])
    with on_the_wire(engine=engine, grammars=compiler) as wire:
        submitted, submit = [], engine.submit
        engine.submit = lambda request: (submitted.append(request.rid), submit(request))[1]  # type: ignore[method-assign]
        connection = wire.send("/v1/completions", body(ignore_eos=False, structured_outputs={"regex": "a"}))
        assert compiler.begun.wait(60)
        # Who waits for a grammar holds up nobody, and has no slot.
        assert httpx.post(f"{wire.url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60).status_code == 200
        assert len(submitted) == 1
        connection.close()
        compiler.go.set()
        assert wait_for(lambda: len(submitted) == 2), "it was not asked for"
        assert wait_for(lambda: not wire.front.jobs and wire.front.link.live == 0 and not wire.live)


def test_openais_client_talks_to_it() -> None:
    tokens = tokens_of()
    text = "One two three."
    with on_the_wire(script_of(tokens, text), tokens=tokens, api_key=("sk-1",)) as wire:
        client = openai.OpenAI(base_url=f"{wire.url}/v1", api_key="sk-1")
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert client.models.list().data[0].id == "tiny"
        said = client.chat.completions.create(model="tiny", messages=messages)
        assert said.choices[0].message.content == text
        parts = list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in parts) == text
        assert client.completions.create(model="tiny", prompt="a").choices[0].text == text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-2").models.list()
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, temperature=9)
        assert caught.value.param == "temperature"


def test_litellm_reads_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import asks the network for prices otherwise
    # Its import takes many seconds, so it is only here.
    import litellm

    tokens = tokens_of()
    text = "One two three."
    messages: Any = [{"role": "user", "content": "hi"}]
    with on_the_wire(script_of(tokens, text), tokens=tokens) as wire:
        options: Any = {"api_base": f"{wire.url}/v1", "api_key": "sk-1"}
        said = litellm.completion("openai/tiny", messages, **options)
        assert said.choices[0].message.content == text and said.usage.completion_tokens > 3
        stream = litellm.completion("openai/tiny", messages, stream=True, **options)
        assert "".join(p.choices[0].delta.content or "" for p in stream) == text
        whole = litellm.text_completion("a", "text-completion-openai/tiny", logprobs=1, **options)
        assert whole.choices[0].text == text


def test_many_streams_at_once_end_whole(wire_count: int = 40) -> None:
    tokens = tokens_of()
    text = "Lorem ipsum dolor sit amet, " * 5
    found: list[str] = []
    limits = httpx.Limits(max_connections=wire_count)
    with (
        on_the_wire(script_of(tokens, text), tokens=tokens, tick_seconds=0.001) as wire,
        httpx.Client(limits=limits, timeout=60) as client,
    ):

        def one() -> None:
            request = {"model": "tiny", "prompt": "a", "stream": True}
            with client.stream("POST", f"{wire.url}/v1/completions", json=request, timeout=120) as response:
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
            found.append("".join(json.loads(line)["choices"][0]["text"] for line in lines))

        threads = [threading.Thread(target=one) for _ in range(wire_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _ledger_agrees(wire)
    assert found == [text] * wire_count


def _ledger_agrees(wire: Wire) -> None:
    sent = 40 * (len(wire.front.tokens.encode("Lorem ipsum dolor sit amet, " * 5, False)) + 1)
    assert f"fastlayers_front_tokens_total {float(sent)}" in httpx.get(f"{wire.url}/metrics", timeout=60).text
