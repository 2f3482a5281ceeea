"""The clocks of the layer of one rank of eight, on a device that is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers.layer import trust

ROOT = Path(__file__).parents[2]


class Device:
    """A device that works through what is queued, and events on it; waiting lasts as long as it was told."""

    def __init__(self, busy_ms: float) -> None:
        self.now, self.busy, self.asleep, self.naps = 0.0, busy_ms, False, list[int]()

    def event(self, **kind: bool) -> Any:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", self.now)
        made.query = lambda: not self.asleep
        made.elapsed_time = lambda other: other.at - made.at
        return made

    def sleep(self, cycles: int) -> None:
        self.naps.append(cycles)
        self.asleep = cycles >= 2**29  # a shorter wait is over before the host has queued all

    def work(self, *given: Any) -> list[torch.Tensor]:
        self.now += self.busy
        return [torch.zeros(2)]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stack of two layers whose device takes 3 ms a step."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program, device = import_module("tp8_layer"), Device(3.0)
    monkeypatch.setattr(program, "SETTLING", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep, raising=False)
    made = program.Stack.__new__(program.Stack)
    made.cuda, made.layers, made.device_of_the_test = True, [None] * 2, device
    made.sizes = program.Sizes(2, (1,), 4096, 4096, 10)
    made.graphs = SimpleNamespace(replay=device.work)
    return made


def test_replays_are_queued_back_to_back_and_the_first_do_not_count(stack: Any) -> None:
    found = stack.replays("any")
    assert found == [pytest.approx(3000.0)] * 10
    assert stack.row(found) == {"us": 1500.0, "quartiles_us": [1500.0, 1500.0], "runs": 10}
    assert stack.row(found, 5)["us"] == 300.0


def test_a_prompt_is_timed_where_all_of_it_was_queued_before(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = stack.device_of_the_test
    row = stack.queued(device.work, 4)
    assert (row["us"], row["runs"], row["finite"], row["host_ahead"]) == (1500.0, 4, True, False)
    assert device.naps[0] < device.naps[1] and len(set(device.naps[-4:])) == 1  # longer and longer, then at most
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(device, "asleep", True))
    assert stack.queued(device.work, 4)["host_ahead"] is True


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("trials.tp8_layer_kernels")


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_products_of_heads_into_parts_of_something_wider(tokens: int, trial: Any) -> None:
    heads, nope, rank, size = 2, 32, 128, 32
    q, weight = torch.randn(tokens, heads, nope + 8).bfloat16(), torch.randn(heads, nope + size, rank).bfloat16()
    room = torch.full((tokens, heads, rank + 8), 7.0).bfloat16()
    trial.absorbed(q[..., :nope], weight[:, :nope], room[..., :rank], 16)
    wanted = torch.einsum("thk,hkn->thn", q[..., :nope].float(), weight[:, :nope].float())
    assert (room[..., :rank].float() - wanted).abs().max() < 0.01 * wanted.abs().max() and bool(
        (room[..., rank:] == 7).all()
    )
    latent, o = torch.randn(tokens, heads, rank).bfloat16(), torch.empty(tokens, heads, size).bfloat16()
    trial.absorbed(latent, weight[:, nope:].transpose(1, 2), o, 16)
    wanted = torch.einsum("thk,hnk->thn", latent.float(), weight[:, nope:].float())
    assert (o.float() - wanted).abs().max() < 0.01 * wanted.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("coded", [False, True])
def test_both_norms_in_one_launch(coded: bool, trial: Any) -> None:
    rows = torch.randn(5, 256 + 128 + 16).bfloat16()
    q_a, latent, _ = rows.split([256, 128, 16], -1)
    norms = [fl.RMSNorm(size, dtype=torch.bfloat16, backend="triton") for size in (256, 128)]
    for norm in norms:
        norm.weight.copy_(torch.randn(norm.weight.shape))
    product = fl.FP8BlockLinear(256, 128, backend="triton" if coded else "torch")
    trust(product)
    layer = SimpleNamespace(q_a_layernorm=norms[0], kv_a_layernorm=norms[1], q_b_proj=product)
    q, normed = trial.pair(layer, q_a, latent)
    assert torch.equal(normed, norms[1](latent))
    if not coded:
        assert torch.equal(q, norms[0](q_a))
        return
    wanted, _ = norms[0].coded(q_a, None, "col")
    assert torch.equal(q.codes.view(torch.uint8), wanted.codes.view(torch.uint8)) and torch.equal(
        q.scales, wanted.scales
    )


@pytest.mark.slow
def test_ways_through_the_layer_are_right(tmp_path: Path) -> None:
    """The trial's candidates beside the library's, interpreted: codes from three rows on, products near."""
    program, out = ROOT / "benchmarks" / "trials" / "tp8_layer_ways.py", tmp_path / "ways.jsonl"
    roots = os.pathsep.join(str(ROOT / name) for name in ("src", "models", "server", "benchmarks"))
    env = os.environ | {"PYTHONPATH": roots, "FASTLAYERS_BACKEND": "rms_norm=triton,fp8_linear=triton"}
    command = [sys.executable, str(program), "--small", "--device", "cpu", "--seconds", "900", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    _, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["batch"] for row in rows] == [1] * 6 + [3] * 6
    for row in rows:
        near = row["way"] in ("products", "both")
        assert row["apart"] == 0.0 or (near and row["apart"] < 0.01), row
