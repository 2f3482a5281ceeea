"""Load on a server: arrivals, concurrency, warm-ups, repeats; and the client's own health."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from fastlayers.errors import ArgumentError
from fastlayers_server.bench import datasets
from fastlayers_server.bench.client import Answer, Ask, Target, send
from fastlayers_server.bench.report import TITLES, detail, figures
from fastlayers_server.flags import flag
from fastlayers_server.stalls import Collections, Stalls, freeze, thaw, watch_loop

BACKENDS = ("openai", "vllm", "sglang", "openai-chat")
MAX_LAG, LOOK_SECONDS = 0.005, 0.01
ANY, LEAST, RATE = (0, 2**31), (1, 2**31), (1e-3, float("inf"))  # bounds of flags
SILENT_SECONDS = 2.0  # so long a server that is not ready is waited for without a word


@dataclass(frozen=True)
class BenchConfig:
    """Flags of ``fastlayers bench serve``, ``latency`` and ``throughput``; most are vLLM's."""

    backend: str = flag("openai", "openai, vllm, sglang: completions; openai-chat: chats", choices=BACKENDS)
    base_url: str = flag("", "default: http://HOST:PORT")
    host: str = flag("127.0.0.1", "of the server")
    port: int = flag(8000, "of the server")
    endpoint: str = flag("", "default: the backend's own")
    api_key: str = flag("", "key that the server wants", secret=True)
    model: str = flag("", "default: the first that the server lists")
    tokenizer: str = flag("", "folder of a tokenizer: for text prompts, and where the server does not tell its vocabulary")  # fmt: skip  # noqa: E501
    dataset_name: str = flag("random", "kind of prompts", choices=datasets.NAMES)
    dataset_path: str = flag("", "JSONL of --dataset-name file")
    random_input_len: int = flag(1024, "prompt tokens", "--input-len", within=LEAST)
    random_output_len: int = flag(128, "answer tokens", "--output-len", within=LEAST)
    random_range_ratio: float = flag(0.0, "lengths vary by this share, both ways", within=(0, 1))
    random_prefix_len: int = flag(0, "tokens that all prompts begin with; of 'prefix': of each group", within=ANY)
    prefix_groups: int = flag(1, "of 'prefix': how many beginnings there are", within=LEAST)
    num_prompts: int = flag(1000, "requests of a run", within=LEAST)
    request_rate: float = flag(float("inf"), "arrivals a second; inf: all at once", within=RATE)
    burstiness: float = flag(1.0, "1: Poisson arrivals; less: burstier", within=RATE)
    max_concurrency: int = flag(0, "requests at once; 0: any", within=ANY)
    num_warmups: int = flag(-1, "requests before the run; -1: twice the concurrency, at least 16")
    num_runs: int = flag(1, "runs; their medians are printed", within=LEAST)
    temperature: float = flag(0.0, "of every request")
    seed: int = flag(0, "of prompts and arrivals")
    ignore_eos: bool = flag(False, "answers are as long as asked for")
    extra_body: str = flag("", "JSON that every body gets besides")
    goodput: tuple[str, ...] = flag((), "NAME:MS that a good request keeps, as ttft:200,tpot:30")
    percentile_metrics: tuple[str, ...] = flag(("ttft", "tpot", "itl"), "of ttft, tpot, itl, e2el")
    metric_percentiles: tuple[str, ...] = flag(("99",), "percentiles that are printed")
    ramp_up_strategy: str = flag("none", "how the rate grows", choices=("none", "linear", "exponential"))
    ramp_up_start_rps: float = flag(1.0, "where it begins", within=RATE)
    ramp_up_end_rps: float = flag(10.0, "where it ends", within=RATE)
    save_result: bool = flag(False, "write a JSON file")
    save_detailed: bool = flag(False, "with each request's times")
    result_dir: str = flag(".", "folder of that file")
    result_filename: str = flag("", "default: from backend, rate, model and time")
    server_note: str = flag("", "what the server was started with, for the file")
    flush_cache: bool = flag(False, "empty the server's prefix cache before each run (admin key as --api-key)")
    connect_timeout: float = flag(5.0, "seconds to wait for a server that listens")
    ready_timeout: float = flag(600.0, "seconds to wait until one that listens is ready")

    def __post_init__(self) -> None:
        """Refuse values that the command line's types do not tell, before a server is asked for anything."""
        folder, file = Path(self.tokenizer), Path(self.dataset_path)
        for name, read, accepted in (
            ("extra_body", lambda: isinstance(self.extra, dict), "a JSON object"),
            ("goodput", lambda: {*self.limits} <= {*TITLES} - {"itl"}, "NAME:MS of ttft, tpot, e2el"),
            ("percentile_metrics", lambda: {*self.percentile_metrics} <= {*TITLES}, ", ".join(TITLES)),
            ("metric_percentiles", lambda: all(0 <= each <= 100 for each in self.percentiles), "numbers from 0 to 100"),
            ("tokenizer", lambda: not self.tokenizer or (folder / "tokenizer.json").is_file(),
             "a folder with a tokenizer.json"),
            ("dataset_path", lambda: self.dataset_name != "file" or file.is_file(), "a JSONL file"),
        ):  # fmt: skip
            try:
                good = read()
            except ValueError:
                good = False
            if not good:
                raise ArgumentError("bench", f"--{name.replace('_', '-')}", repr(getattr(self, name)), accepted)

    @property
    def extra(self) -> Any:
        """What every body gets besides."""
        return json.loads(self.extra_body or "{}")

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds that a good request keeps, by metric."""
        return {name: float(ms) for name, _, ms in (each.partition(":") for each in self.goodput)}

    @property
    def percentiles(self) -> list[float]:
        """Those of :attr:`metric_percentiles`."""
        return [float(each) for each in self.metric_percentiles]

    @property
    def url(self) -> str:
        """Address of the server."""
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def chat(self) -> bool:
        """Whether requests are chats."""
        return self.backend == "openai-chat"


def arrivals(config: BenchConfig, count: int) -> list[float]:
    """Return when each request is sent, in seconds from the start, as vLLM schedules them."""
    draw = np.random.default_rng(config.seed)
    if config.ramp_up_strategy != "none":
        share = np.arange(count) / max(1, count - 1)
        first, last = config.ramp_up_start_rps, config.ramp_up_end_rps
        linear = config.ramp_up_strategy == "linear"
        rates = first + (last - first) * share if linear else first * (last / first) ** share
    elif config.request_rate == float("inf"):
        return [0.0] * count
    else:
        rates = np.full(count, config.request_rate)
    gaps = draw.gamma(config.burstiness, 1.0 / (rates * config.burstiness))
    times = np.cumsum(gaps)
    if config.ramp_up_strategy == "none":
        # The last arrival is where the rate says, so that two runs of one rate take as long.
        times *= count / config.request_rate / times[-1]
    return (times - times[0]).tolist()


async def prepared(session: aiohttp.ClientSession, config: BenchConfig) -> tuple[Target, list[Ask], dict[str, Any]]:
    """Wait for the server, ask what it serves, make the prompts; return also what it says of itself.

    Raises
    ------
    ValueError
        The server is not there, or does not say what is needed.
    """
    served = await _when_ready(session, config)
    async with session.get(f"{config.url}/server_info") as response:
        info = await response.json() if response.status == 200 else {}
    engine = info.get("engine") or {}
    endpoint = config.endpoint or ("/v1/chat/completions" if config.chat else "/v1/completions")
    fields: dict[str, Any] = {"temperature": config.temperature}
    fields |= {"ignore_eos": True} if config.ignore_eos else {}
    target = Target(config.url + endpoint, config.model or served, config.chat, fields | config.extra)
    about = {"server": info.get("version"), "config": info.get("config"), "device": engine.get("device")}
    return target, _asks(config, engine.get("vocab_size", 0)), {"model": target.model, **about}


async def _when_ready(session: aiohttp.ClientSession, config: BenchConfig) -> str:
    begin, why, told, listens = time.monotonic(), "", False, False
    while time.monotonic() < begin + config.ready_timeout:
        if not told and time.monotonic() > begin + SILENT_SECONDS:
            told = True
            print(f"waiting for {config.url}, {config.ready_timeout:g} s at most: {why}", file=sys.stderr)
        try:
            async with session.get(f"{config.url}/v1/models") as response:
                listens = True
                if response.status == 200:
                    name = (await response.json())["data"][0]["id"]
                    async with session.get(f"{config.url}/ready") as ready:
                        # Servers without the route are ready when they list models.
                        if ready.status != 503:
                            return str(name)
                        why = await ready.text()
                elif response.status in (401, 403):
                    raise ValueError(f"{config.url} wants another --api-key")
                else:
                    why = f"status {response.status}"
        except aiohttp.ClientError as error:
            why = f"{type(error).__name__}: {error}"
            if not listens and time.monotonic() > begin + config.connect_timeout:
                waited = f"{config.connect_timeout:g} s (--connect-timeout)"
                raise ValueError(f"no server listens at {config.url}, waited {waited}: {why}") from error
        await asyncio.sleep(0.2)
    raise ValueError(f"{config.url} is not ready after {config.ready_timeout:g} s: {why}")


def _asks(config: BenchConfig, vocabulary: int) -> list[Ask]:
    tokenizer: Any = None
    if config.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(config.tokenizer) / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab_size(with_added_tokens=False) or vocabulary
    if config.dataset_name != "file" and not vocabulary:
        raise ValueError("the server does not tell its vocabulary; --tokenizer names a folder that does")
    sizes = config.random_input_len, config.random_output_len
    if config.dataset_name == "random":
        asks = datasets.random_asks(
            config.num_prompts, *sizes, vocabulary, config.seed, range_ratio=config.random_range_ratio,
            prefix_len=config.random_prefix_len,
        )  # fmt: skip
    elif config.dataset_name == "sharegpt-like":
        asks = datasets.chat_like(config.num_prompts, vocabulary, config.seed)
    elif config.dataset_name == "prefix":
        asks = datasets.shared_prefixes(
            config.num_prompts, config.prefix_groups, config.random_prefix_len, *sizes, vocabulary, config.seed
        )
    else:
        length = (lambda t: len(tokenizer.encode(t).ids)) if tokenizer else len
        asks = datasets.from_file(Path(config.dataset_path), config.num_prompts, sizes[1], length)
    if config.chat:
        if tokenizer is None and any(isinstance(a.prompt, list) for a in asks):
            raise ValueError("chats are text: --tokenizer names the folder that spells the ids")
        asks = [Ask(a.prompt if isinstance(a.prompt, str) else tokenizer.decode(a.prompt), a.prompt_len, a.output_len) for a in asks]  # fmt: skip  # noqa: E501
    return asks


async def load(
    session: aiohttp.ClientSession, target: Target, asks: Sequence[Ask], times: Sequence[float], concurrency: int
) -> tuple[list[Answer], float]:
    """Send every request at its time; return the answers and how long all took."""
    places = asyncio.Semaphore(concurrency or len(asks) or 1)

    async def one(ask: Ask, body: bytes) -> Answer:
        async with places:
            return await send(session, target, ask, body)

    # Encoded beforehand: of a burst the last ones would wait for the client.
    bodies = [target.body(ask) for ask in asks]
    begin, tasks = time.perf_counter(), []
    for ask, body, at in zip(asks, bodies, times, strict=True):
        wait = begin + at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(ask, body)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - begin


async def measured(config: BenchConfig) -> dict[str, Any]:
    """Run the benchmark; return the figures of the median run, with what they depend on."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=6 * 3600)
    key = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20, headers=key) as session:
        target, asks, about = await prepared(session, config)
        warmups = config.num_warmups if config.num_warmups >= 0 else max(16, 2 * config.max_concurrency)
        warm, _ = await load(session, target, [asks[i % len(asks)] for i in range(warmups)], [0.0] * warmups, config.max_concurrency or 64)  # fmt: skip  # noqa: E501
        broken = [a.error for a in warm if a.error]
        if warm and len(broken) == len(warm):
            raise ValueError(f"every warm-up failed: {broken[0]}")
        runs = []
        for _ in range(config.num_runs):
            if config.flush_cache:
                async with session.post(f"{config.url}/flush_cache") as flushed:
                    if flushed.status != 200:
                        raise ValueError(f"/flush_cache answers {flushed.status}: {await flushed.text()}")
            runs.append(await _one_run(session, config, target, asks))
    speeds = [run["output_throughput"] for run in runs]
    chosen = sorted(runs, key=lambda run: run["output_throughput"])[(len(runs) - 1) // 2]
    chosen["fastlayers"] |= about | {
        "runs": speeds, "spread": (max(speeds) - min(speeds)) / max(statistics.median(speeds), 1e-9),
        "seed": config.seed, "dataset": config.dataset_name, "dataset_digest": datasets.digest_of(asks),
        "distinct_prompts": datasets.distinct(asks), "server_note": config.server_note,
    }  # fmt: skip
    return chosen


async def _one_run(
    session: aiohttp.ClientSession, config: BenchConfig, target: Target, asks: list[Ask]
) -> dict[str, Any]:
    lags, stalls = [0.0], Stalls()

    def late(seconds: float) -> None:
        lags.append(seconds)
        stalls.late("client's loop", seconds)

    freeze()  # prompts and libraries would be walked while answers are timed
    cpu = time.process_time()
    watching = asyncio.ensure_future(watch_loop(late, LOOK_SECONDS))
    try:
        with Collections(lambda generation, seconds: stalls.note("client's collector", seconds, generation=generation)):
            answers, duration = await load(session, target, asks, arrivals(config, len(asks)), config.max_concurrency)
    finally:
        watching.cancel()
        thaw()
    found = figures(
        answers, duration, percentiles=config.percentiles, goodput=config.limits,
        max_concurrency=config.max_concurrency, request_rate=config.request_rate,
    )  # fmt: skip
    usual = float(np.percentile(lags, 99))
    found["fastlayers"] = {
        "client_cpu_share": (time.process_time() - cpu) / duration, "client_lag_p99_ms": usual * 1e3,
        "client_lag_max_ms": max(lags) * 1e3, "client_stalls": list(stalls.last), "valid": usual <= MAX_LAG,
        "first_errors": [a.error for a in answers if a.error][:3],
    }  # fmt: skip
    return found | (detail(answers) if config.save_detailed else {})
