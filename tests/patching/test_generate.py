"""Patched models generate what stock ones generate, in every mode; broken kernels are noticed by the same check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers
from packaging.version import Version

import fastlayers as fl
import fastlayers_models
from fastlayers.patching import experts, gqa, mla
from fastlayers.patching.mlp import FastMLP
from fastlayers.patching.norm import FastRMSNorm
from fastlayers.patching.router import FastSoftmaxRouter, FastTopKFirstRouter, FastV3Router

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIGS, GQA, build, prompt

SHIPPED = Path(fastlayers_models.__file__).parent / "assets" / "tiny_deepseek_v3"
PADDED = (0, 5, 17)
STEPS = 24  # new tokens
# What takes more for its tokens to vary, or for the corruptions below to show: a mode, a family in one.
MORE_STEPS = {"beams_padded": 40, "prompt_lookup": 40, "qwen2, dynamic_padded": 64, "qwen3, dynamic_padded": 64}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dynamic": ({"batch": 1}, {}),
    "dynamic_padded": ({"batch": 3, "pads": PADDED}, {}),
    "static_padded": ({"batch": 3, "pads": PADDED}, {"cache_implementation": "static"}),
    "beams_padded": ({"batch": 2, "pads": (0, 9)}, {"num_beams": 3}),
    "sampling_padded": ({"batch": 3, "pads": PADDED}, {"do_sample": True, "top_k": 30, "temperature": 1.3}),
    "chunked_prefill": ({"batch": 3, "pads": PADDED}, {"prefill_chunk_size": 7}),
    "prompt_lookup": ({"batch": 1}, {"prompt_lookup_num_tokens": 4}),
}


@pytest.fixture(scope="module")
def models() -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get


_said: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def stock(model: Any, question: str, ask: Callable[[], Any]) -> Any:
    """Return what a model answers without a patch, asked once: what is corrupted here, it does not run."""
    answers = _said.setdefault(model, {})
    if question not in answers:
        answers[question] = ask()
    return answers[question]


@torch.inference_mode()
def tokens(model: Any, inputs: dict[str, torch.Tensor], steps: int = STEPS, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    options = {"do_sample": False} | options
    out: torch.Tensor = model.generate(**inputs, max_new_tokens=steps, min_new_tokens=steps, **options)
    return out


def until_they_differ(wanted: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return what ends ``generate`` at the first other token: what comes behind it tells nothing more."""

    def differ(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), not torch.equal(ids, wanted[:, : ids.shape[1]]))

    return differ


def same_tokens(model: Any, mode: str, **patching: Any) -> bool:
    """The check of this file: stock and patched tokens are the same, they vary, and our code ran."""
    shape, options = MODES[mode]
    inputs = prompt(**shape)
    if mode == "prompt_lookup":
        # Repeated pieces, so that candidates are found and some are rejected.
        piece = inputs["input_ids"][:, :20]
        inputs = {"input_ids": piece.repeat(1, 3), "attention_mask": torch.ones_like(piece).repeat(1, 3)}
    family = model.config.model_type.removesuffix("_moe")
    steps = MORE_STEPS.get(f"{family}, {mode}", MORE_STEPS.get(mode, STEPS))
    wanted = stock(model, mode, lambda: tokens(model, inputs, steps, **options))
    ends = {} if mode == "beams_padded" else {"stopping_criteria": [until_they_differ(wanted)]}
    with fl.patched(model, **patching) as report:
        given = tokens(model, inputs, steps, **options, **ends)
        hits, fallbacks = report.hits(), report.fallbacks()
    new = wanted[:, inputs["input_ids"].shape[1] :]
    assert min(len(set(row.tolist())) for row in new) >= 12, "a collapsed model proves nothing"
    assert hits and min(hits.values()) > 0, hits
    assert not any(fallbacks.values()), fallbacks
    return wanted.shape == given.shape and bool((wanted == given).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["v3", "v2"])
def test_tokens_are_identical(models: Callable[[str], Any], name: str, mode: str) -> None:
    assert same_tokens(models(name), mode)


