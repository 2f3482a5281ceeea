"""One token's product with FP8 blocks: any tile, codes of the quantiser, planted bugs, early reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl

from fastlayers import env, tuning
from fastlayers.device import DESCRIBED
from fastlayers.integers import cdiv
from fastlayers.linear.fp8_block import triton as fp8_triton
from fastlayers.linear.fp8_block import triton_vector as vector
from fastlayers.linear.fp8_block.layer import FP8_LINEAR, FP8BlockLinear, FP8LinearConfig
from fastlayers.linear.fp8_block.reference import ReferenceFP8Linear
from fastlayers.linear.fp8_block.triton import TritonFP8Linear, default_config, serves, tile_config, vector_config
from fastlayers.quant.block_quant import quantize_block_weight
from fastlayers.quant.coded_rows import CodedRows
from fastlayers.quant.group_quant.layer import GroupQuantConfig
from fastlayers.quant.group_quant.triton import TritonGroupQuant, requantized
from fastlayers.runtime.launch import kernel
from fastlayers.testing.compile_check import KernelBuild, compile_for, compiled_for
from fastlayers.triton_lang import await_inputs, dependent_launch, release_dependents

sys.path.insert(0, str(Path(__file__).parents[1]))
from planted_faults import planted

interpreted = pytest.mark.skipif(not env.triton_interpret(), reason="needs Triton's interpreter")
H200 = DESCRIBED["H200"]
BF16, FP16 = torch.bfloat16, torch.float16
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def operands(cfg: FP8LinearConfig, tokens: int = 1, device: str = "cpu") -> Operands:
    """Return x with outliers, weight, scales that differ by orders of magnitude, and bias."""
    random = torch.Generator().manual_seed(cfg.in_features + cfg.out_features)
    x = torch.randn(tokens, cfg.in_features, generator=random) * torch.exp(
        torch.randn(1, cfg.in_features, generator=random)
    )
    weight = torch.randn(cfg.out_features, cfg.in_features, generator=random) / cfg.in_features**0.5
    codes, scale = quantize_block_weight(weight, cfg.block_size)
    scale *= torch.exp(torch.randn(scale.shape, generator=random))
    bias = torch.randn(cfg.out_features, generator=random).to(cfg.dtype) if cfg.bias else None
    given = x.to(cfg.dtype), codes, scale, bias
    return tuple(None if each is None else each.to(device) for each in given)  # type: ignore[return-value]


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (y.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < 5e-3)


TILES = [(2, 512, 1), (4, 512, 2), (8, 1024, 4), (1, 512, 9)]


@interpreted
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("float", BF16), ("ue8m0", FP16), pytest.param("float", FP16, marks=pytest.mark.slow),
        pytest.param("ue8m0", BF16, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("n", "k", "bias"), [(8, 1024, False), (133, 640, True), (13, 1377, True), (5, 71, False)])
def test_agrees_with_the_reference_whatever_the_tile(n: int, k: int, bias: bool, fmt: str, dtype: torch.dtype) -> None:
    cfg = FP8LinearConfig(k, n, bias, dtype, scale_fmt=fmt)
    given = operands(cfg)
    expected = ReferenceFP8Linear(cfg)(*given)
    for tile in TILES[:2] if k % 16 else TILES:
        y = TritonFP8Linear(cfg, vector_config(*tile))(*given)
        assert y.dtype == dtype and y.shape == (1, n)
        assert close(y, expected), tile


@interpreted
def test_bits_do_not_depend_on_what_is_ahead() -> None:
    cfg = FP8LinearConfig(2000, 9, bias=True)
    given = operands(cfg)
    found = [TritonFP8Linear(cfg, vector_config(4, 512, ahead))(*given) for ahead in (1, 2, 3, 9)]
    assert all(torch.equal(y, found[0]) for y in found)


@interpreted
@pytest.mark.parametrize("layout", ["row", "col"])
def test_codes_give_the_bits_of_rows(layout: str) -> None:
    """Whoever quantised: a kernel in front, or each program."""
    cfg = FP8LinearConfig(1152, 21, bias=True)
    x, *rest = operands(cfg)
    codes, scales = TritonGroupQuant(GroupQuantConfig(128, scale_layout=layout))(x)
    for tile in TILES:
        backend = TritonFP8Linear(cfg, vector_config(*tile))
        assert torch.equal(backend(CodedRows(codes, scales), *rest), backend(x, *rest))  # type: ignore[arg-type]


@kernel
def _worth_kernel(x_ptr, scale_ptr, y_ptr, eps, UE8M0: tl.constexpr, K: tl.constexpr):
    k = tl.arange(0, K)
    x = tl.load(x_ptr + k).to(tl.float32)
    tl.store(y_ptr + k, requantized(x, tl.load(scale_ptr + tl.arange(0, K // 128)), eps, 448.0, UE8M0))


@interpreted
@pytest.mark.parametrize("fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_codes_are_those_of_the_quantiser(dtype: torch.dtype, fmt: str) -> None:
    x, _, _, _ = operands(FP8LinearConfig(1024, 8, dtype=dtype))
    x[0, 128:256], x[0, 300], x[0, 700] = 0, float("inf"), float("nan")
    codes, scales = TritonGroupQuant(GroupQuantConfig(128, scale_fmt=fmt))(x)
    factor, y = torch.rand(8) + 0.5, torch.empty(1024)
    _worth_kernel[(1,)](x, factor, y, 1e-10, UE8M0=fmt == "ue8m0", K=1024)
    expected = codes[0].float() * (scales[0] * factor).repeat_interleave(128)
    assert expected.isnan().sum() == 256
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_one_token_takes_vectors_by_rule_and_more_do_not() -> None:
    cfg = FP8LinearConfig(7168, 2112)
    assert serves(default_config(cfg, 1), 1) and not serves(default_config(cfg, 1), 2)
    assert all("ahead" not in default_config(cfg, tokens) for tokens in (0, 2, 3, 64))
    others = (
        FP8LinearConfig(7168, 2112, dtype=torch.float32),
        FP8LinearConfig(96, 80, block_size=(32, 32)),
        FP8LinearConfig(1000, 64),
    )
    assert all("ahead" not in default_config(other, 1) for other in others)
    assert default_config(FP8LinearConfig(1000, 64), 1)["fused"] == 1
    for n, k in ((2112, 7168), (3072, 1536), (36864, 7168), (7168, 16384), (8, 16), (512, 7168)):
        found = [c for c in TritonFP8Linear.candidates(FP8LinearConfig(k, n), 1) if "ahead" in c]
        # The longest rows run by another kernel unless a table says otherwise.
        assert (found[0] == default_config(FP8LinearConfig(k, n), 1)) == (k <= 8192) and len(found) <= 9
        for each in found:
            assert 128 % each["n"] == 0 and each["k"] == 512 * each["warps"] and each["n"] * each["ahead"] <= 32, each


@interpreted
@pytest.mark.parametrize("tokens", [0, 2, 17])
def test_a_table_with_vectors_alone_serves_more_tokens_by_the_rule(tokens: int) -> None:
    cfg = FP8LinearConfig(256, 24, bias=True)
    given = operands(cfg, tokens)
    tuned, plain = TritonFP8Linear(cfg, vector_config(2, 512, 1)), TritonFP8Linear(cfg)
    assert torch.equal(tuned(*given), plain(*given))
    assert tuned.codes_layout(tokens) == plain.codes_layout(tokens) and tuned.codes_layout(1) is None


def test_vectors_of_another_shapes_table_are_not_for_rows_that_begin_between_16_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.TUNED_DIR, str(tmp_path))
    path = tuning.path_of(tmp_path, "fp8_linear", FP8LinearConfig(1600, 64).tuning_key(), H200)
    rungs = [
        {"max_tokens": 1, "backend": "triton", "config": vector_config(2, 512, 1)},
        {"max_tokens": None, "backend": "triton", "config": tile_config(64, 64, 4, 4, 1)},
    ]
    tuning.write(path, {"schema": 1, "layer": "fp8_linear", "device": "H200", "ladder": rungs})
    found = [FP8_LINEAR.choose(FP8LinearConfig(columns, 64), H200) for columns in (1600, 1616, 1608)]
    assert all(path.name in choice.evidence for choice in found)
    assert [choice.rungs[0].config != () for choice in found] == [True, True, False]
    assert all(choice.rungs[1].config for choice in found)


MUTANTS = {
    "first tile again": ("held[i].to", "held[0].to"),
    "last tile dropped": ("if i + AHEAD < BLOCKS:", "if i + AHEAD < BLOCKS - 1:"),
    "tile after the next": ("(i + AHEAD) * BLOCK_K", "(i + AHEAD + 1) * BLOCK_K"),
    "halves exchanged": ("tl.join(low, high)", "tl.join(high, low)"),
    "columns interleaved": ("tl.permute(tl.join(low, high), (0, 2, 1))", "tl.join(low, high)"),
    "scales of the first tile": ("x, scales[i], eps", "x, scales[0], eps"),
    "scales of the first rows": ("(column0 // BLOCK_ROWS)", "(column0 * 0)"),
    "no bias": ("y.to(tl.float32) + bias", "y.to(tl.float32)"),
    "edge of x not masked": (", mask=k < K, other=0.0", ""),
    "no wait": ("    await_inputs(PDL)\n", ""),
}


def mutated(name: str, folder: Path) -> ModuleType:
    """Return the kernel's module with one expression changed."""
    return planted(vector, folder, MUTANTS[name], ('@operator("fp8_block_vector", _empty)\n', ""))


