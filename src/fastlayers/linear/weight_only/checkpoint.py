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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers.quant.packed_codes import UNIT, pack_nibbles, unpack_codes, unpack_words
from fastlayers.weights import Slot, scale_slot, wrong_scale

if TYPE_CHECKING:
    from fastlayers.linear.weight_only.layer import WeightOnlyLinear

PLAIN = ("plain", "plain_tensor")
Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Codes:
    """Where a matrix's codes go, and which part of its ``in_features`` ``rows`` are; views into parameters.

    ``weight`` ``[n, …]``, ``scale`` and ``zero`` ``[G, n]``, ``index`` int32 ``[k]``: of this rank.
    """

    layout: str
    format: str
    group_size: int
    in_features: int
    rows: slice
    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    index: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a code."""
        return bits_of(self.format)


def bits_of(format: str) -> int:
    """Return how many bits a code of a format has."""
    return 4 if format == "w4a16" else 8


def aligned(layer: WeightOnlyLinear, cfg: Any) -> None:
    """Raise :class:`ArgumentError` where a rank's part begins or ends inside a word or a group."""
    if layer.layout in PLAIN:
        return
    words = 32 // bits_of(cfg.format)
    if layer.layout != "packed" or cfg.zero_point:
        for size, part in zip(layer.full_parts, layer.column_slices, strict=True):
            if part.start % words or part.stop % words:
                given = f"{size}, of which this rank reads {part.start} to {part.stop}"
                raise ArgumentError(layer.kind, "out_features", given, f"parts of whole words: multiples of {words}")
    rows, group = layer.row_slice, max(cfg.group_size, UNIT)
    if layer.shard.kind == "row" and layer.shard.axis.size > 1 and (rows.start % group or rows.stop % group):
        given = f"{layer.in_features}, of which this rank reads {rows.start} to {rows.stop}"
        raise ArgumentError(layer.kind, "in_features", given, f"parts of whole groups: multiples of {group}")


def layout_slots(held: Codes, full: int, read: slice, first: list[torch.Tensor]) -> Iterator[tuple[str, Slot]]:
    """Yield the tensors of a matrix of ``full`` output features, of which ``read`` are held here.

    ``first`` is shared by the matrices of one input: the first one's groups of input features, once they were read.
    """
    if held.layout in PLAIN:
        yield "weight", Slot(held.weight, (full, held.in_features), (read, held.rows))
        scale = held.scale[0]
        if held.layout == "plain":
            yield "weight_scale", scale_slot(scale, full, read)
        else:
            count = scale.shape[0]
            yield "weight_scale", Slot(scale, (), (), lambda part: part.reshape(1).expand(count), wrong=wrong_scale)
        return
    make = _compressed if held.layout == "packed" else _words
    yield from make(held, full, read, first)


def _words(held: Codes, full: int, read: slice, first: list[torch.Tensor]) -> Iterator[tuple[str, Slot]]:
    """AutoAWQ's and GPTQ's tensors: input features first, zero points packed by output feature."""
    awq, k, rows, bits = held.layout == "awq", held.in_features, held.rows, held.bits
    words, size = 32 // bits, held.group_size or k
    groups, some = k // size, slice(rows.start // size, -(-rows.stop // size))
    columns = slice(read.start // words, read.stop // words)
    store = _store(bits)
    if awq:
        weight = Slot(
            held.weight, (k, full // words), (rows, columns),
            lambda part: store(unpack_codes(part, bits, 1, awq=True).t()),
        )  # fmt: skip
    else:
        row_words = slice(rows.start // words, -(-rows.stop // words))
        weight = Slot(
            held.weight, (k // words, full), (row_words, read), lambda part: store(unpack_codes(part, bits, 0).t())
        )
    yield "qweight", weight
    yield "scales", Slot(held.scale, (groups, full), (some, read), wrong=wrong_scale)
    offset = int(held.layout == "gptq") - (128 if bits == 8 else 0)
    if held.zero is not None:
        yield (
            "qzeros",
            Slot(
                held.zero, (groups, full // words), (some, columns),
                lambda part: (unpack_words(part, bits, 1, awq=awq) + offset).to(torch.int16),
            ),
        )  # fmt: skip
    if not awq:
        yield "g_idx", _group_slot(held, size, first)


def _compressed(held: Codes, full: int, read: slice, first: list[torch.Tensor]) -> Iterator[tuple[str, Slot]]:
    """The tensors of compressed-tensors' pack-quantized: output features first."""
    k, rows, bits = held.in_features, held.rows, held.bits
    words, size, store = 32 // bits, held.group_size or k, _store(bits)
    groups, some, own = k // size, slice(rows.start // size, -(-rows.stop // size)), rows.stop - rows.start
    yield (
        "weight_packed",
        Slot(
            held.weight, (full, -(-k // words)), (read, slice(rows.start // words, -(-rows.stop // words))),
            lambda part: store(unpack_codes(part, bits, 1)[:, :own]),
        ),
    )  # fmt: skip
    yield "weight_scale", Slot(held.scale, (full, groups), (read, some), lambda part: part.t(), wrong=wrong_scale)
    yield "weight_shape", Slot(held.scale.new_empty(0, dtype=torch.int64), (2,), convert=_is([full, k]))
    if held.zero is not None:
        columns, offset = slice(read.start // words, read.stop // words), 128 if bits == 8 else 0
        yield (
            "weight_zero_point",
            Slot(
                held.zero, (full // words, groups), (columns, some),
                lambda part: (unpack_words(part, bits, 0).t() - offset).to(torch.int16),
            ),
        )  # fmt: skip
    if held.index is not None:
        yield "weight_g_idx", _group_slot(held, size, first)


def _store(bits: int) -> Convert:
    return (lambda codes: pack_nibbles(codes)) if bits == 4 else (lambda codes: (codes ^ 128).view(torch.int8))


def _is(wanted: list[int]) -> Convert:
    """Return what compares a tensor that only describes others, and keeps nothing of it."""

    def convert(given: torch.Tensor) -> torch.Tensor:
        if given.tolist() != wanted:
            raise CheckpointError(f"{given.tolist()}, but the model wants {wanted}")
        return given[:0].to(torch.int64)

    return convert


def _group_slot(held: Codes, size: int, first: list[torch.Tensor]) -> Slot:
    k = held.in_features
    if held.index is not None:
        return Slot(held.index, (k,), convert=_groups_below(k // size, first))
    return Slot(held.scale.new_empty(0, dtype=torch.int32), (k,), convert=_runs(size))


def _groups_below(count: int, first: list[torch.Tensor]) -> Convert:
    def convert(index: torch.Tensor) -> torch.Tensor:
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
            found = f"{int(index.min())} to {int(index.max())}"
            raise CheckpointError(f"groups {found}, but there are {count}")
        if not first:
            first.append(index)
        elif not torch.equal(first[0], index):
            raise CheckpointError(
                "other groups of input features than of the linear that this one is fused with; files whose linears "
                "of one input were ordered each by itself are not read"
            )
        return index.to(torch.int32)

    return convert


def _runs(size: int) -> Convert:
    def convert(index: torch.Tensor) -> torch.Tensor:
        if not torch.equal(index.long().cpu(), torch.arange(index.numel(), device="cpu") // size):
            raise CheckpointError(
                f"input features are not in order of their groups of {size}, but quantization_config says "
                "desc_act false"
            )
        return index[:0].to(torch.int32)

    return convert
