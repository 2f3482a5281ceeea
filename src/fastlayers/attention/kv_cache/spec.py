"""What a model's cache looks like, settled before attention backends are chosen: :class:`KVCacheSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fastlayers.errors import (
    ArgumentError,
    as_integers,
    check_choice,
    check_device,
    check_fields,
    check_plain,
    check_positive,
)
from fastlayers.memory import allocate

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class KVCacheSpec:
    """Layout of a paged cache.

    Parameters
    ----------
    rows : tuple[tuple[int, ...], ...]
        One entry per attention layer, in order: ``(kv_lora_rank + qk_rope_head_dim,)`` for latent rows (MLA), or
        ``(num_kv_heads, head_dim)`` for a pair of key and value rows (GQA).
    page_size : int
        Tokens a page.
    dtype : torch.dtype
        fp32, fp16, bf16, or e4m3 (saturating, scale 1).
    """

    rows: tuple[tuple[int, ...], ...]
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_fields("KVCacheSpec", self)
        check_positive("KVCacheSpec", page_size=self.page_size)
        check_choice("KVCacheSpec", "dtype", self.dtype, DTYPES)
        if not isinstance(self.rows, tuple):
            raise ArgumentError("KVCacheSpec", "rows", repr(self.rows), "a tuple with one entry per layer")
        for row in self.rows:
            check_plain("KVCacheSpec", "tuple[int, ...]", rows=row)
            if len(row) not in (1, 2) or min(row) < 1:
                raise ArgumentError("KVCacheSpec", "rows", row, "(latent_width,) or (num_kv_heads, head_dim)")
        object.__setattr__(self, "rows", tuple(as_integers(*row) for row in self.rows))

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers."""
        return sum(r[0] if len(r) == 1 else 2 * r[0] * r[1] for r in self.rows) * self.dtype.itemsize

    def allocate(self, num_pages: int, device: torch.device | str | None = None) -> list[LayerCache]:
        """Return one zeroed :class:`LayerCache` per layer, each of ``num_pages`` pages (page 0 included)."""
        check_positive("KVCacheSpec.allocate", num_pages=num_pages)
        (num_pages,) = as_integers(num_pages)
        device = check_device("KVCacheSpec.allocate", device)

        def zeros(*size: int) -> torch.Tensor:
            shape = num_pages, self.page_size, *size
            return allocate("KVCacheSpec.allocate", "the cache of a layer", shape, self.dtype, device)

        return [
            LayerCache(zeros(row[0])) if len(row) == 1 else LayerCache(zeros(*row), zeros(*row)) for row in self.rows
        ]


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache: latent rows ``[pages, page_size, L + R]``, or keys and values ``[pages, page_size, Hkv, D]``.

    ``keys`` holds the latents where ``values`` is ``None``.
    """

    keys: torch.Tensor
    values: torch.Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Pages, page 0 included."""
        return self.keys.shape[0]


def cache_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention layers of ``model`` in order: the modules that have ``kv_row``."""
    for module in model.modules():
        if hasattr(module, "kv_row"):
            yield module


def kv_cache_spec(model: nn.Module, *, page_size: int = 64, dtype: torch.dtype | None = None) -> KVCacheSpec:
    """Return the cache layout that ``model``'s attention layers need.

    Parameters
    ----------
    model : nn.Module
        Holds ``MLAAttention`` or ``Attention`` layers.
    page_size : int
    dtype : torch.dtype, optional
        Default: the dtype of the model's parameters.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("kv_cache_spec", "model", repr(model), "a model with attention layers")
    rows = tuple(tuple(layer.kv_row) for layer in cache_layers(model))  # type: ignore[arg-type]
    if not rows:
        raise ArgumentError("kv_cache_spec", "model", type(model).__name__, "a model with attention layers")
    if dtype is None:
        dtype = next(p.dtype for p in model.parameters() if p.dtype in DTYPES[:3])
    return KVCacheSpec(rows, page_size, dtype)
