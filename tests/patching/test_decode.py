"""``cuda_graph=True`` without a GPU: graphs that call their function, everything else as it is on one."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import fastlayers as fl
from fastlayers.attention.gqa.config import GQAConfig
from fastlayers.errors import ArgumentError, NoBackendError
from fastlayers.moe.fused_moe.layer import FUSED_MOE
from fastlayers.patching import block, capturable, decode, prefill
from fastlayers.patching.classes import PREFIX
from fastlayers.patching.decoder import FastDecoderLayer
from fastlayers.patching.paged import PagedCache
from fastlayers.patching.prefill import ExtendKey
from fastlayers.patching.step import DecodeStep
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime

sys.path.insert(0, str(Path(__file__).parent))
from tiny import CONFIGS, build, eager_graphs, prompt

NEW = 10  # tokens: one from the prompt, the others from a step each
# What a patch puts into v2 is v3's but for the router, into qwen2 and qwen3 what qwen2_moe and qwen3_moe have, too.
FAMILIES: list[Any] = ["v3", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama"]
FAMILIES += [pytest.param(name, marks=pytest.mark.slow) for name in ("v2", "qwen2", "qwen3")]


@pytest.fixture(autouse=True)
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``patch(cuda_graph=True)`` work on a CPU; the check itself is tested through ``CHECK``."""
    monkeypatch.setattr(capturable, "check_capturable", lambda roots: None)
    monkeypatch.setattr(decode, "attach", partial(decode.attach, make_graphs=eager_graphs, core="torch"))


CHECK = capturable.check_capturable


@torch.inference_mode()
def tokens(model: Any, inputs: dict[str, Any] | None = None, new: int = NEW, **options: Any) -> torch.Tensor:
    given = prompt(3, 40, pads=(0, 6, 3)) if inputs is None else inputs
    options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0, **options}
    found = model.generate(**given, **options)
    return found if isinstance(found, torch.Tensor) else found.sequences


def driver(model: Any) -> decode.DecodeDriver:
    found = decode.driver_of(model)
    assert found is not None
    return found


def decodes(model: Any) -> list[Any]:
    """Return the records of decode steps; prompts are in test_prefill.py."""
    return [record for record in driver(model).ledger if not isinstance(record.key, ExtendKey)]


# Layers as v3_dense has are in v3.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "v3_dense")) for n in CONFIGS])
def test_tokens_of_replayed_steps_equal_stock(name: str) -> None:
    model = build(name)
    stock = tokens(model)
    report = fl.patch(model, cuda_graph=True)
    before = report.hits()
    assert torch.equal(tokens(model), stock)
    assert report.hits()["cuda_graph"] == NEW - 1 and report.fallbacks()["cuda_graph"] == 0
    assert torch.equal(tokens(model), stock)
    assert report.hits()["cuda_graph"] == 2 * (NEW - 1) and len(decodes(model)) == 1
    # Each replay runs each module; the first graph ran them four times besides, and prefills twice.
    attention = {name: hits for name, hits in report.hits().items() if name.endswith("self_attn")}
    assert all(hits - before[name] >= 2 * NEW for name, hits in attention.items()) and attention
    assert torch.equal(tokens(model, disable_compile=True), stock)
    assert report.hits()["cuda_graph"] == 2 * (NEW - 1), "disable_compile runs the same step without a graph"


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "gpt_oss", "v3", "v2"])
def test_sparse_blocks_run_their_cores_directly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    stock, ran = tokens(model), []
    fl.patch(model, cuda_graph=True, moe="torch")
    original = block.run

    def noted(mlp: Any, x: torch.Tensor, step: Any) -> Any:
        out = original(mlp, x, step)
        ran.append(out is not None)
        return out

    monkeypatch.setattr(block, "run", noted)
    assert torch.equal(tokens(model), stock)
    assert ran and all(ran)


