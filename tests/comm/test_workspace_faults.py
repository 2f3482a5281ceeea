"""What goes wrong while a workspace is made, on one rank: all of them refuse it together, and say why."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from fastlayers import env
from fastlayers.comm import fabric
from fastlayers.comm.expert_exchange.cases import experts_of
from fastlayers.comm.expert_exchange.layer import ExpertExchange
from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.sum_norm.layer import SumNorm
from fastlayers.comm.symmetric import SymmArena
from fastlayers.errors import CollectiveMismatch
from fastlayers.testing.world import Rank, world

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import hasten

if env.triton_interpret():  # in the ranks, too, which load this file alone
    hasten()

CPU = torch.device("cpu")


class Mapped(SymmArena):
    """An arena of files that all ranks map; a fault is that of the last rank."""

    folder, fault = "", ""

    @property
    def faulty(self) -> bool:
        return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def _map(self, rank: int, nbytes: int, shared: bool = True) -> torch.Tensor:
        return torch.from_file(f"{self.folder}/{rank}", shared=shared, size=nbytes, dtype=torch.uint8)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.fault == "no memory" and self.faulty:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._map(torch.distributed.get_rank(), nbytes)  # what is gathered next comes when all have done so

    def _meet(self, buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
        if self.fault == "no rendezvous" and self.faulty:
            raise RuntimeError("CUDA driver error: peer access is not supported")
        private = self.fault == "no peer access" and self.faulty
        return [self._map(peer, buffer.numel(), shared=not (private and peer == 0)) for peer in range(size)]

    def ready(self) -> None:
        torch.distributed.barrier()


def make(rank: Rank, folder: str, fault: str) -> tuple[str | None, list[str], str, torch.Tensor]:
    """Return why there is no workspace, what was logged, what a layer takes, and what it makes of each rank's rows."""
    own = type("Own", (Mapped,), {"folder": folder, "fault": fault})
    axis, said = rank.spec().tp, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    fabric.log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "survey", lambda axis, device: Fabric(axis.size))
        patch.setattr(fabric, "SymmArena", own)
        made = Workspace.make(axis, 16, torch.float32, CPU, rows=4)
    fabric.log.removeHandler(handler)
    name = "auto" if fault else "triton_symm_mem"
    layer = SumNorm(axis, 16, workspace=made, dtype=torch.float32, backend=name)
    torch.manual_seed(7)
    parts = torch.randn(rank.size, 3, 16)
    h = layer(parts[rank.rank].clone(), torch.zeros(3, 16), torch.ones(16))[1]
    return made.fabric.refusal, said, layer.choice.name, h - parts.sum(0)


REFUSALS = {
    "no memory": "rank 1 could not get 1,280 bytes of symmetric memory: CUDA out of memory. Tried to allocate 2.00 GiB",
    "no rendezvous": "rank 1 could not get the memory of the other ranks: CUDA driver error: peer access is not "
    "supported",
    "no peer access": "no peer access between ranks 1 and 0",
}


@pytest.mark.parametrize("fault", ["", *REFUSALS])
def test_all_ranks_refuse_together(fault: str, tmp_path: Path) -> None:
    for refusal, said, name, off in world(2).run(make, str(tmp_path), fault):
        if fault:
            assert refusal == REFUSALS[fault] and said == [f"rows cross ranks by NCCL: {refusal}"]
        else:
            assert refusal is None and said == []
        assert name == ("gloo" if fault else "triton_symm_mem") and torch.allclose(off, torch.zeros(3, 16), atol=1e-6)


def other_sizes(rank: Rank, folder: str) -> str:
    own = type("Own", (Mapped,), {"folder": folder})
    try:
        own(rank.spec().tp, 1024 * (1 + rank.rank), CPU)
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def test_ranks_ask_for_one_size(tmp_path: Path) -> None:
    wanted = "SymmArena: the ranks ask for [1024, 2048] bytes; accepted: one size on all ranks"
    assert world(2).run(other_sizes, str(tmp_path)) == [wanted] * 2


def exchange(rank: Rank, folder: str) -> tuple[list[bool], list[str]]:
    """Return whether tokens that go through a workspace come back with the bits of those that are gathered."""
    own, axis = type("Own", (Mapped,), {"folder": folder}), rank.spec().tp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "survey", lambda axis, device: Fabric(axis.size))
        patch.setattr(fabric, "SymmArena", own)
        made = Workspace.make(axis, 16, torch.float32, CPU, rows=1, share=4, tokens=(8, 2, 4))
    ways = [
        ExpertExchange(axis, 16, 8, 2, workspace=made, dtype=torch.float32, backend=name)
        for name in ("triton_symm_mem", "gloo")
    ]
    generator, same = torch.Generator().manual_seed(rank.rank), []
    for tokens, ragged in ((4, None), (0, None), (rank.rank * 3, (0, 3)), (3, None)):
        x = torch.randn(tokens, 16, generator=generator)
        ids = torch.rand(tokens, 8, generator=generator).topk(2).indices.int()
        ids[1:2] = -1  # a row that pads
        weights = torch.rand(tokens, 2, generator=generator)
        there = partial(experts_of, rank.rank, 4)
        one, other = (way(x, ids, weights, there, ragged) for way in ways)
        same.append(torch.equal(one, other) and one.shape == x.shape)
    return same, [way.choice.name for way in ways]


def test_tokens_through_a_workspace(tmp_path: Path) -> None:
    assert world(2).run(exchange, str(tmp_path)) == [([True] * 4, ["triton_symm_mem", "gloo"])] * 2
