"""Small kernels of sgl_kernel and flashinfer that benchmarks time beside the backends, and that are no backends.

They write in place, leave the order of equals open, need index tensors of their own, or round elsewhere. A class here
is made and called like a backend's, with a package in its best form:

- in place where the package is: calls after the first, checked one then see other values, which takes as long
- what a step makes once for all layers (indices, tables, base-2 logarithms) is made at the first call and not timed
- those that can be launched dependently (``pdl``) are timed both ways: which is faster depends on what runs before

``judged(own, expected, inputs)``, where a class has it, returns what is compared of its outputs and the reference's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastlayers.activation.silu_mul.layer import SiluMulConfig
from fastlayers.activation.silu_mul_quant.layer import FLOOR, SiluMulQuantConfig
from fastlayers.attention.kv_write.layer import KVWriteConfig
from fastlayers.attention.mla_kv_write.layer import MLAKVWriteConfig
from fastlayers.attention.rotary_kv_write.layer import RotaryKVWriteConfig
from fastlayers.moe.align.layer import MoEAlignConfig
from fastlayers.moe.router.layer import RouterConfig
from fastlayers.norm.rms_norm.layer import RMSNormConfig
from fastlayers.quant.group_quant.layer import empty_scales
from fastlayers.rotary.layer import RotaryConfig
from fastlayers.sampler.layer import RowParams, SamplerConfig

Outputs = dict[str, torch.Tensor]
Judged = tuple[Outputs, Outputs]


def ops() -> Any:
    """Return sgl_kernel's operators."""
    importlib.import_module("sgl_kernel")  # registers the operators
    return torch.ops.sgl_kernel


class Derived:
    """What a call needs beside its operands, made by ``make`` from those and kept while they are the same tensors."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make, self.made = make, None
        self.operands: tuple[Any, ...] = ()

    def __call__(self, *operands: Any) -> Any:
        """Return what was made of these operands."""
        if len(operands) != len(self.operands) or any(a is not b for a, b in zip(operands, self.operands, strict=True)):
            self.operands, self.made = operands, self.make(*operands)
        return self.made


# ---- norms and activations -------------------------------------------------------------------------------------


class SglRMSNorm:
    """sgl_kernel's norm; with a residual in place: the sum in the residual, the norm in ``x``. Rounds once."""

    def __init__(self, cfg: RMSNormConfig, pdl: bool = False) -> None:
        package, one_plus = ops(), cfg.rounding == "one_plus"
        self.eps, self.pdl = cfg.eps, pdl
        self.plain = (package.gemma_rmsnorm if one_plus else package.rmsnorm).default
        self.fused = (package.gemma_fused_add_rmsnorm if one_plus else package.fused_add_rmsnorm).default

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``; with a residual these are the inputs."""
        if residual is None:
            y = torch.empty_like(x)
            self.plain(y, x, weight, self.eps, self.pdl)
            return y, None
        self.fused(x, residual, weight, self.eps, self.pdl)
        return x, residual


class FlashInferRMSNorm:
    """flashinfer's norm; with a residual in place, as sgl_kernel's. Rounds once."""

    def __init__(self, cfg: RMSNormConfig, pdl: bool = False) -> None:
        package, one_plus = importlib.import_module("flashinfer"), cfg.rounding == "one_plus"
        self.eps, self.pdl = cfg.eps, pdl
        self.plain = package.gemma_rmsnorm if one_plus else package.rmsnorm
        self.fused = package.gemma_fused_add_rmsnorm if one_plus else package.fused_add_rmsnorm

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(y, new_residual)``; with a residual these are the inputs."""
        if residual is None:
            return self.plain(x, weight, self.eps, enable_pdl=self.pdl), None
        self.fused(x, residual, weight, self.eps, enable_pdl=self.pdl)
        return x, residual


