"""Ranks that differ are named before anything runs; a rank that was waited for in vain ends in RankLostError."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fastlayers_models
from fastlayers.comm import ladders
from fastlayers.comm.agreement import axis_of, share_tables
from fastlayers.comm.fabric import agree
from fastlayers.comm.parallel import Axis
from fastlayers.comm.seam import Late
from fastlayers.device import DESCRIBED
from fastlayers.errors import CollectiveMismatch, RankLostError
from fastlayers.norm.rms_norm.layer import RMS_NORM
from fastlayers.registry.choice import Rung
from fastlayers.runtime import builds, kernel_cache
from fastlayers.runtime.warmup import warmup
from fastlayers.testing.world import Rank, world
from fastlayers.tuning import SHIPPED
from fastlayers_models import AutoModel, agreement
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.llama import LlamaConfig, LlamaForCausalLM
from fastlayers_models.rows import Outbox

CONFIG = dict(
    model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, eos_token_id=1,
)  # fmt: skip


def differ(rank: Rank) -> str:
    axis = rank.spec().tp
    agree(axis, {"table": "a", "slots": 8})
    try:
        agree(axis, {"table": "ab"[rank.rank], "slots": 8})
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def test_every_rank_names_what_differs() -> None:
    wanted = "ranks differ in table: rank 0 has a; rank 1 has b; accepted: the same on all ranks"
    assert world(2).run(differ) == [wanted] * 2


def another_model(rank: Rank) -> str:
    config = LlamaConfig.from_hf(CONFIG | {"rms_norm_eps": 1e-6 * (1 + rank.rank)})
    try:
        LlamaForCausalLM(config, parallel=rank.spec(), dtype=torch.float32)
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def another_dtype(rank: Rank) -> str:
    config = LlamaConfig.from_hf(CONFIG)
    LlamaForCausalLM(config, parallel=rank.spec(), dtype=torch.float32)
    try:
        LlamaForCausalLM(config, parallel=rank.spec(), dtype=(torch.float32, torch.bfloat16)[rank.rank])
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def another_split(rank: Rank) -> list[str]:
    whole, by_expert, by_requests = rank.spec(), rank.spec(ep=2), rank.spec(attn_dp=2)
    said = []
    for other in (by_expert, by_requests):
        try:
            LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=(whole, other)[rank.rank], dtype=torch.float32)
        except CollectiveMismatch as error:
            said.append(str(error))
    return said


def test_splits_that_differ_are_named_as_they_were_given() -> None:
    begin, end = "ranks differ in split: rank 0 has tp=2, dp=1, ep=1; rank 1 has", "; accepted: the same on all ranks"
    for said in world(2).run(another_split):
        assert said == [f"{begin} tp=2, dp=1, ep=2{end}", f"{begin} tp=1, dp=2, ep=1{end}"]


def test_models_that_differ() -> None:
    for message in world(2).run(another_model):
        assert message.startswith("ranks differ in config.rms_norm_eps: rank 0 has 1e-06; rank 1 has 2e-06")
    for message in world(2).run(another_dtype):
        assert message.startswith("ranks differ in dtype: rank 0 has torch.float32; rank 1 has torch.bfloat16")


def facts_that_differ(rank: Rank, folder: str) -> list[str]:
    """Return what is said when only one rank has another version, GPU, backend, tuned ladder or checkpoint."""
    spec, own = rank.spec(), rank.rank == 1
    config = LlamaConfig.from_hf(CONFIG)

    def build() -> str:
        try:
            LlamaForCausalLM(config, parallel=spec, dtype=torch.float32)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    said = [build()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "source_hash", lambda: "edited" if own else "as released")
        said.append(build())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "as_device", lambda device: DESCRIBED["H100" if own else "H200"])
        said.append(build())
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setenv("FASTLAYERS_BACKEND", "rms_norm=reference")
        said.append(build())
    with pytest.MonkeyPatch.context() as patch:
        rungs = (Rung(8, RMS_NORM.named("torch")), Rung(None, RMS_NORM.named("torch")))
        choose = RMS_NORM._choose_auto
        if own:
            patch.setattr(RMS_NORM, "_choose_auto", lambda *given: replace(choose(*given), rungs=rungs))
        said.append(build())
    for change in ("", " "):
        with pytest.MonkeyPatch.context() as patch:
            file = Path(folder, f"rank {rank.rank}{change}", ladders.NAME)
            file.parent.mkdir()
            file.write_text((SHIPPED / ladders.NAME).read_text() + change * own)
            patch.setenv("FASTLAYERS_TUNED_DIR", str(file.parent))
            said.append(build())
    LlamaForCausalLM(config, dtype=torch.float32)  # a rank by itself asks nobody
    for name, size in (("copied", 16), ("longer", 16 + own)):
        path = Path(folder, f"{name} by rank {rank.rank}")
        path.mkdir()
        save_file({"model.norm.weight": torch.ones(size)}, path / "model.safetensors")
        (path / "config.json").write_text("{}")
        try:
            agreement.same_checkpoint(Checkpoint(path), spec)
        except CollectiveMismatch as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"


def read_another(rank: Rank, folder: str, what: str) -> str:
    """Return what is said when the second rank reads a model of another family, or with other weights."""
    path = TINY
    if rank.rank == 1:
        path = Path(shutil.copytree(path, Path(folder, what)))
        file = path / ("config.json" if what == "family" else "model.safetensors")
        data = bytearray(file.read_bytes())
        if what == "family":
            data = bytearray(json.dumps(json.loads(data) | {"model_type": "llama"}).encode())
        else:
            data[len(data) // 2] ^= 1
        file.write_bytes(data)
    try:
        AutoModel.from_pretrained(path, parallel=rank.spec())
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("what", "named"), [
    ("family", "config: rank 0 has DeepseekConfig; rank 1 has LlamaConfig"),
    ("weights", "checkpoint: rank 0 has 1 files, "),
])  # fmt: skip
def test_another_model_is_named(what: str, named: str, tmp_path: Path) -> None:
    for said in world(2).run(read_another, str(tmp_path), what):
        assert said.startswith(f"ranks differ in {named}")


def test_whatever_differs_is_named(tmp_path: Path) -> None:
    for said in world(2).run(facts_that_differ, str(tmp_path)):
        nothing, version, device, backend, table, ladder, another, copied, longer = said
        assert nothing == ladder == copied == "nothing"
        assert "ranks differ in fastlayers: rank 0 has" in version and "(edited)" in version
        assert device.startswith("ranks differ in device: rank 0 has H200; rank 1 has H100")
        assert backend.startswith("ranks differ in backend of model.layers.N.input_layernorm: rank 0 has torch; ")
        assert "rank 1 has reference" in backend
        assert table.startswith("ranks differ in backend of model.") and "rank 1 has torch:8|torch;" in table
        assert another.startswith("ranks differ in ladders between ranks: rank 0 has ")
        assert longer.startswith("ranks differ in checkpoint: rank 0 has 1 files")


def what_is_built(rank: Rank, folder: str) -> list[dict[str, int]]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        path = Path(folder, f"built{rank.rank}")
        path.mkdir()
        patch.setattr(builds, "record_path", lambda package: path / package)
        have = {"everywhere": 8 << rank.rank, f"only on {rank.rank}": 4}
        text = {"schema": builds.SCHEMA, "versions": kernel_cache.versions_key(), "built": have}
        (path / "deep_gemm").write_text(json.dumps(text))
        builds.refresh()
        found.append(dict(builds.built("deep_gemm")))
        builds.meet(rank.spec().tp)
        found.append(dict(builds.built("deep_gemm")))
        builds.refresh()
        found.append(dict(builds.built("deep_gemm")))
    builds.refresh()
    return found


def test_only_what_all_ranks_have_built_counts(tmp_path: Path) -> None:
    for rank, (before, met, after) in enumerate(world(2).run(what_is_built, str(tmp_path))):
        assert before == after == {"everywhere": 8 << rank, f"only on {rank}": 4}
        assert met == {"everywhere": 8}


def what_failed(rank: Rank) -> dict[str, str]:
    mine = {f"of {rank.rank}": "its words", "of both": f"by {rank.rank}"}
    return builds.of_all_ranks(mine, rank.spec().tp)


def test_what_one_rank_could_not_build_no_rank_takes() -> None:
    both = {"of 0": "its words", "of 1": "its words", "of both": "by 0"}
    assert world(2).run(what_failed) == [both, both]


def tables(rank: Rank, folder: str) -> list[str]:
    own = Path(folder, f"tables{rank.rank}")
    own.mkdir()
    written = [own / "linear" / "a.json"] if rank.rank == 0 else []
    for path in written:
        path.parent.mkdir()
        path.write_text("timed by the first")
    found = share_tables(written, own, rank.spec().tp)
    return [path.relative_to(own).as_posix() + ": " + path.read_text() for path in found]


def test_the_first_ranks_tables_are_everybodys(tmp_path: Path) -> None:
    assert world(2).run(tables, str(tmp_path)) == [["linear/a.json: timed by the first"]] * 2


def warmed(rank: Rank) -> str:
    model = LlamaForCausalLM(LlamaConfig.from_hf(CONFIG), parallel=rank.spec(), dtype=torch.float32)
    assert axis_of(model) is rank.spec().tp
    warmup(model.decoder.layers[0].input_layernorm, [2], progress=False)  # by itself: nobody is asked
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setenv("FASTLAYERS_BACKEND", "rms_norm=reference")
        try:
            warmup(model, [2], progress=False)
        except CollectiveMismatch as error:
            return str(error)
    return "nothing"


def test_what_a_warm_up_chooses_is_compared() -> None:
    for said in world(2).run(warmed):
        assert said.startswith(
            "ranks differ in backend of model.layers.N.input_layernorm: rank 0 has torch; rank 1 has"
        )


def test_one_rank_agrees_with_itself() -> None:
    agree(Axis(), {"anything": object()})
    agree(Axis(2, 1), {"sizes": "only"})


def test_a_lost_rank_is_named_with_the_step_whose_tokens_it_spoils() -> None:
    of_group, status = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    outbox = Outbox(4, torch.device("cpu"), [Late(of_group, (2, 5)), Late(status, (0, 1, 2))])
    good = outbox.send(torch.tensor([5, 6]))
    status.fill_(2)
    bad = outbox.send(torch.tensor([7, 8]))
    assert good.tokens() == [5, 6]
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 1 did not answer within the deadline") as caught:
            bad.tokens()
        assert (caught.value.rank, caught.value.operation) == (1, "a sum over ranks")
    of_group.fill_(2)  # by its number in its group, which is named as all ranks know it
    with pytest.raises(RankLostError, match="rank 5 did not answer within the deadline"):
        outbox.send(torch.tensor([9])).tokens()
    assert Late(status, (0,)).named(4) == 3  # of an axis whose ranks nobody listed
