"""One call for every family: :class:`AutoModel` reads ``config.json`` and builds the class for its ``model_type``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError, CheckpointError, UnknownModelError, check_choice, check_kind
from fastlayers_models.blocks import CausalLM
from fastlayers_models.check_quantization import check_quantization
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.find import find

_DEEPSEEK = "fastlayers_models.deepseek:DeepseekForCausalLM"
_QWEN = "fastlayers_models.qwen:QwenForCausalLM"
_QWEN_VL = "fastlayers_models.qwen_vl:QwenVLForCausalLM"
# model_type -> module and class, imported when asked for.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "gpt_oss": "fastlayers_models.gpt_oss:GptOssForCausalLM",
        "llama": "fastlayers_models.llama:LlamaForCausalLM",
        "llama4": "fastlayers_models.llama4:Llama4ForCausalLM",
        "llama4_text": "fastlayers_models.llama4:Llama4ForCausalLM",
        "qwen2": _QWEN,
        "qwen2_5_vl": _QWEN_VL,
        "qwen2_5_vl_text": _QWEN,
        "qwen2_moe": _QWEN,
        "qwen3": _QWEN,
        "qwen3_moe": _QWEN,
    }
)


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
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
        families: Mapping[str, str | type[CausalLM]] = FAMILIES,
        parallel: ParallelSpec | Ranks | None = None,
        **options: Any,
    ) -> Any:
        """Build the model of a checkpoint and load its weights.

        Parameters
        ----------
        path : str or Path
            A directory with ``config.json`` and safetensors shards, or a name on the Hugging Face hub, of which only
            JSON files, chat templates and safetensors at the top are downloaded.
        dtype : torch.dtype or str
            Of activations and of weights that are not quantised: bf16, fp16 or fp32, also by name (``"bfloat16"``);
            ``"auto"``: what ``config.json`` says.
        device : torch device, optional
            Default: torch's.
        families : mapping
            ``model_type`` to ``"module:class"``, or to the class; ``FAMILIES | {...}`` adds one. Default: ``FAMILIES``,
            and behind them what installed packages name (see :func:`installed_families`).
        parallel : Ranks or ParallelSpec, optional
            How the model is split. ``Ranks(tp=2)`` meets the other processes (all of them must call this), started by
            ``torchrun --nproc-per-node 2``; each reads only its part of the weights.
        **options
            As for the family's constructor: ``page_size``, ``kv_dtype``, ``backend`` and its own.

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
            A dtype, device, family or option that is not accepted, or a value in ``config.json`` that the model cannot
            be built from.
        """
        check_kind("AutoModel", Mapping, families=families)
        check_kind("AutoModel", ParallelSpec | Ranks | None, parallel=parallel)
        folder = find(path)
        checkpoint = Checkpoint(folder)
        family = family_of(checkpoint.config, families, folder)
        check_options(family, options)
        place, number = _device(device), _dtype(dtype, checkpoint.config)
        if isinstance(parallel, Ranks):
            parallel, place = parallel.join(place)
        if parallel is not None:
            options["parallel"] = parallel
        try:
            return family.from_pretrained(folder, dtype=number, device=place, **options)
        except ArgumentError as error:
            # What was built from a config.json that is wrong about the tensors is not where the mistake is.
            if found := check_quantization(checkpoint, ()):
                raise CheckpointError(f"{folder} does not fit the model; {'; '.join(found)}; {error}") from error
            raise


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _dtype(given: Any, config: Mapping[str, Any]) -> torch.dtype:
    name = given
    if given == "auto":
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
        said = [part.get(key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
        name = said[0] if said and isinstance(said[0], str) and said[0] in _DTYPES else "bfloat16"
    if isinstance(name, str):
        name = _DTYPES.get(name.removeprefix("torch."))
    if name not in _DTYPES.values():
        accepted = ", ".join(f"torch.{known}" for known in _DTYPES) + ", their names, or 'auto'"
        raise ArgumentError("AutoModel", "dtype", repr(given), accepted)
    assert isinstance(name, torch.dtype)
    return name


def _device(given: torch.device | str | None) -> torch.device | None:
    if given is None:
        return None
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError("AutoModel", "device", repr(given), "a torch device, as in 'cpu' or 'cuda:0'") from error
    if device.type == "cpu" and device.index:  # torch takes it, and no tensor is ever there
        raise ArgumentError("AutoModel", "device", repr(str(device)), "'cpu', which has no number")
    if device.type == "meta":
        raise ArgumentError("AutoModel", "device", repr(str(device)), "a device with memory, as weights are loaded")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ArgumentError("AutoModel", "device", repr(str(device)), f"'cpu', or one of {count} CUDA devices here")
    return device


def check_options(family: type[CausalLM], options: Mapping[str, Any]) -> None:
    """Raise :class:`ArgumentError` for an option that neither the family's constructor nor its loader names."""
    makers = (family.__init__, family.from_pretrained)
    parameters = [p for maker in makers for p in inspect.signature(maker).parameters.values()]
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(family.__init__).parameters.values()):
        return
    known = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    known -= {"self", "config", "path", "dtype", "device"}
    for name in options:
        check_choice(f"{family.__name__}.from_pretrained", "option", name, tuple(sorted(known)))


def _inner_hint(config: Mapping[str, Any], families: Mapping[str, Any]) -> str:
    """Return what to do where a model is unknown, but the language model in it is not: as LLaVA is published."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(kind, str) or kind not in families:
        return ""
    return (
        f". Its text_config says {kind!r}: the language model alone runs from a checkpoint of its own, which "
        "transformers writes (from_pretrained of its causal language model, then save_pretrained)"
    )


def installed_families() -> dict[str, str]:
    """Return ``model_type`` to ``"module:class"`` of the entry-point group ``fastlayers.families``; imports none.

    They are asked only for what is not in :data:`FAMILIES`, so no package changes a family that is here.
    """
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group="fastlayers.families")}


def family_of(
    config: Mapping[str, Any], families: Mapping[str, str | type[CausalLM]] = FAMILIES, where: object = ""
) -> type[CausalLM]:
    """Return the model class for a parsed ``config.json``; ``where`` is named in the error.

    Raises
    ------
    UnknownModelError
        The ``model_type`` is not in ``families``, nor, where these are :data:`FAMILIES`, in an installed package's.
    ArgumentError
        What stands there leads to no class of a model, with the reason.
    """
    kind = config.get("model_type")
    if families is FAMILIES and isinstance(kind, str) and kind not in FAMILIES:
        families = {**installed_families(), **FAMILIES}
    if not isinstance(kind, str) or kind not in families:
        prefix = f"{where}: " if where else ""
        known = ", ".join(sorted(families)) + _inner_hint(config, families)
        raise UnknownModelError(f"{prefix}model_type {kind!r} is unknown; known: {known}")
    argument, given = f"families[{kind!r}]", families[kind]
    accepted = "'module:class' of a model, as those that derive from fastlayers_models.blocks.CausalLM, or the class"
    found: Any = given
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:  # what the module's own imports miss, too
            raise ArgumentError("AutoModel", argument, f"{given!r} ({error})", accepted) from error
    if not (isinstance(found, type) and hasattr(found, "from_pretrained")):
        raise ArgumentError("AutoModel", argument, repr(given), accepted)
    return found
