"""A cache for ``generate`` of fixed capacity, whose rows lie in pages that attention cores read where they are.

    B = batch, C = capacity (whole pages), K = key heads, D = head_dim, L + R = latent and rotary key of MLA
    keys, values[B * C / PAGE, PAGE, K, D]     grouped queries: row b owns pages b * C / PAGE and following
    rows[B * C / PAGE, PAGE, L + R]            MLA

To Hugging Face's code it is a cache of dynamic layers: ``keys`` and ``values`` are views of what is filled, ``update``
returns all of it. Decoding in a graph writes the pages itself and calls :meth:`PagedCache.advance`. Anything that
rebinds keys or values (beams, batch selection, growth beyond the capacity) makes a layer an ordinary dynamic one.
Copies and pickles are plain :class:`DynamicCache` objects.

The buffers outlive the cache: a :class:`CachePool` keeps them by batch and capacity, since captured graphs hold their
addresses, and lends them to one living cache at a time.
"""

from __future__ import annotations

import copyreg
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from fastlayers.errors import CaptureError
from fastlayers.patching.cache import PAGE, stock_layer

# Smallest capacity; larger ones are powers of two and the numbers half way between them.
MIN_CAPACITY = 256


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method and does not keep its object alive."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = held()
        return None if found is None else found(*args)

    return call


def capacity_bucket(tokens: int) -> int:
    """Return the capacity for ``tokens`` cached tokens: 256, 384, 512, 768, 1024, …"""
    size = MIN_CAPACITY
    while size < tokens:
        if size + size // 2 >= tokens:
            return size + size // 2
        size *= 2
    return size


class CacheStore:
    """The buffers of one batch size and capacity: rows of every layer, and what a decode step reads besides."""

    _serial = itertools.count()

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity, self.serial = batch, capacity, next(self._serial)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        # The same as pages, with one in front that is nobody's: tokens of padding are written there.
        self.spared: dict[int, tuple[torch.Tensor, ...]] = {}
        # The static inputs of captured steps, made by whoever captures, and the graphs' bytes.
        self.state: Any = None
        self.extends: dict[tuple[int, bool], Any] = {}
        self.graph_bytes = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Name of this store's graph."""
        return self.batch, self.capacity, self.serial

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the graph."""
        return self.graph_bytes + sum(
            sum(t.numel() * t.element_size() for t in ((rows,) if rows is not None else (keys, values)))
            for keys, values, rows in self.layers.values()
        )

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor, latent: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys ``[B, C, K, D]``, values and (MLA) rows ``[pages, PAGE, L + R]`` of a layer, made if needed."""
        if index in self.layers:
            return self.layers[index]
        heads, pages = key.shape[1], self.batch * self.capacity // PAGE
        options: dict[str, Any] = {"dtype": key.dtype, "device": key.device}
        # Zeros: kernels may read whole pages, and nothing that they read may be NaN.
        with torch.inference_mode(False):
            if latent:
                rank, width = key.shape[-1], key.shape[-1] + value.shape[-1]
                whole = torch.zeros(pages + 1, PAGE, width, **options)
                rows, self.spared[index] = whole[1:], (whole,)
                dense = rows.view(self.batch, self.capacity, 1, width)
                self.layers[index] = dense[..., :rank], dense[..., rank:], rows
            else:
                both = tuple(torch.zeros(pages + 1, PAGE, heads, x.shape[-1], **options) for x in (key, value))
                keys, values = (each[1:].view(self.batch, self.capacity, *each.shape[2:]) for each in both)
                self.layers[index], self.spared[index] = (keys, values, None), both
        return self.layers[index]


class CacheLease:
    """What ties a cache to its store; the pool watches it. A reference of its own, so that no cycle arises."""

    def __init__(self, pool: CachePool | None, capacity: int) -> None:
        self.pool, self.capacity = pool, capacity
        self.store: CacheStore | None = None

    def bind(self, batch: int) -> CacheStore:
        """Return the store, taken from the pool at first use, when the batch size is known."""
        if self.store is None:
            self.store = CacheStore(batch, self.capacity) if self.pool is None else self.pool.lend(self, batch)
        return self.store


