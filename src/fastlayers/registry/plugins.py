"""Out-of-tree backends, from the entry-point group ``fastlayers.backends``."""

from __future__ import annotations

import logging

from fastlayers.registry.layers import builtin_registry

log = logging.getLogger(__name__)

plugin_errors: dict[str, str] = {}
_plugins_loaded = False


def load_plugins() -> None:
    """Load out-of-tree backends from the entry-point group ``fastlayers.backends``, once per process.

    Each entry point is a function ``register(add)``; it calls ``add(layer, backend, before=None)``. One that
    fails is recorded in :data:`plugin_errors` (``fastlayers doctor`` shows it) and logged; the rest go on.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    from importlib.metadata import entry_points

    for entry in entry_points(group="fastlayers.backends"):
        try:
            entry.load()(lambda layer, backend, before=None: builtin_registry(layer).add(backend, before=before))
        except Exception as error:  # a foreign plug-in must not break the library; the reason is kept
            plugin_errors[entry.name] = f"{type(error).__name__}: {error}"
            log.warning("plug-in %s of group fastlayers.backends failed: %s", entry.name, plugin_errors[entry.name])
