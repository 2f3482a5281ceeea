"""Write of new keys and values into a paged cache, both in one launch.

    T = tokens, Hkv = num_kv_heads, D = head_dim, V = v_head_dim; the caches are read as [slots, Hkv, ...]
    k_cache[loc[t], h, :] = cache_dtype(k[t, h, :])
    v_cache[loc[t], h, :] = cache_dtype(v[t, h, :])

e4m3 caches saturate: values are clamped to ±448 before the cast (scale 1). Several rows may share slot 0,
where padded rows go; what it then holds is unspecified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fastlayers import env
from fastlayers.attention.kv_cache.spec import DTYPES as CACHE_DTYPES
from fastlayers.attention.meta import check_loc
from fastlayers.device import Device
from fastlayers.errors import check_choice, check_positive, check_tensor, free_to_look
from fastlayers.layer import Layer
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend

FLOATS = CACHE_DTYPES[:3]
INDICES = (torch.int64, torch.int32)


def needs_e4m3(cfg: Any, device: Device) -> str | None:
    """Refuse e4m3 caches on GPUs whose compiler has no e4m3 conversion (a predicate for Triton rows)."""
    return device.refuses_e4m3("e4m3 caches") if cfg.kv_dtype == torch.float8_e4m3fn else None


@dataclass(frozen=True)
class KVWriteConfig:
    """What a backend must know: the row of one token, and the cache's dtype."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive("KVWrite", num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, v_head_dim=self.v_head_dim)
        check_choice("KVWrite", "kv_dtype", self.kv_dtype, CACHE_DTYPES)


_HERE = "fastlayers.attention.kv_write"
KV_WRITE = Registry(
    "kv_write",
    [
        triton_backend(f"{_HERE}.triton:TritonKVWrite", needs_e4m3),
        torch_backend(f"{_HERE}.torch:TorchKVWrite"),
        reference_backend(f"{_HERE}.reference:ReferenceKVWrite"),
    ],
    cases=f"{_HERE}.cases",
)


class KVWrite(Layer):
    """Writes new keys and values into a paged cache.

    Parameters
    ----------
    num_kv_heads, head_dim : int
    v_head_dim : int, optional
        Default ``head_dim``.
    kv_dtype : torch.dtype
        Of the cache: fp32, fp16, bf16 or e4m3.
    device : torch device, optional
    backend : str
        ``"auto"``, a name, or a ladder.

    Notes
    -----
    Capture-safe; allocates nothing on CUDA. Slots are checked on a CPU, and with
    ``FASTLAYERS_DEBUG`` anywhere, which synchronises.
    What is written is outside autograd.

    Examples
    --------
    >>> import torch
    >>> from fastlayers.attention.kv_write.layer import KVWrite
    >>> write = KVWrite(num_kv_heads=1, head_dim=2, kv_dtype=torch.float32)
    >>> k_cache, v_cache = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2)
    >>> write(torch.ones(1, 1, 2), torch.ones(1, 1, 2), k_cache, v_cache, torch.tensor([3]))
    >>> k_cache.flatten().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        cfg = KVWriteConfig(num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, kv_dtype)
        self.choose(KV_WRITE, cfg, device, backend)
        self.debug = env.debug()

    def forward(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """Write.

        Parameters
        ----------
        k, v : Tensor ``[T, Hkv, D]``, ``[T, Hkv, V]``
            fp32, fp16 or bf16; may be strided, the last dimension is contiguous.
        k_cache, v_cache : Tensor ``[pages, page_size, Hkv, D]``, ``[pages, page_size, Hkv, V]``
            Contiguous; written in place.
        loc : Tensor int64 or int32 ``[T]``
            Slot of each row; contiguous.
        """
        cfg = self.cfg
        name, heads, where = "KVWrite", cfg.num_kv_heads, self.device_type
        shape: tuple[int | None, ...] = (None, heads, cfg.head_dim)
        check_tensor(name, "k", k, shape=shape, dtype=FLOATS, device=where, last_dim_contiguous=True)
        tokens, where = k.shape[0], k.device
        shape = (tokens, heads, cfg.v_head_dim)
        check_tensor(name, "v", v, shape=shape, dtype=k.dtype, device=where, last_dim_contiguous=True)
        check_cache(name, "k_cache", k_cache, (heads, cfg.head_dim), cfg.kv_dtype, where)
        pages = tuple(k_cache.shape[:2])
        check_cache(name, "v_cache", v_cache, (heads, cfg.v_head_dim), cfg.kv_dtype, where, pages)
        check_tensor(name, "loc", loc, shape=(tokens,), dtype=INDICES, device=where, contiguous=True)
        check_loc("KVWrite", loc, k_cache.shape[0] * k_cache.shape[1], self.debug or free_to_look(loc))
        self.ladder.pick(tokens)(k, v, k_cache, v_cache, loc)


def check_cache(
    layer: str,
    argument: str,
    cache: torch.Tensor | None,
    row: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    pages: tuple[int, ...] = (),
) -> None:
    """Raise :class:`ArgumentError` unless ``cache`` is a contiguous cache of such rows."""
    shape = (*(pages or (None, None)), *row)
    check_tensor(layer, argument, cache, shape=shape, dtype=dtype, device=device, contiguous=True)
