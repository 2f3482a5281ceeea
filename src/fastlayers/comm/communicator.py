"""LayerCommunicator: the one place that decides which collective runs between two layers, by transitions.py's tables.

The MLP never reduces on its own: it says ``hidden.partial(out, "tp")``, and exactly one row of the tables is taken.
An MLP whose output is whole already says ``hidden.complete(out)``, and then nothing is summed.

Source: SGLang's layer communicator and DP attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from fastlayers.comm.layouts import Hidden, Layout, Norm, normed
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Moves, Seam
from fastlayers.comm.transitions import HOOKS, Codes, RankOps, Tables, Transition
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, LayoutError, check_choice, check_kind, check_plain, describe
from fastlayers.quant.coded_rows import CodingNorm
from fastlayers.registry import TRITON_NEEDS, Backend, Registry


def _needs_cuda(cfg: Any, device: Device) -> str | None:
    return None if device.type == "cuda" else f"its kernels write into other GPUs' memory, this is {device}"


_HERE = "fastlayers.comm.communicator:LayerCommunicator"
COMMUNICATOR = Registry(
    "communicator",
    [
        Backend(
            "triton_symm_mem", _HERE, TRITON_NEEDS, _needs_cuda,
            note="sums, gathers and scatters of the rows sum_norm, gather_rows, scatter_rows; checked on all ranks",
        ),
        Backend("collective", _HERE, auto_on=("cpu", "cuda"), note="torch.distributed's: NCCL, or gloo on a CPU"),
    ],
)  # fmt: skip
# What a copy makes for itself: transitions are functions of this object's own norms and collectives.
MADE = (
    "_tables", "_transitions", "_spread", "_hooks", "_spread_hooks", "_norms", "_coding", "table", "spread_table",
)  # fmt: skip


def mlp_place(mlp_kind: str, *, all_to_all: bool = False, dense_tp: int | None = None) -> str:
    """Return the place of an MLP's rows: ``"scattered"`` or ``"full"``.

    A sparse MLP (``"moe"``) is scattered if its experts exchange tokens by all-to-all; a dense one if its weights
    are replicated (``dense_tp=1``); all others see the rows of the whole world.
    """
    check_choice("LayerCommunicator", "mlp_kind", mlp_kind, ("dense", "moe"))
    check_plain("LayerCommunicator", "bool", all_to_all=all_to_all)
    check_plain("LayerCommunicator", "int > 0 | None", dense_tp=dense_tp)
    return "scattered" if (all_to_all if mlp_kind == "moe" else dense_tp == 1) else "full"


def _by_strings(table: Mapping[tuple[str, Layout], Transition]) -> dict[tuple[str | None, ...], Transition]:
    return {(hook, given.place, given.pending, given.residual): row for (hook, given), row in table.items()}


def _no_hidden(hook: str, given: object) -> NoReturn:
    # Every tensor has a ``layout``, of another kind.
    accepted = "a Hidden, as Hidden.start(tensor) makes for the first layer"
    raise ArgumentError(f"LayerCommunicator.{hook}", "hidden", describe(given), accepted)


def _check_step(hook: str, step: object) -> None:
    check_kind(f"LayerCommunicator.{hook}", StepTokens | None, step=step)


def _check_norm(argument: str, norm: object) -> None:
    """Raise :class:`ArgumentError` unless ``norm`` can be called with a tensor and a residual."""
    call = norm.forward if isinstance(norm, nn.Module) else norm
    try:
        inspect.signature(call).bind(None, None)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        accepted = "an RMSNorm, or what else takes norm(x, residual)"
        raise ArgumentError("LayerCommunicator", argument, describe(norm), accepted) from error


class LayerCommunicator:
    """The norms and the communication of one decoder layer, in three hooks.

    The tables at the head of ``transitions.py`` are built at construction for this layer, this rank grid and these
    options; a layout that is not in them raises :class:`LayoutError`. Of which a step takes, ``StepTokens.spread``
    says. At world size 1 the hooks are two norm calls.

    Parameters
    ----------
    parallel : ParallelSpec
        With process groups wherever an axis has several ranks.
    input_layernorm, post_attention_layernorm : RMSNorm
        Or any callable with ``norm(x) -> y`` and ``norm(x, residual) -> (y, x + residual)``. They stay the
        layer's own submodules; the communicator holds no parameters.
    mlp_kind : str
        ``"dense"`` (weights split over ``tp``) or ``"moe"`` (experts over ``ep``, each expert over ``moe_tp``).
        The output of either is a partial sum over all ranks: pending over ``"tp"``.
    all_to_all, dense_tp : bool, int or None
        See :func:`mlp_place`: whether the MLP sees scattered rows instead of all rows.
    is_last : bool
        The last layer's output is in place ``attn_full``; hand it to :meth:`finish`.
    previous : LayerCommunicator, optional
        The communicator of the layer before: checks at construction that its outputs are accepted here.
    seam : Seam, optional
        Of the same spec: sums over ranks and the norms behind them become one operator.
    moves : Moves, optional
        Of the same spec: gathers and scatters of rows between groups; of groups of several ranks with a ``seam``.
    codes : callable, optional
        ``codes(hook, rows)`` returns the layout of scales in which whoever reads what that hook returns takes
        :class:`~fastlayers.quant.coded_rows.CodedRows`, or ``None``. Asked by a trusted layer's seam and moves, and on
        one rank by its norms, where ``codes.may(hook)`` says that it can be other than ``None``.

    Attributes
    ----------
    place : str
        Where the MLP's rows lie: ``"full"`` or ``"scattered"``.
    table, spread_table : dict[tuple[str, Layout], Layout]
        ``(hook, layout given) -> layout returned``, of steps whose residual is whole, and of those where it is spread.
    rank_ops : type[RankOps]
        Class attribute: the moves between places. A subclass may bring its own (fused, or broken for a test).

    Raises
    ------
    LayoutError
        At construction: ``previous`` returns what this layer cannot take. In a hook: the layout is not in the table.
    ArgumentError
        In a hook: the rows do not fit ``step``, or ``step`` is missing with several attention groups.

    Notes
    -----
    A hook consumes its argument: the tensor of a pending :class:`Hidden` may be overwritten by its sum. Outputs are
    capture-safe where the backend's collectives are. Ranks without rows enter every collective.

    Examples
    --------
    A decoder layer; ``attention`` and ``mlp`` return partial sums when their weights are split:

    >>> import torch, fastlayers as fl
    >>> class DecoderLayer(torch.nn.Module):
    ...     def __init__(self, size, parallel):
    ...         super().__init__()
    ...         self.input_layernorm, self.post_attention_layernorm = fl.RMSNorm(size), fl.RMSNorm(size)
    ...         self.attention, self.mlp = torch.nn.Identity(), torch.nn.Identity()
    ...         self.comm = fl.LayerCommunicator(
    ...             parallel,
    ...             input_layernorm=self.input_layernorm,
    ...             post_attention_layernorm=self.post_attention_layernorm,
    ...             is_last=True,
    ...         )
    ...     def forward(self, hidden, step=None):
    ...         hidden = self.comm.prepare_attn(hidden, step)
    ...         hidden = self.comm.prepare_mlp(hidden.partial(self.attention(hidden.tensor), "attn_tp"), step)
    ...         return self.comm.postprocess(hidden.partial(self.mlp(hidden.tensor), "tp"), step)
    >>> layer = DecoderLayer(2, fl.ParallelSpec())
    >>> hidden = layer(fl.Hidden.start(torch.tensor([[1.0, 1.0]])))
    >>> str(hidden.layout)
    'attn_full, sum over tp due, residual attn_full'
    >>> layer.comm.finish(hidden, norm=None).round().tolist()
    [[3.0, 3.0]]
    """

    rank_ops: type[RankOps] = RankOps

    def __init__(
        self,
        parallel: ParallelSpec,
        *,
        input_layernorm: Norm,
        post_attention_layernorm: Norm,
        mlp_kind: str = "dense",
        all_to_all: bool = False,
        dense_tp: int | None = None,
        is_last: bool = False,
        previous: LayerCommunicator | None = None,
        seam: Seam | None = None,
        moves: Moves | None = None,
        codes: Codes | None = None,
    ) -> None:
        check_kind("LayerCommunicator", ParallelSpec, parallel=parallel)
        check_kind("LayerCommunicator", Seam | None, seam=seam)
        check_kind("LayerCommunicator", Moves | None, moves=moves)
        if not (codes is None or callable(codes)):
            accepted = "a function of a hook and its rows that returns a layout of scales or None, or None"
            raise ArgumentError("LayerCommunicator", "codes", describe(codes), accepted)
        _check_norm("input_layernorm", input_layernorm)
        _check_norm("post_attention_layernorm", post_attention_layernorm)
        check_plain("LayerCommunicator", "bool", is_last=is_last)
        check_kind("LayerCommunicator", LayerCommunicator | None, previous=previous)
        self.place = mlp_place(mlp_kind, all_to_all=all_to_all, dense_tp=dense_tp)
        self.input_layernorm, self.post_attention_layernorm = input_layernorm, post_attention_layernorm
        self.is_last = is_last
        self.ops = self.rank_ops(parallel)
        if seam is not None:
            self.ops.seam = seam
        if moves is not None:
            self.ops.moves = moves
        # Whether the rows of each step are the caller's business, who vouches for them (a model of whole layers).
        self.trusted = False
        self._codes = codes
        self._fill()
        if previous is not None:
            for spread in (False, True):
                for layout in previous.outputs_of(spread=spread):
                    self._find("prepare_attn", layout, spread)

    def _fill(self) -> None:
        """Make the tables of transitions."""
        norms = self.input_layernorm, self.post_attention_layernorm
        codes = self._as_codes if self._codes is not None else None
        self._tables = tables = Tables(self.ops, norms, self.place, self.is_last, codes)
        self._transitions = {(row.hook, row.given): row for row in tables.whole()}
        self._spread = {(row.hook, row.given): row for row in tables.spread()}
        self.table = {key: row.to for key, row in self._transitions.items()}
        self.spread_table = {key: row.to for key, row in self._spread.items()}
        self._norms = norms if self.ops.alone and self.place == "full" else None
        # Who reads what they return is looked at when a step asks: the layer may not be whole yet.
        self._coding: tuple[Norm, Norm] | None = None
        # The same by plain strings: nothing of ours is hashed in a step.
        self._hooks, self._spread_hooks = _by_strings(self._transitions), _by_strings(self._spread)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fill()

    def _as_codes(self, hook: str, rows: int) -> str | None:
        """Return the layout in which rows may be codes.

        ``None`` where inputs are checked, gradients are recorded, or a compiler looks on, which knows tensors only.
        """
        plain = not self.trusted or torch.is_grad_enabled() or torch.compiler.is_compiling()
        return None if plain or self._codes is None else self._codes(hook, rows)

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """The layouts that :meth:`postprocess` can return."""
        return self.outputs_of()

    def outputs_of(self, *, spread: bool = False) -> tuple[Layout, ...]:
        """Return the layouts that :meth:`postprocess` can return in steps that are spread, or not."""
        table = self.spread_table if spread else self.table
        return tuple(dict.fromkeys(to for (hook, _), to in table.items() if hook == "postprocess"))

    def report(self) -> list[str]:
        """Return both tables in words, a line for each transition; ``fl.explain`` shows them. Of one rank: nothing."""
        if self.ops.alone:
            return []
        lines = [f"{row.hook}: {row.given} -> {row.to}: {row.how}" for row in self._transitions.values()]
        return lines + [f"spread, {row.hook}: {row.given} -> {row.to}: {row.how}" for row in self._spread.values()]

    def bare_norms(self, hidden: Hidden, *, coded: bool = False) -> tuple[Norm, Norm] | None:
        """Return what the hooks of a layer with this input are on one rank: two norms; ``None``: call the hooks.

        With ``coded`` what they return may be :class:`~fastlayers.quant.coded_rows.CodedRows`, which only a step that
        somebody vouched for reads.
        """
        norms = self._norms
        if coded and norms is not None:
            norms = self._coding or self._see_readers(norms)
        if norms is None or not self.trusted or type(hidden) is not Hidden or hidden.tensor.shape[0] == 0:
            return None
        given = hidden.layout
        return norms if given.place == "attn_full" and given.residual != "scattered" else None

    def _see_readers(self, norms: tuple[Norm, Norm]) -> tuple[Norm, Norm]:
        """Have a norm of one rank ask, each step, whether its rows may be codes, where that can be."""
        codes: Any = self._codes
        first, second = (
            CodingNorm(norm, partial(self._as_codes, hook))
            if hasattr(norm, "coded") and hasattr(codes, "may") and codes.may(hook)
            else norm
            for hook, norm in zip(HOOKS, norms, strict=True)
        )
        self._coding = first, second
        return self._coding

    def prepare_attn(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the attention's input, ``attn_full``: any pending sum done, residual added, normalised."""
        return self.run("prepare_attn", hidden, step)

    def prepare_mlp(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the MLP's input, in place ``self.place``, from the attention's output."""
        return self.run("prepare_mlp", hidden, step)

    def postprocess(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the layer's output, from the MLP's output."""
        return self.run("postprocess", hidden, step)

    def finish(self, hidden: Hidden, norm: Norm | None, step: StepTokens | None = None) -> torch.Tensor:
        """Return the last layer's output ``[T, D]`` of the own group: sum done, residual added, ``norm`` applied.

        With ``norm=None`` the sum of hidden state and residual is returned un-normalised.
        """
        layout = hidden.layout if isinstance(hidden, Hidden) else _no_hidden("finish", hidden)
        _check_step("finish", step)
        if step is not None and step.spread and not self.ops.alone:
            return self._finish_spread(hidden, norm, step)
        pending_fits = layout.pending is None or not self.ops.many_groups
        if layout.place != "attn_full" or layout.residual != "attn_full" or not pending_fits:
            raise LayoutError(f"finish: {layout}; accepted: attn_full, residual attn_full, as of the last postprocess")
        self._check_rows("finish", hidden, step)
        assert hidden.residual is not None
        fused = self._tables.fused(norm) if norm is not None and layout.pending is not None else None
        if fused is not None:
            return fused[0](hidden, step)[0]
        x = self.ops.reduce_(hidden.tensor, layout.pending)
        return x + hidden.residual if norm is None else normed(norm, x, hidden.residual)[0]

    def _finish_spread(self, hidden: Hidden, norm: Norm | None, step: StepTokens) -> torch.Tensor:
        """Return what :meth:`finish` does, of rows whose residual is scattered."""
        layout = hidden.layout
        if layout not in self.outputs_of(spread=True):
            accepted = "; ".join(map(str, self.outputs_of(spread=True)))
            raise LayoutError(f"finish: {layout}; accepted: {accepted}, as of the last postprocess")
        self._check_rows("finish", hidden, step)
        assert hidden.residual is not None
        x = hidden.tensor if layout.place == "scattered" else self.ops.own_rows(hidden)
        y = x + hidden.residual if norm is None else normed(norm, x, hidden.residual)[0]
        return self.ops.attn_tp.all_gather(y)

    def run(self, hook: str, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return what the hook of that name does."""
        given = hidden.layout if isinstance(hidden, Hidden) else _no_hidden(hook, hidden)
        try:
            spread = step is not None and step.spread
        except AttributeError:
            _check_step(hook, step)
            raise
        hooks = self._spread_hooks if spread else self._hooks
        found = hooks.get((hook, given.place, given.pending, given.residual)) or self._find(hook, given, spread)
        if not self.trusted and (step is not None or self.ops.many_groups):
            self._check_rows(hook, hidden, step)
        tensor, residual = found.move(hidden, step)
        return Hidden(tensor, residual, found.to)

    def _find(self, hook: str, layout: Layout, spread: bool) -> Transition:
        table = self._spread if spread else self._transitions
        found = table.get((hook, layout))
        if found is None:
            known = "; ".join(str(given) for name, given in table if name == hook)
            raise LayoutError(f"{hook}: no transition from ({layout}); accepted: {known}")
        return found

    def _check_rows(self, hook: str, hidden: Hidden, step: StepTokens | None) -> None:
        ops = self.ops
        if step is None:
            if ops.many_groups:
                raise ArgumentError(hook, "step", None, f"StepTokens of {ops.attn_dp.size} attention groups")
            return
        # One group whose rows are never scattered needs no count that its ranks divide.
        whole = not ops.many_groups and self.place == "full" and not step.spread
        even = step.attn_tp == ops.attn_tp.size or (step.attn_tp == 1 and whole)
        if len(step.rows) != ops.attn_dp.size or not even:
            accepted = f"StepTokens of {ops.attn_dp.size} groups of {ops.attn_tp.size} ranks"
            raise ArgumentError(hook, "step", step, accepted)
        mine = step.rows[ops.attn_dp.rank]
        rows = {"full": step.full_rows, "attn_full": mine, "scattered": mine // step.attn_tp}[hidden.layout.place]
        if hidden.tensor.shape[0] != rows:
            accepted = f"{rows} rows ({hidden.layout.place}) by {step}"
            raise ArgumentError(hook, "hidden.tensor", f"{hidden.tensor.shape[0]} rows", accepted)
