"""How many functions one decoder layer calls in a step that is not captured: Python's and C's, as cProfile counts them.

The host's time of such a step is these calls. On the Triton path the driver's launch is a stub that records, and
nothing is computed. There the frames are counted, too, that a reader meets from ``DecoderLayer.forward`` to a launch.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastlayers as fl
import fastlayers_models
from fastlayers.attention.meta import AttentionBatch, AttentionState
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.registry import LAYERS
from fastlayers.runtime import launch
from fastlayers.runtime.launch import Kernel, New
from fastlayers_models.auto import AutoModel

sys.path.insert(0, str(Path(__file__).parent))
from family_tools import save_random, tiny_config

ROOT = Path(__file__).parents[2]
OURS = tuple(str(Path(package.__file__ or "").parent) for package in (fl, fastlayers_models))
# What is written out for so many tensors has its module's name for a file.
WRITTEN = f"<{launch.__name__}>"
LAUNCHES = [code for code in Kernel.bind.__code__.co_consts if hasattr(code, "co_code")]
# What the layer took at commit 07d317b, before the path was shortened, measured by this file's program on a CPU.
BEFORE = {
    "qwen3_moe": 769, "qwen3": 663, "deepseek_v3": 858, "gpt_oss": 744, "llama": 625, "qwen2": 626, "qwen2_moe": 817,
}  # fmt: skip
# Dense, and experts; latent attention has five linears and two norms more.
ON_TRITON = {"qwen3": 255, "llama": 250, "qwen2": 250, "qwen3_moe": 276, "gpt_oss": 276, "deepseek_v3": 443}


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """Have the collector rest: who is told of its walks, as Hypothesis is, would be called amid what is counted."""
    gc.disable()
    yield
    gc.enable()


@contextmanager
def nothing_counted() -> Iterator[None]:
    yield


def calls_of_a_layer(model: Any) -> int:
    """Return the calls of the second layer in a decode step of two requests, after steps that made what is kept."""
    profile = cProfile.Profile()

    @contextmanager
    def counted() -> Iterator[None]:
        profile.enable()
        yield
        profile.disable()

    steps_of_a_layer(model, counted)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


class Frames:
    """Functions of ours that run within, and those that lie above each other at the deepest launch."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.met: list[str] = []
        self.deepest: list[str] = []
        self._stack: list[str] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._notice)
        yield
        sys.setprofile(None)

    def _notice(self, frame: Any, event: str, given: Any) -> None:
        code = frame.f_code
        written = code.co_filename == WRITTEN
        if not written and not code.co_filename.startswith(OURS):
            return
        # A comprehension is a frame of this Python only, and part of the function that it stands in.
        if event == "call" and not code.co_name.startswith("<"):
            self.functions.add((launch.__file__ if written else code.co_filename, code.co_qualname))
            self.met.append(code.co_qualname)
            self._stack.append(code.co_qualname)
            if written or code in LAUNCHES:
                self.deepest = max(self.deepest, self._stack[:], key=len)
        elif event == "return" and not code.co_name.startswith("<"):
            self._stack.pop()


def steps_of_a_layer(model: Any, counted: Callable[[], Any]) -> None:
    """Run steps of the second layer; the last one ``with counted()``."""
    state = AttentionState(2, 16, 4, model.page_size, model.device)
    caches = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype).allocate(4, model.device)
    layer, cache = model.decoder.layers[1], caches[1]
    x = torch.randn(2, model.config.hidden_size)
    # The counted length was seen before: what is known of one is kept.
    for number, length in enumerate((3, 4, 5, 6, 6)):
        meta = state.plan(AttentionBatch((1, 1), (length, length), [[1], [2]]))
        layer.self_attn.check_step(meta, cache)
        meta.vouch()  # as the model does, once a step
        step, communicator = StepTokens.plan([2], extend=False), layer.communicator
        # What the layer before hands on.
        hidden = communicator.prepare_attn(Hidden.start(x), step).partial(x, "attn_tp")
        hidden = communicator.prepare_mlp(hidden, step).partial(x, "tp")
        hidden = communicator.postprocess(hidden, step)
        with torch.inference_mode(), counted() if number == 4 else nothing_counted():
            layer(hidden, meta, cache, step, None)


