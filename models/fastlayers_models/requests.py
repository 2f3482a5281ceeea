"""What a generator keeps of each prompt, and what it yields: :class:`Request`, :class:`Token`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index as as_index
from typing import Any

import numpy as np
import torch

from fastlayers.errors import ArgumentError, describe
from fastlayers.sampler.layer import SamplingParams
from fastlayers_models.images import PromptImages
from fastlayers_models.rows import Row


@dataclass(frozen=True)
class Token:
    """One generated token: which prompt it continues, its id, and why the request ended (or ``None``)."""

    request: int
    id: int
    finished: str | None = None


@dataclass
class Request:
    """One prompt on its way: what is cached of it, and what was generated; ``needs``: pages, with all of its tokens."""

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    needs: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    output: list[int] = field(default_factory=list)
    done: bool = False
    images: PromptImages | None = None

    @property
    def row(self) -> Row:
        """As a step sees it: a request's tokens depend on its own draws, not on who else is in the batch."""
        delta = 0 if self.images is None else self.images.delta
        return Row(self.output[-1] if self.output else 0, self.params, self.seed, len(self.output), delta)


def stop_ids(eos_ids: Any) -> set[int]:
    """Return the ids that end a request, or raise :class:`ArgumentError`."""
    try:
        ids = eos_ids.tolist() if hasattr(eos_ids, "tolist") else eos_ids
        return {as_index(each) for each in (None if isinstance(ids, str | bytes | Mapping) else ids)}  # type: ignore[union-attr]
    except (TypeError, RuntimeError) as error:  # also of tensors without data
        accepted = "a sequence of token ids, () for none, or None for the configuration's"
        raise ArgumentError("Generator", "eos_ids", describe(eos_ids), accepted) from error


def _listed(values: Any) -> Any:
    """Return tensors and arrays as lists of Python's numbers, and anything else as it is."""
    known = isinstance(values, np.ndarray) or (isinstance(values, torch.Tensor) and not values.is_meta)
    return values.tolist() if known else values


def prompts_of(prompts: Any) -> list[Sequence[int]]:
    """Return the prompts as rows of token ids, or raise :class:`ArgumentError`.

    A tensor or an array may stand for either, and NumPy's integers for ids: so they come out of a data set.
    """
    rows = _listed(prompts)
    accepted = "a sequence of prompts, each a sequence of token ids, as in [[1, 2, 3]]"
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ArgumentError("Generator", "prompts", repr(rows)[:80], accepted)
    each = [_listed(row) for row in rows]
    for index, row in enumerate(each):
        if not isinstance(row, Sequence) or isinstance(row, str | bytes):
            raise ArgumentError("Generator", f"prompts[{index}]", repr(row)[:80], accepted)
    return [_plain(row) for row in each]


def _plain(row: Sequence[Any]) -> Sequence[Any]:
    """Return a row of ids with Python's integers for NumPy's."""
    if not any(issubclass(kind, np.integer) for kind in set(map(type, row))):
        return row
    return [int(each) if isinstance(each, np.integer) else each for each in row]


def wrong_ids(prompt: Sequence[Any], vocab: int) -> list[Any]:
    """Return what is no id of a vocabulary; of plain integers the least and the largest say whether there is any."""
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab:
        return []
    return [i for i in prompt if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab]
