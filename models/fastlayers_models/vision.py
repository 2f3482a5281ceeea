"""Qwen2.5-VL's vision tower: patches of images in, rows of the language model's width out.

    N = patches, m = spatial_merge_size, E = hidden_size, D = E / num_heads

    pixels[N, C·frames·p·p] ─► patch_embed ─► order ─► [ norm1 ─► attn ─► norm2 ─► SwiGLU ] × depth ─► merger ─► order⁻¹
    attn     q and k turn by the patch's height (first D/4 frequencies) and width (the others), then each patch sees all
             of its segment: a window of window_size pixels a side, in fullatt_block_indexes its whole frame
    merger   RMSNorm, m × m patches as one row, linear, GELU, linear                  [N / m², out_hidden_size]

Patches come as transformers' processor gives them: image after image, frame after frame, m × m neighbours together,
which are one page of the keys here. Windows, also those that an edge cuts, follow one another in ``order``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import nn

import fastlayers as fl
from fastlayers.attention.core import AttentionCore
from fastlayers.attention.gqa.config import GQA, GQAConfig
from fastlayers.attention.kv_cache.spec import KVCacheSpec, LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, AttentionState, whole_pages
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError, describe
from fastlayers.layer import trust
from fastlayers.quant.spec import NONE, QuantSpec
from fastlayers.rotary.scaling import build_tables
from fastlayers.weights import Slot
from fastlayers_models.blocks import ModelContext, SwiGLU
from fastlayers_models.config import Size
from fastlayers_models.settings import MOST_LAYERS, Setting, read_settings, shown

Grid = tuple[int, int, int]
_SETTINGS: Mapping[str, Setting] = {
    "depth": Setting("int > 0", 32, most=MOST_LAYERS),
    "hidden_size": Setting("int > 0", 3584),
    "hidden_act": Setting("str", "silu", choices=("silu",)),
    "intermediate_size": Setting("int > 0", 3420),
    "num_heads": Setting("int > 0", 16, also=("num_attention_heads",)),
    "in_channels": Setting("int > 0", 3),
    "patch_size": Setting("int > 0", 14),
    "spatial_merge_size": Setting("int > 0", 2),
    "temporal_patch_size": Setting("int > 0", 2),
    "window_size": Setting("int > 0", 112),
    "out_hidden_size": Setting("int > 0", 3584),
    "fullatt_block_indexes": Setting("tuple[int, ...]", (7, 15, 23, 31)),
}
_ROPE: Mapping[str, Setting] = {
    "rope_type": Setting("str", "axial", choices=("axial",)),
    "rope_theta": Setting("float > 0", 10000.0),
}
_IDS: Mapping[str, Setting] = {"image_token_id": Setting("int", 151655), "video_token_id": Setting("int", 151656)}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What towers vary; names are those of ``vision_config`` in ``config.json``, the ids' those beside it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    window_size: int
    out_hidden_size: int
    fullatt_block_indexes: tuple[int, ...]
    rope_theta: float
    image_token_id: int
    video_token_id: int
    quant: QuantSpec = NONE
    rms_norm_eps: ClassVar[float] = 1e-6

    def __post_init__(self) -> None:
        name = "VisionConfig"
        if self.hidden_size % (4 * self.num_heads):
            accepted = f"a multiple of {4 * self.num_heads}: four for each of num_heads {self.num_heads}"
            raise ArgumentError(name, "hidden_size", self.hidden_size, accepted)
        if not self.window_side:
            accepted = f"at least {self.spatial_merge_size * self.patch_size}: spatial_merge_size · patch_size"
            raise ArgumentError(name, "window_size", self.window_size, accepted)

    @property
    def head_dim(self) -> int:
        """Of each attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patches(self) -> int:
        """How many become one row of the language model."""
        return self.spatial_merge_size**2

    @property
    def window_side(self) -> int:
        """Of a window, in such rows."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def patch_width(self) -> int:
        """Values of one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @staticmethod
    def from_hf(config: Mapping[str, Any], quant: QuantSpec = NONE) -> VisionConfig:
        """Read ``vision_config`` of a parsed ``config.json``.

        Raises
        ------
        ArgumentError
            A value that the tower cannot be built from.
        """
        parts: list[Mapping[str, Any]] = []
        for holder, key in ((config, "vision_config"), (config.get("vision_config"), "rope_parameters")):
            part = holder.get(key) if isinstance(holder, Mapping) else None
            if part is not None and not isinstance(part, Mapping):
                raise ArgumentError("VisionConfig", key, shown(part), "an object of names and values, or none")
            parts.append(part or {})
        values = read_settings("VisionConfig", parts[0], _SETTINGS)
        del values["hidden_act"]
        rope = read_settings("VisionConfig.rope_parameters", parts[1], _ROPE)
        ids = read_settings("VisionConfig", config, _IDS)
        return VisionConfig(**values, **ids, rope_theta=rope["rope_theta"], quant=quant)

    def sizes(self, prefix: str) -> Iterator[Size]:
        """Yield tensors by which a checkpoint shows how large the tower is; ``prefix``: its checkpoint name."""
        width, block, merged = self.hidden_size, f"{prefix}.blocks.0", self.hidden_size * self.patches
        yield Size(f"{prefix}.patch_embed.proj.weight", self.patch_shape, "hidden_size, in_channels, patch_size")
        yield Size(f"{block}.attn.qkv.weight", (3 * width, width), "hidden_size")
        yield Size(f"{block}.mlp.gate_proj.weight", (self.intermediate_size, width), "intermediate_size")
        yield Size(f"{prefix}.merger.mlp.0.weight", (merged, merged), "hidden_size, spatial_merge_size")
        yield Size(f"{prefix}.merger.mlp.2.weight", (self.out_hidden_size, merged), "out_hidden_size")

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Of the weight that embeds patches, a convolution's in the checkpoint."""
        return (self.hidden_size, self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)


