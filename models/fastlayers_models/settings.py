"""Reading ``config.json``: what each key may hold, and what transformers assumes where the file is silent.

A family says what it reads as a table of :class:`Setting`; :func:`read_settings` is the only way from the file to a
number, so that a wrong type, NaN, ``"false"`` or a size that no checkpoint has is one error, which names the setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastlayers.errors import ArgumentError, CheckpointError, check_plain
from fastlayers.quant.spec import QuantSpec
from fastlayers.rotary.scaling import RopeScaling

# Stands for: transformers assumes something, but a file that does not say it is none of this family.
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()
# No tensor has more rows, and no model more layers or positions: beyond these a mistake only costs memory.
MOST, MOST_LAYERS, MOST_POSITIONS = 2**31 - 1, 10_000, 2**24
MOST_NESTED = 32
# Of a value in a message.
MOST_SHOWN = 200


@dataclass(frozen=True)
class Setting:
    """One key of ``config.json``.

    Parameters
    ----------
    kind : str
        As :func:`fastlayers.errors.check_plain` names them, or ``"ids"``: one token id, or several, or null. With
        ``" | None"`` null is a value of its own, and as a flag it is false; otherwise it says as little as an absent
        key.
    default : object
        What transformers assumes; :data:`REQUIRED`: nothing is assumed here.
    most : int
        The largest integer.
    also : tuple[str, ...]
        Other names of the key; where several are given they must agree.
    choices : tuple
        What is accepted, if not everything of the kind.
    """

    kind: str
    default: Any = REQUIRED
    most: int = MOST
    also: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()


SIZE, COUNT, FLAG = Setting("int > 0"), Setting("int >= 0"), Setting("bool", False)
_CAUSAL = Setting("bool", True)


def read_settings(owner: str, config: Mapping[str, Any], table: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the settings of ``table``, checked: integers, finite floats, flags, and lists as tuples.

    Parameters
    ----------
    owner : str
        Named in errors.
    config : mapping
        The parsed ``config.json``.
    table : mapping

    Raises
    ------
    ArgumentError
        A required setting is missing, or one is not of its kind.
    CheckpointError
        The file is nested too deeply to be a configuration.
    """
    check_depth(config, owner)
    if not _read(owner, config, "is_causal", _CAUSAL):  # transformers' masks ask for it, in every family
        raise ArgumentError(owner, "is_causal", shown(config["is_causal"]), "true, or no such key")
    return {name: _read(owner, config, name, setting) for name, setting in table.items()}


def _read(owner: str, config: Mapping[str, Any], name: str, setting: Setting) -> Any:
    said = [key for key in (name, *setting.also) if config.get(key) is not None]
    if not said:
        null = any(key in config for key in (name, *setting.also))
        if null and setting.kind.endswith(" | None"):
            return None
        if null and setting.kind == "ids":
            return ()
        if null and setting.kind == "bool":
            return False  # as whoever asks "if config.flag" takes it
        if setting.default is REQUIRED:
            accepted = {"int": "an integer", "bool": "true or false"}.get(setting.kind.split()[0], "a value")
            raise ArgumentError(owner, name, "None", accepted)
        return setting.default
    value = checked(owner, said[0], config[said[0]], setting)
    for other in said[1:]:
        if checked(owner, other, config[other], setting) != value:
            raise ArgumentError(owner, other, shown(config[other]), f"what {said[0]} says, {shown(value)}")
    return value


def checked(owner: str, name: str, value: Any, setting: Setting) -> Any:
    """Return one value as the setting's kind has it, or raise :class:`ArgumentError`."""
    kind = setting.kind.removesuffix(" | None")
    if kind == "ids":
        kind = "tuple[int, ...]"
        value = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    value = tuple(value) if isinstance(value, list) else value
    try:
        check_plain(owner, kind, **{name: value})
    except ArgumentError as error:
        raise ArgumentError(owner, name, shown(value), error.accepted) from None
    if kind.startswith("float"):
        try:
            value = float(value)
        except OverflowError:
            raise ArgumentError(owner, name, shown(value), "a finite number") from None
    integers = (value,) if kind.startswith("int") else value if kind == "tuple[int, ...]" else ()
    if any(abs(integer) > setting.most for integer in integers):
        raise ArgumentError(owner, name, shown(value), f"at most {setting.most}")
    if setting.choices and value not in setting.choices:
        accepted = ", ".join(map(repr, setting.choices))
        raise ArgumentError(owner, name, shown(value), accepted)
    return value


