"""Merge of two attention results over disjoint sets of keys.

    T = tokens, H = heads, D = head_dim;  lse = natural logarithm of the softmax denominator
    m[T,H]   = max(lse_a, lse_b)
    o[T,H,D] = (exp(lse_a - m) o_a + exp(lse_b - m) o_b) / (exp(lse_a - m) + exp(lse_b - m))
    lse[T,H] = m + log(exp(lse_a - m) + exp(lse_b - m))

A side whose LSE is -inf saw no key and contributes nothing, whatever its output holds; +inf counts as -inf.
Where both sides saw nothing, the result is 0 and -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from fastlayers.errors import check_positive, check_tensor
from fastlayers.layer import Layer
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class MergeStateConfig:
    """What a backend must know: ``head_dim``."""

    head_dim: int

    def __post_init__(self) -> None:
        check_positive("MergeState", head_dim=self.head_dim)


_HERE = "fastlayers.attention.merge_state"
MERGE_STATE = Registry(
    "merge_state",
    [
        triton_backend(f"{_HERE}.triton:TritonMergeState"),
        torch_backend(f"{_HERE}.torch:TorchMergeState"),
        reference_backend(f"{_HERE}.reference:ReferenceMergeState"),
    ],
    cases=f"{_HERE}.cases",
)


class MergeState(Layer):
    """Merge two attention results over disjoint sets of keys.

    Parameters
    ----------
    head_dim : int
        Of the outputs (the values' head dimension).
    device : torch device, optional
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Never merge two states whose LSE both hold an attention sink: it would count twice. Source: the split
    softmax of FlashAttention (Dao et al. 2022). Capture-safe; allocates its outputs.
    For inference only: it raises where an input or a parameter requires a gradient.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> o_a, o_b = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    >>> lse = torch.zeros(1, 1)
    >>> o, lse = fl.merge_state(o_a, lse, o_b, lse)
    >>> o.tolist(), round(lse.item(), 4)
    ([[[0.5, 0.5]]], 0.6931)
    """

    def __init__(self, head_dim: int, *, device: torch.device | str | None = None, backend: str = "auto") -> None:
        super().__init__()
        self.choose(MERGE_STATE, MergeStateConfig(head_dim), device, backend)

    def forward(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge.

        Parameters
        ----------
        o_a, o_b : Tensor ``[T, H, D]``
            One dtype (fp32, fp16, bf16); any strides, the last dimension is contiguous.
        lse_a, lse_b : Tensor fp32 ``[T, H]``
            Natural logarithm.

        Returns
        -------
        o : Tensor ``[T, H, D]``
        lse : Tensor fp32 ``[T, H]``
            Both are new tensors.
        """
        check_tensor(
            "MergeState",
            "o_a",
            o_a,
            shape=(None, None, self.cfg.head_dim),
            dtype=FLOATS,
            device=self.device_type,
            last_dim_contiguous=True,
        )
        shape, where = tuple(o_a.shape), o_a.device
        check_tensor("MergeState", "o_b", o_b, shape=shape, dtype=o_a.dtype, device=where, last_dim_contiguous=True)
        check_tensor("MergeState", "lse_a", lse_a, shape=shape[:2], dtype=torch.float32, device=where)
        check_tensor("MergeState", "lse_b", lse_b, shape=shape[:2], dtype=torch.float32, device=where)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
        result: tuple[torch.Tensor, torch.Tensor] = self.ladder.pick(o_a.shape[0])(o_a, lse_a, o_b, lse_b)
        return result


@lru_cache
def _layer(head_dim: int, device: torch.device, backend: str) -> MergeState:
    return MergeState(head_dim, device=device, backend=backend)


def merge_state(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention results; a :class:`MergeState` made on first use for this head size and device.

    See :meth:`MergeState.forward` for shapes. Inside a compiled or captured region make the module yourself.
    """
    check_tensor("merge_state", "o_a", o_a, shape=(None, None, None), dtype=FLOATS)
    return _layer(o_a.shape[-1], o_a.device, backend)(o_a, lse_a, o_b, lse_b)
