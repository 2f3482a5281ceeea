"""MLA's decode with heads as columns: who is refused, right in each way it is launched, planted faults, and a GPU's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla import wgmma
from fastlayers.attention.mla.cases import _REAL, _decode
from fastlayers.attention.mla.config import MLA, MLAConfig
from fastlayers.attention.mla.wgmma import PER_SM, WgmmaMLA
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.tuning.parity import check_parity

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import latent_decode
from latent_decode import BF16, BOUND_LSE_GPU, CPU, DRAWN, E4M3, FP16, SCALE, exact, inputs
from planted_faults import planted

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
REAL = MLAConfig(16, 512, 64, 128, 128, SCALE, 64, BF16, BF16, "decode")
wrong = partial(latent_decode.wrong, bound_o=6e-3)  # results and softmax weights of eight bits


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "H200", None),
        ({"num_heads": 1, "page_size": 128, "dtype": FP16, "kv_dtype": FP16}, "H100", None),
        ({}, "A100", "needs sm_90, this is sm_80"),
        ({}, "B200", "needs sm_90, this is sm_100"),
        ({"kv_dtype": E4M3}, "H200", "a cache of torch.float8_e4m3fn are not both float16 or bfloat16"),
        ({"kv_dtype": FP16}, "H200", "queries of torch.bfloat16 and a cache of torch.float16 are not both"),
        ({"num_heads": 17}, "H200", "17 heads are more than 16"),
        ({"page_size": 32}, "H200", "pages of 32 tokens do not hold whole tiles of 64"),
        ({"kv_lora_rank": 256}, "H200", r"latents of 256 \+ 64 are not 512 \+ 64"),
        ({"phase": "ragged", "few": True}, "H200", "serves decode only, not ragged"),
        ({"phase": "extend"}, "H200", "serves decode only, not extend"),
    ],
)
def test_who_is_refused(changes: dict[str, Any], device: str, reason: str | None) -> None:
    why = MLA.named("wgmma").refusal(replace(REAL, **changes), as_device(device))
    assert (why is None) == (reason is None) and (reason is None or re.search(reason, str(why)))


def test_one_token_a_request_alone() -> None:
    meta = AttentionState(2, 8, 2, 64).plan(AttentionBatch((2, 1), (3, 4), [[1], [2]]))
    q, cache = torch.zeros(3, 16, 576, dtype=BF16), torch.zeros(3, 64, 576, dtype=BF16)
    with pytest.raises(ArgumentError, match="a step of several new tokens a request; accepted: one each for backend"):
        WgmmaMLA(REAL).decode(q, cache, meta)
    with pytest.raises(ArgumentError, match=r"config of the wgmma backend is \{'block_m': 16\}"):
        WgmmaMLA(REAL, {"block_m": 16})
    o, lse = WgmmaMLA(REAL).decode(q[:0], cache, meta)
    assert o.shape == (0, 16, 512) and lse.shape == (0, 16)


def test_what_the_tuner_is_offered() -> None:
    assert WgmmaMLA.candidates(REAL, 64) == [{"per_sm": 1}, {"per_sm": 2}, {"per_sm": 4}]
    assert WgmmaMLA(REAL).per_sm == PER_SM[0] == 1 and WgmmaMLA(REAL, {"per_sm": 4}).per_sm == 4
    # What is compiled anew with the number of requests, and does not come back with the length.
    kinds = [WgmmaMLA(REAL).kernels_of(64, 1, length)[0] for length in (100, 200, 300, 4096, 65536)]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == list(dict.fromkeys(kinds))
    assert kinds[0] == (0, 0) and kinds[-1][1] == 128


# ---- the same numbers ------------------------------------------------------------------------------------------


def attend(
    given: tuple[torch.Tensor, ...], longest: int, per_sm: int = 1, module: Any = wgmma, twin: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as the backend does."""
    q, cache, table, starts, lengths = given
    twin = env.triton_interpret() if twin is None else twin
    o, lse = module._decode.function(q, cache, table, starts, lengths, 512, SCALE, longest, per_sm, twin)
    return o, lse


