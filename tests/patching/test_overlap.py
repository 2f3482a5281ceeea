"""Steps that are launched before Hugging Face's loop asks for them: the same tokens, whatever it asks for."""

from __future__ import annotations

import copy
import pickle
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList, TextStreamer

import fastlayers as fl
from fastlayers.errors import ArgumentError
from fastlayers.patching import capturable, decode, overlap
from fastlayers.patching.overlap import WRONG_GUESSES, Overlap, nothing_foreign

sys.path.insert(0, str(Path(__file__).parent))
from tiny import build, eager_graphs, prompt

NEW = 10
END = 0  # the id of padding, which no prompt has
ASKED: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": END}


@pytest.fixture(autouse=True)
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "check_capturable", lambda roots: None)
    monkeypatch.setattr(decode, "attach", partial(decode.attach, make_graphs=eager_graphs, core="torch"))


@torch.inference_mode()
def generated(model: Any, inputs: dict[str, Any] | None = None, **options: Any) -> Any:
    given = prompt(3, 40, pads=(0, 6, 3)) if inputs is None else inputs
    return model.generate(**given, **(ASKED | options))


def ahead(model: Any) -> Overlap:
    found = decode.driver_of(model)
    assert found is not None
    return found.overlap


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths for which steps are launched from now on."""
    found, launch = list[int](), Overlap.launch

    def noted(self: Overlap, step: Any, length: int, *rest: Any) -> None:
        found.append(length)
        launch(self, step, length, *rest)

    monkeypatch.setattr(Overlap, "launch", noted)
    return found


@pytest.mark.parametrize("name", ["v3", "qwen3_moe", "gpt_oss", "llama"])
def test_tokens_and_logits_equal_those_of_steps_that_wait(name: str, launched: list[int]) -> None:
    model = build(name)
    stock = generated(model)
    fl.patch(model, cuda_graph=True, overlap=False)
    kept = {"return_dict_in_generate": True, "output_logits": True}
    for _ in range(2):  # prompts are replayed from the second on
        waited = generated(model, **kept)
    report = fl.patch(model, cuda_graph=True)
    before = int(decode.driver_of(model).replays)  # type: ignore[union-attr]
    assert not launched and torch.equal(waited.sequences, stock)
    ours = generated(model, **kept)
    assert torch.equal(ours.sequences, stock) and ahead(model).wrong == 0
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, waited.logits, strict=True))
    # The first step is the loop's own, and none is launched that it cannot ask for.
    assert launched == list(range(41, 40 + NEW - 1)) and ahead(model)._launched is None
    assert int(decode.driver_of(model).replays) == before + NEW - 1  # type: ignore[union-attr]
    for layer, other in zip(ours.past_key_values.layers, waited.past_key_values.layers, strict=True):
        assert layer.get_seq_length() == 40 + NEW - 1
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert report is not None


def test_wrong_guesses_are_run_again_and_given_up(launched: list[int]) -> None:
    model = build("qwen3")
    free = generated(model)
    # What greedy search would take may not be taken, so that every guess is wrong.
    banned = [[int(token)] for token in free[:, 41:].unique() if int(token) != END]
    stock = generated(model, bad_words_ids=banned)
    fl.patch(model, cuda_graph=True, overlap=True)
    kept = generated(model)
    assert torch.equal(kept, free) and len(launched) == NEW - 2
    launched.clear()
    ours = generated(model, bad_words_ids=banned)
    assert torch.equal(ours, stock) and not torch.equal(stock, free)
    assert ahead(model).wrong == WRONG_GUESSES <= len(launched) < NEW - 2
    launched.clear()
    assert torch.equal(generated(model), free) and ahead(model).wrong == 0 and len(launched) == NEW - 2


@pytest.mark.parametrize("end_of", [0, 1])
def test_rows_that_have_ended_and_an_answer_that_ends_early(end_of: int, launched: list[int]) -> None:
    model = build("llama")
    free = generated(model)
    inputs = None if end_of else prompt(1, 40)
    row = generated(model, inputs)[0] if not end_of else free[1]
    options = {"min_new_tokens": 0, "eos_token_id": int(row[44])}
    stock = generated(model, inputs, **options)
    fl.patch(model, cuda_graph=True, overlap=True)
    assert torch.equal(generated(model, inputs, **options), stock) and launched
    assert ahead(model)._launched is None, "what was launched behind the end is waited for"
    assert torch.equal(generated(model), free)


def test_what_is_not_guessed(launched: list[int]) -> None:
    model = build("llama")
    fl.patch(model, cuda_graph=True, overlap=True)
    generated(model, do_sample=True, top_k=5)
    generated(model, stopping_criteria=StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids)).bool()]))
    generated(model, disable_compile=True)
    generated(model, max_new_tokens=2, min_new_tokens=2)
    assert not launched
    assert nothing_foreign((), {"streamer": object.__new__(TextStreamer), "logits_processor": None})
    assert not nothing_foreign((), {"streamer": SimpleNamespace(put=print, end=print)})
    assert not nothing_foreign((1, 2, 3), {}) and not nothing_foreign((), {"prefix_allowed_tokens_fn": print})


def test_nothing_is_left_running_by_a_call_that_fails(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    stock = generated(model)
    fl.patch(model, cuda_graph=True, overlap=True)
    taken, take = list[int](), Overlap.take

    def fails(self: Overlap, *given: Any) -> Any:
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return take(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Overlap, "take", fails)
        with pytest.raises(KeyboardInterrupt):
            generated(model)
    assert ahead(model)._launched is None and len(launched) == 3
    assert torch.equal(generated(model), stock)


def test_caches_that_grow_and_hooks_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("gpt_oss", num_hidden_layers=2), prompt(3, 118, pads=(0, 6, 3))
    inputs = {key: torch.cat((value, value[:1].expand(3, -1)), dim=1) for key, value in inputs.items()}
    many = {"max_new_tokens": 146, "min_new_tokens": 146}
    stock = generated(model, inputs, **many)
    monkeypatch.setattr(decode, "FIRST_TOKENS", 10)
    report = fl.patch(model, cuda_graph=True, overlap=True)
    assert torch.equal(generated(model, inputs, **many), stock)
    assert report.hits()["cuda_graph"] == 145 and report.fallbacks()["cuda_graph"] == 0 == ahead(model).wrong


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_and_second_patches_say_whether(how: str, launched: list[int]) -> None:
    model = build("llama")
    fl.patch(model, cuda_graph=True)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(generated(other), generated(model)) and len(launched) == 2 * (NEW - 2)
    fl.patch(model, cuda_graph=True, overlap=False)
    launched.clear()
    generated(model)
    assert not launched and decode.driver_of(other).overlapping  # type: ignore[union-attr]


def test_steps_that_python_launches_cannot_run_ahead() -> None:
    with pytest.raises(ArgumentError, match="overlap is True; accepted: cuda_graph=True"):
        fl.patch(build("llama"), overlap=True)
    with pytest.raises(ArgumentError, match="overlap is 'yes'"):
        fl.patch(build("llama"), cuda_graph=True, overlap="yes")  # type: ignore[arg-type]


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step begins behind its ids, on the side stream; who takes its logits, or nobody, waits for its end."""
    said = list[str]()

    class Event:
        def __init__(self) -> None:
            self.name = f"event {sum(each.startswith('made') for each in said)}"
            said.append(f"made {self.name}")

        def record(self) -> None:
            said.append(f"{now[-1]} records {self.name}")

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_event=lambda event: said.append(f"{name} waits for {event.name}"))

    now = ["current"]

    @contextmanager
    def on(each: Any) -> Any:
        now.append(each.name)
        yield
        now.pop()

    cuda = SimpleNamespace(Event=Event, stream=on, current_stream=lambda device: stream("current"))
    monkeypatch.setattr(overlap, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(overlap, "side_stream", lambda device: stream("side"))
    step: Any = SimpleNamespace(
        device=torch.device("cuda"), ids=torch.zeros(1, 1, dtype=torch.long), positions=torch.zeros(1, 1), length=7
    )
    guess, logits = Overlap(), torch.tensor([[[0.0, 2.0, 1.0]]])
    guess.begin(20)

    def replay() -> torch.Tensor:
        said.append(f"{now[-1]} replays {int(step.ids)} at {int(step.positions)}")
        return logits + 1

    guess.launch(step, 7, logits, replay)
    launch = ["made event 0", "made event 1", "current records event 0", "side waits for event 0"]
    assert said == [*launch, "side replays 1 at 1", "side records event 1"]
    said.clear()
    asked = {"input_ids": torch.ones(1, 1, dtype=torch.long), "position_ids": torch.ones(1, 1)}
    assert torch.equal(guess.take(step, 7, asked), logits + 1) and said == ["current waits for event 1"]  # type: ignore
    assert guess.take(step, 8, asked) is None and len(said) == 1 and guess.wants(19) and not guess.wants(20)
    for other in ({"input_ids": asked["input_ids"] + 1}, {"position_ids": asked["position_ids"] + 1}):
        said.clear()
        step.positions.zero_()
        guess.launch(step, 8, logits, replay)
        assert guess.take(step, 8, asked | other) is None and said[-1].startswith("current waits for")
        assert step.length == -1
    assert guess.wrong == WRONG_GUESSES and not guess.wants(9)
    guess.begin(20)
    step.positions.zero_()
    guess.launch(step, 8, logits, replay)
    assert guess.take(step, 9, asked) is None and guess.wrong == 0 and said[-1].startswith("current waits for")
