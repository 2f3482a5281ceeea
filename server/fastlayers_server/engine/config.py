"""What an engine is started with. Frozen, plain values: it travels to the engine's process as JSON."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fastlayers.comm.parallel import TOKEN_WAYS
from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError
from fastlayers_server.flags import flag

# What vLLM and SGLang call our dtypes.
PEERS_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
LEAST = 16  # prompt tokens of a step with rows at least, however many these are


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
        Beyond them, and beyond a request for each free slot, one is refused with "queue_full".
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
    mixed : bool
        Rows that decode are part of an extend beside them, so that weights are read once. Not with ``piece``, where no
        two requests share a step.

    Raises
    ------
    ValueError
        ``mixed`` with ``piece``.
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
    mixed: bool = False

    def __post_init__(self) -> None:
        """Refuse what the executor would compute once for each piece: the rows beside them."""
        if self.mixed and self.piece:
            raise ValueError(f"mixed with piece {self.piece}; accepted: mixed, or one request a step")

    @property
    def most_tokens(self) -> int:
        """New tokens of one step at most."""
        return max(self.max_batched_tokens, self.max_running + LEAST * self.mixed)


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with: those flags of ``fastlayers serve`` that are the engine's; see their own texts.

    Parameters
    ----------
    layers : int
        With random weights: decoder layers to keep; 0: all.
    begun : float
        ``time.monotonic()`` when whoever wanted this engine began to start it, or 0.0.
    """

    model: str = flag("tiny", "checkpoint directory, a name on the Hugging Face hub, or 'tiny', the one that ships", "--model-path")  # fmt: skip  # noqa: E501
    load_format: str = flag("safetensors", "dummy: random weights, for benchmarks", choices=("safetensors", "dummy"))
    device: str = flag("", "cpu, cuda, cuda:1; default: a GPU if there is one")
    dtype: str = flag("auto", "auto: the checkpoint's", choices=("auto", "bf16", "fp16", "fp32"), words=PEERS_DTYPES)
    tp: int = flag(1, "ranks that share each attention layer", "--tensor-parallel-size", "--tp-size", "-tp")
    attn_dp_size: int = flag(1, "attention groups, each with requests and a cache of its own")
    ep: int = flag(1, "groups that split the experts; a divisor of tp * attn_dp_size", "--ep-size")
    expert_exchange: str = flag("auto", "how tokens get to the ranks of their experts; auto: gather, unless measured slower", choices=TOKEN_WAYS)  # fmt: skip  # noqa: E501
    max_model_len: int = flag(0, "longest prompt and answer together; 0: the model's", "--context-length", within=(0, 2**31))  # fmt: skip  # noqa: E501
    kv_cache_dtype: str = flag("auto", "of cached keys and values; auto: the weights'", choices=("auto", "bf16", "fp16", "fp32", "e4m3"), words=PEERS_DTYPES | {"fp8": "e4m3", "fp8_e4m3": "e4m3"})  # fmt: skip  # noqa: E501
    fp8_math: bool = flag(False, "latent attention over an e4m3 cache may round queries and softmax weights to e4m3, too")  # fmt: skip  # noqa: E501
    bf12: bool = flag(False, "keep bf16 weights in 12 bits, too: less time for steps of one token, 0.75 of their memory more")  # fmt: skip  # noqa: E501
    page_size: int = flag(64, "tokens of a cache page", "--block-size", within=(1, 128))
    num_pages: int = flag(0, "pages of the cache; 0: what the memory holds", within=(0, 2**31))
    gpu_memory_utilization: float = flag(0.9, "share of the device's memory for this process", within=(0.05, 0.98))
    max_running_requests: int = flag(256, "requests decoded at once", "--max-num-seqs", within=(1, 65536))
    max_num_batched_tokens: int = flag(8192, "ceiling of a chunk of prompt tokens", "--chunked-prefill-size", within=(16, 2**20))  # fmt: skip  # noqa: E501
    itl_target_ms: float = flag(40.0, "a chunk beside decoding requests may take them so long; 0: any time", within=(0, 60_000))  # fmt: skip  # noqa: E501
    max_partial_prefills: int = flag(
        2, "prompts that may be half done at once", "--max-num-partial-prefills", within=(1, 256)
    )
    max_queued_requests: int = flag(
        2048, "more than so many without a free slot get 429", "--max-num-queued-reqs", within=(1, 2**20)
    )
    max_queued_tokens: int = flag(4_000_000, "prompt tokens that wait; more get 429", "--max-num-queued-tokens", within=(1, 2**40))  # fmt: skip  # noqa: E501
    schedule_policy: str = flag("fcfs", "order of waiting requests", "--scheduling-policy", choices=("fcfs", "lpm"))
    enable_priority: bool = flag(False, "requests may set priority; SMALLER is served first", "--enable-priority-scheduling")  # fmt: skip  # noqa: E501
    no_prefix_cache: bool = flag(False, "prompts share nothing", "--no-enable-prefix-caching", "--disable-radix-cache")
    disable_overlap_schedule: bool = flag(False, "plan after commit, not beside it", "--no-async-scheduling")
    disable_mixed_steps: bool = flag(False, "decode beside a chunk of prompts in a step of its own")
    disable_cuda_graph: bool = flag(False, "run every step eager", "--enforce-eager", "--disable-decode-cuda-graph")
    speculative_algorithm: str = flag("none", "what drafts tokens: mtp: the model's own draft layer, ngram: the text so far, draft: another model", choices=("none", "mtp", "ngram", "draft"))  # fmt: skip  # noqa: E501
    speculative_draft_model: str = flag("", "for draft: a directory or name of a smaller model with the same vocabulary", "--speculative-draft-model-path")  # fmt: skip  # noqa: E501
    speculative_max_k: int = flag(4, "drafts a step at most", "--speculative-num-steps", within=(1, 8))
    speculative_topk: int = flag(1, "mtp's drafts of each depth; more than 1 make a tree, which runs uncaptured", "--speculative-eagle-topk")  # fmt: skip  # noqa: E501
    speculative_verify: str = flag("match", "rejection: draw mtp's drafts; a seed's text then depends on them", choices=("match", "rejection"))  # fmt: skip  # noqa: E501
    deterministic: bool = flag(False, "equal request and seed, equal bytes", "--enable-deterministic-inference")
    max_logprobs: int = flag(20, "likeliest tokens that a request may ask for", within=(0, 20))
    watchdog_timeout: float = flag(30.0, "seconds after which a step counts as hung", within=(1, 86_400))
    no_freeze_gc: bool = flag(False, "let the collector walk what the start made")
    profile_folder: str = flag("", "where /start_profile writes; empty: there are no profiles")
    seed: int = flag(0, "of random weights (--load-format dummy)", "--random-seed")
    log_level: str = flag("info", "debug, info, warning, error", choices=("debug", "info", "warning", "error"))
    layers: int = 0
    begun: float = 0.0


