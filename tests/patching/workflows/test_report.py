"""The report tells the truth: what is named runs, and what does not run is counted with its reason."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastlayers as fl
from fastlayers.errors import PatchError

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close, logits
from tiny import build, prompt


@pytest.mark.parametrize("made", ["renamed", "loaded"])
def test_experts_of_a_model_subclass_run(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = build("qwen3_moe"), build("qwen3_moe")

    class Mine(transformers.Qwen3MoeForCausalLM):
        pass

    if made == "renamed":
        model.__class__ = Mine
    else:
        # Whether experts' implementations can be set transformers reads in a class's file, and keeps for what derives.
        name = "_can_set_experts_implementation_cached_value"
        monkeypatch.delattr(transformers.Qwen3MoeForCausalLM, name, raising=False)
        model = Mine(transformers.Qwen3MoeConfig.from_dict(twin.config.to_dict())).eval()
        model.load_state_dict(twin.state_dict())
        assert not model._can_set_experts_implementation()
    report = fl.patch(model)
    assert close(logits(model), logits(twin))
    experts = [entry.name for entry in report.replaced if "fused_moe" in entry.implementation]
    assert experts and all(report.hits()[name] == 1 for name in experts)


@pytest.mark.parametrize("name", ["v3", "qwen3_moe", "gpt_oss"])
def test_experts_of_a_lone_layer_run(name: str) -> None:
    layer, twin = (build(name).model.layers[1].mlp for _ in range(2))
    report = fl.patch(layer)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        wanted, given = (m(x) for m in (twin, layer))
    if isinstance(wanted, tuple):
        wanted, given = wanted[0], given[0]
    assert close(given, wanted)
    assert {name: count for name, count in report.hits().items() if not count} == {}
    fl.unpatch(layer)
    assert torch.equal(layer(x)[0], twin(x)[0])


@pytest.mark.parametrize("name", ["v3", "gpt_oss", "llama"])
def test_what_falls_back_at_every_call_is_in_the_summary(name: str) -> None:
    model = build(name)
    report = fl.patch(model)
    assert "fell back" not in report.summary()
    model(**prompt(1, 8))
    assert not any(report.hits().values())
    assert "gradients are wanted" in report.summary()
    model.train()
    with torch.no_grad():
        model(**prompt(1, 8))
    model.eval()
    lines = [line for line in report.summary().splitlines() if line.startswith("fell back")]
    assert len(lines) == 2 and any("training mode" in line for line in lines)
    assert any(f"{len(report.fallbacks())} modules" in line for line in lines)


def test_experts_of_another_dtype_than_the_model_are_skipped() -> None:
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts.to(torch.bfloat16)
    report = fl.patch(model)
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert set(reasons) == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert all("bfloat16" in reason and "float32" in reason for reason in reasons.values())


def test_a_patch_never_edits_the_configuration() -> None:
    for name in ("v3", "qwen3_moe", "gpt_oss", "llama"):
        model = build(name)
        before = {key: repr(value) for key, value in model.config.__dict__.items()}
        fl.patch(model)
        logits(model)
        model.generate(**prompt(1, 8), max_new_tokens=3, do_sample=False)
        assert {key: repr(value) for key, value in model.config.__dict__.items()} == before
        assert model.config._attn_implementation in ("sdpa", "eager")


class Stateless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_reasons_name_what_was_changed() -> None:
    model: Any = build("llama")
    report = fl.patch(model)
    model.model.layers[0].mlp.act_fn = Stateless()
    logits(model)
    assert "fell back: 1 calls of 1 modules: act_fn was replaced or hooked" in report.summary()
    assert report.fallbacks()["model.layers.0.mlp"] == 1 and report.hits()["model.layers.1.mlp"] == 1


def test_products_that_end_after_the_patch_are_in_the_summary() -> None:
    model = build("llama")
    report = fl.patch(model)
    assert "no longer" not in report.summary()
    held = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.load_state_dict(held, assign=True)  # and somebody keeps them
    logits(model)
    line = next(line for line in report.summary().splitlines() if line.startswith("no longer one product"))
    assert "4 of 4: aliased" in line
    model.load_state_dict({key: tensor.clone() for key, tensor in held.items()}, assign=True)
    del held
    logits(model)
    assert "no longer" not in report.summary()
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(2.0 * linear.weight.detach())
    assert "no longer one product: 1 of 4" in report.summary()
    kept = pickle.loads(pickle.dumps(report))
    assert kept.summary().splitlines()[0] == report.summary().splitlines()[0]
    fl.unpatch(model)
    assert "no longer" not in report.summary()


def test_sharded_weights_are_not_called_quantised() -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    model, twin = build("v3"), build("v3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        report = fl.patch(model)
        reasons = {entry.kind: entry.reason for entry in report.skipped}
        assert reasons == dict.fromkeys(("attention", "moe", "norm"), "dtensor: sharded parameters")
        with torch.no_grad():
            assert close(model(**prompt(2, 12)).logits, twin(**prompt(2, 12)).logits)
    finally:
        dist.destroy_process_group()


def test_what_derives_from_a_known_class_is_left_alone_and_named() -> None:
    model, twin = build("llama"), build("llama")
    first = model.model.layers[0]
    for module, name in ((first.self_attn, "Mine"), (first.input_layernorm, "Own"), (first.mlp, "Wide")):
        module.__class__ = type(name, (type(module),), {})
    report = fl.patch(model, dry_run=True)
    named = {entry.name for entry in report.skipped if entry.reason == "unknown-class"}
    assert named == {f"model.layers.0.{each}" for each in ("self_attn", "input_layernorm", "mlp")}
    with pytest.raises(PatchError, match=r"Own.*unknown-class"):
        fl.patch(model, strict=True)
    fl.patch(model)
    assert close(logits(model), logits(twin))


@pytest.mark.parametrize("name", ["llama", "qwen2", "v3", "qwen2_moe"])
def test_no_tokens_are_an_mlps_result_too(name: str) -> None:
    model, twin = build(name), build(name)
    fl.patch(model)
    pairs = [(m, t) for (path, m), t in zip(model.named_modules(), twin.modules(), strict=True) if path.endswith("mlp")]
    pairs += [(m.shared_experts, t.shared_experts) for m, t in pairs if hasattr(m, "shared_experts")]
    dense = [(m, t) for m, t in pairs if hasattr(t, "gate_proj")]
    assert dense
    with torch.no_grad():
        for mine, stock in dense:
            for shape in ((0, 64), (2, 0, 64), (64,), (3, 64)):
                x = torch.randn(shape)
                assert close(mine(x), stock(x)) and mine(x).shape == stock(x).shape
