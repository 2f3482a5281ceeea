"""Everything that ``fastlayers serve`` can be told: one frozen object, from which the command line is made.

Each field is a flag of the same name; aliases are those of vLLM and SGLang. What peers have and we do not is an error
that says why.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastlayers.errors import ArgumentError
from fastlayers_server.engine.config import EngineConfig, drafting, ranks_of
from fastlayers_server.flags import flag, flags_of, given_values, parser_of, spellings, typed
from fastlayers_server.ranks import MOST, check_experts

log = logging.getLogger("fastlayers.serve")
DAY = (0, 86_400)


@dataclass(frozen=True)
class ServeConfig(EngineConfig):
    """Settings of a server, its engine's and its front's; see the fields' own texts."""

    served_model_name: tuple[str, ...] = flag((), "names that requests use; default: the folder's")
    host: str = flag("127.0.0.1", "address to listen at")
    port: int = flag(8000, "0: any free one", within=(0, 65535))
    api_key: tuple[str, ...] = flag((), "a key that requests need, or @FILE with one a line", secret=True)
    admin_api_key: tuple[str, ...] = flag((), "a key for /freeze_gc, /flush_cache, /abort, /drain, …", secret=True)
    open_admin: bool = flag(False, "admin routes without a key (benches, tests)")
    grammar_timeout: float = flag(5.0, "seconds that compiling one grammar may take", within=(0.1, 600))
    reasoning_parser: str = flag("auto", "how reasoning is marked", choices=("auto", "deepseek_r1", "qwen3", "harmony", "none"))  # fmt: skip  # noqa: E501
    tool_call_parser: str = flag("auto", "how calls are marked", choices=("auto", "hermes", "deepseek_v3", "deepseek_v31", "harmony", "none"))  # fmt: skip  # noqa: E501
    reasoning_field: str = flag("both", "name of reasoning in answers", choices=("both", "reasoning_content", "reasoning", "none"))  # fmt: skip  # noqa: E501
    chat_template: str = flag("", "file with a template instead of the model's")
    generation_config: str = flag("auto", "none: OpenAI's defaults instead of the model's", choices=("auto", "none"))
    max_n: int = flag(8, "choices of a request", within=(1, 64))
    lenient_fields: bool = flag(False, "unknown fields are counted instead of refused")
    limit_concurrency: int = flag(4096, "requests at once; more get 429", within=(1, 2**20))
    max_body_mb: float = flag(16.0, "largest body", within=(0.001, 1024))
    header_timeout: float = flag(10.0, "seconds for a connection's headers", within=DAY)
    body_timeout: float = flag(30.0, "seconds for each part of a body", within=DAY)
    write_timeout: float = flag(60.0, "a client that takes nothing for so long is given up", within=DAY)
    request_timeout: float = flag(0.0, "seconds that a request may wait; 0: any", within=DAY)
    shutdown_timeout: float = flag(30.0, "seconds for what runs, after SIGTERM", within=DAY)
    drain_delay: float = flag(0.0, "seconds between /ready's 503 and the first refusal", within=DAY)
    cors_origin: tuple[str, ...] = flag((), "origins of pages that may ask", "--allowed-origins")
    enable_openapi: bool = flag(False, "serve /openapi.json")
    metrics_public: bool = flag(False, "/metrics needs no key")
    metrics_compat: str = flag("none", "peers' names beside ours", choices=("none", "vllm", "sglang", "both"))
    otlp_endpoint: str = flag("", "URL that traces are sent to", "--otlp-traces-endpoint")
    log_prompts: bool = flag(False, "log what is asked and answered")
    gc_warning_threshold_secs: float = flag(0.0, "log collections that take longer; 0: none")
    in_process: bool = flag(False, "the engine on a thread of this process")

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.served_model_name[0]

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a body at most."""
        return int(self.max_body_mb * 2**20)

    def shown(self) -> dict[str, Any]:
        """Return the settings without secrets."""
        given = {name: (field, getattr(self, name)) for name, field in NAMES.items()}
        return {name: "***" if field.metadata["secret"] and value else value for name, (field, value) in given.items()}


NAMES: Mapping[str, Any] = MappingProxyType(flags_of(ServeConfig))
# Every spelling of a flag, in a command line or a file -> its field.
SPELLED: Mapping[str, str] = MappingProxyType(
    {spelled: name for name, field in NAMES.items() for spelled in spellings(field)}
)
# Why there is no such flag -> flags of peers.
LACKING = {
    "no code of a model's folder is ever run": "--trust-remote-code",
    "adapters are not served": "--enable-lora --lora-modules --lora-paths",
    "its name is --ep, with a number": "--enable-expert-parallel",
    "its name is --attn-dp-size, with a number": "--enable-dp-attention",
    "of attention groups its name is --attn-dp-size; replicas are servers of their own":
        "--dp-size --data-parallel-size --dp",
    "a server runs on the GPUs of one host":
        "--nnodes --node-rank --master-addr --dist-init-addr --pipeline-parallel-size --pp-size --pp",
    "one front serves; start several servers behind a balancer":
        "--api-server-count --tokenizer-worker-num --api-workers",
    "prefill and decode share a server": "--disaggregation-mode --kv-transfer-config",
    "weights stay on the device": "--cpu-offload-gb",
    "preempted requests are computed again, from the prefix cache": "--swap-space",
    "the checkpoint says how it is quantised": "--quantization",
    "the tokenizer is the model folder's": "--tokenizer",
    "its new name is the variable FASTLAYERS_BACKEND=gqa=NAME,mla=NAME": "--attention-backend",
    "its new name is the variable FASTLAYERS_BACKEND=fused_moe=NAME": "--moe-backend --moe-runner-backend",
    "its new name is the variable FASTLAYERS_BACKEND=linear=NAME": "--linear-backend",
    "its new name is the variable FASTLAYERS_BACKEND=fp8_linear=NAME": "--fp8-gemm-backend",
    "/metrics is always on": "--enable-metrics",
    "figures are at /metrics, and not logged": "--disable-log-stats",
    "prompts are logged with --log-prompts only": "--disable-log-requests --enable-log-requests --log-requests",
    "--log-level warning leaves a line for each request out": "--disable-uvicorn-access-log",
    "its name is --log-level": "--uvicorn-log-level",
    "it is always on; --tool-call-parser says how calls are marked, if the template does not":
        "--enable-auto-tool-choice",
    "it is always on; --reasoning-parser says how thoughts are marked, if the model does not": "--enable-reasoning",
    "a server listens at --host and --port": "--uds",
    "TLS ends at a proxy in front of this server": "--ssl-keyfile --ssl-certfile",
    "a proxy in front of this server takes its own part of the path away": "--root-path",
    "a name on the hub is its main branch; of another one give the directory that it was loaded to": "--revision",
    "models are kept where the variable HF_HOME says": "--download-dir",
    "its new name is the variable HF_TOKEN": "--hf-token",
    "the model's config.json says it": "--hf-overrides --rope-scaling",
    "requests say it, else the model's generation_config.json": "--override-generation-config",
    "its names are --speculative-algorithm, --speculative-max-k and the others beside them": "--speculative-config",
    "its name is --num-pages, of --page-size tokens each": "--max-total-tokens",
    "it is always on": "--enable-chunked-prefill",
    "it is on; --no-prefix-cache switches it off": "--enable-prefix-caching",
    "grammars are xgrammar's": "--guided-decoding-backend",
    "steps of up to --max-running-requests requests are captured": "--cuda-graph-max-bs --max-seq-len-to-capture",
    "steps overlap instead; --disable-overlap-schedule switches that off": "--num-scheduler-steps",
}  # fmt: skip
NEVER: Mapping[str, str] = MappingProxyType({given: why for why, flags in LACKING.items() for given in flags.split()})


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
    values = given_values(parser(), arguments, NEVER, "MODEL")
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
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())  # YAML's own comes in four lines
        raise ArgumentError("serve", "--config", f"{str(path)!r} ({why})", "a YAML file of flags") from error
    if not isinstance(found, dict):
        raise ArgumentError("serve", "--config", f"{str(path)!r}, which holds no mapping", "names and values of flags")
    named: dict[str, Any] = {}
    for given, value in found.items():
        spelled = "--" + str(given).replace("_", "-").lstrip("-")
        if spelled in NEVER:
            raise ArgumentError("serve", spelled, f"given in {str(path)!r}", f"nothing: {NEVER[spelled]}")
        name = SPELLED.get(spelled)
        if name is None:
            accepted = "names of flags, as --help lists them"
            raise ArgumentError("serve", "--config", f"{str(given)!r} in {str(path)!r}", accepted)
        if name in named:
            raise ArgumentError("serve", "--config", f"{str(given)!r} in {str(path)!r}", f"one name of --{name.replace('_', '-')}")  # fmt: skip  # noqa: E501
        named[name] = value
    return named


def _check(config: ServeConfig) -> None:
    check_experts("serve", config.ep, config.tp * config.attn_dp_size, "--tp × --attn-dp-size")
    ranks = ranks_of(config)
    if ranks.processes > MOST:
        accepted = f"at most {MOST} processes: a server's ranks lie on one host"
        raise ArgumentError("serve", "--tp × --attn-dp-size", ranks.processes, accepted)
    if config.attn_dp_size > 1 and config.deterministic:
        accepted = "1 with --deterministic: what a group computes depends on how much the others bring"
        raise ArgumentError("serve", "--attn-dp-size", config.attn_dp_size, accepted)
    if config.attn_dp_size > 1 and config.speculative_algorithm != "none":
        accepted = "1 with drafts: a step that verifies would hold up the other groups"
        raise ArgumentError("serve", "--attn-dp-size", config.attn_dp_size, accepted)
    drafting(config)
    if config.in_process and config.tp * config.attn_dp_size > 1:
        raise ArgumentError("serve", "--in-process", "given", "nothing with several ranks, each of which is a process")
    if not config.host.strip():
        accepted = "an address of this machine: 127.0.0.1 is for itself only, 0.0.0.0 for everybody"
        raise ArgumentError("serve", "--host", repr(config.host), accepted)
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
            lines = [line.strip() for line in Path(text[1:]).read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no UTF-8"
            raise ArgumentError("serve", option, f"{text!r} ({why})", "a key, or @FILE") from error
        if not lines:
            raise ArgumentError("serve", option, f"{text!r}, which holds no key", "a key, or @FILE with one a line")
        found += lines
    return tuple(found)


def as_json(config: ServeConfig) -> str:
    """Return the configuration as a document, keys masked."""
    return json.dumps(config.shown(), indent=2)
