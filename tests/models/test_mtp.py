"""The NextN (multi-token prediction) layer against stock transformers' MtpModel, and how many drafts are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlayers.errors import ArgumentError, CheckpointError
from fastlayers_models.deepseek import DeepseekForCausalLM
from fastlayers_server import tasks

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_tools import SHIPPED, Feeder, per_row_error, rewrite, with_mtp
from tiny_models import YARN, Variation, hf_model, prompts, relative_rms

BOUND = 1e-5
STORY_SEED = 30_000


def ours(folder: Path, **options: Any) -> DeepseekForCausalLM:
    return DeepseekForCausalLM.from_pretrained(folder, dtype=torch.float32, page_size=16, **options)


def stock(folder: Path) -> tuple[Any, Any]:
    """Return transformers' model and MTP model, told where the MTP tensors of a checkpoint of this depth are."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    return model, MtpModel.from_pretrained(model, device_map={"": "cpu"}).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}
    plain = tmp_path_factory.mktemp("plain")
    hf_model(Variation("v3", changes=changes), plain)
    return with_mtp(plain, tmp_path_factory.mktemp("mtp") / "model")


@pytest.fixture(scope="module", params=["shipped", "random"])
def pair(request: pytest.FixtureRequest, random_folder: Path) -> tuple[DeepseekForCausalLM, Any, Any, list[list[int]]]:
    """Return (ours, transformers' model, its MTP model, rows of tokens)."""
    folder = SHIPPED if request.param == "shipped" else random_folder
    if request.param == "random":
        return ours(folder), *stock(folder), prompts(3)
    words = request.getfixturevalue("tokenizer")
    return ours(folder), *stock(folder), [words(text)["input_ids"] for text in tasks.stories("held_out", 3, STORY_SEED)]


@torch.inference_mode()
def stock_mtp_logits(model: Any, mtp: Any, row: list[int], first_position: int) -> torch.Tensor:
    """Return the logits of token t+2 for t = 0 … len-2, by transformers' own MTP layer."""
    ids = torch.tensor([row])
    hidden = model.model(ids).last_hidden_state[:, :-1]
    embedded = model.get_input_embeddings()(ids[:, 1:])
    position = torch.arange(first_position, first_position + len(row) - 1)[None]
    masks = mtp.create_masks_for_mtp_layer(0, embedded, None, position)
    states = mtp.layers[0](
        embedded, hidden, mtp.rotary_emb(embedded, position), position_ids=position, past_key_values=None, **masks
    )
    logits: torch.Tensor = model.lm_head(states)[0]
    return logits


def test_logits_equal_stock_mtp_model(pair: Any) -> None:
    model, reference, mtp, rows = pair
    found = Feeder(model, rows).run([("extend", [len(row) for row in rows])], mtp=True)
    for index, row in enumerate(rows):
        # The last position has no next token; transformers gives the pair (h_t, token t+1) position t+1.
        for first_position in (0, 1):
            wanted = stock_mtp_logits(reference, mtp, row, first_position)
            assert relative_rms(found[index][:-1], wanted) <= BOUND
            assert per_row_error(found[index][:-1], wanted) <= 5 * BOUND
        # And it is not the main model's prediction of either token.
        assert relative_rms(found[index][:-1], reference(torch.tensor([row])).logits[0, :-1].detach()) > 0.05


