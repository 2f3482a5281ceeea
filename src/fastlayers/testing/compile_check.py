"""Compile Triton kernels for sm_90 without a GPU and report spills and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHARED_MEMORY_LIMIT = 227 * 1024


@dataclass(frozen=True)
class KernelBuild:
    """One kernel with one configuration, as it is launched for a real shape.

    Parameters
    ----------
    name : str
    kernel : Kernel or triton.JITFunction
    signature : mapping
        Argument name -> Triton type (``"*bf16"``, ``"i32"``, ``"fp32"``); constexpr arguments are left out.
    constexprs : mapping
        Constexpr argument name -> value.
    num_warps, num_stages : int
    aligned : tuple[str, ...]
        Integer arguments (strides, sizes) that a launch passes as multiples of 16. Pointers always are. Without
        this knowledge Triton neither vectorises nor pipelines loads, and the report would be about other code.
    fused : bool
        Whether a product and a sum may become one operation, which rounds once.
    registers : int, optional
        How many a thread has at most.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    fused: bool = True
    registers: int | None = None


@dataclass(frozen=True)
class Report:
    """Resources of one compiled kernel: bytes of shared memory, registers and spilled registers a thread."""

    name: str
    shared: int
    registers: int
    spills: int


def compiled_for(build: KernelBuild, capability: int = 90) -> Any:
    """Return Triton's compiled kernel for ``sm_<capability>``; needs no GPU, and no interpreter mode."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(build.kernel, "jit", build.kernel)
    names = function.arg_names
    signature = {n: build.signature.get(n, "constexpr") for n in names}
    constexprs = {(names.index(n),): value for n, value in build.constexprs.items()}
    pointers = {n for n, kind in signature.items() if kind.startswith("*")}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in pointers | set(build.aligned)}
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        fn=function, signature=signature, constexprs=constexprs, attrs=attributes
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": build.fused}
    if build.registers is not None:
        options["maxnreg"] = build.registers
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_for(build: KernelBuild, capability: int = 90) -> Report:
    """Compile one kernel for ``sm_<capability>`` and report what it takes."""
    compiled = compiled_for(build, capability)
    registers, spills = _ptxas_report(compiled.asm["ptx"], capability)
    return Report(build.name, int(compiled.metadata.shared), registers, spills)


def _ptxas_report(ptx: str, capability: int) -> tuple[int, int]:
    """Return (registers, spilled bytes) that Triton's own ptxas reports for this PTX."""
    import re
    import subprocess
    import tempfile

    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(capability)
    path = getattr(tool, "path", None) or tool[0]
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    stores = re.search(r"(\d+) bytes spill stores", text)
    return int(registers.group(1)) if registers else 0, int(stores.group(1)) if stores else 0
