"""torch.compile of a model's small operators, as an option: :class:`TorchCompile`.

    blocks (decoder layers) ─► small layers compute by torch operations ─► inductor fuses them between opaque kernels

Off unless asked for: our small operators are fused already, and start before their predecessor has ended, which
inductor's kernels do not. What it gains or costs is measured in ``benchmarks/notes/torch_compile.md``.
Source: SGLang's ``torch_compile_decoration``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlayers.errors import ArgumentError, check_choice, check_fields, check_plain, check_positive
from fastlayers.layer import Layer
from fastlayers.registry import registry

# Layers that hold no packed weights, do little else than move data, and consist of operations that inductor fuses.
# None that write to a cache: inductor makes a whole new cache of it and copies that back.
SMALL_OPERATORS = ("rms_norm", "silu_mul", "rotary")

# Those of torch.compile that leave CUDA graphs to us.
MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class TorchCompile:
    """How small operators are compiled.

    Parameters
    ----------
    max_batch : int
        Largest batch that is compiled; larger ones gain nothing.
    mode : str
        Of ``torch.compile``: ``"default"``, or ``"max-autotune-no-cudagraphs"``, which also tunes torch's products.
    backend : str
        Of ``torch.compile``.
    operators : tuple of str
        Those of ``SMALL_OPERATORS`` that compute by torch operations inside; all other layers keep their backends,
        which are opaque to the compiler.

    Raises
    ------
    ArgumentError
        A value that is none of these.

    Notes
    -----
    While buckets are captured nobody else may use or copy the model: its blocks run compiled for everyone.
    """

    max_batch: int = 32
    mode: str = "default"
    backend: str = "inductor"
    operators: tuple[str, ...] = SMALL_OPERATORS

    def __post_init__(self) -> None:
        check_fields("TorchCompile", self)
        check_positive("TorchCompile", max_batch=self.max_batch)
        check_choice("TorchCompile", "mode", self.mode, MODES)
        backends = [name for name in torch.compiler.list_backends(exclude_tags=()) if name != "cudagraphs"]
        check_choice("TorchCompile", "backend", self.backend, tuple(backends))
        if self.backend != "inductor" and self.mode != "default":
            raise ArgumentError("TorchCompile", "mode", f"{self.mode!r} with backend {self.backend!r}", "'default'")
        check_plain("TorchCompile", "tuple[str, ...]", operators=self.operators)
        for name in self.operators:
            check_choice("TorchCompile", "operators", name, SMALL_OPERATORS)


class CompiledBlocks:
    """Blocks of a model that run compiled inside ``with compiled.applied():`` and as they were outside.

    Parameters
    ----------
    blocks : sequence of nn.Module
        Called alike; blocks of one class share what is compiled.
    how : TorchCompile

    Notes
    -----
    Everything is compiled as one graph a block (``fullgraph``): what cannot be traced raises. Shapes are fixed: each
    batch size compiles anew, so that this is for what will be captured. Before the first call inside, run the blocks
    once outside, with the same shapes: ladders and plans that are built when they are first needed cannot be traced.
    """

    def __init__(self, blocks: Sequence[nn.Module], how: TorchCompile) -> None:
        self.blocks = list(blocks)
        options: dict[str, Any] = {"mode": how.mode} if how.backend == "inductor" else {}
        self._forwards = [
            torch.compile(block.forward, backend=how.backend, fullgraph=True, dynamic=False, **options)
            for block in self.blocks
        ]
        layers = dict.fromkeys(layer for block in self.blocks for layer in block.modules() if isinstance(layer, Layer))
        small = [layer for layer in layers if hasattr(layer, "choice") and layer.choice.layer in how.operators]
        self._ladders = [
            (layer, registry(layer.choice.layer).choose(layer.cfg, layer.choice.device, "torch").build())
            for layer in small
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the blocks compiled inside; not for several threads at a time."""
        before = [(layer, layer.ladder) for layer, _ in self._ladders]
        # Somebody may have put an own forward on a block.
        forwards = [(block, vars(block).get("forward")) for block in self.blocks]
        # One limit for all callers of a function would stop at the eighth batch size.
        with torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=65536):
            try:
                for layer, ladder in self._ladders:
                    layer.ladder = ladder
                for block, forward in zip(self.blocks, self._forwards, strict=True):
                    block.forward = forward
                yield
            finally:
                for block, replaced in forwards:
                    if replaced is None:
                        vars(block).pop("forward", None)
                    else:
                        block.forward = replaced
                for layer, ladder in before:
                    layer.ladder = ladder
