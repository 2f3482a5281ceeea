"""An engine over two ranks on the CPU: its tokens are those of one, and a lost rank restarts all of them."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fastlayers.comm.parallel import SINGLE
from fastlayers.errors import ArgumentError, CollectiveMismatch
from fastlayers_server.engine import child, startup
from fastlayers_server.engine import protocol as p
from fastlayers_server.engine.client import EngineClient
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.request import ENDED, Chunk, Request, TickPlan
from fastlayers_server.parallel import channel, follower
from fastlayers_server.parallel import child as parallel_child
from fastlayers_server.parallel.frames import Mirror, encode
from fastlayers_server.parallel.leader import Leader
from fastlayers_server.ranks import ended, launcher
from fastlayers_server.serve_config import parse
from fastlayers_server.torchrun import launch

sys.path.insert(0, str(Path(__file__).parent))
from test_process import Front, gone  # type: ignore[import-not-found]

PROMPT = p.pack_ids([5, 6, 7])


def request(slot: int, *tokens: int, **settings: Any) -> Request:
    made = Request(p.Submit(slot, PROMPT, **settings), 3, [5, 6, 7], frozenset({1}), 0)
    made.slot, made.tokens = slot, [5, 6, 7, *tokens]
    return made


def test_a_plan_and_what_a_rank_without_scheduler_makes_of_it() -> None:
    decoding = request(2, 9, sampling=p.Sampling(0.7, seed=4), min_new_tokens=3)
    fresh = request(1, sampling=p.Sampling(presence_penalty=1.0))
    plan = TickPlan(7, [fresh, decoding], [(1, 0, 4), (2, 1, 5)], [8])
    plan.chunks, plan.rows, plan.starts = [Chunk(fresh, 0, [5, 6, 7], 1)], [decoding], [4]
    plan.verify = [Chunk(decoding, 4, [9, 3, 2], 3, (-1, 0, 0))]
    plan.complete()
    mirror = Mirror()
    found, told, digest = mirror.plan(encode(plan, 5, 0xABCD))
    assert (found.tick, told, digest, found.masked) == (7, 5, 0xABCD, False)
    assert found.pages == plan.pages and found.poisoned == [8] and found.starts == [4]
    assert [(r.slot, r.tokens, r.prompt_len, r.ends, r.general) for r in found.admitted] == [
        (1, [5, 6, 7], 3, frozenset({1}), True), (2, [5, 6, 7, 9], 3, frozenset({1}), False)
    ]  # fmt: skip
    assert found.admitted[1].submit.sampling == decoding.submit.sampling
    assert found.chunks[0].request is found.admitted[0] and found.chunks[0].ids == [5, 6, 7]
    assert tuple(found.verify[0].parents) == (-1, 0, 0) and found.verify[0].samples == 3
    assert [r.slot for r in found.sampled] == [r.slot for r in plan.sampled]
    assert [(i, r.slot, d) for i, r, d in found.special] == [(i, r.slot, d) for i, r, d in plan.special] != []
    following = TickPlan(8, [], rows=[decoding], starts=[5])
    following.complete()
    again = mirror.plan(encode(following))[0]
    assert again.rows == [found.admitted[1]]  # by its slot
    constrained = TickPlan(9, [request(1, grammar="g")], rows=[decoding], starts=[6])
    constrained.chunks = [Chunk(constrained.admitted[0], 0, [5, 6, 7], 1)]
    constrained.complete(mixed=True)
    last = mirror.plan(encode(constrained))[0]
    assert (last.masked, last.mixed) == (constrained.masked, constrained.mixed) == (True, True)
    assert found.admitted[0].state == ENDED != found.admitted[1].state  # another has its slot


FRAMES = """
import hashlib, random, sys
sys.path.insert(0, sys.argv[1])
import world
from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.parallel.frames import encode

limits = SchedulerConfig(
    23, 160, 20, 16, (1,), max_running=16, max_batched_tokens=64, enable_priority=True, policy="lpm"
)
served, r, digest = world.World(limits, delay=1), random.Random(0), hashlib.sha256()
for tick in range(400):
    if r.random() < 0.5 and served.scheduler.queue.count < 9:
        prompt = [r.randrange(23) for _ in range(r.randint(1, 90))] if r.random() < 0.6 else [7] * 60
        served.submit(prompt, 60, ignore_eos=True, priority=r.randint(-1, 1), namespace=r.choice([b"", b"a", b"b"]))
    if served.scheduler.live and r.random() < 0.1:
        served.scheduler.end([r.choice(sorted(served.scheduler.live))], served.now)
        served.collect()
    digest.update(encode(served.tick(), tick, 0))
