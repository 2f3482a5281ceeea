"""Linear layer with e4m3 weights, one scale per 128×128 block, and activations quantised on the fly.

    K = in_features, N = out_features (on this rank); B = block_size, kb = k // B[1], nb = n // B[0]
    qx[..., K], sx[..., kb]  = e4m3 of x, one scale per token and B[1] features       (see quant/group_quant)
    a[..., N, kb]            = Σ over the block's k of qx[..., k] · weight[n, k]      (fp32)
    y[..., N]                = round( Σ over kb of a · sx[..., kb] · weight_scale_inv[nb, kb] ) + bias[N]

The sum over K is promoted to fp32, with its scales, once per block: Hopper's e4m3 unit keeps about 14 bits.
y is rounded once to ``dtype``; the bias is added to the rounded sum, as Hugging Face and SGLang do.
Checkpoint layout, the only stored copy: weight e4m3 [N, K], weight_scale_inv fp32 [ceil(N/B0), ceil(K/B1)].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd import forward_ad

from fastlayers.activation.silu_mul.layer import SiluAndMul
from fastlayers.activation.silu_mul_quant.layer import SiluMulQuant
from fastlayers.comm.parallel import REPLICATED, Shard
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_pair
from fastlayers.linear.base import check_source
from fastlayers.linear.quantised import QuantisedLinear, QuantisedLinearConfig
from fastlayers.quant.block_quant import (
    BLOCK,
    E4M3,
    check_scale_grid,
    dequantize_block_weight,
    grid_of,
    quantize_block_weight,
)
from fastlayers.quant.group_quant.layer import GROUPS, SCALE_FMTS
from fastlayers.registry import (
    TRITON_NEEDS,
    Backend,
    Registry,
    blackwell_guard,
    not_multiple,
    reference_backend,
    torch_backend,
    triton_backend,
)
from fastlayers.weights import Slot, wrong_scale

# Backends of the activation before a down projection that round as the one does which quantises as well.
ROUNDS_TWICE = ("triton", "torch", "reference")


@dataclass(frozen=True)
class FP8LinearConfig(QuantisedLinearConfig):
    """What a backend must know: sizes on this rank, ``dtype`` of x, y and bias, blocks, activation scales."""

    layer = "FP8BlockLinear"

    block_size: tuple[int, int] = BLOCK
    scale_fmt: str = "float"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.layer, "scale_fmt", self.scale_fmt, SCALE_FMTS)
        rows, columns = self.block_size
        if rows < 1 or columns not in GROUPS:
            raise ArgumentError(self.layer, "block_size", self.block_size, f"(rows >= 1, columns one of {GROUPS})")

    @property
    def grid(self) -> tuple[int, int]:
        """Shape of ``weight_scale_inv``."""
        return grid_of(self.out_features, self.in_features, self.block_size)

    scales = grid

    @property
    def padded_in(self) -> int:
        """``in_features`` rounded up to whole blocks; activations are padded with zeros up to here."""
        return self.grid[1] * self.block_size[1]

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables."""
        return f"{super().tuning_key()},block={self.block_size[0]}x{self.block_size[1]}"


def _triton_refuse(cfg: FP8LinearConfig, device: Device) -> str | None:
    if (why := device.refuses_e4m3("e4m3 products")) is not None:
        return why
    if cfg.block_size[1] < 32:
        return f"block_size {cfg.block_size}: an e4m3 dot needs blocks of at least 32 columns"
    return None


def _package_gemm_refuse(cfg: FP8LinearConfig, device: Device, rows: int) -> str | None:
    """Return why the packages' sm_90 GEMMs cannot run it; ``rows``: what out_features must be a multiple of."""
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.dtype != torch.bfloat16:
        return f"dtype {cfg.dtype}: it writes bfloat16 only"
    if cfg.block_size != BLOCK:
        return f"block_size {cfg.block_size} is not {BLOCK}"
    return not_multiple(cfg, in_features=128, out_features=rows)


def _refuse_64(cfg: FP8LinearConfig, device: Device) -> str | None:
    return _package_gemm_refuse(cfg, device, 64)


def _refuse_16(cfg: FP8LinearConfig, device: Device) -> str | None:
    return _package_gemm_refuse(cfg, device, 16)


def _trtllm_refuses(cfg: FP8LinearConfig) -> str | None:
    if cfg.in_features < 256:
        return f"in_features {cfg.in_features} is less than 256"
    return None if cfg.dtype == torch.bfloat16 else f"dtype {cfg.dtype} is not bfloat16"


