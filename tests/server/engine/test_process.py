"""An engine in a process of its own: killed, hung, refused, shut down; every request is told its end once."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastlayers_server.engine import child, client
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.client import EngineClient, engine_client
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.front.errors import ApiError
from fastlayers_server.front.link import Link

sys.path.insert(0, str(Path(__file__).parent))
from scripted import ScriptedEngine  # type: ignore[import-not-found]

SCRIPTED = (sys.executable, str(Path(__file__).parent / "scripted_child.py"))


class Front:
    """Collects what an engine says."""

    def __init__(
        self, model: str = "", *, command: Any = SCRIPTED, in_process: bool = False, client: Any = None, **settings: Any
    ) -> None:
        config = EngineConfig(model=model, **settings)
        beside = engine_client(config, in_process=True) if in_process else client
        self.engine: Any = beside or EngineClient(config, command)
        self.inbox = queue.Queue[Any]()
        self.finished: dict[int, list[p.Output]] = {}
        self.ids: dict[int, list[int]] = {}
        self.link, self.deaths = Link(self.engine), list[p.Died]()  # told by hand, on no event loop
        self.engine.start(self.inbox.put)

    def be_patient(self) -> None:
        """From now on let a step, or a silence, take as long as it may on a busy machine."""
        self.engine.config = replace(self.engine.config, watchdog_timeout=60.0)

    def until(self, kind: Any, timeout: float = 90.0) -> Any:
        if kind is p.Died and self.deaths:
            return self.deaths.pop()
        while True:
            message = self.inbox.get(timeout=timeout)
            self.link._handle(message)
            if isinstance(message, kind):
                return message

    def feed(self, output: p.Output) -> None:
        assert output.rid not in self.finished
        self.ids.setdefault(output.rid, []).extend(output.ids)
        if output.finish:
            self.finished[output.rid] = [output]

    def end_of(self, rid: int) -> p.Output:
        while rid not in self.finished:
            message = self.until((p.StepOut, p.Died))
            self.deaths += [message] * isinstance(message, p.Died)
        return self.finished[rid][0]

    def submit(self, rid: int, new: int) -> None:
        self.link.submit(p.Submit(rid, p.pack_ids([5, 6, 7]), p.Sampling(seed=1), new, ignore_eos=True), self.feed)


def test_killed_while_it_streams_and_started_again() -> None:
    front = Front()
    assert front.until(p.EngineInfo).epoch == 1
    front.submit(1, 4)
    assert Path(front.engine._folder).stat().st_mode & 0o777 == 0o700, "its sockets are nobody else's"
    assert front.end_of(1).finish == "length" and len(front.ids[1]) == 4
    front.submit(2, 3000)
    while len(front.ids.get(2, ())) < 5:
        front.until(p.StepOut)
    os.kill(front.engine.pid, signal.SIGKILL)
    assert front.end_of(2).code == "engine_restarting"
    died = front.until(p.Died)
    assert died.restarting and died.epoch == 1 and "-9" in died.reason
    assert front.until(p.EngineInfo).epoch == 2
    front.submit(3, 4)
    assert front.end_of(3).finish == "length" and front.ids[3] == front.ids[1]
    front.submit(4, 3000)
    pid = front.engine.pid
    front.engine.shutdown()
    assert front.end_of(4).code == "draining" and front.engine.phase == "dead"
    assert not front.until(p.Died).restarting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ApiError, match="dead"):
        front.link.check_ready()
    assert not Path(front.engine._folder).exists()


def test_a_hung_step_is_killed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # What is asked where it hangs has longer for its answer than a machine needs that is not busy.
    patient = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(max(seconds, 3.0)))
    monkeypatch.setattr(client, "time", patient)
    front = Front("hangs", watchdog_timeout=1.0)
    front.until(p.EngineInfo)
    front.submit(1, 4)
    assert front.end_of(1).code == "engine_restarting"
    died = front.until(p.Died)
    front.be_patient()
    assert died.restarting and died.reason == "a step took longer than 1 s"
    told = capfd.readouterr().err
    assert " in launch\n" in told or "scripted_child.py" in told, "where it hangs"
    assert " in _io\n" in told and told.count("hread 0x") >= 2, "what its other threads do"
    front.until(p.EngineInfo)
    front.submit(2, 4)
    assert front.end_of(2).finish == "length"
    front.engine.shutdown()


def test_a_process_ends_while_a_thread_of_a_library_runs() -> None:
    front = Front("reads")
    front.until(p.EngineInfo)
    process = front.engine._child
    front.submit(1, 4)
    assert front.end_of(1).finish == "length"
    front.submit(2, 4000)
    front.until(p.StepOut)
    front.engine.shutdown()
    assert process.returncode == 0, "killed for not ending"
    assert front.end_of(2).code == "draining", "what was sent last goes out"


def test_a_process_that_stands_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot say that its step takes long; while it serves, nobody waits longer for it than for such a step."""
    monkeypatch.setattr(client, "LEAST_SILENCE", 2.0)
    front = Front(watchdog_timeout=1.0)
    front.until(p.EngineInfo)
    os.kill(front.engine.pid, signal.SIGSTOP)
    died = front.until(p.Died)
    front.be_patient()
    assert died.restarting and died.reason == "the engine said nothing for 2 s"
    front.until(p.EngineInfo)
    front.submit(1, 4)
    assert front.end_of(1).finish == "length"
    front.engine.shutdown()


