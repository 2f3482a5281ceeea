"""The sampler's oracle: one row at a time, on the CPU, fp64."""

from __future__ import annotations

import torch

from fastlayers.sampler.layer import RowParams, SamplerConfig


def philox_words(seed: int, offset: int) -> list[int]:
    """Philox4x32-10 in Python integers."""
    low = 2**32 - 1
    k0, k1 = seed & low, seed >> 32 & low
    counter = [offset & low, offset >> 32 & low, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ k0, b & low, a >> 32 ^ counter[3] ^ k1, a & low]
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return counter


class ReferenceSampler:
    """See :mod:`fastlayers.sampler.layer` for the procedure."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.cfg = cfg

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids and advance the offsets; ``mode`` only promises what the rows need."""
        columns = zip(*(tensor.tolist() for tensor in rows), strict=True)
        ids = [self._row(x, *values) for x, values in zip(logits.double().cpu(), columns, strict=True)]
        rows.offset.add_(1)
        return torch.tensor(ids, dtype=torch.int64, device=logits.device)

    @staticmethod
    def _row(x: torch.Tensor, temperature: float, k: int, p: float, min_p: float, seed: int, offset: int) -> int:
        x = torch.where(x.isnan(), float("-inf"), x)
        largest = x.max()
        if temperature <= 0 or largest == float("-inf"):
            return int((x == largest).nonzero()[0])
        weight = torch.where(x == largest, 1.0, ((x - largest) / temperature).exp())
        ranked, order = x.sort(descending=True)
        kept = torch.ones_like(x, dtype=torch.bool)
        if 0 < k < len(x):
            kept = x >= ranked[k - 1]
        if p < 1:
            sums = torch.cat((x.new_zeros(1), (weight * kept)[order].cumsum(0)))
            larger = torch.searchsorted(-ranked, -x)  # how many logits are strictly larger than each
            kept &= (larger == 0) | (sums[larger] < p * sums[-1])
        kept &= weight >= min_p
        running = (weight * kept).cumsum(0)
        first, second, _, _ = philox_words(seed, offset)
        target = ((first >> 5) * 2**26 + (second >> 6)) / 2**53 * running[-1]
        above = (running > target).nonzero()
        return int(above[0]) if len(above) else int((weight * kept).nonzero()[-1])
