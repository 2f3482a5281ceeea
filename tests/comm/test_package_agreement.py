"""A package that one rank has and cannot import: all ranks name it, and none begins without the other."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import device as device_module
from fastlayers.comm import rank_layer
from fastlayers.comm.fabric import Fabric, Workspace, survey
from fastlayers.comm.ladders import NAME
from fastlayers.comm.parallel import Axis
from fastlayers.comm.rank_layer import packages_of
from fastlayers.comm.sum_norm.layer import SUM_NORM, SumNorm, SumNormConfig
from fastlayers.device import DESCRIBED, forget_probes
from fastlayers.errors import CollectiveMismatch, NoBackendError
from fastlayers.testing.world import Rank, world
from fastlayers.tuning.table import SCHEMA

BF16 = torch.bfloat16
H200 = replace(DESCRIBED["H200"], described=False)


def workspace() -> Workspace:
    push = types.SimpleNamespace(hidden_size=64, dtype=BF16, slots=4)
    arena = types.SimpleNamespace(device=torch.device("cpu"))
    return Workspace(Fabric(2), arena, push)  # type: ignore[arg-type]


def play_package(patch: pytest.MonkeyPatch, folder: Path, broken: bool) -> None:
    """Put a flashinfer there that imports, whose module of collectives may not."""
    (folder / "flashinfer").mkdir(parents=True)
    (folder / "flashinfer" / "__init__.py").write_text("")
    text = "raise ImportError('libcudart.so.13 is not here')" if broken else "allreduce_fusion = print"
    (folder / "flashinfer" / "comm.py").write_text(f"{text}\ncreate_allreduce_fusion_workspace = print\n")
    patch.syspath_prepend(folder)
    patch.setattr(rank_layer, "by_nccl", lambda group: True)
    for module in (device_module, rank_layer):
        patch.setattr(module, "as_device", lambda device: H200)
    forget_probes()


def forget_package() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    forget_probes()


def ask(rank: Rank, folder: str, by: str, broken: int) -> list[str]:
    """Return what two layers say that want the package of one workspace."""
    axis, made, said = rank.spec().tp, workspace(), []
    options: dict[str, Any] = {"rounding": "one_plus", "workspace": made, "dtype": BF16}
    with pytest.MonkeyPatch.context() as patch:
        play_package(patch, Path(folder, f"rank{rank.rank}"), rank.rank == broken)
        patch.setattr("fastlayers.comm.sum_norm.flashinfer.Fusion", lambda *given: None)
        if by == "environment":
            patch.setenv("FASTLAYERS_BACKEND", "sum_norm=flashinfer")
        for _ in range(2):
            try:
                layer = SumNorm(axis, 64, backend="flashinfer" if by == "name" else "auto", **options)
                said.append(layer.choice.name)
            except NoBackendError as error:
                said.append(str(error))
    forget_package()
    return said


@pytest.mark.parametrize("by", ["name", "environment"])
def test_all_ranks_name_the_one_that_cannot_import(by: str, tmp_path: Path) -> None:
    for said in world(2).run(ask, str(tmp_path), by, 1):
        for each in said:
            assert "rank 1: flashinfer.comm fails to import: ImportError: libcudart.so.13 is not here" in each
    fine = tmp_path / "fine"
    assert world(2).run(ask, str(fine), by, -1) == [["flashinfer"] * 2] * 2


def other_wish(rank: Rank) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setenv("FASTLAYERS_BACKEND", "sum_norm=nccl,rms_norm=torch")
        try:
            survey(rank.spec().tp, torch.device("cpu"))
        except CollectiveMismatch as error:
            return str(error)
    return "nothing"


def test_ranks_whose_environments_name_other_rows_are_named() -> None:
    for said in world(2).run(other_wish):
        assert said.startswith(
            "ranks differ in FASTLAYERS_BACKEND of layers between ranks: {0: {}, 1: {'sum_norm': 'nc"
        )


def test_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_layer, "by_nccl", lambda group: True)
    monkeypatch.setenv("FASTLAYERS_TUNED_DIR", str(tmp_path))
    ladder = [{"max_tokens": 64, "backend": "flashinfer"}, {"max_tokens": None, "backend": "nccl"}]
    entry = {
        "layer": "sum_norm", "way": "", "ranks": 2, "device": "H200", "dtype": "bfloat16", "hidden_size": 64,
        "tokens": [64], "ladder": ladder, "made": {"commit": "abc", "torch": torch.__version__},
    }  # fmt: skip
    (tmp_path / NAME).write_text(json.dumps({"schema": SCHEMA, "ladders": [entry]}))
    cfg = SumNormConfig(Axis(2), 64, BF16, 4, rounding="one_plus", workspace=workspace())

    def names(cfg: SumNormConfig, backend: str) -> list[str]:
        return [row.name for row in packages_of(SUM_NORM, cfg, H200, backend)]

    assert names(cfg, "auto") == ["flashinfer"]  # by the ladder
    assert names(replace(cfg, hidden_size=512), "auto") == names(cfg, "triton_symm_mem") == []
    assert names(cfg, "triton_symm_mem:2|flashinfer") == ["flashinfer"]
    # What is refused on all ranks alike need not be imported.
    assert names(replace(cfg, rounding="cast_then_scale"), "flashinfer") == []
    lacking = Workspace(Fabric(2, None, {"flashinfer": "rank 0: it is absent"}))
    assert names(replace(cfg, workspace=lacking), "flashinfer") == []
