"""Products of few rows by ``wgmma``: who is refused, plans, the kernel run by hand, planted faults, and a GPU's."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.device import DESCRIBED, Device, as_device
from fastlayers.linear.dense import triton_wgmma
from fastlayers.linear.dense.layer import LINEAR, LinearConfig
from fastlayers.linear.dense.triton import PARAMETERS, TritonLinear
from fastlayers.linear.dense.triton_wgmma import (
    MAX_ROWS,
    SHARED,
    Plan,
    WgmmaLinear,
    candidates,
    plan_for,
    rule,
    tokens_for,
    twin,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    "cfg, card, reason",
    [
        (LinearConfig(128, 64), DESCRIBED["H200"], None),
        (LinearConfig(128, 64, dtype=FP16), DESCRIBED["H200"], None),
        (LinearConfig(128, 64, dtype=FP32), DESCRIBED["H200"], "is not one of float16, bfloat16"),
        (LinearConfig(96, 64), DESCRIBED["H200"], "96 input features are no multiple of 64"),
        (LinearConfig(128, 64), Device("cuda", "a card", (10, 0)), "needs sm_90, this is sm_100"),
        (LinearConfig(128, 64), Device("cuda", "a card", (8, 0)), "needs sm_90, this is sm_80"),
    ],
)
def test_who_is_refused(cfg: LinearConfig, card: Device, reason: str | None) -> None:
    found = LINEAR.named("wgmma").refusal(cfg, card)
    assert found is None if reason is None else reason in (found or "")


SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (2880, 4096),
    (5120, 2880),
    (151936, 2048),
    (64, 64),
)


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 64, 200])
@pytest.mark.parametrize("n, k", SHAPES)
def test_plans_fit(n: int, k: int, rows: int) -> None:
    plans = [Plan(**each) for each in candidates(LinearConfig(k, n), rows)]
    assert plans[0] == rule(n, k) and len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.fits(min(rows, MAX_ROWS), k) and plan.shared(rows) <= SHARED
        assert k % (64 * plan.SPLITS) == 0 and 2 <= plan.STAGES <= k // 64 // plan.SPLITS + 1
    assert len(plans) > 3 or rows > MAX_ROWS or n * k < 1 << 22


def test_what_does_not_fit() -> None:
    assert Plan(4, 2, 10).fits(32, 4096) and not Plan(4, 2, 10).fits(32, 4096 + 64)  # half a step
    assert not Plan(4, 4, 6).fits(32, 1024)  # more ahead than there is
    assert not Plan(8, 1, 14).fits(8, 4096) and Plan(8, 1, 12).fits(8, 4096)  # an SM's memory


@interpreted
def test_lent_plans_and_many_rows() -> None:
    """A plan of another shape that does not fit is not taken; rows beyond 64 are right."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 192, generator=random).bfloat16() for n in (70, 40))
    for config in (None, Plan(4, 2, 4)._asdict(), Plan(4, 3, 2)._asdict()):
        y = WgmmaLinear(LinearConfig(192, 40, out_dtype=FP32), config)(x, weight, None)
        assert torch.allclose(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    with pytest.raises(fl.FastlayersError, match="config of the wgmma backend"):
        WgmmaLinear(LinearConfig(192, 40), {"W": 4})


class Memory:
    """Pointers into a tensor's elements, as the kernel adds to them."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at, self.dtype = flat, torch.as_tensor(at), SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> Memory:
        return Memory(self.flat, self.at + offset)


class Shared:
    """A buffer: what is asked for comes when its group is waited for."""

    def __init__(self, dtype: torch.dtype, shape: list[int], _: Any) -> None:
        self.data = torch.full(shape, float("nan"), dtype=dtype)

    def permute(self, order: tuple[int, ...]) -> Shared:
        turned = Shared(self.data.dtype, [], None)
        turned.data = self.data.permute(order)
        return turned


class Player:
    """Runs the kernel's source with torch in place of Gluon: copies arrive and products read as late as they may."""

    def __init__(self, source: str) -> None:
        self.groups: list[list[Any]] = []
        self.open: list[Any] = []
        self.running: list[Any] = []
        self.waited = False
        source = re.sub(r"@gluon\.jit\n|@kernel\(.*\)\n|@gluon\.constexpr_function\n", "", source)
        source = re.sub(r": gl\.constexpr( =)?", lambda found: " =" if found[1] else "", source)
        self.names: dict[str, Any] = {
            "gl": SimpleNamespace(
                static_range=range, static_assert=self.check, allocate_shared_memory=Shared, program_id=self.program,
                arange=lambda low, high, layout=None: torch.arange(low, high), int64=torch.int64, float32=FP32,
                minimum=lambda a, b: torch.minimum(a, torch.as_tensor(b)), load=self.load, store=self.store,
                zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=torch.float64),
                convert_layout=lambda x, layout: x, SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
                NVMMADistributedLayout=lambda *_: None, NVMMASharedLayout=lambda *_: None,
            ),
            "hopper": SimpleNamespace(
                fence_async_shared=lambda: None, warpgroup_mma=self.multiply, warpgroup_mma_wait=self.finish
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.copy, commit_group=self.commit, wait_group=self.wait
            ),
            "await_inputs": self.await_inputs, "release_dependents": lambda _: None,
        }  # fmt: skip
        exec(source, self.names)

    def check(self, holds: bool, why: str) -> None:
        assert holds, why

    def program(self, axis: int) -> int:
        return self.place[axis]

    def await_inputs(self, _: bool) -> None:
        self.waited = True

    def copy(self, into: Shared, pointer: Memory, mask: Any = None) -> None:
        assert self.waited or pointer.flat is self.weight, "x is read before the kernels in front have ended"
        assert (
            all(into not in used for used, *_ in self.running) or mask is False or not bool(torch.as_tensor(mask).any())
        )
        at, mask = torch.broadcast_tensors(pointer.at, torch.as_tensor(True if mask is None else mask))
        self.open.append((into, pointer.flat, at, mask))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for into, flat, at, mask in self.groups.pop(0):
                into.data[mask] = flat[at[mask]]

    def multiply(self, a: Shared, b: Shared, acc: torch.Tensor, is_async: bool) -> Any:
        self.running.append(((a, b), acc))
        return self.running[-1]

    def finish(self, left: int, deps: list[Any]) -> torch.Tensor:
        (a, b), acc = deps[0]
        self.running.remove(deps[0])
        found: torch.Tensor = acc + a.data.double() @ b.data.double()
        return found

    def load(self, pointer: Memory) -> torch.Tensor:
        return pointer.flat[pointer.at]

    def store(self, pointer: Memory, value: torch.Tensor, mask: Any) -> None:
        at, value, mask = torch.broadcast_tensors(pointer.at, value, mask)
        assert not bool(self.written[at[mask]].any()), "a result twice"
        self.written[at[mask]] = True
        pointer.flat[at[mask]] = value[mask].to(pointer.flat.dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        (m, k), n = x.shape, len(weight)
        y = torch.full((plan.SPLITS * m * n,), float("nan"))
        self.weight, self.written = weight.flatten(), torch.zeros(len(y), dtype=torch.bool)
        rows = torch.nn.functional.pad(x, (0, 8))  # which lie apart
        for tile in range(-(-n // (16 * plan.W))):
            for split in range(plan.SPLITS):
                self.place, self.waited, self.groups = (tile, split), False, []
                self.names["wgmma_rows_kernel"](
                    Memory(rows.flatten()), Memory(self.weight), Memory(self.weight if bias is None else bias),
                    Memory(y), m, n, k + 8, k, k, bias is not None, plan.SPLITS, tokens_for(m), plan.W, plan.STAGES,
                    True,
                )  # fmt: skip
                assert not self.running and not self.open
        return y.view(plan.SPLITS, m, n).sum(0)


SOURCE = "\n".join(
    inspect.getsource(getattr(each, "fn", getattr(each, "function", each)))
    for each in (triton_wgmma._turn, triton_wgmma.wgmma_rows_kernel.jit)
)


def played_is_right(source: str) -> bool:
    player, random = Player("def copied_by(W): ...\ndef stored_by(W): ...\n" + source), torch.Generator().manual_seed(0)
    for m, n, k, plan in (
        (5, 70, 512, Plan(4, 1, 4)), (9, 130, 768, Plan(8, 1, 5)), (17, 64, 768, Plan(4, 3, 4)),
        (8, 40, 256, Plan(4, 1, 5)), (33, 33, 192, Plan(4, 1, 2)),
    ):  # fmt: skip
        x, weight = (torch.randn(rows, k, generator=random).bfloat16() for rows in (m, n))
        bias = torch.randn(n, generator=random).bfloat16() if plan.SPLITS == 1 else None
        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        try:
            if not torch.allclose(player(x, weight, bias, plan).double(), wanted, rtol=1e-5, atol=1e-4):
                return False
        except AssertionError:
            return False
    return True


def test_the_kernel_by_hand_is_right() -> None:
    assert played_is_right(SOURCE)


MUTANTS = {
    "one group too few is waited for": ("wait_group(STAGES - 2)", "wait_group(STAGES - 1)"),
    "the next step into the buffer that is read": ("ring[(here + STAGES - 1) % STAGES]", "ring[here]"),
    "one step too few ahead": ("ahead = step + (STAGES - 1)", "ahead = step + STAGES"),
    "steps that there are not": ("inside = ahead < STEPS", "inside = ahead <= STEPS"),
    "the rest of a turn is left out": ("gl.static_range(STEPS % STAGES)", "gl.static_range(0)"),
    "another split's columns": ("split * (STEPS * 64)", "split * STEPS"),
    "x before the wait": ("    await_inputs(PDL)\n", ""),
    "rows beyond the edge are stored": ("mask=(row < N) & (token < M)", "mask=token < M"),
    "the bias of another row": ("bias_ptr + gl.minimum(row, N - 1)", "bias_ptr + gl.minimum(row + 1, N - 1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_show(name: str) -> None:
    old, new = MUTANTS[name]
    assert SOURCE.count(old) == 1
    with suppress(IndexError):  # beyond the end of what there is in memory
        assert not played_is_right(SOURCE.replace(old, new))


GPU_SHAPES = [(200, 512), (4096, 4096), (2880, 4096), (5120, 2880)]


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("n, k", GPU_SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_bits_are_its_twins_on_a_gpu(n: int, k: int, dtype: torch.dtype) -> None:
    cfg, random = LinearConfig(k, n, True, dtype), torch.Generator("cuda").manual_seed(n)
    if (why := LINEAR.named("wgmma").refusal(cfg, as_device("cuda"))) is not None:
        pytest.skip(why)
    wide = torch.randn(MAX_ROWS + 6, k + 8, generator=random, device="cuda").to(dtype)
    weight, bias = (torch.randn(*size, generator=random, device="cuda").to(dtype) for size in ((n, k), (n,)))
    for rows in (1, 5, 8, 9, 17, 33, 64, 70):
        x = wide[:rows, :k]
        exact = x.double() @ weight.double().T + bias.double()
        plans = candidates(cfg, min(rows, MAX_ROWS))
        for config in (None, *plans[1 :: max(1, len(plans) // 3)]):
            made = WgmmaLinear(cfg, config)
            y, numbers = made(x, weight, bias), twin(rows, plan_for(rows, n, k, tuple(made.plan)))
            assert torch.equal(y, TritonLinear(cfg, dict(zip(PARAMETERS, numbers, strict=True)))(x, weight, bias))
            assert float((y.double() - exact).abs().max() / exact.abs().max()) < 2.0**-8
    # Rows that begin between copies: of x copied, of the weight its twin's.
    x, odd = wide[:9, 3 : k + 3], torch.empty(n * k + 1, dtype=dtype, device="cuda")[1:].view(n, k).copy_(weight)
    made = WgmmaLinear(cfg)
    assert torch.equal(made(x, weight, bias), made(x.clone(), odd, bias))


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_repeat_bits_behind_a_slow_producer_and_other_sizes() -> None:
    cfg, random = LinearConfig(4096, 4096), torch.Generator("cuda").manual_seed(1)
    if (why := LINEAR.named("wgmma").refusal(cfg, as_device("cuda"))) is not None:
        pytest.skip(why)
    weight, given = (torch.randn(n, 4096, generator=random, device="cuda").bfloat16() for n in (4096, 32))
    made, x, slow = WgmmaLinear(cfg), torch.zeros_like(given), torch.randn(3072, 3072, device="cuda")
    wanted = made(given, weight, None)

    def step() -> torch.Tensor:
        x.zero_()
        _ = slow @ slow  # what comes behind it has long begun when x is written
        x.copy_(given)
        return made(x, weight, None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for turn in range(100):
        if turn % 10 == 0:
            made(given[: turn % 31 + 1], weight, None)
        graph.replay()
        assert torch.equal(y, wanted), turn
