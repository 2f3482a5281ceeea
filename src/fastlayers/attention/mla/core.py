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
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers.device import Device
from fastlayers.errors import check_choice, check_positive
from fastlayers.layer import PHASES
from fastlayers.registry import Backend, Registry, reference_backend, torch_backend, triton_backend


@dataclass(frozen=True)
class MLAConfig:
    """What an MLA core must know; ``num_heads`` is per rank. See the head of this file for the letters.

    ``phase``: ``"decode"`` asks for ``decode`` only (the absorbed form: mostly one token a request, but short extends
    and left-padded batches come this way too), ``"extend"`` for ``prefill`` only, ``""`` for both.
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

    def __post_init__(self) -> None:
        check_choice("mla", "phase", self.phase, ("", *PHASES))
        check_positive(
            "mla", num_heads=self.num_heads, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim,
            qk_nope_head_dim=self.qk_nope_head_dim, v_head_dim=self.v_head_dim, page_size=self.page_size,
        )  # fmt: skip
        floats = (torch.float32, torch.float16, torch.bfloat16)
        check_choice("mla", "dtype", self.dtype, floats)
        check_choice("mla", "kv_dtype", self.kv_dtype, (*floats, torch.float8_e4m3fn))

    @property
    def latent_width(self) -> int:
        """Width of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class Varlen:
    """Ragged lengths of a prefill: tensors for kernels, tuples for the host.

    ``cu_q``, ``cu_k``: int32 ``[B + 1]`` on the device. With ``causal``, query i of a request with q new and k
    attended tokens sees keys up to ``k - q + i``.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    causal: bool

    @staticmethod
    def of(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, device: torch.device) -> Varlen:
        """Build from host lengths; copies two short tensors to the device."""

        def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
            host = torch.zeros(len(lengths) + 1, dtype=torch.int32)
            host[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
            return host.to(device, non_blocking=True)

        return Varlen(cumulative(q_lens), cumulative(k_lens), q_lens, k_lens, causal)


def _needs_blackwell(cfg: MLAConfig, device: Device) -> str | None:
    if device.capability is None or device.capability[0] != 10:
        return f"needs sm_100, this is {device.sm}"
    return None


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


_HERE = "fastlayers.attention.mla"
_NOT_RUN = "not run on this hardware"
MLA = Registry(
    "mla",
    [
        # Rows for hardware that was not at hand: guards and reasons only, never chosen elsewhere.
        Backend(
            "trtllm_gen", f"{_HERE}.blackwell:TrtllmGenMLA", ("flashinfer:mla",), _needs_blackwell, (), note=_NOT_RUN
        ),
        Backend(
            "cutlass",
            f"{_HERE}.blackwell:CutlassMLA",
            ("sgl_kernel:cutlass_mla_decode",),
            _needs_blackwell,
            (),
            note=_NOT_RUN,
        ),
        triton_backend(f"{_HERE}.triton:TritonMLA", _triton_refuses),
        torch_backend(f"{_HERE}.torch:TorchMLA"),
        reference_backend(f"{_HERE}.reference:ReferenceMLA"),
    ],
    cases=f"{_HERE}.cases",
)
