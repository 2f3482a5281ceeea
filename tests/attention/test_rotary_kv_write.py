"""rotary_kv_write: equals the rotary layer followed by a write, both flavours; Hugging Face's layouts; errors."""

from __future__ import annotations

import pytest
import torch

import fastlayers as fl
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWrite, RotaryKVWriteConfig
from fastlayers.errors import ArgumentError

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("into", "out"), [(False, False), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rotary_dim", [16, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_rotary_then_write(backend: str, into: bool, out: bool, rotary_dim: int, dtype: torch.dtype) -> None:
    rotary = fl.RotaryEmbedding(16, max_position=50, interleaved_in=into, interleaved_out=out, rotary_dim=rotary_dim)
    write = RotaryKVWrite(
        4, 2, 16, 8, rotary_dim=rotary_dim, interleaved_in=into, interleaved_out=out, kv_dtype=dtype, backend=backend
    )  # fmt: skip
    q, k, v = (torch.randn(3, *size).to(dtype) for size in ((4, 16), (2, 16), (2, 8)))
    positions, loc = torch.tensor([49, 0, 7]), torch.tensor([9, 4, 11])
    cache = LayerCache(torch.zeros(3, 4, 2, 16, dtype=dtype), torch.zeros(3, 4, 2, 8, dtype=dtype))
    turned = write(q, k, v, rotary.cos, rotary.sin, positions, cache, loc)
    expected_q, expected_k = rotary(q, k, positions)
    assert cache.values is not None
    torch.testing.assert_close(turned.to(dtype), expected_q)
    torch.testing.assert_close(cache.keys.flatten(0, 1)[loc], expected_k)
    assert torch.equal(cache.values.flatten(0, 1)[loc], v)
    untouched = [slot for slot in range(12) if slot not in loc.tolist()]
    assert not cache.keys.flatten(0, 1)[untouched].any() and not cache.values.flatten(0, 1)[untouched].any()


@pytest.mark.parametrize("out", [False, True])
def test_latent_rows(out: bool) -> None:
    """V3 reads interleaved and writes half-split, V2 writes interleaved; scores do not depend on which."""
    rotary = fl.RotaryEmbedding(8, max_position=50, interleaved_in=True, interleaved_out=out)
    write = RotaryKVWrite(3, 1, 8, 6, interleaved_in=True, interleaved_out=out, latent=True, kv_dtype=torch.float32)
    q, k, latent = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 6)
    cache, positions, loc = LayerCache(torch.zeros(2, 4, 14)), torch.tensor([3, 30]), torch.tensor([6, 5])
    turned = write(q, k, latent, rotary.cos, rotary.sin, positions, cache, loc)
    expected_q, expected_k = rotary(q, k, positions)
    rows = cache.keys.flatten(0, 1)[loc]
    torch.testing.assert_close(turned, expected_q)
    assert torch.equal(rows[:, :6], latent[:, 0])
    torch.testing.assert_close(rows[:, 6:], expected_k[:, 0])


def test_v3_equals_v2_de_interleaved() -> None:
    q, k, latent = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 6)
    rotary, found = fl.RotaryEmbedding(8, max_position=50), {}
    for out in (False, True):
        write = RotaryKVWrite(3, 1, 8, 6, interleaved_in=True, interleaved_out=out, latent=True, kv_dtype=torch.float32)
        cache = LayerCache(torch.zeros(1, 2, 14))
        positions, loc = torch.tensor([3, 30]), torch.tensor([0, 1])
        turned = write(q, k, latent, rotary.cos, rotary.sin, positions, cache, loc)
        found[out] = (turned, cache.keys[0, :, 6:])
    for v3, v2 in zip(found[False], found[True], strict=True):
        assert torch.equal(v3, torch.cat([v2[..., 0::2], v2[..., 1::2]], -1)) and not torch.equal(v3, v2)


def test_key_is_rounded_to_the_models_dtype_before_the_caches() -> None:
    """bf16 1.0625 (halfway between two e4m3 codes, to even 1.0) comes from fp32 1.0634 (above the middle: 1.125)."""
    write = RotaryKVWrite(1, 1, 2, kv_dtype=FP8)
    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16)
    cache = LayerCache(torch.zeros(1, 1, 1, 2, dtype=FP8), torch.zeros(1, 1, 1, 2, dtype=FP8))
    cos, sin = torch.tensor([[1.0634]]), torch.zeros(1, 1)
    write(x, x, x, cos, sin, torch.tensor([0]), cache, torch.tensor([0]))
    assert cache.keys.flatten()[0].item() == 1.0