_HERE = "fastlayers.linear.fp8_block"
FP8_LINEAR = Registry(
    "fp8_linear",
    [
        Backend(
            "deep_gemm", f"{_HERE}.deep_gemm:DeepGemmFP8Linear", (*TRITON_NEEDS, "deep_gemm:fp8_gemm_nt"), _refuse_64
        ),
        Backend(
            "flashinfer",
            f"{_HERE}.flashinfer:FlashInferFP8Linear",
            (*TRITON_NEEDS, "flashinfer.gemm.gemm_base:get_fp8_blockscale_gemm_runner_sm90"),
            _refuse_64,
        ),
        Backend(
            "cublas",
            f"{_HERE}.cublas:CublasFP8Linear",
            (*TRITON_NEEDS, "torch.nn.functional:scaled_mm", "torch.nn.functional:ScalingType.BlockWise128x128"),
            _refuse_16,
        ),
        triton_backend(f"{_HERE}.triton:TritonFP8Linear", _triton_refuse),
        # TensorRT-LLM's product, as FlashInfer has it.
        blackwell_guard("trtllm", ("flashinfer.gemm:gemm_fp8_nt_blockscaled",), _trtllm_refuses),
        torch_backend(f"{_HERE}.torch:TorchFP8Linear"),
        reference_backend(f"{_HERE}.reference:ReferenceFP8Linear"),
    ],
    cases=f"{_HERE}.cases",
)


