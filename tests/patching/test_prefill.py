"""Prompts of ``generate`` as replays, with ``cuda_graph=True``, without a GPU: against stock models."""

from __future__ import annotations

import copy
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.patching import capturable, decode
from fastlayers.patching.experts import FastExperts
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.paged import CacheStore
from fastlayers.patching.prefill import LATENT_TOKENS, ExtendKey, Prefills, starts_of
from fastlayers.patching.step import ExtendStep
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIGS, build, eager_graphs, prompt


@pytest.fixture(autouse=True)
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "check_capturable", lambda roots: None)
    monkeypatch.setattr(decode, "attach", partial(decode.attach, make_graphs=eager_graphs))


@torch.inference_mode()
def tokens(model: Any, inputs: dict[str, Any], new: int = 2, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0, **options}
    found: torch.Tensor = model.generate(**inputs, **options)
    return found


def driver(model: Any) -> decode.DecodeDriver:
    found = decode.driver_of(model)
    assert found is not None
    return found


def extends(model: Any) -> list[Any]:
    return [record for record in driver(model).ledger if isinstance(record.key, ExtendKey)]


# Parts of these are in others: dense layers in v3, biases of attention in qwen2; linears are called as modules are.
IN_OTHERS = ("v3_dense", "llama_bias")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in IN_OTHERS)) for n in CONFIGS])
def test_replayed_prompts_give_stock_tokens(name: str) -> None:
    model = build(name)
    cases = [prompt(1, 40), prompt(3, 40, pads=(0, 6, 3)), prompt(1, 17, seed=2), prompt(2, 64, seed=3)]
    stock = [tokens(model, case) for case in cases]
    fl.patch(model, cuda_graph=True)
    for _ in range(2):
        for case, wanted in zip(cases, stock, strict=True):
            assert torch.equal(tokens(model, case), wanted)
    assert int(driver(model).prefills) == 4 and sum(driver(model).uncaptured.values()) == 4
    found = {(record.key.batch, record.key.tokens, record.key.padded) for record in extends(model)}
    assert found == {(1, 64, False), (3, 128, True), (1, 32, False), (2, 128, False)}


@pytest.mark.parametrize("name", ["qwen3", "v3", "gpt_oss"])
def test_bucket_edges_and_what_the_cache_held_before(name: str) -> None:
    model = build(name)
    # One capacity; each prompt is shorter or longer than the one whose rows still lie there.
    cases = [prompt(1, n, seed=n) for n in (64, 33, 63, 16, 32, 17, 1, 15)]
    stock = [tokens(model, case) for case in cases]
    fl.patch(model, cuda_graph=True)
    for _ in range(2):
        for case, wanted in zip(cases, stock, strict=True):
            assert torch.equal(tokens(model, case), wanted)
    assert {record.key.tokens for record in extends(model)} == {16, 32, 64}
    assert int(driver(model).prefills) == 2 * 8 - 3


def test_one_new_token_and_a_prompt_longer_than_the_largest_bucket() -> None:
    model = build("qwen3")
    cases = [prompt(1, 24), prompt(2, 24, pads=(5, 0))]
    stock = [tokens(model, case, new=1) for case in cases]
    report = fl.patch(model, cuda_graph=True)
    driver(model).prefill.tokens = (16, 32)
    for _ in range(3):
        assert torch.equal(tokens(model, cases[0], new=1), stock[0])
        assert torch.equal(tokens(model, cases[1], new=1), stock[1])
    assert int(driver(model).prefills) == 2 and report.hits()["cuda_graph"] == 0
    assert driver(model).uncaptured["more than 32 tokens, the largest bucket"] == 3


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "v3", "v2", "qwen2_moe"])
def test_padding_costs_no_expert_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = build(name), prompt(2, 20, pads=(0, 4))
    stock, seen = tokens(model, case, new=1), []  # type: ignore[var-annotated]
    fl.patch(model, cuda_graph=True, moe="torch")
    tokens(model, case, new=1)
    original = FastExperts._fl_run

    def noted(module: Any, x: torch.Tensor, ids: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        seen.append(int((ids >= 0).any(-1).sum()))
        return original(module, x, ids, share)

    monkeypatch.setattr(FastExperts, "_fl_run", noted)
    assert torch.equal(tokens(model, case, new=1), stock)
    assert set(seen) == {0, 36} and seen[-1] == 36  # nobody's tokens before the capture, then the real ones


@pytest.mark.parametrize("wrong", ["kept", "starts", "positions", "count"])
def test_a_wrong_step_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model, plan = prompt(2, 40, pads=(0, 20)), build("qwen3_moe"), ExtendStep.plan
    stock = tokens(model, case, new=12)
    fl.patch(model, cuda_graph=True, moe="torch")
    tokens(model, prompt(2, 40, seed=9, pads=(0, 20)))

    def off(self: Any, ids: torch.Tensor, positions: torch.Tensor, starts: list[int]) -> None:
        times = 2 if wrong == "positions" else 1
        plan(self, ids, times * positions, [0, 30] if wrong == "starts" else starts)
        self.kept.sub_(1 if wrong == "kept" else 0)
        self.count.sub_(40 if wrong == "count" else 0)

    monkeypatch.setattr(ExtendStep, "plan", off)
    assert not torch.equal(tokens(model, case, new=12), stock)
    monkeypatch.setattr(ExtendStep, "plan", plan)
    assert torch.equal(tokens(model, case, new=12), stock)


def test_sampling_and_scores() -> None:
    model, case = build("qwen3_moe"), prompt(2, 30, pads=(0, 5))
    fl.patch(model, cuda_graph=True)
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 1.3, "return_dict_in_generate": True}
    drawn = []
    for more in ({"disable_compile": True}, {}, {}, {}):
        torch.manual_seed(7)
        found: Any = tokens(model, case, new=8, output_scores=True, **options, **more)
        drawn.append((found.sequences, found.scores))
        del found  # a cache that is held has rows of its own
    assert int(driver(model).prefills) == 2
    for sequences, scores in drawn[1:]:
        assert torch.equal(sequences, drawn[0][0])
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(scores, drawn[0][1], strict=True))
    assert driver(model).uncaptured["disable_compile=True"] == 1