def test_a_hung_step_of_a_thread_says_where(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can end a thread; it says once a step what it does, and goes on if it can."""
    monkeypatch.setattr(child, "BEAT_SECONDS", 0.05)
    go = threading.Event()

    def make(phase: Any, epoch: int) -> Any:
        engine: Any = ScriptedEngine()._make(phase, epoch)
        launch = engine.executor.launch
        engine.executor.launch = lambda plan: (go.wait(60), launch(plan))[1]
        return engine

    front = Front(client=EngineClient(EngineConfig(watchdog_timeout=0.2), make=make))
    front.until(p.EngineInfo)
    front.submit(1, 4)
    late = 0
    while late < 3:
        late += front.until(p.Beat).tick_age > 0.2
    told = capfd.readouterr().err  # of this step: on a busy machine another one may take long, too
    go.set()
    assert front.end_of(1).finish == "length"
    front.engine.shutdown()
    assert told.count("Current thread 0x") == 1 and " in wait\n" in told and " in run\n" in told, told


@pytest.mark.parametrize("new", [1, 2])
def test_a_last_step_that_hangs_counts_as_hung(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched behind it, but it is waited for."""
    monkeypatch.setattr(child, "BEAT_SECONDS", 0.05)
    go = threading.Event()

    def make(phase: Any, epoch: int) -> Any:
        engine: Any = ScriptedEngine()._make(phase, epoch)
        launch = engine.executor.launch

        def hanging(plan: Any) -> Any:
            step = launch(plan)
            if plan.tick == new:
                result, step.result = step.result, lambda: (go.wait(60), result())[1]
            return step

        engine.executor.launch = hanging
        return engine

    front = Front(client=EngineClient(EngineConfig(), make=make))
    front.until(p.EngineInfo)
    front.submit(1, new)
    end, hung = time.monotonic() + 30.0, False
    while not hung and time.monotonic() < end:
        hung = front.until(p.Beat).tick_age > 0.3
    go.set()
    assert hung, "it beats, and says of nothing that it takes long"
    assert front.end_of(1).finish == "length"
    while front.until(p.Beat).tick_age:
        pass
    front.engine.shutdown()


def test_a_front_that_takes_nothing_is_left() -> None:
    """An engine waits for its front at most so long; meanwhile its messages lie in bounded queues."""
    front = Front("chatty")
    front.until(p.EngineInfo)
    deliver, taken = front.engine._deliver_to, threading.Event()
    front.engine._deliver_to = lambda message: (taken.wait(300), deliver(message))
    child = front.engine._child
    front.submit(1, 4000)
    try:
        assert child.wait(120) == 1, "it ends by itself"
    finally:
        taken.set()
    assert front.end_of(1).code == "engine_restarting"
    assert front.until(p.Died).restarting
    front.engine.shutdown()


def test_a_start_that_takes_long_beats() -> None:
    front = Front("slow", watchdog_timeout=1.0)
    beats = []
    while not isinstance(message := front.inbox.get(timeout=60), p.EngineInfo):
        beats.append(message)
    assert len(beats) >= 3 and all(isinstance(b, p.Beat) and b.epoch == 1 for b in beats)
    assert {b.phase for b in beats} >= {"weights"} and front.engine.phase == "serving"
    front.engine.shutdown()


def test_a_start_that_nobody_waits_for_ends_at_once() -> None:
    front = Front("stuck")
    while front.engine.phase != "weights":
        front.inbox.get(timeout=60)
    pid, begin = front.engine.pid, time.monotonic()
    front.engine.shutdown()
    assert time.monotonic() - begin < 9.0, "a start has nothing to finish, for which it had ten seconds"
    died = front.until(p.Died)
    assert not died.restarting and died.reason == "the server ended before the engine was there"
    gone([pid], 0.0)
    assert not Path(front.engine._folder).exists()


def test_a_start_that_is_in_vain_is_not_repeated() -> None:
    front = Front("refused")
    front.submit(1, 4)
    died = front.until(p.Died)
    assert not died.restarting and died.reason == "ValueError: there is no such model"
    assert front.end_of(1).code == "draining" and front.engine.phase == "dead"


def test_an_engine_that_keeps_failing_is_given_up() -> None:
    front, reasons = Front("fails"), []
    for rid in range(1, 5):
        front.until(p.EngineInfo)
        front.submit(rid, 4)
        assert front.end_of(rid).code == ("engine_restarting" if rid < 4 else "draining"), "no word of a restart"
        died = front.until(p.Died)
        reasons.append((died.restarting, died.reason.split(":")[0]))
    assert reasons == [(True, "ZeroDivisionError")] * 3 + [(False, "ZeroDivisionError")]


def test_what_cannot_be_started_again_now_is_tried_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where connections hold every file that this process may open: they end, and so does the trouble."""
    front = Front()
    assert front.until(p.EngineInfo).epoch == 1
    start, refused = subprocess.Popen, []

    def popen(*arguments: Any, **options: Any) -> Any:
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(24, "Too many open files")
        return start(*arguments, **options)

    monkeypatch.setattr(client, "PAUSE", 0.1)
    monkeypatch.setattr(subprocess, "Popen", popen)
    os.kill(front.engine.pid, signal.SIGKILL)
    reasons = [front.until(p.Died) for _ in range(3)]
    assert all(died.restarting for died in reasons) and "Too many open files" in reasons[2].reason
    assert front.until(p.EngineInfo).epoch == 4
    front.submit(1, 4)
    assert front.end_of(1).finish == "length"
    refused.clear()
    os.kill(front.engine.pid, signal.SIGKILL)
    assert not front.until(p.Died).restarting, "three times in ten minutes, whatever the reasons"
    front.engine.shutdown()


@pytest.mark.parametrize("model", ["", "stuck again"])
def test_what_comes_before_a_front_knows_of_the_death_is_nobodys(model: str) -> None:
    """It is told its end, and neither computed by the next engine nor waited for when the server ends."""
    front = Front(model)
    front.until(p.EngineInfo)
    os.kill(front.engine.pid, signal.SIGKILL)
    while front.engine.epoch == 1:
        time.sleep(0.01)
    front.submit(2, 3000)  # as an event loop does that has news to read first
    assert front.end_of(2).code == "engine_restarting"
    if not model:
        front.until(p.EngineInfo)
        front.submit(3, 4)
        assert front.end_of(3).finish == "length", "and no word of the other one"
        front.engine.send(p.Control(1, "stats"))
        front.until(p.Reply)
        assert front.link.stats is not None and front.link.stats.running == 0 and front.ids[2] == []
    begin = time.monotonic()
    front.engine.shutdown()
    assert time.monotonic() - begin < 9.0, "nobody waits for that start, which had ten seconds"


def test_the_engine_ends_with_its_front(short_folder: Path) -> None:
    """And takes the folder of their sockets along, which the front had no time for."""
    code = (
        "import sys, time; from fastlayers_server.engine.client import EngineClient;"
        "from fastlayers_server.engine.config import EngineConfig;"
        f"engine = EngineClient(EngineConfig(), {SCRIPTED!r}); told = [];"
        "engine.start(told.append);\n"
        "while not told: time.sleep(0.05)\n"
        "print(engine.pid, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(short_folder)}
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    os.kill(pid, 0)
    assert list(short_folder.iterdir())
    front.kill()
    front.wait()
    gone([pid])
    assert not list(short_folder.iterdir())


def gone(pids: list[int], seconds: float = 60.0) -> None:
    """Wait until no process of these is left, or is more than a zombie."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_shipped_model_in_a_process_of_its_own() -> None:
    found = {}
    for in_process in (False, True):
        config = EngineConfig(device="cpu", max_model_len=256, max_running_requests=4)
        engine, inbox = engine_client(config, in_process=in_process), queue.Queue[Any]()
        engine.start(inbox.put)
        ids: list[int] = []
        while not isinstance(inbox.get(timeout=120), p.EngineInfo):
            pass
        engine.submit(p.Submit(1, p.pack_ids([9, 8, 7]), p.Sampling(0.9, seed=4), 6, ignore_eos=True))
        finish = ""
        while not finish:
            message = inbox.get(timeout=120)
            assert not isinstance(message, p.Died)
            for output in message.outputs if isinstance(message, p.StepOut) else ():
                ids += output.ids
                finish = output.finish
        engine.shutdown()
        found[in_process] = ids
    assert found[False] == found[True] and len(found[True]) == 6
