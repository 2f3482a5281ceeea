"""The ways to run one checkpoint that ``fastlayers eval`` compares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

import fastlayers as fl
from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
from fastlayers.errors import UnknownNameError, dtype_name
from fastlayers.quant.spec import FORMATS, QuantSpec
from fastlayers.runtime.held_directory import make
from fastlayers_models.auto import AutoModel
from fastlayers_models.checkpoint import Checkpoint
from fastlayers_models.convert import convert_to_fp8_block, dequantize_checkpoint
from fastlayers_server.engine.config import EngineConfig
from fastlayers_server.front.tokens import TokenText
from fastlayers_server.hugging_face import load_hugging_face, misread
from fastlayers_server.llm import LLM, Params

# What a format rounds; the module divergence tells stock transformers to do the same.
Rounding = Literal["bf16", "fp8-block", "fp8-weights", "fp8-kv", "fp8-inputs", "int8-inputs"]


class Runner(Protocol):
    """One way to run a checkpoint."""

    model: Any

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return greedy continuations, cut after the first end token."""

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return fp32 logits ``[len(ids), vocab]`` for one sequence."""


class HuggingFaceRunner:
    """A Hugging Face model, patched or not; prompts are padded on the left."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, *, patch: bool) -> None:
        self.device = device
        self.model = load_hugging_face(path, dtype, device)
        self.report = fl.patch(self.model) if patch else None
        eos = self.model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """See :class:`Runner`."""
        width = max(map(len, prompts))
        pad = min(self.eos)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad
        )
        return [_cut(row, self.eos) for row in out[:, width:].tolist()]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """See :class:`Runner`."""
        logits: torch.Tensor = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        return logits.float()


