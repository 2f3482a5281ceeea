"""Stand-ins for kernel packages: same calls, same demands on layouts, plain torch inside.

What a package leaves unwritten they leave unwritten; what it may overwrite they fill with NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fastlayers.quant.block_quant import decode_e4m3, scale_blocks_
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4


@contextmanager
def modules(**named: Any) -> Iterator[None]:
    """Put modules (``a__b`` is ``a.b``) into ``sys.modules`` while the block runs."""
    full = {name.replace("__", "."): value for name, value in named.items()}
    before = {name: sys.modules.get(name) for name in full}
    sys.modules.update(full)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def product(a: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return the exact product of 1x128-scaled rows and a 128x128-scaled weight."""
    left = decode_e4m3(a) * scale.repeat_interleave(128, 1)
    return left @ scale_blocks_(decode_e4m3(weight), weight_scale, (128, 128)).T


class FakeDeepGemm(ModuleType):
    """The grouped products of deep_gemm and its process-wide tile."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.tile = 128
        self.used: list[int] = []
        self._C = SimpleNamespace(
            get_mk_alignment_for_contiguous_layout=lambda: self.tile,
            set_mk_alignment_for_contiguous_layout=lambda rows: setattr(self, "tile", rows),
        )

    def m_grouped_fp8_gemm_nt_contiguous(self, a: Any, b: Any, d: torch.Tensor, ends: Any, **options: bool) -> None:
        """Each expert's rows start at the tile after the end of the one before."""
        assert options == {"use_psum_layout": True}
        assert a[1].stride() == (1, a[0].shape[0]) and a[0].shape[0] % 4 == 0
        assert b[0].is_contiguous() and b[1].is_contiguous() and d.dtype == torch.bfloat16
        self._contiguous(d, ends, lambda rows, e: product(a[0][rows], a[1][rows], b[0][e], b[1][e]))

    def m_grouped_bf16_gemm_nt_contiguous(self, a: Any, b: Any, d: torch.Tensor, ends: Any, **options: bool) -> None:
        """The same without scales."""
        assert options == {"use_psum_layout": True} and a.dtype == b.dtype == torch.bfloat16
        self._contiguous(d, ends, lambda rows, e: a[rows].float() @ b[e].float().T)

    def _contiguous(self, d: torch.Tensor, ends: torch.Tensor, multiply: Any) -> None:
        self.used.append(self.tile)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            assert start <= end, "an expert without rows ends where it starts"
            d[start : -(-end // self.tile) * self.tile] = torch.nan
            d[start:end] = multiply(slice(start, end), expert).bfloat16()
            start = -(-end // self.tile) * self.tile
        assert start <= d.shape[0]

    def fp8_m_grouped_gemm_nt_masked(self, a: Any, b: Any, d: torch.Tensor, counts: Any, expected: int) -> None:
        """As many rows for each expert; ``counts`` of them in use."""
        experts, capacity, width = a[0].shape
        assert a[1].stride() == (width // 128 * capacity, 1, capacity) and capacity % self.tile == 0 and expected > 0
        for expert, count in enumerate(counts.tolist()):
            d[expert, : -(-count // self.tile) * self.tile] = torch.nan
            rows = (expert, slice(0, count))
            d[rows] = product(a[0][rows], a[1][rows], b[0][expert], b[1][expert]).bfloat16()


def define_sgl_kernel() -> torch.library.Library:
    """Define sgl_kernel's operator for CPUs; gone with the library that is returned."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(
        "es_fp8_blockwise_scaled_grouped_mm(Tensor output, Tensor a, Tensor b, Tensor scales_a, Tensor scales_b,"
        " Tensor stride_a, Tensor stride_b, Tensor stride_d, Tensor problem_sizes, Tensor expert_offsets,"
        " Tensor workspace) -> ()"
    )

    def run(output, a, b, scales_a, scales_b, stride_a, stride_b, stride_d, sizes, offsets, workspace):  # type: ignore
        assert workspace.nbytes >= 90000 and scales_a.is_contiguous() and sizes.is_contiguous()
        experts, deep, wide = b.shape
        assert b.mT.is_contiguous() and scales_b.mT.is_contiguous()
        for strides, value in ((stride_a, deep), (stride_b, deep), (stride_d, wide)):
            assert strides.dtype == torch.int64 and strides.tolist() == [value] * experts
        for expert, ((count, n, k), start) in enumerate(zip(sizes.tolist(), offsets.tolist(), strict=True)):
            assert (n, k) == (wide, deep)
            rows = slice(start, start + count)
            output[rows] = product(a[rows], scales_a[rows], b[expert].T, scales_b[expert].T).to(output.dtype)

    library.impl("es_fp8_blockwise_scaled_grouped_mm", run, "CPU")
    return library


class _Layout:
    """A layout that changes nothing but the order of bytes: reversed, so that nobody reads it by accident."""

    def __init__(self, shape: Any, mx_axis: int, num_warps: int = 8) -> None:
        assert mx_axis == 1 and len(shape) == 3
        self.shape = tuple(shape)

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        assert tuple(data.shape) == self.shape
        return data.mT.flip(-1).contiguous().mT


def triton_kernels() -> dict[str, Any]:
    """Return the modules of a stand-in for triton_kernels."""

    def matmul_ogs(x, w, bias, routing, gather_indx=None, precision_config=None, fused_activation=None):  # type: ignore
        experts, deep, wide = w.shape
        assert bias is None or bias.dtype == torch.float32
        assert w.storage.data.stride(-2) == 1 and x.dtype == torch.bfloat16
        codes = w.storage.data.mT.flip(-1).unflatten(-1, (-1, 16))
        scales = precision_config.weight_scale.storage.data.mT.flip(-1)
        out = x.new_empty(routing.expt_data, wide if fused_activation is None else wide // 2)
        out.fill_(torch.nan)
        if gather_indx is not None:
            tokens = torch.div(gather_indx.src_indx, routing.n_expts_act, rounding_mode="trunc")
            assert type(tokens) is torch.Tensor  # a kernel's argument
        start = 0
        for expert, count in enumerate(routing.expt_hist.tolist()):
            rows = slice(start, start + count)
            start += count
            left = x[rows] if gather_indx is None else x[tokens[rows].long()]
            h = left.float() @ dequantize_mxfp4(codes[expert], scales[expert], torch.float32).T
            h = h if bias is None else h + bias[expert]
            if fused_activation is not None:
                alpha, limit = fused_activation.fn_args
                gate, up = h[:, ::2].clamp(max=limit), h[:, 1::2].clamp(-limit, limit)
                h = gate * torch.sigmoid(alpha * gate) * (up + 1)
            out[rows] = h.bfloat16()
        return out

    def record(**fields: Any) -> Any:
        return lambda *args, **named: SimpleNamespace(**dict(zip(fields, args, strict=False)), **named)

    routing = dict(gate_scal=0, expt_hist=0, n_expts_tot=0, n_expts_act=0, expt_data=0)
    products = SimpleNamespace(
        matmul_ogs=matmul_ogs, RoutingData=record(**routing), GatherIndx=record(src_indx=0, dst_indx=0),
        PrecisionConfig=record(), FnSpecs=record(name=0, fn=0, names=0), FusedActivation=record(specs=0, fn_args=0),
    )  # fmt: skip
    tensors = SimpleNamespace(
        FP4="fp4", Storage=record(data=0, layout=0), Tensor=record(storage=0),
        make_ragged_tensor_metadata=lambda counts, rows: rows,
    )  # fmt: skip
    layouts = SimpleNamespace(HopperMXValueLayout=_Layout, HopperMXScaleLayout=_Layout)
    return {
        "triton_kernels": ModuleType("triton_kernels"), "triton_kernels__matmul_ogs": products,
        "triton_kernels__swiglu": SimpleNamespace(swiglu_fn=None), "triton_kernels__tensor": tensors,
        "triton_kernels__tensor_details": ModuleType("triton_kernels.tensor_details"),
        "triton_kernels__tensor_details__layout": layouts,
    }  # fmt: skip
