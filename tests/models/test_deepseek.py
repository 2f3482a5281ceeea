"""DeepSeek from our layers against Hugging Face: logits at every step, greedy tokens, paths, MTP, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.attention.mla.prefix_chunks import MLAThresholds
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.device import DESCRIBED
from fastlayers.errors import AllocatorOverflowError, ArgumentError, CheckpointError, UnknownModelError
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.config import DeepseekConfig
from fastlayers_models.deepseek import DeepseekForCausalLM, DeepseekMoE, fused_experts
from fastlayers_models.generate import Generator
from fastlayers_server.known_models import DEEPSEEK_V3

sys.path.insert(0, str(Path(__file__).parent))
from tiny_models import VARIATIONS, Variation, hf_model, prompts, relative_rms

STEPS = 32  # from prompts of 40 to 60: across a page of 64 and the length before rope is scaled
IDS = [v.name for v in VARIATIONS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function: variation -> (Hugging Face model, folder), made once."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(variation: Variation) -> tuple[Any, Path]:
        if variation.name not in made:
            folder = tmp_path_factory.mktemp(variation.name)
            made[variation.name] = (hf_model(variation, folder), folder)
        return made[variation.name]

    return get


def ours(folder: Path, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


@torch.inference_mode()
def teacher_forced(model: DeepseekForCausalLM, rows: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
    """Return every row's logits ``[len, vocab]``, fed in steps of ``chunks`` tokens, then one by one."""
    lengths = [len(row) for row in rows]
    table = whole_pages(lengths, model.page_size)
    spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
    caches = spec.allocate(1 + sum(map(len, table)), model.device)
    state = AttentionState(len(rows), sum(lengths), max(map(len, table)), model.page_size, model.device)
    done, logits = [0] * len(rows), [[] for _ in rows]  # type: ignore[var-annotated]
    sizes = list(chunks)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        size = sizes.pop(0) if sizes else 1
        counts = [min(size, n - d) for d, n in zip(done, lengths, strict=True)]
        ids = [t for row, d, c in zip(rows, done, counts, strict=True) for t in row[d : d + c]]
        meta = state.plan(AttentionBatch(tuple(counts), tuple(done), table))
        out = model.compute_logits(model(torch.tensor(ids), meta, caches)).split(counts)
        for i, part in enumerate(out):
            logits[i].append(part)
        done = [d + c for d, c in zip(done, counts, strict=True)]
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("variation", VARIATIONS, ids=IDS)
def test_logits_and_greedy_tokens_equal_hugging_face(saved: Any, variation: Variation) -> None:
    reference, folder = saved(variation)
    model = ours(folder)
    rows = prompts(variation.batch)
    generated = Generator(model, max_batch=variation.batch).generate(rows, max_new_tokens=STEPS, eos_ids=())
    # Teacher-forced over prompt and continuation: a prefill, then one token a step.
    full = [row + tokens for row, tokens in zip(rows, generated, strict=True)]
    logits = teacher_forced(model, full, [len(rows[0])])
    with torch.inference_mode():
        for row, tokens, found in zip(full, generated, logits, strict=True):
            wanted = reference(torch.tensor([row])).logits[0]
            # Each token is what Hugging Face's model takes behind those before: its greedy continuation.
            assert len(tokens) == STEPS and wanted[-1 - STEPS : -1].argmax(-1).tolist() == tokens
            per_step = (found - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)
            assert relative_rms(found, wanted) <= 1e-5 and float(per_step.max()) <= 5e-5


@pytest.mark.parametrize("variation", [v for v in VARIATIONS if v.changes.get("n_shared_experts", 1)][:3], ids=str)
def test_shared_experts_among_the_routed_equal_hugging_face(saved: Any, variation: Variation) -> None:
    reference, folder = saved(variation)
    model = ours(folder, fuse_shared=True)
    blocks = [module for module in model.modules() if isinstance(module, DeepseekMoE)]
    shared = model.config.n_shared_experts
    assert blocks and all(block.shared_experts is None and block.experts.cfg.num_shared == shared for block in blocks)
    rows = prompts(2)
    logits = teacher_forced(model, rows, [40])
    with torch.inference_mode():
        for row, found in zip(rows, logits, strict=True):
            assert relative_rms(found, reference(torch.tensor([row])).logits[0]) <= 1e-5


