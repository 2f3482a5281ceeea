"""The sampler by FlashInfer's kernels (compiled at first use).

    softmax → top_k_renorm_probs → top_p_renorm_probs → min_p_sampling_from_probs

Its kernels read one seed and one counter for a whole batch and give each row its own stretch of the generator, so a
row's token depends on its place in the batch. Probabilities are fp32.
"""

from __future__ import annotations

import importlib

import torch

from fastlayers.operators import operator
from fastlayers.sampler.layer import MODES, RowParams, SamplerConfig, fake_ids

# A draw takes one number of 32 bits a row; the generator makes four at a time.
NUMBERS_A_CALL = 4


@operator("sampler_flashinfer", fake_ids, writes=("offset",))
def _sampler(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p:
    torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, mode: int,
) -> torch.Tensor:  # fmt: skip
    x = logits.float()
    x = x.masked_fill(x.isnan(), float("-inf"))
    greedy = x.argmax(-1)
    counter = offset[:1] * NUMBERS_A_CALL
    offset.add_(1)
    if not mode or not len(x):
        return greedy
    package = importlib.import_module("flashinfer.sampling")
    largest = x.gather(-1, greedy.unsqueeze(-1))
    is_greedy = (temperature <= 0) | (largest.squeeze(-1) == float("-inf"))
    below = (x - largest).masked_fill(x == largest, 0.0)  # also where inf - inf is NaN
    probs = package.softmax(below, temperature.masked_fill(is_greedy, 1.0), enable_pdl=False)
    if MODES[mode] == "filtered":
        vocab_size = x.shape[1]
        kept = top_k.masked_fill(top_k <= 0, vocab_size).clamp(max=vocab_size)
        probs = package.top_p_renorm_probs(package.top_k_renorm_probs(probs, kept), top_p)
    drawn = package.min_p_sampling_from_probs(probs, min_p, seed=seed[:1], offset=counter)
    return torch.where(is_greedy, greedy, drawn.long())


class FlashInferSampler:
    """Draws a batch from its first row's seed and counter."""

    def __init__(self, cfg: SamplerConfig) -> None:
        self.cfg = cfg

    def __call__(self, logits: torch.Tensor, rows: RowParams, mode: str) -> torch.Tensor:
        """Return ids ``[B]`` and advance the offsets in place."""
        ids: torch.Tensor = _sampler(logits, *rows, MODES.index(mode))
        return ids
