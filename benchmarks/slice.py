"""A slice of DeepSeek-V3 from a checkpoint to tokens: ``python benchmarks/slice.py [--out FILE]``.

Real widths, six layers (one of them dense), FP8 blocks, 32 experts instead of 256 so that writing takes seconds. A
checkpoint of random weights is written as DeepSeek's are, read back into a model, and compared with what was written;
then how many tokens a server's cache holds beside these weights, in e4m3 and in bf16, allocated; a prompt of 2,048
tokens, decode steps of 1 and of 32 requests with the host's work, and how many greedy tokens are the same captured and
not. One JSON line a row; ends with 1 where weights differ.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import Rows, arguments, finish
from safetensors.torch import save_file

import fastlayers as fl
from fastlayers.weights import slots
from fastlayers_models import AutoModel, Generator
from fastlayers_models.auto import family_of
from fastlayers_server.bench_command import time_per_token
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.engine.startup import scheduler_config
from fastlayers_server.known_models import KNOWN
from fastlayers_server.random_models import fill_random

SLICE: dict[str, Any] = {
    "num_hidden_layers": 6, "first_k_dense_replace": 1, "n_routed_experts": 32, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 4096,
}  # fmt: skip
SMALL: dict[str, Any] = SLICE | {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "num_hidden_layers": 2, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
SHARD = 4 << 30


def write(config: dict[str, Any], folder: Path, device: str) -> tuple[dict[str, torch.Tensor], int]:
    """Write a checkpoint; return a few of its tensors, and the bytes of all."""
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), device=device, dtype=torch.bfloat16)
    fill_random(model)
    weight_map, shard, kept, total = dict[str, str](), dict[str, torch.Tensor](), dict[str, torch.Tensor](), 0

    def close() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, slot in slots(model):
        if tuple(slot.dest.shape) != slot.shape:
            raise SystemExit(f"{name}: held as {tuple(slot.dest.shape)}, not as {slot.shape}")
        shard[name] = slot.dest.detach().cpu().contiguous()
        total += shard[name].nbytes
        if "layers.1." in name and "self_attn" in name:
            kept[name] = shard[name]
        if sum(each.nbytes for each in shard.values()) > SHARD:
            close()
    close()
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return kept, total


def seconds(call: Any, device: str) -> tuple[float, Any]:
    """Return how long a call took, waited for, and what it returned."""
    begin = time.perf_counter()
    found = call()
    if device != "cpu":
        torch.cuda.synchronize()
    return round(time.perf_counter() - begin, 3), found


def capacity(model: Any, cache: str, device: str) -> dict[str, Any]:
    """Return how many tokens a server gives its cache beside this model, as pages that were allocated."""
    # As many requests as it takes to use all of the memory.
    config = EngineConfig(device=device, kv_cache_dtype=cache, max_running_requests=65536)
    limits = scheduler_config(config, model)
    spec = fl.kv_cache_spec(model, page_size=limits.page_size, dtype=model.kv_dtype)
    held = sum(each.keys.nbytes for each in spec.allocate(limits.num_pages, device))
    tokens = (limits.num_pages - 1) * limits.page_size  # the first page is nobody's
    about = {"what": "capacity", "kv_dtype": str(model.kv_dtype).removeprefix("torch.")}
    return about | {"tokens": tokens, "gib": round(held / 2**30, 2), "bytes_of_a_token": spec.bytes_per_token}


def capacities(model: Any, device: str) -> Iterator[dict[str, Any]]:
    """Yield :func:`capacity` over an e4m3 cache and over one in the model's dtype: the weights are the same."""
    usual = model.kv_dtype
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("auto", usual)):
        model.kv_dtype = dtype
        try:
            yield capacity(model, name, device)
        finally:
            model.kv_dtype = usual
        if device != "cpu":
            torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    """Run all of it."""
    options = arguments(__doc__, 60.0).parse_args()
    rows, device = Rows(options), options.device
    config = dict(KNOWN["deepseek-ai/DeepSeek-V3"]) | (SMALL if options.small else SLICE)
    prompt, batches = (32, (1, 3)) if options.small else (2048, (1, 32))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        took, (kept, total) = seconds(lambda: write(config, folder, device), device)
        rows.put({"what": "written", "gib": round(total / 2**30, 2), "seconds": took})
        if device != "cpu":
            torch.cuda.empty_cache()
        took, model = seconds(lambda: AutoModel.from_pretrained(folder, device=device), device)
        rows.put({"what": "load", "gib": round(total / 2**30, 2), "seconds": took})
    for row in capacities(model, device):
        rows.put(row)
    read = {name: slot.dest for name, slot in slots(model) if name in kept}
    bad = [name for name, value in kept.items() if not torch.equal(_bits(read[name].cpu()), _bits(value))]
    generator = Generator(model, max_batch=4, max_length=prompt + 64, prefill_tokens=prompt)
    ids = [torch.randint(3, config["vocab_size"], (prompt,)).tolist()]

    def first() -> Any:
        return generator.generate(ids, max_new_tokens=1, eos_ids=())

    first()
    rows.put({"what": "prefill", "tokens": prompt, "ms": round(1e3 * min(seconds(first, device)[0] for _ in "abc"), 2)})
    for batch in batches:
        rows.put({"what": "decode", "batch": batch} | time_per_token(model, batch))
    plain = Generator(model, max_batch=4, max_length=prompt + 64, prefill_tokens=prompt, cuda_graph=False)
    (one,), (other,) = (each.generate(ids, max_new_tokens=24, eos_ids=()) for each in (generator, plain))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    rows.put({"what": "tokens", "new": len(one), "equal_before_a_near_tie": same, "weights_equal": not bad})
    finish(bad)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


if __name__ == "__main__":
    main()