def test_which_shared_experts_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(table: bool = False, device: str = "cuda", ep: int = 1, asked: bool | None = None, **more: Any) -> int:
        config = DeepseekConfig.from_hf(DEEPSEEK_V3 | more)
        parallel = ParallelSpec.grid(8, 0, ep=ep)
        found: list[str] = []

        def find(layer: str, key: str, device: Any) -> Path | None:
            found.append(f"{layer} {key}")
            return Path() if table else None

        monkeypatch.setattr("fastlayers_models.deepseek.find", find)
        monkeypatch.setattr("fastlayers_models.deepseek.as_device", lambda device: DESCRIBED["H200"])
        context: Any = SimpleNamespace(config=config, parallel=parallel, fuse_shared=asked, dtype=torch.bfloat16,
                                       device=torch.device(device))  # fmt: skip
        count = fused_experts(context, "model.layers.5.mlp")
        assert found in ([], ["fused_moe E=257,k=9,D=7168,I=256,fp8_block,silu"])
        return count

    assert (fused(), fused(table=True), fused(asked=True), fused(table=True, asked=False)) == (0, 1, 1, 0)
    assert fused(table=True, device="cpu") == fused(table=True, ep=2) == fused(table=True, n_shared_experts=0) == 0
    names = [f"model.layers.5.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")]
    quantised = DEEPSEEK_V3["quantization_config"] | {"modules_to_not_convert": ["lm_head", *names]}
    kept: dict[str, Any] = {"quantization_config": quantised}
    assert fused(table=True, **kept) == 0
    for more, why in (
        ({"ep": 2}, "experts are split over 2 ranks"), ({"n_shared_experts": 0}, "there are none"),
        (kept, "formats are fp8_block and none"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"fuse_shared is True, while .*{why}"):
            fused(asked=True, **more)


def test_left_padded_hugging_face_batch_equals_ours(saved: Any) -> None:
    reference, folder = saved(VARIATIONS[0])
    rows = prompts(3)
    width = max(map(len, rows))
    ids = torch.tensor([[2] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    out = reference.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=2
    )
    assert Generator(ours(folder)).generate(rows, max_new_tokens=16, eos_ids=()) == out[:, width:].tolist()


@pytest.mark.parametrize("chunks", [[7, 13, 1, 20], [60], [1] * 5, [33, 40]])
def test_every_path_gives_the_same_logits(saved: Any, chunks: list[int]) -> None:
    _, folder = saved(VARIATIONS[2])
    rows = prompts(2)
    whole = teacher_forced(ours(folder), rows, [64])
    one_shot = MLAThresholds(prefix=1, few=1)
    low, high = (MLAThresholds(prefix=1, one_shot=1, chunk=chunk, few=1) for chunk in (9, 1000))
    for thresholds in (MLAThresholds(), MLAThresholds(prefix=1), one_shot, low, high):
        found = teacher_forced(ours(folder, thresholds=thresholds), rows, chunks)
        assert all(relative_rms(a, b) <= 1e-5 for a, b in zip(found, whole, strict=True)), thresholds


def test_chunked_prefill_generates_the_same_tokens(saved: Any) -> None:
    _, folder = saved(VARIATIONS[0])
    model, rows = ours(folder), prompts(5)
    whole = Generator(model).generate(rows, max_new_tokens=12, eos_ids=())
    assert Generator(model, prefill_tokens=17, max_batch=2).generate(rows, max_new_tokens=12, eos_ids=()) == whole


def test_generator_returns_all_pages_and_stops_at_end_tokens(saved: Any) -> None:
    _, folder = saved(VARIATIONS[0])
    generator, rows = Generator(ours(folder)), prompts(2)
    free = generator.pool.free_pages
    first = generator.generate(rows, max_new_tokens=8, eos_ids=())
    stopped = generator.generate(rows, max_new_tokens=8, eos_ids=(first[0][3],))
    assert stopped[0] == first[0][: first[0].index(first[0][3]) + 1]
    stream = generator.stream(rows, max_new_tokens=8, eos_ids=())
    next(stream)
    stream.close()
    assert generator.pool.free_pages == free


def test_sampling_is_reproducible_and_independent_of_the_batch(saved: Any) -> None:
    from fastlayers.sampler.layer import SamplingParams

    _, folder = saved(VARIATIONS[0])
    model, rows = ours(folder), prompts(3)
    params = [SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=s) for s in (1, 2, 3)]
    together = Generator(model).generate(rows, params, max_new_tokens=10, eos_ids=())
    alone = [
        Generator(model).generate([r], [p], max_new_tokens=10, eos_ids=())[0] for r, p in zip(rows, params, strict=True)
    ]
    assert together == alone
    other = Generator(model).generate(rows[:1], SamplingParams(temperature=0.8, seed=9), max_new_tokens=10, eos_ids=())
    assert other[0] != together[0]


def test_bad_prompts_are_named_and_nothing_runs(saved: Any) -> None:
    generator = Generator(ours(saved(VARIATIONS[0])[1]))
    for bad in ([], [160], [-1], [True]):
        with pytest.raises(ArgumentError, match=r"prompts\[1\]"):
            generator.generate([[5], bad], max_new_tokens=2)
    with pytest.raises(ArgumentError, match="max_length"):
        generator.generate([[5] * 250], max_new_tokens=64)
    small = Generator(ours(saved(VARIATIONS[0])[1]), num_pages=2)
    with pytest.raises(AllocatorOverflowError, match="request 0"):
        small.generate([list(range(3, 60))], max_new_tokens=2)
    assert small.pool.free_pages == 1


def rewrite(folder: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint with its tensors changed by ``change(dict)``."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_extra_and_misshapen_tensors_are_named(saved: Any, tmp_path: Path) -> None:
    folder = saved(VARIATIONS[0])[1]
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    cases = {
        "missing": (lambda t: t.pop(name), "missing tensors: " + name),
        "extra": (
            lambda t: t.update({"model.layers.0.surprise": torch.zeros(2)}),
            "unexpected tensors: model.layers.0.surprise",
        ),
        "shape": (lambda t: t.update({name: t[name][:-1].contiguous()}), "wrong shapes: " + name),
    }
    for case, (change, message) in cases.items():
        with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
            ours(rewrite(folder, tmp_path / case, change))


def test_truncated_and_corrupt_files_are_named(saved: Any, tmp_path: Path) -> None:
    folder = saved(VARIATIONS[0])[1]
    data = (folder / "model.safetensors").read_bytes()
    for case, content in (("short", data[: len(data) // 2]), ("header", b"\xff" * 64), ("empty", b"")):
        target = tmp_path / case
        target.mkdir()
        (target / "config.json").write_text((folder / "config.json").read_text())
        (target / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            ours(target)
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"no .*safetensors"):
        Checkpoint(tmp_path / "none")


def test_unknown_model_type_lists_the_known_ones(saved: Any, tmp_path: Path) -> None:
    target = rewrite(saved(VARIATIONS[0])[1], tmp_path / "other", lambda t: None)
    config = json.loads((target / "config.json").read_text()) | {"model_type": "mamba"}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModelError, match="deepseek_v2, deepseek_v3"):
        ours(target)


def test_wrong_cache_and_hidden_states_are_named(saved: Any) -> None:
    model = ours(saved(VARIATIONS[0])[1])
    layer = model.model.layers[0].self_attn
    meta = AttentionState(1, 8, 1, 16).plan(AttentionBatch((4,), (0,), [[1]]))
    cache = fl.kv_cache_spec(model, page_size=16, dtype=torch.bfloat16).allocate(2)[0]
    with pytest.raises(ArgumentError, match=r"MLAAttention: cache\.keys is bfloat16"):
        layer(torch.zeros(4, 64), meta, cache)
    good = fl.kv_cache_spec(model, page_size=16).allocate(2)[0]
    with pytest.raises(ArgumentError, match="MLAAttention: hidden_states"):
        layer(torch.zeros(5, 64), meta, good)
    with pytest.raises(ArgumentError, match="mtp"):
        model.mtp(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64), meta, good, index=1)
