"""A ladder behind something that serves one token with a copy of the weights: :class:`FirstRung`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastlayers.registry.choice import Ladder

if TYPE_CHECKING:
    from fastlayers.weights_epoch import Packed


class FirstRung(Ladder):
    """A ladder behind what serves one token in another way, for as long as that is of the weights as they are.

    Parameters
    ----------
    held : Packed
        What ``impl`` computes with.
    impl : callable
        Called as the ladder's own implementations are.
    behind : Ladder
    """

    def __init__(self, held: Packed, impl: Any, behind: Ladder) -> None:
        super().__init__(behind.choice, behind.impls)
        self.held, self.impl, self.behind, self.single = held, impl, behind, None

    def pick(self, num_tokens: int) -> Any:
        """Return the implementation for this token count; a traced program, which asks nothing later, has no copy."""
        held = self.held
        if num_tokens == 1 and not torch.compiler.is_compiling() and held.counter._version == held.at:
            return self.impl
        return self.behind.pick(num_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_its_own, (self.behind,)  # a copied layer has other weights, and a file need not hold them twice

    def before(self, ladder: Ladder) -> FirstRung:
        """Return the same before another ladder."""
        return FirstRung(self.held, self.impl, ladder)


def _of_its_own(behind: Ladder) -> Ladder:
    """Return what a copied or restored layer computes with: nothing was stored of its weights."""
    return behind
