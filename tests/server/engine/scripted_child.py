"""An engine's process without a model; the configuration's ``model`` says how it misbehaves."""

from __future__ import annotations

import threading
import time

from scripted import ScriptedEngine

from fastlayers_server.engine import child
from fastlayers_server.engine.child import Phase, end, main
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.loop import Engine


def make(config: EngineConfig, phase: Phase, epoch: int) -> Engine:
    if config.model == "refused":
        raise ValueError("there is no such model")
    phase("weights")
    waits = {"slow": 1.5, "stuck": 600.0, "stuck again": 600.0 * (epoch > 1)}
    time.sleep(waits.get(config.model, 0.0))  # as reading weights may take
    engine = ScriptedEngine(tick_seconds=0.0 if config.model == "chatty" else 0.005)._make(phase, epoch)
    if config.model == "reads":  # a library that does not end when the interpreter does
        threading.Thread(target=time.sleep, args=(600,)).start()
    if config.model == "hangs" and epoch == 1:
        engine.executor.launch = lambda plan: time.sleep(600)  # type: ignore[method-assign,assignment,return-value,misc]
    if config.model == "fails":
        engine.executor.launch = lambda plan: 1 // 0  # type: ignore[method-assign,assignment,return-value,misc]
    return engine


if __name__ == "__main__":
    child.OUTBOX, child.FRONT_SECONDS, child.BEAT_SECONDS = 100, 1.5, 0.2
    end(main(make))
