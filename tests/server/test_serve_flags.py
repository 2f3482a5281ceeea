"""The flags of ``fastlayers serve``: what is refused, a file of them, and that each has an effect."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fastlayers.errors import ArgumentError
from fastlayers_server.serve_command import resolved, serve, template_of
from fastlayers_server.serve_config import NEVER, ServeConfig, parse


@pytest.mark.parametrize("name", sorted(NEVER))
def test_flags_that_we_lack_say_why(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse([name, "2"])
    assert NEVER[name] in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--port", "x"], "invalid int value"),
        (["--port", "70000"], "0 to 65535"),
        (["--load-format", "pt"], "invalid choice"),
        (["--kv-cache-dtype", "fp8_e5m2"], "invalid choice: 'fp8_e5m2'"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["a", "--model", "b"], "the same as MODEL"),
        (["--cors-origin", "*"], "one by one"),
        (["--host", ""], "0.0.0.0 for everybody"),
        (["--api-key", ""], "--api-key is ''; accepted: at least one"),
        (["--served-model-name", ","], "--served-model-name is ''; accepted: at least one"),
        (["--host", " "], "0.0.0.0 for everybody"),
        (["--max-mod", "3"], "unrecognized"),
        (["--gpu-memory-utilization", "1.5"], "0.05 to 0.98"),
        (["--watchdog-timeout", "0"], "1 to 86400"),  # each step would count as hung
    ],
)
def test_flags_that_are_wrong_are_refused(given: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match="accepted") as caught:
        parse(given)
    assert says in str(caught.value)


def test_a_file_of_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: tiny\nmax-n: 3\napi_key: [sk-secret]\nitl_target_ms: 20\n")
    assert serve(["--config", str(path), "--max-n", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["max_n"], shown["itl_target_ms"], shown["api_key"]) == (4, 20.0, "***")
    path.write_text("model-path: tiny\nmax-num-seqs: 3\ntensor_parallel_size: 2\nno-enable-prefix-caching: true\n")
    assert serve(["--config", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["max_running_requests"], shown["tp"], shown["no_prefix_cache"]) == (
        "tiny",
        3,
        2,
        True,
    )
    for text, says in (("nope: 1", "'nope'"), ("enable-auto-tool-choice: true", "nothing: it is always on"),
                       ("max-num-seqs: 3\nmax_running_requests: 4", "one name of --max-running-requests"),
                       ("max_n: many", "a int"), ("- a", "no mapping"), ("{", "--config"),
                       ("api_key: 123456", "--api-key is a int"), ("api_key: ''", "at least one")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ArgumentError, match="accepted") as caught:
            serve(["--config", str(path)])
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_every_flag_has_an_effect(tmp_path: Path) -> None:
    """Each field is the engine's, or read by the front or the command itself; keys come from their files."""
    from fastlayers_server.engine.config import EngineConfig

    folder = Path(__file__).parents[2] / "server" / "fastlayers_server"
    source = "".join(p.read_text() for p in (folder / "serve_command.py", *folder.glob("front/*.py")))
    read_here = ("max_body_mb",)  # as max_body_bytes
    for field in dataclasses.fields(ServeConfig):
        used = f"config.{field.name}" in source or field.name in EngineConfig.__dataclass_fields__
        assert used or field.name in read_here, f"{field.name}: nothing reads it"
    (tmp_path / "keys").write_text("sk-1\n\n sk-2 \n")
    (tmp_path / "template").write_text("{{ messages }}")
    given = ServeConfig(api_key=(f"@{tmp_path}/keys",), admin_api_key=("adm",), chat_template=f"{tmp_path}/template")
    found = resolved(given, tmp_path)
    assert found == dataclasses.replace(given, served_model_name=(tmp_path.name,), api_key=("sk-1", "sk-2"))
    assert resolved(dataclasses.replace(given, in_process=True), tmp_path).no_freeze_gc
    assert template_of(given) == "{{ messages }}" and template_of(ServeConfig()) is None
    assert ServeConfig(max_body_mb=0.5).max_body_bytes == 2**19


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"--api-key is .*\(no UTF-8\); accepted: a key, or @FILE"):
        resolved(parse(["--api-key", f"@{tmp_path / 'keys'}"])[0], tmp_path)
    (tmp_path / "flags").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ArgumentError, match="--config"):
        parse(["--config", str(tmp_path / "flags")])