counted = served.scheduler.metrics.counters
assert counted["preemptions_total"] and counted["prefix_hits_total"], counted
print(digest.hexdigest())
"""


def test_frames_do_not_depend_on_the_seed_of_hashes() -> None:
    """I18: an order that followed from hashes would differ on every rank and in every run."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", FRAMES, str(Path(__file__).parent)], env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=False,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != ""


class Script:
    """A channel and an executor of one rank, with what the first one says."""

    def __init__(self, tokens: list[list[int]], digests: list[tuple[int, int]]) -> None:
        self.rank, self.axis, self.tokens, self.launched = 1, SINGLE, iter(tokens), 0
        plans = []
        for tick, (told, digest) in enumerate(digests):
            plan = TickPlan(tick, rows=[request(1)], starts=[3], admitted=[request(1)] if tick == 0 else [])
            plan.complete()
            plans.append(encode(plan, told, digest))
        self.said = iter([*plans, None])

    def hear(self) -> bytes | None:
        return next(self.said)

    def launch(self, plan: TickPlan) -> Any:
        self.launched += 1
        return self

    def result(self) -> Any:
        return TickResultOf(next(self.tokens))


class TickResultOf:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = [tokens]


def digests(*tokens: list[int]) -> list[tuple[int, int]]:
    digest, found = channel.Digest(), [(0, 0)]
    for each in tokens:
        digest.add([each])
        found.append((digest.count, digest.value))
    return found


def test_other_tokens_than_the_first_ranks_are_noticed() -> None:
    told = digests([3], [4], [5])
    script = Script([[3], [4], [5]], told)
    follower.follow(script, script)  # type: ignore[arg-type]
    assert script.launched == 4
    late = Script([[3], [4], [5]], [(0, 0), (0, 0), (0, 0), told[1]])
    follower.follow(late, late)  # type: ignore[arg-type]
    wrong = Script([[3], [9], [5]], told)
    with pytest.raises(CollectiveMismatch, match="rank 1 drew other tokens than rank 0 in one of the first 2 steps"):
        follower.follow(wrong, wrong)  # type: ignore[arg-type]
    assert wrong.launched == 2


def test_masks_of_the_first_rank_are_those_of_the_others() -> None:
    plan = TickPlan(1, [request(1, grammar="g"), request(2)])
    plan.rows, plan.starts = plan.admitted[::-1], [2, 2]
    plan.complete()
    told: list[bytes] = []
    seen: list[torch.Tensor] = []
    step = SimpleNamespace(sample=seen.append, result=lambda: TickResultOf([3]))
    executor: Any = SimpleNamespace(launch=lambda plan: step, model=SimpleNamespace(device=torch.device("cpu")))
    masks = torch.tensor([[-1, -1, -1], [5, 0, -7]], dtype=torch.int32)
    Leader(executor, SimpleNamespace(tell=told.append, axis=SINGLE)).launch(plan).sample(masks)  # type: ignore[arg-type]
    heard = iter([*told, None])
    follower.follow(executor, SimpleNamespace(rank=1, axis=SINGLE, hear=lambda: next(heard)))  # type: ignore[arg-type]
    assert len(seen) == 2 and seen[0] is masks and seen[1].dtype == torch.int32 and torch.equal(seen[1], masks)


def test_what_several_ranks_cannot_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--in-process is given; accepted: nothing with several ranks"):
        parse(["--tp", "2", "--in-process"])
    with pytest.raises(ArgumentError, match="--ep is 3; accepted: a divisor of --tp × --attn-dp-size = 2"):
        parse(["--tp", "2", "--ep", "3"])
    with pytest.raises(ArgumentError, match="--tp × --attn-dp-size is 100; accepted: at most 64 processes"):
        parse(["--tp", "50", "--attn-dp-size", "2"])
    assert parse(["-tp", "2"])[0].tp == 2