def drafting(config: EngineConfig) -> bool:
    """Return whether tokens are drafted; raises :class:`ArgumentError` for settings that do not go together."""
    how, rule, topk = config.speculative_algorithm, config.speculative_verify, config.speculative_topk
    drafts = how in ("mtp", "draft")
    for name, good, accepted in (
        ("algorithm", drafts or how in ("none", "ngram"),
         "'none', 'ngram' (prompt lookup), 'mtp' (the model's own draft layer) or 'draft' (another model)"),
        ("draft_model", bool(config.speculative_draft_model) == (how == "draft"), "a model for 'draft', else nothing"),
        ("algorithm", how == "none" or not config.deterministic,
         "'none' with deterministic: a step that verifies has other shapes than one that decodes"),
        ("max_k", 1 <= config.speculative_max_k <= 8, "1 to 8"),
        ("verify", rule == "match" or (rule == "rejection" and drafts),
         "'match', or 'rejection' where 'mtp' or 'draft' drafts: those of 'ngram' are not drawn"),
        ("algorithm", how in ("none", "ngram") or config.tp * config.attn_dp_size == 1,
         "'none' or 'ngram' over several ranks: only the first one drafts"),
        ("topk", topk == 1 or (2 <= topk <= 4 and drafts and rule == "match"),
         "1, or 2 to 4 where 'mtp' or 'draft' drafts and 'match' verifies"),
    ):  # fmt: skip
        if not good:
            given = getattr(config, f"speculative_{name}")
            raise ArgumentError("engine", f"speculative_{name}", repr(given), accepted)
    return how != "none"


def ranks_of(config: EngineConfig) -> Ranks:
    """Return the ranks that an engine is split over."""
    return Ranks(config.tp, config.attn_dp_size, config.ep, expert_exchange=config.expert_exchange)
