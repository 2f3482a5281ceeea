"""Sum over ranks, every rank gets all of it.

n = ranks of the axis, T = rows (equal on all ranks), H = hidden_size
s[T,H]  = Σ over ranks of x[T,H]            (fp32, in rank order, rounded once to the dtype)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.comm.rank_layer import MNNVL, NVSHMEM, RankConfig, RankLayer, rank_registry, refuse_nccl, refuse_package
from fastlayers.device import Device
from fastlayers.registry import Backend

# What sgl_kernel's buffers hold.
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class AllReduceConfig(RankConfig):
    """What a backend must know; fields as of :class:`~fastlayers.comm.rank_layer.RankConfig`."""

    layer, operator = "AllReduce", "push"

    def limits(self) -> dict[str, int]:
        return super().limits() | {"sgl_kernel": MOST_BYTES // (self.hidden_size * self.dtype.itemsize)}


def _refuse_torch(cfg: AllReduceConfig, device: Device) -> str | None:
    if (why := refuse_nccl(cfg, device) or cfg.refusal) is not None:
        return why
    if cfg.dtype == torch.float16:
        return "fp16: torch sums bf16 and fp32 only"
    return None if cfg.hidden_size % 8 == 0 else f"rows of {cfg.hidden_size} values; a multiple of 8"


ALL_REDUCE = rank_registry(
    "all_reduce", "AllReduce",
    {
        "nccl_window": "NCCL < 2.29: symmetric windows replayed in graphs corrupt data",
        "multimem": "multicast is off on this fabric",
        "nvshmem": NVSHMEM,
        "mnnvl": MNNVL,
    },
    Backend(
        "torch_symm_mem", "fastlayers.comm.all_reduce.torch_symm_mem:TorchSymmMemAllReduce",
        ("torch.distributed._symmetric_memory:rendezvous",), _refuse_torch, (),
    ),
    Backend(
        "sgl_kernel", "fastlayers.comm.all_reduce.sgl_kernel:SglAllReduce",
        ("sgl_kernel", *(f"torch.ops:sgl_kernel.{name}" for name in
                         ("meta_size", "init_custom_ar", "register_buffer", "all_reduce", "dispose"))),
        refuse_package("sgl_kernel", (2, 4, 6, 8)), (), note="waits for ever for a rank that is lost",
    ),
)  # fmt: skip


class AllReduce(RankLayer):
    """Sum over the ranks of an axis; parameters as of :class:`~fastlayers.comm.rank_layer.RankLayer`.

    Notes
    -----
    Every rank of the axis makes the same calls with the same number of rows. Capture-safe; ``x`` may be overwritten.
    """

    rows, config = ALL_REDUCE, AllReduceConfig

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x [T, H]`` over the ranks, which may be ``x`` itself, overwritten."""
        if not self.trusted:
            self.check_rows(x)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        self.check_order(x)
        total: torch.Tensor = self.ladder.pick(x.shape[0])(x)
        return total
