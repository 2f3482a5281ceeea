"""Train the tiny DeepSeek-V3 checkpoint that ships with the project, from a seed and generated text.

    PYTHONPATH=models python tools/train_tiny.py --out OUT --compile --workers 15

The main model is the stock transformers `DeepseekV3ForCausalLM`; only the multi-token-prediction (MTP)
layer around one more stock decoder layer is written here. Forward and backward run on bf16 weights, so what
the loss sees is what is shipped; AdamW updates fp32 copies of them. Routing is balanced without an auxiliary
loss: after each step every expert's bias moves by a fixed amount towards an even load (DeepSeek-V3 report,
2.1.2).

Which hidden state the MTP layer takes: the main model's output *after* its final norm. vLLM
(`deepseek_v2.py` returns `self.norm(...)`), SGLang (`deepseek_v2.py` hands the normed states to the logits
processor, which stores them) and transformers (`capture_outputs` ties `hidden_states[-1]` to
`last_hidden_state`) all feed exactly that, and `hnorm` then normalises it again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3MoE,
    DeepseekV3RMSNorm,
)

from fastlayers_models import tasks

BOS, EOS, PAD, USER, ASSISTANT = range(5)
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Sums, differences and look-ups are the hardest, so the training text has more of them.
TRAINING_KINDS = (
    *("add", "sub", "lookup", "reverse", "add", "sub", "sort", "lookup"),
    *("add", "sub", "copy", "lookup"),
)
USER_WEIGHT = 0.1  # letters and digits of a question are random: little to learn, but their losses are large

# The keys and their spelling are those of the published config.json.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 512,
}


# ---------------------------------------------------------------------------------------------- text


def turn(question: str, answer: str) -> str:
    """Return one user turn and its reply, as the chat template writes them."""
    return f"{SPECIAL[USER]}{question}{SPECIAL[ASSISTANT]}{answer}{SPECIAL[EOS]}"


def short_documents(seed: int, n: int) -> list[str]:
    """Return `n` documents: single problems, chats of several turns, and stories plain and on request."""
    rng = random.Random(f"short {seed}")
    questions = tasks.iter_problems("train", seed, TRAINING_KINDS)
    texts = tasks.iter_story_chats("train", seed)
    documents = []
    for _ in range(n):
        kind = rng.random()
        if kind < 0.88:
            turns = [next(questions) for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 3, 4)))]
            body = "".join(turn(p.prompt, p.answer) for p in turns)
            system = "You are a helpful assistant." if rng.random() < 0.04 else ""
        else:
            request, story = next(texts)
            body, system = (turn(request, story) if kind < 0.94 else story + SPECIAL[EOS]), ""
        documents.append(SPECIAL[BOS] + system + body)
    return documents


def long_documents(seed: int, n: int) -> list[str]:
    """Return `n` chats whose first question follows 300 to 2,300 tokens of stories and solved examples."""
    rng = random.Random(f"long {seed}")
    documents = []
    for index in range(n):
        characters = int(2.2 * rng.randint(300, 2300))
        problem = tasks.long_prompt(characters, len, seed=seed * 1_000_003 + index, split="train")
        documents.append(SPECIAL[BOS] + turn(problem.prompt, problem.answer))
    return documents


def train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of 512 tokens; digits and capitals are always tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("[0-9A-Z]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", pair=f"{SPECIAL[BOS]} $A $B", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    prompts = [p.prompt for p in tasks.problems("train", 2000)]
    requests = [request for request, _ in islice(tasks.iter_story_chats("train", 1), 2000)]
    chats = [f"Question:\nAnswer:\n\n{request}" for request in requests]
    system = ["You are a helpful assistant."] * 200
    tokenizer.train_from_iterator(tasks.stories("train", 4000) + prompts + chats + system, trainer)
    return tokenizer


def shard(job: tuple[str, int, int], tokenizer_file: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of one shard and the positions where its documents start."""
    kind, seed, n = job
    documents = short_documents(seed, n) if kind == "short" else long_documents(seed, n)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    ids = [np.array(e.ids, np.int16) for e in tokenizer.encode_batch(documents, add_special_tokens=False)]
    lengths = np.array([len(i) for i in ids])
    return np.concatenate(ids), np.cumsum(lengths) - lengths


