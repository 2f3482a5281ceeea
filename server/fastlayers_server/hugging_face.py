"""Stock transformers as the commands here use it: a model, its tokenizer, a conversation's token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastlayers.errors import CheckpointError
from fastlayers.quant.spec import QuantSpec
from fastlayers_models.checkpoint import CONFIG, Checkpoint, read_json


def reason_of(error: Exception) -> str:
    """Return what another library raised, as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def misread(path: Path) -> str | None:
    """Return what a checkpoint is that transformers would take for other weights, or would not take; else ``None``.

    That are int8 codes as ``fastlayers convert`` writes them, and ragged FP8 blocks: it infers the size of all blocks
    of a matrix from how many scales there are. What else it cannot load it says itself.
    """
    config = read_json(path / CONFIG).get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == "int8":
        return "int8, which transformers does not know: it takes the codes for weights"
    spec = QuantSpec.from_config(config) if isinstance(config, dict) and config.get("quant_method") == "fp8" else None
    if spec is None or spec.format != "fp8_block":
        return None
    checkpoint, ending = Checkpoint(path), "_scale_inv"
    for name in checkpoint.names():
        owner = name.removesuffix(ending)
        if name.endswith(ending) and owner in checkpoint.file_of:
            sizes = checkpoint.shape(owner)[-2:]
            if any(size > block and size % block for size, block in zip(sizes, spec.block_size, strict=False)):
                return f"in FP8 blocks, the last of {owner} {list(sizes)} smaller: transformers takes all for alike"
    return None


def load_hugging_face(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a checkpoint with stock transformers, without its progress bars and its note about MTP tensors.

    Raises
    ------
    CheckpointError
        transformers cannot read it; whatever it raised is named. Or it would take it for other weights.
    """
    if (why := misread(path)) is not None:
        raise CheckpointError(f"{path}: {why}")
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except MemoryError:
        raise
    except Exception as error:  # its validation has exceptions of its own
        raise CheckpointError(f"{path}: transformers cannot load it: {reason_of(error)}") from error
    # MXFP4 experts are expanded to bf16, whatever was asked for.
    return (model.float() if dtype == torch.float32 else model).to(device).eval()


# Files of which a tokenizer has at least one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class, before and since transformers 5


def _is_plain(path: Path) -> bool:
    """Whether a checkpoint says that tokenizer.json is all of its tokenizer."""
    told = path / "tokenizer_config.json"
    settings = json.loads(told.read_text()) if told.is_file() and (path / "tokenizer.json").is_file() else {}
    return "auto_map" not in settings and settings.get("tokenizer_class") in _PLAIN


def tokenizer_of(path: Path) -> Any:
    """Return the checkpoint's tokenizer, or raise :class:`CheckpointError` where it has none that can be read."""
    import transformers

    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(f"{path}: no tokenizer.json; a checkpoint with its tokenizer's files is needed for text")
    try:
        # AutoTokenizer imports models and their generation, half of a command's start, to find the class said here.
        made: Any = transformers.PreTrainedTokenizerFast if _is_plain(path) else transformers.AutoTokenizer
        return made.from_pretrained(path, local_files_only=True)  # a directory: nobody is to be asked for it
    except Exception as error:  # the tokenizers' own are no subclasses of anything else
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer or config.json: {reason_of(error)}"
        ) from error


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of one user turn, ready for the assistant's answer.

    Raises
    ------
    CheckpointError
        The tokenizer does not say how a conversation is written.
    """
    if not getattr(tokenizer, "chat_template", None):
        where = getattr(tokenizer, "name_or_path", "")
        raise CheckpointError(f"{where}: no chat_template.jinja, and no chat_template in tokenizer_config.json")
    return template_ids(tokenizer, [{"role": "user", "content": prompt}], True)


def template_ids(tokenizer: Any, messages: list[dict[str, str]], awaiting: bool) -> list[int]:
    """Return the token ids of a conversation as the template writes it, perhaps awaiting the assistant's answer."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=awaiting, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
