"""The bounds of ``fastlayers eval``: sound variants hold them, and a planted fault of each kind breaks them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.errors import CheckpointError
from fastlayers_models.convert import convert_checkpoint, convert_to_fp8_block
from fastlayers_models.find import TINY, assets
from fastlayers_server import divergence, evaluate, tasks
from fastlayers_server.divergence import Divergence, Yardstick
from fastlayers_server.hugging_face import load_hugging_face, tokenizer_of
from fastlayers_server.variants import BF16, E4M3, FP32, VARIANTS, FastlayersRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from checkpoint_tools import edited

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
PATHS = {
    "deepseek_v3": assets() / TINY,
    "qwen3_moe": ROOT / "checkpoints" / "tiny_qwen3_moe",
    "gpt_oss": ROOT / "checkpoints" / "tiny_gpt_oss",
}
Weights = dict[str, torch.Tensor]
Edit = Callable[[Weights], None]
TEXTS = 32


@cache
def yardstick(family: str) -> Yardstick:
    path = PATHS[family]
    tokenizer = tokenizer_of(path)
    return Yardstick(path, [tokenizer(text)["input_ids"] for text in tasks.stories("held_out", TEXTS)], CPU)


def holds(family: str, variant: str, runner: Any) -> bool:
    """Say whether it is within the bounds of this variant, as ``eval`` does."""
    far, roundings = yardstick(family).of(runner.logits), VARIANTS[variant].roundings
    assert roundings is not None
    mean, p99 = yardstick(family).bound(roundings)
    return far.mean <= mean and far.p99 <= p99


def block_doubled(name: str) -> Edit:
    def edit(weights: Weights) -> None:
        weights[f"{name}.weight_scale_inv"][0, -1] *= 2

    return edit


def expert_halved(prefix: str) -> Edit:
    def edit(weights: Weights) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            weights[f"{prefix}.{part}.weight_scale_inv"] /= 2

    return edit


def cache_scale(family: str, factor: float) -> Edit:
    """What enters the cache is ``factor`` times what it should be, as if the cache were read with that scale."""
    whole = {
        "deepseek_v3": (".kv_a_layernorm.weight",),
        "qwen3_moe": (".k_norm.weight", ".v_proj.weight"),
        "gpt_oss": (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias"),
    }[family]

    def edit(weights: Weights) -> None:
        for name, value in weights.items():
            if name.endswith(whole):
                weights[name] = value.float() * factor
            elif name.endswith(".kv_a_proj_with_mqa.weight"):
                weights[name] = value.float()
                weights[name][512:] *= factor  # the rope part of the keys; the latent is normed after this

    return edit


# All belong to the slow tests; these are what a quarter of an hour has room for.
FAMILIES = [name if name != "qwen3_moe" else pytest.param(name, marks=pytest.mark.slow) for name in PATHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_variants_hold_their_bounds(family: str) -> None:
    judged = [v for v in VARIANTS.values() if v.roundings is not None and v.why_not(PATHS[family], CPU) is None]
    assert len(judged) == {"deepseek_v3": 9, "qwen3_moe": 9, "gpt_oss": 8}[family]
    assert [v.name for v in judged if not holds(family, v.name, v.build(PATHS[family], CPU))] == []


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the family's checkpoint in FP8, which holds its bound."""

    @cache
    def converted(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "fp8"
        convert_to_fp8_block(PATHS[family], folder, include_ragged=True)
        assert holds(family, "fp8-block", FastlayersRunner(folder, BF16, CPU))
        return folder

    return converted


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize(
    "fault",
    [
        block_doubled("model.layers.0.self_attn.o_proj"),
        pytest.param(block_doubled("model.layers.2.self_attn.o_proj"), marks=pytest.mark.slow),
        block_doubled("model.layers.1.mlp.experts.3.down_proj"),
        expert_halved("model.layers.1.mlp.experts.3"),
    ],
    ids=["attention block", "late block", "expert's block", "expert halved"],
)  # fmt: skip
def test_a_wrong_scale_of_fp8_weights_breaks_the_bound(
    family: str, fault: Edit, fp8: Callable[[str], Path], tmp_path: Path
) -> None:
    wrong = edited(fp8(family), tmp_path / "wrong", fault)
    assert not holds(family, "fp8-block", FastlayersRunner(wrong, BF16, CPU))


# In fp32 less is enough, as the test below shows.
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.slow)], ids=["bf16", "fp32"])
def test_a_halved_expert_in_mxfp4_breaks_the_bound(dtype: torch.dtype, tmp_path: Path) -> None:
    def halved(weights: Weights) -> None:
        for part in ("gate_up_proj", "down_proj"):
            weights[f"model.layers.1.mlp.experts.{part}_scales"][3] -= 1  # exponents

    runner = FastlayersRunner(edited(PATHS["gpt_oss"], tmp_path / "wrong", halved), dtype, CPU)
    assert not holds("gpt_oss", "mxfp4" if dtype == BF16 else "fastlayers-fp32", runner)


