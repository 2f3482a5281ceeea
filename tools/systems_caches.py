"""What docs/systems.md says of FP8 caches of latent attention: their times, beside bf16's, and what they hold."""

from __future__ import annotations

import re

from systems_figures import NEVER_SLOWER, Found, Row, Said, _range, read

# What a longer step over an FP8 cache is for: see docs/serving.md.
CAPACITY = "what such a cache gains is room for tokens"
KV_DTYPE = re.compile(r"kv_dtype=[\w.]+")


def _decode() -> dict[tuple[str, int, int, bool], dict[str, Row]]:
    """Return what ``auto`` took for decode with exact arithmetic, by point, and of each by the cache's dtype."""
    found: dict[tuple[str, int, int, bool], dict[str, Row]] = {}
    for row in read("performance/mla.jsonl"):
        exact = row.get("auto") and "decode" in row["cfg"] and "fp8_math=True" not in row["cfg"]
        if exact and (dtype := KV_DTYPE.search(row["cfg"])) is not None:
            point = KV_DTYPE.sub("", row["cfg"]), row["tokens"], row["context"], bool(row.get("ragged"))
            found.setdefault(point, {})[dtype[0].rpartition(".")[2]] = row
    return found


def beside_bf16() -> list[float]:
    """Return what decode over an e4m3 cache takes over what it takes over bf16, at each point that has both."""
    both = [own for own in _decode().values() if {"float8_e4m3fn", "bfloat16"} <= own.keys()]
    return [own["float8_e4m3fn"]["us"] / own["bfloat16"]["us"] for own in both]


def _beside_bf16() -> str:
    """Return at how many points decode over an FP8 cache is slower than over bf16, and by how much."""
    ratios = beside_bf16()
    slower = [ratio for ratio in ratios if ratio > NEVER_SLOWER]
    if not slower:
        return ""
    return f"slower than over bf16 at {len(slower)} of {len(ratios)} points, {_range(slower)} ×: {CAPACITY}"


def fp8_cache() -> Found:
    """Item 5: decode over an FP8 cache with exact arithmetic, at most so many microseconds, and with FP8's."""
    wanted = {(16, 64, False): 105, (16, 128, False): 200, (128, 128, False): 400, (16, 128, True): 115}
    told, late = [], []
    for (heads, batch, math), limit in wanted.items():
        rows = [
            row for row in read("performance/mla.jsonl")
            if row.get("auto") and (row["tokens"], row["context"]) == (batch, 4096) and not row.get("ragged")
            and "float8" in row["cfg"] and f"num_heads={heads}," in row["cfg"] and f"fp8_math={math}" in row["cfg"]
        ]  # fmt: skip
        if rows:
            error = f", error {rows[-1]['error']:.2g}" if math else ""
            words = f"{heads} heads, {batch} × 4k{', FP8 arithmetic' if math else ''}"
            told.append(f"{words}: {rows[-1]['us']:.0f} µs ({limit} wanted{error})")
            late += [words] if rows[-1]["us"] > limit else []
    if len(told) < len(wanted):
        return None
    return Said("; ".join(told), f"longer than wanted: {'; '.join(late)}" if late else "", _beside_bf16())


def capacity() -> Found:
    """Item 5: the tokens that a server's cache holds beside a slice of DeepSeek-V3, as pages that were allocated."""
    held = {row["kv_dtype"]: row for row in read("slice_h200.jsonl") if row.get("what") == "capacity"}
    if not {"float8_e4m3fn", "bfloat16"} <= held.keys():
        return None
    narrow, wide = (held[name]["tokens"] for name in ("float8_e4m3fn", "bfloat16"))
    text = f"{narrow / 1e6:.2f} million tokens in e4m3, {wide / 1e6:.2f} in bf16: {narrow / wide:.2f} ×"
    return Said(text, "" if narrow >= 1.9 * wide else f"{narrow / wide:.3f} × the tokens, 1.9 wanted")