# Attention of qwen2_moe is qwen2's without a window, that of qwen3 is qwen3_moe's without biases: one mode is enough.
OTHER_MODES = [
    pytest.param(name, mode, marks=[pytest.mark.slow] * (name in ("qwen2_moe", "qwen3") and mode != "dynamic_padded"))
    for name in GQA
    for mode in ("dynamic", "dynamic_padded", "static_padded", "beams_padded", "chunked_prefill")
]


@pytest.mark.parametrize(("name", "mode"), OTHER_MODES)
def test_tokens_of_other_families_are_identical(models: Callable[[str], Any], name: str, mode: str) -> None:
    assert same_tokens(models(name), mode)


@pytest.mark.parametrize("mode", ["dynamic_padded", "static_padded"])
@pytest.mark.parametrize("name", ["v3_yarn_bias", "v2_lite", "v3_dense", "llama_bias"])
def test_tokens_are_identical_in_other_variants(models: Callable[[str], Any], name: str, mode: str) -> None:
    assert same_tokens(models(name), mode)


@pytest.mark.parametrize("changes", [{"cache": "hf"}, {"fuse_projections": False}], ids=str)
def test_tokens_are_identical_with_other_options(models: Callable[[str], Any], changes: dict[str, Any]) -> None:
    assert same_tokens(models("v3"), "dynamic_padded", **changes)


def test_tokens_are_identical_with_eager_attention() -> None:
    model = build("v3", attn="eager")
    assert same_tokens(model, "dynamic_padded") and same_tokens(model, "static_padded")


@pytest.mark.parametrize("kind", ["attention", "moe", "norm", "mlp"])
def test_backend_by_name_gives_the_same_tokens(models: Callable[[str], Any], kind: str) -> None:
    assert same_tokens(models("v3"), "dynamic", **{kind: "torch"})


