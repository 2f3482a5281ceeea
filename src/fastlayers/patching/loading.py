"""``from_pretrained``: load a Hugging Face model and patch it, with our own reading of FP8 blocks on a CPU.

Without a GPU transformers dequantises FP8 checkpoints, and infers the block size from the scale grid: 576 rows with
5 scale rows fail, 448 rows with 4 load silently wrong. Here blocks come from ``weight_block_size``, by
ceil-division.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlayers.checkpoint_files import INDEX, SINGLE, weight_files
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError, CheckpointError, describe
from fastlayers.patching.apply import check_options
from fastlayers.patching.apply import patch as apply_patch
from fastlayers.patching.report import PatchReport
from fastlayers.quant.block_quant import E4M3, dequantize_block_weight

_SCALES = ("_scale_inv", "_scale")
# Of Hugging Face's from_pretrained: these name other files than the usual ones.
_OTHER_FILES = ("variant", "gguf_file")
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# What else says where a configuration is: in a repository's code, or in a GGUF file.
_CONFIG_OPTIONS = ("trust_remote_code", "code_revision", "gguf_file")


def from_pretrained(
    auto_class: Any, name: str | Path, *, patch: dict[str, Any] | None = None, **hf_options: Any
) -> tuple[nn.Module, PatchReport]:
    """Load a model with ``auto_class.from_pretrained`` and patch it.

    Parameters
    ----------
    auto_class : type
        ``AutoModelForCausalLM``, or a model class.
    name : str or Path
        Directory or hub name.
    patch : dict, optional
        Arguments of :func:`fastlayers.patch`.
    **hf_options
        Arguments of Hugging Face's ``from_pretrained`` (``dtype``, ``device_map``, …).

    Returns
    -------
    (nn.Module, PatchReport)
        In evaluation mode.

    Raises
    ------
    ArgumentError
        ``auto_class`` cannot load, ``patch`` has what :func:`fastlayers.patch` does not accept, an option names other
        files than are read here, or ``output_loading_info`` asks for another pair; said before anything is loaded.
    CheckpointError
        An FP8 tensor without its scales, or scales of another grid than the config's blocks; files that
        :func:`fastlayers.checkpoint_files.weight_files` refuses.
    """
    check_options("from_pretrained", {} if patch is None else patch)
    if not callable(getattr(auto_class, "from_pretrained", None)):
        accepted = "AutoModelForCausalLM, or another class with from_pretrained"
        raise ArgumentError("from_pretrained", "auto_class", describe(auto_class), accepted)
    if not isinstance(name, str | Path):
        raise ArgumentError("from_pretrained", "name", describe(name), "a directory or a hub name")
    if hf_options.pop("output_loading_info", False):
        raise ArgumentError("from_pretrained", "output_loading_info", True, "False: the model comes with its report")
    config = _config_of(name, hf_options)
    if _dequantises(config, hf_options):
        model = _load_dequantised(auto_class, str(name), config, dict(hf_options))
    else:
        model = auto_class.from_pretrained(name, **hf_options)
    model.eval()
    return model, apply_patch(model, **(patch or {}))


def _some(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _config_of(name: str | Path, options: dict[str, Any]) -> Any:
    """Return the configuration that a model would be loaded with: the caller's object, or what is read."""
    from transformers import AutoConfig, PretrainedConfig

    given = options.get("config")
    if isinstance(given, PretrainedConfig):
        return given
    return AutoConfig.from_pretrained(given or name, **_some(options, (*_HUB_OPTIONS, *_CONFIG_OPTIONS)))


def _dequantises(config: Any, options: dict[str, Any]) -> bool:
    """Return whether Hugging Face would dequantise a checkpoint of this configuration while loading."""
    quant = getattr(config, "quantization_config", None)
    if quant is None or _field(quant, "quant_method") != "fp8":
        return False
    capable = torch.cuda.is_available() and as_device("cuda").has_fp8_dot
    asked = (quant, options.get("quantization_config"))  # the checkpoint's, and what the caller adds to it
    return not capable or any(each is not None and bool(_field(each, "dequantize")) for each in asked)


def _field(quant: Any, name: str) -> Any:
    value = quant.get(name) if isinstance(quant, dict) else getattr(quant, name, None)
    return getattr(value, "value", value)


def _load_dequantised(auto_class: Any, name: str, config: Any, options: dict[str, Any]) -> Any:
    for key in _OTHER_FILES:
        if options.get(key):
            accepted = "none, as the blocks of an FP8 checkpoint are read from its usual files here"
            raise ArgumentError("from_pretrained", key, repr(options[key]), accepted)
    hub, config = _some(options, _HUB_OPTIONS), copy.deepcopy(config)  # it may be the caller's
    quant = config.quantization_config
    block = _field(quant, "weight_block_size") or (128, 128)
    del config.quantization_config
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    if dtype in (None, "auto"):
        dtype = config.dtype or torch.bfloat16
    state = read_dequantised(checkpoint_files(name, hub), (int(block[0]), int(block[1])), dtype)
    for key in (*_HUB_OPTIONS, "config", "quantization_config"):
        options.pop(key, None)
    mapping = getattr(auto_class, "_model_mapping", None)
    model_class = auto_class if mapping is None else mapping[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)


def checkpoint_files(name: str, hub: dict[str, Any]) -> list[Path]:
    """Return the safetensors files of a checkpoint, through Hugging Face's cache if it is not a directory.

    Raises
    ------
    CheckpointError
        See :func:`fastlayers.checkpoint_files.weight_files`; or there are none.
    """
    from transformers.utils import cached_file

    def find(file: str) -> Path | None:
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        found = cached_file(name, file, **quiet, **hub)
        return None if found is None else Path(found)

    config = find("config.json")
    said = json.loads(config.read_text(encoding="utf-8")) if config is not None else {}
    chosen = weight_files(name, said, find)
    if chosen is None:
        cached_file(name, SINGLE, **hub)  # raises in Hugging Face's words: unreachable, gated, or not there
        raise CheckpointError(f"{name}: neither {SINGLE} nor {INDEX} is there")
    return list(chosen.files.values())


def read_dequantised(files: list[Path], block: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, FP8 ones dequantised to ``dtype``; scales are consumed."""
    from safetensors import safe_open

    where: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key in where:
                    raise CheckpointError(f"{key} is in {where[key].name}, {path.name}: one would be lost")
                where[key] = path
    scales: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            scales.update({key: opened.get_tensor(key) for key in opened.keys() if key.endswith(_SCALES)})  # noqa: SIM118
    state: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key not in scales and not key.endswith("activation_scale"):
                    state[key] = _dequantised(key, opened.get_tensor(key), scales, block, dtype)
    return state


def _dequantised(
    key: str, tensor: torch.Tensor, scales: dict[str, torch.Tensor], block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    if tensor.dtype != E4M3:
        return tensor
    scale = next((scales[key + ending] for ending in _SCALES if key + ending in scales), None)
    if scale is None:
        raise CheckpointError(f"{key}: e4m3 without {key}_scale_inv in the checkpoint")
    try:
        return dequantize_block_weight(tensor, scale.float(), block, dtype)
    except ValueError as error:
        raise CheckpointError(f"{key}: {error}") from error
