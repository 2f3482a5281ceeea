"""What programs of their own measured for docs/systems.md: a figure an item, and whether that is what was wanted.

Each function returns what was measured, what is missing and what is lost (:class:`Said`), or ``None`` as long as its
result is not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ablation_rows
from performance_rows import OURS, VLLM, last_runs

from fastlayers.attention.buckets import SHORT_CONTEXT
from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.meta import AttentionBatch
from fastlayers.attention.mla.config import MLAConfig
from fastlayers.attention.mla.prefix_chunks import MLAThresholds, select_path
from fastlayers.registry import builtin_registry
from fastlayers_server.ablation import undecided
from fastlayers_server.known_models import DEEPSEEK_V3

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TUNED = ROOT / "src" / "fastlayers" / "tuned"
NEVER_SLOWER = 1.03
# Tokens of a request's pages in `several_tokens.py flashmla`: 66 of 64.
VERIFIED_CAPACITY = 4224
OURS_OR_TORCH = (*OURS, "torch")
# How many rows weights alone are for: with more, decoding them takes longer than reading fewer bytes saves.
FEW_ROWS = 16
# Seconds by which a capture may be the longer one.
CAPTURES_DIFFER = 0.05
# What two chunks of a prefix may take of one shot, the least share of the memory's rate of steps that read many keys,
# and of the floor's rate of whole steps: less is not what the items are for.
CHUNKS, READING, WHOLE = 1.05, 0.85, 0.5
# Percent of a step that an optimisation may lose that is off by default.
MOST_LOST = 10.0
# Optimisations of the ablation that may lose, as nobody gets them unasked, and what they are for.
OFF_BY_DEFAULT = {
    ablation_rows.ABSORBED_CODES: "off by default (`fp8_absorb=False`): what it gains is "
    "memory, as no bf16 copy of `kv_b_proj` is held",
}
Row = dict[str, Any]


class Said(NamedTuple):
    """What was ``measured``; what is ``missing``, so that the item is not done; what is ``lost``.

    A loss does not make an item undone, since it is beside what the item is for; it says so, and stands on the page.
    """

    measured: str
    missing: str = ""
    lost: str = ""


Found = Said | None


def read(file: str) -> list[Row]:
    """Return the rows of a result file, none where it is not there; of several runs of a point the last counts."""
    path = RESULTS / file
    if not path.is_file():
        return []
    return last_runs(json.loads(line) for line in path.read_text().splitlines() if line.strip())


def _share(pairs: Sequence[tuple[float, float]], name: str) -> Found:
    """Return at how many points the first time is not the longer one."""
    if not pairs:
        return None
    ratios = sorted(a / b for a, b in pairs)
    good, middle = sum(each <= NEVER_SLOWER for each in ratios), ratios[len(ratios) // 2]
    text = f"{good} of {len(ratios)} points not slower than {name}; median {middle:.2f} ×, worst {ratios[-1]:.2f} ×"
    slower = "" if good == len(ratios) else f"slower than {name} at {len(ratios) - good} of {len(ratios)} points"
    return Said(text, slower)


def _lost(found: Found, why: str) -> Found:
    """Return a figure whose shortfall is a loss that leaves its item done, because of ``why``."""
    if found is None or not found.missing:
        return found
    return Said(found.measured, "", f"{found.missing}: {why}")


def _beside(found: Found, lack: str) -> Found:
    """Return a figure with what is not there beside it, which leaves its item as it is."""
    return found and Said(found.measured, found.missing, "; ".join(filter(None, [found.lost, lack])))


def _range(values: Iterable[float], digits: int = 2) -> str:
    """Return the least and the largest in words, one where both read alike."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (found[0], found[-1])))


def _points(file: str, layer: str, keep: Callable[[Row], bool] = lambda row: True) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in read(file):
        if row.get("layer") == layer and "key" in row and keep(row):
            found.setdefault(row["key"], []).append(row)
    return found


def _against(file: str, layer: str, peer: str, keep: Callable[[Row], bool] = lambda row: True) -> Found:
    """Return how the best of ours compares with a package's at the points where both were timed."""
    pairs = []
    for rows in _points(file, layer, keep).values():
        own = [row["us"] for row in rows if row["backend"] in OURS]
        theirs = [row["us"] for row in rows if row["backend"].startswith(peer)]
        pairs += [(min(own), min(theirs))] if own and theirs else []
    return _share(pairs, peer)


