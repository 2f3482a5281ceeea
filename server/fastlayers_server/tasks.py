"""Exact-answer problems and short stories: the text of the tiny checkpoints.

Everything here is generated from a seed by plain Python, so the text carries no licence, needs no download
and is the same on every machine. Each problem and each story has a *key* (its content without the wording);
a hash of the key puts it into the training or the held-out split, so the two can never share an item,
whatever the seeds.

=========  =========================================  ==========
kind       prompt                                     answer
=========  =========================================  ==========
add        ``What is 127 + 45?``                      ``172``
sub        ``What is 127 - 45?``                      ``82``
copy       ``Copy: QWEZ``                             ``QWEZ``
reverse    ``Reverse: QWEZ``                          ``ZEWQ``
sort       ``Sort: QWEZ``                             ``EQWZ``
lookup     ``Given K7, B1, Z3, what is B?``           ``B1``
=========  =========================================  ==========
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from string import ascii_uppercase
from typing import Literal

Split = Literal["train", "held_out"]

KINDS = ("add", "sub", "copy", "reverse", "sort", "lookup")
HELD_OUT_PROBLEMS = 1000
HELD_OUT_SEED = 20_000
_HELD_OUT_IN = 8  # one key in eight is held out

_NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Milo", "Nora",
    "Otto", "Pia", "Rosa", "Sam", "Tess", "Uma",
)  # fmt: skip
_ANIMALS = ("fox", "goat", "duck", "cat", "dog", "owl", "mouse", "horse", "frog", "bear", "crow", "otter")
_PLACES = ("forest", "harbour", "market", "garden", "valley", "village", "river", "mountain", "field", "mill")
_THINGS = ("key", "lamp", "kite", "drum", "map", "coin", "book", "boat", "bell", "ring", "hat", "basket")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "silver", "golden")
_FOODS = ("bread", "apples", "soup", "honey", "cheese", "berries", "nuts", "cake")
_WEATHER = ("sunny", "rainy", "windy", "foggy", "snowy", "quiet")


@dataclass(frozen=True)
class Problem:
    """A question with one right answer.

    Parameters
    ----------
    kind
        One of `KINDS`, or ``"long"`` for `long_prompt`.
    prompt
        What the user says: the content of one chat turn.
    answer
        What the assistant must say, character for character.
    """

    kind: str
    prompt: str
    answer: str


def split_of(key: str) -> Split:
    """Say which split a key belongs to.

    Parameters
    ----------
    key
        The content of a problem or story, without its wording.

    Returns
    -------
    str
        ``"train"`` or ``"held_out"``; it depends on the key alone.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % _HELD_OUT_IN == 0 else "train"


def _number(rng: random.Random) -> int:
    """Return a number of one to three digits; longer ones more often, since there are more of them."""
    low, high = rng.choice(((0, 9), (10, 99), (10, 99), (100, 999), (100, 999), (100, 999)))
    return rng.randint(low, high)


def _arithmetic(kind: str, rng: random.Random) -> tuple[str, Problem]:
    """Return the key and the problem of one sum or one difference that is not negative."""
    a, b = _number(rng), _number(rng)
    high, low = max(a, b), min(a, b)
    # The key forgets the order: 3 + 5 in training would give away 5 + 3.
    key = f"{kind} {high} {low}"
    if kind == "add":
        return key, Problem(kind, f"What is {a} + {b}?", str(a + b))
    return key, Problem(kind, f"What is {high} - {low}?", str(high - low))


def _letters(kind: str, rng: random.Random) -> tuple[str, Problem]:
    """Return the key and the problem of one copy, reverse or sort of three to eight distinct letters."""
    text = "".join(rng.sample(ascii_uppercase, rng.randint(3, 8)))
    answer = {"copy": text, "reverse": text[::-1], "sort": "".join(sorted(text))}[kind]
    return f"{kind} {text}", Problem(kind, f"{kind.capitalize()}: {text}", answer)