def test_experts_of_another_layout_run_their_own_code() -> None:
    # Kernels want GPT-OSS's weights in another order; loading may put them back into the checkpoint's.
    model = build("gpt_oss")
    fl.patch(model, cuda_graph=True, moe="torch")
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 1, 64)
    step = DecodeStep(2, 256, torch.device("cpu"), "torch")
    with torch.inference_mode():
        wanted = mlp(x)[0]
        assert torch.allclose(block.run(mlp, x, step), wanted, atol=1e-5)
        mlp.experts._fl_core = FUSED_MOE.choose(mlp.experts._fl_core.choice.cfg, "cpu", "triton").build()
        mlp.experts._fl_views = False  # chosen with it
        assert block.run(mlp, x, step) is None and torch.allclose(mlp(x)[0], wanted, atol=1e-5)
        mlp.train()
        assert block.run(mlp, x, step) is None


def test_a_wrong_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests above can fail: a step that is one position off, or scaled, gives other tokens.
    model = build("qwen3_moe")
    fl.patch(model, cuda_graph=True)
    wanted, original, linear = tokens(model), DecodeStep.set_length, DecodeStep.linear
    monkeypatch.setattr(DecodeStep, "set_length", lambda self, length: original(self, length - 1))
    assert not torch.equal(tokens(model), wanted)
    monkeypatch.setattr(DecodeStep, "set_length", original)
    monkeypatch.setattr(DecodeStep, "linear", lambda self, *given: 1.2 * linear(self, *given))
    assert not torch.equal(tokens(model), wanted)


def test_other_shapes_get_their_own_graph_and_old_ones_stay() -> None:
    model = build("qwen3")
    cases = [prompt(1, 30), prompt(3, 40, pads=(0, 6, 3)), prompt(2, 300 // 2, seed=4), prompt(1, 30)]
    stock = [tokens(model, case, new=new) for case, new in zip(cases, (12, 20, 120, 7), strict=True)]
    fl.patch(model, cuda_graph=True)
    for case, new, wanted in zip(cases, (12, 20, 120, 7), stock, strict=True):
        assert torch.equal(tokens(model, case, new=new), wanted)
    keys = [record.key[:2] for record in decodes(model)]
    assert sorted(keys) == [(1, 256), (2, 384), (3, 256)]
    assert torch.equal(tokens(model, cases[0], new=12), stock[0]) and len(decodes(model)) == 3


@pytest.mark.parametrize("total", range(245, 252))
def test_the_edge_of_the_capacity(total: int) -> None:
    # Runs before a capture write beyond the step's row: never into the next one.
    model = build("llama")
    inputs = prompt(3, 150, pads=(0, 9, 0))
    inputs = {key: torch.cat((value, value[:, 10:]), dim=1)[:, : total - 3] for key, value in inputs.items()}
    inputs["attention_mask"] = (torch.arange(total - 3) >= torch.tensor([0, 9, 0])[:, None]).long()
    stock = tokens(model, inputs, new=3)
    report = fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens(model, inputs, new=3), stock)
    assert report.hits()["cuda_graph"] == 2
    (record,) = decodes(model)
    assert record.key[1] - prefill.SLACK >= total - 1


def test_sampling_draws_what_the_uncaptured_step_draws() -> None:
    model = build("qwen3_moe")
    report = fl.patch(model, cuda_graph=True)
    drawn = []
    for options in ({"disable_compile": True}, {}, {}):
        torch.manual_seed(7)
        drawn.append(tokens(model, do_sample=True, top_k=20, temperature=1.3, num_return_sequences=2, **options))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2]) and drawn[0].shape[0] == 6
    assert not torch.equal(drawn[0][0], drawn[0][1]), "two answers to one prompt differ"
    assert report.hits()["cuda_graph"] == 2 * (NEW - 1)


def test_rows_end_at_their_end_token() -> None:
    model = build("llama")
    free = tokens(model)
    end = int(free[1, 45])
    options: dict[str, Any] = {"min_new_tokens": 0, "eos_token_id": end}
    stock = tokens(model, **options)
    fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens(model, **options), stock) and (stock[1, 46:] == 0).all()


