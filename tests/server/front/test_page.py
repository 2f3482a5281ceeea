"""The page at /, in a headless Chromium where one is installed; `make test-browser`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .harness import script_of, serving, tokens_of
from .test_security import FRONT
from .wire import on_the_wire

PAGE = (FRONT / "page.html").read_text()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere() -> None:
    loads: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loads.extend(v or "" for k, v in attrs if k in ("src", "href", "action"))

    Reader().feed(PAGE)
    assert loads == ["data:,"]
    assert not re.findall(r"https?://|@import|url\(|importScripts|eval\(|innerHTML\b", PAGE)
    with serving() as server:
        response = server.get("/")
    assert response.text == PAGE and response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]


class Browser:
    """A headless Chromium and one tab, spoken to over its debugging socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=120)
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> Any:
        for _ in range(int(seconds / 0.1)):
            found = await self.value(expression)
            if found:
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}; the page: {await self.value('document.body.innerText')}")


@pytest.fixture
def profile(tmp_path: Path) -> Iterator[str]:
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", f"--user-data-dir={tmp_path}", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "DevTools listening on" in line:
                break
        yield line.split("ws://")[1].split("/")[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed ({', '.join(BROWSERS)})")
def test_a_chat_streams_and_the_gauges_live(profile: str) -> None:
    tokens = tokens_of()
    text = "Hello <b>you</b> & ünï 🙂."

    async def visit(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://{profile}/json/new?about:blank") as response:
                target = (await response.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(target, max_msg_size=0) as socket:
                browser = Browser(socket)
                await browser.call("Runtime.enable")
                await browser.call("Page.enable")
                await browser.call("Page.navigate", url=url)
                # Without a key the page says what is wrong, and shows nothing of the server.
                await browser.until("document.getElementById('state')?.textContent.includes('API key')")
                assert await browser.value("document.getElementById('model').textContent") == ""
                submit = "document.getElementById('say').value = 'hi', document.getElementById('form').requestSubmit()"
                await browser.value(submit)
                await browser.until(
                    "document.querySelector('.turn:last-child .failed')?.textContent.includes('API key')"
                )
                await browser.value("key.value = 'sk-1', key.dispatchEvent(new Event('change'))")
                await browser.until("document.getElementById('model').textContent === 'tiny'")
                await browser.until("document.getElementById('state').textContent === 'serving'")
                await browser.until("document.getElementById('facts').innerText.includes('4096 tokens')")
                await browser.value(submit)
                await browser.until("document.getElementById('send').textContent === 'Stop'")
                shown = "document.querySelector('.turn:last-child > div:nth-child(2)').textContent"
                early = await browser.until(f"{shown}.length > 2 && {shown}")
                assert len(early) < len(text) and text.startswith(early), "the answer did not stream"
                await browser.until(f"{shown} === {json.dumps(text)}")
                cost = await browser.until("document.querySelector('.turn:last-child .cost').textContent")
                assert re.match(r"\d+ tokens, first after \d+ ms, 0 of 5 prompt tokens cached", cost)
                await browser.until("document.getElementById('gauge-requests running')?.children.length === 3")
                gauges = await browser.value("document.getElementById('gauges').innerText")
                assert "tok/s" in gauges and "cache hits" in gauges
                assert not browser.complaints

    with on_the_wire(script_of(tokens, text), tokens=tokens, tick_seconds=0.15, api_key=("sk-1",)) as wire:
        asyncio.run(visit(f"{wire.url}/"))
