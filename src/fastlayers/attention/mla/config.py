"""The attention core of MLA: over cached latents (MQA form), or over expanded keys and values (MHA form).

    T = new tokens, S = tokens attended to, H = heads on this rank
    L = kv_lora_rank, R = qk_rope_head_dim, N = qk_nope_head_dim, V = v_head_dim

    decode   q[T,H,L+R] · cache[pages, page, L+R]           -> o[T,H,L],  lse[T,H]
             s = scale · q · row ;  p = softmax(s) ;  o = p · row[:L]        one cached row serves all heads
    prefill  q[T,H,N+R] · k[S,H,N+R], v[S,H,V]               -> o[T,H,V],  lse[T,H]

``scale`` is the one of the unabsorbed head (N+R wide, YaRN's factor included), never (L+R)^-0.5. LSE is the natural
logarithm, fp32; a row that attends to nothing gives o = 0 and lse = -inf. A backend has

    decode(q, cache, meta) -> (o, lse)
    prefill(q, k, v, lens, need_lse=True) -> (o, lse or None)

Few kernels take every step, so a backend says which *phases* it serves:

    "decode"   ``decode`` with one new token a request, every cached row counts
    "ragged"   ``decode`` with any number of new tokens, causal
    "padded"   the same with left padding: rows before ``meta.starts`` do not count
    "extend"   ``prefill``
    ""         all of them
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from fastlayers.attention.meta import AttentionMeta
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, check_choice, check_fields, check_plain, check_positive
from fastlayers.registry import (
    TRITON_NEEDS,
    Backend,
    Registry,
    blackwell_guard,
    reference_backend,
    torch_backend,
    triton_backend,
)

NAME = "MLAAttention"
PHASES = ("decode", "ragged", "padded", "extend")
FEW = 8  # new tokens of each request in a step that verifies drafts


@dataclass(frozen=True)
class MLAConfig:
    """What an MLA core must know; ``num_heads`` is per rank, ``phase`` one of :data:`PHASES` or "".

    See the head of this file for the letters and the phases. ``context`` is the number of cached tokens a request for
    which the choice is made: which kernel wins depends on it as much as on the batch. It changes no result.
    ``fp8_math`` lets ``decode`` round queries and softmax weights to e4m3 as well, where the cache is e4m3: several
    times faster, and as coarse as that format. A backend may be more exact. Without ``lse`` nobody reads decode's LSE,
    and it is unspecified. ``captured``: whether the steps are captured extends (``meta.is_extend_bucket``). ``tree``:
    whether new tokens are trees of drafts, of which each sees its own path (``meta.tree``). ``few``: whether in
    "ragged" no request brings more than :data:`FEW` new tokens.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    phase: str = ""
    context: int = 4096
    fp8_math: bool = False
    lse: bool = True
    captured: bool = False
    tree: bool = False
    few: bool = False

    def __post_init__(self) -> None:
        check_fields(NAME, self)
        check_choice(NAME, "phase", self.phase, ("", *PHASES))
        check_positive(
            NAME, num_heads=self.num_heads, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim,
            qk_nope_head_dim=self.qk_nope_head_dim, v_head_dim=self.v_head_dim, page_size=self.page_size,
            context=self.context,
        )  # fmt: skip
        check_plain(NAME, "float > 0", softmax_scale=self.softmax_scale)
        floats = (torch.float32, torch.float16, torch.bfloat16)
        check_choice(NAME, "dtype", self.dtype, floats)
        check_choice(NAME, "kv_dtype", self.kv_dtype, (*floats, torch.float8_e4m3fn))
        if self.fp8_math and self.kv_dtype != torch.float8_e4m3fn:
            raise ArgumentError(NAME, "fp8_math", True, f"a cache of float8_e4m3fn, not of {self.kv_dtype}")

    @property
    def latent_width(self) -> int:
        """Width of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def tuning_key(self) -> str:
        """Return the shape key of tuned tables; the scale changes nothing."""
        dims = f"L={self.kv_lora_rank},R={self.qk_rope_head_dim},N={self.qk_nope_head_dim},V={self.v_head_dim}"
        dtypes = "_".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.kv_dtype))
        dtypes += "_math" if self.fp8_math else ""
        context = f",ctx={self.context}" if self.phase == "decode" else ""
        return f"H={self.num_heads},{dims},page={self.page_size},{dtypes},{self.phase or 'all'}{context}"


def check_no_padding(backend: str, meta: AttentionMeta) -> None:
    """Raise :class:`ArgumentError` if the step has left padding; for plans of backends that cannot mask it.

    A layer takes another backend for such a step. What can come here is a bucket that was captured without padding.
    """
    if any(meta.batch.starts):
        accepted = f"steps without left padding: {backend} was chosen (or captured) for the phase 'decode'"
        raise ArgumentError(NAME, "meta.starts", meta.batch.starts, accepted)


def empty_decode(q: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention to latents writes into, ``o [T, H, rank]`` and ``lse [T, H]``; also operators' fake."""
    return q.new_empty(*q.shape[:2], rank), q.new_empty(*q.shape[:2], dtype=torch.float32)