# Lengths, heads, rows a page, starts, dtype.
SHAPES: dict[str, tuple[tuple[int, ...], int, int, tuple[int, ...], torch.dtype]] = {
    "direct": ((1, 63, 64, 65, 0, 130, 7), 16, 64, (), BF16),
    "cut evenly": ((300, 7, 513), 16, 128, (), FP16),
    "by length": (DRAWN, 5, 64, (), BF16),
    "cut evenly, padded": ((300, 129, 40), 3, 64, (70, 0, 39), BF16),
    "by length, padded": (DRAWN, 3, 64, (130, 0, 63, 1, 0, 0, 65, 62, 64), BF16),
}
PER = {"by length": 4, "by length, padded": 4}


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Play a GPU of six multiprocessors, which seven requests fill."""
    monkeypatch.setattr(wgmma, "NOMINAL_SM_COUNT", 6)
    wgmma._launches.cache_clear()
    yield
    wgmma._launches.cache_clear()


@interpreted
@pytest.mark.parametrize("name", SHAPES)
def test_right_however_requests_are_cut(name: str, few_multiprocessors: None) -> None:
    lengths, heads, page, starts, dtype = SHAPES[name]
    given, longest = inputs(lengths, heads, page, CPU, dtype, starts), max(lengths)
    assert wrong(attend(given, longest, PER.get(name, 1)), exact(given)) == ""
    splits, by_length, *_ = wgmma._launches(
        given[0].shape, 512, (*given[0].stride()[:2], *given[1].stride()[:2], given[2].stride()[0]), page, SCALE,
        longest - longest % 64, dtype, PER.get(name, 1), True, CPU,
    )  # fmt: skip
    assert (splits == 1, by_length) == (name == "direct", name.startswith("by length"))


@interpreted
@pytest.mark.parametrize("bucket", [0, 4])
def test_parity_through_the_backend(bucket: int) -> None:
    """Padding of a bucket, queries of any size, and the same bits again."""
    case = _decode("bf16", 16, _REAL, 64, BF16, (90, 1, 64), bucket=bucket or None)
    check_parity("mla", MLA.named("wgmma"), case, CPU)


MUTANTS = {
    "keys behind the end are read": ("latent = tl.load(tile + latent_at, mask=inside, other=0.0)",
                                     "latent = tl.load(tile + latent_at)", "direct"),
    "keys behind the end count": ('tl.where(inside, score, float("-inf"))', "score", "direct"),
    "padding counts": ("inside = ((key < high) & (key >= start))", "inside = (key < high)", "cut evenly, padded"),
    "the first page always": ("mask=n + BLOCK_N < high, other=0)", "mask=n < low, other=0)", "direct"),
    "sums do not decay": ("acc * decay[None, :])", "acc)", "direct"),
    "totals do not decay": ("total = total * decay", "total = total", "direct"),
    "rotated columns are left out": ("score = dot(rope, q_rope, score) * scale", "score = score * scale", "direct"),
    "a part late": ("low += split * part", "low += (split + 1) * part", "cut evenly"),
    "parts overlap": ("high = tl.minimum(low + part, end)", "high = end", "cut evenly"),
    "each request has one part": ("* HEADS + row, parts,", "* HEADS + row, 1,", "by length"),
    "rows for heads": ("row[None, :] * RANK + latent_column[:, None], o,", "(HEADS - 1 - row)[None, :] * RANK"
                       " + latent_column[:, None], o,", "direct"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_show(name: str, tmp_path: Path, few_multiprocessors: None) -> None:
    before, after, shape = MUTANTS[name]
    operator = '"mla_wgmma_decode"', f'"mla_wgmma_mutant_{list(MUTANTS).index(name)}"'
    mutant: Any = planted(wgmma, tmp_path, (before, after), operator, once=True)
    mutant.NOMINAL_SM_COUNT = 6
    lengths, heads, page, starts, dtype = SHAPES[shape]
    given = inputs(lengths, heads, page, CPU, dtype, starts)
    assert wrong(attend(given, max(lengths), PER.get(shape, 1), mutant), exact(given))


# ---- a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("heads", [1, 7, 16])
def test_on_a_gpu(heads: int) -> None:
    """Eager, again, the twin's bits, and replayed with lengths, starts and pages that change in place."""
    if (why := MLA.named("wgmma").refusal(replace(REAL, num_heads=heads), as_device("cuda"))) is not None:
        pytest.skip(why)
    device = torch.device("cuda")
    shapes = ((0, 1, 63, 64, 65), (4096,), (4100, 0, 1, 63, 64, 65, 333, 20, 1000, 128, 127), (2048,) * 16,
              tuple(1 + 97 * i % 1500 for i in range(150)))  # fmt: skip
    for page, dtype in ((64, BF16), (128, FP16)):
        for lengths in shapes:
            given = inputs(lengths, heads, page, device, dtype)
            wanted = exact(given)
            for per_sm in PER_SM:
                found, again = (attend(given, max(lengths), per_sm) for _ in range(2))
                assert wrong(found, wanted, BOUND_LSE_GPU) == "", (lengths[:6], page, per_sm)
                assert all(map(torch.equal, found, again)), (lengths[:6], page, per_sm)
                twin = attend(given, max(lengths), per_sm, twin=True)
                assert all(map(torch.equal, found, twin)), (lengths[:6], page, per_sm)
    for count in (4, 12, 64):
        draws = [[(37 * i * i + 911 * draw) % 1800 for i in range(count)] for draw in range(3)]
        static = inputs([1800, *draws[0][1:]], heads, 64, device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            attend(static, 1800)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = attend(static, 1800)
        torch.cuda.synchronize()
        for draw in (*draws, [1800] * count):
            fresh = inputs([1800, *draw[1:]], heads, 64, device, BF16, [length // 3 for length in (1800, *draw[1:])])
            for to, source in zip(static, fresh, strict=True):
                to.copy_(source)
            found[0].fill_(float("nan"))
            graph.replay()
            replayed = found[0].clone(), found[1].clone()
            assert wrong(replayed, exact(static), BOUND_LSE_GPU) == "", (count, draw[:6])
            assert all(map(torch.equal, replayed, attend(static, 1800))), (count, draw[:6])