class FastlayersRunner:
    """A model of ``fastlayers_models``."""

    def __init__(
        self, path: Path, dtype: torch.dtype, device: torch.device, *, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.model = AutoModel.from_pretrained(path, dtype=dtype, device=device, kv_dtype=kv_dtype)
        self._path = path
        self._engine: LLM | None = None

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """See :class:`Runner`."""
        llm = self._llm(len(prompts), max(map(len, prompts)) + max_new_tokens)
        found = llm.generate(prompts, Params(temperature=0.0, max_tokens=max_new_tokens))
        return [completion.outputs[0].token_ids for completion in found]

    def _llm(self, batch: int, length: int) -> LLM:
        """Return the engine, made anew for more or longer prompts than before."""
        held = self._engine
        if held is None or held.info.max_model_len < length or held.info.max_running < batch:
            self._engine = held = None  # its cache goes before the next one's is made
            page = self.model.page_size
            longest = min(-(-length // 256) * 256, self.model.config.max_position_embeddings)
            config = EngineConfig(
                max_model_len=longest, max_running_requests=batch, num_pages=batch * -(-longest // page) + 1,
                page_size=page, no_prefix_cache=True, no_freeze_gc=True,
            )  # fmt: skip
            tokens = TokenText(self._path, invent=True)
            self._engine = held = LLM(str(self._path), config, loaded=self.model, tokens=tokens)
        return held

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """See :class:`Runner`."""
        model, count = self.model, len(ids)
        page = model.page_size
        pages = whole_pages([count], page)
        spec = fl.kv_cache_spec(model, page_size=page, dtype=model.kv_dtype)
        caches = spec.allocate(len(pages[0]) + 1, model.device)
        state = AttentionState(1, count, len(pages[0]), page, model.device)
        meta = state.plan(AttentionBatch((count,), (0,), pages))
        hidden = model(torch.tensor(list(ids), device=model.device), meta, caches)
        return model.compute_logits(hidden).float()


@dataclass(frozen=True)
class Variant:
    """One row of the table: a name, what it is, which row it must agree with, and how to build it.

    ``formats``: the formats of checkpoints that it can be made from (see :class:`fastlayers.QuantSpec`); empty: any.
    ``roundings``: what its numbers lose against the checkpoint in fp32 (see :mod:`fastlayers_server.divergence`);
    ``None``: it is one of those that say how much that is. ``devices``: where it can run; empty: anywhere. ``stock``:
    transformers reads the checkpoint as it is.
    """

    name: str
    description: str
    baseline: str | None
    quantised: bool
    build: Callable[[Path, torch.device], Runner]
    formats: tuple[str, ...] = ()
    roundings: tuple[Rounding, ...] | None = None
    devices: tuple[str, ...] = ()
    stock: bool = False

    def why_not(self, path: Path, device: torch.device) -> str | None:
        """Return why there is no such row for this checkpoint and this device, or ``None``."""
        if self.devices and device.type not in self.devices:
            return f"which runs on {' or '.join(self.devices)} alone: elsewhere kernels of its format multiply in bf16"
        if self.stock and (why := misread(path)) is not None:
            return f"made from a checkpoint that transformers reads, and this one is {why}"
        format = QuantSpec.from_config(Checkpoint(path).config.get("quantization_config")).format
        if not self.formats or format in self.formats:
            return None
        kinds = " or ".join("unquantised" if kind == "none" else kind for kind in self.formats)
        return (
            f"made from a checkpoint that is {kinds}, and this one is {'unquantised' if format == 'none' else format}"
        )

    def against(self, path: Path, device: torch.device, ran: Collection[str] = ()) -> str | None:
        """Return the row that this one must agree with: its baseline, or what stands in where there is none such.

        ``ran``: the rows that there are; of one that failed, or was not asked for, the stand-in may be among them.
        """
        stand_in = STAND_INS.get(self.baseline or "")
        if stand_in is None or self.baseline in ran:
            return self.baseline
        missing = stand_in in ran or VARIANTS[str(self.baseline)].why_not(path, device) is not None
        return stand_in if missing else self.baseline


def _fp8_folder(path: Path) -> Path:
    folder = make("fastlayers-fp8-") / "fp8"
    convert_to_fp8_block(path, folder, include_ragged=True)
    return folder


def _multiplied_out(path: Path, dtype: torch.dtype) -> Path:
    folder = make("fastlayers-dequantised-") / dtype_name(dtype)
    dequantize_checkpoint(path, folder, dtype)
    return folder


def _stock(dtype: torch.dtype) -> Callable[[Path, torch.device], Runner]:
    return lambda path, device: HuggingFaceRunner(path, dtype, device, patch=False)


def _stock_multiplied_out(dtype: torch.dtype) -> Callable[[Path, torch.device], Runner]:
    return lambda path, device: HuggingFaceRunner(_multiplied_out(path, dtype), dtype, device, patch=False)


def _patched(dtype: torch.dtype) -> Callable[[Path, torch.device], Runner]:
    return lambda path, device: HuggingFaceRunner(path, dtype, device, patch=True)


def _ours(dtype: torch.dtype) -> Callable[[Path, torch.device], Runner]:
    return lambda path, device: FastlayersRunner(path, dtype, device)


BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
_PLAIN, _MXFP4, _CPU = ("none",), ("mxfp4",), ("cpu",)
# Transformers itself multiplies MXFP4 out.
_CODED = tuple(format for format in FORMATS if format not in (*_PLAIN, *_MXFP4))
VARIANTS = {
    v.name: v
    for v in (
        Variant("hf", "Hugging Face, bf16", None, False, _stock(BF16), stock=True),
        Variant("hf-fp32", "Hugging Face, fp32", None, False, _stock(FP32), stock=True),
        Variant(
            "hf-dequantised", "Hugging Face, bf16 with the weights dequantised", None, False,
            _stock_multiplied_out(BF16), _CODED,
        ),
        Variant(
            "hf-dequantised-fp32", "Hugging Face, fp32 with the weights dequantised", None, False,
            _stock_multiplied_out(FP32), _CODED,
        ),
        Variant("patched", "patched, bf16", "hf", False, _patched(BF16), roundings=("bf16",), stock=True),
        Variant("patched-fp32", "patched, fp32", "hf-fp32", False, _patched(FP32), roundings=(), stock=True),
        Variant("fastlayers", "fastlayers_models, bf16", "hf", False, _ours(BF16), roundings=("bf16",)),
        Variant("fastlayers-fp32", "fastlayers_models, fp32", "hf-fp32", False, _ours(FP32), roundings=()),
        Variant(
            "dequantised", "fastlayers_models, bf16 with the FP8 weights dequantised", None, False,
            lambda p, d: FastlayersRunner(_multiplied_out(_fp8_folder(p), BF16), BF16, d), _PLAIN,
            ("bf16", "fp8-weights"),
        ),
        Variant(
            "fp8-block", "fastlayers_models, FP8-block weights", "dequantised", True,
            lambda p, d: FastlayersRunner(_fp8_folder(p), BF16, d), _PLAIN, ("bf16", "fp8-block"),
        ),
        Variant(
            "fp8-block-fp32", "fastlayers_models, fp32 with FP8-block weights", "fastlayers-fp32", True,
            lambda p, d: FastlayersRunner(_fp8_folder(p), FP32, d), _PLAIN, ("fp8-block",), _CPU,
        ),
        Variant(
            "mxfp4-dequantised", "fastlayers_models, bf16 with the MXFP4 weights dequantised", None, False,
            lambda p, d: FastlayersRunner(_multiplied_out(p, BF16), BF16, d), _MXFP4, ("bf16",),
        ),
        Variant(
            "mxfp4", "fastlayers_models, MXFP4 weights", "mxfp4-dequantised", True, _ours(BF16), _MXFP4, ("bf16",),
        ),
        Variant(
            "fp8-kv", "fastlayers_models, bf16 with FP8 KV", "fastlayers", True,
            lambda p, d: FastlayersRunner(p, BF16, d, kv_dtype=E4M3), roundings=("bf16", "fp8-kv"),
        ),
        Variant(
            "fp8-kv-fp32", "fastlayers_models, fp32 with FP8 KV", "fastlayers-fp32", True,
            lambda p, d: FastlayersRunner(p, FP32, d, kv_dtype=E4M3), (), ("fp8-kv",), _CPU,
        ),
    )
}  # fmt: skip
# The rows that take the place of others where transformers cannot read the checkpoint as it is.
STAND_INS = {"hf": "hf-dequantised", "hf-fp32": "hf-dequantised-fp32"}
USUAL = ("hf", "patched", "fastlayers")


def usual_variants(path: Path, device: torch.device) -> list[Variant]:
    """Return the variants of :data:`USUAL`, and behind those that this checkpoint does not have, what stands in."""
    names = []
    for name in USUAL:
        names.append(name)
        if name in STAND_INS and VARIANTS[name].why_not(path, device) is not None:
            names.append(STAND_INS[name])
    return [VARIANTS[name] for name in names]


def named_variants(names: Sequence[str]) -> list[Variant]:
    """Return the variants of these names, each once; raise :class:`UnknownNameError` with the known ones."""
    for name in names:
        if name not in VARIANTS:
            raise UnknownNameError(f"variant {name!r} is unknown; known: {', '.join(VARIANTS)}")
    return [VARIANTS[name] for name in dict.fromkeys(names)]


def _cut(ids: list[int], eos: set[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in eos:
            return ids[: position + 1]
    return ids
