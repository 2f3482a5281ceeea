"""A patched Llama 4: what is replaced and what is left alone, tokens and logits of stock, also across chunks."""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama4 import modeling_llama4

import fastlayers as fl
from fastlayers.patching import capturable, decode, head, plan
from fastlayers.patching.prefill import ExtendKey

sys.path.insert(0, str(Path(__file__).parent))
from tiny import eager_graphs, prompt

LAYERS = 4
TEXT: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 8,
    "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


_built: dict[str, Any] = {}


def _made(dtype: torch.dtype, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**TEXT | changes))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.5 * torch.randn_like(value))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.Llama4ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def model_of(dtype: torch.dtype = torch.float32, attn: str = "sdpa", **changes: Any) -> Any:
    """Return a tiny model: chunks of 16, experts in every second layer, the fourth without positions."""
    key = repr((dtype, sorted(changes.items())))
    if key not in _built:
        _built[key] = _made(dtype, changes)
    model = copy.deepcopy(_built[key])
    model.set_attn_implementation(attn)
    return model


@torch.inference_mode()
def logits_of(model: Any, batch: int = 1, pads: tuple[int, ...] = ()) -> torch.Tensor:
    logits: torch.Tensor = model(**prompt(batch, 40, pads=pads)).logits
    return logits


@torch.inference_mode()
def run(model: Any, batch: int, pads: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a prompt of three chunks and more, and its logits."""
    tokens = model.generate(**prompt(batch, 40, pads=pads), max_new_tokens=24, do_sample=False)
    return tokens, logits_of(model, batch, pads)


@pytest.fixture
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "check_capturable", lambda roots: None)
    monkeypatch.setattr(decode, "attach", partial(decode.attach, make_graphs=eager_graphs, core="torch"))


@torch.inference_mode()
def tokens_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=20, pad_token_id=0)
    return found


@pytest.mark.parametrize(
    ("pads", "changes"),
    [
        ((), {}),
        ((3, 0), {}),
        ((0, 19), {"attn": "eager", "use_qk_norm": False, "num_experts_per_tok": 2, "attention_bias": True}),
        ((3, 0), {"attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0], "num_key_value_heads": 4}),
    ],
    ids=["whole", "padded", "no norm, two experts", "no temperature"],
)  # fmt: skip
def test_tokens_and_logits_are_those_of_stock(pads: tuple[int, ...], changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    tokens, logits = run(model, 2, pads)
    assert len(set(tokens[0, 40:].tolist())) > 3
    with fl.patched(model, strict=True) as report:
        found = run(model, 2, pads)
        assert torch.equal(found[0], tokens)
        assert float((found[1] - logits).norm() / logits.norm()) <= 1e-5
        assert report.hits() and all(report.hits().values()) and not any(report.fallbacks().values())
    assert torch.equal(logits_of(model, 2, pads), logits)
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_fl_")]


def test_bf16_stays_as_near() -> None:
    model, exact = model_of(torch.bfloat16), model_of(torch.bfloat16).float()
    wanted, stock = logits_of(exact), logits_of(model)
    with fl.patched(model):
        found = logits_of(model)
    errors = [float((each.float() - wanted).norm() / wanted.norm()) for each in (found, stock)]
    assert 0 < errors[0] <= 1.25 * errors[1]


def test_what_is_replaced() -> None:
    model = model_of()
    report = fl.patch(model)
    assert head.direct(model)
    kinds = [entry.kind for entry in report.replaced if entry.action == "swapped"]
    # Dense MLPs in two layers; in the two others a shared expert, the router, the experts and what asks them.
    counts = {"attention": LAYERS, "mlp": LAYERS, "norm": 2 * LAYERS + 1, "moe": 2 * 3}
    assert {kind: kinds.count(kind) for kind in kinds} == counts and not report.skipped


@pytest.mark.usefixtures("graphs_anywhere")
def test_captured_steps_and_prompts_give_stock_tokens() -> None:
    """Steps begin where a row's chunk does; a prompt is replayed where no row is longer than a chunk."""
    model = model_of()
    cases = [prompt(3, 40, pads=(0, 6, 3)), prompt(1, 14, seed=2), prompt(2, 20, pads=(5, 4), seed=3)]
    stock = [tokens_of(model, case) for case in cases]
    report = fl.patch(model, cuda_graph=True)
    for _ in range(2):
        for case, wanted in zip(cases, stock, strict=True):
            assert torch.equal(tokens_of(model, case), wanted)
    driver = decode.driver_of(model)
    assert driver is not None and report.fallbacks()["cuda_graph"] == 0
    assert report.hits()["cuda_graph"] == 6 * 19 and int(driver.prefills) == 2
    assert driver.uncaptured["longer than the 16 tokens of an attention's chunk"] == 2
    assert "longer than the 16 tokens" in str(fl.explain(model))
    (entry,) = [entry for entry in report.replaced if entry.kind == "decode"]
    assert f"adds in norms in {LAYERS} of {LAYERS} layers" in entry.implementation
    prompts = {record.key.tokens for record in driver.ledger if isinstance(record.key, ExtendKey)}
    assert prompts == {16, 32}


@pytest.mark.usefixtures("graphs_anywhere")
@pytest.mark.parametrize("excluded", ["*.experts", "*.feed_forward", "*.router"])
def test_parts_that_are_left_out_give_the_same(excluded: str) -> None:
    model = model_of(interleave_moe_layer_step=1)
    stock = tokens_of(model, prompt(2, 20, pads=(3, 0)))
    report = fl.patch(model, cuda_graph=True, exclude=excluded, moe="torch")
    assert torch.equal(tokens_of(model, prompt(2, 20, pads=(3, 0))), stock)
    falls = {name: n for name, n in report.fallbacks().items() if n}
    named = {"*.experts": "feed_forward", "*.feed_forward": "experts", "*.router": ""}[excluded]
    assert all(name.endswith(named) for name in falls) and bool(falls) == bool(named)


def test_a_norm_that_somebody_replaced_is_called_and_not_captured(graphs_anywhere: None) -> None:
    model = model_of()
    norm = model.model.layers[0].self_attn.qk_norm
    norm.forward = lambda x: 0.5 * x
    stock = tokens_of(model, prompt(1, 20))
    report = fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens_of(model, prompt(1, 20)), stock)
    (entry,) = [entry for entry in report.skipped if entry.kind == "decode"]
    assert entry.reason.startswith("not-capturable: attention of layer 0: qk_norm is not the code")


