"""Attention groups whose rows cross ranks by moves and a seam, in processes: one function for every kind of ranks.

kernels     interpreted, over memory that the processes map
reference   on a CPU, over Gloo
nccl        on GPUs, over symmetric memory: ``-m multigpu``, with two or four of them
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fastlayers import env
from fastlayers.comm import fabric, triton_push, triton_signals
from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.fabric import Fabric, Workspace
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import Axis, ParallelSpec
from fastlayers.comm.seam import Moves, Seam, late_of
from fastlayers.comm.sum_norm.reference import sum_in_order
from fastlayers.comm.symmetric import Arena, SymmArena
from fastlayers.comm.triton_exchange import Exchange
from fastlayers.comm.triton_push import PushSum
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.registry import COLLECTIVES
from fastlayers.testing.comm_check import COMM_CASES, HIDDEN, SPREAD_CASES, check_communicator
from fastlayers.testing.world import Rank, World, world

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import hasten

if env.triton_interpret():  # in the ranks, too, which load this file alone
    hasten()

CASES = {case.name: case for case in (*COMM_CASES, *SPREAD_CASES)}
SLOTS = 16  # of the interpreted kernels


def kinds(size: int) -> list[Any]:
    """Return the kinds of ranks that there may be so many of."""
    interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
    gpus = pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} CUDA devices")
    return [
        pytest.param("kernels", marks=interpreted), "reference",
        pytest.param("nccl", marks=[pytest.mark.multigpu, gpus]),
    ]  # fmt: skip


def each(sizes: dict[str, int]) -> list[Any]:
    """Return names with the kinds of ranks on which they run."""
    found = []
    for name, size in sizes.items():
        for kind in kinds(size):
            marks = getattr(kind, "marks", ())
            value = kind if isinstance(kind, str) else kind.values[0]
            found.append(pytest.param(name, value, marks=marks, id=f"{name}-{value}"))
    return found


def ranks(size: int, kind: str) -> World:
    return world(size, "nccl" if kind == "nccl" else "gloo")


class Mapped(Arena):
    """The arena of one rank of an axis, in files that its ranks map."""

    def __init__(self, axis: Axis, folder: str, nbytes: int, deadline_s: float) -> None:
        names = [f"{folder}/{'_'.join(map(str, axis.ranks))}-{rank}" for rank in range(axis.size)]
        self.all = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names]
        super().__init__(
            axis.size, axis.rank, self.all[axis.rank], [every.data_ptr() for every in self.all], deadline_s
        )


def mapped(axis: Axis, folder: str, hidden: int, dtype: torch.dtype, deadline_s: float) -> Workspace:
    """Return what :meth:`Workspace.make` does on GPUs."""
    programs = 2
    nbytes = PushSum.nbytes_for(axis.size, hidden, dtype, SLOTS)
    nbytes += Exchange.nbytes_for(axis.size, hidden, dtype, SLOTS, programs)
    arena = Mapped(axis, folder, nbytes, deadline_s)
    push, exchange = PushSum(arena, hidden, dtype, SLOTS), Exchange(arena, hidden, dtype, SLOTS, programs, 1)
    torch.distributed.barrier()
    return Workspace(Fabric(axis.size), arena, push, exchange)


def clock() -> Any:
    """Return the time, as a kernel has it; who waits lets the others run."""
    time.sleep(0.0002)
    return tl.full([], time.monotonic_ns(), tl.int64)


@contextmanager
def connected(
    rank: Rank, parallel: ParallelSpec, hidden: int, dtype: torch.dtype, kind: str, folder: str,
    deadline_s: float = 60.0,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Give the seam and the moves of a model over such ranks."""
    several, sizes = parallel.attn_tp.size > 1, (hidden, dtype, rank.device)
    if kind == "nccl":
        found: dict[str, Any] = {
            "seam": Seam.make(parallel, *sizes), "moves": Moves.make(parallel, *sizes),
        }  # fmt: skip
        assert (found["seam"] is not None) == several and found["moves"] is not None
        for across in filter(None, found.values()):
            assert across.workspace.arena is not None, across.workspace.fabric.refusal
            across.workspace.arena.deadline_ns = int(deadline_s * 1e9)
            assert across.gather.choice.name.startswith("triton_symm_mem"), across.evidence
        yield found
        assert [late.status.item() for late in late_of(made_of(found))] == [0] * (1 + several) or deadline_s < 5
        return
    with pytest.MonkeyPatch.context() as patch:
        name = "triton_symm_mem" if kind == "kernels" else "reference"
        patch.setenv(env.BACKEND, ",".join(f"{layer}={name}" for layer in COLLECTIVES))
        for module in (triton_push, triton_signals):
            patch.setattr(module, "now", clock)
        of_axis: Any = lambda axis: None  # noqa: E731
        if kind == "kernels":
            of_axis = lambda axis: mapped(axis, folder, hidden, dtype, deadline_s)  # noqa: E731
        seam = Seam(parallel, of_axis(parallel.attn_tp), *sizes) if several else None
        moves = Moves(parallel, of_axis(parallel.tp), *sizes)
        assert moves.gather.choice.name == moves.scatter.choice.name == name
        yield {"seam": seam, "moves": moves}


