"""What the packed weights of AWQ, GPTQ and compressed-tensors are in an unquantised checkpoint."""

from __future__ import annotations

import torch

from fastlayers.errors import CheckpointError
from fastlayers.linear.weight_only.layer import WeightOnlyLinear
from fastlayers.quant.spec import QuantSpec
from fastlayers.weights import slots
from fastlayers_models.check_quantization import wrong_words
from fastlayers_models.checkpoint import Checkpoint

# Of each packing: the tensor of codes, and those that describe it.
_WORDS = ("qzeros", "scales", "g_idx")
_PARTS = {
    **dict.fromkeys(("awq", "gptq", "gptq_v2"), ("qweight", _WORDS)),
    "packed": ("weight_packed", ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
}


def packed_format(spec: QuantSpec) -> bool:
    """Return whether a checkpoint holds words of codes under names of their own, instead of weights."""
    return spec.layout in _PARTS


def unpacked(name: str, checkpoint: Checkpoint, spec: QuantSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return what one tensor becomes: ``MODULE.weight`` for the words of codes, nothing for what describes them.

    Raises
    ------
    CheckpointError
        A tensor that the packing has is missing, or does not fit the others.
    """
    module, _, last = name.rpartition(".")
    words, others = _PARTS[spec.layout]
    if f"{module}.{words}" not in checkpoint.file_of or last not in (words, *others):
        return {name: checkpoint.read(name)}
    if last != words:
        return {}
    shape, bits = checkpoint.shape(name), 4 if spec.format == "w4a16" else 8
    many = 32 // bits
    n, k = {"awq": (shape[-1] * many, shape[0]), "packed": (shape[0], shape[-1] * many)}.get(
        spec.layout, (shape[-1], shape[0] * many)
    )
    layer = WeightOnlyLinear(
        k, n, format=spec.format, group_size=spec.group_size, zero_point=spec.zero_point, act_order=spec.act_order,
        layout=spec.layout, dtype=torch.float32, backend="reference",
    )  # fmt: skip
    for part, slot in slots(layer, module):
        if part not in checkpoint.file_of:
            raise CheckpointError(f"{name}: there is no {part}, which the layout {spec.layout!r} has")
        if checkpoint.shape(part) != tuple(slot.shape):
            raise CheckpointError(f"{part}: shape {checkpoint.shape(part)}, but {name} wants {tuple(slot.shape)}")
        if (wrong := wrong_words(checkpoint, part)) is not None:
            raise CheckpointError(wrong)
        slot.fill(part, checkpoint.read(part))
    return {f"{module}.weight": layer.dequantized(dtype)}
