"""Classes of context length: which kernel decodes fastest depends on the cached tokens as much as on the batch."""

from __future__ import annotations

# The contexts that decode distinguishes, a factor of four apart.
CONTEXTS = (1024, 4096, 16384, 65536)


def context_of(max_seq_len: int) -> int:
    """Return which of :data:`CONTEXTS` is nearest by ratio to the longest request that a step may have."""
    return next((context for context in CONTEXTS if max_seq_len <= 2 * context), CONTEXTS[-1])
