"""The ranks without a scheduler: hear a plan, compute it, and compare calls and tokens with the first rank's."""

from __future__ import annotations

from collections import deque

import torch

from fastlayers.errors import CollectiveMismatch
from fastlayers_server.engine.executor import TorchExecutor, TorchStep
from fastlayers_server.parallel.channel import Calls, Channel, Digest
from fastlayers_server.parallel.frames import Mirror

AHEAD = 2  # plans that are launched before the tokens of the first are waited for


def follow(executor: TorchExecutor, channel: Channel) -> None:
    """Compute what the first rank plans, until it says that nothing follows.

    Raises
    ------
    CollectiveMismatch
        The tokens here are not those of the first rank.
    CollectiveOrderError
        What was called here between ranks is not what the first rank called.
    RankLostError
        A rank did not answer.
    """
    mirror, digest, flying = Mirror(), Digest(), deque[TorchStep]()
    calls = Calls(channel.axis)
    known = {0: 0}  # digests of this rank that the first rank's are still to be compared with
    while (frame := channel.hear()) is not None:
        plan, told, wanted = mirror.plan(frame)
        calls.compare(*mirror.calls, plan.tick)  # first: tokens of a step whose calls differ may never be there
        if told not in known:
            while digest.count < told:
                _settle(flying, digest, known)
        if known[told] != wanted:
            raise CollectiveMismatch(
                f"rank {channel.rank} drew other tokens than rank 0 in one of the first {told} steps: digest "
                f"{known[told]:08x}, rank 0 has {wanted:08x}; accepted: the same on all ranks"
            )
        known = {count: value for count, value in known.items() if count >= told}
        step = executor.launch(plan)
        if plan.masked:
            masks = channel.hear()
            assert masks is not None
            rows = torch.frombuffer(bytearray(masks), dtype=torch.int32).view(len(plan.sampled), -1)
            step.sample(rows.to(executor.model.device))
        flying.append(step)
        while len(flying) > AHEAD:
            _settle(flying, digest, known)


def _settle(flying: deque[TorchStep], digest: Digest, known: dict[int, int]) -> None:
    digest.add(flying.popleft().result().tokens)
    known[digest.count] = digest.value
