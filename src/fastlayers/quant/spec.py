"""How a checkpoint's weights are quantised, as plain data: :class:`QuantSpec`.

Comes from the checkpoint's ``quantization_config`` and goes into constructors, module by module, so that models
have no branches on the number format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastlayers.errors import ArgumentError, check_choice, check_fields, check_kind, check_pair, check_plain
from fastlayers.quant.packed_codes import UNIT
from fastlayers.quant.weight_only_config import (
    LAYOUTS,
    WEIGHT_ONLY,
    awq_options,
    check_int8,
    compressed_options,
    gptq_options,
)

FORMATS = ("none", "fp8_block", "int8", "mxfp4", "fp8_tensor", "fp8_channel", *WEIGHT_ONLY)


@dataclass(frozen=True)
class QuantSpec:
    """The number format of a module's weights.

    Parameters
    ----------
    format : str
        ``"none"`` (the model's dtype), ``"fp8_block"`` (e4m3, fp32 scale per 128×128 block), ``"int8"`` (W8A8,
        one fp32 scale per output channel), ``"mxfp4"`` (experts only: 4-bit codes, a power of two per 32 inputs),
        ``"fp8_tensor"`` and ``"fp8_channel"`` (e4m3, one fp32 scale per matrix or per output channel). Activations as
        they are: ``"w4a16"``, ``"w8a16"`` (integers) and ``"fp8_w8a16"`` (e4m3).
    block_size : tuple[int, int]
        Rows and columns of one scale block.
    scale_fmt : str
        ``"float"``, or for ``fp8_block`` ``"ue8m0"`` (powers of two), of the activations' scales.
    skip : tuple[str, ...]
        Modules kept in the model's dtype: full names, or name suffixes, or ``re:`` patterns.
    activation_scale : str
        Of ``fp8_tensor`` and ``fp8_channel``: ``"token"``, ``"tensor"`` (both found at each call) or ``"static"``.
    scale_names : tuple[str, str]
        How the checkpoint calls the scales of weight and input, for the same two formats.
    group_size, zero_point, act_order, layout
        Of weights alone: see :class:`fastlayers.WeightOnlyLinear`.
    """

    format: str = "none"
    block_size: tuple[int, int] = (128, 128)
    scale_fmt: str = "float"
    skip: tuple[str, ...] = ()
    activation_scale: str = "token"
    scale_names: tuple[str, str] = ("weight_scale", "input_scale")
    group_size: int = 0
    zero_point: bool = False
    act_order: bool = False
    layout: str = "plain"

    def __post_init__(self) -> None:
        check_choice("QuantSpec", "format", self.format, FORMATS)
        check_choice("QuantSpec", "scale_fmt", self.scale_fmt, ("float", "ue8m0"))
        check_choice("QuantSpec", "activation_scale", self.activation_scale, ("token", "tensor", "static"))
        check_fields("QuantSpec", self)
        self._check_weight_only()
        if self.scale_fmt != "float" and self.format != "fp8_block":
            raise ArgumentError("QuantSpec", "scale_fmt", f"{self.scale_fmt!r} with {self.format}", "'float'")
        # As tuples: a spec is hashable.
        object.__setattr__(self, "scale_names", tuple(self.scale_names))
        object.__setattr__(self, "block_size", check_pair("QuantSpec", "block_size", self.block_size))
        for rule in self.skip:
            if rule.startswith("re:"):
                try:
                    re.compile(rule[3:])
                except re.error as error:
                    raise ArgumentError("QuantSpec", "skip", repr(rule), f"a regular expression ({error})") from error

    def _check_weight_only(self) -> None:
        """Raise where fields of weights alone are set for another format, or are no layout or group of theirs."""
        if self.format in WEIGHT_ONLY:
            # A layout that is not said is "plain", whatever the format; the layer refuses what it cannot read.
            check_choice("QuantSpec", "layout", self.layout, tuple(dict.fromkeys(("plain", *LAYOUTS[self.format]))))
            if self.group_size < 0 or self.group_size % UNIT:
                accepted = f"0 (a scale per channel) or a multiple of {UNIT}"
                raise ArgumentError("QuantSpec", "group_size", self.group_size, accepted)
            return
        for name, default in (("group_size", 0), ("zero_point", False), ("act_order", False), ("layout", "plain")):
            if (given := getattr(self, name)) != default:
                accepted = f"{default!r}: it is for weights alone ({', '.join(WEIGHT_ONLY)})"
                raise ArgumentError("QuantSpec", name, f"{given!r} with {self.format}", accepted)

    def for_module(self, name: str) -> QuantSpec:
        """Return the spec of one module by its full checkpoint name: itself, or unquantised if skipped."""
        return NONE if self.format != "none" and any(_matches(rule, name) for rule in self.skip) else self

    @staticmethod
    def from_config(config: Mapping[str, Any] | None) -> QuantSpec:
        """Return the spec for a Hugging Face ``quantization_config`` (``None``: unquantised).

        Raises
        ------
        ArgumentError
            A ``quant_method`` that no format of ours covers.
        """
        check_kind("QuantSpec", Mapping | None, quantization_config=config)
        if not config:
            return NONE
        method = config.get("quant_method")
        if method == "fp8" and "weight_block_size" in config and config["weight_block_size"] is None:
            return _hugging_face_per_tensor(config)
        if method == "fp8":
            size = config.get("weight_block_size") or (128, 128)
            block = check_pair("QuantSpec", "quantization_config.weight_block_size", size)
            return QuantSpec("fp8_block", block, config.get("scale_fmt") or "float", _kept(config))
        if method == "int8":
            return QuantSpec("int8", skip=_kept(config))
        if method == "mxfp4":
            # The format of experts; whatever the file says of other modules, their tensors are not in it.
            kept = tuple(_from_glob(rule) for rule in _kept(config))
            return QuantSpec("mxfp4", skip=(*kept, r"re:^(?!.*\bexperts\b)"))
        if method == "fbgemm_fp8":
            return QuantSpec("fp8_channel", skip=_kept(config))
        if method in ("awq", "gptq"):
            read = awq_options if method == "awq" else gptq_options
            return QuantSpec(**read(config, _kept(config)))
        if method == "compressed-tensors":
            return _compressed_tensors(config)
        known = "'fp8', 'int8', 'mxfp4', 'fbgemm_fp8', 'awq', 'gptq' or 'compressed-tensors'"
        raise ArgumentError("QuantSpec", "quantization_config.quant_method", repr(method), known)


def _kept(config: Mapping[str, Any], key: str = "modules_to_not_convert") -> tuple[str, ...]:
    """Return the modules that ``quantization_config`` leaves unquantised: a list of names, or none."""
    given = config.get(key)
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(rule, str) for rule in given):
        raise ArgumentError("QuantSpec", f"quantization_config.{key}", repr(given), "a list of names, or none")
    return tuple(given)


def _hugging_face_per_tensor(config: Mapping[str, Any]) -> QuantSpec:
    """Return the spec of ``{"quant_method": "fp8", "weight_block_size": null}``, with Hugging Face's scale names."""
    scheme = config.get("activation_scheme") or "dynamic"
    check_choice("QuantSpec", "quantization_config.activation_scheme", scheme, ("dynamic", "static"))
    names = ("weight_scale_inv", "activation_scale")
    return QuantSpec(
        "fp8_tensor",
        skip=_kept(config),
        activation_scale="static" if scheme == "static" else "token",
        scale_names=names,
    )


