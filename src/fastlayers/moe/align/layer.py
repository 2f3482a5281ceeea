"""Grouping of (token, expert) pairs into blocks of ``block`` pairs of one expert, for grouped GEMMs.

    P = T*k pairs, E = num_experts, B = block, pair p belongs to token p // k

    sorted_ids[C]      pairs ordered by expert, each expert's run padded with P to a multiple of B
    expert_ids[C/B]    the expert of each block
    num_post_pad[1]    pairs including padding that are in use; a multiple of B

    ids  [[0, 2], [2, -1]], E = 3, B = 2:   sorted_ids [0, 4, 1, 2],  expert_ids [0, 2],  num_post_pad 4

Inside an expert pairs keep their order, so results do not depend on timing. A pair whose id is outside
``[0, E)`` (-1: padding, or an expert of another rank) gets no place: it costs nothing. The capacity C depends on
shapes only. From num_post_pad on, both arrays are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastlayers.device import Device
from fastlayers.errors import check_positive
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend


@dataclass(frozen=True)
class MoEAlignConfig:
    """``num_experts`` and the block size, see the file's head."""

    num_experts: int
    block: int

    def __post_init__(self) -> None:
        check_positive("moe_align", num_experts=self.num_experts, block=self.block)


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Return the largest number of blocks that any ids can need: the capacity in blocks.

    Every expert that occurs opens one block; each further block of it needs ``block`` more pairs.
    """
    opened = min(num_pairs, num_experts)
    return opened + (num_pairs - opened) // block


def _power_of_two(cfg: MoEAlignConfig, device: Device) -> str | None:
    return f"block {cfg.block} is not a power of two" if cfg.block & (cfg.block - 1) else None


_HERE = "fastlayers.moe.align"
MOE_ALIGN = Registry(
    "moe_align",
    [
        triton_backend(f"{_HERE}.triton:TritonMoEAlign", _power_of_two),
        torch_backend(f"{_HERE}.torch:TorchMoEAlign"),
        reference_backend(f"{_HERE}.reference:ReferenceMoEAlign"),
    ],
    cases=f"{_HERE}.cases",
)
