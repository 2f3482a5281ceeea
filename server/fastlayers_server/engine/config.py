"""What an engine is started with. Frozen, plain values: it travels to the engine's process as JSON."""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits of the scheduler.

    Parameters
    ----------
    vocab_size, max_model_len, eos_ids
        Of the model.
    num_pages, page_size : int
        Of the cache, page 0 included; one request of ``max_model_len`` fits.
    max_running : int
        Requests with a slot.
    max_batched_tokens : int
        New tokens of one extend at most, where nothing decodes; with decoding rows the step-time table may say less.
    max_extend_requests : int
        Requests that share an extend.
    max_partial_prefills : int
        Requests that may be left in the middle of their prompt after a tick.
    max_queued_requests, max_queued_tokens : int
        Beyond them a request is refused with "queue_full".
    policy : str
        "fcfs", or "lpm": the longest cached prefix first, within a window, and nobody is passed over more than 8 times.
    enable_priority, prefix_cache : bool
    drop_last_block : bool
        A hit leaves its last block out: a draft layer needs the embedding of the token behind it.
    extend_only : bool
        Deterministic mode: only blocks that extends wrote are published.
    max_logprobs : int
    features : sequence of str
        Of "penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar"; what is absent is refused.
    itl_target : float
        Seconds that an extend beside decoding rows may take together with them.
    """

    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int = 64
    eos_ids: tuple[int, ...] = ()
    max_running: int = 256
    max_batched_tokens: int = 8192
    max_extend_requests: int = 32
    max_partial_prefills: int = 2
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_000_000
    policy: str = "fcfs"
    enable_priority: bool = False
    prefix_cache: bool = True
    drop_last_block: bool = False
    extend_only: bool = False
    max_logprobs: int = 20
    features: tuple[str, ...] = ("penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar")
    itl_target: float = 0.05
