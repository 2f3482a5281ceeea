"""What a decode step takes on more GPUs than there are: a simulation of its stages, calibrated on two.

    a layer, split by    stages of every rank ("|": all ranks meet)
    tp                   attention | sum, norm | MLP or experts | sum, norm
    dp                   attention | gather | MLP or experts | scatter               rows of all groups
    dp, all-to-all       attention | dispatch | experts | combine                    rows to the experts that they chose

    compute    launches · launch_us + row_us · rows + max(weights / rate, operations / flops)
               + max(cached tokens / rate, operations on them / attention_flops)
               launches wait for each other, so a rank's share of a layer has as many of them as a whole layer; each
               halving of a weight's width takes ``narrow`` more of its bytes' time; of the rows' µs a part
               ``row_split`` is divided
    link       what two ranks took to send as many bytes each (linear between measured sizes); beyond one host
               also nic_us and bytes / nic_rate

Events: every rank has one compute unit and one link. A stage starts when its batch's last one is done and the unit is
free; a link's when the last rank arrives, so a rank with busier experts keeps all others waiting. With two batches
(``overlap``) one computes while the other's bytes are under way, and compute takes ``contention`` more meanwhile.

From one GPU and from pairs of two come all numbers but those of :class:`Assumed`, which are not ours. No step of
DeepSeek-V3's layers on two GPUs is among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist, linear_regression
from typing import Any

from fastlayers.errors import ArgumentError, check_choice
from fastlayers.moe.placement.planner import EplbConfig, first_placement, plan_placement

_NAME = "overlap_sim"


@dataclass(frozen=True)
class ModelSize:
    """What a step reads and computes; ``attention``: weights of one layer as (split by heads, on every rank).

    ``kernels`` names the measured model whose kernels it runs; ``launches``: of a (dense, MoE) layer of it at one
    request, beside those two norms or sums that a link's time holds.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: tuple[int, int]
    cache_bytes: int  # of one token in one layer
    cache_splits: bool  # by heads, over tp
    intermediate: int  # of dense layers
    dense_layers: int
    kernels: str
    launches: tuple[int, int]
    experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    shared_size: int = 0
    weight_bytes: int = 2
    most_tp: int = 8  # heads of keys and values, where the cache splits by them
    cache_operations: int = 0  # of all heads on one cached token in one layer, where bytes do not hide them


