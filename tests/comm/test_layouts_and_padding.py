"""Layouts, the mode tables and the token bookkeeping, by hand; no ranks needed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import fastlayers as fl
from fastlayers.comm.collectives import collectives
from fastlayers.comm.communicator import LayerCommunicator, mlp_place
from fastlayers.comm.layouts import Hidden, Layout
from fastlayers.comm.padding import StepTokens, padding_mode
from fastlayers.comm.parallel import ParallelSpec
from fastlayers.errors import ArgumentError, LayoutError

# ---- Layout and Hidden ---------------------------------------------------------------------------------------


def test_layout_round_trips_and_checks_its_fields() -> None:
    layout = Layout("attn_full", "attn_tp", "scattered")
    assert eval(repr(layout)) == layout and hash(layout) == hash(copy.copy(layout))
    for bad in ({"place": "half"}, {"place": "full", "pending": "ep"}, {"place": "full", "residual": "full"}):
        with pytest.raises(ArgumentError, match="Layout"):
            Layout(**bad)


@pytest.mark.parametrize("with_residual", [False, True])
def test_hidden_is_a_pytree(with_residual: bool) -> None:
    residual = torch.ones(2, 3) if with_residual else None
    layout = Layout("attn_full", "tp", "attn_full" if with_residual else None)
    hidden = Hidden(torch.zeros(2, 3), residual, layout)
    leaves, tree = pytree.tree_flatten(hidden)
    assert len(leaves) == 1 + with_residual and leaves[0] is hidden.tensor
    again = pytree.tree_unflatten(leaves, tree)
    assert again.layout == layout and again.tensor is hidden.tensor and again.residual is residual
    other = Hidden(hidden.tensor, residual, Layout("full", None, layout.residual))
    assert pytree.tree_structure(other) != tree, "the layout must be part of the structure"
    shapes = pytree.tree_map(lambda t: t.shape, hidden)
    assert shapes.tensor == (2, 3)
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(hidden)[0]]
    assert names == [".tensor", ".residual"][: 1 + with_residual]
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_partial_and_complete_keep_place_and_residual() -> None:
    start = Hidden(torch.zeros(2, 3), torch.ones(2, 3), Layout("full", None, "attn_full"))
    due = start.partial(torch.ones(2, 3), "tp")
    assert due.layout == Layout("full", "tp", "attn_full") and due.residual is start.residual
    assert due.complete(due.tensor).layout == start.layout and start.tensor.sum() == 0


# ---- padding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "extend", "graph", "mode"),
    [
        ([5], True, False, "max_len"),  # one group: nothing to gather
        ([5, 5], True, False, "sum_len"),
        ([5, 5], True, True, "max_len"),
        ([5, 5], False, False, "max_len"),
        ([4, 0], False, False, "max_len"),  # 8 >= 8
        ([8, 0, 0, 0], False, False, "sum_len"),  # 16 < 32
        ([8, 8, 0, 0], False, False, "max_len"),  # 32 >= 32
        ([8, 7, 0, 0], False, False, "sum_len"),  # 30 < 32
        ([8, 0, 0, 0], False, True, "max_len"),
        ([0, 0, 0, 0], False, False, "max_len"),
    ],
)
def test_padding_mode_table(lengths: list[int], extend: bool, graph: bool, mode: str) -> None:
    assert padding_mode(lengths, extend=extend, graph=graph) == mode


def test_lengths_are_rounded_before_the_mode_is_decided() -> None:
    # As they are: 2 * (8 + 7) < 8 * 4. Rounded to twos: 2 * (8 + 8) >= 8 * 4.
    assert StepTokens.plan([8, 7, 0, 0], attn_tp=2, extend=False).mode == "max_len"
    assert StepTokens.plan([8, 7, 0, 0], attn_tp=1, extend=False).mode == "sum_len"


def test_rows_of_both_modes() -> None:
    decode = StepTokens.plan([3, 0], attn_tp=2, extend=False)
    assert (decode.mode, decode.rows, decode.offsets, decode.full_rows) == ("max_len", (4, 4), (0, 4), 8)
    prefill = StepTokens.plan([3, 0, 5], attn_tp=2, extend=True)
    assert (prefill.mode, prefill.rows, prefill.offsets, prefill.full_rows) == ("sum_len", (4, 0, 6), (0, 4, 4), 10)
    assert prefill.group_slice(2) == slice(4, 10) and prefill.group_slice(1) == slice(4, 4)
    graph = StepTokens.plan([3, 0], attn_tp=2, extend=False, graph=True, bucket=8)
    assert graph.rows == (8, 8) and graph.real == (3, 0)


def test_local_count_of_real_tokens_by_hand() -> None:
    step = StepTokens(real=(5,), rows=(8,), attn_tp=4)
    assert [step.num_token_non_padded(0, rank) for rank in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("attn_tp", [1, 2, 4])
def test_local_counts_sum_to_the_real_count_and_match_a_mask(attn_tp: int) -> None:
    for real in range(13):
        step = StepTokens.plan([real, 3], attn_tp=attn_tp, extend=False, graph=True, bucket=12)
        flags = step.valid_rows()[step.group_slice(0)].view(attn_tp, -1)
        counts = [step.num_token_non_padded(0, rank) for rank in range(attn_tp)]
        assert counts == flags.sum(1).tolist() and sum(counts) == real


def test_valid_rows_is_refreshed_in_place() -> None:
    out = torch.ones(8, dtype=torch.bool)
    given = StepTokens.plan([3, 1], attn_tp=2, extend=False).valid_rows(out)
    assert given is out and out.tolist() == [True, True, True, False, True, False, False, False]


@pytest.mark.parametrize(
    "arguments",
    [
        {"real": (), "rows": ()},
        {"real": (3,), "rows": (2,)},
        {"real": (1, 1), "rows": (1,)},
        {"real": (1, 3), "rows": (2, 4)},  # unequal in max_len
        {"real": (3,), "rows": (3,), "attn_tp": 2},
        {"real": (3,), "rows": (3,), "mode": "min_len"},
    ],
)
def test_inconsistent_steps_raise(arguments: dict) -> None:
    with pytest.raises(ArgumentError, match="StepTokens"):
        StepTokens(**arguments)


def test_plan_rejects_bad_counts_and_buckets() -> None:
    with pytest.raises(ArgumentError, match="real"):
        StepTokens.plan([2, -1], extend=False)
    with pytest.raises(ArgumentError, match=r"real is \[1.7\]; accepted: counts"):
        StepTokens.plan([1.7], extend=False)  # type: ignore[list-item]
    for graph, bucket in ((False, 8), (True, 2), (True, 9)):
        with pytest.raises(ArgumentError, match="bucket"):
            StepTokens.plan([3, 4], attn_tp=2, extend=False, graph=graph, bucket=bucket)


# ---- the communicator's tables -------------------------------------------------------------------------------


def communicator(spec: ParallelSpec | None = None, **options: object) -> LayerCommunicator:
    norms = (fl.RMSNorm(4, backend="torch"), fl.RMSNorm(4, backend="torch"))
    given = {"input_layernorm": norms[0], "post_attention_layernorm": norms[1], **options}
    return LayerCommunicator(spec or ParallelSpec(), **given)


def test_place_of_every_kind_of_mlp() -> None:
    assert mlp_place("dense") == mlp_place("dense", dense_tp=4) == mlp_place("dense", all_to_all=True) == "full"
    assert mlp_place("moe") == mlp_place("moe", dense_tp=1) == "full"
    assert mlp_place("dense", dense_tp=1) == mlp_place("moe", all_to_all=True) == "scattered"
    with pytest.raises(ArgumentError, match="mlp_kind"):
        mlp_place("sparse")


FULL_OUT, DUE = Layout("attn_full", None, "attn_full"), Layout("attn_full", "tp", "attn_full")
SCATTERED = Layout("scattered", None, "scattered")


@pytest.mark.parametrize(
    ("grid", "options", "outputs"),
    [
        ((1, 1), {}, {FULL_OUT, DUE}),
        ((4, 1), {}, {FULL_OUT, DUE}),
        ((4, 2), {}, {FULL_OUT}),
        ((4, 4), {"mlp_kind": "moe"}, {FULL_OUT}),
        ((4, 2), {"dense_tp": 1}, {SCATTERED}),
        ((4, 2), {"dense_tp": 1, "is_last": True}, {FULL_OUT}),
        ((4, 1), {"mlp_kind": "moe", "all_to_all": True}, {SCATTERED}),
    ],
)
def test_output_layouts(grid: tuple[int, int], options: dict, outputs: set[Layout]) -> None:
    comm = communicator(ParallelSpec.grid(grid[0], 0, attn_dp=grid[1]), **options)
    assert set(comm.outputs) == outputs
    for kind in ({}, {"dense_tp": 1}, {"mlp_kind": "moe"}):  # whatever follows takes it
        following = communicator(ParallelSpec.grid(grid[0], 0, attn_dp=grid[1]), previous=comm, **kind)
        assert all(("prepare_attn", layout) in following.table for layout in outputs)


def test_a_layer_that_cannot_follow_is_rejected_at_construction() -> None:
    with pytest.raises(LayoutError, match=r"prepare_attn: no transition from \(attn_full, sum over tp due"):
        communicator(ParallelSpec.grid(4, 0, attn_dp=2), previous=communicator(ParallelSpec.grid(4, 0)))


def test_layouts_without_a_transition_raise() -> None:
    comm, x = communicator(), torch.ones(2, 4)
    with pytest.raises(LayoutError, match="prepare_mlp: no transition"):
        comm.prepare_mlp(Hidden(x, None, Layout("attn_full")))  # nothing holds the residual
    with pytest.raises(LayoutError, match=r"postprocess: no transition.*accepted: full, residual attn_full"):
        comm.postprocess(Hidden(x, x, Layout("attn_full", "tp", "attn_full")))
    with pytest.raises(LayoutError, match="postprocess"):
        comm.postprocess(Hidden(x, x, Layout("full", "attn_tp", "attn_full")))
    with pytest.raises(LayoutError, match="prepare_attn"):
        comm.prepare_attn(Hidden(x, x, Layout("full", None, "attn_full")))
    with pytest.raises(LayoutError, match="finish"):
        comm.finish(Hidden(x, x, SCATTERED), None)
    scattered = communicator(dense_tp=1)
    with pytest.raises(LayoutError, match="postprocess"):  # replicated weights leave no sum due
        scattered.postprocess(Hidden(x, x, Layout("scattered", "tp", "scattered")))


def test_steps_that_do_not_fit_raise() -> None:
    comm, x = communicator(ParallelSpec.grid(4, 0, attn_dp=2)), torch.ones(2, 4)
    hidden = Hidden(x, x, FULL_OUT)
    with pytest.raises(ArgumentError, match="step is None; accepted: StepTokens of 2 attention groups"):
        comm.prepare_attn(hidden)
    with pytest.raises(ArgumentError, match="2 groups of 2 ranks"):
        comm.prepare_attn(hidden, StepTokens.plan([2, 2], attn_tp=1, extend=False))
    with pytest.raises(ArgumentError, match="2 rows; accepted: 4 rows"):
        comm.prepare_attn(hidden, StepTokens.plan([3, 2], attn_tp=2, extend=False))


def test_world_of_one_is_two_norm_calls_and_no_group() -> None:
    assert not torch.distributed.is_initialized()
    comm, x = communicator(), torch.randn(3, 4)
    kept = x.clone()
    hidden = comm.prepare_attn(Hidden.start(x))
    assert torch.equal(hidden.tensor, comm.input_layernorm(x)) and hidden.residual is x
    out = torch.randn(3, 4)
    hidden = comm.prepare_mlp(hidden.partial(out, "attn_tp"))
    y, residual = comm.post_attention_layernorm(out, x)
    assert hidden.residual is not None
    assert torch.equal(hidden.tensor, y) and torch.equal(hidden.residual, residual)
    last = comm.postprocess(hidden.partial(hidden.tensor, "tp"))
    assert last.tensor is hidden.tensor and last.residual is hidden.residual
    assert torch.equal(comm.finish(last, comm.input_layernorm), comm.input_layernorm(y, residual)[0])
    assert torch.equal(x, kept)


def test_norms_do_not_run_on_a_rank_without_rows() -> None:
    def norm(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    comm, nothing = communicator(input_layernorm=norm, post_attention_layernorm=norm), torch.empty(0, 4)
    hidden = comm.prepare_mlp(comm.prepare_attn(Hidden.start(nothing)).partial(nothing, "attn_tp"))
    assert hidden.tensor.shape == (0, 4) and hidden.layout.place == "full"


def test_shapes_of_a_rank_can_be_studied_without_groups_but_not_run() -> None:
    ops = collectives(ParallelSpec.grid(4, 1).tp)
    assert ops.own_slice(torch.arange(8)).tolist() == [2, 3]
    with pytest.raises(ArgumentError, match=r"ParallelSpec\.from_mesh"):
        ops.all_reduce_(torch.ones(2))


def test_the_hooks_trace_without_a_graph_break() -> None:
    comm = communicator()

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = comm.prepare_attn(Hidden(x, residual, FULL_OUT))
        hidden = comm.prepare_mlp(hidden.partial(hidden.tensor * 2, "attn_tp"))
        return comm.finish(comm.postprocess(hidden.partial(hidden.tensor * 3, "tp")), None)

    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, residual), block(x, residual), rtol=0, atol=0)


@pytest.mark.parametrize("hook", ["prepare_attn", "prepare_mlp", "postprocess", "finish"])
def test_a_bare_tensor_is_no_hidden(hook: str) -> None:
    norm = fl.RMSNorm(4)
    comm = LayerCommunicator(ParallelSpec(), input_layernorm=norm, post_attention_layernorm=norm)
    words = (
        rf"LayerCommunicator\.{hook}: hidden is float32\[2, 4\] on cpu; accepted: a Hidden, as Hidden\.start\(tensor\)"
    )
    with pytest.raises(ArgumentError, match=words):
        getattr(comm, hook)(torch.zeros(2, 4), *((None,) if hook == "finish" else ()))


@pytest.mark.parametrize("hook", ["prepare_attn", "prepare_mlp", "postprocess", "finish"])
def test_a_count_is_no_step(hook: str) -> None:
    norm = fl.RMSNorm(4)
    comm = LayerCommunicator(ParallelSpec(), input_layernorm=norm, post_attention_layernorm=norm)
    hidden = Hidden(torch.zeros(2, 4), torch.zeros(2, 4), Layout("attn_full", None, "attn_full"))
    with pytest.raises(
        ArgumentError, match=rf"LayerCommunicator\.{hook}: step is 2; accepted: a StepTokens of .* None"
    ):
        getattr(comm, hook)(hidden, *((None, 2) if hook == "finish" else (2,)))


def test_a_hidden_state_begins_with_a_tensor_and_names_its_axes() -> None:
    for wrong in (None, [[1.0]]):
        with pytest.raises(ArgumentError, match=r"Hidden\.start: embedded is .*; accepted: a Tensor of torch"):
            Hidden.start(wrong)  # type: ignore[arg-type]
    hidden = Hidden.start(torch.zeros(2, 4))
    for axis in ("ep", ["tp"]):
        with pytest.raises(ArgumentError, match=r"Hidden\.partial: axis is .*; accepted: one of 'attn_tp', 'tp'"):
            hidden.partial(hidden.tensor, axis)  # type: ignore[arg-type]
