"""The tiny Qwen3-MoE and GPT-OSS of the source tree, read by stock transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers_server import tasks

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[2]
FOLDERS = {name: ROOT / "checkpoints" / f"tiny_{name}" for name in ("qwen3_moe", "gpt_oss")}
EXPECTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}

pytestmark = pytest.mark.skipif(
    not (ROOT / "checkpoints").is_dir(), reason="these checkpoints are in the source tree, not in the package"
)


def load(family: str) -> tuple[Any, dict[str, Any]]:
    """Return the stock model in bf16, MXFP4 experts expanded, and what transformers says about the loading."""
    options = {}
    if family == "gpt_oss":
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        FOLDERS[family], dtype=torch.bfloat16, output_loading_info=True, **options
    )


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(family: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    model, info = load(family)
    yield model.eval(), info


@pytest.fixture(scope="module")
def tokenizer(family: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(FOLDERS[family])


def tensors_of(family: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the file, as stored."""
    with safetensors.safe_open(FOLDERS[family] / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_folder_is_small(family: str) -> None:
    assert sum(f.stat().st_size for f in FOLDERS[family].iterdir()) <= 3_000_000


def test_config(family: str) -> None:
    config = json.loads((FOLDERS[family] / "config.json").read_text())
    assert {name: config[name] for name in EXPECTED[family]} == EXPECTED[family]


def test_tokenizer_is_that_of_the_tiny_deepseek(family: str) -> None:
    shipped = ROOT / "models" / "fastlayers_models" / "assets" / "tiny_deepseek_v3"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDERS[family] / name).read_bytes() == (shipped / name).read_bytes()


def test_stock_transformers_loads_every_tensor(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, info = loaded
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_qwen_experts_are_stored_one_by_one() -> None:
    tensors = tensors_of("qwen3_moe")
    for layer in (1, 3):
        for expert in range(8):
            for part in ("gate_proj", "up_proj", "down_proj"):
                assert tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"].shape == (128, 128)
    for layer in range(4):
        assert tensors[f"model.layers.{layer}.self_attn.q_norm.weight"].shape == (64,)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_gpt_oss_experts_are_packed() -> None:
    tensors = tensors_of("gpt_oss")
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts"
        assert tensors[f"{stem}.gate_up_proj_blocks"].shape == (8, 256, 4, 16)
        assert tensors[f"{stem}.gate_up_proj_scales"].shape == (8, 256, 4)
        assert tensors[f"{stem}.down_proj_blocks"].shape == (8, 128, 4, 16)
        assert tensors[f"{stem}.down_proj_scales"].shape == (8, 128, 4)
        assert tensors[f"model.layers.{layer}.self_attn.sinks"].shape == (4,)
    packed = {name for name in tensors if name.endswith(("_blocks", "_scales"))}
    assert {tensors[name].dtype for name in packed} == {torch.uint8}
    assert {tensors[name].dtype for name in tensors.keys() - packed} == {torch.bfloat16}


def test_gpt_oss_expands_to_what_the_bytes_say(loaded: tuple[Any, dict[str, Any]], family: str) -> None:
    if family != "gpt_oss":
        pytest.skip("no MXFP4 tensors")
    tensors = tensors_of(family)
    stem = "model.layers.1.mlp.experts.down_proj"
    expert, row, column = 3, 17, 71  # an odd column: the high nibble
    byte = int(tensors[f"{stem}_blocks"][expert, row, column // 32, column % 32 // 2])
    code = byte >> 4 if column % 2 else byte & 15
    size = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * 2.0 ** (
        int(tensors[f"{stem}_scales"][expert, row, column // 32]) - 127
    )
    stock = loaded[0].model.layers[1].mlp.experts.down_proj
    assert float(stock[expert, column, row]) == (-size if code & 8 else size)


def test_every_expert_is_used(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    model = loaded[0]
    counts: list[torch.Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            counts.append(torch.zeros(8))

            def count(_module: Any, _inputs: Any, out: Any, total: torch.Tensor = counts[-1]) -> None:
                total += torch.bincount(out[2].flatten(), minlength=8)

            hooks.append(module.register_forward_hook(count))
    texts = tasks.stories("held_out", 8) + [p.prompt for p in tasks.held_out_problems(60)]
    with torch.no_grad():
        model(torch.tensor([tokenizer("\n\n".join(texts))["input_ids"]]))
    for hook in hooks:
        hook.remove()
    assert len(counts) in (2, 4)
    for total in counts:
        assert float((total / total.sum()).min()) > 0.04


def test_answers_held_out_problems(loaded: tuple[Any, dict[str, Any]], tokenizer: Any) -> None:
    problems = tasks.held_out_problems(20)
    chats = [[{"role": "user", "content": p.prompt}] for p in problems]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    ids = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = loaded[0].generate(**ids, max_new_tokens=12, do_sample=False)
    said = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said == [p.answer for p in problems]
