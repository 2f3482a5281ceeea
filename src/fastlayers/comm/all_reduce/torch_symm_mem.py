"""AllReduce by torch's own one-shot sum over symmetric memory: an oracle for ours, by name."""

from __future__ import annotations

import torch

from fastlayers.comm.all_reduce.layer import AllReduceConfig

# Rows of the buffer; more take several calls.
ROWS = 1024


class TorchSymmMemAllReduce:
    """Copies rows into a buffer that other ranks read, and adds up all of them.

    The first call makes the buffer, together with the other ranks, so it must not be captured. With more than two ranks
    torch rounds after each of them.
    """

    def __init__(self, cfg: AllReduceConfig) -> None:
        self.cfg = cfg
        self._buffer: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        buffer = self._buffer if self._buffer is not None else self._made(x)
        sums = []
        for rows in x.split(ROWS):
            held = buffer[: rows.shape[0]]
            held.copy_(rows)
            sums.append(torch.ops.symm_mem.one_shot_all_reduce(held, "sum", self._group.group_name))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _made(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory as symmetric

        assert isinstance(self.cfg.axis.group, dist.ProcessGroup)
        self._group = self.cfg.axis.group
        self._buffer = symmetric.empty((ROWS, x.shape[1]), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(self._buffer, self._group)
        return self._buffer