def test_drafts_equal_stock_candidate_generator(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    calls: list[tuple[list[int], torch.Tensor]] = []
    original = MTPCandidateGenerator.get_candidates

    def recording(self: Any, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        ids, logits = original(self, input_ids, *args, **options)
        if logits is not None:
            calls.append((ids[0].tolist(), logits[0, -1].clone()))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recording)
    reference, _ = stock(SHIPPED)
    request = next(tasks.iter_story_chats("held_out", STORY_SEED))[0]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = reference.generate(**ids, do_sample=False, max_new_tokens=24, use_mtp=True)[0].tolist()
    assert len(calls) >= 8
    drafted = Feeder(ours(SHIPPED), [out]).run([("extend", [len(out)])], mtp=True)[0]
    for candidate, logits in calls:
        known = len(candidate) - 1
        assert candidate[:known] == out[:known]
        # The state at known-2, with the token at known-1, drafts the token at place known.
        assert relative_rms(drafted[known - 2], logits) <= 5 * BOUND
        assert int(drafted[known - 2].argmax()) == candidate[known]


def test_chunked_prefill_and_decode_equal_one_prefill(pair: Any) -> None:
    model, _, _, rows = pair
    lengths = [len(row) for row in rows]
    whole = Feeder(model, rows).run([("extend", lengths)], mtp=True)
    tail = 4
    chunks = [
        ("extend", [min(17, n - tail) for n in lengths]),
        ("extend", [n - tail - min(17, n - tail) for n in lengths]),
    ]
    parts = Feeder(model, rows).run([*chunks, *[("decode", [1] * len(rows))] * tail], mtp=True)
    for index in range(len(rows)):
        assert relative_rms(parts[index], whole[index]) <= BOUND


def test_acceptance_on_held_out_stories(tokenizer: Any) -> None:
    texts = tasks.stories("held_out", 24, STORY_SEED)
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    model = ours(SHIPPED)
    step = [("extend", [len(row) for row in rows])]
    said, drafts = Feeder(model, rows).run(step), Feeder(model, rows).run(step, mtp=True)
    kept = torch.cat([drafts[i][:-2].argmax(-1) == said[i][1:-1].argmax(-1) for i in said])
    right = torch.cat([drafts[i][:-2].argmax(-1) == torch.tensor(row[2:]) for i, row in enumerate(rows)])
    acceptance, accuracy = float(kept.float().mean()), float(right.float().mean())
    print(f"{len(kept)} drafts: {acceptance:.3f} kept, {accuracy:.3f} are the text")
    # The model card says 99%: a wrong hidden state, shift or weight costs more than 4 points.
    assert acceptance > 0.95 and accuracy > 0.6


def test_mtp_uses_its_own_weights_and_not_the_main_models(random_folder: Path, tmp_path: Path) -> None:
    rows = prompts(1)
    step = [("extend", [len(rows[0])])]
    plain = ours(random_folder)
    main, draft = Feeder(plain, rows).run(step)[0], Feeder(plain, rows).run(step, mtp=True)[0]
    for part in ("embed_tokens", "shared_head.head", "shared_head.norm", "enorm", "hnorm", "eh_proj", "mlp.gate"):
        name = f"model.layers.3.{part}.weight"
        changed = ours(rewrite(random_folder, tmp_path / part, lambda t, n=name: t.update({n: t[n].flip(0)})))
        assert torch.equal(Feeder(changed, rows).run(step)[0], main), part
        assert relative_rms(Feeder(changed, rows).run(step, mtp=True)[0], draft) > 1e-2, part


def test_mtp_layer_is_optional(random_folder: Path, tmp_path: Path) -> None:
    rows = prompts(1)
    step = [("extend", [len(rows[0])])]
    main = Feeder(ours(random_folder), rows).run(step)[0]
    without = ours(random_folder, load_mtp=False)
    assert len(without.model.layers) == 3 and without.config.num_nextn_predict_layers == 0
    assert torch.equal(Feeder(without, rows).run(step)[0], main)
    meta = Feeder(without, rows).plan([3], "extend")[1]
    with pytest.raises(ArgumentError, match=r"DeepseekForCausalLM\.mtp: index"):
        without.mtp(torch.zeros(3, 64), torch.zeros(3, dtype=torch.int64), meta, None)  # type: ignore[arg-type]
    # Transformers drops the layer on saving but leaves the number in config.json.
    dropped = rewrite(random_folder, tmp_path / "dropped", lambda t: [t.pop(n) for n in list(t) if ".layers.3." in n])
    assert json.loads((dropped / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert torch.equal(Feeder(ours(dropped), rows).run(step)[0], main)


def test_incomplete_mtp_layer_is_named(random_folder: Path, tmp_path: Path) -> None:
    name = "model.layers.3.eh_proj.weight"
    broken = rewrite(random_folder, tmp_path / "broken", lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        ours(broken)
    assert len(ours(broken, load_mtp=False).model.layers) == 3


def test_two_mtp_layers(random_folder: Path, tmp_path: Path) -> None:
    def twice(tensors: dict[str, torch.Tensor]) -> None:
        found = {n: t for n, t in tensors.items() if n.startswith("model.layers.3.")}
        tensors |= {n.replace(".layers.3.", ".layers.4."): t.clone() for n, t in found.items()}

    folder = rewrite(random_folder, tmp_path / "two", twice, lambda c: c.update(num_nextn_predict_layers=2))
    model, rows = ours(folder), prompts(1)
    feeder = Feeder(model, rows)
    ids, meta, step, following = feeder.plan([len(rows[0])], "extend")
    with torch.inference_mode():
        hidden = model(ids, meta, feeder.caches, step)
        first, second = (model.mtp(hidden, following, meta, feeder.caches[3 + i], step, index=i) for i in range(2))
    assert torch.equal(first, second)
    assert len(ours(folder, load_mtp=False).model.layers) == 3