def _taken(file: str, layer: str, peer: str, keep: Callable[[Row], bool] = lambda row: True) -> Found:
    """Return how what ``auto`` takes compares with the best where ours and a package's were timed.

    Of a layer without tuned tables ``auto`` takes the first of the registry's order, today's; else, what it took then.
    """
    order = [] if (TUNED / layer).is_dir() else [row.name for row in builtin_registry(layer).ranked]
    pairs = []
    for rows in _points(file, layer, keep).values():
        own = [row["us"] for row in rows if row["backend"] in OURS]
        theirs = [row["us"] for row in rows if row["backend"].startswith(peer)]
        taken = [row["us"] for row in rows if row.get("auto")]
        if order:
            ranked = [row for row in rows if row["backend"] in order]
            taken = [row["us"] for row in sorted(ranked, key=lambda row: order.index(row["backend"]))]
        pairs += [(taken[0], min(own + theirs))] if own and theirs and taken else []
    found = _share(pairs, f"the best of ours and {peer}")
    return found and Said(f"what `auto` takes: {found.measured}", found.missing)


def flashmla() -> Found:
    """Item 7: several new tokens a request, captured: what today's rule takes against the other; both were timed."""
    rule, pairs = builtin_registry("mla").named("flashmla").auto_from, []
    for row in read("flashmla_h200.jsonl"):
        if row.get("what") == "flashmla" and "flashmla_us" in row and rule is not None:
            # The context is that of the pages that a server captures such a step for.
            short = row["context"] + row["new"] <= SHORT_CONTEXT
            cfg = MLAConfig(
                row["heads"], 512, 64, 128, 128, 0.1, phase="ragged", few=True, captured=True,
                context=context_of(SHORT_CONTEXT if short else VERIFIED_CAPACITY),
            )  # fmt: skip
            start = rule(cfg)
            taken = "flashmla" if start is not None and row["new"] * row["requests"] >= start else "triton"
            pairs.append((row[f"{taken}_us"], min(row["flashmla_us"], row["triton_us"])))
    found = _share(pairs, "the best of Triton's and FlashMLA")
    return found and Said(f"what `auto` takes: {found.measured}", found.missing)


def crossover() -> Found:
    """Item 11: what today's thresholds choose against the other way; each point has the times of both."""
    pairs = []
    for row in read("mla_paths_h200.jsonl"):
        if "chosen" in row:
            batch = AttentionBatch((row["new"],), (row["prefix"],), [[1]])
            chosen = select_path(batch, MLAThresholds(), row["heads"])
            pairs.append((row[f"{chosen}_us"], min(row["mqa_us"], row["mha_one_shot_us"])))
    return _share(pairs, "the other way")


def pages() -> Found:
    """Item 13: a layer's step of 512 tokens behind 32,768."""
    rows = [row for row in read("mla_paths_h200.jsonl") if "page" in row]
    told = [
        f"pages of {row['page']}: one shot {row['mha_one_shot_us'] / 1e3:.2f} ms, two chunks "
        f"{row['mha_chunked_us'] / 1e3:.2f}, latents {row['mqa_us'] / 1e3:.2f}" for row in rows
    ]  # fmt: skip
    late = [str(row["page"]) for row in rows if row["mha_chunked_us"] > CHUNKS * row["mha_one_shot_us"]]
    missing = f"chunks take over {CHUNKS} × one shot with pages of {', '.join(late)}" if late else ""
    return Said("; ".join(told), missing) if {row["page"] for row in rows} == {1, 16, 64} else None


def first_tokens() -> Found:
    """Item 13: the first token of a prompt that begins with what is cached, by each way."""
    rows = {row["way"]: row for row in read("prefix_first_token_h200.jsonl") if row.get("what") == "first token"}
    if not {"one shot", "two chunks", "latents"} <= rows.keys():
        return None
    shot, chunks = rows["one shot"], rows["two chunks"]
    text = f"{shot['new']} tokens behind {shot['prefix']:,}, {shot['layers']} layers: "
    text += ", ".join(f"{way} {row['ms']:.1f} ms" for way, row in rows.items())
    return Said(text, f"chunks take over {CHUNKS} × one shot" if chunks["ms"] > CHUNKS * shot["ms"] else "")


