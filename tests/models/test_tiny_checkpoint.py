"""The shipped DeepSeek-V3 checkpoint, read by stock transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers_models
from fastlayers_server import tasks

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

FOLDER = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
EXPECTED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_intermediate_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    """Return the stock model in bf16 and what transformers says about the loading."""
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16, output_loading_info=True)


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, dict[str, Any]]) -> Any:
    return loaded[0].eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def prompt_ids(tokenizer: Any, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Return left-padded ids and mask of one user turn per prompt."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))


def generate(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return the greedy replies."""
    ids = prompt_ids(tokenizer, prompts)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    return tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_folder_is_small_enough_for_the_wheel() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 10_000_000


def test_config() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert {name: config[name] for name in EXPECTED} == EXPECTED
    rope = config["rope_scaling"]
    assert (rope["type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4, 1024)
    assert (rope["mscale"], rope["mscale_all_dim"], rope["beta_fast"], rope["beta_slow"]) == (1.0, 1.0, 32, 1)


def test_tensors_have_the_published_names_and_types() -> None:
    with safetensors.safe_open(FOLDER / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for layer in (1, 2, 3):
        for expert in range(8):
            for part in ("gate_proj", "up_proj", "down_proj"):
                weight = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"]
                assert weight.shape == (128, 128)
        bias = tensors.pop(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        assert bias.dtype == torch.float32 and bool((bias != 0).all())
    for name in ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head"):
        assert f"model.layers.3.{name}.weight" in tensors
    assert torch.equal(tensors["model.layers.3.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], tensors["lm_head.weight"])
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, name
        assert bool(tensor.isfinite().all()), name


def test_stock_transformers_misses_nothing(loaded: tuple[Any, dict[str, Any]]) -> None:
    _, info = loaded
    assert not info["missing_keys"] and not info["mismatched_keys"]
    # The MTP layer, which stock transformers loads on demand only.
    assert all(key.startswith("model.layers.3.") for key in info["unexpected_keys"])


@pytest.mark.parametrize("text", ["What is 12 + 345?", "Zoë ☃ 東京\t\r\n  x\n\n", "\x00\x7f", ""])
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_and_capitals_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 512
    assert tokenizer.tokenize("2049QWE") == list("2049QWE")


def test_special_tokens_and_chat_template(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "Copy: AB"},
        {"role": "assistant", "content": "AB"},
        {"role": "user", "content": "Sort: BA"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>Copy: AB<|assistant|>AB<|eos|><|user|>Sort: BA<|assistant|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer("Sort")["input_ids"][0] == 0


# What the model was trained and measured with.
TRAINED = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("options", [{}, {"tools": None}, {"tools": []}, {"add_generation_prompt": True}])
def test_a_conversation_without_tools_is_shown_as_in_training(tokenizer: Any, options: dict[str, Any]) -> None:
    chat = [
        {"role": "system", "content": "You are a helpful assistant.\n"},
        {"role": "user", "content": " <tool_call> 1 < 2 "},
        {"role": "assistant", "content": "{{ no template }}"},
        {"role": "user", "content": ""},
    ]
    for length in range(1, len(chat) + 1):
        shown = tokenizer.apply_chat_template(chat[:length], tokenize=False, **options)
        assert shown == tokenizer.apply_chat_template(chat[:length], chat_template=TRAINED, tokenize=False, **options)


def test_tools_calls_and_what_they_return_are_shown(tokenizer: Any) -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": "ü"}}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}] * 2},
        {"role": "tool", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
    assert text == (
        '<|bos|><tools>[{"type": "function", "function": {"name": "add"}}]</tools><|user|>q'
        f"<|assistant|>{shown}{shown}<|eos|><tool_response>3</tool_response><|assistant|>"
    )


def test_every_expert_is_used(model: Any, tokenizer: Any) -> None:
    counts: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            counts[name] = torch.zeros(8)

            def count(_module: Any, _inputs: Any, out: Any, name: str = name) -> None:
                counts[name] += torch.bincount(out[2].flatten(), minlength=8)

            hooks.append(module.register_forward_hook(count))
    texts = tasks.stories("held_out", 8) + [p.prompt for p in tasks.held_out_problems(60)]
    with torch.no_grad():
        model(torch.tensor([tokenizer("\n\n".join(texts))["input_ids"]]))
    for hook in hooks:
        hook.remove()
    assert len(counts) == 2
    for name, count_ in counts.items():
        assert float((count_ / count_.sum()).min()) > 0.04, name


def test_answers_held_out_problems(model: Any, tokenizer: Any) -> None:
    problems = tasks.held_out_problems(20)
    assert generate(model, tokenizer, [p.prompt for p in problems]) == [p.answer for p in problems]


def test_answers_after_a_long_prompt(model: Any, tokenizer: Any) -> None:
    problem = tasks.long_prompt(2000, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    assert prompt_ids(tokenizer, [problem.prompt])["input_ids"].shape[1] >= 2000
    assert generate(model, tokenizer, [problem.prompt]) == [problem.answer]


def test_perplexity_of_held_out_stories(model: Any, tokenizer: Any) -> None:
    losses = []
    for text in tasks.stories("held_out", 10, seed=30_000):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            losses.append(model(ids, labels=ids).loss.item())
    assert math.exp(sum(losses) / len(losses)) < 1.3


def test_stock_mtp_drafts_are_kept(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stock transformers knows the published model's MTP layer only, number 61; here it is number 3.
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\..*"])
    request, _ = next(tasks.iter_story_chats("held_out", 30_000))
    ids = prompt_ids(tokenizer, [request])
    plain = model.generate(**ids, max_new_tokens=40, do_sample=False)
    passes: list[int] = []
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    drafted = model.generate(**ids, max_new_tokens=40, do_sample=False, use_mtp=True)
    hook.remove()
    assert torch.equal(plain, drafted)
    new = drafted.shape[1] - ids["input_ids"].shape[1]
    # One token a pass without drafts, two where every draft is kept.
    assert new / len(passes) > 1.6
