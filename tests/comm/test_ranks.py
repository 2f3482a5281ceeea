"""How processes meet: Ranks under torchrun, what is refused, and the command line over two processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError, EnvironmentVariableError
from fastlayers.testing.world import Rank, world
from fastlayers_server.cli import main

ROOT = Path(__file__).parents[2]


def test_sizes_are_checked_before_anybody_meets() -> None:
    assert fl.Ranks is Ranks and Ranks(tp=2, dp=3).processes == 6
    with pytest.raises(ArgumentError, match=r"Ranks: ep is 3; accepted: a divisor of tp \* dp = 4"):
        Ranks(tp=2, dp=2, ep=3)
    with pytest.raises(ArgumentError, match="Ranks: tp"):
        Ranks(tp=0)


def test_one_process_needs_nothing() -> None:
    spec, device = Ranks().join("cpu")
    assert spec == ParallelSpec() and device.type == "cpu"
    with pytest.raises(ArgumentError, match="processes is 1; accepted: 2: torchrun --nproc-per-node 2"):
        Ranks(tp=2).join("cpu")


def test_what_torchrun_sets() -> None:
    assert env.torchrun_rank({}) is None
    assert env.torchrun_rank({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (3, 4, 1)
    with pytest.raises(EnvironmentVariableError, match="LOCAL_RANK=None"):
        env.torchrun_rank({"RANK": "3", "WORLD_SIZE": "4"})


def join(rank: Rank) -> tuple[tuple[int, ...], ...]:
    spec, device = Ranks(dp=2, ep=2).join("cpu")
    assert device.type == "cpu"
    with pytest.raises(ArgumentError, match="processes is 2; accepted: 4"):
        Ranks(tp=2, dp=2).join("cpu")
    return tuple((axis.size, axis.rank) for axis in (spec.tp, spec.attn_tp, spec.attn_dp, spec.ep, spec.moe_tp))


def test_processes_that_have_met_already() -> None:
    one, two = world(2).run(join)
    assert one == ((2, 0), (1, 0), (2, 0), (2, 0), (1, 0))
    assert two == ((2, 1), (1, 0), (2, 1), (2, 1), (1, 0))


STAYS_OUT = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(0)
from datetime import timedelta
import fastlayers as fl
from fastlayers.comm import ranks
ranks.TIMEOUT = timedelta(seconds=2)
try:
    fl.Ranks(tp=2).join("cpu")
except fl.errors.RankLostError as error:
    print(error, flush=True)
"""


def torchrun(program: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program of two processes."""
    program.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_rank_that_ends_before_the_model(tmp_path: Path) -> None:
    found = torchrun(tmp_path / "program.py", STAYS_OUT)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Ranks: rank 0 waited for 2 processes, and rank 1 did not come within 2 s (")
    assert found.stdout.rstrip().endswith("; accepted: all 2 processes make the model")


# All on one core, where threads of Gloo's run when nothing else does: so they hold what a call sent until the end.
ENDS_AT_ONCE = """
import os
from pathlib import Path
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import torch
import fastlayers as fl
from fastlayers.comm.collectives import collectives
spec, _ = fl.Ranks(tp=2).join("cpu")
over = collectives(spec.tp)
over.all_reduce_(torch.ones(4))
threads = [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]
for thread in threads:
    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
for _ in range(20):
    over.all_reduce_(torch.ones(4))
print(len(threads) > 1, flush=True)
"""


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_program_that_ends_behind_a_call_is_not_aborted(tmp_path: Path, times: int) -> None:
    """Without ``Ranks.leave()``; see ``_let_go``, without which a rank of each run is."""
    for _ in range(times):
        found = torchrun(tmp_path / "program.py", ENDS_AT_ONCE)
        assert found.returncode == 0, found.stderr
        assert "".join(found.stdout.split()) == "TrueTrue"  # both write to one pipe, maybe before either ends its line


def command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *given: str
) -> tuple[int, str, str]:
    """Run the command here, which starts the ranks' processes; return its exit code and what all of them wrote."""
    monkeypatch.setattr(sys, "argv", ["fastlayers", *given])
    monkeypatch.setattr(subprocess, "run", partial(subprocess.run, timeout=300))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), *capfd.readouterr()


GPT_OSS = ["--checkpoint", str(ROOT / "checkpoints" / "tiny_gpt_oss")]


# That --tp arrives, and what ranks then compute, other tests say, too; that --dp does, this one alone.
@pytest.mark.parametrize("checkpoint", [GPT_OSS, pytest.param([], marks=pytest.mark.slow)], ids=["gpt_oss", "deepseek"])
@pytest.mark.parametrize("split", [pytest.param(["--tp", "2"], marks=pytest.mark.slow), ["--dp", "2"]], ids=" ".join)
def test_command_line_over_two_processes(
    split: list[str], checkpoint: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Notices of the model are given once: here that a format is slow on this device."""
    asked = ["generate", "What is 127 + 45?", "--dtype", "fp32", "--device", "cpu", "--json", *split, *checkpoint]
    code, said, errors = command_line(monkeypatch, capfd, *asked)
    answer = json.loads(said)  # one process speaks
    assert code == 0 and answer["text"].strip() == "172" and answer["finished"] == "stop"
    assert errors.count("MXFP4 weights in 4 modules") == (checkpoint == GPT_OSS)


def test_ranks_that_fail_alike_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "models")
    from family_tools import Variation, save_random

    odd = Variation("odd", "LlamaConfig", 1, {"num_hidden_layers": 1, "intermediate_size": 65})
    folder = save_random(odd.hf_config(), tmp_path / "odd")
    for file in (ROOT / "checkpoints" / "tiny_gpt_oss").glob("*token*"):
        shutil.copy(file, folder)
    capfd.readouterr()  # what saving shows
    asked = ["generate", "Once", "--device", "cpu", "--dp", "2", "--checkpoint", str(folder)]
    code, _, errors = command_line(monkeypatch, capfd, *asked)
    said = "error: generate: Linear out_features: size is 65 over 2 ranks; accepted: a multiple of 2"
    assert (code, " ".join(errors.split())) == (1, said)