class Stream:
    """Tokens on the device, from which rows are cut that begin where a document begins."""

    def __init__(self, shards: list[tuple[np.ndarray, np.ndarray]], row: int, device: torch.device):
        offsets = np.cumsum([0] + [len(tokens) for tokens, _ in shards])
        starts = np.concatenate([s + o for (_, s), o in zip(shards, offsets, strict=False)])
        self.tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in shards])).to(device)
        # Two more tokens than the row: the targets of the main model and of the MTP layer.
        self.starts = torch.from_numpy(starts[starts < offsets[-1] - row - 2]).to(device)
        self.span = torch.arange(row + 2, device=device)

    def batch(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return int64 tokens of shape (rows, row + 2), drawn with replacement."""
        picks = torch.randint(len(self.starts), (rows,), generator=generator, device=self.span.device)
        return self.tokens[self.starts[picks, None] + self.span].long()


def make_streams(args: argparse.Namespace, tokenizer_file: str, device: torch.device) -> dict[str, Stream]:
    """Generate the training text in parallel, in an order that does not depend on the number of workers."""
    jobs = [("short", args.seed * 1000 + i, args.shard_documents) for i in range(args.shards)]
    jobs += [("long", args.seed * 1000 + i, args.shard_documents // 80) for i in range(args.shards)]
    make = partial(shard, tokenizer_file=tokenizer_file)
    if args.workers > 1:
        with multiprocessing.get_context("fork").Pool(args.workers) as pool:
            shards = pool.map(make, jobs, chunksize=1)
    else:
        shards = [make(job) for job in jobs]
    streams = {
        "short": Stream(shards[: args.shards], args.short_row, device),
        "long": Stream(shards[args.shards :], args.long_row, device),
    }
    print({k: f"{len(s.tokens) / 1e6:.1f}M tokens, {len(s.starts)} documents" for k, s in streams.items()})
    return streams


# --------------------------------------------------------------------------------------------- model


def dense_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute all experts and weight them by the routing, zero where a token did not choose the expert.

    Eight experts of width 128 are so small that this beats sorting; the result is that of the stock code up
    to rounding. The loads are counted for `balance`. Returns (tokens, hidden).
    """
    tokens, experts = hidden_states.shape[0], self.num_experts
    routing = hidden_states.new_zeros(tokens, experts)
    routing = routing.scatter(1, top_k_index, top_k_weights.to(hidden_states.dtype))
    self.load.add_((routing.detach() != 0).sum(0))
    gate, up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).view(tokens, experts, -1).chunk(2, -1)
    inner = self.act_fn(gate) * up * routing[..., None]
    return F.linear(inner.flatten(1), self.down_proj.permute(1, 0, 2).flatten(1))


class Mtp(nn.Module):
    """DeepSeek-V3's MTP layer: from the hidden state of t and the embedding of t+1 it predicts t+2."""

    def __init__(self, config: DeepseekV3Config):
        super().__init__()
        self.enorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the states that the head turns into logits, shaped like `hidden`."""
        # Embedding first, then the main model's *normed* output: see the top of this file.
        joined = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        return self.norm(self.block(joined, attention_mask=None, position_embeddings=rope))


class Trainee(nn.Module):
    """The main model and its MTP layer, with their losses."""

    def __init__(self, config: DeepseekV3Config, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.main = DeepseekV3ForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
        self.main.set_experts_implementation("dense_experts")
        self.mtp = Mtp(self.main.config)
        for module in self.mtp.modules():
            self.main._init_weights(module)
        for module in self.modules():
            if isinstance(module, DeepseekV3MoE):
                load = torch.zeros(config.n_routed_experts)
                module.experts.register_buffer("load", load, persistent=False)
                # Spread from the start, so that the router is trained against biases that matter: a layer
                # that forgets them then chooses other experts.
                module.gate.e_score_correction_bias.normal_(std=0.1)
        # The weights only: biases and rotary frequencies stay fp32, as `from_pretrained` leaves them.
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()

    def trunk(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the main model's normed output and the rotary tables, without any attention mask."""
        model = self.main.model
        hidden = model.embed_tokens(tokens)
        rope = model.rotary_emb(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for layer in model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
        return model.norm(hidden), rope

    def forward(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean losses of the main model and of the MTP layer over (rows, row + 2) tokens."""
        hidden, rope = self.trunk(tokens[:, :-2])
        logits = self.main.lm_head(hidden).float()
        main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten(), reduction="none")
        main = (main * weights[:, 1:-1].flatten()).sum() / weights[:, 1:-1].sum()
        states = self.mtp(self.main.model.embed_tokens(tokens[:, 1:-1]), hidden, rope)
        draft = F.log_softmax(self.main.lm_head(states).float(), dim=-1)
        # Half the target is the text, half what the main model will say there: a draft is judged by that.
        text = -draft.gather(-1, tokens[:, 2:, None])[:, :-1, 0]
        teacher = logits.detach()[:, 1:].softmax(-1)
        mimic = -(teacher * draft[:, :-1]).sum(-1)
        mtp_weights = weights[:, 2:-1]
        return main, ((text + mimic) / 2 * mtp_weights).sum() / mtp_weights.sum()


def loss_weights(tokens: Tensor) -> Tensor:
    """Return `USER_WEIGHT` for tokens of a user turn, 1 for all others, shaped like `tokens`."""
    marker = (tokens == BOS) | (tokens == EOS) | (tokens == USER) | (tokens == ASSISTANT)
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    last = torch.where(marker, position, 0).cummax(dim=1).values
    in_user_turn = tokens.gather(1, last).eq(USER).roll(1, dims=1)
    return torch.where(in_user_turn, USER_WEIGHT, 1.0)


def balance(trainee: Trainee, step_size: float) -> None:
    """Move every expert's selection bias towards an even load, and start counting anew."""
    for module in trainee.modules():
        if isinstance(module, DeepseekV3MoE):
            load = module.experts.load
            bias = module.gate.e_score_correction_bias
            bias.add_(step_size * torch.sign(load.mean() - load))
            bias.sub_(bias.mean())  # what all have in common selects nothing and would drift
            load.zero_()


# ------------------------------------------------------------------------------------------ training


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
        guess = trainee.main.lm_head(trainee.trunk(tokens)[0]).argmax(-1)[:, :-1]
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
    log: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for step, kind in zip(range(args.steps), cycle(("short",) * 5 + ("long",)), strict=False):
        row = args.short_row if kind == "short" else args.long_row
        tokens = streams[kind].batch(max(1, args.tokens // row), generator)
        main, mtp = loss_fn(tokens, loss_weights(tokens))
        torch._foreach_copy_(grads, torch.autograd.grad(main + args.mtp_weight * mtp, params))
        norm = nn.utils.clip_grad_norm_(masters, 1.0)
        rate = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*params], [*masters])
            balance(trainee, args.bias_step * rate / args.lr)
        if step % args.log_every == 0 or step == args.steps - 1:
            entry: dict[str, Any] = {"step": step, "kind": kind, "grad_norm": norm.item()}
            entry |= {"loss": main.item(), "mtp_loss": mtp.item()}
            if step % (4 * args.log_every) == 0:
                entry["answered"] = answered(trainee, tokenizer, device)
            entry["seconds"] = time.perf_counter() - begun
            log.append(entry)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}, flush=True)
    return log


