"""Time ``fastlayers serve`` over HTTP: ``python benchmarks/serve_rows.py MODEL … [--seconds 150] [--out FILE]``.

A server of each model (random weights at real dimensions, ``--load-format dummy``) and ``fastlayers bench serve``, the
client, as processes of their own; prompts of 512 tokens and answers of 128, all distinct, unless a row says otherwise.
Rows: seconds to ``/ready``, once more if kernels had to be compiled; 32 and 256 prompts at once; one at a time; a
shared prefix of 2,048 tokens, beside the same without the cache; Poisson arrivals at 70 % of what 256 at once reached,
with what their first tokens waited for, and what stood for a tenth of a second: in the engine, the front, the client,
or the machine. One JSON line a row; the first describes the run. ``--switches``: instead of these, a server as it is by
default and one without each of :data:`SWITCHES`, or with each of :data:`ADDED` that is named, under the loads that
ought to tell; a row says what was measured with it and without.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import profiles
import torch
from machine import Machine, touch

from fastlayers.device import as_device
from fastlayers.runtime.kernel_cache import STORES, ensure
from fastlayers.tuning.provenance import loop_ms, provenance

CLI = [sys.executable, "-m", "fastlayers_server"]
PROMPT, ANSWER = 512, 128
PREFIX, MORE, SHARED = 2048, 128, 64
LOAD = 0.7
# What is on by default: the flags of a server without it, the loads of LOADS that ought to tell.
SWITCHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "overlap": (("--disable-overlap-schedule",), ("at once", "one")),
    "CUDA graphs": (("--disable-cuda-graph",), ("at once", "one")),
    "prefix cache": (("--no-prefix-cache",), ("at once", "shared prefix")),
    "chunks": (("--itl-target-ms", "0"), ("at once", "arrivals")),
}
# What is off by default, and may cost next to nothing where it does not help.
ADDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lookup": (("--speculative-algorithm", "ngram"), ("at once", "one", "shared prefix", "arrivals")),
}
# A burst, and the longest gaps of ten seconds, differ by more between two runs of one server than what is off by
# default may cost: such loads come so many times, with other prompts, and the median run counts.
REPEATS = {"shared prefix": 12, "arrivals": 2}
# What is told of a load: the first is what a switch is for. A burst's first tokens come with two steps or three: their
# median jumps from the end of one to that of another, where their mean moves by a share.
LOADS = {
    "at once": ("output_throughput", "median_ttft_ms", "median_tpot_ms"),
    "one": ("median_tpot_ms", "median_ttft_ms"),
    "shared prefix": ("mean_ttft_ms", "median_ttft_ms", "output_throughput"),
    "arrivals": ("p99_itl_ms", "median_itl_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput"),
}
Row = dict[str, Any]


def get(port: int, path: str) -> str:
    """Return what the server answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as response:
        text: str = response.read().decode()
    return text


