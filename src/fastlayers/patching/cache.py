"""Cache layers for MLA inside Hugging Face's cache: latent and rotary key of a token side by side in one row.

    B = batch, S = cached tokens, L = kv_lora_rank, R = qk_rope_head_dim
    buffer[B, 1, capacity, L + R]     keys = buffer[..., :S, :L],  values = buffer[..., :S, L:]

Contents are exactly what the stock layers hold, so patched and stock code can share a cache. The dynamic layer
grows geometrically, so a step writes one row instead of copying all. Operations that rebind ``keys`` and ``values``
to other tensors are noticed; the rows are packed again then.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

# Capacities are whole pages of this many rows: attention kernels read the buffer as pages.
PAGE = 64


def _whole_pages(rows: int) -> int:
    return -(-rows // PAGE) * PAGE


def _fits(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether these are a latent and a rotary key that can share rows."""
    return (
        keys.dim() == 4
        and keys.shape[1] == values.shape[1] == 1
        and keys.shape[:3] == values.shape[:3]
        and keys.dtype == values.dtype
        and keys.device == values.device
    )


def _frozen(buffer: torch.Tensor) -> bool:
    """Return whether the buffer was made in inference mode and may not be written outside of it."""
    if torch.compiler.is_compiling():
        return False
    return buffer.is_inference() and not torch.is_inference_mode_enabled()