def three_axes() -> Found:
    """Item 19: one launch against one each, and the vision tower."""
    rows = [row for row in read("systems_h200.jsonl") if row.get("item") == 19]
    launches = _share([(r["one_launch_us"], r["apart_us"]) for r in rows if "apart_us" in r], "launches apart")
    if launches is None:
        return None
    tower = [
        f"tower, {len(row['images'])} of {row['images'][0][1:]} patches: {row['ours_ms']:.1f} ms, "
        f"stock {row['stock_ms']:.1f}"
        for row in rows if "stock_ms" in row
    ]  # fmt: skip
    slow = any("stock_ms" in row and row["ours_ms"] > 1.03 * row["stock_ms"] for row in rows)
    missing = launches.missing or ("the vision tower is slower than stock's" if slow else "")
    return Said("; ".join([launches.measured, *tower]), missing)


def tensor_cores() -> Found:
    """Item 22: the share of the memory's rate with few query heads a key head, where a threshold would turn."""
    told, low = dict[int, str](), list[int]()
    for group in (1, 2, 4):
        rows = {
            row["tokens"]: row["of_memory"] for row in read("performance/gqa.jsonl")
            if row.get("auto") and row["context"] == 4096 and not row.get("ragged")
            and f"num_heads=32, num_kv_heads={32 // group}, head_dim=128" in row["cfg"]
            and "kv_dtype=torch.bfloat16" in row["cfg"] and "page_size=64" in row["cfg"] and "decode" in row["cfg"]
        }  # fmt: skip
        many = 32 if group < 4 else 64
        if many in rows:
            alone = f", of one request {rows[1]:.0%}" if 1 in rows else ""
            told[group] = f"{group} query heads a key head: {rows[many]:.0%} of the memory's rate{alone}"
            low += [group] if rows[many] < READING else []
    missing = f"below {READING:.0%} with {', '.join(map(str, low))} query heads a key head" if low else ""
    return Said("; ".join(told.values()), missing) if len(told) == 3 else None


def schedules() -> Found:
    """Item 32: what the transpose of scales would cost."""
    rows = [row for row in read("systems_h200.jsonl") if row.get("item") == 32]
    return _share([(row["as_read_us"], row["transposed_us"]) for row in rows], "with the transpose")


def edge() -> Found:
    """Item 32: what ``auto`` takes around the rows at which CUTLASS's experts change their schedule, and the best."""
    told, late = [], []
    for rows in _points("products_h200.jsonl", "fused_moe", lambda row: row["model"] == "top 1").values():
        best = min(rows, key=lambda row: row["us"])
        for row in rows:
            if row.get("auto"):
                ratio = row["us"] / best["us"]
                told.append(f"{row['tokens']} rows: {row['backend']}, {ratio:.2f} × {best['backend']}'s time")
                late += [f"{row['tokens']}"] if ratio > NEVER_SLOWER else []
    if not told:
        return None
    slower = f"slower than the best at {' and '.join(late)} rows" if late else ""
    why = "so few experts have no table, and the ladder that another one lends changes at rows that were best for those"
    return _lost(Said(f"what `auto` takes: {'; '.join(told)}", slower), why)


def nvfp4() -> Found:
    """Item 35: against a copy of as many bytes."""
    rows = [row for row in read("systems_h200.jsonl") if row.get("item") == 35]
    told = [f"{r['tokens']} rows of {r['experts']}: {r['us']:.1f} µs, a copy {r['copy_us']:.1f}" for r in rows]
    longer = [row["us"] / row["copy_us"] for row in rows]
    slower = f"{_range(longer, 1)} × a copy of as many bytes" if rows and max(longer) > NEVER_SLOWER else ""
    # `NVFP4Quant` is public for plug-ins: see the last table of the page.
    why = "products that read such codes need sm_100, so that no step here waits for it, and it was not made faster"
    return _lost(Said("; ".join(told), slower), why) if rows else None


def gated() -> Found:
    """Item 40: an activation that writes what the product reads, against a launch more and bf16 between."""
    rows = [row for row in read("gated_h200.jsonl") if "one_us" in row and "norm" not in row]
    return _share([(row["one_us"], row["two_us"]) for row in rows], "bf16 between two launches")


