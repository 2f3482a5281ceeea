"""The text of the tiny checkpoints as tokens: documents, tokenizer, rows for the training steps."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from fastlayers_server import tasks

VOCABULARY, CONTEXT = 512, 4096
BOS, EOS, PAD, USER, ASSISTANT = range(5)
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"]
# Tools and calls are shown as Hermes does, in plain text: no training text has them, so they cost no special token.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}{% endfor %}{{ eos_token }}"
    "{% elif message['role'] == 'tool' %}{{ '<tool_response>' + message['content'] + '</tool_response>' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Sums, differences and look-ups are the hardest, so the training text has more of them.
TRAINING_KINDS = (
    *("add", "sub", "lookup", "reverse", "add", "sub", "sort", "lookup"),
    *("add", "sub", "copy", "lookup"),
)
USER_WEIGHT = 0.1  # letters and digits of a question are random: little to learn, but their losses are large


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
        vocab_size=VOCABULARY,
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
    # One at a time: `encode_batch` has threads, which hang in a forked worker if TOKENIZERS_PARALLELISM is on.
    ids = [np.array(tokenizer.encode(d, add_special_tokens=False).ids, np.int16) for d in documents]
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


def make_shards(args: argparse.Namespace, tokenizer_file: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Generate the training text in parallel, in an order that does not depend on the number of workers."""
    jobs = [("short", args.seed * 1000 + i, args.shard_documents) for i in range(args.shards)]
    jobs += [("long", args.seed * 1000 + i, args.shard_documents // 80) for i in range(args.shards)]
    make = partial(shard, tokenizer_file=tokenizer_file)
    if args.workers > 1:
        with multiprocessing.get_context("fork").Pool(args.workers) as pool:
            return pool.map(make, jobs, chunksize=1)
    return [make(job) for job in jobs]


def make_streams(args: argparse.Namespace, tokenizer_file: str, device: torch.device) -> dict[str, Stream]:
    """Return the training text on the device; `args.text` names a file that keeps it for the next family."""
    if args.text and args.text.exists():
        stored = np.load(args.text)
        if stored["made_from"].tolist() != [args.seed, args.shards, args.shard_documents]:
            raise ValueError(f"{args.text} was made with other --seed, --shards or --shard-documents")
        shards = [(stored[f"tokens{i}"], stored[f"starts{i}"]) for i in range(2 * args.shards)]
    else:
        shards = make_shards(args, tokenizer_file)
        if args.text:
            named: dict[str, Any] = {f"tokens{i}": tokens for i, (tokens, _) in enumerate(shards)}
            named |= {f"starts{i}": starts for i, (_, starts) in enumerate(shards)}
            np.savez(args.text, made_from=[args.seed, args.shards, args.shard_documents], **named)
    streams = {
        "short": Stream(shards[: args.shards], args.short_row, device),
        "long": Stream(shards[args.shards :], args.long_row, device),
    }
    print({k: f"{len(s.tokens) / 1e6:.1f}M tokens, {len(s.starts)} documents" for k, s in streams.items()})
    return streams


def loss_weights(tokens: Tensor) -> Tensor:
    """Return `USER_WEIGHT` for tokens of a user turn, 1 for all others, shaped like `tokens`."""
    marker = (tokens == BOS) | (tokens == EOS) | (tokens == USER) | (tokens == ASSISTANT)
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    last = torch.where(marker, position, 0).cummax(dim=1).values
    in_user_turn = tokens.gather(1, last).eq(USER).roll(1, dims=1)
    return torch.where(in_user_turn, USER_WEIGHT, 1.0)


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
        "model_max_length": CONTEXT,
        "pad_token": SPECIAL[PAD],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
