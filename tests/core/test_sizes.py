"""Every public class and function that takes an integer: what is none is refused, and so is what no memory holds."""

from __future__ import annotations

import importlib.util
import inspect
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastlayers as fl
from fastlayers.attention.buckets import ExtendBucket
from fastlayers.attention.kv_cache.spec import KVCacheSpec
from fastlayers.attention.meta import whole_pages
from fastlayers.errors import ArgumentError, FastlayersError
from fastlayers.memory import allocate, memory_for
from fastlayers.registry import Choice, Ladder, Registry
from fastlayers.sampler.layer import SamplingState
from fastlayers_models import AutoModel, Checkpoint, Generator
from fastlayers_models.find import TINY, assets

_SPEC = importlib.util.spec_from_file_location("makers", Path(__file__).with_name("test_constructor_checks.py"))
assert _SPEC is not None and _SPEC.loader is not None
_CHECKS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_CHECKS)
MAKERS: dict[Callable[..., Any], dict[str, Any]] = _CHECKS.MAKERS
SHIPPED = assets() / TINY
Registered = Choice | Ladder | Registry
HUGE = (2**31, 2**40, 2**62, 2**70)
WRONG = (True, 1.5, np.float32(1), float("nan"), "1", [1], {}, torch.ones(2), np.array([1, 2]), -1, *HUGE)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Let no test of sizes take the machine's memory: 1 GiB more than the process has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def integers() -> Iterator[tuple[Callable[..., Any], str]]:
    for make in MAKERS:
        for name, parameter in inspect.signature(make).parameters.items():
            if str(parameter.annotation).startswith("int"):
                yield make, name


@pytest.mark.parametrize(("make", "name"), list(integers()), ids=lambda each: getattr(each, "__qualname__", each))
def test_a_size_beyond_all_memory_is_named_or_costs_nothing(make: Callable[..., Any], name: str) -> None:
    for value in HUGE:
        try:
            make(**{**MAKERS[make], name: value})
        except FastlayersError as error:
            shown = [str(value), name, str(error.__dict__.get("argument"))]
            assert any(each in str(error) for each in shown), (value, str(error))


@pytest.mark.parametrize(("make", "name"), list(integers()), ids=lambda each: getattr(each, "__qualname__", each))
def test_an_integer_of_numpy_is_an_integer(make: Callable[..., Any], name: str) -> None:
    value = MAKERS[make].get(name, inspect.signature(make).parameters[name].default)
    if value is not None:
        for kind in (np.int64, np.int32):
            made = make(**{**MAKERS[make], name: kind(value)})
            assert repr(made) == repr(make(**{**MAKERS[make], name: value})) or "object at" in repr(made)


KINDS = (np.uint8, np.int8, np.uint16, np.int32, np.uint64)