RANK = """
import faulthandler, os, signal
from fastlayers_server.ranks import end_with_launcher
end_with_launcher()
faulthandler.register(signal.SIGUSR1)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
LAUNCHER = f"""
import signal, subprocess, sys
from fastlayers_server.torchrun import _ask_all
signal.signal(signal.SIGUSR1, _ask_all)
subprocess.Popen([sys.executable, "-c", {RANK!r}]).wait()
"""


@pytest.mark.parametrize("front", [True, False])
def test_a_rank_ends_with_its_front_and_its_folder(
    front: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With torchrun, too; then the front starts others, which meet in the same folder."""
    folder, parents = tmp_path / "sockets", iter([7, 7, 8])
    folder.mkdir()

    def kill(pid: int, number: int) -> None:
        if not front:
            raise ProcessLookupError

    monkeypatch.setattr(parallel_child.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(parallel_child.os, "kill", kill)
    monkeypatch.setattr(parallel_child.os, "_exit", sys.exit)
    monkeypatch.setattr(parallel_child, "LOOK_SECONDS", 0.0)
    with pytest.raises(SystemExit):
        parallel_child._end_with(99, str(folder))
    assert folder.exists() == front


def test_a_front_whose_exit_code_nobody_asked_for_is_gone() -> None:
    """Else who reads the front's output to its end waits for ranks that hold it, and they for the front to vanish."""
    front = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert front.stdin is not None and not ended(front.pid)
    front.stdin.close()
    deadline = time.monotonic() + 60
    while not ended(front.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(front.pid, 0)  # its number is still taken
    assert ended(front.pid)
    front.wait()
    assert ended(front.pid)


@pytest.mark.parametrize(("begun", "error", "reason", "code"), [
    (False, ArgumentError("MLAAttention num_heads", "size", "4 over 3 ranks", "a multiple of 3"),
     "ArgumentError: MLAAttention num_heads: size is 4 over 3 ranks; accepted: a multiple of 3", child.REFUSED),
    (True, MemoryError("no more"), "rank 2: MemoryError: no more", 1),
])  # fmt: skip
def test_a_rank_without_scheduler_tells_the_front_why_it_ends(
    begun: bool, error: Exception, reason: str, code: int, short_folder: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One that is killed for it leaves the first rank with no more than that it is gone."""

    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(startup, "build", (lambda *given: SimpleNamespace(executor=None)) if begun else fail)
    monkeypatch.setattr(channel, "Channel", lambda: None)
    monkeypatch.setattr(follower, "follow", fail)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    monkeypatch.setattr(faulthandler, "register", lambda *given, **options: None)
    monkeypatch.setattr(parallel_child.logs, "configure", lambda level: None)
    with zmq.Context() as context, context.socket(zmq.PULL) as front:
        front.bind(f"ipc://{short_folder}/from-7")
        assert parallel_child._following(EngineConfig(tp=3), 2, str(short_folder), 7) == code
        assert front.poll(5000)
        assert p.from_engine.decode(front.recv()) == p.Died(7, reason, restarting=begun)
    assert caplog.messages == [f"rank 2 {'died' if begun else 'does not start'}: {error}"]


def test_the_rank_that_failed_first_is_the_reason() -> None:
    lost, others = "RankLostError: a rank did not answer", "rank 2: RankLostError: rank 1 is gone"
    for reason in ("rank 1: MemoryError: no more", "the process of rank 1 was ended by SIGKILL"):
        for all_said in ((reason, lost), (lost, others, reason), (reason, "rank 2: OSError: closed")):
            front = EngineClient(EngineConfig(tp=2), ())
            for said in all_said:
                front._hear(p.Died(1, said, restarting=True), None)  # type: ignore[arg-type]
            assert front._reason == reason and not front._refused


def test_the_front_hears_which_rank_a_signal_ended(short_folder: Path, tmp_path: Path) -> None:
    """A rank that the system kills says nothing, and torchrun ends the others before they do."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL * int(os.environ['RANK']))\nsignal.pause()"
    )
    command = parallel_child.command_of(EngineConfig(tp=2))[:-2]
    with zmq.Context() as context, context.socket(zmq.PULL) as front:
        front.bind(f"ipc://{short_folder}/from-7")
        command += [str(script), str(short_folder), "7", str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        said = "the process of rank 1 was ended by SIGKILL"
        assert front.poll(5000) and p.from_engine.decode(front.recv()) == p.Died(7, said, restarting=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and (json.loads(line)["message"], json.loads(line)["level"]) == (said, "error")


@pytest.mark.parametrize(
    ("codes", "said", "code"),
    [((1, -9), ["rank 1 was ended by SIGKILL"], 1), ((3, -15), [], 3), ((-15, 1), ["rank 0 was ended by SIGTERM"], 1)],
)
def test_a_signal_is_the_cause_of_what_others_say_unless_torchrun_sent_it(
    codes: tuple[int, ...], said: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(arguments: Any) -> None:
        failures = {rank: ProcessFailure(rank, 0, each, "none") for rank, each in enumerate(codes)}
        for failure in failures.values():
            failure.timestamp = 5
        raise ChildFailedError("ranks", failures)

    monkeypatch.setattr("torch.distributed.run.main", main)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    told: list[str] = []
    try:
        assert launch([], told.append) == code
    finally:
        logging.disable(logging.NOTSET)
    assert [each.removeprefix("the process of ") for each in told] == said


def test_a_rank_that_stands_still_ends_with_its_launcher() -> None:
    """It cannot end itself, and would keep its memory; asked where it hangs, it answers, or is named if it cannot."""
    command, pipe = [sys.executable, "-c", LAUNCHER], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"RANK": "3"}) as launcher:
        try:
            assert launcher.stdout is not None and launcher.stderr is not None
            rank = int(launcher.stdout.readline())
            launcher.send_signal(signal.SIGUSR1)
            assert launcher.stderr.readline() == f"rank 3 (pid {rank}):\n"
            while "most recent call first" not in (line := launcher.stderr.readline()):
                assert line, "no answer"
            os.kill(rank, signal.SIGSTOP)
            while Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            launcher.send_signal(signal.SIGUSR1)
            while not (line := launcher.stderr.readline()).startswith("rank "):
                assert line, "not named"
            assert line == f"rank 3 (pid {rank}) is stopped and does not answer:\n"
        finally:
            launcher.kill()
        gone([rank])


def noticed(died: p.Died) -> bool:
    """Whether others saw that a rank was gone, which nobody had to find out by waiting for a step, or for a word."""
    return "took longer" not in died.reason and "said nothing" not in died.reason


def freezes(front: Front) -> bool:
    """Whether both ranks do, which did not at their start."""
    front.engine.send(p.Control(1, "freeze_gc"))
    counts = front.until(p.Reply).value["ranks"]
    return len(counts) == 2 and min(counts) > 10_000


def asked(front: Front) -> dict[int, list[int]]:
    """Requests of every kind at once: greedy, drawn, penalised, in pieces, of more tokens than a frame's first part."""
    long = [2 + i % 50 for i in range(150)]
    for rid, prompt, sampling, new in (
        (1, [5, 6, 7], p.Sampling(0.0), 12), (2, [9, 8], p.Sampling(0.9, seed=11), 12), (3, long, p.Sampling(0.0), 6),
        (4, [4] * 5, p.Sampling(0.8, seed=5, frequency_penalty=0.7), 8),
    ):  # fmt: skip
        submit = p.Submit(rid, p.pack_ids(prompt), sampling, new, ignore_eos=True, logprobs=1 if rid == 1 else -1)
        front.link.submit(submit, front.feed)
    for rid in (1, 2, 3, 4):
        assert front.end_of(rid).finish == "length", front.finished[rid]
    return {rid: front.ids[rid] for rid in (1, 2, 3, 4)}


SETTINGS: dict[str, Any] = dict(
    device="cpu", max_num_batched_tokens=64, num_pages=64, page_size=16, max_model_len=256, max_running_requests=8
)


def test_tokens_of_two_ranks_and_a_lost_one() -> None:
    ranks = Front("tiny", command=None, tp=2, no_freeze_gc=True, **SETTINGS)
    alone = Front("tiny", in_process=True, **SETTINGS)
    alone.until(p.EngineInfo)
    wanted = asked(alone)
    alone.engine.shutdown()
    assert ranks.until(p.EngineInfo).epoch == 1
    assert asked(ranks) == wanted
    assert freezes(ranks)
    workers = _children(ranks.engine.pid)
    assert len(workers) == 2
    ranks.submit(10, 240)
    while len(ranks.ids.get(10, ())) < 3:
        ranks.until(p.StepOut)
    os.kill(workers[1], signal.SIGKILL)
    assert ranks.end_of(10).code == "engine_restarting"
    died = ranks.until(p.Died)
    assert died.restarting and noticed(died) and "rank 1" in died.reason, died
    assert ranks.until(p.EngineInfo).epoch == 2
    gone(workers)
    ranks.submit(11, 4)
    assert ranks.end_of(11).finish == "length"
    workers = _children(ranks.engine.pid)
    ranks.engine.shutdown()
    gone(workers)


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return sorted(map(int, listed.stdout.split()))


def test_ctrl_c_while_torchrun_is_imported_ends_a_command_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "torch.distributed.run", Interrupted("torch.distributed.run"))
    said: list[str] = []
    assert (launch([], said.append), said) == (128 + signal.SIGINT, [])


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_who_ends_a_command_of_several_ranks_reads_no_traceback(number: signal.Signals) -> None:
    """A terminal's interrupt reaches all processes, and none waits for another to end its answer."""
    command = [*launcher(2, "fastlayers_server"), "generate", "Once", "--max-new-tokens", "250"]
    command += ["--temperature", "3", "--tp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.read(1)
        workers = _children(started.pid)
        assert len(workers) == 2
        begun = time.monotonic()
        os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
        assert (started.stderr.read(), started.wait(60)) == (b"", 128 + number)
        assert time.monotonic() - begun < 12  # torchrun gives its processes half a minute
    gone(workers)
