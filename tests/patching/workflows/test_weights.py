"""Weights of a patched model under the tools that save, load, share and move them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fastlayers as fl

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import all_packed, close, logits
from tiny import build, prompt

FAMILIES = ["v3", "qwen2_moe", "gpt_oss", "llama"]


def with_other_weights(name: str) -> Any:
    return build(name, seed=5)


@pytest.mark.parametrize("name", FAMILIES)
def test_accelerate_saves_and_loads_every_tensor(name: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = build(name), with_other_weights(name)
    wanted = logits(model)
    names = set(model.state_dict())
    fl.patch(model)
    assert all_packed(model)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "model")
    assert set(safetensors.load_file(tmp_path / "model" / "model.safetensors")) == names
    fl.patch(other)
    accelerate.load_checkpoint_in_model(other, str(tmp_path / "model"))
    assert close(logits(other), wanted)

    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    accelerator.load_state(str(tmp_path / "state"))
    assert close(logits(prepared), wanted)
    accelerator.free_memory()


@pytest.mark.parametrize("name", FAMILIES)
def test_safetensors_saves_and_loads_whole_models(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = build(name), with_other_weights(name)
    wanted = logits(model)
    fl.patch(model)
    fl.patch(other)
    safetensors.save_model(model, str(tmp_path / "all.safetensors"))
    assert safetensors.load_model(other, str(tmp_path / "all.safetensors")) == (set(), [])
    assert close(logits(other), wanted)
    fl.unpatch(other)
    assert torch.equal(logits(other), wanted)


@pytest.mark.parametrize("name", ["v3", "llama"])
def test_the_hub_saves_every_tensor(name: str, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(name)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    fl.patch(model)
    hub.save_torch_model(model, str(tmp_path))
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(found) == set(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)

    class Mine(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.inner = build(name, seed=seed)

    mine = Mine(seed=3)
    before = logits(mine.inner)
    fl.patch(mine)
    mine.save_pretrained(tmp_path / "mine")
    again = Mine.from_pretrained(tmp_path / "mine")
    assert torch.equal(logits(again.inner), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_that_look_at_weights_before_patch_and_unpatch_stay_current(name: str) -> None:
    model, twin = build(name), build(name)
    held = model.state_dict()
    report = fl.patch(model)
    assert any("aliased: another tensor" in entry.reason for entry in report.replaced)
    del held["lm_head.weight"]
    for m, tensors in ((model, held), (twin, twin.state_dict())):
        for key, tensor in tensors.items():
            if key.endswith("_proj.weight"):
                tensor.mul_(1.2)
        assert not torch.equal(logits(m), logits(build(name)))
    assert close(logits(model), logits(twin))

    other = build(name)
    fl.patch(other)
    held = other.state_dict()
    fl.unpatch(other)
    for key, tensor in held.items():
        assert other.get_parameter(key).data_ptr() == tensor.data_ptr() if "bias" not in key else True


@pytest.mark.parametrize("how", ["kept, then moved", "assigned", "another model's"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_that_look_at_weights_after_patch_stay_current(name: str, how: str) -> None:
    model, twin = build(name), build(name)
    for m in (model, twin):
        other = build(name, seed=5)
        held = m.state_dict() if how.startswith("kept") else other.state_dict()
        if m is model:
            fl.patch(model)
        if how.startswith("kept"):
            m.to("cpu").float()  # moves nothing
        else:
            m.load_state_dict(held if how == "another model's" else dict(held), assign=True)
        logits(m)
        for tensor in held.values() if how != "another model's" else [p.data for p in other.parameters()]:
            tensor.mul_(0.9)
    assert close(logits(model), logits(twin)) and not all_packed(model)
    # Whoever assigns tensors and lets go of them has them packed.
    model.load_state_dict({key: tensor.clone() for key, tensor in twin.state_dict().items()}, assign=True)
    assert close(logits(model), logits(twin)) and all_packed(model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", FAMILIES)
def test_shared_memory_stays_shared(name: str, when: str) -> None:
    model = build(name)
    wanted = logits(model)
    if when == "before":
        model.share_memory()
        report = fl.patch(model)
        assert any("shared memory" in entry.reason for entry in report.replaced)
    else:
        fl.patch(model)
        model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert close(logits(model), wanted)
    fl.unpatch(model)
    assert all(parameter.is_shared() for parameter in model.parameters())
    assert torch.equal(logits(model), wanted)


def test_transposed_weights_keep_their_strides() -> None:
    model = build("llama")
    linear = model.model.layers[0].self_attn.k_proj
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    strides = {name: p.stride() for name, p in model.named_parameters()}
    wanted = logits(model)
    fl.patch(model)
    fl.unpatch(model)
    assert torch.equal(logits(model), wanted)
    assert {name: p.stride() for name, p in model.named_parameters()} == strides


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_parameters_share_a_storage(name: str) -> None:
    model = build(name)
    fl.patch(model)
    assert all_packed(model)
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    for parameter, storage in zip(model.parameters(), storages, strict=True):
        assert storage.nbytes() == parameter.nbytes and parameter.storage_offset() == 0


def _renumbered(model: Any, rows: list[int]) -> None:
    """Keep these experts of the last layer, some of them twice, as a study of pruning or upcycling does."""
    block = model.model.layers[-1].mlp
    router = getattr(block, "gate", None) or block.router
    for module in (block.experts, router):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()[rows], requires_grad=False))
        module.num_experts = len(rows)


@pytest.mark.parametrize("rows", [[0, 2, 3, 5, 7, 11], [*range(16), 1, 4, 9, 1]], ids=["fewer", "more"])
@pytest.mark.parametrize("moe", ["auto", "torch"])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_experts_that_were_removed_or_added(name: str, moe: str, rows: list[int]) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model, moe=moe)
    for m in (model, twin):
        _renumbered(m, rows)
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, logits(build(name)), 1e-4)
    assert report.fallbacks()["model.layers.1.mlp.experts"] == 1
    model.to(torch.float64).to(torch.float32)
    assert close(logits(model), wanted) and report.hits()["model.layers.1.mlp.experts"] == 1
    fl.unpatch(model)
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("name", ["v3", "qwen3_moe", "gpt_oss"])
def test_pruned_experts(name: str, weight: str) -> None:
    model, twin = build(name), build(name)
    report = fl.patch(model)
    for m in (model, twin):
        prune.l1_unstructured(m.model.layers[1].mlp.experts, weight, amount=0.5)
    wanted = logits(twin)
    assert close(logits(model), wanted) and not close(wanted, logits(build(name)), 1e-3)
    assert "the weights were replaced" in report.summary()
    for m in (model, twin):
        prune.remove(m.model.layers[1].mlp.experts, weight)
    assert close(logits(model), wanted) and report.hits()["model.layers.1.mlp.experts"] > 0


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "v3"])
def test_weights_that_are_strided_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read what they are given as if it lay without gaps: they are not given this."""
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rms_norm=triton,router=triton")
    model = build(name, num_hidden_layers=2)
    wide: set[str] = set()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, value in tensors.items():
                if value is not None and value.dim() == 1 and value.is_floating_point() and key != "inv_freq":
                    apart = torch.stack([value.detach(), torch.full_like(value, 7.0)], -1)[:, 0]
                    tensors[key] = nn.Parameter(apart) if tensors is module._parameters else apart
                    wide.add(key)
    assert "weight" in wide
    ids = prompt(2, 9)
    with torch.inference_mode():
        wanted, report = model(**ids).logits, fl.patch(model)
        assert torch.allclose(model(**ids).logits, wanted, atol=1e-4)
    assert sum(report.hits().values()) > 6
