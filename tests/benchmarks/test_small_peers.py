"""Packages' small kernels as peers, on the CPU: stand-ins compute what the packages document, judged as on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers import device as device_module
from fastlayers.device import DESCRIBED
from fastlayers.errors import FastlayersError
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.registry import registry
from fastlayers.testing.spec import spec_of
from fastlayers.tuning.bench import check_peer, rows_of
from fastlayers.tuning.clock import clock_for
from fastlayers.tuning.samples import Option
from fastlayers.tuning.search import Bench
from fastlayers.tuning.sweep import case_at, parse_shape

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import small_kernels
import small_peers

CPU, H200, A100 = torch.device("cpu"), DESCRIBED["H200"], DESCRIBED["A100"]
Calls = list[str]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, pdl: Any = None) -> None:
    residual += x
    x.copy_(norm(residual, weight, eps))


def rotate(x: torch.Tensor, rows: torch.Tensor, neox: bool) -> torch.Tensor:
    c, s = rows.float()[:, None].chunk(2, -1)
    pairs = x.float().chunk(2, -1) if neox else (x.float()[..., ::2], x.float()[..., 1::2])
    turned = (pairs[0] * c - pairs[1] * s, pairs[1] * c + pairs[0] * s)
    return (torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)).to(x.dtype)


def append(values: list[torch.Tensor], caches: list[torch.Tensor], requests: Any, positions: Any, *pages: Any) -> None:
    """What flashinfer's indices mean: a request's pages, and places in them."""
    indices, ends, last = pages
    assert all(tensor.dtype == torch.int32 for tensor in (requests, positions, *pages)) and len(last) == len(ends) - 1
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        for value, cache in zip(values, caches, strict=True):
            page, place = divmod(position, cache.shape[1])
            cache[indices[ends[request] + page], place] = value[row]


def sgl(calls: Calls) -> SimpleNamespace:
    """sgl_kernel's operators."""

    def rotary_embedding(positions: Any, q: Any, k: Any, size: int, table: torch.Tensor, neox: bool) -> None:
        assert table.dtype == q.dtype and size == q.shape[-1]
        q.copy_(rotate(q, table[positions], neox))
        k.copy_(rotate(k, table[positions], neox))

    def merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
        total = torch.logaddexp(lse_a, lse_b)  # NaN in rows that a side did not see, as the kernel gives
        lse.copy_(total)
        o.copy_((lse_a - total).exp()[..., None] * o_a + (lse_b - total).exp()[..., None] * o_b)

    def topk(weights: Any, ids: Any, scores: torch.Tensor, choice: torch.Tensor, renormalize: bool) -> None:
        ids.copy_(choice.topk(ids.shape[1]).indices)
        found = scores.gather(-1, ids.long())
        weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)

    def align(ids: Any, places: int, block: int, pairs: Any, owners: Any, total: Any, sums: Any, *flags: bool) -> None:
        assert flags == (True, False) and len(sums) == places + 1 and len(pairs) == block * len(owners)
        pairs.fill_(ids.numel())
        end = 0
        for expert in range(places - 1):
            found = (ids.flatten() == expert).nonzero().flatten().flip(0)  # in another order than ours
            pairs[end : end + len(found)] = found.int()
            begin, end = end, end + -(-len(found) // block) * block
            owners[begin // block : end // block] = expert
        total.fill_(end)

    def quantise(y: Any, q: Any, s: torch.Tensor, group: int, eps: float, *more: Any) -> None:
        assert more == (-448.0, 448.0, False, False, None)
        groups = y.float().unflatten(-1, (-1, group))
        s.copy_(groups.abs().amax(-1).clamp_min(eps) / 448.0)
        q.copy_((groups / s[..., None]).flatten(-2).to(q.dtype))

    found: dict[str, Callable[..., Any]] = {
        "rmsnorm": lambda y, x, weight, eps, pdl: y.copy_(norm(x, weight, eps)),
        "fused_add_rmsnorm": add_norm,
        "gemma_rmsnorm": lambda y, x, weight, eps, pdl: y.copy_(norm(x, weight + 1, eps)),
        "gemma_fused_add_rmsnorm": lambda x, residual, weight, eps, pdl: add_norm(x, residual, weight + 1, eps),
        "silu_and_mul": lambda y, x: y.copy_(torch.nn.functional.silu(x[:, : y.shape[1]].float()) * x[:, y.shape[1] :]),
        "sgl_per_token_group_quant_8bit_v2": quantise, "rotary_embedding": rotary_embedding, "merge_state_v2": merge,
        "topk_softmax": lambda w, i, x, again, cap, bias: topk(w, i, x.softmax(-1), x, again),
        "topk_sigmoid": lambda w, i, x, again, bias: topk(w, i, x.sigmoid(), x.sigmoid() + bias, again),
        "moe_align_block_size": align,
    }  # fmt: skip

    def noted(name: str) -> SimpleNamespace:
        def call(*operands: Any) -> None:
            calls.append(f"{name}, dependent" if name.endswith("rmsnorm") and operands[-1] is True else name)
            found[name](*operands)

        return SimpleNamespace(default=call)

    return SimpleNamespace(**{name: noted(name) for name in found})


def flashinfer(calls: Calls) -> dict[str, dict[str, Callable[..., Any]]]:
    """flashinfer's functions by module."""

    def rope(positions: Any, q: Any, k: Any, size: int, table: torch.Tensor, is_neox: bool) -> Any:
        assert table.dtype == torch.float32 and size == q.shape[-1]
        return rotate(q, table[positions], is_neox), rotate(k, table[positions], is_neox)

    def merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
        assert o_a.shape[1] * o_a.shape[2] * o_a.element_size() // 16 <= 1024  # threads of a block
        total = torch.logaddexp2(lse_a, lse_b)
        o = torch.exp2(lse_a - total)[..., None] * o_a + torch.exp2(lse_b - total)[..., None] * o_b
        return o.to(o_a.dtype), total

    def route(
        x: Any, bias: Any, groups: int, kept: int, k: int, factor: float, weights: Any, ids: Any, **_: Any
    ) -> None:
        shape = {"num_groups": groups, "topk_groups": kept, "correction_bias": True, "scaling_factor": factor}
        own = registry("router").named("torch").load()(RouterConfig(x.shape[1], k, "sigmoid", **shape))
        for mine, theirs in zip((weights, ids), own(x, bias, None), strict=True):
            mine.copy_(theirs.flip(-1))  # in another order

    def softmax(x: torch.Tensor, temperature: torch.Tensor, enable_pdl: bool) -> torch.Tensor:
        return (x.float() / temperature[:, None]).softmax(-1)

    def top_k(probs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        assert k.dtype == torch.int32 and int(k.min()) > 0
        ranked = probs.sort(-1, descending=True).values
        return probs.masked_fill(probs < ranked.gather(-1, k.long()[:, None] - 1), 0.0)

    def top_p(probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        ranked, order = probs.sort(-1, descending=True)
        outside = (ranked.cumsum(-1) - ranked) >= p[:, None] * ranked.sum(-1, keepdim=True)
        return probs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)

    def draw(probs: torch.Tensor, min_p: Any, *, seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        assert len(seed) == len(offset) == 1
        kept = probs >= min_p[:, None] * probs.amax(-1, keepdim=True)
        return torch.multinomial(probs.masked_fill(~kept, 0.0), 1)[:, 0].int()

    def both(probs: Any, k: Any, p: Any, filter_apply_order: str, **seeds: Any) -> torch.Tensor:
        assert filter_apply_order == "joint"
        return draw(top_p(top_k(probs, k), p), torch.zeros(len(probs)), **seeds)

    def silu_and_mul(x: torch.Tensor, out: torch.Tensor, enable_pdl: bool) -> None:
        sgl([]).silu_and_mul.default(out, x)

    found: dict[str, dict[str, Callable[..., Any]]] = {
        "flashinfer": {
            "rmsnorm": lambda x, weight, eps, enable_pdl: norm(x, weight, eps), "silu_and_mul": silu_and_mul,
            "fused_add_rmsnorm": lambda x, residual, weight, eps, enable_pdl: add_norm(x, residual, weight, eps),
        },
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache": rope},
        "flashinfer.page": {
            "append_paged_kv_cache": lambda k, v, r, p, caches, *pages: append([k, v], list(caches), r, p, *pages),
            "append_paged_mla_kv_cache": lambda a, b, r, p, x, y, *pages: append([a, b], [x, y], r, p, *pages),
        },
        "flashinfer.cascade": {"merge_state": merge},
        "flashinfer.fused_moe": {"fused_topk_deepseek": route},
        "flashinfer.sampling": {
            "softmax": softmax, "top_k_renorm_probs": top_k, "top_p_renorm_probs": top_p,
            "min_p_sampling_from_probs": draw, "top_k_top_p_sampling_from_probs": both,
        },
    }  # fmt: skip

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any, **named: Any) -> Any:
            dependent = named.get("enable_pdl") or named.get("launch_with_pdl")
            calls.append(f"{name}, dependent" if dependent else name)
            return function(*operands, **named)

        return call

    return {module: {name: noted(name, f) for name, f in functions.items()} for module, functions in found.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins are installed; returns the names of the functions called, in order."""
    noted: Calls = []
    operators = sgl(noted)
    monkeypatch.setattr(small_kernels, "ops", lambda: operators)
    for name, functions in flashinfer(noted).items():
        module = ModuleType(name)
        module.__dict__.update(functions | {"gemma_rmsnorm": None, "gemma_fused_add_rmsnorm": None})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(device_module, "missing", lambda needs, load: None)
    return noted


V3 = "num_experts=64,top_k=4,scoring=sigmoid,num_groups=4,topk_groups=2,correction_bias=True,apply_scaling=False"
V3_WRITE = "num_heads=4,num_kv_heads=1,head_dim=64,v_head_dim=512,rotary_dim=64,interleaved_in=True,latent=True"
GQA_WRITE = "num_heads=4,num_kv_heads=2,head_dim=64,v_head_dim=64,rotary_dim=64"
# Layer, configuration, peer, the functions it calls.
WORK = [
    ("rms_norm", "D=128,rounding=scale_then_cast,dtype=bfloat16", "sgl_kernel in place", ["fused_add_rmsnorm"]),
    ("rms_norm", "D=128,rounding=one_plus,dtype=bfloat16", "sgl_kernel in place", ["gemma_fused_add_rmsnorm"]),
    ("rms_norm", "D=128,dtype=bfloat16", "flashinfer in place", ["fused_add_rmsnorm"]),
    ("silu_mul", "size=64,dtype=bfloat16", "flashinfer", ["silu_and_mul"]),
    ("rms_norm", "D=128,dtype=bfloat16", "flashinfer in place, PDL", ["fused_add_rmsnorm, dependent"]),
    ("rms_norm", "D=128,dtype=bfloat16", "sgl_kernel in place, PDL", ["fused_add_rmsnorm, dependent"]),
    ("silu_mul", "size=64,dtype=bfloat16", "flashinfer, PDL", ["silu_and_mul, dependent"]),
    (
        "silu_mul_quant", "size=256,scale_layout=col_tma4", "sgl_kernel (2 launches)",
        ["silu_and_mul", "sgl_per_token_group_quant_8bit_v2"],
    ),
    ("rotary", "head_dim=64,rotary_dim=64,interleaved_in=True", "sgl_kernel in place", ["rotary_embedding"]),
    ("rotary", "head_dim=64,rotary_dim=64,interleaved_in=True", "flashinfer", ["apply_rope_with_cos_sin_cache"]),
    ("rotary", "head_dim=64,rotary_dim=64", "flashinfer", ["apply_rope_with_cos_sin_cache"]),
    (
        "rotary_kv_write", V3_WRITE, "flashinfer (2 launches)",
        ["apply_rope_with_cos_sin_cache", "append_paged_mla_kv_cache"],
    ),
    (
        "rotary_kv_write", GQA_WRITE, "flashinfer (2 launches)",
        ["apply_rope_with_cos_sin_cache", "append_paged_kv_cache"],
    ),
    ("kv_write", "num_kv_heads=2,head_dim=64,v_head_dim=64", "flashinfer", ["append_paged_kv_cache"]),
    ("mla_kv_write", "kv_lora_rank=512,rope_dim=64", "flashinfer", ["append_paged_mla_kv_cache"]),
    ("merge_state", "head_dim=128", "sgl_kernel", ["merge_state_v2"]),
    ("merge_state", "head_dim=128", "flashinfer", ["merge_state"]),
    ("router", V3, "flashinfer", ["fused_topk_deepseek"]),
    ("router", V3, "flashinfer, PDL", ["fused_topk_deepseek, dependent"]),
    ("router", "num_experts=16,top_k=4", "sgl_kernel", ["topk_softmax"]),
    ("router", "num_experts=16,top_k=4,scoring=sigmoid,correction_bias=True", "sgl_kernel", ["topk_sigmoid"]),
    ("moe_align", "num_experts=9,block=4", "sgl_kernel", ["moe_align_block_size"]),
    (
        "sampler", "vocab_size=600,seeds=batch", "flashinfer (4 launches)",
        2 * ["softmax", "top_k_renorm_probs", "top_p_renorm_probs", "min_p_sampling_from_probs"],
    ),
    (
        "sampler", "vocab_size=600,seeds=batch", "flashinfer (4 launches), PDL",
        2 * ["softmax, dependent", "top_k_renorm_probs", "top_p_renorm_probs", "min_p_sampling_from_probs"],
    ),
    (
        "sampler", "vocab_size=600,seeds=batch", "flashinfer (no min-p)",
        2 * ["softmax", "top_k_top_p_sampling_from_probs"],
    ),
]  # fmt: skip


def bench_of(layer: str, shape: str) -> Bench:
    cfg = parse_shape(layer, shape)
    return Bench(layer, cfg, CPU, clock_for(CPU), peers=small_peers.small_peers(layer, cfg, H200))


@pytest.mark.parametrize(("layer", "shape", "name", "expected"), WORK)
def test_a_peer_computes_the_layer_with_its_package_in_its_best_form(
    layer: str, shape: str, name: str, expected: list[str], calls: Calls
) -> None:
    bench = bench_of(layer, shape)
    case = case_at(layer, bench.cfg, 10)
    assert check_peer(bench, Option(name), case) < 0.04
    assert calls == expected


def test_a_peer_writes_rotated_queries_where_they_belong(calls: Calls) -> None:
    """As at real sizes, where absorbed queries leave room for them: the package's rotation gives new tensors."""
    layer = "rotary_kv_write"
    (case,) = (case for case in spec_of(layer).cases if case.name == "into")
    bench = Bench(layer, case.cfg, CPU, clock_for(CPU), peers=small_peers.small_peers(layer, case.cfg, H200))
    assert case.shape["into"] and check_peer(bench, Option("flashinfer (2 launches)"), case) < 0.04
    assert calls == ["apply_rope_with_cos_sin_cache", "append_paged_mla_kv_cache"]


@pytest.mark.parametrize("layer", sorted({work[0] for work in WORK}))
def test_what_a_kernel_computes_wrongly_is_seen(layer: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do nothing, or give the zeros of new tensors: however a peer is judged, that must show."""
    shape, name = next((work[1], work[2]) for work in reversed(WORK) if work[0] == layer)
    bench = bench_of(layer, shape)
    idle = SimpleNamespace(default=lambda *operands: None)
    names = vars(sgl([]))
    monkeypatch.setattr(small_kernels, "ops", lambda: SimpleNamespace(**dict.fromkeys(names, idle)))
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    for module, functions in flashinfer([]).items():
        for function in functions:
            monkeypatch.setattr(sys.modules[module], function, nothing_of(function))
    with pytest.raises(FastlayersError, match=layer):
        check_peer(bench, Option(name), case_at(layer, bench.cfg, 10))


def nothing_of(function: str) -> Callable[..., Any]:
    """What a function that launches nothing returns."""
    made: dict[str, Callable[..., Any]] = {
        "apply_rope_with_cos_sin_cache": lambda positions, q, k, *rest, **_: (q.clone(), k.clone()),
        "merge_state": lambda o, lse, *rest: (o.clone(), lse.clone()),
        "softmax": lambda x, *rest, **_: x, "top_k_renorm_probs": lambda x, k: x, "top_p_renorm_probs": lambda x, p: x,
        "min_p_sampling_from_probs": lambda x, *rest, **_: torch.zeros(len(x), dtype=torch.int32),
        "top_k_top_p_sampling_from_probs": lambda x, *rest, **_: torch.zeros(len(x), dtype=torch.int32),
    }  # fmt: skip
    return made.get(function, lambda *operands, **named: None)


def test_peers_are_timed_beside_the_backends_and_indices_are_made_once(calls: Calls) -> None:
    bench = bench_of("kv_write", "num_kv_heads=2,head_dim=64,v_head_dim=64")
    with torch.inference_mode():  # as the operands are made
        rows = rows_of(bench, case_at("kv_write", bench.cfg, 3), 3, rounds=3)
    assert {(row["backend"], row.get("peer", False)) for row in rows} == {("torch", False), ("flashinfer", True)}
    made: list[tuple[Any, ...]] = []
    derived = small_kernels.Derived(lambda *operands: made.append(operands) or len(made))
    first, second = torch.ones(2), torch.ones(2)
    assert [derived(first), derived(first), derived(second), derived(second, first)] == [1, 1, 2, 3]


def test_absent_packages_and_shapes_that_a_kernel_does_not_take_have_no_peers(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {layer: set(bench_of(layer, shape).peers) for layer, shape, _, _ in WORK}
    assert found["router"] == {"sgl_kernel", "flashinfer", "flashinfer, PDL"} and found["rms_norm"] == {
        "sgl_kernel in place", "sgl_kernel in place, PDL", "flashinfer in place", "flashinfer in place, PDL",
    }  # fmt: skip
    before = {layer: set(small_peers.small_peers(layer, parse_shape(layer, shape), A100)) for layer, shape, *_ in WORK}
    assert not any("PDL" in name for names in before.values() for name in names) and before["rms_norm"]
    for layer, changes, why in (
        ("rms_norm", {"dtype": torch.float32}, "float32"),
        ("silu_mul_quant", {"scale_fmt": "ue8m0"}, "ue8m0"),
        ("rotary", {"interleaved_out": True, "interleaved_in": False}, "pairs"),
        ("rotary", {"head_dim": 80, "rotary_dim": 64, "mrope_section": ()}, "80"),
        ("rotary_kv_write", {"qk_norm": 1e-6, "latent": False}, "norm"),
        ("rotary_kv_write", {"v_head_dim": 256, "latent": True, "num_kv_heads": 1, "qk_norm": None}, "256 + 64"),
        ("kv_write", {"kv_dtype": torch.float8_e4m3fn}, "float8"),
        ("mla_kv_write", {"kv_lora_rank": 256}, "256"),
        ("router", {"num_experts": 512, "num_groups": 8, "topk_groups": 4}, "384"),
    ):  # fmt: skip
        cfg = replace(spec_of(layer).cases[-2].cfg, **changes)
        for row in small_peers.PEERS[layer]:
            if (layer, row.name) != ("router", "sgl_kernel"):
                assert why in str(row.refusal(cfg, H200))
    assert small_peers.small_peers("fp8_linear", None, H200) == {}
    cpu = DESCRIBED["cpu"]
    assert all(row.refusal(bench_of(*work[:2]).cfg, cpu) for work in WORK for row in small_peers.PEERS[work[0]])
    monkeypatch.setattr(device_module, "missing", lambda needs, load: f"{needs[0]} is not installed")
    assert all(bench_of(layer, shape).peers == {} for layer, shape, _, _ in WORK)
