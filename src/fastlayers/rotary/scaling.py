"""Rope frequencies: default, linear, llama3 and YaRN, as plain data and as fp32 tables.

    d = rotary_dim, f = 0 … d/2 - 1, b = base
    default    inv[f] = b^(-2f/d)
    linear     inv[f] / factor
    llama3     inv[f] for short wavelengths, inv[f] / factor for long ones, a linear blend between
    yarn       inv[f] · mask + inv[f] / factor · (1 - mask),  mask = 1 - ramp(low, high)
    table      cos[p, f] = cos(p · inv[f]) · attention_factor,  sin alike

The order of operations is Hugging Face's, so that the frequencies are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers.errors import ArgumentError, check_choice, check_fields, check_kind, check_plain, describe

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How a checkpoint stretches its rotary embedding; see the file's head for the formulas.

    Parameters
    ----------
    kind : str
        ``"default"``, ``"linear"``, ``"llama3"`` or ``"yarn"``.
    factor : float
        By how much the context is stretched.
    original_max_position : int
        Context length before stretching (llama3, yarn).
    low_freq_factor, high_freq_factor : float
        llama3: bounds of the blend, in rotations over the original context.
    beta_fast, beta_slow : float
        yarn: bounds of the ramp, in rotations over the original context.
    truncate : bool
        yarn: round the ramp's bounds outwards to integers (DeepSeek), or not (GPT-OSS).
    mscale, mscale_all_dim : float
        yarn: cos and sin are multiplied by ``m(mscale) / m(mscale_all_dim)`` if both are set, else by
        ``m(1)``, with ``m(s) = 0.1 · s · ln(factor) + 1``.
    attention_factor : float or None
        yarn: that multiplier, given explicitly.
    mrope_section : tuple[int, ...]
        MRoPE: number of frequencies for the time, height and width axis; empty: one axis.
    mrope_interleaved : bool
        MRoPE: axes alternate (``t h w t h w … t t``) instead of lying in three chunks.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        check_choice("RopeScaling", "kind", self.kind, KINDS)
        check_fields("RopeScaling", self)
        check_plain("RopeScaling", "float > 0", factor=self.factor, low_freq_factor=self.low_freq_factor)
        check_plain("RopeScaling", "float > 0", beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        check_plain("RopeScaling", "float > 0 | None", attention_factor=self.attention_factor)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            accepted = f"more than low_freq_factor {self.low_freq_factor}"
            raise ArgumentError("RopeScaling", "high_freq_factor", self.high_freq_factor, accepted)
        if self.kind in ("llama3", "yarn") and self.original_max_position <= 0:
            raise ArgumentError(
                "RopeScaling",
                "original_max_position",
                self.original_max_position,
                f"a positive integer for {self.kind}",
            )
        if len(self.mrope_section) not in (0, 3) or any(part < 0 for part in self.mrope_section):
            raise ArgumentError("RopeScaling", "mrope_section", self.mrope_section, "three counts, or none")

    @staticmethod
    def from_config(config: Any, layer_type: str | None = None) -> RopeScaling:
        """Return the scaling that a Hugging Face config (object or parsed ``config.json``) asks for.

        Reads ``rope_parameters`` and the older ``rope_scaling``. ``layer_type`` picks one of several sets
        (``"full_attention"``) where the config has one per layer type.

        Raises
        ------
        ArgumentError
            A rope type other than default, linear, llama3, yarn and mrope, or a stretched one that does not say by how
            much.
        """
        rope = rope_parameters(config, layer_type)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "mrope":  # older Qwen-VL configs; its frequencies are the default ones
            kind = "default"
        check_choice("RopeScaling", "rope_type", kind, KINDS)
        longest = config_value(config, "max_position_embeddings") or 0
        original = config_value(config, "original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        factor = rope.get("factor")
        if factor is None and kind == "yarn" and original:
            factor = longest / original
        if factor is None and kind != "default":
            accepted = f"a positive number for {kind}" + (
                ", or original_max_position_embeddings to find it from" if kind == "yarn" else ""
            )
            raise ArgumentError("RopeScaling", "factor", None, accepted)
        original = int(original or longest)
        return RopeScaling(
            kind,
            float(factor) if factor is not None and kind != "default" else 1.0,
            original if kind in ("llama3", "yarn") else 0,
            low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
            high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            mscale=float(rope.get("mscale") or 0.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            attention_factor=rope.get("attention_factor"),
            mrope_section=tuple(rope.get("mrope_section") or ()),
            mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
        )

    @property
    def table_factor(self) -> float:
        """What cos and sin are multiplied by: 1.0 for all kinds but yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


