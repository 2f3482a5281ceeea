"""The experts' second product over strips of outputs: the bits of the product by tiles, and planted bugs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile, candidates, plan_for, takes_strips
from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.triton import backend, strip_gemm
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import compare, poisoned_memory
from fastlayers.testing.spec import spec_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

V3 = FusedMoEConfig(7168, 256, 256, 8, num_shared=1, quant="fp8_block", scaling_factor=2.5, dtype=torch.bfloat16)
SMALL = replace(V3, hidden_size=512, num_experts=4, top_k=2)


def plan(m: int, n: int, strip: int, first: int = 128) -> LaunchConfig:
    """A plan of so many pairs a block and columns a tile."""
    return LaunchConfig(Tile(m, first, 128, 4, 2), Tile(m, n, 128, 4, 2), band=2, strip=strip)


def inputs_of(cfg: FusedMoEConfig, tokens: int, device: str, dtype: torch.dtype | None = None) -> Mapping[str, Any]:
    """Inputs with a token without experts and a pair of one that is not here; pair 0 is one that counts."""
    shape = {"num_tokens": tokens, "dtype": dtype or cfg.dtype, "load": "uneven"}
    inputs = make_inputs(Case("strips", cfg, shape), torch.device(device), 5)
    inputs["topk_ids"][1] = -1
    inputs["topk_ids"][-1, 0] = cfg.num_experts
    return inputs


def computed(cfg: FusedMoEConfig, how: LaunchConfig, inputs: Mapping[str, Any]) -> torch.Tensor:
    ours = TritonFusedMoE(cfg, how.config())
    with poisoned_memory():
        y: torch.Tensor = run(ours, inputs, prepare(ours, inputs))["y"]
    return y


# Two groups of columns, one and three; tiles of a whole group and of half; weights on either side of a product; codes
# of a launch of their own; few pairs and more than are aligned at once.
CASES = {
    "two_groups_swapped": (SMALL, plan(16, 64, 4), 5),
    "whole_groups": (replace(SMALL, num_shared=0), plan(16, 128, 2), 5),
    "one_group": (replace(SMALL, intermediate_size=128), plan(16, 64, 2), 4),
    "three_groups_ue8m0": (replace(SMALL, intermediate_size=384, scale_fmt="ue8m0"), plan(16, 32, 4), 4),
    "many_pairs": (replace(SMALL, hidden_size=256), plan(64, 64, 2), 40),
    "quantised_between": (SMALL, plan(32, 64, 8, first=64), 9),
}


@pytest.mark.parametrize(("cfg", "how", "tokens"), CASES.values(), ids=CASES)
def test_strips_have_the_bits_of_tiles(cfg: FusedMoEConfig, how: LaunchConfig, tokens: int) -> None:
    inputs = inputs_of(cfg, tokens, "cpu")
    found = computed(cfg, how, inputs)
    assert torch.equal(found, computed(cfg, replace(how, strip=1), inputs))
    oracle = ReferenceFusedMoE(cfg)
    case = Case("strips", cfg, {"num_tokens": tokens, "dtype": cfg.dtype, "load": "uneven"})
    wanted = run(oracle, inputs, prepare(oracle, inputs))["y"]
    assert bool(wanted.any())
    compare("y", found, wanted, spec_of("fused_moe").bounds(case).get("y"))


def test_wide_inputs_multiply_codes_as_bf16() -> None:
    inputs = inputs_of(SMALL, 3, "cpu", torch.float32)
    cfg, how = replace(SMALL, dtype=None), plan(16, 64, 4)
    assert torch.equal(computed(cfg, how, inputs), computed(cfg, replace(how, strip=1), inputs))


def test_who_takes_strips() -> None:
    assert takes_strips(V3, 512) and not takes_strips(V3, 1024 * 3)
    for changed in ({"intermediate_size": 160}, {"intermediate_size": 2048}, {"quant": "none"}, {"bias": True}):
        cfg = replace(V3, **changed)
        assert not takes_strips(cfg, 512), changed
        assert all(LaunchConfig.of(each).strip == 1 for tokens in (64, 4096) for each in candidates(cfg, tokens))
        assert not TritonFusedMoE.fits(cfg, plan(16, 64, 8).config()) and TritonFusedMoE.fits(
            cfg, plan(16, 64, 1).config()
        )
    # Measured: 64 and 128 tokens, and a prompt.
    for tokens, height in ((64, 16), (128, 16), (4096, 64)):
        how = plan_for(tokens, V3, False)
        assert (how.first.m, how.second.n, how.strip) == (height, 64, 8)
        assert (
            plan_for(tokens, V3, True).strip == plan_for(tokens, replace(V3, intermediate_size=768), False).strip == 1
        )
    more = {LaunchConfig.of(each).strip for each in candidates(replace(V3, intermediate_size=768), 4096)}
    assert more == {1, 8}


def test_tables_from_before_have_no_strips() -> None:
    config = plan(16, 64, 1).config()
    assert config.pop("strip") == 1
    assert LaunchConfig.of(config) == plan(16, 64, 1)


MUTANTS = {
    "scales of the first tile": ("current = following", "pass"),
    "scales of the strip's place alone": ("(begin + tl.minimum(tile + 1, TILES - 1) * BLOCK_N)", "(begin + 0 * tile)"),
    "tiles a row apart": ("tile * (BLOCK_N * I)", "tile * I"),
    "the first group twice": ("product_of(codes[group]", "product_of(codes[0]"),
    "not weighed": ("acc * weight[:, None]", "acc + 0 * weight[:, None]"),
    "no slot is empty": ("mask=real[:, None])\n        current", "mask=pair[:, None] >= 0)\n        current"),
}


BROKEN, STRIPS = replace(SMALL, hidden_size=1024, num_shared=0), plan(16, 64, 4)


@lru_cache
def in_tiles() -> torch.Tensor:
    return computed(BROKEN, replace(STRIPS, strip=1), inputs_of(BROKEN, 5, "cpu"))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_tiles()
    mutant = planted(strip_gemm, tmp_path, MUTANTS[name])
    monkeypatch.setattr(backend, "strip_kernel", mutant.strip_kernel)
    backend._launches.cache_clear()
    try:
        assert not torch.equal(computed(BROKEN, STRIPS, inputs_of(BROKEN, 5, "cpu")), wanted)
    finally:
        backend._launches.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [16, 64, 300, 4096])
def test_gpu_strips_have_the_bits_of_tiles_over_replays(tokens: int) -> None:
    cfg = replace(V3, num_experts=32)
    inputs, other = inputs_of(cfg, tokens, "cuda"), inputs_of(cfg, 33, "cuda")
    for how in (plan(16, 64, 8), plan(64, 64, 8), plan(64, 128, 7)):
        wanted = computed(cfg, replace(how, strip=1), inputs)
        ours = TritonFusedMoE(cfg, how.config())
        packed = prepare(ours, inputs)
        assert torch.equal(run(ours, inputs, packed)["y"], wanted), how
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(ours, inputs, packed)["y"]
        for replay in range(100):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, wanted), (how, replay)
            if replay == 50:
                run(ours, other, packed)
