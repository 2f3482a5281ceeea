"""Generation with several attention groups over Gloo gives the tokens of one process, idle groups included."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.comm import seam
from fastlayers.errors import AllocatorOverflowError, ArgumentError
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.sampler.layer import SamplingParams
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator
from fastlayers_models.rows import Pending

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import save_random, tiny_config

FAMILIES = ("deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [3], [20, 21, 22, 23]]
NEW = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    gpt_oss = dict(num_hidden_layers=2, initializer_range=0.2)
    return {name: save_random(tiny_config(name, **gpt_oss), tmp_path_factory.mktemp(name)) for name in FAMILIES}


def load(folder: Any, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


def generator_of(model: Any, graphs: bool) -> Generator:
    kept = CudaGraphs(runtime=EagerRuntime(), warm_ups=1, freeze=False) if graphs else None
    return Generator(model, max_batch=2, max_length=64, prefill_tokens=6, graphs=kept)


def generate(rank: Rank, folder: str, ep: int, graphs: bool, prompts: list[list[int]]) -> tuple[Any, ...]:
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2, ep=ep)), graphs)
    found = generator.generate(prompts, max_new_tokens=NEW, eos_ids=())
    return found, generator.pool.free_pages, generator.step.graphs.replays if graphs else 0  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {
        name: generator_of(load(folder), False).generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
        for name, folder in folders.items()
    }


@pytest.mark.parametrize(("family", "ep", "graphs"), [
    ("deepseek_v3", 1, False), ("deepseek_v3", 2, True), ("qwen3_moe", 2, True), ("gpt_oss", 2, False),
    ("qwen3", 1, True),
])  # fmt: skip
def test_two_groups(folders: dict[str, Path], wanted: Any, family: str, ep: int, graphs: bool) -> None:
    # Five prompts on two groups of two rows: one group has a second round, the other one request less.
    for prompts in (PROMPTS, PROMPTS[:1]):  # then the second group is idle from first to last
        first, second = world(2).run(generate, str(folders[family]), ep, graphs, prompts)
        assert first[0] == second[0] == wanted[family][: len(prompts)]
        assert first[1] == second[1] and first[2] == second[2]
        assert (first[2] > 0) == graphs


def by_moves(rank: Rank, folder: str, ep: int, graphs: bool, prompts: list[list[int]]) -> tuple[Any, ...]:
    """Return what :func:`generate` does, with rows that cross groups as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "connected", lambda parallel, device: parallel.tp.size > 1)
        generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2, ep=ep)), graphs)
    assert generator.model.moves is not None and (generator.model.seam is not None) == (rank.size > 2)
    found = generator.generate(prompts, max_new_tokens=NEW, eos_ids=())
    return found, generator.pool.free_pages, generator.step.graphs.replays if graphs else 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "size", "graphs"), [("qwen3_moe", 2, False), ("qwen3", 2, True), ("qwen3", 4, True)]
)
def test_groups_whose_rows_cross_by_moves(
    folders: dict[str, Path], wanted: Any, family: str, size: int, graphs: bool
) -> None:
    for prompts in (PROMPTS, PROMPTS[:1]):
        found = world(size).run(by_moves, str(folders[family]), 1, graphs, prompts)
        assert [tokens for tokens, *_ in found] == [wanted[family][: len(prompts)]] * size
        assert all((replays > 0) == graphs for *_, replays in found)


def both(rank: Rank, folder: str, prompts: list[list[int]]) -> list[list[int]]:
    return generator_of(load(folder, parallel=rank.spec(attn_dp=2)), True).generate(
        prompts, max_new_tokens=NEW, eos_ids=()
    )


def test_two_groups_of_two_ranks(folders: dict[str, Path], wanted: Any) -> None:
    assert world(4).run(both, str(folders["deepseek_v3"]), PROMPTS) == [wanted["deepseek_v3"]] * 4


def close_early(rank: Rank, folder: str) -> tuple[list[int], list[list[int]]]:
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2)), False)
    stream = generator.stream(PROMPTS[:2], max_new_tokens=NEW, eos_ids=())
    seen = []
    for token in stream:
        assert token.request == rank.rank
        seen.append(token.id)
        if rank.rank == 0 and len(seen) == 2:
            stream.close()  # type: ignore[attr-defined]
            break
    again = generator.generate(PROMPTS[:2], max_new_tokens=3, eos_ids=())
    return seen, again


