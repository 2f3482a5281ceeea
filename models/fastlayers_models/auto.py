"""One call for every family: :class:`AutoModel` reads ``config.json`` and builds the class for its ``model_type``."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fastlayers.errors import CheckpointError, UnknownModelError
from fastlayers_models.blocks import CausalLM
from fastlayers_models.checkpoint import Checkpoint

_DEEPSEEK = "fastlayers_models.deepseek:DeepseekForCausalLM"
_QWEN = "fastlayers_models.qwen:QwenForCausalLM"
# model_type -> module and class, imported when asked for.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "gpt_oss": "fastlayers_models.gpt_oss:GptOssForCausalLM",
        "llama": "fastlayers_models.llama:LlamaForCausalLM",
        "qwen2": _QWEN,
        "qwen2_5_vl": _QWEN,
        "qwen2_5_vl_text": _QWEN,
        "qwen2_moe": _QWEN,
        "qwen3": _QWEN,
        "qwen3_moe": _QWEN,
    }
)
ACCEPTED = (
    "accepted: a directory with config.json and *.safetensors, or the name of such a model on the Hugging Face hub"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


class AutoModel:
    """Loads a checkpoint of any family that is implemented.

    Examples
    --------
    >>> from fastlayers_models import AutoModel
    >>> AutoModel.from_pretrained("model.gguf")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    fastlayers.errors.CheckpointError: model.gguf: a GGUF file; accepted: a directory with config.json ...
    """

    @staticmethod
    def from_pretrained(
        path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        families: Mapping[str, str] = FAMILIES,
        **options: Any,
    ) -> Any:
        """Build the model of a checkpoint and load its weights.

        Parameters
        ----------
        path : str or Path
            A directory with ``config.json`` and safetensors shards, or a name on the Hugging Face hub, of which only
            JSON files and safetensors at the top are downloaded.
        dtype : torch.dtype
            Of activations and of weights that are not quantised.
        device : torch device, optional
            Default: torch's.
        families : mapping
            ``model_type`` to ``"module:class"``; ``FAMILIES | {...}`` adds one.
        **options
            As for the family's constructor: ``parallel``, ``page_size``, ``kv_dtype``, ``backend`` and its own.

        Returns
        -------
        CausalLM
            A model of the family.

        Raises
        ------
        UnknownModelError
            The ``model_type`` is not in ``families``; the known ones are listed.
        CheckpointError
            No such directory, something else than a model directory, files or tensors that do not fit, or a hub that
            cannot be reached.
        ArgumentError
            A value in ``config.json`` that the model cannot be built from.
        """
        folder = find(path)
        family = family_of(Checkpoint(folder).config, families, folder)
        return family.from_pretrained(folder, dtype=dtype, device=device, **options)


def family_of(config: Mapping[str, Any], families: Mapping[str, str] = FAMILIES, where: object = "") -> type[CausalLM]:
    """Return the model class for a parsed ``config.json``; ``where`` is named in the error."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        prefix = f"{where}: " if where else ""
        raise UnknownModelError(f"{prefix}model_type {kind!r} is unknown; known: {', '.join(sorted(families))}")
    module, _, name = families[kind].partition(":")
    family: type[CausalLM] = getattr(importlib.import_module(module), name)
    return family


def find(path: str | Path) -> Path:
    """Return the local directory of a model: ``path`` itself, or what the hub has under that name.

    Raises
    ------
    CheckpointError
        Something that is not a model directory: what it is, is named.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise CheckpointError(f"{local}: {_other_directory(local)}; {ACCEPTED}")
        return local
    if local.suffix.lower() == ".gguf" or _starts_like_gguf(local):
        raise CheckpointError(f"{local}: a GGUF file; {ACCEPTED}")
    if local.is_file():
        raise CheckpointError(f"{local}: a file; {ACCEPTED}")
    if not _HUB_NAME.fullmatch(str(path)):
        raise CheckpointError(f"{local}: no such directory, and not a name on the hub; {ACCEPTED}")
    return _download(str(path))


def _other_directory(folder: Path) -> str:
    """Say what a directory without ``config.json`` is."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text()).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        merge = f" of {base}" if base else ""
        return f"an adapter{merge} (adapter_config.json), which must be merged into its base model first"
    if any(folder.glob("*.gguf")):
        return "a directory of GGUF files without config.json"
    return "a directory without config.json"


def _starts_like_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Sub-directories hold the same weights in other layouts (GPT-OSS: original/, metal/).
        wanted, unwanted = ["*.json", "*.safetensors"], ["*/*"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{name}: no such directory here, and the hub did not give a model of this name "
            f"({type(error).__name__}: {reason}); {ACCEPTED}"
        ) from error
