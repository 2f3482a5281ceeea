"""The activation in the last lines of a product by ``wgmma``: the kernel by hand, who takes it, and a GPU's bits."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers import env
from fastlayers.activation.silu_mul.layer import SILU_MUL, SiluMulConfig
from fastlayers.activation.silu_mul.triton import TritonSiluMul
from fastlayers.device import as_device
from fastlayers.errors import ArgumentError
from fastlayers.linear.dense import triton_wgmma, triton_wgmma_gated
from fastlayers.linear.dense.layer import LINEAR, LinearConfig
from fastlayers.linear.dense.triton import TritonLinear
from fastlayers.linear.dense.triton_wgmma import Plan, WgmmaLinear, candidates, plan_for, tokens_for
from fastlayers.registry import registry
from fastlayers.registry.choice import Ladder
from fastlayers.tuning.staleness import kernel_hash
from fastlayers_models.blocks import SwiGLU

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tuning"))
from small_models import QWEN3, QWEN3_MOE, small_model
from test_call_counts import ON_TRITON, StubDriver, calls_of_a_layer, on_triton
from test_sources import reached
from test_split_rows import Wrapper, fixed, hidden_of, same, wrap_forward
from test_wgmma import Memory, Player

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = Plan(4, 1, 2)
interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")


# ---- the kernel by hand ------------------------------------------------------------------------------------------


def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``, rounded to the dtype of ``up`` after each."""
    silu = torch.nn.functional.silu(gate.float()).to(up.dtype)
    return (silu.double() * up.double()).to(up.dtype)


