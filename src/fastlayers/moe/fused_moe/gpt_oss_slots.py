"""Checkpoints that hold all experts in one tensor a projection, with interleaved gate and up rows: GPT-OSS.

    E = experts, D = hidden_size, I = intermediate_size

    bf16     gate_up_proj [E, D, 2I], down_proj [E, I, D]                  (transposed)
    mxfp4    gate_up_proj_blocks [E, 2I, D/32, 16], gate_up_proj_scales [E, 2I, D/32]
             down_proj_blocks [E, D, I/32, 16], down_proj_scales [E, D, I/32]
    both     gate_up_proj_bias [E, 2I], down_proj_bias [E, D]

A rank reads whole experts (``ep``), and of each the pairs of gate and up rows and the columns of the down projection
that belong to its part of I (``tp``), in mxfp4 whole groups of 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.quant.mxfp4.codes import BYTES, GROUP
from fastlayers.weights import Slot, wrong_exponent


@dataclass(frozen=True)
class PackedExpertNames:
    """Names of the tensors relative to the module, without ``_blocks``, ``_scales`` and ``_bias``."""

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class StackedExpertNames:
    """Names of tensors that hold all experts, transposed, gate columns before up columns, not quantised: Llama 4.

    ``gate_up`` ``[E, D, 2I]``, ``down`` ``[E, I, D]``.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"


def slots_of_stacked(
    names: StackedExpertNames,
    cfg: FusedMoEConfig,
    experts: MoEWeights,
    whole: tuple[int, int],
    first: int,
    inner: slice,
) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of one rank, two for each expert's gate and up; arguments as for :func:`slots_of_packed`."""
    (count, full), hidden, own = whole, cfg.hidden_size, cfg.intermediate_size
    for local in range(cfg.num_experts):
        one, expert = slice(first + local, first + local + 1), slice(local, local + 1)
        for half in range(2):
            columns = slice(half * full + inner.start, half * full + inner.stop)
            dest = experts.w13[expert, half * own : (half + 1) * own].mT
            yield names.gate_up, Slot(dest, (count, hidden, 2 * full), (one, slice(0, hidden), columns))
        yield names.down, Slot(experts.w2[expert].mT, (count, full, hidden), (one, inner))


def part_of_groups(axis: Axis, extent: int, layer: str, group: int = GROUP, why: str = "for MXFP4") -> slice:
    """Return this rank's features of ``extent``: whole groups, as evenly as they go; ``why`` they are not cut.

    Raises
    ------
    ArgumentError
        ``extent`` is not whole groups, or there are fewer of them than ranks.
    """
    if extent < 1 or extent % group:
        raise ArgumentError(layer, "intermediate_size", extent, f"a multiple of {group} {why}")
    groups = extent // group
    if groups < axis.size:
        given = f"{extent} over {axis.size} ranks"
        raise ArgumentError(layer, "intermediate_size", given, f"at least {group} features a rank {why}")
    # The first ranks take one more, so that the slowest rank has as little as possible to do.
    each, more = divmod(groups, axis.size)
    start = axis.rank * each + min(axis.rank, more)
    return slice(start * group, (start + each + (axis.rank < more)) * group)


def slots_of_packed(
    names: PackedExpertNames, cfg: FusedMoEConfig, experts: MoEWeights, whole: tuple[int, int], first: int, inner: slice
) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of one rank, one for each tensor and expert: no more than an expert is held while loading.

    ``whole``: experts and their features over all ranks; this one holds the experts from ``first`` on, features
    ``inner``.
    """
    (count, full), hidden = whole, cfg.hidden_size
    rows, every = slice(2 * inner.start, 2 * inner.stop), slice(0, hidden)
    for local in range(cfg.num_experts):
        one = slice(first + local, first + local + 1)
        expert = slice(local, local + 1)
        if experts.w13_scale is not None and experts.w2_scale is not None:  # MXFP4
            groups = slice(inner.start // GROUP, inner.stop // GROUP)
            wide, narrow = hidden // GROUP, full // GROUP
            yield (
                f"{names.gate_up}_blocks",
                Slot(experts.w13[expert], (count, 2 * full, wide, BYTES), (one, rows)),
            )
            shape = count, 2 * full, wide
            scale = Slot(experts.w13_scale[expert], shape, (one, rows), wrong=wrong_exponent)
            yield f"{names.gate_up}_scales", scale
            yield (
                f"{names.down}_blocks",
                Slot(experts.w2[expert], (count, hidden, narrow, BYTES), (one, every, groups)),
            )
            shape, part = (count, hidden, narrow), (one, every, groups)
            yield f"{names.down}_scales", Slot(experts.w2_scale[expert], shape, part, wrong=wrong_exponent)
        else:
            # Transposed views of the parameters: the copy turns them, and dtypes are checked as everywhere.
            yield names.gate_up, Slot(experts.w13[expert].mT, (count, hidden, 2 * full), (one, every, rows))
            yield names.down, Slot(experts.w2[expert].mT, (count, full, hidden), (one, inner))
        if experts.w13_bias is not None and experts.w2_bias is not None:
            yield f"{names.gate_up}_bias", Slot(experts.w13_bias[expert], (count, 2 * full), (one, rows))
            yield f"{names.down}_bias", Slot(experts.w2_bias[expert], (count, hidden), (one,))