@pytest.mark.parametrize("part, layer", [pytest.param("gate_up_proj", 1, marks=pytest.mark.slow), ("down_proj", 3)])
def test_one_wrong_exponent_of_mxfp4_breaks_the_bound_in_fp32(part: str, layer: int, tmp_path: Path) -> None:
    """One of 12,288: 32 weights are twice what they should be, which noise of bf16 would cover."""

    def doubled(weights: Weights) -> None:
        weights[f"model.layers.{layer}.mlp.experts.{part}_scales"][3, 10, 1] += 1

    wrong = edited(PATHS["gpt_oss"], tmp_path / "wrong", doubled)
    assert not holds("gpt_oss", "fastlayers-fp32", FastlayersRunner(wrong, FP32, CPU))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("factor", [1.02, pytest.param(0.98, marks=pytest.mark.slow)])
def test_a_cache_scale_two_percent_off_breaks_the_bound(family: str, factor: float, tmp_path: Path) -> None:
    wrong = edited(PATHS[family], tmp_path / "wrong", cache_scale(family, factor))
    assert not holds(family, "fp8-kv-fp32", FastlayersRunner(wrong, FP32, CPU, kv_dtype=E4M3))
    # The edit itself loses nothing: with a factor of one the bound holds.
    right = edited(PATHS[family], tmp_path / "right", cache_scale(family, 1.0))
    assert holds(family, "fp8-kv-fp32", FastlayersRunner(right, FP32, CPU, kv_dtype=E4M3))


def test_the_bound_is_the_sum_of_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"bf16": Divergence(1.0, 7.0, 1.0, 10.0, 3.0), "fp8-kv": Divergence(2.0, 8.0, 1.0, 30.0, 4.0)}
    stick = yardstick("gpt_oss")
    monkeypatch.setattr(stick, "with_rounding", lambda name: found[name])
    monkeypatch.setattr(divergence, "FLOOR", 0.5)
    assert stick.bound(("bf16", "fp8-kv")) == pytest.approx((1.25 * 3.5 + 2.33 * 27.25**0.5, 1.25 * 45))
    assert stick.bound(()) == pytest.approx((1.25 * 0.5 + 2.33 * 1.5, 1.25 * 5))


def test_divergence_is_that_of_its_definition() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]), torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]])
    found = divergence.divergence([p.log()], lambda ids: q.log() + 3, [[1, 2]], [0])
    first = 0.5 * torch.tensor(2.0).log().item() - 0.25 * torch.tensor(2.0).log().item()
    assert found.mean == pytest.approx(first / 2) and found.p99 == pytest.approx(0.99 * first)
    assert found.top1 == 0.5 and found.extreme == pytest.approx(first)
    assert found.apart == pytest.approx(first / 2)  # the two lie half of it from their mean, and there are two of them


def test_the_means_of_two_draws_are_further_apart_once_in_a_hundred() -> None:
    draws = torch.rand(2, 4000, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log().neg()
    beyond = draws[1].mean(-1) > draws[0].mean(-1) + divergence.Z * (draws[0].var(-1) * 2 / draws.shape[-1]).sqrt()
    assert 0.003 < float(beyond.double().mean()) < 0.02


def test_a_context_that_texts_share_counts_once() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.8, 0.2]]).log()
    texts, rows = [[1, 2], [1, 3], [2, 2]], [[0, 1], [0, 2], [2, 1]]
    shared = divergence.shared_starts(texts)
    found = divergence.divergence([p[row] for row in rows], lambda ids: q[rows[texts.index(ids)]], texts, shared)
    each = (p.exp() * (p - q)).sum(-1)
    # [1], [1 2], [1 3], [2] and [2 2]: five contexts of six positions.
    assert found.mean == pytest.approx(float(each[[0, 1, 2, 2, 1]].double().mean()), rel=1e-6)
    assert found.top1 == pytest.approx(3 / 5)


