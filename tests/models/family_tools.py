"""Tiny random checkpoints of any family, and the comparisons that every family must pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoint_tools import Feeder, per_row_error
from tiny_models import prompts, relative_rms

from fastlayers.testing.world import Rank, world
from fastlayers_models.auto import AutoModel
from fastlayers_models.generate import Generator

STEPS = 32  # from prompts of 40 to 60: across a page of 64, a window and the length before rope is scaled
BOUND = 1e-5
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BASE: dict[str, Any] = dict(
    vocab_size=163, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, rms_norm_eps=1e-6, bos_token_id=0,
    eos_token_id=1, pad_token_id=2,
)  # fmt: skip
MOE: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32)


@dataclass(frozen=True)
class Variation:
    """One configuration: its name, the name of its class in transformers, and what differs from :data:`BASE`."""

    name: str
    config: str
    batch: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def hf_config(self) -> Any:
        """Return the Hugging Face configuration."""
        import transformers

        return getattr(transformers, self.config)(**BASE | dict(self.changes))


# A name of ours -> the configuration's class in transformers, and what differs from BASE.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", MOE | {"shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"head_dim": 16}),
}
GPT_OSS: dict[str, Any] = dict(
    vocab_size=163, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=4, max_position_embeddings=256,
    sliding_window=32, pad_token_id=2, eos_token_id=1,
)  # fmt: skip


def tiny_config(family: str, **gpt_oss: Any) -> Any:
    """Return a tiny Hugging Face configuration; ``gpt_oss``: what differs from :data:`GPT_OSS`."""
    import transformers
    from tiny_models import VARIATIONS, hf_config

    if family == "deepseek_v3":
        return hf_config(VARIATIONS[0])
    if family == "gpt_oss":
        return transformers.GptOssConfig(**GPT_OSS | gpt_oss)
    name, changes = TINY[family]
    return Variation(family, name, changes=changes).hf_config()


def save_random(config: Any, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save a random model of a Hugging Face configuration; norms, biases and gates are not left trivial."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    randomize(AutoModelForCausalLM.from_config(config)).to(dtype).save_pretrained(folder)
    return folder


def randomize(model: Any) -> Any:
    """Give norms, biases and learned logits values that show when they are dropped or misplaced."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return model


