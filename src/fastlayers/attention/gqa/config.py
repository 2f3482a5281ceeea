"""Grouped-query attention over a paged cache: the core.

    T = tokens, Hq = num_heads, Hkv = num_kv_heads, D = head_dim; head h of q reads head h // (Hq / Hkv)
    p(t)        = positions[t], the position of token t in its request
    s[t, h, j]  = softmax_scale * q[t, h] · k[j, h]              for keys j of the request with
                  start ≤ j ≤ p(t)  and  p(t) - j < window       (all others: -inf)
                  softcap * tanh(s / softcap)                    with softcap
    Z[t, h]     = sum_j exp(s[t, h, j]) + exp(sink[h])           the sink is a raw logit without a value
    o[t, h]     = sum_j exp(s[t, h, j]) v[j, h] / Z[t, h]        new tensor of q's dtype
    lse[t, h]   = log Z[t, h]                                    fp32, natural logarithm

Without ``causal`` every new token sees what the last one of its request does (the patches of an image).

A token of a tree of drafts sees all keys before the tree, and of the tree's those on its path (``meta.tree``); its
position, and a key's, is how many are before it on the path.

A token that sees nothing (left padding) gives o = 0 and, without a sink, lse = -inf. Softmax is in fp32. e4m3
caches are read with scale 1. An LSE that holds a sink must not be merged with another one that does.

Few kernels take every step, so a backend says which *phases* it serves:

    "decode"   one new token a request, no left padding
    "extend"   any number of new tokens, no left padding
    "padded"   any number, and keys before ``meta.starts`` do not count
    ""         all of them
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fastlayers.attention.context_buckets import context_of
from fastlayers.attention.kv_cache.spec import DTYPES as CACHE_DTYPES
from fastlayers.attention.kv_write.layer import needs_e4m3
from fastlayers.attention.meta import AttentionMeta
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_plain, check_positive
from fastlayers.registry import Backend, Registry, blackwell_guard, reference_backend, torch_backend, triton_backend

NAME = "Attention"
PHASES = ("decode", "extend", "padded")


@dataclass(frozen=True)
class GQAConfig:
    """What a backend must know.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
        Of this rank.
    softmax_scale : float
    window : int, optional
        Tokens that a token sees, itself included (Hugging Face's ``sliding_window``).
    softcap : float, optional
    sinks : bool
    page_size : int
    dtype, kv_dtype : torch.dtype
        Of q and of the cache.
    phase : str
        See the head of this file.
    lse : bool
        Whether the caller reads the LSE; if not, a backend may return one without rows.
    context : int
        Cached tokens a request for which decode's choice is made; what lies before a window does not count. It
        changes no result.
    captured : bool
        Whether the steps are captured extends (``meta.is_extend_bucket``).
    tree : bool
        Whether new tokens are trees of drafts (``meta.tree``).
    causal : bool
        False, without window or tree: p(t) is the request's last position for each of its new tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    phase: str = ""
    lse: bool = True
    context: int = 4096
    captured: bool = False
    tree: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        check_choice(NAME, "phase", self.phase, ("", *PHASES))
        check_positive(NAME, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        check_positive(NAME, page_size=self.page_size, context=self.context)
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(NAME, "num_heads", self.num_heads, f"a multiple of {self.num_kv_heads}")
        if self.window is not None:
            check_positive(NAME, window=self.window)
            object.__setattr__(self, "context", min(self.context, context_of(self.window)))
        if not self.causal and (self.tree or self.window is not None):
            given = "False with a tree" if self.tree else f"False with window {self.window}"
            raise ArgumentError(NAME, "causal", given, "True for windows and trees")
        check_plain(NAME, "float > 0", softmax_scale=self.softmax_scale)
        if self.softcap is not None and not self.softcap > 0:
            raise ArgumentError(NAME, "softcap", self.softcap, "a positive number or None")
        check_choice(NAME, "dtype", self.dtype, CACHE_DTYPES[:3])
        check_choice(NAME, "kv_dtype", self.kv_dtype, CACHE_DTYPES)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables; scale and LSE change little."""
        dtypes = "_".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        extras = [f"window={self.window}"] * (self.window is not None) + ["softcap"] * (self.softcap is not None)
        heads = f"H={self.num_heads},Hkv={self.num_kv_heads},D={self.head_dim},page={self.page_size}"
        context = [f"ctx={self.context}"] * (self.phase == "decode")
        extras += ["sinks"] * self.sinks + ["full"] * (not self.causal)
        return ",".join([heads, *extras, dtypes, self.phase or "all", *context])


def check_no_padding(backend: str, meta: AttentionMeta) -> None:
    """Raise :class:`ArgumentError` if the step has left padding; for plans of backends that cannot mask it.

    A layer takes another backend for such a step. What can come here is a bucket that was captured without padding.
    """
    if any(meta.batch.starts):
        accepted = f"steps without left padding: {backend} was chosen (or captured) for those"
        raise ArgumentError(NAME, "meta.starts", meta.batch.starts, accepted)


def split_bytes(cfg: GQAConfig, sm_count: int, requests: int, tokens: int, captured: bool) -> int:
    """Return how many bytes FlashInfer's parts of a step's split keys take: fp32 rows and an LSE each.

    The package cuts keys until its programs, two a multiprocessor, have a tile of query rows each; a captured schedule
    has room for as many tiles, or for all those of an uncut step. A row is a token of one head of a group.

    Parameters
    ----------
    cfg : GQAConfig
    sm_count : int
        Multiprocessors of the device.
    requests, tokens : int
        Of the step, padding included.
    captured : bool
    """
    rows = tokens * cfg.group // requests
    tile = 16 if rows <= 16 else 64 if rows <= 64 or cfg.head_dim >= 256 else 128
    tiles = 2 * sm_count // cfg.num_kv_heads
    if captured:
        tiles = max(tiles, -(-tokens * cfg.group // tile) + requests - 1)
    return cfg.num_heads * tiles * tile * (cfg.head_dim + 1) * 4


# Bytes that parts may take where a step is not captured; a captured one takes more for each further request.
MOST_SPLIT_BYTES = 512 << 20


def _refuse_triton(cfg: GQAConfig, device: Device) -> str | None:
    if cfg.head_dim > 256:
        return f"head_dim {cfg.head_dim} is larger than 256"
    return needs_e4m3(cfg, device)


_HALVES = (torch.float16, torch.bfloat16)


def _refuse_kernels(cfg: GQAConfig, device: Device, oldest: tuple[int, int], dims: tuple[int, ...]) -> str | None:
    """Refuse what no CUDA kernel package takes: other devices, fp32, other head dimensions, several key dtypes."""
    if device.capability is None or device.capability < oldest:
        return f"needs sm_{oldest[0]}{oldest[1]} or newer, this is {device.sm}"
    if cfg.dtype not in _HALVES:
        return f"dtype {cfg.dtype} is neither float16 nor bfloat16"
    if cfg.head_dim not in dims:
        return f"head_dim {cfg.head_dim} is not one of {', '.join(map(str, dims))}"
    return _only_causal(cfg)


def _only_causal(cfg: GQAConfig) -> str | None:
    return None if cfg.causal else "here it masks later tokens, and these see each other"


def _same_dtype(cfg: GQAConfig) -> str | None:
    return None if cfg.kv_dtype == cfg.dtype else f"a cache of {cfg.kv_dtype} under queries of {cfg.dtype}"


def _only_sm_90(device: Device) -> str | None:
    return None if device.capability == (9, 0) else f"its kernels are for sm_90 only, this is {device.sm}"


def _refuse_flashinfer_fa3(cfg: GQAConfig, device: Device) -> str | None:
    return _refuse_kernels(cfg, device, (9, 0), (64, 128, 256)) or _only_sm_90(device) or _same_dtype(cfg)


def _refuse_flashinfer_fa2(cfg: GQAConfig, device: Device) -> str | None:
    if (why := _refuse_kernels(cfg, device, (8, 0), (64, 128, 256))) is not None:
        return why
    if cfg.lse:
        return "it adds up weights that are rounded to 16 bits, which shows in an LSE"
    # One request has as many parts as any step; 128 tokens fill the largest tile.
    parts = split_bytes(cfg, device.sm_count, 1, 1 if cfg.phase == "decode" else 128, captured=False)
    if parts > MOST_SPLIT_BYTES:
        return f"parts of split keys may take {parts >> 20} MiB, more than {MOST_SPLIT_BYTES >> 20}"
    return None


def _trtllm_gen_refuses(cfg: GQAConfig) -> str | None:
    """Refuse what TensorRT-LLM's generated kernels do not take on the right hardware either."""
    if cfg.dtype not in _HALVES:
        return f"dtype {cfg.dtype} is neither float16 nor bfloat16"
    if cfg.page_size not in (16, 32, 64):
        return f"page_size {cfg.page_size} is not one of 16, 32, 64"
    if cfg.head_dim not in (64, 128, 256):
        return f"head_dim {cfg.head_dim} is not one of 64, 128, 256"
    if cfg.softcap is not None:
        return "it has no softcap"
    return "it returns no LSE" if cfg.lse else _only_causal(cfg)


def _refuse_xqa(cfg: GQAConfig, device: Device) -> str | None:
    if (why := _refuse_kernels(cfg, device, (9, 0), tuple(range(16, 257, 16))) or _same_dtype(cfg)) is not None:
        return why
    if cfg.lse:
        return "it returns no LSE"
    if cfg.softcap is not None:
        return "it has no softcap"
    if cfg.page_size not in (16, 32, 64, 128):
        return f"page_size {cfg.page_size} is not one of 16, 32, 64, 128"
    return None if cfg.group <= 32 else f"{cfg.group} query heads a key head are more than 32"


def _refuse_fa3(cfg: GQAConfig, device: Device) -> str | None:
    dims = tuple(range(8, 257, 8))
    if (why := _refuse_kernels(cfg, device, (9, 0), dims) or _only_sm_90(device) or _same_dtype(cfg)) is not None:
        return why
    if cfg.softcap is not None:
        return "its packages are built without softcap"
    return "it rounds sinks to bfloat16, which shows in an LSE" if cfg.sinks and cfg.lse else None


def _refuse_sdpa(cfg: GQAConfig, device: Device) -> str | None:
    for why, given in (("an LSE", cfg.lse), ("windows", cfg.window), ("softcap", cfg.softcap), ("sinks", cfg.sinks)):
        if given:
            return f"torch's kernels do not do {why}"
    return _only_causal(cfg) or _same_dtype(cfg)


_HERE = "fastlayers.attention.gqa"
_UNPADDED = ("decode", "extend")
GQA = Registry(
    "gqa",
    [
        # Ours first: the package rows are faster for some shapes (a tuned table says which), but are compiled at first
        # use, some for minutes.
        replace(
            triton_backend(f"{_HERE}.triton:TritonGQA", _refuse_triton), captures_extend=True, masks_trees=True
        ),
        Backend(
            "flashinfer_fa3", f"{_HERE}.flashinfer:FlashInferFA3", ("flashinfer.prefill:get_batch_prefill_module",),
            _refuse_flashinfer_fa3, phases=("extend",),
        ),
        # TensorRT-LLM's generated kernels, as FlashInfer has them; on sm_90 its decode is XQA.
        replace(
            blackwell_guard(
                "trtllm_gen",
                ("flashinfer.decode:trtllm_batch_decode_with_kv_cache",
                 "flashinfer.prefill:trtllm_batch_context_with_kv_cache"),
                _trtllm_gen_refuses,
            ),
            phases=_UNPADDED,
        ),
        Backend("xqa", f"{_HERE}.xqa:XQA", ("flashinfer.xqa:xqa",), _refuse_xqa, phases=("decode",)),
        Backend(
            "fa3", f"{_HERE}.fa3:FA3", ("flash_attn_interface:flash_attn_with_kvcache",), _refuse_fa3,
            phases=_UNPADDED,
        ),
        Backend(
            "flashinfer_fa2", f"{_HERE}.flashinfer:FlashInferFA2", ("flashinfer.prefill:get_batch_prefill_module",),
            _refuse_flashinfer_fa2, phases=_UNPADDED,
        ),
        # Its module asks torch for what every version that is taken has, and importing that may take seconds.
        Backend("sdpa", f"{_HERE}.sdpa:SDPA", (), _refuse_sdpa, phases=("extend",)),
        replace(torch_backend(f"{_HERE}.torch:TorchGQA"), captures_extend=True, masks_trees=True),
        replace(reference_backend(f"{_HERE}.reference:ReferenceGQA"), masks_trees=True),
    ],
    cases=f"{_HERE}.cases",
)  # fmt: skip
