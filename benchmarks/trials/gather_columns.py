"""Try FP8 rows between ranks whose scales lie in columns: rows of a program beside each other.

    torchrun --standalone --nproc-per-node 2 benchmarks/trials/gather_columns.py --out FILE
    --check       every variant on small sizes against today's kernel, ranks of one process interpreted on the CPU
    --compile     what each variant takes when it is compiled for sm_90; needs no GPU

A program of today's kernel takes rows that lie as many rows apart as there are programs, so in a layout of columns each
scale crosses the link alone, four bytes of which each is a packet. A program of :func:`beside_kernel` takes ``CHUNK``
rows beside each other, keeps their scales, and stores a part of each column: the same codes and scales. One JSON line
a variant: the slower rank's time, today's before and after. What is predicted: ``benchmarks/notes/exchange.md``.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from fastlayers.comm.symmetric import SymmArena, local_arenas
from fastlayers.comm.triton_exchange import Exchange, way_of
from fastlayers.comm.triton_push import warps_of
from fastlayers.comm.triton_signals import address, await_signal, order, signal
from fastlayers.integers import next_power_of_2
from fastlayers.norm.rms_norm.row import quantised_row
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild, compile_for
from fastlayers.triton_lang import await_inputs, release_dependents

sys.path.insert(0, str(Path(__file__).parents[1]))
from rows import Rows, arguments, finish

HIDDEN = 7168
LAYOUT = "col_tma4"
CHUNKS = (8, 4, 16)
# With more a multiprocessor holds one program of 16 warps, and not two.
REGISTERS = 64
ROWS = (16384, 4096, 2048, 256)


@kernel(do_not_specialize=("share", "rank", "deadline_ns", "scales_at", "s_group"))
def beside_kernel(
    x_ptr, outboxes_ptr, flags_ptr, flag_ptr, state_ptr, status_ptr, x_stride, hidden, share, rank, deadline_ns,
    scales_at, s_group, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    group, beside = tl.arange(0, BLOCK // 128), tl.arange(0, CHUNK)
    tile = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    await_inputs(PDL)
    release_dependents(PDL)
    late = tl.load(status_ptr)
    last = tl.load(state_ptr + 2 * program) + 1
    if PART <= 1:
        for hop in tl.static_range(1, N):
            signal(address(flags_ptr, (rank + hop) % N, tl.int32) + rank * programs + program, last)
    if PART == 0 or PART == 2:
        for hop in tl.static_range(1, N):
            giver = (rank + hop) % N
            late = await_signal(flag_ptr + giver * programs + program, last, late, deadline_ns, status_ptr, 1 + giver)
        for block in range(program, tl.cdiv(share, CHUNK), programs):
            first = block * CHUNK
            kept = tl.zeros((BLOCK // 128, CHUNK), tl.float32)
            for each in tl.range(0, CHUNK, loop_unroll_factor=1):
                row = first + each
                x = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + column, mask=(column < hidden) & (row < share),
                            other=0.0)  # fmt: skip
                codes, scale = quantised_row(x, BLOCK)
                for hop in tl.static_range(N):
                    box = address(outboxes_ptr, (rank + hop) % N, tl.uint8)
                    at = (rank * share + row).to(tl.int64)
                    tl.store(box + at * hidden + tile, codes.to(tl.uint8, bitcast=True),
                             mask=(tile < hidden) & (row < share))  # fmt: skip
                kept = tl.where(beside[None, :] == each, scale[:, None], kept)
            for hop in tl.static_range(N):
                box = address(outboxes_ptr, (rank + hop) % N, tl.uint8) + scales_at
                place = group[:, None].to(tl.int64) * s_group + (rank * share + first + beside)[None, :]
                tl.store(box.to(tl.pointer_type(tl.float32)) + place, kept,
                         mask=(group[:, None] * 128 < hidden) & (first + beside < share)[None, :])  # fmt: skip
        for hop in tl.static_range(1, N):
            signal(address(flags_ptr, (rank + hop) % N, tl.int32) + (N + rank) * programs + program, last)
    if PART == 0 or PART == 3:
        for hop in tl.static_range(1, N):
            giver = (rank + hop) % N
            late = await_signal(flag_ptr + (N + giver) * programs + program, last, late, deadline_ns, status_ptr,
                                1 + giver)  # fmt: skip
        tl.store(state_ptr + 2 * program, last)


def beside(move: Exchange, x: torch.Tensor, chunk: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of all ranks, as ``move.gather_quantised`` does."""
    share, hidden, arena = x.shape[0], x.shape[1], move.arena
    codes, scales, (scales_at, s_row, s_group) = move._coded(share * arena.size, LAYOUT)
    assert s_row == 1
    beside_kernel[(move.state.shape[0],)](
        x, move.outbox.peers, move.flags.peers, move.flags.tensor, move.state, arena.status, x.stride(0), hidden, share,
        arena.rank, arena.deadline_ns, scales_at, s_group, N=arena.size, CHUNK=chunk, BLOCK=next_power_of_2(hidden),
        PART=part, num_warps=warps_of(hidden), maxnreg=REGISTERS, **order(x.device),
    )  # fmt: skip
    return codes, scales


