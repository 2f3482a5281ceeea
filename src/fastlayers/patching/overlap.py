"""The next greedy step, launched before Hugging Face's loop has read the token of the last.

    current stream   logits, kept | argmax |    the loop: copy, argmax, cat, "has it ended?" | compare | logits, kept …
    side stream                            | the next step ............................................ |

The loop waits for every token before it asks for the next step, and meanwhile the GPU has nothing to do. So the step
that it will most likely ask for, the token with the highest logit one position on, is launched as soon as there are
logits, and the loop's own kernels run beside it. What the loop asks for is compared with what was launched: where it is
the same, its logits are there; where not, the step runs as it would have, over what the other one wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastlayers.patching.step import DecodeStep
from fastlayers.runtime.streams import side_lock, side_stream

# Guesses of one call of generate that may be wrong: penalties and forced tokens make them wrong again and again.
WRONG_GUESSES = 2
# Arguments of generate with code of the caller's that runs between two steps, and may change what the next one reads.
FOREIGN = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")


def nothing_foreign(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return whether no code of the caller's runs between two steps of such a call of ``generate``."""
    streamer = options.get("streamer")
    known = streamer is None or type(streamer).__module__ == "transformers.generation.streamers"
    # In front: inputs and the generation config.
    return known and len(args) <= 2 and not any(options.get(name) for name in FOREIGN)


@dataclass(frozen=True)
class _Launched:
    """A step that runs, or has run: with how many tokens in the cache, and what it returns."""

    step: DecodeStep
    length: int
    logits: torch.Tensor
    done: torch.cuda.Event | None


class Overlap:
    """Launches guessed steps of one model, one at a time.

    Attributes
    ----------
    until : int
        Only steps with fewer cached tokens are launched: those that the running call of ``generate`` may ask for.
    wrong : int
        Its guesses that were wrong.
    """

    def __init__(self) -> None:
        self._launched: _Launched | None = None
        self.until = self.wrong = 0

    def begin(self, until: int) -> None:
        """Begin a call of ``generate`` that ends with ``until`` cached tokens; 0: without guesses."""
        self.settle()
        self.until, self.wrong = until, 0

    def wants(self, length: int) -> bool:
        """Return whether the step with so many cached tokens may be launched before it is asked for."""
        return length < self.until and self.wrong < WRONG_GUESSES

    def launch(self, step: DecodeStep, length: int, logits: torch.Tensor, replay: Callable[[], torch.Tensor]) -> None:
        """Replay ``step`` on the side stream for the highest of ``logits`` ``[B, 1, V]``, which are read before."""
        step.ids.copy_(logits.argmax(-1))
        step.positions.add_(1)
        if step.device.type != "cuda":
            self._launched = _Launched(step, length, replay(), None)
            return
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record()
        side = side_stream(step.device)
        with side_lock, torch.cuda.stream(side):
            side.wait_event(ready)
            found = replay()
            done.record()
        self._launched = _Launched(step, length, found, done)

    def take(self, step: DecodeStep, length: int, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the logits of the step that is asked for, if it was launched; what was launched has ended then."""
        launched = self._launched
        if launched is None:
            return None
        same = launched.step is step and launched.length == length
        if same:
            asked = (step.ids == inputs["input_ids"]) & (step.positions == inputs["position_ids"])
            same = bool(asked.all())  # waits for the current stream alone, which has only the loop's kernels
            self.wrong += not same
        if not same:
            self.settle()
            return None
        self._wait()
        return launched.logits

    def settle(self) -> None:
        """Have the current stream wait for what was launched, and forget it: nobody asks for it any more."""
        if self._launched is not None:
            # The device has counted a token that the cache does not have.
            self._launched.step.length = -1
            self._wait()

    def _wait(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None and launched.done is not None:
            torch.cuda.current_stream(launched.step.device).wait_event(launched.done)