class FlashInferSiluMul:
    """flashinfer's activation, launched dependently; the other way is a backend."""

    def __init__(self, cfg: SiluMulConfig) -> None:
        self.activate = importlib.import_module("flashinfer").silu_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        y = x.new_empty(x.shape[0], x.shape[1] // 2)
        self.activate(x, out=y, enable_pdl=True)
        return y


class SglSiluMulQuant:
    """sgl_kernel's activation and its quantisation, one after the other: fused, it ignores the activation here."""

    def __init__(self, cfg: SiluMulQuantConfig) -> None:
        self.ops, self.cfg = ops(), cfg

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales."""
        cfg, rows = self.cfg, x.shape[0]
        y = x.new_empty(rows, cfg.size)
        self.ops.silu_and_mul.default(y, x)
        q = x.new_empty(y.shape, dtype=torch.float8_e4m3fn)
        s = empty_scales(x, rows, cfg.groups, cfg.scale_layout)
        self.ops.sgl_per_token_group_quant_8bit_v2.default(
            y, q, s, cfg.group_size, FLOOR, -448.0, 448.0, False, False, None
        )
        return q, s


# ---- rotary embedding and cache writes -------------------------------------------------------------------------


def _table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((cos, sin), -1)


def _halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` with the first ``dim`` values of its rows moved from pairs to halves."""
    return torch.cat((x[..., :dim:2], x[..., 1:dim:2], x[..., dim:]), -1)


class FlashInferRotary:
    """flashinfer's rotation into new tensors. Pairs stay where they were; as halves they are judged."""

    def __init__(self, cfg: RotaryConfig) -> None:
        self.rotate = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache
        self.cfg, self.table = cfg, Derived(_table)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both rotated."""
        found: tuple[torch.Tensor, torch.Tensor] = self.rotate(
            positions, q, k, self.cfg.head_dim, self.table(cos, sin), is_neox=not self.cfg.interleaved_in
        )
        return found

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return its outputs in the layer's order of dimensions."""
        if self.cfg.interleaved_in and not self.cfg.interleaved_out:
            own = {name: _halves(x, self.cfg.rotary_dim) for name, x in own.items()}
        return own, expected


class SglRotary(FlashInferRotary):
    """sgl_kernel's rotation, in place; its table has the dtype of ``q``."""

    def __init__(self, cfg: RotaryConfig) -> None:
        self.ops, self.cfg = ops(), cfg
        self.table = Derived(lambda cos, sin, q: _table(cos, sin).to(q.dtype))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs, rotated."""
        neox = not self.cfg.interleaved_in
        self.ops.rotary_embedding.default(positions, q, k, self.cfg.head_dim, self.table(cos, sin, q), neox)
        return q, k


def _pages(loc: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return flashinfer's indices: all pages belong to one request, in which a token's position is its slot."""
    pages, page_size = cache.shape[:2]
    requests = torch.zeros_like(loc, dtype=torch.int32)
    ends, last = (requests.new_tensor(values) for values in ([0, pages], [page_size]))
    return requests, loc.int(), torch.arange(pages, dtype=torch.int32, device=loc.device), ends, last


class FlashInferKVWrite:
    """flashinfer's append to a paged cache."""

    def __init__(self, cfg: KVWriteConfig) -> None:
        self.append, self.pages = importlib.import_module("flashinfer.page").append_paged_kv_cache, Derived(_pages)

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, loc: torch.Tensor
    ) -> None:
        """Write both."""
        requests, positions, *pages = self.pages(loc, k_cache)
        self.append(k, v, requests, positions, (k_cache, v_cache), *pages)


