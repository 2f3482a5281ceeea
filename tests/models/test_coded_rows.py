"""Rows that are gathered as codes have the bits of rows that are gathered and then quantised; two ranks over Gloo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.comm import seam as seam_module
from fastlayers.comm.gather_rows.collective import CollectiveGatherRows
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.seam import Seam
from fastlayers.layer import trust
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers.linear.fp8_block.torch import TorchFP8Linear
from fastlayers.linear.fp8_block.triton import TritonFP8Linear
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.quant.coded_rows import CodedRows, layout_of_codes, linear_of
from fastlayers.quant.group_quant.layer import quantize_groups
from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import family_of
from fastlayers_server.random_models import fill_random

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMMON = {
    "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "quantization_config": FP8, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
# Codes are read by attention and by a dense MLP; in front of experts a router wants the rows.
DENSE = COMMON | {
    "model_type": "qwen3", "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128,
}  # fmt: skip
LATENT = COMMON | {
    "model_type": "deepseek_v3", "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip


def of_codes(product: Any) -> Any:
    """Return what multiplies on a CPU, also of what came as codes."""

    def multiply(self: Any, x: Any, *operands: Any) -> torch.Tensor:
        if type(x) is not CodedRows:
            found: torch.Tensor = product(self, x, *operands)
            return found
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "quantize", lambda rows: (x.codes, x.scales))
            return multiply(self, torch.empty(x.shape, dtype=torch.bfloat16), *operands)

    return multiply


@contextmanager
def model_of(config: dict[str, Any], parallel: fl.ParallelSpec) -> Iterator[Any]:
    """Give a model over such ranks whose FP8 products take codes, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FP8BlockLinear, "codes_layout", lambda self, rows: "row")
        patch.setattr(TorchFP8Linear, "__call__", of_codes(TorchFP8Linear.__call__))
        patch.setattr(seam_module, "connected", lambda parallel, device: parallel.tp.size > 1)
        family: Any = family_of(config)
        model = family(family.config_class.from_hf(config), parallel=parallel, dtype=torch.bfloat16, page_size=16)
        fill_random(model.eval())
        fl.finalize(model)
        assert "as codes and scales where FP8 products read them" in str(fl.explain(model))
        yield model


@torch.inference_mode()
def hidden_states(rank: Rank, config: dict[str, Any], counts: list[int]) -> list[tuple[bool, int]]:
    """Return for prompts of so many tokens whether codes made no difference, and how often codes were gathered."""
    gathered: list[int] = []
    plain = CollectiveGatherRows.__call__

    def counted(self: Any, x: torch.Tensor, sizes: Any = None) -> Any:
        gathered.append(x.shape[0])
        return plain(self, x, sizes)

    found = []
    with pytest.MonkeyPatch.context() as patch, model_of(config, rank.spec()) as model:
        patch.setattr(CollectiveGatherRows, "__call__", counted)
        assert model.seam is not None and model.seam.codes and model.seam.chosen["rows as codes"] == "True"
        model.spread_rows = range(2, 200)
        for count in counts:
            outputs, gathered[:] = [], []
            for model.seam.codes in (True, False):
                state = AttentionState(1, count, 8, 16, "cpu")
                caches = fl.kv_cache_spec(model, page_size=16, dtype=model.kv_dtype).allocate(9, "cpu")
                meta = state.plan(AttentionBatch((count,), (0,), [list(range(1, 9))]))
                outputs.append(model(torch.arange(count) % 60, meta, caches))
            found.append((torch.equal(*outputs) and bool(outputs[0].isfinite().all()), len(gathered)))
    return found


@pytest.mark.parametrize(("config", "times"), [(DENSE, 3), (LATENT, 2)], ids=["gqa", "mla"])
def test_codes_change_no_bit_of_a_model(config: dict[str, Any], times: int) -> None:
    # Attention, but for the first, and dense MLPs read 40 tokens as codes; of 41 rows one is padding, which is cut off.
    assert world(2).run(hidden_states, config, [40, 41]) == [[(True, times), (True, 0)]] * 2