def _compressed_tensors(config: Mapping[str, Any]) -> QuantSpec:
    """Return the spec of one group of linears in FP8 or int8 (W8A8), or of weights alone, of compressed-tensors."""
    given = config.get("config_groups") or {}
    groups = list(given.values()) if isinstance(given, Mapping) else []
    first = groups[0] if len(groups) == 1 and isinstance(groups[0], Mapping) else {}
    weights, inputs = (
        part if isinstance(part, Mapping) else {} for part in (first.get("weights"), first.get("input_activations"))
    )
    if first and first.get("input_activations") is None:
        return QuantSpec(**compressed_options(config, first, _kept(config, "ignore")))
    kinds = [(part.get("type"), part.get("num_bits")) for part in (weights, inputs)]
    if kinds == [("int", 8), ("int", 8)]:
        check_int8(config, first)
        return QuantSpec("int8", skip=_kept(config, "ignore"))
    strategy, dynamic = weights.get("strategy"), inputs.get("dynamic") or False
    if kinds != [("float", 8), ("float", 8)] or strategy not in ("tensor", "channel"):
        raise ArgumentError(
            "QuantSpec", "quantization_config.config_groups", f"{len(groups)} groups, first {kinds}, {strategy!r}",
            "one group of 8-bit float weights, strategy 'tensor' or 'channel', and 8-bit float inputs; one of 8-bit "
            "integers, 'channel' and 'token'; or one of weights alone",
        )  # fmt: skip
    check_plain("QuantSpec", "bool", **{"quantization_config.config_groups.input_activations.dynamic": dynamic})
    activation = ("token" if inputs.get("strategy") == "token" else "tensor") if dynamic else "static"
    return QuantSpec(f"fp8_{strategy}", skip=_kept(config, "ignore"), activation_scale=activation)


def _from_glob(rule: str) -> str:
    """Return a rule with ``*`` (``model.layers.*.self_attn``) as a pattern of the names that begin like it."""
    return "re:^" + re.escape(rule).replace(r"\*", ".*") if "*" in rule else rule


def _matches(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.search(rule[3:], name) is not None
    return name == rule or name.endswith("." + rule) or name.startswith(rule + ".")


NONE = QuantSpec()
