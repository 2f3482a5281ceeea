"""Everything that ``fastlayers serve`` can be told: one frozen object, from which the command line is made.

Each field is a flag of the same name; aliases are those of vLLM and SGLang. What peers have and we do not is an error
that says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastlayers.comm.ranks import Ranks
from fastlayers.errors import ArgumentError
from fastlayers_server.flags import flag, given_values, parser_of, typed

log = logging.getLogger("fastlayers.serve")


@dataclass(frozen=True)
class ServeConfig:
    """Settings of a server; see the fields' own texts."""

    model: str = flag("tiny", "checkpoint directory, a name on the Hugging Face hub, or 'tiny', the one that ships", "--model-path")  # fmt: skip  # noqa: E501
    served_model_name: tuple[str, ...] = flag((), "names that requests use; default: the folder's")
    host: str = flag("127.0.0.1", "address to listen at")
    port: int = flag(8000, "0: any free one")
    api_key: tuple[str, ...] = flag((), "a key that requests need, or @FILE with one a line", secret=True)
    admin_api_key: tuple[str, ...] = flag((), "a key for /freeze_gc, /flush_cache, /abort, /drain, …", secret=True)
    open_admin: bool = flag(False, "admin routes without a key (benches, tests)")
    device: str = flag("", "cpu, cuda, cuda:1; default: a GPU if there is one")
    dtype: str = flag("auto", "auto, bf16, fp16, fp32", choices=("auto", "bf16", "fp16", "fp32"))
    tp: int = flag(1, "ranks that share each attention layer", "--tensor-parallel-size", "--tp-size", "-tp")
    attn_dp_size: int = flag(1, "attention groups, each with requests and a cache of its own")
    ep: int = flag(1, "groups that split the experts; a divisor of tp * attn_dp_size", "--ep-size")
    load_format: str = flag("safetensors", "dummy: random weights, for benchmarks", choices=("safetensors", "dummy"))
    max_model_len: int = flag(0, "longest prompt and answer together; 0: the model's", "--context-length")
    kv_cache_dtype: str = flag("auto", "of cached keys and values", choices=("auto", "bf16", "fp16", "fp32", "e4m3"))
    page_size: int = flag(64, "tokens of a cache page", "--block-size")
    num_pages: int = flag(0, "pages of the cache; 0: what the memory holds")
    gpu_memory_utilization: float = flag(0.9, "share of the device's memory for this process")
    max_running_requests: int = flag(256, "requests decoded at once", "--max-num-seqs")
    max_num_batched_tokens: int = flag(8192, "ceiling of a chunk of prompt tokens", "--chunked-prefill-size")
    itl_target_ms: float = flag(40.0, "a chunk beside decoding requests may take them so long; 0: any time")
    max_partial_prefills: int = flag(2, "prompts that may be half done at once")
    max_queued_requests: int = flag(2048, "more get 429", "--max-num-queued-reqs")
    max_queued_tokens: int = flag(4_000_000, "prompt tokens that wait; more get 429", "--max-num-queued-tokens")
    schedule_policy: str = flag("fcfs", "order of waiting requests", "--scheduling-policy", choices=("fcfs", "lpm"))
    enable_priority: bool = flag(False, "requests may set priority; SMALLER is served first", "--enable-priority-scheduling")  # fmt: skip  # noqa: E501
    no_prefix_cache: bool = flag(False, "prompts share nothing", "--no-enable-prefix-caching", "--disable-radix-cache")
    disable_overlap_schedule: bool = flag(False, "plan after commit, not beside it", "--no-async-scheduling")
    disable_cuda_graph: bool = flag(False, "run every step eager", "--enforce-eager", "--disable-decode-cuda-graph")
    speculative_algorithm: str = flag("none", "draft tokens and verify them", choices=("none", "mtp", "ngram", "draft"))
    speculative_draft_model: str = flag("", "for draft: a directory or name of a smaller model with the same vocabulary", "--speculative-draft-model-path")  # fmt: skip  # noqa: E501
    speculative_max_k: int = flag(4, "drafts a step at most", "--speculative-num-steps")
    speculative_topk: int = flag(1, "mtp's drafts of each depth; more than 1 make a tree, which runs uncaptured", "--speculative-eagle-topk")  # fmt: skip  # noqa: E501
    speculative_verify: str = flag("match", "rejection: draw mtp's drafts; a seed's text then depends on them", choices=("match", "rejection"))  # fmt: skip  # noqa: E501
    deterministic: bool = flag(False, "equal request and seed, equal bytes", "--enable-deterministic-inference")
    grammar_timeout: float = flag(5.0, "seconds that compiling one grammar may take")
    reasoning_parser: str = flag("auto", "how reasoning is marked", choices=("auto", "deepseek_r1", "qwen3", "harmony", "none"))  # fmt: skip  # noqa: E501
    tool_call_parser: str = flag("auto", "how calls are marked", choices=("auto", "hermes", "deepseek_v3", "deepseek_v31", "harmony", "none"))  # fmt: skip  # noqa: E501
    reasoning_field: str = flag("both", "name of reasoning in answers", choices=("both", "reasoning_content", "reasoning", "none"))  # fmt: skip  # noqa: E501
    chat_template: str = flag("", "file with a template instead of the model's")
    generation_config: str = flag("auto", "none: OpenAI's defaults instead of the model's", choices=("auto", "none"))
    max_n: int = flag(8, "choices of a request")
    max_logprobs: int = flag(20, "likeliest tokens that a request may ask for")
    lenient_fields: bool = flag(False, "unknown fields are counted instead of refused")
    limit_concurrency: int = flag(4096, "requests at once; more get 429")
    max_body_mb: float = flag(16.0, "largest body")
    header_timeout: float = flag(10.0, "seconds for a connection's headers")
    body_timeout: float = flag(30.0, "seconds for each part of a body")
    write_timeout: float = flag(60.0, "a client that takes nothing for so long is given up")
    request_timeout: float = flag(0.0, "seconds that a request may wait; 0: any")
    shutdown_timeout: float = flag(30.0, "seconds for what runs, after SIGTERM")
    drain_delay: float = flag(0.0, "seconds between /ready's 503 and the first refusal")
    watchdog_timeout: float = flag(30.0, "seconds after which a step counts as hung")
    cors_origin: tuple[str, ...] = flag((), "origins of pages that may ask", "--allowed-origins")
    enable_openapi: bool = flag(False, "serve /openapi.json")
    metrics_public: bool = flag(False, "/metrics needs no key")
    metrics_compat: str = flag("none", "peers' names beside ours", choices=("none", "vllm", "sglang", "both"))
    otlp_endpoint: str = flag("", "URL that traces are sent to", "--otlp-traces-endpoint")
    log_level: str = flag("info", "debug, info, warning, error", choices=("debug", "info", "warning", "error"))
    log_prompts: bool = flag(False, "log what is asked and answered")
    gc_warning_threshold_secs: float = flag(0.0, "log collections that take longer; 0: none")
    no_freeze_gc: bool = flag(False, "let the collector walk what the start made")
    profile_folder: str = flag("", "where /start_profile writes; empty: there are no profiles")
    in_process: bool = flag(False, "the engine on a thread of this process")
    seed: int = flag(-1, "of random weights (--load-format dummy); -1: random", "--random-seed")

    def shown(self) -> dict[str, Any]:
        """Return the settings without secrets."""
        secrets = {f.name for f in dataclasses.fields(self) if f.metadata["secret"]}
        return {k: ("***" if v else v) if k in secrets else v for k, v in dataclasses.asdict(self).items()}