class FP8BlockLinear(QuantisedLinear):
    """Linear with e4m3 weights (one scale per block) and activations quantised 1×128 on the fly.

    Parameters
    ----------
    in_features, bias, names, device, dtype, backend
        As of every :class:`~fastlayers.linear.quantised.QuantisedLinear`.
    out_features : int or sequence of int
        Several sizes fuse that many checkpoint tensors; every part but the last is whole blocks of rows.
    block_size : tuple[int, int]
        The checkpoint's ``weight_block_size``; the columns are also the group of the activations.
    scale_fmt : str
        ``"float"`` or ``"ue8m0"`` (powers of two), of the activations' scales.
    shard : Shard
        A split must fall on block borders.

    Notes
    -----
    Parameters: ``weight`` e4m3 ``[local_out, local_in]`` (zeros until loaded), ``weight_scale_inv`` fp32
    (ones until loaded), ``bias``. Source: DeepSeek-V3 technical report, section 3.3.

    Examples
    --------
    >>> import torch, fastlayers as fl
    >>> dense = fl.Linear(256, 576, dtype=torch.bfloat16)
    >>> _ = dense.weight.copy_(torch.linspace(-1, 1, 576 * 256).view(576, 256))
    >>> layer = fl.FP8BlockLinear.from_linear(dense)
    >>> layer.weight.dtype, tuple(layer.weight_scale_inv.shape)
    (torch.float8_e4m3fn, (5, 2))
    >>> x = torch.randn(3, 256, dtype=torch.bfloat16)
    >>> bool((layer(x) - dense(x)).norm() < 0.05 * dense(x).norm())
    True
    """

    registry = FP8_LINEAR
    scale_name = "weight_scale_inv"
    weight_scale_inv: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        block_size: tuple[int, int] = BLOCK,
        scale_fmt: str = "float",
        shard: Shard = REPLICATED,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, shard, names)
        block_size = check_pair(self.kind, "block_size", block_size)
        cfg = FP8LinearConfig(self.local_in, self.local_out, bias, dtype, block_size, scale_fmt)
        self._check_blocks(block_size)
        self.build(cfg, device, backend, E4M3)

    def codes_layout(self, rows: int) -> str | None:
        """Return the layout of scales with which so many ``CodedRows`` may be ``x``; ``None``: it takes none.

        The product of codes is that of the rows, bit by bit: they are quantised here as they were elsewhere.
        """
        cfg = self.cfg
        if cfg.block_size[1] != 128 or cfg.scale_fmt != "float" or cfg.in_features % 128:
            return None
        impl = self.ladder.single or self.ladder.pick(rows)
        found: str | None = impl.codes_layout(rows) if hasattr(impl, "codes_layout") else None
        return found

    def quantised_activation(self, act: SiluAndMul) -> nn.ModuleDict | None:
        """Return what :meth:`gated` takes: ``act`` with quantisation, for each layout of scales that products read.

        ``None`` where a backend of ``act`` was asked for that rounds in another way.
        """
        if any(rung.backend.name not in ROUNDS_TWICE for rung in act.choice.rungs):
            return None
        group, fmt = self.cfg.block_size[1], self.cfg.scale_fmt
        return nn.ModuleDict({
            layout: SiluMulQuant(
                self.local_in, group_size=group, scale_layout=layout, scale_fmt=fmt, device=self.device_type
            )
            for layout in ("col", "col_tma4")
        })  # fmt: skip

    def gated(self, gate_up: torch.Tensor, act: SiluAndMul, quantised: nn.ModuleDict) -> torch.Tensor:
        """Return ``self(act(gate_up))``, bit for bit, for the product ``[..., 2 · local_in]`` of gate and up.

        Where the product takes codes, one launch activates and quantises. Elsewhere ``act`` runs, and where a hook
        looks at what goes in or out of either, or ``act`` is something else by now.
        """
        tokens = gate_up.numel() // (2 * self.local_in)
        impl = self.ladder.single or self.ladder.pick(tokens)
        layout = impl.codes_layout(tokens) if hasattr(impl, "codes_layout") else None
        hooked = self._forward_pre_hooks or self._forward_hooks or act._forward_pre_hooks or act._forward_hooks
        other = hooked or type(act) is not SiluAndMul
        if layout is None or other or torch.is_grad_enabled() or forward_ad._current_level >= 0:
            plain: torch.Tensor = self(act(gate_up))
            return plain
        q, s = quantised[layout](gate_up.reshape(-1, 2 * self.local_in))
        bias = self.bias if self.adds_bias else None
        y: torch.Tensor = impl.product(q, s, self.weight, self.weight_scale_inv, bias)
        return y.view(*gate_up.shape[:-1], self.local_out)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight ``[local_out, local_in]``, each block times its scale, rounded once to ``dtype``."""
        return dequantize_block_weight(self.weight, self.weight_scale_inv, self.cfg.block_size, dtype)

    def _check_blocks(self, block_size: tuple[int, int]) -> None:
        rows, columns = block_size
        split = self.shard.axis.size > 1
        for index, size in enumerate(self.part_sizes):
            ragged_allowed = index == len(self.part_sizes) - 1 and not (split and self.shard.kind == "column")
            if size % rows and not ragged_allowed:
                why = "on each rank" if split and self.shard.kind == "column" else "for every part but the last"
                raise ArgumentError(
                    self.kind, f"out_features[{index}]", size, f"a multiple of the block's {rows} rows {why}"
                )
        if split and self.shard.kind == "row" and self.local_in % columns:
            raise ArgumentError(
                self.kind, "in_features", f"{self.in_features}, {self.local_in} on each rank",
                f"a multiple of the block's {columns} columns on each rank",
            )  # fmt: skip

    def scale_slots(self, index: int, full: int, read: slice, local: slice) -> Iterator[tuple[str, Slot]]:
        """Yield ``weight_scale_inv``, one number a block."""
        rows, columns = self.cfg.block_size
        blocks = _blocks(read, rows), _blocks(self.row_slice, columns)
        grid = grid_of(full, self.in_features, self.cfg.block_size)
        yield "weight_scale_inv", Slot(self.weight_scale_inv[_blocks(local, rows)], grid, blocks, wrong=wrong_scale)

    @classmethod
    def from_linear(
        cls,
        source: nn.Linear,
        *,
        block_size: tuple[int, int] = BLOCK,
        scale_fmt: str = "float",
        backend: str = "auto",
    ) -> FP8BlockLinear:
        """Return a layer with the weight of an ``nn.Linear`` or :class:`Linear`, quantised by blocks.

        ``scale_fmt`` holds for weights and activations. ``source`` stays as it is and gives the dtype.
        """
        block_size = check_pair(cls.__name__, "block_size", block_size)
        check_source(cls.__name__, source)
        weight, scale = quantize_block_weight(source.weight.detach(), block_size, scale_fmt)
        return cls.from_checkpoint(
            weight, scale, source.bias, block_size=block_size, scale_fmt=scale_fmt, dtype=source.weight.dtype,
            backend=backend,
        )  # fmt: skip

    @classmethod
    def from_checkpoint(
        cls,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        block_size: tuple[int, int] = BLOCK,
        scale_fmt: str = "float",
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
    ) -> FP8BlockLinear:
        """Return a layer over a checkpoint's tensors, shared where dtype and layout agree.

        Parameters
        ----------
        weight : Tensor e4m3 ``[N, K]``
        weight_scale_inv : Tensor ``[ceil(N / rows), ceil(K / columns)]``
        bias : Tensor ``[N]``, optional

        Raises
        ------
        ArgumentError
            Another dtype, or a scale grid of another size.
        """
        n, k = cls.check_stored(weight, weight_scale_inv, bias, E4M3)
        block_size = check_pair(cls.__name__, "block_size", block_size)
        check_scale_grid(cls.__name__, "weight_scale_inv", weight_scale_inv, weight, block_size)
        made = cls(
            k, n, bias is not None, block_size=block_size, scale_fmt=scale_fmt, device="meta", dtype=dtype,
            backend="reference",
        )  # fmt: skip
        made.take(backend, weight, weight_scale_inv, bias)
        return made


def _blocks(span: slice, block: int) -> slice:
    return slice(span.start // block, -(-span.stop // block))
