"""LayerCommunicator: the one place that decides which collective runs between two layers.

    d = attention groups (attn_dp), n = ranks of one group (attn_tp), world = tp = d * n
    places as drawn in layouts.py; "Σ axis" = a sum over that axis is pending

    hook           from                       what happens                                              to
    prepare_attn   attn_full [Σ]              [all-reduce,] add residual (layer 0: none), norm          attn_full
                   scattered                  add residual, norm (own rows), all-gather over attn_tp    attn_full
    prepare_mlp    attn_full Σ attn_tp, d=1   all-reduce, add residual, norm                            full
      (full MLP)   attn_full [Σ of 1], d>1    add residual, norm (own rows), gather                     full
                   attn_full Σ attn_tp, n>1   rank 0 of each group adds the residual to its partial     full
                                              sum, gather-partial, norm (all rows); residual: own slice
    prepare_mlp    attn_full Σ attn_tp        reduce-scatter over attn_tp, add residual, norm           scattered
      (scattered)  attn_full                  own slice, add residual, norm                             scattered
    postprocess    full Σ tp, d=1             nothing: the sum stays due until the next norm            attn_full Σ
                   full Σ tp, d>1             reduce-scatter [, all-gather in the group] (max_len);     attn_full
                                              one of the two forms of postprocess_sum (sum_len)
                   full                       own slice of the group                                    attn_full
                   scattered, last layer      all-gather over attn_tp                                   attn_full
                   scattered                  nothing                                                   scattered

The MLP never reduces on its own: it says ``hidden.partial(out, "tp")``, and exactly one of the rows above is taken.
An MLP whose output is whole already says ``hidden.complete(out)``, and then nothing is summed.

Source: SGLang's layer communicator and DP attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from fastlayers.comm.collectives import collectives
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.padding import StepTokens
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.comm.seam import Moves, Seam
from fastlayers.device import Device
from fastlayers.errors import ArgumentError, LayoutError, check_choice, check_kind, check_plain, describe
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
Norm = Callable[..., Any]
Transition = Callable[[Hidden, "StepTokens | None"], tuple[torch.Tensor, "torch.Tensor | None"]]


def mlp_place(mlp_kind: str, *, all_to_all: bool = False, dense_tp: int | None = None) -> str:
    """Return the place of an MLP's rows: ``"scattered"`` or ``"full"``.

    A sparse MLP (``"moe"``) is scattered if its experts exchange tokens by all-to-all; a dense one if its weights
    are replicated (``dense_tp=1``); all others see the rows of the whole world.
    """
    check_choice("LayerCommunicator", "mlp_kind", mlp_kind, ("dense", "moe"))
    check_plain("LayerCommunicator", "bool", all_to_all=all_to_all)
    check_plain("LayerCommunicator", "int > 0 | None", dense_tp=dense_tp)
    return "scattered" if (all_to_all if mlp_kind == "moe" else dense_tp == 1) else "full"


class RankOps:
    """The collectives of one rank along the axes the communicator uses, and the moves built from them."""

    # What sums over ranks in fewer launches, where there is one.
    seam: Seam | None = None
    # What gathers and scatters rows between groups of one rank each, where there is something quicker.
    moves: Moves | None = None

    def __init__(self, parallel: ParallelSpec) -> None:
        self.attn_tp, self.attn_dp, self.tp = map(collectives, (parallel.attn_tp, parallel.attn_dp, parallel.tp))
        self.many_groups = self.attn_dp.size > 1
        self.alone = self.attn_tp.size == self.attn_dp.size == self.tp.size == 1

    def reduce_(self, x: torch.Tensor, axis: str | None) -> torch.Tensor:
        """Return ``x`` with the sum due over ``axis`` (``None``: none) done; may overwrite ``x``."""
        if axis is None:
            return x
        if self.seam is not None:
            return self.seam.all_reduce(x)
        return (self.tp if axis == "tp" else self.attn_tp).all_reduce_(x)

    def gather_replicate(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``attn_full`` → ``full``, values whole on each rank of a group."""
        if step.mode == "max_len":
            return self.attn_dp.all_gather(x) if self.moves is None else self.moves.gather(x)
        mine = x if self.attn_tp.rank == 0 else None
        return self.tp.gather_by_sum(mine, x, step.full_rows, step.offsets[self.attn_dp.rank])

    def gather_partial(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``attn_full`` → ``full``, values being partial sums over the group."""
        if step.mode == "max_len":
            return self.tp.all_gather(self.attn_tp.reduce_scatter(x))
        return self.tp.gather_by_sum(x, x, step.full_rows, step.offsets[self.attn_dp.rank])

    def add_residual_once(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return partial sums whose sum over the group holds ``residual`` once: rank 0 adds it, others do not."""
        return x + residual if self.attn_tp.rank == 0 else x

    def own_group(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``full`` → ``attn_full`` without a sum: a view of the own group's rows."""
        return x[step.group_slice(self.attn_dp.rank)]

    def postprocess_sum(self, x: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """``full`` with a sum over tp due → ``attn_full``: each rank gets its slice of the sum, summed once."""
        if step.mode == "max_len":
            if self.moves is not None:
                return self.moves.scatter(x)
            return self.attn_tp.all_gather(self.tp.reduce_scatter(x))
        if self.attn_tp.size == 1:
            return self.tp.reduce_scatter_variable(x, step.rows)
        return self.own_group(self.tp.all_reduce_(x), step)


def _fused(seam: Seam | None, norm: Norm) -> Transition | None:
    """Return the transition that sums over ranks, adds the residual and norms in one operator, if there is one."""
    made = seam.sum_norm(norm) if seam is not None else None
    if made is None:
        return None
    layer, module = made, norm

    def summed(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor] = layer(hidden.tensor, hidden.residual, module.weight)  # type: ignore[attr-defined]
        return found

    return summed


def _only(norm: Norm) -> Transition:
    """Return the transition of one rank by itself: the residual added and normed, nothing to reduce or gather."""
    return lambda hidden, step: _norm(norm, hidden.tensor, hidden.residual)


def _no_hidden(hook: str, given: object) -> NoReturn:
    # Every tensor has a ``layout``, of another kind.
    accepted = "a Hidden, as Hidden.start(tensor) makes for the first layer"
    raise ArgumentError(f"LayerCommunicator.{hook}", "hidden", describe(given), accepted)


def _norm(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised, new residual); ranks without rows launch nothing."""
    if x.shape[0] == 0:
        return x, x if residual is None else residual
    return (norm(x), x) if residual is None else norm(x, residual)


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

    The table at the head of this file is built at construction for this layer, this rank grid and these options;
    a layout that is not in it raises :class:`LayoutError`. At world size 1 the hooks are two norm calls.

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
        Of the same spec: gathers and scatters of equal numbers of rows between groups of one rank.

    Attributes
    ----------
    place : str
        Where the MLP's rows lie: ``"full"`` or ``"scattered"``.
    table : dict[tuple[str, Layout], Layout]
        ``(hook, layout given) -> layout returned``.
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
    ) -> None:
        check_kind("LayerCommunicator", ParallelSpec, parallel=parallel)
        check_kind("LayerCommunicator", Seam | None, seam=seam)
        check_kind("LayerCommunicator", Moves | None, moves=moves)
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
        self._fill()
        if previous is not None:
            for layout in previous.outputs:
                self._find("prepare_attn", layout)

    def _fill(self) -> None:
        """Make the table of transitions."""
        self._transitions: dict[tuple[str, Layout], tuple[Transition, Layout]] = {}
        self._add_prepare_attn()
        if self.place == "full":
            self._add_prepare_mlp_full()
        else:
            self._add_prepare_mlp_scattered()
        self._add_postprocess()
        self.table = {key: to for key, (_, to) in self._transitions.items()}
        # The same by plain strings: nothing of ours is hashed in a step.
        self._hooks = {
            (hook, given.place, given.pending, given.residual): found
            for (hook, given), found in self._transitions.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        # Transitions are functions of this object's own norms and collectives: a copy makes its own.
        return {name: value for name, value in self.__dict__.items() if name not in ("_transitions", "_hooks", "table")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fill()

    @property
    def outputs(self) -> tuple[Layout, ...]:
        """The layouts that :meth:`postprocess` can return."""
        return tuple(dict.fromkeys(to for (hook, _), to in self.table.items() if hook == "postprocess"))

    def prepare_attn(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the attention's input, ``attn_full``: any pending sum done, residual added, normalised."""
        return self._run("prepare_attn", hidden, step)

    def prepare_mlp(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the MLP's input, in place ``self.place``, from the attention's output."""
        return self._run("prepare_mlp", hidden, step)

    def postprocess(self, hidden: Hidden, step: StepTokens | None = None) -> Hidden:
        """Return the layer's output, from the MLP's output."""
        return self._run("postprocess", hidden, step)

    def finish(self, hidden: Hidden, norm: Norm | None, step: StepTokens | None = None) -> torch.Tensor:
        """Return the last layer's output ``[T, D]`` of the own group: sum done, residual added, ``norm`` applied.

        With ``norm=None`` the sum of hidden state and residual is returned un-normalised.
        """
        layout = hidden.layout if isinstance(hidden, Hidden) else _no_hidden("finish", hidden)
        pending_fits = layout.pending is None or not self.ops.many_groups
        if layout.place != "attn_full" or layout.residual != "attn_full" or not pending_fits:
            raise LayoutError(f"finish: {layout}; accepted: attn_full, residual attn_full, as of the last postprocess")
        self._check_rows("finish", hidden, step)
        assert hidden.residual is not None
        fused = _fused(self.ops.seam, norm) if norm is not None and layout.pending is not None else None
        if fused is not None:
            return fused(hidden, step)[0]
        x = self.ops.reduce_(hidden.tensor, layout.pending)
        return x + hidden.residual if norm is None else _norm(norm, x, hidden.residual)[0]

    def _run(self, hook: str, hidden: Hidden, step: StepTokens | None) -> Hidden:
        given = hidden.layout if isinstance(hidden, Hidden) else _no_hidden(hook, hidden)
        transition, to = self._hooks.get((hook, given.place, given.pending, given.residual)) or self._find(hook, given)
        if not self.trusted and (step is not None or self.ops.many_groups):
            self._check_rows(hook, hidden, step)
        tensor, residual = transition(hidden, step)
        return Hidden(tensor, residual, to)

    def _find(self, hook: str, layout: Layout) -> tuple[Transition, Layout]:
        found = self._transitions.get((hook, layout))
        if found is None:
            known = "; ".join(str(given) for name, given in self._transitions if name == hook)
            raise LayoutError(f"{hook}: no transition from ({layout}); accepted: {known}")
        return found

    def _check_rows(self, hook: str, hidden: Hidden, step: StepTokens | None) -> None:
        ops = self.ops
        if step is None:
            if ops.many_groups:
                raise ArgumentError(hook, "step", None, f"StepTokens of {ops.attn_dp.size} attention groups")
            return
        # One group whose rows are never scattered needs no count that its ranks divide.
        even = step.attn_tp == ops.attn_tp.size or (step.attn_tp == 1 and not ops.many_groups and self.place == "full")
        if len(step.rows) != ops.attn_dp.size or not even:
            accepted = f"StepTokens of {ops.attn_dp.size} groups of {ops.attn_tp.size} ranks"
            raise ArgumentError(hook, "step", step, accepted)
        mine = step.rows[ops.attn_dp.rank]
        rows = {"full": step.full_rows, "attn_full": mine, "scattered": mine // step.attn_tp}[hidden.layout.place]
        if hidden.tensor.shape[0] != rows:
            accepted = f"{rows} rows ({hidden.layout.place}) by {step}"
            raise ArgumentError(hook, "hidden.tensor", f"{hidden.tensor.shape[0]} rows", accepted)

    # The rows of the table. Each function gets what the layout promises, and returns (tensor, residual).

    def _add(self, hook: str, given: Layout, to: Layout, transition: Transition) -> None:
        self._transitions[hook, given] = (transition, to)

    def _add_prepare_attn(self) -> None:
        ops, norm = self.ops, self.input_layernorm
        # Several groups never leave a sum over tp due: their rows differ.
        sums = (None, "attn_tp") if ops.many_groups else (None, "attn_tp", "tp")

        def whole(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            return _norm(norm, ops.reduce_(hidden.tensor, hidden.layout.pending), hidden.residual)

        def scattered(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            y, residual = _norm(norm, hidden.tensor, hidden.residual)
            return ops.attn_tp.all_gather(y), residual

        to, fused = Layout("attn_full", None, "attn_full"), _fused(ops.seam, norm)
        for residual in (None, "attn_full"):
            for pending in sums:
                how = _only(norm) if ops.alone else fused if fused is not None and pending is not None else whole
                self._add("prepare_attn", Layout("attn_full", pending, residual), to, how)
        given = Layout("scattered", None, "scattered")
        self._add("prepare_attn", given, Layout("attn_full", None, "scattered"), scattered)

    def _add_prepare_mlp_full(self) -> None:
        ops, norm = self.ops, self.post_attention_layernorm

        def residual_of(hidden: Hidden) -> torch.Tensor:
            assert hidden.residual is not None
            scattered = hidden.layout.residual == "scattered"
            return ops.attn_tp.all_gather(hidden.residual) if scattered else hidden.residual

        def one_group(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            return _norm(norm, ops.reduce_(hidden.tensor, hidden.layout.pending), residual_of(hidden))

        def norm_first(hidden: Hidden, step: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            assert step is not None
            y, residual = _norm(norm, hidden.tensor, residual_of(hidden))
            return ops.gather_replicate(y, step), residual

        def gather_first(hidden: Hidden, step: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            assert step is not None
            full = ops.gather_partial(ops.add_residual_once(hidden.tensor, residual_of(hidden)), step)
            return _norm(norm, full, None)[0], ops.own_group(full, step)

        to, fused = Layout("full", None, "attn_full"), _fused(ops.seam, norm)
        for place in ("attn_full", "scattered"):
            for pending in (None, "attn_tp"):
                given = Layout("attn_full", pending, place)
                if fused is not None and pending is not None and place == "attn_full":
                    self._add("prepare_mlp", given, to, fused)
                elif not ops.many_groups:
                    self._add("prepare_mlp", given, to, _only(norm) if ops.alone else one_group)
                elif pending and ops.attn_tp.size > 1:
                    self._add("prepare_mlp", given, to, gather_first)
                else:
                    self._add("prepare_mlp", given, to, norm_first)

    def _add_prepare_mlp_scattered(self) -> None:
        ops, norm = self.ops, self.post_attention_layernorm

        def scatter(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            layout = hidden.layout
            assert hidden.residual is not None
            x = ops.attn_tp.reduce_scatter(hidden.tensor) if layout.pending else ops.attn_tp.own_slice(hidden.tensor)
            whole = layout.residual == "attn_full"
            return _norm(norm, x, ops.attn_tp.own_slice(hidden.residual) if whole else hidden.residual)

        for residual in ("attn_full", "scattered"):
            for pending in (None, "attn_tp"):
                given = Layout("attn_full", pending, residual)
                self._add("prepare_mlp", given, Layout("scattered", None, "scattered"), scatter)

    def _add_postprocess(self) -> None:
        ops = self.ops

        def keep(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            return hidden.tensor, hidden.residual

        def gather(hidden: Hidden, _: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            assert hidden.residual is not None
            return ops.attn_tp.all_gather(hidden.tensor), ops.attn_tp.all_gather(hidden.residual)

        def summed(hidden: Hidden, step: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            assert step is not None
            return ops.postprocess_sum(hidden.tensor, step), hidden.residual

        def sliced(hidden: Hidden, step: StepTokens | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            assert step is not None
            return ops.own_group(hidden.tensor, step), hidden.residual

        done = Layout("attn_full", None, "attn_full")
        if self.place == "scattered":
            given = Layout("scattered", None, "scattered")
            self._add("postprocess", given, done if self.is_last else given, gather if self.is_last else keep)
            return
        whole, due = Layout("full", None, "attn_full"), Layout("full", "tp", "attn_full")
        if ops.many_groups:
            self._add("postprocess", whole, done, sliced)
            self._add("postprocess", due, done, summed)
        else:
            self._add("postprocess", whole, done, keep)
            self._add("postprocess", due, Layout("attn_full", "tp", "attn_full"), keep)
