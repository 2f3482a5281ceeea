"""What hastens the interpreter gives what it gives by itself: every operator and cast, of every pair of types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
sys.path.insert(0, sys.argv[1])
from quick_interpreter import hasten

warnings.simplefilter("ignore")
core.dtype.to_ir = core.block_type.to_ir = lambda self, builder: self  # as in a launch
TYPES = [getattr(tl, name) for name in (
    "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8e4nv", "float8e5")]
NUMBERS = (0, 1, -1, 3, 200, 70000, -70000, 2**31, 2**40, 2**63, 2**64, -0.0, 0.5, 1e300, float("nan"), True)
OPS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "shl", "less_than", "equal", "minimum")


def tensor(kind, sizes):
    bits = np.random.default_rng(5).integers(0, 256, (*sizes, 8), dtype=np.uint8).view(np.uint64)[..., 0]
    array = interpreter._get_np_dtype(kind)
    data = bits & 1 > 0 if kind is tl.int1 else bits.astype(f"u{array.itemsize}").view(array)
    handle = interpreter.TensorHandle(data if sizes else data.reshape(1), kind)
    return core.tensor(handle, tl.block_type(kind, [*sizes]) if sizes else kind)


def said(call, *given):
    try:
        made = call(*given)
    except Exception as error:
        return type(error).__name__, str(error)[:60]
    return str(made.type), str(made.dtype), str(made.shape), made.handle.data.shape, made.handle.data.tobytes()


def all_said():
    semantic, found = interpreter.TritonSemantic(interpreter.interpreter_builder), {}

    def ask(name, label, *pairs):
        more = {"minimum": [core.PropagateNan.NONE], "add": [False], "sub": [False], "mul": [False]}.get(name, [])
        found[name, *label] = [said(getattr(semantic, name), *pair, *more) for pair in pairs]

    for i, a in enumerate(TYPES):
        block, one, wide = tensor(a, (4, 1)), tensor(a, ()), tl.pointer_type(a)
        pointer = core.tensor(interpreter.TensorHandle(np.array([64], np.uint64), wide), wide)
        ask("add", (a, "pointer and number"), (pointer, 3), (3, pointer))
        for j, b in enumerate(TYPES):
            if not whole and i != j and (i > j) == (i + j) % 2:  # each pair of two types in one order
                continue
            other, row = tensor(b, (4, 8)), tensor(b, (4,))
            for name in OPS:
                ask(name, (a, b), (block, other), (block, tensor(b, ())), (one, other), (one, tensor(b, ())))
            ask("cast", (a, b), (block, b), (one, b))
            ask("add", (a, b, "pointer"), (pointer, row), (row, pointer))
        for place, number in enumerate(NUMBERS):
            for name in OPS:
                ask(name, (a, place), (block, number), (number, block))
    for sizes in ((4,), (4, 8), (2, 4, 1), (8, 8)):
        others = [tensor(tl.int32, other) for other in ((4,), (1, 8), (2, 1, 8), (8,))]
        ask("add", (sizes,), *((tensor(tl.int32, sizes), other) for other in others))
    return found


whole = sys.argv[2] == "whole"
plain = all_said()
hasten()
quick = all_said()
assert interpreter._patch_builtin.__module__ == "quick_interpreter", "another version of Triton: nothing is hastened"
wrong = [name for name in plain if plain[name] != quick[name]]
assert not wrong, [(name, plain[name], quick[name]) for name in wrong[:3]]
print(sum(len(each) == 5 for row in plain.values() for each in row))
"""


@pytest.mark.parametrize(("pairs", "least"), [("once", 5500), pytest.param("whole", 9000, marks=pytest.mark.slow)])
def test_results_are_those_of_the_interpreter_alone(pairs: str, least: int) -> None:
    """Of every two types in one order, or in both."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), pairs], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > least  # so many have a result; the others are refused alike
