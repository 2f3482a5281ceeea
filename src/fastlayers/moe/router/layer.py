"""Top-k routing: softmax, sigmoid, biased and grouped, with deterministic ties.

    T = tokens, D = hidden_size, E = num_experts, G = num_groups, k = top_k

    z[T,E] = x[T,D] @ weight[E,D]^T (+ bias[E])      NaN -> -1e30, then clamped to ±1e30
    s[T,E] = softmax(z) | sigmoid(z) | z             scoring = "softmax" | "sigmoid" | "softmax_after_topk"
    c[T,E] = s + e_score_correction_bias[E]          for the choice only
    group score [T,G] = max of c, or sum of its two largest; the best topk_groups groups stay,
                        c of all others becomes -inf or 0
    ids[T,k] = the k largest c, descending; equal values: lowest id first
    w[T,k]   = s[ids]   ("softmax_after_topk": softmax of the k logits)
    w        = w / (sum over k of w + renorm_eps)    if renormalize
    w        = w * scaling_factor                    if apply_scaling; else the experts apply it (once)
    w        = w.to(weights_dtype).float()           if weights_dtype: as routers round that give the model's dtype

Rows >= num_valid get id -1 and weight 0. A masked expert that is chosen all the same (masked_score
"zero", everything else exactly 0) weighs 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastlayers.device import as_device
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_float,
    check_plain,
    check_positive,
    check_tensor,
)
from fastlayers.layer import Layer
from fastlayers.memory import allocate
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot

SCORINGS = ("softmax", "sigmoid", "softmax_after_topk")
GROUP_SCORES = ("top2_sum", "max")
MASKED_SCORES = ("-inf", "zero")
# What weights may be rounded to; the tensor is fp32 whatever it is.
WEIGHTS_DTYPES = (None, torch.bfloat16, torch.float16)
# Finite stand-in for infinity, so that no logit makes the softmax NaN.
LARGE = 1e30


@dataclass(frozen=True)
class RouterConfig:
    """What a backend must know; see the file's head. ``factor`` is what the weights are multiplied by."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    masked_score: str = "-inf"
    correction_bias: bool = False
    renormalize: bool = True
    renorm_eps: float = 1e-20
    scaling_factor: float = 1.0
    apply_scaling: bool = True
    weights_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        name = "TopKRouter"
        check_choice(name, "weights_dtype", self.weights_dtype, WEIGHTS_DTYPES)
        check_positive(
            name,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
        )
        check_plain(name, "float >= 0", renorm_eps=self.renorm_eps)
        check_choice(name, "scoring", self.scoring, SCORINGS)
        check_choice(name, "group_score", self.group_score, GROUP_SCORES)
        check_choice(name, "masked_score", self.masked_score, MASKED_SCORES)
        if self.num_experts > 1 << 15:
            raise ArgumentError(name, "num_experts", self.num_experts, "at most 32768")
        if self.num_experts % self.num_groups:
            raise ArgumentError(name, "num_groups", self.num_groups, f"a divisor of num_experts {self.num_experts}")
        if self.topk_groups > self.num_groups:
            raise ArgumentError(name, "topk_groups", self.topk_groups, f"at most num_groups {self.num_groups}")
        kept = self.topk_groups * self.group_size
        if self.top_k > kept:
            raise ArgumentError(name, "top_k", self.top_k, f"at most {kept}, the experts of {self.topk_groups} groups")
        if self.grouped and self.group_score == "top2_sum" and self.group_size < 2:
            raise ArgumentError(name, "num_groups", self.num_groups, "groups of at least 2 experts for top2_sum")

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.num_groups

    @property
    def group_size(self) -> int:
        """Experts per group."""
        return self.num_experts // self.num_groups

    @property
    def factor(self) -> float:
        """What the routing weights are multiplied by here."""
        return self.scaling_factor if self.apply_scaling else 1.0


_HERE = "fastlayers.moe.router"
ROUTER = Registry(
    "router",
    [
        triton_backend(f"{_HERE}.triton:TritonRouter"),
        torch_backend(f"{_HERE}.torch:TorchRouter"),
        reference_backend(f"{_HERE}.reference:ReferenceRouter"),
    ],
    cases=f"{_HERE}.cases",
)