def test_scores_and_the_cache_that_is_returned() -> None:
    model = build("qwen3")
    inputs = prompt(2, 30, pads=(0, 5))
    options: dict[str, Any] = {
        "return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": 9,
        "pad_token_id": 0,
    }  # fmt: skip
    with torch.inference_mode():
        stock = model.generate(**inputs, **options)
        report = fl.patch(model, cuda_graph=True)
        ours = model.generate(**inputs, **options)
        kept = [layer.keys.clone() for layer in ours.past_key_values.layers]
        for a, b in zip(stock.scores, ours.scores, strict=True):
            assert float((a - b).norm() / a.norm()) < 1e-5, "scores are copies: the logits' buffer is used again"
        for layer, keys in zip(stock.past_key_values.layers, kept, strict=True):
            assert float((layer.keys - keys).norm() / keys.norm()) < 1e-5
        # Another call must not write the rows of a cache that somebody holds.
        tokens(model, prompt(2, 30, seed=9), new=9)
        assert all(torch.equal(a.keys, b) for a, b in zip(ours.past_key_values.layers, kept, strict=True))
        # Handed in again it is the caller's, and runs uncaptured.
        more = torch.cat((ours.sequences, prompt(2, 4, seed=3)["input_ids"]), dim=1)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, more.shape[1] - 30, dtype=torch.long)), dim=1)
        count = report.hits()["cuda_graph"]
        given = {"input_ids": more, "attention_mask": mask}
        next_ours = tokens(model, given, new=6, past_key_values=ours.past_key_values)
        assert report.hits()["cuda_graph"] == count
        fl.unpatch(model)
        next_stock = tokens(model, given, new=6, past_key_values=stock.past_key_values)
    assert torch.equal(next_ours, next_stock)


UNCAPTURED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "beam_search is not plain"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no_cache": ({"use_cache": False}, "use_cache=False"),
    "hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation is not plain"),
}


@pytest.mark.parametrize("case", UNCAPTURED)
def test_what_is_not_captured_runs_as_before_and_says_so_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    options, words = UNCAPTURED[case]
    model, inputs = build("qwen3"), prompt(1, 30)
    stock = tokens(model, inputs, new=8, **options)
    report = fl.patch(model, cuda_graph=True)
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        for _ in range(2):
            assert torch.equal(tokens(model, inputs, new=8, **options), stock)
    assert report.hits()["cuda_graph"] == 0
    said = [r.getMessage() for r in caplog.records if "runs uncaptured" in r.getMessage()]
    assert len(said) == 1 and words in said[0]


