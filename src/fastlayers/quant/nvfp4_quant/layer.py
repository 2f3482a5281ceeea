"""Quantisation of activations to NVFP4: e2m1 codes, an e4m3 scale for 16 features, an fp32 scale for each expert.

    T = rows, ordered by expert; K = features; E = experts; G = K / 16; g[E] = global_scale, usually 448 · 6 / max |x|
    e(t)         = the expert of row t: offsets[e] <= t < offsets[e + 1];  a row of none has codes and scales 0
    y[T,K]       = x[T,K] · g[e(t)]                               fp32
    s[T,G]       = e4m3(max over the group of |y| / 6)            to nearest even, at most 448
    q[T,K]       = e2m1(y / s)                                    to nearest, ties to the even code, at most ±6
    x            ≈ q · s / g

Each step is rounded once, so every backend gives the same bits. A group with NaN or infinity has scale NaN (0x7F) and
codes 0; one whose scale is 0 has codes 0. Two codes share a byte, the first one its low half. Where scales lie:

    "linear"     uint8 [T, G]
    "swizzled"   uint8 [R · ceil4(G)], what products of sm_100 read: each expert's rows begin at a multiple of 128,
                 tiles of 128 rows × 4 groups lie one after another along the groups, and inside a tile row r, group c
                 is byte (r % 32) · 16 + r // 32 · 4 + c. R = (T // 128 + E) · 128; what belongs to no row is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers import env
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_positive, check_tensor, free_to_look
from fastlayers.layer import Layer
from fastlayers.registry import Registry, blackwell_guard, reference_backend, torch_backend, triton_backend

GROUP, LARGEST, TILE_ROWS, TILE_GROUPS = 16, 6.0, 128, 4
SCALE_LAYOUTS = ("linear", "swizzled")
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAME = "NVFP4Quant"


@dataclass(frozen=True)
class NVFP4QuantConfig:
    """What a backend must know: ``num_experts`` whose rows come in one call, and where scales lie."""

    num_experts: int = 1
    scale_layout: str = "linear"

    def __post_init__(self) -> None:
        check_positive(_NAME, num_experts=self.num_experts)
        check_choice(_NAME, "scale_layout", self.scale_layout, SCALE_LAYOUTS)

    def scale_rows(self, rows: int) -> int:
        """Return R, the rows of swizzled scales."""
        return (rows // TILE_ROWS + self.num_experts) * TILE_ROWS

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"E={self.num_experts},{self.scale_layout}"


def swizzled_place(row: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the byte of (row, group) in swizzled scales; ``row`` counts the padding between experts."""
    tiles = -(-groups // TILE_GROUPS)
    tile = row // TILE_ROWS * tiles + group // TILE_GROUPS
    inside = row % TILE_ROWS
    return tile * (TILE_ROWS * TILE_GROUPS) + inside % 32 * 16 + inside // 32 * 4 + group % TILE_GROUPS


def first_scale_rows(offsets: torch.Tensor) -> torch.Tensor:
    """Return for each expert at which row its swizzled scales begin, int32 ``[E]``."""
    tiles = (offsets[1:] - offsets[:-1] + (TILE_ROWS - 1)) // TILE_ROWS
    return ((tiles.cumsum(0) - tiles) * TILE_ROWS).to(torch.int32)


def _refuse_triton(cfg: NVFP4QuantConfig, device: Device) -> str | None:
    return device.refuses_e4m3("e4m3 scales")


_HERE = "fastlayers.quant.nvfp4_quant"
NVFP4_QUANT = Registry(
    "nvfp4_quant",
    [
        triton_backend(f"{_HERE}.triton:TritonNVFP4Quant", _refuse_triton),
        # Its codes are made by approximate reciprocals, and by instructions of sm_100.
        blackwell_guard("flashinfer", ("flashinfer:fp4_quantize",)),
        torch_backend(f"{_HERE}.torch:TorchNVFP4Quant"),
        reference_backend(f"{_HERE}.reference:ReferenceNVFP4Quant"),
    ],
    cases=f"{_HERE}.cases",
)


class NVFP4Quant(Layer):
    """Quantise rows of one or several experts to NVFP4.

    Parameters
    ----------
    num_experts : int
    scale_layout : str
        ``"linear"`` or ``"swizzled"``, see the file's head.
    device
        Where the input will be.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: NVIDIA's NVFP4 and its packages' expert quantisation. No product here takes it yet: sm_90 has no four-bit
    matrix units. No parameters. Capture-safe; allocates its outputs. For inference only: it raises where an input
    requires a gradient.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.quant.nvfp4_quant.layer import NVFP4Quant
    >>> x = torch.tensor([[6.0, 0.5, -3.0, 0.3] + [0.0] * 12])
    >>> codes, scales = NVFP4Quant()(x, torch.tensor([1.0]), torch.tensor([0, 1], dtype=torch.int32))
    >>> codes[0, :2].tolist(), scales.view(torch.float8_e4m3fn).float().tolist()
    ([23, 29], [[1.0]])
    """

    def __init__(
        self,
        num_experts: int = 1,
        scale_layout: str = "linear",
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.debug = env.debug()
        self.choose(NVFP4_QUANT, NVFP4QuantConfig(num_experts, scale_layout), device, backend)

    def forward(
        self, x: torch.Tensor, global_scale: torch.Tensor, offsets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise ``x``.

        Parameters
        ----------
        x : Tensor ``[T, K]``
            bf16, fp16 or fp32; K a multiple of 16. Rows may be strided.
        global_scale : Tensor fp32 ``[E]``
        offsets : Tensor int32 ``[E + 1]``
            Where each expert's rows begin, and where the last one's end: 0 to T, none below the one before.

        Returns
        -------
        (Tensor, Tensor)
            uint8 codes ``[T, K / 2]``, and the bytes of e4m3 scales in the layout asked for.

        Raises
        ------
        ArgumentError
            Another shape, dtype or device; under ``FASTLAYERS_DEBUG``, and on a CPU, also other offsets. Elsewhere
            looking would synchronise, and which rows are then whose differs between backends.
        """
        experts = self.cfg.num_experts
        check_tensor(_NAME, "x", x, dtype=INPUT_DTYPES, device=self.device_type)
        if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % GROUP:
            raise ArgumentError(_NAME, "x", f"of shape {list(x.shape)}", f"[T, K] with K a multiple of {GROUP}")
        check_tensor(
            _NAME, "global_scale", global_scale, shape=(experts,), dtype=torch.float32, device=x.device, contiguous=True
        )
        check_tensor(
            _NAME, "offsets", offsets, shape=(experts + 1,), dtype=torch.int32, device=x.device, contiguous=True
        )
        if self.debug or free_to_look(offsets):
            _check_offsets(offsets.tolist(), x.shape[0])
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x, global_scale=global_scale)
        found: tuple[torch.Tensor, torch.Tensor] = self.ladder.pick(x.shape[0])(x, global_scale, offsets)
        return found


def _check_offsets(offsets: list[int], rows: int) -> None:
    for place, (least, offset) in enumerate(zip([0, *offsets], offsets, strict=False)):
        if not least <= offset <= rows:
            given = f"{offset} at {place}" + f", behind {least}" * (place > 0)
            raise ArgumentError(_NAME, "offsets", given, f"rows from 0 to {rows}, none below the one before")