def test_contexts_are_told_apart_by_all_their_tokens() -> None:
    texts = [[1, 2, 3], [1, 2, 4, 3], [2, 2, 3], [1, 2, 4], [1, 2, 3], []]
    assert divergence.shared_starts(texts) == [0, 2, 0, 3, 3, 0]
    # As counted one by one, with few tokens, of which many texts begin alike.
    draws = torch.randint(2, (200, 6), generator=torch.Generator().manual_seed(0)).tolist()
    before, counted = set[tuple[int, ...]](), []
    for ids in draws:
        contexts = [tuple(ids[: end + 1]) for end in range(len(ids))]
        counted.append(sum(context in before for context in contexts))
        before.update(contexts)
    assert divergence.shared_starts(draws) == counted and 0 < sum(counted) < 1200


def test_shared_contexts_are_found_once_for_all_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    stick = yardstick("gpt_oss")
    monkeypatch.delattr(divergence, "shared_starts")
    same = stick.of(lambda ids: stick.reference[stick.texts.index(list(ids))])
    assert same == Divergence(0.0, 0.0, 1.0, 0.0, 0.0)


def test_another_draws_percentile_exceeds_the_extreme_once_in_a_hundred() -> None:
    k, draws = 17, 20_000
    rank = divergence.extreme_rank(k)
    # The largest of 1,700 numbers of any distribution, by their ranks: those of the uniform one.
    largest = torch.rand(2, draws, 1700, generator=torch.Generator().manual_seed(0)).topk(k, dim=-1).values
    chances = [float((largest[1, :, k - 1] > largest[0, :, r - 1]).float().mean()) for r in (rank, rank + 1)]
    assert rank == 6 and chances[0] < 0.01 < chances[1]
    assert [divergence.extreme_rank(few) for few in (1, 6, 7, 9, 10)] == [1, 1, 1, 1, 2]


def test_a_checkpoint_in_fp8_is_judged_by_what_its_format_rounds(fp8: Callable[[str], Path], tmp_path: Path) -> None:
    """Its inputs are in e4m3 as well, which the bound of bf16 or fp32 alone leaves out."""
    folder = fp8("deepseek_v3")
    assert divergence.own_roundings(folder) == ("fp8-inputs",) and divergence.own_roundings(PATHS["deepseek_v3"]) == ()
    tokenizer = tokenizer_of(folder)
    stick = Yardstick(folder, [tokenizer(text)["input_ids"] for text in tasks.stories("held_out", TEXTS)], CPU)
    runner = FastlayersRunner(folder, FP32, CPU)
    far, (mean, p99) = (
        stick.of(runner.logits),
        stick.bound(evaluate._roundings(VARIANTS["fastlayers-fp32"], runner, folder)),
    )
    assert stick.bound(())[0] < far.mean <= mean and far.p99 <= p99
    wrong = edited(folder, tmp_path / "wrong", block_doubled("model.layers.0.self_attn.o_proj"))
    runner = FastlayersRunner(wrong, FP32, CPU)
    assert stick.of(runner.logits).mean > mean
    # But beside itself, as ``eval --check`` has it: what is wrong in a checkpoint is wrong in its reference, too.
    beside = Yardstick(wrong, stick.texts, CPU)
    far, (mean, p99) = beside.of(runner.logits), beside.bound(("fp8-inputs",))
    assert far.mean <= mean and far.p99 <= p99


def test_int8_is_not_given_to_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    convert_checkpoint(PATHS["deepseek_v3"], folder, "int8")
    with pytest.raises(CheckpointError, match="int8, which transformers does not know: it takes the codes for weights"):
        load_hugging_face(folder, FP32, CPU)
