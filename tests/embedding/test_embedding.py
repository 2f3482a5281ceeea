"""Vocabulary embedding and head under sharding, padding and tying."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastlayers.comm.parallel import Axis, Shard
from fastlayers.embedding.layer import VocabEmbedding
from fastlayers.embedding.lm_head import LMHead
from fastlayers.errors import ArgumentError
from fastlayers.weights import slots


def shards(size: int) -> list[Shard]:
    return [Shard("column", Axis(size, rank, tuple(range(size)))) for rank in range(size)]


def load(module: torch.nn.Module, checkpoint: dict[str, torch.Tensor]) -> set[str]:
    """Fill ``module`` from ``checkpoint`` and return the names that were asked for."""
    names = set()
    for name, slot in slots(module):
        assert slot.shape == tuple(checkpoint[name].shape)
        slot.fill(name, checkpoint[name][slot.index])
        names.add(name)
    return names


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("vocab", "ranks"), [(12, 3), (10, 3), (10, 4), (5, 4), (7, 1)])
def test_sum_over_ranks_is_the_whole(backend: str, vocab: int, ranks: int) -> None:
    table, ids = torch.randn(vocab, 6), torch.arange(vocab).flip(0)
    total = torch.zeros(vocab, 6)
    for shard in shards(ranks):
        layer = VocabEmbedding(vocab, 6, shard=shard, backend=backend)
        assert load(layer, {"weight": table}) == {"weight"}
        assert layer.weight.shape[0] == -(-vocab // ranks)
        total += layer(ids)
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_shapes_of_ids(ids: torch.dtype) -> None:
    layer = VocabEmbedding(5, 3, dtype=torch.bfloat16)
    y = layer(torch.ones(2, 4, dtype=ids))
    assert (y.shape, y.dtype) == ((2, 4, 3), torch.bfloat16)


def test_ids_outside_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    layer = VocabEmbedding(10, 3, shard=shards(2)[1])
    assert layer(torch.tensor([0, 9])).shape == (2, 3)
    for bad in ([0, 10], [-1, 3]):
        with pytest.raises(ArgumentError, match=r"VocabEmbedding: ids .* accepted: 0 to 9"):
            layer(torch.tensor(bad))


def test_triton_never_reads_outside_the_table() -> None:
    layer = VocabEmbedding(4, 3, backend="triton")
    layer.weight.fill_(1.0)
    kernel = layer.ladder.pick(3)  # the layer looks, on a CPU
    assert kernel(torch.tensor([-1, 10**9, 3]), layer.weight).tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_errors() -> None:
    layer = VocabEmbedding(4, 3)
    for bad in (torch.zeros(2), torch.zeros(2, dtype=torch.bool)):
        with pytest.raises(ArgumentError, match="ids"):
            layer(bad)
    with pytest.raises(ArgumentError, match="vocab_size"):
        VocabEmbedding(0, 3)
    with pytest.raises(ArgumentError, match=r"shard\.kind"):
        VocabEmbedding(4, 3, shard=Shard("row"))


@pytest.mark.parametrize(("vocab", "ranks"), [(12, 3), (10, 4), (5, 4), (7, 1)])
def test_head_gathers_to_the_whole(vocab: int, ranks: int) -> None:
    weight, bias, x = torch.randn(vocab, 6), torch.randn(vocab), torch.randn(3, 6)
    heads = [LMHead(6, vocab, True, shard=shard) for shard in shards(ranks)]
    for head in heads:
        assert load(head, {"weight": weight, "bias": bias}) == {"weight", "bias"}
    logits = heads[0].trim(torch.cat([head(x) for head in heads], -1))
    torch.testing.assert_close(logits, x @ weight.t() + bias)


def test_head_in_fp32() -> None:
    head = LMHead(6, 4, dtype=torch.bfloat16, out_dtype=torch.float32)
    assert head(torch.zeros(1, 6, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_tied_head(rank: int) -> None:
    shard = shards(2)[rank]
    embedding = VocabEmbedding(5, 3, shard=shard, dtype=torch.bfloat16)
    head = LMHead(3, 5, shard=shard, tied_to=embedding)
    assert head.weight is embedding.weight
    load(embedding, {"weight": torch.ones(5, 3)})
    # A copy in the checkpoint is read and dropped: the embedding's counts.
    assert load(head, {"weight": torch.zeros(5, 3)}) == {"weight"}
    assert all(slot.optional for _, slot in slots(head))
    rows = 3 if rank == 0 else 2
    assert head(torch.ones(1, 3, dtype=torch.bfloat16)).tolist() == [[3.0] * rows + [0.0] * (3 - rows)]


def test_tied_head_must_fit() -> None:
    embedding = VocabEmbedding(5, 3)
    for arguments in ((3, 6), (4, 5)):
        with pytest.raises(ArgumentError, match="tied_to"):
            LMHead(*arguments, tied_to=embedding)
    with pytest.raises(ArgumentError, match="tied_to"):
        LMHead(3, 5, shard=shards(2)[0], tied_to=embedding)


def test_traceable() -> None:
    layer, ids = VocabEmbedding(10, 3, shard=shards(2)[1], backend="torch"), torch.tensor([1, 7])
    layer.weight.normal_()
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(ids), layer(ids))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference", "triton"])
def test_ids_outside_the_vocabulary_are_named_on_a_cpu(backend: str) -> None:
    layer = VocabEmbedding(10, 4, backend=backend)
    for bad in (11, -1):
        with pytest.raises(ArgumentError, match=f"VocabEmbedding: ids is {bad} to {bad}; accepted: 0 to 9"):
            layer(torch.tensor([bad]))


def test_ids_outside_the_vocabulary_are_named_by_each_rank() -> None:
    for shard in (*shards(1), *shards(2)):
        layer = VocabEmbedding(9, 4, shard=shard)
        layer.weight.fill_(1.0)
        assert layer(torch.tensor([0, 8])).sum() in (8.0, 4.0)
        for bad in (9, -1):
            with pytest.raises(ArgumentError, match=f"VocabEmbedding: ids is .*{bad}.*; accepted: 0 to 8"):
                layer(torch.tensor([0, bad]))


def test_ids_without_values_are_not_looked_at() -> None:
    layer, ids = VocabEmbedding(10, 4, backend="torch"), torch.tensor([[1], [2]])
    layer.weight.normal_()
    assert torch.equal(torch.func.vmap(layer)(ids), layer(ids))
    assert torch.equal(make_fx(layer)(ids)(ids), layer(ids))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(ids)).shape == (2, 1, 4)