def test_tables_that_a_norm_takes_back_are_not_captured(graphs_anywhere: None) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    model = model_of(rope_parameters=rope)
    stock = tokens_of(model, prompt(1, 20))
    report = fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens_of(model, prompt(1, 20)), stock)
    (entry,) = [entry for entry in report.skipped if entry.kind == "decode"]
    assert entry.reason == "not-capturable: rotary embedding 'yarn' scales what a norm behind it takes back"


def test_copies_run_as_the_patched_model() -> None:
    model = model_of()
    fl.patch(model)
    wanted = logits_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(other), wanted)
        fl.unpatch(other)
        assert type(other.model.layers[1].feed_forward) is modeling_llama4.Llama4TextMoe


def test_kernels_get_the_experts_in_their_order_and_unpatch_puts_them_back() -> None:
    model, inputs = model_of(), prompt(1, 6)
    with torch.inference_mode():
        stock = model(**inputs).logits
        strides = {n: p.stride() for n, p in model.named_parameters() if "experts" in n}
        fl.patch(model, moe="triton")
        moved = {n: p.stride() for n, p in model.named_parameters() if "experts" in n}
        assert moved.keys() == strides.keys() and all(moved[n] != strides[n] for n in moved)
        assert float((model(**inputs).logits - stock).norm() / stock.norm()) <= 1e-5
        fl.unpatch(model)
        assert {n: p.stride() for n, p in model.named_parameters() if "experts" in n} == strides
        assert torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("moe", ["auto", "torch"])
def test_routers_logits_are_those_of_stock(moe: str) -> None:
    """By the model's own way of recording them, and by anybody's hook, also where a backend chooses."""
    model, inputs = model_of(), prompt(1, 12)
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        blocks = [layer.feed_forward for layer in model.model.layers if layer.is_moe_layer]
        stock = [block(model.model.embed_tokens(inputs["input_ids"]))[1] for block in blocks]
        fl.patch(model, moe=moe)
        for block in blocks:
            block.router.register_forward_hook(lambda module, args, found: seen.append(found[1]))
        found = [block(model.model.embed_tokens(inputs["input_ids"]))[1] for block in blocks]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, stock, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, seen, strict=True)) and len(seen) == 2


def test_code_of_another_version_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "KNOWN", {})
    report = fl.patch(model_of())
    assert {entry.kind for entry in report.replaced} >= {"norm", "mlp", "attention", "moe"} and not report.skipped


