"""News of the engine on the front's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastlayers_server.engine.protocol import (
    Died,
    EngineInfo,
    Forgotten,
    FromEngine,
    Grammar,
    Output,
    Sampling,
    StepOut,
    Submit,
)
from fastlayers_server.front.errors import of_output
from fastlayers_server.front.link import AT_ONCE, Link

ROWS = 5 * AT_ONCE + 3


class Client:
    """Takes what a front sends, and says what a test wants."""

    phase, epoch = "serving", 1

    def start(self, deliver: Callable[[FromEngine], None]) -> None:
        self.deliver = deliver

    def submit(self, request: Submit) -> None:
        """Nobody computes it."""

    def send(self, message: Any) -> None:
        self.sent = [*getattr(self, "sent", []), message]


def told(act: Callable[[Client, list[int]], Coroutine[Any, Any, None]]) -> dict[int, list[Output]]:
    """Return what each of so many rows was fed while ``act`` ran, and then for as many turns as there are rows."""
    heard: dict[int, list[Output]] = {rid: [] for rid in range(1, ROWS + 1)}
    order: list[int] = []

    def feed(output: Output) -> None:
        heard[output.rid].append(output)
        order.append(output.rid)

    async def run() -> None:
        client: Any = Client()
        link = Link(client)
        link.start(asyncio.get_running_loop())
        for rid in heard:
            link.submit(Submit(rid, b"", Sampling()), feed)
        await act(client, order)
        for _ in range(ROWS):
            await asyncio.sleep(0)

    asyncio.run(run())
    return heard


def step(token: int) -> StepOut:
    return StepOut(tuple(Output(rid, (token,)) for rid in range(1, ROWS + 1)))


def test_others_have_their_turns_while_a_step_is_told() -> None:
    async def act(client: Client, order: list[int]) -> None:
        client.deliver(step(7))
        seen = []
        while len(order) < ROWS:
            await asyncio.sleep(0)
            seen.append(len(order))
        assert order == list(range(1, ROWS + 1))
        assert all(after - before <= AT_ONCE for before, after in zip([0, *seen], seen, strict=False))

    assert all([output.ids for output in outputs] == [(7,)] for outputs in told(act).values())


def test_a_step_is_told_whole_before_the_next_one() -> None:
    async def act(client: Client, order: list[int]) -> None:
        client.deliver(step(7))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < len(order) < ROWS
        client.deliver(step(8))
        client.deliver(step(9))

    assert all([output.ids for output in outputs] == [(7,), (8,), (9,)] for outputs in told(act).values())


def test_what_an_engine_said_is_told_before_its_death() -> None:
    async def act(client: Client, order: list[int]) -> None:
        client.deliver(step(7))
        client.deliver(Died(1, "killed", restarting=True))

    for outputs in told(act).values():
        assert [(output.ids, output.code) for output in outputs] == [((7,), ""), ((), "engine_restarting")]


def test_a_grammar_is_brought_again_when_the_engine_forgot_it() -> None:
    async def run() -> list[Any]:
        client: Any = Client()
        link = Link(client)
        link.start(asyncio.get_running_loop())
        for message in (None, None, Forgotten(("a", "c")), None, EngineInfo(1, 512, 64, (1,), 16, 9, 4, 8, 20, ())):
            if message is not None:
                client.deliver(message)
                await asyncio.sleep(0.01)
            link.grammar("a", "of a")
            link.grammar("b", "of b")
        return list(client.sent)

    a, b = Grammar("a", "of a"), Grammar("b", "of b")
    assert asyncio.run(run()) == [a, b, a, a, b]


def test_a_grammar_that_the_engine_has_not_is_no_fault_of_its_client() -> None:
    async def run() -> list[Any]:
        client: Any = Client()
        link, ended = Link(client), list[Output]()
        link.start(asyncio.get_running_loop())
        for rid, code in ((1, "invalid_grammar"), (2, "grammar_lost"), (3, "invalid_grammar")):
            link.grammar("a", "of a")
            link.submit(Submit(rid, b"", Sampling(), grammar="a"), ended.append)
            client.deliver(StepOut((Output(rid, finish="error", code=code, message="m"),)))
            await asyncio.sleep(0.01)
        return [*client.sent, *(of_output(output).status for output in ended)]

    # One that is wrong is wrong when it comes again, and no reason to bring all others again.
    a = Grammar("a", "of a")
    assert asyncio.run(run()) == [a, a, 400, 503, 400]
