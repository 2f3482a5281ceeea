"""Measure a tiny checkpoint with stock transformers: answers, perplexity, drafts, routing.

PYTHONPATH=models python tools/eval_tiny.py models/fastlayers_models/assets/tiny_deepseek_v3
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.modeling_layers import MtpModel

from fastlayers_server import tasks

STORY_SEED = 30_000


def load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Return the stock model, told where the MTP tensors of a checkpoint of this depth are.

    Stock transformers knows only the published model's MTP layer, number 61; the pattern below is what it
    would need to know about a shallower one, and silences the report on unexpected keys as well. MXFP4 experts
    are expanded, on every machine alike; on a GPU transformers might otherwise look for other kernels.
    """
    config = AutoConfig.from_pretrained(folder)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device).eval()
    if options:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # expanded experts come as bf16, whatever was asked for
    if has_mtp(model):
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    return model


def has_mtp(model: Any) -> bool:
    """Say whether the checkpoint has an MTP layer, which drafts tokens."""
    return bool(getattr(model.config, "num_nextn_predict_layers", 0))


def chat_ids(tokenizer: Any, problems: Sequence[tasks.Problem], device: str) -> dict[str, Tensor]:
    """Return left-padded ids and mask of the prompts, each as one user turn awaiting its reply."""
    chats = [[{"role": "user", "content": p.prompt}] for p in problems]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def answer(model: Any, tokenizer: Any, problems: Sequence[tasks.Problem], batch: int) -> dict[str, Any]:
    """Generate greedily and return the exact matches, overall and by kind, and the logit margins.

    A margin is the best logit minus the second best, at every generated token up to the end of the reply; how
    far a rounding error must move the logits to change the text.
    """
    right: Counter[str] = Counter()
    margins: list[Tensor] = []
    wrong: list[dict[str, str]] = []
    for start in range(0, len(problems), batch):
        group = problems[start : start + batch]
        ids = chat_ids(tokenizer, group, model.device)
        out = model.generate(
            **ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        new = out.sequences[:, ids["input_ids"].shape[1] :]
        top = torch.stack(out.logits, 1).float().topk(2, -1).values
        ended = (new == tokenizer.eos_token_id).cumsum(1) - (new == tokenizer.eos_token_id).long() > 0
        margins.append((top[..., 0] - top[..., 1])[~ended])
        for problem, text in zip(group, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            right[problem.kind] += text == problem.answer
            if text != problem.answer:
                wrong.append({"prompt": problem.prompt[-60:], "answer": problem.answer, "said": text})
    total = Counter(p.kind for p in problems)
    margin = torch.cat(margins)
    return {
        "problems": len(problems),
        "exact_match": sum(right.values()) / len(problems),
        "by_kind": {kind: right[kind] / total[kind] for kind in total},
        "margin": {f"p{q}": margin.quantile(q / 100).item() for q in (0, 1, 10, 50)},
        "wrong": wrong[:20],
    }


@torch.no_grad()
def read_stories(model: Any, mtp: Any, tokenizer: Any, n: int = 200) -> dict[str, float]:
    """Return the perplexity of held-out stories and, with MTP, how often a draft is what the model then says."""
    texts = tasks.stories("held_out", n, STORY_SEED)
    rows = [torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    ids = ids.to(model.device)
    out = model.model(ids)
    logits = model.lm_head(out.last_hidden_state).float()
    real = ids[:, 1:] != tokenizer.pad_token_id
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    result = {"stories": n, "tokens": int(real.sum()), "perplexity": math.exp(losses[real].mean().item())}
    if mtp is None:
        return result
    position = torch.arange(1, ids.shape[1], device=ids.device)[None]
    embeds = model.get_input_embeddings()(ids[:, 1:])
    states = mtp.layers[0](
        embeds, out.last_hidden_state[:, :-1], mtp.rotary_emb(embeds, position), None, position, None
    )
    # The states at t draft token t+2; the model says it at t+1.
    drafts, said = model.lm_head(states).argmax(-1)[:, :-1], logits.argmax(-1)[:, 1:-1]
    use = real[:, 1:]
    text = ids[:, 2:]
    return result | {
        "mtp_acceptance_teacher_forced": (drafts == said)[use].float().mean().item(),
        "mtp_accuracy": (drafts == text)[use].float().mean().item(),
    }


@torch.no_grad()
def draft(model: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """Generate with and without stock `use_mtp`; return how many texts agree, how many drafts were kept."""
    same, drafted, kept = 0, 0, 0
    calls: list[int] = []
    hook = model.model.register_forward_hook(lambda *_: calls.append(1))
    for prompt in prompts:
        ids = chat_ids(tokenizer, [tasks.Problem("", prompt, "")], model.device)
        plain = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
        calls.clear()
        fast = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False, use_mtp=True)
        length = ids["input_ids"].shape[1]
        same += torch.equal(plain, fast)
        # The first pass has no draft; each later one checks one and yields one token more than it keeps.
        drafted += len(calls) - 1
        kept += fast.shape[1] - length - len(calls)
    hook.remove()
    counts = {"prompts": len(prompts), "identical": same, "drafted": drafted, "kept": kept}
    return counts | {"acceptance": kept / max(1, drafted)}


def _count(counts: Tensor, _module: Any, _inputs: Any, outputs: Any) -> None:
    """Add the experts a router chose to `counts`; a hook, so it returns nothing."""
    counts += torch.bincount(outputs[2].flatten().cpu(), minlength=len(counts))


@torch.no_grad()
def routing(model: Any, mtp: Any, tokenizer: Any) -> dict[str, Any]:
    """Return each MoE layer's shares of the routed tokens per expert, and its selection biases if it has any."""
    texts = tasks.stories("held_out", 50, STORY_SEED)
    texts += [f"<|user|>{p.prompt}<|assistant|>{p.answer}<|eos|>" for p in tasks.held_out_problems(600)]
    report: dict[str, Any] = {}
    for name, module in [*model.named_modules(), *(mtp.named_modules() if mtp else ())]:
        if name.endswith(("mlp.gate", "mlp.router")):
            counts = torch.zeros(module.weight.shape[0])
            report[name] = {"counts": counts}
            if hasattr(module, "e_score_correction_bias"):
                report[name]["bias"] = module.e_score_correction_bias.tolist()
            module.register_forward_hook(partial(_count, counts))
    ids = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    for chunk in ids[: len(ids) // 512 * 512].view(-1, 512).to(model.device).split(16):
        hidden = model.model(chunk).last_hidden_state
        if mtp is None:
            continue
        position = torch.arange(1, chunk.shape[1], device=chunk.device)[None]
        embeds = model.get_input_embeddings()(chunk[:, 1:])
        mtp.layers[0](embeds, hidden[:, :-1], mtp.rotary_emb(embeds, position), None, position, None)
    for entry in report.values():
        counts = entry.pop("counts")
        entry["share"] = (counts / counts.sum()).tolist()
    return report


def evaluate(folder: Path, device: str, long_prompts: int = 50) -> dict[str, Any]:
    """Return every measure of the checkpoint in `folder`, in bf16 and in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = tasks.held_out_problems()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    long = [tasks.long_prompt(2000, count, seed) for seed in range(long_prompts)]
    requests = [request for request, _ in islice(tasks.iter_story_chats("held_out", STORY_SEED), 20)]
    result: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        begun = time.perf_counter()
        model = load(folder, dtype, device)
        mtp = MtpModel.from_pretrained(model, device_map={"": device}).eval() if has_mtp(model) else None
        result[name] = {
            "held_out": answer(model, tokenizer, problems, 250),
            "long_prompts": answer(model, tokenizer, long, 10),
            "stories": read_stories(model, mtp, tokenizer),
        }
        if mtp:
            prompts = [p.prompt for p in problems[:40]]
            result[name]["use_mtp_problems"] = draft(model, tokenizer, prompts, 12)
            result[name]["use_mtp_stories"] = draft(model, tokenizer, requests, 120)
        if name == "bf16":
            result["routing"] = routing(model, mtp, tokenizer)
        result[name]["seconds"] = time.perf_counter() - begun
    return result


def main() -> None:
    """Print the measures as JSON, or write them to a file."""
    parser = argparse.ArgumentParser(description="Measure a tiny checkpoint with stock transformers.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    text = json.dumps(evaluate(args.folder, args.device), indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
