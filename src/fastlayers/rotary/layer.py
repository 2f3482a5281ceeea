"""Rotary position embedding (RoPE) of queries and keys, MRoPE included.

    T = tokens, H = heads, D = head_dim, d = rotary_dim ≤ D, f = 0 … d/2 - 1
    c, s        = cos[p, f], sin[p, f]           p = positions[T], or positions[axis(f), T] with MRoPE
    (a, b)      = (x[f], x[f + d/2])             half-split input
                  (x[2f], x[2f + 1])             interleaved input
    (a', b')    = (a·c - b·s, b·c + a·s)         fp32, rounded once to the input's dtype
    y[T, H, :d] = all a' then all b'             half-split output
                  a'₀ b'₀ a'₁ b'₁ …              interleaved output
    y[T, H, d:] = x[T, H, d:]

    family               interleaved_in    interleaved_out
    Llama, Qwen, GPT-OSS      no                no
    DeepSeek-V2               yes               yes
    DeepSeek-V3               yes               no        (rope_interleave; cached keys are de-interleaved)

Hugging Face rounds in other places: DeepSeek-V3, Llama and Qwen cast cos and sin to the model's dtype and
multiply there (three more roundings); DeepSeek-V2 rotates in fp32, as here. In fp32 models all agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers import env
from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_kind,
    check_number,
    check_plain,
    check_positive,
    check_tensor,
    describe,
    free_to_look,
)
from fastlayers.layer import Layer
from fastlayers.memory import memory_for
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend
from fastlayers.rotary.scaling import RopeScaling, build_tables, config_value, rope_parameters

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_WIDTH = 65_536  # of a head: lists on the host are as long


@dataclass(frozen=True)
class RotaryConfig:
    """What a backend must know: dimensions, pairing of input and output, MRoPE's split of frequencies."""

    head_dim: int
    rotary_dim: int
    interleaved_in: bool = False
    interleaved_out: bool = False
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        check_positive("RotaryEmbedding", head_dim=self.head_dim, rotary_dim=self.rotary_dim)
        if self.head_dim > MOST_WIDTH:
            raise ArgumentError("RotaryEmbedding", "head_dim", self.head_dim, f"at most {MOST_WIDTH}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ArgumentError(
                "RotaryEmbedding",
                "rotary_dim",
                self.rotary_dim,
                f"an even number up to head_dim {self.head_dim}",
            )
        if self.mrope_section and sum(self.mrope_section) != self.rotary_dim // 2:
            raise ArgumentError(
                "RotaryEmbedding",
                "mrope_section",
                self.mrope_section,
                f"counts that sum to {self.rotary_dim // 2}",
            )

    def axes(self) -> list[int]:
        """Return for each frequency the axis (0 time, 1 height, 2 width) whose position it rotates with."""
        half, section = self.rotary_dim // 2, self.mrope_section
        if not section:
            return [0] * half
        if self.mrope_interleaved:
            return [f % 3 if f < 3 * section[f % 3] else 0 for f in range(half)]
        return [0] * section[0] + [1] * section[1] + [2] * section[2]


_HERE = "fastlayers.rotary"
ROTARY = Registry(
    "rotary",
    [
        triton_backend(f"{_HERE}.triton:TritonRotary"),
        torch_backend(f"{_HERE}.torch:TorchRotary"),
        reference_backend(f"{_HERE}.reference:ReferenceRotary"),
    ],
    cases=f"{_HERE}.cases",
)


