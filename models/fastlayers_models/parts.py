"""What a step is asked for: what each request brings to it, and which captured step it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastlayers.errors import check_choice
from fastlayers.sampler.layer import MODES
from fastlayers_models.images import PromptImages


class StepKey(NamedTuple):
    """What a captured step is: its kind, the tokens and requests it is padded to, and how it samples.

    ``longest``: the most tokens, cached and new, of a request; 0: as many as the state holds.
    """

    kind: str
    tokens: int
    requests: int
    mode: str
    longest: int = 0


@dataclass(frozen=True)
class Part:
    """What one request brings to an extend step.

    Parameters
    ----------
    ids : sequence of int
        New tokens. Empty: one, the last token of ``row``, which may still be on its way (a decode row).
    prefix : int
        Tokens of the request that are cached.
    pages : sequence of int
        Enough for the prefix and the new tokens.
    row : int, optional
        Row by which the next token is drawn, and which gets it. ``None``: none is drawn (not the last chunk).
    mode : str
        Of sampling, one of :data:`fastlayers.sampler.layer.MODES`: ``Row.params.mode``.
    images : PromptImages, optional
        Of the request. A step with images is not captured.
    """

    ids: Sequence[int]
    prefix: int
    pages: Sequence[int]
    row: int | None = None
    mode: str = "greedy"
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:  # many are made a step: the usual answer without a call
            check_choice("Part", "mode", self.mode, MODES)