def beside_peers(
    layer: str, file: str = "performance/small_ops.jsonl", peer: str = ""
) -> tuple[int, list[tuple[float, float]]]:
    """Return how many shapes of a layer were timed, and the time of what ``auto`` takes and the best peer's of each."""
    points = _points(file, layer)
    shapes = {row["cfg"] for rows in points.values() for row in rows}
    pairs = []
    for rows in points.values():
        own = [row["us"] for row in rows if row["auto"]]
        peers = [row for row in rows if row["backend"] not in OURS_OR_TORCH and row["backend"].startswith(peer)]
        pairs += [(own[0], min(row["us"] for row in peers))] if own and peers else []
    return len(shapes), pairs


def quantiser() -> Found:
    """Item 41: group quantisation, which divides exactly, beside a package's."""
    return _share(beside_peers("group_quant", peer="sgl_kernel")[1], "sgl_kernel")


def block_products(peer: str = "") -> Found:
    """Items 37 and 43: what ``auto`` takes for FP8 products by blocks, beside one package's or the best of any."""
    shapes, pairs = beside_peers("fp8_linear", "performance/fp8_linear.jsonl", peer)
    found = _share(pairs, peer or "the best peer")
    return found and Said(f"{shapes} shapes; what `auto` takes: {found.measured}", found.missing)


def decode(*models: str) -> Found:
    """Items 63 and 64: whole steps of one request and of 32, beside vLLM's on the same kind of GPU."""
    steps = {
        (row["model"], row["batch"]): row["tpot_ms"]
        for row in read("performance/generate.jsonl") if row.get("model") in models and "tpot_ms" in row
    }  # fmt: skip
    if set(steps) != {(model, batch) for model in models for batch in (1, 32)}:
        return None
    told = [f"{m}, {batch}: {ms:.2f} ms a token (vLLM {VLLM[m, batch]:.2f})" for (m, batch), ms in steps.items()]
    late = [f"{m} at {batch}" for (m, batch), ms in steps.items() if ms > VLLM[m, batch]]
    return Said("; ".join(told), f"slower than vLLM: {', '.join(late)}" if late else "")


def several_shapes(layer: str) -> Found:
    """Items 18 and 24: several shapes, beside peers that are launched dependently where they can be."""
    shapes, pairs = beside_peers(layer)
    found = _share(pairs, "the best peer") if shapes >= 3 else None
    return found and Said(f"{shapes} shapes; {found.measured}", found.missing)


def rotations() -> Found:
    """Item 18: as above; by how much ours may take longer alone is what its early start gains in a chain."""
    found, chains = several_shapes("rotary"), {}
    for row in read("rotary_launch_h200.jsonl"):
        if row.get("op") == "norm, rotary, norm, rotary":
            chains[row["model"], row["launch"]] = row["us"]
    gains = [
        (us - chains[model, "now early"]) / 2 for (model, launch), us in chains.items() if launch == "now plain"
    ]  # fmt: skip
    late = [a - b for a, b in beside_peers("rotary")[1] if a > NEVER_SLOWER * b]
    if found is None or not late or not gains:
        return found
    text = f"{found.measured}: {max(late):.2f} µs at most, by an early start that gains {_range(gains)} a rotation "
    text += "in chains"
    return Said(text, "" if max(late) < min(gains) else found.missing)


def switched(words: str) -> Found:
    """Return what the ablation says of an optimisation, by model and batch; what captures differ by says nothing."""
    runs, found = ablation_rows.rows(RESULTS / "ablation_h200.jsonl")
    whats = sorted({row["what"] for row in found if words in row["what"] and "ratio" in row})
    if not whats:
        return None
    columns = dict.fromkeys((row["model"], row["batch"]) for row in found)
    own = {each: ablation_rows.of_last_commit(runs, found, whats[0], each) for each in columns}
    ratios = {column: ablation_rows.ratio_of(measured) for column, measured in own.items() if measured}
    told = {(model, batch): f"{model.split('/')[1]}, {batch}" for model, batch in ratios}
    apart = {column: ablation_rows.noise(runs, found, column)[2] for column in ratios}
    beside = {column: f" ± {far:.1%}" if far else "" for column, far in apart.items()}
    text = "; ".join(f"{told[column]}: {ratio:.3f} ×{beside[column]}" for column, ratio in ratios.items())
    open_ = [column for column, ratio in ratios.items() if undecided(ratio, apart[column])]
    lost = f"no further from 1 than captures differ, which decides nothing: {'; '.join(told[c] for c in open_)}"
    lost = lost if open_ else ""
    less = [100 * (1 - ratio) for ratio in ratios.values() if ratio < 1]
    if less and (why := OFF_BY_DEFAULT.get(whats[0])) is not None and round(max(less), 1) <= MOST_LOST:
        return Said(text, "", "; ".join(filter(None, [f"loses {_range(less, 1)} % of a step: {why}", lost])))
    least = {column: 1 - max(NEVER_SLOWER - 1, apart[column]) for column in ratios}
    slow = [told[column] for column, ratio in ratios.items() if ratio < least[column]]
    return Said(text, f"a step is slower with it: {'; '.join(slow)}" if slow else "", lost)


