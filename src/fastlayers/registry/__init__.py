"""Ranked, lazy backends for each layer, and the one place where a backend is chosen.

layers.py     the layers by name
backend.py    one row: name, needs, refusal, target
registry.py   a layer's ranked rows, and the choice among them
choice.py     what was chosen, and the ladder built from it; which rung serves a step (`Ladder.pick`)
spec.py       what a layer tells tests, benchmarks and the tuner of itself
plugins.py    rows of other distributions
environment.py   what is set in our variables and has no effect
"""

from fastlayers.moved import renamed
from fastlayers.registry.backend import (
    REPEATS,
    TRITON_NEEDS,
    Backend,
    UnverifiedBackend,
    blackwell_guard,
    hopper_guard,
    not_multiple,
    reference_backend,
    supports_all,
    torch_backend,
    triton_backend,
)
from fastlayers.registry.choice import Choice, Ladder, Rung
from fastlayers.registry.layers import COLLECTIVES, LAYERS, PARTS, builtin_registry
from fastlayers.registry.plugins import load_plugins, plugin_errors, why_not_loaded
from fastlayers.registry.registry import Registry, check_ladder, environment_wishes, registry

__all__ = [
    "COLLECTIVES", "LAYERS", "PARTS", "REPEATS", "TRITON_NEEDS", "Backend", "Choice", "Ladder", "Registry", "Rung",
    "UnverifiedBackend", "blackwell_guard", "builtin_registry", "check_ladder", "environment_wishes", "hopper_guard",
    "load_plugins", "not_multiple", "plugin_errors", "reference_backend", "registry", "supports_all", "torch_backend",
    "triton_backend", "why_not_loaded",
]  # fmt: skip

__getattr__ = renamed(__name__, {"accepts_all": "supports_all", "NotRun": "UnverifiedBackend"})
