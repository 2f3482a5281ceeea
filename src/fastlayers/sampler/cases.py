"""The sampler's cases, inputs and cost."""

from __future__ import annotations

from typing import Any

import torch

from fastlayers.registry.spec import Case, Cost, LayerSpec, zero_rows
from fastlayers.sampler.layer import RowParams, SamplerConfig


def _case(
    name: str,
    batch: int,
    vocab: int,
    mode: str,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    special: bool = False,
    small: bool = True,
    seeds: str = "row",
) -> Case:
    shape = {"batch": batch, "mode": mode, "dtype": dtype, "padding": padding, "special": special}
    return Case(name, SamplerConfig(vocab, seeds), shape, small)


CASES = (
    _case("flat_filtered", 8, 512, "filtered"),
    _case("greedy_ties", 5, 300, "greedy", torch.bfloat16),
    _case("sampled_odd", 12, 97, "sampled", torch.float16),
    _case("filtered_ties_strided", 6, 130, "filtered", torch.bfloat16, padding=6),
    _case("nan_and_inf", 6, 40, "filtered", special=True),
    _case("two_blocks", 2, 4100, "filtered"),
    # Half of a row's logits are equal: no bracket of thresholds is small.
    _case("flat_ties", 3, 9000, "filtered"),
    # One token survives, so the ids are the same whatever the generator.
    _case("one_kept", 10, 600, "filtered", seeds="batch"),
    _case("one_token", 2, 1, "filtered"),
    _case("empty", 0, 64, "filtered"),
    _case("deepseek_v3", 64, 129280, "filtered", small=False),
    _case("one_kept_qwen3", 10, 151936, "filtered", torch.bfloat16, small=False, seeds="batch"),
    _case("qwen3", 64, 151936, "filtered", torch.bfloat16, small=False),
    _case("qwen3_sampled", 64, 151936, "sampled", torch.bfloat16, small=False),
    _case("qwen3_greedy", 256, 151936, "greedy", torch.bfloat16, small=False),
)


def make_inputs(case: Case, device: torch.device, seed: int) -> dict[str, Any]:
    """Rows mix greedy and every combination of filters; offsets differ, and seeds use all 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    batch, vocab, shape = case.shape["batch"], case.cfg.vocab_size, case.shape
    # Flat logits: one token more or less in the kept set moves most draws.
    scale = 0.5 if case.name.startswith("flat") else 3.0
    x = scale * torch.randn(batch, vocab + shape["padding"], generator=generator).to(shape["dtype"])
    if "ties" in case.name:
        x = x.round()
    if shape["special"]:
        nan, inf = float("nan"), float("inf")
        for index, values in enumerate(([nan, 1.0], [-inf, nan], [inf, 0.0], [-0.0, 0.0], [-inf, -1e30])):
            x[index] = torch.tensor(values).repeat(-(-x.shape[1] // 2))[: x.shape[1]]
        x[5, 3] = nan
    row = torch.arange(batch)
    if case.name.startswith("one_kept"):
        x[row, x.argmax(-1)] += 4.0
    drawn = torch.full((batch,), shape["mode"] != "greedy")
    greedy = (row % 5).eq(4) | ~drawn
    filtered = torch.full((batch,), shape["mode"] == "filtered")
    options = {
        "temperature": torch.where(greedy, 0.0, 0.3 + 0.2 * (row % 7)).float(),
        "top_k": torch.where((row % 2).eq(0), 1 + (row * 7) % 5, 0).int() * filtered,
        "top_p": torch.where((row % 3).lt(2) & filtered, 0.95 - 0.1 * (row % 6), 1.0).float(),
        "min_p": torch.where((row % 4).eq(3) & drawn, 0.3, 0.0).float(),
        "seed": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        "offset": torch.randint(2**40, (batch,), generator=generator),
    }
    if case.name.startswith("one_kept"):
        _keep_one(options, row % 5)
    tensors = {name: value.to(device) for name, value in options.items()}
    return {"logits": x.to(device)[:, :vocab], "mode": shape["mode"], **tensors}


def _keep_one(options: dict[str, torch.Tensor], way: torch.Tensor) -> None:
    """Let greedy search, top-k, top-p, min-p or a low temperature leave one token, turn by turn."""
    options["temperature"] = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.01])[way]
    options["top_k"] = way.eq(1).int()
    options["top_p"] = torch.where(way.eq(2), 1e-6, 1.0).float()
    options["min_p"] = way.eq(3).float()


def call(impl: Any, inputs: dict[str, Any], context: Any) -> Any:
    """Draw one token a row."""
    rows = RowParams(*(inputs[name] for name in RowParams._fields))
    return impl(inputs["logits"], rows, inputs["mode"])


def run(impl: Any, inputs: dict[str, Any], context: Any) -> dict[str, torch.Tensor]:
    """Draw twice, so that offsets must advance; ids and offsets are exact."""
    first = call(impl, inputs, context)
    return {"ids": first, "again": call(impl, inputs, context), "offset": inputs["offset"]}


def cost(case: Case) -> Cost:
    """Memory bound: the logits once; drawing reads them again, and thresholds take two passes more."""
    values, logits = case.shape["batch"] * case.cfg.vocab_size, case.shape["dtype"].itemsize
    passes = {"greedy": 1, "sampled": 2, "filtered": 4}[case.shape["mode"]]
    return Cost(30.0 * values * (passes > 1) + values, float(values * logits), float(values * logits * passes))


def examples(layer: Any, count: int) -> list[tuple[Any, ...]]:
    """Return the layer's arguments for so many requests, in each mode."""
    from fastlayers.sampler.layer import MODES, SamplingState

    logits = zero_rows(layer, count, layer.cfg.vocab_size)
    state = SamplingState(count, logits.device)
    return [(logits, state.view(count), mode) for mode in MODES]


def at_tokens(shape: dict[str, Any], cfg: Any, tokens: int, context: int) -> dict[str, Any]:
    """Return a case's shape with another number of requests."""
    return shape | {"batch": tokens}


SPEC = LayerSpec(
    CASES,
    make_inputs,
    run,
    cost,
    mutates=("offset",),
    call=call,
    examples=examples,
    at_tokens=at_tokens,
    counts_requests=True,
)
