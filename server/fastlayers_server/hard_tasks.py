"""Conversations that the tiny checkpoints do not all get right: sums of many numbers, look-ups of several hops.

Each turn is a problem of :mod:`fastlayers_server.tasks`, held out like those there, and asks about the answer before
it; a conversation is right where every turn is. The tables are longer than any that was trained on.

========  ==============================================================================  ======================
kind      turns                                                                           what makes it hard
========  ==============================================================================  ======================
sums      ``What is 127 + 45?`` ``What is 172 - 60?`` … each takes the result before it   twenty terms
hops      ``Given K7, B1, …, what is B?`` … the digit found is the number of the table     tables of sixteen rows
          that the next question is about
========  ==============================================================================  ======================

Sixteen rows and twenty terms were found by measuring: the shipped checkpoints score between 85 and 97 % of the set
(``benchmarks/results/eval_tiny*_cpu.json``), where a format that loses a little loses problems.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_uppercase

from fastlayers_server.tasks import Problem, split_of

HARD_KINDS = ("sums", "hops")
HARD_PROBLEMS = 200
HARD_SEED = 40_000
TERMS, ROWS, HOPS, TABLES = 20, 16, 2, 10


@dataclass(frozen=True)
class Conversation:
    """Questions of which each follows from the answer before it.

    Parameters
    ----------
    kind
        One of `HARD_KINDS`.
    turns
        In order; each has its one right answer.
    """

    kind: str
    turns: tuple[Problem, ...]


def _sums(rng: random.Random) -> Conversation:
    """Add and subtract, beginning with a number of three digits and staying between 0 and 999."""
    total = rng.randint(100, 999)
    turns: list[Problem] = []
    while len(turns) < TERMS:
        sign, term = rng.choice("+-"), rng.randint(10, 999)
        result = total + term if sign == "+" else total - term
        name = "add" if sign == "+" else "sub"
        key = f"{name} {max(total, term)} {min(total, term)}"
        if 0 <= result <= 999 and split_of(key) == "held_out":
            turns.append(Problem(name, f"What is {total} {sign} {term}?", str(result)))
            total = result
    return Conversation("sums", tuple(turns))


def _hops(rng: random.Random) -> Conversation:
    """Look a letter up in table 0, then one in the table whose number was found; no row leads back to table 0."""
    tables, table = [_table(rng) for _ in range(TABLES)], 0
    turns: list[Problem] = []
    while len(turns) < HOPS:
        rows = tables[table]
        wanted, shown = rng.choice(rows), ", ".join(rows)
        if split_of(f"lookup {shown} {wanted}") == "held_out":
            turns.append(Problem("lookup", f"Given {shown}, what is {wanted[0]}?", wanted))
            table = int(wanted[1])
        elif all(split_of(f"lookup {shown} {row}") != "held_out" for row in rows):
            tables[table] = _table(rng)
    return Conversation("hops", tuple(turns))


def _table(rng: random.Random) -> list[str]:
    return [f"{name}{rng.randint(1, TABLES - 1)}" for name in rng.sample(ascii_uppercase, ROWS)]


def hard_problems(n: int = HARD_PROBLEMS) -> list[Conversation]:
    """Return the fixed hard set, or its first `n` conversations.

    Parameters
    ----------
    n
        At most `HARD_PROBLEMS`.

    Returns
    -------
    list of Conversation
        The kinds in turn, so a prefix is as mixed as the whole.

    Raises
    ------
    ValueError
        If more than `HARD_PROBLEMS` are asked for.
    """
    if n > HARD_PROBLEMS:
        raise ValueError(f"the hard set has {HARD_PROBLEMS} conversations, not {n}")
    rng, makers = random.Random(f"hard {HARD_SEED}"), (_sums, _hops)
    return [makers[index % len(makers)](rng) for index in range(n)]
