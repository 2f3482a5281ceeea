"""The process of one rank: ``torchrun … -m fastlayers_server.parallel.child FOLDER EPOCH FRONT``.

The first rank is an engine's process (:mod:`fastlayers_server.engine.child`), whose configuration comes on its stdin;
the others get it from the store by which the ranks meet. A rank that fails says why to the front, and ends all of them;
the front starts all again. None outlives the front, whose process is FRONT.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from fastlayers_server import log as logs
from fastlayers_server.engine import child
from fastlayers_server.engine.child import Phase
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import Died, encode
from fastlayers_server.ranks import end_with_launcher, ended, launcher

LOOK_SECONDS = 0.5


def command_of(config: EngineConfig) -> list[str]:
    """Return what starts all ranks of an engine; folder, epoch and front are appended."""
    program = "fastlayers_server.parallel.launch"
    return launcher(config.tp * config.attn_dp_size, "fastlayers_server.parallel.child", program)


def _end_with(front: int, folder: str) -> None:
    """End this process when the front, whose folder goes with it, or torchrun is gone: either may be killed."""
    launcher = os.getppid()
    while os.getppid() == launcher:
        if ended(front):
            shutil.rmtree(folder, ignore_errors=True)
            break
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def main() -> int:
    """Run the process of this rank."""
    import torch.distributed as dist

    end_with_launcher()
    threading.Thread(target=_end_with, args=(int(sys.argv[3]), sys.argv[1]), name="rank-watch", daemon=True).start()
    store, rank, _ = next(dist.rendezvous("env://"))
    if rank == 0:
        given = sys.stdin.buffer.read()
        store.set("engine", given)
    config = msgspec.json.decode(store.get("engine"), type=EngineConfig)
    if rank == 0:
        return child.main(_leading, config)
    return _following(config, rank, sys.argv[1], int(sys.argv[2]))


def _leading(config: EngineConfig, phase: Phase, epoch: int) -> Engine:
    from fastlayers_server.engine.startup import build
    from fastlayers_server.parallel.channel import Channel
    from fastlayers_server.parallel.leader import Leader
    from fastlayers_server.parallel.together import GroupLeader

    engine: Any = build(config, phase, epoch)
    channel = Channel()
    leader = (Leader if config.attn_dp_size == 1 else GroupLeader)(engine.executor, channel)
    engine.executor, engine.ended, engine.frozen = leader, leader.close, channel.freeze
    return engine


def _following(config: EngineConfig, rank: int, folder: str, epoch: int) -> int:
    import faulthandler
    import signal

    from fastlayers_server.engine.startup import build
    from fastlayers_server.parallel.channel import Channel
    from fastlayers_server.parallel.follower import follow
    from fastlayers_server.parallel.together import follow_together

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to end
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # What all ranks do alike the first one says.
    logs.configure(config.log_level if config.log_level == "error" else "warning")
    engine: Any = None
    try:
        engine = build(config, lambda phase: None, epoch)
        (follow if config.attn_dp_size == 1 else follow_together)(engine.executor, Channel())
    except Exception as error:
        return _failed(error, rank, folder, epoch, begun=engine is not None)
    return 0


def _failed(error: Exception, rank: int, folder: str, epoch: int, *, begun: bool) -> int:
    """Tell the front why this rank ends, and return its exit code: the first one sees no more than that it is gone."""
    told, code = child.died(error, epoch, begun=begun, who=f"rank {rank}")
    if begun:  # while they start, ranks mostly end alike, and the first one says the same
        told = msgspec.structs.replace(told, reason=f"rank {rank}: {told.reason}")
    send(folder, epoch, told)
    return code


def send(folder: str, epoch: int, told: Died) -> None:
    """Send the front a message from a process that ends."""
    context = zmq.Context[Any]()
    front = context.socket(zmq.PUSH)
    front.connect(f"ipc://{folder}/from-{epoch}")
    front.send(encode(told))
    front.close(linger=2000)
    context.term()


if __name__ == "__main__":
    raise SystemExit(main())