class CachePool:
    """Stores by batch and capacity; the least recently used ones go when their bytes exceed a limit.

    Parameters
    ----------
    max_bytes : int
        Of rows. The store in use stays, whatever it takes.
    dropped : callable
        Called with the key of a store that is no longer lent.
    """

    def __init__(self, max_bytes: int, dropped: Callable[[tuple[int, int, int]], object]) -> None:
        self.max_bytes, self._dropped = max_bytes, dropped
        self._stores: OrderedDict[tuple[int, int], tuple[CacheStore, weakref.ref[CacheLease]]] = OrderedDict()

    def lend(self, lease: CacheLease, batch: int) -> CacheStore:
        """Return the store for this batch and the lease's capacity; a new one if another cache lives in it."""
        key = batch, lease.capacity
        store, holder = self._stores.pop(key, (None, None))
        if store is not None and holder is not None and holder() is not None:
            # Somebody kept a cache: its rows are his, and the graph that writes them goes.
            self._dropped(store.key)
            store = None
        if store is None:
            store = CacheStore(*key)
        self._stores[key] = store, weakref.ref(lease)
        self.shrink(store)
        return store

    def shrink(self, kept: CacheStore) -> None:
        """Drop the least recently used stores until the limit holds."""
        while len(self._stores) > 1 and sum(store.nbytes for store, _ in self._stores.values()) > self.max_bytes:
            key = next(k for k, (store, _) in self._stores.items() if store is not kept)
            self.forget(key)

    def forget(self, key: tuple[int, int]) -> None:
        """Drop one store."""
        store, _ = self._stores.pop(key)
        self._dropped(store.key)

    def clear(self) -> None:
        """Drop all stores; caches that live keep theirs."""
        for key in list(self._stores):
            self.forget(key)

    def __len__(self) -> int:
        return len(self._stores)


