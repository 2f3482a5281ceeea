"""Which class reads a checkpoint's tokenizer: its files' own word, and AutoTokenizer where they leave that open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastlayers.errors import CheckpointError
from fastlayers_server.hugging_face import tokenizer_of

PLAIN = "PreTrainedTokenizerFast"


@pytest.mark.parametrize(("settings", "asked"), [
    ({"tokenizer_class": PLAIN}, False), ({"tokenizer_class": "TokenizersBackend"}, False),
    ({"tokenizer_class": "LlamaTokenizerFast"}, True), ({}, True), (None, True),
    ({"tokenizer_class": PLAIN, "auto_map": {"AutoTokenizer": ["its.Own", None]}}, True),
])  # fmt: skip
def test_auto_tokenizer_is_asked_unless_the_files_say_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any] | None, asked: bool
) -> None:
    by: list[str] = []

    def reader(name: str) -> Any:
        return type(name, (), {"from_pretrained": staticmethod(lambda path, **_: by.append(name))})

    # By name: transformers puts another module in its own place, and a file may have imported the first.
    monkeypatch.setattr(f"transformers.{PLAIN}", reader(PLAIN))
    monkeypatch.setattr("transformers.AutoTokenizer", reader("AutoTokenizer"))
    (tmp_path / "tokenizer.json").write_text("{}")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer_of(tmp_path)
    assert by == ["AutoTokenizer" if asked else PLAIN]


@pytest.mark.parametrize("text", ["[1]", "{", "null"])
def test_settings_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot read its tokenizer"):
        tokenizer_of(tmp_path)
