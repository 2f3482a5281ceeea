"""The layer and the backend that CONTRIBUTING.md adds work as the text says; the code is taken from the text."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.registry import LAYERS, Backend, plugins, registry
from fastlayers.registry.layers import LAYERS as PLACES
from fastlayers.registry.spec import spec_of
from fastlayers.testing.parity import check_parity
from fastlayers.tuning.sources import Sources
from fastlayers.tuning.sweep import case_at

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "compile"))
import test_public_layers as contract
from recorded import record, recording

GUIDE = Path(fl.__file__).parents[2] / "CONTRIBUTING.md"
FILES = ("layer.py", "reference.py", "torch.py", "triton.py", "cases.py")


def blocks(title: str) -> list[str]:
    section = GUIDE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"^( *)```python\n(.*?)^ *```$", section, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


@pytest.fixture(scope="module", autouse=True)
def softcap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the files into a folder of the package, and the lines into the two tables."""
    root = tmp_path_factory.mktemp("walk")
    folder = root / "softcap"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Soft cap of logits."""\n')
    *files, lines, _ = blocks("Add a layer")
    for name, text in zip(FILES, files, strict=True):
        (folder / name).write_text(text)
    (folder / "numpy.py").write_text(blocks("Add a backend")[0])
    registered, public = lines.splitlines()
    fl.__path__.append(str(root))
    LAYERS.update(eval("{" + registered + "}"))
    fl._PUBLIC.update(eval("{" + public + "}"))  # type: ignore[attr-defined]
    yield folder
    fl.__path__.remove(str(root))
    del LAYERS["softcap"], fl._PUBLIC["Softcap"]  # type: ignore[attr-defined]
    fl.__dict__.pop("Softcap", None)
    for name in [name for name in sys.modules if name.startswith("fastlayers.softcap")]:
        del sys.modules[name]


def test_a_layer_is_seven_files(softcap: Path) -> None:
    assert PLACES is LAYERS
    assert len(FILES) + len(blocks("Add a layer")[-2].splitlines()) == 7
    assert len(blocks("Add a backend")) == 3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_its_backends_agree_with_the_reference(backend: str) -> None:
    cases = [case for case in spec_of("softcap").cases if case.small]
    assert len(cases) == 3
    for case in cases:
        check_parity("softcap", backend, case, "cpu")


def test_its_example_runs_and_everything_else_knows_it() -> None:
    module = importlib.import_module("fastlayers.softcap.layer")
    assert doctest.testmod(module).failed == 0 and doctest.testmod(module).attempted == 3
    layer = fl.Softcap(30)  # type: ignore[attr-defined]
    assert layer.choice.name == "torch" and "triton" in str(fl.backends("softcap", device="H200"))
    assert [each.chosen for each in fl.explain(layer)] == ["torch"]
    report = fl.warmup(layer, tokens=[4, 1], progress=False)
    report.watch.close()
    assert [label for label, _, _ in report.steps] == ["Softcap 4", "Softcap 1"]
    assert case_at("softcap", layer.cfg, 17).shape["num_tokens"] == 17
    names = [name for name, _ in fl._PUBLIC.items()]  # type: ignore[attr-defined]
    assert "Softcap" in names and "softcap" in fl.layers()
    with recording() as recorder:
        record(recorder, "softcap")
    builds = list(recorder.builds.values())
    assert builds[0].name == "_softcap_kernel-softcap-odd" and len(builds) == 3
    assert builds[-1].signature == {"x_ptr": "*bf16", "y_ptr": "*bf16", "size": "i32", "cap": "fp32"}
    assert builds[-1].constexprs == {"BLOCK": 1024} and builds[-1].aligned == ("size",)


def test_it_keeps_the_contract_of_public_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    (subject,) = eval("{" + blocks("Add a layer")[-1] + "}", vars(contract)).values()
    monkeypatch.setitem(contract.SUBJECTS, "Softcap", subject)
    monkeypatch.setattr(contract, "FOLLOWS_DTYPE", contract.FOLLOWS_DTYPE | {"Softcap"})
    contract.test_bad_input_raises_our_error_and_changes_nothing("Softcap")
    contract.test_copies_compute_the_same("Softcap")
    contract.test_casts("Softcap")
    contract.test_compiles_without_a_graph_break("Softcap")
    for backend in ("torch", "triton"):
        contract.test_what_is_accepted_is_computed_right("Softcap", backend, monkeypatch)


def test_its_kernel_is_what_its_tables_depend_on(softcap: Path) -> None:
    target, plain = "fastlayers.softcap.triton:TritonSoftcap", Sources()
    before = plain.kernel_hash(target)

    def read(name: str) -> tuple[str, bool] | None:
        found = plain._read(name)
        changed = found is not None and name == "fastlayers.softcap.triton"
        return (found[0].replace("2.0 * x", "2.5 * x"), found[1]) if changed and found is not None else found

    assert Sources(read).kernel_hash(target) != before


def test_the_backend_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    row: Any = eval(blocks("Add a backend")[1], {"Backend": Backend})
    table = registry("softcap")
    monkeypatch.setattr(table, "ranked", list(table.ranked))
    table.add(row)
    for case in (case for case in spec_of("softcap").cases if case.small):
        check_parity("softcap", "numpy", case, "cpu")
    layer = fl.Softcap(30)  # type: ignore[attr-defined]
    assert layer.choice.name == "numpy"
    torch.testing.assert_close(layer(torch.full((1, 2), 60.0)), torch.full((1, 2), 30 * 0.9640276))
    rows = {each.name: each for each in fl.backends("softcap", device="H200")}
    assert "runs on the host" in rows["numpy"].reason and not rows["numpy"].hardware


def test_the_plug_in_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    table, found = registry("softcap"), {}
    monkeypatch.setattr(table, "ranked", list(table.ranked))
    monkeypatch.setattr(plugins, "plugin_backends", [])
    exec(blocks("Add a backend")[2], found)
    found["register"](partial(plugins._add, "my_package"))
    assert [row.name for row in table.ranked] == ["triton", "mine", "torch", "reference"]
    why = fl.Softcap(30).choice.refused["mine"]  # type: ignore[attr-defined]
    assert why == "my_package is not installed (pip install my_package)"
