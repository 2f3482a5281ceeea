"""How a checkpoint's weights are quantised, as plain data: :class:`QuantSpec`.

Comes from the checkpoint's ``quantization_config`` and goes into constructors, module by module, so that models
have no branches on the number format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastlayers.errors import ArgumentError, check_choice

FORMATS = ("none", "fp8_block", "int8", "mxfp4")


@dataclass(frozen=True)
class QuantSpec:
    """The number format of a module's weights.

    Parameters
    ----------
    format : str
        ``"none"`` (the model's dtype), ``"fp8_block"`` (e4m3, fp32 scale per 128×128 block), ``"int8"`` (W8A8,
        one fp32 scale per output channel), ``"mxfp4"`` (experts only: 4-bit codes, a power of two per 32 inputs).
    block_size : tuple[int, int]
        Rows and columns of one scale block.
    scale_fmt : str
        ``"float"`` or ``"ue8m0"`` (powers of two) for activation scales.
    skip : tuple[str, ...]
        Modules kept in the model's dtype: full names, or name suffixes, or ``re:`` patterns.
    """

    format: str = "none"
    block_size: tuple[int, int] = (128, 128)
    scale_fmt: str = "float"
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("QuantSpec", "format", self.format, FORMATS)
        check_choice("QuantSpec", "scale_fmt", self.scale_fmt, ("float", "ue8m0"))
        if len(self.block_size) != 2 or min(self.block_size) < 1:
            raise ArgumentError("QuantSpec", "block_size", self.block_size, "two positive integers")

    def for_module(self, name: str) -> QuantSpec:
        """Return the spec of one module by its full checkpoint name: itself, or unquantised if skipped."""
        return NONE if self.format != "none" and any(_matches(rule, name) for rule in self.skip) else self

    def with_skip(self, *rules: str) -> QuantSpec:
        """Return this spec with further modules kept unquantised."""
        return replace(self, skip=self.skip + rules)

    @staticmethod
    def from_config(config: Mapping[str, Any] | None) -> QuantSpec:
        """Return the spec for a Hugging Face ``quantization_config`` (``None``: unquantised).

        Raises
        ------
        ArgumentError
            A ``quant_method`` that no format of ours covers.
        """
        if not config:
            return NONE
        method = config.get("quant_method")
        if method == "fp8":
            size = config.get("weight_block_size") or (128, 128)
            if len(size) != 2:
                raise ArgumentError("QuantSpec", "weight_block_size", size, "two integers")
            return QuantSpec(
                "fp8_block",
                (int(size[0]), int(size[1])),
                config.get("scale_fmt") or "float",
                tuple(config.get("modules_to_not_convert") or ()),
            )
        if method == "int8":
            return QuantSpec("int8", skip=tuple(config.get("modules_to_not_convert") or ()))
        if method == "mxfp4":
            # The format of experts; whatever the file says of other modules, their tensors are not in it.
            kept = tuple(_from_glob(rule) for rule in config.get("modules_to_not_convert") or ())
            return QuantSpec("mxfp4", skip=(*kept, r"re:^(?!.*\bexperts\b)"))
        raise ArgumentError("QuantSpec", "quantization_config.quant_method", repr(method), "'fp8', 'int8' or 'mxfp4'")


def _from_glob(rule: str) -> str:
    """Return a rule with ``*`` (``model.layers.*.self_attn``) as a pattern of the names that begin like it."""
    return "re:^" + re.escape(rule).replace(r"\*", ".*") if "*" in rule else rule


def _matches(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.search(rule[3:], name) is not None
    return name == rule or name.endswith("." + rule) or name.startswith(rule + ".")


NONE = QuantSpec()