def shared_experts() -> Found:
    """Item 25: tables of DeepSeek's experts with the shared one among them; a model fuses where there is one."""
    found = sorted((RESULTS / "tuned" / "fused_moe").glob("E=257,k=9,D=7168,*.json"))
    names = ", ".join(path.name.partition(",fp8")[0] for path in found)
    return Said(f"{len(found)} shapes tuned: {names}") if found else None


def tuned_weights() -> Found:
    """Item 26: shapes of int8, of weights alone and of their experts with a table of the page's device."""
    counts = {
        name: len([*(RESULTS / "tuned").glob(f"{pattern}device_name=H200.json")])
        for name, pattern in (("int8", "int8_linear/*"), ("w4a16", "weight_only_linear/*,w4a16,*"),
                              ("experts in w4a16", "fused_moe/*,w4a16,*"))
    }  # fmt: skip
    others = len([*(RESULTS / "tuned").glob("weight_only_linear/*8a16,*")])
    text = ", ".join(f"{name} {count}" for name, count in counts.items())
    return Said(f"shapes with a table: {text}, 8 bits alone {others}") if all(counts.values()) else None


def weights_alone(layer: str) -> Found:
    """Item 26: weights alone over bf16 at the same shape, by format and rows; they are for few rows."""
    rows = [row for row in read("weight_only_h200.jsonl") if row.get("auto") and "key" in row]
    wide = {(row["model"], row["tokens"]): row["us"] for row in rows if "a16" not in row["cfg"]}
    ratios: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["layer"] == layer and (format_ := re.search(r"'(\w+a16)'", row["cfg"])) is not None:
            ratios.setdefault(format_[1], []).append((row["tokens"], row["us"] / wide[row["model"], row["tokens"]]))
    told, missing, lost, many = list[str](), list[str](), list[str](), list[float]()
    for name, found in ratios.items():
        by_rows = [f"{n}: {_range(r for m, r in found if m == n)}" for n in sorted({n for n, _ in found})]
        good = sum(ratio <= NEVER_SLOWER for _, ratio in found)
        told.append(f"{name}: {good} of {len(found)} points not slower than bf16; × by rows {', '.join(by_rows)}")
        few = [ratio for n, ratio in found if n <= FEW_ROWS and ratio > NEVER_SLOWER]
        if name == "fp8_w8a16":  # for whoever has such a checkpoint, and not the memory for bf16
            if (bad := len(found) - good) > 0:
                lost.append(f"{name} is slower than bf16 at {bad} of {len(found)} points: what it gains is memory")
            continue
        missing += [f"{name} slower than bf16 at {len(few)} points of at most {FEW_ROWS} rows"] if few else []
        many += [ratio for n, ratio in found if n > FEW_ROWS and ratio > NEVER_SLOWER]
    if many:
        slower = f"{len(many)} points of more than {FEW_ROWS} rows take {_range(many)} × bf16's time"
        why = "weights alone are for few rows, with many decoding them takes longer than reading fewer bytes saves"
        lost.insert(0, f"{slower}: {why}")
    return Said("; ".join(told), "; ".join(missing), "; ".join(lost)) if told else None


