"""From a configuration to the parts of an engine: weights, memory, graphs, measured step times. In phases."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

import fastlayers as fl
from fastlayers.bf12 import StoredBF12, store_bf12
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError
from fastlayers.layer import Layer
from fastlayers.registry import registry
from fastlayers.runtime.compile_log import CompileWatch, stop_watching
from fastlayers.sampler.layer import Sampler
from fastlayers_models.find import TINY, assets, find
from fastlayers_server.engine.child import Phase
from fastlayers_server.engine.config import EngineConfig, SchedulerConfig, drafting, ranks_of
from fastlayers_server.engine.executor import TorchExecutor
from fastlayers_server.engine.grammar import GrammarMasks, tokenizer_info
from fastlayers_server.engine.loop import Engine
from fastlayers_server.engine.protocol import EngineInfo
from fastlayers_server.engine.scheduler import Scheduler
from fastlayers_server.engine.speculation import Lookups, Speculation
from fastlayers_server.engine.warming import draw_specially, measure, warm_up
from fastlayers_server.parallel.groups import Groups
from fastlayers_server.parallel.together import GroupExecutor
from fastlayers_server.stalls import freeze

log = logging.getLogger(__name__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
# Beside weights and cache: graphs, workspaces, activations and logits of the largest steps.
GPU_RESERVE = 6 << 30
CPU_CACHE_BYTES = 512 << 20
PIECE = 64  # prompt tokens of a step in deterministic mode


class Timeline:
    """What a start spends its seconds on, part after part; also in the log.

    Attributes
    ----------
    parts : list of (str, float)
        What was done, and its seconds, the device's work included.
    """

    def __init__(self, begun: float = 0.0) -> None:
        self.parts: list[tuple[str, float]] = []
        self._since = begun or time.monotonic()

    def said(self, part: str) -> None:
        """Take what was done since the last part, or since the beginning, for this one."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.parts.append((part, now - self._since))
        log.info("start: %6.2f s %s", now - self._since, part)
        self._since = now


def build(config: EngineConfig, phase: Phase, epoch: int = 1, model: Any = None) -> Engine:
    """Load the model, reserve all memory, capture every step, and return the engine.

    ``model``: one that is loaded already, with the page size of the configuration.

    Raises
    ------
    FastlayersError
        In a sentence: no such model, a value that is not accepted, a model or a context that does not fit.
    """
    times = Timeline(config.begun)
    times.said("process and its imports")
    speculates = drafting(config)
    check_drafter(config, None if model is None else model.config)
    seconds, begin = {}, time.monotonic()
    phase("weights")
    model = load_model(config, times.said) if model is None else model
    times.said("weights packed, tables probed")
    if config.bf12:
        times.said(keep_bf12(model).summary)
    seconds["weights"] = time.monotonic() - begin
    if config.deterministic:
        for part in (model, Sampler(model.config.vocab_size, device=model.device)):
            refuse_variant(part)
    drafter = None
    if config.speculative_algorithm == "draft":
        drafter = load_model(replace(config, model=config.speculative_draft_model, fp8_math=False))
        if config.bf12:  # told where it takes none, not refused: the served model has its own
            times.said(f"draft model: {store_bf12(drafter).summary}")
    phase("warmup")
    limits = scheduler_config(config, model, drafter)
    groups = config.attn_dp_size
    grammars = _grammars(config, limits, model.device) if groups == 1 else None
    if grammars is not None:
        limits = msgspec.structs.replace(limits, features=(*limits.features, "grammar"))
    begin = time.monotonic()
    cuda = model.device.type == "cuda"
    if cuda and grammars is not None:
        grammars.read()
        times.said("grammars")
    if cuda:
        warm_up(model, limits, times.said)
    folder = Path(config.profile_folder) if config.profile_folder else None
    executor = (TorchExecutor if groups == 1 else GroupExecutor)(
        model, limits, cuda_graph=False if config.disable_cuda_graph else "auto", profile_folder=folder,
        verify_each=(config.speculative_max_k * config.speculative_topk + 1) * speculates,
        mtp=config.speculative_topk * (config.speculative_algorithm in ("mtp", "draft")), draft_model=drafter,
        rejection=config.speculative_verify == "rejection",
    )  # fmt: skip
    scheduler: Any = Scheduler(limits) if groups == 1 else Groups([Scheduler(limits) for _ in range(groups)])
    times.said("cache, tables of rows")
    if cuda:
        stop_watching()  # what the engine's own steps need besides is meant to be compiled
    seconds["warmup"] = time.monotonic() - begin
    phase("capture")
    begin = time.monotonic()
    executor.capture()
    ledger = executor.decoding.ledger
    warm, captured = sum(r.warm_up_seconds for r in ledger), sum(r.capture_seconds for r in ledger)
    times.said(f"{len(ledger)} graphs: {warm:.2f} s of runs before, {captured:.2f} s of captures")
    if cuda:
        scheduler.budget.measured(*measure(executor, scheduler))
        times.said("steps measured")
        draw_specially(executor, grammars)
        times.said("draws with wishes")
    seconds["capture"] = time.monotonic() - begin
    if cuda:
        executor.backends()
        times.said("backends and their reasons")
    executor.watch = CompileWatch()
    if not config.no_freeze_gc:
        freeze()
    times.said("collector frozen")
    executor.start = times.parts
    info = EngineInfo(
        epoch, limits.vocab_size, limits.max_model_len, limits.eos_ids, limits.page_size, groups * limits.num_pages,
        groups * limits.max_running, groups * limits.max_queued_requests, limits.max_logprobs, limits.features,
        str(getattr(model.config, "model_type", "")), str(model.device), seconds,
    )  # fmt: skip
    drafts = Speculation(executor.mtp or Lookups(), config.speculative_max_k, scheduler.metrics) if speculates else None
    # Whether a launch returns before its work is done.
    overlap = (cuda or executor.decoding.graphs is not None) and not config.disable_overlap_schedule
    return Engine(scheduler, executor, info=info, overlap=overlap, grammars=grammars, drafts=drafts)