def shown(value: object) -> str:
    """Return a value of ``config.json`` as an error message shows it."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def check_depth(value: object, where: object) -> None:
    """Raise :class:`CheckpointError` for lists and objects within each other by more than 32 levels.

    What is nested deeper than the interpreter's own limit could not even be put into a message.
    """
    level = [value]
    for _ in range(MOST_NESTED):
        level = [inner for each in level for inner in _within(each)]
        if not level:
            return
    raise CheckpointError(f"{where}: config.json is nested more than {MOST_NESTED} levels deep")


def _within(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()


# ---- rotary embeddings and number formats ----------------------------------------------------------------------

_ROPE: dict[str, Setting] = {
    "rope_type": Setting("str | None", None, also=("type",)),
    "factor": Setting("float > 0 | None", None),
    "original_max_position_embeddings": Setting("int > 0 | None", None),
    "low_freq_factor": Setting("float > 0 | None", None),
    "high_freq_factor": Setting("float > 0 | None", None),
    "beta_fast": Setting("float > 0 | None", None),
    "beta_slow": Setting("float > 0 | None", None),
    "truncate": Setting("bool", True),
    "mscale": Setting("float >= 0 | None", None),
    "mscale_all_dim": Setting("float >= 0 | None", None),
    "attention_factor": Setting("float > 0 | None", None),
    "mrope_section": Setting("tuple[int, ...] | None", None),
    "mrope_interleaved": FLAG,
}


def read_rope(
    owner: str,
    config: Mapping[str, Any],
    longest: int,
    *,
    theta: float = 10000.0,
    silent: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what ``config.json`` says of its rotary embedding, as :meth:`RotaryEmbedding.from_config` reads it.

    Parameters
    ----------
    owner : str
    config : mapping
        With ``rope_parameters``, or the older ``rope_scaling`` and ``rope_theta``.
    longest : int
        ``max_position_embeddings``.
    theta : float
        What the family assumes where the file does not say.
    silent : mapping, optional
        What it assumes where the file says nothing else of its rotary embedding, either.

    Raises
    ------
    ArgumentError
        A value of another kind, or a scaling that is not implemented or lacks a number.
    """
    # Of both, transformers takes the older one.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key)
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(owner, key, shown(given), "an object of names and values, or none")
    if given is None and silent is not None:
        given = silent
    given = dict(given or {})
    for layer_type in ("full_attention", "sliding_attention"):
        if layer_type in given:
            raise ArgumentError(owner, f"{key}.{layer_type}", shown(given[layer_type]), "one set for all layers")
    if given.get("rope_type") is not None:
        given.pop("type", None)  # of both, the newer one
    values = {name: _read(f"{owner}.{key}", given, name, setting) for name, setting in _ROPE.items()}
    base = Setting("float > 0", theta)
    values["rope_theta"] = (
        _read(f"{owner}.{key}", given, "rope_theta", base)
        if given.get("rope_theta") is not None
        else _read(owner, config, "rope_theta", base)
    )
    whole = Setting("float > 0", 1.0, choices=(1.0,))
    for place, holder in ((f"{owner}.{key}", given), (owner, config)):
        _read(place, holder, "partial_rotary_factor", whole)
    rope = {name: value for name, value in values.items() if value is not None}
    rope["rope_type"] = rope.get("rope_type", "default")
    if rope["rope_type"] == "mrope":  # of older Qwen-VL files; its frequencies are the default ones
        rope["rope_type"] = "default"
    outer = _read(owner, config, "original_max_position_embeddings", Setting("int > 0 | None", None))
    if outer is not None and rope["rope_type"] in ("llama3", "yarn"):
        within = rope.get("original_max_position_embeddings")
        if within != outer:  # transformers would take the one within, or max_position_embeddings
            accepted = f"what {key} says, {within}"
            raise ArgumentError(owner, "original_max_position_embeddings", outer, accepted)
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", longest)
    found = {"max_position_embeddings": longest, "rope_parameters": rope}
    RopeScaling.from_config(found)
    return found


def longest_position(owner: str, rope: Mapping[str, Any]) -> int:
    """Return how many positions a model may use: with YaRN, what it stretches the original context to."""
    longest: int = rope["max_position_embeddings"]
    parameters = rope["rope_parameters"]
    if parameters["rope_type"] != "yarn":
        return longest
    stretched = parameters["original_max_position_embeddings"] * parameters.get("factor", 1.0)
    if stretched > MOST_POSITIONS:
        raise ArgumentError(owner, "factor", parameters["factor"], f"one that gives at most {MOST_POSITIONS} positions")
    return max(longest, int(stretched))


def read_quantization(owner: str, config: Mapping[str, Any]) -> QuantSpec:
    """Return the number format that ``quantization_config`` names."""
    given = config.get("quantization_config")
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(owner, "quantization_config", shown(given), "an object with quant_method, or none")
    spec = QuantSpec.from_config(given)
    if spec.format == "fp8_block" and given is not None:  # whose inputs have a scale a group, found at each call
        for key, wanted in (("activation_scheme", "dynamic"), ("fmt", "e4m3")):
            if given.get(key) not in (None, wanted):
                raise ArgumentError(
                    owner, f"quantization_config.{key}", shown(given[key]), f"{wanted!r}, or no such key"
                )
    return spec
