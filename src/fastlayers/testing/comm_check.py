"""One check for every communicator: a toy model on a rank grid against the same model written out in one process.

``check_communicator(rank, communicator, case)`` runs on each rank of :func:`~fastlayers.testing.world.world` or
:func:`~fastlayers.testing.world.simulate` and raises AssertionError where anything differs: the input of each
attention, the input of each MLP in its place, and the final output. Rows that are padding hold NaN, so a row that
leaks into another shows.

    attention   mixes the rows of its own group (running mean), then two matrices split over attn_tp
    dense MLP   relu between two matrices split over tp, or replicated (place "scattered")
    MoE         one expert per row, experts split over ep and each over moe_tp
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastlayers.comm.communicator import LayerCommunicator
from fastlayers.comm.layouts import Hidden
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.norm.rms_norm.layer import RMSNorm
from fastlayers.testing.world import Rank

HIDDEN, INNER, EXPERTS = 8, 16, 4


@dataclass(frozen=True)
class CommCase:
    """One rank grid, token counts, and the kinds of its layers.

    Parameters
    ----------
    name : str
    size, attn_dp, ep : int
        The rank grid.
    real : tuple[int, ...]
        Tokens of each attention group.
    extend, graph : bool
        Decide the padding mode.
    mlps : tuple[str, ...]
        One layer each: ``"dense"``, ``"whole"`` (dense, summed by itself), ``"scattered"``, ``"moe"``.
    attention : str
        ``"partial"`` (split over attn_tp) or ``"whole"`` (replicated).
    spread : bool
        Whether the residual is scattered.
    """

    name: str
    size: int
    attn_dp: int = 1
    ep: int = 1
    real: tuple[int, ...] = (5,)
    extend: bool = False
    graph: bool = False
    mlps: tuple[str, ...] = ("dense", "dense")
    attention: str = "partial"
    spread: bool = False

    def step(self) -> StepTokens:
        """Return the step's token counts."""
        n = self.size // self.attn_dp
        bucket = 8 if self.graph else None
        return StepTokens.plan(
            self.real, attn_tp=n, extend=self.extend, graph=self.graph, bucket=bucket, spread=self.spread
        )


SCATTERED = ("scattered", "dense", "scattered", "scattered")
COMM_CASES = (
    CommCase("single", 1, mlps=("dense", "moe", "scattered", "whole")),
    CommCase("tp2", 2),
    CommCase("tp2_whole_attention", 2, attention="whole", mlps=("dense", "whole", "dense")),
    CommCase("tp2_moe_tp", 2, mlps=("dense", "moe")),
    CommCase("tp2_ep2", 2, ep=2, mlps=("dense", "moe")),
    CommCase("tp2_scattered", 2, real=(6,), mlps=SCATTERED),
    CommCase("tp2_scattered_whole", 2, real=(5,), attention="whole", mlps=("dense", *SCATTERED)),
    CommCase("tp2_no_tokens", 2, real=(0,)),
    CommCase("dp2_max_len", 2, attn_dp=2, real=(3, 5)),
    CommCase("dp2_sum_len", 2, attn_dp=2, real=(5, 3), extend=True, mlps=("dense", "whole", "dense")),
    CommCase("dp2_idle_max_len", 2, attn_dp=2, real=(0, 4)),
    CommCase("dp2_idle_sum_len", 2, attn_dp=2, real=(4, 0), extend=True),
    CommCase("dp2_graph", 2, attn_dp=2, real=(1, 7), graph=True),
    CommCase("dp2_ep2", 2, attn_dp=2, ep=2, real=(4, 3), mlps=("dense", "moe")),
    CommCase("dp2_scattered", 2, attn_dp=2, real=(2, 3), extend=True, mlps=SCATTERED),
    CommCase("tp4", 4, real=(7,)),
    CommCase("tp4_ep2", 4, ep=2, mlps=("dense", "moe", "moe")),
    CommCase("dp2_tp2_max_len", 4, attn_dp=2, real=(3, 5), mlps=("dense", "whole", "dense")),
    CommCase("dp2_tp2_sum_len", 4, attn_dp=2, real=(6, 3), extend=True, mlps=("dense", "whole", "dense")),
    CommCase("dp2_tp2_whole_max_len", 4, attn_dp=2, real=(3, 5), attention="whole"),
    CommCase("dp2_tp2_whole_sum_len", 4, attn_dp=2, real=(3, 5), attention="whole", extend=True),
    CommCase("dp2_tp2_idle_max_len", 4, attn_dp=2, real=(4, 0)),
    CommCase("dp2_tp2_idle_sum_len", 4, attn_dp=2, real=(0, 5), extend=True),
    CommCase("dp2_tp2_graph", 4, attn_dp=2, ep=2, real=(7, 2), graph=True, mlps=("dense", "moe")),
    CommCase("dp2_tp2_scattered", 4, attn_dp=2, ep=4, real=(5, 2), extend=True, mlps=(*SCATTERED, "moe", "scattered")),
    CommCase("dp2_tp2_no_tokens", 4, attn_dp=2, real=(0, 0), extend=True),
    CommCase("dp4_max_len", 4, attn_dp=4, real=(3, 1, 2, 4)),
    CommCase("dp4_sum_len", 4, attn_dp=4, real=(3, 1, 2, 4), extend=True, mlps=("dense", "whole", "dense")),
    CommCase("dp4_skewed_decode", 4, attn_dp=4, real=(9, 0, 1, 0)),
    CommCase("dp4_ep4", 4, attn_dp=4, ep=4, real=(2, 0, 3, 1), extend=True, mlps=("dense", "moe")),
)
# Every case again with a scattered residual, and grids of eight ranks.
SPREAD_CASES = (
    *(replace(case, name=f"{case.name}_spread", spread=True) for case in COMM_CASES),
    CommCase("tp8_spread", 8, real=(9,), mlps=("dense", "moe"), spread=True),
    CommCase("dp4_tp2_spread", 8, attn_dp=4, real=(3, 0, 1, 2), extend=True, spread=True),
    CommCase("dp2_tp4_spread", 8, attn_dp=2, ep=2, real=(5, 2), mlps=("dense", "moe"), spread=True),
)


