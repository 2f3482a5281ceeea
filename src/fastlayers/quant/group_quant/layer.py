"""Quantisation of activations: one scale for each token and group of features.

    T = tokens, K = features, G = K / group, MAX = 448 (e4m3) or 127 (int8)
    absmax[T,G] = max(eps, max over the group of |x[T,K]|)
    s[T,G]      = absmax / MAX                    ("float": a division, not a product with a rounded 1/MAX)
                = 2^ceil(log2(absmax / MAX))      ("ue8m0": a power of two, never below absmax / MAX)
    q[T,K]      = round(clamp(x / s, -MAX, MAX))  (to nearest even, e4m3 and int8 alike)
    x           ≈ q · s

All steps are fp32 and correctly rounded, so every backend gives the same bits. With ``exact=False`` a backend may
multiply by reciprocals, as kernels elsewhere do: a scale may be one unit off, and a code next to a tie one code
off. A group with NaN or infinity gets scale NaN
and codes 0, so whatever is computed from it is NaN (exact layers only). Memory of the scales (``scale_layout``):

    "row"        strides (G, 1)
    "col"        strides (1, T)
    "col_tma4"   strides (1, T rounded up to 4), what TMA needs; the padding is never written
    "packed_tma4"  int32 [T, ceil(G / 4)], strided as "col_tma4": four exponent bytes each, the first group's lowest, 0
                 behind the last group; ue8m0 only. What products of sm_100 read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_plain, check_tensor
from fastlayers.layer import Layer
from fastlayers.registry import Backend, Registry, reference_backend, torch_backend, triton_backend

GROUPS = (16, 32, 64, 128)
SCALE_FMTS = ("float", "ue8m0")
SCALE_LAYOUTS = ("row", "col", "col_tma4")
PACKED = "packed_tma4"
LAYOUTS = (*SCALE_LAYOUTS, PACKED)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class GroupQuantConfig:
    """What a backend must know; see the file's head for each field."""

    group: int = 128
    dtype: torch.dtype = torch.float8_e4m3fn
    scale_fmt: str = "float"
    scale_layout: str = "row"
    eps: float = 1e-10
    exact: bool = True

    def __post_init__(self) -> None:
        check_choice("GroupQuant", "group", self.group, GROUPS)
        check_choice("GroupQuant", "dtype", self.dtype, tuple(LARGEST))
        check_choice("GroupQuant", "scale_fmt", self.scale_fmt, SCALE_FMTS)
        check_choice("GroupQuant", "scale_layout", self.scale_layout, LAYOUTS)
        if self.scale_layout == PACKED and self.scale_fmt != "ue8m0":
            raise ArgumentError("GroupQuant", "scale_layout", f"{PACKED!r} with {self.scale_fmt!r} scales", "'ue8m0'")
        check_plain("GroupQuant", "float", eps=self.eps)
        if not 1e-30 <= self.eps <= 1.0:
            raise ArgumentError("GroupQuant", "eps", self.eps, "1e-30 <= eps <= 1, so that no scale is subnormal")

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        name = str(self.dtype).removeprefix("torch.")
        return f"group={self.group},{name},{self.scale_fmt},{self.scale_layout}" + ("" if self.exact else ",inexact")