class RotaryEmbedding(Layer):
    """Rotary position embedding with its cos/sin tables.

    Parameters
    ----------
    head_dim : int
        Last dimension of ``q`` and ``k``.
    base : float
        Hugging Face's ``rope_theta``.
    scaling : RopeScaling, optional
        Default: none.
    max_position : int
        The tables hold positions ``0 … max_position - 1``; they are built here and never grow.
    interleaved_in, interleaved_out : bool
        Pairing of the dimensions, see the file's head.
    rotary_dim : int, optional
        How many leading dimensions rotate (default: all).
    device
        Of the tables.
    backend : str
        ``"auto"``, a name, or a ladder.

    Attributes
    ----------
    cos, sin : Tensor
        fp32 ``[max_position, rotary_dim / 2]``, non-persistent buffers. ``module.to(bf16)`` leaves them fp32.

    Notes
    -----
    Source: Su et al. 2021; YaRN: Peng et al. 2023; MRoPE: Qwen2-VL. Capture-safe; allocates its outputs.
    Gradients are right with the backends ``torch`` and ``reference``; a backward pass through another one raises.
    Positions outside the table are an :class:`ArgumentError` on a CPU, and under ``FASTLAYERS_DEBUG`` anywhere.
    Elsewhere looking would synchronise, and the Triton backend clamps them into the table.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> rope = fl.RotaryEmbedding(4, max_position=8)
    >>> q, k = rope(torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.tensor([0, 1]))
    >>> [round(v, 3) for v in q[1, 0].tolist()]
    [-0.301, 0.99, 1.382, 1.01]
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        scaling: RopeScaling | None = None,
        max_position: int = 4096,
        interleaved_in: bool = False,
        interleaved_out: bool = False,
        rotary_dim: int | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive("RotaryEmbedding", max_position=max_position)
        (max_position,) = as_integers(max_position)
        check_plain("RotaryEmbedding", "float > 0", base=base)
        check_kind("RotaryEmbedding", RopeScaling | None, scaling=scaling)
        self.base, self.scaling, self.max_position = float(base), scaling or RopeScaling(), max_position
        cfg = RotaryConfig(
            head_dim,
            head_dim if rotary_dim is None else rotary_dim,
            interleaved_in,
            interleaved_out,
            self.scaling.mrope_section,
            self.scaling.mrope_interleaved,
        )
        self.choose(ROTARY, cfg, device, backend)
        self.debug = env.debug()
        self._fill_tables(torch.get_default_device() if device is None else torch.device(device))

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        head_dim: int | None = None,
        max_position: int | None = None,
        interleaved_in: bool = False,
        interleaved_out: bool = False,
        layer_type: str | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> RotaryEmbedding:
        """Return the rotary embedding of a Hugging Face config (object or parsed ``config.json``).

        ``head_dim`` and ``max_position`` default to the config's. How dimensions pair is not in the config.
        """
        rope = rope_parameters(config, layer_type)
        base, part = (
            default if (given := rope.get(name)) is None else given
            for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0))
        )
        check_number("RotaryEmbedding.from_config", partial_rotary_factor=part)
        if head_dim is None:
            head_dim = config_value(config, "head_dim")
        if head_dim is None:
            hidden, heads = (config_value(config, name) for name in ("hidden_size", "num_attention_heads"))
            check_positive("RotaryEmbedding.from_config", hidden_size=hidden, num_attention_heads=heads)
            hidden, heads = as_integers(hidden, heads)
            head_dim = hidden // heads
        check_positive("RotaryEmbedding.from_config", head_dim=head_dim)
        if max_position is None:
            max_position = config_value(config, "max_position_embeddings")
        return cls(
            head_dim,
            base=base,
            scaling=RopeScaling.from_config(config, layer_type),
            max_position=max_position,
            interleaved_in=interleaved_in,
            interleaved_out=interleaved_out,
            rotary_dim=int(head_dim * part),
            device=device,
            backend=backend,
        )

    def _fill_tables(self, device: torch.device) -> None:
        with memory_for("RotaryEmbedding", max_position=self.max_position, head_dim=self.cfg.head_dim):
            tables = build_tables(self.cfg.rotary_dim, self.base, self.scaling, self.max_position)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        was_meta = self.cos.is_meta
        super()._apply(fn, recurse)
        # Tables stay fp32 under .to(bf16), and come into being when a module leaves the meta device.
        if self.cos.dtype != torch.float32 or (was_meta and not self.cos.is_meta):
            self._fill_tables(self.cos.device)
        return self

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate ``q`` and ``k``.

        Parameters
        ----------
        q : Tensor ``[T, Hq, D]``
            fp32, fp16 or bf16; any strides with a contiguous last dimension.
        k : Tensor ``[T, Hk, D]`` or None
            Same dtype; the number of heads may differ (MLA: 1).
        positions : Tensor ``[T]``, or ``[3, T]`` with MRoPE
            int32 or int64.

        Returns
        -------
        (Tensor, Tensor or None)
            New contiguous tensors.

        Raises
        ------
        ArgumentError
            Another shape, dtype or device; on a CPU, and with ``FASTLAYERS_DEBUG`` anywhere, also positions outside
            the tables.
        """
        name, dim, where = "RotaryEmbedding", self.cfg.head_dim, self.cos.device
        check_tensor(name, "q", q, shape=(None, None, dim), dtype=DTYPES, device=where, last_dim_contiguous=True)
        tokens = q.shape[0]
        if k is not None:
            shape = (tokens, None, dim)
            check_tensor(name, "k", k, shape=shape, dtype=q.dtype, device=where, last_dim_contiguous=True)
        self._check_positions(positions, tokens)
        rotated: tuple[torch.Tensor, torch.Tensor | None] = self.ladder.pick(tokens)(
            q, k, self.cos, self.sin, positions
        )
        return rotated

    def _check_positions(self, positions: torch.Tensor, tokens: int) -> None:
        shapes = ((tokens,), (3, tokens)) if self.cfg.mrope_section else ((tokens,),)
        check_tensor("RotaryEmbedding", "positions", positions, device=self.cos.device)
        if positions.dtype not in (torch.int32, torch.int64) or tuple(positions.shape) not in shapes:
            accepted = " or ".join(str(list(shape)) for shape in shapes)
            raise ArgumentError("RotaryEmbedding", "positions", describe(positions), f"int32 or int64 {accepted}")
        if tokens and (self.debug or free_to_look(positions)):
            self._check_range(positions)

    def _check_range(self, positions: torch.Tensor) -> None:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.max_position:
            accepted = f"0 to {self.max_position - 1} (max_position)"
            raise ArgumentError("RotaryEmbedding", "positions", f"{low} to {high}", accepted)


def check_rotary(layer: str, rotary: RotaryEmbedding, argument: str, head_dim: int, *, whole: bool = False) -> None:
    """Raise :class:`ArgumentError` unless ``rotary`` rotates heads of ``head_dim``, ``whole``: all of each head."""
    check_kind(layer, RotaryEmbedding, rotary=rotary)
    for name, size in (("head_dim", rotary.cfg.head_dim), ("rotary_dim", rotary.cfg.rotary_dim)):
        if size != head_dim and (whole or name == "head_dim"):
            raise ArgumentError(layer, f"rotary.{name}", size, f"{argument} {head_dim}")