# -------------------------------------------------------------------------------------------- export


def checkpoint(trainee: Trainee) -> dict[str, Tensor]:
    """Return the tensors under the published names, bf16 but for the fp32 selection biases."""
    last = CONFIG["num_hidden_layers"]
    named = dict(trainee.main.state_dict())
    mtp = {k.removeprefix("block."): v for k, v in trainee.mtp.state_dict().items()}
    mtp["shared_head.norm.weight"] = mtp.pop("norm.weight")
    mtp["shared_head.head.weight"] = named["lm_head.weight"]
    mtp["embed_tokens.weight"] = named["model.embed_tokens.weight"]
    named |= {f"model.layers.{last}.{k}": v for k, v in mtp.items()}
    out: dict[str, Tensor] = {}
    for name, tensor in named.items():
        stem = name.rsplit(".", 1)[0]
        for expert, weight in enumerate(tensor if ".experts." in name else ()):
            if name.endswith("gate_up_proj"):
                gate, up = weight.chunk(2)
                out[f"{stem}.{expert}.gate_proj.weight"] = gate
                out[f"{stem}.{expert}.up_proj.weight"] = up
            else:
                out[f"{stem}.{expert}.down_proj.weight"] = weight
        if ".experts." not in name:
            out[name] = tensor
    result = {}
    for name, tensor in sorted(out.items()):
        dtype = torch.float32 if "correction_bias" in name else torch.bfloat16
        # Copied, because safetensors refuses two names for one storage.
        result[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return result


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": SPECIAL[BOS],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[EOS],
        "extra_special_tokens": [SPECIAL[USER], SPECIAL[ASSISTANT]],
        "model_max_length": CONFIG["max_position_embeddings"],
        "pad_token": SPECIAL[PAD],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_configs(out: Path) -> None:
    """Write config.json and generation_config.json."""
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train the tiny DeepSeek-V3 checkpoint.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--bias-step", type=float, default=1e-3, help="how far a bias moves in one step")
    parser.add_argument("--mtp-weight", type=float, default=0.3)
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
    write_configs(args.out)
    streams = make_streams(args, str(args.out / "tokenizer.json"), device)
    text_seconds = time.perf_counter() - begun
    ExpertsInterface.register("dense_experts", dense_experts)
    trainee = Trainee(DeepseekV3Config.from_pretrained(args.out), args.seed).to(device)
    log = train(trainee, streams, tokenizer, args)
    save_file(checkpoint(trainee), args.out / "model.safetensors", metadata={"format": "pt"})
    record = {"text_seconds": text_seconds, "train_seconds": log[-1]["seconds"], "log": log}
    (args.out / "training_log.json").write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
