"""Sparse blocks during a decode step on pages: router and experts hand each other what their cores speak.

Hugging Face's blocks pass expert numbers as int64 and weights in the router's dtype; cores take int32 and fp32. Here
nothing is converted: the router's core rounds the weights as theirs are. Shared experts are added as the block's own
code does it.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.patching.classes import count
from fastlayers.patching.comparison import own_forward
from fastlayers.patching.experts import FastExperts
from fastlayers.patching.hashes import KNOWN
from fastlayers.patching.matching import bare, foreign_hooks, is_known
from fastlayers.patching.mlp import stepped
from fastlayers.patching.router import FastRouter


def direct(block: Any) -> bool:
    """Return whether :func:`run` computes what this block does: known code, patched router and experts, no hooks."""
    cls: Any = type(block)
    router, experts = _router(block), getattr(block, "experts", None)  # type: Any, Any
    if not is_known(cls, ("forward",), KNOWN) or not own_forward(block):
        return False
    if not isinstance(router, FastRouter) or not isinstance(experts, FastExperts) or not experts._fl_weighs:
        return False
    return not foreign_hooks(block) and bare(router) and bare(experts) and router._fl_core is not None


def run(block: Any, x: torch.Tensor, step: Any) -> torch.Tensor | None:
    """Return the output of a sparse block for ``x [B, Q, D]``, or ``None``: its own code is to run."""
    if not direct(block):
        return None
    router, experts = _router(block), block.experts
    rows = x.view(-1, x.shape[-1])
    if experts._fl_core.choice.device.type != x.device.type or experts._fl_why_not(rows) or router._fl_why_not(rows):
        return None
    count(router._fl_hits)
    count(experts._fl_hits)
    logits = router._fl_step_logits(rows)
    core = router._fl_core.pick(rows.shape[0])
    weights, ids = core(logits, router._fl_read("e_score_correction_bias"), step.count)
    # Rounded by the core already where the family's router rounds them.
    y = experts._fl_run(rows, ids, weights)
    if hasattr(block, "shared_experts"):
        y = y.view(x.shape) + _shared(block.shared_experts, x, step)
    elif hasattr(block, "shared_expert"):
        y = y + torch.sigmoid(block.shared_expert_gate(rows)) * _shared(block.shared_expert, rows, step)
    return y.view(x.shape)


def _router(block: Any) -> Any:
    return getattr(block, "gate", None) or getattr(block, "router", None)


def _shared(mlp: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    y = stepped(mlp, x, step)
    return mlp(x) if y is None else y
