"""Requests made from the schema, and around it: whatever comes, no answer is a fault of the server."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlayers_server.front.app import ROUTES

from .harness import script_of, tokens_of
from .wire import Wire, on_the_wire

SECONDS, LEAST = 30.0, 5  # after which time no more are drawn, but so many of each kind, on whatever machine
FUZZ = settings(
    deadline=None, max_examples=20, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)  # fmt: skip


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    tokens = tokens_of()
    options = {"enable_openapi": True, "open_admin": True, "body_timeout": 2.0}
    with on_the_wire(script_of(tokens, "ok"), tokens=tokens, tick_seconds=0.0, **options) as it:
        yield it


def check(response: httpx.Response, what: str) -> None:
    assert response.status_code < 500, f"{what}: {response.status_code} {response.text[:500]}"
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], what


@pytest.mark.parametrize("examples", [LEAST, pytest.param(20, marks=pytest.mark.slow)])
def test_requests_of_the_schema(wire: Wire, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{wire.url}/openapi.json")
    end = time.monotonic() + SECONDS
    seen, drawn = set(), Counter[str]()
    with httpx.Client(base_url=wire.url, timeout=120, verify=False) as client:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in ("/drain", "/freeze_gc"):
                continue

            @settings(FUZZ, max_examples=examples)
            @given(case=operation.as_strategy())
            def one(case: schemathesis.Case) -> None:
                if time.monotonic() > end and drawn[case.path] >= LEAST:
                    return
                drawn[case.path] += 1
                request = case.as_transport_kwargs(base_url=wire.url)
                body = request.get("json")
                raw = {"json": body} if "json" in request else {"content": request.get("data") or b""}
                headers = {k: v for k, v in (request.get("headers") or {}).items() if k.lower() != "user-agent"}
                url = request["url"].removeprefix(wire.url)
                response = client.request(case.method, url, headers=headers, params=request.get("params"), **raw)  # type: ignore[arg-type]  # fmt: skip
                seen.add((case.path, response.status_code))
                check(response, f"{case.method} {case.path} {json.dumps(body)[:2000]}")

            one()
        assert {path for path, _ in seen} >= {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
        assert ("/v1/completions", 400) in seen or ("/v1/completions", 404) in seen
        assert client.get("/health").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_any_value_in_any_field(wire: Wire, route: str) -> None:
    (body,) = (served.body for served in ROUTES if served.path == route)
    assert body is not None
    names = [f.alias or name for name, f in body.model_fields.items()]
    base = {"/v1/completions": {"prompt": "a"}, "/tokenize": {"prompt": "a"}}.get(
        route, {"messages": [{"role": "user", "content": "hi"}]}
    )
    end = time.monotonic() + SECONDS / 3
    good = 0
    with httpx.Client(base_url=wire.url, timeout=120) as client:

        @settings(FUZZ, max_examples=80)
        @given(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
        def one(fields: dict[str, object]) -> None:
            nonlocal good
            if time.monotonic() > end and good > 20:
                return
            # Lone surrogates have no UTF-8; JSON may spell them.
            raw = json.dumps({"model": "tiny", "max_tokens": 2, **base, **fields} if "v1" in route else base | fields)
            response = client.post(route, content=raw.encode(), headers={"content-type": "application/json"})
            check(response, raw[:2000])
            good += 1

        one()
    assert good > 20