def empty_scales(x: torch.Tensor, rows: int, groups: int, layout: str) -> torch.Tensor:
    """Return uninitialised scales ``[rows, groups]`` like ``x`` with the strides of ``layout``: fp32, or packed."""
    if layout == "row":
        return x.new_empty(rows, groups, dtype=torch.float32)
    padded = rows if layout == "col" else (rows + 3) // 4 * 4
    if layout == PACKED:
        return x.new_empty((groups + 3) // 4, padded, dtype=torch.int32).t()[:rows]
    return x.new_empty(groups, padded, dtype=torch.float32).t()[:rows]


def packed_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the exponent bytes of packed scales, uint8 ``[T, 4 · ceil(groups / 4)]``."""
    return packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpacked_scales(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """Return fp32 scales ``[T, groups]`` of packed ones ``[T, ceil(groups / 4)]``."""
    exponents = packed_bytes(packed)[:, :groups].int()
    return torch.where(exponents == 255, torch.nan, (exponents << 23).view(torch.float32))


def check_groups(x: torch.Tensor, group: int) -> None:
    """Raise :class:`ArgumentError` unless ``x`` is a float tensor whose last dimension is whole groups."""
    check_tensor("GroupQuant", "x", x, dtype=INPUT_DTYPES)
    if x.dim() < 1 or x.shape[-1] == 0 or x.shape[-1] % group:
        raise ArgumentError("GroupQuant", "x", f"of shape {list(x.shape)}", f"[..., K] with K a multiple of {group}")


def _refuse_triton(cfg: GroupQuantConfig, device: Device) -> str | None:
    return device.refuses_e4m3("e4m3 codes") if cfg.dtype == torch.float8_e4m3fn else None


def _refuse_sgl_kernel(cfg: GroupQuantConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.exact:
        return "it multiplies by 448 / absmax, so codes next to a tie differ; ask for exact=False"
    if cfg.dtype != torch.float8_e4m3fn:
        return f"dtype {cfg.dtype}: it truncates int8 codes"
    if cfg.scale_fmt != "float":
        return f"scale_fmt {cfg.scale_fmt!r}: it packs such scales into bytes"
    if cfg.eps != 1e-10:
        return f"eps {cfg.eps}: it takes 1e-10 only"
    return None


_HERE = "fastlayers.quant.group_quant"
GROUP_QUANT = Registry(
    "group_quant",
    [
        triton_backend(f"{_HERE}.triton:TritonGroupQuant", _refuse_triton),
        Backend(
            "sgl_kernel",
            f"{_HERE}.sgl_kernel:SglKernelGroupQuant",
            ("sgl_kernel", "torch.ops:sgl_kernel.sgl_per_token_group_quant_8bit_v2"),
            _refuse_sgl_kernel,
        ),
        torch_backend(f"{_HERE}.torch:TorchGroupQuant"),
        reference_backend(f"{_HERE}.reference:ReferenceGroupQuant"),
    ],
    cases=f"{_HERE}.cases",
)


class GroupQuant(Layer):
    """Quantise activations to e4m3 or int8 with one fp32 scale per token and group of features.

    Parameters
    ----------
    group : int
        16, 32, 64 or 128.
    dtype : torch.dtype
        ``torch.float8_e4m3fn`` or ``torch.int8``.
    scale_fmt : str
        ``"float"``, or ``"ue8m0"`` (powers of two, still stored as fp32).
    scale_layout : str
        ``"row"``, ``"col"``, ``"col_tma4"``, or with ``"ue8m0"`` also ``"packed_tma4"``.
    eps : float
        Smallest absmax: an all-zero group gets scale ``eps / MAX`` and codes 0.
    exact : bool
        False admits backends that differ by one code at ties, see the file's head.
    device, backend
        Where it will run; ``"auto"``, a name, or a ladder.

    Notes
    -----
    Source: DeepSeek-V3's 1×128 activations. No parameters. Capture-safe; allocates its outputs.
    For inference only: it raises where an input or a parameter requires a gradient.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> from fastlayers.quant.group_quant.layer import GroupQuant
    >>> q, s = GroupQuant(group=16)(torch.full((1, 32), 896.0))
    >>> q.dtype, q[0, 0].item(), s.tolist()
    (torch.float8_e4m3fn, 448.0, [[2.0, 2.0]])
    """

    def __init__(
        self,
        group: int = 128,
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scale_fmt: str = "float",
        scale_layout: str = "row",
        eps: float = 1e-10,
        exact: bool = True,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.choose(GROUP_QUANT, GroupQuantConfig(group, dtype, scale_fmt, scale_layout, eps, exact), device, backend)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise ``x``.

        Parameters
        ----------
        x : Tensor ``[..., K]``
            bf16, fp16 or fp32; K a multiple of ``group``. Rows may be strided. In the scales, leading
            dimensions are flattened to T.

        Returns
        -------
        (Tensor, Tensor)
            ``q`` of ``x``'s shape, contiguous, and ``s`` fp32 ``[T, K / group]``, or packed int32.

        Raises
        ------
        ArgumentError
            K is not a multiple of ``group``, another dtype or device.
        """
        check_groups(x, self.cfg.group)
        check_tensor("GroupQuant", "x", x, device=self.device_type)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(x=x)
        rows = x.reshape(-1, x.shape[-1])
        q, s = self.ladder.pick(rows.shape[0])(rows)
        return q.view(x.shape), s


def quantize_groups(
    x: torch.Tensor,
    group: int = 128,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_fmt: str = "float",
    scale_layout: str = "row",
    eps: float = 1e-10,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` once: :class:`GroupQuant` as a function.

    It chooses a backend at each call; what runs each step should hold a :class:`GroupQuant`.
    """
    layer = GroupQuant(
        group,
        dtype=dtype,
        scale_fmt=scale_fmt,
        scale_layout=scale_layout,
        eps=eps,
        device=x.device,
        backend=backend,
    )
    result: tuple[torch.Tensor, torch.Tensor] = layer(x)
    return result
