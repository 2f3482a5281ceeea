"""Captured steps on two GPUs whose other rank dies or stays out: they end, in words, and so does what is behind them.

Kernels of NCCL have no deadline. What a CPU can show of the watch that ends them: ``test_watch.py``; of a generator
whose ranks die: ``test_lost_ranks.py``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm.collectives import collectives
from fastlayers.comm.watch import Watch
from fastlayers.errors import RankLostError
from fastlayers.runtime.graphs import CudaGraphs
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from family_tools import save_random, tiny_config
from test_lost_ranks import die, said_by

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GRACE, DEADLINE, SUMS = 1.0, 4.0, 3.0  # seconds: of an ended process, of one that lives, of a sum
PROMPTS, NEW = [[5, 6, 7, 8, 9, 10, 11], [12, 13]], 24


def tell(folder: str, **found: Any) -> None:
    """Write what was found, and end: NCCL would wait for the other rank."""
    Path(folder, "part").write_text(json.dumps(found))
    Path(folder, "part").rename(Path(folder, "seen"))
    die()


def stay_out(folder: str) -> None:
    """Live without a call until the other rank has told what it found."""
    until = time.monotonic() + 60.0
    while not Path(folder, "seen").exists() and time.monotonic() < until:
        time.sleep(0.1)


@torch.inference_mode()
def replayed(rank: Rank, folder: str, fault: str) -> None:
    """Tell how a replay of two collectives of NCCL ends for the first rank, and whether its graphs can be freed."""
    over, graphs, event = collectives(rank.spec().tp), CudaGraphs(rank.device), torch.cuda.Event()
    watch = Watch.of(rank.spec(), rank.device)
    assert watch is not None
    watch.grace_s, watch.deadline_s = GRACE, DEADLINE if fault == "silent" else 60.0
    x = torch.ones(8, 64, device=rank.device)

    def step() -> torch.Tensor:
        return over.all_gather(over.all_reduce_(x.clone()))

    graphs.capture("step", step)
    for _ in range(3):
        y = graphs.replay("step")
        event.record()
        watch.wait(event)
    good = bool((y == 2.0).all()) and y.shape == (16, 64)
    torch.distributed.barrier()
    if rank.rank == 1:
        if fault == "silent":
            stay_out(folder)
        die()
    graphs.replay("step")
    event.record()
    said, seconds = said_by(lambda: watch.wait(event))
    begin = time.monotonic()
    for _ in range(2):  # what is launched behind it ends as well
        graphs.replay("step")
    torch.cuda.synchronize()
    graphs.clear()
    tell(folder, good=good, said=said, seconds=seconds, more=time.monotonic() - begin)


@pytest.mark.parametrize("fault", ["killed", "silent"])
def test_a_replay_of_nccl_without_its_other_rank_ends(fault: str, tmp_path: Path) -> None:
    world(2, "nccl").run(replayed, str(tmp_path), fault, dying=[0, 1], timeout=90.0)
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["good"] and seen["more"] < 10.0
    if fault == "killed":
        assert seen["said"].startswith("Watch: rank 1 is gone, its process") and seen["seconds"] < GRACE + 10.0
    else:
        assert seen["said"].startswith("Watch: a rank of (0, 1) did not answer for 4 s")
        assert DEADLINE <= seen["seconds"] < DEADLINE + 10.0


@torch.inference_mode()
def generated(rank: Rank, model: str, folder: str, fault: str, board: bool) -> None:
    """Tell what a stream of captured steps raises of which the other rank dies or stays out, and how long that took."""
    made = AutoModel.from_pretrained(
        model, dtype=torch.bfloat16, page_size=16, device=rank.device, parallel=rank.spec()
    )
    assert made.seam is not None and made.seam.workspace is not None and made.seam.workspace.arena is not None
    made.seam.workspace.arena.deadline_ns = int(SUMS * 1e9)
    generator = Generator(made, max_batch=2, max_length=64, prefill_tokens=16, cuda_graph=True)
    step: Any = generator.step
    step._outbox.watch.grace_s = GRACE
    wanted = generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=())  # compiled, captured
    if not board:
        step._board = None  # as between hosts: nobody is told but by what does not come
    torch.distributed.barrier()
    right, calls = step.graphs.replay, 0

    def away(key: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == NEW // 2:
            if fault == "silent":
                stay_out(folder)
            die()
        return right(key)

    if rank.rank == 1:
        step.graphs.replay = away
    seen, said, last = 0, "nothing", time.monotonic()
    try:
        for _ in generator.stream(PROMPTS, max_new_tokens=NEW, eos_ids=()):
            seen, last = seen + 1, time.monotonic()
    except RankLostError as error:
        said = str(error)
    seconds, begin = time.monotonic() - last, time.monotonic()
    generator.close()
    torch.cuda.synchronize()
    tell(folder, said=said, seconds=seconds, tokens=seen, all=sum(map(len, wanted)), more=time.monotonic() - begin)


@pytest.mark.parametrize(("fault", "board"), [("killed", True), ("killed", False), ("silent", False)])
def test_a_generator_without_its_other_rank_ends(fault: str, board: bool, tmp_path: Path) -> None:
    """Behind its sums each of its steps gathers logits by NCCL, which alone would wait for ever."""
    model = str(save_random(tiny_config("qwen3"), tmp_path / "model"))
    world(2, "nccl").run(generated, model, str(tmp_path), fault, board, dying=[0, 1], timeout=120.0)
    seen = json.loads((tmp_path / "seen").read_text())
    begin = "Board: rank 1 is gone, its process" if board else "Watch: rank 1 "
    assert seen["said"].startswith(begin), seen
    assert seen["seconds"] < SUMS + GRACE + 10.0 and seen["more"] < SUMS + 10.0, seen
    assert 0 < seen["tokens"] < seen["all"] == 2 * NEW, seen


PROGRAM = """
import os, signal, sys
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import RankLostError
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

model = AutoModel.from_pretrained(sys.argv[1], parallel=Ranks(tp=2))
generator = Generator(model, max_batch=2, max_length=64, prefill_tokens=16)
prompts = [[5, 6, 7, 8], [9, 10]]
generator.generate(prompts, max_new_tokens=24, eos_ids=())
try:
    for number, _ in enumerate(generator.stream(prompts, max_new_tokens=24, eos_ids=())):
        if number == 10 and model.parallel.tp.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except RankLostError as error:
    print("lost", error.rank, flush=True)
    if sys.argv[2] == "raised":
        raise
    if sys.argv[2] == "left":
        generator.close()
        Ranks.leave()
"""


@pytest.mark.parametrize("how", ["caught", "left", "raised"])
def test_a_program_that_has_lost_a_rank_ends(how: str, tmp_path: Path) -> None:
    """By a plain return, behind ``leave``, or by the error: NCCL keeps no process that has nothing left to do."""
    model = str(save_random(tiny_config("qwen3"), tmp_path / "model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, model, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = ranks[0].communicate(timeout=120.0)[0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert "lost 1" in said and ranks[1].returncode == -9, said
    assert ranks[0].returncode == (1 if how == "raised" else 0), said
