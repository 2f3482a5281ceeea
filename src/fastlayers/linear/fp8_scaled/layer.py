"""Linear layer with e4m3 weights that have one scale, or one per output channel, and e4m3 activations (W8A8).

    K = in_features, N = out_features (on this rank)
    sx[...]     = max(1e-10, max over K of |x[..., K]|) / 448         "token": one scale per token
                = max(1e-10, max over all tokens of |x|) / 448        "tensor": one scale for the whole call
                = input_scale                                         "static": calibrated, from the checkpoint
    qx[..., K]  = e4m3(clamp(x / sx, ±448))                           to nearest even
    y[..., N]   = round( (Σ over K of qx[..., k] · weight[n, k]) · sx · weight_scale[n] + bias[n] )

The sum is fp32, promoted once per 128 features (Hopper's e4m3 unit keeps about 14 bits), and y is rounded once to
``dtype``. A token with NaN or infinity gets a scale of NaN, so its row of y is NaN ("tensor": all rows; "static":
NaN stays NaN, infinity saturates).
Stored: weight e4m3 [N, K], weight_scale fp32 [N] (a scale per tensor is repeated: fused parts keep their own),
input_scale fp32 [parts] ("static"; the largest counts), bias [N] in dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_kind, check_plain, describe
from fastlayers.linear.base import check_source, frozen
from fastlayers.linear.quantised import QuantisedLinear, QuantisedLinearConfig
from fastlayers.linear.sgl_scaled_gemm import refuses
from fastlayers.quant.block_quant import E4M3, E4M3_MAX, decode_e4m3
from fastlayers.registry import TRITON_NEEDS, Backend, Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot, scale_slot, wrong_divisor, wrong_scale

WEIGHT_SCALES = ("tensor", "channel")
ACTIVATION_SCALES = ("token", "tensor", "static")
SCALE_NAMES = ("weight_scale", "input_scale")
EPS = 1e-10


@dataclass(frozen=True)
class FP8ScaledLinearConfig(QuantisedLinearConfig):
    """What a backend must know: sizes on this rank, ``dtype`` of x, y and bias, where activation scales come from."""

    layer = "FP8ScaledLinear"

    activation_scale: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.layer, "activation_scale", self.activation_scale, ACTIVATION_SCALES)

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"{super().tuning_key()},{self.activation_scale}"


def needs_fp8_dot(cfg: object, device: Device) -> str | None:
    """Refuse CUDA devices whose tensor cores do not multiply e4m3."""
    return device.refuses_e4m3("e4m3 matrix units")


def _refuse_sgl_kernel(cfg: FP8ScaledLinearConfig, device: Device) -> str | None:
    return refuses(cfg, device, 16)


_HERE = "fastlayers.linear.fp8_scaled"
FP8_SCALED_LINEAR = Registry(
    "fp8_scaled_linear",
    [
        # Ahead of ours: at every size that was timed it was not slower (benchmarks/results/products_h200.jsonl).
        Backend(
            "sgl_kernel",
            f"{_HERE}.sgl_kernel:SglKernelFP8ScaledLinear",
            ("sgl_kernel", "torch.ops:sgl_kernel.fp8_scaled_mm", *TRITON_NEEDS),
            _refuse_sgl_kernel,
        ),
        triton_backend(f"{_HERE}.triton:TritonFP8ScaledLinear", needs_fp8_dot),
        torch_backend(f"{_HERE}.torch:TorchFP8ScaledLinear"),
        reference_backend(f"{_HERE}.reference:ReferenceFP8ScaledLinear"),
    ],
    cases=f"{_HERE}.cases",
)


def quantize_scaled_weight(weight: torch.Tensor, scale: str = "channel") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight ``[..., N, K]`` to e4m3 with one scale per matrix or per output channel.

    Returns
    -------
    (Tensor, Tensor)
        e4m3 ``[..., N, K]``, and fp32 scales: ``[..., N]`` (``"channel"``) or ``[...]`` (``"tensor"``). absmax / 448;
        1 where everything is zero.
    """
    check_choice("quantize_scaled_weight", "scale", scale, WEIGHT_SCALES)
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ArgumentError("quantize_scaled_weight", "weight", describe(weight), "a floating tensor [..., N, K]")
    wide = weight.float()
    absmax = wide.abs().amax(-1) if scale == "channel" else wide.abs().amax((-2, -1))
    # A tensor as divisor: CUDA turns a division by a Python number into a product with 1/448.
    scales = (absmax.clamp_min(1e-30) / absmax.new_full((), E4M3_MAX)).masked_fill(absmax == 0, 1.0)
    by_row = scales[..., None] if scale == "channel" else scales[..., None, None]
    return (wide / by_row).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


