"""What is replaced and what is left alone, with which reason; strict, dry run, selection, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import fastlayers as fl
from fastlayers.errors import ArgumentError, FastlayersError, PatchError, UnknownNameError
from fastlayers.patching import matching, plan

sys.path.insert(0, str(Path(__file__).parent))
from test_contracts import FAMILIES, logits, snapshot
from tiny import GQA, build


def reasons(report: Any) -> dict[str, str]:
    return {entry.name: entry.reason for entry in report.skipped}


def test_everything_known_is_replaced() -> None:
    model = build("v3")
    report = fl.patch(model, strict=True)
    assert report.skipped == ()
    kinds = {entry.kind for entry in report.replaced}
    assert kinds == {"attention", "moe", "norm", "mlp"}
    attention = next(e for e in report.entries if e.name == "model.layers.0.self_attn")
    assert (attention.action, attention.original_class) == ("swapped", "DeepseekV3Attention")
    experts = next(e for e in report.entries if e.name == "model.layers.1.mlp.experts")
    assert (experts.action, experts.implementation) == ("swapped", "fused_moe=torch")
    packed = next(e for e in report.entries if e.name == "model.layers.0.self_attn.q_a_proj+kv_a_proj_with_mqa")
    assert packed.bytes_moved == (40 + 32 + 16) * 64 * 4
    data = json.loads(report.to_json())
    assert len(data["entries"]) == len(report.entries)
    assert "DeepseekV3Attention" in report.summary() and str(report) == report.summary()


def test_dry_run_changes_nothing() -> None:
    model = build("v3")
    before = snapshot(model)
    dry = fl.patch(model, dry_run=True)
    assert snapshot(model) == before
    real = fl.patch(model)
    assert [(e.name, e.kind, e.action) for e in dry.entries] == [(e.name, e.kind, e.action) for e in real.entries]
    assert dry.hits() == {} and f"(dry run): {len(real.entries)} to replace, 0 skipped" in dry.summary()
    swapped = sum(entry.action == "swapped" for entry in real.entries)
    assert f"patch: {len(real.entries)} replaced, 0 skipped" in real.summary()
    for again, words in ((fl.patch(model, dry_run=True), "to replace"), (fl.patch(model), "replaced")):
        assert f": 0 {words}, {swapped} already patched, 0 skipped" in again.summary()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"fuse_projections": False}], ids=["fused", "apart"])
def test_a_dry_run_counts_what_a_patch_does(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)
    dry, real = fl.patch(model, dry_run=True, **options), fl.patch(model, **options)
    assert [(e.name, e.action) for e in dry.entries] == [(e.name, e.action) for e in real.entries]


class LoraLike(nn.Module):
    """The shape of a LoRA wrapper: it shows the base layer's weight."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.down(x).sum(-1, keepdim=True)


def _hook(model: Any) -> None:
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, args, output: output * 2.0)
    model.model.norm.register_forward_pre_hook(lambda module, args: None)


