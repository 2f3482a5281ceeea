"""What the distribution promises, and the house rules that a program can check.

The rules are checked on the syntax tree, so that comments and docstrings may name what code may not do.
"""

import ast
import gc
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ROOTS = {
    "fastlayers": REPO / "src" / "fastlayers",
    "fastlayers_models": REPO / "models" / "fastlayers_models",
    "fastlayers_server": REPO / "server" / "fastlayers_server",
}
# Who may not import whom: the arrows go server -> models -> library, never back.
ABOVE = {
    "fastlayers": {"fastlayers_models", "fastlayers_server"},
    "fastlayers_models": {"fastlayers_server"},
    "fastlayers_server": set(),
}
NOT_AT_IMPORT = {"triton", "transformers", "flashinfer", "deep_gemm", "sgl_kernel", "triton_kernels"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 90
IMPORT_BUDGET_S = 0.3

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())


# --- metadata -----------------------------------------------------------------------------------------


def requirement_name(requirement: str) -> str:
    return re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower()


def test_python_and_version():
    project = PROJECT["project"]
    assert project["requires-python"] == ">=3.11"
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert "dynamic" not in project


def test_dependencies_are_exactly_the_agreed_ones():
    names = {requirement_name(r) for r in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "triton", "einops", "numpy", "safetensors", "transformers", "typer", "rich"}
    (triton,) = (r for r in PROJECT["project"]["dependencies"] if requirement_name(r) == "triton")
    assert "platform_system == 'Linux'" in triton


def test_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"hopper", "server", "ray", "dev", "realmodel"}
    assert {requirement_name(r) for r in extras["hopper"]} == {
        "flashinfer-python",
        "sglang-kernel",
        "sgl-deep-gemm",
    }


def test_requirements_have_lower_bounds_and_no_exact_pins():
    project = PROJECT["project"]
    requirements = [
        *project["dependencies"],
        *(r for e in project["optional-dependencies"].values() for r in e),
    ]
    for requirement in requirements:
        specifier = requirement.split(";")[0]
        assert ">=" in specifier, f"{requirement}: no lower bound"
        assert not re.search(r"===?|~=|<", specifier), f"{requirement}: pins or caps a version"


def test_three_import_packages_in_one_distribution():
    build = PROJECT["tool"]["hatch"]["build"]
    assert build["dev-mode-dirs"] == ["src", "models", "server"]
    packages = build["targets"]["wheel"]["packages"]
    assert [REPO / p for p in packages] == list(ROOTS.values())
    for name, root in ROOTS.items():
        assert (root / "__init__.py").is_file(), f"{name} has no __init__.py"
        assert (root / "py.typed").is_file(), f"{name} has no py.typed"


def test_console_script_is_at_the_top_of_the_pyramid():
    assert PROJECT["project"]["scripts"] == {"fastlayers": "fastlayers_server.__main__:main"}


def test_constraints_pin_what_the_tests_rely_on():
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = {requirement_name(line): line for line in lines if line and not line.startswith("#")}
    assert pins["torch"] == "torch==2.13.0"
    assert pins["triton"] == "triton==3.6.0"
    assert pins["numpy"] == "numpy<2.4"
    assert pins["transformers"] == "transformers==5.17.0"


# --- house rules --------------------------------------------------------------------------------------