def _grammars(config: EngineConfig, limits: SchedulerConfig, device: torch.device) -> GrammarMasks | None:
    """Return what masks for grammars, if the model has a tokenizer."""
    known = config.load_format == "dummy" and config.model != "tiny"  # by name, perhaps without a folder
    folder = Path(config.model).expanduser() if known else model_folder(config.model)
    if not (folder / "tokenizer.json").is_file():
        return None
    described = partial(tokenizer_info, folder, limits.vocab_size, limits.eos_ids)
    return GrammarMasks(described, limits.vocab_size, 2 * limits.max_running, pinned=device.type == "cuda")


def refuse_variant(layers: Any) -> None:
    """Raise :class:`ArgumentError` for the first backend that does not promise equal bits for equal calls here."""
    chosen = [c for m in layers.modules() if isinstance(m, Layer) and hasattr(m, "choice") for c in m.choices]
    for choice, rung in ((c, rung) for c in chosen for rung in c.rungs):
        kind = choice.device.type
        if kind not in rung.backend.repeats_on:
            able = [backend.name for backend in registry(choice.layer).ranked if kind in backend.repeats_on]
            given = f"True, with {choice.layer}={rung.backend.name}, of which nobody has shown that it repeats its bits"
            accepted = f"False, or by FASTLAYERS_BACKEND={choice.layer}=… one of: {', '.join(able) or 'none'}"
            raise ArgumentError("engine", "deterministic", f"{given} on {kind}", accepted)


def model_folder(name: str) -> Path:
    """Return the folder of a model, see :func:`fastlayers_models.find.find`; "tiny" is the one that ships."""
    return assets() / TINY if name in ("tiny", TINY) else find(name)


def load_model(config: EngineConfig, said: Callable[[str], None] = lambda part: None) -> Any:
    """Return the model on its device; ``said`` is told what was just done."""
    from fastlayers_models.auto import AutoModel, check_options, family_of
    from fastlayers_server.known_models import config_of
    from fastlayers_server.random_models import random_model

    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # A CPU computes in fp32 what a checkpoint keeps in bf16: that is faster there.
    dtype: Any = _DTYPES.get(config.dtype, "auto" if device.type == "cuda" else torch.float32)
    cache = None if config.kv_cache_dtype == "auto" else _DTYPES.get(config.kv_cache_dtype)
    if config.kv_cache_dtype != "auto" and cache is None:
        raise ArgumentError("engine", "kv_cache_dtype", repr(config.kv_cache_dtype), "auto, " + ", ".join(_DTYPES))
    options: dict[str, Any] = {"page_size": config.page_size, "kv_dtype": cache}
    options |= {"fp8_math": True} if config.fp8_math else {}
    if config.tp * config.attn_dp_size > 1:
        options["parallel"], device = ranks_of(config).join(device)
    elif config.expert_exchange != "auto":  # the model says what one rank cannot do
        options["parallel"] = ParallelSpec(expert_exchange=config.expert_exchange)
    if config.load_format != "dummy":
        return AutoModel.from_pretrained(model_folder(config.model), dtype=dtype, device=device, **options)
    dtype = torch.bfloat16 if dtype == "auto" else dtype
    kept = config.layers or None
    known = config_of(str(model_folder("tiny")) if config.model == "tiny" else config.model)
    check_options(family_of(known), options)
    return random_model(known, device, dtype=dtype, layers=kept, seed=config.seed, said=said, **options)


def keep_bf12(model: Any, who: str = "engine") -> StoredBF12:
    """Let the layers of a loaded model keep copies for steps of one token, see :func:`fastlayers.store_bf12`.

    Before what is left of the memory becomes the cache. Each rank keeps copies of what it holds, of the same layers:
    all ranks call this, and all of them refuse where one does.

    Raises
    ------
    ArgumentError
        No layer takes it; why is said, and on which rank where not all refuse alike.
    """
    stored = store_bf12(model)
    if not stored.layers:
        why = stored.why_not or "it has no linears of plain weights"
        raise ArgumentError(who, "bf12", True, f"False: no layer of this model can keep such a copy: {why}")
    return stored


