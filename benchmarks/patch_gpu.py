"""Decode speed of Hugging Face ``generate`` on one GPU: stock, stock compiled, patched, patched with CUDA graphs.

Real dimensions, bf16, random weights made on the GPU, distinct random prompts of 128 tokens. Two models of the same
weights stand side by side, one patched, and all variants alternate in one process:

    stock          the default: eager, dynamic cache
    stock_best     static cache and transformers' own torch.compile
    patched        fl.patch(model, cuda_graph=True) with disable_compile=True: our step without its graph
    graph          fl.patch(model, cuda_graph=True)
    overlap        fl.patch(model, cuda_graph=True, overlap=True)

A step is (time of 40 new tokens - time of 8) / 32. The graph's replay is timed by itself; what remains of its step is
the host's. Floors: bytes that one step must read (weights in use, cached rows) over the rate of a copy; for experts,
those that this step's tokens really chose.

    python benchmarks/patch_gpu.py --model qwen3_30b --batch 1 16 --json benchmarks/results/patch_gpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import fastlayers as fl
from fastlayers.patching import decode
from fastlayers.tuning.provenance import provenance

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_30b": ("Qwen3Moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "qwen3_8b": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "gpt_oss_20b": ("GptOss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    }),
    # Twelve layers with an eighth of the experts: what fits beside a copy of itself, with the host's work of the whole.
    "deepseek_v3_slice": ("DeepseekV3", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 12, "first_k_dense_replace": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
    }),
    "tiny": ("Qwen3Moe", {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    }),
}  # fmt: skip
PROMPT, SHORT, LONG = 128, 8, 40
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {}, "stock_best": {"cache_implementation": "static"}, "patched": {"disable_compile": True}, "graph": {},
    "overlap": {}, "bf12": {},
}  # fmt: skip


def build(name: str) -> Any:
    """Return a model in bf16 with random weights, made on the GPU."""
    family, sizes = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False, eos_token_id=None)
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


@torch.inference_mode()
def seconds(model: Any, ids: torch.Tensor, new: int, options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Generate ``new`` tokens; return the time and the tokens."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new,
        pad_token_id=0, **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - begin, out[:, ids.shape[1] :]


def by(variant: str, models: dict[str, Any], ids: torch.Tensor) -> Any:
    """Return the model of a variant, which overlaps steps from now on, or not, and reads bf12 copies, or not."""
    model = models[variant]
    if (driver := decode.driver_of(model)) is not None:
        before, chosen = driver.chosen, (variant in ("overlap", "bf12"), variant == "bf12")
        driver.choose(*chosen)
        if before[1] != chosen[1]:
            driver.drop_others()
            for _ in range(2):  # captures anew
                seconds(model, ids, LONG, VARIANTS[variant])
    return model


def step_ms(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """Return milliseconds of one decode step."""
    short, long = (seconds(model, ids, new, options)[0] for new in (SHORT, LONG))
    return (long - short) / (LONG - SHORT) * 1e3


@torch.inference_mode()
def replay_ms(model: Any, repeats: int = 20) -> float:
    """Return milliseconds of one replay of the graph that ran last, by events."""
    driver = decode.driver_of(model)
    assert driver is not None and driver.graphs is not None
    key = driver.graphs.keys[-1]
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Behind another one, so that the host's way to the launch is not in it.
        driver.graphs.replay(key)
        start.record()
        driver.graphs.replay(key)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Return bytes per second of a large copy, read and written ones counted."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    b.copy_(a)
    start.record()
    for _ in range(10):
        b.copy_(a)
    end.record()
    torch.cuda.synchronize()
    return 20 * a.numel() / (start.elapsed_time(end) * 1e-3)


@torch.inference_mode()
def active_experts(model: Any, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """Return the mean number of experts per layer that a step's tokens choose, uncaptured; 0 without experts."""
    counts: list[int] = []
    gates = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]

    def note(module: Any, inputs: Any, output: Any) -> None:
        if output[2].shape[0] == ids.shape[0]:
            counts.append(int(output[2].unique().numel()))

    hooks = [gate.register_forward_hook(note) for gate in gates]
    try:
        seconds(model, ids, 4, options)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.mean(counts) if counts else 0.0


