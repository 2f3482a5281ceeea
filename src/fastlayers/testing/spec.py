"""What a layer says of itself to tests: :mod:`fastlayers.registry.spec`, under the name that tests and plug-ins use."""

from fastlayers.registry.spec import BOUNDS, EXACT, Bound, Case, Cost, LayerSpec, Oracle, spec_of

__all__ = ["BOUNDS", "EXACT", "Bound", "Case", "Cost", "LayerSpec", "Oracle", "spec_of"]
