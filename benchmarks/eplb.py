"""Experts that move between captured steps: ``torchrun --nproc-per-node 2 benchmarks/eplb.py [--out FILE]``.

A Qwen3-MoE of a few layers with random weights and a router that likes some experts, on two ranks that split the
experts: decode without placement, with a placement that stays, and with one that moves a layer at a time. Rows:
milliseconds a token, graphs and addresses of weights before and after, layers moved, requests whose tokens are those
without placement (another grouping of two ranks' sums may flip a near tie). Exits with 1 where a slot does not hold the
expert it names, bit for bit, where an address changed, or where something was captured anew.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rows import Rows, arguments, finish

import fastlayers as fl
from fastlayers_models import AutoModel
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.generate import Generator

LIKED = 6


def make_model(folder: Path, small: bool) -> None:
    """Write the checkpoint."""
    layers, experts, hidden, inner = (2, 16, 128, 64) if small else (8, 64, 2048, 768)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=experts, num_experts_per_tok=8,
        moe_intermediate_size=inner, max_position_embeddings=2048, initializer_range=0.05, eos_token_id=1,
        bos_token_id=0, pad_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:LIKED] += 0.03 * torch.sign(layer.mlp.gate.weight[:LIKED])
    model.to(torch.bfloat16).save_pretrained(folder)


def held(model: Any, folder: Path) -> bool:
    """Return whether every slot of every rank holds the expert that it names."""
    checkpoint, right = Checkpoint(folder), True
    for index, layer in enumerate(model.decoder.layers):
        experts = layer.mlp.experts
        placement = experts.placement
        right &= placement.logical == placement.physical_to_logical.tolist()
        for local, expert in enumerate(placement.logical[placement.own_slots]):
            name = f"model.layers.{index}.mlp.experts.{expert}.down_proj.weight"
            right &= torch.equal(experts.w2[local].cpu(), checkpoint.read(name))
    flag = torch.tensor([int(right)], device=model.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def decode(
    folder: Path, eplb: fl.EplbConfig | None, prompts: list[list[int]], new: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of all prompts, and what was seen meanwhile."""
    model = AutoModel.from_pretrained(folder, parallel=fl.Ranks(tp=2, ep=2, eplb=eplb))
    generator = Generator(model, max_batch=len(prompts), max_length=512)

    def graphs() -> int:
        return len(list(generator.step.graphs.keys)) if generator.step.graphs else 0

    generator.generate(prompts, max_new_tokens=4, eos_ids=())  # captures
    before, addresses = graphs(), [parameter.data_ptr() for parameter in model.parameters()]
    took: list[float] = []
    found: list[list[int]] = [[] for _ in prompts]
    last = time.perf_counter()
    for token in generator.stream(prompts, max_new_tokens=new, eos_ids=()):
        found[token.request].append(token.id)
        if token.request == len(prompts) - 1:
            now = time.perf_counter()
            took.append((now - last) * 1e3)
            last = now
    facts: dict[str, Any] = {
        "median_ms": round(statistics.median(took[2:]), 3), "slowest_ms": [round(t, 2) for t in sorted(took[2:])[-4:]],
        "graphs_before_and_after": [before, graphs()],
        "addresses_kept": addresses == [parameter.data_ptr() for parameter in model.parameters()],
    }  # fmt: skip
    if model.balancer is not None:
        facts |= {
            "layers_moved": model.balancer.moved, "mib_received": round(model.balancer.received / 2**20, 1),
            "weights_right_on_all_ranks": held(model, folder),
        }  # fmt: skip
    generator.close()
    return found, facts


def measure(options: argparse.Namespace, rows: Rows | None, folder: Path) -> list[object]:
    """Put the rows; return what is wrong."""
    new = 24 if options.small else 96
    prompts = [[(7 * i + j) % 4000 + 3 for j in range(32)] for i in range(16)]
    often = 4 if options.small else 16
    ways = {
        "without placement": None,
        "placement that stays": fl.EplbConfig(num_redundant_experts=8, step_interval=0),
        "experts that move": fl.EplbConfig(
            num_redundant_experts=8, step_interval=often, layers_per_step=1, min_gain=0.0
        ),
    }
    wanted: list[list[int]] = []
    bad: list[object] = []
    for what, eplb in ways.items():
        tokens, facts = decode(folder, eplb, prompts, new)
        gc.collect()
        wanted = wanted or tokens
        equal = sum(one == other for one, other in zip(wanted, tokens, strict=True))
        # With random weights many logits are nearly tied: until where requests say the same.
        alike = [
            next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
            for one, other in zip(wanted, tokens, strict=True)
        ]
        row = {"what": what, **facts, "tokens_equal": equal, "of": len(prompts), "tokens_alike_until": sorted(alike)}
        if rows is not None:
            rows.put(row)
        one, other = facts["graphs_before_and_after"]
        if not (facts["addresses_kept"] and one == other and facts.get("weights_right_on_all_ranks", True)):
            bad.append(row)
        if what == "experts that move" and not facts["layers_moved"]:
            bad.append("no expert moved")
    return bad


def main() -> None:
    """Run one rank."""
    options, first = arguments(__doc__, 80.0).parse_args(), os.environ.get("RANK", "0") == "0"
    # Ranks of one start share a parent process.
    folder = Path(tempfile.gettempdir()) / f"eplb_{os.getppid()}"
    if first:
        make_model(folder, options.small)
        (folder / "done").touch()
    while not (folder / "done").is_file():
        time.sleep(0.2)
    bad = measure(options, Rows(options) if first else None, folder)
    fl.Ranks.leave()
    if first:
        shutil.rmtree(folder)
    finish(bad)


if __name__ == "__main__":
    main()
