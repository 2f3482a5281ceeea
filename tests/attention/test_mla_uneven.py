"""Latents of requests that differ in length: who computes which part, and that all of it is added up once."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

import fastlayers.attention.mla.triton as mla_triton
from fastlayers.attention.mla.cases import SPEC, _decode
from fastlayers.attention.mla.config import MLA
from fastlayers.attention.mla.launch_config import (
    MANY_REQUESTS,
    MAX_SPLITS,
    PARTIAL_ROWS,
    LaunchConfig,
    decode_launch,
    uneven_splits,
)
from fastlayers.registry.spec import Case
from fastlayers.tuning.parity import ParityError, check_parity

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TINY = (32, 16, 16, 16)
LENGTHS = (330, 1, 64, 65, 700, 2, 129, 31, 300)
CPU = torch.device("cpu")


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a GPU of six multiprocessors, which nine requests fill."""
    monkeypatch.setattr(mla_triton, "NOMINAL_SM_COUNT", 6)
    mla_triton._decode_launches.cache_clear()


CASES = (
    _decode("bf16", 4, TINY, 16, BF16, LENGTHS, bucket=12),
    _decode("fp32_padded_left", 3, TINY, 64, FP32, LENGTHS, starts=(70, 0, 3, 64, 5, 1, 0, 30, 299)),
    _decode("e4m3", 4, TINY, 64, BF16, LENGTHS, kv_dtype=E4M3),
    _decode("verify", 2, TINY, 64, FP16, LENGTHS, query_lens=(3, 1, 0, 2, 4, 1, 1, 1, 2)),
)


def _launch(case: Case) -> tuple[int, int, int]:
    shape = case.shape
    most, heads = max(shape["query_lens"]), case.cfg.num_heads
    found = decode_launch(
        heads * most, shape["bucket"] or len(LENGTHS), most, max(LENGTHS), case.cfg.dtype, case.cfg.kv_dtype,
        case.cfg.page_size, (), mla_triton.NOMINAL_SM_COUNT,
    )  # fmt: skip
    return found[2:]


@pytest.mark.usefixtures("few_places")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_by_length_add_up(case: Case) -> None:
    usual, most, block = _launch(case)
    assert (usual, most, block) == (1, 8, 32)
    check_parity("mla", MLA.named("triton"), case, CPU)


@triton.jit
def _mean_part(
    lens_ptr, requests, wanted, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    every = tl.arange(0, REQUESTS)
    keys = tl.load(lens_ptr + every, mask=every < requests, other=0)
    usual = tl.maximum(tl.cdiv(tl.sum(keys, axis=0), requests * wanted), LEAST)
    return keys, tl.cdiv(usual, BLOCK_N) * BLOCK_N


@triton.jit
def _a_part_is_lost(
    slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    every = tl.arange(0, REQUESTS)
    keys, part = _mean_part(lens_ptr, requests, wanted, REQUESTS, BLOCK_N, LEAST)
    parts = tl.where(every < requests, tl.maximum(keys // part, 1), 0)
    last = tl.cumsum(parts, axis=0)
    request = tl.sum((last <= slot).to(tl.int32), axis=0)
    mine = every == request
    split = slot - tl.sum(tl.where(mine, last - parts, 0), axis=0)
    return request, split, part, tl.sum(tl.where(mine, parts, 0), axis=0)


@triton.jit
def _parts_of_the_mean(
    slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    _, part = _mean_part(lens_ptr, requests, wanted, REQUESTS, BLOCK_N, LEAST)
    return slot // wanted, slot % wanted, part, wanted


@triton.jit
def _one_part_too_many(
    slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    request, split, part, parts = mla_triton_part_of(
        slot, lens_ptr, starts_ptr, requests, wanted, splits, REQUESTS, BLOCK_N, LEAST
    )
    return request, split, part, parts + 1


mla_triton_part_of = mla_triton._part_of


@pytest.mark.usefixtures("few_places")
@pytest.mark.parametrize("planted", [_a_part_is_lost, _parts_of_the_mean, _one_part_too_many])
def test_planted_faults_show(planted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_triton, "_part_of", planted)
    with pytest.raises(ParityError):
        check_parity("mla", MLA.named("triton"), CASES[0], CPU)


def _parts(lengths: list[int], wanted: int, splits: int, block: int = 32, least: int = 64) -> tuple[int, list[int]]:
    """Share out as the kernel does, in Python: the longest usual part, and each request's number of parts."""
    usual = max(-(-sum(lengths) // (len(lengths) * wanted)), least)
    part = [-(-max(-(-length // splits), usual) // block) * block for length in lengths]
    return -(-usual // block) * block, [-(-length // each) for length, each in zip(lengths, part, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_every_part_has_a_program(seed: int) -> None:
    """The grid has one program more a request than the mean is worth: enough, whatever the lengths."""
    draw = random.Random(seed)
    count, wanted = draw.randrange(1, 300), draw.choice((1, 2, 4, 8))
    lengths = [max(1, int(draw.lognormvariate(6, 1.5))) for _ in range(count)]
    splits = min(MAX_SPLITS, 8 * wanted)
    _, parts = _parts(lengths, wanted, splits)
    assert sum(parts) <= count * (wanted + 1) and max(parts) <= splits and min(parts) >= 1


def test_equal_lengths_are_cut_as_before() -> None:
    for wanted, length in ((2, 4096), (4, 4096), (4, 4097), (1, 300)):
        assert _parts([length] * 64, wanted, 8 * wanted)[1] == [wanted] * 64


def test_how_many_parts_there_may_be() -> None:
    config = LaunchConfig(16, 32, 4, 3)
    few = MANY_REQUESTS - 1
    assert uneven_splits(16, few, few * 16, 1 << 16, config) == 16  # few requests have programs enough
    assert uneven_splits(4, 64, 64 * 16, 1 << 16, config) == 32
    assert uneven_splits(16, 16, 16 * 16, 1 << 16, config) == MAX_SPLITS
    assert uneven_splits(2, 128, 128 * 16, 640, config) == 10  # none shorter than a split is worth
    assert uneven_splits(1, 128, 128 * 128, 1 << 16, config) == PARTIAL_ROWS // (128 * 128)
    # What settles nothing is cut as before, by kernels that do not look.
    same = decode_launch(16, 64, 1, 200, BF16, BF16, 64, (), 132)
    assert same[2:] == (2, 2, 0)


def test_queries_of_any_size_in_fp16() -> None:
    """An e4m3 cache is multiplied in fp16: queries far outside its range, in one row or in all, are as exact."""
    case = _decode("e4m3", 4, TINY, 16, BF16, (45, 1, 17), kv_dtype=E4M3)
    spec = SPEC
    for scale in (1e-30, 1e-3, 3e4, 1e20):
        inputs = spec.make_inputs(case, CPU, 0)
        sizes = torch.tensor([scale, 1.0, 0.0])[:, None, None]
        inputs["q"] = (inputs["q"].float() * sizes).to(BF16)
        results = {}
        for name in ("reference", "triton"):
            impl = MLA.named(name).load()(case.cfg)
            results[name] = spec.run(impl, inputs, spec.prepare(impl, inputs))["o"].float()
        bound = 1e-2 * results["reference"].abs().max()
        torch.testing.assert_close(results["triton"], results["reference"], rtol=0, atol=float(bound))
