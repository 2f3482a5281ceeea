"""The messages between front and engine: they survive the wire, and a scripted engine keeps their rules."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.checks import refusal
from fastlayers_server.engine.client import EngineClient
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.queue import WaitingQueue
from fastlayers_server.engine.request import Request, TickResult
from fastlayers_server.engine.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parent))
from scripted import ScriptedEngine, hashed, saying

SAMPLING = p.Sampling(0.7, 5, 0.9, 0.1, -3, 0.5, -0.5, 1.1, ((4, -2.0), (7, 100.0)))
TO = [
    p.Submit(2**60 + 1, p.pack_ids([5, 2**31 - 1]), SAMPLING, 9, 2, (3,), True, -1, 1.5, 2.5, b"ns", 3, 0, "key", 7),
    p.Abort((1, 2)),
    p.Abort((1,), "stop"),
    p.Grammar("key", "{}"),
    p.Control(4, "explain"),
    p.Shutdown(),
]
FROM = [
    p.StepOut((p.Output(1, (4, 5), "stop", cached_tokens=16, logprobs=(p.TokenLogprobs(-0.5, ((4, -0.5),)),)),)),
    p.Stats(3, 4, 5, {"free": 1}, {"requests_total": {"stop": 2}}, {"tick_seconds": ((1, 2), 0.5)}),
    p.Reply(4, True, {"a": [1]}),
    p.Beat(1, "serving", 3, 0.25),
    p.EngineInfo(1, 512, 4096, (1,), 64, 100, 8, 9, 20, ("logprobs",)),
    p.Died(1, "killed", True),
]


@pytest.mark.parametrize("message", TO + FROM, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Any) -> None:
    decoder = p.to_engine if message in TO else p.from_engine
    assert decoder.decode(p.encode(message)) == message
    with pytest.raises(AttributeError):
        message.rid = 0


def test_a_foreign_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        p.to_engine.decode(p.encode(FROM[0]))
    with pytest.raises(msgspec.ValidationError):
        p.to_engine.decode(msgspec.msgpack.encode({"type": "abort", "rids": ["a"]}))


def test_ids_are_packed_as_int32() -> None:
    assert p.pack_ids([1, 256]) == b"\1\0\0\0\0\1\0\0"
    assert p.unpack_ids(p.pack_ids([])) == [] and p.unpack_ids(p.pack_ids([0, 2**31 - 1])) == [0, 2**31 - 1]
    with pytest.raises(OverflowError):
        p.pack_ids([2**31])
    with pytest.raises(ValueError):
        p.unpack_ids(b"\1\0\0")


def test_the_front_side_imports_no_torch() -> None:
    modules = "fastlayers_server.engine.protocol, fastlayers_server.engine.client"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert found.stdout.strip() == "False"


class Front:
    """Collects what an engine delivers."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine, self.inbox = engine, queue.Queue[p.FromEngine]()
        engine.start(self.inbox.put)

    def until(self, kind: type, timeout: float = 120.0) -> Any:
        while True:
            message = self.inbox.get(timeout=timeout)
            if isinstance(message, kind):
                return message

    def outputs(self, *rids: int) -> dict[int, list[p.Output]]:
        """Return the outputs of these requests up to their ends."""
        found: dict[int, list[p.Output]] = {rid: [] for rid in rids}
        while not all(outs and outs[-1].finish for outs in found.values()):
            for output in self.until(p.StepOut).outputs:
                assert not (found[output.rid] and found[output.rid][-1].finish), "news after the end"
                found[output.rid].append(output)
        return found