def _lookup(kind: str, rng: random.Random) -> tuple[str, Problem]:
    """Return the key and the problem of one look-up in a table of three to eight rows."""
    names = rng.sample(ascii_uppercase, rng.randint(3, 8))
    rows = [f"{name}{rng.randint(0, 9)}" for name in names]
    wanted = rng.choice(rows)
    table = ", ".join(rows)
    return f"{kind} {table} {wanted}", Problem(kind, f"Given {table}, what is {wanted[0]}?", wanted)


_MAKERS: dict[str, Callable[[str, random.Random], tuple[str, Problem]]] = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "copy": _letters,
    "reverse": _letters,
    "sort": _letters,
    "lookup": _lookup,
}


def iter_problems(split: Split, seed: int, kinds: Sequence[str] = KINDS) -> Iterator[Problem]:
    """Generate problems without end.

    Parameters
    ----------
    split
        ``"train"`` or ``"held_out"``.
    seed
        The same seed gives the same problems.
    kinds
        The kinds, taken in turn; name one several times to get more of it.

    Yields
    ------
    Problem
        Repeats are possible, since the small sums are few.
    """
    rng = random.Random(f"problems {split} {seed}")
    for kind in cycle(kinds):
        make = _MAKERS[kind]
        key, problem = make(kind, rng)
        while split_of(key) != split:
            key, problem = make(kind, rng)
        yield problem


