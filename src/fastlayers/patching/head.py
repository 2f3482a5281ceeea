"""The head of a decode step that reads bf12 copies: one product of one row, as those of the layers.

Elsewhere, and where the model's own code is of another version, hooked or replaced, that runs as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.patching.comparison import own_forward
from fastlayers.patching.hashes import KNOWN
from fastlayers.patching.matching import foreign_hooks, is_known
from fastlayers.patching.packing import plain


def direct(root: Any) -> bool:
    """Return whether this model's ``forward`` is its decoder and a plain head behind it: known code, no hooks."""
    cls: Any = type(root)
    if not is_known(cls, ("forward",), KNOWN) or not own_forward(root) or foreign_hooks(root):
        return False
    return plain(root.lm_head)


def logits_of(root: Any, step: Any, cache: Any) -> torch.Tensor:
    """Run the model on a step's static tensors."""
    inputs = {
        "input_ids": step.ids, "position_ids": step.positions, "attention_mask": step.mask, "past_key_values": cache,
        "use_cache": True,
    }  # fmt: skip
    if step.copies is None or not direct(root) or step.copies.of(root.lm_head.weight) is None:
        found: torch.Tensor = root(**inputs, logits_to_keep=step.kept, return_dict=True).logits
        return found
    hidden: torch.Tensor = root.model(**inputs)[0]
    logits: torch.Tensor = step.apply(root.lm_head, hidden[:, -step.kept :])
    return logits
