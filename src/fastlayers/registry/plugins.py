"""Out-of-tree backends, from the entry-point group ``fastlayers.backends``."""

from __future__ import annotations

import logging
from functools import partial
from threading import RLock
from typing import Any

from fastlayers.device import missing
from fastlayers.errors import ArgumentError, UnknownNameError
from fastlayers.registry import environment
from fastlayers.registry.backend import Backend
from fastlayers.registry.layers import COLLECTIVES, LAYERS, builtin_registry, no_layer

log = logging.getLogger(__name__)

plugin_errors: dict[str, str] = {}
# What each entry point added: its name, the layer, the row.
plugin_backends: list[tuple[str, str, Backend]] = []
_plugins_loaded = False
# Other threads wait until all are loaded; a plug-in that asks for a registry meanwhile does not.
_lock, _within = RLock(), False


def load_plugins() -> None:
    """Load out-of-tree backends from the entry-point group ``fastlayers.backends``, once per process.

    Each entry point is a function ``register(add)``; it calls ``add(layer, backend, before=None)``. One that
    fails is recorded in :data:`plugin_errors` (``fastlayers doctor`` shows it) and logged; the rest go on. Environment
    variables that have no effect are logged, too: no backend is chosen before.
    """
    global _plugins_loaded, _within
    if _plugins_loaded:
        return
    with _lock:
        if _plugins_loaded or _within:
            return
        _within = True
        try:
            _load()
        finally:
            _plugins_loaded, _within = True, False


def _add(entry: str, layer: str, backend: Any, before: str | None = None) -> None:
    if layer not in LAYERS and layer not in COLLECTIVES:
        raise UnknownNameError(no_layer(layer))
    builtin_registry(layer).add(backend, before=before)
    plugin_backends.append((entry, layer, backend))


def why_not_loaded(backend: Backend) -> str | None:
    """Return why a plug-in's class cannot be imported, though its packages are here; ``None`` of rows of ours, too.

    Nobody has tested a plug-in's target before: it is imported to see, where ours are only if chosen.
    """
    ours = all(backend is not row for _, _, row in plugin_backends)
    if ours or missing(backend.needs, load=True) is not None:
        return None
    try:
        backend.load()
    except Exception as error:  # a foreign module may raise anything
        return str(error) if isinstance(error, ArgumentError) else f"its target raised {type(error).__name__}: {error}"
    return None


def _load() -> None:
    from importlib.metadata import entry_points

    environment.warn()
    for entry in entry_points(group="fastlayers.backends"):
        try:
            entry.load()(partial(_add, entry.name))
        except Exception as error:  # a foreign plug-in must not break the library; the reason is kept
            plugin_errors[entry.name] = f"{type(error).__name__}: {error}"
            log.warning("plug-in %s of group fastlayers.backends failed: %s", entry.name, plugin_errors[entry.name])