def facts(made: object) -> object:
    """Return what an object was made of: numbers with their types, tensors by their shapes."""
    if isinstance(made, torch.Tensor):
        return tuple(made.shape), made.dtype
    if isinstance(made, dict):
        return {key: facts(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [facts(each) for each in made]
    if type(made).__module__.startswith("fastlayers") and hasattr(made, "__dict__"):
        inside = vars(made) if not isinstance(made, Registered) else {}
        return type(made), {name: facts(value) for name, value in inside.items()}
    return (type(made), made) if isinstance(made, int | float | str | slice | np.generic) else type(made)


def sizes_of(make: Callable[..., Any]) -> dict[str, int]:
    parameters = inspect.signature(make).parameters
    given = {name: MAKERS[make].get(name, parameter.default) for name, parameter in parameters.items()}
    names = [name for each, name in integers() if each is make]
    return {name: given[name] for name in names if type(given[name]) is int}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__qualname__)
def test_sizes_of_numpy_make_what_those_of_python_make(make: Callable[..., Any], kind: Any) -> None:
    """One by one and together; products of them leave NumPy's smaller integers."""
    usual, sizes = facts(make(**MAKERS[make])), sizes_of(make)
    fitting = {name: kind(size) for name, size in sizes.items() if size <= np.iinfo(kind).max}
    for each in (*({name: size} for name, size in fitting.items()), fitting):
        assert facts(make(**{**MAKERS[make], **each})) == usual, each


def test_products_of_numpys_small_integers_do_not_wrap() -> None:
    for kind in (np.uint8, np.uint32, np.uint64):
        assert fl.PagePool(200, 4).extend([], kind(9), "x") == [1, 2, 3]
    assert fl.PagePool(1000, np.uint8(4)).extend([], 9, "x") == [1, 2, 3]  # type: ignore[arg-type]
    sizes: list[tuple[Any, ...]] = [(1, 1, np.uint16(1024), 64), (1, 1, np.uint8(20), 64), (1, 1, np.int16(512), 128)]
    sizes += [(np.uint8(100), np.uint8(200), 2, 16), (np.uint8(4), 8, 100, 64), (1, 4, 2, np.uint64(16))]
    for given in sizes:
        state = fl.AttentionState(*given)
        wanted = [int(size) for size in given]
        assert (state.max_batch, state.max_tokens, state.max_pages, state.page_size) == tuple(wanted)
        assert type(state.capacity) is int and state.capacity == wanted[2] * wanted[3]
        assert state.plan(ONE).out_cache_loc.tolist() == [wanted[3]]
    rotary = fl.RotaryEmbedding(64, max_position=16)
    for kind in (np.uint8, np.int8):
        mla = fl.MLAAttention(
            100, kind(20), q_lora_rank=None, kv_lora_rank=kind(64), qk_nope_head_dim=kind(32),
            qk_rope_head_dim=kind(64), v_head_dim=kind(16), rotary=rotary,
        )  # fmt: skip
        assert mla.o_proj.weight.shape == (100, 320) and mla.kv_b_proj.weight.shape == (960, 64)
        gqa = fl.Attention(kind(100), kind(20), kind(10), kind(64), rotary=rotary, window=kind(3))
        assert gqa.o_proj.weight.shape == (100, 1280) and gqa.qkv_proj.weight.shape == (2560, 100)
    assert KVCacheSpec(((np.uint8(8), np.uint8(64)),), 16, torch.float32).bytes_per_token == 4096
    assert whole_pages([np.uint8(9), np.uint8(1)], np.uint8(4)) == [[1, 2, 3], [4]]  # type: ignore[arg-type]
    assert ExtendBucket(np.uint8(8), np.int64(1)) == ExtendBucket(8, 1)  # type: ignore[arg-type]
    assert repr(ExtendBucket(np.uint8(8), np.int64(1))) == repr(ExtendBucket(8, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*KINDS, np.int64])
def test_a_generator_of_numpys_sizes_generates_the_same(kind: Any, model: Any) -> None:
    prompts = [[5, 6, 7, 8], [9, 10]]
    usual = Generator(model, max_batch=2, max_length=32, prefill_tokens=2).generate(prompts, max_new_tokens=2)
    numbers = {"max_batch": 2, "max_length": 32, "prefill_tokens": 2, "num_pages": 9}
    generator = Generator(model, **{name: kind(value) for name, value in numbers.items()})
    assert generator.generate(prompts, max_new_tokens=kind(2)) == usual
    assert [label for label, _ in generator.warm_up_calls([kind(1)])] == ["decode 1", "prefill 1"]
    for name, value in numbers.items():
        only = Generator(model, **{"max_batch": 2, "max_length": 32, name: kind(value)})
        assert only.generate(prompts, max_new_tokens=2) == usual, name


def test_memory_that_there_is_not_is_told_from_other_errors() -> None:
    words = "x: b is 4611686018427387904; accepted: a size for which there is memory"
    with pytest.raises(ArgumentError, match=words), memory_for("x", a=1, b=2**62):
        torch.empty(2**62)
    for error in (RuntimeError("something else"), ValueError("no"), torch.OutOfMemoryError("on a GPU: too large")):
        with pytest.raises(type(error), match=str(error)), memory_for("x", a=1):
            raise error
    with pytest.raises(
        ArgumentError, match=r"Linear: weight is bfloat16\[4, 4611686018427387904\]; accepted: a size for"
    ):
        allocate("Linear", "weight", (4, 2**62), torch.bfloat16, "cpu")
    made = allocate("Linear", "weight", (2, 3), torch.bfloat16, "cpu", 1)
    assert torch.equal(made, torch.ones(2, 3, dtype=torch.bfloat16))
    assert allocate("RMSNorm", "weight", (2,), None, "cpu", 1).dtype == torch.float32
    with pytest.raises(RuntimeError, match="nowhere"):
        allocate("Linear", "weight", (2,), None, "nowhere")


# ---- calls -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModel.from_pretrained(SHIPPED, dtype=torch.float32)


ALLOCATOR, POOL, STATE = fl.BumpAllocator(1024), fl.PagePool(8, 16), fl.AttentionState(2, 8, 2, 16)
SAMPLING, SAMPLER, SPEC = SamplingState(2), fl.Sampler(8), KVCacheSpec(((8,),), 16, torch.float32)
X = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
ONE = fl.AttentionBatch((1,), (0,), [[1]])
# What is called with one value, and what of WRONG it takes; each, by itself, does nothing that stays.
CALLS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "alloc": (lambda v: ALLOCATOR.alloc("a", (v,)), ()),
    "extend": (lambda v: POOL.extend([], v, "r"), ()),
    "extend pages": (lambda v: POOL.extend([v], 40, "r"), ()),
    "release": (lambda v: POOL.release([v]), ()),
    "row": (lambda v: SAMPLING.set(v, fl.SamplingParams()), ()),
    "offset": (lambda v: SAMPLING.set(0, fl.SamplingParams(), v), HUGE[:3]),
    "top": (lambda v: SAMPLER.logprobs(*X, v), ()),
    "pages of a cache": (SPEC.allocate, ()),
    "rows of a cache": (lambda v: KVCacheSpec(((v,),), 16, torch.float32), HUGE[:3]),
    "page of a request": (lambda v: STATE.plan(fl.AttentionBatch((1,), (0,), [[v]])), ()),
    "pages as an array": (lambda v: STATE.plan(fl.AttentionBatch((1,), (0,), np.array([[v]]))), ()),
    "new tokens": (lambda v: STATE.plan(fl.AttentionBatch((v,), (0,), [[1]])), (True,)),
    "cached tokens": (lambda v: STATE.plan(fl.AttentionBatch((1,), (v,), [[1]])), (True,)),
    "starts": (lambda v: STATE.plan(fl.AttentionBatch((1,), (1,), [[1]], (v,))), (True,)),
    "bucket": (lambda v: STATE.plan(ONE, bucket=v), ()),
    "num_pages": (lambda v: STATE.plan(ONE, num_pages=v), HUGE[:3]),
    "tokens of a group": (lambda v: fl.StepTokens.plan([v], extend=True), (True, *HUGE)),
    "attn_tp": (lambda v: fl.StepTokens.plan([1], extend=True, attn_tp=v), HUGE[:3]),
    "rows of a group": (lambda v: fl.StepTokens.plan([1], extend=False, graph=True, bucket=v), HUGE[:3]),
    "flag": (lambda v: fl.StepTokens.plan([1], extend=v), (True,)),
    "tokens of a bucket": (lambda v: ExtendBucket(v, 1), HUGE[:3]),
    "requests of a bucket": (lambda v: ExtendBucket(8, v), HUGE[:3]),
    "lengths": (lambda v: whole_pages([v], 2**40), HUGE[:3]),
    "page size": (lambda v: whole_pages([1], v), HUGE[:3]),
    "warm-up": (lambda v: fl.warmup(fl.RMSNorm(8), [v], progress=False, build=False, probe=False), ()),
    "head_dim": (lambda v: fl.RotaryEmbedding.from_config({"max_position_embeddings": 8}, head_dim=v), ()),
    "no sizes": (lambda v: fl.RotaryEmbedding.from_config({"hidden_size": v}), ()),
    "max_position": (lambda v: fl.RotaryEmbedding.from_config({"head_dim": 8}, max_position=v), ()),
    "device": (lambda v: fl.Ranks().join(v), ()),
    "patched": (lambda v: fl.patched(v).__enter__(), ()),
    "source": (fl.Linear.from_linear, ()),
    "source of codes": (fl.FP8BlockLinear.from_linear, ()),
    "source of int8": (fl.Int8Linear.from_linear, ()),
    "source of e4m3": (fl.FP8ScaledLinear.from_linear, ()),
    "source of nibbles": (fl.WeightOnlyLinear.from_linear, ()),
    "tensor": (Checkpoint(SHIPPED).read, ()),
    "families": (lambda v: AutoModel.from_pretrained(SHIPPED, families=v), ()),
    "parallel": (lambda v: AutoModel.from_pretrained(SHIPPED, parallel=v), ()),
    "page_size": (lambda v: AutoModel.from_pretrained(SHIPPED, page_size=v), HUGE[:3]),
    "load_mtp": (lambda v: AutoModel.from_pretrained(SHIPPED, load_mtp=v), (True,)),
}  # fmt: skip
# Of a generator, on the shipped model.
MADE: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "max_batch": (lambda m, v: Generator(m, max_batch=v, max_length=32), ()),
    "max_length": (lambda m, v: Generator(m, max_batch=1, max_length=v), ()),
    "pages": (lambda m, v: Generator(m, max_batch=1, max_length=32, num_pages=v), ()),
    "prefill_tokens": (lambda m, v: Generator(m, max_batch=1, max_length=32, prefill_tokens=v), HUGE[:3]),
    "prompt": (lambda m, v: Generator(m, max_batch=1, max_length=32).generate([[v]], max_new_tokens=1), ()),
    "new": (lambda m, v: Generator(m, max_batch=1, max_length=32).generate([[1]], max_new_tokens=v), ()),
    "warm_up_calls": (lambda m, v: list(Generator(m, max_batch=1, max_length=32).warm_up_calls([v])), ()),
    "capture": (lambda m, v: Generator(m, max_batch=1, max_length=32).capture([v]), ()),
}