def empty_prefill(q: torch.Tensor, v: torch.Tensor, need_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention to keys writes into, ``o [T, H, V]`` and, if needed, ``lse``; also operators' fake."""
    rows = q.shape[0] if need_lse else 0
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(rows, q.shape[1], dtype=torch.float32)


@dataclass(frozen=True)
class RaggedLengths:
    """Ragged lengths of a prefill: tensors for kernels, tuples for the host.

    ``cu_q``, ``cu_k``: int32 ``[B + 1]`` on the device. With ``causal``, query i of a request with q new and k
    attended tokens sees keys up to ``k - q + i``. ``plans`` holds what backends computed for these lengths: layers
    that share one object share them.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    causal: bool
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def plan_of(self, key: Hashable, make: Callable[[RaggedLengths], Any]) -> Any:
        """Return ``make(self)``, computed once for each key."""
        if key not in self.plans:
            self.plans[key] = make(self)
        return self.plans[key]

    @staticmethod
    def of(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, device: torch.device) -> RaggedLengths:
        """Build from host lengths; copies two short tensors to the device."""

        def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
            host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
            return host.to(device, non_blocking=True)

        return RaggedLengths(cumulative(q_lens), cumulative(k_lens), q_lens, k_lens, causal)


_HALF = (torch.float16, torch.bfloat16)


def _refuses_latents(cfg: MLAConfig) -> str | None:
    """Say what both foreign decode kernels cannot do: they are compiled for DeepSeek's latents."""
    if (cfg.kv_lora_rank, cfg.qk_rope_head_dim) != (512, 64):
        return f"latents of {cfg.kv_lora_rank} + {cfg.qk_rope_head_dim} are not 512 + 64"
    return None if cfg.dtype in _HALF else f"dtype {cfg.dtype} is not float16 or bfloat16"


def _flashmla_refuses(cfg: MLAConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.page_size != 64:
        return f"pages of {cfg.page_size} tokens are not of 64"
    if cfg.kv_dtype == torch.float8_e4m3fn:
        if not cfg.fp8_math:
            return "with an e4m3 cache it rounds queries and softmax weights to e4m3, too, which fp8_math would allow"
        if cfg.dtype != torch.bfloat16:
            return f"with an e4m3 cache its output is bfloat16, not {cfg.dtype}"
    elif cfg.kv_dtype != cfg.dtype:
        return f"a cache of {cfg.kv_dtype} is not of the queries' {cfg.dtype}"
    return _refuses_latents(cfg)


# Tokens of a captured step that verifies drafts, from which on FlashMLA takes it: with 16 to 128 heads and contexts of
# 2,048 and 4,096 it took at most Triton's time from 24 tokens on, half of it with many heads, and up to twice of it
# at 16 tokens and fewer (benchmarks/results/flashmla_h200.jsonl). With contexts of 500 it takes more of it at 32
# tokens; at 128 of them more with 16 and 32 heads and less with more, and at 256 less with all but 16. A server
# captures what differs so for contexts up to 1,024 as well (benchmarks/notes/mla.md).
VERIFY_FROM, VERIFY_CONTEXT, VERIFY_HEADS = 24, 4096, 16
SHORT_FROM = {64: 96, 32: 192}  # by the least heads


def _flashmla_verifies_from(cfg: MLAConfig) -> int | None:
    if not (cfg.phase == "ragged" and cfg.few and cfg.captured and cfg.kv_dtype == torch.bfloat16):
        return None
    if cfg.context < VERIFY_CONTEXT:
        return next((rows for heads, rows in SHORT_FROM.items() if cfg.num_heads >= heads), None)
    return VERIFY_FROM if cfg.num_heads >= VERIFY_HEADS else None


def _flashinfer_refuses(cfg: MLAConfig, device: Device) -> str | None:
    if device.capability is None or device.capability < (8, 0):
        return f"needs sm_80 or newer, this is {device.sm}"
    if cfg.phase == "extend":
        dims = (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, cfg.v_head_dim)
        if cfg.dtype not in _HALF:
            return f"dtype {cfg.dtype} is not float16 or bfloat16"
        return None if dims == (192, 128) else f"heads of {dims[0]} and {dims[1]} are not of 192 and 128"
    if cfg.kv_dtype not in (cfg.dtype, torch.float8_e4m3fn):
        return f"a cache of {cfg.kv_dtype} is neither of the queries' {cfg.dtype} nor e4m3"
    return _refuses_latents(cfg)


def _fa3_refuses(cfg: MLAConfig, device: Device) -> str | None:
    if (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.phase != "extend" and cfg.kv_dtype == torch.float8_e4m3fn and cfg.dtype != torch.bfloat16:
        return f"with an e4m3 cache queries of {cfg.dtype} are not bfloat16"
    return _flashinfer_refuses(cfg, device)


def _fa2_refuses(cfg: MLAConfig, device: Device) -> str | None:
    if cfg.kv_dtype == torch.float8_e4m3fn:
        return "has no e4m3 cache"
    if cfg.lse:
        return "sums softmax weights after rounding them: its LSE is off by 1e-5, more than fp32 may be"
    return _flashinfer_refuses(cfg, device)


def _triton_refuses(cfg: MLAConfig, device: Device) -> str | None:
    if cfg.kv_lora_rank & (cfg.kv_lora_rank - 1) or cfg.qk_rope_head_dim & (cfg.qk_rope_head_dim - 1):
        return f"kv_lora_rank {cfg.kv_lora_rank} and qk_rope_head_dim {cfg.qk_rope_head_dim} must be powers of two"
    if cfg.kv_dtype == torch.float8_e4m3fn and (why := device.refuses_e4m3("e4m3 caches")) is not None:
        return why
    if min(cfg.kv_lora_rank, cfg.qk_rope_head_dim) < 16:
        return f"kv_lora_rank {cfg.kv_lora_rank} and qk_rope_head_dim {cfg.qk_rope_head_dim} must be at least 16"
    # What the compiler reports for the largest 16-bit tiles, a column: decode 152 KiB of 576, prefill 128 KiB of 320.
    head = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    needed = max(cfg.latent_width * 152 / 576, head * 128 / 320)
    if device.type == "cuda" and cfg.dtype != torch.float32 and needed * 1024 > device.shared_memory:
        return f"tiles take {needed:.0f} KiB of shared memory, {device.sm} has {device.shared_memory // 1024}"
    return None


def _gluon_refuses(cfg: MLAConfig, device: Device) -> str | None:
    # Without a GPU its twin runs in Triton's interpreter.
    if device.type == "cuda" and (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.kv_dtype != torch.float8_e4m3fn:
        return f"a cache of {cfg.kv_dtype} is not of e4m3"
    if cfg.num_heads > 128:
        return f"{cfg.num_heads} heads are more than 128"
    return _refuses_latents(cfg)


def _wgmma_refuses(cfg: MLAConfig, device: Device) -> str | None:
    # Without a GPU it runs in Triton's interpreter.
    if device.type == "cuda" and (why := device.refuses_all_but(9)) is not None:
        return why
    if cfg.dtype not in _HALF or cfg.kv_dtype != cfg.dtype:
        return f"queries of {cfg.dtype} and a cache of {cfg.kv_dtype} are not both float16 or bfloat16"
    if cfg.num_heads > 16:
        return f"{cfg.num_heads} heads are more than 16"
    if cfg.page_size % 64:
        return f"pages of {cfg.page_size} tokens do not hold whole tiles of 64"
    return _refuses_latents(cfg)


_HERE = "fastlayers.attention.mla"
# As Triton 3.6 has them.
_GLUON = (
    "triton.experimental.gluon:constexpr_function", "triton.experimental.gluon.language:warp_specialize",
    "triton.experimental.gluon.language.nvidia.hopper:warpgroup_mma",
)  # fmt: skip
_FLASHINFER = ("flashinfer.mla:get_batch_mla_module", "flashinfer.prefill:get_batch_prefill_module")
MLA = Registry(
    "mla",
    [
        # Rows for hardware that was not at hand: guards and reasons only, never chosen elsewhere.
        blackwell_guard("trtllm_gen", ("flashinfer:mla",)),
        blackwell_guard("cutlass", ("sgl_kernel:cutlass_mla_decode",)),
        Backend(
            "flashmla",
            f"{_HERE}.flashmla:FlashMLA",
            ("sgl_kernel.flash_mla:flash_mla_with_kvcache", "torch.ops:sgl_kernel.fwd_kvcache_mla"),
            _flashmla_refuses,
            phases=("decode", "ragged"),
            captures_extend=True,
            few_only=True,
            auto_phases=("decode",),
            auto_from=_flashmla_verifies_from,
        ),
        # Ahead of what converts such a cache to bf16: 1.7 to 2.5 times as fast with 128 heads.
        replace(
            triton_backend(f"{_HERE}.gluon_decode:GluonMLA", _gluon_refuses),
            name="gluon",
            needs=(*TRITON_NEEDS, *_GLUON),
            phases=("decode",),
            repeats_on=(),  # alike in replays; whatever shares the batch was not seen yet
        ),
        Backend(
            "flashinfer_fa3",
            f"{_HERE}.flashinfer:FlashInferFA3",
            _FLASHINFER,
            _fa3_refuses,
            phases=("decode", "ragged", "extend"),
        ),
        replace(triton_backend(f"{_HERE}.triton:TritonMLA", _triton_refuses), captures_extend=True, masks_trees=True),
        replace(
            triton_backend(f"{_HERE}.wgmma:WgmmaMLA", _wgmma_refuses),
            name="wgmma",
            needs=(*TRITON_NEEDS, *_GLUON),
            phases=("decode",),
            repeats_on=(),  # alike in replays; whatever shares the batch was not seen yet
        ),
        Backend(
            "flashinfer_fa2",
            f"{_HERE}.flashinfer:FlashInferFA2",
            _FLASHINFER,
            _fa2_refuses,
            phases=("decode", "ragged"),
        ),
        replace(torch_backend(f"{_HERE}.torch:TorchMLA"), captures_extend=True, masks_trees=True),
        replace(reference_backend(f"{_HERE}.reference:ReferenceMLA"), masks_trees=True),
    ],
    cases=f"{_HERE}.cases",
)
