"""SiLU of the gate times the up projection, quantised to e4m3 in groups: the input of an FP8 down projection.

    T = tokens, I = size, g = group_size, G = ceil(I / g) groups (the last may be ragged)
    y[T, I]   = silu(gate).to(dtype) · up, rounded to dtype           as silu_mul, bit for bit
    a[T, G]   = max(|y| over the group, 1e-10)
    s[T, G]   = a / 448                          "ue8m0": the next power of two, never below
    q[T, I]   = e4m3(clamp(y / s, ±448))

A group with NaN or infinity gets scale NaN and codes 0, as in group_quant. Layouts of ``s``, all ``[T, G]`` fp32:

    "row"         stride (G, 1)
    "col"         stride (1, T)
    "col_tma4"    stride (1, T rounded up to 4): what TMA loads on sm_90
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.device import Device
from fastlayers.errors import check_choice, check_positive, check_tensor
from fastlayers.layer import Layer
from fastlayers.quant.group_quant.layer import GROUPS, SCALE_FMTS, SCALE_LAYOUTS
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOOR = 1e-10
E4M3_MAX = 448.0


@dataclass(frozen=True)
class SiluMulQuantConfig:
    """What a backend must know: sizes, and the layout and number format of the scales."""

    size: int
    group_size: int = 128
    scale_layout: str = "row"
    scale_fmt: str = "float"

    def __post_init__(self) -> None:
        check_positive("SiluMulQuant", size=self.size)
        check_choice("SiluMulQuant", "group_size", self.group_size, GROUPS)
        check_choice("SiluMulQuant", "scale_layout", self.scale_layout, SCALE_LAYOUTS)
        check_choice("SiluMulQuant", "scale_fmt", self.scale_fmt, SCALE_FMTS)

    @property
    def groups(self) -> int:
        """Scale groups of a row."""
        return -(-self.size // self.group_size)


def _refuse_triton(cfg: SiluMulQuantConfig, device: Device) -> str | None:
    return device.refuses_e4m3("e4m3 codes")


_HERE = "fastlayers.activation.silu_mul_quant"
SILU_MUL_QUANT = Registry(
    "silu_mul_quant",
    [
        triton_backend(f"{_HERE}.triton:TritonSiluMulQuant", _refuse_triton),
        torch_backend(f"{_HERE}.torch:TorchSiluMulQuant"),
        reference_backend(f"{_HERE}.reference:ReferenceSiluMulQuant"),
    ],
    cases=f"{_HERE}.cases",
)


class SiluMulQuant(Layer):
    """``silu(gate) · up`` quantised to e4m3 with one fp32 scale per token and group.

    Parameters
    ----------
    size : int
        Width of the output; the input has twice that.
    group_size : int
        Values that share a scale: 16, 32, 64 or 128.
    scale_layout : str
        ``"row"``, ``"col"`` or ``"col_tma4"``, see the file's head.
    scale_fmt : str
        ``"float"``, or ``"ue8m0"`` for powers of two.
    device
        Where it will run.
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    The product is rounded to the model's dtype before it is quantised, so the fused layer gives what the
    two separate ones give. Source: DeepSeek-V3 report, section 3.3. Capture-safe; allocates its outputs.
    For inference only: it raises where an input or a parameter requires a gradient.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.activation.silu_mul_quant.layer import SiluMulQuant
    >>> q, s = SiluMulQuant(128)(torch.ones(2, 256))
    >>> q.dtype, q.shape, round(float(s[0, 0]) * float(q[0, 0]), 4)
    (torch.float8_e4m3fn, torch.Size([2, 128]), 0.7311)
    """

    def __init__(
        self,
        size: int,
        *,
        group_size: int = 128,
        scale_layout: str = "row",
        scale_fmt: str = "float",
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        cfg = SiluMulQuantConfig(size, group_size, scale_layout, scale_fmt)
        self.choose(SILU_MUL_QUANT, cfg, device, backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(q, s)``: e4m3 ``[T, I]`` and fp32 ``[T, G]`` for ``x`` ``[T, 2I]``."""
        wanted = (None, 2 * self.cfg.size)
        check_tensor(
            "SiluMulQuant", "x", x, shape=wanted, dtype=DTYPES, device=self.device_type, last_dim_contiguous=True
        )
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        q, s = self.ladder.pick(x.shape[0])(x)
        return q, s