def test_a_closed_stream_leaves_the_other_group_running(folders: dict[str, Path], wanted: Any) -> None:
    expected = wanted["qwen3"]
    (first, again), (second, also) = world(2).run(close_early, str(folders["qwen3"]))
    assert first == expected[0][:2] and second == expected[1]
    assert again == also == [row[:3] for row in expected[:2]]


def scarce(rank: Rank, folder: str) -> tuple[list[list[int]], str]:
    """Return the tokens of requests that fit one by one, and what is said of one that never does."""
    model = load(folder, parallel=rank.spec(attn_dp=2))
    generator = Generator(model, max_batch=2, max_length=64, prefill_tokens=6, num_pages=2)
    found = generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
    with pytest.raises(AllocatorOverflowError) as caught:
        generator.generate([[5], [5] * 10], max_new_tokens=NEW, eos_ids=())
    return found, str(caught.value)


def test_a_group_waits_for_pages_and_none_for_one_that_gave_up(folders: dict[str, Path], wanted: Any) -> None:
    said = "Generator: request 1 needs 2 pages for all of its tokens; the cache of its attention group has 1"
    assert world(2).run(scarce, str(folders["qwen3"])) == [(wanted["qwen3"], said)] * 2


def sample(rank: Rank, folder: str, params: list[SamplingParams]) -> list[list[int]]:
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2)), True)
    return generator.generate(PROMPTS[:2], params, max_new_tokens=NEW, eos_ids=())


def test_groups_that_sample_differently(folders: dict[str, Path]) -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=5, seed=3)]
    one = generator_of(load(folders["qwen3"]), False).generate(PROMPTS[:2], params, max_new_tokens=NEW, eos_ids=())
    assert world(2).run(sample, str(folders["qwen3"]), params) == [one, one]


def draw(rank: Rank, folder: str, attn_dp: int) -> list[list[int]]:
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=attn_dp)), False)
    torch.manual_seed(rank.rank)  # as a program does whose ranks draw for themselves
    return generator.generate(PROMPTS[:2], SamplingParams(temperature=1.5), max_new_tokens=NEW, eos_ids=())


@pytest.mark.parametrize("attn_dp", [1, 2])
def test_ranks_draw_by_one_seed_where_none_is_given(folders: dict[str, Path], attn_dp: int) -> None:
    one, other = world(2).run(draw, str(folders["qwen3"]), attn_dp)
    assert one == other and len(set(one[0])) > 1


def stop(rank: Rank, folder: str, eos: int) -> tuple[list[list[int]], bool]:
    """Return the tokens, and whether steps were launched before the tokens of those before were read."""
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2)), True)
    order: list[str] = []
    step, exchange, read = generator.step, generator.step.exchange, Pending.tokens  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "exchange", lambda intent: (order.append("next"), exchange(intent))[1])
        patch.setattr(Pending, "tokens", lambda self: (order.append("read"), read(self))[1])
        found = generator.generate(PROMPTS, max_new_tokens=NEW, eos_ids=(eos,))
    return found, "next next read" in " ".join(order)


def test_groups_launch_ahead_and_drop_what_comes_after_a_stop(folders: dict[str, Path], wanted: Any) -> None:
    folder, eos = folders["qwen3"], wanted["qwen3"][0][2]
    one = generator_of(load(folder), False).generate(PROMPTS, max_new_tokens=NEW, eos_ids=(eos,))
    assert any(len(tokens) < NEW for tokens in one)
    assert world(2).run(stop, str(folder), eos) == [(one, True)] * 2


def alone(rank: Rank, folder: str) -> Iterator[str] | list[str]:
    generator = generator_of(load(folder, parallel=rank.spec(attn_dp=2)), False)
    found = []
    for call in (lambda: generator.step.extend([]), lambda: generator.step.launch(None)):  # type: ignore[arg-type]
        try:
            call()
        except ArgumentError as error:
            found.append(str(error))
    return found


def test_a_group_makes_no_step_by_itself(folders: dict[str, Path]) -> None:
    for messages in world(2).run(alone, str(folders["qwen3"])):
        assert len(messages) == 2 and all("in every group" in message for message in messages)