class LatentLayer(DynamicLayer):
    """A :class:`DynamicLayer` whose keys and values are views of one growing buffer."""

    keys: Any
    values: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.buffer: torch.Tensor | None = None
        # The views that this layer made last; anything else in keys or values came from outside.
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def linked(self) -> bool:
        """Whether ``keys`` and ``values`` still are views of the buffer."""
        return self._views is not None and self.keys is self._views[0] and self.values is self._views[1]

    def _view(self, length: int) -> None:
        assert self.buffer is not None
        rank = self._rank
        self.keys, self.values = self.buffer[:, :, :length, :rank], self.buffer[:, :, :length, rank:]
        self._views = (self.keys, self.values)

    def _drop(self) -> None:
        self.buffer, self._views = None, None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B,1,Q,L]`` latents and ``[B,1,Q,R]`` rotary keys; return all cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, added = self.get_seq_length(), key_states.shape[-2]
        same_batch = length == 0 or self.keys.shape[0] == key_states.shape[0]
        recorded = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if recorded or not same_batch or not _fits(key_states, value_states):
            # Writing in place would break autograd; what does not fit gets the stock layer's behaviour and errors.
            self._drop()
            result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return result
        self._reserve(length, length + added, key_states, value_states)
        assert self.buffer is not None
        self.buffer[:, :, length : length + added, : self._rank] = key_states
        self.buffer[:, :, length : length + added, self._rank :] = value_states
        self._view(length + added)
        return self.keys, self.values

    def _reserve(self, length: int, needed: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffer hold ``needed`` rows, the first ``length`` of them as they are in keys and values."""
        if self.linked and self.buffer is not None and needed <= self.buffer.shape[2] and not _frozen(self.buffer):
            return
        self._rank = key_states.shape[-1]
        width = self._rank + value_states.shape[-1]
        capacity = _whole_pages(needed + max(256, needed // 4))
        # Zeros: kernels read whole pages, and nothing that they read may be NaN.
        buffer = torch.zeros(key_states.shape[0], 1, capacity, width, dtype=key_states.dtype, device=key_states.device)
        if length:
            buffer[:, :, :length, : self._rank] = self.keys
            buffer[:, :, :length, self._rank :] = self.values
        self.buffer = buffer

    def rows(self) -> torch.Tensor | None:
        """Return the cached rows ``[B, S, L + R]`` as a view, or ``None`` if they are not side by side."""
        if not self.linked or self.buffer is None:
            return None
        return self.buffer[:, 0, : self.keys.shape[2]]

    def pages(self) -> torch.Tensor | None:
        """Return the buffer as ``[B * capacity / PAGE, PAGE, L + R]``, or ``None``."""
        if not self.linked or self.buffer is None:
            return None
        return self.buffer.view(-1, PAGE, self.buffer.shape[-1])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens; the buffer stays."""
        linked = self.linked and self.buffer is not None
        super().crop(tokens_to_remove)
        if linked:
            self._view(self.keys.shape[-2])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch, capacity included, so that the next step need not copy again."""
        self._select(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)), super().reorder_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._select(lambda b: b.repeat_interleave(repeats, dim=0), super().batch_repeat_interleave, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        self._select(lambda b: b[indices, ...], super().batch_select_indices, indices)

    def _select(self, on_buffer: Any, on_views: Any, argument: Any) -> None:
        length: Any = self.get_seq_length()
        if self.linked and self.buffer is not None and length:
            self.buffer = on_buffer(self.buffer)
            self._view(length)
        else:
            on_views(argument)

    def reset(self) -> None:
        """Do what the stock layer does; its tensors may be zeroed or dropped, by version."""
        super().reset()
        if not self.linked:
            self._drop()


class StaticLatentLayer(StaticLayer):
    """A :class:`StaticLayer` whose keys and values are views of one buffer of fixed address."""

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len, **kwargs)
        self.buffer: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def linked(self) -> bool:
        """Whether ``keys`` and ``values`` still are views of the buffer."""
        return self._views is not None and self.keys is self._views[0] and self.values is self._views[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffer; decline (stock tensors) on CUDA, or if keys and values cannot share rows."""
        super().lazy_initialization(key_states, value_states)
        # On CUDA, Hugging Face compiles decoding with a static cache, and inductor (torch 2.11) cannot compile a graph
        # whose inputs are views of one tensor that it writes.
        if key_states.is_cuda or not _fits(key_states, value_states):
            return
        rank, width = key_states.shape[-1], key_states.shape[-1] + value_states.shape[-1]
        rows = _whole_pages(self.max_cache_len)
        self.buffer = torch.zeros(self.batch_size, 1, rows, width, dtype=self.dtype, device=self.device)
        self.keys = self.buffer[:, :, : self.max_cache_len, :rank]
        self.values = self.buffer[:, :, : self.max_cache_len, rank:]
        self._views = (self.keys, self.values)
        if not torch.compiler.is_compiling():
            for tensor in (self.buffer, self.keys, self.values):
                torch._dynamo.mark_static_address(tensor)

    def rows(self) -> torch.Tensor | None:
        """Return all rows ``[B, max_cache_len, L + R]`` as a view, or ``None`` if they are not side by side."""
        if not self.linked or self.buffer is None:
            return None
        return self.buffer[:, 0, : self.max_cache_len]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch in place: the address stays."""
        if self.linked and self.buffer is not None:
            if self.get_seq_length() > 0:
                self.buffer.copy_(self.buffer.index_select(0, beam_idx.to(self.buffer.device)))
        else:
            super().reorder_cache(beam_idx)


def adopt(cache: Any, index: int) -> None:
    """Replace layer ``index`` of a Hugging Face cache by ours, if it is a stock one that holds nothing yet.

    Offloaded caches keep their layers: they move tensors one by one.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        return
    replicate: Any = getattr(cache, "layer_class_to_replicate", None)
    if replicate is DynamicLayer:
        while len(layers) <= index:
            layers.append(DynamicLayer())
    if index >= len(layers):
        return
    layer = layers[index]
    if layer.is_initialized:
        return
    if type(layer) is DynamicLayer:
        layers[index] = LatentLayer()
    elif type(layer) is StaticLayer:
        layers[index] = StaticLatentLayer(layer.max_cache_len)


def latent_rows(cache: Any, index: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what the cache just returned as rows ``[B, S, L + R]``: a view where it can be, else a copy."""
    layer: Any = cache.layers[index] if cache is not None and index < len(getattr(cache, "layers", ())) else None
    own = isinstance(layer, (LatentLayer, StaticLatentLayer)) and layer.keys is keys
    if own or (hasattr(layer, "paged") and layer.get_seq_length() == keys.shape[2]):
        rows: torch.Tensor | None = layer.rows()
        if rows is not None:
            return rows
    return torch.cat((keys, values), dim=-1)[:, 0]
