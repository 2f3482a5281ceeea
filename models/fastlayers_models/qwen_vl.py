"""Qwen2.5-VL: the language model of :mod:`.qwen`, and the tower of :mod:`.vision` where a checkpoint has one.

    images ─► tower ─► rows in place of image tokens ─┐
    text ─► embed ────────────────────────────────────┴─► decoder, positions on three axes ─► norm ─► lm_head ─► logits

Positions, and what a prompt's images are of a step, are in :mod:`.images`. Videos are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import nn

from fastlayers.errors import CheckpointError
from fastlayers_models.blocks import ModelContext
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.config import Size
from fastlayers_models.qwen import QwenConfig, QwenForCausalLM
from fastlayers_models.vision import VisionConfig, VisionTower

_TOWER = re.compile(r"^((?:model\.)?visual)\.(?:blocks\.(\d+)\.)?")


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig(QwenConfig):
    """A language model's configuration with that of its tower; ``tower``: the tower's checkpoint name."""

    vision: VisionConfig
    tower: str

    def sizes(self) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large it is; see :class:`Size`."""
        yield from super().sizes()
        yield from self.vision.sizes(self.tower)


class QwenVLForCausalLM(QwenForCausalLM):
    """Qwen2.5-VL for generation over a paged cache; parameters as of :class:`QwenForCausalLM`.

    Notes
    -----
    ``backend`` is that of the decoder's attention; the tower's has no cache to follow, and is chosen by itself. Under
    ``parallel`` every rank holds the whole tower. A checkpoint without tensors of a tower makes the language model.
    """

    @property
    def tower(self) -> VisionTower | None:
        """The vision tower, called as ``tower(pixel_values, image_grid_thw)``; ``None`` if the checkpoint has none."""
        config = self.config
        return self.get_submodule(config.tower) if isinstance(config, QwenVLConfig) else None  # type: ignore[return-value]

    def make_model(self, context: ModelContext) -> nn.Module:
        """Return the decoder, or what holds it; the tower stands where its checkpoint names say."""
        model, config = super().make_model(context), context.config
        if isinstance(config, QwenVLConfig):
            holder = model if config.tower.startswith("model.") else self
            holder.visual = VisionTower(context, config.vision, config.tower)
        return model

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> QwenConfig:
        """Return the configuration of a checkpoint, with that of the tower if there are tensors of one."""
        config = super().read_config(checkpoint)
        found = [match for name in checkpoint.names() if (match := _TOWER.match(name))]
        if not found:
            return config
        vision = VisionConfig.from_hf(checkpoint.config, config.quant)
        blocks = 1 + max((int(match[2]) for match in found if match[2]), default=-1)
        for name, said, there in (
            ("depth", vision.depth, blocks),
            ("out_hidden_size", vision.out_hidden_size, config.hidden_size),
        ):
            if said != there:
                what = "blocks that there are" if name == "depth" else "language model's hidden_size"
                words = f"vision_config.{name} is {said} in config.json, the {what} {there}"
                raise CheckpointError(f"{checkpoint.path} does not fit the model; {words}")
        text = {each.name: getattr(config, each.name) for each in fields(config)}
        return QwenVLConfig(**text, vision=vision, tower=found[0][1])