def check(call: Callable[[Any], Any], taken: tuple[Any, ...]) -> None:
    for value in WRONG:
        accepted = any(type(each) is type(value) and each == value for each in taken)
        if accepted:
            call(value)
            continue
        with pytest.raises(FastlayersError) as caught:
            call(value)
            print(repr(value), "was taken")
        assert len(str(caught.value)) < 2000, value


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_size_is_refused_wherever_it_is_given(name: str) -> None:
    free, used = POOL.free_pages, ALLOCATOR.used
    check(*CALLS[name])
    assert (POOL.free_pages, ALLOCATOR.used) == (free, used)


@pytest.mark.parametrize("name", MADE)
def test_what_is_no_size_is_refused_by_a_generator(name: str, model: Any) -> None:
    call, taken = MADE[name]
    check(lambda value: call(model, value), taken)


def test_a_generator_asked_for_whole_prompts_takes_memory_for_what_there_is(model: Any) -> None:
    prompts = [[5, 6, 7] * 9, [8, 9]]
    usual = Generator(model, max_batch=2, max_length=32).generate(prompts, max_new_tokens=3)
    generator = Generator(model, max_batch=2, max_length=32, prefill_tokens=2**62)
    assert generator.state.max_tokens == 64 and generator.generate(prompts, max_new_tokens=3) == usual