def test_errors_name_the_argument_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAYERS_DEBUG", "1")
    write = RotaryKVWrite(2, 1, 4, kv_dtype=torch.float32)
    q, k, cos = torch.ones(2, 2, 4), torch.ones(2, 1, 4), torch.ones(8, 2)
    positions, loc = torch.tensor([0, 1]), torch.tensor([1, 2])
    cache = LayerCache(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4))
    for call, words in (
        ((q[..., :2], k, k, cos, cos, positions, cache, loc), "RotaryKVWrite: q "),
        ((q, k.half(), k, cos, cos, positions, cache, loc), "RotaryKVWrite: k "),
        ((q, k, k[:1], cos, cos, positions, cache, loc), "RotaryKVWrite: v "),
        ((q, k, k, cos.half(), cos, positions, cache, loc), "RotaryKVWrite: cos "),
        ((q, k, k, cos, cos[:4], positions, cache, loc), "RotaryKVWrite: sin "),
        ((q, k, k, cos, cos, positions.int(), cache, loc), "RotaryKVWrite: positions "),
        ((q, k, k, cos, cos, positions + 7, cache, loc), r"positions is from 7 to 8; accepted: positions in \[0, 8\)"),
        ((q, k, k, cos, cos, positions, LayerCache(cache.keys), loc), "RotaryKVWrite: cache.values "),
        ((q, k, k, cos, cos, positions, cache, loc + 2), r"slots in \[0, 4\)"),
    ):
        with pytest.raises(ArgumentError, match=words):
            write(*call)
    assert cache.values is not None and not cache.keys.any() and not cache.values.any()
    with pytest.raises(ArgumentError, match="rotary_dim is 3"):
        RotaryKVWrite(1, 1, 4, rotary_dim=3)
    with pytest.raises(ArgumentError, match="num_kv_heads is 2; accepted: 1 with latent"):
        RotaryKVWrite(2, 2, 4, latent=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_three_axes_in_one_call_equal_norms_rotation_and_write(backend: str, interleaved: bool) -> None:
    section = (4, 2, 2)
    scaling = fl.rotary.scaling.RopeScaling("default", mrope_section=section, mrope_interleaved=interleaved)
    rotary = fl.RotaryEmbedding(16, max_position=50, scaling=scaling)
    norms = [fl.RMSNorm(16, 1e-5, dtype=torch.float32) for _ in "qk"]
    more = {"kv_dtype": torch.float32, "backend": backend}
    fused = RotaryKVWrite(4, 2, 16, qk_norm=1e-5, mrope_section=section, mrope_interleaved=interleaved, **more)
    q, k, v = torch.randn(3, 8, 16).split((4, 2, 2), 1)
    cache, loc = LayerCache(*torch.zeros(2, 3, 4, 2, 16)), torch.tensor([9, 4, 11])
    for positions in (torch.tensor([[3, 1, 49], [0, 7, 2], [30, 0, 5]]), torch.tensor([3, 1, 49])):
        turned = fused(q, k, v, rotary.cos, rotary.sin, positions, cache, loc, norms[0].weight, norms[1].weight)
        expected_q, expected_k = rotary(norms[0](q), norms[1](k), positions)
        torch.testing.assert_close(turned, expected_q)
        torch.testing.assert_close(cache.keys.flatten(0, 1)[loc], expected_k)


def test_axes_are_named_where_they_do_not_fit() -> None:
    x, cos, loc = torch.randn(2, 1, 8), torch.ones(4, 4), torch.tensor([0, 1])
    cache = LayerCache(*torch.zeros(2, 1, 2, 1, 8))
    write = RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32, mrope_section=(2, 1, 1))
    axes = torch.zeros(3, 2, dtype=torch.int64)
    write(x, x, x, cos, cos, axes, cache, loc)
    for wrong in (axes[:2], axes.t(), axes.int()):
        with pytest.raises(ArgumentError, match="RotaryKVWrite: positions "):
            write(x, x, x, cos, cos, wrong, cache, loc)
    with pytest.raises(ArgumentError, match="RotaryKVWrite: positions "):
        RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32)(x, x, x, cos, cos, axes, cache, loc)
    for section in ((2, 2), (2, 2, 1)):
        with pytest.raises(ArgumentError, match=r"mrope_section is .*; accepted: three counts that sum to 4"):
            RotaryKVWrite(1, 1, 8, mrope_section=section)
    for wrong in (x[:1], x.half(), x[..., :4]):
        with pytest.raises(ArgumentError, match="RotaryKVWrite: out "):
            write(x, x, x, cos, cos, loc, cache, loc, out=wrong)


def test_config_round_trips() -> None:
    cfg = RotaryKVWriteConfig(4, 1, 64, 512, 64, True, False, True, FP8)
    assert eval(repr(cfg)) == cfg


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_round_as_the_separate_layer(dtype: torch.dtype) -> None:
    """One launch gives the bits of RMSNorm, rotation and write one after the other."""
    norms = [fl.RMSNorm(16, 1e-5, dtype=dtype) for _ in "qk"]
    for norm in norms:
        torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    rotary = fl.RotaryEmbedding(16, max_position=50)
    fused = RotaryKVWrite(4, 2, 16, kv_dtype=dtype, qk_norm=1e-5, backend="torch")
    plain = RotaryKVWrite(4, 2, 16, kv_dtype=dtype, backend="torch")
    rows = torch.randn(3, 8, 16).to(dtype)
    q, k, v = rows.split((4, 2, 2), 1)  # strided, as a fused projection's parts are
    caches = [LayerCache(*torch.zeros(2, 3, 4, 2, 16, dtype=dtype)) for _ in range(2)]
    rest = (rotary.cos, rotary.sin, torch.tensor([49, 0, 7]))
    loc = torch.tensor([9, 4, 11])
    one = fused(q, k, v, *rest, caches[0], loc, norms[0].weight, norms[1].weight)
    several = plain(norms[0](q), norms[1](k), v, *rest, caches[1], loc)
    assert torch.equal(one, several) and torch.equal(caches[0].keys, caches[1].keys) and caches[0].keys.any()


