"""After a warm-up no prompts compile on the device that tables are shipped for: its ladders, its kernels recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import device
from fastlayers.attention.batch import AttentionBatch
from fastlayers.attention.meta import AttentionState
from fastlayers.device import DESCRIBED, Package
from fastlayers.layer import Layer
from fastlayers.quant.spec import QuantSpec
from fastlayers.runtime import builds, kernel_cache, precompile
from fastlayers.runtime.attention_steps import Step, arguments, kind_of, of_each_kind
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.runtime.warmup import _examples
from fastlayers_models.generate import Generator
from fastlayers_server import known_models
from fastlayers_server.random_models import random_model

sys.path.insert(0, str(Path(__file__).parent))
from kinds import Kinds

# Of attention everything is as it is; the rest is small, as nothing is computed.
SMALL = dict(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_local_experts=4, moe_intermediate_size=32, num_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip
MODELS = {
    "qwen3_8b": known_models.QWEN3_8B, "qwen3_30b": known_models.QWEN3_30B_A3B, "gpt_oss": known_models.GPT_OSS_20B
}  # fmt: skip
BATCH, CACHED, STEP = 256, 1 << 17, 1024  # requests, cached tokens of all, and new ones of a step


class Prefill:
    """Stands for FlashInfer's module."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def plan(self, *given: Any) -> list[int]:
        return [0]

    def paged_run(self, *given: Any) -> None:
        pass


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Have layers choose as on an H200 with these packages, which do nothing, and whose modules none was built of."""
    here = ("triton", *request.param)
    for store in kernel_cache.STORES.values():
        monkeypatch.setenv(store.variable, str(tmp_path / store.package))
    builds.refresh()

    def package(name: str, *, load: bool) -> Package:
        return Package(name, "ok", "1", None) if name in here else Package(name, "absent", None, "not here")

    monkeypatch.setattr(device, "package", package)
    monkeypatch.setattr(device, "_this_cpu", lambda: DESCRIBED["H200"])
    for name, attributes in (
        ("flashinfer", {}), ("flashinfer.prefill", {"get_batch_prefill_module": Prefill}),
        ("flashinfer.xqa", {"xqa": lambda *given, **more: None}),
    ):  # fmt: skip
        made = ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
    # Tensors stay on the host, where nothing is timed and nobody draws from what was not computed.
    monkeypatch.setattr("fastlayers.tuning.probe.probe_tables", lambda model: None)
    monkeypatch.setattr(Layer, "device_type", torch.device("cpu"))
    draw = fl.Sampler.forward
    monkeypatch.setattr(fl.Sampler, "forward", lambda *given, **more: draw(*given, **more).zero_())
    yield
    builds.refresh()


with_packages = pytest.mark.parametrize("h200", [("flashinfer",), ()], indirect=True, ids=["packages", "triton"])


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Return lengths of prompts: alike, as the benchmark draws them (what it found is first), and of all sizes."""
    chance, found = random.Random(seed), [[44] * 19, [1] * 20]
    while len(found) < count:
        batch, length = (int(2 ** chance.uniform(0, most.bit_length() - 1)) for most in (BATCH, longest))
        if batch * (length + 64) <= CACHED:
            alike = chance.random() < 0.7
            found.append([length if alike else chance.randint(1, length) for _ in range(batch)])
    return found