class FP8ScaledLinear(QuantisedLinear):
    """Linear with e4m3 weights (one scale, or one per output channel) and e4m3 activations.

    Parameters
    ----------
    in_features, out_features, bias, names, device, dtype, backend
        As of every :class:`~fastlayers.linear.quantised.QuantisedLinear`.
    weight_scale : str
        ``"tensor"`` or ``"channel"``: what the checkpoint stores per part.
    activation_scale : str
        ``"token"``, ``"tensor"`` (both found at each call) or ``"static"`` (stored in the checkpoint).
    scale_names : tuple[str, str]
        How the checkpoint calls the scales of weight and input: ``("weight_scale", "input_scale")``, or Hugging
        Face's ``("weight_scale_inv", "activation_scale")``.
    shard : Shard
        A row shard quantises each rank's part of a token with its own scale.

    Notes
    -----
    Parameters: ``weight`` e4m3 ``[local_out, local_in]`` (zeros until loaded), ``weight_scale`` fp32 ``[local_out]``
    and ``input_scale`` fp32 ``[parts]`` (ones until loaded), ``bias``. Source: Micikevicius et al. 2022
    (FP8 formats).

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> dense = fl.Linear(64, 32, bias=True)
    >>> _ = dense.weight.copy_(torch.randn(32, 64))
    >>> layer, x = fl.FP8ScaledLinear.from_linear(dense), torch.randn(3, 64)
    >>> layer.weight.dtype, bool((layer(x) - dense(x)).norm() < 0.05 * dense(x).norm())
    (torch.float8_e4m3fn, True)
    """

    registry = FP8_SCALED_LINEAR

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        weight_scale: str = "channel",
        activation_scale: str = "token",
        scale_names: tuple[str, str] = SCALE_NAMES,
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, shard, names)
        check_choice(self.kind, "weight_scale", weight_scale, WEIGHT_SCALES)
        check_plain(self.kind, "tuple[str, str]", scale_names=scale_names)
        cfg = FP8ScaledLinearConfig(self.local_in, self.local_out, bias, dtype, activation_scale)
        self.weight_scale_kind, self.scale_names = weight_scale, tuple(scale_names)
        self.build(cfg, device, backend, E4M3)
        self.input_scale: nn.Parameter | None = None
        if activation_scale == "static":
            self.input_scale = frozen(torch.ones(len(self.part_sizes), device=device, dtype=torch.float32))

    def scale_slots(self, index: int, full: int, read: slice, local: slice) -> Iterator[tuple[str, Slot]]:
        """Yield the scale of the weight (``[]`` or ``[N]``) and, if it is stored, the input's (``[]``)."""
        weight_name, input_name = self.scale_names
        scale = self.weight_scale[local]
        if self.weight_scale_kind == "tensor":
            yield weight_name, Slot(scale, (), convert=_repeated(scale.shape[0]), wrong=wrong_scale)
        else:
            yield weight_name, scale_slot(scale, full, read)
        if self.input_scale is not None:
            part = self.input_scale[index : index + 1]
            yield input_name, Slot(part, (), convert=lambda s: s.reshape(1), wrong=wrong_divisor)

    @classmethod
    def from_linear(
        cls,
        source: nn.Linear,
        *,
        weight_scale: str = "channel",
        activation_scale: str = "token",
        input_scale: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> FP8ScaledLinear:
        """Return a layer with the weight of an ``nn.Linear`` or :class:`Linear`, which gives the dtype."""
        check_source(cls.__name__, source)
        weight, scale = quantize_scaled_weight(source.weight.detach(), weight_scale)
        return cls.from_checkpoint(
            weight, scale, source.bias, input_scale, activation_scale=activation_scale, dtype=source.weight.dtype,
            backend=backend,
        )  # fmt: skip

    @classmethod
    def from_checkpoint(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        *,
        activation_scale: str = "token",
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> FP8ScaledLinear:
        """Return a layer over a checkpoint's tensors, shared where dtype and layout agree.

        Parameters
        ----------
        weight : Tensor e4m3 ``[N, K]``
        weight_scale : Tensor
            One number, ``[N]`` or ``[N, 1]``.
        bias : Tensor ``[N]``, optional
        input_scale : Tensor of one number, optional
            Asked for by ``activation_scale="static"`` and only then.

        Raises
        ------
        ArgumentError
            Another dtype or shape.
        """
        n, k = cls.check_stored(weight, weight_scale, bias, E4M3)
        if weight_scale.numel() != 1 and tuple(weight_scale.shape) not in ((n,), (n, 1)):
            raise ArgumentError(cls.__name__, "weight_scale", describe(weight_scale), f"one number, [{n}] or [{n}, 1]")
        check_kind(cls.__name__, torch.Tensor | None, input_scale=input_scale)
        if (activation_scale == "static") != (input_scale is not None and input_scale.numel() == 1):
            given = "None" if input_scale is None else describe(input_scale)
            raise ArgumentError(
                cls.__name__, "input_scale", f"{given} with {activation_scale!r}", "one number with 'static', else None"
            )
        made = cls(
            k, n, bias is not None, weight_scale="tensor" if weight_scale.numel() == 1 else "channel",
            activation_scale=activation_scale, device="meta", dtype=dtype, backend="reference",
        )  # fmt: skip
        made.take(backend, weight, weight_scale.reshape(-1).expand(n), bias)
        if input_scale is not None:
            made.input_scale = frozen(input_scale.to(weight.device, torch.float32).reshape(1))
        return made

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``weight · weight_scale`` ``[local_out, local_in]``, rounded once to ``dtype``."""
        return (decode_e4m3(self.weight) * self.weight_scale[:, None]).to(dtype)

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """Return the weight, its scales, and the input's stored scale: the largest of the parts."""
        scale: torch.Tensor | None = self.input_scale
        if scale is not None and len(self.part_sizes) > 1:
            scale = scale.amax(0, keepdim=True)
        return self.weight, self.weight_scale, scale


def _repeated(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scale: scale.reshape(1).expand(count)
