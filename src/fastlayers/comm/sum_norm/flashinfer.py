"""SumNorm by FlashInfer's kernel after TensorRT-LLM's, by name: sum, residual and norm in one launch.

    rows ─► inbox of every rank ─► Σ in rank order (fp32, rounded) ─► + residual, rounded ─► norm, rounded once

Words that differ from −0 have arrived, in three inboxes that take turns; counters of the device's own say whose turn it
is, so that a captured call is replayed as it is. Its kernels wait for ever for a rank that is lost.
"""

from __future__ import annotations

import importlib
import weakref
from functools import partial
from typing import Any

import torch

from fastlayers import env
from fastlayers.comm.parallel import Axis
from fastlayers.comm.processes import gather_objects, naming_lost
from fastlayers.comm.sum_norm.layer import SumNormConfig
from fastlayers.comm.symmetric import all_well

# Of its allocation: the inboxes, and a buffer for sums of many rows.
BUFFERS = 4


class FlashInferSumNorm:
    """Takes as many rows as the workspace has slots; the first of a workspace makes FlashInfer's, on all ranks."""

    def __init__(self, cfg: SumNormConfig) -> None:
        self.cfg, self.slots = cfg, cfg.made().slots
        made, device = cfg.workspace, cfg.workspace.arena.device
        make = partial(Fusion, cfg.axis, cfg.hidden_size, cfg.dtype, self.slots, device)
        self.fusion: Fusion = made.of_package("flashinfer", make)
        self.bias = 1.0 if cfg.rounding == "one_plus" else 0.0

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, *, codes: str | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return ``(y, h)``, new tensors. Its codes have scales that no product here reads, so ``y`` are rows."""
        self.cfg.check_slots(x.shape[0], self.slots)
        if not x.shape[0]:
            return x, x if residual is None else residual
        x = x.contiguous()
        residual = torch.zeros_like(x) if residual is None else residual.contiguous()
        y, h = torch.empty_like(x), torch.empty_like(x)
        self.fusion(x, residual, weight, self.cfg.eps, self.bias, y, h)
        return y, h


class Fusion:
    """FlashInfer's workspace for the ranks of an axis; collective, and let go of with this object.

    Raises
    ------
    NoSymmetricMemory
        On every rank alike: one of them could not build the kernels, or has no memory.
    """

    def __init__(self, axis: Axis, hidden_size: int, dtype: torch.dtype, slots: int, device: torch.device) -> None:
        import torch.distributed as dist

        self.comm: Any = importlib.import_module("flashinfer.comm")
        failed: str | None = None
        try:
            # One rank builds where none has; the others wait for it, none holds memory meanwhile.
            importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()
            wanted = BUFFERS * axis.size * slots * hidden_size * dtype.itemsize
            free = torch.cuda.mem_get_info(device)[0]
            failed = None if wanted < free else f"{wanted:,} bytes, of which {free:,} are free"
        except Exception as error:  # a package may raise anything; the other ranks have to know
            failed = (str(error).splitlines() or [type(error).__name__])[0][:200]
        all_well("flashinfer's workspace", gather_objects(failed, axis, "making flashinfer's workspace"))
        env.disable_multicast()
        with torch.cuda.device(device):
            self.made = self.comm.create_allreduce_fusion_workspace(
                backend="trtllm", world_size=axis.size, rank=axis.rank, max_token_num=slots, hidden_dim=hidden_size,
                dtype=dtype, group=axis.group,
            )  # fmt: skip
        self._end = weakref.finalize(self, _let_go, self.comm, self.made)
        torch.cuda.synchronize(device)
        with naming_lost(axis, "making flashinfer's workspace"):
            dist.barrier(group=axis.group)  # nobody pushes before all inboxes are empty

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bias: float, y: torch.Tensor,
        h: torch.Tensor,
    ) -> None:  # fmt: skip
        """Sum, add, norm; rows are contiguous. Not launched early: it reads residual and weight before it waits."""
        self.comm.allreduce_fusion(
            input=x, workspace=self.made, pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=False, output=y, residual_in=residual, residual_out=h, norm_out=y, rms_gamma=weight,
            rms_eps=eps, weight_bias=bias, fp32_acc=True,
        )  # fmt: skip


def _let_go(comm: Any, made: Any) -> None:
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(
        made.ipc_handles
    )  # a table of its own, which destroy leaves
    made.destroy()