def narrow_rows() -> Found:
    """Item 50: the gather of 16,384 rows in FP8, whole and behind a norm in one launch."""
    rows = [row for row in read("two_gpus_exchange_h200.jsonl") if "gather_fp8_us" in row and row["rows"] == 16384]
    if not rows:
        return None
    plain, wide, normed = (rows[-1][f"{name}_us"] for name in ("gather_fp8", "gather", "norm_gather_fp8"))
    text = f"16,384 FP8 rows, scales in columns: {plain:.0f} µs, in bf16 {wide:.0f}; "
    text += f"behind a norm in one launch, scales in rows, {normed:.0f}"
    return Said(text, f"16,384 FP8 rows take {plain:.0f} µs, 200 wanted" if plain > 200 else "")


def groups() -> Found:
    """Item 53: two attention groups beside two ranks that share each layer: tokens a second, and in the cache."""
    held: dict[bool, dict[int, Row]] = {True: {}, False: {}}
    for row in read("two_gpus_slice_h200.jsonl"):
        if row.get("what") == "decode_groups":
            held[row["dp"] > 1][row["requests"]] = row
    both = sorted(held[True].keys() & held[False].keys())
    if not both:
        return None
    ratios = {n: held[True][n]["tokens_per_s"] / held[False][n]["tokens_per_s"] for n in both}
    room = held[True][both[-1]]["cache_tokens"] / held[False][both[-1]]["cache_tokens"]
    told = ", ".join(f"{n} requests {ratio:.2f} ×" for n, ratio in ratios.items())
    text = f"`dp=2, ep=2` over `tp=2`, DeepSeek-V3's layers: {told} the tokens/s, {room:.2f} × the tokens in the cache"
    best = ratios[both[-1]]
    short = "" if best >= 1.15 else f"at {both[-1]} requests {best:.3f} × the tokens/s of `tp=2`, 1.15 wanted"
    return Said(text, short)


def capture() -> Found:
    """Item 56: frozen and not, forced collections and not."""
    last = {
        (row["frozen"], row["force_cudagraph_gc"]): row
        for row in read("performance/capture.jsonl") if "runs_s" in row
    }  # fmt: skip
    if len(last) < 4:
        return None
    plain, forced = (
        [last[frozen, collect]["capture_s"] for frozen in (True, False)] for collect in (False, True)
    )  # fmt: skip
    text = f"frozen {plain[0]:.2f} s, not {plain[1]:.2f}; with forced collections {forced[0]:.2f} and {forced[1]:.2f}"
    runs = _range(last[True, False]["runs_s"])
    text += f"; up to {CAPTURES_DIFFER} s longer counts as no longer: runs of the first way take {runs}"
    slower = plain[0] > NEVER_SLOWER * plain[1] + CAPTURES_DIFFER
    return Said(text, f"slower frozen: {plain[0]:.2f} s against {plain[1]:.2f}" if slower else "")


def compiled() -> Found:
    """Item 55: steps and their capture, compiled in each way, against none."""
    rows = [row for row in read("torch_compile_h200.jsonl") if "tpot_ms" in row]
    plain = {row["batch"]: row for row in rows if row["torch_compile"] is None}
    ways = [row for row in rows if row["torch_compile"] is not None and row["batch"] in plain]
    if not ways:
        return None
    said = []
    for name in dict.fromkeys(row["torch_compile"] for row in ways):
        mine = [row for row in ways if row["torch_compile"] == name]
        steps = ", ".join(f"{row['tpot_ms'] / plain[row['batch']]['tpot_ms']:.3f} × at {row['batch']}" for row in mine)
        captured, usual = mine[0]["capture_s"], plain[mine[0]["batch"]]["capture_s"]
        said.append(f"`{name}` {steps}, captured in {captured:.0f} s, not {usual:.0f}")
    slower = [row for row in ways if row["tpot_ms"] > NEVER_SLOWER * plain[row["batch"]]["tpot_ms"]]
    text = f"{ways[0]['model']}, a step's time: {'; '.join(said)}"
    return Said(text, f"slower in {len(slower)} of {len(ways)} cases" if slower else "")


def in_turns() -> Found:
    """Item 60: a step in halves against whole ones, on two GPUs."""
    rows = {row["overlap"]: row for row in read("two_gpus_overlap_h200.jsonl") if row.get("what") == "decode_groups"}
    if not {"off", "two_batch"} <= rows.keys():
        return None
    off, halves = rows["off"], rows["two_batch"]
    same = "the same" if halves["same_tokens_as_first"] else "other"
    text = f"{halves['requests']} requests: {halves['tpot_ms']:.2f} ms a step in halves, {off['tpot_ms']:.2f} whole"
    slower = "slower in halves on two GPUs, so off by default; a server's steps have no halves"
    return Said(f"{text}; {same} tokens", slower if halves["tpot_ms"] > off["tpot_ms"] else "")