def copied(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the next call overwrites."""
    return found[0].view(torch.uint8).clone(), found[1].contiguous().clone()


def alike(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return whether these are the same codes and scales."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check(rows: Rows) -> list[dict[str, Any]]:
    """Compare all variants with today's kernel, ranks of one process on the CPU."""
    bad, hidden = list[dict[str, Any]](), 384
    for ranks in (2, 4):
        moves = [
            Exchange(arena, hidden, torch.bfloat16, 24, 2)
            for arena in local_arenas(ranks, Exchange.nbytes_for(ranks, hidden, torch.bfloat16, 24, 2))
        ]
        for share in (21, 2, 0):
            xs = [torch.randn(share, hidden).bfloat16() for _ in moves]
            for part in (1, 2, 3):
                pairs = [
                    move.gather_quantised(x, layout=LAYOUT, part=part)[0] for move, x in zip(moves, xs, strict=True)
                ]
            wanted = copied(pairs[0])
            for chunk in CHUNKS:
                for part in (1, 2, 3):
                    found = [beside(move, x, chunk, part) for move, x in zip(moves, xs, strict=True)]
                row = {"ranks": ranks, "rows": share * ranks, "chunk": chunk,
                       "same": all(alike(copied(each), wanted) for each in found)}  # fmt: skip
                rows.put(row)
                bad += [] if row["same"] else [row]
    return bad


def time_all(options: Namespace) -> list[dict[str, Any]]:
    """Time all variants on the ranks of this host."""
    from two_gpus import Run
    from two_gpus_rows import microseconds, several

    run = Run(Namespace(dp=1, ep=1))
    axis, bad = run.parallel.tp, list[dict[str, Any]]()
    rows = Rows(options) if run.rank == 0 else None
    for count in ROWS:
        share = count // axis.size
        programs, chunk = way_of(share)
        arena = SymmArena(
            axis, Exchange.nbytes_for(axis.size, HIDDEN, torch.bfloat16, share, programs), run.device, 10.0
        )  # fmt: skip
        move = Exchange(arena, HIDDEN, torch.bfloat16, share, programs, chunk)
        arena.ready()
        torch.manual_seed(axis.rank)
        x = torch.randn(share, HIDDEN, device=run.device).bfloat16()
        ways: dict[str, Callable[[], Any]] = {
            "today": partial(move.gather_quantised, x, layout=LAYOUT),
            "rows": partial(move.gather_quantised, x, layout="row"),
            **{f"beside {each}": partial(beside, move, x, each) for each in CHUNKS},
            "again": partial(move.gather_quantised, x, layout=LAYOUT),
        }
        wanted = copied(move.gather_quantised(x, layout=LAYOUT)[0])
        for name, way in ways.items():
            same = alike(copied(way()), wanted) if "beside" in name else True
            row = {
                "rows": count, "programs": programs, "way": name, "same": run.all_true(same),
                "us": microseconds(run, partial(several, way, 4), 4, 15), "late": arena.failed(),
            }  # fmt: skip
            if rows is not None:
                rows.put(row)
            bad += [] if row["same"] and row["late"] is None else [row]
    return bad


def build_of(chunk: int) -> KernelBuild:
    """Return how a variant is compiled for two ranks."""
    signature = {"x_ptr": "*bf16", "outboxes_ptr": "*u64", "flags_ptr": "*u64"}
    signature |= dict.fromkeys(("flag_ptr", "state_ptr", "status_ptr"), "*i32")
    signature |= dict.fromkeys(("x_stride", "hidden", "share", "rank", "s_group"), "i32")
    signature |= dict.fromkeys(("deadline_ns", "scales_at"), "i64")
    given = {"N": 2, "CHUNK": chunk, "BLOCK": next_power_of_2(HIDDEN), "PART": 0, "PDL": True}
    return KernelBuild(
        f"beside {chunk}",
        beside_kernel,
        signature,
        given,
        warps_of(HIDDEN),
        aligned=("x_stride", "hidden"),
        registers=REGISTERS,
    )


@torch.inference_mode()
def main() -> None:
    """Compile, check, or check and time."""
    parser = arguments(__doc__, 45.0)
    parser.add_argument("--check", action="store_true", help="only bits, on small sizes and on the CPU")
    parser.add_argument("--compile", action="store_true", help="only what the variants take; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        for chunk in CHUNKS:
            report = compile_for(build_of(chunk))
            print(json.dumps({"way": report.name, "registers": report.registers, "spills": report.spills,
                              "shared": report.shared}), flush=True)  # fmt: skip
        return
    options.device = "cpu" if options.check else options.device
    torch.manual_seed(0)
    finish(check(Rows(options)) if options.check else time_all(options))


if __name__ == "__main__":
    main()
