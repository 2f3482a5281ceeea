"""Write of new latent and rope rows into a paged cache (MLA), without concatenating them first.

    T = tokens, L = kv_lora_rank, R = rope_dim; the cache is read as [slots, L + R]
    cache[loc[t], :L] = cache_dtype(latent[t])
    cache[loc[t], L:] = cache_dtype(rope[t])

e4m3 caches saturate: values are clamped to ±448 before the cast (scale 1). Several rows may share slot 0,
where padded rows go; what it then holds is unspecified.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastlayers import env
from fastlayers.attention.kv_cache.spec import DTYPES as CACHE_DTYPES
from fastlayers.attention.kv_write.layer import FLOATS, INDICES, check_cache, needs_e4m3
from fastlayers.attention.meta import check_loc
from fastlayers.errors import check_choice, check_positive, check_tensor, free_to_look
from fastlayers.layer import Layer
from fastlayers.registry import Registry, reference_backend, torch_backend, triton_backend


@dataclass(frozen=True)
class MLAKVWriteConfig:
    """What a backend must know: the two parts of a row, and the cache's dtype."""

    kv_lora_rank: int
    rope_dim: int
    kv_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive("MLAKVWrite", kv_lora_rank=self.kv_lora_rank, rope_dim=self.rope_dim)
        check_choice("MLAKVWrite", "kv_dtype", self.kv_dtype, CACHE_DTYPES)


_HERE = "fastlayers.attention.mla_kv_write"
MLA_KV_WRITE = Registry(
    "mla_kv_write",
    [
        triton_backend(f"{_HERE}.triton:TritonMLAKVWrite", needs_e4m3),
        torch_backend(f"{_HERE}.torch:TorchMLAKVWrite"),
        reference_backend(f"{_HERE}.reference:ReferenceMLAKVWrite"),
    ],
    cases=f"{_HERE}.cases",
)


class MLAKVWrite(Layer):
    """Writes new latent and rope rows into a paged cache.

    Parameters
    ----------
    kv_lora_rank, rope_dim : int
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
    >>> from fastlayers.attention.mla_kv_write.layer import MLAKVWrite
    >>> write = MLAKVWrite(kv_lora_rank=2, rope_dim=1, kv_dtype=torch.float32)
    >>> cache = torch.zeros(2, 1, 3)
    >>> write(torch.ones(1, 2), torch.full((1, 1), 7.0), cache, torch.tensor([1]))
    >>> cache.tolist()
    [[[0.0, 0.0, 0.0]], [[1.0, 1.0, 7.0]]]
    """

    def __init__(
        self,
        kv_lora_rank: int,
        rope_dim: int,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.choose(MLA_KV_WRITE, MLAKVWriteConfig(kv_lora_rank, rope_dim, kv_dtype), device, backend)
        self.debug = env.debug()

    def forward(self, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor) -> None:
        """Write.

        Parameters
        ----------
        latent, rope : Tensor ``[T, L]``, ``[T, R]``
            fp32, fp16 or bf16; rows may be strided, the last dimension is contiguous.
        cache : Tensor ``[pages, page_size, L + R]``
            Contiguous; written in place.
        loc : Tensor int64 or int32 ``[T]``
            Slot of each row; contiguous.
        """
        cfg, name = self.cfg, "MLAKVWrite"
        wanted, where = (None, cfg.kv_lora_rank), self.device_type
        check_tensor(name, "latent", latent, shape=wanted, dtype=FLOATS, device=where, last_dim_contiguous=True)
        shape, where = (latent.shape[0], cfg.rope_dim), latent.device
        check_tensor(name, "rope", rope, shape=shape, dtype=latent.dtype, device=where, last_dim_contiguous=True)
        check_cache(name, "cache", cache, (cfg.kv_lora_rank + cfg.rope_dim,), cfg.kv_dtype, where)
        check_tensor(name, "loc", loc, shape=shape[:1], dtype=INDICES, device=where, contiguous=True)
        check_loc(name, loc, cache.shape[0] * cache.shape[1], self.debug or free_to_look(loc))
        self.ladder.pick(latent.shape[0])(latent, rope, cache, loc)
