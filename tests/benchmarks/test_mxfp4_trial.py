"""The trial of MXFP4 experts: a lane decodes the left operand, candidates fit, and one that fails is left out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fastlayers import env
from fastlayers.moe.fused_moe.swizzle import SwizzledWeights, swizzle_codes, swizzle_scales
from fastlayers.quant.mxfp4.codes import dequantize_mxfp4

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from trials import mxfp4_experts as trial
from trials import mxfp4_wgmma

sys.path.insert(0, str(Path(__file__).parents[1] / "compile"))
from recorded import recording

MASK = 0xFFFFFFFF


def halves(word: torch.Tensor) -> torch.Tensor:
    """Return the two bf16 values of words."""
    both = torch.stack((word & 0xFFFF, word >> 16), -1)
    return (both << 16).to(torch.int32).view(torch.float32)


def run(text: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the few instructions that decoding has on words held as int64."""
    held = dict(given)

    def value(name: str) -> torch.Tensor | int:
        return held[name] if name in held else int(name, 0)

    for line in re.findall(r"[^;{}]+(?:\{[^}]*\}[^;{}]*)*;", text[1:-1]):
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name.startswith(".reg"):
            continue
        if name == "mov.b32" and rest.startswith("{"):
            parts, source = re.fullmatch(r"\{(.*)\}, (\w+)", rest).groups()
            low, high = parts.split(", ")
            held |= {low: held[source] & 0xFFFF, high: held[source] >> 16}
            continue
        if name == "mov.b32":
            to, low, high = re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest).groups()
            held[to] = held[low] | held[high] << 16
            continue
        to, *names = rest.split(", ")
        a, b, *c = (value(word) for word in names)
        if name == "and.b32":
            found = a & b
        elif name == "shl.b32":
            found = a << b & MASK
        elif name == "mul.hi.u32":
            found = a * b >> 32
        elif name == "mad.lo.u32":
            found = a * b + c[0] & MASK
        elif name == "lop3.b32":
            assert c[1] == 0xEA  # (a & b) | c
            found = a & b | c[0]
        elif name == "prmt.b32":
            bytes_ = [a >> 8 * i & 255 for i in range(4)] + [torch.zeros_like(a)] * 4
            found = sum(bytes_[c[0] >> 4 * i & 15] << 8 * i for i in range(4))
        else:
            assert name == "mul.bf16x2"
            product = (halves(a) * halves(b)).bfloat16().view(torch.int16).long() & 0xFFFF
            found = product[..., 0] | product[..., 1] << 16
        held[to] = found
    return held