@interpreted
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "no wait"])
def test_planted_bug_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = FP8LinearConfig(1200, 133, bias=True)
    x, weight, scale, bias = operands(cfg)
    # Behind every row lie numbers that no result may hold.
    wide = torch.full((133, 2048), float("nan")).to(torch.float8_e4m3fn)
    wide[:, :1200] = weight
    xs = torch.cat([x, torch.full((1, 848), float("nan"), dtype=BF16)], 1)
    given = xs[:, :1200], wide[:, :1200], scale, bias
    expected = ReferenceFP8Linear(cfg)(x, weight, scale, bias)
    assert close(TritonFP8Linear(cfg, vector_config(4, 512, 2))(*given), expected)
    monkeypatch.setattr(fp8_triton, "fp8_block_vector", mutated(name, tmp_path).fp8_block_vector)
    try:
        y = TritonFP8Linear(cfg, vector_config(4, 512, 2))(*given)
    except Exception:  # an index that is none
        return
    assert not close(y, expected), f"{name} changes nothing"


def build(n: int, k: int, tile: dict[str, int], **constants: Any) -> KernelBuild:
    """Return what one token launches at a shape."""
    types = {"x_ptr": "*bf16", "s_ptr": "*fp32", "weight_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "bias_ptr": "*bf16"}
    sizes = {name: "i32" for name in ("N", "K", "s_stride", "weight_stride", "scale_stride")}
    blocks = cdiv(k, tile["k"])
    given = {
        "CODED": False, "UE8M0": False, "HAS_BIAS": False, "EVEN_K": k % tile["k"] == 0, "BLOCKS": blocks,
        "AHEAD": min(blocks, tile["ahead"]), "BLOCK_ROWS": 128, "BLOCK_N": tile["n"], "BLOCK_K": tile["k"], "PDL": True,
    }  # fmt: skip
    signature = types | {"y_ptr": "*bf16"} | sizes | {"eps": "fp32"}
    name = f"{n}x{k}-{tile['n']}x{tile['k']}-{tile['ahead']}{''.join(constants)}"
    return KernelBuild(
        name, vector.fp8_vector_kernel, signature, given | constants, tile["warps"], 2, ("N", "K", "weight_stride")
    )


compiling = [
    pytest.mark.compile, pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles"),
]  # fmt: skip
SHAPES = ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (24576, 1536), (7168, 16384))


