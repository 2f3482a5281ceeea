"""Ranks whose generators or requests differ are named by all, before a step in which they would wait for each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers import env
from fastlayers.attention.buckets import ExtendBuckets
from fastlayers.errors import ArgumentError, CollectiveMismatch
from fastlayers.sampler.layer import SamplingParams
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import save_random, tiny_config

PROMPTS = [[5, 6, 7, 8], [9, 10], [11]]
SETTINGS: dict[str, dict[str, Any]] = {
    "max_batch": {"max_batch": 2},
    "max_length": {"max_length": 32},
    "max_length: rank 0 has 64; rank 1 has 100000": {"max_length": 100_000},
    "num_pages": {"num_pages": 5},
    "prefill_tokens": {"prefill_tokens": 3},
    "cuda_graph": {"cuda_graph": False},
    "extend_buckets": {"extend_buckets": ExtendBuckets((), ())},
}
WARM = SamplingParams(temperature=0.7)
REQUESTS: dict[str, dict[str, Any]] = {
    "prompts: rank 0 has 3 of 7 tokens, ": {"prompts": [[5, 6, 7, 8], [9, 10], [12]]},
    "prompts: rank 0 has 3 of 7 tokens": {"prompts": [*PROMPTS, [3]]},
    "max_new_tokens: rank 0 has 4; rank 1 has 5": {"max_new_tokens": 5},
    "eos_ids: rank 0 has []; rank 1 has [3]": {"eos_ids": [3]},
    "params: rank 0 has SamplingParams(temperature=0.0": {"params": WARM},
    "what they refuse: rank 0 has None; rank 1 has Generator: prompts[0] is ": {"max_new_tokens": 100},
    "what they refuse: rank 0 has None; rank 1 has Generator: eos_ids is ": {"eos_ids": "x"},
    "params: rank 0 has SamplingParams(temperature=0": {"params": [WARM, WARM, SamplingParams(temperature=0.0)]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random(tiny_config("qwen3"), tmp_path_factory.mktemp("qwen3")))


def said(call: Any) -> str:
    try:
        call()
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def made(rank: Rank, folder: str) -> list[str]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=rank.spec())
    common: dict[str, Any] = {"max_length": 64}
    return [said(lambda own=own: Generator(model, **common | (own if rank.rank else {}))) for own in SETTINGS.values()]


def test_generators_of_other_settings(folder: str) -> None:
    for found in world(2).run(made, folder):
        assert len(found) == len(SETTINGS)
        for name, words in zip(SETTINGS, found, strict=True):
            assert words.startswith(f"ranks differ in {name}") and ": rank 0 has " in words, words


def asked(rank: Rank, folder: str, attn_dp: int) -> tuple[list[str], list[list[int]]]:
    spec = rank.spec(attn_dp=attn_dp)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, parallel=spec)
    generator = Generator(model, max_length=64)
    common: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 4, "eos_ids": ()}
    found = [
        said(lambda own=own: generator.generate(**common | (own if rank.rank else {}))) for own in REQUESTS.values()
    ]
    with pytest.raises(ArgumentError, match="eos_ids is 'x'"):  # what all refuse alike is each one's own error
        generator.generate(**common | {"eos_ids": "x"})
    return found, generator.generate(**common)


@pytest.mark.parametrize("attn_dp", [1, 2])
def test_other_requests(folder: str, attn_dp: int) -> None:
    """Nothing was launched, so the next call is right."""
    wanted = Generator(AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16), max_length=64).generate(
        PROMPTS, max_new_tokens=4, eos_ids=()
    )
    for found, tokens in world(2).run(asked, folder, attn_dp):
        assert tokens == wanted
        for words, message in zip(REQUESTS, found, strict=True):
            assert message.startswith(f"ranks differ in {words}"), message


def told(rank: Rank, folder: str, name: str, value: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank:
            patch.setenv(name, value)
        return said(lambda: AutoModel.from_pretrained(folder, dtype=torch.float32, parallel=rank.spec()))


@pytest.mark.parametrize(("name", "value", "words"), [
    (env.DEBUG, "1", "FASTLAYERS_DEBUG: rank 0 has False; rank 1 has True"),
    (env.BACKEND, "sum_norm=reference", "FASTLAYERS_BACKEND of layers between ranks: rank 0 has {}; rank 1 has {'sum_"),
])  # fmt: skip
def test_other_environments(folder: str, name: str, value: str, words: str) -> None:
    for found in world(2).run(told, folder, name, value):
        assert found.startswith(f"ranks differ in {words}"), found
