"""A few tokens a request by the kernel of decode: which steps, its variants, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fastlayers.attention.gqa import launch_config, triton_decode
from fastlayers.attention.gqa.cases import SPEC
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.gqa.triton import TritonGQA
from fastlayers.device import as_device
from fastlayers.testing.parity import ParityError, check_parity

CPU = as_device("cpu")
CASES = [case for case in SPEC.cases if case.small and case.name.startswith("few_")]
BF16, FP32 = torch.bfloat16, torch.float32


def test_which_steps_it_takes() -> None:
    each = launch_config.tokens_each
    # One variant a height of the tile: as many tokens as fill it.
    assert [each(4, most, BF16) for most in (1, 2, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 0]
    assert [each(8, most, BF16) for most in (2, 3, 4, 5)] == [2, 4, 4, 0]
    assert (each(1, 32, BF16), each(1, 33, BF16), each(3, 5, BF16), each(16, 1, BF16), each(64, 1, BF16)) == (
        32, 0, 5, 2, 0
    )  # fmt: skip
    assert (each(4, 4, FP32), each(4, 5, FP32)) == (4, 0)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that grows by the constants of each launch of the kernel."""
    real, found = triton_decode._decode_kernel.at, []

    def at(grid: Any, *numbers: Any, **constants: Any) -> Any:
        found.append(constants)
        return real(grid, *numbers, **constants)

    monkeypatch.setattr(triton_decode._decode_kernel, "at", at)
    triton_decode._launches.cache_clear()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_take_it(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch)
    check_parity("gqa", "triton", case, "cpu")
    triton_decode._launches.cache_clear()
    assert found and all(constants["EACH"] > 1 for constants in found)
    wanted = {"few_splits": (True, False), "few_added_at_once": (True, True), "few_left_padded": (False, True)}
    if split := wanted.get(case.name):
        assert {(constants["SPLIT"], constants["FUSED"]) for constants in found} == {split}


def test_what_is_compiled_is_told() -> None:
    cfg = GQAConfig(32, 8, 128, 0.1, page_size=64, dtype=BF16, kv_dtype=BF16, phase="extend")
    core = TritonGQA(cfg)
    kinds = {most: core.kernels_of(1, most, 4000)[0] for most in (1, 2, 3, 4, 5, 8)}
    assert kinds[2] == kinds[3] == kinds[4] != kinds[1] and kinds[5] == kinds[8] != kinds[4]
    assert GQA.named("triton").refuse(cfg, CPU) is None


@triton.jit
def _of_nobody_later(valid, place, row, first, GROUP: tl.constexpr, EACH: tl.constexpr, WINDOW: tl.constexpr):
    """Later drafts are seen."""
    return valid[None, :] & (row >= 0)[:, None]


@triton.jit
def _of_the_first(valid, place, row, first, GROUP: tl.constexpr, EACH: tl.constexpr, WINDOW: tl.constexpr):
    """Each token sees what the first one does."""
    return valid[None, :] & (place <= first)[None, :] & (row >= 0)[:, None]


@triton.jit
def _no_later_token(row, token, GROUP: tl.constexpr, EACH: tl.constexpr):
    """All rows are the first token's."""
    return token + 0 * row


@triton.jit
def _one_too_few(cu_ptr, request, EACH: tl.constexpr):
    """The last token of a request is left out."""
    token = tl.load(cu_ptr + request)
    return token.to(tl.int64), tl.maximum(tl.load(cu_ptr + request + 1) - token - 1, 0)


FAULTS = {"_seen": (_of_nobody_later, _of_the_first), "_token": (_no_later_token,), "_new_tokens": (_one_too_few,)}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_planted_faults_show(name: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, name, fault)
    (case,) = [case for case in CASES if case.name == "few_splits"]
    with pytest.raises(ParityError):
        check_parity("gqa", GQA.named("triton"), case)