def test_bad_norms() -> None:
    with pytest.raises(ArgumentError, match="qk_norm"):
        RotaryKVWriteConfig(3, 1, 8, 6, 8, latent=True, qk_norm=1e-6)
    x, cos, zero = torch.randn(1, 1, 8), torch.zeros(1, 4), torch.tensor([0])
    cache, weight = LayerCache(*torch.zeros(2, 1, 1, 1, 8)), torch.ones(8)
    normed = RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32, qk_norm=1e-6)
    for weights in ((), (weight,), (weight, weight[:4]), (weight.half(), weight)):
        with pytest.raises(ArgumentError, match="_weight"):
            normed(x, x, x, cos, cos, zero, cache, zero, *weights)
    with pytest.raises(ArgumentError, match="None without qk_norm"):
        RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32)(x, x, x, cos, cos, zero, cache, zero, weight, weight)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("bad", [4, -1])
def test_positions_outside_the_table_are_named_on_a_cpu_and_nothing_is_written(backend: str, bad: int) -> None:
    x, cos, loc = torch.randn(2, 1, 8), torch.ones(4, 4), torch.tensor([0, 1])
    cache = LayerCache(*torch.zeros(2, 1, 2, 1, 8))
    write = RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32, backend=backend)
    with pytest.raises(ArgumentError, match=r"RotaryKVWrite: positions is from .*; accepted: positions in \[0, 4\)"):
        write(x, x, x, cos, cos, torch.tensor([1, bad]), cache, loc)
    assert not cache.keys.any() and not cache.values.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("bad", [2, -1])
def test_slots_outside_the_cache_are_named_on_a_cpu(bad: int, trusted: bool) -> None:
    x, cos, loc = torch.randn(2, 1, 8), torch.ones(4, 4), torch.tensor([0, bad])
    cache = LayerCache(*torch.zeros(2, 1, 2, 1, 8))
    write = RotaryKVWrite(1, 1, 8, kv_dtype=torch.float32)
    write.trusted = trusted and bad > 0  # a slot below zero is never planned
    with pytest.raises(ArgumentError, match=r"RotaryKVWrite: loc is slots from .*; accepted: slots in \[0, 2\)"):
        write(x, x, x, cos, cos, torch.tensor([1, 0]), cache, loc)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("norm", "section"), [(None, ()), (1e-6, (4, 2, 2))])
def test_heads_may_lie_side_by_side(backend: str, norm: float | None, section: tuple[int, ...], trusted: bool) -> None:
    write = RotaryKVWrite(4, 2, 16, qk_norm=norm, mrope_section=section, kv_dtype=torch.bfloat16, backend=backend)
    write.trusted = trusted
    rotary = fl.RotaryEmbedding(16, max_position=50)
    # Rows that lie apart, and more of them in the second call: what was prepared for the first is not taken.
    for tokens in (3, 5, 3):
        qkv = torch.randn(tokens, 10, 16).to(torch.bfloat16)[:, :8]
        positions = torch.randint(0, 50, (3, tokens) if section and tokens == 3 else (tokens,))
        weights = [] if norm is None else [torch.randn(16).to(torch.bfloat16) for _ in "qk"]
        found = []
        for given in ((qkv, None, None), qkv.split((4, 2, 2), 1)):
            cache = LayerCache(*(torch.zeros(3, 4, 2, 16, dtype=torch.bfloat16) for _ in "kv"))
            loc = torch.tensor([9, 4, 11, 5, 6][:tokens])
            with torch.inference_mode() if tokens == 3 else torch.enable_grad():
                turned = write(*given, rotary.cos, rotary.sin, positions, cache, loc, *weights)
            found.append((turned, cache.keys, cache.values))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and found[0][1].any()


def test_heads_side_by_side_are_named_where_they_do_not_fit() -> None:
    write, cache = RotaryKVWrite(2, 1, 4, kv_dtype=torch.float32), LayerCache(*torch.zeros(2, 1, 1, 1, 4))
    rest = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([0]), cache, torch.tensor([0])
    with pytest.raises(ArgumentError, match=r"RotaryKVWrite: q is .*\[1, 3, 4\].*; accepted: .*4, 4\]"):
        write(torch.zeros(1, 3, 4), None, None, *rest)
    with pytest.raises(ArgumentError, match=r"RotaryKVWrite: v is .*; accepted: None, as the other one"):
        write(torch.zeros(1, 4, 4), None, torch.zeros(1, 1, 4), *rest)
    with pytest.raises(ArgumentError, match=r"RotaryKVWrite: k is .*; accepted: None, as the other one"):
        write(torch.zeros(1, 4, 4), torch.zeros(1, 1, 4), None, *rest)