@pytest.mark.parametrize(
    ("h200", "model", "count"),
    [
        (("flashinfer",), "qwen3_8b", 12),
        *(
            pytest.param(packages, model, 200, marks=pytest.mark.slow)
            for packages in (("flashinfer",), ())
            for model in MODELS
        ),
    ],
    indirect=["h200"],
)
def test_no_prompts_need_another_kernel(h200: None, model: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, run = Kinds(monkeypatch), precompile.run

    def run_some(jobs: Sequence[precompile.Job], advance: Callable[[str], None], **more: Any) -> dict[str, float]:
        return run([job for job in jobs if job.tokens <= STEP], advance)  # no step brings more

    monkeypatch.setattr(precompile, "run", run_some)
    generator = Generator(
        random_model(MODELS[model] | SMALL, "cpu", dtype=torch.bfloat16, layers=2 if model == "gpt_oss" else 1),
        max_batch=BATCH, max_length=min(40960, MODELS[model]["max_position_embeddings"]), prefill_tokens=STEP,
        num_pages=CACHED // 64 + 1, cuda_graph=True, graphs=CudaGraphs(runtime=EagerRuntime()),
    )  # fmt: skip
    fl.warmup(generator, max_batch=BATCH, progress=False, probe=False).watch.close()
    warm, late = set(kinds.seen), {}
    for lengths in prompts(count, generator.max_length - 2, 7):
        kinds.seen.clear()
        generator.generate([[1] * length for length in lengths], max_new_tokens=1, eos_ids=())
        assert kinds.seen
        if new := kinds.seen - warm:
            late[f"{len(lengths)} × {max(lengths)}"] = new
    assert not late


def attention(heads: int, keys: int, dim: int, positions: int = 40960, **more: Any) -> Any:
    rotary = fl.RotaryEmbedding(dim, max_position=positions)
    return fl.Attention(32, heads, keys, dim, rotary=rotary, page_size=64, dtype=torch.bfloat16, **more)


def latent(heads: int, **more: Any) -> Any:
    rotary = fl.RotaryEmbedding(64, max_position=16384, interleaved_in=True)
    return fl.MLAAttention(
        32, heads, q_lora_rank=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        rotary=rotary, page_size=64, dtype=torch.bfloat16, **more,
    )  # fmt: skip


def steps(count: int, reach: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return new and cached tokens of the requests of each step, of all sizes."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        each, batch = int(2 ** chance.uniform(0, 11)), int(2 ** chance.uniform(0, 8))
        queries = [each if chance.random() < 0.6 else chance.randint(1, each) for _ in range(batch)]
        deepest = int(2 ** chance.uniform(0, reach.bit_length() - 1)) if chance.random() < 0.7 else 0
        prefixes = [chance.randint(0, max(0, min(deepest, reach) - query)) for query in queries]
        if sum(queries) <= 2048:
            found.append((queries, prefixes))
    return found


LAYERS: dict[str, Callable[[], Any]] = {
    "qwen3_8b": lambda: attention(32, 8, 128), "qwen3_30b": lambda: attention(32, 4, 128),
    "gpt_oss": lambda: attention(64, 8, 64, 131072, sinks=True),
    "gpt_oss_window": lambda: attention(64, 8, 64, 131072, sinks=True, window=128),
    "one_key_head": lambda: attention(20, 1, 96), "v3": lambda: latent(128), "v3_tp8": lambda: latent(16),
    "v3_e4m3": lambda: latent(16, kv_dtype=torch.float8_e4m3fn),
}  # fmt: skip


@with_packages
@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_each_kind_stand_for_all(h200: None, name: str) -> None:
    layer = LAYERS[name]()
    positions = layer.rotary.max_position
    state = AttentionState(BATCH, 2048, positions // 64, 64)
    known = {kind_of(layer, step) for step in of_each_kind(layer, state, positions, BATCH, positions)}
    assert len(known) < 120
    for queries, prefixes in steps(3000, positions, 3):
        longest = max(query + prefix for query, prefix in zip(queries, prefixes, strict=True))
        step = Step(len(queries), sum(queries), max(queries), longest)
        assert kind_of(layer, step) in known, step


@pytest.mark.parametrize("h200", [()], indirect=True)
@pytest.mark.parametrize(
    "name", ["qwen3_30b", "gpt_oss_window", "one_key_head", pytest.param("v3", marks=pytest.mark.slow), "v3_tp8"]
)
def test_kinds_are_those_of_what_is_launched(h200: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, layer = Kinds(monkeypatch), LAYERS[name]()
    state = AttentionState(BATCH, 2048, layer.rotary.max_position // 64, 64)

    def launched(inputs: tuple[Any, ...]) -> set[Any]:
        kinds.seen.clear()
        layer(*inputs)
        return {kind for kind in kinds.seen if kind[0].endswith((".gqa.triton", ".gqa.triton_decode", ".mla.triton"))}

    warm = set()
    for step in of_each_kind(layer, state, 2048, BATCH, layer.rotary.max_position):
        x, cache = precompile._rows_and_cache(layer, step.num_tokens, 1)
        warm |= launched(arguments(layer, step, state, x, cache))
    for count in (20, 100, 300, 2000) if layer.core_path else ():  # expanded keys of prompts, in each rung
        for inputs in _examples(layer, count):
            warm |= launched(inputs)
    for queries, prefixes in steps(80, layer.rotary.max_position, 5):
        pages = [[1] * -(-(query + prefix) // 64) for query, prefix in zip(queries, prefixes, strict=True)]
        x, cache = precompile._rows_and_cache(layer, sum(queries), 1)
        found = launched((x, state.plan(AttentionBatch(tuple(queries), tuple(prefixes), pages)), cache))
        assert found and not found - warm, (queries, prefixes)


@pytest.mark.parametrize("h200", [()], indirect=True)
def test_last_chunks_of_experts_are_warmed_up(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run by the plan of all tokens, whatever their own number is."""
    kinds = Kinds(monkeypatch)
    layer = fl.FusedMoE(128, 128, 128, 8, quant=QuantSpec("fp8_block"), dtype=torch.bfloat16, backend="triton")
    layer.finalize()
    for job in precompile.jobs_of("experts", layer, _examples, 8192, BATCH):
        job.call()
    warm = set(kinds.seen)
    kinds.seen.clear()
    for tail in (1, 3, 103, 128, 129, 507, 700, 1300, 2500, 4095):
        for inputs in _examples(layer, 4096 + tail):
            layer(*inputs)
    assert kinds.seen and not kinds.seen - warm
