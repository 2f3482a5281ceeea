"""One Hugging Face model before and after ``fastlayers.patch``: the same tokens, faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastlayers as fl
from fastlayers_server.hugging_face import chat_ids, load_hugging_face, tokenizer_of
from fastlayers_server.tasks import long_prompt


@dataclass(frozen=True)
class Run:
    """Tokens of one run and how long it took; ``prefill_seconds`` is the time to the first token."""

    tokens: list[int]
    text: str
    seconds: float
    prefill_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        return max(0, len(self.tokens) - 1) / max(1e-9, self.seconds - self.prefill_seconds)


@dataclass(frozen=True)
class Demo:
    """What the demonstration saw: the faster turn of each side, and whether all turns gave the same tokens."""

    prompt_tokens: int
    stock: Run
    patched: Run
    identical: bool
    turns: dict[str, list[float]]
    report: Any
    hits: dict[str, int]

    @property
    def speedup(self) -> float:
        """Decode speed, patched over stock."""
        return self.patched.tokens_per_second / self.stock.tokens_per_second


def run_demo(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    new_tokens: int = 64,
    min_prompt_tokens: int = 2000,
    repeats: int = 2,
    progress: Callable[[str], Any] = lambda _: None,
) -> Demo:
    """Generate greedily with a Hugging Face model as it is and patched, in turns.

    Parameters
    ----------
    path : Path
        Checkpoint directory with its tokenizer.
    device, dtype
    new_tokens : int
        Tokens to generate; end tokens do not stop the run, so that both sides do the same work.
    min_prompt_tokens : int
    repeats : int
        Turns of each side, taken in alternation, so that a busy moment of the machine does not decide.
    progress : callable
        Called with a sentence at each stage.
    """
    tokenizer = tokenizer_of(path)
    model = load_hugging_face(path, dtype, device)
    problem = long_prompt(min_prompt_tokens, lambda text: len(tokenizer(text)["input_ids"]))
    ids = torch.tensor([chat_ids(tokenizer, problem.prompt)], device=device)
    stock: list[Run] = []
    patched: list[Run] = []
    for turn in range(1, repeats + 1):
        progress(f"Hugging Face, turn {turn} of {repeats}: {ids.shape[1]} prompt tokens, {new_tokens} new ones")
        stock.append(_generate(model, tokenizer, ids, new_tokens))
        with fl.patched(model) as report:
            progress(f"patched, turn {turn} of {repeats}: the same prompt")
            patched.append(_generate(model, tokenizer, ids, new_tokens))
            hits = report.hits()
    same = all(run.tokens == stock[0].tokens for run in stock + patched)
    best = [min(runs, key=lambda run: run.seconds - run.prefill_seconds) for runs in (stock, patched)]
    turns = {n: [r.tokens_per_second for r in runs] for n, runs in (("stock", stock), ("patched", patched))}
    return Demo(ids.shape[1], best[0], best[1], same, turns, report, hits)


class _FirstToken:
    """A streamer that notes when the first new token arrived (the prompt itself is put first)."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing to flush."""


@torch.inference_mode()
def _generate(model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int) -> Run:
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    # A short run first: neither side pays for first calls.
    model.generate(ids[:, :64], **(options | {"attention_mask": torch.ones_like(ids[:, :64])}), max_new_tokens=4)
    clock = _FirstToken()
    begin = time.perf_counter()
    out = model.generate(ids, **options, min_new_tokens=new_tokens, max_new_tokens=new_tokens, streamer=clock)
    if ids.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    tokens = out[0, ids.shape[1] :].tolist()
    return Run(tokens, tokenizer.decode(tokens), seconds, clock.first - begin)