def test_a_pool_of_many_pages_costs_what_is_handed_out() -> None:
    pool, pages = fl.PagePool(2**31, 16), []
    assert pool.extend(pages, 33, "a") == [1, 2, 3] and pool.free_pages == 2**31 - 4
    other = pool.extend([], 16, "b")
    pool.release(pages)
    assert other == [4] and pool.extend([], 64, "c") == [1, 2, 3, 5] and pool.free_pages == 2**31 - 6


def test_page_0_holds_no_new_token() -> None:
    state = fl.AttentionState(2, 8, 3, 4)
    state.plan(fl.AttentionBatch((1, 1), (0, 5), [[7], [8, 9]]))
    before = {name: value.clone() for name, value in vars(state.plan(ONE)).items() if isinstance(value, torch.Tensor)}
    for query, prefix, pages in (((1,), (0,), [0]), ((3,), (2,), [3, 0]), ((1,), (4,), [3, 0, 5])):
        for table in ([pages], np.array([pages])):
            with pytest.raises(
                ArgumentError, match=r"page_table\[0\] is \[.*0.*\]; accepted: pages from 1 on for the new"
            ):
                state.plan(fl.AttentionBatch(query, prefix, table))
    meta = state.plan(fl.AttentionBatch((1,), (2,), [[3, 0]]))  # what is not needed yet may be none
    assert meta.out_cache_loc.tolist() == [14]
    after = {name: value for name, value in vars(state.plan(ONE)).items() if isinstance(value, torch.Tensor)}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    # Requests without a new token need none.
    assert state.plan(fl.AttentionBatch((0, 1), (0, 1), [[], [2]])).out_cache_loc.tolist() == [9]