def _lora(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_b_proj = LoraLike(attention.q_b_proj)


def _instance_forward(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.forward = MethodType(lambda self, x: 3.0 * x, norm)


class OtherNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class StrangeRMSNorm(OtherNorm):
    pass


def _unknown(model: Any) -> None:
    model.model.layers[2].input_layernorm = StrangeRMSNorm()


def _gelu(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


class QuantisedLinear(nn.Linear):
    pass


def _quantised(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = QuantisedLinear


LEFT_ALONE: dict[str, tuple[Any, dict[str, str]]] = {
    "hooked": (_hook, {"model.layers.0.self_attn": "hooked", "model.norm": "hooked"}),
    "lora": (_lora, {"model.layers.0.self_attn": "wrapped-linear(LoRA)"}),
    "instance-forward": (_instance_forward, {"model.layers.1.input_layernorm": "instance-forward"}),
    "unknown-class": (_unknown, {"model.layers.2.input_layernorm": "unknown-class"}),
    "custom-gate": (_gelu, {"model.layers.0.mlp": "custom-gate"}),
    "quantized": (_quantised, {"model.layers.0.mlp": "quantized(QuantisedLinear)"}),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone_says_why_and_still_works(case: str) -> None:
    change, wanted = LEFT_ALONE[case]
    model = build("v3")
    plain = logits(model)
    torch.manual_seed(3)
    change(model)
    before, stock = snapshot(model), logits(model)
    if case != "quantized":
        assert not torch.equal(stock, plain), "the change must matter"
    with pytest.raises(PatchError, match="strict"):
        fl.patch(model, strict=True)
    assert snapshot(model) == before
    report = fl.patch(model)
    assert {name: reason.split(":")[0] for name, reason in reasons(report).items()} == wanted
    assert float((logits(model) - stock).norm() / stock.norm()) < 1e-5
    fl.unpatch(model)
    assert snapshot(model) == before


def test_linears_of_integers_are_left_alone() -> None:
    model = build("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.to(torch.int8), requires_grad=False)
    report = fl.patch(model, dry_run=True)
    assert reasons(report) == {"model.layers.0.self_attn": "quantized(int8): k_proj"}


class WQLinear_GEMM(nn.Module):
    """The shape of AutoAWQ's linears: packed words, no weight."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(source.in_features, source.out_features // 8, dtype=torch.int32))
        self.held = [source]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](x)  # type: ignore[no-any-return]


def test_linears_of_awq_are_left_alone_and_the_rest_is_patched() -> None:
    model = build("llama")
    stock = logits(model)
    model.config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, WQLinear_GEMM(child))
    report = fl.patch(model)
    first = ("self_attn", "quantized(WQLinear_GEMM): q_proj"), ("mlp", "quantized(WQLinear_GEMM): gate_proj")
    layers = range(len(model.model.layers))
    assert reasons(report) == {f"model.layers.{i}.{name}": reason for i in layers for name, reason in first}
    assert {entry.kind for entry in report.replaced} == {"norm"}
    assert float((logits(model) - stock).norm() / stock.norm()) < 1e-5


def test_codes_that_transformers_took_for_weights_are_refused() -> None:
    model = build("llama")
    before = snapshot(model)
    model.config.quantization_config = {"quant_method": "int8", "modules_to_not_convert": ["lm_head"]}
    with pytest.raises(PatchError, match=r"quant_method 'int8', which transformers does not know.*--format bf16"):
        fl.patch(model)
    # A method that transformers did load has modules of its own, which are judged one by one.
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert fl.patch(model, dry_run=True).skipped == ()
    del model.config.quantization_config
    assert snapshot(model) == before


def test_lora_of_peft_is_left_alone() -> None:
    from peft import LoraConfig, get_peft_model

    model = build("v3")
    lora: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_a_proj", "o_proj"], init_lora_weights=False))
    lora.eval()
    stock = logits(lora)
    report = fl.patch(lora)
    skipped = reasons(report)
    attention = [name for name in skipped if name.endswith("self_attn")]
    assert len(attention) == 3 and all(skipped[name].startswith("wrapped-linear(LoRA)") for name in attention)
    assert any(e.kind == "norm" for e in report.replaced)
    assert float((logits(lora) - stock).norm() / stock.norm()) < 1e-5
    fl.unpatch(lora)
    assert torch.equal(logits(lora), stock)


@pytest.mark.parametrize("name", GQA)
def test_lora_of_peft_is_left_alone_in_other_families(name: str) -> None:
    from peft import LoraConfig, get_peft_model

    lora: Any = get_peft_model(build(name), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lora.eval()
    stock = logits(lora)
    report = fl.patch(lora)
    skipped = reasons(report)
    attention = [key for key in skipped if key.endswith("self_attn")]
    assert len(attention) == 2 and all(skipped[key].startswith("wrapped-linear(LoRA)") for key in attention)
    assert any(e.kind == "norm" for e in report.replaced)
    assert float((logits(lora) - stock).norm() / stock.norm()) < 1e-5
    fl.unpatch(lora)
    assert torch.equal(logits(lora), stock)


def test_mxfp4_blocks_are_left_alone() -> None:
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    model = build("gpt_oss", hidden_size=64, intermediate_size=32)
    block = model.model.layers[0].mlp
    block.experts = Mxfp4GptOssExperts(model.config)
    block.forward = MethodType(lambda self, x: (2.0 * x, None), block)
    found = reasons(fl.patch(model))
    assert found["model.layers.0.mlp.experts"].startswith("quantized(mxfp4)")
    assert found["model.layers.0.mlp.router"].startswith("instance-forward")
    assert len(found) == 2


def test_a_backend_that_hugging_faces_caches_do_not_suit_is_refused() -> None:
    model = build("llama")
    before = snapshot(model)
    with pytest.raises(FastlayersError, match="caches are not pages"):
        fl.patch(model, attention="triton")
    assert snapshot(model) == before


def test_lora_added_after_the_patch_is_not_bypassed() -> None:
    model, twin = build("v3"), build("v3")
    fl.patch(model)
    for m in (model, twin):
        torch.manual_seed(4)
        for name in ("q_a_proj", "kv_b_proj"):
            attention = m.model.layers[0].self_attn
            setattr(attention, name, LoraLike(getattr(attention, name)))
    assert float((logits(model) - logits(twin)).norm() / logits(twin).norm()) < 1e-5


def test_zero_replacements_raise() -> None:
    model = build("v3")
    before = snapshot(model)
    with pytest.raises(PatchError, match="nothing can be replaced"):
        fl.patch(model, include="lm_head")
    for argument in ("include", "exclude"):
        with pytest.raises(ArgumentError, match=f"patch: {argument} is 'norm'; accepted: a glob that matches"):
            fl.patch(model, **{argument: ["norm"]})
    with pytest.raises(PatchError, match="nothing can be replaced"):
        fl.patch(nn.Sequential(nn.Linear(4, 4)))
    assert snapshot(model) == before
    types = "deepseek_v2, deepseek_v3, gpt_oss, llama, llama4, qwen2, qwen2_moe, qwen3, qwen3_moe"
    words = rf"nothing .* model; accepted: {types}\n  StrangeRMSNorm: unknown-class, 0 and 2 more$"
    with pytest.raises(PatchError, match=words):
        fl.patch(nn.Sequential(*(StrangeRMSNorm() for _ in range(3))))


def test_include_and_exclude() -> None:
    model = build("v3")
    report = fl.patch(model, include="model.layers.1.*", exclude=["*layernorm"], strict=True)
    assert {e.name for e in report.replaced if e.action != "packed"} == {
        "model.layers.1.self_attn", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts",
    }  # fmt: skip
    assert set(reasons(report).values()) == {"user-excluded"}
    fl.unpatch(model)
    norm_class = type(model.model.norm)
    report = fl.patch(model, include=(norm_class, lambda name, module: name.endswith("mlp.gate")))
    assert {e.kind for e in report.replaced} == {"norm", "moe"}
    assert model.config._experts_implementation != "fastlayers"


def test_experts_that_are_excluded_run_the_original() -> None:
    model = build("v3")
    stock = logits(model)
    report = fl.patch(model, exclude="model.layers.1.mlp.experts")
    assert "model.layers.1.mlp.experts" not in report.hits()
    assert float((logits(model) - stock).norm() / stock.norm()) < 1e-5


def test_a_kind_can_be_left_out() -> None:
    model = build("v3")
    report = fl.patch(model, moe=False, norm=False, mlp=False, strict=True)
    assert {e.kind for e in report.entries} == {"attention"}
    assert type(model.model.norm).__name__ == "DeepseekV3RMSNorm"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"attention": 3}, ArgumentError), ({"cache": "paged"}, ArgumentError), ({"verify": True}, ArgumentError),
        ({"include": 3}, ArgumentError), ({"norm": "no_such_backend"}, UnknownNameError),
        ({"backend": "trtllm_gen"}, FastlayersError), ({"fp8_math": True}, ArgumentError),
        ({"no_such_argument": True}, TypeError),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_leave_the_model_as_it_was(options: dict[str, Any], error: type[Exception]) -> None:
    model = build("v3")
    before = snapshot(model)
    with pytest.raises(error):
        fl.patch(model, **options)
    assert snapshot(model) == before


def test_a_failure_half_way_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlayers.patching import apply

    model = build("v3")
    before, wanted = snapshot(model), logits(model)
    right, calls = apply.swap, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 9:
            raise RuntimeError("out of memory")
        return right(*arguments)

    monkeypatch.setattr(apply, "swap", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        fl.patch(model)
    assert len(calls) == 9
    assert snapshot(model) == before
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("name", ["v3", "v2_lite", *GQA])
def test_unknown_code_is_verified(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(plan, "KNOWN", {})
    model = build(name)
    before = snapshot(model)
    assert fl.patch(model, dry_run=True, strict=True).skipped == ()
    assert snapshot(model) == before
    with pytest.raises(PatchError, match="unknown-forward"):
        fl.patch(model, verify=False)
    assert snapshot(model) == before


def test_verification_catches_a_forward_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("v3")
    stock_norm, stock_attention = type(model.model.norm), type(model.model.layers[0].self_attn)
    right_norm, right_attention = stock_norm.forward, stock_attention.expand_kv

    def other_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.001 * right_norm(self, hidden_states)

    def other_expansion(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        keys, values = right_attention(self, kv_nope, k_rot)
        return keys, 1.001 * values

    monkeypatch.setattr(stock_norm, "forward", other_norm)
    monkeypatch.setattr(stock_attention, "expand_kv", other_expansion)
    stock = logits(model)
    report = fl.patch(model)
    found = reasons(report)
    assert all(found[f"model.layers.{i}.self_attn"].startswith("verify-failed: relative error") for i in range(3))
    assert found["model.norm"].startswith("verify-failed")
    assert float((logits(model) - stock).norm() / stock.norm()) < 1e-5


def test_fingerprints_ignore_layout_but_not_code() -> None:
    class One:
        def forward(self, x: int) -> int:
            """Say something."""
            return x + 1  # a comment

    class Two:
        def forward(self, x):  # type: ignore[no-untyped-def]
            return (x +
                    1)  # fmt: skip

    class Three:
        def forward(self, x: int) -> int:
            return x + 2

    prints = [matching.fingerprint(cls, ("forward",)) for cls in (One, Two, Three)]
    assert prints[0] == prints[1] != prints[2]
    assert None not in prints


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nope": 1}, "patch is with 'nope'; accepted: arguments of fastlayers.patch: attention, moe"),
        ({"model": None}, "patch is with 'model'"),
        ("cache", "patch is 'cache'; accepted: a dict"),
        ({"cache": "x"}, "cache is 'x'"),
        ({"moe": 3}, "moe is 3"),
        (
            {"fp8_math": True},
            r"^patch: fp8_math is True; accepted: False: patch has no fp8_math.*AutoModel\.from_pretrained",
        ),
    ],
)
def test_from_pretrained_checks_the_options_of_patch_before_it_loads(options: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fl.from_pretrained(None, "no/checkpoint/at/all", patch=options)


@pytest.mark.parametrize(
    ("auto_class", "name", "words"),
    [
        (None, "no/checkpoint/at/all", "auto_class is None; accepted: AutoModelForCausalLM"),
        (dict, "no/checkpoint/at/all", "auto_class is <class 'dict'>"),
        (AutoModelForCausalLM, None, "name is None; accepted: a directory"),
    ],
)
def test_from_pretrained_names_an_argument_that_it_cannot_load_with(auto_class: Any, name: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fl.from_pretrained(auto_class, name)
