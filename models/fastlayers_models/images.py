"""Prompts with images: where each stands, positions on three axes, and the rows that take their tokens' places.

    ids        t t I I I I I I t t           an image of 1 × 2 × 3 rows (m × m patches each), m = spatial_merge_size
    time       0 1 2 2 2 2 2 2 5 6           constant within a still image
    height     0 1 2 2 2 3 3 3 5 6
    width      0 1 2 3 4 2 3 4 5 6           what follows goes on behind the longer side
    generated tokens: their place in the sequence + delta, here -3

As transformers' ``get_rope_index`` has it; source: Qwen2-VL (Wang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastlayers.errors import ArgumentError, free_to_look
from fastlayers_models.vision import Grid, VisionConfig, VisionTower

NAME = "Generator"


class ImageRows(NamedTuple):
    """Rows of a step that are images': which of its tokens, int64 ``[n]``, and what stands there, ``[n, D]``."""

    places: torch.Tensor
    values: torch.Tensor


def rope_index(
    ids: Sequence[int], grids: Sequence[Grid], config: VisionConfig, argument: str = "ids"
) -> tuple[torch.Tensor, int, int]:
    """Return where a prompt's tokens stand on three axes, by how much what follows it stands earlier, and its images.

    Parameters
    ----------
    ids : sequence of int
    grids : sequence of (frames, height, width)
        In patches, of the prompt's images in order, and perhaps of later prompts'.
    config : VisionConfig
    argument : str
        Named in errors.

    Returns
    -------
    (Tensor int64 ``[3, tokens]``, int, int)
        Positions; the delta, 0 or less; how many of the grids are the prompt's.

    Raises
    ------
    ArgumentError
        A video, or image tokens that are not as many as the grids say.
    """
    image, merge, parts, at, start, used = config.image_token_id, config.spatial_merge_size, [], 0, 0, 0
    if config.video_token_id in ids:
        place = list(ids).index(config.video_token_id)
        raise ArgumentError(NAME, argument, f"a video's token {config.video_token_id} at {place}", "text and images")
    places = [place for place, token in enumerate(ids) if token == image]
    taken = 0
    while taken < len(places):
        first = places[taken]
        if used == len(grids):
            given = f"{len(places) - taken} image tokens from {first} on"
            raise ArgumentError(NAME, argument, given, f"those of {used} images in image_grid_thw that are left for it")
        count, height, width = (grids[used][0], grids[used][1] // merge, grids[used][2] // merge)
        size = count * height * width
        run = next((n for n, place in enumerate(places[taken:]) if place != first + n), len(places) - taken)
        if run < size:
            accepted = f"{size}, as image_grid_thw[{used}] {list(grids[used])} says of this prompt's image"
            raise ArgumentError(NAME, argument, f"{run} image tokens from {first} on", accepted)
        parts.append(torch.arange(start, start + first - at).expand(3, -1))
        start += first - at
        axes = [torch.arange(start, start + length) for length in (count, height, width)]
        parts.append(torch.cartesian_prod(*axes).T)
        start += max(height, width)
        at, taken, used = first + size, taken + size, used + 1
    parts.append(torch.arange(start, start + len(ids) - at).expand(3, -1))
    positions = torch.cat(parts, 1)
    return positions, int(positions.max()) + 1 - len(ids), used


class PromptImages:
    """The images of one prompt; embedded when the first chunk with one of their tokens is prefilled.

    Attributes
    ----------
    delta : int
        What is added to the place of a generated token.
    """

    def __init__(
        self,
        ids: Sequence[int],
        positions: torch.Tensor,
        delta: int,
        tower: VisionTower,
        pixel_values: torch.Tensor,
        grids: Sequence[Grid],
    ) -> None:
        self.positions, self.delta = positions, delta
        self._places = (torch.tensor(ids) == tower.config.image_token_id).nonzero().flatten()
        self._tower, self._pixels, self._grids = tower, pixel_values, grids
        self._embedded: torch.Tensor | None = None

    def axes(self, first: int, last: int) -> torch.Tensor:
        """Return positions ``[3, last - first]`` of the sequence's tokens from ``first`` to ``last``."""
        if first >= self.positions.shape[1]:
            return torch.arange(first + self.delta, last + self.delta).expand(3, -1)
        return self.positions[:, first:last]

    def rows(self, first: int, last: int) -> ImageRows:
        """Return those of the tokens from ``first`` to ``last`` that are images', counted from ``first``."""
        low, high = torch.searchsorted(self._places, torch.tensor([first, last])).tolist()
        if self._embedded is None:
            if low == high:
                return ImageRows(self._places[:0], self._pixels.new_empty(0))
            self._embedded = self._tower(self._pixels, self._grids)
        found = ImageRows(self._places[low:high] - first, self._embedded[low:high])
        if high == len(self._places):
            self._embedded = self._embedded[:0]  # all are cached now
        return found


def prompt_images(
    tower: VisionTower | None, prompts: Sequence[Sequence[int]], pixel_values: Any, image_grid_thw: Any,
    image_token: int | None = None,
) -> list[PromptImages | None]:  # fmt: skip
    """Return the images of each prompt, ``None`` for a prompt without; arguments as of ``Generator.stream``.

    ``image_token``: what stands for images in prompts of a model that was read without its tower.

    Raises
    ------
    ArgumentError
        Images without a tower, one of both arguments without the other, what the tower refuses, tokens of images and
        videos in prompts that are not those of the images, or pixels on a CPU that are not finite.

    Notes
    -----
    Pixels are read once for that, 2.5 ms for an image of 1,036 × 1,036 on one core. Those on a GPU are not looked at,
    which would wait for it: NaN then goes on into the prompt's logits.
    """
    if tower is None:
        if pixel_values is not None or image_grid_thw is not None:
            raise ArgumentError(NAME, "pixel_values", "given", "None: this model has no vision tower")
        for index, ids in enumerate(prompts):
            if image_token is not None and image_token in ids:
                given = f"an image's token {image_token} at {list(ids).index(image_token)}"
                raise ArgumentError(NAME, f"prompts[{index}]", given, "text: this model has no vision tower")
        return [None] * len(prompts)
    pair = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
    missing = [name for name, value in pair.items() if value is None]
    if len(missing) == 1:
        raise ArgumentError(NAME, missing[0], None, "what the processor gives, beside the other of both")
    grids: list[Grid] = []
    if not missing:
        grids = tower.read_grids(pixel_values, image_grid_thw)
        _check_finite(pixel_values)
    found: list[PromptImages | None] = []
    used = first = 0
    for index, ids in enumerate(prompts):
        positions, delta, count = rope_index(ids, grids[used:], tower.config, f"prompts[{index}]")
        own = grids[used : used + count]
        last = first + sum(t * h * w for t, h, w in own)
        found.append(PromptImages(ids, positions, delta, tower, pixel_values[first:last], own) if own else None)
        used, first = used + count, last
    if used < len(grids):
        given = f"{len(grids)} images"
        raise ArgumentError(NAME, "image_grid_thw", given, f"{used}, as the prompts have tokens of")
    return found


def _check_finite(pixel_values: torch.Tensor) -> None:
    if not free_to_look(pixel_values):
        return
    pixels = pixel_values.float()
    # NaN anywhere is both ends; to ask isfinite of each takes ten times as long.
    if not all(bool(end.isfinite()) for end in pixels.aminmax()):
        row = int((~pixels.isfinite().all(1)).nonzero()[0])
        raise ArgumentError(NAME, "pixel_values", f"NaN or infinite in row {row}", "finite numbers")


def step_images(parts: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ImageRows | None]:
    """Return the positions ``[3, T]`` of a step's tokens, and which of its rows are images'.

    Parameters
    ----------
    parts : sequence of Part
        What each request brings, some with images.
    device : torch.device
    """
    axes, places, values, offset = [], [], [], 0
    for part in parts:
        first, last = part.prefix, part.prefix + max(1, len(part.ids))
        if part.images is None:
            axes.append(torch.arange(first, last).expand(3, -1))
        else:
            axes.append(part.images.axes(first, last))
            rows = part.images.rows(first, last)
            if len(rows.places):
                places.append(rows.places + offset)
                values.append(rows.values)
        offset += last - first
    positions = torch.cat(axes, 1).to(device)
    if not places:
        return positions, None
    return positions, ImageRows(torch.cat(places).to(device), torch.cat(values).to(device))