class GatedPlayer(Player):
    """Runs the kernel that activates; results are bf16."""

    def __init__(self, source: str) -> None:
        stubs = "".join(f"def {name}(*_): ...\n" for name in ("copied_by", "halves_by", "inner_by"))
        super().__init__(stubs + source)
        self.names["silu_mul_rounded"] = activate
        gl = self.names["gl"]
        gl.convert_layout = lambda x, layout, assert_trivial=False: x
        gl.reshape, gl.permute = torch.reshape, torch.permute
        gl.split = lambda x: (x[..., 0], x[..., 1])

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        (m, k), n = x.shape, len(weight) // 2
        y = torch.full((m * n,), float("nan"), dtype=BF16)
        self.weight, self.written = weight.flatten(), torch.zeros(len(y), dtype=torch.bool)
        rows = torch.nn.functional.pad(x, (0, 8))  # which lie apart
        for tile in range(-(-n // (8 * plan.W))):
            self.place, self.waited, self.groups = (tile,), False, []  # type: ignore[assignment]
            self.names["gated_rows_kernel"](
                Memory(rows.flatten()), Memory(self.weight), Memory(self.weight if bias is None else bias), Memory(y),
                m, n, k + 8, k, k, bias is not None, tokens_for(m), plan.W, plan.STAGES, True,
            )  # fmt: skip
            assert not self.running and not self.open
        return y.view(m, n)


SOURCE = "\n".join(
    inspect.getsource(getattr(each, "fn", getattr(each, "function", each)))
    for each in (triton_wgmma._turn, triton_wgmma_gated.gated_rows_kernel.jit)
)


def played_is_right(source: str) -> bool:
    """Return whether all bits are those of a product, rounded, and its activation: all sums here are exact."""
    player, random = GatedPlayer(source), torch.Generator().manual_seed(0)
    for m, n, k, plan in (
        (5, 140, 512, Plan(4, 1, 4)), (9, 256, 768, Plan(8, 1, 5)), (8, 80, 256, Plan(4, 1, 5)),
        (33, 66, 192, Plan(4, 1, 2)), (1, 130, 192, Plan(8, 1, 3)),
    ):  # fmt: skip
        x, weight = (torch.randint(-8, 9, (rows, k), generator=random).to(BF16) for rows in (m, n))
        weight /= 256
        bias = torch.randint(-99, 99, (n,), generator=random).to(BF16) / 64 if m % 2 else None
        y = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).to(BF16)
        try:
            if not same(player(x, weight, bias, plan), activate(*y.chunk(2, -1))):
                return False
        except AssertionError:
            return False
    return True


def test_the_kernel_by_hand_has_the_bits_of_two_launches() -> None:
    assert played_is_right(SOURCE)


MUTANTS = {
    "gate and up exchanged": ("gate, up = gl.split", "up, gate = gl.split"),
    "no rounding in between": (
        "gate.to(y_ptr.dtype.element_ty), up.to(y_ptr.dtype.element_ty)", "gate.double(), up.double()"
    ),
    "only the gate rounded": ("up.to(y_ptr.dtype.element_ty)", "up.double()"),
    "rows r and r + 16 are paired": ("[W, 2, 8, TOKENS]", "[W // 2, 2, 16, TOKENS]"),
    "rows r and r + 1 are paired": ("[W, 2, 8, TOKENS]), (0, 2, 3, 1)", "[W, 8, 2, TOKENS]), (0, 1, 3, 2)"),
    "the first half of a tile is gate": ("tiled // 8 % 2 * N", "tiled // (8 * W) * N"),
    "up rows of the next gate row": ("tiled // 8 % 2 * N", "tiled // 8 % 2 * (N + 1)"),
    "another program's rows": ("gl.program_id(0) * (8 * W)", "gl.program_id(0) * (16 * W)"),
    "up rows beyond the edge": ("tiled % 8, N - 1)", "tiled % 8, 2 * N - 1)"),
    "the gate's bias for both": ("bias_ptr + N + row", "bias_ptr + row"),
    "no bias of the gate": ("        gate += gl.load(bias_ptr + row).to(gl.float32)\n", ""),
    "rows beyond the edge are stored": ("mask=(row < N) & (token < M)", "mask=token < M"),
    "x before the wait": ("    await_inputs(PDL)\n", ""),
    "the rest of a turn is left out": ("gl.static_range(STEPS % STAGES)", "gl.static_range(0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_show(name: str) -> None:
    old, new = MUTANTS[name]
    assert SOURCE.count(old) == 1
    with suppress(IndexError):  # beyond the end of what there is in memory
        assert not played_is_right(SOURCE.replace(old, new))


# ---- who takes it ------------------------------------------------------------------------------------------------


def activating(cfg: LinearConfig, plan: Plan = SHORT, **more: int) -> WgmmaLinear:
    return WgmmaLinear(cfg, plan._asdict() | {"ACT": 1} | more)


def by_triton(act: fl.SiluAndMul) -> fl.SiluAndMul:
    act.choose(SILU_MUL, act.cfg, None, "triton")
    return act


def pair(
    half: int = 96, k: int = 256, bias: bool = True, dtype: torch.dtype = BF16, device: str = "cpu",
    plan: Plan = SHORT,
) -> tuple[fl.Linear, fl.SiluAndMul]:  # fmt: skip
    """Return a gate and an up projection that may activate, and their activation."""
    random = torch.Generator().manual_seed(half)
    linear = fl.Linear(
        k, [half, half], bias, names=("../gate_proj", "../up_proj"), dtype=dtype, device=device, backend="triton"
    )
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=random) / (1 if parameter.dim() == 1 else k**0.5 / 3))
    linear.ladder = fixed(activating(linear.cfg, plan), linear.choice)
    return linear, fl.SiluAndMul(half, device=device, backend="triton")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note rows of which one launch was asked for."""
    found: list[int] = []
    gated_rows = triton_wgmma_gated.gated_rows

    def noting(x: torch.Tensor, *given: Any) -> torch.Tensor:
        found.append(len(x))
        return gated_rows(x, *given)

    monkeypatch.setattr(triton_wgmma_gated, "gated_rows", noting)
    yield found


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize(
    ("rows", "half", "k", "bias", "dtype"),
    [(1, 96, 256, False, BF16), (9, 40, 128, True, FP16), (33, 72, 192, True, BF16), (64, 16, 64, False, BF16)],
)
def test_the_twin_has_the_bits_of_two_launches(rows: int, half: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    linear, act = pair(half, k, bias, dtype)
    x = torch.randn(rows, k + 16, generator=torch.Generator().manual_seed(rows)).to(dtype)[:, :k]
    found = linear.activated(x, act)
    assert found is not None and found.shape == (rows, half) and found.is_contiguous()
    assert same(found, act(linear(x))) and bool(found.any())
    # By itself it is the product, whatever its configuration says.
    plain = WgmmaLinear(linear.cfg, SHORT._asdict())(x, linear.weight, linear.bias)
    assert linear(x).shape == (rows, 2 * half) and same(linear(x), plain)


def test_what_a_configuration_may_say() -> None:
    cfg = LinearConfig(256, 96)
    assert activating(cfg).activates and not activating(cfg, ACT=0).activates
    assert not WgmmaLinear(cfg, SHORT._asdict()).activates and not WgmmaLinear(cfg).activates
    assert activating(cfg).plan == [4, 1, 2] and activating(cfg, LEAVE=1).leaves_splits
    with pytest.raises(ArgumentError, match="SPLITS of 1 with ACT"):
        activating(cfg, Plan(4, 2, 2))
    for kind in (WgmmaLinear, TritonLinear):
        with pytest.raises(ArgumentError, match="the keys"):
            kind(cfg, SHORT._asdict() | {"ACTS": 1})
    linear, _ = pair()
    impls = WgmmaLinear(linear.cfg), linear.ladder.single
    assert linear.ladder.activates and not Ladder(linear.ladder.choice, impls[:1]).activates


def test_times_of_the_product_stay_true() -> None:
    """What is tuned as this backend knows nothing of the kernel that activates: see ``fastlayers.tuning.sources``."""
    target = registry("linear").named("wgmma").target
    assert isinstance(target, str) and kernel_hash(target)
    modules = {module for module, _ in reached(target)}
    assert triton_wgmma.__name__ in modules and triton_wgmma_gated.__name__ not in modules


@torch.inference_mode()
@interpreted
def test_who_takes_two_launches(taken: list[int]) -> None:
    linear, act = pair()
    x = torch.randn(9, 256).to(BF16)
    assert linear.activated(x, act) is not None

    class Other(fl.Linear):
        pass

    class OtherAct(fl.SiluAndMul):
        pass

    # Three dimensions, no rows, many; rows that begin between copies, columns that lie apart.
    odd = torch.randn(9, 264).to(BF16)
    for given in (x[None], x[:0], torch.randn(65, 256).to(BF16), odd[:, :256], odd[:, 3:259], x[:, :1].expand(9, 256)):
        assert linear.activated(given, act) is None
    parts = [fl.Linear(256, sizes, names=["../a"] * len(sizes), dtype=BF16) for sizes in ([192], [64, 128], [64] * 3)]
    for each in (*parts, Other(256, [96, 96], names=("../a", "../b"), dtype=BF16)):
        each.ladder = fixed(activating(each.cfg), linear.choice)
        assert each.activated(x, act) is None
    others = [fl.SiluAndMul(48), fl.SiluAndMul(96, dtype=FP16), OtherAct(96), torch.nn.Identity()]
    for other in others:
        assert linear.activated(x, other) is None
    once = by_triton(fl.SiluAndMul(96))
    (rung,) = once.ladder.choice.rungs
    once.ladder.choice = replace(once.ladder.choice, rungs=(replace(rung, backend=SILU_MUL.named("flashinfer")),))
    assert linear.activated(x, once) is None, "rounds once"
    with torch.inference_mode(False), torch.enable_grad():
        assert linear.activated(x, act) is None
    # A plan that is of another shape gives way to the rule, which may split.
    linear.ladder = fixed(activating(linear.cfg, Plan(4, 1, 9)), linear.choice)
    assert (linear.activated(x, act) is None) == (plan_for(9, 192, 256, (4, 1, 9)).SPLITS > 1)
    linear.ladder = fixed(WgmmaLinear(linear.cfg), linear.choice)
    assert linear.activated(x, act) is None
    linear.ladder = fixed(TritonLinear(linear.cfg), linear.choice)
    assert linear.activated(x, act) is None


@torch.inference_mode()
@interpreted
def test_who_is_called_alone_is_checked() -> None:
    linear, act = pair()
    with pytest.raises(ArgumentError, match="256"):
        linear.activated(torch.randn(9, 192).to(BF16), act)
    with pytest.raises(ArgumentError, match="float32"):
        linear.activated(torch.randn(9, 256), act)


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("odd", [False, True])
def test_a_weight_between_copies_has_its_twin(odd: bool) -> None:
    linear, act = pair()
    memory = torch.empty(192 * 256 + 8, dtype=BF16)[1 if odd else 0 :][: 192 * 256].view(192, 256)
    linear.weight = torch.nn.Parameter(memory.copy_(linear.weight), requires_grad=False)
    x = torch.randn(9, 256).to(BF16)
    found = linear.activated(x, act)
    assert found is not None and same(found, act(linear(x)))


def let_activate(model: Any) -> list[SwiGLU]:
    """Have all dense MLPs' activations run where their products do, and in one launch; return those MLPs."""
    found = [layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, SwiGLU)]
    for mlp in found:
        linear: Any = mlp.gate_up_proj
        linear.ladder = fixed(activating(linear.cfg), linear.choice)
        by_triton(mlp.act_fn)
    return found


