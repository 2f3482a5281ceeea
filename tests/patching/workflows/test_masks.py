"""Attention masks of a patched model: what the caller gives, what layers and hooks see, and what padding becomes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlayers as fl
from fastlayers.patching import gqa

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_contracts import close
from tiny import build, prompt

FAMILIES = ["v3", "qwen3", "gpt_oss", "llama"]


def pair(name: str, attn: str = "eager", **changes: Any) -> tuple[Any, Any, Any]:
    stock = build(name, attn=attn, **changes)
    fast = copy.deepcopy(stock)
    return stock, fast, fl.patch(fast)


@torch.no_grad()
def same(stock: Any, fast: Any, *args: Any, **options: Any) -> bool:
    wanted, given = (model(*args, **options).logits for model in (stock, fast))
    return close(given, wanted)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", ["argument", "config", "module"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_is_causal_means_what_it_means_to_stock(name: str, attn: str, way: str) -> None:
    if name == "gpt_oss" and attn == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    stock, fast, report = pair(name, attn)
    ids, options = prompt(2, 30)["input_ids"], {}
    with torch.no_grad():
        causal = stock(ids).logits
    for model in (stock, fast):
        if way == "config":
            model.config.is_causal = False
        elif way == "module":
            for layer in model.model.layers:
                layer.self_attn.is_causal = False
        else:
            options = {"is_causal": False}
    assert same(stock, fast, ids, **options)
    with torch.no_grad():
        changed = not close(stock(ids, **options).logits, causal, 1e-3)
    assert changed or (attn == "eager" and way != "config"), "stock itself ignores it there"
    if name != "v3":
        assert min(report.hits().values()) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_called_without_a_mask_sees_what_stock_sees(name: str) -> None:
    for attn in ("eager", "sdpa") if name != "gpt_oss" else ("eager",):
        stock, fast, report = pair(name, attn)
        x = torch.randn(2, 9, 64)
        table = stock.model.rotary_emb(x, position_ids=torch.arange(9)[None])
        outs = [
            m.model.layers[0].self_attn(hidden_states=x, position_embeddings=table, attention_mask=None)[0].detach()
            for m in (stock.requires_grad_(False), fast.requires_grad_(False))
        ]
        assert close(outs[1], outs[0]) and report.hits()["model.layers.0.self_attn"] == 1


class Watching(nn.Module):
    """Somebody's attention around a stock one: keeps what it is handed."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(kwargs["attention_mask"])
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_patch_left_alone_get_stocks_masks(name: str) -> None:
    stock = build(name, attn="eager")
    for model in (stock,):
        model.model.layers[0].self_attn = Watching(model.model.layers[0].self_attn)
    fast = copy.deepcopy(stock)
    fl.patch(fast, exclude="model.layers.0.self_attn*")
    inputs = prompt(2, 20, pads=(0, 4))
    assert same(stock, fast, **inputs)
    wanted, given = (model.model.layers[0].self_attn.seen[0] for model in (stock, fast))
    assert wanted.is_floating_point() and given.dtype == wanted.dtype and torch.equal(given, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_that_add_to_the_mask_do(name: str) -> None:
    stock, fast, report = pair(name)
    bias = 2.0 * torch.randn(20, 20)

    def add(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": kwargs["attention_mask"] + bias}

    inputs = prompt(2, 20)
    with torch.no_grad():
        plain = stock(**inputs).logits
    for model in (stock, fast):
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
    assert same(stock, fast, **inputs)
    with torch.no_grad():
        assert not close(fast(**inputs).logits, plain, 1e-3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_eager_attention_adds_masks_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    stock, fast, report = pair(name, **({"sliding_window": 64} if name == "gpt_oss" else {}))
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    if dtype.is_floating_point:
        mask = torch.zeros(2, 1, 20, 20, dtype=dtype).masked_fill(~seen, -1e4)
    else:
        mask = (3 * seen).to(dtype).expand(2, 1, 20, 20)
    assert same(stock, fast, prompt(2, 20)["input_ids"], attention_mask=mask)
    assert not any(report.fallbacks().values())


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_at_padding_are_stocks(name: str, attn: str) -> None:
    if name == "gpt_oss" and attn == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    stock, fast, report = pair(name, attn)
    assert same(stock, fast, **prompt(3, 30, pads=(0, 5, 17)))
    assert min(report.hits().values()) > 0


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_at_padding_under_autocast(name: str, attn: str) -> None:
    if name == "gpt_oss" and attn == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    stock, fast, _ = pair(name, attn)
    inputs = prompt(3, 30, pads=(0, 5, 17))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted, given = (model(**inputs).logits for model in (stock, fast))
    assert close(given, wanted, 3e-2) and wanted.dtype == given.dtype == torch.bfloat16
    assert same(stock, fast, **inputs)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_arguments_that_stock_ignores_are_ignored(name: str, attn: str) -> None:
    stock, fast, _ = pair(name, attn)
    ids = prompt(2, 20)["input_ids"]
    assert same(stock, fast, ids, softcap=2.0)
    if name == "llama":
        assert same(stock, fast, ids, s_aux=torch.randn(4))


@pytest.mark.parametrize("argument", ["dropout", "scaling"])
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "v3"])
def test_arguments_that_stock_refuses_are_refused(name: str, argument: str) -> None:
    for model in pair(name, "eager")[:2]:
        with pytest.raises(TypeError, match=f"multiple values for .*{argument}"), torch.no_grad():
            model(prompt(2, 20)["input_ids"], **{argument: 0.5})


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["v3", "llama"])
def test_attention_weights_asked_for_by_the_configuration(name: str, attn: str) -> None:
    stock, fast, _ = pair(name, attn)
    ids = prompt(1, 12)["input_ids"]
    found = []
    for model in (stock, fast):
        try:
            model.config.output_attentions = True
        except ValueError as error:
            found.append(str(error))
            continue
        with torch.no_grad():
            found.append(model(ids).attentions)
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        assert len(found[0]) == len(found[1]) > 0
        assert all(close(g, w) for g, w in zip(found[1], found[0], strict=True) if w is not None)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hook_that_reads_attention_weights_gets_them(name: str) -> None:
    stock, fast, report = pair(name)
    sums: list[torch.Tensor] = []
    for model in (stock, fast):
        model.model.layers[0].self_attn.register_forward_hook(lambda m, a, output: sums.append(output[1].sum(-1)))
    assert same(stock, fast, **prompt(2, 12))
    assert close(sums[1], sums[0])
    assert report.fallbacks()["model.layers.0.self_attn"] == 1
    assert "attention weights are asked for" in report.summary()


