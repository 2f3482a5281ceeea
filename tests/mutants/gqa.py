"""Planted bugs of gqa."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlayers.attention.gqa.torch import TorchGQA


class _Clean(TorchGQA):
    """Reads a cache without NaN, so that a bug shows as a wrong number."""

    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        caches = [c.float().nan_to_num(0.25).to(c.dtype) for c in (k_cache, v_cache)]
        return super().__call__(q, *caches, meta, sinks)


class _PageOffByOne(_Clean):
    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        wrong = replace(meta, page_table=(meta.page_table + 1) % k_cache.shape[0])
        return super().__call__(q, k_cache, v_cache, wrong, sinks)


class _StaleMetadata(_Clean):
    """The lengths of the step before: the newest key is not seen."""

    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        return super().__call__(q, k_cache, v_cache, replace(meta, positions=meta.positions - 1), sinks)


class _SinkTwice(_Clean):
    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        doubled = None if sinks is None else sinks + torch.log(torch.tensor(2.0))
        return super().__call__(q, k_cache, v_cache, meta, doubled)


class _SinkScaled(_Clean):
    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        scaled = None if sinks is None else sinks * self.cfg.softmax_scale
        return super().__call__(q, k_cache, v_cache, meta, scaled)


class _WindowOffByOne(_Clean):
    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(cfg if cfg.window is None else replace(cfg, window=cfg.window + 1))


class _NotCausal(_Clean):
    def _softmax(self, q, k, v, seen, sink):  # type: ignore[no-untyped-def]
        return super()._softmax(q, k, v, torch.ones_like(seen), sink)


class _LeftPaddingSeen(_Clean):
    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        return super().__call__(q, k_cache, v_cache, replace(meta, starts=torch.zeros_like(meta.starts)), sinks)


class _HalfScale(_Clean):
    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(replace(cfg, softmax_scale=cfg.softmax_scale / 2))


class _SwappedHeads(_Clean):
    """Query head h reads key head h % Hkv instead of h // group."""

    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        order = torch.arange(self.cfg.num_heads).view(-1, self.cfg.num_kv_heads).T.flatten().to(q.device)
        back = order.argsort()
        o, lse = super().__call__(q[:, order], k_cache, v_cache, meta, None if sinks is None else sinks[order])
        return o[:, back], lse[:, back]


class _BinaryLogarithm(_Clean):
    def __call__(self, q, k_cache, v_cache, meta, sinks):  # type: ignore[no-untyped-def]
        o, lse = super().__call__(q, k_cache, v_cache, meta, sinks)
        return o, lse / 0.6931471805599453


class _UnboundedScores(_Clean):
    def __init__(self, cfg):  # type: ignore[no-untyped-def]
        super().__init__(replace(cfg, softcap=None))


MUTANTS = {
    "page_off_by_one": _PageOffByOne,
    "stale_metadata": _StaleMetadata,
    "sink_twice": _SinkTwice,
    "sink_scaled": _SinkScaled,
    "window_off_by_one": _WindowOffByOne,
    "not_causal": _NotCausal,
    "left_padding_seen": _LeftPaddingSeen,
    "half_scale": _HalfScale,
    "swapped_heads": _SwappedHeads,
    "binary_logarithm": _BinaryLogarithm,
    "softcap_missing": _UnboundedScores,
}
