"""What a ``quantization_config`` of AWQ, GPTQ or compressed-tensors says of integers, as QuantSpec's fields.

What is not read is refused here, in the words of the file: other widths, packings for one kernel only, rules that give
single modules another width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastlayers.errors import ArgumentError

# By format; the last one is what a layer that was made of an unquantised one is said to have.
LAYOUTS = {
    "w4a16": ("awq", "gptq", "gptq_v2", "packed"),
    "w8a16": ("gptq", "gptq_v2", "packed", "plain_tensor", "plain"),
    "fp8_w8a16": ("plain_tensor", "plain"),
}
WEIGHT_ONLY = tuple(LAYOUTS)
# Neither AutoAWQ nor GPTQ packs the head unless it says so, nor what has one output: no words of codes.
HEAD, GATE = "lm_head", "shared_expert_gate"
Options = dict[str, Any]


def _refuse(key: str, given: object, accepted: str) -> ArgumentError:
    return ArgumentError("QuantSpec", f"quantization_config.{key}", repr(given), accepted)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    given = config.get(key)
    if given is None:
        return default
    if not isinstance(given, bool):
        raise _refuse(key, given, "true or false")
    return given


def _bits(config: Mapping[str, Any], key: str, accepted: tuple[int, ...]) -> int:
    given = config.get(key)
    if isinstance(given, bool) or given not in accepted:
        raise _refuse(key, given, " or ".join(map(str, accepted)))
    return int(given)


def _group_size(config: Mapping[str, Any], key: str = "group_size") -> int:
    """Return the group's size, 0 where the file says -1: one group of all input features."""
    given = config.get(key)
    if isinstance(given, bool) or not isinstance(given, int) or not (given == -1 or (given > 0 and given % 32 == 0)):
        raise _refuse(key, given, "-1 or a multiple of 32")
    return max(0, given)


def awq_options(config: Mapping[str, Any], kept: tuple[str, ...]) -> Options:
    """Return the options of AutoAWQ's: nibbles and zero points, shuffled by eights ("gemm")."""
    _bits(config, "bits", (4,))
    version = config.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refuse("version", version, "'gemm'; other versions are packed for one kernel")
    if not _flag(config, "zero_point", True):
        raise _refuse("zero_point", False, "true: AutoAWQ's files hold zero points")
    skip = (*kept, HEAD, GATE)
    return {"format": "w4a16", "layout": "awq", "group_size": _group_size(config), "zero_point": True, "skip": skip}


def gptq_options(config: Mapping[str, Any], kept: tuple[str, ...]) -> Options:
    """Return the options of GPTQ's: 4 or 8 bits, zero points less one ("gptq") or as they are ("gptq_v2")."""
    bits = _bits(config, "bits", (4, 8))
    layout = config.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refuse("checkpoint_format", layout, "'gptq' or 'gptq_v2'; others are packed for one kernel")
    if config.get("is_marlin_format"):
        raise _refuse("is_marlin_format", True, "false: that is packed for one kernel")
    group, head = _group_size(config), () if _flag(config, "lm_head", False) else (HEAD,)
    return {
        "format": f"w{bits}a16", "layout": layout, "group_size": group, "zero_point": True,
        "act_order": _flag(config, "desc_act", False) and group > 0, "skip": (*kept, *_skipped(config), *head, GATE),
    }  # fmt: skip


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return GPTQModel's rules of modules that are left out (``-:pattern``); it has rules for other widths, too."""
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) for rule in rules):
        raise _refuse("dynamic", rules, "an object of rules, or none")
    if others := [rule for rule in rules if not rule.startswith("-:")]:
        raise _refuse("dynamic", others[0], "rules that leave modules out ('-:…'): all others have one width")
    return tuple(f"re:^(?:{rule[2:]})" for rule in rules)


def check_int8(config: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise unless compressed-tensors' group of 8-bit integers (W8A8) is what :class:`fastlayers.Int8Linear` computes.

    That is symmetric weights with a scale per output channel, and symmetric inputs with one per token, found at each
    call.
    """
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise _refuse("config_groups.targets", group.get("targets"), "['Linear']")
    if group.get("output_activations") is not None:
        raise _refuse("config_groups.output_activations", group["output_activations"], "null with 8-bit integers")
    if config.get("format") not in ("int-quantized", "naive-quantized"):
        raise _refuse("format", config.get("format"), "'int-quantized' or 'naive-quantized' with 8-bit inputs")
    wanted = {"weights": ("channel", False), "input_activations": ("token", True)}
    for part, (strategy, dynamic) in wanted.items():
        where, given = f"config_groups.{part}.", group[part]
        if given.get("strategy") != strategy:
            raise _refuse(f"{where}strategy", given.get("strategy"), f"{strategy!r} with 8-bit integers")
        if (given.get("dynamic") or False) is not dynamic:
            raise _refuse(f"{where}dynamic", given.get("dynamic"), f"{str(dynamic).lower()} with 8-bit integers")
        if given.get("symmetric") not in (None, True):
            raise _refuse(f"{where}symmetric", given["symmetric"], "true with 8-bit integers for inputs")


def compressed_options(config: Mapping[str, Any], group: Mapping[str, Any], kept: tuple[str, ...]) -> Options:
    """Return the options of compressed-tensors' one group of weights alone."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _refuse("config_groups.weights", weights, "an object")
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise _refuse("config_groups.targets", group.get("targets"), "['Linear']")
    where = "config_groups.weights."
    weights = {f"{where}{name}": value for name, value in weights.items()}
    kind, strategy, packing = weights.get(f"{where}type"), weights.get(f"{where}strategy"), config.get("format")
    if kind not in ("int", "float"):
        raise _refuse(f"{where}type", kind, "'int' or 'float'")
    bits = _bits(weights, f"{where}num_bits", (8,) if kind == "float" else (4, 8))
    order = weights.get(f"{where}actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic", True):
        raise _refuse(f"{where}actorder", order, "'weight', 'group' or none")
    if kind == "int" and packing == "pack-quantized":
        layout = "packed"
    elif packing in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8:
        layout = "plain_tensor" if strategy == "tensor" else "plain"
    else:
        accepted = "'pack-quantized' for integers, 'float-quantized', 'int-quantized' or 'naive-quantized' for 8 bits"
        raise _refuse("format", packing, accepted)
    strategies = ("channel", "group") if layout == "packed" else ("channel", "tensor")
    if strategy not in strategies:
        raise _refuse(f"{where}strategy", strategy, " or ".join(map(repr, strategies)) + f" in {packing}")
    symmetric = _flag(weights, f"{where}symmetric", True)
    if layout != "packed" and not symmetric:
        raise _refuse(f"{where}symmetric", False, f"true in {packing}")
    size = _group_size(weights, f"{where}group_size") if strategy == "group" else 0
    return {
        "format": "fp8_w8a16" if kind == "float" else f"w{bits}a16", "layout": layout, "group_size": size,
        "zero_point": not symmetric, "act_order": order in ("group", "dynamic", True) and size > 0, "skip": kept,
    }  # fmt: skip
