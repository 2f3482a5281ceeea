"""Keys, admin routes, what may be imported, what is never shown."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastlayers_server.front import gate
from fastlayers_server.front.app import ADMIN, ROUTES
from fastlayers_server.front.gate import OPEN

from .harness import Server, script_of, serving, tokens_of

FRONT = Path(__file__).parents[3] / "server" / "fastlayers_server" / "front"
KEYS = {"api_key": ("sk-one", "sk-zwei-ü"), "admin_api_key": ("adm",)}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(**KEYS) as it:
        yield it


def paths() -> list[tuple[str, str]]:
    found = [(served.methods[0], served.path.replace("{name:path}", "tiny")) for served in ROUTES]
    return [*found, ("GET", "/nope"), ("POST", "/v1/files"), ("GET", "/health/"), ("GET", "/healthz")]  # fmt: skip


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "sk-one", "Basic sk-one", "Bearer sk-one-", "Bearer \xe9"])  # fmt: skip  # noqa: E501
def test_every_route_but_the_two_open_ones_needs_a_key(guarded: Server, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key.encode("latin-1")}
    for method, path in paths():
        response = guarded.request(method, path, headers)  # type: ignore[arg-type]
        if path in OPEN:
            assert response.status_code == 200
            continue
        expected = (403, "admin_key_required") if path in ADMIN else (401, "invalid_api_key")
        assert (response.status_code, response.json()["error"]["code"]) == expected, path
    told = guarded.request("GET", "/v1/models", headers).json()["error"]["message"]  # type: ignore[arg-type]
    # A key without "Bearer" is not called wrong: it may be right.
    assert told == ("the API key is wrong" if (key or "").startswith("Bearer ") else "an API key is needed: Authorization: Bearer KEY")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("key", ["sk-one", "sk-zwei-ü", "adm"])
def test_each_key_opens_the_routes(guarded: Server, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".encode()}
    assert guarded.request("GET", "/v1/models", headers).status_code == 200  # type: ignore[arg-type]
    flushed = guarded.request("POST", "/flush_cache", headers)  # type: ignore[arg-type]
    assert flushed.status_code == (200 if key == "adm" else 403)


def test_a_key_is_compared_with_every_stored_one_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compare, seen = gate.hmac.compare_digest, []  # type: ignore[var-annotated]
    monkeypatch.setattr(
        gate.hmac, "compare_digest", lambda given, stored: (seen.append(stored), compare(given, stored))[1]
    )
    stored = gate.digests(["one", "two", "three"])
    for key in ("one", "three", "none"):
        seen.clear()
        assert gate.matches(gate.digests([key])[0], stored) == (key != "none")
        assert seen == list(stored), "whoever stops at the first match tells by its time which one it is"


def test_admin_routes_are_off_without_a_key_or_open_admin() -> None:
    with serving() as server:
        for path in ADMIN:
            response = server.request("POST", path)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_disabled")
    with serving(open_admin=True) as server:
        assert server.request("POST", "/flush_cache").status_code == 200


def test_metrics_may_be_public() -> None:
    with serving(**KEYS, metrics_public=True) as server:
        assert server.get("/metrics").status_code == 200
        assert server.get("/server_info").status_code == 401


def test_the_page_is_open_and_says_nothing(guarded: Server) -> None:
    page = guarded.get("/")
    assert page.status_code == 200 and "tiny" not in page.text


def test_several_keys_share_no_prefixes(guarded: Server) -> None:
    seen = []
    engine = guarded.front.link.client
    submit = engine.submit
    engine.submit = lambda request: (seen.append(request.namespace), submit(request))[1]  # type: ignore[method-assign]
    for key in ("sk-one", "sk-zwei-ü", "sk-one"):
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
        headers = {"authorization": f"Bearer {key}".encode(), "content-type": "application/json"}
        guarded.request("POST", "/v1/completions", headers, content=body)  # type: ignore[arg-type]
    assert seen[0] == seen[2] != seen[1] and all(len(n) == 16 for n in seen)


def test_keys_and_prompts_are_neither_logged_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    from fastlayers_server.serve_config import ServeConfig

    config = ServeConfig(api_key=("sk-secret",), admin_api_key=("adm-secret",))
    with caplog.at_level(logging.DEBUG), serving(api_key=config.api_key, admin_api_key=config.admin_api_key) as server:
        headers = {"authorization": "Bearer sk-secret"}
        body = {"model": "tiny", "prompt": "my-private-words", "max_tokens": 2}
        assert server.post("/v1/completions", body, **headers).status_code == 200
        server.post("/v1/completions", body | {"temperature": "%s%n"}, **headers)
        info = server.get("/server_info", **headers).text
        metrics = server.get("/metrics", **headers).text
    shown = caplog.text + info + metrics + repr(server.front.config)
    assert "secret" not in shown and "my-private-words" not in shown
    assert '"***"' in info


@pytest.mark.parametrize("wanted", [False, True])
def test_what_is_said_is_in_the_log_only_where_that_is_wanted(wanted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In no part of a record: what is written beside a message is in its facts."""
    tokens, asked, answered = tokens_of(), "my-private-words", "an answer"
    routes = {"completions": "prompt", "responses": "input", "chat/completions": "messages"}
    with (
        caplog.at_level(logging.DEBUG),
        serving(script_of(tokens, answered), tokens=tokens, log_prompts=wanted) as server,
    ):
        for route, field in routes.items():
            body = {"model": "tiny", field: [{"role": "user", "content": asked}] if field == "messages" else asked}
            for stream in (False, True):
                assert server.post(f"/v1/{route}", body | {"stream": stream}).status_code == 200
            assert server.post(f"/v1/{route}", body | {"temperature": asked}).status_code == 400
    logged = [repr(vars(record)) for record in caplog.records]
    for said in (asked, answered):
        assert sum(said in each for each in logged) == (6 if wanted else 0), said


