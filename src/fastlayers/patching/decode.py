"""``patch(model, cuda_graph=True)``: the steps of ``generate`` as replays of captured graphs.

Five methods of Hugging Face's generation loop are overridden on the instance. ``generate`` says whose the graphs are
meanwhile: their outputs are valid until the next replay of any, so that another thread's call runs as before. Cache
preparation hands out a :class:`PagedCache`; the two that choose the callable of decode steps choose
:meth:`DecodeDriver.call`; prefill replays prompts, see :mod:`fastlayers.patching.prefill`. A step copies ids and
positions into static tensors and replays the whole ``forward`` of the model, captured per batch and capacity; the
logits it returns are valid until the next step.

What cannot be captured runs as before, and says why once. ``disable_compile=True`` in the generation config runs the
same step without a graph.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastlayers.errors import NoBackendError
from fastlayers.patching.bf12 import BF12Copies
from fastlayers.patching.capturable import attention_layers, fingerprint, why_not_root
from fastlayers.patching.classes import RECORDED, swap, unswap
from fastlayers.patching.comparison import recorded
from fastlayers.patching.decoder import FastDecoderLayer, decoder_of, fusible
from fastlayers.patching.head import logits_of
from fastlayers.patching.mla import FastMLA
from fastlayers.patching.overlap import Overlap, nothing_foreign
from fastlayers.patching.paged import CacheLease, CachePool, CacheStore, PagedCache, capacity_bucket, weak_method
from fastlayers.patching.prefill import KNOWN_INPUTS, SLACK, ExtendKey, Prefills, why_not
from fastlayers.patching.step import DecodeStep, PagedStep
from fastlayers.runtime.captured_steps import CapturedSteps
from fastlayers.runtime.graphs import CudaGraphs

log = logging.getLogger(__name__)

ATTRIBUTE = "_fl_decode"
METHODS = ("generate", "_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call", "_prefill")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")
_WORDS = "cuda_graph: decoding runs uncaptured"
# New tokens for which a cache has room at first.
FIRST_TOKENS = 2048
# Bytes of rows and graphs that are kept between calls of generate, besides those in use.
MAX_CACHE_BYTES = 16 << 30


class DecodeDriver(CapturedSteps):
    """Drives the steps of one patched model.

    Parameters
    ----------
    root : PreTrainedModel
    make_graphs : callable
        ``make_graphs(device)`` returns the :class:`fastlayers.runtime.graphs.CudaGraphs` to capture with. Pickled with
        the model, so a function of a module.
    core : str
        Backend of the attention core and of the cache write; ``"auto"``: the best that can be captured.
    overlapping, bf12 : bool
        Whether greedy steps are launched before they are asked for, and steps of one row read bf12 copies.

    Attributes
    ----------
    overlap : Overlap
        What was launched so.
    replays, prefills : Tensor int64 ``[1]``
        Decode steps, and prompts, that were replayed.
    falls : Tensor int64 ``[1]``
        Decode steps that ran uncaptured.
    prefill : Prefills
        Which prompts are replayed.
    uncaptured : Counter[str]
        Prompts that ran uncaptured, by the reason in words.
    """

    counted = "prefills"

    def __init__(
        self, root: Any, make_graphs: Callable[[torch.device], CudaGraphs], core: str, overlapping: bool, bf12: bool
    ) -> None:
        # Weakly, as all else that leads back: the model holds its driver, and is freed when its user lets go of it.
        self._root, self._make_graphs, self.core = weakref.ref(root), make_graphs, core
        self.overlapping, self.overlap, self.copies = overlapping, Overlap(), BF12Copies(bf12)
        # What somebody put on the instance before.
        self._before: Any = None
        with torch.inference_mode(False):
            self.replays, self.falls, self.prefills = (
                torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(3)
            )
        self._reset()

    def _reset(self) -> None:
        super().__init__()
        self._pool = CachePool(MAX_CACHE_BYTES, weak_method(self._dropped))
        self._weights: tuple[Any, ...] = ()
        self._said: set[str] = set()
        self._handles = -1
        # Held while a call of generate has the graphs, and by which thread.
        self._turn, self._thread, self._guessable = threading.RLock(), 0, False
        self.prefill = Prefills(attention_layers(self.root))

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own graphs and counters.
        names = ("root", "_make_graphs", "core", "overlapping", "_before")
        return {name: getattr(self, name) for name in names} | {"bf12": self.copies.wanted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("root", "_make_graphs", "core", "overlapping")
        self.__init__(*(state[name] for name in names), state.get("bf12", False))  # type: ignore[misc]
        self._before = state["_before"]

    @property
    def root(self) -> Any:
        """The model that is driven."""
        return self._root()

    def _dropped(self, key: tuple[int, int, int]) -> None:
        if self.graphs is not None:
            for name in self.graphs.keys:
                if name[:3] == key:  # type: ignore[index]
                    self.graphs.drop(name)

    def clear(self) -> None:
        """Drop all graphs and buffers."""
        self.overlap.settle()
        self.broken.clear()
        self.wanted.clear()
        self._pool.clear()
        self.copies.clear()
        if self.graphs is not None:
            self.graphs.clear()

    def graphs_on(self, device: torch.device) -> CudaGraphs:
        """Return where graphs are kept, made at the first call."""
        if self.graphs is None:
            self.graphs = self._make_graphs(device)
        return self.graphs

    def keep(self, store: CacheStore, key: Any) -> None:
        """Count the bytes of a new graph to its store, and let the pool drop others for them."""
        store.graph_bytes += next(record.bytes for record in self.ledger if record.key == key)
        self._pool.shrink(store)

    def kind_of(self, key: Any) -> Any:
        """Return the batch, the capacity, and what else the key of a prompt has: not whose buffers they are."""
        return key[:2] + key[3:]

    def describe(self, key: Any) -> str:
        """Return a graph's key in words."""
        what = f"prefill of {key.tokens} tokens" if isinstance(key, ExtendKey) else "decode"
        return f"{what}, batch {key[0]}, capacity {key[1]}"

    @property
    def chosen(self) -> tuple[bool, bool]:
        """Whether steps overlap, and whether those of one row read bf12 copies."""
        return self.overlapping, self.copies.wanted

    def choose(self, overlapping: bool, bf12: bool) -> None:
        """Make steps so from now on; graphs and copies of another choice stay until :meth:`drop_others`."""
        self.overlapping, self.copies.wanted = overlapping, bf12

    def drop_others(self) -> None:
        """Drop the graphs and copies of another choice; the next call of generate does, too."""
        if self._weights and self._weights[-1] != self.copies.wanted:
            self.clear()

    def attach(self) -> None:
        """Override the methods on the instance."""
        self._before = self.root.__dict__.get("generate")
        for name in METHODS:
            if not hasattr(type(self.root), name):
                continue
            self.root.__dict__[name] = getattr(self, "own_" + name.lstrip("_"))
        self.root.__dict__[ATTRIBUTE] = self

    def detach(self) -> None:
        """Remove the overrides, and all that was captured."""
        own = self.root.__dict__
        for name in METHODS:
            if getattr(own.get(name), "__self__", None) is self:  # else somebody wrapped it since
                del own[name]
        if self._before is not None:
            own.setdefault("generate", self._before)
        own.pop(ATTRIBUTE, None)
        self.clear()

    def _stock(self, name: str) -> Any:
        if name == "generate" and self._before is not None:
            return self._before
        return partial(getattr(type(self.root), name), self.root)

    def own_generate(self, *args: Any, **options: Any) -> Any:
        """Generate; the graphs are this thread's until it returns, unless another one has them."""
        mine = self._turn.acquire(blocking=False)
        before = self._thread, self._guessable
        if mine:
            self._thread = threading.get_ident()
            self._guessable = self.overlapping and nothing_foreign(args, options)
        try:
            return self._stock("generate")(*args, **options)
        finally:
            if mine:
                self.overlap.settle()
                self._thread, self._guessable = before
                self._turn.release()

    def own_prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> Any:  # fmt: skip
        """Hand out a :class:`PagedCache`, or what the original hands out."""
        reason = self._why_not_prepare(generation_config, model_kwargs, generation_mode)
        if reason:
            self._say(reason)
            return self._stock("_prepare_cache_for_generation")(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        layers = attention_layers(self.root)
        weights = *fingerprint(self.root), self.copies.wanted
        if self.copies.stale(self.root) or weights != self._weights:
            self.clear()
            # The next ones may be on another device.
            self._weights, self.graphs = weights, None
        wanted = max(max_cache_length + 1, getattr(generation_config, "max_cache_len", None) or 0)
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            # What a generous limit allows is rarely used: the cache grows where it is.
            wanted = min(wanted, mask.shape[1] + FIRST_TOKENS)
        greedy = generation_mode is GenerationMode.GREEDY_SEARCH and self._guessable
        self.overlap.begin(max_cache_length if greedy else 0)
        lease = CacheLease(self._pool, capacity_bucket(wanted + SLACK))
        model_kwargs["past_key_values"] = PagedCache(lease, [isinstance(layer, FastMLA) for layer in layers])
        return None

    def _why_not_prepare(self, config: Any, model_kwargs: dict[str, Any], mode: Any) -> str:
        """Return why this call of generate runs without a graph, or ""."""
        handed = model_kwargs.get("past_key_values")
        if handed is not None:
            if isinstance(handed, PagedCache):
                # From an earlier call: it is the caller's now, and no step may write into it behind their back.
                handed.unfit = "a cache was passed by the caller"
            return "a cache was passed by the caller"
        if config.use_cache is False:
            return "use_cache=False"
        if self._thread != threading.get_ident():
            return "another thread is generating, or generate() was not called on the model"
        if mode not in _MODES or config.is_assistant:
            return f"{getattr(mode, 'value', mode)} is not plain greedy search or sampling"
        if config.cache_implementation not in (None, "dynamic"):
            return f"cache_implementation={config.cache_implementation!r} was asked for"
        for name in _RECORDED:
            if getattr(config, name, False) or getattr(self.root.config, name, False) or model_kwargs.get(name):
                return f"{name} was asked for"
        if self.root.training:
            return "the model is in training mode"
        if recorded():
            return RECORDED
        if self._make_graphs is CudaGraphs and self.root.device.type != "cuda":
            return f"the model is on {self.root.device}"
        return why_not_root(self.root)

    def own_valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Return whether :meth:`own_get_compiled_call` gives the callable of decode steps."""
        cache = model_kwargs.get("past_key_values")
        if not isinstance(cache, PagedCache):
            found: bool = self._stock("_valid_auto_compile_criteria")(model_kwargs, generation_config)
            return found
        cache.capture = not generation_config.disable_compile
        return True

    def own_get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return the callable of decode steps; other caches than ours get what the original gives."""
        return partial(self.call, compile_config)

    def call(self, compile_config: Any, *args: Any, **inputs: Any) -> Any:
        """Run one step of the generation loop."""
        cache = inputs.get("past_key_values")
        if not isinstance(cache, PagedCache):
            return self._stock("get_compiled_call")(compile_config)(*args, **inputs)
        reason = self._why_not_step(cache, args, inputs)
        if reason:
            self.overlap.settle()
            self._say(reason)
            self.falls.add_(1)
            return self.root(*args, **inputs)
        try:
            logits = self._decode(cache, inputs)
        except NoBackendError as error:
            # Nothing was counted yet; the rows that were written are written again.
            cache.unfit = str(error)
            self._say(cache.unfit)
            self.falls.add_(1)
            return self.root(*args, **inputs)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def own_prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """Replay the prompts, or run what the original runs."""
        cache: Any = model_kwargs.get("past_key_values")
        reason = why_not(cache, generation_config, model_kwargs)
        if not reason:
            # What the original hands to the model.
            mask = model_kwargs.get("attention_mask")
            whole = mask is not None and mask.shape[1] == input_ids.shape[1]
            inputs = self.root.prepare_inputs_for_generation(
                input_ids, next_sequence_length=input_ids.shape[1] if whole else None,
                is_first_iteration=options.get("is_first_iteration", args[0] if args else True), **model_kwargs,
            )  # fmt: skip
            logits = self.prefill.replay(self, cache, inputs)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
            return self.root(**inputs, return_dict=True)
        self.uncaptured[reason] += isinstance(cache, PagedCache)
        return self._stock("_prefill")(input_ids, generation_config, model_kwargs, *args, **options)

    def _why_not_step(self, cache: PagedCache, args: tuple[Any, ...], inputs: dict[str, Any]) -> str:
        """Return why this step runs as an ordinary call of the model, or ""."""
        if RemovableHandle.next_id != self._handles:
            # Somebody registered a hook, on whatever: which of them a replay would miss is worth a look.
            self._handles = RemovableHandle.next_id
            cache.unfit = cache.unfit or why_not_root(self.root)
        if cache.unfit:
            return cache.unfit
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if args or ids is None or ids.shape[1] != 1:
            return "a chunk of several tokens"
        other = [n for n, given in inputs.items() if n not in KNOWN_INPUTS and given is not None and given is not False]
        if other:
            return f"the step takes {', '.join(sorted(other))}"
        if torch.is_grad_enabled() or torch.is_autocast_enabled(ids.device.type):
            return "gradients or autocast are on"
        if recorded():
            return RECORDED
        store = cache.lease.store
        if store is None or not cache.layers[0].attached:
            return "the cache is not in pages any more"
        if positions is None or positions.shape != ids.shape or ids.shape[0] != store.batch:
            return "no positions of one token a row were given"
        if not cache.started:
            cache.unfit = self._start(cache, store, inputs.get("attention_mask"))
        elif cache.get_seq_length() + SLACK > store.capacity:
            self._grow(cache, store)
        return cache.unfit

    def _start(self, cache: PagedCache, store: CacheStore, mask: torch.Tensor | None) -> str:
        """Prepare the first step of a generation: where rows begin. Returns why there can be none, or ""."""
        if not cache.attached:
            return "the cache is not in pages any more"
        if cache.get_seq_length() + SLACK > store.capacity:
            cache.grow(capacity_bucket(store.capacity + 1))
            store = cache.lease.bind(store.batch)
        length, step = cache.get_seq_length(), self._step_of(cache, store)
        step.meta.starts.zero_()
        if mask is not None:
            if mask.dim() != 2 or mask.shape != (store.batch, length + 1):
                return "an attention mask that is not one number a cached token"
            seen = mask[:, :length] != 0
            first = length - seen.sum(-1)
            # Padding may only be on the left: the tokens that count are the last ones.
            if not bool((seen == (torch.arange(length, device=mask.device) >= first[:, None])).all()):
                return "an attention mask with gaps, or padding on the right"
            step.meta.starts.copy_(first)
        cache.started = True
        return ""

    def _step_of(self, cache: PagedCache, store: CacheStore) -> DecodeStep:
        """Return the static tensors that go with a store; nothing on the device is counted yet."""
        if store.state is None:
            store.state = DecodeStep(store.batch, store.capacity, cache.layers[0].device, self.core)
            store.state.copies = self.copies if store.batch == 1 else None
            self.chain(store.state)
        step: DecodeStep = store.state
        step.length = -1
        return step

    def chain(self, step: PagedStep) -> None:
        """Tell a step which norm reads what a decoder layer returns."""
        step.chain([m for m in decoder_of(self.root).layers if isinstance(m, FastDecoderLayer)])

    def _grow(self, cache: PagedCache, store: CacheStore) -> None:
        """Move a full cache into the next larger store; its graph is captured at the next step."""
        self.overlap.settle()
        cache.grow(capacity_bucket(store.capacity + 1))
        step = self._step_of(cache, cache.lease.bind(store.batch))
        step.meta.starts.copy_(store.state.meta.starts)

    def _decode(self, cache: PagedCache, inputs: dict[str, Any]) -> torch.Tensor:
        store = cache.lease.store
        assert store is not None
        step: DecodeStep = store.state
        length = int(cache.layers[0].get_seq_length())
        logits = self.overlap.take(step, length, inputs)
        if logits is None:
            step.ids.copy_(inputs["input_ids"])
            step.positions.copy_(inputs["position_ids"])
            if step.length != length:
                step.set_length(length)
            step.cache = cache
            try:
                logits = self._replay(store, step, length) if cache.capture else self.forward(step)
            finally:
                step.cache = None
        else:
            self.replays.add_(1)
        step.length = length + 1
        cache.advance()
        return self._guess(cache, store, length + 1, logits)

    def _guess(self, cache: PagedCache, store: CacheStore, length: int, logits: torch.Tensor) -> torch.Tensor:
        """Launch the step that comes next where that may be, and return logits that it does not overwrite."""
        graphs, fits = self.graphs, length + SLACK <= store.capacity
        if not (cache.capture and fits and self.overlap.wants(length)) or graphs is None or store.key not in graphs:
            return logits
        step, kept = store.state, logits.clone()
        step.cache = cache
        try:
            self.overlap.launch(step, length, kept, partial(graphs.replay, store.key))
        finally:
            step.cache = None
        return kept

    def _replay(self, store: CacheStore, step: DecodeStep, length: int) -> torch.Tensor:
        """Replay the step's graph, captured now if there is none; without one where that failed."""
        graphs = self.graphs_on(step.device)
        if store.key not in graphs:
            restore = partial(step.set_length, length)
            broken = self.kind_of(store.key) in self.broken
            # The same step without a graph gives the same tokens.
            if broken or not self.capture_step(store.key, self.run(step), _WORDS, restore):
                return self.forward(step)
            self.keep(store, store.key)
        logits: torch.Tensor = graphs.replay(store.key)
        self.replays.add_(1)
        return logits

    def run(self, step: PagedStep) -> Callable[[], torch.Tensor]:
        """Return what captures :meth:`forward`."""
        return partial(weak_method(self.forward), step)

    def forward(self, step: PagedStep) -> torch.Tensor:
        """Run the model on the static tensors; what is captured. Nothing of it refers to the cache afterwards."""
        cache = step.cache
        cache.step = step
        try:
            step.begin()
            return logits_of(self.root, step, cache)
        finally:
            cache.step = None
            step.end()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("%s: %s", _WORDS, reason)


def driver_of(root: Any) -> DecodeDriver | None:
    """Return the driver attached to this model."""
    found: DecodeDriver | None = root.__dict__.get(ATTRIBUTE)
    return found


def attach(
    root: Any, undo: ExitStack, make_graphs: Callable[[torch.device], CudaGraphs] = CudaGraphs,
    core: str = "auto", overlapping: bool = False, bf12: bool = False,
) -> DecodeDriver:  # fmt: skip
    """Capture the decode steps of ``root`` from now on; decoder layers of known code add and norm in one launch.

    Parameters
    ----------
    root : PreTrainedModel
        Patched already.
    undo : ExitStack
        Gets what undoes this, should a later step of the patch fail; else see :meth:`DecodeDriver.drop_others`.
    make_graphs, core, overlapping, bf12
        As for :class:`DecodeDriver`; by default CUDA graphs, and the best cores that can be captured.
    """
    driver = driver_of(root)
    if driver is not None:
        undo.callback(driver.choose, *driver.chosen)
        driver.choose(overlapping, bf12)
        return driver
    for layer in getattr(decoder_of(root), "layers", ()):
        if fusible(layer):
            undo.callback(unswap, layer)
            swap(layer, FastDecoderLayer, "auto", False)
    driver = DecodeDriver(root, make_graphs, core, overlapping, bf12)
    undo.callback(driver.detach)
    driver.attach()
    return driver