def test_pages_are_integers() -> None:
    for page in (1, np.int64(1), np.uint8(1), torch.tensor(1)):
        assert fl.AttentionState(1, 1, 1, 4).plan(fl.AttentionBatch((1,), (0,), [[page]])).out_cache_loc.tolist() == [4]
    for page in (True, np.bool_(True), np.float32(1), 1.0, "1", None, [1]):
        with pytest.raises(ArgumentError, match=r"AttentionState\.plan: page_table\[0\] is .*; accepted: page numbers"):
            fl.AttentionState(1, 1, 1, 4).plan(fl.AttentionBatch((1,), (0,), [[page]]))


def test_a_page_row_of_bytes_holds_no_pages() -> None:
    state = fl.AttentionState(1, 1, 1, 4)
    for _ in "before and after page 49 was planned":
        for row in (b"1", bytearray(b"1")):
            with pytest.raises(ArgumentError, match=r"plan: page_table\[0\] is \[49\]; accepted: page numbers"):
                state.plan(fl.AttentionBatch((1,), (0,), [row]))
        for pages in ([49], (49,)):
            assert state.plan(fl.AttentionBatch((1,), (0,), [pages])).out_cache_loc.tolist() == [196]


def test_small_integers_of_numpy_are_added_to_pythons() -> None:
    batch = fl.AttentionBatch((np.uint8(3),), (1000,), [[1]])  # type: ignore[arg-type]
    assert batch.seq_lens == (1003,) and type(batch.seq_lens[0]) is int


def test_a_steps_counts_are_pythons_integers_or_named() -> None:
    usual = fl.StepTokens.plan([200, 100], attn_tp=2, extend=True)
    for kind in (np.uint8, np.int64, np.uint64):
        made = fl.StepTokens.plan([kind(200), kind(100)], attn_tp=kind(2), extend=True)
        by_hand = fl.StepTokens((kind(200), kind(100)), (kind(200), kind(100)), "sum_len", kind(2))
        assert repr(made) == repr(by_hand) == repr(usual) and made.full_rows == 300
        bucket = fl.StepTokens.plan([3], attn_tp=kind(2), extend=False, graph=True, bucket=kind(200))
        assert repr(bucket) == repr(fl.StepTokens.plan([3], attn_tp=2, extend=False, graph=True, bucket=200))
        assert usual.group_slice(kind(1)) == slice(200, 300)
        assert usual.num_token_non_padded(kind(1), kind(1)) == 50
    for real, rows in (((1.5,), (2,)), ((1,), (2.0,)), ((np.float32(1),), (2,)), (("1",), (2,))):
        with pytest.raises(ArgumentError, match=r"StepTokens: (real|rows) is .*; accepted: a tuple of integers"):
            fl.StepTokens(real, rows)  # type: ignore[arg-type]
    for text in (b"1", bytearray(b"1"), "1"):
        with pytest.raises(ArgumentError, match=r"StepTokens: real is .*; accepted: counts, one for each group"):
            fl.StepTokens.plan(text, extend=True)  # type: ignore[arg-type]
    for rank in (1.7, None, -1, 2, "0", True):
        with pytest.raises(ArgumentError, match=r"StepTokens\.group_slice: dp_rank is "):
            usual.group_slice(rank)  # type: ignore[arg-type]
        for argument, ranks in (("dp_rank", (rank, 0)), ("attn_rank", (0, rank))):
            with pytest.raises(ArgumentError, match=rf"StepTokens\.num_token_non_padded: {argument} is "):
                usual.num_token_non_padded(*ranks)  # type: ignore[arg-type]


def test_a_parameter_outside_a_table_is_named_on_a_cpu() -> None:
    outside = torch.nn.Parameter(torch.tensor([10]), requires_grad=False)
    with pytest.raises(ArgumentError, match="VocabEmbedding: ids is 10 to 10; accepted: 0 to 9"):
        fl.VocabEmbedding(10, 4)(outside)
    with pytest.raises(ArgumentError, match="RotaryEmbedding: positions is "):
        fl.RotaryEmbedding(8, max_position=10)(torch.ones(1, 1, 8), torch.ones(1, 1, 8), outside)
