"""A patched model on a GPU: Triton norms, routers, experts, MLPs and the paged core inside Hugging Face's code."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
import fastlayers_models
from fastlayers.patching import decode, packing
from fastlayers.patching.prefill import ExtendKey
from fastlayers_models.convert import convert_to_fp8_block
from fastlayers_server.tasks import held_out_problems, long_prompt

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIGS, GQA, build, prompt

pytestmark = pytest.mark.gpu
TINY = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"


def load(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).to("cuda").eval()


def chats(prompts: list[str]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.padding_side = "left"
    texts = [f"<|bos|><|user|>{prompt}<|assistant|>" for prompt in prompts]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to("cuda")
    return tokenizer, batch["input_ids"], batch["attention_mask"]


def answer(model: Any, ids: Any, mask: Any, new: int, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=2, **options)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
def test_fp32_tokens_equal_stock(options: dict[str, Any]) -> None:
    model = load(torch.float32)
    _, ids, mask = chats([p.prompt for p in held_out_problems(8)])
    stock = answer(model, ids, mask, 12, **options)
    with fl.patched(model) as report:
        assert torch.equal(answer(model, ids, mask, 12, **options), stock)
        hits = report.hits()
    assert all(hits[f"model.layers.{i}.self_attn"] for i in range(3)) and sum(hits.values()) > 100
    assert torch.equal(answer(model, ids, mask, 12, **options), stock)


@pytest.mark.parametrize("name", [*GQA, "v3", "v2"])
def test_one_product_is_one_product(name: str) -> None:
    model = build(name).to("cuda")
    fl.patch(model)
    packed = [module for module in model.modules() if isinstance(module, packing.PackedModule)]
    together = [module for module in packed if module._fl_packed.weight is not None]
    assert together and all(module._fl_packed.holds(module) for module in together)
    with torch.no_grad():
        assert all(module._fl_packed.whole(module) for module in together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_answers_are_right(dtype: torch.dtype) -> None:
    model, problems = load(dtype), held_out_problems(60)
    report = fl.patch(model)
    implementations = " ".join(str(entry.implementation) for entry in report.replaced)
    assert "rms_norm=triton" in implementations and "fused_moe=triton" in implementations
    tokenizer, ids, mask = chats([p.prompt for p in problems])
    texts = tokenizer.batch_decode(answer(model, ids, mask, 16), skip_special_tokens=True)
    assert sum(text.strip() == p.answer for text, p in zip(texts, problems, strict=True)) >= 58


def test_long_prompt_takes_the_paged_core() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    problem = long_prompt(2000, lambda text: len(tokenizer(text)["input_ids"]))
    model = load(torch.bfloat16)
    report = fl.patch(model)
    assert any("mla=triton" in str(entry.implementation) for entry in report.replaced)
    _, ids, mask = chats([problem.prompt])
    text = tokenizer.decode(answer(model, ids, mask, 12)[0], skip_special_tokens=True)
    assert text.strip() == problem.answer


def test_fp8_checkpoint_runs_on_our_linears(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert_to_fp8_block(TINY, tmp_path / "fp8")
    model, report = fl.from_pretrained(AutoModelForCausalLM, tmp_path / "fp8", patch={}, dtype=torch.bfloat16)
    model = model.to("cuda").eval()
    problems = held_out_problems(60)
    tokenizer, ids, mask = chats([p.prompt for p in problems])
    texts = tokenizer.batch_decode(answer(model, ids, mask, 16), skip_special_tokens=True)
    assert sum(text.strip() == p.answer for text, p in zip(texts, problems, strict=True)) >= 58
    assert sum(report.hits().values()) > 0


@pytest.mark.parametrize("name", ["v3", *GQA])
@torch.no_grad()
def test_inductor_compiles_patched_layers_once(name: str) -> None:
    model = build(name).to("cuda")
    report = fl.patch(model)
    torch._dynamo.reset()
    layer = model.model.layers[-1]
    step: Any = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 5, 64, device="cuda")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(20):
            x = x.roll(1, 0) + 0.1
            position = torch.arange(turn, turn + 5, device="cuda")[None].expand(2, -1)
            table = model.model.rotary_emb(x, position_ids=position)
            given = step(x, attention_mask=None, position_embeddings=table)
    wanted = layer(x, attention_mask=None, position_embeddings=table)
    assert float((given - wanted).norm() / wanted.norm()) < 1e-4
    own = [n for key, n in report.hits().items() if key.startswith(f"model.layers.{len(model.model.layers) - 1}.")]
    assert own and min(own) >= 21


@pytest.mark.parametrize("name", ["llama", "v3_dense"])
def test_transformers_compiler_gives_stocks_tokens_by_one_product_a_layer(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = build(name).to("cuda").requires_grad_(False)
    inputs = {key: value.to("cuda") for key, value in prompt(2, 24, pads=(0, 5)).items()}

    def tokens(model: Any, **options: Any) -> torch.Tensor:
        # A static cache is what transformers compiles the steps of, and records in graphs.
        options |= {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
        found: torch.Tensor = model.generate(**inputs, **options)
        return found

    twin, asked, right = copy.deepcopy(model), [], packing._lie_in
    monkeypatch.setattr(packing, "_lie_in", lambda buffer, parts: asked.append(right(buffer, parts)) or asked[-1])
    report = fl.patch(model)
    torch._dynamo.reset()
    wanted = tokens(twin, disable_compile=True)
    for _ in range(2):
        assert torch.equal(tokens(model), wanted)
    assert len(asked) > 0 and all(asked)
    assert min(report.hits().values()) > 0 and not any(report.fallbacks().values())
    for each in (model, twin):
        linear = each.model.layers[1].mlp.up_proj
        linear.weight.data = 1.5 * linear.weight.data
    changed = tokens(twin, disable_compile=True)
    assert torch.equal(tokens(model), changed) and not torch.equal(changed, wanted)


@pytest.mark.parametrize("name", GQA)
def test_fp32_tokens_of_every_family_equal_stock(name: str) -> None:
    model = build(name).to("cuda")
    ids = torch.stack([torch.randperm(100, generator=torch.Generator().manual_seed(i))[:48] + 3 for i in range(3)])
    ids, mask = ids.to("cuda"), torch.ones_like(ids)
    mask[1, :7] = 0
    mask = mask.to("cuda")
    options = {"min_new_tokens": 24, "eos_token_id": None}
    stock = answer(model, ids, mask, 24, **options)
    with fl.patched(model) as report:
        assert torch.equal(answer(model, ids, mask, 24, **options), stock)
        assert min(report.hits().values()) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_captured_steps_equal_stock(name: str) -> None:
    model = build(name).to("cuda")
    cases = [(prompt(3, 40, pads=(0, 6, 3)), 24), (prompt(1, 30), 9), (prompt(2, 150, seed=4), 110)]
    runs = [({key: value.to("cuda") for key, value in inputs.items()}, new) for inputs, new in cases]
    options = {"eos_token_id": None}

    def all_tokens() -> list[torch.Tensor]:
        return [
            answer(model, inputs["input_ids"], inputs["attention_mask"], new, min_new_tokens=new, **options)
            for inputs, new in runs
        ]

    stock = all_tokens()
    report = fl.patch(model, cuda_graph=True)
    for turn in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(all_tokens(), stock, strict=True))
        assert report.hits()["cuda_graph"] == turn * (23 + 8 + 109) and report.fallbacks()["cuda_graph"] == 0
    driver = decode.driver_of(model)
    assert driver is not None
    steps = [record.key for record in driver.ledger if not isinstance(record.key, ExtendKey)]
    assert sorted(key[:2] for key in steps) == [(1, 256), (2, 384), (3, 256)]
    twin = copy.deepcopy(model)
    fl.unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(all_tokens(), stock, strict=True))
    model = twin
    assert all(torch.equal(a, b) for a, b in zip(all_tokens(), stock, strict=True))
    twin_driver = decode.driver_of(twin)
    assert twin_driver is not None and int(twin_driver.replays) == 23 + 8 + 109


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "v3"])
@pytest.mark.parametrize("sampled", [False, True])
def test_bf16_tokens_of_captured_and_uncaptured_steps_are_equal(name: str, sampled: bool) -> None:
    model = build(name, dtype=torch.bfloat16).to("cuda")
    report = fl.patch(model, cuda_graph=True)
    inputs = {key: value.to("cuda") for key, value in prompt(4, 60, pads=(0, 6, 3, 20)).items()}
    found = []
    # From the second time on the prompts are replayed, too, by kernels that round otherwise than those of the first.
    for options in ({"disable_compile": True}, {}, {}, {}):
        torch.manual_seed(3)
        with torch.inference_mode():
            found.append(model.generate(**inputs, do_sample=sampled, max_new_tokens=40, pad_token_id=0, **options))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert report.hits()["cuda_graph"] == 3 * 39


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "v3"])
def test_steps_launched_before_they_are_asked_for_give_the_same_tokens(name: str) -> None:
    model = build(name, dtype=torch.bfloat16).to("cuda")
    inputs = {key: value.to("cuda") for key, value in prompt(4, 60, pads=(0, 6, 3, 20)).items()}
    options: dict[str, Any] = {
        "do_sample": False, "max_new_tokens": 120, "pad_token_id": 0, "eos_token_id": None, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip

    def found(**more: Any) -> Any:
        with torch.inference_mode():
            return model.generate(**inputs, **options, **more)

    # From the second time on the prompts are replayed, too, by kernels that round otherwise than those of the first.
    report, cases = fl.patch(model, cuda_graph=True, overlap=False), ({}, {"repetition_penalty": 3.0})
    waited = [[found(**case) for _ in range(3)][-1] for case in cases]
    before = report.hits()["cuda_graph"]
    fl.patch(model, cuda_graph=True)
    driver = decode.driver_of(model)
    assert driver is not None and driver.overlapping
    for _ in range(3):
        for case, wanted in zip(cases, waited, strict=True):
            ours = found(**case)
            assert torch.equal(ours.sequences, wanted.sequences)
            assert all(torch.equal(a, b) for a, b in zip(ours.logits, wanted.logits, strict=True))
            assert (driver.overlap.wrong == 0) == (not case)
    assert report.hits()["cuda_graph"] == before + 6 * 119


def test_a_trained_model_answers_in_graphs() -> None:
    model, problems = load(torch.bfloat16), held_out_problems(40)
    report = fl.patch(model, cuda_graph=True)
    tokenizer, ids, mask = chats([p.prompt for p in problems])
    texts = tokenizer.batch_decode(answer(model, ids, mask, 16), skip_special_tokens=True)
    assert sum(text.strip() == p.answer for text, p in zip(texts, problems, strict=True)) >= 38
    assert report.hits()["cuda_graph"] > 3


@pytest.mark.parametrize("name", [*GQA, "v2", "v3"])
def test_prompts_are_replayed_with_stock_tokens(name: str) -> None:
    model = build(name, torch.float32).to("cuda")
    cases = [prompt(1, 40), prompt(3, 40, pads=(0, 6, 3)), prompt(1, 17, seed=2), prompt(2, 64, seed=3)]
    inputs = [{key: value.cuda() for key, value in case.items()} for case in cases]
    stock = [answer(model, case["input_ids"], case["attention_mask"], 8) for case in inputs]
    fl.patch(model, cuda_graph=True)
    for _ in range(3):
        for case, wanted in zip(inputs, stock, strict=True):
            assert torch.equal(answer(model, case["input_ids"], case["attention_mask"], 8), wanted)
    driver = decode.driver_of(model)
    assert driver is not None and int(driver.prefills) == 8, driver.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss", "llama"])
def test_norms_and_rotation_in_one_launch_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype).to("cuda")
    fl.patch(model)
    attention = model.model.layers[1].self_attn
    assert attention._fl_turn is not None
    x = torch.randn(2, 1, 64, device="cuda", dtype=dtype)
    position = model.model.rotary_emb(x, torch.tensor([[9], [4]], device="cuda"))
    with torch.inference_mode():
        given = attention._fl_project(x, position)
        attention._fl_turn = None
        wanted = attention._fl_project(x, position)
    for g, w in zip(given, wanted, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(g, w, atol=2e-6, rtol=2e-6)
        else:  # a norm's sum in another order may round a value the other way
            assert float((g != w).float().mean()) <= (0.01 if "qwen3" in name else 0.0)
            torch.testing.assert_close(g, w, atol=1e-6, rtol=2**-7)
