"""After a warm-up no prompts compile on the device that tables are shipped for: its ladders, its kernels recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import fastlayers as fl
from fastlayers import device
from fastlayers.attention.batch import AttentionBatch
from fastlayers.attention.kv_cache import spec
from fastlayers.attention.meta import AttentionState
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.device import DESCRIBED, Package
from fastlayers.layer import Layer
from fastlayers.quant.spec import QuantSpec
from fastlayers.runtime import builds, kernel_cache, precompile
from fastlayers.runtime.attention_steps import Step, arguments, kind_of, of_each_kind
from fastlayers.runtime.graphs import CudaGraphs, EagerRuntime
from fastlayers.runtime.package_builds import Built, Module, PackageBuilds
from fastlayers.runtime.warmup import _examples
from fastlayers.weights_epoch import epoch_of
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
MODULES = (".gqa.triton", ".gqa.triton_decode", ".mla.triton", ".mla.wgmma", ".mla.gluon_columns", ".mla.triton_reduce")
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
    monkeypatch.setattr("fastlayers.runtime.warmup.probe_tables", lambda model: [])
    monkeypatch.setattr(Layer, "device_type", torch.device("cpu"))
    draw = fl.Sampler.forward
    monkeypatch.setattr(fl.Sampler, "forward", lambda *given, **more: draw(*given, **more).zero_())
    # Nobody reads or writes the gigabytes that an H200 would hold, so that nobody has to find them.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setattr(
        spec, "allocate", lambda layer, name, shape, *like: torch.empty(shape, dtype=like[0], device="cpu")
    )
    monkeypatch.setattr(functional, "linear", lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight)))
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
        (("flashinfer",), "qwen3_8b", 6),
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
@pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_of_each_kind_stand_for_all(h200: None, name: str, count: int) -> None:
    layer = LAYERS[name]()
    positions = layer.rotary.max_position
    state = AttentionState(BATCH, 2048, positions // 64, 64)
    known = {kind_of(layer, step) for step in of_each_kind(layer, state, positions, BATCH, positions)}
    assert len(known) < 120
    for queries, prefixes in steps(count, positions, 3):
        longest = max(query + prefix for query, prefix in zip(queries, prefixes, strict=True))
        step = Step(len(queries), sum(queries), max(queries), longest)
        assert kind_of(layer, step) in known, step


@pytest.mark.parametrize("h200", [()], indirect=True)
@pytest.mark.parametrize("count", [16, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["qwen3_30b", "gpt_oss_window", "one_key_head", pytest.param("v3", marks=pytest.mark.slow), "v3_tp8"]
)
def test_kinds_are_those_of_what_is_launched(
    h200: None, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, layer = Kinds(monkeypatch), LAYERS[name]()
    state = AttentionState(BATCH, 2048, layer.rotary.max_position // 64, 64)

    def launched(inputs: tuple[Any, ...]) -> set[Any]:
        kinds.seen.clear()
        layer(*inputs)
        return {kind for kind in kinds.seen if kind[0].endswith(MODULES)}

    warm = set()
    for step in of_each_kind(layer, state, 2048, BATCH, layer.rotary.max_position):
        x, cache = precompile._rows_and_cache(layer, step.num_tokens, 1)
        warm |= launched(arguments(layer, step, state, x, cache))
    for tokens in (4, 12, 20, 50, 100, 300, 2000) if layer.core_path else ():  # expanded keys of prompts, in each rung
        for inputs in _examples(layer, tokens):
            warm |= launched(inputs)
    for queries, prefixes in steps(count, layer.rotary.max_position, 5):
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


@pytest.mark.parametrize("h200", [()], indirect=True)
@pytest.mark.parametrize("held", [True, False], ids=["of a generator", "alone"])
def test_long_prefixes_are_warmed_up_where_steps_reach_them(
    h200: None, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over the prefix's chunks are not causal, and all give sums to merge: kernels that no other step has."""
    kinds = Kinds(monkeypatch)
    state = AttentionState(4, 2048, 256, 64)
    step = SimpleNamespace(state=state, extend_buckets=None) if held else None

    def late(one_shot: int) -> set[Any]:
        layer = latent(16, thresholds=MLAThresholds(one_shot=one_shot, chunk=256, few=1))
        kinds.seen.clear()
        for job in precompile.jobs_of("mla", layer, _examples, 2048, 4, step):
            job.call()
        warm = set(kinds.seen)
        kinds.seen.clear()
        for queries, prefixes in (((40,), (3000,)), ((700, 1000), (1, 2900)), ((2000,), (2050,)), ((9, 9), (2000, 64))):
            pages = [[1] * -(-(query + prefix) // 64) for query, prefix in zip(queries, prefixes, strict=True)]
            x, cache = precompile._rows_and_cache(layer, sum(queries), 1)
            meta = state.plan(AttentionBatch(queries, prefixes, pages))
            assert (layer.path(meta) == "mha_chunked") == (one_shot < 2048)
            layer(x, meta, cache)
        return {kind for kind in kinds.seen - warm if "mla" in kind[0] or "merge" in kind[0]}

    # Steps of four requests bring 65,536 tokens at most.
    assert late(2000) == set()
    layer = latent(16, thresholds=MLAThresholds(one_shot=4 * 16384))
    assert not [job for job in precompile.jobs_of("mla", layer, _examples, 2048, 4, step) if "chunks" in job.label]


@pytest.mark.parametrize("h200", [("flashinfer",)], indirect=True)
@pytest.mark.parametrize("fails", [False, True], ids=["built", "fails"])
def test_what_only_long_contexts_take_is_built(h200: None, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS's decode has XQA in its tables of 16,384 and 65,536 cached tokens, and in that of 4,096 it has not."""
    built: set[str] = set()
    wanted: list[str] = []
    told: list[Module] = []

    def unbuilt(layer: str, backend: Any, cfg: Any, where: Any) -> str | None:
        lacks = backend.name == "xqa" and builds.entry(layer, backend.name, cfg, where) not in built
        return builds.UNBUILT if lacks else None

    def record(done: Any, tokens: int) -> list[str]:
        names = {builds.entry(layer, row.name, cfg, where) for layer, row, cfg, where in done}
        built.update(name for name in names if "=xqa" in name)
        return sorted(built)

    def begin(self: PackageBuilds, modules: Any) -> None:
        told[:] = modules
        wanted.extend(module.label for module in told)

    def ended(self: PackageBuilds) -> list[Built]:
        return [Built(module, 1.0, "error: no space" if fails else None) for module in told]

    def failed(layer: str, backend: Any, cfg: Any, where: Any) -> str | None:
        return builds._failed.get(builds.entry(layer, backend.name, cfg, where))  # of a described device, too

    monkeypatch.setattr(builds, "_failed", {})
    monkeypatch.setattr(builds, "unbuilt", unbuilt)
    monkeypatch.setattr(builds, "record", record)
    monkeypatch.setattr(builds, "failed", failed)
    monkeypatch.setattr(PackageBuilds, "begin", begin)
    monkeypatch.setattr(PackageBuilds, "ended", ended)
    monkeypatch.setattr(PackageBuilds, "ready", lambda self, package: True)
    layer = LAYERS["gpt_oss"]()
    deep = Step(128, 128, 1, 20000)

    def core() -> str:
        return type(layer.core(deep, 128)).__name__

    assert core() == "TritonGQA"  # chosen before the warm-up, when nothing is built
    Kinds(monkeypatch)
    epoch = epoch_of(model := torch.nn.Sequential(layer))
    before = epoch.value
    report = fl.warmup(model, max_tokens=64, max_batch=128, progress=False, probe=False)
    report.watch.close()
    assert len(wanted) == len(set(wanted)) and any("gen_xqa_module" in label for label in wanted)
    assert core() == ("TritonGQA" if fails else "XQA") and layer.built_only
    assert (epoch.value > before) and bool(built) != fails
    # A layer of the same kind, and a second warm-up, find it.
    layer = LAYERS["gpt_oss"]()
    assert core() == ("TritonGQA" if fails else "XQA")