def check_drafter(config: EngineConfig, target: Any = None) -> None:
    """Raise :class:`ArgumentError` for a model that lacks what is to draft for it, before anything is loaded.

    ``target``: the configuration of the model that is to be served, if it is loaded already.
    """
    from fastlayers_models.auto import family_of
    from fastlayers_server.known_models import config_of

    def described(name: str) -> Any:
        given = config_of(name if config.load_format == "dummy" and name != "tiny" else str(model_folder(name)))
        return family_of(given).config_class.from_hf(given)

    how = config.speculative_algorithm
    if how not in ("mtp", "draft"):
        return
    random, target = target is None and config.load_format == "dummy", target or described(config.model)
    if how == "mtp" and (random or not getattr(target, "num_nextn_predict_layers", 0)):
        accepted = "'none' or 'ngram': this model has no draft layer"
        raise ArgumentError("engine", "speculative_algorithm", "'mtp'", accepted)
    if how == "draft" and (theirs := described(config.speculative_draft_model).vocab_size) != target.vocab_size:
        given = f"one with a vocabulary of {theirs}"
        raise ArgumentError("engine", "speculative_draft_model", given, f"one of {target.vocab_size}")


def scheduler_config(config: EngineConfig, model: Any, drafter: Any = None) -> SchedulerConfig:
    """Return the scheduler's limits for a model that is on its device already."""
    longest = model.config.max_position_embeddings
    length = config.max_model_len or longest
    if not 1 < length <= longest:
        raise ArgumentError("engine", "max_model_len", length, f"2 to {longest} (max_position_embeddings)")
    cached = [each for each in (model, drafter) if each is not None]
    specs = [fl.kv_cache_spec(each, page_size=config.page_size, dtype=each.kv_dtype) for each in cached]
    page_bytes, one = sum(s.bytes_per_token for s in specs) * config.page_size, -(-length // config.page_size)
    most = config.max_running_requests * one + 1
    if config.num_pages:
        pages, room = config.num_pages, f"{config.num_pages} pages"
    else:
        budget = _cache_bytes(config, model.device)
        pages = least_of_ranks(model, min(most, budget // page_bytes))
        room = f"{budget / 2**30:.1f} GiB that are left for the cache"
    if pages - 1 < one:
        needs = f"{(one + 1) * page_bytes / 2**30:.2f} GiB, {one + 1} pages"
        raise ArgumentError("engine", "max_model_len", f"{length}, which needs {needs}", f"what fits {room}")
    told = () if config.attn_dp_size > 1 else ("prompt_logprobs",)  # what another group's rank has is not sent
    block = math.lcm(config.page_size, 16)
    piece = -(-PIECE // block) * block if config.deterministic else 0
    if piece > config.max_num_batched_tokens:
        accepted = f"{piece} or more: deterministic mode computes prompts in pieces of so many tokens"
        raise ArgumentError("engine", "max_num_batched_tokens", config.max_num_batched_tokens, accepted)
    return SchedulerConfig(
        vocab_size=model.config.vocab_size, max_model_len=length, num_pages=pages, page_size=config.page_size,
        eos_ids=tuple(sorted(model.config.eos_token_ids)), max_running=config.max_running_requests,
        max_batched_tokens=config.max_num_batched_tokens, max_partial_prefills=config.max_partial_prefills,
        max_queued_requests=config.max_queued_requests, max_queued_tokens=config.max_queued_tokens,
        policy=config.schedule_policy, enable_priority=config.enable_priority,
        prefix_cache=not config.no_prefix_cache, drop_last_block=config.speculative_algorithm == "mtp",
        piece=piece, max_logprobs=config.max_logprobs,
        features=("penalties", "logit_bias", "logprobs", *told), itl_target=config.itl_target_ms / 1e3,
        mixed=_may_mix(config, model),
    )  # fmt: skip


def _may_mix(config: EngineConfig, model: Any) -> bool:
    """Whether rows that decode may be part of an extend.

    Latents are expanded there, of all that a row has cached; a draft layer wants hidden rows of each kind apart.
    """
    drafted = config.speculative_algorithm in ("mtp", "draft")
    latents = getattr(model, "captured_tokens", None) is not None
    apart = config.attn_dp_size > 1  # groups take as many steps as each other, of the same kinds
    return not (config.disable_mixed_steps or config.deterministic or drafted or latents or apart)


def least_of_ranks(model: Any, value: int) -> int:
    """Return the smallest value that a rank has: whatever is planned must fit all of them."""
    axis = model.parallel.tp
    if axis.size == 1:
        return value
    found = torch.tensor([value], device=model.device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=axis.group)
    return int(found)


def _cache_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - GPU_RESERVE)
