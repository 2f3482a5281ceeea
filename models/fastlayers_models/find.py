"""Where a model lies: a directory, or what the hub has under a name. Without torch: a front asks too."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fastlayers.checkpoint_files import INDEX, NAMED, SINGLE
from fastlayers.errors import ArgumentError, CheckpointError, check_path

# A conversion keeps this file until it is done.
UNFINISHED = "conversion_state.json"
TINY = "tiny_deepseek_v3"
ACCEPTED = (
    "accepted: a directory with config.json and *.safetensors, or the name of such a model on the Hugging Face hub"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


def assets() -> Path:
    """Return the folder with the checkpoints that ship with the project; :data:`TINY` is one of them."""
    return Path(__file__).parent / "assets"


def find(path: str | Path) -> Path:
    """Return the local directory of a model: ``path`` itself, or what the hub has under that name.

    Raises
    ------
    CheckpointError
        Something that is not a model directory: what it is, is named.
    ArgumentError
        Neither a string nor a path, or a name that no file can have.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentError("AutoModel", "path", repr(path), ACCEPTED.removeprefix("accepted: "))
    try:
        local = check_path("AutoModel", "path", path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}; {ACCEPTED}") from error
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise CheckpointError(f"{local}: {_other_directory(local)}; {ACCEPTED}")
        return local
    if local.suffix.lower() == ".gguf" or _starts_like_gguf(local):
        raise CheckpointError(f"{local}: a GGUF file; {ACCEPTED}")
    if local.is_file():
        raise CheckpointError(f"{local}: a file; {ACCEPTED}")
    if not HUB_NAME.fullmatch(str(path)):
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
    if (folder / UNFINISHED).is_file():
        return "an unfinished conversion without config.json (the same `fastlayers convert` again takes it up)"
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
        wanted, unwanted = ["*.json", "*.jinja", "*.safetensors"], ["*/*"]
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{name}: no such directory here, and the hub did not give a model of this name "
            f"({type(error).__name__}: {reason}); {ACCEPTED}"
        ) from error
    # What is not downloaded may be what transformers would read, so that other safetensors files are no answer.
    if not any((folder / file).is_file() for file in (SINGLE, INDEX)) and not _names_weights(folder):
        raise CheckpointError(f"{name}: the hub has neither {SINGLE} nor {INDEX} under this name; {ACCEPTED}")
    return folder


def _names_weights(folder: Path) -> bool:
    try:
        return NAMED in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False