def made_of(found: dict[str, Any]) -> Any:
    return type("Model", (), found)


# ---- every transition --------------------------------------------------------------------------------------------


@torch.inference_mode()
def communicate(rank: Rank, name: str, kind: str, folder: str) -> None:
    case = CASES[name]
    spec = rank.spec(attn_dp=case.attn_dp, ep=case.ep)
    with connected(rank, spec, HIDDEN, torch.float32, kind, folder) as across:

        def made(parallel: ParallelSpec, **options: Any) -> LayerCommunicator:
            return LayerCommunicator(parallel, **across, **options)

        check_communicator(rank, made, case)  # type: ignore[arg-type]


NAMES = (
    "dp2_graph", "dp2_sum_len", "dp2_idle_max_len", "dp2_idle_sum_len", "dp2_scattered", "dp2_tp2_graph",
    "dp2_tp2_sum_len", "dp2_tp2_idle_sum_len", "dp2_tp2_idle_max_len", "dp2_tp2_max_len_spread",
    "dp2_tp2_scattered", "dp2_tp2_no_tokens", "dp4_max_len",
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), each({name: CASES[name].size for name in NAMES}))
def test_transitions(name: str, kind: str, tmp_path: Path) -> None:
    ranks(CASES[name].size, kind).run(communicate, name, kind, str(tmp_path))


# ---- bits --------------------------------------------------------------------------------------------------------


def drawn(rank: Rank, rows: int, hidden: int, seed: int) -> torch.Tensor:
    """Return rows that every rank draws alike."""
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().to(rank.device)


