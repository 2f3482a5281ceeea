"""From answers to figures, in vLLM's words: one dictionary, and the text of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastlayers_server.bench.client import Answer

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
# What vLLM prints before the latencies: label, figure, format. None, and a rate of "inf", is left out.
LINES = (
    ("Successful requests", "completed", "<10"),
    ("Failed requests", "failed", "<10"),
    ("Maximum request concurrency", "max_concurrency", "<10"),
    ("Request rate configured (RPS)", "request_rate", "<10.2f"),
    ("Benchmark duration (s)", "duration", "<10.2f"),
    ("Total input tokens", "total_input_tokens", "<10"),
    ("Total generated tokens", "total_output_tokens", "<10"),
    ("Request throughput (req/s)", "request_throughput", "<10.2f"),
    ("Request goodput (req/s)", "request_goodput", "<10.2f"),
    ("Output token throughput (tok/s)", "output_throughput", "<10.2f"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", "<10.2f"),
    ("Peak concurrent requests", "max_concurrent_requests", "<10.2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", "<10.2f"),
)


def figures(
    answers: Sequence[Answer], duration: float, *, percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None, max_concurrency: int = 0, request_rate: float = float("inf"),
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of a run, in seconds of ``duration`` and milliseconds of latencies.

    Parameters
    ----------
    goodput : mapping, optional
        Milliseconds that a request may take: of "ttft", "tpot", "e2el".
    """
    good = [a for a in answers if a.ok]
    total_in, total_out = sum(a.prompt_len for a in good), sum(a.output_len for a in good)
    series = {
        "ttft": [a.ttft for a in good],
        "tpot": [a.tpot for a in good if a.output_len > 1],
        "itl": [gap for a in good for gap in a.itl],
        "e2el": [a.latency for a in good],
    }
    peak_tokens, peak_requests = _peaks(good)
    met = None
    if goodput:
        bounds = {"latency" if name == "e2el" else name: ms for name, ms in goodput.items()}
        met = sum(all(getattr(a, name) * 1e3 <= ms for name, ms in bounds.items()) for a in good) / duration
    events = sum(1 + len(a.itl) for a in good)
    found: dict[str, Any] = {
        "duration": duration, "completed": len(good), "failed": len(answers) - len(good),
        "total_input_tokens": total_in, "total_output_tokens": total_out,
        "request_throughput": len(good) / duration, "request_goodput": met,
        "output_throughput": total_out / duration, "total_token_throughput": (total_in + total_out) / duration,
        "max_output_tokens_per_s": peak_tokens, "max_concurrent_requests": peak_requests,
        "request_rate": "inf" if request_rate == float("inf") else request_rate,
        "max_concurrency": max_concurrency or None,
        "tokens_per_event": total_out / events if events else 0.0,
        "cached_share": sum(a.cached for a in good) / total_in if total_in else 0.0,
    }  # fmt: skip
    for name, values in series.items():
        ms = np.asarray(values or [0.0]) * 1e3
        found |= {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": ms.std()}
        found |= {f"p{p:g}_{name}_ms": np.percentile(ms, p) for p in percentiles}
    return {name: float(v) if isinstance(v, np.floating) else v for name, v in found.items()}


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """Return the most tokens within a second of the run, and the most requests at once."""
    if not answers:
        return 0.0, 0
    begin = min(a.start for a in answers)
    seconds = int(max(a.start + a.latency for a in answers) - begin) + 1
    tokens, requests = np.zeros(seconds), np.zeros(seconds, dtype=int)
    for answer in answers:
        at = answer.start + answer.ttft - begin
        share = answer.output_len / (1 + len(answer.itl))
        for gap in (0.0, *answer.itl):
            at += gap
            tokens[min(seconds - 1, int(at))] += share
        requests[int(answer.start - begin) : int(answer.start - begin + answer.latency) + 1] += 1
    return float(tokens.max()), int(requests.max())


def detail(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Return what each request did."""
    return {
        "input_lens": [a.prompt_len for a in answers], "output_lens": [a.output_len for a in answers],
        "ttfts": [a.ttft for a in answers], "itls": [a.itl for a in answers],
        "latencies": [a.latency for a in answers], "start_times": [a.start for a in answers],
        "generated_texts": [a.text for a in answers], "errors": [a.error for a in answers],
    }  # fmt: skip


def text(found: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return the figures as vLLM prints them."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for label, name, shape in LINES:
        if found[name] not in (None, "inf"):
            lines.append(f"{label + ':':<40} {found[name]:{shape}}")
    for name in metrics:
        lines.append(f"{TITLES[name]:-^50}")
        for kind in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            label = f"{kind.capitalize()} {name.upper()} (ms):"
            lines.append(f"{label:<40} {found[f'{kind}_{name}_ms']:<10.2f}")
    return "\n".join([*lines, "=" * 50, f"tokens per event: {found['tokens_per_event']:.2f}"])
