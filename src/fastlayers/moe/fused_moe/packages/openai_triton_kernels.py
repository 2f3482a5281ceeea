"""MXFP4 experts by the triton_kernels package (OpenAI's) on Hopper, with our own kernels around them.

Weights are packed once into the package's swizzled layout: a warp then decodes its codes without exchanging any. The
first product gathers token rows, adds the bias and applies the clamped SwiGLU; the second adds its bias and leaves
rows ordered by expert, which our own kernel weighs and sums in a fixed order. Nothing of the package's process-wide
settings is touched.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.moe.fused_moe.config import FusedMoEConfig
from fastlayers.moe.fused_moe.experts_operator import ExpertsBackend, experts_operator
from fastlayers.moe.fused_moe.swizzle import EXPERTS_AT_ONCE, SwizzledWeights
from fastlayers.moe.fused_moe.token_chunks import token_chunks
from fastlayers.moe.fused_moe.triton.permute import place
from fastlayers.moe.fused_moe.triton.reduce import combine
from fastlayers.moe.fused_moe.weights import MoEWeights

MAX_TOKENS = 8192
# The layout of scales belongs to this number of warps.
WARPS = 8
# Of its tiles, in rows.
HEIGHTS = (16, 32, 64, 128)


def _layouts() -> tuple[Any, Any]:
    from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout

    return HopperMXValueLayout, HopperMXScaleLayout


def _swizzle(data: torch.Tensor, layout: Any, **options: int) -> torch.Tensor:
    """Return ``data`` ``[E, N, K']`` of bytes in a layout of the package; a few experts at a time."""
    packed: torch.Tensor | None = None
    for start in range(0, data.shape[0], EXPERTS_AT_ONCE):
        chunk = data[start : start + EXPERTS_AT_ONCE].mT
        swizzled = layout(chunk.shape, **options).swizzle_data(chunk).mT
        if packed is None:
            packed = swizzled.new_empty(data.shape[0], *swizzled.shape[1:])
        packed[start : start + EXPERTS_AT_ONCE] = swizzled
    assert packed is not None
    return packed.mT


def swizzle(weights: MoEWeights) -> SwizzledWeights:
    """Return ``weights`` (blocks ``[E, N, K/32, 16]``, scales ``[E, N, K/32]``) in the package's layout."""
    value, scale = _layouts()
    assert weights.w13_scale is not None and weights.w2_scale is not None
    codes = [_swizzle(w.flatten(-2), value, mx_axis=1) for w in (weights.w13, weights.w2)]
    scales = [_swizzle(s, scale, mx_axis=1, num_warps=WARPS) for s in (weights.w13_scale, weights.w2_scale)]
    return SwizzledWeights(*codes, *scales).with_biases(weights)


class TokenNumbers(torch.Tensor):
    """Which token each row gathers, for a package that divides this by the number of experts a row.

    That is one here, but the division would be a launch of its own: by one it is left out.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what ``func`` does with plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.div and len(args) == 2 and type(args[1]) is int and args[1] == 1:
                if (kwargs or {}).get("rounding_mode") == "trunc":
                    return args[0].as_subclass(torch.Tensor)
            return func(*args, **(kwargs or {}))


def _most_tiles(rows: int, experts: int, height: int) -> int:
    """Return for how many tiles the package launches, however the rows are spread over experts."""
    return rows if rows <= experts else -(-(rows - experts + 1) // height) + experts - 1


def _product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int, int],
    routing: Any, gather: Any, clamped: tuple[float, float] | None,
) -> torch.Tensor:  # fmt: skip
    """Return the product of ``x`` (rows gathered) with experts of ``shape`` ``(E, K, N)``: rows in bf16."""
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, Storage, Tensor

    value, scale = _layouts()
    experts, deep, wide = shape
    weight = Tensor(Storage(codes, value((experts, deep // 2, wide), mx_axis=1)), dtype=FP4, shape=list(shape))
    of_scales = (experts, deep // 32, wide)
    layout = scale(of_scales, mx_axis=1, num_warps=WARPS)
    precision = PrecisionConfig(weight_scale=Tensor(Storage(scales, layout), shape=list(of_scales)))
    activation = None
    if clamped is not None:
        activation = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), clamped)
    result: torch.Tensor = matmul_ogs(
        x, weight, bias, routing, gather_indx=gather, precision_config=precision, fused_activation=activation
    )
    return result


@experts_operator("fused_moe_triton_kernels", SwizzledWeights)
def _fused_moe(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, packed: SwizzledWeights, cfg: FusedMoEConfig,
    numbers: list[int],
) -> torch.Tensor:  # fmt: skip
    from triton_kernels.matmul_ogs import GatherIndx, RoutingData
    from triton_kernels.tensor import make_ragged_tensor_metadata

    experts, inner = cfg.num_experts, cfg.intermediate_size
    hidden = x.shape[1]
    y = x.new_empty(*x.shape)
    for chunk, weights, ids, out in token_chunks(x, topk_weights, topk_ids, y, MAX_TOKENS):
        rows = place(ids, experts, 0, tokens_of_rows=True)
        counts = rows.groups[0]
        # One expert a row: what is gathered are token numbers already.
        assert rows.token_of is not None
        routing = RoutingData(None, counts, experts, 1, make_ragged_tensor_metadata(counts, rows.total))
        gather = GatherIndx(rows.token_of.as_subclass(TokenNumbers), rows.row_of)
        a = _product(
            chunk, packed.w13, packed.w13_scale, packed.w13_bias, (experts, hidden, 2 * inner), routing, gather,
            (cfg.alpha, cfg.limit),
        )  # fmt: skip
        o = _product(a, packed.w2, packed.w2_scale, packed.w2_bias, (experts, inner, hidden), routing, None, None)
        combine(o, weights, ids, None, rows, 0, cfg.scaling_factor, out)
    return y


class TritonKernelsFusedMoE(ExpertsBackend):
    """Two launches of ours (two more for many tokens) and four of the package, one operator."""

    experts = _fused_moe

    @staticmethod
    def token_counts(cfg: FusedMoEConfig, most: int) -> list[int]:
        """Return token counts up to ``most`` which together launch each variant of the package's product.

        Its tiles follow from the power of two of an expert's rows; whether there are a multiple of 16 of them, or one,
        is compiled in; and from some number on its programs are persistent: hence the first and the last of a kind.
        """
        found: dict[tuple[object, ...], list[int]] = {}
        for tokens in range(1, min(most, MAX_TOKENS) + 1):
            rows = tokens * cfg.top_k
            tiles = [_most_tiles(rows, cfg.num_experts, height) for height in HEIGHTS]
            kind = (rows // cfg.num_experts).bit_length(), *((n == 1, n % 16 == 0) for n in tiles)
            found[kind] = [*found.get(kind, (tokens,))[:1], tokens]
        return sorted({count for ends in found.values() for count in ends})

    def pack(self, weights: MoEWeights) -> SwizzledWeights:
        """Return the weights in the package's layout; the given ones are of no further use to it."""
        return swizzle(weights)