def tiles(n: int, k: int) -> list[dict[str, int]]:
    return [c for c in TritonFP8Linear.candidates(FP8LinearConfig(k, n), 1) if "ahead" in c]


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(build(n, k, tile), marks=compiling, id=build(n, k, tile).name)
        for n, k in SHAPES[:3] + SHAPES[5:]
        for tile in tiles(n, k)
    ],
)
def test_no_candidate_spills_and_only_the_last_sum_has_barriers(each: KernelBuild) -> None:
    report = compile_for(each)
    assert report.spills == 0 and report.registers * 32 * each.num_warps <= 65536 and report.shared <= 1024, report
    ptx = compiled_for(each).asm["ptx"]
    assert ptx.count("bar.sync") <= 4


@pytest.mark.parametrize("coded", [pytest.param(each, marks=compiling) for each in (False, True)])
def test_only_weights_are_read_before_the_wait(coded: bool) -> None:
    tile = vector_config(8, 2048, 1)
    constants = {"CODED": True, "x_ptr": "*fp8e4nv"} if coded else {}
    each = build(7168, 2048, tile, **{name: value for name, value in constants.items() if name == "CODED"})
    if coded:
        each = KernelBuild(
            each.name, each.kernel, {**each.signature, "x_ptr": "*fp8e4nv"}, each.constexprs, 4, 2, each.aligned
        )
    before, wait, after = compiled_for(each).asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    loads = re.compile(r"ld\.global[.\w:]*v4")
    # 8 rows x 2048 columns over 128 threads, 16 bytes each: all of the weight, and a scale, are on their way.
    assert len(loads.findall(before)) == 8 and len(re.findall(r"ld\.global", before)) == 9
    assert not re.search(r"st\.global", before) and len(loads.findall(after)) == (1 if coded else 2)


