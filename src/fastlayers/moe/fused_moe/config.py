"""What the experts' backends must know, and by which shape key tuned tables find it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers.errors import ArgumentError, check_choice, check_plain, check_positive, dtype_name
from fastlayers.moe.fused_moe.weights import FORMATS
from fastlayers.quant.mxfp4.codes import groups_of
from fastlayers.quant.packed_codes import UNIT
from fastlayers.quant.weight_only_config import WEIGHT_ONLY

ACTIVATIONS = ("silu", "swiglu_oai")
_NAME = "FusedMoE"


@dataclass(frozen=True)
class FusedMoEConfig:
    """What a backend must know: sizes on this rank, formats, activation.

    ``dtype`` is that of the activations, where it is known. ``group_size`` (0: a scale an output channel) and
    ``zero_point`` are of weights alone of 4 or 8 bits.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared: int = 0
    quant: str = "none"
    scale_fmt: str = "float"
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    bias: bool = False
    scaling_factor: float = 1.0
    interleaved: bool = False
    dtype: torch.dtype | None = None
    group_size: int = 0
    zero_point: bool = False

    def __post_init__(self) -> None:
        check_positive(
            _NAME,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        check_choice(_NAME, "quant", self.quant, FORMATS)
        check_choice(_NAME, "activation", self.activation, ACTIVATIONS)
        check_plain(_NAME, "int >= 0", num_shared=self.num_shared)
        if self.scaling_factor == 0.0:
            raise ArgumentError(_NAME, "scaling_factor", self.scaling_factor, "a factor other than 0")
        if self.quant == "mxfp4":
            groups_of(self.hidden_size, "hidden_size", _NAME)
            groups_of(self.intermediate_size, "intermediate_size", _NAME)
        self._check_codes()
        if self.interleaved and self.quant not in ("none", "mxfp4"):
            raise ArgumentError(_NAME, "interleaved", f"True with {self.quant}", "False: gate rows, then up rows")
        if self.num_shared and (self.interleaved or self.quant == "mxfp4"):
            raise ArgumentError(_NAME, "num_shared", f"{self.num_shared} with {self.quant}", "0, if not gate, then up")

    def _check_codes(self) -> None:
        size, alone = self.group_size, self.quant in WEIGHT_ONLY
        check_plain(_NAME, "int >= 0", group_size=size)
        check_plain(_NAME, "bool", zero_point=self.zero_point)
        if (size or self.zero_point) and (not alone or self.quant == "fp8_w8a16"):
            given = f"group_size {size}, zero_point {self.zero_point} with {self.quant}"
            raise ArgumentError(_NAME, "quant", given, "0 and False: they are of integers of 4 or 8 bits alone")
        if size % UNIT:
            raise ArgumentError(_NAME, "group_size", size, f"0 (a scale per channel) or a multiple of {UNIT}")
        least = size or (UNIT if self.quant == "w4a16" else 1)
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % least:
                raise ArgumentError(_NAME, name, getattr(self, name), f"a multiple of {least}: whole groups of inputs")

    @property
    def all_experts(self) -> int:
        """Routed and shared experts of this rank."""
        return self.num_experts + self.num_shared

    @property
    def pairs_per_token(self) -> int:
        """Experts a token takes, shared ones included."""
        return self.top_k + self.num_shared

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        sizes = f"E={self.all_experts},k={self.pairs_per_token},D={self.hidden_size},I={self.intermediate_size}"
        dtype = "" if self.dtype in (None, torch.bfloat16) else f",{dtype_name(self.dtype)}"
        quant = f"{self.quant},{self.group_size}" if self.quant in WEIGHT_ONLY else self.quant
        return f"{sizes},{quant},{self.activation}{dtype}"
