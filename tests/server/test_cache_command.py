"""``fastlayers cache``: the directory of FASTLAYERS_CACHE_DIR, in a process that warmed nothing up."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastlayers import env
from fastlayers.runtime.kernel_cache import STORES, versions_key
from fastlayers_server.cli import app


def test_the_directory_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    archive = str(tmp_path / "kernels.tar.gz")
    for place, verb in (("a", "export"), ("b", "import")):
        for store in STORES.values():
            monkeypatch.setenv(store.variable, "")
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / place))
        group = tmp_path / place / versions_key() / "triton" / "ABC"
        if verb == "export":
            group.mkdir(parents=True)
            (group / "k.cubin").write_bytes(b"cubin")
        assert CliRunner().invoke(app, ["cache", verb, archive]).exit_code == 0
        assert (group / "k.cubin").read_bytes() == b"cubin"
    assert not (tmp_path / ".triton").exists()
