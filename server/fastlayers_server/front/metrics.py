"""What /metrics says, in Prometheus' text: the front's own clocks, and the engine's Stats as they came."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, core, generate_latest
from prometheus_client.registry import Collector

from fastlayers_server.engine.protocol import COUNTERS, HISTOGRAMS, SECONDS, Output, Stats
from fastlayers_server.front.schemas import ChatRequest
from fastlayers_server.stalls import Stalls

if TYPE_CHECKING:
    from fastlayers_server.front.link import Link
    from fastlayers_server.front.rows import Row

log = logging.getLogger("fastlayers.front")
LENGTHS = tuple(2.0**i for i in range(18))
# own family -> (vLLM's, SGLang's) names; sums of a counter's keys where theirs has none.
ALIASES: Mapping[str, tuple[str, str]] = {
    "requests_running": ("num_requests_running", "num_running_reqs"),
    "requests_waiting": ("num_requests_waiting", "num_queue_reqs"),
    "kv_usage_ratio": ("kv_cache_usage_perc", "token_usage"),
    "prefix_queries": ("prefix_cache_queries", ""),
    "prefix_hits": ("prefix_cache_hits", "cached_tokens"),
    "preemptions": ("num_preemptions", "num_retracted_reqs"),
    "evicted_pages": ("", "evicted_pages"),
    "prompt_tokens": ("prompt_tokens", "prompt_tokens"),
    "generation_tokens": ("generation_tokens", "generation_tokens"),
    "aborts": ("", "num_aborted_requests"),
    "requests": ("request_success", ""),
    "rejections": ("admission_rejections", ""),
    "nonfinite_rows": ("corrupted_requests", ""),
    "spec_drafts": ("spec_decode_num_drafts", ""),
    "spec_draft_tokens": ("spec_decode_num_draft_tokens", ""),
    "spec_accepted_tokens": ("spec_decode_num_accepted_tokens", ""),
    "ttft_seconds": ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    "itl_seconds": ("inter_token_latency_seconds", "inter_token_latency_seconds"),
    "tpot_seconds": ("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    "e2e_seconds": ("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    "queue_seconds": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill_seconds": ("request_prefill_time_seconds", ""),
    "decode_seconds": ("request_decode_time_seconds", ""),
    "prompt_length": ("request_prompt_tokens", ""),
    "output_length": ("request_generation_tokens", ""),
}
LABELS = {"request_success": ("finish", "finished_reason")}


class Metrics(Collector):
    """Everything that /metrics shows.

    Parameters
    ----------
    model_name : str
    compat : str
        "none", "vllm", "sglang" or "both": whose names are shown beside ours.
    gc_warning : float
        Collections that took more seconds are logged; 0: none.
    """

    def __init__(self, model_name: str, compat: str = "none", gc_warning: float = 0.0) -> None:
        self._model, self._compat = model_name, compat
        self.link: Link | None = None
        self._own = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._own}

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"fastlayers_{name}_seconds", text, labels, buckets=SECONDS, **own)

        self.ttft = seconds("ttft", "From the complete body to the first token")
        self.itl = seconds("itl", "Between a request's news")
        self._tpot = seconds("tpot", "Time per output token after the first, of requests that ended")
        self._e2e = seconds("e2e", "From the complete body to the end")
        self.grammar_compile = seconds("grammar_compile", "Compiling one grammar")
        self._gc = seconds("gc_pause", "Collections of the front", "generation")
        self._prompt = Histogram("fastlayers_prompt_length", "Tokens", buckets=LENGTHS, **own)
        self._output = Histogram("fastlayers_output_length", "Tokens", buckets=LENGTHS, **own)
        self.aborts = Counter("fastlayers_aborts", "Requests ended early", ["cause"], **own)
        self.errors = Counter("fastlayers_http_errors", "Answers that were errors", ["code"], **own)
        self._ignored = Counter("fastlayers_ignored_fields", "Only with --lenient-fields", ["field"], **own)
        self.tool_failures = Counter("fastlayers_tool_parse_failures", "Tool calls without valid JSON", **own)
        self.front_tokens = Counter("fastlayers_front_tokens", "Tokens that went into answers", **own)
        self._gc_warning = gc_warning
        self.stalls = Stalls()

    def collected(self, generation: int, seconds: float) -> None:
        """Take what a garbage collection took."""
        self._gc.labels(str(generation)).observe(seconds)
        self.stalls.note("collector", seconds, generation=generation)
        if self._gc_warning and seconds > self._gc_warning:
            log.warning("a collection of generation %d took %.3f s", generation, seconds)

    def ended(self, output: Output, row: Row) -> None:
        """Count a request that ended; ``row`` has not taken the last news yet."""
        taken, tokens = time.monotonic() - row.job.arrival, len(row.ids) + len(output.ids) * (not row.done)
        self.front_tokens.inc(tokens)
        if output.finish in ("stop", "length"):
            self._e2e.observe(taken)
            self._output.observe(tokens)
            self._prompt.observe(len(row.prompt))
            if tokens > 1 and row.first_token:
                self._tpot.observe((time.monotonic() - row.first_token) / (tokens - 1))

    def ignored(self, field: str) -> None:
        """Count a field that --lenient-fields let through; names that clients invent share one label."""
        self._ignored.labels(field if field in ChatRequest.model_fields else "other").inc()

    def text(self) -> bytes:
        """Return the metrics as Prometheus reads them."""
        return generate_latest(self)

    def collect(self) -> Iterator[core.Metric]:
        """Yield every family, and the aliases."""
        about = "Of the front's loop, collector, news"
        stood = family_of(core.CounterMetricFamily, "front_stalls", about, "where", self.stalls.counts)
        for family in (*self._own.collect(), stood, *self._engine()):
            # When a series began is a second gauge for each, which nobody reads.
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
            own = family.name.removeprefix("fastlayers_")
            for theirs, prefix in zip(ALIASES.get(own, ("", "")), ("vllm", "sglang"), strict=True):
                if theirs and self._compat in (prefix, "both"):
                    yield self._alias(family, prefix, theirs)

    def _alias(self, family: core.Metric, prefix: str, name: str) -> core.Metric:
        alias = core.Metric(f"{prefix}:{name}", family.documentation, family.type)
        keep, called = LABELS.get(name, ("", ""))
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            labels = {"model_name": self._model} | ({"engine": "0"} if prefix == "vllm" else {})
            labels |= {"le": sample.labels["le"]} if "le" in sample.labels else {}
            labels |= {called: sample.labels[keep]} if keep else {}
            key = suffix, tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
        for (suffix, pairs), value in sums.items():
            alias.add_sample(alias.name + suffix, dict(pairs), value)
        return alias

    def _engine(self) -> Iterator[core.Metric]:
        link = self.link
        if link is None:
            return
        yield core.GaugeMetricFamily("fastlayers_ready", "1 while requests are taken", link.phase == "serving")
        if link.info is not None:
            about = {"model": self._model, "model_type": link.info.model_type, "device": link.info.device}
            yield core.InfoMetricFamily("fastlayers_engine", "What runs", about)
            took = link.info.startup_seconds
            yield family_of(core.GaugeMetricFamily, "startup_seconds", "Of each phase", "phase", took)
        if link.stats is not None:
            yield from of_stats(link.stats)


def family_of(kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
    """Return a family with a sample for each value of its label."""
    made = kind(f"fastlayers_{name}", text, labels=[label])
    for key, value in values.items():
        made.add_metric([key], value)
    return made


def of_stats(stats: Stats) -> Iterator[core.Metric]:
    """Yield the families of an engine's Stats."""
    yield core.GaugeMetricFamily("fastlayers_requests_running", "Requests with a slot", stats.running)
    yield core.GaugeMetricFamily("fastlayers_requests_waiting", "Requests without one", stats.waiting)
    yield core.GaugeMetricFamily("fastlayers_waiting_tokens", "Prompt tokens of the waiting ones", stats.waiting_tokens)
    yield family_of(core.GaugeMetricFamily, "pages", "Pages of the cache", "state", stats.pages)
    used = stats.pages.get("private", 0) + stats.pages.get("locked", 0)
    usage = used / max(1, sum(stats.pages.values()))
    yield core.GaugeMetricFamily("fastlayers_kv_usage_ratio", "Share of pages that requests hold", usage)
    for name, label in COUNTERS.items():
        text, totals = "Since the engine's start", stats.counters.get(name, {})
        if label:
            yield family_of(core.CounterMetricFamily, name, text, label, totals)
        else:
            yield core.CounterMetricFamily(f"fastlayers_{name}", text, totals.get("", 0.0))
    for name, bounds in HISTOGRAMS.items():
        counts, total = stats.histograms.get(name, ((0,) * (len(bounds) + 1), 0.0))
        running, buckets = 0, []
        for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
            running += count
            buckets.append((bound, running))
        yield core.HistogramMetricFamily(f"fastlayers_{name}", "Of the engine", buckets, total)