@dataclass
class ToyLayer:
    """Weights of one layer, whole; ranks slice them."""

    kind: str
    norms: tuple[RMSNorm, RMSNorm]
    attn: tuple[torch.Tensor, torch.Tensor]
    mlp: tuple[torch.Tensor, torch.Tensor]
    router: torch.Tensor


def _toy_layers(case: CommCase, device: torch.device) -> list[ToyLayer]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-2] ** -0.5).to(device)

    layers = []
    for kind in case.mlps:
        norms = (RMSNorm(HIDDEN, backend="torch", device=device), RMSNorm(HIDDEN, backend="torch", device=device))
        for norm in norms:
            norm.weight.copy_((1 + torch.rand(HIDDEN, generator=generator)).to(device))
        many = (EXPERTS,) if kind == "moe" else ()
        attn = (draw(HIDDEN, INNER), draw(INNER, HIDDEN))
        mlp = (draw(*many, HIDDEN, INNER), draw(*many, INNER, HIDDEN))
        layers.append(ToyLayer(kind, norms, attn, mlp, draw(HIDDEN, EXPERTS)))
    return layers


def _attention(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], part: slice, real: int) -> torch.Tensor:
    """Running mean over the group's real rows, then the slice ``part`` of the inner features."""
    counts = torch.arange(1, real + 1, device=x.device, dtype=x.dtype)[:, None]
    mixed = torch.cat([x[:real].cumsum(0) / counts, x[real:]])
    return torch.relu(mixed @ weights[0][:, part]) @ weights[1][part]


def _mlp(x: torch.Tensor, layer: ToyLayer, part: slice, experts: slice) -> torch.Tensor:
    if layer.kind != "moe":
        return torch.relu(x @ layer.mlp[0][:, part]) @ layer.mlp[1][part]
    chosen = (x @ layer.router).argmax(-1)
    out = torch.zeros_like(x)
    for expert in range(experts.start, experts.stop):
        y = torch.relu(x @ layer.mlp[0][expert][:, part]) @ layer.mlp[1][expert][part]
        out = torch.where((chosen == expert)[:, None], y, out)
    return out


