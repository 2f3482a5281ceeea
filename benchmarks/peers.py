"""Pipelines of other projects that benchmarks compare with. None is a backend, none a dependency.

``sglang``: its Triton experts (``fused_experts``) from ``topk_ids`` to the output, with the configuration files that it
ships for the device and its own rule where it ships none. It runs in this process if the package can be imported.
Peers of small operators are in :mod:`small_peers`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastlayers.moe.fused_moe.layer import FusedMoEConfig
from fastlayers.moe.fused_moe.weights import GROUP, MoEWeights

sys.path.insert(0, str(Path(__file__).parent))
from small_peers import small_peers

_MOE = "sglang.srt.layers.moe.moe_runner"
_KERNELS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"


def peers(layer: str, cfg: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the peers of a layer by name: called with ``cfg``, each makes what a backend's class makes.

    Empty where no peer is installed, or none runs this configuration.
    """
    if layer != "fused_moe":
        return small_peers(layer, cfg)
    if importlib.util.find_spec("sglang") is None or refusal(cfg) is not None:
        return {}
    return {"sglang": SglangExperts}


def refusal(cfg: FusedMoEConfig) -> str | None:
    """Return why sglang's Triton experts are not compared for this configuration, or ``None``."""
    if cfg.quant not in ("none", "fp8_block") or cfg.scale_fmt != "float":
        return f"{cfg.quant} with {cfg.scale_fmt} scales is not compared; bf16 and fp8 blocks are"
    if cfg.activation != "silu" or cfg.bias or cfg.interleaved:
        return "only silu without biases, gate rows before up rows, is compared"
    if cfg.dtype not in (None, torch.bfloat16):
        return f"{cfg.dtype} is not compared; bf16 is"
    if cfg.quant == "fp8_block" and (cfg.hidden_size % GROUP or cfg.intermediate_size % GROUP):
        return f"sizes that are no multiple of {GROUP} have other blocks of scales there"
    return None


class SglangExperts:
    """sglang's experts behind a backend's interface; weights as they are in the checkpoint, nothing is copied.

    Shared experts are experts of the same product there as well. Their ids are appended, by sglang's own kernel, in
    the call: inputs are the very same ids that our backends get.
    """

    def __init__(self, cfg: FusedMoEConfig) -> None:
        _start()
        runner = importlib.import_module(f"{_MOE}.base")
        self.cfg = cfg
        self.fused_experts = importlib.import_module(f"{_MOE}.triton_utils.fused_moe").fused_experts
        self.append = importlib.import_module(_KERNELS).fused_append_shared_experts
        self.fp8 = cfg.quant == "fp8_block"
        # Equal numbers mean that no id is filtered: the pipeline's faster half.
        self.runner = runner.MoeRunnerConfig(
            num_experts=cfg.all_experts, num_local_experts=cfg.all_experts, inplace=False,
            routed_scaling_factor=cfg.scaling_factor,
        )  # fmt: skip

    def pack(self, weights: MoEWeights) -> MoEWeights:
        """Return the weights: the layouts agree."""
        return weights

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, weights: MoEWeights
    ) -> torch.Tensor:
        """Return the experts' output ``[T, D]``."""
        cfg = self.cfg
        if cfg.num_shared:
            topk_ids, topk_weights = self.append(
                topk_ids, topk_weights, cfg.num_shared, 1.0 / cfg.scaling_factor, N=cfg.num_experts
            )
        scales = {"w1_scale": weights.w13_scale, "w2_scale": weights.w2_scale} if self.fp8 else {}
        out: torch.Tensor = self.fused_experts(
            x, weights.w13, weights.w2, (topk_weights, topk_ids, None), self.runner, use_fp8_w8a8=self.fp8,
            block_shape=[GROUP, GROUP] if self.fp8 else None, **scales,
        )  # fmt: skip
        return out


@functools.cache
def _start() -> None:
    """Give sglang the state that it keeps per process: default arguments of its server, and a group of one rank."""
    arguments = importlib.import_module("sglang.srt.server_args")
    arguments.set_global_server_args_for_scheduler(arguments.ServerArgs(model_path="dummy"))
    parallel = importlib.import_module("sglang.srt.distributed.parallel_state")
    if not parallel.model_parallel_is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            method = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        parallel.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=method, backend="gloo"
        )
        parallel.initialize_model_parallel(tensor_model_parallel_size=1)