class Breaks(EagerRuntime):
    def capture(self, fn: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_fails_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    model, case = build("qwen3"), prompt(1, 30)
    stock = tokens(model, case)
    fl.patch(model, cuda_graph=True)
    driver(model)._make_graphs = lambda device: CudaGraphs(runtime=Breaks())
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching"):
        for _ in range(4):
            assert torch.equal(tokens(model, case), stock)
    assert caplog.text.count("prompts of 32 tokens run uncaptured") == 1
    assert int(driver(model).prefills) == 0
    (failed,) = (why for why in driver(model).uncaptured if "not permitted" in why)
    assert 1 <= driver(model).uncaptured[failed] <= 3
    assert sum(driver(model).uncaptured.values()) == 4


def test_what_runs_as_before_and_why() -> None:
    model = build("qwen3")
    gap, whole = prompt(2, 30), prompt(2, 30)
    gap["attention_mask"][0, 7:9] = 0
    embedded = {"inputs_embeds": model.get_input_embeddings()(whole["input_ids"]).detach()}
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = [(gap, {}), (embedded, {}), (whole, {"prefill_chunk_size": 11})]
    stock = [tokens(model, given, **copy.deepcopy(options)) for given, options in runs]
    fl.patch(model, cuda_graph=True)
    for _ in range(2):
        for (given, options), wanted in zip(runs, stock, strict=True):
            assert torch.equal(tokens(model, given, **copy.deepcopy(options)), wanted)
    assert int(driver(model).prefills) == 0
    assert driver(model).uncaptured == {
        "an attention mask with gaps, or padding on the right": 2, "prompts in chunks, or embedded ones": 4
    }  # fmt: skip


def test_graphs_go_with_their_store_and_the_report_names_them() -> None:
    model, case = build("llama"), prompt(1, 30)
    fl.patch(model, cuda_graph=True)
    for _ in range(2):
        tokens(model, case)
    lines = driver(model).report()
    assert any(line.startswith("prefill of 32 tokens, batch 1, capacity 256: captured in") for line in lines)
    assert any(line.startswith("decode, batch 1, capacity 256: captured in") for line in lines)
    assert "1 prefills uncaptured: the first prompts of 32 tokens, batch 1, capacity 256" in lines
    assert fl.explain(model).steps == tuple(lines)
    driver(model)._pool.clear()
    assert driver(model).ledger == []
    assert torch.equal(tokens(model, case), tokens(model, case)) and len(extends(model)) == 1


def test_the_spare_page_takes_what_is_nobody_s() -> None:
    model, case = build("qwen3"), prompt(2, 20, pads=(0, 4))
    fl.patch(model, cuda_graph=True)
    tokens(model, case)
    ((store, _),) = driver(model)._pool._stores.values()
    for both in store.spared.values():
        for whole in both:
            whole.fill_(float("nan"))
    for layer in store.layers.values():
        layer[0][1, :4], layer[1][1, :4] = 0, 0  # padding is masked, and finite as it always is
    held = {index: layer[0].clone() for index, layer in store.layers.items()}
    tokens(model, case, new=1)
    for index, (keys, _, _) in store.layers.items():
        changed = (keys != held[index]) & ~keys.isnan()
        rows = changed.flatten(2).any(-1)
        assert rows[0].nonzero().flatten().tolist() == list(range(20))
        assert rows[1].nonzero().flatten().tolist() == list(range(4, 20))
        assert not store.spared[index][0][0, 0].isnan().any() and store.spared[index][0][0, 1:].isnan().all()


def test_latent_attention_ends_its_buckets_earlier() -> None:
    latent: Any = object.__new__(FastMLA)
    assert Prefills([latent]).tokens[-1] == LATENT_TOKENS < Prefills([]).tokens[-1] == 2048
    assert driver_tokens("v3") == LATENT_TOKENS and driver_tokens("qwen3") == 2048


def driver_tokens(name: str) -> int:
    model = build(name)
    fl.patch(model, cuda_graph=True)
    return driver(model).prefill.tokens[-1]


def test_where_rows_begin() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert starts_of(mask, 2, 4) == [2, 0] and starts_of(None, 3, 4) == [0, 0, 0]
    assert starts_of(mask, 2, 5) == "an attention mask that is not one number a token"
    assert starts_of(torch.tensor([[0, 0], [1, 1]]), 2, 2) == "a row without tokens"
    for wrong in ([[1, 0, 1, 1]], [[1, 1, 0, 0]]):
        assert starts_of(torch.tensor(wrong), 1, 4) == "an attention mask with gaps, or padding on the right"
    assert CacheStore(2, 256).extends == {}


def test_a_warm_up_captures_prompts() -> None:
    model = build("qwen3")
    fl.patch(model, cuda_graph=True)
    fl.warmup(model, tokens=[20], progress=False)
    assert [record.key.tokens for record in extends(model)] == [32]
