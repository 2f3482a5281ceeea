"""The instructions that decode bytes of codes: a few of PTX's, by hand, on every byte with every zero point."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fastlayers.linear.weight_only import triton_codes


def prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """Pick four of the eight bytes of ``b`` and ``a``."""
    data = [(word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)]
    return sum((data[selector >> 4 * i & 7] << np.uint32(8 * i) for i in range(4)), np.uint32(0))


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Look three bits up in a table: bit i of it is the result for a, b, c = i."""
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def fma(kind: torch.dtype, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Multiply and add pairs of 16-bit numbers with one rounding: exact in fp64, then to the dtype."""
    x, y, z = (torch.from_numpy(np.ascontiguousarray(each)).view(kind).double() for each in (a, b, c))
    return (x * y + z).to(kind).view(torch.int32).numpy().view(np.uint32)


def run(text: str, kind: torch.dtype, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a block of instructions."""
    held = dict(given)
    like = next(iter(given.values()))

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full_like(like, int(name, 0))

    for line in filter(None, (each.strip() for each in re.sub(r"[{}]", "", text).split(";"))):
        if line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        out, *arguments = (each.strip() for each in rest.split(","))
        if name == "prmt.b32":
            held[out] = prmt(value(arguments[0]), value(arguments[1]), int(arguments[2], 0))
        elif name == "lop3.b32":
            held[out] = lop3(*map(value, arguments[:3]), int(arguments[3], 0))
        elif name == "shr.b32":
            held[out] = value(arguments[0]) >> value(arguments[1])
        elif name == "mov.b32":
            held[out] = value(arguments[0])
        else:
            assert name == {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}[kind], name
            held[out] = fma(kind, *map(value, arguments))
    return held


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_all_codes_less_all_zero_points(kind: torch.dtype) -> None:
    """Zero points of GPTQ's files end at 16."""
    text = {torch.bfloat16: triton_codes.CODES_TO_BF16, torch.float16: triton_codes.CODES_TO_FP16}[kind].value
    data = np.random.default_rng(0).permutation(np.arange(1024) % 256).astype(np.uint8)
    words = data.view(np.uint32)
    for zero in range(17):
        offset = torch.full((2 * len(words),), float(-(128 if kind == torch.bfloat16 else 1024) - zero)).to(kind)
        pairs = offset.view(torch.int32).numpy().view(np.uint32)
        held = run(text, kind, {"$4": words, "$5": pairs, "$6": pairs})
        for first, codes in (("$0", data & 15), ("$2", data >> 4)):
            second = f"${int(first[1]) + 1}"
            both = np.stack([held[first], held[second]], -1).view(np.int32)
            found = torch.from_numpy(both).view(kind).flatten()
            assert torch.equal(found.float(), torch.from_numpy(codes.astype(np.float32)) - zero)