@pytest.mark.parametrize("kind", ["gap", "right", "own_cache", "kwargs"])
def test_steps_that_do_not_fit_run_as_before(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs, options = build("qwen3"), prompt(2, 30), {}
    if kind == "gap":
        inputs["attention_mask"][0, 7:9] = 0
    elif kind == "right":
        inputs["attention_mask"][0, -2:] = 0
    if kind == "own_cache":
        options["past_key_values"] = DynamicCache()
    if kind == "kwargs":
        options["prefill_chunk_size"] = 11
    stock = tokens(model, inputs, new=8, **copy.deepcopy(options))
    report = fl.patch(model, cuda_graph=True)
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert torch.equal(tokens(model, inputs, new=8, **copy.deepcopy(options)), stock)
    expected = {"gap": "gaps", "right": "gaps", "own_cache": "passed by the caller", "kwargs": "several tokens"}
    assert expected[kind] in caplog.text
    # Chunks of the prompt run as before, the steps after them are replays.
    assert report.hits()["cuda_graph"] == (7 if kind == "kwargs" else 0)
    if kind in ("gap", "right"):
        assert report.fallbacks()["cuda_graph"] == 7


class Breaks(EagerRuntime):
    def capture(self, fn: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")


def breaking_graphs(device: torch.device) -> CudaGraphs:
    return CudaGraphs(runtime=Breaks())


def test_a_capture_that_fails_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_moe")
    stock = tokens(model)
    report = fl.patch(model)
    decode.attach(model, ExitStack(), make_graphs=breaking_graphs)
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert torch.equal(tokens(model), stock) and torch.equal(tokens(model), stock)
    assert caplog.text.count("not permitted when stream is capturing") == 1
    assert int(driver(model).replays) == 0 and min(report.hits().values()) > 0


def test_heads_that_no_core_takes_run_as_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3")
    stock, original = tokens(model), DecodeStep.pick

    def refusing(self: Any, cfg: Any) -> Any:
        if isinstance(cfg, GQAConfig):
            raise NoBackendError("gqa", cfg, "cpu", "triton", {"triton": "head_dim 512 is larger than 256"})
        return original(self, cfg)

    monkeypatch.setattr(DecodeStep, "pick", refusing)
    fl.patch(model, cuda_graph=True)
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert torch.equal(tokens(model), stock)
    assert "head_dim 512 is larger" in caplog.text
    assert int(driver(model).replays) == 0 and int(driver(model).falls) == NEW - 1


def test_a_model_that_moved_to_the_cpu_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3")
    stock = tokens(model)
    fl.patch(model)
    decode.attach(model, ExitStack(), make_graphs=CudaGraphs)
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert torch.equal(tokens(model), stock)
    assert "the model is on cpu" in caplog.text and int(driver(model).replays) == 0


def test_weights_in_place_are_used_and_new_storages_captured_again() -> None:
    model, twin = build("qwen3_moe"), build("qwen3_moe")
    fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens(model), tokens(twin))
    with torch.no_grad():
        for m in (model, twin):
            m.lm_head.weight.copy_(m.lm_head.weight.flip(0))
    assert torch.equal(tokens(model), tokens(twin)) and len(decodes(model)) == 1
    (first,) = decodes(model)
    state = {key: value.clone() for key, value in build("qwen3_moe", seed=5).state_dict().items()}
    model.load_state_dict(state, assign=True), twin.load_state_dict(state)
    assert torch.equal(tokens(model), tokens(twin))
    (second,) = decodes(model)
    assert second.key != first.key, "the old graph held the old addresses"


@pytest.mark.parametrize("name", FAMILIES)
def test_unpatch_restores_everything(name: str) -> None:
    model = build(name)
    attributes = {key: sorted(module.__dict__) for key, module in model.named_modules()}
    classes = {key: type(module) for key, module in model.named_modules()}
    stock = tokens(model)
    report = fl.patch(model, cuda_graph=True)
    assert any(entry.action == "captured" for entry in report.entries) and "CUDA graphs" in report.summary()
    layers = [m for m in model.modules() if isinstance(m, FastDecoderLayer)]
    assert len(layers) == len(model.model.layers)
    tokens(model)
    held = driver(model)
    fl.unpatch(model)
    assert {key: sorted(module.__dict__) for key, module in model.named_modules()} == attributes
    assert {key: type(module) for key, module in model.named_modules()} == classes
    assert held.ledger == [] and torch.equal(tokens(model), stock)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3_moe", "deepcopy"), ("v3", "pickle"), pytest.param("qwen3_moe", "pickle", marks=pytest.mark.slow),
        pytest.param("v3", "deepcopy", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_copies_capture_for_themselves(name: str, how: str) -> None:
    model = build(name)
    stock = tokens(model)
    report = fl.patch(model, cuda_graph=True)
    tokens(model)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert driver(other) is not driver(model) and driver(other).root is other and driver(model).root is model
    assert driver(other).ledger == [] and len(decodes(model)) == 1
    count = report.hits()["cuda_graph"]
    assert torch.equal(tokens(other), stock)
    assert report.hits()["cuda_graph"] == count and int(driver(other).replays) == NEW - 1
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(tokens(other), stock)
    fl.unpatch(other)
    assert not any(n.startswith(PREFIX) for m in other.modules() for n in m.__dict__)
    assert torch.equal(tokens(other), stock) and not torch.equal(tokens(model), stock)


def test_another_instance_and_a_second_patch() -> None:
    model, other = build("qwen3"), build("qwen3")
    before = sorted(other.__dict__)
    first = fl.patch(model, cuda_graph=True)
    held = driver(model)
    fl.patch(model, cuda_graph=True)
    assert driver(model) is held and decode.driver_of(other) is None and sorted(other.__dict__) == before
    assert torch.equal(tokens(model), tokens(other)) and first.hits()["cuda_graph"] == NEW - 1
    seen: list[Any] = []
    stock = type(other)._sample

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(type(options["past_key_values"]))
        return stock(self, *args, **options)

    type(other)._sample = noted
    try:
        tokens(other), tokens(model)
    finally:
        type(other)._sample = stock
    assert seen == [DynamicCache, PagedCache]


def test_a_model_patched_before_gets_graphs_by_a_second_patch() -> None:
    model = build("llama")
    fl.patch(model)
    report = fl.patch(model, cuda_graph=True)
    tokens(model)
    assert report.hits()["cuda_graph"] == NEW - 1


def test_a_model_of_which_attention_is_left_alone_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3")
    stock = tokens(model)
    report = fl.patch(model, cuda_graph=True, attention=False)
    (entry,) = [e for e in report.entries if e.kind == "decode"]
    assert entry.action == "skipped" and "attention of layer 0 is not patched" in entry.reason
    with caplog.at_level(logging.WARNING, logger="fastlayers.patching.decode"):
        assert torch.equal(tokens(model), stock)
    assert "attention of layer 0 is not patched" in caplog.text and report.hits()["cuda_graph"] == 0


def test_rope_that_reads_positions_on_the_host_is_not_captured() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build("llama", rope_parameters=rope)
    stock = tokens(model)
    report = fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens(model), stock) and report.hits()["cuda_graph"] == 0
    assert "dynamic" in decode.why_not_root(model)


def test_a_failing_patch_leaves_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    monkeypatch.setattr(capturable, "captured", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fl.patch(model, cuda_graph=True)
    assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_cpu_has_no_graphs(monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
    monkeypatch.setattr(capturable, "check_capturable", CHECK)
    model = build("qwen3")
    before = sorted(model.__dict__)
    with pytest.raises(ArgumentError, match=r"cuda_graph.*the model is on cpu.*a model on a CUDA device"):
        fl.patch(model, cuda_graph=True, dry_run=dry_run)
    assert sorted(model.__dict__) == before
    with pytest.raises(ArgumentError, match="the model does not generate"):
        fl.patch(model.model, cuda_graph=True, dry_run=dry_run)
    with pytest.raises(ArgumentError, match="cuda_graph"):
        fl.patch(model, cuda_graph="yes")  # type: ignore[arg-type]


def test_hooks_and_adapters_are_not_left_out_by_replays(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = build("qwen3"), []
    stock = tokens(model)
    hook = model.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(1))
    report = fl.patch(model, cuda_graph=True)
    assert not isinstance(model.model.layers[0], FastDecoderLayer)
    assert isinstance(model.model.layers[1], FastDecoderLayer)
    assert torch.equal(tokens(model), stock) and report.hits()["cuda_graph"] == 0 and len(seen) == NEW
    assert "a hook is registered on model.layers.0" in decode.why_not_root(model)
    hook.remove()
    assert torch.equal(tokens(model), stock) and report.hits()["cuda_graph"] == NEW - 1 and len(seen) == NEW
    model.model.layers[1].mlp.base_layer = nn.Linear(2, 2)
    assert "layers.1.mlp is an adapter" in decode.why_not_root(model)


@pytest.mark.parametrize("name", ["gpt_oss", "v3"])
def test_a_cache_grows_where_the_limit_is_far(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(name, num_hidden_layers=2), prompt(3, 118, pads=(0, 6, 3))
    inputs = {key: torch.cat((value, value[:1].expand(3, -1)), dim=1) for key, value in inputs.items()}
    stock = tokens(model, inputs, new=146)  # behind the prompt's 236: beyond 384, where it grows a second time
    monkeypatch.setattr(decode, "FIRST_TOKENS", 10)
    report = fl.patch(model, cuda_graph=True)
    assert torch.equal(tokens(model, inputs, new=146), stock)
    assert report.hits()["cuda_graph"] == 145 and report.fallbacks()["cuda_graph"] == 0
    assert [record.key[1] for record in decodes(model)] == [256, 384, 512]
    assert torch.equal(tokens(model, inputs, new=10), stock[:, :246])
    assert [record.key[1] for record in decodes(model)] == [384, 512, 256]


def test_linears_that_somebody_hooked_run_as_modules() -> None:
    step = DecodeStep(2, 256, torch.device("cpu"), "torch")
    linear, x, seen = nn.Linear(8, 4), torch.randn(2, 1, 8), []
    wanted = linear(x)
    assert torch.allclose(step.apply(linear, x), wanted)
    linear.register_forward_hook(lambda *given: seen.append(1))
    assert torch.equal(step.apply(linear, x), wanted) and seen == [1]