def oracle(case: CommCase, layers: list[ToyLayer], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what one group's ``tokens [real, D]`` give in one process: every layer's inputs, and the output."""
    trace: dict[str, torch.Tensor] = {}
    everything, x = slice(0, INNER), tokens
    for i, layer in enumerate(layers):
        trace[f"attn{i}"] = layer.norms[0](x)
        x = x + _attention(trace[f"attn{i}"], layer.attn, everything, len(x))
        trace[f"mlp{i}"] = layer.norms[1](x)
        x = x + _mlp(trace[f"mlp{i}"], layer, everything, slice(0, EXPERTS))
    trace["out"] = x
    return trace


def check_communicator(rank: Rank, communicator: type[LayerCommunicator], case: CommCase) -> None:
    """Raise AssertionError unless this rank computes what :func:`oracle` does, for its rows."""
    spec, step = rank.spec(attn_dp=case.attn_dp, ep=case.ep), case.step()
    layers = _toy_layers(case, rank.device)
    generator = torch.Generator().manual_seed(11)
    tokens = [torch.randn(real, HIDDEN, generator=generator).to(rank.device) for real in case.real]
    traces = [oracle(case, layers, t) for t in tokens]
    group, place = spec.attn_dp.rank, spec.attn_tp
    comms: list[LayerCommunicator] = []
    for i, layer in enumerate(layers):
        comms.append(
            communicator(
                spec,
                input_layernorm=layer.norms[0],
                post_attention_layernorm=layer.norms[1],
                mlp_kind="moe" if layer.kind == "moe" else "dense",
                dense_tp=1 if layer.kind == "scattered" else None,
                is_last=i == len(layers) - 1,
                previous=comms[-1] if comms else None,
            )
        )

    def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
        fill = values.new_full((rows - len(values), HIDDEN), float("nan"))
        return torch.cat([values, fill])

    embedded = padded(tokens[group], step.rows[group])
    if case.attention == "partial":  # as from a vocabulary-sharded embedding: each rank holds some rows
        held = torch.arange(len(embedded), device=rank.device) % place.size == place.rank
        hidden = Hidden.start(torch.where(held[:, None], embedded, 0.0), pending="attn_tp")
    else:
        hidden = Hidden.start(embedded)
    for i, (layer, comm) in enumerate(zip(layers, comms, strict=True)):
        hidden = comm.prepare_attn(hidden, step)
        _compare(f"{case.name}: attention input {i}", hidden.tensor, [traces[group][f"attn{i}"]], step, group)
        split = case.attention == "partial"
        part = place.part(INNER, "attention") if split else slice(0, INNER)
        out = _attention(hidden.tensor, layer.attn, part, case.real[group])
        hidden = comm.prepare_mlp(hidden.partial(out, "attn_tp") if split else hidden.complete(out), step)
        assert hidden.layout.place == comm.place, f"{case.name}: MLP input {i} is {hidden.layout}"
        wanted = [t[f"mlp{i}"] for t in traces]
        _compare_place(f"{case.name}: MLP input {i}", hidden, wanted, step, spec)
        hidden = comm.postprocess(_mlp_output(hidden, layer, spec), step)
        assert hidden.layout in comm.outputs_of(spread=step.spread), f"{case.name}: output {i} is {hidden.layout}"
    result = comms[-1].finish(hidden, None, step)
    _compare(f"{case.name}: output", result, [traces[group]["out"]], step, group)


def _mlp_output(hidden: Hidden, layer: ToyLayer, spec: ParallelSpec) -> Hidden:
    x = hidden.tensor
    if layer.kind == "moe":
        out = _mlp(x, layer, spec.moe_tp.part(INNER, "expert"), spec.ep.part(EXPERTS, "experts"))
        return hidden.partial(out, "tp")
    if layer.kind == "dense":
        return hidden.partial(_mlp(x, layer, spec.tp.part(INNER, "mlp"), slice(0, 0)), "tp")
    return hidden.complete(_mlp(x, layer, slice(0, INNER), slice(0, 0)))


def _compare_place(what: str, hidden: Hidden, wanted: list[torch.Tensor], step: StepTokens, spec: ParallelSpec) -> None:
    group = spec.attn_dp.rank
    if hidden.layout.place == "full":
        _compare(what, hidden.tensor, wanted, step, None)
        return
    q = step.rows[group] // spec.attn_tp.size
    real, start = step.num_token_non_padded(group, spec.attn_tp.rank), q * spec.attn_tp.rank
    assert hidden.tensor.shape[0] == q, f"{what}: {hidden.tensor.shape[0]} rows, wanted {q}"
    _close(what, hidden.tensor[:real], wanted[group][start : start + real])


def _compare(what: str, given: torch.Tensor, wanted: list[Any], step: StepTokens, group: int | None) -> None:
    """Compare the real rows of one group (``attn_full``) or of all (``full``, group ``None``)."""
    rows = step.full_rows if group is None else step.rows[group]
    assert given.shape[0] == rows, f"{what}: {given.shape[0]} rows, wanted {rows}"
    for i, values in enumerate(wanted):
        start = step.offsets[i] if group is None else 0
        _close(f"{what}, group {i}", given[start : start + len(values)], values)


def _close(what: str, given: torch.Tensor, wanted: torch.Tensor) -> None:
    # fp32 sums of at most some dozens of terms of size 1, in another order than the oracle's.
    torch.testing.assert_close(given, wanted, rtol=1e-6, atol=4e-6, msg=lambda text: f"{what}: {text}")
