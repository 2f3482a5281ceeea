"""Checkpoints that hold one tensor per expert and projection: which part of each a rank reads, and where that goes.

    E = local experts, D = hidden_size, I = intermediate_size

    none         gate_proj.weight [I, D], up_proj.weight [I, D], down_proj.weight [D, I], and .bias where there are any
    fp8_block    and .weight_scale_inv, a number a block
    int8         and .weight_scale, a number a row
    w4a16, …     the tensors of the layout, as of a linear: :mod:`fastlayers.linear.weight_only.checkpoint`

Shared experts are one MLP of ``count · I`` features in the file, and ``count`` experts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError, check_choice
from fastlayers.linear.weight_only.checkpoint import PLAIN, Codes, bits_of, layout_slots
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.gpt_oss_slots import part_of_groups
from fastlayers.moe.fused_moe.weights import GROUP, MoEWeights
from fastlayers.quant.packed_codes import UNIT
from fastlayers.quant.spec import QuantSpec
from fastlayers.quant.weight_only_config import LAYOUTS
from fastlayers.weights import Slot, wrong_scale

_NAME = "FusedMoE"


def part_of_features(quant: QuantSpec, intermediate_size: int, tp: Axis) -> slice:
    """Return the inner features of this rank: equal parts, or whole groups or words where weights are packed.

    Raises
    ------
    ArgumentError
        No such parts; or experts are not read in this layout, or in this order of input features.
    """
    if quant.format == "mxfp4":
        return part_of_groups(tp, intermediate_size, _NAME)
    if quant.format in LAYOUTS:
        check_choice(_NAME, "quant.layout", quant.layout, LAYOUTS[quant.format])
        if quant.act_order:
            accepted = "False; `fastlayers convert SRC DST --format bf16` multiplies such experts out"
            raise ArgumentError(_NAME, "quant.act_order", True, accepted)
        whole, what = _uncut(quant)
        if whole > 1 and (tp.size > 1 or not _may_end_inside_a_word(quant)):
            why, ranks = f"with {quant.format}: no {what} is cut", intermediate_size // whole
            if intermediate_size % whole == 0 and ranks < tp.size:
                why += f", so at most {ranks} ranks"
            return part_of_groups(tp, intermediate_size, _NAME, whole, why)
    return tp.part(intermediate_size, f"{_NAME} intermediate_size")


def _uncut(quant: QuantSpec) -> tuple[int, str]:
    """Return how many input features of packed weights stay together, and what they are."""
    if quant.layout in PLAIN:
        return 1, ""
    if quant.group_size:
        return max(quant.group_size, UNIT), "group of inputs"
    return (UNIT, "unit of nibbles") if quant.format == "w4a16" else (32 // bits_of(quant.format), "word of codes")


def _may_end_inside_a_word(quant: QuantSpec) -> bool:
    """Return whether the last word of a row may be filled up: bytes with one scale a row, no words along the rows."""
    alone = not quant.group_size and not quant.zero_point
    return alone and quant.format == "w8a16" and quant.layout == "packed"


def slots_of_experts(
    held: MoEWeights, cfg: FusedMoEConfig, full: int, read: slice, names: Sequence[str], first: int, count: int, *,
    layout: str,
) -> Iterator[tuple[str, Slot]]:  # fmt: skip
    """Yield the slots of ``count`` experts from ``first`` on that the checkpoint stores as one MLP.

    Parameters
    ----------
    held : MoEWeights
        Of this rank.
    cfg : FusedMoEConfig
    full : int
        Inner features of an expert over all ranks, of which this one holds ``read``.
    read : slice
    names : sequence of str
        Of gate, up and down, without ``.weight``.
    first, count : int
    layout : str
        Of weights alone of 4 or 8 bits.

    Raises
    ------
    ArgumentError
        Several experts' codes share a word.
    """
    experts, hidden = slice(first, first + count), cfg.hidden_size
    if cfg.quant in LAYOUTS:
        words = 1 if layout in PLAIN else 32 // bits_of(cfg.quant)
        if count > 1 and full % words:
            given = f"{count} with intermediate_size {full}"
            accepted = f"1, or an intermediate_size of whole words: a multiple of {words}"
            raise ArgumentError(_NAME, "num_shared", given, accepted)
        for expert in range(count):
            part = slice(expert * full + read.start, expert * full + read.stop)
            yield from _codes(held, cfg, part, names, first + expert, full * count, layout)
    else:
        for half, name in enumerate(names[:2]):
            yield f"{name}.weight", _rows(held.w13, half, experts, full, read, (hidden,))
        yield f"{names[2]}.weight", _columns(held.w2, experts, full, read, hidden)
    if cfg.quant == "fp8_block":
        assert held.w13_scale is not None and held.w2_scale is not None
        blocks, wide = -(-full // GROUP), -(-hidden // GROUP)
        part = slice(read.start // GROUP, -(-read.stop // GROUP))
        for half, name in enumerate(names[:2]):
            slot = _rows(held.w13_scale, half, experts, blocks, part, (wide,))
            yield f"{name}.weight_scale_inv", replace(slot, wrong=wrong_scale)
        slot = _columns(held.w2_scale, experts, blocks, part, wide)
        yield f"{names[2]}.weight_scale_inv", replace(slot, wrong=wrong_scale)
    if cfg.quant == "int8":
        assert held.w13_scale is not None and held.w2_scale is not None
        for half, name in enumerate(names[:2]):
            slot = _rows(held.w13_scale, half, experts, full, read, ())
            yield f"{name}.weight_scale", _flattened(slot)
        # One scale per output channel, shared by the parts of the input.
        slot = Slot(held.w2_scale[experts], (hidden,), convert=lambda s: s.expand(count, -1))
        yield f"{names[2]}.weight_scale", _flattened(slot)
    if held.w13_bias is not None and held.w2_bias is not None:
        for half, name in enumerate(names[:2]):
            yield f"{name}.bias", _rows(held.w13_bias, half, experts, full, read, ())
        yield f"{names[2]}.bias", Slot(held.w2_bias[first], (hidden,))


def _codes(
    held: MoEWeights, cfg: FusedMoEConfig, read: slice, names: Sequence[str], expert: int, whole: int, layout: str
) -> Iterator[tuple[str, Slot]]:  # fmt: skip
    """Yield what one expert reads of an MLP of ``whole`` features: rows of gate and up, columns of down."""
    hidden, own = cfg.hidden_size, cfg.intermediate_size
    weight, scale, zero = held.of("w13", expert)
    assert scale is not None
    for half, name in enumerate(names[:2]):
        rows = slice(half * own, (half + 1) * own)
        codes = Codes(
            layout, cfg.quant, cfg.group_size, hidden, slice(0, hidden), weight[rows], scale[:, rows],
            None if zero is None else zero[:, rows],
        )  # fmt: skip
        for tensor, slot in layout_slots(codes, whole, read, []):
            yield f"{name}.{tensor}", slot
    weight, scale, zero = held.of("w2", expert)
    assert scale is not None
    codes = Codes(layout, cfg.quant, cfg.group_size, whole, read, weight, scale, zero)
    for tensor, slot in layout_slots(codes, hidden, slice(0, hidden), []):
        yield f"{names[2]}.{tensor}", slot


def _rows(parameter: torch.Tensor, half: int, experts: slice, full: int, read: slice, rest: tuple[int, ...]) -> Slot:
    """Return the slot of gate (half 0) or up (half 1) rows; ``full`` rows per expert, ``read`` of them here."""
    size, count = read.stop - read.start, experts.stop - experts.start
    dest = parameter[experts, half * size : (half + 1) * size]
    if count == 1:
        return Slot(dest[0], (full, *rest), (read,))
    return Slot(dest, (count * full, *rest), convert=lambda part: part.unflatten(0, (count, full))[:, read])


def _columns(parameter: torch.Tensor, experts: slice, full: int, read: slice, hidden: int) -> Slot:
    """Return the slot of the down projection: ``full`` columns per expert, ``read`` of them here."""
    count = experts.stop - experts.start
    if count == 1:
        return Slot(parameter[experts][0], (hidden, full), (slice(0, hidden), read))
    return Slot(
        parameter[experts],
        (hidden, count * full),
        convert=lambda part: part.unflatten(1, (count, full))[:, :, read].transpose(0, 1),
    )


def _flattened(slot: Slot) -> Slot:
    """Return the slot of one scale a row, which may be stored as ``[N]`` or ``[N, 1]``."""
    inner = slot.convert or (lambda rows: rows)
    return replace(slot, convert=lambda rows: inner(rows.reshape(-1)), wrong=wrong_scale)
