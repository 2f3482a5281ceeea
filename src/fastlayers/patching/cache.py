"""A cache layer for MLA inside Hugging Face's cache: latent and rotary key of a token side by side in one row.

    B = batch, S = cached tokens, L = kv_lora_rank, R = qk_rope_head_dim
    buffer[B, 1, capacity, L + R]     what ``update`` returns: buffer[..., :S, :L] and buffer[..., :S, L:]

The buffer grows geometrically, so a step writes one row instead of copying all, as attention kernels like to read
them. To everybody else the layer is a stock one: whoever asks for ``keys`` or ``values`` gets tensors of their own,
contiguous, and they are what the layer holds from then on, until the next step packs rows again. Rows that a view may
still look at are never overwritten. Pickles and programs of torch.compile hold stock layers.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from fastlayers.patching.classes import differentiated
from fastlayers.weights_epoch import is_aliased

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


def _alike(held: torch.Tensor, added: torch.Tensor) -> bool:
    """Return whether rows of one can follow those of the other as they are."""
    return held.shape[0] == added.shape[0] and held.dtype == added.dtype and held.device == added.device


class LatentLayer(DynamicLayer):
    """A :class:`DynamicLayer` that keeps its contents in one growing buffer between steps."""

    def __init__(self, **kwargs: Any) -> None:
        self._begin()
        super().__init__(**kwargs)

    def _begin(self) -> None:
        self.buffer: torch.Tensor | None = None
        # Rows that are filled, and rows that ever were: views of those may be around.
        self._length = self._mark = self._rank = 0
        # Keys and values while there is no buffer.
        self._apart: list[Any] = [None, None]
        # The shape of a decode step over pages, and its metadata: the same for all layers of a cache.
        self.described: tuple[Any, Any] | None = None

    def _views(self) -> list[Any]:
        if self.buffer is None:
            return self._apart
        rows = self.buffer[:, :, : self._length]
        return [rows[..., : self._rank], rows[..., self._rank :]]

    def _take(self, which: int) -> Any:
        """Return keys or values as tensors of their own, which are the contents from now on."""
        if self.buffer is not None:
            self._apart = [view.contiguous() for view in self._views()]
            self.buffer = None
        return self._apart[which]

    def _put(self, which: int, value: torch.Tensor | None) -> None:
        self._take(which)
        self._apart[which] = value

    keys: Any = property(lambda self: self._take(0), lambda self, value: self._put(0, value))
    values: Any = property(lambda self: self._take(1), lambda self, value: self._put(1, value))

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        if self.buffer is not None:
            return self._length
        keys = self._apart[0]
        return 0 if not self.is_initialized or keys.numel() == 0 else int(keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[B,1,Q,L]`` latents and ``[B,1,Q,R]`` rotary keys; return all cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, added = self.get_seq_length(), key_states.shape[-2]
        if torch.compiler.is_compiling():
            held = self._views() if length else [key_states[..., :0, :], value_states[..., :0, :]]
            self.buffer = None
            self._apart = [torch.cat(pair, dim=-2) for pair in zip(held, (key_states, value_states), strict=True)]
            return self._apart[0], self._apart[1]
        alike = length == 0 or _alike(self._views()[0], key_states)
        recorded = differentiated(key_states, value_states, *self._views())
        if recorded or not alike or not _fits(key_states, value_states):
            # Writing in place would break autograd; what does not fit gets the stock layer's behaviour and errors.
            result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return result
        buffer = self._reserve(length, length + added, key_states, value_states)
        buffer[:, :, length : length + added, : self._rank] = key_states
        buffer[:, :, length : length + added, self._rank :] = value_states
        self._length = self._mark = length + added
        keys, values = self._views()
        return keys, values

    def _reserve(self, length: int, needed: int, key_states: torch.Tensor, value_states: torch.Tensor) -> torch.Tensor:
        """Return a buffer for ``needed`` rows whose first ``length`` ones are the contents."""
        held = self.buffer
        if held is not None and needed <= held.shape[2]:
            # Made in inference mode, it may not be written outside of it.
            frozen = held.is_inference() and not torch.is_inference_mode_enabled()
            if not frozen and (length >= self._mark or not is_aliased(held)):
                return held
        rank, width = key_states.shape[-1], key_states.shape[-1] + value_states.shape[-1]
        capacity = _whole_pages(needed + max(256, needed // 4))
        # Zeros: kernels read whole pages, and nothing that they read may be NaN.
        buffer = torch.zeros(key_states.shape[0], 1, capacity, width, dtype=key_states.dtype, device=key_states.device)
        if length:
            keys, values = self._views()
            buffer[:, :, :length, :rank] = keys
            buffer[:, :, :length, rank:] = values
        self.buffer, self._rank, self._apart = buffer, rank, [None, None]
        return buffer

    def rows(self) -> torch.Tensor | None:
        """Return the cached rows ``[B, S, L + R]`` as a view, or ``None`` if they are not side by side."""
        return None if self.buffer is None else self.buffer[:, 0, : self._length]

    def pages(self) -> torch.Tensor | None:
        """Return the buffer as ``[B * capacity / PAGE, PAGE, L + R]``, or ``None``."""
        return None if self.buffer is None else self.buffer.view(-1, PAGE, self.buffer.shape[-1])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens; the buffer stays."""
        held, self._apart, self.buffer = self.buffer, self._views(), None
        super().crop(tokens_to_remove)
        if held is not None:
            self.buffer, self._length, self._apart = held, int(self._apart[0].shape[-2]), [None, None]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the batch, capacity included, so that the next step need not copy again."""
        self._select(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)), super().reorder_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self._select(lambda b: b.repeat_interleave(repeats, dim=0), super().batch_repeat_interleave, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        self._select(lambda b: b[indices, ...], super().batch_select_indices, indices)

    def _select(self, on_buffer: Any, on_tensors: Any, argument: Any) -> None:
        if self.buffer is not None and self._length:
            self.buffer, self._mark = on_buffer(self.buffer), self._length
        else:
            on_tensors(argument)

    def __copy__(self) -> LatentLayer:
        # Of a stock layer both have the same tensors, and each makes new ones when it grows.
        self._take(0)
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, _apart=list(self._apart))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentLayer:
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__ | {"described": None}, memo))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return stock_layer({"keys": self.keys, "values": self.values, **self.__dict__})


_OWN = ("buffer", "_length", "_mark", "_rank", "_apart", "described")


def stock_layer(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return what pickles a layer as a :class:`DynamicLayer`: it loads where fastlayers is not installed."""
    plain = {name: value for name, value in state.items() if name not in _OWN}
    return copyreg._reconstructor, (DynamicLayer, object, None), plain  # type: ignore[attr-defined]


def adopt(cache: Any, index: int) -> None:
    """Make layer ``index`` of a Hugging Face cache one of ours, if it is a stock one that holds nothing yet.

    The object stays the same. Offloaded caches keep their layers: they move tensors one by one.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        return
    replicate: Any = getattr(cache, "layer_class_to_replicate", None)
    if replicate is DynamicLayer:
        while len(layers) <= index:
            layers.append(DynamicLayer())
    if index < len(layers) and type(layers[index]) is DynamicLayer and not layers[index].is_initialized:
        layer: Any = layers[index]
        for name in ("keys", "values"):
            layer.__dict__.pop(name, None)
        layer.__class__ = LatentLayer
        layer._begin()


def latent_rows(cache: Any, index: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what the cache just returned as rows ``[B, S, L + R]``: a view where it can be, else a copy."""
    layer: Any = cache.layers[index] if cache is not None and index < len(getattr(cache, "layers", ())) else None
    if isinstance(layer, LatentLayer) or hasattr(layer, "paged"):
        rows: torch.Tensor | None = layer.rows()
        if rows is not None and rows.shape[1] == keys.shape[2]:
            return rows
    return torch.cat((keys, values), dim=-1)[:, 0]