@torch.inference_mode()
def teacher_forced_error(name: str, model: Any) -> float:
    """Largest relative error of logits, step by step over given tokens after a chunked prefill, left padding."""
    inputs = prompt(3, 60, pads=PADDED)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def logits() -> list[torch.Tensor]:
        found, cache, start = [], None, 0
        for end in (31, 44, *range(45, 61)):
            # As generate does: positions count from the first token that is not padding.
            position = (mask[:, :end].cumsum(-1) - 1).clamp_min(0)[:, start:end]
            out = model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=position, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache = out.past_key_values
            found.append(out.logits[mask[:, start:end].bool()])
            start = end
        return found

    wanted = stock(model, "logits", logits)
    with fl.patched(model) as report:
        given = logits()
        assert min(report.hits().values()) > 0
    return max(float((g - w).norm() / w.norm()) for g, w in zip(given, wanted, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_step(models: Callable[[str], Any], name: str) -> None:
    assert teacher_forced_error(name, models(name)) <= 1e-5


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="stock MtpModel does not build MoE blocks before 5.17"
)
def test_use_mtp_generates_the_same() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fastlayers_server.tasks import iter_story_chats

    model: Any = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    story = next(iter(iter_story_chats("held_out", 30_000)))[0]
    ids = tokenizer(story, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = tokens(model, inputs)
    wanted = tokens(model, inputs, use_mtp=True)
    implementation = model.config._experts_implementation
    with fl.patched(model) as report:
        given = tokens(model, inputs, use_mtp=True)
        assert min(report.hits().values()) > 0
        assert model.config._experts_implementation == implementation, "the configuration is not edited"
    assert torch.equal(wanted, given) and torch.equal(plain, given)


# --- anti-vacuity: each corruption of one fast path must be seen by the checks above


def _scaled_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.attend_latent
    monkeypatch.setattr(mla, "attend_latent", lambda q, rows, mask, s, rank: right(q, rows, mask, 1.01 * s, rank))


def _ignored_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.attend_latent
    monkeypatch.setattr(mla, "attend_latent", lambda q, rows, mask, scale, rank: right(q, rows, None, scale, rank))


def _stale_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mla.latent_rows

    def stale(*arguments: Any) -> torch.Tensor:
        rows = right(*arguments).clone()
        rows[:, -1] = rows[:, -2]
        return rows

    monkeypatch.setattr(mla, "latent_rows", stale)


def _output(monkeypatch: pytest.MonkeyPatch, target: Any, method: str, change: Callable[[Any], Any]) -> None:
    right = getattr(target, method)
    monkeypatch.setattr(target, method, lambda *arguments: change(right(*arguments)))


CORRUPTIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "softmax_scale": _scaled_softmax,
    "ignored_mask": _ignored_mask,
    "stale_last_row": _stale_last_row,
    "norm_scale": lambda m: _output(m, FastRMSNorm, "forward", lambda y: 1.01 * y),
    "mlp_scale": lambda m: _output(m, FastMLP, "forward", lambda y: 1.05 * y),
    "router_weights": lambda m: _output(m, FastV3Router, "_fl_exact", lambda r: (1.05 * r[0], r[1])),
    "router_choice": lambda m: _output(m, FastV3Router, "_fl_exact", lambda r: (r[0], r[1].roll(1, 0))),
    "absorbed_output": lambda m: _output(m, mla.FastMLA, "_fl_absorbed", lambda o: 1.01 * o),
    "expanded_output": lambda m: _output(m, mla.FastMLA, "_fl_expanded", lambda o: 1.01 * o),
    "projection": lambda m: _output(m, mla.FastMLA, "_fl_project", lambda t: (t[0], 1.01 * t[1], t[2])),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corrupted_fast_path_is_noticed(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, corruption: str
) -> None:
    model = models("v3")
    CORRUPTIONS[corruption](monkeypatch)
    assert teacher_forced_error("v3", model) > 1e-5
    assert not same_tokens(model, "dynamic_padded")


def _module(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, change: Callable[[Any], Any]) -> None:
    right = getattr(target, name)
    monkeypatch.setattr(target, name, lambda *arguments: change(right(*arguments)))


def _sharper(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gqa.attend
    monkeypatch.setattr(gqa, "attend", lambda q, k, v, mask, scale, *rest: right(q, k, v, mask, 1.01 * scale, *rest))


def _unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gqa.attend

    def open_eyed(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> torch.Tensor:
        return right(q, k, v, None if mask is None else torch.ones_like(mask), *rest)

    monkeypatch.setattr(gqa, "attend", open_eyed)


def _no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gqa.attend
    monkeypatch.setattr(gqa, "attend", lambda q, k, v, mask, scale, *rest: right(q, k, v, mask, scale, None, None))


# What is broken -> the families that run it.
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "softmax_scale": (_sharper, GQA),
    "ignored_mask": (_unmasked, GQA),
    "no_sinks": (_no_sinks, ("gpt_oss",)),
    "rotary": (lambda m: _module(m, gqa, "rotate", lambda x: x.flip(1)), GQA),
    "norm_scale": (lambda m: _output(m, FastRMSNorm, "forward", lambda y: 1.01 * y), GQA),
    "mlp_scale": (lambda m: _output(m, FastMLP, "forward", lambda y: 1.05 * y), GQA[:4] + GQA[5:]),
    "experts": (lambda m: _module(m, experts, "grouped", lambda y: 1.05 * y), ("qwen2_moe", "qwen3_moe", "gpt_oss")),
    "softmax_router": (
        lambda m: _output(m, FastSoftmaxRouter, "_fl_exact", lambda r: (r[0], r[1].roll(1, 0))),
        ("qwen2_moe", "qwen3_moe"),
    ),
    "topk_first_router": (
        lambda m: _output(m, FastTopKFirstRouter, "_fl_exact", lambda r: (r[0], r[1].roll(1, 0))), ("gpt_oss",)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), [(b, n) for b, (_, names) in BROKEN.items() for n in names])
def test_what_is_broken_in_another_family_is_noticed(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, broken: str, name: str
) -> None:
    BROKEN[broken][0](monkeypatch)
    assert teacher_forced_error(name, models(name)) > 1e-5
    assert not same_tokens(models(name), "dynamic_padded")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "dynamic_padded"])
def test_every_mode_notices_a_corrupted_scale(
    models: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    _scaled_softmax(monkeypatch)
    assert not same_tokens(models("v3"), mode)
