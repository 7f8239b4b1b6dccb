"""Generate a synthetic encyclopaedia and questions about it, instead of Wikipedia and Natural
Questions.

Ours: NQ Search without a download, at a size that a tiny model can learn. An article:

    Ada Finch
    born Oslo, job cook, friend Bo Hale

A question asks for the place or the job of a person (one hop), or of a person's friend (two hops).
3,328 people are for training (13,312 different questions) and the warm start, 768 are held out.
Friends belong to the same group.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from envs.base import held_out
from envs.search import Retriever

FIRST_NAMES = """Ada Bea Bo Cleo Dan Eva Finn Gus Hana Ivo Jo Kim Leo Mia Ned Olga Pia Quin Ray Sue
Tom Una Vic Wanda Xena Yuri Zoe Amir Boris Clara Diego Elsa Anton Astrid Bruno Carla Cyril Dora
Edgar Erik Fay Felix Greta Hugo Ines Jana Karl Lars Lena Marco Nadia Nina Otto Paula Petra Rosa Rudi
Sven Tara Theo Uma Vera Walt Yves""".split()
LAST_NAMES = """Finch Hale Stone Marsh Reed Wolf Berg Frost Klein Lind Moss Nash Orr Page Quist Rook
Shaw Tait Ueda Voss Webb Yates Zorn Abel Brook Cole Drew Engel Fox Grant Holt Iqbal Adler Barth
Bloom Craig Dahl Dunn Ellis Falk Ford Gale Hardy Hicks Jung Kane Kerr Lowe Mann Munk Nolan Olsen
Pike Pratt Quill Rios Sand Swan Thorn Udall Vance Wells Young Zell""".split()
PLACES = "Oslo Rome Lima Cairo Delhi Kyoto Quito Perth".split()
JOBS = "cook baker pilot judge nurse tailor miner singer".split()
VALUES = PLACES + JOBS

# Each is one token, together with its space.
WORDS = tuple(f" {word}" for word in ("born", "job", "friend", *FIRST_NAMES, *LAST_NAMES, *VALUES))
# Regular expressions that find them in a text.
PERSON = rf"\b(?:{'|'.join(FIRST_NAMES)}) (?:{'|'.join(LAST_NAMES)})\b"
VALUE = rf"\b(?:{'|'.join(VALUES)})\b"

GROUPS = {"train": (768, 4096), "held-out": (0, 768)}  # positions in a fixed shuffle
FULL = {"born": "Where was {} born?", "job": "What is the job of {}?"}


class Question(NamedTuple):
    """A question of NQ Search, generated or from data."""

    text: str
    answers: list[str]  # the golden ones
    # Only generated questions have these:
    group: str = ""
    people: Sequence[str] = ()  # in the order of the chain; the last one's article has the answer


@cache
def facts(group: str) -> dict[str, dict[str, str]]:
    """Return {person: {relation: value}} for the people of a group. Their friends form a circle."""
    start, stop = GROUPS[group]
    names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    people = np.random.default_rng(7).permutation(names)[start:stop].tolist()

    rng = np.random.default_rng((3, start))
    facts_of = {}
    for k, person in enumerate(people):
        facts_of[person] = {
            "born": rng.choice(PLACES),
            "job": rng.choice(JOBS),
            "friend": people[k + 1 - len(people)],
        }
    return facts_of


def question(seed: int, style: str) -> Question:
    """Return the question of a seed: about a person or, with probability 1/2, about a person's
    friend. Full: "What is the job of the friend of Ada Finch?" Terse: " Ada Finch friend job"."""
    rng = np.random.default_rng(seed)
    group = "held-out" if held_out(seed) else "train"
    facts_of = facts(group)
    person = list(facts_of)[rng.integers(len(facts_of))]

    people = [person]
    terse = f" {person}"
    full = person
    if rng.random() >= 0.5:
        people.append(facts_of[person]["friend"])
        terse += " friend"
        full = f"the friend of {person}"

    relation = rng.choice(["born", "job"])
    text = FULL[relation].format(full) if style == "full" else f"{terse} {relation}"
    return Question(text, [facts_of[people[-1]][relation]], group, people)


@cache
def retriever(group: str) -> Retriever:
    """Return the index of the articles about the people of a group."""
    articles = []
    for person, values in facts(group).items():
        sentence = ", ".join(f"{relation} {value}" for relation, value in values.items())
        articles.append(f"{person}\n{sentence}")
    return Retriever(articles)


def search(group: str, queries: list[str], topk: int) -> list[list[str]]:
    """Return the `topk` best articles of a group for each query, best first."""
    return retriever(group).search(queries, topk)
