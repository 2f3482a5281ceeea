"""Write stand-ins for the kernel packages, to test how the library meets versions it does not expect.

    python tools/stub_packages.py KIND FOLDER        KIND is old, new or broken

Put FOLDER on PYTHONPATH. Each stand-in has the metadata of an installed distribution, and a package:

old     a version from before the lower bound, whose package has none of the functions that backends need
new     a version far ahead, whose functions all exist under their old names but fail when they are called
broken  an expected version whose package raises at import, as a build for another torch does
"""

import shutil
import sys
from pathlib import Path

# distribution name, import name, version that the lower bound names
PACKAGES = [
    ("flashinfer-python", "flashinfer", "0.6.14"),
    ("sglang-kernel", "sgl_kernel", "0.4.5"),
    ("sgl-deep-gemm", "deep_gemm", "0.1.4"),
]
VERSIONS = {"old": "0.0.1", "new": "99.0.0"}
BODIES = {
    "old": '__version__ = "{version}"\n',
    "new": """__version__ = "{version}"
__path__ = []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def moved(*args, **kwargs):
        raise TypeError(f"{package}.{{name}}() got other arguments than version {version} takes")

    return moved
""",
    "broken": 'raise ImportError("{package}: undefined symbol: a build for another torch")\n',
}


def write_stub(folder: Path, kind: str, distribution: str, package: str, expected: str) -> None:
    version = VERSIONS.get(kind, expected)
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(BODIES[kind].format(version=version, package=package))
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text("")


def main(kind: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for distribution, package, expected in PACKAGES:
        write_stub(folder, kind, distribution, package, expected)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in BODIES:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
