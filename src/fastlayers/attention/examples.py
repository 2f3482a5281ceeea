"""What an attention layer is called with to warm it up: both kinds of steps, for as many tokens as are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastlayers.errors import ArgumentError
from fastlayers.registry.spec import place_of


def long_prefix_example(layer: Any, count: int, path: str) -> tuple[Any, ...]:
    """Return the layer's arguments for a prompt's last ``count`` tokens behind a page that is cached, on this path."""
    from fastlayers.attention.kv_cache.spec import kv_cache_spec
    from fastlayers.attention.meta import AttentionBatch, AttentionState

    size, device = layer.cfg.page_size, place_of(layer)
    pages = 1 + -(-count // size)
    cache = kv_cache_spec(layer, page_size=size, dtype=layer.cfg.kv_dtype).allocate(pages + 1, device)[0]
    x = torch.zeros(count, layer.hidden_size, dtype=layer.cfg.dtype, device=device)
    batch = AttentionBatch((count,), (size,), [list(range(1, pages + 1))])
    return x, replace(AttentionState(1, count, pages, size, device).plan(batch), path=path), cache


def step_examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for ``count`` requests of one token, and for one of ``count`` tokens."""
    from fastlayers.attention.kv_cache.spec import kv_cache_spec
    from fastlayers.attention.meta import AttentionBatch, AttentionState

    positions = getattr(layer.rotary, "max_position", count)
    if count > positions:
        raise ArgumentError("warmup", "tokens", count, f"at most {positions} (max_position of the rotary embedding)")
    size, device = layer.cfg.page_size, place_of(layer)
    pages = -(-count // size)
    cache = kv_cache_spec(layer, page_size=size, dtype=layer.cfg.kv_dtype).allocate(pages + 1, device)[0]
    x = torch.zeros(count, layer.hidden_size, dtype=layer.cfg.dtype, device=device)
    decode = AttentionBatch((1,) * count, (0,) * count, [[1]] * count)  # one row for all of them
    extend = AttentionBatch((count,), (0,), [list(range(1, pages + 1))])
    return [
        (x, AttentionState(count, count, pages, size, device).plan(batch).vouch(), cache) for batch in (decode, extend)
    ]
