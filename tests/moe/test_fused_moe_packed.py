"""Experts of weights alone of 4 and 8 bits: layouts by hand, parts of ranks, shared experts, memory, refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.parallel import Axis
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.weight_only.layer import quantize_weight_only
from fastlayers.moe.fused_moe.cases import make_inputs, prepare, run
from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.gpt_oss_slots import StackedExpertNames
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile, plan_for
from fastlayers.moe.fused_moe.reference import ReferenceFusedMoE
from fastlayers.moe.fused_moe.triton import backend as triton_backend
from fastlayers.moe.fused_moe.triton import packed_vector
from fastlayers.moe.fused_moe.triton.backend import TritonFusedMoE
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.moe.placement.planner import EplbConfig
from fastlayers.moe.placement.table import ExpertPlacement
from fastlayers.quant.block_quant import E4M3
from fastlayers.quant.packed_codes import pack_words, run_of, unpack_nibbles
from fastlayers.quant.spec import QuantSpec
from fastlayers.registry.spec import Case
from fastlayers.testing.parity import compare, poisoned_memory
from fastlayers.testing.spec import spec_of
from fastlayers.weights import slots

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

D, INNER, E, K, GROUP = 64, 96, 3, 2, 32
FP32 = torch.float32
Tensors = dict[str, torch.Tensor]
PARTS = {"gate_proj": (INNER, D), "up_proj": (INNER, D), "down_proj": (D, INNER)}
AWQ = QuantSpec("w4a16", group_size=GROUP, zero_point=True, layout="awq")
GPTQ = QuantSpec("w4a16", group_size=GROUP, zero_point=True, layout="gptq")
PACKED = QuantSpec("w4a16", group_size=GROUP, layout="packed")
GPTQ_8 = QuantSpec("w8a16", group_size=GROUP, zero_point=True, layout="gptq_v2")
CHANNEL = QuantSpec("w8a16", layout="plain")
CHANNEL_PACKED = QuantSpec("w8a16", layout="packed")
CHANNEL_GPTQ = QuantSpec("w8a16", zero_point=True, layout="gptq_v2")
FP8 = QuantSpec("fp8_w8a16", layout="plain_tensor")
SPECS = {"awq": AWQ, "gptq": GPTQ, "packed": PACKED, "gptq_8": GPTQ_8, "channel": CHANNEL, "fp8": FP8}


def load(layer: fl.FusedMoE, tensors: Tensors) -> set[str]:
    """Fill a layer as a loader does, and return the names that it read."""
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.experts = layer
    read = set()
    for name, slot in slots(model):
        given = tensors[name]
        assert slot.shape in (tuple(given.shape), tuple(given.shape[:1])), name
        slot.fill(name, given[slot.index] if slot.index else given)
        read.add(name)
    return read


def packed(name: str, weight: torch.Tensor, spec: QuantSpec) -> tuple[Tensors, torch.Tensor]:
    """Return a matrix's tensors in a layout, and what they stand for."""
    (n, k), bits = weight.shape, 4 if spec.format == "w4a16" else 8
    if spec.layout == "plain_tensor":
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(E4M3)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale
    stored, scale, zero = quantize_weight_only(weight, spec.format, spec.group_size, spec.zero_point)
    scale = scale.half().float()
    codes = (unpack_nibbles(stored) if bits == 4 else stored.int() + 128).int()
    zeros = (
        torch.full_like(scale, 8 if bits == 4 else 128) if zero is None else zero.float() + (128 if bits == 8 else 0)
    )
    spread = [each.t().repeat_interleave(k // each.shape[0], 1) for each in (zeros, scale)]
    dense = (codes - spread[0]) * spread[1]
    if spec.layout == "plain":
        return {f"{name}.weight": stored, f"{name}.weight_scale": scale.t().contiguous()}, dense
    if spec.layout == "packed":
        shape, whole = torch.tensor([n, k]), F.pad(codes, (0, -k % (32 // bits)))
        return {
            f"{name}.weight_packed": pack_words(whole, bits, 1), f"{name}.weight_scale": scale.t().contiguous(),
            f"{name}.weight_shape": shape,
        }, dense  # fmt: skip
    awq, less = spec.layout == "awq", int(spec.layout == "gptq")
    found = {
        f"{name}.qweight": pack_words(codes.t(), bits, int(awq), awq=awq), f"{name}.scales": scale.half(),
        f"{name}.qzeros": pack_words((zeros - less).int(), bits, 1, awq=awq),
    }  # fmt: skip
    return found if awq else found | {f"{name}.g_idx": (torch.arange(k) // (spec.group_size or k)).int()}, dense


def checkpoint(spec: QuantSpec, shared: int = 0, inner: int = INNER) -> tuple[Tensors, Tensors]:
    """Return experts in a layout, and dequantised."""
    generator, parts = (
        torch.Generator().manual_seed(0),
        {part: (inner, D) for part in PARTS} | {"down_proj": (D, inner)},
    )
    shapes = {f"mlp.experts.{e}.{part}": shape for e in range(E) for part, shape in parts.items()}
    for part, (n, k) in parts.items() if shared else ():
        shapes[f"mlp.shared_experts.{part}"] = (n, k * shared) if part == "down_proj" else (n * shared, k)
    coded, dense = {}, {}
    for name, shape in shapes.items():
        # Zero points of one less than 0 are none.
        weight = torch.randn(shape, generator=generator) * torch.linspace(0.1, 0.5, shape[1]) + 0.01
        tensors, dense[name] = packed(name, weight, spec)
        coded |= tensors
    return coded, dense


def inputs(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)]).int()
    return torch.randn(tokens, D, generator=generator), torch.rand(tokens, K, generator=generator) + 0.1, ids


def expected(dense: Tensors, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shared: bool) -> torch.Tensor:
    def mlp(prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (dense[f"{prefix}.{part}"] for part in PARTS)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    y = torch.stack([
        sum(weights[t, j] * mlp(f"mlp.experts.{int(ids[t, j])}", x[t]) for j in range(K)) for t in range(len(x))
    ])  # fmt: skip
    return y + mlp("mlp.shared_experts", x) if shared else y


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_layouts_by_hand(layout: str, backend: str) -> None:
    """One code apart from its zero point in each output feature: each product is a scale times one x."""
    awq, n = layout == "awq", 32
    places = torch.arange(n) * 5 % n
    tensors: Tensors = {}
    for name, (far, zero, scales) in {
        "0.gate_proj": (1, 5, (0.5, 2.0)), "0.up_proj": (2, 7, (1.0, 0.25)), "0.down_proj": (3, 1, (2.0,)),
    }.items():  # fmt: skip
        k = 32 * len(scales)
        codes, where = torch.full((k, n), zero), places + (torch.arange(n) % len(scales)) * 32
        codes[where, torch.arange(n)] += far
        zeros = torch.full((len(scales), n), zero)
        tensors |= {
            f"mlp.experts.{name}.qweight": pack_words(codes, 4, int(awq), awq=awq),
            f"mlp.experts.{name}.qzeros": pack_words(zeros - int(not awq), 4, 1, awq=awq),
            f"mlp.experts.{name}.scales": torch.tensor(scales).half()[:, None].expand(-1, n).contiguous(),
        }
        tensors |= {} if awq else {f"mlp.experts.{name}.g_idx": (torch.arange(k) // 32).int()}
    # Two groups of x, of which odd outputs read the second; the down projection has one group, and twice the outputs.
    for part, dim in (("qweight", 1), ("qzeros", 1), ("scales", 1)):
        down = f"mlp.experts.0.down_proj.{part}"
        tensors[down] = torch.cat((tensors[down], tensors[down]), dim)
    layer = fl.FusedMoE(64, n, 1, 1, quant=QuantSpec("w4a16", group_size=32, zero_point=True, layout=layout),
                        dtype=FP32, backend=backend)  # fmt: skip
    assert load(layer, tensors) == set(tensors)
    x, odd = torch.randn(3, 64), torch.arange(n) % 2
    picked = x[:, places + 32 * odd]
    gate, up = picked * torch.where(odd == 1, 2.0, 0.5), 2 * picked * torch.where(odd == 1, 0.25, 1.0)
    inner = F.silu(gate) * up
    y = layer(x, torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    torch.testing.assert_close(y, 6.0 * inner[:, places].repeat(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("name", SPECS)
def test_tensor_parallel_ranks_sum_to_one(name: str, shared: int) -> None:
    """Three groups of inner features over two ranks: the first has two of them."""
    tensors, dense = checkpoint(SPECS[name], shared)
    x, weights, ids = inputs()
    total = torch.zeros(5, D)
    for rank in range(2):
        part = fl.FusedMoE(
            D, INNER, E, K, num_shared=shared, scaling_factor=2.0, quant=SPECS[name], tp=Axis(2, rank), dtype=FP32
        )
        size = part.column_slice.stop - part.column_slice.start
        assert size == (INNER // 2 if name in ("channel", "fp8") else (64, 32)[rank])
        assert load(part, tensors) == set(tensors)
        total += part(x, weights / 2.0, ids)
    torch.testing.assert_close(total, expected(dense, x, weights, ids, shared > 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "inner", "shared", "sizes"),
    [
        (CHANNEL_PACKED, 50, 0, (50,)), (CHANNEL_PACKED, 50, 1, (50,)), (CHANNEL_PACKED, 52, 2, (52,)),
        (CHANNEL_PACKED, 52, 2, (28, 24)), (CHANNEL_PACKED, 12, 0, (4, 4, 4)), (CHANNEL_GPTQ, 36, 0, (20, 16)),
    ],
)  # fmt: skip
def test_bytes_with_one_scale_a_row_are_cut_at_words(
    spec: QuantSpec, inner: int, shared: int, sizes: tuple[int, ...]
) -> None:
    """As linears read them: no multiples of 32, and on one rank a last word that is not full."""
    tensors, dense = checkpoint(spec, shared, inner)
    x, weights, ids = inputs()
    total = torch.zeros(5, D)
    for rank, size in enumerate(sizes):
        axis = Axis(len(sizes), rank)
        part = fl.FusedMoE(D, inner, E, K, num_shared=shared, quant=spec, tp=axis, dtype=FP32, backend="triton")
        assert part.column_slice.stop - part.column_slice.start == size
        assert load(part, tensors) == set(tensors)
        total += part(x, weights, ids)
    torch.testing.assert_close(total, expected(dense, x, weights, ids, shared > 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "inner", "ranks", "words"),
    [
        (CHANNEL_PACKED, 50, 2, "50; accepted: a multiple of 4 with w8a16: no word of codes is cut"),
        (CHANNEL_GPTQ, 50, 1, "50; accepted: a multiple of 4 with w8a16: no word of codes is cut"),
        (QuantSpec("w4a16", layout="packed"), 50, 1, "50; accepted: a multiple of 32 with w4a16: no unit of .*"),
        (GPTQ_8, 50, 1, "50; accepted: a multiple of 32 with w8a16: no group of inputs is cut"),
        (CHANNEL_PACKED, 8, 3, "8 over 3 ranks; accepted: at least 4 features a rank .* is cut, so at most 2 ranks"),
    ],
)  # fmt: skip
def test_features_that_ranks_cannot_share_are_named(spec: QuantSpec, inner: int, ranks: int, words: str) -> None:
    """Of ranks only where there are too many of them."""
    with pytest.raises(ArgumentError, match=f"intermediate_size is {words}$"):
        fl.FusedMoE(D, inner, E, K, quant=spec, tp=Axis(ranks, 0))


def test_shared_experts_that_share_a_word_are_refused() -> None:
    layer = fl.FusedMoE(D, 50, E, K, num_shared=2, quant=CHANNEL_PACKED, dtype=FP32)
    with pytest.raises(ArgumentError, match=r"num_shared is 2 with intermediate_size 50; accepted: 1, or .* of 4"):
        list(layer.slots())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_expert_parallel_ranks_and_placements_sum_to_one(backend: str) -> None:
    tensors, dense = checkpoint(AWQ)
    x, weights, ids = inputs()
    total = torch.zeros(5, D)
    for rank in range(3):
        part = fl.FusedMoE(D, INNER, E, K, quant=AWQ, ep=Axis(3, rank), dtype=FP32, backend=backend)
        assert load(part, tensors) == {name for name in tensors if f".experts.{rank}." in name}
        total += part(x, weights, ids)
    torch.testing.assert_close(total, expected(dense, x, weights, ids, False), rtol=1e-4, atol=1e-4)
    total = torch.zeros(5, D)
    for rank in range(2):
        placement = ExpertPlacement(E, Axis(2, rank), EplbConfig(num_redundant_experts=1), "cpu")
        placed = fl.FusedMoE(
            D, INNER, E, K, quant=AWQ, ep=Axis(2, rank), placement=placement, dtype=FP32, backend=backend
        )
        load(placed, tensors)
        assert placed.w13_zero.shape[0] == 2
        total += placed(x, weights, placement(ids, torch.arange(5)))
    torch.testing.assert_close(total, expected(dense, x, weights, ids, False), rtol=1e-4, atol=1e-4)


def test_weights_stay_packed_and_are_no_copies() -> None:
    layer = fl.FusedMoE(D, INNER, E, K, quant=AWQ, dtype=FP32)
    tensors, _ = checkpoint(AWQ)
    load(layer, tensors)
    layer.finalize()
    assert layer.packed.w13.data_ptr() == layer.w13.data_ptr()
    assert layer.packed.w2_zero.data_ptr() == layer.w2_zero.data_ptr()
    words = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("qweight"))
    assert layer.w13.nbytes + layer.w2.nbytes == words
    groups = E * (2 * INNER * D + D * INNER) // GROUP
    assert sum(p.nbytes for p in layer.parameters()) == words + groups * 6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    layer = fl.FusedMoE(D, INNER, E, K, quant=AWQ, dtype=FP32, backend=backend)
    load(layer, checkpoint(AWQ)[0])
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs()), layer(*inputs()))
    with pytest.raises(ArgumentError, match="gradient"):
        x, weights, ids = inputs()
        layer(x.requires_grad_(), weights, ids)


def test_groups_and_tokens_out_of_reach_do_no_harm() -> None:
    """Padding rows may hold anything; strided rows are read as they lie."""
    layer = fl.FusedMoE(D, INNER, E, K, quant=PACKED, dtype=FP32, backend="triton")
    load(layer, checkpoint(PACKED)[0])
    x, weights, ids = inputs(7)
    wide = torch.full((7, 2 * D), float("nan"))
    wide[:, :D] = x
    ids[3] = -1
    y = layer(wide[:, :D], weights, ids)
    assert bool((y[3] == 0).all()) and bool(y.isfinite().all())
    assert torch.equal(y, layer(x, weights, ids))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quant": QuantSpec("w4a16", group_size=32)}, r"layout is 'plain'; accepted: one of 'awq', 'gptq'"),
        (
            {"quant": QuantSpec("w4a16", group_size=32, layout="gptq", act_order=True)},
            r"act_order is True; accepted: False; `fastlayers convert SRC DST --format bf16`",
        ),
        ({"quant": QuantSpec("w4a16", group_size=128, layout="awq")}, r"intermediate_size is 96; .* multiple of 128"),
        ({"quant": QuantSpec("w4a16", group_size=96, layout="awq")}, r"hidden_size is 64; accepted: a multiple of 96"),
        (
            {"quant": AWQ, "tp": Axis(4, 0)},
            r"96 over 4 ranks; accepted: at least 32 features a rank with w4a16: no group .* at most 3 ranks",
        ),
        ({"quant": AWQ, "interleaved": True}, r"interleaved is True with w4a16"),
        ({"quant": QuantSpec("fp8_w8a16", group_size=32)}, r"group_size 32, zero_point False with fp8_w8a16"),
        ({"quant": AWQ, "names": StackedExpertNames()}, "them for plain experts alone"),
    ],
)  # fmt: skip
def test_what_does_not_go_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fl.FusedMoE(D, INNER, E, K, **arguments)


def test_other_formats_have_no_groups_and_files_must_fit() -> None:
    with pytest.raises(ArgumentError, match="group_size 32, zero_point False with int8"):
        FusedMoEConfig(64, 64, 4, 2, quant="int8", group_size=32)
    with pytest.raises(ArgumentError, match=r"group_size is 48; .* multiple of 32"):
        FusedMoEConfig(96, 96, 4, 2, quant="w4a16", group_size=48)
    layer, (tensors, _) = fl.FusedMoE(D, INNER, E, K, quant=GPTQ, dtype=FP32), checkpoint(GPTQ)
    tensors["mlp.experts.1.up_proj.g_idx"] = tensors["mlp.experts.1.up_proj.g_idx"].flip(0)
    with pytest.raises(
        CheckpointError, match=r"^mlp\.experts\.1\.up_proj\.g_idx: .* not in order of their groups of 32"
    ):
        load(layer, tensors)
    layer, (tensors, _) = fl.FusedMoE(D, INNER, E, K, quant=PACKED, dtype=FP32), checkpoint(PACKED)
    tensors["mlp.experts.1.up_proj.weight_shape"] += 1
    with pytest.raises(CheckpointError, match=r"^mlp\.experts\.1\.up_proj\.weight_shape: .*, but the model wants"):
        load(layer, tensors)


def test_a_table_may_hold_other_tiles_for_every_step() -> None:
    """What the tuner tries gives the rule's result: blocks, single pairs, shared columns, shallow steps."""
    layer = fl.FusedMoE(D, INNER, E, K, quant=AWQ, dtype=torch.bfloat16, backend="triton")
    load(layer, checkpoint(AWQ)[0])
    x, weights, ids = inputs(6)
    x, packed = x.bfloat16(), layer.weights()
    wanted = TritonFusedMoE(layer.cfg)(x, weights, ids, packed)
    found = [TritonFusedMoE(layer.cfg, each) for each in TritonFusedMoE.candidates(layer.cfg, 6)]
    shapes = {(each.plan.by_pair, each.plan.splits): each for each in found if each.plan is not None}
    assert set(shapes) == {(True, 1), (True, 2), (False, 1), (False, 2)}
    for each in shapes.values():
        torch.testing.assert_close(each(x, weights, ids, packed), wanted, rtol=1e-2, atol=1e-2)


def behind(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[range]]:
    """Return copies of tensors at the beginning of longer ones, and where the rest of those lies."""
    whole = [torch.cat((each.flatten(), torch.zeros(4096, dtype=each.dtype))) for each in tensors]
    copies = [longer[: each.numel()].view(each.shape) for longer, each in zip(whole, tensors, strict=True)]
    ends = [each.data_ptr() + each.nbytes for each in copies]
    return copies, [range(end, end + 4096 * each.itemsize) for end, each in zip(ends, copies, strict=True)]


@pytest.mark.skipif(not env.triton_interpret(), reason="addresses are seen in Triton's interpreter")
@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_without_columns_reads_nothing_of_another_expert(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of inputs is one block: the other splits have none, and no scale that would be theirs."""
    from triton.runtime.interpreter import InterpreterBuilder

    cfg = FusedMoEConfig(D, 64, E, 1, quant="w4a16", group_size=64, zero_point=True, dtype=torch.bfloat16)
    whole = torch.randn(E, 2 * 64, D), torch.randn(E, D, 64)
    (w13, s13, z13), (w2, s2, z2) = (
        [torch.stack(part) for part in zip(*(quantize_weight_only(w, "w4a16", 64, True) for w in each), strict=True)]
        for each in whole
    )
    (s2, z2), poisoned = behind(s2, z2)
    experts = MoEWeights(w13, w2, s13, s2, w13_zero=z13, w2_zero=z2)
    load_of, read = InterpreterBuilder.create_masked_load, []

    def watched(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        places = pointers.data[mask.data.astype(bool)]
        read.append(int(places.size))
        for each in poisoned:
            assert not ((places >= each.start) & (places < each.stop)).any(), "behind the scales of the last expert"
        return load_of(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    plan = TritonFusedMoE.candidates(cfg, 2)[0]
    x, ids = torch.randn(2, D).bfloat16(), torch.full((2, 1), E - 1, dtype=torch.int32)
    one, many = (
        TritonFusedMoE(cfg, plan | {"splits": each})(x, torch.ones(2, 1), ids, experts) for each in (1, splits)
    )
    assert torch.equal(one, many) and sum(read) > 0


@pytest.mark.parametrize("inner", [32, 64, 96, 128, 256, 768])
@pytest.mark.parametrize("group", [0, 32, 64, 96, 128])
def test_plans_have_columns_for_every_split(inner: int, group: int) -> None:
    if group and inner % group:
        return
    cfg = FusedMoEConfig(384, inner, 8, 2, quant="w4a16", group_size=group, dtype=torch.bfloat16)
    found = [each for tokens in (1, 4, 16, 64) for each in TritonFusedMoE.candidates(cfg, tokens)]
    for each in found:
        blocks = -(-inner // min(each["k2"], run_of(group, torch.bfloat16)))
        assert (each["splits"] - 1) * -(-blocks // each["splits"]) < blocks, each
    assert {each["splits"] for each in found} == ({1, 2} if inner > 32 else {1})


# Columns in several groups a tile, or in several tiles; outputs of a program and tiles ahead that are not alike.
NIBBLES = FusedMoEConfig(64, 64, 3, 2, quant="w4a16", group_size=32, zero_point=True, dtype=torch.bfloat16)
VECTORS = LaunchConfig(Tile(0, 8, 64, 1, 1), Tile(0, 4, 32, 1, 3))
TILES = LaunchConfig(Tile(0, 16, 32, 1, 1), Tile(0, 8, 64, 1, 1))
MORE = {"activation": "swiglu_oai", "bias": True, "scaling_factor": 1.5}
DEEP = {"hidden_size": 128, "intermediate_size": 128, "top_k": 1, "group_size": 128}


def by_vectors(cfg: FusedMoEConfig, plan: LaunchConfig, tokens: int, module: ModuleType = packed_vector) -> None:
    """Compare matrix-vector products with the reference; of several tokens one pair is dropped."""
    spec = spec_of("fused_moe")
    case = Case("few", cfg, {"num_tokens": tokens, "dtype": cfg.dtype, "load": "uneven"})
    given, oracle = make_inputs(case, torch.device("cpu"), 5), ReferenceFusedMoE(cfg)
    if tokens > 1:
        given["topk_ids"][1, 0] = -1
    ours, wanted = TritonFusedMoE(cfg, plan.config()), run(oracle, given, prepare(oracle, given))["y"]
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setattr(triton_backend, "packed_vector_experts", module.packed_vector_experts)
        patch.setattr(triton_backend, "packed_experts", None)
        y = run(ours, given, prepare(ours, given))["y"]
    compare("y", y, wanted, spec.bounds(case).get("y"))


@pytest.mark.parametrize(
    ("more", "plan", "tokens"),
    [
        ({}, VECTORS, 1), ({"zero_point": False, "num_shared": 1, "top_k": 1, "intermediate_size": 32}, VECTORS, 2),
        ({"intermediate_size": 32}, TILES, 4), ({"group_size": 64, "zero_point": False}, VECTORS, 1),
        ({"group_size": 64, **MORE}, TILES, 2), (DEEP, VECTORS, 1), (DEEP | {"zero_point": False}, TILES, 1),
        ({"hidden_size": 96, "intermediate_size": 96, "top_k": 1}, VECTORS, 1),
        ({"hidden_size": 96, "intermediate_size": 96, "num_shared": 1, **MORE}, TILES, 1),
    ],
)  # fmt: skip
def test_matrix_vector_products_give_the_reference(more: dict[str, Any], plan: LaunchConfig, tokens: int) -> None:
    by_vectors(replace(NIBBLES, **more), plan, tokens)


MUTANTS = {
    "high codes meet low features": ("_load(x_row + k + 16,", "_load(x_row + k,"),
    "scales of the first group": ("group = (i * BLOCK_K + tl.arange(0, RUNS)", "group = (tl.arange(0, RUNS) * 0"),
    "up is gate": ("place = row + I - BLOCK_N if row >= BLOCK_N else row", "place = row % BLOCK_N"),
    "no zero points": ('return scale, _load(zero_ptr + at, inside, EVEN, "").to', "return scale, (scale * 0 + 8.0).to"),
    "unweighted": ("each * weight[:, None]", "each"),
    "a tile late": ("(output + AHEAD) % BLOCK_N,", "output % BLOCK_N,"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_in_matrix_vector_products_shows(name: str, tmp_path: Path) -> None:
    mutant = planted(packed_vector, tmp_path, MUTANTS[name])
    with pytest.raises(AssertionError):
        by_vectors(NIBBLES, VECTORS, 1, mutant)


def test_the_tuner_tries_matrix_vector_products_of_few_tokens_and_nibbles_in_groups() -> None:
    cfg = FusedMoEConfig(2048, 768, 128, 8, quant="w4a16", group_size=128, dtype=torch.bfloat16)
    found = {tokens: TritonFusedMoE.candidates(cfg, tokens) for tokens in (1, 4, 5)}
    # Right behind the rule's, which they are not: a quick run takes the first ones.
    assert [each["m"] for each in found[1]][:9] == [1] + [0] * 7 + [1] and plan_for(1, cfg, False).first.m == 1
    assert found[4][1:8] == found[1][1:8] and all(each["m"] for each in found[5])
    for each in found[1][1:8]:
        assert 32 * 16 * each["warps1"] == each["k1"] // 2 and 32 * 16 * each["warps2"] == 8 * each["k2"] // 2
        assert TritonFusedMoE.fits(cfg, each)
    changes: tuple[dict[str, Any], ...] = (
        {"group_size": 0}, {"group_size": 192}, {"quant": "w8a16"}, {"dtype": FP32}, {"top_k": 17},
    )  # fmt: skip
    for more in changes:
        other = replace(cfg, hidden_size=1536, **more)
        assert not TritonFusedMoE.fits(other, found[1][1])
        assert all(each["m"] for each in TritonFusedMoE.candidates(other, 1))


def test_what_was_not_measured_is_said() -> None:
    cfg = FusedMoEConfig(2048, 768, 128, 8, quant="w4a16", group_size=128, dtype=torch.bfloat16)
    for device in ("A100", "L40S", "H200", "B200"):
        rows = {row.name: row for row in fl.backends("fused_moe", device=device, cfg=cfg)}
        assert rows["triton"].hardware and rows["triton"].reason == "w4a16: not measured on a GPU yet"
        assert "w4a16" in rows["deep_gemm"].reason or "sm_90" in rows["deep_gemm"].reason
    plain = fl.backends("fused_moe", device="H200", cfg=FusedMoEConfig(2048, 768, 128, 8, dtype=torch.bfloat16))
    assert not any("not measured" in row.reason for row in plain)