class Server:
    """A server of one model on a free port, from its start."""

    def __init__(self, model: str, log: Path, more: Sequence[str] = ()) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        weights = [] if model == "tiny" else ["--load-format", "dummy", "--seed", "0"]
        flags = ["--open-admin", "--port", str(self.port), "--max-model-len", "4096" if weights else "512", *more]
        self.begin = time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen([*CLI, "serve", model, *weights, *flags], stdout=file, stderr=file)

    def ready(self, end: float) -> Row:
        """Wait until it answers, its process ends, or the time has passed; return seconds and when phases were seen."""
        phases: dict[str, float] = {}
        while time.monotonic() < end and self.process.poll() is None:
            passed = round(time.monotonic() - self.begin, 2)
            try:
                get(self.port, "/ready")
                return {"ready_s": passed, "phases": phases}
            except urllib.error.HTTPError as error:
                phases.setdefault(json.loads(error.read()).get("phase", "?"), passed)
            except OSError:
                pass
            time.sleep(0.05)
        return {"ready_s": None, "phases": phases, "exit_code": self.process.poll()}

    def parts(self) -> list[list[Any]]:
        """Return what its engine spent the start on, in seconds."""
        parts: list[list[Any]] = json.loads(get(self.port, "/explain"))["executor"]["start"]
        return parts

    def compiled(self) -> dict[str, float]:
        """Return the server's own counts of uncaptured steps and compiled kernels since it is ready."""
        names = "fastlayers_eager_steps_total", "fastlayers_jit_compiles_total", "fastlayers_preemptions_total"
        lines = [line.rpartition(" ") for line in get(self.port, "/metrics").splitlines() if line.startswith(names)]
        return {name: float(value) for name, _, value in lines}

    def generated(self) -> float:
        """Return how many tokens it has generated."""
        name = "fastlayers_generation_tokens_total"
        return sum(
            float(line.rpartition(" ")[2]) for line in get(self.port, "/metrics").splitlines() if line.startswith(name)
        )

    def post(self, path: str) -> None:
        """Ask for something to be done."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="POST")
        with urllib.request.urlopen(asked, timeout=60.0) as response:
            response.read()

    def stop(self) -> None:
        """End it as an operator would."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def bench(port: int, end: float, *flags: object) -> Row:
    """Run the client; return its document, or why there is none."""
    command = [*CLI, "bench", "serve", "--port", str(port), "--json", "--ignore-eos", *map(str, flags)]
    left = end - time.monotonic()
    if left < 4:
        return {"skipped": "no time is left"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done in the {left:.0f} s that were left"}
    lines = done.stdout.splitlines()
    found: Row = json.loads(lines[-1]) if lines else {"failed": 1}
    # Of a client that was too slow the document is kept: it says so.
    return {"failed": done.stderr[-400:]} if found["failed"] else found


def short(found: Row, *names: str) -> Row:
    """Return what a row keeps of a client's document."""
    if "output_throughput" not in found:
        return found
    about = found["fastlayers"]
    kept = {name: round(found[name], 3) for name in ("output_throughput", "request_throughput", "duration", *names)}
    return kept | {
        "failed": found["failed"], "runs": [round(value, 1) for value in about["runs"]], "valid": about["valid"],
        "client_cpu_share": round(about["client_cpu_share"], 3),
        "client_lag_p99_ms": round(about["client_lag_p99_ms"], 2),
        "client_lag_max_ms": round(about["client_lag_max_ms"], 2),
    }  # fmt: skip


def rows_of(port: int, end: float, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a server that is ready."""
    small = options.small
    prompt, answer, prefix, more = (64, 16, 128, 32) if small else (PROMPT, ANSWER, PREFIX, MORE)
    few, many, shared = (4, 16, 8) if small else (32, 256, SHARED)
    warm, usual = ("--num-warmups", 4), ("--random-input-len", prompt, "--random-output-len", answer, "--flush-cache")
    found = bench(port, end, *usual, "--num-prompts", few, "--num-runs", 3, *warm)
    yield {"row": "at once", "prompts": few, **short(found, "median_ttft_ms", "median_tpot_ms")}
    found = bench(port, end, *usual, "--num-prompts", many, "--num-runs", 3, *warm, "--seed", 1)
    yield {"row": "at once", "prompts": many, **short(found, "median_ttft_ms", "median_tpot_ms", "p99_itl_ms")}
    if options.at_once:
        return
    rate = found.get("request_throughput", 0.0) * LOAD
    one = "--random-input-len", prompt // 4, "--random-output-len", answer, "--num-prompts", 6, "--max-concurrency", 1
    found = bench(port, end, *one, "--num-warmups", 1, "--seed", 2)
    yield {"row": "one", "prompt": prompt // 4, **short(found, "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms")}
    together = "--num-prompts", shared, "--random-output-len", 16, "--seed", 3
    cold = bench(port, end, "--random-input-len", prefix + more, *together, *warm, "--flush-cache")
    kind = "--dataset-name", "prefix", "--random-prefix-len", prefix, "--random-input-len", more
    hits = bench(port, end, *kind, *together, "--num-warmups", 1)
    row: Row = {
        "row": "prefix", "prompts": shared,
        "cold": short(cold, "median_ttft_ms"), "shared": short(hits, "median_ttft_ms"),
    }  # fmt: skip
    if "median_ttft_ms" in cold and "median_ttft_ms" in hits:
        row["ttft_ratio"] = round(hits["median_ttft_ms"] / cold["median_ttft_ms"], 3)
        row["cached_share"] = round(hits["cached_share"], 4)
    yield row
    count = min(options.arrivals, int(rate * (end - time.monotonic() - 12)))
    if count < options.arrivals and not options.small:
        yield {"row": "arrivals", "left_out": f"there was time for {max(0, count)} of {options.arrivals}"}
    elif count >= 4:
        flags = "--num-prompts", count, "--request-rate", round(rate, 2), "--seed", 4, "--metric-percentiles", "99,100"
        before, stood = waits(port), stalls(port)
        with Machine() as machine:
            found = bench(port, end, *usual, *flags, *warm)
        names = "median_itl_ms", "p99_itl_ms", "p100_itl_ms", "median_ttft_ms", "p99_ttft_ms", "mean_ttft_ms"
        spent = {name: [b - a for a, b in zip(before[name], each, strict=True)] for name, each in waits(port).items()}
        means = {name: round(1e3 * seconds / max(1.0, number), 2) for name, (seconds, number) in spent.items()}
        yield {
            "row": "arrivals", "rate": round(rate, 2), "requests": count, **short(found, *names), "mean_ms": means,
            "stalls": {name: number - stood[name] for name, number in stalls(port).items()},
            "stood": standing(port, found, machine), "machine": machine.told(),
        }  # fmt: skip


def waits(port: int) -> dict[str, list[float]]:
    """Return what first tokens waited for so far, in seconds and how often.

    In the engine until a step was planned (queue), then until it had ended (prefill); all of it as the front saw it.
    """
    lines = (line.rpartition(" ") for line in get(port, "/metrics").splitlines())
    values = {name: float(value) for name, _, value in lines if name.endswith(("_seconds_sum", "_seconds_count"))}
    names = "queue", "prefill", "ttft"
    return {name: [values[f"fastlayers_{name}_seconds_{what}"] for what in ("sum", "count")] for name in names}


def stalls(port: int) -> dict[str, float]:
    """Return what took longer than 125 ms so far: ticks of the engine, gaps the front saw, its collector's pauses.

    A gap that no tick explains stood between the two processes, or in the front.
    """
    found = dict.fromkeys(("tick", "itl", "gc_pause"), 0.0)
    for line in get(port, "/metrics").splitlines():
        series, _, value = line.rpartition(" ")
        name, is_bucket, labels = series.removeprefix("fastlayers_").partition("_seconds_bucket")
        if is_bucket and name in found and ('le="+Inf"' in labels or 'le="0.125"' in labels):
            found[name] += float(value) * (1 if "Inf" in labels else -1)
    return found


def standing(port: int, found: Row, machine: Machine) -> list[Row]:
    """Return the longest stalls of every process since the machine is watched; ``at``: seconds since then."""
    told = json.loads(get(port, "/explain"))
    of_all = {
        "engine": told.get("stalls", []), "front": told.get("front", {}).get("stalls", []),
        "client": found.get("fastlayers", {}).get("client_stalls", []), "machine": machine.stalls.last,
    }  # fmt: skip
    recent = [{"who": who} | each for who, last in of_all.items() for each in last if each["at"] >= machine.begin]
    longest = sorted(recent, key=lambda each: -each["ms"])[:12]
    return [each | {"at": round(each["at"] - machine.begin, 2)} for each in longest]


def profiled(server: Server, end: float, options: argparse.Namespace, folder: Path) -> Row:
    """Return what the first rank's device does while many requests decode, in a part of a load that is not timed."""
    prompt, answer, many = (64, 256, 4) if options.small else (PROMPT, 2 * ANSWER, 256)
    flags = "--random-input-len", prompt, "--random-output-len", answer, "--num-prompts", many, "--flush-cache"
    row: Row = {"row": "profile", "prompts": many}
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(bench, server.port, end, *flags, "--num-warmups", 0, "--seed", 5)
        # By then all prompts are cached, or nearly.
        goal = server.generated() + answer // 4 * many
        while not load.done() and server.generated() < goal:
            time.sleep(0.05)
        if load.done():
            return row | {"no_profile": f"the load was over: {load.result()}"}
        try:
            server.post("/start_profile")
            time.sleep(0.3)
            server.post("/stop_profile")
        except urllib.error.HTTPError as error:
            return row | {"no_profile": error.read().decode()[-400:]}
    return row | profiles.of_trace(max(folder.glob("*.json")))


def ranks_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return a server's flags for several ranks."""
    flags = (f"--{name.replace('_', '-')} {size}".split() for name, size in sizes_of(options).items())
    return tuple(word for flag in flags for word in flag)


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of a server's rank grid that are not one."""
    return {name: vars(options)[name] for name in ("tp", "attn_dp_size", "ep") if vars(options)[name] > 1}


def measure(model: str, options: argparse.Namespace, log: Path) -> Iterator[Row]:
    """Yield the rows of one model."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        flags = (*ranks_of(options), *(("--profile-folder", folder) if options.profile else ()))
        for again in (False, True):
            known = compiled()
            server = Server(model, log, flags)
            try:
                started = server.ready(end)
                started |= {"compiled": len(compiled() - known)}
                if started["ready_s"] is not None:
                    started["parts"] = server.parts()
                    if started["compiled"] and not (again or options.once):
                        yield {"row": "start, kernels compiled", **started}
                        continue
                yield {"row": "start", **started}
                if started["ready_s"] is not None:
                    yield from rows_of(server.port, end, options)
                    yield {"row": "since ready", **server.compiled()}
                    if options.profile:
                        yield profiled(server, end, options, Path(folder))
                return
            finally:
                server.stop()


def compiled() -> set[str]:
    """Return the kernels in all caches."""
    return {name for store in STORES.values() for name in store.kernels()}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="names that fastlayers serve knows, or tiny")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each model, its start included")
    parser.add_argument("--arrivals", type=int, default=2000, help="of these so many, or none: fewer are another load")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each attention group of a server")
    parser.add_argument("--attn-dp-size", type=int, default=1, help="attention groups")
    parser.add_argument("--ep", type=int, default=1, help="groups that split the experts")
    parser.add_argument("--at-once", action="store_true", help="only the start and the two rows of prompts at once")
    parser.add_argument("--profile", action="store_true", help="also what the first rank's decode steps are made of")
    parser.add_argument(
        "--switches", nargs="*", choices=(*SWITCHES, *ADDED), metavar="NAME",
        help="what each thing that is on by default is worth, or each that is named",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="few and short prompts, to try things out")
    parser.add_argument("--once", action="store_true", help="one start, whether or not it compiled kernels")
    parser.add_argument("--touch-gib", type=float, default=8.0, help="host memory that is touched before anything runs")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "serve_rows.log")
    parser.add_argument("--device", default="cuda", help="that the server finds; said in the first line")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = str(as_device(options.device))
    about = {"loop_ms": loop_ms(), "torch": torch.__version__, "device": device}
    head = {"command": "python " + " ".join(sys.argv), **provenance(), **about}
    ensure()
    tell(head | {"touched_s": touch(options.touch_gib)}, options.out)
    for model in options.models:
        for row in (measure if options.switches is None else switched)(model, options, options.log):
            tell({"model": model, **sizes_of(options), **row}, options.out)


def switched(model: str, options: argparse.Namespace, log: Path) -> Iterator[Row]:
    """Yield the rows of a model's server with everything that is on by default, and with each switch turned.

    What is off by default is timed in two servers by turns with two usual ones: two of a kind differ, too, by what they
    measured when they started, from which chunks follow.
    """
    end = time.monotonic() + options.seconds
    rate = 0.0
    found: dict[str, dict[str, list[Row]]] = {}  # by switch, all usual servers together, and by load
    turned = {name: (SWITCHES | ADDED)[name] for name in options.switches or SWITCHES}
    added = [name for name in turned if name in ADDED]
    servers = [("", (), tuple(LOADS)), *((name, *each) for name, each in turned.items())]
    for name, flags, loads in [*servers, *(each for each in servers if added and each[0] in ("", *added))]:
        server = Server(model, log, (*ranks_of(options), *flags))
        try:
            started = server.ready(end)
            if started["ready_s"] is None:
                yield {"row": "switch", "switch": name, **started}
                continue
            for load in loads:
                often = REPEATS.get(load, 1) if added else 1
                runs = [bench(server.port, end, *load_of(load, rate, options.small, run)) for run in range(often)]
                rate = rate or LOAD * runs[0].get("request_throughput", 0.0)
                found.setdefault(name, {}).setdefault(load, []).extend(short(run, *LOADS[load]) for run in runs)
                if name and name not in added:
                    yield side_by_side(name, load, found)
        finally:
            server.stop()
    for name in added:
        for load in found.get(name, ()) if "" in found else ():
            yield side_by_side(name, load, found)


def side_by_side(name: str, load: str, found: Mapping[str, Mapping[str, Sequence[Row]]]) -> Row:
    """Return a switch's row: the median runs of a load with and without it."""
    turned, usual = (median_of(found[server][load], LOADS[load]) for server in (name, ""))
    sides = {"on": turned, "off": usual} if name in ADDED else {"on": usual, "off": turned}
    return {"row": "switch", "switch": name, "load": load, **sides}


def median_of(rows: Sequence[Row], names: Sequence[str]) -> Row:
    """Return the row with the median of the first that is named, and of several all values; one without it as it is."""
    without = next((row for row in rows if names[0] not in row), None)
    if without is not None or len(rows) == 1:
        return without or rows[0]
    ordered = sorted(rows, key=lambda row: float(row[names[0]]))
    return ordered[(len(rows) - 1) // 2] | {"of": {name: [row[name] for row in rows] for name in names}}


def load_of(load: str, rate: float, small: bool, run: int = 0) -> tuple[object, ...]:
    """Return the client's flags for a load; ``rate``: arrivals a second; ``run``: of several, each with its prompts."""
    prompt, answer, prefix, many, seconds = (64, 16, 128, 8, 2) if small else (PROMPT, ANSWER, PREFIX, SHARED, 10)
    sizes = "--random-input-len", prompt, "--random-output-len", answer, "--num-warmups", 4
    if load == "at once":
        return (*sizes, "--num-prompts", many, "--num-runs", 3, "--flush-cache")
    if load == "one":
        return (*sizes[:4], "--num-warmups", 1, "--num-prompts", 3, "--max-concurrency", 1, "--seed", 1)
    if load == "shared prefix":
        shared = "--dataset-name", "prefix", "--random-prefix-len", prefix, "--random-input-len", prompt // 4
        return (*shared, "--random-output-len", 16, "--num-prompts", many, "--num-warmups", 1, "--seed", 20 + run)
    return (*sizes, "--num-prompts", max(4, int(rate * seconds)), "--request-rate", round(rate, 2), "--seed", 30 + run)


def tell(row: Row, out: Path | None) -> None:
    """Print a row, and append it to the file: an early end keeps what was measured."""
    print(json.dumps(row), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