def _gqa(hidden: int, heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    return hidden * size * (2 * heads + 2 * kv_heads), 0


_MLA_HEADS = 128

MODELS: Mapping[str, ModelSize] = {
    "qwen3_8b": ModelSize(
        "Qwen3-8B", 36, 4096, 151936, _gqa(4096, 32, 8, 128), 4096, True, 12288, 36, "qwen3_8b", (7, 0)
    ),
    "qwen3_30b_a3b": ModelSize(
        "Qwen3-30B-A3B", 48, 2048, 151936, _gqa(2048, 32, 4, 128), 2048, True, 0, 0, "qwen3_30b_a3b", (0, 8),
        128, 8, 768, most_tp=4,
    ),
    # Four of a MoE layer's launches are the router's and the experts'; a dense layer has three instead.
    "deepseek_v3": ModelSize(
        "DeepSeek-V3", 61, 7168, 129280,
        (1536 * _MLA_HEADS * 192 + 512 * _MLA_HEADS * 256 + _MLA_HEADS * 128 * 7168, 7168 * (1536 + 576)),
        1152, False, 18432, 3, "deepseek_v3", (13, 14), 256, 8, 2048, 2048, 1, _MLA_HEADS,
        cache_operations=2 * _MLA_HEADS * (576 + 512),
    ),
}  # fmt: skip
# What was measured of it on one and two GPUs: eight MoE layers, when the kernels took more launches.
SLICE = replace(MODELS["deepseek_v3"], layers=8, dense_layers=0, launches=(0, 21))


@dataclass(frozen=True)
class Assumed:
    """Constants that nobody measured here: of a network between hosts, and of two kernels at once."""

    host: int = 8  # GPUs that NVLink connects
    nic_rate: float = 50e9
    nic_us: float = 9.0
    contention: float = 0.1
    memory: float = 141e9 * 0.9


Points = tuple[tuple[float, float], ...]  # (bytes that a rank sends, µs)
Widths = Mapping[int, Points]  # by hidden size


@dataclass(frozen=True)
class Calibration:
    """What was measured; see :func:`calibrate`."""

    rate: float  # bytes of HBM a second
    flops: Mapping[int, float]  # by bytes of a weight
    attention_flops: float  # of latent attention
    launch_us: Mapping[str, float]  # of a launch without a byte read, by ModelSize.kernels
    row_us: Mapping[str, float]
    narrow: Mapping[str, float]  # by how much a weight of half the width reads slower
    norm: Widths
    links: Mapping[str, Widths]  # sum, sum_nccl, two_shot, gather, scatter, dispatch, combine
    row_split: float = 0.0
    exchange_us: float = 0.0  # of groups, before each step
    assumed: Assumed = field(default_factory=Assumed)


@dataclass(frozen=True)
class Split:
    """How a model is split; ``way``: of MLP rows between groups, ``"gather"`` or ``"all_to_all"``."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    way: str = "gather"
    nccl: bool = False

    def __post_init__(self) -> None:
        check_choice("Split", "way", self.way, ("gather", "all_to_all"))
        if self.tp * self.dp % self.ep:
            raise ArgumentError("Split", "ep", self.ep, f"a divisor of tp * dp = {self.ranks}")

    @property
    def ranks(self) -> int:
        """GPUs."""
        return self.tp * self.dp

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in ("tp", "dp", "ep") if getattr(self, name) > 1]
        return ", ".join(parts) + (", all-to-all" if self.way == "all_to_all" else "") if parts else "one GPU"


@dataclass(frozen=True)
class Stage:
    """Work on one unit: µs of each rank; of a link all ranks meet before it."""

    unit: str
    us: tuple[float, ...]


def interpolate(widths: Widths, hidden: int, at: float) -> float:
    """Return the µs for ``at`` bytes, linear between sizes; beyond the last one at the last two sizes' rate.

    Of the hidden size that was measured and is nearest.
    """
    points = widths[min(widths, key=lambda width: abs(math.log(width / hidden)))]
    if at <= points[0][0]:
        return points[0][1]
    last = points[-2:]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(points) if at <= pair[1][0]), (last[0], last[1]))
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def link_us(found: Calibration, what: str, hidden: int, rows: float, ranks: int) -> float:
    """Return the µs of an exchange of bf16 ``rows`` of all ranks (``dispatch``, ``combine``: of each rank)."""
    if ranks == 1:
        return 0.0
    size = 2 * hidden * rows
    share = (ranks - 1) / ranks * size
    if what in ("dispatch", "combine"):
        share = (ranks - 1) * (1 - (1 - 1 / ranks) ** 8) * size  # a token goes once to each rank that it needs
    if what == "sum":
        ways = [("sum", (ranks - 1) * size), ("two_shot", 2 * share)]
        us = min(interpolate(found.links[way], hidden, sent) for way, sent in (ways[:1] if ranks == 2 else ways))
    else:
        us = interpolate(found.links[what], hidden, (2 * share) if what == "sum_nccl" else share)
    assumed = found.assumed
    if ranks > assumed.host:
        far = share * (ranks - assumed.host) / (ranks - 1)
        us += assumed.nic_us + far / assumed.nic_rate * 1e6
    return us


def expert_loads(model: ModelSize, zipf: float) -> list[float]:
    """Return the part of all pairs that each expert gets: equal, or falling as Zipf's law with that exponent."""
    # The busiest experts lie far from each other, as a trained router's do.
    weights = [1 / (1 + (e * 97) % model.experts) ** zipf for e in range(model.experts)]
    return [w / sum(weights) for w in weights]


def _experts_us(
    model: ModelSize, split: Split, tokens: float, found: Calibration, zipf: float, eplb: EplbConfig | None
) -> tuple[float, ...]:
    """Return the µs of each rank's experts for ``tokens`` of all groups."""
    loads = expert_loads(model, zipf)
    placement = first_placement(model.experts, model.experts)
    if eplb is not None:
        placement = first_placement(model.experts, eplb.slots(model.experts, split.ep))
        placement = plan_placement([round(load * 10**7) for load in loads], placement, split.ep, eplb)
    counts = [placement.count(e) for e in range(model.experts)]
    # No token takes an expert twice.
    chance = [min(1.0, model.top_k * load) for load in loads]
    each, inner = 3 * model.hidden * model.expert_size, split.ranks // split.ep
    unlucky = NormalDist().inv_cdf((split.ep - 0.375) / (split.ep + 0.25)) if split.ep > 1 else 0.0
    of_ranks, size = [], len(placement) // split.ep
    for rank in range(split.ep):
        held = placement[rank * size : (rank + 1) * size]
        hit = [1 - (1 - chance[e] / counts[e]) ** tokens for e in held]
        pairs = sum(tokens * chance[e] / counts[e] for e in held)
        # Of several ranks one is the busiest by chance, and all wait for it.
        active = min(len(held), sum(hit) + unlucky * math.sqrt(sum(p * (1 - p) for p in hit)))
        us = _work_us(found, model, inner, active * each / inner, 2 * pairs * each / inner)
        of_ranks += [us] * inner
    return tuple(of_ranks)


def _work_us(
    found: Calibration, model: ModelSize, parts: int, weights: float, operations: float, width: int = 0
) -> float:
    """Return the µs of one of ``parts`` that weights are divided into; ``width``: bytes of one, not the model's."""
    width = width or model.weight_bytes
    size = (1 + found.narrow[model.kernels] * math.log2(parts)) * weights * width
    return max(size / found.rate, operations / found.flops[width]) * 1e6


def _cached_us(found: Calibration, model: ModelSize, tp: int, tokens: float) -> float:
    """Return the µs of attention over so many cached tokens in one layer."""
    size = tokens * model.cache_bytes / (tp if model.cache_splits else 1)
    return max(size / found.rate, tokens * model.cache_operations / tp / found.attention_flops) * 1e6


def _fixed_us(found: Calibration, model: ModelSize, dense: bool, rows: float, ranks: int) -> float:
    """Return half of what a layer takes beside its bytes; ``ranks``: over which its work is divided."""
    launches = model.launches[0 if dense else 1] * found.launch_us[model.kernels]
    return (launches + found.row_us[model.kernels] * rows * (1 - found.row_split * (1 - 1 / ranks))) / 2


def layer_stages(
    model: ModelSize, split: Split, rows: float, context: int, found: Calibration, *, dense: bool, zipf: float = 0.0,
    eplb: EplbConfig | None = None,
) -> list[Stage]:  # fmt: skip
    """Return the stages of one layer; ``rows``: tokens of one attention group."""
    n = split.ranks
    per_head, everywhere = model.attention
    own = per_head / split.tp + everywhere
    attention = _work_us(found, model, split.tp, own, 2 * rows * own)
    attention += _cached_us(found, model, split.tp, rows * context) + _fixed_us(found, model, dense, rows, split.tp)
    tokens = rows * split.dp
    spread = model.intermediate if dense else model.shared_size
    inner = 3 * model.hidden * spread / n
    mlp = [_work_us(found, model, n, inner, 2 * tokens * inner) + _fixed_us(found, model, dense, tokens, n)] * n
    if not dense:
        routed = _experts_us(model, split, tokens, found, zipf, eplb)
        mlp = [a + b for a, b in zip(mlp, routed, strict=True)]
    norm = interpolate(found.norm, model.hidden, rows * model.hidden * 2)
    if split.dp == 1:
        ways, brought, less = ["sum_nccl" if split.nccl else "sum"] * 2, rows, norm if n == 1 else 0.0
    else:
        spread_out = split.way == "all_to_all" and not dense
        ways, less = ["dispatch", "combine"] if spread_out else ["gather", "scatter"], norm
        brought = rows if spread_out else tokens
    links = [less + link_us(found, way, model.hidden, brought, n) for way in ways]
    parts = ([attention] * n, [links[0]] * n, mlp, [links[1]] * n)
    units = ("compute", "link", "compute", "link")
    return [Stage(unit, tuple(us)) for unit, us in zip(units, parts, strict=True)]


def run(batches: Sequence[Sequence[Stage]], contention: float) -> float:
    """Return the µs until all batches are done; a stage of each is issued in turn, the later batch one stage behind."""
    ranks = len(batches[0][0].us)
    done = [[0.0] * ranks for _ in batches]
    free = {"compute": [0.0] * ranks, "link": [0.0] * ranks}
    slower = 1 + contention * (len(batches) > 1)
    for place in range(max(map(len, batches)) + len(batches) - 1):
        for number, stages in enumerate(batches):
            if not 0 <= place - number < len(stages):
                continue
            stage = stages[place - number]
            begin = [max(a, b) for a, b in zip(done[number], free[stage.unit], strict=True)]
            if stage.unit == "link":
                begin = [max(begin)] * ranks
            us = [each * (slower if stage.unit == "compute" else 1) for each in stage.us]
            free[stage.unit] = done[number] = [a + b for a, b in zip(begin, us, strict=True)]
    return max(max(each) for each in done)


def step_ms(
    model: ModelSize, split: Split, batch: int, found: Calibration, *, context: int = 88, overlap: bool = False,
    zipf: float = 0.0, eplb: EplbConfig | None = None,
) -> float:  # fmt: skip
    """Return the milliseconds of a decode step of ``batch`` requests in all, in as equal groups as can be."""
    rows = math.ceil(batch / split.dp)
    lanes = [rows / 2, rows / 2] if overlap else [rows]
    stages: list[list[Stage]] = []
    for mine in lanes:
        layers: list[Stage] = []
        for dense, count in ((True, model.dense_layers), (False, model.layers - model.dense_layers)):
            if count:
                layers += count * layer_stages(
                    model, split, mine, context, found, dense=dense, zipf=zipf, eplb=None if dense else eplb
                )
        stages.append(layers)
    # The head stays in bf16, and in the attention group.
    head = model.vocab * model.hidden / split.tp
    us = run(stages, found.assumed.contention) + _work_us(found, model, split.tp, head, 2 * rows * head, 2)
    return (us + (found.exchange_us if split.dp > 1 else 0.0)) / 1e3


def memory_bytes(model: ModelSize, split: Split, batch: int, context: int) -> float:
    """Return the bytes of weights and cached tokens of one rank."""
    per_head, everywhere = model.attention
    moe = model.layers - model.dense_layers
    weights = model.layers * (per_head / split.tp + everywhere)
    weights += 3 * model.hidden * (model.dense_layers * model.intermediate + moe * model.shared_size) / split.ranks
    weights += 3 * model.hidden * moe * model.experts * model.expert_size / split.ranks
    tokens = math.ceil(batch / split.dp) * context
    cached = tokens * model.layers * model.cache_bytes / (split.tp if model.cache_splits else 1)
    return weights * model.weight_bytes + 4 * model.vocab * model.hidden / split.tp + cached


def calibrate(
    decode: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], rate: float, flops: Mapping[int, float], *,
    slices: Iterable[Mapping[str, Any]], attention_flops: float, narrow: float,
) -> Calibration:  # fmt: skip
    """Return the :class:`Calibration` of committed results.

    Parameters
    ----------
    decode : rows of ``two_gpus_decode``
        Those of one GPU; those over symmetric memory with early starts, for :attr:`Calibration.narrow` of bf16 and
        :attr:`Calibration.row_split`; and two groups of one request, for what they exchange before a step.
    rows : rows of ``two_gpus_rows``
    rate : float
        Bytes a second of a copy in HBM.
    flops : mapping
        Operations a second of the experts' best kernel, by bytes of a weight.
    slices : rows of ``two_gpus_slice``
        Those of one GPU.
    attention_flops : float
        Operations a second of latent attention on one GPU.
    narrow : float
        :attr:`Calibration.narrow` of FP8, from one GPU; see :func:`narrow_of`.
    """
    kept = list(rows)

    def points(what: str, key: str, of: str = "rows", share: float = 1.0) -> Widths:
        found: dict[int, dict[float, float]] = {}
        for r in kept:
            if r.get("what") == what and key in r:
                width = r.get("hidden", 7168)
                found.setdefault(width, {})[r[of] * 2 * width * share] = r[key]
        return {width: tuple(sorted(each.items())) for width, each in found.items()}

    links = {
        "sum": points("sum_norm_time", "sum_norm_us"), "sum_nccl": points("sum_norm_time", "nccl_norm_us"),
        "two_shot": points("exchange_time", "scatter_norm_gather_us"),
        # Of rows of both ranks each sends half.
        "gather": points("exchange_time", "gather_us", share=0.5),
        "scatter": points("exchange_time", "scatter_us", share=0.5),
        "dispatch": points("tokens", "dispatch_us", "tokens"), "combine": points("tokens", "combine_us", "tokens"),
    }  # fmt: skip
    zero = dict.fromkeys(MODELS, 0.0)
    norm = points("sum_norm_time", "norm_us")
    found = Calibration(rate, flops, attention_flops, zero, zero, {**zero, "deepseek_v3": narrow}, norm, links)
    steps = list(decode)
    for name, model, measured in (
        *((name, MODELS[name], steps) for name in ("qwen3_8b", "qwen3_30b_a3b")), ("deepseek_v3", SLICE, slices),
    ):  # fmt: skip
        left = {
            r["batch"]: (r["device_ms"] - step_ms(model, Split(), r["batch"], found)) * 1e3 / model.layers
            for r in measured if r.get("what") == "decode" and r["model"].startswith(name) and r["ranks"] == 1
        }  # fmt: skip
        first, last = min(left), max(left)
        row = max(0.0, (left[last] - left[first]) / (last - first))
        launch = (left[first] - row * first) / max(model.launches)
        found = replace(found, launch_us={**found.launch_us, name: launch}, row_us={**found.row_us, name: row})
    found = _among_ranks(found, [r for r in steps if r.get("what") == "decode" and r.get("early")])
    groups = [r for r in steps if r.get("what") == "decode_groups" and r["requests"] == r["dp"]]
    for r in groups:
        split = Split(r["ranks"] // r["dp"], r["dp"], r["ep"])
        alone = step_ms(MODELS[r["model"]], split, r["requests"], found)
        found = replace(found, exchange_us=max(0.0, r["tpot_ms"] - alone) * 1e3)
    return found


def _among_ranks(found: Calibration, steps: Sequence[Mapping[str, Any]]) -> Calibration:
    """Return the calibration with what two ranks change for bf16 models: least squares of relative errors."""
    a = b = c = d = e = 0.0
    for r in steps:
        model, split = MODELS[r["model"]], Split(r["ranks"])
        base = step_ms(model, split, r["batch"], found)
        others = replace(found, narrow={**found.narrow, r["model"]: 1.0}), replace(found, row_split=1.0)
        by = [step_ms(model, split, r["batch"], other) - base for other in others]
        x, y, left = by[0] / r["device_ms"], by[1] / r["device_ms"], 1 - base / r["device_ms"]
        a, b, c, d, e = a + x * x, b + x * y, c + y * y, d + x * left, e + y * left
    determinant = a * c - b * b
    if determinant <= 0:
        return found
    narrow = dict.fromkeys((r["model"] for r in steps), (c * d - b * e) / determinant)
    return replace(found, narrow={**found.narrow, **narrow}, row_split=(a * e - b * d) / determinant)


def narrow_of(whole: Mapping[int, float], parts: Mapping[int, float], ranks: int) -> float:
    """Return by how much each halving of the width slows reading down: µs by tokens, of whole weights and of a part.

    Least squares: what a part takes more than its share of the whole's time, in proportion to that share. What does
    not grow with it is launches.
    """
    share = [whole[tokens] / ranks for tokens in sorted(whole)]
    more = [parts[tokens] - us for tokens, us in zip(sorted(whole), share, strict=True)]
    return linear_regression(share, more).slope / math.log2(ranks)


def varied(found: Calibration, by: float = 0.2) -> list[Calibration]:
    """Return calibrations that differ in one parameter each, by so much up and down."""
    made = []
    for times in (1 - by, 1 + by):
        for name in ("rate", "attention_flops", "row_split", "exchange_us"):
            made.append(replace(found, **{name: getattr(found, name) * times}))
        for name in ("launch_us", "row_us", "narrow", "flops"):
            other: Any = {k: v * times for k, v in getattr(found, name).items()}
            made.append(replace(found, **{name: other}))
        slower = {
            name: {width: tuple((x, y * times) for x, y in points) for width, points in widths.items()}
            for name, widths in found.links.items()
        }
        made.append(replace(found, links=slower))
        for name in ("nic_rate", "nic_us", "contention"):
            assumed = replace(found.assumed, **{name: getattr(found.assumed, name) * times})
            made.append(replace(found, assumed=assumed))
    return made


def splits_of(model: ModelSize, ranks: int, way: str = "gather") -> list[Split]:
    """Return the splits over so many GPUs that a model can take."""
    found = []
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0 and n <= model.most_tp):
        for ep in {1, ranks} if model.experts and model.experts % ranks == 0 else {1}:
            found.append(Split(tp, ranks // tp, ep, way))
    return sorted(found, key=lambda split: (-split.tp, split.ep))