@kernel
def slow_copy_kernel(x_ptr, y_ptr, size, loops, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy, long after the next kernel may have started."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    release_dependents(PDL)
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    for _ in range(loops):
        x = x * 1.0 + 0.0 * tl.sqrt(tl.abs(x))
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < size)


def behind_a_slow_copy(product: Any, rounds: int) -> bool:
    """Return whether the product reads what the kernel in front writes at its end, and not what lies there before."""
    cfg = FP8LinearConfig(4096, 2048)
    x, weight, scale, _ = operands(cfg, device="cuda")
    expected, late, right = ReferenceFP8Linear(cfg)(x, weight, scale, None), torch.empty_like(x), []
    launch = dependent_launch(x.device)
    for _ in range(rounds):
        late.fill_(float("nan"))
        # Some 300 us: longer than the host takes to launch the product, which nothing may come between.
        slow_copy_kernel[(4,)](x, late, 4096, 30_000, BLOCK=1024, num_warps=4, **launch)
        y = product(late, None, weight, scale, None, 128, False, cfg.dtype, [8, 2048, 4, 2])
        right.append(close(y, expected))
    return all(right)


@pytest.mark.gpu
def test_gpu_input_is_read_after_the_wait() -> None:
    assert behind_a_slow_copy(vector.fp8_block_vector, 20)


@pytest.mark.gpu
def test_gpu_input_read_before_the_wait_shows(tmp_path: Path) -> None:
    without = mutated("no wait", tmp_path)
    if dependent_launch(torch.device("cuda"))["PDL"]:
        assert not behind_a_slow_copy(without.fp8_block_vector, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_gpu_replays_give_the_bits_of_an_eager_run(tokens: int) -> None:
    """Of three products behind each other, each of which may begin before the one in front has ended."""
    layers = [FP8BlockLinear(2048, 2048, device="cuda", backend="triton") for _ in range(3)]
    for layer in layers:
        _, weight, scale, _ = operands(layer.cfg, device="cuda")
        layer.weight.data.copy_(weight)
        layer.weight_scale_inv.data.copy_(scale)
    x = operands(layers[0].cfg, tokens, "cuda")[0]

    def step() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    expected = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
