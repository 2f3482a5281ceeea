"""Ranks that differ are named before anything runs; a rank that was waited for in vain ends in RankLostError."""

from __future__ import annotations

import pytest
import torch

from fastlayers.comm.fabric import agree
from fastlayers.comm.parallel import Axis
from fastlayers.errors import CollectiveMismatch, RankLostError
from fastlayers.testing.world import Rank, world
from fastlayers_models.llama import LlamaConfig, LlamaForCausalLM
from fastlayers_models.rows import Outbox

CONFIG = dict(
    model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, eos_token_id=1,
)  # fmt: skip


def differ(rank: Rank) -> str:
    axis = rank.spec().tp
    agree(axis, {"table": "a", "slots": 8})
    try:
        agree(axis, {"table": "ab"[rank.rank], "slots": 8})
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def test_every_rank_names_what_differs() -> None:
    wanted = "ranks differ in table: rank 0 has a; rank 1 has b; accepted: the same on all ranks"
    assert world(2).run(differ) == [wanted] * 2


def another_model(rank: Rank) -> str:
    config = LlamaConfig.from_hf(CONFIG | {"rms_norm_eps": 1e-6 * (1 + rank.rank)})
    try:
        LlamaForCausalLM(config, parallel=rank.spec(), dtype=torch.float32)
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def another_dtype(rank: Rank) -> str:
    config = LlamaConfig.from_hf(CONFIG)
    LlamaForCausalLM(config, parallel=rank.spec(), dtype=torch.float32)
    try:
        LlamaForCausalLM(config, parallel=rank.spec(), dtype=(torch.float32, torch.bfloat16)[rank.rank])
    except CollectiveMismatch as error:
        return str(error)
    return "nothing"


def test_models_that_differ() -> None:
    for message in world(2).run(another_model):
        assert message.startswith("ranks differ in config.rms_norm_eps: rank 0 has 1e-06; rank 1 has 2e-06")
    for message in world(2).run(another_dtype):
        assert message.startswith("ranks differ in dtype: rank 0 has torch.float32; rank 1 has torch.bfloat16")


def test_one_rank_agrees_with_itself() -> None:
    agree(Axis(), {"anything": object()})
    agree(Axis(2, 1), {"sizes": "only"})


def test_a_lost_rank_is_named_with_the_step_whose_tokens_it_spoils() -> None:
    status = torch.zeros(1, dtype=torch.int32)
    outbox = Outbox(4, torch.device("cpu"), status)
    good = outbox.send(torch.tensor([5, 6]))
    status.fill_(2)
    bad = outbox.send(torch.tensor([7, 8]))
    assert good.tokens() == [5, 6]
    for _ in range(2):
        with pytest.raises(RankLostError, match="rank 1 did not answer within the deadline"):
            bad.tokens()
