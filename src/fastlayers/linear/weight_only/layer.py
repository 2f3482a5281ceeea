"""Linear layer with weights of 4 or 8 bits and activations as they are (weight-only: W4A16, W8A16).

    K = in_features, N = out_features (on this rank), G = 1 or K / group_size groups of input features
    w[n, k]   = (code[n, k] - zero[g(k), n]) · scale[g(k), n]        g(k) = k // group_size, or what the file says
    y[..., n] = round( Σ over k of x[..., k] · round(w[n, k]) + bias[n] )             groups: the dequantised layer's
    y[..., n] = round( (Σ over k of x[..., k] · (code[n, k] - zero[n])) · scale[n] + bias[n] )    a scale per channel

Sums are fp32 and y is rounded once; ``round(w)`` is to the dtype of x. With a scale per channel codes are multiplied
as they are, which is exact; the Triton backend does so with groups, too, and scales their sums: w is not rounded.
Stored: weight uint8 [N, K/2] ("w4a16": codes 0 to 15, two a byte, see quant/packed_codes.py), int8 [N, K] ("w8a16") or
e4m3 [N, K] ("fp8_w8a16"); weight_scale fp32 [G, N]; weight_zero int16 [G, N]; group_index int32 [K]; bias [N] in dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.errors import ArgumentError, check_choice, check_fields, check_kind, check_plain, describe
from fastlayers.linear.base import check_source, frozen
from fastlayers.linear.quantised import QuantisedLinear, QuantisedLinearConfig
from fastlayers.linear.weight_only.checkpoint import Codes, aligned, layout_slots
from fastlayers.memory import allocate
from fastlayers.quant.block_quant import E4M3, E4M3_MAX
from fastlayers.quant.packed_codes import UNIT, pack_nibbles
from fastlayers.quant.weight_only_config import LAYOUTS
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend
from fastlayers.weights import Slot

FORMATS = {"w4a16": torch.uint8, "w8a16": torch.int8, "fp8_w8a16": E4M3}
# What is subtracted from a code where no zero points are stored.
ZERO = {"w4a16": 8, "w8a16": 0, "fp8_w8a16": 0}
_NAME = "WeightOnlyLinear"


@dataclass(frozen=True)
class WeightOnlyLinearConfig(QuantisedLinearConfig):
    """What a backend must know: sizes on this rank, ``dtype`` of x, y and bias, and how weights are stored."""

    layer = _NAME

    format: str = "w4a16"
    group_size: int = 128
    zero_point: bool = False
    act_order: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(_NAME, "format", self.format, tuple(FORMATS))
        check_fields(_NAME, self)
        check_codes(_NAME, self.format, self.in_features, self.group_size, self.zero_point, self.act_order)
        if self.act_order and not self.group_size:
            raise ArgumentError(_NAME, "act_order", "True with one group", "several groups")

    @property
    def groups(self) -> int:
        """Scales of an output channel."""
        return self.in_features // self.group_size if self.group_size else 1

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the weight's scales."""
        return self.groups, self.out_features

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"{super().tuning_key()},{self.format},{self.group_size}"


_HERE = "fastlayers.linear.weight_only"
WEIGHT_ONLY_LINEAR = Registry(
    "weight_only_linear",
    [
        triton_backend(f"{_HERE}.triton:TritonWeightOnlyLinear"),
        torch_backend(f"{_HERE}.torch:TorchWeightOnlyLinear"),
        reference_backend(f"{_HERE}.reference:ReferenceWeightOnlyLinear"),
    ],
    cases=f"{_HERE}.cases",
)


def check_codes(
    layer: str, format: str, in_features: int, group_size: int, zero_point: bool, act_order: bool = False
) -> None:
    """Raise :class:`ArgumentError` unless a format has such groups of so many input features."""
    accepted = f"0 (a scale per channel) or a multiple of {UNIT} that divides in_features {in_features}"
    if group_size < 0 or group_size % UNIT or (group_size and in_features % group_size):
        raise ArgumentError(layer, "group_size", group_size, accepted)
    if format == "w4a16" and in_features % UNIT:
        raise ArgumentError(layer, "in_features", in_features, f"a multiple of {UNIT} where codes are nibbles")
    if format == "fp8_w8a16" and (group_size or zero_point or act_order):
        given = f"group_size {group_size}, zero_point {zero_point}, act_order {act_order}"
        raise ArgumentError(
            layer, "format", f"fp8_w8a16 with {given}", "group_size 0 (a scale per channel), no zero points"
        )


