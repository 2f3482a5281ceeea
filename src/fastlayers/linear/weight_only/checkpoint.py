"""How checkpoints pack weights of 4 and 8 bits, and which part of each tensor a rank reads.

    layout      weight                    scale            zero point                  group of an input feature
    awq         qweight [K, N/8]          scales [G, N]    qzeros [G, N/8]             –
    gptq        qweight [K/8, N]          scales [G, N]    qzeros [G, N/8], less one   g_idx [K]
    gptq_v2     qweight [K/8, N]          scales [G, N]    qzeros [G, N/8]             g_idx [K]
    packed      weight_packed [N, K/8]    weight_scale [N, G]   weight_zero_point [N/8, G]   weight_g_idx [K]
    plain       weight [N, K]             weight_scale [N] or [N, 1]; "plain_tensor": one number

Words are int32 and hold 8 nibbles, or 4 bytes of 8-bit codes (then /4); codes are unsigned, around 8 or 128. "awq"
shuffles eight codes, see quant/packed_codes.py. GPTQ writes g_idx also where groups are runs: that is checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.quant.packed_codes import UNIT, pack_nibbles, unpack_words
from fastlayers.weights import Slot, scale_slot, wrong_scale

if TYPE_CHECKING:
    from fastlayers.linear.weight_only.layer import WeightOnlyLinear

PLAIN = ("plain", "plain_tensor")
Convert = Callable[[torch.Tensor], torch.Tensor]


def aligned(layer: WeightOnlyLinear, cfg: Any) -> None:
    """Raise :class:`ArgumentError` where a rank's part begins or ends inside a word or a group."""
    if layer.layout in PLAIN:
        return
    words = 32 // _bits(cfg)
    if layer.layout != "packed" or cfg.zero_point:
        for size, part in zip(layer.full_parts, layer.column_slices, strict=True):
            if part.start % words or part.stop % words:
                given = f"{size}, of which this rank reads {part.start} to {part.stop}"
                raise ArgumentError(layer.kind, "out_features", given, f"parts of whole words: multiples of {words}")
    rows, group = layer.row_slice, max(cfg.group_size, UNIT)
    if layer.shard.kind == "row" and layer.shard.axis.size > 1 and (rows.start % group or rows.stop % group):
        given = f"{layer.in_features}, of which this rank reads {rows.start} to {rows.stop}"
        raise ArgumentError(layer.kind, "in_features", given, f"parts of whole groups: multiples of {group}")


def _bits(cfg: Any) -> int:
    return 4 if cfg.format == "w4a16" else 8


def layout_slots(
    layer: WeightOnlyLinear, full: int, read: slice, local: slice, index: list[torch.Tensor]
) -> Iterator[tuple[str, Slot]]:
    """Yield the tensors of one part of ``full`` output features, of which ``read`` go to rows ``local``.

    ``index`` is shared by the parts of a layer: the first one's groups of input features, once they were read.
    """
    if layer.layout in PLAIN:
        yield "weight", Slot(layer.weight[local], (full, layer.in_features), (read, layer.row_slice))
        scale = layer.weight_scale[0, local]
        if layer.layout == "plain":
            yield "weight_scale", scale_slot(scale, full, read)
        else:
            count = scale.shape[0]
            yield "weight_scale", Slot(scale, (), (), lambda part: part.reshape(1).expand(count), wrong=wrong_scale)
        return
    make = _compressed if layer.layout == "packed" else _words
    yield from make(layer, full, read, local, index)


