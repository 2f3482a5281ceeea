"""What was chosen for a layer: rungs (token thresholds, each with its backend), and the ladder built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastlayers.device import Device
from fastlayers.registry.layers import builtin_registry
from fastlayers.registry.plugins import load_plugins
from fastlayers.tuning.ladder import Rung


@dataclass(frozen=True)
class Choice:
    """What was chosen for one layer, on which evidence, and why the rest lost."""

    layer: str
    cfg: Any
    device: Device
    requested: str
    rungs: tuple[Rung, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    evidence: str = "rank"

    @property
    def name(self) -> str:
        """The chosen backend's name; a ladder reads ``"triton:64|torch"``."""
        return "|".join(
            r.backend.name if r.max_tokens is None else f"{r.backend.name}:{r.max_tokens}" for r in self.rungs
        )

    def __reduce__(self) -> tuple[Any, ...]:
        rungs = tuple((rung.max_tokens, rung.backend.name, rung.microseconds, rung.config) for rung in self.rungs)
        return _restore_choice, (
            self.layer, self.cfg, self.device, self.requested, rungs, dict(self.refused), self.evidence
        )  # fmt: skip

    def rung_for(self, tokens: int) -> Rung:
        """Return the rung that serves this many tokens."""
        return next(rung for rung in self.rungs if rung.max_tokens is None or tokens <= rung.max_tokens)

    def build(self) -> Ladder:
        """Import the chosen backends and construct them with the configuration.

        Rungs of one backend and configuration share what is built: it is warmed up once.
        """
        alike = {(rung.backend.name, rung.config): rung for rung in self.rungs}
        built = {what: rung.build(self.cfg) for what, rung in alike.items()}
        return Ladder(self, tuple(built[rung.backend.name, rung.config] for rung in self.rungs))

    def __repr__(self) -> str:
        return f"{self.layer}={self.name}"


def _restore_choice(
    layer: str, cfg: Any, device: Device, requested: str, rungs: tuple[Any, ...], refused: dict[str, str], evidence: str
) -> Choice:
    load_plugins()
    table = builtin_registry(layer)
    restored = tuple(Rung(limit, table.named(name), us, config) for limit, name, us, config in rungs)
    return Choice(layer, cfg, device, requested, restored, refused, evidence)


class Ladder:
    """The built implementations of a :class:`Choice`, fixed at construction."""

    def __init__(self, choice: Choice, impls: tuple[Any, ...]) -> None:
        self.choice, self.impls = choice, impls
        self._limited = tuple(
            (rung.max_tokens, impl)
            for rung, impl in zip(choice.rungs, impls, strict=True)
            if rung.max_tokens is not None
        )
        self.single = impls[0] if len(impls) == 1 else None
        # Whether some rung leaves a sum to the layer behind it: see fastlayers.linear.split_rows.
        self.leaves_splits = any(getattr(impl, "leaves_splits", False) for impl in impls)

    def pick(self, num_tokens: int) -> Any:
        """Return the implementation for this token count; a loop over few rungs, which torch.compile can trace."""
        if self.single is not None:
            return self.single
        for limit, impl in self._limited:
            if num_tokens <= limit:
                return impl
        return self.impls[-1]

    def pack(self, *weights: Any) -> Any:
        """Let the implementation pack weights; all rungs share the result."""
        return self.impls[-1].pack(*weights)