@pytest.mark.parametrize("family", BEFORE)
def test_torch_path(family: str, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(save_random(tiny_config(family), tmp_path), dtype=torch.float32)
    assert calls_of_a_layer(model) <= 0.44 * BEFORE[family]


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_a_layer_of_one_rank_is_its_stages(family: str, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(save_random(tiny_config(family), tmp_path), dtype=torch.float32)
    state = AttentionState(2, 16, 4, model.page_size, model.device)
    ids, found = torch.arange(7) % 5, []
    for trusted in (True, False):
        caches = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype).allocate(4, model.device)
        for layer in model.decoder.layers:
            layer.communicator.trusted = trusted
        bare = layer.communicator.bare_norms(Hidden.start(torch.zeros(1, model.config.hidden_size)))
        assert (bare is not None) == trusted
        with torch.inference_mode():
            found.append(model(ids, state.plan(AttentionBatch((4, 3), (0, 0), [[1], [2]])), caches))
    assert torch.equal(*found)


class StubDriver:
    """Counts launches and makes none."""

    launches = 0

    def device(self) -> int:
        return -1

    def stream(self, device: int) -> int:
        return -1

    def prepare(self, compiled: Any) -> Any:
        def launched(*arguments: Any) -> None:
            StubDriver.launches += 1

        return launched, ()

    def maker(self, new: New) -> Callable[[], torch.Tensor]:
        return partial(torch.empty, new.shape, dtype=new.dtype)


class StubTriton:
    """A first launch that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: "compiled"


def on_triton(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a model all of whose layers launch kernels of ours, by a driver that counts."""
    without = ("embedding", "sampler", "mxfp8_quant", "bmm")
    names = [name for name in LAYERS if name not in without]
    monkeypatch.setenv("FASTLAYERS_BACKEND", ",".join(f"{name}=triton" for name in names))
    model = AutoModel.from_pretrained(save_random(tiny_config(family), folder), dtype=torch.bfloat16)
    monkeypatch.setattr(launch, "driver", StubDriver())
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("fastlayers.")]
    for kernel in {id(each): each for m in modules for each in vars(m).values() if isinstance(each, Kernel)}.values():
        monkeypatch.setattr(kernel, "jit", StubTriton())
        monkeypatch.setattr(kernel, "prepared", True)
        monkeypatch.setattr(kernel, "_known", {})
    StubDriver.launches = 0
    return model


@pytest.mark.parametrize("family", ON_TRITON)
def test_triton_path(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of_a_layer(on_triton(family, tmp_path, monkeypatch))
    assert StubDriver.launches >= 5 * 3  # prepared ones, in the steps after the first
    assert calls <= ON_TRITON[family]


class Zeroings(TorchDispatchMode):
    """Notes what torch is asked to fill."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.seen += 1
        if "zero" in name or "fill" in name or name in ("full", "new_full", "ones", "new_ones"):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ON_TRITON)
def test_a_decode_step_zeroes_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No counter, maximum or accumulator starts at zero by a fill of its own: there is no memset to save."""
    zeroings = Zeroings()

    @contextmanager
    def watched() -> Iterator[None]:
        with zeroings:
            yield

    steps_of_a_layer(on_triton(family, tmp_path, monkeypatch), watched)
    assert zeroings.seen > 10 and zeroings.asked == []
    with zeroings:
        torch.empty(2).zero_()
    assert zeroings.asked == ["zero_"]


@pytest.mark.parametrize(("family", "functions", "files"), [("qwen3_moe", 40, 27), ("deepseek_v3", 51, 27)])
def test_frames_from_a_decoder_layer_to_its_launches(
    family: str, functions: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = Frames()
    steps_of_a_layer(on_triton(family, tmp_path, monkeypatch), frames.counted)
    assert frames.deepest[0] == "DecoderLayer.forward"
    assert len(frames.deepest) <= 9, frames.deepest
    assert len(frames.functions) <= functions, sorted(frames.functions)
    assert len({file for file, _ in frames.functions}) <= files
    dense, latent = drawing().split("an MLA layer differs in the middle")
    drawn = re.findall(r"[A-Z]\w+\.\w+", dense if family == "qwen3_moe" else latent)
    met = iter(frames.met)  # each is looked for behind the one before it
    assert len(drawn) >= 2 and [name for name in drawn if name not in met] == []


def drawing() -> str:
    """Return the path of a token as docs/architecture.md draws it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return text.split("\n## The path of a token\n")[1].split("```")[1]


def test_every_file_of_the_drawing_is_there() -> None:
    named = re.findall(r"[\w/]*/[\w/]*\.py", drawing())
    assert len(named) >= 15 and [n for n in named if not any((r / n).is_file() for r in (ROOT, Path(OURS[0])))] == []