@pytest.mark.parametrize("name", ["Llama4TextMoe", "Llama4TextExperts", "Llama4Router", "Llama4TextAttention"])
def test_code_that_computes_something_else_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = getattr(modeling_llama4, name)
    original = cls.forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return 1.01 * found if isinstance(found, torch.Tensor) else (1.01 * found[0], *found[1:])

    monkeypatch.setattr(cls, "forward", other)
    model = model_of()
    stock = logits_of(model)
    report = fl.patch(model)
    wrong = [entry for entry in report.skipped if entry.original_class == name]
    assert wrong and all("verify-failed: relative error" in entry.reason for entry in wrong)
    assert float((logits_of(model) - stock).norm() / stock.norm()) <= 1e-5


def test_another_activation_is_left_alone() -> None:
    model = model_of()
    model.model.layers[0].feed_forward.activation_fn = torch.nn.GELU()
    model.model.layers[1].feed_forward.experts.act_fn = torch.nn.GELU()
    stock = logits_of(model)
    report = fl.patch(model)
    reasons = {entry.kind: entry.reason for entry in report.skipped}
    assert reasons == {"mlp": "custom-gate: activation GELU", "moe": "custom-gate: activation GELU"}
    assert float((logits_of(model) - stock).norm() / stock.norm()) <= 1e-5
    assert report.fallbacks()["model.layers.1.feed_forward"] > 0


def test_the_vision_part_keeps_its_code_and_images_are_not_captured(graphs_anywhere: None) -> None:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    config = transformers.Llama4Config(vision_config=vision, text_config=TEXT)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    inputs = prompt(1, 20)
    with torch.inference_mode():
        stock = model(**inputs).logits
        report = fl.patch(model, cuda_graph=True)
        assert float((model(**inputs).logits - stock).norm() / stock.norm()) <= 1e-5
    reasons = {(entry.kind, entry.reason) for entry in report.skipped}
    words = "vision: its layers are not covered, the language model's are"
    captured = "not-capturable: images are not part of a step"
    assert reasons == {("attention", words), ("mlp", words), ("decode", captured)}
    assert all(count > 0 for name, count in report.hits().items() if "language_model" in name)


@pytest.mark.gpu
@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_gpu_captured_steps_give_stock_tokens(use_qk_norm: bool) -> None:
    model = model_of(use_qk_norm=use_qk_norm).to("cuda")
    given = [prompt(3, 40, pads=(0, 6, 3)), prompt(1, 14, seed=2), prompt(2, 20, pads=(5, 4), seed=3)]
    cases = [{name: value.to("cuda") for name, value in case.items()} for case in given]
    stock = [tokens_of(model, case) for case in cases]
    with fl.patched(model, strict=True) as plain:
        assert all(torch.equal(tokens_of(model, case), wanted) for case, wanted in zip(cases, stock, strict=True))
        assert not any(plain.fallbacks().values())
    report = fl.patch(model, cuda_graph=True)
    used = " ".join(str(entry.implementation) for entry in report.replaced)
    assert all(name in used for name in ("fused_moe=triton", "router=triton", "rms_norm=triton"))
    for _ in range(2):
        for case, wanted in zip(cases, stock, strict=True):
            assert torch.equal(tokens_of(model, case), wanted)
    driver = decode.driver_of(model)
    assert driver is not None and int(driver.prefills) == 2 and report.hits()["cuda_graph"] == 6 * 19
    assert report.fallbacks()["cuda_graph"] == 0


@pytest.mark.gpu
def test_gpu_bf16_prompts_stay_as_near() -> None:
    """Dense layers alone: a router's choice that falls the other way says nothing of roundings."""
    model = model_of(torch.bfloat16, interleave_moe_layer_step=LAYERS + 1).to("cuda")
    exact = copy.deepcopy(model).float()
    inputs = {name: value.to("cuda") for name, value in prompt(4, 15).items()}

    @torch.inference_mode()
    def last(each: Any) -> torch.Tensor:
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        found: torch.Tensor = each.generate(**inputs, max_new_tokens=1, **options).logits[0].float()
        return found

    wanted, stock = last(exact), last(model)
    fl.patch(model, cuda_graph=True)
    found = [last(model) for _ in range(2)]  # the second one is a replay
    driver = decode.driver_of(model)
    assert driver is not None and int(driver.prefills) == 1
    errors = [float((each - wanted).norm() / wanted.norm()) for each in (*found, stock)]
    assert min(errors) > 0 and max(errors[:2]) <= 1.5 * errors[2], errors