def problems(split: Split, n: int, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[Problem]:
    """Return the first `n` problems of `iter_problems`.

    Parameters
    ----------
    split, seed, kinds
        As for `iter_problems`.
    n
        How many.

    Returns
    -------
    list of Problem
        The kinds in turn, so a prefix is as mixed as the whole.
    """
    return list(islice(iter_problems(split, seed, kinds), n))


def held_out_problems(n: int = HELD_OUT_PROBLEMS) -> list[Problem]:
    """Return the fixed held-out set, or its first `n` problems.

    Parameters
    ----------
    n
        At most `HELD_OUT_PROBLEMS`.

    Returns
    -------
    list of Problem
        `n` different problems, the kinds in turn.

    Raises
    ------
    ValueError
        If more than `HELD_OUT_PROBLEMS` are asked for.
    """
    if n > HELD_OUT_PROBLEMS:
        raise ValueError(f"the held-out set has {HELD_OUT_PROBLEMS} problems, not {n}")
    by_kind: dict[str, Iterator[Problem]] = {}
    for index, kind in enumerate(KINDS):
        by_kind[kind] = iter_problems("held_out", HELD_OUT_SEED + index, (kind,))
    chosen: dict[str, Problem] = {}
    for kind in cycle(KINDS):
        if len(chosen) == n:
            break
        fresh = next(p for p in by_kind[kind] if p.prompt not in chosen)
        chosen[fresh.prompt] = fresh
    return list(chosen.values())


def _favourite(rng: random.Random, options: Sequence[str], who: str) -> str:
    """Return the option that goes with `who`, or three times in ten any of them.

    Without favourites the next word would often be one of twelve equally likely ones, and a greedy story
    would turn on the last bit of a logit.
    """
    if rng.random() < 0.3:
        return rng.choice(options)
    digest = hashlib.blake2b(f"{who} {len(options)}".encode(), digest_size=4).digest()
    return options[int.from_bytes(digest, "little") % len(options)]


def _story(rng: random.Random) -> tuple[str, str, str]:
    """Return the key, the request and the text of one story."""
    hero, friend = rng.sample(_NAMES, 2)
    thing, colour = rng.choice(_THINGS), rng.choice(_COLOURS)
    animal, place, weather = (_favourite(rng, options, hero) for options in (_ANIMALS, _PLACES, _WEATHER))
    food = _favourite(rng, _FOODS, friend)
    openings = (
        f"One {weather} morning {hero} walked to the {place} with a small {animal}.",
        f"{hero} lived near the {place} with a small {animal}. One {weather} day they went out early.",
        f"It was a {weather} day at the {place}. {hero} was playing there with a small {animal}.",
    )
    troubles = (
        f"There the {animal} lost a {colour} {thing}. They looked everywhere, but the {thing} was gone.",
        f"There they found a {colour} {thing} in the grass. Nobody at the {place} knew whose {thing} it was.",
        f"There they met {friend}, who was sad. The {colour} {thing} of {friend} had fallen into the water.",
    )
    helps = (
        f'"Do not worry," said {hero}. "The {animal} and I will help."',
        f"The {animal} thought for a while and then ran off as fast as it could.",
        f"{hero} gave the {animal} some {food}, and together they made a plan.",
    )
    endings = (
        f"In the evening {friend} came with the {colour} {thing} and thanked {hero} and the {animal}.",
        f"Before the sun went down the {animal} brought the {colour} {thing} to {friend}, who was very glad.",
    )
    closes = (
        f"Then {hero} and {friend} sat down and ate {food}.",
        f"From that day on {hero}, {friend} and the {animal} were good friends.",
    )
    beats = (openings, troubles, helps, endings, closes)
    sentences = [_favourite(rng, options, f"{hero} {beat}") for beat, options in enumerate(beats)]
    key = f"story {hero} {friend} {animal} {place} {thing} {colour}"
    request = f"Tell me a story about {hero}, {friend} and the {colour} {thing}."
    return key, request, " ".join(sentences)


def iter_story_chats(split: Split, seed: int) -> Iterator[tuple[str, str]]:
    """Generate stories without end, each with the request that a user would make for it.

    Parameters
    ----------
    split
        ``"train"`` or ``"held_out"``; the two never share a cast (people, animal, place and thing together).
    seed
        The same seed gives the same stories.

    Yields
    ------
    tuple of str
        The request and the story.
    """
    rng = random.Random(f"stories {split} {seed}")
    while True:
        key, request, text = _story(rng)
        if split_of(key) == split:
            yield request, text


def stories(split: Split, n: int, seed: int = 0) -> list[str]:
    """Return the first `n` stories of `iter_story_chats`, without the requests.

    Parameters
    ----------
    split, seed
        As for `iter_story_chats`.
    n
        How many.

    Returns
    -------
    list of str
        One paragraph each, about 400 characters.
    """
    return [text for _, text in islice(iter_story_chats(split, seed), n)]


def long_prompt(
    min_tokens: int = 2000,
    count_tokens: Callable[[str], int] | None = None,
    seed: int = 0,
    split: Split = "held_out",
) -> Problem:
    """Make one long prompt: stories and solved examples, ending in a question.

    Parameters
    ----------
    min_tokens
        The prompt has at least this many tokens, and at most one story more.
    count_tokens
        Counts the tokens of a text, say ``lambda text: len(tokenizer.encode(text))``. Without it words are
        counted; a word has at least one token, so the prompt is then longer than asked for, never shorter.
    seed, split
        Choose the stories and the problems.

    Returns
    -------
    Problem
        Of kind ``"long"``. Its prompt is one user turn and its answer the answer to the last question.
    """
    count = count_tokens or (lambda text: len(text.split()))
    rng = random.Random(f"long {split} {seed}")
    texts = iter_story_chats(split, rng.randrange(1 << 30))
    questions = iter_problems(split, rng.randrange(1 << 30), rng.sample(KINDS, len(KINDS)))
    last = next(questions)
    end = f"Question: {last.prompt}"
    parts: list[str] = []
    total = count(end)
    while total < min_tokens:
        if rng.random() < 0.25:
            part = next(texts)[1]
        else:
            solved = next(questions)
            part = f"Question: {solved.prompt}\nAnswer: {solved.answer}"
        parts.append(part)
        # Counted piece by piece, without the blank line between the pieces: a lower bound of the whole.
        total += count(part)
    return Problem("long", "\n\n".join([*parts, end]), last.answer)
