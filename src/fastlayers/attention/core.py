"""What attention layers over a paged cache share: which core a step takes, projections, and the checks of a step.

    meta.phase     a step of                                              ladder
    "decode"       one token a request                                    by the class of its longest context
    "extend"       any numbers of tokens                                  of ``several_tokens``, the core's own phase
    "padded"       either, with requests that begin with padding          of "padded"
    "tree"         tokens that each follow another of them               of ``several_tokens``, of what masks trees
    "captured"     tokens padded to a bucket, with lengths on the device  of ``several_tokens``, of what can be captured
    "captured tree"  both                                                 of ``several_tokens``, of what can do both

The usual ladders are built with the layer, all others when the first such step comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.autograd import forward_ad

from fastlayers import env
from fastlayers.attention.context_buckets import CONTEXTS, context_of
from fastlayers.attention.kv_cache.spec import LayerCache
from fastlayers.attention.meta import AttentionBatch, AttentionMeta, check_pages, check_slots, check_step
from fastlayers.comm.parallel import Shard
from fastlayers.errors import ArgumentError, check_tensor, free_to_look
from fastlayers.layer import Layer, check_asked
from fastlayers.linear.base import LinearBase
from fastlayers.linear.factory import linear
from fastlayers.quant.spec import QuantSpec
from fastlayers.registry import Choice, Ladder, Registry
from fastlayers.registry import registry as registry_named

# Phases whose ladders are built with the layer, in the order in which it holds them.
PHASES = ("decode", "extend")


@dataclass(frozen=True)
class Projections:
    """Makes the linears of one attention layer: number format by checkpoint name, one device and dtype."""

    quant: QuantSpec
    prefix: str
    device: torch.device | str | None
    dtype: torch.dtype | None

    def spec(self, name: str) -> QuantSpec:
        """Return the number format of checkpoint module ``name``."""
        return self.quant.for_module(f"{self.prefix}.{name}" if self.prefix else name)

    def linear(
        self, name: str, in_features: int, out: int | Sequence[int], bias: bool, shard: Shard,
        names: Sequence[str] | None = None,
    ) -> LinearBase:  # fmt: skip
        """Return the linear of checkpoint module ``name``; ``names``: of the parts of a fused one."""
        return linear(
            in_features, out, bias, quant=self.spec(name), shard=shard, names=names, device=self.device,
            dtype=self.dtype,
        )  # fmt: skip


class AttentionCore(Layer):
    """Base of the attention layers; a subclass projects, writes the cache and calls the core that :meth:`core` picks.

    Attributes
    ----------
    choice, ladder
        Of the phase ``"extend"``.
    decode_choice, decode_ladder
        Of steps in which each request brings one token, at the usual context.
    kv_row : tuple[int, ...]
        What the cache holds of a token, for :func:`fastlayers.kv_cache_spec`.
    """

    # As errors name it, and the core's phase for several new tokens a request over cached rows.
    name: ClassVar[str]
    several_tokens: ClassVar[str] = "extend"
    # The path of a step of several tokens by which it reaches that core; "": there is no other.
    core_path: ClassVar[str] = ""
    # Up to so many new tokens a request a step is one of ``few``, with a ladder of its own; 0: there is none.
    few: ClassVar[int] = 0
    # Whether contexts with one choice share what is built: no backend reads ``cfg.context``.
    shares_contexts: ClassVar[bool] = False
    decode_choice: Choice
    decode_ladder: Ladder
    hidden_size: int
    kv_row: tuple[int, ...]
    o_proj: LinearBase

    def choose_core(
        self, registry: Registry, cfg: Any, device: torch.device | str | None, backend: str, window: int | None = None
    ) -> None:
        """Choose and build the core's backends, one ladder for decode and one for everything else."""
        check_asked(self, cfg, device)
        self.cfg, self._debug = cfg, env.debug()
        # The last class of contexts that decode tells apart: what lies before a window is not read.
        self._last_context = CONTEXTS[-1] if window is None else context_of(window)
        self.use([choice.build() for choice in registry.choose_phases(cfg, PHASES, device, backend)])

    @property
    def choices(self) -> list[Choice]:
        """What was chosen, decode first."""
        return [self.decode_choice, self.choice]

    def choices_for(self, cfg: Any, device: Any, requested: str, built_only: bool = True) -> list[Choice]:
        """Choose for another configuration or device, as the constructor did."""
        return registry_named(self.choice.layer).choose_phases(cfg, PHASES, device, requested, built_only=built_only)

    def use(self, ladders: Sequence[Ladder]) -> None:
        """Compute with these from now on; ladders of other phases and contexts are built when their next step comes."""
        super().use(ladders)
        self.decode_ladder = ladders[0]
        self.decode_choice = self.decode_ladder.choice
        self._ladders = {("decode", self.cfg.context): self.decode_ladder}
        if self.several_tokens == PHASES[1]:
            self._ladders["extend", 0] = self.ladder

    def extra_repr(self) -> str:
        """Return the configuration and the chosen backends."""
        chosen = super().extra_repr()
        return f"{chosen}, decode={self.decode_choice.name}" if chosen else ""

    def core(self, meta: AttentionMeta, tokens: int) -> Any:
        """Return the core for a step: by its phase, in decode by its context, and by its tokens.

        The context is that of the longest request, for a captured bucket its capacity: known on the host, and the same
        at every replay.
        """
        phase = meta.phase
        key = phase, min(meta.context, self._last_context) if phase == "decode" else 0
        if 0 < meta.max_query_len <= self.few and phase in ("extend", "captured"):
            # What verifies drafts is captured for a context, as decode is.
            key = f"{phase} of few", min(meta.context, self._last_context) if phase == "captured" else 0
        ladder = self._ladders.get(key)
        if ladder is None:
            ladder = self._ladders[key] = self._built(meta)
        return ladder.single or ladder.pick(tokens)

    def tells_contexts(self, tokens: int, contexts: Sequence[int]) -> bool:
        """Return whether a captured step of so many tokens, a few a request, takes one core at one context, and another
        at another: then it is worth a graph for each.
        """
        if not self.few:
            return False
        cfg = replace(self.cfg, phase=self.several_tokens, captured=True, few=True)
        taken = set()
        for context in contexts:
            there = replace(cfg, context=context_of(context))
            rung = self._choice_for(there, self.decode_choice.requested).rung_for(tokens)
            taken.add((rung.backend.name, rung.config))
        return len(taken) > 1

    def _built(self, meta: AttentionMeta) -> Ladder:
        phase = meta.phase if meta.phase in ("decode", "padded") else self.several_tokens
        context = min(meta.context, self._last_context)
        cfg = replace(self.cfg, context=context, captured=meta.is_extend_bucket, tree=meta.tree is not None)
        if self.few:
            cfg = replace(cfg, few=meta.max_query_len <= self.few)
        usual = self.decode_choice
        choice = self._choice_for(replace(cfg, phase=phase), usual.requested)
        same = self.shares_contexts and phase == "decode" and choice.rungs == usual.rungs
        return self.decode_ladder if same else choice.build()

    def _choice_for(self, cfg: Any, requested: str) -> Choice:
        table, device = registry_named(self.choice.layer), self.choice.device
        return table.choose_phases(cfg, (cfg.phase,), device, requested, built_only=self.built_only)[0]

    def choose_again(self, built_only: bool = True) -> bool:
        """Choose once more, ladders of other phases and contexts as well: those that would differ are built anew."""
        self.built_only = built_only
        if super().choose_again(built_only):
            return True
        if self.choice.requested != "auto":
            return False
        kept = {
            key: ladder for key, ladder in self._ladders.items()
            if ladder is self.decode_ladder or ladder is self.ladder or not self._differs(ladder.choice)
        }  # fmt: skip
        if len(kept) == len(self._ladders):
            return False
        self._ladders = kept
        for epoch in self._epochs:
            epoch.changed()
        return True

    def _differs(self, choice: Choice) -> bool:
        return choice.requested == "auto" and self._choice_for(choice.cfg, "auto").rungs != choice.rungs

    def long_prefix(self, tokens: int) -> str:
        """Return the path that steps of so many tokens, cached and new ones, take alone; ``""``: there is none."""
        return ""

    def outweighs_capture(self, batch: AttentionBatch) -> bool:
        """Return whether an extend takes a way here that no captured step takes, and that saves more than launches."""
        return False

    def check(self, argument: str, hidden: torch.Tensor, meta: AttentionMeta, cache: LayerCache) -> None:
        """Raise :class:`ArgumentError` unless the inputs of ``forward`` fit; ``argument`` is the name of the first."""
        check_step(self.name, meta, cache)
        shape, where = (meta.num_tokens, self.hidden_size), self.o_proj.weight.device
        check_tensor(self.name, argument, hidden, shape=shape, dtype=self.cfg.dtype, device=where)
        self.check_step(meta, cache)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self.refuse_grad(**{argument: hidden}, **self.before_the_cache())

    def check_step(self, meta: AttentionMeta, cache: LayerCache) -> None:
        """Raise :class:`ArgumentError` unless a step's metadata and a cache are as this layer needs them.

        ``forward`` does so by itself, unless a model that holds the layer did.
        """
        check_step(self.name, meta, cache)
        size, where = self.cfg.page_size, self.o_proj.weight.device
        if meta.page_size != size:
            raise ArgumentError(self.name, "meta.page_size", meta.page_size, f"{size}, as constructed")
        check_tensor(self.name, "meta.positions", meta.positions, device=where)
        wanted, dtype = (None, size, *self.kv_row), self.cfg.kv_dtype
        check_tensor(self.name, "cache.keys", cache.keys, shape=wanted, dtype=dtype, device=where, contiguous=True)
        if len(self.kv_row) == 2:
            both = tuple(cache.keys.shape)
            check_tensor(
                self.name, "cache.values", cache.values, shape=both, dtype=dtype, device=where, contiguous=True
            )
        check_pages(self.name, meta, cache.num_pages, self._debug or free_to_look(meta.page_table))
        if self._debug:
            check_slots(self.name, meta)

    def before_the_cache(self) -> dict[str, torch.Tensor]:
        """Return the parameters whose gradients would be cut off where keys and values are cached."""
        return {name: weight for name, weight in self.named_parameters() if not name.startswith("o_proj.")}