def drafts() -> Found:
    """Item 61: the NextN layer, captured: but for a tick in ten, as where a prompt comes."""
    found = [row for row in read("drafts_h200.jsonl") if row.get("way", "").startswith("mtp")]
    rows = [row for row in found if "fewer" in row]
    told = [f"{row['way']}, {row['prompts']}: {row['fewer']:.2f} × fewer steps" for row in rows]
    wrong = [row for row in rows if set(row["equal_tokens"]) != {row["of"]}]
    eager = sum(sum(row["uncaptured"].values()) for row in found if "uncaptured" in row)
    ticks = sum(row["ticks"] for row in rows)
    short = [f"{len(wrong)} ways say other tokens"] if wrong else []
    short += [f"{eager:.0f} steps of {ticks} ticks ran uncaptured"] if 10 * eager > ticks else []
    return Said("; ".join(told), "; ".join(short)) if rows else None


def deepseek() -> Found:
    """Item 62: a slice through load, prefill and decode, and `bench model` of six layers: two models, as it says."""
    rows = {row["what"]: row for row in read("slice_h200.jsonl") if "what" in row}
    bench = read("bench_model_h200.jsonl")
    model = [row for row in bench if row.get("what") == "model"]
    layers = [row["layers"] for row in bench if "layers" in row]
    if not {"load", "prefill", "decode", "tokens"} <= rows.keys() or not model or not layers:
        return None
    load, first, step = rows["load"], rows["prefill"], rows["decode"]
    program = (ROOT / "benchmarks" / "slice.py").read_text()
    names = "n_routed_experts", "first_k_dense_replace", "num_hidden_layers"
    # The slice's come first in the program, then those of what it makes on a CPU.
    experts, dense, count = (int(re.findall(rf'"{name}": (\d+)', program)[0]) for name in names)
    whole = DEEPSEEK_V3["n_routed_experts"], DEEPSEEK_V3["first_k_dense_replace"]
    text = f"a slice of {dense} dense layer and {count - dense} with {experts} of {whole[0]} experts: "
    text += f"{load['gib']:.1f} GiB read in {load['seconds']:.1f} s; {first['tokens']} tokens in {first['ms']:.1f} ms; "
    text += f"{step['tpot_ms']:.2f} ms a token of {step['batch']}"
    steps = [f"{row['batch']}: {row['us'] / 1e3:.2f} ms ({row['of_floor']:.0%} of the floor's rate)" for row in model]
    others = f"{whole[1]} dense layers and {layers[-1] - whole[1]} with all {whole[0]}"
    text += f"; another model, `bench model` of {others}: "
    slow = [str(row["batch"]) for row in model if row["of_floor"] < WHOLE]
    return Said(text + ", ".join(steps), f"below {WHOLE:.0%} of the floor's rate: {', '.join(slow)}" if slow else "")


def suite() -> Found:
    """Items 21 and 58: tests on a GPU."""
    path = RESULTS / "gpu_suite.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    if "sources" not in found:  # of a commit that has not got these tests
        return None
    bad = found["failed"] + found["error"]
    card = "an " + found["device"].split()[1]  # NVIDIA H200, NVIDIA H100 80GB HBM3
    text = f"{found['passed']} tests passed on {card} at {found['commit']}"
    return Said(text, f"{bad} tests fail" if bad else "")


def pauses() -> Found:
    """Item 65: milliseconds between tokens around a full collection, with what lives left to it and frozen."""
    path = RESULTS / "pauses.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    if not found:
        return None
    told = {row["frozen"]: f"{row['median_ms']:.1f} median, {row['longest_ms']:.1f} longest" for row in found["rows"]}
    text = f"ms between tokens of a host without a GPU, {found['objects'] / 1e6:.0f} million objects, around a full "
    held, left = ({row["frozen"]: row for row in found["rows"]}[each]["longest_ms"] for each in (True, False))
    text += f"collection: {told[False]}; frozen {told[True]}"
    return Said(text, "" if held < left / 10 else "frozen, a full collection still shows")
