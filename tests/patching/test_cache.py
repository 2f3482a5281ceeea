"""The latent cache layers hold what Hugging Face's hold, through every operation that a cache knows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

import fastlayers as fl
from fastlayers.patching.cache import LatentLayer, adopt, latent_rows

sys.path.insert(0, str(Path(__file__).parent))
from test_contracts import close
from tiny import build, prompt

RANK, ROPE = 6, 4


def states(batch: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 1, length, RANK, generator=generator),
        torch.randn(batch, 1, length, ROPE, generator=generator),
    )


OPERATIONS: dict[str, Callable[[Any], None]] = {
    "crop": lambda layer: layer.crop(-3),
    "crop_nothing": lambda layer: layer.crop(0),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat_and_select": lambda layer: (
        layer.batch_repeat_interleave(2),
        layer.batch_select_indices(torch.tensor([5, 0, 2])),
    ),
    "reset": lambda layer: layer.reset(),
    "offload": lambda layer: (layer.offload(), layer.prefetch()),
    "rebound_outside": lambda layer: (
        setattr(layer, "keys", layer.keys.flip(0)),
        setattr(layer, "values", layer.values.flip(0)),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_leave_what_the_stock_layer_holds(operation: str) -> None:
    layers: list[Any] = [DynamicLayer(), LatentLayer()]
    for step, length in enumerate((300, 1, 30, 1, 200)):
        results = [layer.update(*states(3, length, step)) for layer in layers]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        if step in (0, 1, 3):
            for layer in layers:
                OPERATIONS[operation](layer)
            for name in ("keys", "values"):
                wanted, given = (getattr(layer, name) for layer in layers)
                # Newer versions drop the tensors in reset, older ones zero them.
                assert given is None if wanted is None else torch.equal(given, wanted)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
    rows = layers[1].rows()
    assert rows is not None and torch.equal(rows, torch.cat((layers[0].keys, layers[0].values), -1)[:, 0])


def test_a_step_writes_one_row_and_growth_is_geometric() -> None:
    layer = LatentLayer()
    layer.update(*states(2, 400, 0))
    addresses = set()
    for step in range(2000):
        layer.update(*states(2, 1, step))
        assert layer.buffer is not None
        addresses.add((layer.buffer.data_ptr(), layer.buffer.shape[2]))
    assert len({capacity for _, capacity in addresses}) <= 8
    assert layer.buffer is not None and layer.buffer.shape[2] % 64 == 0
    pages = layer.pages()
    assert pages is not None and pages.data_ptr() == layer.buffer.data_ptr()


def test_crop_keeps_the_buffer() -> None:
    layer = LatentLayer()
    layer.update(*states(2, 100, 0))
    assert layer.buffer is not None
    address = layer.buffer.data_ptr()
    for step in range(20):
        layer.update(*states(2, 5, step))
        layer.crop(-4)
        assert layer.buffer is not None and layer.buffer.data_ptr() == address
    assert layer.get_seq_length() == 120


def test_deepcopy_stays_linked_and_independent() -> None:
    layer = LatentLayer()
    layer.update(*states(2, 10, 0))
    other = copy.deepcopy(layer)
    assert other.buffer is not None and layer.buffer is not None
    assert other.buffer.data_ptr() != layer.buffer.data_ptr()
    kept = layer.keys.clone()
    other.update(*states(2, 1, 1))
    assert torch.equal(layer.keys, kept) and other.get_seq_length() == 11
    rows = other.rows()
    assert rows is not None and torch.equal(rows[..., :RANK], other.keys[:, 0])


def test_a_cache_made_in_inference_mode_can_be_used_outside() -> None:
    layer = LatentLayer()
    with torch.inference_mode():
        keys, _ = layer.update(*states(2, 10, 0))
    with torch.no_grad():
        again, _ = layer.update(*states(2, 1, 1))
    assert again.shape[2] == 11 and torch.equal(again[:, :, :10], keys)


def test_gradients_go_through_the_stock_way() -> None:
    layer = LatentLayer()
    keys, values = states(2, 5, 0)
    layer.update(keys.requires_grad_(), values.requires_grad_())
    out, _ = layer.update(*states(2, 1, 1))
    out.sum().backward()
    assert keys.grad is not None and bool((keys.grad == 1).all())


def test_a_wrong_batch_is_an_error_as_before() -> None:
    layer = LatentLayer()
    layer.update(*states(3, 5, 0))
    with pytest.raises(RuntimeError):
        layer.update(*states(1, 1, 1))


def test_only_empty_stock_layers_are_adopted() -> None:
    cache = DynamicCache()
    cache.update(*states(2, 3, 0), 0)
    adopt(cache, 0)
    adopt(cache, 2)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicLayer, LatentLayer]

    class Mine(DynamicLayer):
        pass

    cache.layers[1] = Mine()
    adopt(cache, 1)
    assert type(cache.layers[1]) is Mine
    static = StaticCache(config=build("v3").config, max_cache_len=32)
    adopt(static, 1)
    assert all(type(layer) is StaticLayer for layer in static.layers)
    cache.layers[1], cache.offloading = DynamicLayer(), True
    adopt(cache, 1)
    assert type(cache.layers[1]) is DynamicLayer


def test_rows_of_any_cache() -> None:
    cache = DynamicCache()
    keys, values = cache.update(*states(2, 3, 0), 0)
    assert torch.equal(latent_rows(cache, 0, keys, values), torch.cat((keys, values), -1)[:, 0])
    assert latent_rows(None, 0, keys, values).shape == (2, 3, RANK + ROPE)
    adopt(cache, 1)
    keys, values = cache.update(*states(2, 3, 1), 1)
    rows = latent_rows(cache, 1, keys, values)
    assert rows.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("first", ["stock", "patched"])
@torch.inference_mode()
def test_stock_and_patched_code_share_a_cache(first: str) -> None:
    model = build("v3")
    inputs = prompt(2, 50)["input_ids"]
    wanted = model(inputs).logits[:, 40:]
    report = fl.patch(model) if first == "patched" else None
    out = model(inputs[:, :40], use_cache=True)
    found = []
    for step in range(40, 50):
        if step == 45:
            if report is not None:
                fl.unpatch(model)
            else:
                fl.patch(model)
        out = model(inputs[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    assert close(torch.cat(found, 1), wanted)