def rope_parameters(config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """Return the rope settings of a Hugging Face config as one flat dictionary, ``rope_theta`` included.

    Raises
    ------
    ArgumentError
        Something that is no configuration, the rope settings without the configuration around them, or one set for
        each layer type and ``layer_type`` names none of them: any of these would read as an embedding without scaling.
    """
    if not (isinstance(config, Mapping) or hasattr(config, "__dict__")):
        raise ArgumentError("rope_parameters", "config", describe(config), "a Hugging Face config, or a mapping")
    # Of both, transformers takes the older one.
    rope = config_value(config, "rope_scaling") or config_value(config, "rope_parameters") or {}
    check_kind("rope_parameters", Mapping, config=rope)
    if not rope and config_value(config, "rope_type") is not None:
        accepted = "the whole config, which has these settings as its 'rope_parameters' or 'rope_scaling'"
        raise ArgumentError("rope_parameters", "config", "rope settings alone", accepted)
    sets = tuple(name for name, value in rope.items() if isinstance(value, Mapping))
    if sets:
        check_choice("rope_parameters", "layer_type", layer_type, sets)
        rope = rope[layer_type]
    rope = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None and config_value(config, name) is not None:
            rope[name] = config_value(config, name)
    return rope


def config_value(config: Any, name: str) -> Any:
    """Return an entry of a Hugging Face config, object or mapping; ``None`` where it has none."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's ``0.1 · mscale · ln(factor) + 1`` (1.0 where nothing is stretched)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_scale(head_dim: int, scaling: RopeScaling | None = None) -> float:
    """Return DeepSeek's softmax scale: ``head_dim^-0.5 · m²`` with ``m = m(mscale_all_dim)``.

    ``head_dim`` is that of queries and keys, rope part included (192 for DeepSeek-V3, which gives 0.135234).
    Scalings without ``mscale_all_dim`` leave ``head_dim^-0.5`` (GPT-OSS puts its factor on cos and sin).
    """
    scale = head_dim**-0.5
    if scaling is None or scaling.kind == "default" or not scaling.mscale_all_dim:
        return scale
    mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return scale * mscale * mscale


def inverse_frequencies(rotary_dim: int, base: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Return the fp32 angular frequencies ``[rotary_dim / 2]``, on the CPU."""
    scaling = scaling or RopeScaling()
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    powers = base**exponents
    frequencies = 1.0 / powers
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(powers, rotary_dim, base, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    context, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > context / low, frequencies / scaling.factor, frequencies)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, blended, stretched)


def _yarn(powers: torch.Tensor, rotary_dim: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    if base == 1:
        raise ArgumentError(
            "RotaryEmbedding", "base", base, "another number than 1 with yarn: all angles would turn alike"
        )

    def dimension(rotations: float) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return (rotary_dim * math.log(turns)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of width zero divides by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    mask = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - mask) + 1.0 / powers * mask


def build_tables(
    rotary_dim: int, base: float, scaling: RopeScaling | None, max_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 ``(cos, sin)``, each ``[max_position, rotary_dim / 2]``, computed on the CPU.

    On the CPU whatever the model's device, so that every device holds the same bits.
    """
    frequencies = inverse_frequencies(rotary_dim, base, scaling)
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * frequencies
    factor = 1.0 if scaling is None else scaling.table_factor
    return angles.cos() * factor, angles.sin() * factor
