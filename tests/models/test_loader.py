"""Loading checkpoints: memory, shards, dtypes, spellings of the configuration, errors that change nothing, bad data."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.embedding.layer import VocabEmbedding
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.weights import Slot, slots
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.config import DeepseekConfig
from fastlayers_models.convert import convert_to_fp8_block
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.loading import load_weights

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, Feeder, Tensors, rewrite, tensors_of, write
from tiny_models import BASE, YARN, Variation, hf_model, prompts, relative_rms

MIB = 2**20
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v3")
    hf_model(Variation("v3", changes={"rope_parameters": YARN, "attention_bias": True}), made)
    return made


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp8") / "made"
    convert_to_fp8_block(SHIPPED, made, include_ragged=True)
    return made


def ours(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(path, dtype=dtype, page_size=16, **options)


def logits_of(model: DeepseekForCausalLM) -> torch.Tensor:
    rows = prompts(2)
    steps = [("extend", [len(row) - 2 for row in rows]), *[("decode", [1, 1])] * 2]
    return torch.cat(list(Feeder(model, rows).run(steps).values()))


# ---- memory ----------------------------------------------------------------------------------------------------

MEASURE = """
import re, sys, torch
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_models.loading import load_weights

def peak():
    # Not getrusage: its peak outlives exec, so it would be that of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

small = DeepseekForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
before = peak()
model = DeepseekForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
print(peak() - before, sum(p.numel() * p.element_size() for p in model.parameters()), float(model.lm_head.weight[5, 5]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_peak_memory_is_the_parameters_and_one_shard(folder: Path, tmp_path: Path) -> None:
    config = BASE | dict(
        model_type="deepseek_v3", hidden_size=1024, intermediate_size=6144, num_hidden_layers=8, first_k_dense_replace=8
    )
    small = DeepseekForCausalLM(DeepseekConfig.from_hf(config), device="meta")
    shared: dict[torch.Size, torch.Tensor] = {}
    tensors: Tensors = {}
    for name, slot in slots(small):
        shape = torch.Size(slot.shape)
        tensors[name] = shared.setdefault(shape, torch.full(shape, 0.25, dtype=torch.bfloat16)).clone()
    path = write(tmp_path / "large", config, tensors, shards=4)
    del tensors
    largest = max(file.stat().st_size for file in path.glob("*.safetensors"))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    growth, parameters, value = (float(word) for word in run.stdout.split())
    print(f"grew by {growth / MIB:.0f} MiB: parameters {parameters / MIB:.0f}, largest shard {largest / MIB:.0f}")
    assert parameters > 2.5 * largest > 200 * MIB and value == 0.25
    # Holding all shards, or a second copy of the parameters, would cost three times as much as this allows.
    assert 0.9 * parameters < growth < parameters + largest + 32 * MIB


class Counting(Checkpoint):
    """A checkpoint that knows which of the tensors it handed out are still alive."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.handed_out: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0
        self.files: list[Path] = []

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        self.most_alive = max(self.most_alive, sum(ref() is not None for ref in self.handed_out))
        self.files.append(self.file_of[name])
        value = super().read(name, index)
        self.handed_out.append(weakref.ref(value))
        return value


def test_tensors_are_read_one_at_a_time_and_shards_one_after_another(folder: Path, tmp_path: Path) -> None:
    checkpoint = Counting(rewrite(folder, tmp_path / "sharded", shards=3))
    model = DeepseekForCausalLM(DeepseekConfig.from_hf(checkpoint.config | {"num_nextn_predict_layers": 0}))
    load_weights(model, checkpoint, ignore=model.ignored_tensors)
    assert len(checkpoint.handed_out) == len(tensors_of(folder)) and checkpoint.most_alive == 0
    assert len({str(file) for file in checkpoint.files}) == 3 and checkpoint.files == sorted(checkpoint.files)


@pytest.mark.parametrize("rank", range(4))
def test_every_slot_of_a_rank_holds_its_slice_of_the_file(folder: Path, rank: int) -> None:
    spec = ParallelSpec.grid(4, rank, attn_dp=2, ep=2)
    model = ours(folder, parallel=spec)
    stored = tensors_of(folder)
    checked = 0
    for name, slot in slots(model):
        wanted = stored[name][slot.index] if slot.index else stored[name]
        assert torch.equal(slot.dest, slot.convert(wanted) if slot.convert else wanted), name
        checked += 1
    assert checked > 50
    held = sum(p.numel() for p in model.parameters())
    assert held < 0.75 * sum(t.numel() for t in stored.values())


def test_more_ranks_than_the_vocabulary_fills(folder: Path) -> None:
    # 160 rows over 128 ranks: two each, and nothing for the last 48.
    name, held = "model.embed_tokens.weight", []
    for rank in (0, 79, 80, 127):
        table = VocabEmbedding(160, 64, shard=ParallelSpec.grid(128, rank).column(), dtype=torch.float32)
        (_, slot), *_ = table.slots()
        slot.fill(name, Checkpoint(folder).read(name, slot.index))
        held.append(slot.dest.shape[0])
        assert table.weight.shape == (2, 64)
    assert held == [2, 2, 0, 0]


# ---- shards and spellings --------------------------------------------------------------------------------------


def test_sharded_checkpoint_equals_the_single_file(folder: Path, tmp_path: Path) -> None:
    whole, parts = ours(folder), ours(rewrite(folder, tmp_path / "sharded", shards=5))
    wanted = dict(whole.named_parameters())
    assert all(torch.equal(p, wanted[n]) for n, p in parts.named_parameters())


def test_broken_indices_are_named(folder: Path, tmp_path: Path) -> None:
    def sharded(name: str) -> tuple[Path, dict[str, Any]]:
        path = rewrite(folder, tmp_path / name, shards=3)
        return path, json.loads((path / INDEX).read_text())

    path, _ = sharded("missing")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not there: model-00002-of-00003\.safetensors"):
        ours(path)

    path, index = sharded("elsewhere")
    name = "model.norm.weight"
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"safetensors: model\.norm\.weight"):
        ours(path)

    for number, text in enumerate(("{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}')):
        path, _ = sharded(f"text{number}")
        (path / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            ours(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3"])
def test_unreadable_configurations_are_named(folder: Path, tmp_path: Path, text: str | None) -> None:
    path = rewrite(folder, tmp_path / "made")
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ours(path)


def test_values_that_no_model_can_have_are_named(folder: Path) -> None:
    config = Checkpoint(folder).config
    bad = {
        "hidden_size": (None, "64", True, 64.0), "num_experts_per_tok": (0,), "n_routed_experts": (-8,),
        "n_group": (3,), "hidden_act": ("gelu",), "topk_method": ("best",),
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            family = {"model_type": "deepseek_v2"} if name == "topk_method" else {}
            with pytest.raises(ArgumentError, match="DeepseekConfig: ") as caught:
                DeepseekConfig.from_hf(config | family | {name: value})
            assert name in str(caught.value) or (name == "n_group" and "n_routed_experts" in str(caught.value))
    for method, message in (("hqq", "quant_method is 'hqq'"), ("awq", "quantization_config.bits is None; accepted: 4")):
        with pytest.raises(ArgumentError, match=message):
            DeepseekConfig.from_hf(config | {"quantization_config": {"quant_method": method}})


def test_both_spellings_of_yarn_give_the_same_logits(folder: Path, tmp_path: Path) -> None:
    def legacy(config: dict[str, Any]) -> None:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}

    def without(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}

    new = logits_of(ours(folder))
    assert torch.equal(logits_of(ours(rewrite(folder, tmp_path / "legacy", config=legacy))), new)
    assert relative_rms(logits_of(ours(rewrite(folder, tmp_path / "plain", config=without))), new) > 1e-2


def test_tied_embeddings(folder: Path, tmp_path: Path) -> None:
    tie = dict(config=lambda c: c.update(tie_word_embeddings=True))
    copied = rewrite(
        folder, tmp_path / "copied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    wanted = logits_of(ours(copied))
    for name, source, change in (
        ("absent", folder, lambda t: t.pop("lm_head.weight")),
        ("present", copied, lambda t: None),
    ):
        model = ours(rewrite(source, tmp_path / name, change, **tie))  # type: ignore[arg-type]
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits_of(model), wanted), name
    # transformers would not tie them.
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true .*but lm_head\.weight is not model\.embed"):
        ours(rewrite(folder, tmp_path / "another", **tie))  # type: ignore[arg-type]
    untied = rewrite(folder, tmp_path / "untied", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        ours(untied)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_loads_into_every_other(
    folder: Path, tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"

    def cast(tensors: Tensors) -> None:
        tensors |= {n: t.to(source) for n, t in tensors.items() if n != bias}

    path = rewrite(folder, tmp_path / "cast", cast)
    model, stored = ours(path, target), tensors_of(path)
    for name, slot in slots(model):
        assert slot.index == () or all(isinstance(part, slice) for part in slot.index)
        value = stored[name][slot.index] if slot.index else stored[name]
        assert torch.equal(slot.dest, (slot.convert(value) if slot.convert else value).to(slot.dest.dtype)), name
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.model.layers[1].self_attn.o_proj.weight.dtype == target
    logits = logits_of(model)
    assert logits.dtype == target and bool(logits.isfinite().all())
    # Against the untouched fp32 weights, in the median of the rows (a near tie of two experts may fall the other way):
    # bf16 keeps 8 bits and fp16 11, and three layers round some twenty times each.
    coarsest = max({torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[d] for d in (source, target))
    wanted = logits_of(ours(folder))
    per_row = (logits.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(per_row.median()) < 10 * coarsest


# ---- errors that change nothing --------------------------------------------------------------------------------


def spoil(tensors: Tensors, name: str, value: torch.Tensor) -> None:
    tensors[name] = value


QKV = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
MISFITS = {
    "scale grid": (
        True, lambda t: spoil(t, f"{QKV}_scale_inv", torch.ones(4, 1)), rf"{QKV}_scale_inv has shape \(4, 1\)",
    ),
    "scale grid of an expert": (
        True, lambda t: spoil(t, f"{GATE}_scale_inv", torch.ones(2, 1)), rf"{GATE}_scale_inv has shape \(2, 1\)",
    ),
    "no scale": (True, lambda t: t.pop(f"{QKV}_scale_inv"), f"missing tensors: {QKV}_scale_inv"),
    "no scale of an expert": (True, lambda t: t.pop(f"{GATE}_scale_inv"), f"missing tensors: {GATE}_scale_inv"),
    "bf16 for e4m3": (True, lambda t: spoil(t, QKV, t[QKV].bfloat16()), f"wrong number formats: {QKV} is BF16"),
    "int8 for e4m3": (True, lambda t: spoil(t, GATE, t[GATE].view(torch.int8)), f"wrong number formats: {GATE} is I8"),
    "e4m3 for bf16": (
        False, lambda t: spoil(t, QKV, t[QKV].to(torch.float8_e4m3fn)), f"wrong number formats: {QKV} is F8_E4M3",
    ),
    "scale without format": (
        False, lambda t: spoil(t, f"{QKV}_scale_inv", torch.ones(5, 1)), f"unexpected tensors: {QKV}_scale_inv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_named_and_nothing_is_written(fp8_folder: Path, tmp_path: Path, case: str) -> None:
    quantised, change, message = MISFITS[case]
    source = fp8_folder if quantised else SHIPPED
    model = ours(source, torch.bfloat16)
    for parameter in model.parameters():
        parameter.view(torch.uint8).fill_(57)
    broken = Checkpoint(rewrite(source, tmp_path / "broken", change))
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, broken, ignore=model.ignored_tensors)
    assert all(bool((p.view(torch.uint8) == 57).all()) for p in model.parameters())


def test_truncated_shard_is_named_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    path = rewrite(folder, tmp_path / "made", shards=3)
    last = path / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-64])
    model = ours(folder)
    for parameter in model.parameters():
        parameter.fill_(57)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: truncated or corrupt"):
        load_weights(model, Checkpoint(path), ignore=model.ignored_tensors)
    assert all(bool((p == 57).all()) for p in model.parameters())


def test_a_long_list_of_names_is_cut(folder: Path, tmp_path: Path) -> None:
    path = rewrite(folder, tmp_path / "made", lambda t: [t.pop(n) for n in list(t) if ".self_attn." in n])
    with pytest.raises(CheckpointError, match=r"missing tensors: .*kv_a_layernorm\.weight, .* and \d+ more"):
        ours(path)


# ---- bad data at run time --------------------------------------------------------------------------------------


def batch_of(model: DeepseekForCausalLM, page: int, state: AttentionState | None = None) -> Any:
    state = state or AttentionState(1, 8, 1, model.page_size)
    return state.plan(AttentionBatch((4,), (0,), [[page]]))


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_debug_mode_finds_bad_ids_pages_and_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    model = ours(folder)
    feeder = Feeder(model, [[3, 4, 5, 6]])
    good = torch.tensor([3, 4, 5, 6])
    meta = feeder.plan([4], "extend")[1]
    for bad in (160, -1, 2**40):
        with pytest.raises(ArgumentError, match=r"VocabEmbedding: ids .* accepted: 0 to 159"):
            model(torch.tensor([3, bad, 5, 6]), meta, feeder.caches)
    pages = feeder.caches[0].num_pages
    for page in (pages, -1):
        with pytest.raises(ArgumentError, match=rf"page_table\[0\].*pages in \[0, {pages}\)"):
            feeder.state.plan(AttentionBatch((4,), (0,), [[page]]), num_pages=pages)
    with pytest.raises(ArgumentError, match=rf"MLAAttention: meta\.page_table .*accepted: .*{pages}"):
        model(good, batch_of(model, pages), feeder.caches)
    with pytest.raises(ArgumentError, match=r"AttentionState\.plan: page_table\[0\] is \[-1\]"):
        batch_of(model, -1)
    assert all(int(cache.keys.count_nonzero()) == 0 for cache in feeder.caches)
    assert model(good, meta, feeder.caches).isfinite().all()


def test_checks_of_data_cost_nothing_when_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = {"aten::_local_scalar_dense", "aten::min", "aten::max", "aten::aminmax", "aten::nonzero"}
    ran: dict[str, list[str]] = {}
    for setting in ("0", "1"):
        monkeypatch.setenv("FASTLAYERS_DEBUG", setting)
        feeder = Feeder(ours(folder), [[3, 4, 5, 6, 7]])
        feeder.run([("extend", [4])])
        ids, meta, step, _ = feeder.plan([1], "decode")
        with Operators() as operators, torch.inference_mode():
            feeder.model(ids, meta, feeder.caches, step)
        ran[setting] = operators.names
    assert len(ran["0"]) > 50 and not reading & set(ran["0"])
    assert reading & set(ran["1"])


def test_nan_in_one_request_stays_there(folder: Path) -> None:
    rows = prompts(3)
    rows = [[t for t in row if t != 7] for row in rows]
    plain = ours(folder)
    steps = [("extend", [len(row) - 3 for row in rows]), *[("decode", [1] * 3)] * 3]
    wanted = Feeder(plain, rows).run(steps)
    for value in (float("nan"), float("inf"), -float("inf")):
        model = ours(folder)
        model.model.embed_tokens.weight[7] = value
        routed: list[torch.Tensor] = []
        for module in model.modules():
            if type(module).__name__ == "TopKRouter":
                module.register_forward_hook(lambda _, args, out, to=routed: to.append(out[1]))
        # From its fifth token on, the request in the middle is not finite. (The tokens before it may follow: they are
        # in the same product of weights and values, and zero times NaN is NaN.)
        bad = [rows[0], [*rows[1][:4], 7, *rows[1][5:]], rows[2]]
        found = Feeder(model, bad).run(steps)
        assert relative_rms(found[0], wanted[0]) < 1e-6 and relative_rms(found[2], wanted[2]) < 1e-6
        assert not found[1][4:].isfinite().any()
        ids = torch.cat(routed)
        assert len(routed) == 2 * len(steps) and int(ids.min()) >= 0 and int(ids.max()) < 8
        assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_fp16_cannot_hold_are_named(dtype: torch.dtype) -> None:
    slot = Slot(torch.zeros(3, dtype=torch.float16), (3,))
    with pytest.raises(CheckpointError, match=r"w: up to 7\d+ in the checkpoint, which float16 cannot hold"):
        slot.fill("w", torch.tensor([1.0, -70000.0, torch.inf], dtype=dtype))
    assert not slot.dest.any()
    slot.fill("w", torch.tensor([65280.0, -torch.inf, torch.nan], dtype=dtype))
    assert slot.dest[1] == -torch.inf and slot.dest[2].isnan()
