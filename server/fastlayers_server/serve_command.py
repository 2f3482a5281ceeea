"""``fastlayers serve``: from a command line to a running server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers_server import log as logs
from fastlayers_server.ranks import check_heads
from fastlayers_server.serve_config import NAMES, ServeConfig, as_json, keys_of, parse

if TYPE_CHECKING:
    from fastlayers_server.engine.client import EngineClient

log = logging.getLogger("fastlayers.serve")
MANY_FILES, OWN_FILES = 65_536, 64  # opened at most; of which so many are not connections


def resolved(config: ServeConfig, folder: Path) -> ServeConfig:
    """Return the settings with keys instead of the files that hold them, and with the name of the model."""
    return dataclasses.replace(
        config,
        served_model_name=config.served_model_name or (folder.resolve().name,),
        api_key=keys_of(config.api_key, "--api-key"),
        admin_api_key=keys_of(config.admin_api_key, "--admin-api-key"),
        # On a thread of this process the engine freezes for both.
        no_freeze_gc=config.no_freeze_gc or config.in_process,
    )


def template_of(config: ServeConfig) -> str | None:
    """Return the chat template that replaces the model's, if there is one."""
    try:
        return Path(config.chat_template).read_text("utf-8") if config.chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("serve", "--chat-template", f"{config.chat_template!r} ({error})", "a file") from error


def engine_of(config: ServeConfig, folder: Path) -> EngineClient:
    """Return the client of the engine that will serve; nothing is started yet."""
    from fastlayers_server.engine.client import engine_client
    from fastlayers_server.engine.config import EngineConfig

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    settings = EngineConfig(**values | {"model": str(folder)})
    return engine_client(settings, in_process=config.in_process)


def run(config: ServeConfig) -> int:
    """Serve until a signal or the engine's end, and return the exit code.

    Raises
    ------
    FastlayersError
        Nothing was started: the model has no folder or tokenizer, the address is taken.
    """
    begin = time.monotonic()
    logs.configure(config.log_level)
    check_texts(config)
    raise_file_limit(config.limit_concurrency)
    config = dataclasses.replace(config, profile_folder=profile_folder(config.profile_folder))
    # Until the server drains on it, a signal ends the start like any error: nothing stays behind.
    leaving = _Leaving()
    before = {number: signal.signal(number, leaving) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if config.speculative_draft_model and config.load_format != "dummy":
            model_folder(dataclasses.replace(config, model=config.speculative_draft_model))
        folder = model_folder(config)
        if config.tp > 1:
            from fastlayers_models.checkpoint import read_json

            check_heads("serve", config.tp, known(config) or read_json(folder / "config.json"))
        return _run(config, folder, begin, leaving)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_file_limit(connections: int) -> None:
    """Let this process open as many files as it may: a shell's usual limit is 1,024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < connections + OWN_FILES:
        said = "%d files may be open here (ulimit -Hn): fewer connections than --limit-concurrency %d"
        log.warning(said, most, connections)


class _Leaving:
    """Ends the process on a signal; also where somebody else's code swallowed what it raised, as imports do."""

    def __init__(self) -> None:
        self._number = 0
        self._waits = False

    def __call__(self, number: int, frame: Any) -> None:
        self._number = number
        if not self._waits:
            self.check()

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Let what is inside run to its end first."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        self.check()

    def check(self) -> None:
        """Raise ``SystemExit`` if a signal came."""
        if self._number:
            raise SystemExit(128 + self._number)


def check_texts(config: ServeConfig) -> None:
    """Raise :class:`ArgumentError` for a flag whose text is not UTF-8, which no answer could say."""
    for name in NAMES:
        value = getattr(config, name)
        try:
            "".join(map(str, value if isinstance(value, tuple) else (value,))).encode()
        except UnicodeEncodeError as error:
            shown = "another text" if "key" in name else ascii(value)
            raise ArgumentError("serve", f"--{name.replace('_', '-')}", shown, "text in UTF-8") from error


def profile_folder(given: str) -> str:
    """Return the directory that profiles are written to, made if need be."""
    if not given:
        return given
    try:
        folder = Path(given).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError, ValueError) as error:
        accepted = "a directory that can be written to"
        raise ArgumentError("serve", "--profile-folder", f"{given!r} ({error})", accepted) from error


