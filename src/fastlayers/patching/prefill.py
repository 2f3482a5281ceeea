"""Which prompts of ``generate`` are replayed, and how they are brought into a graph's static tensors.

Rows lie one behind the other without their padding, and are padded together to a bucket of tokens. A bucket is captured
when its second prompt comes: whoever generates once does not wait for a capture. Prompts that are not replayed run as
before; the driver counts why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastlayers.attention.buckets import LATENT_TOKENS, TOKENS, ExtendBuckets
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.paged import CacheStore, PagedCache
from fastlayers.patching.step import ExtendStep

# What a step takes besides ids, positions and the cache; anything else that is set runs uncaptured.
KNOWN_INPUTS = {
    "input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "logits_to_keep", "return_dict",
}  # fmt: skip
# Rows that the runs before a capture of decode write beyond the step's own.
SLACK = 8


class ExtendKey(NamedTuple):
    """Name of a graph: that of the store whose rows it writes, the bucket's tokens, and whether rows are padded."""

    batch: int
    capacity: int
    serial: int
    tokens: int
    padded: bool


class Prefills:
    """The policy for one patched model.

    Parameters
    ----------
    layers : sequence of modules
        The attention layers. Where they attend in chunks, a replay's prompts are no longer than one.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        most = LATENT_TOKENS if any(isinstance(layer, FastMLA) for layer in layers) else TOKENS[-1]
        self.tokens = tuple(size for size in TOKENS if size <= most)
        chunks = (getattr(layer, "_fl_chunk", lambda: None)() for layer in layers)
        self.chunk = min((size for size in chunks if size is not None), default=None)

    def replay(self, driver: Any, cache: PagedCache, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return logits ``[B, 1, V]`` of replayed prompts, whose rows are cached then; ``None``: nothing was done.

        Parameters
        ----------
        driver : DecodeDriver
            Captures, counts why not, and runs the model on a step's static tensors.
        cache : PagedCache
            Empty.
        inputs : dict
            What the model is called with otherwise.
        """
        found = self._key(driver, cache, inputs)
        if isinstance(found, str):
            driver.uncaptured[found] += 1
            return None
        key, starts = found
        store = cache.lease.store
        assert store is not None
        for layer in cache.layers:
            layer.take_pages()
        device = cache.layers[0].device
        graphs, step = driver.graphs_on(device), step_of(store, key, device, driver.core)
        step.cache = cache
        try:
            if key not in graphs:
                driver.chain(step)
                words = f"cuda_graph: prompts of {key.tokens} tokens run uncaptured"
                if not driver.capture_step(key, driver.run(step), words):
                    driver.uncaptured[driver.broken[driver.kind_of(key)]] += 1
                    return None
                driver.keep(store, key)
            step.plan(inputs["input_ids"], inputs["position_ids"], starts)
            logits: torch.Tensor = graphs.replay(key)
        finally:
            step.cache = None
        driver.prefills.add_(1)
        for layer in cache.layers:
            layer.filled(inputs["input_ids"].shape[1])
        return logits.view(store.batch, 1, -1)

    def _key(self, driver: Any, cache: PagedCache, inputs: dict[str, Any]) -> tuple[ExtendKey, list[int]] | str:
        """Return the graph of these prompts and where rows begin, or why they run as before."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        given = (name for name, value in inputs.items() if value is not None and value is not False)
        other = [name for name in given if name not in KNOWN_INPUTS]
        if other:
            return f"the step takes {', '.join(sorted(other))}"
        if ids is None or ids.dim() != 2 or positions is None or positions.shape[1:] != ids.shape[1:]:
            return "no ids and positions of one number a token were given"
        if torch.is_grad_enabled() or torch.is_autocast_enabled(ids.device.type):
            return "gradients or autocast are on"
        batch, length = ids.shape
        starts = starts_of(inputs.get("attention_mask"), batch, length)
        if isinstance(starts, str):
            return starts
        if self.chunk is not None and length - min(starts) > self.chunk:
            return f"longer than the {self.chunk} tokens of an attention's chunk"
        store = cache.lease.bind(batch)
        if length + SLACK > store.capacity:
            return "the cache is too short"
        key = self._bucket(driver, store, len(cache.layers), starts, length)
        return key if isinstance(key, str) else (key, starts)

    def _bucket(self, driver: Any, store: CacheStore, layers: int, starts: list[int], length: int) -> ExtendKey | str:
        """Return the graph of prompts of which row b begins at ``starts[b]``, or why there is none."""
        batch = store.batch
        buckets = ExtendBuckets(self.tokens, (batch,))
        bucket = buckets.bucket_of(batch * length - sum(starts), batch)
        if isinstance(bucket, str):
            return bucket
        key = ExtendKey(*store.key, bucket.tokens, any(starts))
        kind = driver.kind_of(key)
        if kind in driver.broken or kind not in driver.wanted or len(store.layers) < layers:
            first = f"the first prompts of {bucket.tokens} tokens, batch {batch}, capacity {store.capacity}"
            return str(driver.missing(kind, first))
        return key


def starts_of(mask: torch.Tensor | None, batch: int, length: int) -> list[int] | str:
    """Return where each row of prompts begins, or why that cannot be said; waits for the device."""
    if mask is None:
        return [0] * batch
    if mask.dim() != 2 or mask.shape != (batch, length):
        return "an attention mask that is not one number a token"
    seen = mask != 0
    first = length - seen.sum(-1)
    left = (seen == (torch.arange(length, device=mask.device) >= first[:, None])).all()
    found: list[int] = torch.cat((first, left[None].long())).tolist()
    if not found.pop():
        return "an attention mask with gaps, or padding on the right"
    return "a row without tokens" if max(found) == length else found


def step_of(store: CacheStore, key: ExtendKey, device: torch.device, core: str) -> ExtendStep:
    """Return the static tensors of a graph."""
    name = key.tokens, key.padded
    if name not in store.extends:
        store.extends[name] = ExtendStep(key.batch, key.capacity, key.tokens, key.padded, device, core)
    step: ExtendStep = store.extends[name]
    return step


def why_not(cache: Any, config: Any, kwargs: dict[str, Any]) -> str:
    """Return why a prompt's call of ``_prefill`` runs as before, whatever its tokens are, or ""."""
    if not isinstance(cache, PagedCache):
        return "another cache"
    if cache.unfit or not cache.capture:
        return cache.unfit or "disable_compile=True"
    if config.prefill_chunk_size is not None or kwargs.get("inputs_embeds") is not None or cache.get_seq_length():
        return "prompts in chunks, or embedded ones"
    return ""