def keep_two(mlps: list[SwiGLU]) -> None:
    """Have the same MLPs take two launches."""
    for mlp in mlps:
        linear: Any = mlp.gate_up_proj
        linear.ladder = fixed(WgmmaLinear(linear.cfg, SHORT._asdict()), linear.choice)


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize(("config", "dense"), [(QWEN3, 2), (QWEN3_MOE, 0)])
def test_models_have_the_same_bits(config: dict[str, Any], dense: int, taken: list[int]) -> None:
    model = small_model(config, dtype=BF16)
    mlps, ids = let_activate(model), torch.arange(9) + 3
    found = hidden_of(model, ids)
    assert len(mlps) == dense and taken == [9] * dense
    keep_two(mlps)
    assert same(found, hidden_of(model, ids)) and taken == [9] * dense


def hook(module: Any) -> None:
    module.register_forward_hook(lambda module, given, y: None)


def hook_before(module: Any) -> None:
    module.register_forward_pre_hook(lambda module, given: None)


def compiled(module: Any) -> None:
    module._compiled_call_impl = module._call_impl


def wrap(name: str) -> Callable[[Any], None]:
    return lambda mlp: setattr(mlp, name, Wrapper(getattr(mlp, name)))


def of(name: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda mlp: change(getattr(mlp, name))


WAYS = {
    f"{how} {name}": way
    for name in ("gate_up_proj", "act_fn")
    for how, way in (
        ("wrapped", wrap(name)),
        ("a forward of", of(name, wrap_forward)),
        ("a hook of", of(name, hook)),
        ("a hook before", of(name, hook_before)),
        ("compiled", of(name, compiled)),
    )
}


@torch.inference_mode()
@interpreted
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_in_either_place_is_called_as_it_was(way: str, taken: list[int]) -> None:
    model = small_model(QWEN3, dtype=BF16)
    mlps, ids = let_activate(model), torch.arange(9) + 3
    wanted = hidden_of(model, ids)
    assert taken == [9, 9]
    WAYS[way](mlps[0])
    assert same(hidden_of(model, ids), wanted) and taken == [9] * 3


@interpreted
def test_gradients_and_compilers_take_two_launches(taken: list[int]) -> None:
    model = small_model(QWEN3, dtype=BF16)
    (mlp, _), x = let_activate(model), torch.randn(9, 64).to(BF16)
    with torch.no_grad():
        wanted = mlp(x)
        assert taken == [9]
        traced = torch.compile(mlp, backend="eager", fullgraph=True)
        assert same(traced(x), wanted) and taken == [9]
    assert same(mlp(x), wanted) and taken == [9], "gradients are recorded, of nothing"


def test_a_step_with_it_calls_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer; the launches are a stub's."""
    model = on_triton("qwen3", tmp_path, monkeypatch)
    linear = model.decoder.layers[1].mlp.gate_up_proj
    for module in (triton_wgmma, triton_wgmma_gated):
        monkeypatch.setattr(module, "_by_twin", lambda weight: False)
    found = []
    for impl in (WgmmaLinear(linear.cfg), activating(linear.cfg)):
        linear.ladder = fixed(impl, linear.choice)
        calls_of_a_layer(model)  # whose first launches are Triton's
        StubDriver.launches = 0
        found.append((calls_of_a_layer(model), StubDriver.launches))
    (two, launched), (one, fewer) = found
    assert one < two and fewer == launched - 5, found
    assert one <= ON_TRITON["qwen3"]


# ---- a GPU's bits ------------------------------------------------------------------------------------------------


def skip_elsewhere() -> None:
    if (why := LINEAR.named("wgmma").refusal(LinearConfig(4096, 4096), as_device("cuda"))) is not None:
        pytest.skip(why)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("half, k", [(12288, 4096), (1536, 2880), (100, 512), (3072, 1024), (25, 64)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_bits_are_those_of_two_launches_on_a_gpu(half: int, k: int, dtype: torch.dtype) -> None:
    skip_elsewhere()
    cfg, random = LinearConfig(k, 2 * half, True, dtype), torch.Generator("cuda").manual_seed(half)
    wide = torch.randn(64, k + 16, generator=random, device="cuda").to(dtype)
    # Gates of all sizes, some of which SiLU rounds to zero.
    weight = (torch.randn(2 * half, k, generator=random, device="cuda") * 4 / k**0.5).to(dtype)
    bias, act = torch.randn(2 * half, generator=random, device="cuda").to(dtype), TritonSiluMul(SiluMulConfig(half))
    for rows in (1, 2, 8, 17, 32, 64):
        plans = [plan for plan in candidates(cfg, rows) if plan["SPLITS"] == 1] or [SHORT._asdict()]
        plans = plans[:: max(1, len(plans) // 3)]
        plans += [Plan(8, 1, 2)._asdict(), Plan(4, 1, min(4, k // 64 + 1))._asdict()]
        for config in plans:
            made, plain = activating(cfg, Plan(**config)), WgmmaLinear(cfg, config)
            for x, added in ((wide[:rows, :k], bias), (wide[:rows, :k].contiguous(), None)):
                found = made.activated(x, weight, added)
                assert found is not None and same(found, act(plain(x, weight, added))), (rows, config)
    odd = torch.empty(2 * half * k + 1, dtype=dtype, device="cuda")[1:].view(2 * half, k).copy_(weight)
    x = wide[:9, :k]
    found = made.activated(x, odd, bias)
    assert found is not None and same(found, act(plain(x, weight, bias)))


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("plan", [Plan(4, 1, 5), Plan(8, 1, 6), Plan(4, 1, 8)])
def test_replays_repeat_bits_behind_a_slow_producer_and_other_sizes(plan: Plan) -> None:
    """A hundred replays of the launch and of the product behind it, which begins early, with other rows in between."""
    skip_elsewhere()
    linear, act = pair(12288, 4096, False, device="cuda", plan=plan)
    random = torch.Generator("cuda").manual_seed(1)
    given = torch.randn(32, 4096, generator=random, device="cuda").bfloat16()
    down = torch.randn(4096, 12288, generator=random, device="cuda").bfloat16() / 64
    behind, x = WgmmaLinear(LinearConfig(12288, 4096)), torch.zeros_like(given)
    slow = torch.randn(3072, 3072, device="cuda")
    inner = act(linear(given))
    wanted = behind(inner, down, None)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        x.zero_()
        _ = slow @ slow  # what comes behind it has long begun when x is written
        x.copy_(given)
        found = linear.activated(x, act)
        assert found is not None
        return found, behind(found, down, None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for turn in range(100):
        if turn % 10 == 0:
            rows = given[: turn % 31 + 1]
            other = linear.activated(rows, act)
            assert other is not None and same(other, act(linear(rows)))
        for each in found:
            each.zero_()
        graph.replay()
        assert same(found[0], inner) and same(found[1], wanted), turn
