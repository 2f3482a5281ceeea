"""Linear: agreement with torch.nn, fused parts, shards and their slots, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers import env
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.linear.dense.layer import Linear, LinearConfig
from fastlayers.weights import slots


def fill(layer: nn.Module, checkpoint: dict[str, torch.Tensor], prefix: str = "block.proj") -> set[str]:
    """Fill a layer from a checkpoint as the loader does; return the names it read."""
    read = set()
    for name, slot in slots(layer, prefix):
        tensor = checkpoint[name]
        assert tuple(tensor.shape) == slot.shape, name
        slot.fill(name, tensor[slot.index] if slot.index else tensor)
        read.add(name)
    return read


def random_checkpoint(parts: dict[str, int], columns: int) -> dict[str, torch.Tensor]:
    """Return weights and biases of parts with these numbers of rows."""
    weights = {f"block.{name}.weight": torch.randn(rows, columns) for name, rows in parts.items()}
    return weights | {f"block.{name}.bias": torch.randn(rows) for name, rows in parts.items()}


@pytest.mark.skipif(not env.triton_interpret(), reason="needs TRITON_INTERPRET=1 without a GPU")
def test_a_weight_stored_by_columns_is_read_by_rows() -> None:
    source = nn.Linear(48, 20)
    source.weight = nn.Parameter(source.weight.detach().t().contiguous().t())
    x = torch.randn(3, 48)
    torch.testing.assert_close(Linear.from_linear(source, backend="triton")(x), source(x))


def test_equals_torch_nn_bit_for_bit() -> None:
    source = nn.Linear(48, 20).to(torch.bfloat16)
    layer = Linear.from_linear(source)
    x = torch.randn(2, 3, 48, dtype=torch.bfloat16)
    assert layer.weight.data_ptr() == source.weight.data_ptr()
    assert torch.equal(layer(x), source(x))
    assert layer.choice.name == "torch"


def test_config_evaluates_to_itself() -> None:
    cfg = LinearConfig(64, 32, True, torch.bfloat16, torch.float32)
    assert eval(repr(cfg)) == cfg
    assert cfg.tuning_key() == "N=32,K=64,bfloat16_float32"


def test_zeros_until_loaded_and_empty_input() -> None:
    layer = fl.Linear(8, 6, bias=True)
    assert layer(torch.randn(0, 8)).shape == (0, 6)
    assert torch.equal(layer(torch.randn(2, 8)), torch.zeros(2, 6))


def test_fused_parts_read_their_checkpoint_tensors() -> None:
    checkpoint = random_checkpoint({"q": 6, "k": 4}, 8)
    layer = Linear(8, [6, 4], bias=True, names=["../q", "../k"])
    assert fill(layer, checkpoint) == set(checkpoint)
    x = torch.randn(3, 8)
    q, k = layer(x).split(layer.part_sizes, -1)
    torch.testing.assert_close(q, x @ checkpoint["block.q.weight"].T + checkpoint["block.q.bias"])
    torch.testing.assert_close(k, x @ checkpoint["block.k.weight"].T + checkpoint["block.k.bias"])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_shards_make_up_the_whole(kind: str) -> None:
    checkpoint = random_checkpoint({"a": 8, "b": 4}, 12)
    whole = Linear(12, [8, 4], bias=True, names=["../a", "../b"])
    fill(whole, checkpoint)
    x = torch.randn(5, 12)
    a, b = whole(x).split(whole.part_sizes, -1)
    outputs = []
    for rank in range(4):
        spec = ParallelSpec.grid(4, rank)
        shard = spec.column() if kind == "column" else spec.row()
        layer = Linear(12, [8, 4], bias=True, shard=shard, names=["../a", "../b"])
        assert fill(layer, checkpoint) == set(checkpoint)
        assert layer.adds_bias == (kind == "column" or rank == 0)
        outputs.append(layer(x if kind == "column" else x[:, layer.row_slice]).split(layer.part_sizes, -1))
    if kind == "row":
        torch.testing.assert_close(sum(o[0] for o in outputs), a)
        torch.testing.assert_close(sum(o[1] for o in outputs), b)
    else:
        torch.testing.assert_close(torch.cat([o[0] for o in outputs], -1), a)
        torch.testing.assert_close(torch.cat([o[1] for o in outputs], -1), b)


def test_fp32_output_keeps_the_sum() -> None:
    layer = Linear(256, 7, dtype=torch.bfloat16, out_dtype=torch.float32)
    layer.weight.copy_(torch.randn(7, 256))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ layer.weight.double().T, rtol=1e-5, atol=1e-5)


def test_compiles_without_graph_breaks() -> None:
    layer = fl.Linear(16, 8, bias=True)
    layer.weight.copy_(torch.randn(8, 16))
    explained = torch._dynamo.explain(layer)(torch.randn(4, 16))
    assert explained.graph_break_count == 0


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"in_features": 0, "out_features": 4}, "in_features"),
        ({"in_features": 4, "out_features": [4, 4]}, "names"),
        ({"in_features": 4, "out_features": [4, 4], "names": ["../a"]}, "names"),
        ({"in_features": 4, "out_features": [4, -1], "names": ["../a", "../b"]}, r"out_features\[1\]"),
        ({"in_features": 4, "out_features": 4, "dtype": torch.int8}, "dtype"),
        ({"in_features": 4, "out_features": 4, "out_dtype": torch.float16}, "out_dtype"),
    ],
)
def test_bad_construction_names_the_argument(arguments: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        Linear(**arguments)  # type: ignore[arg-type]


def test_indivisible_shard_names_the_layer() -> None:
    with pytest.raises(ArgumentError, match="Linear out_features"):
        Linear(8, 6, shard=ParallelSpec.grid(4, 0).column())


BAD_INPUTS = [
    torch.zeros(2, 7),
    torch.zeros(2, 8, dtype=torch.float16),
    torch.zeros(2, 8, device="meta"),
    torch.tensor(1.0),
]


@pytest.mark.parametrize("bad", BAD_INPUTS)
def test_bad_input(bad: torch.Tensor) -> None:
    layer = fl.Linear(8, 4)
    before = layer.weight.clone()
    with pytest.raises(ArgumentError, match=r"Linear: x is .*accepted: float32\[\.\.\., 8\] on cpu"):
        layer(bad)
    assert torch.equal(layer.weight, before)


def test_slot_refuses_another_shape_and_a_quantised_tensor() -> None:
    layer = fl.Linear(8, 4)
    ((name, slot),) = slots(layer, "proj")
    with pytest.raises(CheckpointError, match=r"proj\.weight"):
        slot.fill(name, torch.zeros(4, 7))
    with pytest.raises(CheckpointError, match="dtype"):
        slot.fill(name, torch.zeros(4, 8, dtype=torch.float8_e4m3fn))


def test_named_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(fl.FastlayersError, match="float64"):
        fl.Linear(8, 4, dtype=torch.float64, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [1, 7, 33])
def test_rows_apart_with_nan_between(features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some CPUs' products read 16-bit numbers in pairs, so one behind the row; not every CPU shows it."""
    wide = torch.full((9, features + 3), torch.nan, dtype=dtype)
    wide[:, :features] = torch.randn(9, features)
    x, layer = wide[:, :features], fl.Linear(features, 5, dtype=dtype)
    layer.weight.normal_()
    assert torch.equal(layer(x), layer(x.contiguous()))
    product = fl.Bmm(1, features, 5, dtype=dtype)
    assert torch.equal(product(x[None], layer.weight[None]), product(x[None].contiguous(), layer.weight[None]))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: seen.append(x) or x)
    monkeypatch.setattr(torch, "bmm", lambda x, weight: seen.append(x) or x)
    layer(x), product(x[None], layer.weight[None])
    assert len(seen) == 2 and all(each.is_contiguous() for each in seen)
