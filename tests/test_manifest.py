"""The committed manifest of (layer, backend, case) triples is what the suite runs.

``tests/test_parity.py`` runs every triple and may not skip one (``conftest.py`` turns such a skip into a failure), so
a passing suite means that exactly the manifest was executed. After adding cases: ``python tests/test_manifest.py``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest.json"


def triples() -> list[str]:
    """Return ``layer/backend/case`` for everything that ``test_parity.py`` runs without a GPU."""
    spec = importlib.util.spec_from_file_location("fastlayers_parity_triples", HERE / "test_parity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sorted("/".join(triple) for triple in module.cpu_triples())


def test_manifest_is_what_runs() -> None:
    committed = json.loads(MANIFEST.read_text())
    assert committed == triples(), "run: python tests/test_manifest.py"


if __name__ == "__main__":
    MANIFEST.write_text(json.dumps(triples(), indent=1) + "\n")