@torch.inference_mode()
def groups(rank: Rank, config: dict[str, Any], attn_dp: int, counts: tuple[int, ...]) -> list[tuple[bool, list[int]]]:
    """Return for both kinds of steps whether codes made no difference, and of how many rows each rank sent codes."""
    sent: list[int] = []
    plain = CollectiveGatherRows._coded

    def counted(self: Any, codes: torch.Tensor, *how: Any) -> Any:
        sent.append(codes.shape[0])
        return plain(self, codes, *how)

    spec, found = rank.spec(attn_dp=attn_dp), []
    count = counts[spec.attn_dp.rank]
    with pytest.MonkeyPatch.context() as patch, model_of(config, spec) as model:
        patch.setattr(CollectiveGatherRows, "_coded", counted)
        assert model.moves is not None and model.moves.codes and (model.seam is None) == (attn_dp == rank.size)
        for extend in (False, True):
            outputs, sent[:] = [], []
            for model.moves.codes in (True, False):
                state = AttentionState(1, count, 8, 16, "cpu")
                caches = fl.kv_cache_spec(model, page_size=16, dtype=model.kv_dtype).allocate(9, "cpu")
                meta = state.plan(AttentionBatch((count,), (0,), [list(range(1, 9))]))
                step = StepTokens.plan(counts, attn_tp=spec.attn_tp.size, extend=extend)
                outputs.append(model(torch.arange(count) % 60, meta, caches, step)[:count])
            found.append((torch.equal(*outputs) and bool(outputs[0].isfinite().all()), [*sent]))
    return found


