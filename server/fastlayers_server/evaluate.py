"""Exact-match accuracy and perplexity of one checkpoint, run in several ways: ``fastlayers eval``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import fastlayers
from fastlayers.errors import ArgumentError, CheckpointError, FastlayersError
from fastlayers.tuning.provenance import provenance
from fastlayers_server.tasks import Problem, held_out_problems, stories
from fastlayers_server.variants import Runner, Variant, reason_of

BATCH = 50
MAX_ANSWER = 24


@dataclass(frozen=True)
class Score:
    """One row: accuracy over the problems, perplexity over the stories, answers that differ from the baseline's."""

    variant: str
    description: str
    baseline: str | None
    exact_match: float
    perplexity: float
    problems: int
    flips: int | None
    seconds: float


def evaluate(
    path: Path,
    variants: Sequence[Variant],
    device: torch.device,
    *,
    limit: int = 1000,
    num_stories: int = 100,
    progress: Callable[[str, int, int], Any] = lambda *_: None,
    omit: Callable[[Variant, Exception], Any] | None = None,
) -> list[Score]:
    """Score every variant on the held-out problems and stories.

    Parameters
    ----------
    path : Path
        Checkpoint directory with its tokenizer.
    variants : sequence of Variant
    device : torch.device
    limit, num_stories : int
        How many of the 1,000 problems, and how many stories.
    progress : callable
        Called with (variant, done, total).
    omit : callable, optional
        Told each variant that does not apply to this checkpoint or fails, and the error, and the others go on;
        default: the first one raises.

    Returns
    -------
    list[Score]
        In the order given; ``flips`` is ``None`` where the baseline is not among the variants before it.

    Raises
    ------
    ArgumentError
        Without ``omit``: a variant does not apply to this checkpoint.
    CheckpointError
        No tokenizer.
    """
    tokenizer = tokenizer_of(path)
    problems, texts = held_out_problems()[:limit], stories("held_out", num_stories)
    answers: dict[str, list[str]] = {}
    scores = []
    for variant in variants:
        begin = time.perf_counter()
        try:
            if (reason := variant.why_not(path)) is not None:
                raise ArgumentError("eval", "variant", f"{variant.name!r}, {reason}", "one that applies")
            runner = variant.build(path, device)
            given = _answers(runner, tokenizer, problems, partial(progress, variant.name))
            perplexity = _perplexity(runner, tokenizer, texts)
        except (FastlayersError, OSError, ValueError, RuntimeError) as error:
            if omit is None:
                raise
            omit(variant, error)
            continue
        answers[variant.name] = given
        right = sum(text == problem.answer for text, problem in zip(given, problems, strict=True))
        before = answers.get(variant.baseline) if variant.baseline else None
        flips = None if before is None else sum(a != b for a, b in zip(given, before, strict=True))
        scores.append(
            Score(
                variant.name, variant.description, variant.baseline, right / len(given), perplexity, len(given),
                flips, time.perf_counter() - begin,
            )
        )  # fmt: skip
    return scores


# Files of which a tokenizer has at least one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def tokenizer_of(path: Path) -> Any:
    """Return the checkpoint's tokenizer, or raise :class:`CheckpointError` where it has none that can be read."""
    from transformers import AutoTokenizer

    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(f"{path}: no tokenizer.json; a checkpoint with its tokenizer's files is needed for text")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the tokenizers' own are no subclasses of anything else
        raise CheckpointError(
            f"{path}: transformers cannot read its tokenizer or config.json: {reason_of(error)}"
        ) from error


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of one user turn, ready for the assistant's answer.

    Raises
    ------
    CheckpointError
        The tokenizer does not say how a conversation is written.
    """
    if not getattr(tokenizer, "chat_template", None):
        where = getattr(tokenizer, "name_or_path", "")
        raise CheckpointError(f"{where}: no chat_template.jinja, and no chat_template in tokenizer_config.json")
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _answers(
    runner: Runner, tokenizer: Any, problems: Sequence[Problem], progress: Callable[[int, int], Any]
) -> list[str]:
    given: list[str] = []
    for first in range(0, len(problems), BATCH):
        part = problems[first : first + BATCH]
        outputs = runner.generate([chat_ids(tokenizer, p.prompt) for p in part], MAX_ANSWER)
        given += [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in outputs]
        progress(len(given), len(problems))
    return given


def _perplexity(runner: Runner, tokenizer: Any, texts: Sequence[str]) -> float:
    loss, count = 0.0, 0
    for text in texts:
        ids: list[int] = tokenizer(text)["input_ids"]
        logits = runner.logits(ids)[:-1]
        loss += float(cross_entropy(logits, torch.tensor(ids[1:], device=logits.device), reduction="sum"))
        count += len(ids) - 1
    return math.exp(loss / max(1, count))


def as_json(scores: Sequence[Score]) -> dict[str, dict[str, Any]]:
    """Return ``{variant: {"exact_match": …, "perplexity": …, …}}``."""
    return {score.variant: asdict(score) for score in scores}


def run_facts(device: torch.device) -> dict[str, Any]:
    """Return what scores depend on: command, commit (where there is git), versions, device."""
    import transformers

    return {
        "command": "fastlayers " + " ".join(sys.argv[1:]),
        **provenance(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "fastlayers": fastlayers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
