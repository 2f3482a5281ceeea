"""MLA's absorbed products over the codes of an FP8-block ``kv_b_proj``, instead of a dequantised copy of it.

    kv_b_proj.weight        viewed [H, N+V, L]               e4m3, scales [H, (N+V)/128, L/128]
    q_latent[H,T,L]         = q_nope[H,T,N] · W_kc[H,N,L]    W_kc: the first N rows of a head, taken transposed
    o[H,T,V]                = o_latent[H,T,L] · W_vc[H,V,L]ᵀ W_vc: the last V rows

Both are views: a head's rows are whole blocks, so that neither codes nor scales move. Inputs are rounded to e4m3 with a
scale for each token, head and 128 features, inside the products' own kernels (:class:`fastlayers.Bmm`).
Source: SGLang's absorbed products by group quantisation, without its masks and padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastlayers.attention.mla.config import NAME, MLAConfig
from fastlayers.errors import ArgumentError
from fastlayers.linear.bmm.layer import Bmm
from fastlayers.linear.fp8_block.layer import FP8BlockLinear
from fastlayers.quant.block_quant import BLOCK


class QuantisedAbsorb(nn.Module):
    """Both products of one layer; holds no weights.

    Parameters
    ----------
    cfg : MLAConfig
    projection : nn.Module
        ``kv_b_proj``.
    device

    Raises
    ------
    ArgumentError
        The projection is not of 128×128 blocks, or a head's rows are not whole blocks.
    """

    def __init__(self, cfg: MLAConfig, projection: nn.Module, device: Any) -> None:
        super().__init__()
        rows = cfg.qk_nope_head_dim, cfg.v_head_dim
        blocks = isinstance(projection, FP8BlockLinear) and projection.cfg.block_size == BLOCK
        if not blocks or any(size % BLOCK[0] for size in rows):
            accepted = f"with a kv_b_proj of {BLOCK} blocks, qk_nope_head_dim and v_head_dim multiples of {BLOCK[0]}"
            raise ArgumentError(NAME, "fp8_absorb", f"True with {type(projection).__name__}, heads of {rows}", accepted)
        self.cfg = cfg
        heads, rank = cfg.num_heads, cfg.kv_lora_rank
        self.keys = Bmm(heads, rows[0], rank, format="fp8_block", dtype=cfg.dtype, device=device)
        self.values = Bmm(heads, rank, rows[1], format="fp8_block", dtype=cfg.dtype, device=device)

    def forward(
        self, projection: Any, q_nope: torch.Tensor, q_pe: torch.Tensor, room: torch.Tensor | None,
        attend: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Return ``o [T, H, V]`` of ``q_nope [T, H, N]`` and ``q_pe [T, H, R]``, attended to by ``attend`` between.

        ``room [T, H, L+R]``: where the queries go, with ``q_pe`` there already; ``None``: a new tensor.
        """
        cfg, rank = self.cfg, self.cfg.kv_lora_rank
        per_head = projection.weight.view(cfg.num_heads, -1, rank)
        scales = projection.weight_scale_inv.view(cfg.num_heads, per_head.shape[1] // BLOCK[0], -1)
        nope, blocks = cfg.qk_nope_head_dim, cfg.qk_nope_head_dim // BLOCK[0]
        keys = per_head[:, :nope].transpose(1, 2), scales[:, :blocks].transpose(1, 2)
        by_head = q_nope.transpose(0, 1)
        if room is None:
            queries = torch.cat([self.keys(by_head, *keys).transpose(0, 1), q_pe], -1)
        else:
            self.keys(by_head, *keys, out=room[..., :rank].transpose(0, 1))
            queries = room
        latent = attend(queries).to(queries.dtype).transpose(0, 1)
        if room is None:
            return self.values(latent, per_head[:, nope:], scales[:, blocks:]).transpose(0, 1)
        o = room.new_empty(room.shape[0], cfg.num_heads, cfg.v_head_dim)
        self.values(latent, per_head[:, nope:], scales[:, blocks:], out=o.transpose(0, 1))
        return o