class TopKRouter(Layer):
    """Choose ``top_k`` of ``num_experts`` experts for every token.

    Parameters
    ----------
    hidden_size, num_experts, top_k : int
    scoring : str
        ``"softmax"`` (Qwen, DeepSeek-V2), ``"sigmoid"`` (DeepSeek-V3), ``"softmax_after_topk"`` (GPT-OSS).
    num_groups, topk_groups : int
        Group-limited routing: only the best ``topk_groups`` of ``num_groups`` groups are eligible.
    group_score : str
        ``"top2_sum"`` (V3) or ``"max"`` (V2).
    masked_score : str
        What experts of other groups score: ``"-inf"`` (V3) or ``"zero"`` (V2).
    correction_bias : bool
        Hold ``e_score_correction_bias`` (fp32), added for the choice only.
    renormalize, renorm_eps : bool, float
        Divide the chosen weights by their sum plus ``renorm_eps``.
    scaling_factor, apply_scaling : float, bool
        The routed scaling factor, and whether it is applied here. It must be applied exactly once: either
        here, or by ``FusedMoE(scaling_factor=…)``.
    logits_dtype : torch.dtype or None
        ``torch.float32``: the linear accumulates and returns fp32 (DeepSeek). ``None``: the input's dtype.
    bias : bool
        Hold a bias of the linear (GPT-OSS).
    device, dtype
        Of the weight. On a CPU an fp32 linear keeps its weight in fp32, so that no call converts it.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: DeepSeek-V2 and V3 technical reports. Capture-safe; allocates its outputs. NaN and infinite logits
    are routed deterministically and never out of range. Gradients of the weights are right with the backend ``torch``;
    a backward pass through another kernel raises.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> router = fl.TopKRouter(4, 4, top_k=2, renormalize=False)
    >>> router.weight.copy_(torch.eye(4)).shape
    torch.Size([4, 4])
    >>> weights, ids = router(torch.tensor([[0.0, 3.0, 1.0, 3.0]]))
    >>> ids.tolist(), [round(w, 3) for w in weights[0].tolist()]
    ([[1, 3]], [0.458, 0.458])
    """

    kept_in_fp32 = ("e_score_correction_bias",)
    weight: nn.Parameter
    bias: nn.Parameter | None
    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        num_groups: int = 1,
        topk_groups: int = 1,
        group_score: str = "top2_sum",
        masked_score: str = "-inf",
        correction_bias: bool = False,
        renormalize: bool = True,
        renorm_eps: float = 1e-20,
        scaling_factor: float = 1.0,
        apply_scaling: bool = True,
        logits_dtype: torch.dtype | None = torch.float32,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive("TopKRouter", hidden_size=hidden_size)
        (hidden_size,) = as_integers(hidden_size)
        check_plain("TopKRouter", "bool", bias=bias)
        check_float("TopKRouter", dtype=dtype)
        check_choice("TopKRouter", "logits_dtype", logits_dtype, (torch.float32, None))
        cfg = RouterConfig(
            num_experts, top_k, scoring, num_groups, topk_groups, group_score, masked_score, correction_bias,
            renormalize, renorm_eps, scaling_factor, apply_scaling,
        )  # fmt: skip
        self.choose(ROUTER, cfg, device, backend)
        self.hidden_size, self.logits_dtype = hidden_size, logits_dtype
        if logits_dtype is torch.float32 and as_device(device).type == "cpu":
            dtype = torch.float32

        def parameter(*shape: int, dtype: torch.dtype | None = dtype) -> nn.Parameter:
            return nn.Parameter(allocate("TopKRouter", "weight", shape, dtype, device), requires_grad=False)

        self.weight = parameter(num_experts, hidden_size)
        self.bias = parameter(num_experts) if bias else None
        self.e_score_correction_bias = parameter(num_experts, dtype=torch.float32) if correction_bias else None

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield ``weight [E,D]`` and, where held, ``bias [E]`` and ``e_score_correction_bias [E]``."""
        experts = self.cfg.num_experts
        yield "weight", Slot(self.weight, (experts, self.hidden_size))
        if self.bias is not None:
            yield "bias", Slot(self.bias, (experts,))
        if self.e_score_correction_bias is not None:
            yield "e_score_correction_bias", Slot(self.e_score_correction_bias, (experts,))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the router's logits ``[T,E]``: fp32, or (``logits_dtype=None``) the input's dtype."""
        x, weight = hidden_states, self.weight
        if self.logits_dtype is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, weight.to(x.dtype), bias)
        if x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float32:
            # Products of 16-bit numbers are exact in fp32: the same sums without fp32 copies of x and weight.
            z = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return z if self.bias is None else z + self.bias.float()
        return F.linear(x.float(), weight.float(), None if self.bias is None else self.bias.float())

    def forward(
        self, hidden_states: torch.Tensor, num_valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route every token.

        Parameters
        ----------
        hidden_states : Tensor ``[T, D]``
        num_valid : int32 Tensor ``[1]``, optional
            On the device; rows from this index on are padding: id -1, weight 0.

        Returns
        -------
        topk_weights : fp32 Tensor ``[T, k]``
        topk_ids : int32 Tensor ``[T, k]``
            Descending by score; equal scores: lowest id first.

        Raises
        ------
        ArgumentError
            Wrong shape, dtype or device.
        """
        if not self.trusted:
            self._check(hidden_states, num_valid)
        core = self.ladder.single or self.ladder.pick(hidden_states.shape[0])
        # A backend may have a kernel for the logits of a few tokens.
        logits = None
        held: Any = self._parameters
        correction = held.get("e_score_correction_bias")
        if correction is None:  # there is none; or pruned or parametrized: torch computes it
            correction = self.e_score_correction_bias
        route, own_logits = hasattr(core, "route"), hasattr(core, "logits")
        if route or own_logits:
            bias = held.get("bias")
            if bias is None:
                bias = self.bias
            try:
                weight = held["weight"]
            except KeyError:
                weight = self.weight
        if route:
            routed: tuple[torch.Tensor, torch.Tensor] | None = core.route(
                hidden_states, weight, bias, self.logits_dtype, correction, num_valid
            )
            if routed is not None:
                return routed
        if own_logits:
            logits = core.logits(hidden_states, weight, bias, self.logits_dtype)
        if logits is None:
            logits = self.logits(hidden_states)
        topk_weights, topk_ids = core(logits, correction, num_valid)
        return topk_weights, topk_ids

    def _check(self, hidden_states: torch.Tensor, num_valid: torch.Tensor | None) -> None:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        check_tensor("TopKRouter", "hidden_states", hidden_states, shape=(None, self.hidden_size), dtype=floats)
        check_tensor("TopKRouter", "hidden_states", hidden_states, device=self.weight.device)
        if num_valid is not None:
            check_tensor(
                "TopKRouter",
                "num_valid",
                num_valid,
                shape=(1,),
                dtype=torch.int32,
                device=hidden_states.device,
            )