def test_a_scripted_engine_answers_as_the_script_says() -> None:
    front = Front(ScriptedEngine(saying([10, 11, 12], 1)))
    assert front.until(p.EngineInfo).eos_ids == (1,)
    front.engine.submit(p.Submit(1, p.pack_ids([5]), max_new_tokens=8))
    front.engine.submit(p.Submit(2, p.pack_ids([5]), max_new_tokens=2, logprobs=1))
    front.engine.submit(p.Submit(3, p.pack_ids([5]), max_new_tokens=8, stop_ids=(11,)))
    front.engine.submit(p.Submit(4, b""))
    found = front.outputs(1, 2, 3, 4)
    ids = {rid: [i for out in outs for i in out.ids] for rid, outs in found.items()}
    assert ids == {1: [10, 11, 12, 1], 2: [10, 11], 3: [10, 11], 4: []}
    assert [found[rid][-1].finish for rid in (1, 2, 3, 4)] == ["stop", "length", "stop", "error"]
    assert len(found[2][0].logprobs) == 1 and found[4][0].code == "invalid_prompt"
    front.engine.shutdown()


def test_abort_finish_and_shutdown_end_requests_once() -> None:
    front = Front(ScriptedEngine())
    front.until(p.EngineInfo)
    for rid in (1, 2, 3):
        front.engine.submit(p.Submit(rid, p.pack_ids([5]), max_new_tokens=4000, ignore_eos=True))
    front.engine.send(p.Abort((1, 99)))
    front.engine.send(p.Abort((2,), "stop"))
    seen = {rid: [] for rid in (1, 2, 3)}  # type: ignore[var-annotated]
    while not (seen[1] and seen[2]):
        for output in front.until(p.StepOut).outputs:
            if output.finish:
                seen[output.rid].append(output.finish)
    front.engine.shutdown()
    while not seen[3]:
        seen[3] += [o.finish for o in front.until(p.StepOut).outputs if o.rid == 3 and o.finish]
    assert seen == {1: ["abort"], 2: ["stop"], 3: ["error"]} and front.engine.phase == "dead"


def test_the_default_script_is_a_pure_function() -> None:
    script = hashed(64)
    assert [script([1, 2], 3, i) for i in range(8)] == [script([1, 2], 3, i) for i in range(8)]
    assert len({script([1, 2], 3, i) for i in range(64)}) > 20
    assert script([1, 2], 3, 0) != script([2, 1], 3, 0) or script([1, 2], 3, 1) != script([2, 1], 3, 1)


def test_a_request_that_breaks_the_scheduler_ends_alone() -> None:
    engine = ScriptedEngine()
    front = Front(engine)
    front.until(p.EngineInfo)
    while engine._engine is None:
        pass
    submit = engine._engine.scheduler.submit

    def breaks(request: p.Submit, now: float) -> None:
        if request.rid == 2:
            raise KeyError("a bug")
        submit(request, now)

    engine._engine.scheduler.submit = breaks  # type: ignore[method-assign]
    for rid in (1, 2, 3):
        engine.submit(p.Submit(rid, p.pack_ids([5]), max_new_tokens=3, ignore_eos=True))
    found = front.outputs(1, 2, 3)
    assert [found[rid][-1].finish for rid in (1, 2, 3)] == ["length", "error", "length"]
    assert found[2][-1].code == "internal_error" and "KeyError" in found[2][-1].message
    engine.shutdown()


