"""``fastlayers bench serve | startup | latency | throughput``; what they need is imported when one runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import typer

from fastlayers.errors import ArgumentError
from fastlayers_server.flags import given_values, parser_of, typed

# Flags of vLLM's benchmarks that we lack, and why.
NEVER = {
    "--dataset": "its new name is --dataset-name",
    "--sharegpt-output-len": "--dataset-name file takes an output_len a line",
    "--hf-output-len": "no data set is downloaded; --dataset-name file takes yours",
    "--hf-name": "no data set is downloaded; --dataset-name file takes yours",
    "--use-beam-search": "beam search is not served",
    "--trust-remote-code": "no code of a model's folder is ever run",
    "--profile": "POST /start_profile and /stop_profile",
    "--logprobs": "--extra-body '{\"logprobs\": 1}'",
    "--lora-modules": "adapters are not served",
}


def _measured(
    name: str, kind: Any, work: Callable[[Any], Coroutine[Any, Any, dict[str, Any]]], arguments: Sequence[str],
    defaults: dict[str, Any], told: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[Any, dict[str, Any], bool]:  # fmt: skip
    """Return a command's settings, what was measured, and whether people are to be shown it; else it was printed."""
    parser = parser_of(kind, f"fastlayers bench {name}", (kind.__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    values = given_values(parser, arguments, NEVER)
    as_json = values.pop("json")
    config = typed(kind, f"bench {name}", defaults | values)
    try:
        import uvloop

        found = uvloop.run(work(config))
    except ValueError as error:
        raise ArgumentError(f"bench {name}", "the run", f"not done: {error}", "a server that answers") from error
    if as_json:
        print(json.dumps(told(found)))
    return config, found, not as_json


def _exit_code(found: dict[str, Any]) -> int:
    """Return 1 where a request failed, or where the figures are this client's own, which is said; else 0."""
    valid, lag = found["fastlayers"]["valid"], found["fastlayers"]["client_lag_p99_ms"]
    if not valid:
        print(f"INVALID: this client was late by {lag:.1f} ms (p99); use a faster machine", file=sys.stderr)
    return 0 if valid and not found["failed"] else 1


def bench_serve(arguments: Sequence[str]) -> int:
    """Load a server and print what vLLM's benchmark prints; the exit code is 1 if a request failed, or this client."""
    from fastlayers_server.bench import serve
    from fastlayers_server.bench.report import text

    config, found, shown = _measured("serve", serve.BenchConfig, serve.measured, arguments, {})
    ours = found["fastlayers"]
    if shown:
        print(text(found, config.percentile_metrics, config.percentiles))
        if len(ours["runs"]) > 1:
            print(f"output tok/s of each run: {', '.join(f'{v:.1f}' for v in ours['runs'])}; the median run is shown")
        for error in ours["first_errors"]:
            print(f"failed: {error}")
    if config.save_result:
        rate = found["request_rate"]
        stem = f"{config.backend}-{rate}qps-{Path(ours['model']).name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "api_key"} | {"request_rate": rate}
        target = Path(config.result_dir) / (config.result_filename or stem)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(found | {"flags": settings}, indent=2) + "\n")
    return _exit_code(found)


def bench_startup(arguments: Sequence[str]) -> int:
    """Start a server several times and print when it listened, was ready, and gave its first token."""
    from fastlayers_server.bench import startup

    config, found, shown = _measured("startup", startup.StartupConfig, startup.measured, arguments, {})
    for name, seconds in found["median_s"].items() if shown else ():
        print(f"{name + ':':<40} {seconds:<10.2f} s (median of {config.iters})")
    return 0


def bench_latency(arguments: Sequence[str]) -> int:
    """Send one batch of requests at once, several times, and print how long a batch takes."""
    defaults = {"num_prompts": 8, "random_input_len": 32, "random_output_len": 128, "num_runs": 10, "ignore_eos": True}
    import numpy as np

    from fastlayers_server.bench import serve

    async def work(config: serve.BenchConfig) -> dict[str, Any]:
        times: list[float] = []
        for run in range(config.num_runs):
            # Other prompts each time: a cached prefix would be measured otherwise.
            again = dataclasses.replace(config, num_runs=1, seed=config.seed + run, num_warmups=-1 if run == 0 else 0)
            found = await serve.measured(again)
            if found["failed"]:
                raise ValueError(f"{found['failed']} requests failed: {found['fastlayers']['first_errors'][0]}")
            times.append(found["duration"])
        return {"avg_latency": float(np.mean(times)), "latencies": times,
                "percentiles": {str(p): float(np.percentile(times, p)) for p in (10, 25, 50, 75, 90, 99)}}  # fmt: skip

    _, found, shown = _measured("latency", serve.BenchConfig, work, arguments, defaults)
    if shown:
        print(f"Avg latency: {found['avg_latency']} seconds")
        for percentile, value in found["percentiles"].items():
            print(f"{percentile}% percentile latency: {value} seconds")
    return 0


def bench_throughput(arguments: Sequence[str]) -> int:
    """Send all requests at once and print requests and tokens a second."""
    from fastlayers_server.bench import serve

    def short(found: dict[str, Any]) -> dict[str, Any]:
        return {
            "elapsed_time": found["duration"], "num_requests": found["completed"],
            "total_num_tokens": found["total_input_tokens"] + found["total_output_tokens"],
            "requests_per_second": found["request_throughput"], "tokens_per_second": found["total_token_throughput"],
        }  # fmt: skip

    _, found, shown = _measured("throughput", serve.BenchConfig, serve.measured, arguments, {"ignore_eos": True}, short)
    if shown:
        print(
            f"Throughput: {found['request_throughput']:.2f} requests/s, {found['total_token_throughput']:.2f} total "
            f"tokens/s, {found['output_throughput']:.2f} output tokens/s"
        )
        print(f"Total num prompt tokens:  {found['total_input_tokens']}")
        print(f"Total num output tokens:  {found['total_output_tokens']}")
    return _exit_code(found)


COMMANDS = {"serve": bench_serve, "startup": bench_startup, "latency": bench_latency, "throughput": bench_throughput}


def register(bench: typer.Typer) -> None:
    """Add the commands to ``fastlayers bench``; their flags are parsed here, not by typer."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, run in COMMANDS.items():
        bench.command(name, context_settings=settings, add_help_option=False)(_command(run))


def _command(run: Any) -> Any:
    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args))

    command.__doc__ = run.__doc__
    return command
