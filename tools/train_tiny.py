"""Train a tiny checkpoint of one family, from a seed and generated text.

    PYTHONPATH=models python tools/train_tiny.py --out OUT --compile --workers 15
    PYTHONPATH=models python tools/train_tiny.py --family gpt_oss --out OUT --compile --workers 15

The models are those of stock transformers; `tiny/` holds what each family needs beyond that, and the text.
Forward and backward run on bf16 weights, so what the loss sees is what is shipped; AdamW updates fp32 copies
of them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny.deepseek_v3 import DeepseekV3Trainee
from tiny.family import Trainee
from tiny.gpt_oss import GptOssTrainee
from tiny.qwen3_moe import Qwen3MoeTrainee
from tiny.text import (
    ASSISTANT,
    BOS,
    EOS,
    PAD,
    SPECIAL,
    Stream,
    loss_weights,
    make_streams,
    train_tokenizer,
    turn,
    write_tokenizer,
)
from tokenizers import Tokenizer
from torch import nn

from fastlayers_server import tasks

FAMILIES: dict[str, type[Trainee]] = {
    "deepseek_v3": DeepseekV3Trainee,
    "qwen3_moe": Qwen3MoeTrainee,
    "gpt_oss": GptOssTrainee,
}


@torch.no_grad()
def answered(trainee: Trainee, tokenizer: Tokenizer, device: torch.device) -> float:
    """Return the share of held-out problems whose whole answer is the teacher-forced argmax."""
    trainee.eval()
    correct = 0
    held_out = tasks.held_out_problems()
    for start in range(0, len(held_out), 250):
        texts = [SPECIAL[BOS] + turn(p.prompt, p.answer) for p in held_out[start : start + 250]]
        rows = [torch.tensor(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
        guess = trainee.logits(tokens).argmax(-1)[:, :-1]
        is_answer = ((tokens == ASSISTANT).cumsum(1) > 0)[:, :-1] & (tokens[:, 1:] != PAD)
        correct += int(((guess == tokens[:, 1:]) | ~is_answer).all(1).sum())
    trainee.train()
    return correct / len(held_out)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate at `step`: a linear warm-up, then half a cosine down to zero."""
    warm_up = min(300, args.steps // 10 + 1)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (args.steps - warm_up)))


def train(
    trainee: Trainee, streams: dict[str, Stream], tokenizer: Tokenizer, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train in place and return the log, one entry every `args.log_every` steps."""
    device = next(trainee.parameters()).device
    generator = torch.Generator(device).manual_seed(args.seed)
    params = list(trainee.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    grads = [torch.zeros_like(m) for m in masters]
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad
    decay = [m for m in masters if m.ndim > 1]
    rest = [m for m in masters if m.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=device.type == "cuda")
    loss_fn = torch.compile(trainee, dynamic=False) if args.compile else trainee
    extra_weight = {"mtp": args.mtp_weight, "balance": args.balance_weight}[trainee.extra]
    log: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for step, kind in zip(range(args.steps), cycle(("short",) * 5 + ("long",)), strict=False):
        row = args.short_row if kind == "short" else args.long_row
        tokens = streams[kind].batch(max(1, args.tokens // row), generator)
        main, extra = loss_fn(tokens, loss_weights(tokens))
        torch._foreach_copy_(grads, torch.autograd.grad(main + extra_weight * extra, params))
        norm = nn.utils.clip_grad_norm_(masters, 1.0)
        rate = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*params], [*masters])
            trainee.after_step(args.bias_step * rate / args.lr)
        if step % args.log_every == 0 or step == args.steps - 1:
            entry: dict[str, Any] = {"step": step, "kind": kind, "grad_norm": norm.item()}
            entry |= {"loss": main.item(), f"{trainee.extra}_loss": extra.item()}
            if step % (4 * args.log_every) == 0:
                entry["answered"] = answered(trainee, tokenizer, device)
            entry["seconds"] = time.perf_counter() - begun
            log.append(entry)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}, flush=True)
    return log


def write_configs(config: dict[str, Any], out: Path) -> None:
    """Write config.json and generation_config.json."""
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train a tiny checkpoint from generated text.")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="deepseek_v3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="an .npz file to read the tokenised text from, or to leave it in")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--bias-step", type=float, default=1e-3, help="how far a selection bias moves in a step")
    parser.add_argument("--mtp-weight", type=float, default=0.3)
    parser.add_argument("--balance-weight", type=float, default=0.02, help="of the routers' auxiliary loss")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in one step")
    parser.add_argument("--short-row", type=int, default=256)
    parser.add_argument("--long-row", type=int, default=2304)
    parser.add_argument("--shards", type=int, default=60)
    parser.add_argument("--shard-documents", type=int, default=40000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=250)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, and write the checkpoint and the training log."""
    args = arguments()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    tokenizer = train_tokenizer()
    write_tokenizer(tokenizer, args.out)
    write_configs(FAMILIES[args.family].config, args.out)
    streams = make_streams(args, str(args.out / "tokenizer.json"), device)
    text_seconds = time.perf_counter() - begun
    trainee = FAMILIES[args.family](args.seed).to(device)
    log = train(trainee, streams, tokenizer, args)
    save_file(trainee.checkpoint(), args.out / "model.safetensors", metadata={"format": "pt"})
    record = {"text_seconds": text_seconds, "train_seconds": log[-1]["seconds"], "log": log}
    (args.out / "training_log.json").write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