@pytest.mark.parametrize(("config", "times"), [(DENSE, 2), (LATENT, 1)], ids=["gqa", "mla"])
@pytest.mark.parametrize("size", [2, 4])
def test_groups_send_codes_and_change_no_bit(config: dict[str, Any], times: int, size: int) -> None:
    """Each rank quantises its own rows: padded to the fullest group's, and in prompts as many as there are."""
    counts = (40, 22) if size == 4 else (40, 21)
    shares = [rows * 2 // size for rows in counts for _ in range(size // 2)]
    config = config | {name: 512 for name in ("intermediate_size", "moe_intermediate_size") if name in config}
    for rank, found in enumerate(world(size).run(groups, config, 2, counts)):
        assert found == [(True, [shares[0]] * times), (True, [shares[rank]] * times)]


# In the interpreter: of as few columns as make a group, or two where several are to be written.
FEW_HEADS = {"num_attention_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 128}
DENSE_OF_ONE, LATENT_OF_ONE = (
    config | {name: size for name, size in (FEW_HEADS | keys).items() if name in config}
    for config, keys in ((DENSE, {"num_key_value_heads": 1}), (LATENT, {"num_key_value_heads": 2}))
)


@torch.inference_mode()
@pytest.mark.parametrize(("config", "norms"), [(DENSE_OF_ONE, 4), (LATENT_OF_ONE, 5)], ids=["gqa", "mla"])
def test_norms_of_one_rank_write_codes_and_change_no_bit(
    config: dict[str, Any], norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and dense MLPs read codes, and of latent attention the product behind the queries' norm."""
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rms_norm=triton,fp8_linear=triton")
    family: Any = family_of(config)
    model = family(family.config_class.from_hf(config), dtype=torch.bfloat16, device="cpu", page_size=16).eval()
    fill_random(model)
    fl.finalize(model)
    layer = model.decoder.layers[1]
    written: list[int] = []
    plain = RMSNorm.coded

    def counted(self: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, layout: str) -> Any:
        found = plain(self, x, residual, layout)
        written.append(0 if found is None else x.shape[0])
        return found

    def step(tokens: int) -> tuple[torch.Tensor, list[int]]:
        written.clear()
        state = AttentionState(1, tokens, 8, 16, "cpu")
        caches = fl.kv_cache_spec(model, page_size=16, dtype=model.kv_dtype).allocate(9, "cpu")
        meta = state.plan(AttentionBatch((tokens,), (0,), [list(range(1, 9))]))
        return model(torch.arange(tokens) % 60, meta, caches), [*written]

    monkeypatch.setattr(RMSNorm, "coded", counted)
    coded, counts = step(9)
    assert counts == [9] * norms and coded.isfinite().all()
    # One row is quantised by the product itself, whoever looks sees rows, and so does a copy that is asked anew.
    with monkeypatch.context() as patch:  # what it gives nobody looks at, and it takes the interpreter longest
        patch.setattr(TritonFP8Linear, "__call__", lambda self, x, *rest: x.new_zeros(len(x), self.cfg.out_features))
        assert step(1)[1] == []
    seen: list[type] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda module, given: seen.append(type(given[0]))),
        layer.input_layernorm.register_forward_hook(lambda module, given, y: seen.append(type(y[0]))),
    ]
    watched, counts = step(9)
    assert torch.equal(watched, coded) and set(seen) == {torch.Tensor} and len(counts) == norms - 1
    for hook in hooks:
        hook.remove()
    model = copy.deepcopy(model)
    again, counts = step(9)
    assert torch.equal(again, coded) and counts == [9] * norms
    # A reader that somebody put in its place checks what comes, and so does a layer that nobody vouched for.
    layer = model.decoder.layers[1]
    linear = linear_of(layer.self_attn)
    other = fl.FP8BlockLinear(linear.local_in, linear.local_out, backend="triton")
    other.load_state_dict(linear.state_dict())
    setattr(layer.self_attn, type(layer.self_attn).reads, other)
    again, counts = step(9)
    assert torch.equal(again, coded) and len(counts) == norms - 1
    written.clear()
    state = AttentionState(1, 9, 8, 16, "cpu")
    cache = fl.kv_cache_spec(model, page_size=16, dtype=model.kv_dtype).allocate(9, "cpu")[0]
    meta = state.plan(AttentionBatch((9,), (0,), [list(range(1, 9))]))
    alone = model.decoder.layers[0](Hidden.start(torch.randn(9, 256).bfloat16()), meta, cache, None)
    assert alone.tensor.isfinite().all() and len(written) == norms - 4
    monkeypatch.setattr(RMSNorm, "coded", lambda *given: None)
    assert torch.equal(step(9)[0], coded)


@torch.inference_mode()
def test_checks_of_debug_mode_see_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_BACKEND", "rms_norm=triton,fp8_linear=triton")
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    family: Any = family_of(LATENT)
    model = family(family.config_class.from_hf(LATENT), dtype=torch.bfloat16, device="cpu", page_size=16).eval()
    fill_random(model)
    fl.finalize(model)
    state = AttentionState(1, 9, 8, 16, "cpu")
    caches = fl.kv_cache_spec(model, page_size=16, dtype=model.kv_dtype).allocate(9, "cpu")
    monkeypatch.setattr(RMSNorm, "coded", lambda *given: pytest.fail("nothing is trusted"))
    meta = state.plan(AttentionBatch((9,), (0,), [list(range(1, 9))]))
    assert model(torch.arange(9), meta, caches).isfinite().all()


@torch.inference_mode()
def test_who_takes_codes() -> None:
    made = fl.FP8BlockLinear(256, 128, backend="triton")
    made.weight.data.view(torch.uint8).random_(0, 100)
    x = torch.randn(40, 256, dtype=torch.bfloat16)
    assert layout_of_codes(made, 40) is None  # it would check what comes
    trust(made)
    layout = layout_of_codes(made, 40)
    assert layout == "col" and layout_of_codes(made, 1) is None  # one token is quantised by the product itself
    codes = CodedRows(*quantize_groups(x, scale_layout=layout))
    assert codes.shape == x.shape and codes.numel() == x.numel() and not codes.requires_grad
    assert torch.equal(made(codes), made(x))
    others = (
        fl.FP8BlockLinear(256, 128, scale_fmt="ue8m0", backend="triton"),
        fl.FP8BlockLinear(256, 128, backend="torch"), fl.Linear(256, 128),
    )  # fmt: skip
    trust(*others)
    assert [layout_of_codes(each, 40) for each in others] == [None] * 3


class Reader(torch.nn.Module):
    reads = "first"

    def __init__(self) -> None:
        super().__init__()
        self.first = fl.FP8BlockLinear(256, 128, backend="triton")
        trust(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


class Again(Reader):
    """Reads its input twice, which its class says nothing of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean()


def test_whoever_looks_at_an_input_sees_rows() -> None:
    reader, seen = Reader(), lambda module, given: None
    assert layout_of_codes(reader, 40) == "col" and layout_of_codes(Again(), 40) is None
    for module in (reader, reader.first):
        hook = module.register_forward_pre_hook(seen)
        assert layout_of_codes(reader, 40) is None
        hook.remove()
        module.forward = module.forward  # type: ignore[method-assign]
        assert layout_of_codes(reader, 40) is None
        del module.forward
    hook = register_module_forward_pre_hook(seen)
    assert layout_of_codes(reader, 40) is None
    hook.remove()
    assert layout_of_codes(reader, 40) == "col"


def test_a_hidden_size_of_no_whole_groups_has_no_codes() -> None:
    spec = fl.ParallelSpec()
    assert not Seam(spec, None, 192, torch.float32, torch.device("cpu")).codes
    assert Seam(spec, None, 256, torch.float32, torch.device("cpu")).codes
