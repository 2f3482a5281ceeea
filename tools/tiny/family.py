"""What the families share: the interface that the training loop knows, experts without sorting, tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface


class Trainee(nn.Module):
    """A model in training: its losses, and what is shipped of it."""

    config: ClassVar[dict[str, Any]]  # the keys and their spelling are those of the published config.json
    extra: ClassVar[str]  # what the second loss is

    def forward(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the text and the second loss over (rows, row + 2) tokens."""
        raise TypeError(f"{type(self).__name__} defines no losses")

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (rows, length, vocabulary) of (rows, length) tokens."""
        raise TypeError(f"{type(self).__name__} defines no logits")

    def after_step(self, bias_step: float) -> None:
        """Do what follows an optimizer step; here nothing."""

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors under the published names."""
        raise TypeError(f"{type(self).__name__} defines no checkpoint")


class BalancedTrainee(Trainee):
    """A stock model whose routers are kept even by an auxiliary loss, the mean over its layers.

    Parameters
    ----------
    main
        The stock model in fp32; its parameters become bf16, as they are shipped.
    routers
        Its routers, each of which returns logits, weights and indices of the chosen experts.
    """

    extra = "balance"

    def __init__(self, main: Any, routers: Iterable[nn.Module]):
        super().__init__()
        self.main = main
        self.routers: list[Any] = list(routers)
        for router in self.routers:
            router.balance = None
            router.register_forward_hook(record_balance)
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16()

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the normed states of the last layer, without any attention mask."""
        model = self.main.model
        hidden = model.embed_tokens(tokens)
        rope = model.rotary_emb(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for layer in model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
        return model.norm(hidden)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (rows, length, vocabulary) of (rows, length) tokens."""
        return self.main.lm_head(self.hidden(tokens))

    def forward(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean losses of the text and of the routers over (rows, row + 2) tokens."""
        logits = self.logits(tokens[:, :-2]).float()
        main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten(), reduction="none")
        main = (main * weights[:, 1:-1].flatten()).sum() / weights[:, 1:-1].sum()
        balance = torch.stack([router.balance for router in self.routers]).mean()
        for router in self.routers:
            router.balance = None  # it would keep this step's activations alive
        return main, balance


def record_balance(router: Any, _inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Leave the load-balancing loss (Switch Transformers, 2.2) at the router: 1 where the load is even."""
    logits, _, chosen = outputs
    share = F.one_hot(chosen, logits.shape[-1]).float().mean((0, 1))
    router.balance = logits.shape[-1] * (share * logits.float().softmax(-1).mean(0)).sum()


def use_dense_experts(main: Any, forward: Callable[..., Tensor]) -> None:
    """Have every stock experts module of `main` run `forward`."""
    ExpertsInterface.register("dense_experts", forward)
    main.set_experts_implementation("dense_experts")


def dense_routing(hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Return the routing weights as (tokens, experts), zero where a token did not choose the expert."""
    routing = hidden.new_zeros(hidden.shape[0], experts)
    return routing.scatter(1, chosen, weights.to(hidden.dtype))


def per_expert(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split stacked `gate_up_proj` and `down_proj` into `{expert}.{gate,up,down}_proj.weight`."""
    out: dict[str, Tensor] = {}
    for name, tensor in named.items():
        stem = name.rsplit(".", 1)[0]
        for expert, weight in enumerate(tensor if ".experts." in name else ()):
            if name.endswith("gate_up_proj"):
                gate, up = weight.chunk(2)
                out[f"{stem}.{expert}.gate_proj.weight"] = gate
                out[f"{stem}.{expert}.up_proj.weight"] = up
            else:
                out[f"{stem}.{expert}.down_proj.weight"] = weight
        if ".experts." not in name:
            out[name] = tensor
    return out


def shipped(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU, sorted: bf16, but for fp32 selection biases and packed bytes."""
    result = {}
    for name, tensor in sorted(named.items()):
        dtype = torch.float32 if "correction_bias" in name else torch.bfloat16
        if tensor.dtype == torch.uint8:
            dtype = torch.uint8
        # Copied, because safetensors refuses two names for one storage.
        result[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return result