NAMES: Mapping[str, Any] = MappingProxyType({f.name: f for f in dataclasses.fields(ServeConfig)})
LATER = "a server runs on the GPUs of one host"
NEVER: Mapping[str, str] = MappingProxyType(
    {
        "--trust-remote-code": "no code of a model's folder is ever run",
        "--enable-lora": "adapters are not served",
        "--lora-modules": "adapters are not served",
        "--lora-paths": "adapters are not served",
        "--enable-expert-parallel": "its name is --ep, with a number",
        "--enable-dp-attention": "its name is --attn-dp-size, with a number",
        "--dp-size": "of attention groups its name is --attn-dp-size; replicas are servers of their own",
        "--data-parallel-size": "of attention groups its name is --attn-dp-size; replicas are servers of their own",
        "--nnodes": LATER, "--node-rank": LATER,
        "--master-addr": LATER, "--dist-init-addr": LATER, "--pipeline-parallel-size": LATER, "--pp-size": LATER,
        "--api-server-count": "one front serves; start several servers behind a balancer",
        "--tokenizer-worker-num": "one front serves; start several servers behind a balancer",
        "--api-workers": "one front serves; start several servers behind a balancer",
        "--disaggregation-mode": "prefill and decode share a server",
        "--kv-transfer-config": "prefill and decode share a server",
        "--cpu-offload-gb": "weights stay on the device",
        "--swap-space": "preempted requests are computed again, from the prefix cache",
        "--quantization": "the checkpoint says how it is quantised",
        "--tokenizer": "the tokenizer is the model folder's",
        "--attention-backend": "its new name is the variable FASTLAYERS_BACKEND=gqa=NAME,mla=NAME",
        "--moe-backend": "its new name is the variable FASTLAYERS_BACKEND=fused_moe=NAME",
        "--moe-runner-backend": "its new name is the variable FASTLAYERS_BACKEND=fused_moe=NAME",
        "--linear-backend": "its new name is the variable FASTLAYERS_BACKEND=linear=NAME",
        "--fp8-gemm-backend": "its new name is the variable FASTLAYERS_BACKEND=fp8_linear=NAME",
        "--enable-metrics": "/metrics is always on",
        "--disable-log-requests": "prompts are logged with --log-prompts only",
        "--enable-chunked-prefill": "it is always on",
        "--enable-prefix-caching": "it is on; --no-prefix-cache switches it off",
        "--guided-decoding-backend": "grammars are xgrammar's",
        "--max-seq-len-to-capture": "its new name is --cuda-graph-max-bs, of requests",
        "--num-scheduler-steps": "steps overlap instead; --disable-overlap-schedule switches that off",
    }
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fastlayers serve``."""
    made = parser_of(ServeConfig, "fastlayers serve", "Serve a model over HTTP.", "MODEL")
    made.add_argument("--config", default=None, help="YAML file of flags; the command line wins")
    made.add_argument("--json", action="store_true", help="print the configuration as JSON, and stop")
    made.add_argument("--mem-fraction-static", type=float, default=None, help=argparse.SUPPRESS)
    return made


def parse(arguments: Sequence[str]) -> tuple[ServeConfig, bool]:
    """Return the configuration of a command line, and whether only to print it.

    Raises
    ------
    ArgumentError
        An unknown flag, one that is refused, or a value that is not accepted.
    """
    for argument in arguments:
        why = NEVER.get(argument.partition("=")[0])
        if why is not None:
            raise ArgumentError("serve", argument.partition("=")[0], "given", f"nothing: {why}")
    values = given_values(parser(), arguments, "MODEL", "model")
    path, show, fraction = values.pop("config", ""), values.pop("json"), values.pop("mem_fraction_static", None)
    if fraction is not None:
        # SGLang's share holds weights and cache; ours also what a step needs besides.
        values["gpu_memory_utilization"] = round(min(0.98, fraction + 0.04), 4)
        log.warning("--mem-fraction-static %g becomes --gpu-memory-utilization %g", fraction, values["gpu_memory_utilization"])  # fmt: skip  # noqa: E501
    values = (_from_file(Path(path)) if path else {}) | values
    config = typed(ServeConfig, "serve", values)
    _check(config)
    return config, show


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentError("serve", "--config", f"{str(path)!r} ({error})", "a YAML file of flags") from error
    if not isinstance(found, dict):
        raise ArgumentError("serve", "--config", f"{str(path)!r}, which holds no mapping", "names and values of flags")
    named = {str(name).replace("-", "_").lstrip("_"): value for name, value in found.items()}
    for name in named:
        if name not in NAMES:
            raise ArgumentError(
                "serve", "--config", f"{name!r} in {str(path)!r}", "names of flags, as --help lists them"
            )
    return named


def _check(config: ServeConfig) -> None:
    bounds = {
        "port": (0, 65535), "page_size": (1, 128), "max_model_len": (0, 2**31), "gpu_memory_utilization": (0.05, 0.98),
        "max_running_requests": (1, 65536), "max_num_batched_tokens": (16, 2**20), "itl_target_ms": (0, 60_000),
        "max_partial_prefills": (1, 256), "max_queued_requests": (1, 2**20), "max_queued_tokens": (1, 2**40),
        "speculative_max_k": (1, 8), "max_n": (1, 64), "max_logprobs": (0, 20), "limit_concurrency": (1, 2**20),
        "max_body_mb": (0.001, 1024), "grammar_timeout": (0.1, 600), "num_pages": (0, 2**31),
    }  # fmt: skip
    Ranks(config.tp, config.attn_dp_size, config.ep)
    if config.attn_dp_size > 1:
        raise ArgumentError("serve", "--attn-dp-size", config.attn_dp_size, "1: one group's requests are planned")
    if config.in_process and config.tp * config.attn_dp_size > 1:
        raise ArgumentError("serve", "--in-process", "given", "nothing with several ranks, each of which is a process")
    bounds |= {name: (0, 86_400) for name in NAMES if name.endswith(("_timeout", "_delay")) and name not in bounds}
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if not least <= value <= most:
            raise ArgumentError("serve", "--" + name.replace("_", "-"), value, f"{least} to {most}")
    if "*" in config.cors_origin:
        raise ArgumentError("serve", "--cors-origin", "'*'", "origins such as https://example.org, one by one")


def keys_of(given: Sequence[str], option: str) -> tuple[str, ...]:
    """Return keys, of which ``@FILE`` stands for a file with one a line."""
    found: list[str] = []
    for text in given:
        if not text.startswith("@"):
            found.append(text)
            continue
        try:
            found += [line.strip() for line in Path(text[1:]).read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ArgumentError("serve", option, f"{text!r} ({error.strerror})", "a key, or @FILE") from error
    return tuple(found)


def as_json(config: ServeConfig) -> str:
    """Return the configuration as a document, keys masked."""
    return json.dumps(config.shown(), indent=2)
