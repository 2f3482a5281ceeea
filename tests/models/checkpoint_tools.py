"""Checkpoints for the model tests (rewritten, sharded, with an MTP layer), and feeding a model step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.comm.padding import StepTokens
from fastlayers_models.convert import convert_checkpoint
from fastlayers_models.deepseek import DeepseekForCausalLM

Tensors = dict[str, torch.Tensor]
SHIPPED = Path(fl.__file__).parents[2] / "models" / "fastlayers_models" / "assets" / "tiny_deepseek_v3"


def tensors_of(folder: Path) -> Tensors:
    """Return all tensors of a checkpoint."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def edited(source: Path, target: Path, edit: Callable[[Tensors], None]) -> Path:
    """Return ``target``, made a copy of a checkpoint of one file whose weights were edited in place."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    edit(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Write a checkpoint; with several shards, tensors are dealt out in turn and an index is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rewrite(
    source: Path,
    target: Path,
    tensors: Callable[[Tensors], Any] = lambda t: None,
    config: Callable[[dict[str, Any]], Any] = lambda c: None,
    shards: int = 1,
) -> Path:
    """Copy a checkpoint; ``tensors`` and ``config`` change their argument in place."""
    values, settings = tensors_of(source), json.loads((source / "config.json").read_text())
    tensors(values)
    config(settings)
    return write(target, settings, {n: v.contiguous() for n, v in values.items()}, shards)


def with_mtp(source: Path, target: Path, seed: int = 7) -> Path:
    """Copy a checkpoint and give it a random MTP layer with the names of the published one."""
    config = json.loads((source / "config.json").read_text())
    count, size = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def random(value: torch.Tensor) -> torch.Tensor:
        made = torch.rand(value.shape, generator=generator)
        return (made + 0.5 if value.dim() == 1 and value.shape[0] >= 16 else (made - 0.5) * 0.5).to(value.dtype)

    def add(tensors: Tensors) -> None:
        last, new = f"model.layers.{count - 1}.", f"model.layers.{count}."
        tensors |= {new + n.removeprefix(last): random(v) for n, v in tensors.items() if n.startswith(last)}
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{new}{norm}.weight"] = random(torch.empty(size))
        tensors[f"{new}eh_proj.weight"] = random(torch.empty(size, 2 * size))
        tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    return rewrite(source, target, add, lambda c: c.update(num_nextn_predict_layers=1))


def per_row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest ‖actual − expected‖ / ‖expected‖ of a row, in fp64."""
    a, e = actual.double(), expected.double()
    return float(((a - e).norm(dim=-1) / e.norm(dim=-1)).max()) if a.numel() else 0.0


class Feeder:
    """Feeds rows of tokens to a model in steps, in one process or as one rank of several.

    Parameters
    ----------
    model : DeepseekForCausalLM
    rows : list of token rows
        Of all attention groups.
    group : sequence of int
        Attention group of each row; this rank feeds those of its own.
    spread : bool
        Whether each rank adds and norms only its own rows.
    """

    def __init__(
        self, model: DeepseekForCausalLM, rows: list[list[int]], group: Sequence[int] = (), spread: bool = False
    ) -> None:
        self.model, self.rows, self.spread = model, rows, spread
        self.group = list(group) or [0] * len(rows)
        self.mine = [i for i, g in enumerate(self.group) if g == model.parallel.attn_dp.rank]
        self.table = whole_pages([len(row) for row in rows], model.page_size)
        spec = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype)
        self.caches = spec.allocate(1 + sum(map(len, self.table)), model.device)
        tokens, pages = sum(map(len, rows)), max(map(len, self.table))
        self.state = AttentionState(len(rows), tokens, pages, model.page_size, model.device)
        self.done = [0] * len(rows)

    def plan(self, counts: Sequence[int], mode: str) -> tuple[torch.Tensor, Any, StepTokens, torch.Tensor]:
        """Return (ids, metadata, token counts of all groups, the ids that follow) of one step."""
        parallel = self.model.parallel
        real = [sum(c for c, g in zip(counts, self.group, strict=True) if g == d) for d in range(parallel.attn_dp.size)]
        step = StepTokens.plan(
            real, attn_tp=parallel.attn_tp.size, extend=mode != "decode", graph=mode == "max_len", spread=self.spread
        )
        active = [i for i in self.mine if counts[i]]
        spans = [(self.rows[i], self.done[i], counts[i]) for i in active]
        ids = [t for row, start, count in spans for t in row[start : start + count]]
        following = [t for row, start, count in spans for t in (*row, 0)[start + 1 : start + count + 1]]
        batch = AttentionBatch(
            tuple(counts[i] for i in active), tuple(self.done[i] for i in active), [self.table[i] for i in active]
        )
        meta = self.state.plan(batch, num_pages=self.caches[0].num_pages)
        made, next_ids = (torch.tensor(each, dtype=torch.int64, device=self.model.device) for each in (ids, following))
        return made, meta, step, next_ids

    @torch.inference_mode()
    def run(self, steps: Sequence[tuple[str, Sequence[int]]], *, mtp: bool = False) -> dict[int, torch.Tensor]:
        """Return the logits ``[tokens, vocab]`` of each own row (``mtp``: of the MTP layer).

        ``steps`` are (mode, tokens of each row); mode is ``"extend"``, ``"decode"`` or ``"max_len"`` (as under a
        graph).
        """
        parts: dict[int, list[torch.Tensor]] = {i: [] for i in self.mine}
        for mode, counts in steps:
            ids, meta, step, following = self.plan(counts, mode)
            hidden = self.model(ids, meta, self.caches, step)
            if mtp:
                cache = self.caches[self.model.config.num_hidden_layers]
                logits = self.model.mtp(hidden, following, meta, cache, step)
            else:
                logits = self.model.compute_logits(hidden)
            own = [i for i in self.mine if counts[i]]
            for i, part in zip(own, logits.split([counts[i] for i in own]) if own else (), strict=True):
                parts[i].append(part)
            self.done = [d + c for d, c in zip(self.done, counts, strict=True)]
        return {i: torch.cat(found) for i, found in parts.items() if found}


class Stop(Exception):
    """An interruption."""


def interrupted(source: Path, target: Path, after: int, format: str = "int8") -> list[str]:
    """Convert, but stop after so many tensors; return the names of those that were begun."""
    seen: list[str] = []

    def progress(name: str) -> None:
        seen.append(name)
        if len(seen) > after:
            raise Stop

    with pytest.raises(Stop):
        convert_checkpoint(source, target, format, progress=progress)
    return seen