def test_a_lane_decodes_the_left_operand() -> None:
    blocks = torch.randint(0, 256, (1, 64, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.randint(110, 130, (1, 64, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    wanted = dequantize_mxfp4(blocks, scales)[0].double()
    # As the kernel finds them: (w f), o, (t q); of the scales' bytes (s, b) one word for each row g = 2·f + o.
    codes = swizzle_codes(blocks).view(torch.int32)[0].view(4, 4, -1)[:, :, :32].long() & MASK
    words = codes.reshape(4, 4, 2, 4, 4)
    swizzled = swizzle_scales(scales).view(torch.int32)[0, :4].long() & MASK
    scale = swizzled.view(4, 2, 4, 2)[:, 0].reshape(4, 4, 2, 1)
    given = {f"${16 + q}": words[..., q] for q in range(4)} | {"$20": scale.expand(4, 4, 2, 4)}
    held = run(mxfp4_wgmma._DECODE.value, given)
    # What Triton makes of 16 registers: eight results of four values, two in a register.
    found = torch.stack([torch.cat([halves(held[f"${2 * k + i}"]) for i in (0, 1)], -1) for k in range(8)], -1)
    assert found.shape == (4, 4, 2, 4, 4, 8)
    both = found.reshape(4, 4, 2, 4, 2, 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 5, 8, 7, 6)  # k is p h b; joined: b h p
    rows = both.permute(0, 6, 1, 2, 4, 8, 7, 3, 5).reshape(64, 64).double() * 2.0**mxfp4_wgmma._FOLD
    assert torch.equal(rows, wanted)


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let a check be this program."""
    path = tmp_path / "child.py"
    path.write_text(text)
    monkeypatch.setattr(trial, "__file__", str(path))


def test_a_candidate_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import json, sys, time
name = sys.argv[2]
if name == "ring 3x4":
    time.sleep(60)
if name == "wgmma 2x4":
    raise SystemExit("illegal instruction")
print(json.dumps({"candidate": name, "tokens": 32, "right": True}))
"""
    child(tmp_path, monkeypatch, text)
    rows = {row["candidate"]: row for row in trial.checked(["wgmma 2x4", "ring 2x4", "ring 3x4"], 5.0)}
    assert [rows[name]["right"] for name in ("wgmma 2x4", "ring 2x4", "ring 3x4")] == [False, True, False]
    assert rows["wgmma 2x4"]["failed"] == "exit 1: illegal instruction"
    assert rows["ring 3x4"]["failed"] == "not ready after 5 s"


def test_only_what_is_right_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["mxfp4_experts.py", "--out", str(out), "--only", "ring 2x4", "wgmma 2x4"])
    with pytest.raises(SystemExit) as said:
        trial.main()
    assert said.value.code == 2 and not out.exists()
    rows = [
        {"candidate": "ring 2x4", "tokens": 32, "right": True},
        {"candidate": "ring 2x4", "tokens": 64, "right": False},
    ]
    rows.append({"candidate": "wgmma 2x4", "right": False, "failed": "exit 1: no word"})
    asked: list[Any] = []

    def timed(right: dict[str, set[int]], rounds: int) -> list[dict[str, Any]]:
        asked.append(right)
        return [{"tokens": 32, "name": "ring 2x4", "us": 1.0}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trial, "describe_run", lambda device: {"device": str(device)})
    monkeypatch.setattr(trial, "checked", lambda names, seconds: rows if names == ["ring 2x4", "wgmma 2x4"] else [])
    monkeypatch.setattr(trial, "timed", timed)
    trial.main()
    assert asked == [{"ring 2x4": {32}}]
    first, *others = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["shape"] == trial.GPT_OSS.tuning_key() and others[:3] == rows
    assert others[-2] == {"tokens": 32, "name": "ring 2x4", "us": 1.0}


def test_blocks_follow_the_tokens() -> None:
    ring = trial.CANDIDATES["ring 2x4"]
    assert [ring.block_for(tokens) for tokens in (1, 32, 33, 64, 128, 129, 256)] == [8, 8, 16, 16, 32, 32, 32]


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize(("name", "block"), [("wgmma 2x4", 32), ("wgmma 1x8", 32), ("ring 2x4", 8)])
@pytest.mark.parametrize("second", [False, True], ids=["gate_up", "down"])
def test_candidates_fit(name: str, block: int, second: bool) -> None:
    how = trial.CANDIDATES[name]
    assert trial.report(name, block, second)["spills"] == 0
    text = trial.compiled(how, block, second).asm["ptx"]
    # A loop goes round the ring once: for every step a barrier, and of each tile four products.
    found = re.search(r"(\$L__BB\d+_\d+):[^\n]*Loop Header(.*?)bra(?:\.uni)?\s+\1;", text, re.DOTALL)
    assert found is not None
    loop = found[2]
    product = f"wgmma.mma_async.sync.aligned.m64n{block}k16" if how.kind == "wgmma" else "mma.sync.aligned.m16n8k16"
    assert loop.count(product) == 4 * how.tiles * how.stages
    assert loop.count("bar.sync") == loop.count("cp.async.wait_group") == how.stages
    # Codes of all but one step of the ring are asked for before the wait: 16 bytes a lane and tile, and their scales.
    before, wait, _ = text[: found.start()].rpartition("griddepcontrol.wait")
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+), ", before)
    assert wait and "st.global" not in before
    assert [int(size, 16) for size in sizes].count(16) == how.tiles * (how.stages - 1)


class NoDriver:
    """Stands for a GPU of sm_90 where only compiling asks for one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.mark.compile
@pytest.mark.skipif(env.triton_interpret(), reason="Triton interprets, not compiles")
@pytest.mark.parametrize("name", ["wgmma 1x8", "wgmma 2x4 direct", "ring 1x8"])
def test_launches_bind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, tuple[Any, ...]] = {}
    through_triton = JITFunction.run

    def run_only_compiles(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        made = through_triton(self, *arguments, grid=grid, warmup=True, **constants)
        options = made.metadata
        launched[self.__name__] = (grid, options.num_warps, options.maxnreg, options.launch_pdl)
        return made

    monkeypatch.setattr(JITFunction, "run", run_only_compiles)
    # As packed: 32 experts, rows by 64 (scales: 256), columns by 128 (64).
    codes = [torch.empty(32, rows, 5888, dtype=torch.uint8).mT for rows in (1440, 720)]
    scales = [torch.empty(32, rows, 2880, dtype=torch.uint8).mT for rows in (184, 96)]
    packed = SwizzledWeights(*codes, *scales, torch.empty(32, 5760), torch.empty(32, 2880))
    x, weights = torch.empty(128, 2880, dtype=torch.bfloat16), torch.empty(128, 4)
    how = trial.CANDIDATES[name]
    monkeypatch.setattr(driver, "_active", NoDriver())
    with recording() as others:
        y = trial.TrialExperts(trial.GPT_OSS, how)(x, weights, torch.zeros(128, 4, dtype=torch.int32), packed)
    assert y.shape == x.shape
    # 32 blocks that 32 experts open, and 15 that 480 further pairs may fill.
    height = 16 * how.tiles * how.warps
    options = (how.warps, how.registers, True)
    wanted = {f"{how.kind}_gate_up_kernel": ((47 * -(-5760 // height),), *options)}
    wanted |= {f"{how.kind}_down_kernel": ((47 * -(-2880 // height),), *options)}
    if how.kind == "wgmma" and not how.direct:
        wanted |= {"slots_kernel": ((47 * 32,), 4, None, True)}
    assert launched == wanted
    names = {build.kernel.__name__ for build in others.builds.values()}
    assert {"_few_kernel", "reduce_kernel"} <= names and ("gather_kernel" in names) == (how.kind == "ring")
