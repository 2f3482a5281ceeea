"""Decode steps of one row that read bf12 copies: ``patch(cuda_graph=True, bf12=True)``."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense import triton_bf12
from fastlayers.patching import apply, capturable, decode, head
from fastlayers.patching.bf12 import BF12Copies
from fastlayers.quant import bf12

sys.path.insert(0, str(Path(__file__).parent))
from tiny import GQA, VOCAB, build, eager_graphs, prompt

NEW = 6
ASKED: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def graphs_and_copies_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "check_capturable", lambda roots: None)
    monkeypatch.setattr(decode, "attach", partial(decode.attach, make_graphs=eager_graphs, core="torch"))
    monkeypatch.setattr(bf12, "LEAST", 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the rows of what is multiplied by copies from now on, and of the copies."""
    found, product = list[tuple[int, ...]](), triton_bf12.linear_bf12

    def noted(x: torch.Tensor, weight: bf12.BF12Weights, *rest: Any, **more: Any) -> torch.Tensor:
        found.append((x.numel() // x.shape[-1], len(weight.words)))
        return product(x, weight, *rest, **more)

    monkeypatch.setattr(triton_bf12, "linear_bf12", noted)
    return found


def patched(tied: bool = False, **options: Any) -> Any:
    model = build("qwen3", tie_word_embeddings=tied).to(torch.bfloat16)
    fl.patch(model, cuda_graph=True, **options)
    return model


@torch.inference_mode()
def logits_of(model: Any, rows: int = 1) -> torch.Tensor:
    found = model.generate(**prompt(rows, 20), **ASKED, output_logits=True, return_dict_in_generate=True)
    return torch.stack(found.logits).float()


def copies_of(model: Any) -> Any:
    driver = decode.driver_of(model)
    assert driver is not None
    return driver.copies


def test_one_row_reads_copies_and_several_do_not(products: list[tuple[int, ...]]) -> None:
    model, plain = patched(bf12=True), patched()
    wanted, found = logits_of(plain), logits_of(model)
    assert not copies_of(plain).wanted and copies_of(model).nbytes > 0
    assert products and {rows for rows, _ in products} == {1}
    # The same weights, in sums of another order: a few roundings to bfloat16 apart.
    assert (found - wanted).abs().max() <= 2**-5 * wanted.abs().max()
    products.clear()
    logits_of(model, rows=3)
    assert not products


@pytest.fixture
def of_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the largest weight alone be copied: fewer products are interpreted."""
    monkeypatch.setattr(bf12, "LEAST", VOCAB * 64)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_reads_a_copy(tied: bool, products: list[tuple[int, ...]], of_the_head_alone: None) -> None:
    model, plain = patched(tied, bf12=True), patched(tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    wanted, found = (each.generate(**prompt(1, 20), **ASKED) for each in (plain, model))
    assert set(products) == {(1, VOCAB)} and len(products) >= NEW - 1
    assert torch.equal(found, wanted) and len(set(found[0, -NEW:].tolist())) > 2


@pytest.mark.parametrize("name", ["v2", "v3", *GQA])
def test_the_head_of_each_family_is_behind_its_decoder(name: str) -> None:
    model = build(name)
    assert head.direct(model)
    assert not head.direct(model.model)


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def half(*args: Any, **inputs: Any) -> Any:
        out = forward(*args, **inputs)
        out.logits = out.logits / 2
        return out

    return half


def wrap(model: Any) -> None:
    model.forward = halved(model.forward)


def derive(model: Any) -> None:
    model.__class__ = type("Halved", (type(model),), {"forward": halved(type(model).forward)})


@pytest.mark.parametrize("change", [wrap, derive])
def test_what_somebody_put_around_the_head_runs(
    change: Callable[[Any], None], products: list[tuple[int, ...]], of_the_head_alone: None
) -> None:
    model, plain = patched(bf12=True), patched()
    whole = logits_of(plain)
    for each in (model, plain):
        change(each)
    found, wanted = logits_of(model), logits_of(plain)
    assert not products and int(decode.driver_of(model).replays) == NEW - 1  # type: ignore[union-attr]
    assert torch.equal(found, wanted) and torch.equal(2 * found, whole)


def edit(weight: torch.Tensor) -> None:
    weight.mul_(3.0)


def merge(weight: torch.Tensor) -> None:
    weight.data += 0.5 * weight.data.flip(0)  # as adapters are: torch counts no edit


@pytest.mark.parametrize("change", [edit, merge])
def test_an_edited_weight_is_seen_by_the_next_call(
    change: Callable[[torch.Tensor], None], products: list[tuple[int, ...]]
) -> None:
    model, plain = patched(bf12=True), patched()
    before = logits_of(model)
    for each in (model, plain):
        with torch.no_grad():
            change(each.model.layers[0].mlp.down_proj.weight)
            change(each.model.layers[1].self_attn.q_proj.weight)  # a part of a buffer
            change(each.lm_head.weight)
    products.clear()
    wanted, found = logits_of(plain), logits_of(model)
    assert products and (wanted - before).abs().max() > 2**-3 * wanted.abs().max()
    assert (found - wanted).abs().max() <= 2**-5 * wanted.abs().max()


def test_a_turned_weight_has_no_copy_of_the_other(products: list[tuple[int, ...]]) -> None:
    copies, weight = BF12Copies(True), torch.randn(64, 64).bfloat16()
    copy_of = copies.of(weight)
    assert copy_of is not None and copies.of(weight) is copy_of and copies.of(weight.t()) is None


def test_a_model_that_can_have_no_copies_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"patch.*bf12.*no linear of this model has bfloat16 weights"):
        fl.patch(build("qwen3"), cuda_graph=True, bf12=True)


def test_copies_of_a_model_and_second_patches_say_whether(products: list[tuple[int, ...]]) -> None:
    model = patched(bf12=True)
    logits_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copies_of(other).wanted and copies_of(other).nbytes == 0
        products.clear()
        logits_of(other)
        assert products
    fl.patch(model, cuda_graph=True)
    assert not copies_of(model).wanted and copies_of(model).nbytes == 0
    products.clear()
    logits_of(model)
    assert not products


def state_of(model: Any) -> tuple[Any, ...]:
    """Return what a model's steps are made by, and what was made for them."""
    driver = decode.driver_of(model)
    assert driver is not None
    return id(driver), driver.chosen, driver.copies.nbytes, [each.key for each in driver.ledger]


@pytest.mark.parametrize("where", ["captured", "_watch"])
def test_a_second_patch_that_fails_changes_nothing(
    where: str, products: list[tuple[int, ...]], of_the_head_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = patched(bf12=True, overlap=False), build("qwen3").bfloat16()
    logits_of(one)  # prompts are replayed from the second on
    wanted, before = logits_of(one), state_of(one)
    stock = {name: (type(module), sorted(vars(module))) for name, module in other.named_modules()}
    place = capturable if where == "captured" else apply
    right, calls = getattr(place, where), []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if where == "_watch" or other in given:
            raise RuntimeError("out of memory")
        return right(*given)

    monkeypatch.setattr(place, where, failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        fl.patch(nn.ModuleList([one, other]), cuda_graph=True)
    assert len(calls) == (2 if where == "captured" else 1)
    assert {name: (type(module), sorted(vars(module))) for name, module in other.named_modules()} == stock
    assert state_of(one) == before and before[1] == (False, True) and before[2] and before[3]
    products.clear()
    assert torch.equal(logits_of(one), wanted) and products and state_of(one) == before


def test_the_context_manager_gives_back_what_was_chosen(
    products: list[tuple[int, ...]], of_the_head_alone: None
) -> None:
    model = patched(bf12=True, overlap=False)
    wanted = logits_of(model)
    with fl.patched(model, cuda_graph=True):
        assert state_of(model)[1:] == ((True, False), 0, [])
        logits_of(model)
    assert state_of(model)[1:] == ((False, True), 0, [])
    products.clear()
    assert torch.equal(logits_of(model), wanted) and products


def test_steps_that_are_not_captured_read_no_copies() -> None:
    with pytest.raises(ArgumentError, match=r"bf12.*cuda_graph=True"):
        fl.patch(build("qwen3"), bf12=True)