def floor_ms(model: Any, batch: int, active: float, rate: float) -> float:
    """Return milliseconds that reading one step's weights and rows takes."""
    config, total = model.config, 0
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    for name, weight in model.named_parameters():
        size = weight.numel() * weight.element_size()
        if ".experts." in name:
            size = int(size * active / experts)
        total += batch * config.hidden_size * 2 if "embed_tokens" in name else size
    latent = getattr(config, "kv_lora_rank", None)
    row = latent + config.qk_rope_head_dim if latent else 2 * config.num_key_value_heads * config.head_dim
    rows = batch * (PROMPT + LONG) * config.num_hidden_layers * row * 2
    return (total + rows) / rate * 1e3


def profile(model: Any, ids: torch.Tensor) -> list[tuple[str, int, float]]:
    """Return kernels of one replayed step: name, launches, microseconds."""
    from torch.profiler import ProfilerActivity

    driver = decode.driver_of(model)
    assert driver is not None and driver.graphs is not None
    key = driver.graphs.keys[-1]
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            driver.graphs.replay(key)
        torch.cuda.synchronize()
    rows = [(e.key, e.count / 3, e.self_device_time_total / 3) for e in prof.key_averages()]
    return sorted(rows, key=lambda row: -row[2])


def measure(args: argparse.Namespace, name: str, batch: int, models: dict[str, Any], rate: float) -> dict[str, Any]:
    """Time all variants of one model and batch, alternating."""
    generator = torch.Generator().manual_seed(batch)
    vocab = models["graph"].config.vocab_size
    ids = torch.randint(3, vocab, (batch, PROMPT), generator=generator).to("cuda")
    times: dict[str, list[float]] = {variant: [] for variant in args.variants}
    tokens: dict[str, torch.Tensor] = {}
    for variant in args.variants:
        # Compiles, captures, allocates.
        for _ in range(2):
            _, tokens[variant] = seconds(by(variant, models, ids), ids, LONG, VARIANTS[variant])
        print(f"{name} batch {batch}: {variant} is warm", file=sys.stderr, flush=True)
    for _ in range(args.rounds):
        for variant in args.variants:
            times[variant].append(step_ms(by(variant, models, ids), ids, VARIANTS[variant]))
    uncaptured = "stock" if "stock" in models else "patched"
    active = active_experts(models[uncaptured], ids, VARIANTS[uncaptured])
    row: dict[str, Any] = {
        "model": name, "batch": batch, "prompt": PROMPT, "ms": {v: statistics.median(t) for v, t in times.items()},
        "runs_ms": times, "active_experts": active, "floor_ms": floor_ms(models["graph"], batch, active, rate),
        "copy_tb_s": rate / 1e12,
    }  # fmt: skip
    if "graph" in times:
        seconds(by("graph", models, ids), ids, SHORT, {})
        row["replay_ms"] = replay_ms(models["graph"])
        row["host_ms"] = row["ms"]["graph"] - row["replay_ms"]
        driver = decode.driver_of(models["graph"])
        row["graphs"] = [vars(record) for record in driver.ledger] if driver is not None else []
        row["speed_up"] = {v: row["ms"][v] / row["ms"]["graph"] for v in times if v != "graph"}
        row["same_tokens"] = {v: float((tokens[v] == tokens["graph"]).float().mean()) for v in times if v != "graph"}
        if args.profile:
            for kernel, launches, us in profile(models["graph"], ids)[: args.profile]:
                print(f"{us:9.1f} us {launches:6.0f} x {kernel[:110]}")
    return row


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3_30b"], choices=sorted(CONFIGS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="print so many kernels of a replayed step")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    rate = copy_rate()
    about = {
        "command": shlex.join(["python", *sys.argv]), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(), **provenance(),
    }  # fmt: skip
    for name in args.model:
        ours = build(name)
        print(fl.patch(ours, cuda_graph=True).summary(), file=sys.stderr)
        models = dict.fromkeys(("patched", "graph", "overlap", "bf12"), ours)
        if {"stock", "stock_best"} & set(args.variants):
            models["stock"] = models["stock_best"] = build(name)
        for batch in args.batch:
            variants = [v for v in args.variants if v not in ("stock_best", "bf12") or batch == 1]
            one = argparse.Namespace(**{**vars(args), "variants": variants})
            row = {**measure(one, name, batch, models, rate), **about}
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        del ours, models
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
