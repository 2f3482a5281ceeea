"""Which figures of :mod:`systems_figures` stand at which item of docs/systems.md, and what they are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from systems_caches import capacity, fp8_cache
from systems_figures import (
    Found,
    _against,
    _beside,
    _lost,
    _taken,
    block_products,
    capture,
    compiled,
    crossover,
    decode,
    deepseek,
    drafts,
    edge,
    first_tokens,
    flashmla,
    gated,
    groups,
    in_turns,
    narrow_rows,
    nvfp4,
    pages,
    pauses,
    quantiser,
    rotations,
    schedules,
    several_shapes,
    shared_experts,
    suite,
    switched,
    tensor_cores,
    three_axes,
    tuned_weights,
    weights_alone,
)


@dataclass(frozen=True)
class Figure:
    """A figure of an item: what of, the evidence it becomes, and how it is found."""

    item: int
    what: str
    evidence: str
    find: Callable[[], Found]


CHOSEN = "off by default (`torch_compile=None`): who asks for it reads here what it does"
BEHIND = "`auto` takes sgl_kernel's product where that is installed; without it, ours is what there is"
IN_TURNS = "`auto` takes what `fastlayers tune` found fastest when it timed all in turns; these were timed later"
UNUSED = "latent attention has `torch.bmm` for bf16 and this layer for codes; who asks it for bf16 may name `torch`"
NO_BENCH = "no bench of its own: tests say that a step waits for nothing, and nobody timed what waiting would cost"
FIGURES = (
    Figure(5, "decode over an FP8 cache", "performance/mla.jsonl#fp8_math=True", fp8_cache),
    Figure(5, "what an FP8 cache holds", "slice_h200.jsonl#float8_e4m3fn", capacity),
    Figure(7, "FlashMLA with several new tokens a request", "flashmla_h200.jsonl#flashmla_us", flashmla),
    Figure(10, "queries written in place, not copied", "ablation_h200.jsonl#absorbed queries written in place",
           lambda: switched("absorbed queries")),
    Figure(11, "the way that is chosen", "mla_paths_h200.jsonl#chosen", crossover),
    Figure(13, "a layer's time, which is no TTFT, of 512 tokens behind 32,768", "mla_paths_h200.jsonl#page", pages),
    Figure(13, "first token behind a cached prefix", "prefix_first_token_h200.jsonl#first token", first_tokens),
    Figure(14, "one product, not two", "ablation_h200.jsonl#q_a and kv_a in one product",
           lambda: switched("q_a and kv_a")),
    Figure(18, "rotation, launched dependently, beside peers launched plainly", "performance/small_ops.jsonl#rotary",
           rotations),
    Figure(19, "rotation by three axes; vision tower", "systems_h200.jsonl#three axes", three_axes),
    Figure(20, "norms side by side", "ablation_h200.jsonl#norms of q and latent on two streams",
           lambda: switched("norms of q and latent")),
    Figure(21, "steps that wait for nothing", "gpu_suite.json#passed", lambda: _beside(suite(), NO_BENCH)),
    Figure(22, "decode without a threshold", "performance/gqa.jsonl#a key head", tensor_cores),
    Figure(24, "router, beside peers, FlashInfer's launched dependently as well", "performance/small_ops.jsonl#router",
           lambda: several_shapes("router")),
    Figure(25, "ladder of 257 experts", "tuned/fused_moe/E=257,k=9,D=7168,I=256,fp8_block,silu,device_name=H200.json",
           shared_experts),
    Figure(25, "the shared expert among the routed", "ablation_h200.jsonl#shared expert among the routed",
           lambda: switched("shared expert")),
    Figure(26, "int8 and weights alone, tuned", "weight_only_h200.jsonl#w4a16", tuned_weights),
    Figure(26, "linears of weights alone", "weight_only_h200.jsonl#weight_only_linear",
           lambda: weights_alone("weight_only_linear")),
    Figure(26, "experts of weights alone", "weight_only_h200.jsonl#fused_moe", lambda: weights_alone("fused_moe")),
    Figure(27, "routed factor in the sum", "ablation_h200.jsonl#routed factor in the sum over experts",
           lambda: switched("routed factor in the sum")),
    Figure(28, "routed factor in the gate", "ablation_h200.jsonl#factor in the gate",
           lambda: switched("factor in the gate")),
    Figure(32, "scales written as they are read", "systems_h200.jsonl#scales", schedules),
    Figure(32, "at the edge of a schedule", "products_h200.jsonl#top 1", edge),
    Figure(35, "NVFP4's quantisation", "systems_h200.jsonl#nvfp4", nvfp4),
    Figure(37, "products by blocks", "performance/fp8_linear.jsonl#deep_gemm",
           lambda: _lost(block_products(), IN_TURNS)),
    Figure(40, "activation that writes FP8 rows", "gated_h200.jsonl#one_us", gated),
    Figure(41, "group quantisation, divided exactly", "performance/small_ops.jsonl#group_quant", quantiser),
    Figure(42, "FP8 by token and channel", "products_h200.jsonl#fp8_scaled_linear",
           lambda: _taken("products_h200.jsonl", "fp8_scaled_linear", "sgl_kernel")),
    Figure(42, "our own kernel beside it", "products_h200.jsonl#fp8_scaled_linear",
           lambda: _lost(_against("products_h200.jsonl", "fp8_scaled_linear", "sgl_kernel"), BEHIND)),
    Figure(43, "products by blocks, beside FlashInfer's", "performance/fp8_linear.jsonl#flashinfer",
           lambda: _lost(block_products("flashinfer"), IN_TURNS)),
    Figure(44, "absorbed products in a step", "ablation_h200.jsonl#absorbed products",
           lambda: switched("absorbed products")),
    Figure(44, "beside deep_gemm's masked grouped product", "products_h200.jsonl#deep_gemm",
           lambda: _against("products_h200.jsonl", "bmm", "deep_gemm")),
    Figure(45, "absorbed products in a step", "ablation_h200.jsonl#absorbed products",
           lambda: switched("absorbed products")),
    Figure(46, "absorbed products in a step", "ablation_h200.jsonl#absorbed products",
           lambda: switched("absorbed products")),
    Figure(46, "batched products of FP8 with one scale", "products_h200.jsonl#bmm",
           lambda: _against("products_h200.jsonl", "bmm", "sgl_kernel")),
    Figure(46, "batched products of bf16", "products_h200.jsonl#bmm", lambda: _lost(_taken(
        "products_h200.jsonl", "bmm", "torch", lambda row: "format='none'" in row["cfg"]), UNUSED)),
    Figure(47, "int8 products", "products_h200.jsonl#int8_linear",
           lambda: _taken("products_h200.jsonl", "int8_linear", "sgl_kernel")),
    Figure(47, "our own kernel beside it", "products_h200.jsonl#int8_linear",
           lambda: _lost(_against("products_h200.jsonl", "int8_linear", "sgl_kernel"), BEHIND)),
    Figure(50, "rows in FP8 between ranks", "two_gpus_exchange_h200.jsonl#gather_fp8_us", narrow_rows),
    Figure(53, "attention groups beside ranks", "two_gpus_slice_h200.jsonl#decode_groups", groups),
    Figure(54, "captured steps", "ablation_h200.jsonl#captured steps", lambda: switched("captured steps")),
    Figure(55, "small operators compiled", "torch_compile_h200.jsonl#torch_compile",
           lambda: _lost(compiled(), CHOSEN)),
    Figure(60, "two batches in turns", "two_gpus_overlap_h200.jsonl#two_batch", in_turns),
    Figure(58, "a chain of 10,000 dependent launches", "gpu_suite.json#passed", suite),
    Figure(56, "capture of all buckets", "performance/capture.jsonl#frozen", capture),
    Figure(61, "drafts of the NextN layer, captured", "drafts_h200.jsonl#mtp", drafts),
    Figure(63, "whole steps", "performance/generate.jsonl#gpt_oss_20b", lambda: decode("gpt_oss_20b")),
    Figure(64, "whole steps", "performance/generate.jsonl#qwen3_30b_a3b", lambda: decode("qwen3_30b_a3b", "qwen3_8b")),
    Figure(65, "a collection between tokens", "pauses.json#full_collection_ms", pauses),
    Figure(62, "DeepSeek-V3, six layers at real widths", "slice_h200.jsonl#prefill", deepseek),
)  # fmt: skip