def quantize_weight_only(
    weight: torch.Tensor, format: str = "w4a16", group_size: int = 128, zero_point: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise a weight ``[N, K]`` to the nearest codes.

    Returns
    -------
    (Tensor, Tensor, Tensor or None)
        ``weight``, ``weight_scale`` ``[G, N]`` and ``weight_zero`` ``[G, N]`` as the layer stores them.

    Raises
    ------
    ArgumentError
        No weight, or groups that :class:`WeightOnlyLinear` would refuse of one with K input features.
    """
    name = "quantize_weight_only"
    check_choice(name, "format", format, tuple(FORMATS))
    check_plain(name, "int", group_size=group_size)
    check_plain(name, "bool", zero_point=zero_point)
    matrix = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dim() == 2
    if not matrix or not weight.numel():
        raise ArgumentError(name, "weight", describe(weight), "a floating tensor [N, K], one of each or more")
    n, k = weight.shape
    if format == "w4a16" and k % UNIT:
        raise ArgumentError(name, "weight", describe(weight), f"K a multiple of {UNIT} where codes are nibbles")
    check_codes(name, format, k, group_size, zero_point)
    grouped = weight.float().reshape(n, -1, group_size or k)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    zero: torch.Tensor | None = None
    if zero_point:
        levels = 15 if format == "w4a16" else 255
        scale = ((high - low) / levels).clamp_min(1e-30)
        zero = (-low / scale).round().clamp(0, levels)
        codes = ((grouped / scale[..., None]).round() + zero[..., None]).clamp(0, levels)
        if format == "w8a16":
            codes, zero = codes - 128, zero - 128
    else:
        largest = {"w4a16": 7.0, "w8a16": 127.0, "fp8_w8a16": E4M3_MAX}[format]
        absmax = torch.maximum(high, -low)
        scale = (absmax.clamp_min(1e-30) / largest).masked_fill(absmax == 0, 1.0)
        codes = (grouped / scale[..., None]).clamp(-largest, largest)
        codes = codes if format == "fp8_w8a16" else codes.round() + ZERO[format]
    stored = codes.reshape(n, k)
    stored = pack_nibbles(stored) if format == "w4a16" else stored.to(FORMATS[format])
    return stored, scale.t().contiguous(), None if zero is None else zero.t().to(torch.int16).contiguous()


class WeightOnlyLinear(QuantisedLinear):
    """Linear with weights of 4 or 8 bits (a scale per group of input features, or per channel); x stays as it is.

    Parameters
    ----------
    in_features, out_features, bias, names, device, dtype, backend
        As of every :class:`~fastlayers.linear.quantised.QuantisedLinear`.
    format : str
        ``"w4a16"``, ``"w8a16"`` (integers) or ``"fp8_w8a16"`` (e4m3).
    group_size : int
        Input features that share a scale: a multiple of 32; 0: one scale per output channel.
    zero_point : bool
        Whether zero points are stored; otherwise 4-bit codes are around 8, others around 0.
    act_order : bool
        Whether the checkpoint says which group each input feature belongs to (``g_idx``).
    layout : str
        How the checkpoint packs it: ``"awq"``, ``"gptq"``, ``"gptq_v2"`` (zero points as they are),
        ``"packed"`` (compressed-tensors' pack-quantized) or ``"plain"`` (8 bits, a tensor of codes).
    shard : Shard
        Of whole groups, and of whole words of the layout.

    Notes
    -----
    Parameters: ``weight``, ``weight_scale``, ``weight_zero``, ``group_index``, ``bias``: see the module's legend.
    Sources: Frantar et al. 2022 (GPTQ), Lin et al. 2023 (AWQ).

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> dense = fl.Linear(64, 32)
    >>> _ = dense.weight.copy_(torch.randn(32, 64))
    >>> layer, x = fl.WeightOnlyLinear.from_linear(dense, group_size=32), torch.randn(3, 64)
    >>> list(layer.weight.shape), bool((layer(x) - dense(x)).norm() < 0.2 * dense(x).norm())
    ([32, 32], True)
    """

    registry = WEIGHT_ONLY_LINEAR

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        format: str = "w4a16",
        group_size: int = 128,
        zero_point: bool = False,
        act_order: bool = False,
        layout: str = "packed",
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, shard, names)
        cfg = WeightOnlyLinearConfig(
            self.local_in, self.local_out, bias, dtype, format, group_size, zero_point, act_order
        )  # fmt: skip
        check_choice(self.kind, "layout", layout, LAYOUTS[format])
        if act_order and shard.kind == "row" and shard.axis.size > 1:
            raise ArgumentError(self.kind, "act_order", "True with a row shard", "False: each rank needs all groups")
        self.layout = layout
        aligned(self, cfg)
        self.build(cfg, device, backend, FORMATS[format], self.local_in // 2 if format == "w4a16" else None)
        self.weight_zero: nn.Parameter | None = None
        self.group_index: nn.Parameter | None = None
        if zero_point:
            self.weight_zero = frozen(allocate(self.kind, "weight_zero", cfg.scales, torch.int16, device))
        if act_order:
            self.group_index = frozen(allocate(self.kind, "group_index", (self.local_in,), torch.int32, device))

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensors of every part, as its layout names and packs them, and ``bias``."""
        index: list[torch.Tensor] = []  # of the parts read so far: all must be one
        cfg, zero = self.cfg, self.weight_zero
        for prefix, full, read, local in self.parts():
            held = Codes(
                self.layout, cfg.format, cfg.group_size, self.in_features, self.row_slice, self.weight[local],
                self.weight_scale[:, local], None if zero is None else zero[:, local], self.group_index,
            )  # fmt: skip
            for name, slot in layout_slots(held, full, read, index):
                yield f"{prefix}{name}", slot
            if self.bias is not None:
                yield f"{prefix}bias", Slot(self.bias[local], (full,), (read,))

    @classmethod
    def from_linear(
        cls,
        source: nn.Linear,
        *,
        format: str = "w4a16",
        group_size: int = 128,
        zero_point: bool = False,
        backend: str = "auto",
    ) -> WeightOnlyLinear:
        """Return a layer with the weight of an ``nn.Linear`` or :class:`Linear`, each code the nearest."""
        check_source(cls.__name__, source)
        weight = source.weight.detach()
        made = cls(
            weight.shape[1], weight.shape[0], source.bias is not None, format=format, group_size=group_size,
            zero_point=zero_point, layout=LAYOUTS[format][-1], device="meta", dtype=weight.dtype, backend="reference",
        )  # fmt: skip
        stored, scale, zero = quantize_weight_only(weight, format, group_size, zero_point)
        made.take(backend, stored, scale, source.bias)
        made.weight_zero = None if zero is None else frozen(zero)
        return made

    @classmethod
    def from_checkpoint(
        cls,
        tensors: Mapping[str, torch.Tensor],
        in_features: int,
        out_features: int,
        *,
        layout: str,
        format: str = "w4a16",
        group_size: int = 128,
        zero_point: bool = True,
        act_order: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> WeightOnlyLinear:
        """Return a layer over one module's tensors of a checkpoint (``{"qweight": …, "scales": …}``), unpacked.

        Raises
        ------
        ArgumentError
            A tensor of the layout is not there.
        CheckpointError
            Another dtype or shape.
        """
        check_kind(cls.__name__, Mapping, tensors=tensors)
        device = next((each.device for each in tensors.values()), None)
        made = cls(
            in_features, out_features, "bias" in tensors, format=format, group_size=group_size, layout=layout,
            zero_point=zero_point, act_order=act_order, device=device, dtype=dtype, backend=backend,
        )  # fmt: skip
        for name, slot in made.slots():
            if name not in tensors:
                raise ArgumentError(cls.__name__, "tensors", sorted(tensors), f"with {name}, as {layout} has it")
            slot.fill(name, tensors[name])
        return made

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``w`` ``[local_out, local_in]``, rounded once to ``dtype``."""
        from fastlayers.linear.weight_only.torch import decoded

        weight, scale, zero, index = self.operands()
        assert weight is not None and scale is not None
        return decoded(self.cfg.format, self.cfg.group_size, weight, scale, zero, index, scaled=True).to(dtype)

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """Return the weight, its scales, its zero points and the groups of input features."""
        return self.weight, self.weight_scale, self.weight_zero, self.group_index