@torch.inference_mode()
def bits(rank: Rank, attn_dp: int, kind: str, folder: str) -> list[str]:
    """Return where a layer's rows have not the bits of sums, norms and codes that are computed one after another."""
    spec = rank.spec(attn_dp=attn_dp)
    n, d, wrong = spec.attn_tp.size, spec.attn_dp.rank, []
    hidden = 2048 if kind == "nccl" else 256
    norm = RMSNorm(
        hidden, device=rank.device, dtype=torch.bfloat16, backend="torch" if kind == "reference" else "triton"
    )
    norm.weight.copy_(1 + 0.1 * drawn(rank, 1, hidden, 9)[0])
    few: list[tuple[int, ...]] = [(2,) * attn_dp, (4, *[1] * (attn_dp - 1))]
    counts = [*few, (64,) * attn_dp, (512, *[3] * (attn_dp - 1))] if kind == "nccl" else few
    with connected(rank, spec, hidden, torch.bfloat16, kind, folder) as across:
        layouts: list[str | None] = [None, "row", "col_tma4"]
        takes: list[str | None] = [None]
        made = LayerCommunicator(
            spec, input_layernorm=norm, post_attention_layernorm=norm, codes=lambda hook, rows: takes[0], **across
        )
        made.trusted = True
        for count in counts:
            for mode in ("max_len", "sum_len"):
                rows = tuple(-(-each // n) * n for each in count)
                rows = (max(rows),) * attn_dp if mode == "max_len" else rows
                step = StepTokens(count, rows, mode, n)
                parts = [[drawn(rank, rows[g], hidden, 100 * g + r) for r in range(n)] for g in range(attn_dp)]
                residuals = [drawn(rank, rows[g], hidden, 1000 + g) for g in range(attn_dp)]
                # One rank's rows are no sum: they keep the sign of their zeros.
                sums = [sum_in_order(torch.stack(each)) if n > 1 else each[0] for each in parts]
                hs = [(one.float() + old.float()).bfloat16() for one, old in zip(sums, residuals, strict=True)]
                y = torch.cat([norm(h) for h in hs])
                for takes[0] in layouts:
                    given = Hidden(
                        parts[d][spec.attn_tp.rank].clone(), residuals[d], Layout("attn_full", "attn_tp", "attn_full")
                    )
                    found = made.prepare_mlp(given, step)
                    what = f"{count}, {mode}, {takes[0]}"
                    if found.residual is None or not torch.equal(found.residual, hs[d]):
                        wrong.append(f"{what}: residual")
                    if not equal(found.tensor, y, takes[0]):
                        wrong.append(f"{what}: rows")
                whole = [drawn(rank, sum(rows), hidden, 7000 + r) for r in range(spec.tp.size)]
                output = made.postprocess(found.partial(whole[spec.tp.rank].clone(), "tp"), step).tensor
                wanted = sum_in_order(torch.stack(whole))[step.group_slice(d)]
                # The group's own way, of rows that differ in number, adds in bf16.
                exact = mode == "max_len" or len(set(rows)) == 1 or spec.tp.size == 2
                if not (torch.equal(output, wanted) if exact else torch.allclose(output, wanted, rtol=0.05, atol=0.05)):
                    wrong.append(f"{count}, {mode}: sums")
    return wrong


def equal(found: Any, rows: torch.Tensor, layout: str | None) -> bool:
    """Return whether rows are the same, or their codes and scales."""
    if layout is None:
        return torch.equal(found, rows)
    codes, scales = quantize_groups(rows, scale_layout=layout)
    same = isinstance(found, CodedRows) and torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
    return same and torch.equal(found.scales, scales) and found.scales.stride() == scales.stride()


GRIDS = {"dp2": (2, 2), "dp2_tp2": (4, 2), "dp4": (4, 4)}


@pytest.mark.parametrize(("grid", "kind"), each({name: size for name, (size, _) in GRIDS.items()}))
def test_bits(grid: str, kind: str, tmp_path: Path) -> None:
    size, attn_dp = GRIDS[grid]
    assert ranks(size, kind).run(bits, attn_dp, kind, str(tmp_path)) == [[]] * size


# ---- layers one after another, in any order ----------------------------------------------------------------------


@torch.inference_mode()
def chain(rank: Rank, attn_dp: int, kind: str, folder: str, replays: int) -> int:
    """Count steps of two layers whose rows were not those of the first time; captured on GPUs, with ranks held up."""
    spec, hidden = rank.spec(attn_dp=attn_dp), 256
    n, captured = spec.attn_tp.size, kind == "nccl"
    norms = [RMSNorm(hidden, device=rank.device, dtype=torch.bfloat16) for _ in range(2)]
    weights = [drawn(rank, hidden, hidden, 20 + rank.rank + 10 * i) / 64 for i in range(2)]
    with connected(rank, spec, hidden, torch.bfloat16, kind, folder) as across:
        made = LayerCommunicator(spec, input_layernorm=norms[0], post_attention_layernorm=norms[1], **across)

        def layers(x: torch.Tensor, step: StepTokens) -> torch.Tensor:
            state = Hidden.start(x)
            for _ in range(2):
                state = made.prepare_attn(state, step)
                state = made.prepare_mlp(state.partial(state.tensor @ weights[0], "attn_tp"), step)
                state = made.postprocess(state.partial(state.tensor @ weights[1], "tp"), step)
            return made.finish(state, norms[0], step)

        runs, wrong = [], 0
        for bucket in (n, 4 * n) if not captured else (n, 4 * n, 64 * n):
            step = StepTokens.plan([bucket] * attn_dp, attn_tp=n, extend=False, graph=True, bucket=bucket)
            x = drawn(rank, bucket, hidden, 50 + spec.attn_dp.rank)
            wanted = layers(x, step)
            if not captured:
                runs.append((lambda x=x, step=step: layers(x, step), wanted))  # type: ignore[misc]
                continue
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = layers(x, step)
            runs.append((lambda graph=graph, found=found, x=x: (graph.replay(), found)[1], wanted))  # type: ignore[misc]
        order, own = random.Random(3), random.Random(10 + rank.rank)
        counted = torch.zeros((), dtype=torch.int64, device=rank.device)
        for _ in range(replays if captured else 6):
            run, wanted = order.choice(runs)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(400_000)) if captured else time.sleep(own.random() / 100)
            counted += (run() != wanted).any()
        wrong = int(counted)
    return wrong


@pytest.mark.parametrize(("grid", "kind"), each({name: size for name, (size, _) in GRIDS.items()}))
def test_layers_in_any_order_of_steps(grid: str, kind: str, tmp_path: Path) -> None:
    size, attn_dp = GRIDS[grid]
    assert ranks(size, kind).run(chain, attn_dp, kind, str(tmp_path), 3000) == [0] * size


# ---- when something is wrong -------------------------------------------------------------------------------------


@torch.inference_mode()
def stays_away(rank: Rank, kind: str, folder: str) -> list[int]:
    """Return which ranks were waited for in vain in a sum of a group from which the last rank stays away.

    Who waited tells the others of the group, the one that stayed away among them, when the next layer's sum begins.
    """
    spec = rank.spec(attn_dp=2)
    with connected(rank, spec, 256, torch.bfloat16, kind, folder, 1.0) as across:
        x, late = drawn(rank, 2, 256, 1), late_of(made_of(across))
        assert len(late) == 2
        if rank.rank != 3:
            for _ in range(2):
                across["seam"].all_reduce(x.clone())
        torch.distributed.barrier()
        return [each.named(code) for each in late if (code := int(each.status))]


@pytest.mark.parametrize("kind", [kind for kind in kinds(4) if kind != "reference"])
def test_a_rank_of_a_group_is_named_as_all_know_it(kind: str, tmp_path: Path) -> None:
    assert ranks(4, kind).run(stays_away, kind, str(tmp_path)) == [[], [], [3], [3]]


class Short(SymmArena):
    """An arena for which the last rank has no memory."""

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return super()._allocate(nbytes if device.index != 3 else 1 << 42, device)


def no_memory(rank: Rank) -> tuple[str, str, list[str]]:
    spec = rank.spec(attn_dp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "SymmArena", Short)
        seam = Seam.make(spec, 256, torch.bfloat16, rank.device)
    assert seam is not None and seam.workspace is not None
    return str(seam.workspace.fabric.refusal), seam.all_reduce.choice.name, seam.evidence


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
def test_a_group_without_memory_has_all_groups_refuse() -> None:
    for refusal, chosen, evidence in world(4, "nccl").run(no_memory):
        assert "rank 1 could not get" in refusal and chosen == "nccl" and refusal in evidence[-1]
