"""The experts as one operator, whatever computes them: weights one by one, the configuration as its ``repr``.

backend(x, topk_weights, topk_ids, packed)  →  operator(…, w13, w2, scales, biases, "FusedMoEConfig(…)", numbers)
                                            →  function(x, topk_weights, topk_ids, packed, cfg, numbers)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.launch_config import MAX_TOKENS
from fastlayers.moe.fused_moe.weights import MoEWeights
from fastlayers.operators import Operator, like_x, operator
from fastlayers.runtime.launch import Kinds


@lru_cache(maxsize=256)
def _config_of(text: str) -> FusedMoEConfig:
    """Return the configuration that ``text`` is the ``repr`` of.

    Read, not evaluated: the text may come out of a file, with an exported program.
    """
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    return FusedMoEConfig(**{str(given.arg): _value(given.value) for given in call.keywords})


def _value(node: ast.expr) -> Any:
    """Return a literal, or the dtype of ``torch.bfloat16``."""
    if isinstance(node, ast.Attribute) and isinstance(found := getattr(torch, node.attr), torch.dtype):
        return found
    return ast.literal_eval(node)


def experts_operator(name: str, kind: Callable[..., Any] = MoEWeights) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of ``function(x, topk_weights, topk_ids, packed, cfg, numbers) -> y``.

    Parameters
    ----------
    name : str
    kind : class
        Of ``packed``; made of eight tensors, all but the first two of which may be ``None``.
    """

    def register(function: Callable[..., Any]) -> Operator:
        def experts(
            hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor,
            w2: torch.Tensor, w13_scale: torch.Tensor | None, w2_scale: torch.Tensor | None,
            w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None, w13_zero: torch.Tensor | None,
            w2_zero: torch.Tensor | None, cfg: str, numbers: list[int],
        ) -> torch.Tensor:  # fmt: skip
            packed = kind(w13, w2, w13_scale, w2_scale, w13_bias, w2_bias, w13_zero, w2_zero)
            y: torch.Tensor = function(hidden_states, topk_weights, topk_ids, packed, _config_of(cfg), numbers)
            return y

        vars(experts)["whole"] = function
        return operator(name, like_x, layer="FusedMoE", elsewhere="backend='reference' has one")(experts)

    return register


class ExpertsBackend:
    """A backend whose work is one operator of :func:`experts_operator`.

    Attributes
    ----------
    experts : Operator
    numbers : list[int]
        What the operator's function is given besides the configuration; none unless a backend says so.
    """

    experts: Operator

    def __init__(self, cfg: FusedMoEConfig) -> None:
        self.cfg, self.text = cfg, repr(cfg)
        self.numbers: list[int] = []
        # What computes inputs of kinds that came before.
        self._ready = Kinds()

    def pack(self, weights: MoEWeights) -> Any:
        """Return the weights as they are: the kernels read the parameters' layout."""
        return weights

    def numbers_for(self, x: torch.Tensor) -> list[int]:
        """Return the operator's numbers for these tokens; a function of their shape and dtype."""
        return self.numbers

    def prepare(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: Any
    ) -> Callable[..., torch.Tensor]:
        """Return what computes inputs of these shapes, strides and dtypes, called as the backend is."""
        tokens, hidden = x.shape
        read = x.stride()[1] == 1 and topk_weights.is_contiguous() and topk_ids.is_contiguous()
        chunk = self.bound(x, topk_ids, packed) if read and 0 < tokens <= MAX_TOKENS else None
        if chunk is None:
            whole, then = self.experts.function.whole, (self.cfg, self.numbers_for(x))  # type: ignore[attr-defined]
            return lambda *given: whole(*given, *then)

        def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any) -> torch.Tensor:
            y = x.new_empty(tokens, hidden)
            chunk(x, weights, ids, y, packed)
            return y

        return run

    def bound(self, x: torch.Tensor, topk_ids: torch.Tensor, packed: Any) -> Callable[..., None] | None:
        """Return what computes one chunk of such tokens, ``(x, weights, ids, y, packed)``, its launches bound.

        ``None``: the way to the launches is that of the operator's function.
        """
        return None

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: Any
    ) -> torch.Tensor:
        """Return ``y`` ``[T,D]`` in the dtype of ``x``, a new tensor.

        Calls the operator; where nobody looks on, what was prepared for such inputs.
        """
        tensors = (
            x, topk_weights, topk_ids, packed.w13, packed.w2, packed.w13_scale, packed.w2_scale, packed.w13_bias,
            packed.w2_bias, packed.w13_zero, packed.w2_zero,
        )  # fmt: skip
        y: torch.Tensor
        if not self.experts.unwatched(*tensors):
            y = self.experts(*tensors, self.text, self.numbers_for(x))
            return y
        kind = (
            x.shape, x.stride(), x.dtype, x.device, topk_weights.stride(), topk_ids.shape, topk_ids.stride(),
            packed.w2.shape, packed.w13_bias is None, packed.w2_bias is None,
        )  # fmt: skip
        ready = self._ready.get(kind) or self._ready.keep(kind, self.prepare(x, topk_weights, topk_ids, packed))
        y = ready(x, topk_weights, topk_ids, packed)
        return y