def test_the_front_imports_no_torch_and_no_engine_but_its_messages() -> None:
    code = (
        "import sys, fastlayers_server.front.app, fastlayers_server.front.server; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'fastlayers', 'fastlayers_models', 'xgrammar') "
        "or m.startswith('fastlayers_server.engine.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The library's own root is asked for its version; it imports none of its parts by itself.
    found = set(ast.literal_eval(done.stdout)) - {"fastlayers", "fastlayers.moved"}
    assert found == {"fastlayers_server.engine.protocol"}


def test_no_pickle_no_eval_no_fetching() -> None:
    forbidden = {"pickle", "shelve", "marshal", "requests", "urllib", "httpx", "aiohttp", "subprocess"}
    for path in FRONT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {a.name.split(".")[0] for a in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module.split(".")[0]}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & {"eval", "exec", "compile"}
                assert not names, f"{path}: {names}"
            assert not names & forbidden, f"{path}: {names & forbidden}"


def test_cross_origin_requests_are_off_unless_asked_for() -> None:
    origin = {"origin": "https://example.org", "access-control-request-method": "POST"}
    with serving() as server:
        assert server.request("OPTIONS", "/v1/completions", origin).status_code == 405
        assert "access-control-allow-origin" not in server.get("/health", **origin).headers
    with serving(cors_origin=("https://example.org",), api_key=("k",)) as server:
        answer = server.request("OPTIONS", "/v1/completions", origin)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        # As OpenAI's client in a browser asks.
        asked = origin | {"access-control-request-headers": "authorization,content-type,x-stainless-os"}
        answer = server.request("OPTIONS", "/v1/completions", asked)
        assert answer.status_code == 200 and "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_clocks_that_jump_decide_nothing() -> None:
    """What waits, expires or is measured goes by clocks that only go on; dates are for people."""
    wall = {"time": {"time", "localtime", "gmtime", "strftime"}, "datetime": {"now", "utcnow", "today"}}
    # When an answer and the server were made, the file of a benchmark, a line of the log.
    dates = {"front/generation.py": 2, "bench/command.py": 1, "log.py": 4}
    found: dict[str, int] = {}
    parts = ("front", "engine", "parallel", "bench")
    for path in [*(f for part in parts for f in (FRONT.parent / part).glob("*.py")), *FRONT.parent.glob("*ser*.py"),
                 FRONT.parent / "log.py", FRONT.parent / "llm.py"]:  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = str(path.relative_to(FRONT.parent))
                found[name] = found.get(name, 0) + (node.attr in wall.get(node.value.id, ()))
    assert {name: count for name, count in found.items() if count} == dates


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set _ = messages.append(1) %}{{ messages }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(9999999999) %}x{% endfor %}",
    ],
)
def test_a_template_runs_in_a_sandbox_and_its_faults_are_the_requests(template: str) -> None:
    """A model's folder may come from anywhere; its template reaches nothing but the messages."""
    with serving(tokens=tokens_of(template=template)) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        answer = server.post("/v1/chat/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_prompt", "messages"), error
        assert error["message"].startswith("the chat template refuses the messages: ")
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200