class PagedLayer(DynamicLayer):
    """One layer of a :class:`PagedCache`."""

    def __init__(self, lease: CacheLease, index: int, latent: bool) -> None:
        # Before the base class sets keys and values to None.
        self._lease, self._index, self._latent = lease, index, latent
        self._length = 0
        self._pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._foreign: list[Any] | None = None
        super().__init__()

    @property
    def attached(self) -> bool:
        """Whether keys and values still are what this layer wrote into its pages."""
        return self._foreign is None and self._pages is not None

    def _view(self, which: int) -> torch.Tensor | None:
        if self._foreign is not None:
            found: torch.Tensor | None = self._foreign[which]
            return found
        if self._pages is None:
            return None
        dense = self._pages[which]
        assert dense is not None
        return dense[:, : self._length].transpose(1, 2)

    def _rebind(self, which: int, value: torch.Tensor | None) -> None:
        if value is None:
            return
        if self._foreign is None:
            self._foreign = [self.keys, self.values]
        self._foreign[which] = value

    @property
    def keys(self) -> Any:
        """Cached keys ``[B, K, S, D]``, a view of the pages."""
        return self._view(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._rebind(0, value)

    @property
    def values(self) -> Any:
        """Cached values ``[B, K, S, D]``, a view of the pages."""
        return self._view(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._rebind(1, value)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take this layer's pages from the store."""
        self.dtype, self.device = key_states.dtype, key_states.device
        store = self._lease.bind(key_states.shape[0])
        self._pages = store.layer(self._index, key_states, value_states, self._latent)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``[B, K, Q, D]``; return all cached ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, last = self._length, self._length + key_states.shape[-2]
        if not self.attached or not self._takes(key_states, last):
            result: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return result
        assert self._pages is not None
        self._pages[0][:, first:last] = key_states.transpose(1, 2)
        self._pages[1][:, first:last] = value_states.transpose(1, 2)
        self._length = last
        if first == 0:
            return key_states, value_states
        return self.keys, self.values

    def _takes(self, key_states: torch.Tensor, length: int) -> bool:
        """Return whether the pages can hold this; gradients and another shape go the ordinary way."""
        assert self._pages is not None
        keys = self._pages[0]
        recorded = torch.is_grad_enabled() and key_states.requires_grad
        same = key_states.shape[0] == keys.shape[0] and key_states.dtype == keys.dtype
        return same and not recorded and length <= keys.shape[1]

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        if self._foreign is not None:
            length: int = super().get_seq_length()
            return length
        return self._length

    def advance(self) -> None:
        """Count one token that a graph wrote."""
        self._length += 1

    def move(self, lease: CacheLease) -> None:
        """Copy the rows into the pages of another store."""
        assert self._pages is not None
        keys, values = self.keys, self.values
        self._lease = lease
        self._pages = lease.bind(keys.shape[0]).layer(self._index, keys, values, self._latent)
        self._pages[0][:, : self._length] = keys.transpose(1, 2)
        self._pages[1][:, : self._length] = values.transpose(1, 2)

    def take_pages(self) -> None:
        """Take this layer's pages from the store, where an earlier cache left them; nothing is cached yet."""
        store = self._lease.store
        assert store is not None and self._length == 0
        self._pages = store.layers[self._index]
        self.dtype, self.device = self._pages[0].dtype, self._pages[0].device
        self.is_initialized = True

    def filled(self, length: int) -> None:
        """Count the tokens that a graph wrote from the first row on."""
        self._length = length

    def _spared(self) -> tuple[torch.Tensor, ...]:
        store = self._lease.store
        assert store is not None
        return store.spared[self._index]

    def paged(self, spare: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as pages ``[pages, PAGE, K, D]``; grouped queries only.

        ``spare``: with the page in front that is nobody's.
        """
        if spare:
            keys, values = self._spared()
            return keys, values
        assert self._pages is not None
        keys, values, _ = self._pages
        return keys.view(-1, PAGE, *keys.shape[2:]), values.view(-1, PAGE, *values.shape[2:])

    def rows(self) -> torch.Tensor | None:
        """Return MLA's cached rows ``[B, S, L + R]`` as a view, or ``None``."""
        if not self.attached or self._pages is None or self._pages[2] is None:
            return None
        rows = self._pages[2]
        return rows.view(self._pages[0].shape[0], -1, rows.shape[-1])[:, : self._length]

    def pages(self, spare: bool = False) -> torch.Tensor | None:
        """Return MLA's rows as ``[pages, PAGE, L + R]``, or ``None``; ``spare``: as for :meth:`paged`."""
        if spare:
            return self._spared()[0]
        return self._pages[2] if self.attached and self._pages is not None else None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end: as many as the negative number says, or down to the positive one."""
        if self._foreign is not None:
            super().crop(tokens_to_remove)
        elif tokens_to_remove > 0:
            self._length = min(self._length, tokens_to_remove)
        else:
            self._length = max(0, self._length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; the pages stay."""
        if self._foreign is not None:
            super().reset()
        self._length = 0

    def __reduce__(self) -> tuple[Any, ...]:
        layer: Any = DynamicLayer()
        if self.is_initialized:
            layer.lazy_initialization(self.keys, self.values)
            layer.keys, layer.values = self.keys.clone(), self.values.clone()
        return stock_layer(layer.__dict__)


class PagedCache(Cache):
    """The cache of one ``generate`` call that may be captured.

    Parameters
    ----------
    lease : CacheLease
    latent : sequence of bool
        For each layer, whether it is MLA.

    Attributes
    ----------
    step : object or None
        What patched layers read while a decode step runs on the pages; ``None``: they use ``update``.
    capture : bool
        Whether steps may be captured; else they run eagerly, by the same code.
    unfit : str
        Why no step may run on the pages; "" if they may.
    """

    def __init__(self, lease: CacheLease, latent: Sequence[bool]) -> None:
        super().__init__(layers=[PagedLayer(lease, index, kind) for index, kind in enumerate(latent)])
        self.lease = lease
        self.step: Any = None
        self.capture, self.unfit, self.started = True, "", False

    @property
    def attached(self) -> bool:
        """Whether all layers are in their pages and equally long."""
        length = self.layers[0].get_seq_length()
        return all(layer.attached and layer._length == length for layer in self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; see :meth:`PagedLayer.update`."""
        if self.step is not None:
            raise CaptureError(f"layer {layer_idx} left the fast path in the middle of a decode step on pages")
        found: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    def grow(self, capacity: int) -> None:
        """Move all rows into a store of another capacity."""
        old, self.lease = self.lease, CacheLease(self.lease.pool, capacity)
        if old.store is not None:
            self.lease.bind(old.store.batch)
        for layer in self.layers:
            layer.move(self.lease)

    def advance(self) -> None:
        """Count one token in every layer."""
        for layer in self.layers:
            layer.advance()

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**DynamicCache().__dict__, "layers": list(self.layers)}
        return copyreg._reconstructor, (DynamicCache, object, None), state  # type: ignore[attr-defined]


def active_step(cache: Any) -> Any:
    """Return the decode step that runs on the pages of ``cache``, or ``None``."""
    return cache.step if isinstance(cache, PagedCache) else None
