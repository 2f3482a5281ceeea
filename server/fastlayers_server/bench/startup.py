"""How long a server takes from its process's start to its first token, phase by phase."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from fastlayers_server.flags import flag


@dataclass(frozen=True)
class StartupConfig:
    """Flags of ``fastlayers bench startup``."""

    command: str = flag("", "what starts the server, as 'fastlayers serve tiny --port 8001'")
    base_url: str = flag("http://127.0.0.1:8000", "where it will be")
    api_key: str = flag("", "key that the server wants", secret=True)
    iters: int = flag(3, "starts; the median is printed", within=(1, 1000))
    timeout: float = flag(900.0, "seconds of one start")


async def one_start(config: StartupConfig) -> dict[str, float]:
    """Start, wait until ready, draw one token, end the process; return the seconds of each.

    Raises
    ------
    ValueError
        The process ended, or was not ready in time.
    """
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    begin = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*shlex.split(config.command))
    found: dict[str, float] = {}
    phase = ""
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            while "ready" not in found:
                taken = time.perf_counter() - begin
                if process.returncode is not None:
                    raise ValueError(f"the server ended with exit code {process.returncode} after {taken:.1f} s")
                if taken > config.timeout:
                    raise ValueError(f"not ready after {config.timeout:g} s; its last phase: {phase or 'none'}")
                try:
                    async with session.get(f"{config.base_url}/ready") as response:
                        now = (await response.json()).get("phase", "") if response.content_type.endswith("json") else ""
                        found.setdefault("listens", time.perf_counter() - begin)
                        if response.status == 200:
                            found["ready"] = time.perf_counter() - begin
                        elif now != phase:
                            phase = now
                            found[f"phase {phase}"] = time.perf_counter() - begin
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)
            async with session.get(f"{config.base_url}/v1/models") as response:
                name = (await response.json())["data"][0]["id"]
            body = {"model": name, "prompt": [3], "max_tokens": 1, "temperature": 0}
            async with session.post(f"{config.base_url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise ValueError(f"the first request failed: {await response.text()}")
            found["first token"] = time.perf_counter() - begin
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()
    return found


async def measured(config: StartupConfig) -> dict[str, Any]:
    """Return the medians of several starts, and every one."""
    program = next(iter(shlex.split(config.command)), "")
    if shutil.which(program) is None:
        missing = f"no program {program!r} is found on PATH to start the server"
        raise ValueError(f"--command is {config.command!r}; {missing}")
    runs = [await one_start(config) for _ in range(config.iters)]
    names = {name: None for run in runs for name in run}
    medians = {name: statistics.median([run[name] for run in runs if name in run]) for name in names}
    return {"command": config.command, "median_s": medians, "runs": runs}
