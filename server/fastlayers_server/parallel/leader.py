"""The first rank's executor: every plan is told to the other ranks before it is computed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlayers_server.engine.loop import Executor, Step
from fastlayers_server.engine.request import TickPlan, TickResult
from fastlayers_server.parallel.channel import Calls, Channel, Digest
from fastlayers_server.parallel.frames import encode


class LeaderStep:
    """A launched plan of all ranks."""

    def __init__(self, step: Step, leader: Leader) -> None:
        self._step, self._leader = step, leader

    def first(self) -> list[list[int]]:
        """Of this rank; the others compare what :meth:`result` tells."""
        return self._step.first()

    def done(self) -> bool:
        """Whether this rank's tokens are there."""
        return self._step.done()

    def sample(self, masks: Any = None) -> None:
        """Draw, see :class:`~fastlayers_server.engine.loop.Step`; the others get the masks, too."""
        self._leader.channel.tell(masks.numpy().tobytes())
        self._step.sample(masks)

    def result(self) -> Any:
        """Wait for the tokens."""
        return self._leader.reported(self._step.result)


class Leader:
    """An :class:`~fastlayers_server.engine.loop.Executor` over all ranks.

    Parameters
    ----------
    executor : Executor
        Of this rank.
    channel : Channel
    """

    same_steps = True  # captured ones

    def __init__(self, executor: Executor, channel: Channel) -> None:
        self._executor, self.channel, self._digest = executor, channel, Digest()
        self._calls = Calls(channel.axis, self.same_steps)

    def launch(self, plan: TickPlan) -> LeaderStep:
        """Tell the others, and begin."""
        self.channel.tell(encode(plan, self._digest.count, self._digest.value, *self._calls.take()))
        return LeaderStep(self._executor.launch(plan), self)

    def reported(self, result: Callable[[], TickResult]) -> Any:
        """Return the tokens, once they are among those that the others are to have."""
        found = result()
        self._digest.add(found.tokens)
        return found

    def close(self) -> None:
        """Let the other ranks end."""
        self.channel.tell(None)

    def explain(self) -> Any:
        """Of this rank, see :class:`~fastlayers_server.engine.loop.Executor`; and how many there are."""
        return {**self._executor.explain(), "ranks": self.channel.size}

    def backends(self) -> list[dict[str, Any]]:
        """Of this rank; those of the others are equal, or the engine would not have started."""
        return self._executor.backends()

    def profile(self, start: bool) -> str:
        """Of this rank."""
        return self._executor.profile(start)

    def counters(self) -> dict[str, dict[str, float]]:
        """Of this rank."""
        return self._executor.counters()