def sources() -> list[tuple[str, Path]]:
    return [(root, path) for root, folder in ROOTS.items() for path in sorted(folder.rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def dotted(node: ast.AST) -> str:
    """`os.environ` for the expression `os.environ`; empty for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imported_packages(node: ast.AST) -> set[str]:
    """Top-level names of the packages that one import statement or `import_module("...")` loads."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.split(".")[0]}
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
        return {
            a.value.split(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
        }
    return set()


ENVIRONMENT = {"environ", "getenv", "putenv"}


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ENVIRONMENT for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and dotted(node.value) == "os"


def swallows_everything(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
        return any(dotted(a) in {"Exception", "BaseException"} for a in node.args)
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    broad = any(c is None or dotted(c) in {"Exception", "BaseException"} for c in caught)
    return broad and all(
        isinstance(s, ast.Pass | ast.Continue) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in node.body
    )


def is_jitted(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(dotted(d).split(".")[-1] in ("jit", "kernel") for d in decorators)


# Some rule looks at these; a million others are left out at once.
LOOKED_AT = (
    ast.Attribute, ast.Name, ast.Import, ast.ImportFrom, ast.Call, ast.ExceptHandler, ast.FunctionDef,
    ast.AsyncFunctionDef,
)  # fmt: skip


def node_findings(root: str, name: str, node: ast.AST) -> Iterator[str]:
    if reads_environment(node) and name != "src/fastlayers/env.py":
        yield "reads the environment outside src/fastlayers/env.py"
    if isinstance(node, ast.Attribute) and node.attr == "get_device_capability" and name != "src/fastlayers/device.py":
        yield "asks the hardware outside src/fastlayers/device.py"
    for upward in sorted(imported_packages(node) & ABOVE[root]):
        yield f"{root} imports {upward}"
    if isinstance(node, ast.Name) and node.id == "NotImplementedError":
        yield "NotImplementedError"
    if swallows_everything(node):
        yield "swallows every exception"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_jitted(node):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.name} is {lines} lines long (at most {MAX_FUNCTION_LINES})"


def findings(root: str, name: str, text: str) -> list[str]:
    found = []
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        found.append(f"{name}: {lines} lines (at most {MAX_FILE_LINES})")
    for node in ast.walk(ast.parse(text, name)):
        if not isinstance(node, LOOKED_AT):
            continue
        found += [f"{name}:{getattr(node, 'lineno', 0)}: {what}" for what in node_findings(root, name, node)]
    return found


def test_house_rules():
    gc.disable()  # a third of the time would go into looking through trees
    try:
        found = [f for root, path in sources() for f in findings(root, relative(path), path.read_text())]
    finally:
        gc.enable()
    assert not found, "\n".join(found)


VIOLATIONS = {
    "environment": "import os\nos.environ['A']",
    "environment by name": "from os import getenv",
    "hardware": "import torch\ntorch.cuda.get_device_capability()",
    "upward": "def f():\n    from fastlayers_server import cli",
    "upward by string": "import importlib\nimportlib.import_module('fastlayers_models.qwen')",
    "not implemented": "def f():\n    raise NotImplementedError('later')",
    "bare except": "try:\n    f()\nexcept:\n    pass",
    "broad except": "try:\n    f()\nexcept (KeyError, Exception):\n    ...",
    "suppress": "import contextlib\nwith contextlib.suppress(Exception):\n    f()",
    "long function": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
    "long file": "x = 1\n" * (MAX_FILE_LINES + 1),
}


@pytest.mark.parametrize("text", VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_each_rule_finds_its_violation(text):
    assert len(findings("fastlayers", "src/fastlayers/x.py", text)) == 1


def test_rules_leave_good_code_alone():
    text = (
        '"""Says os.environ, NotImplementedError and get_device_capability."""\n'
        "from fastlayers import env\n"
        "try:\n    import x\nexcept ImportError:\n    pass\n"
        "try:\n    import x\nexcept Exception as e:\n    reason = str(e)\n"
        "@triton.jit\ndef kernel():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    )
    assert findings("fastlayers", "src/fastlayers/x.py", text) == []


def test_importing_the_library_names_no_optional_package():
    tree = ast.parse((ROOTS["fastlayers"] / "__init__.py").read_text())
    assert not {p for node in ast.walk(tree) for p in imported_packages(node)} & NOT_AT_IMPORT


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True)
    if listed.returncode == 0:
        return [p for n in listed.stdout.split("\0") if n and (p := REPO / n).is_file()]
    hidden_or_built = re.compile(r"(^|/)(\.(venv|git|venv-matrix)|dist|build|__pycache__)(/|$)")
    return [p for p in REPO.rglob("*") if p.is_file() and not hidden_or_built.search(relative(p))]


def test_no_paths_of_one_machine():
    machine_path = re.compile(r"(?<![\w.~/$}-])/(?:work|root)/")
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{relative(path)}:{i}: {line.strip()[:100]}"
            for i, line in enumerate(lines, 1)
            if machine_path.search(line)
        ]
    assert not found, "\n".join(found)


# --- what an import costs -----------------------------------------------------------------------------

IMPORT_PROBE = """
import json, os, sys, time
import torch
for _ in range(3):  # each a process that has imported torch, and nothing else
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    before = set(sys.modules)
    start = time.process_time()
    import fastlayers
    seconds = time.process_time() - start
    loaded = sorted({name.split(".")[0] for name in set(sys.modules) - before})
    print(json.dumps({"seconds": seconds, "loaded": loaded}), flush=True)
    os._exit(0)
"""


def probe_imports() -> list[dict]:
    paths = [str(root.parent) for root in ROOTS.values()]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*paths, *([inherited] if inherited else [])])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_import_is_quick_and_loads_nothing_optional():
    """Processor time, so that a busy machine does not decide the outcome."""
    runs = probe_imports()
    assert len(runs) == 3
    loaded = set(runs[0]["loaded"])
    assert "fastlayers" in loaded
    assert not loaded & NOT_AT_IMPORT
    assert not loaded & {"fastlayers_models", "fastlayers_server"}
    seconds = min(run["seconds"] for run in runs)  # a neighbour on the same core makes them longer
    assert seconds < IMPORT_BUDGET_S, f"import fastlayers takes {seconds:.3f} s beyond torch"


INTERPRETER = """#!/bin/sh
case "$2" in
    venv) mkdir -p "$5/bin" && cp "$0" "$5/bin/python" ;;
    pytest) echo "$@" ;;
    *sysconfig*) dirname "$0" ;;
    *) echo {version} ;;
esac
"""


def test_the_oldest_python_is_found_or_skipped_in_words(tmp_path: Path) -> None:
    def made(name: str, version: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(INTERPRETER.replace("{version}", version))
        path.chmod(0o755)
        return path

    def run(environment: str, path: Path) -> str:
        command = ["bash", str(REPO / "tools" / "test_oldest.sh"), str(tmp_path / environment), "tests/some.py"]
        variables = os.environ | {"PATH": f"{path.parent}:/usr/bin:/bin", "CPU_TESTS": "not gpu"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=variables)
        return done.stdout

    made("old/bin/python", "3.11.0"), made("new/bin/python", "3.11.99")  # none that is supported is older, or newer
    found = made("path/python3", "3.11.0")
    skipped = "test-oldest: skipped; no supported Python here is older than the environment's 3.11.0\n"
    assert run("old", found) == skipped
    ran = "-m pytest -p no:cacheprovider -m not gpu tests/some.py\n"
    assert run("new", found) == f"test-oldest: Python 3.11.0 ({found}); the environment has 3.11.99\n" + ran
    assert str(REPO / "src") in (tmp_path / "new-oldest" / "bin" / "shared.pth").read_text().splitlines()
    assert "make test-oldest" in (REPO / ".ci" / "run").read_text()
