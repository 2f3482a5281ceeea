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
    piece : int
        Deterministic mode, else 0: every step is one request's, prompts are computed in pieces of so many tokens from
        0 on, and only whole pieces are published and found. A whole number of blocks.
    max_logprobs : int
    features : sequence of str
        Of "penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar"; what is absent is refused.
    itl_target : float
        Seconds that an extend beside decoding rows may take together with them; 0: as many as its prompts need.
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
    piece: int = 0
    max_logprobs: int = 20
    features: tuple[str, ...] = ("penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar")
    itl_target: float = 0.04


class EngineConfig(msgspec.Struct, frozen=True):
    """What an engine is started with; fields are named like the flags of ``fastlayers serve`` that set them.

    Parameters
    ----------
    model : str
        Checkpoint directory, hub name, or "tiny".
    load_format : str
        "safetensors", or "dummy": random weights of the configuration's shapes.
    device, dtype, kv_cache_dtype : str
        "": a GPU if there is one; "auto": the checkpoint's, and dtype's.
    max_model_len, num_pages : int
        0: the model's, and what the memory holds.
    gpu_memory_utilization : float
        Share of the device's memory for everything in this process.
    speculative_algorithm : str
        "none", "ngram" (prompt lookup), "mtp" (the model's own draft layer) or "draft" (another model).
    speculative_draft_model : str
        For "draft": like ``model``, with the same vocabulary.
    speculative_topk : int
        Of "mtp" and "draft": drafts of each depth; more than one make a tree.
    speculative_verify : str
        "match": a draft is right if it is what the request draws; "rejection": drafts of "mtp" and "draft" are drawn,
        and more of them are right, but a seed's text depends on them.
    profile_folder : str
        Where profiles are written; "": there are none.
    layers : int
        With "dummy": decoder layers to keep; 0: all.
    tp, attn_dp_size, ep : int
        Ranks of an attention group, such groups, and groups that split the experts, as of :class:`fastlayers.Ranks`.
    begun : float
        ``time.monotonic()`` when whoever wanted this engine began to start it, or 0.0.
    """

    model: str = "tiny"
    load_format: str = "safetensors"
    device: str = ""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int = 0
    page_size: int = 64
    num_pages: int = 0
    gpu_memory_utilization: float = 0.9
    max_running_requests: int = 256
    max_num_batched_tokens: int = 8192
    itl_target_ms: float = 40.0
    max_partial_prefills: int = 2
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_000_000
    schedule_policy: str = "fcfs"
    enable_priority: bool = False
    no_prefix_cache: bool = False
    disable_overlap_schedule: bool = False
    disable_cuda_graph: bool = False
    speculative_algorithm: str = "none"
    speculative_draft_model: str = ""
    speculative_max_k: int = 4
    speculative_topk: int = 1
    speculative_verify: str = "match"
    deterministic: bool = False
    max_logprobs: int = 20
    watchdog_timeout: float = 30.0
    no_freeze_gc: bool = False
    seed: int = 0
    profile_folder: str = ""
    layers: int = 0
    tp: int = 1
    attn_dp_size: int = 1
    ep: int = 1
    begun: float = 0.0