class FlashInferMLAKVWrite:
    """flashinfer's append to a paged latent cache, given as two views of ours."""

    def __init__(self, cfg: MLAKVWriteConfig | RotaryKVWriteConfig) -> None:
        self.append, self.pages = importlib.import_module("flashinfer.page").append_paged_mla_kv_cache, Derived(_pages)

    def __call__(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write both parts."""
        requests, positions, *pages = self.pages(loc, cache)
        rank = latent.shape[-1]
        self.append(latent, rope, requests, positions, cache[..., :rank], cache[..., rank:], *pages)


class FlashInferRotaryKVWrite:
    """flashinfer's rotation and its append: two launches. Pairs stay where they were; as halves they are judged."""

    def __init__(self, cfg: RotaryKVWriteConfig) -> None:
        pairing = (cfg.interleaved_in, cfg.interleaved_out)
        self.cfg, self.rotary = cfg, FlashInferRotary(RotaryConfig(cfg.head_dim, cfg.rotary_dim, *pairing))
        latent = cfg.latent
        self.write: Any = FlashInferMLAKVWrite(cfg) if latent else FlashInferKVWrite(writes_of(cfg))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, loc: torch.Tensor,
        q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write; return the rotated ``q``, copied into ``out``, which the rotation cannot write, if there is one."""
        q, k = self.rotary(q, k, cos, sin, positions)
        if out is not None:
            q = out.copy_(q)
        if self.cfg.latent:
            self.write(v[:, 0], k[:, 0], keys, loc)
        else:
            self.write(k, v, keys, values, loc)
        return q

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return of the keys only those that were written: the order of dimensions of others is the cache's."""
        page_size = inputs["keys"].shape[1]

        def written(found: Outputs) -> Outputs:  # page 0 is not among the outputs
            return found | {"k": found["k"].flatten(0, 1)[inputs["loc"].long() - page_size]}

        own, expected = written(own), written(expected)
        turned, expected_turned = self.rotary.judged({"q": own["q"], "k": own["k"]}, expected, inputs)
        return own | turned, expected_turned


def writes_of(cfg: RotaryKVWriteConfig) -> KVWriteConfig:
    """Return the writes of a layer that also rotates."""
    return KVWriteConfig(cfg.num_kv_heads, cfg.head_dim, cfg.v_head_dim, cfg.kv_dtype)


# ---- merging, routing, sampling --------------------------------------------------------------------------------


class SglMergeState:
    """sgl_kernel's merge. Judged where both sides saw a key: elsewhere it gives NaN, or what the other side holds."""

    def __init__(self, cfg: Any) -> None:
        self.ops = ops()

    def __call__(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``."""
        o, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
        self.ops.merge_state_v2.default(o_a, lse_a, o_b, lse_b, o, lse)
        return o, lse

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return both without the rows that a side did not see."""
        unseen = ~(inputs["lse_a"].isfinite() & inputs["lse_b"].isfinite())

        def seen(found: Outputs) -> Outputs:
            o, lse = found["o"], found["lse"]
            return {"o": o.masked_fill(unseen[..., None], 0.0), "lse": lse.masked_fill(unseen, 0.0)}

        return seen(own), seen(expected)


class FlashInferMergeState(SglMergeState):
    """flashinfer's merge of base-2 logarithms; heads in parts, as tokens, so that a block of all is launched."""

    # Of its block. A head's row takes one thread for every 16 bytes.
    THREADS = 512

    def __init__(self, cfg: Any) -> None:
        self.merge = importlib.import_module("flashinfer.cascade").merge_state
        self.base_2 = Derived(lambda *lse: tuple(x / math.log(2) for x in lse))

    def __call__(
        self, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(o, lse)``; ``lse`` to base 2."""
        heads, size = o_a.shape[1:]
        while heads % 2 == 0 and heads * size * o_a.element_size() > 16 * self.THREADS:
            heads //= 2
        lse_a, lse_b = self.base_2(lse_a, lse_b)
        o, lse = self.merge(
            o_a.view(-1, heads, size), lse_a.view(-1, heads), o_b.view(-1, heads, size), lse_b.view(-1, heads)
        )
        return o.view(o_a.shape), lse.view(lse_a.shape)

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return both without the rows that a side did not see, logarithms to base e."""
        return super().judged(own | {"lse": own["lse"] * math.log(2)}, expected, inputs)


class FlashInferRouter:
    """flashinfer's fused choice of DeepSeek-V3. Judged whatever the order of a token's experts."""

    def __init__(self, cfg: RouterConfig, pdl: bool = False) -> None:
        self.route = importlib.import_module("flashinfer.fused_moe").fused_topk_deepseek
        self.cfg, self.pdl = cfg, pdl

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(topk_weights, topk_ids)``."""
        cfg = self.cfg
        weights, ids = _chosen(logits, cfg)
        groups = cfg.num_groups, cfg.topk_groups
        self.route(logits, bias, *groups, cfg.top_k, cfg.factor, weights, ids, launch_with_pdl=self.pdl)
        return weights, ids

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return both by ascending id."""

        def by_id(found: Outputs) -> Outputs:
            ids, order = found["topk_ids"].sort(-1)
            return {"topk_ids": ids, "topk_weights": found["topk_weights"].gather(-1, order)}

        return by_id(own), by_id(expected)


class SglRouter(FlashInferRouter):
    """sgl_kernel's choice without groups."""

    def __init__(self, cfg: RouterConfig) -> None:
        self.ops, self.cfg = ops(), cfg
        self.renormalize = cfg.renormalize or cfg.scoring == "softmax_after_topk"

    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, num_valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(topk_weights, topk_ids)``."""
        weights, ids = _chosen(logits, self.cfg)
        if self.cfg.scoring == "sigmoid":
            self.ops.topk_sigmoid.default(weights, ids, logits, self.renormalize, bias)
        else:
            self.ops.topk_softmax.default(weights, ids, logits, self.renormalize, 0.0, None)
        return weights, ids


def _chosen(logits: torch.Tensor, cfg: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], cfg.top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


class SglMoEAlign:
    """sgl_kernel's alignment, with its place for ids that are filtered. Judged whatever the order in an expert."""

    def __init__(self, cfg: MoEAlignConfig) -> None:
        self.ops, self.cfg = ops(), cfg

    def __call__(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``(sorted_ids, expert_ids, num_post_pad)``."""
        pairs, places, block = topk_ids.numel(), self.cfg.num_experts + 1, self.cfg.block
        most = pairs * block if pairs < places else pairs + places * (block - 1)
        blocks = -(-most // block)
        sorted_ids, expert_ids, total, sums = (
            topk_ids.new_empty(size) for size in (blocks * block, blocks, 1, places + 1)
        )
        self.ops.moe_align_block_size.default(topk_ids, places, block, sorted_ids, expert_ids, total, sums, True, False)
        return sorted_ids, expert_ids, total

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return both up to ``num_post_pad``, each expert's pairs ascending."""

        def ascending(found: Outputs) -> Outputs:
            total = int(found["num_post_pad"])
            owners = found["expert_ids"][: total // self.cfg.block].long()
            pairs = found["sorted_ids"][:total].long()
            keys = (owners.repeat_interleave(self.cfg.block) << 32 | pairs).sort().values
            return {"num_post_pad": found["num_post_pad"], "expert_ids": owners, "sorted_ids": keys & 0xFFFFFFFF}

        return ascending(own), ascending(expected)


class FlashInferSampler:
    """flashinfer's four launches: softmax, top-k, top-p, and a draw with min-p from the first row's seed and counter.

    Greedy rows are rows of temperature 1 that keep one token. Counters stay: advancing them is not the kernels' part.
    """

    def __init__(self, cfg: SamplerConfig, pdl: bool = False) -> None:
        self.package, self.cfg, self.pdl = importlib.import_module("flashinfer.sampling"), cfg, pdl
        self.filters = Derived(self._filters)

    def _filters(self, temperature: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        greedy = temperature <= 0
        kept = torch.where((top_k > 0) & (top_k < self.cfg.vocab_size), top_k, self.cfg.vocab_size)
        return temperature.masked_fill(greedy, 1.0), kept.masked_fill(greedy, 1).int()

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return int32 ids."""
        temperature, top_k = self.filters(rows.temperature, rows.top_k)
        return self.draw(self.package.softmax(logits, temperature, enable_pdl=self.pdl), top_k, rows)

    def draw(self, probs: torch.Tensor, top_k: torch.Tensor, rows: RowParams) -> torch.Tensor:
        """Return ids drawn from ``probs``."""
        probs = self.package.top_p_renorm_probs(self.package.top_k_renorm_probs(probs, top_k), rows.top_p)
        ids: torch.Tensor = self.package.min_p_sampling_from_probs(
            probs, rows.min_p, seed=rows.seed[:1], offset=rows.offset[:1]
        )
        return ids

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return the ids alone: any token that its filters keep is right, as its random numbers are not ours."""
        kept = self.kept(inputs)
        right = {name: expected[name] for name in ("ids", "again")}
        drawn = {name: own[name].long() for name in right}
        good = {name: kept.gather(-1, ids[:, None])[:, 0] for name, ids in drawn.items()}
        return {name: torch.where(good[name], right[name], ids) for name, ids in drawn.items()}, right

    def kept(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return which tokens a row keeps, bool ``[B, V]``: top-k, then top-p of what is left, then min-p."""
        weight, ranked, smallest = self.ranked(inputs)
        ranked = ranked.masked_fill(ranked < smallest, 0.0)
        return self.likely(weight, ranked, smallest, inputs) & (weight >= inputs["min_p"][:, None] * ranked[:, :1])

    def ranked(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return fp64 probabilities, the same in descending order, and the smallest that top-k keeps ``[B, 1]``."""
        temperature, top_k = self.filters(inputs["temperature"], inputs["top_k"])
        weight = (inputs["logits"].double() / temperature[:, None]).softmax(-1)
        ranked = weight.sort(-1, descending=True).values
        return weight, ranked, ranked.gather(-1, top_k.long()[:, None] - 1)

    @staticmethod
    def likely(
        weight: torch.Tensor, ranked: torch.Tensor, smallest: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return which tokens have ``smallest``, and top-p of ``ranked``."""
        top_p, running = inputs["top_p"].double()[:, None], ranked.cumsum(-1)
        last = (running[:, :-1] < top_p * running[:, -1:]).sum(-1, keepdim=True)
        edge = torch.where(top_p < 1, ranked.gather(-1, last), 0.0)
        return (weight >= smallest) & (weight >= edge)


class FlashInferTopKTopP(FlashInferSampler):
    """flashinfer's two launches for batches without min-p: softmax, and a draw that filters. Such rows are judged."""

    def draw(self, probs: torch.Tensor, top_k: torch.Tensor, rows: RowParams) -> torch.Tensor:
        """Return ids drawn from ``probs``."""
        ids: torch.Tensor = self.package.top_k_top_p_sampling_from_probs(
            probs, top_k, rows.top_p, filter_apply_order="joint", seed=rows.seed[:1], offset=rows.offset[:1]
        )
        return ids

    def judged(self, own: Outputs, expected: Outputs, inputs: Mapping[str, Any]) -> Judged:
        """Return the ids of rows without min-p."""
        plain = inputs["min_p"] == 0
        own, expected = super().judged(own, expected, inputs)
        return {name: ids[plain] for name, ids in own.items()}, {name: ids[plain] for name, ids in expected.items()}

    def kept(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return which tokens a row keeps: both filters apply to the whole distribution."""
        return self.likely(*self.ranked(inputs), inputs)