@dataclass(frozen=True)
class Layout:
    """Where the patches of some images are: what every layer of one call reads.

    Attributes
    ----------
    order : Tensor int64 ``[N / m²]``
        Which row of the input each row of the tower is.
    positions : Tensor int64 ``[3, N]``
        Nothing, height and width of each patch, in the tower's order.
    cos, sin : Tensor fp32 ``[largest side, D / 2]``
    cache : LayerCache
        Keys and values of the layer that runs.
    frames, windows : AttentionMeta
        The segments of both kinds of layers.
    """

    order: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cache: LayerCache
    frames: AttentionMeta
    windows: AttentionMeta

    @staticmethod
    def of(config: VisionConfig, grids: Sequence[Grid], device: torch.device, dtype: torch.dtype) -> Layout:
        """Return the layout of images of so many frames and patches, down and across."""
        merge, side, size = config.spatial_merge_size, config.window_side, config.patches
        order, places, frames, windows, first = [], [], list[int](), list[int](), 0
        inner = torch.arange(merge)
        for count, height, width in grids:
            rows, columns = height // merge, width // merge
            row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
            window = (row // side * -(-columns // side) + column // side).flatten()
            frame = window.argsort(stable=True)
            down, across = (x[..., None, None] * merge for x in (row, column))
            place = torch.stack(torch.broadcast_tensors(down + inner[:, None], across + inner))
            places.append(place.reshape(2, rows * columns, size)[:, frame].flatten(1).repeat(1, count))
            starts = first + rows * columns * torch.arange(count)
            order.append((starts[:, None] + frame).flatten())
            frames += [rows * columns * size] * count
            windows += (window.bincount() * size).tolist() * count
            first += count * rows * columns
        positions = torch.nn.functional.pad(torch.cat(places, 1), (0, 0, 1, 0)).to(device)
        tables = build_tables(config.head_dim // 2, config.rope_theta, None, max(max(grid[1:]) for grid in grids))
        cos, sin = (torch.cat((table, table), 1).to(device) for table in tables)
        spec = KVCacheSpec(((config.num_heads, config.head_dim),), size, dtype)
        cache = spec.allocate(first + 1, device)[0]
        metas = [_segments(lengths, size, device) for lengths in (frames, windows)]
        return Layout(torch.cat(order).to(device), positions, cos, sin, cache, *metas)


def _segments(lengths: Sequence[int], page_size: int, device: torch.device) -> AttentionMeta:
    longest = max(lengths) // page_size
    state = AttentionState(len(lengths), sum(lengths), longest, page_size, device)
    return state.plan(AttentionBatch(tuple(lengths), (0,) * len(lengths), whole_pages(lengths, page_size)))


class VisionContext(ModelContext):
    """What the tower's parts are built with: it is whole on every rank, and its linears are those of its own names."""

    def __init__(self, context: ModelContext, config: VisionConfig) -> None:
        vars(self).update(vars(context))
        self.config, self.parallel = config, ParallelSpec()


class PatchProjection(fl.Linear):
    """A linear whose checkpoint tensor is the weight of a convolution that takes every value once."""

    def __init__(self, context: ModelContext) -> None:
        config = context.config
        super().__init__(config.patch_width, config.hidden_size, device=context.device, dtype=context.dtype)
        self.shape = config.patch_shape

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield the checkpoint tensor ``weight`` ``[E, C, frames, p, p]``."""
        yield "weight", Slot(self.weight, self.shape, convert=lambda weight: weight.flatten(1))


class VisionAttention(AttentionCore):
    """Attention of patches that all see each other, within segments."""

    name = "VisionAttention"

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        config, place, dtype = context.config, context.device, context.dtype
        heads, dim, width = config.num_heads, config.head_dim, config.hidden_size
        self.shape = 3, heads, dim
        cfg = GQAConfig(
            heads, heads, dim, dim**-0.5, page_size=config.patches, dtype=dtype, kv_dtype=dtype, lse=False, causal=False
        )
        self.choose_core(GQA, cfg, place, "auto")
        section = (0, dim // 4, dim // 4)
        self.write = RotaryKVWrite(heads, heads, dim, kv_dtype=dtype, mrope_section=section, device=place)
        self.qkv = context.linear(f"{name}.qkv", width, 3 * width, True)
        self.proj = context.linear(f"{name}.proj", width, width, True)

    def forward(self, x: torch.Tensor, meta: AttentionMeta, layout: Layout) -> torch.Tensor:
        """Return ``[N, E]``; overwrites the layout's keys and values."""
        q, k, v = self.qkv(x).view(-1, *self.shape).unbind(1)
        cache = layout.cache
        q = self.write(q, k, v, layout.cos, layout.sin, layout.positions, cache, meta.out_cache_loc)
        o, _ = self.core(meta, q.shape[0])(q, cache.keys, cache.values, meta, None)
        attended: torch.Tensor = self.proj(o.to(x.dtype).flatten(1))
        return attended


class VisionBlock(nn.Module):
    """Attention and an MLP, each behind a norm and with a residual around it."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = context.norm(), context.norm()
        self.attn = VisionAttention(context, f"{name}.attn")
        self.mlp = SwiGLU(context, f"{name}.mlp", context.config.intermediate_size, bias=True)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor, meta: AttentionMeta, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is to be added to the residual, and the residual; ``x``: what is still to be added to it."""
        normed, residual = (self.norm1(residual), residual) if x is None else self.norm1(x, residual)
        normed, residual = self.norm2(self.attn(normed, meta, layout), residual)
        return self.mlp(normed), residual


class PatchMerger(nn.Module):
    """Makes one row of the language model's width of m × m neighbours."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        config = context.config
        width = config.hidden_size * config.patches
        self.ln_q = context.norm()
        first = context.linear(f"{name}.mlp.0", width, width, True)
        self.mlp = nn.Sequential(first, nn.GELU(), context.linear(f"{name}.mlp.2", width, config.out_hidden_size, True))
        self.width = width

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``[N / m², out_hidden_size]``."""
        merged: torch.Tensor = self.mlp(self.ln_q(x, residual)[0].view(-1, self.width))
        return merged


class VisionTower(nn.Module):
    """The tower; every rank holds and computes all of it.

    Parameters
    ----------
    context : ModelContext
        Of the model that it belongs to.
    config : VisionConfig
    name : str
        Its checkpoint name.
    """

    def __init__(self, context: ModelContext, config: VisionConfig, name: str) -> None:
        super().__init__()
        inner = VisionContext(context, config)
        self.config, self.device, self.dtype = config, context.device, context.dtype
        self.patch_embed = nn.ModuleDict({"proj": PatchProjection(inner)})
        self.blocks = nn.ModuleList(VisionBlock(inner, f"{name}.blocks.{i}") for i in range(config.depth))
        self.merger = PatchMerger(inner, f"{name}.merger")
        trust(self)

    @torch.inference_mode()
    def forward(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor | Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Embed images.

        Parameters
        ----------
        pixel_values : Tensor ``[N, C·frames·p·p]``
            As transformers' processor gives them, on any device.
        image_grid_thw : integer Tensor or sequence ``[images, 3]``
            Frames, and patches down and across, of each image.

        Returns
        -------
        Tensor ``[N / m², out_hidden_size]``
            Of the tower's dtype, image after image, row by row. Not capture-safe.

        Raises
        ------
        ArgumentError
            Another shape or dtype, or a grid that is not of these patches.
        """
        grids = self.read_grids(pixel_values, image_grid_thw)
        layout = Layout.of(self.config, grids, self.device, self.dtype)
        rows = self.patch_embed["proj"](pixel_values.to(self.device, self.dtype).contiguous())
        residual = rows.unflatten(0, (-1, self.config.patches))[layout.order].flatten(0, 1)
        x: torch.Tensor | None = None
        for index, block in enumerate(self.blocks):
            meta = layout.frames if index in self.config.fullatt_block_indexes else layout.windows
            x, residual = block(x, residual, meta, layout)
        assert x is not None
        merged = self.merger(x, residual)
        embedded: torch.Tensor = torch.empty_like(merged).index_copy_(0, layout.order, merged)
        return embedded

    def warm_up_calls(self, tokens: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what :func:`fastlayers.warmup` runs: an image of at least so many tokens, about as high as wide."""
        for count in tokens:
            height = isqrt(count)
            grid = (1, *(self.config.spatial_merge_size * side for side in (height, -(-count // height))))
            pixels = torch.zeros(grid[1] * grid[2], self.config.patch_width)
            yield f"image {count}", partial(self, pixels, [grid])

    def read_grids(self, pixel_values: Any, image_grid_thw: Any) -> list[Grid]:
        """Return the grids as integers, or raise :class:`ArgumentError` as ``forward`` does."""
        config, name = self.config, "VisionTower"
        listed = image_grid_thw.tolist() if isinstance(image_grid_thw, torch.Tensor) else image_grid_thw
        grids: list[Any] = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else [None]
        merge = config.spatial_merge_size
        for grid in grids:
            good = isinstance(grid, Sequence) and len(grid) == 3 and all(type(n) is int and n > 0 for n in grid)
            if not good or grid[1] % merge or grid[2] % merge:
                given = shown(grid if len(grids) > 1 or grid is not None else image_grid_thw)
                accepted = f"for each image frames, height and width in patches, the last two multiples of {merge}"
                raise ArgumentError(name, "image_grid_thw", given, accepted)
        pixels = isinstance(pixel_values, torch.Tensor) and pixel_values.is_floating_point()
        patches = sum(t * h * w for t, h, w in grids)
        if not grids or not pixels or tuple(pixel_values.shape) != (patches, config.patch_width):
            accepted = (
                f"a floating tensor [{patches}, {config.patch_width}]: the patches of image_grid_thw, at least one"
            )
            raise ArgumentError(name, "pixel_values", describe(pixel_values), accepted)
        return [(t, h, w) for t, h, w in grids]