def _words(
    layer: WeightOnlyLinear, full: int, read: slice, local: slice, index: list[torch.Tensor]
) -> Iterator[tuple[str, Slot]]:
    """AutoAWQ's and GPTQ's tensors: input features first, zero points packed by output feature."""
    cfg, awq, k, rows = layer.cfg, layer.layout == "awq", layer.in_features, layer.row_slice
    bits = _bits(cfg)
    words, size = 32 // bits, cfg.group_size or k
    groups, some = k // size, slice(rows.start // size, -(-rows.stop // size))
    columns = slice(read.start // words, read.stop // words)
    store = _store(bits)
    if awq:
        weight = Slot(
            layer.weight[local], (k, full // words), (rows, columns),
            lambda part: store(unpack_words(part, bits, 1, awq=True).t()),
        )  # fmt: skip
    else:
        row_words = slice(rows.start // words, -(-rows.stop // words))
        weight = Slot(
            layer.weight[local], (k // words, full), (row_words, read),
            lambda part: store(unpack_words(part, bits, 0).t()),
        )  # fmt: skip
    yield "qweight", weight
    yield "scales", Slot(layer.weight_scale[:, local], (groups, full), (some, read), wrong=wrong_scale)
    offset = int(layer.layout == "gptq") - (128 if bits == 8 else 0)
    if layer.weight_zero is not None:
        yield (
            "qzeros",
            Slot(
                layer.weight_zero[:, local], (groups, full // words), (some, columns),
                lambda part: (unpack_words(part, bits, 1, awq=awq) + offset).to(torch.int16),
            ),
        )  # fmt: skip
    if not awq:
        yield "g_idx", _group_slot(layer, k, size, index)


def _compressed(
    layer: WeightOnlyLinear, full: int, read: slice, local: slice, index: list[torch.Tensor]
) -> Iterator[tuple[str, Slot]]:
    """The tensors of compressed-tensors' pack-quantized: output features first."""
    cfg, k, rows = layer.cfg, layer.in_features, layer.row_slice
    bits = _bits(cfg)
    words, size, store = 32 // bits, cfg.group_size or k, _store(bits)
    groups, some = k // size, slice(rows.start // size, -(-rows.stop // size))
    yield (
        "weight_packed",
        Slot(
            layer.weight[local], (full, -(-k // words)), (read, slice(rows.start // words, -(-rows.stop // words))),
            lambda part: store(unpack_words(part, bits, 1)[:, : layer.local_in]),
        ),
    )  # fmt: skip
    scale = layer.weight_scale[:, local]
    yield "weight_scale", Slot(scale, (full, groups), (read, some), lambda part: part.t(), wrong=wrong_scale)
    yield "weight_shape", Slot(layer.weight_scale.new_empty(0, dtype=torch.int64), (2,), convert=_is([full, k]))
    if layer.weight_zero is not None:
        columns, offset = slice(read.start // words, read.stop // words), 128 if bits == 8 else 0
        yield (
            "weight_zero_point",
            Slot(
                layer.weight_zero[:, local], (full // words, groups), (columns, some),
                lambda part: (unpack_words(part, bits, 0).t() - offset).to(torch.int16),
            ),
        )  # fmt: skip
    if layer.group_index is not None:
        yield "weight_g_idx", _group_slot(layer, k, size, index)


def _store(bits: int) -> Convert:
    return (lambda codes: pack_nibbles(codes)) if bits == 4 else (lambda codes: (codes - 128).to(torch.int8))


def _is(wanted: list[int]) -> Convert:
    """Return what compares a tensor that only describes others, and keeps nothing of it."""

    def convert(given: torch.Tensor) -> torch.Tensor:
        if given.tolist() != wanted:
            raise CheckpointError(f"weight_shape: {given.tolist()}, but the model wants {wanted}")
        return given[:0].to(torch.int64)

    return convert


def _group_slot(layer: WeightOnlyLinear, k: int, size: int, index: list[torch.Tensor]) -> Slot:
    if layer.group_index is not None:
        return Slot(layer.group_index, (k,), convert=_groups_below(k // size, index))
    return Slot(layer.weight_scale.new_empty(0, dtype=torch.int32), (k,), convert=_runs(size))


def _groups_below(count: int, first: list[torch.Tensor]) -> Convert:
    def convert(index: torch.Tensor) -> torch.Tensor:
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
            found = f"{int(index.min())} to {int(index.max())}"
            raise CheckpointError(f"g_idx: groups {found}, but there are {count}")
        if not first:
            first.append(index)
        elif not torch.equal(first[0], index):
            raise CheckpointError(
                "g_idx: other groups of input features than of the linear that this one is fused with; files whose "
                "linears of one input were ordered each by itself are not read"
            )
        return index.to(torch.int32)

    return convert


def _runs(size: int) -> Convert:
    def convert(index: torch.Tensor) -> torch.Tensor:
        if not torch.equal(index.long().cpu(), torch.arange(index.numel(), device="cpu") // size):
            raise CheckpointError(
                f"g_idx: input features are not in order of their groups of {size}, but quantization_config says "
                "desc_act false"
            )
        return index[:0].to(torch.int32)

    return convert
