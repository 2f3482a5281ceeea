"""What a decode step takes on more GPUs than there are: a simulation of its stages, calibrated on two.

    a layer, split by    stages of every rank ("|": all ranks meet)
    tp                   attention | sum, norm | MLP or experts | sum, norm
    dp                   attention | gather | MLP or experts | scatter               rows of all groups
    dp, all-to-all       attention | dispatch | experts | combine                    rows to the experts that they chose

    compute    layer_us + row_us · rows + max(bytes / rate, operations / flops)      bytes: weights and cached tokens
               of several ranks reading takes ``among`` more, and a part ``row_split`` of the rows' µs is divided
    link       what two ranks took to send as many bytes each (linear between measured sizes); beyond one host
               also nic_us and bytes / nic_rate

Events: every rank has one compute unit and one link. A stage starts when its batch's last one is done and the unit is
free; a link's when the last rank arrives, so a rank with busier experts keeps all others waiting. With two batches
(``overlap``) one computes while the other's bytes are under way, and compute takes ``contention`` more meanwhile.

From one GPU and from pairs of two come all numbers but those of :class:`Assumed`, which are not ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

from fastlayers.errors import ArgumentError, check_choice
from fastlayers.moe.placement.planner import EplbConfig, first_placement, plan_placement

_NAME = "overlap_sim"


@dataclass(frozen=True)
class ModelSize:
    """What a step reads and computes; ``attention``: weights of one layer as (split by heads, on every rank)."""

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: tuple[int, int]
    cache_bytes: int  # of one token in one layer
    cache_splits: bool  # by heads, over tp
    intermediate: int  # of dense layers
    dense_layers: int
    experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    shared_size: int = 0
    weight_bytes: int = 2
    most_tp: int = 8  # heads of keys and values, where the cache splits by them


def _gqa(hidden: int, heads: int, kv_heads: int, size: int) -> tuple[int, int]:
    return hidden * size * (2 * heads + 2 * kv_heads), 0


MODELS: Mapping[str, ModelSize] = {
    "qwen3_8b": ModelSize("Qwen3-8B", 36, 4096, 151936, _gqa(4096, 32, 8, 128), 4096, True, 12288, 36),
    "qwen3_30b_a3b": ModelSize(
        "Qwen3-30B-A3B", 48, 2048, 151936, _gqa(2048, 32, 4, 128), 2048, True, 0, 0, 128, 8, 768, most_tp=4
    ),
    "deepseek_v3": ModelSize(
        "DeepSeek-V3", 61, 7168, 129280, (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168, 7168 * (1536 + 576)),
        1152, False, 18432, 3, 256, 8, 2048, 2048, 1, 128,
    ),
}  # fmt: skip


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
    layer_us: Mapping[str, float]  # of a layer without a byte read: "dense", "moe"
    row_us: Mapping[str, float]
    norm: Widths
    links: Mapping[str, Widths]  # sum, sum_nccl, two_shot, gather, scatter, dispatch, combine
    among: float = 0.0
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
        us = _work_us(found, split.ranks, active * each / inner, 2 * pairs * each / inner, model.weight_bytes)
        of_ranks += [us] * inner
    return tuple(of_ranks)


def _work_us(found: Calibration, ranks: int, weights: float, operations: float, width: int, cached: float = 0) -> float:
    """Return the µs of ``weights`` of ``width`` bytes and ``cached`` bytes read, and of operations, on one of ranks."""
    size = (1 + found.among * (ranks > 1)) * (weights * width + cached)
    return max(size / found.rate, operations / found.flops[width]) * 1e6


def _fixed_us(found: Calibration, dense: bool, rows: float, ranks: int) -> float:
    """Return half of what a layer takes beside its bytes; ``ranks``: over which its work is divided."""
    kind = "dense" if dense else "moe"
    return (found.layer_us[kind] + found.row_us[kind] * rows * (1 - found.row_split * (1 - 1 / ranks))) / 2


def layer_stages(
    model: ModelSize, split: Split, rows: float, context: int, found: Calibration, *, dense: bool, zipf: float = 0.0,
    eplb: EplbConfig | None = None,
) -> list[Stage]:  # fmt: skip
    """Return the stages of one layer; ``rows``: tokens of one attention group."""
    n = split.ranks
    per_head, everywhere = model.attention
    cached = rows * context * model.cache_bytes / (split.tp if model.cache_splits else 1)
    own = per_head / split.tp + everywhere
    attention = _work_us(found, n, own, 2 * rows * own, model.weight_bytes, cached)
    attention += _fixed_us(found, dense, rows, split.tp)
    tokens = rows * split.dp
    spread = model.intermediate if dense else model.shared_size
    inner = 3 * model.hidden * spread / n
    shared = _work_us(found, n, inner, 2 * tokens * inner, model.weight_bytes)
    mlp = [shared + _fixed_us(found, dense, tokens, n)] * n
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
    us = run(stages, found.assumed.contention) + _work_us(found, split.ranks, head, 2 * rows * head, 2)
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
    decode: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], rate: float, flops: Mapping[int, float]
) -> Calibration:
    """Return the :class:`Calibration` of committed results.

    Parameters
    ----------
    decode : rows of ``two_gpus_decode``
        Those of one GPU; those over symmetric memory with early starts, for :attr:`Calibration.among` and
        :attr:`Calibration.row_split`; and two groups of one request, for what they exchange before a step.
    rows : rows of ``two_gpus_rows``
    rate : float
        Bytes a second of a copy in HBM.
    flops : mapping
        Operations a second of the experts' best kernel, by bytes of a weight.
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
    found = Calibration(rate, flops, {}, {}, points("sum_norm_time", "norm_us"), links)
    steps = list(decode)
    for name, kind in (("qwen3_8b", "dense"), ("qwen3_30b_a3b", "moe")):
        model, zero = MODELS[name], dict.fromkeys(("dense", "moe"), 0.0)
        bare = replace(found, layer_us=zero, row_us=zero)
        left = {
            r["batch"]: (r["device_ms"] - step_ms(model, Split(), r["batch"], bare)) * 1e3 / model.layers
            for r in steps if r.get("what") == "decode" and r["model"] == name and r["ranks"] == 1
        }  # fmt: skip
        first, last = min(left), max(left)
        row = max(0.0, (left[last] - left[first]) / (last - first))
        found = replace(
            found, layer_us={**found.layer_us, kind: left[first] - row * first}, row_us={**found.row_us, kind: row}
        )
    found = _among_ranks(found, [r for r in steps if r.get("what") == "decode" and r.get("early")])
    groups = [r for r in steps if r.get("what") == "decode_groups" and r["requests"] == r["dp"]]
    for r in groups:
        split = Split(r["ranks"] // r["dp"], r["dp"], r["ep"])
        alone = step_ms(MODELS[r["model"]], split, r["requests"], found)
        found = replace(found, exchange_us=max(0.0, r["tpot_ms"] - alone) * 1e3)
    return found


def _among_ranks(found: Calibration, steps: Sequence[Mapping[str, Any]]) -> Calibration:
    """Return the calibration with what several ranks change: least squares of relative errors."""
    a = b = c = d = e = 0.0
    for r in steps:
        model, split = MODELS[r["model"]], Split(r["ranks"])
        base = step_ms(model, split, r["batch"], found)
        others = replace(found, among=1.0), replace(found, row_split=1.0)
        by = [step_ms(model, split, r["batch"], other) - base for other in others]
        x, y, left = by[0] / r["device_ms"], by[1] / r["device_ms"], 1 - base / r["device_ms"]
        a, b, c, d, e = a + x * x, b + x * y, c + y * y, d + x * left, e + y * left
    determinant = a * c - b * b
    if determinant <= 0:
        return found
    return replace(found, among=(c * d - b * e) / determinant, row_split=(a * e - b * d) / determinant)


def varied(found: Calibration, by: float = 0.2) -> list[Calibration]:
    """Return calibrations that differ in one parameter each, by so much up and down."""
    made = []
    for times in (1 - by, 1 + by):
        for name in ("rate", "among", "row_split", "exchange_us"):
            made.append(replace(found, **{name: getattr(found, name) * times}))
        for name in ("layer_us", "row_us", "flops"):
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
