"""Structured output: compiled in a process that is killed when it takes too long, and tokens that follow."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fastlayers_server.engine.grammar import GrammarMasks, GrammarWorker, tokenizer_info
from fastlayers_server.engine.protocol import EngineInfo, Forgotten, Grammar, Sampling

sys.path.insert(0, str(Path(__file__).parent))
from serving import TINY, Bench, made, mixed_steps, plain, prompts

SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip


def tag(**form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


SOURCES = {
    "schema": tag(type="json_schema", json_schema=SCHEMA, max_whitespace_cnt=24),
    "choice": tag(type="regex", pattern="(cat|dog) (sat|ran)"),
    "ebnf": tag(type="grammar", grammar='root ::= "a" [bc]{2,3} "d"'),
    "tag": tag(type="sequence", elements=[
        {"type": "const_string", "value": "Name: "}, {"type": "regex", "pattern": "[a-z]{3}"}]),
}  # fmt: skip
DEAD = {
    "nothing": tag(type="grammar", grammar="root ::= root"),
    "no end": tag(type="grammar", grammar='root ::= "ab" [c-d] end\nend ::= end'),
}
INFO = EngineInfo(1, 512, 64, (1,), 16, 8, 4, 8, 20, ("grammar",))
BOMB = "(" * 60 + "a" + "{1,9})" * 60


async def compiled() -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
    worker = GrammarWorker(TINY, lambda: INFO, timeout=120.0)
    found = {name: await worker.compile(source) for name, source in SOURCES.items()}
    dead = {name: await worker.compile(source) for name, source in DEAD.items()}
    wrong: dict[str, Any] = {}
    for name, source in {
        "regex": tag(type="regex", pattern="(a"),
        "schema": tag(type="json_schema", json_schema={"type": "nothing"}),
        "kind": tag(type="x"),
        "none": "",
    }.items():
        with pytest.raises(ValueError) as caught:
            await worker.compile(source)
        wrong[name] = str(caught.value)
    assert worker._process is not None
    before = worker._process.pid
    assert os.getpgid(before) != os.getpgrp()  # an interrupt from the terminal does not reach it
    os.kill(before, signal.SIGTERM)
    again = await worker.compile(SOURCES["choice"])
    assert again == found["choice"] and worker._process.pid == before
    worker.timeout = 0.0001
    with pytest.raises(TimeoutError):
        await worker.compile(tag(type="regex", pattern=BOMB))
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    worker.timeout = 120.0
    assert await worker.compile(SOURCES["choice"]) == found["choice"]
    await worker.close()
    return found, wrong, dead


@pytest.fixture(scope="module")
def grammars() -> tuple[dict[str, str], dict[str, Any], dict[str, str]]:
    return asyncio.run(compiled())


def test_the_worker_compiles_refuses_and_is_killed(grammars: Any) -> None:
    found, wrong, _ = grammars
    assert all(json.loads(serialized) for serialized in found.values())
    assert all(wrong.values()) and "x" in wrong["kind"]
    # Nothing of where the library found it in its own source.
    assert wrong["regex"] == "Regex parsing error at position 3: The parenthesis is not closed."
    assert not any(".cc:" in said or "std::" in said for said in wrong.values()), wrong


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_worker_that_does_not_start_is_no_fault_of_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("fastlayers_server.engine.grammar.START_SECONDS", seconds)
    # What transformers says of a folder without a tokenizer, without the seconds that its import takes.
    (tmp_path / "transformers.py").write_text("def __getattr__(name): raise OSError('no tokenizer')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    worker = GrammarWorker(tmp_path, lambda: INFO)
    with pytest.raises(RuntimeError, match=f"starts with the tokenizer of {re.escape(str(tmp_path))}"):
        asyncio.run(worker.compile(SOURCES["choice"]))


@pytest.fixture(scope="module")
def model() -> Any:
    return made("deepseek")


def bench(model: Any, overlap: bool, mixed: bool = False) -> Bench:
    masks = GrammarMasks(tokenizer_info(TINY, 512, (1,)), 512, 32)
    features = ("grammar", "logprobs")
    return Bench(model, overlap=overlap, captured=overlap, grammars=masks, features=features, mixed=mixed)


APART = (False, False)  # overlap, mixed


@pytest.mark.parametrize(
    "ways", [(APART, (True, True)), pytest.param((APART, (True, False), (False, True)), marks=pytest.mark.slow)]
)
def test_answers_follow_their_grammars_beside_free_text(model: Any, grammars: Any, ways: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer, told = PreTrainedTokenizerFast.from_pretrained(TINY), []
    rows = prompts(4)
    for overlap, mixed in ways:
        served = bench(model, overlap, mixed)
        together = mixed_steps(served)
        for name, serialized in grammars[0].items():
            served.engine.post(Grammar(name, serialized))
        rids = {
            (name, seed): served.submit([5, 6, 7], 240, Sampling(1.0, seed=seed), grammar=name, ignore_eos=False)
            for name in grammars[0]
            for seed in (0, 1)
        }
        free = [served.submit(row, 10) for row in rows]
        served.run()
        assert [served.ids(rid) for rid in free] == plain(model, rows, 10)
        assert any({*rids.values()} & decoding and {*free} & computed for decoding, computed in together) == mixed
        texts = {key: tokenizer.decode(served.ids(rid), skip_special_tokens=True) for key, rid in rids.items()}
        assert {served.last(rid).finish for rid in rids.values()} == {"stop"}, texts
        for seed in (0, 1):
            person = json.loads(texts["schema", seed])
            assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99
            assert re.fullmatch("(cat|dog) (sat|ran)", texts["choice", seed])
            assert re.fullmatch("a[bc]{2,3}d", texts["ebnf", seed])
            assert re.fullmatch("Name: [a-z]{3}", texts["tag", seed])
        told.append(texts)
    assert all(texts == told[0] for texts in told[1:])


def test_what_is_wrong_ends_that_request_alone(model: Any, grammars: Any) -> None:
    served = bench(model, True)
    served.engine.post(Grammar("broken", "{}"))
    served.engine.post(Grammar("choice", grammars[0]["choice"]))
    unknown = served.submit([5], 4, grammar="broken", ignore_eos=False)
    both = served.submit([5], 4, grammar="choice", ignore_eos=True)
    good = served.submit([5], 30, grammar="choice", ignore_eos=False)
    served.run()
    assert [served.last(rid).code for rid in (unknown, both)] == ["grammar_lost", "invalid_prompt"]
    assert served.last(good).finish == "stop"
    assert not served.engine.grammars.known("broken")  # type: ignore[union-attr]


def test_a_grammar_that_leads_nowhere_is_the_clients_fault(model: Any, grammars: Any) -> None:
    """It compiles; no step draws among no tokens, whose logits would not be finite."""
    for overlap in (False, True):
        served = bench(model, overlap)
        for name, serialized in grammars[2].items():
            served.engine.post(Grammar(name, serialized))
        rids = [served.submit([5], 30, grammar=name, ignore_eos=False) for name in grammars[2]]
        free = served.submit([5], 10)
        served.run()
        for rid in rids:
            last = served.last(rid)
            assert last.code == "invalid_grammar" and last.message.startswith("the grammar leads to where"), last
        assert served.last(free).finish == "length"


def test_logits_that_are_not_finite_are_no_grammars_fault(model: Any, grammars: Any) -> None:
    served = bench(model, False)
    served.engine.post(Grammar("choice", grammars[0]["choice"]))
    rid = served.submit([5], 30, grammar="choice", ignore_eos=False)
    served.engine.tick()
    request, masks = served.engine.scheduler.live[rid], served.engine.grammars
    assert masks is not None and masks.accept(request, [-1]) == ("", "")
    assert masks.accept(request, [5])[0] == "internal_error"


def test_grammars_that_are_forgotten_are_told(model: Any, grammars: Any) -> None:
    """Otherwise a front believes them there, and the next request that names one is refused."""
    served, told = bench(model, False), []
    masks: Any = served.engine.grammars
    masks._cache_bytes = 1  # the last one stays
    served.engine.deliver = told.append
    for name in ("choice", "schema", "choice"):
        served.engine.post(Grammar(name, grammars[0][name]))
    served.engine.tick()
    assert [each.keys for each in told if isinstance(each, Forgotten)] == [("choice",), ("schema",)]
    assert masks.known("choice") and not masks.known("schema")


@pytest.mark.parametrize("burns", [False, True])
def test_a_grammar_that_needs_too_much_of_the_processor_ends(
    model: Any, grammars: Any, burns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for the processor, which others use too, does not count."""
    import time

    import xgrammar

    fill = xgrammar.GrammarMatcher.fill_next_token_bitmask

    def slow(self: Any, *arguments: Any) -> Any:
        end = time.thread_time() + 0.006
        while burns and time.thread_time() < end:
            pass
        time.sleep(0.0 if burns else 0.006)
        return fill(self, *arguments)

    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", slow)
    served = bench(model, True)
    served.engine.post(Grammar("schema", grammars[0]["schema"]))
    rid, free = served.submit([5], 200, grammar="schema", ignore_eos=False), served.submit([5], 10)
    served.run()
    assert served.last(free).finish == "length"
    if burns:
        assert served.last(rid).code == "invalid_grammar" and "longer than 5 ms" in served.last(rid).message
    else:
        assert served.last(rid).finish == "stop"
