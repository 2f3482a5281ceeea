"""Grouped-query attention over a paged cache: the core.

    T = tokens, Hq = num_heads, Hkv = num_kv_heads, D = head_dim; head h of q reads head h // (Hq / Hkv)
    p(t)        = positions[t], the position of token t in its request
    s[t, h, j]  = softmax_scale * q[t, h] · k[j, h]              for keys j of the request with
                  start ≤ j ≤ p(t)  and  p(t) - j < window       (all others: -inf)
                  softcap * tanh(s / softcap)                    with softcap
    Z[t, h]     = sum_j exp(s[t, h, j]) + exp(sink[h])           the sink is a raw logit without a value
    o[t, h]     = sum_j exp(s[t, h, j]) v[j, h] / Z[t, h]        new tensor of q's dtype
    lse[t, h]   = log Z[t, h]                                    fp32, natural logarithm

A token that sees nothing (left padding) gives o = 0 and, without a sink, lse = -inf. Softmax is in fp32. e4m3
caches are read with scale 1. An LSE that holds a sink must not be merged with another one that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers.attention.kv_cache.spec import DTYPES as CACHE_DTYPES
from fastlayers.attention.kv_write.layer import needs_e4m3
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_positive
from fastlayers.layer import PHASES
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend

NAME = "Attention"


@dataclass(frozen=True)
class GQAConfig:
    """What a backend must know.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
        Of this rank.
    softmax_scale : float
    window : int, optional
        Tokens that a token sees, itself included (Hugging Face's ``sliding_window``).
    softcap : float, optional
    sinks : bool
    page_size : int
    dtype, kv_dtype : torch.dtype
        Of q and of the cache.
    phase : str
        ``"decode"``: each request brings one token; ``"extend"``: any number; ``""``: a backend that does both.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    phase: str = ""

    def __post_init__(self) -> None:
        check_choice(NAME, "phase", self.phase, ("", *PHASES))
        check_positive(NAME, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        check_positive(NAME, page_size=self.page_size)
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(NAME, "num_heads", self.num_heads, f"a multiple of {self.num_kv_heads}")
        if self.window is not None:
            check_positive(NAME, window=self.window)
        if self.softcap is not None and not self.softcap > 0:
            raise ArgumentError(NAME, "softcap", self.softcap, "a positive number or None")
        check_choice(NAME, "dtype", self.dtype, CACHE_DTYPES[:3])
        check_choice(NAME, "kv_dtype", self.kv_dtype, CACHE_DTYPES)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def _refuse_triton(cfg: GQAConfig, device: Device) -> str | None:
    if cfg.head_dim > 256:
        return f"head_dim {cfg.head_dim} is larger than 256"
    return needs_e4m3(cfg, device)


_HERE = "fastlayers.attention.gqa"
GQA = Registry(
    "gqa",
    [
        triton_backend(f"{_HERE}.triton:TritonGQA", _refuse_triton),
        torch_backend(f"{_HERE}.torch:TorchGQA"),
        reference_backend(f"{_HERE}.reference:ReferenceGQA"),
    ],
    cases=f"{_HERE}.cases",
)