def stock(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return Hugging Face's model of a checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def ours(folder: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return our model of a checkpoint."""
    return AutoModel.from_pretrained(folder, dtype=dtype, page_size=16, **options)


def rows_of(batch: int, vocab: int = BASE["vocab_size"]) -> list[list[int]]:
    """Return ragged rows of at least 40 distinct tokens; the first token is the last of the vocabulary."""
    return [[vocab - 1, *row] for row in prompts(batch, vocab=vocab - 1)]


def teacher_forced(model: Any, rows: Sequence[Sequence[int]], prefill: Sequence[int]) -> list[torch.Tensor]:
    """Return each row's logits: ``prefill`` tokens of each row at once, the rest one token a step."""
    left = [len(row) - count for row, count in zip(rows, prefill, strict=True)]
    decode = [("decode", [int(step < n) for n in left]) for step in range(max(left))]
    found = Feeder(model, [list(row) for row in rows]).run([("extend", list(prefill)), *decode])
    return [found[i] for i in range(len(rows))]


@torch.inference_mode()
def greedy(reference: Any, row: Sequence[int], steps: int = STEPS) -> list[int]:
    """Return Hugging Face's greedy continuation."""
    ids = torch.tensor([list(row)])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=steps, min_new_tokens=steps,
        eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    tokens: list[int] = out[0, len(row) :].tolist()
    return tokens


def check_like_hugging_face(reference: Any, model: Any, batch: int, steps: int = STEPS) -> None:
    """Identical greedy tokens, and teacher-forced fp32 logits within 1e-5 over prompt and continuation."""
    rows = rows_of(batch)
    generated = Generator(model, max_batch=batch).generate(rows, max_new_tokens=steps, eos_ids=())
    # A model that repeats one token would agree with anything.
    assert max(len(set(tokens)) for tokens in generated) > steps // 8
    full = [row + tokens for row, tokens in zip(rows, generated, strict=True)]
    found_of = teacher_forced(model, full, [len(row) for row in rows])
    for row, tokens, found in zip(full, generated, found_of, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([row])).logits[0]
        # Each is what Hugging Face's model takes behind those before: its greedy continuation.
        assert len(tokens) == steps and wanted[-1 - steps : -1].argmax(-1).tolist() == tokens
        assert relative_rms(found, wanted) <= BOUND
        assert per_row_error(found, wanted) <= 5 * BOUND


def check_bf16(folder: Path, batch: int = 3) -> None:
    """Our bf16 error against fp32 with the same rounded weights is at most 1.25 times the stock model's."""
    rows = rows_of(batch)
    exact = stock(folder, torch.float32)
    found = teacher_forced(ours(folder, torch.bfloat16), rows, [len(row) - 8 for row in rows])

    def logits(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([model(torch.tensor([row])).logits[0].float() for row in rows])

    wanted = logits(exact)
    of_stock = [
        relative_rms(logits(stock(folder, torch.bfloat16, attn_implementation=name)), wanted)
        for name in ("sdpa", "eager")
    ]
    error = relative_rms(torch.cat(found).float(), wanted)
    assert 0 < error <= 1.25 * max(of_stock), (error, of_stock)


# ---- ranks -----------------------------------------------------------------------------------------------------

# Chunked prefill with an idle row, then decode.
SCHEDULE = [("extend", (13, 9, 5, 1)), ("extend", (7, 0, 3, 4)), *[("decode", (1, 1, 1, 1))] * 3]


@dataclass(frozen=True)
class Grid:
    """Ranks, attention groups, expert groups; ``group`` says which attention group has which row."""

    world: int
    attn_dp: int = 1
    ep: int = 1
    group: tuple[int, ...] = (0, 0, 0, 0)

    def __str__(self) -> str:
        return f"tp{self.world // self.attn_dp}_dp{self.attn_dp}_ep{self.ep}"


TP2, TP4, EP2 = Grid(2), Grid(4), Grid(2, ep=2)
DP2, EP2_TP2_DP2 = Grid(2, 2, group=(0, 1, 1, 0)), Grid(4, 2, 2, group=(0, 1, 1, 0))


def feed(rank: Rank, folder: str, grid: Grid) -> list[dict[int, torch.Tensor]]:
    """Return this rank's logits of :data:`SCHEDULE`, with a whole and with a scattered residual."""
    model = ours(folder, parallel=rank.spec(attn_dp=grid.attn_dp, ep=grid.ep))
    return [Feeder(model, rows_of(4), grid.group, spread).run(SCHEDULE) for spread in (False, True)]


def check_ranks(folder: Path, grid: Grid) -> None:
    """Every rank has the logits of one process, to 1e-5, for the rows of its attention group.

    With one group a scattered residual gives the bits of a whole one; with several, sums are in another order.
    """
    wanted = Feeder(ours(folder), rows_of(4)).run(SCHEDULE)
    found = world(grid.world).run(feed, str(folder), grid)
    per_group = grid.world // grid.attn_dp
    for rank, logits in [(rank, logits) for rank, both in enumerate(found) for logits in both]:
        assert set(logits) == {row for row in wanted if grid.group[row] == rank // per_group}
        for row, actual in logits.items():
            assert relative_rms(actual, wanted[row]) <= BOUND, (rank, row)
            assert per_row_error(actual, wanted[row]) <= 5 * BOUND, (rank, row)
    for whole, spread in found if grid.attn_dp == 1 else ():
        assert all(torch.equal(whole[row], spread[row]) for row in whole)
