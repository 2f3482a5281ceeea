"""What absorbed MLA launches and allocates around its kernels, and on which streams: nothing is copied.

The kernels are played by functions; what torch itself is asked for between them is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.attention.mla.layer import MLAAttention

FP32 = torch.float32
# Operators that move nothing.
VIEWS = {"view", "transpose", "slice", "select", "unsqueeze", "split_with_sizes", "_unsafe_view", "alias", "detach"}


class Asked(TorchDispatchMode):
    """Notes every operator that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if name.split(".")[0] not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer() -> MLAAttention:
    rotary = fl.RotaryEmbedding(16, max_position=64, interleaved_in=True)
    return fl.MLAAttention(
        32, 2, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        rotary=rotary, page_size=16, dtype=FP32,
    )  # fmt: skip


@pytest.mark.parametrize("new", [(1, 1), (3, 2)])
def test_queries_are_made_where_the_kernel_reads_them(
    layer: MLAAttention, new: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products, two allocations: the queries [T, H, L+R] and the result; no copy, no cat, no clone."""
    tokens, heads = sum(new), layer.num_heads
    torch.nn.init.normal_(layer.kv_b_proj.weight)
    q, latent, k_pe = torch.randn(tokens, heads, 32), torch.randn(tokens, 32), torch.randn(tokens, 16)
    o_latent, lse, x = torch.randn(tokens, heads, 32), torch.zeros(tokens, heads), torch.zeros(tokens, 32)
    seen: dict[str, torch.Tensor] = {}
    asked = Asked()

    def turn(q_pe: torch.Tensor, *given: Any) -> torch.Tensor:
        out: torch.Tensor = given[-1]
        asked.__exit__(None, None, None)
        out.copy_(q_pe + 1)  # the kernel's own store
        asked.__enter__()
        return out

    def decode(queries: torch.Tensor, cache: torch.Tensor, meta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen["q"] = queries
        return o_latent, lse

    monkeypatch.setattr(layer.rotary_kv_write.ladder, "single", turn)
    monkeypatch.setattr(layer, "core", lambda meta, count: SimpleNamespace(decode=decode))
    monkeypatch.setattr(layer, "_project", lambda hidden: (q, latent, k_pe))
    layer.o_proj = torch.nn.Identity()
    layer.absorbed_weights()
    cache = fl.kv_cache_spec(layer, page_size=16).allocate(num_pages=4)[0]
    meta = AttentionState(2, 8, 2, 16).plan(AttentionBatch(new, (5, 9), [[1], [2]]))
    meta.vouch()
    with asked:
        y = layer(x, meta, cache)
    assert asked.names == ["new_empty", "bmm.out", "new_empty", "bmm.out"]
    w_kc, w_vc = layer.absorbed_weights()
    expected = torch.cat([torch.einsum("thn,hnl->thl", q[..., :16], w_kc), q[..., 16:] + 1], -1)
    assert seen["q"].is_contiguous()
    torch.testing.assert_close(seen["q"], expected)
    torch.testing.assert_close(y, torch.einsum("thl,hvl->thv", o_latent, w_vc).flatten(1))


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name: str, events: list[Any]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Stream) -> None:
        self.events.append((self.name, "waits for", other.name))


@pytest.mark.parametrize("capturing", [False, True])
def test_norms_run_side_by_side_only_under_capture(
    layer: MLAAttention, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    main, aside = Stream("main", events), Stream("aside", events)
    current = [main]

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    def norm(name: str) -> Any:
        return lambda x: events.append((current[-1].name, name))

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        delattr(layer, name)
        object.__setattr__(layer, name, norm(name))
    object.__setattr__(layer, "alt_stream", aside)
    layer._both_norms(SimpleNamespace(is_cuda=True), None)  # type: ignore[arg-type]
    if not capturing:
        assert events == [("main", "q_a_layernorm"), ("main", "kv_a_layernorm")]
        return
    # The side stream begins behind what made its input, and is awaited before anybody reads.
    assert events == [
        ("aside", "waits for", "main"), ("main", "q_a_layernorm"), ("aside", "kv_a_layernorm"),
        ("main", "waits for", "aside"),
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_gpu_steps_wait_for_nothing(kind: str, page_size: int) -> None:
    """Planning a step and running it synchronise nowhere, at pages of one token as well."""
    if kind == "mla":
        made: Any = fl.MLAAttention(
            256, 4, q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            rotary=fl.RotaryEmbedding(64, max_position=512, interleaved_in=True, device="cuda"), page_size=page_size,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
    else:
        rotary = fl.RotaryEmbedding(128, max_position=512, device="cuda")
        made = fl.Attention(
            256, 8, 2, 128, rotary=rotary, page_size=page_size, dtype=torch.bfloat16, device="cuda", qk_norm=1e-6
        )  # fmt: skip
    pages = -(-300 // page_size)
    cache = fl.kv_cache_spec(made, page_size=page_size).allocate(num_pages=2 * pages + 1, device="cuda")[0]
    state = AttentionState(2, 64, pages, page_size, "cuda")
    table = [list(range(1, pages + 1)), list(range(pages + 1, 2 * pages + 1))]
    x = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)

    def step(length: int) -> None:
        meta = state.plan(AttentionBatch((1, 1), (length, length + 3), table))
        meta.vouch()
        made(x, meta, cache)

    with torch.inference_mode():
        for length in (200, 201):  # what is built and compiled at first use
            step(length)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for length in range(202, 212):
                step(length)
        finally:
            torch.cuda.set_sync_debug_mode("default")