def known(config: ServeConfig) -> Mapping[str, Any] | None:
    """Return the configuration of a model that we know by name: of random weights it is enough."""
    from fastlayers_server.known_models import KNOWN

    return KNOWN.get(config.model) if config.load_format == "dummy" else None


def model_folder(config: ServeConfig) -> Path:
    """Return the folder of the model, or, of one that is known, its name."""
    from fastlayers_models.find import TINY, assets, find

    if known(config) is not None:
        return Path(config.model)
    try:
        return assets() / TINY if config.model in ("tiny", TINY) else find(config.model)
    except CheckpointError as error:
        raise CheckpointError(f"serve: {error}, or 'tiny', the one that ships") from error


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ``OSError`` if the address is taken or is none of ours."""
    # Of a socket that does not say that it is TCP's, asyncio lets the kernel hold back the end of an answer until its
    # beginning is acknowledged: 40 ms on a connection that is used again. uvloop never does.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _run(config: ServeConfig, folder: Path, begin: float, leaving: _Leaving) -> int:
    import uvloop

    from fastlayers_server.front.link import Link

    settings, template = resolved(config, folder), template_of(config)
    try:
        listening = bound(config.host, config.port)
    except (OSError, OverflowError) as error:
        given = f"{config.host}:{config.port} ({getattr(error, 'strerror', None) or error})"
        raise ArgumentError(
            "serve", "the address (--host, --port)", given, "an address of this machine that is free"
        ) from error
    port = listening.getsockname()[1]
    if config.host not in ("127.0.0.1", "::1", "localhost") and not settings.api_key:
        log.warning("anybody who reaches %s may use this server: there is no --api-key", config.host)
    loop = uvloop.new_event_loop()
    link = Link(engine_of(config, folder), config.watchdog_timeout)
    try:
        if not config.in_process:
            # The engine's process starts while this one imports, and reads the tokenizer. A thread could not:
            # transformers' imports are lazy, and of two threads that import at once one finds half of them.
            with leaving.later():
                link.start(loop)
        from fastlayers_server.engine.grammar import GrammarWorker
        from fastlayers_server.front.app import make_app, make_front
        from fastlayers_server.front.server import Runner, watched
        from fastlayers_server.front.tokens import TokenText

        try:
            tokens = TokenText(folder, template, config.load_format == "dummy", known(config))
        except ValueError as error:
            raise CheckpointError(f"serve: {error}") from error
        grammars = GrammarWorker(folder, link.check_ready, config.grammar_timeout)
        front = make_front(settings, link, tokens, grammars)
        runner = Runner(make_app(front), front)
        front.link.on_death = runner.engine_died

        async def announce() -> None:
            await runner.listening.wait()  # the engine may be ready first
            await front.link.started.wait()
            if front.link.was_ready:
                name, took = settings.name, time.monotonic() - begin
                print(f"{name} is served at http://{config.host}:{port} (ready after {took:.1f} s)", file=sys.stderr)

        async def serve() -> None:
            telling = asyncio.ensure_future(announce())
            try:
                # Beside an engine on a thread a loop may stand still, as where somebody debugs both.
                with contextlib.nullcontext() if config.in_process else watched(loop):
                    await runner.serve([listening])
            finally:
                telling.cancel()
                await grammars.close()

        leaving.check()
        with logs.aside("fastlayers.access"), asyncio.Runner(loop_factory=lambda: loop) as running:
            running.run(serve())
    except BaseException:
        # A second signal waits until what the first one ends is gone.
        with leaving.later():
            listening.close()
            link.client.abandon()
        raise
    if front.link.death:
        # What the engine says of a wrong value is a sentence already; the type's name in front of it helps nobody.
        print(f"error: {front.link.death.partition(': ')[2] or front.link.death}", file=sys.stderr)
    return runner.exit_code


def serve(arguments: Sequence[str]) -> int:
    """Run ``fastlayers serve`` with these arguments."""
    config, show = parse(arguments)
    if show:
        print(as_json(config))
        return 0
    return run(config)