@pytest.mark.parametrize("kind", ["bool", "float", "biased"])
@pytest.mark.parametrize("sinks", [True, False])
def test_blocks_of_queries_see_what_the_whole_mask_shows(
    monkeypatch: pytest.MonkeyPatch, sinks: bool, kind: str
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 50, 8) for heads in (4, 2, 2))
    seen = torch.ones(50, 50, dtype=torch.bool).tril().triu(-9).expand(2, 1, 50, 50).clone()
    seen[1, :, :30, :4] = False
    mask = seen
    if kind != "bool":
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        mask = mask + torch.randn(50, 50) if kind == "biased" else mask
    sink = torch.randn(4) if sinks else None
    products: list[int] = []
    right = gqa.product
    monkeypatch.setattr(gqa, "product", lambda a, b: products.append(a.shape[1] * b.shape[2]) or right(a, b))
    whole = gqa._plain(q, k, v, mask, 0.3, sink, None)
    monkeypatch.setattr(gqa, "BLOCK", 7)
    before = sum(products)
    blocks = gqa._plain(q, k, v, mask, 0.3, sink, None)
    assert blocks.shape == whole.shape and close(blocks, whole, 1e-6)
    rows = seen.any(-1)[:, 0]
    assert bool((~rows).any())
    if kind == "float":
        assert sum(products) - before < 0.8 * before, "keys that nobody sees are not multiplied"
