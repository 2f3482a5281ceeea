"""Accuracy, perplexity and distance from fp32 of one checkpoint, run in several ways: ``fastlayers eval``."""

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
from fastlayers.layer import Layer
from fastlayers.tuning.provenance import provenance
from fastlayers_server.divergence import Divergence, Yardstick, own_roundings
from fastlayers_server.hard_tasks import HARD_PROBLEMS, Conversation, hard_problems
from fastlayers_server.hugging_face import chat_ids, template_ids, tokenizer_of
from fastlayers_server.tasks import Problem, held_out_problems, stories
from fastlayers_server.variants import FastlayersRunner, Rounding, Runner, Variant

BATCH = 50
MAX_ANSWER = 24


@dataclass(frozen=True)
class Score:
    """One row of the table.

    ``exact_match`` over the problems, ``flips``: answers that differ from the baseline's; ``hard_exact_match`` over the
    hard set's conversations (``None``: none asked). ``perplexity`` and the KL divergence from stock transformers in
    fp32 over the stories, with what this format may reach (see :mod:`fastlayers_server.divergence`); ``within``: it
    did not go beyond (``None``: the row says what the bound is, or nothing was measured). ``backends``: of each kind
    of layer, what computed. ``baseline``: see :meth:`Variant.against`.
    """

    variant: str
    description: str
    baseline: str | None
    exact_match: float
    perplexity: float
    problems: int
    flips: int | None
    seconds: float
    hard_exact_match: float | None
    hard_problems: int
    kl_mean: float | None
    kl_mean_bound: float | None
    kl_p99: float | None
    kl_p99_bound: float | None
    top1_agreement: float | None
    within: bool | None
    backends: dict[str, str]


def evaluate(
    path: Path,
    variants: Sequence[Variant],
    device: torch.device,
    *,
    limit: int = 1000,
    num_stories: int = 100,
    num_hard: int = HARD_PROBLEMS,
    measure_divergence: bool = True,
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
    limit, num_stories, num_hard : int
        How many of the 1,000 problems, how many stories, and how many conversations of the hard set (0: none).
    measure_divergence : bool
        Whether to compare with stock transformers in fp32, which must be able to load the checkpoint.
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
        No tokenizer; or there is to be a comparison with fp32, and transformers cannot load the checkpoint.
    """
    tokenizer = tokenizer_of(path)
    problems, chats = held_out_problems()[:limit], hard_problems(num_hard)
    texts: list[list[int]] = [tokenizer(text)["input_ids"] for text in stories("held_out", num_stories)]
    yardstick = _yardstick(path, texts, device) if measure_divergence else None
    answers: dict[str, list[str]] = {}
    scores = []
    for variant in variants:
        begin = time.perf_counter()
        try:
            if (reason := variant.why_not(path, device)) is not None:
                raise ArgumentError("eval", "variant", f"{variant.name!r}, {reason}", "one that applies")
            runner = variant.build(path, device)
            given = _answers(runner, tokenizer, problems, partial(progress, variant.name))
            right = sum(text == problem.answer for text, problem in zip(given, problems, strict=True))
            hard = [holds_conversation(runner.logits, tokenizer, chat) for chat in chats]
            perplexity, far = _read(runner, texts, yardstick)
            roundings = _roundings(variant, runner, path)
            bound = (None, None) if yardstick is None or roundings is None else yardstick.bound(roundings)
        except (FastlayersError, OSError, ValueError, RuntimeError) as error:
            if omit is None:
                raise
            omit(variant, error)
            continue
        answers[variant.name] = given
        baseline = variant.against(path, device, answers)
        before = answers.get(baseline) if baseline else None
        flips = None if before is None else sum(a != b for a, b in zip(given, before, strict=True))
        mean, p99, top1 = (far.mean, far.p99, far.top1) if far is not None else (None, None, None)
        scores.append(
            Score(
                variant.name, variant.description, baseline, right / len(given), perplexity, len(given),
                flips, time.perf_counter() - begin, sum(hard) / len(hard) if hard else None, len(hard),
                mean, bound[0], p99, bound[1], top1, _within(far, bound), backends_of(runner.model),
            )
        )  # fmt: skip
    return scores


def _roundings(variant: Variant, runner: Runner, path: Path) -> tuple[Rounding, ...] | None:
    """Return a variant's roundings with those of the checkpoint's format, which our models compute in."""
    if variant.roundings is None or not isinstance(runner, FastlayersRunner) or variant.formats:
        return variant.roundings
    own = own_roundings(path)
    return None if own is None else variant.roundings + own


def _yardstick(path: Path, texts: Sequence[Sequence[int]], device: torch.device) -> Yardstick:
    try:
        return Yardstick(path, texts, device)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; without the comparison with fp32: --no-divergence") from error


def _within(far: Divergence | None, bound: tuple[float | None, float | None]) -> bool | None:
    mean, p99 = bound
    return None if far is None or mean is None or p99 is None else far.mean <= mean and far.p99 <= p99


def backends_of(model: Any) -> dict[str, str]:
    """Return, of each kind of layer in a model, the names of the backends that compute."""
    found: dict[str, set[str]] = {}
    for module in model.modules():
        for choice in module.choices if isinstance(module, Layer) else ():
            found.setdefault(choice.layer, set()).add(choice.name)
    return {layer: "|".join(sorted(names)) for layer, names in sorted(found.items())}


def holds_conversation(logits: Callable[[Sequence[int]], torch.Tensor], tokenizer: Any, chat: Conversation) -> bool:
    """Return whether every answer is what greedy decoding would say, each after the right ones before it.

    One pass over the whole conversation: up to the first wrong token, teacher forced and greedy are the same.

    Raises
    ------
    CheckpointError
        The tokenizer's template writes earlier turns otherwise than the last one.
    """
    messages: list[dict[str, str]] = []
    spans: list[tuple[int, list[int]]] = []
    ids: list[int] = []
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.prompt})
        asked = template_ids(tokenizer, messages, True)
        messages.append({"role": "assistant", "content": turn.answer})
        before, ids = ids, template_ids(tokenizer, messages, False)
        if asked[: len(before)] != before or ids[: len(asked)] != asked:
            where = getattr(tokenizer, "name_or_path", "")
            raise CheckpointError(f"{where}: its chat template rewrites earlier turns; --hard 0 does without")
        # The answer and what ends it; a template may add more, which no model need say.
        end = len(asked) + len(tokenizer(turn.answer, add_special_tokens=False)["input_ids"]) + 1
        spans.append((len(asked), ids[len(asked) : end]))
    said: list[int] = logits(ids).argmax(-1).tolist()
    return all(said[begin - 1 : begin - 1 + len(answer)] == answer for begin, answer in spans)


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


def _read(
    runner: Runner, texts: Sequence[Sequence[int]], yardstick: Yardstick | None
) -> tuple[float, Divergence | None]:
    """Return the perplexity of the texts and, in the same pass, how far the logits are from fp32's."""
    loss, count = 0.0, 0

    def logits(ids: Sequence[int]) -> torch.Tensor:
        nonlocal loss, count
        found = runner.logits(ids)
        loss += float(cross_entropy(found[:-1], torch.tensor(ids[1:], device=found.device), reduction="sum"))
        count += len(ids) - 1
        return found

    if yardstick is None:
        for ids in texts:
            logits(ids)
    far = None if yardstick is None else yardstick.of(logits)
    return math.exp(loss / max(1, count)), far


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