def test_an_engine_that_dies_in_this_process_tells_why() -> None:
    engine = ScriptedEngine()
    front = Front(engine)
    front.until(p.EngineInfo)
    while engine._engine is None:
        pass

    def fails(plan: Any) -> Any:
        raise ZeroDivisionError("a bug in a step")

    engine._engine.executor.launch = fails  # type: ignore[method-assign]
    engine.submit(p.Submit(1, p.pack_ids([5]), max_new_tokens=3))
    died = front.until(p.Died)
    assert not died.restarting and died.reason == "ZeroDivisionError: a bug in a step" and engine.phase == "dead"
    engine.submit(p.Submit(3, p.pack_ids([5]), max_new_tokens=3))  # which nobody hears
    engine.shutdown()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"prompt": b""}, "invalid_prompt", "the prompt is empty"),
        ({"prompt": p.pack_ids([5, -1])}, "invalid_prompt", "prompt: token id -1 is not in [0, 512)"),
        ({"prompt": p.pack_ids([512])}, "invalid_prompt", "prompt: token id 512"),
        ({"stop_ids": (512,)}, "invalid_prompt", "stop_ids: token id 512"),
        ({"max_new_tokens": 0}, "invalid_prompt", "max_new_tokens is 0; accepted: 1 or more"),
        ({"max_new_tokens": 4096}, "context_length_exceeded", "1 prompt tokens and 4096 new ones do not fit"),
        ({"logprobs": 1_000_000}, "invalid_prompt", "logprobs is 1000000; accepted: 0 to 20"),
        ({"prompt_logprobs": 1}, "invalid_prompt", "prompt_logprobs is 1; accepted: none on this engine"),
        ({"sampling": p.Sampling(temperature=float("nan"))}, "invalid_prompt", "temperature is nan"),
        ({"sampling": p.Sampling(top_p=0.0)}, "invalid_prompt", "top_p is 0.0"),
        ({"sampling": p.Sampling(logit_bias=((600, 1.0),))}, "invalid_prompt", "logit_bias: token id 600"),
        ({"sampling": p.Sampling(logit_bias=((5, float("inf")),))}, "invalid_prompt", "logit_bias is a value"),
        ({"grammar": "unheard of"}, "grammar_lost", "did not arrive, or was forgotten"),
    ],
)
def test_the_engine_checks_what_a_front_has_checked(change: Any, code: str, said: str) -> None:
    """A front that is wrong costs one request, not the engine."""
    front = Front(ScriptedEngine())
    front.until(p.EngineInfo)
    good = p.Submit(1, p.pack_ids([5]), max_new_tokens=3, ignore_eos=True)
    for request in (good, msgspec.structs.replace(good, rid=2, **change), msgspec.structs.replace(good, rid=3)):
        front.engine.submit(request)
    found = front.outputs(1, 2, 3)
    front.engine.shutdown()
    assert [found[rid][-1].finish for rid in (1, 2, 3)] == ["length", "error", "length"]
    assert len(found[2]) == 1 and found[2][0].code == code and said in found[2][0].message
    assert [o.ids for o in found[1]] == [o.ids for o in found[3]]


def test_a_full_queue_names_its_limits_and_what_never_fits_is_another_error() -> None:
    config = SchedulerConfig(512, 512, 64, 8, max_queued_requests=1, max_queued_tokens=4)
    waiting, before = WaitingQueue(), p.Submit(1, p.pack_ids([5, 6]), max_new_tokens=3)

    def told(prompt: list[int]) -> tuple[str, str] | None:
        return refusal(p.Submit(2, p.pack_ids(prompt), max_new_tokens=3), config, {1}, False, waiting)

    assert told([5] * 4) is None
    code, said = told([5] * 5) or ("", "")
    assert code == "context_length_exceeded" and "at most 4 (--max-queued-tokens)" in said
    waiting.push(Request(before, 1, [5, 6], frozenset(), 0))
    code, said = told([5]) or ("", "")
    assert code == "queue_full" and "at most 1 (--max-queued-requests) of 4 (--max-queued-tokens)" in said


def test_a_burst_that_finds_free_slots_is_not_a_queue() -> None:
    """Of those who came since the last tick as many get a slot in the next one as there are."""
    scheduler = Scheduler(SchedulerConfig(512, 64, 64, 8, max_running=4, max_queued_requests=2))

    def burst(rids: range) -> list[int]:
        for rid in rids:
            scheduler.submit(p.Submit(rid, p.pack_ids([5, 6]), max_new_tokens=3), 0.0)
        refused = [output.rid for output in scheduler.outputs if output.code == "queue_full"]
        scheduler.outputs.clear()
        return refused

    assert burst(range(1, 9)) == [7, 8]
    plan = scheduler.plan(0.0)
    assert len(plan.admitted) == 4 and burst(range(10, 12)) == [10, 11]
    scheduler.commit(plan, TickResult([[7]] * 4), 0.0)
    scheduler.end([1], 0.0)
    assert burst(range(20, 23)) == [21, 22]
