"""Generate a synthetic encyclopaedia and questions about it: stand-ins for Wikipedia and Natural Questions.

Ours: NQ Search without a download, at a size that a tiny model can learn. An article:

    Ada Finch
    born Oslo, job cook, friend Bo Hale

A question asks for the place or the job of a person (one hop), or of a person's friend (two hops). 3,328 people
are for training (13,312 different questions) and the warm start, 768 are held out; friends belong to the same group.
"""

import re
from functools import cache
from typing import NamedTuple

import numpy as np

from envs.base import held_out
from envs.search_server import LocalEncoder, Retriever

GIVEN = """Ada Bea Bo Cleo Dan Eva Finn Gus Hana Ivo Jo Kim Leo Mia Ned Olga Pia Quin Ray Sue Tom Una Vic Wanda Xena
Yuri Zoe Amir Boris Clara Diego Elsa Anton Astrid Bruno Carla Cyril Dora Edgar Erik Fay Felix Greta Hugo Ines Jana Karl
Lars Lena Marco Nadia Nina Otto Paula Petra Rosa Rudi Sven Tara Theo Uma Vera Walt Yves""".split()
FAMILY = """Finch Hale Stone Marsh Reed Wolf Berg Frost Klein Lind Moss Nash Orr Page Quist Rook Shaw Tait Ueda Voss
Webb Yates Zorn Abel Brook Cole Drew Engel Fox Grant Holt Iqbal Adler Barth Bloom Craig Dahl Dunn Ellis Falk Ford Gale
Hardy Hicks Jung Kane Kerr Lowe Mann Munk Nolan Olsen Pike Pratt Quill Rios Sand Swan Thorn Udall Vance Wells Young
Zell""".split()
PLACES = "Oslo Rome Lima Cairo Delhi Kyoto Quito Perth".split()
JOBS = "cook baker pilot judge nurse tailor miner singer".split()
VALUES = PLACES + JOBS
RELATIONS = ("born", "job", "friend")
WORDS = tuple(
    f" {word}" for word in (*RELATIONS, *GIVEN, *FAMILY, *VALUES)
)  # one token each, with its space
PERSON = re.compile(rf"\b(?:{'|'.join(GIVEN)}) (?:{'|'.join(FAMILY)})\b")
VALUE = re.compile(rf"\b(?:{'|'.join(VALUES)})\b")

GROUPS = {"train": (768, 4096), "held-out": (0, 768)}  # positions in a fixed shuffle
FULL = {"born": "Where was {} born?", "job": "What is the job of {}?"}


@cache
def facts(group: str) -> dict[str, dict[str, str]]:
    """Return {person: {relation: value}} for the people of a group. Their friends form a circle."""
    start, stop = GROUPS[group]
    everybody = [f"{given} {family}" for given in GIVEN for family in FAMILY]
    people = np.random.default_rng(7).permutation(everybody)[start:stop].tolist()
    rng = np.random.default_rng((3, start))
    return {
        person: {
            "born": PLACES[rng.integers(len(PLACES))],
            "job": JOBS[rng.integers(len(JOBS))],
            "friend": friend,
        }
        for person, friend in zip(people, people[1:] + people[:1], strict=True)
    }


class Question(NamedTuple):
    group: str
    people: list[str]  # to look up in this order; the article about the last one holds the answer
    answer: str
    terse: str  # for a tiny model: " Ada Finch friend job"
    full: str  # "What is the job of the friend of Ada Finch?"


def question(seed: int) -> Question:
    """Return the question of a seed: about a person or, with probability 1/2, about a person's friend."""
    rng = np.random.default_rng(seed)
    group = "held-out" if held_out(seed) else "train"
    known = facts(group)
    person = list(known)[rng.integers(len(known))]
    people, terse, full = [person], f" {person}", person
    if rng.random() >= 0.5:
        people, terse, full = (
            [person, known[person]["friend"]],
            f" {person} friend",
            f"the friend of {person}",
        )
    relation = ("born", "job")[rng.integers(2)]
    return Question(
        group,
        people,
        known[people[-1]][relation],
        f"{terse} {relation}",
        FULL[relation].format(full),
    )


@cache
def retriever(group: str) -> Retriever:
    """Return the index of the articles about the people of a group."""
    known = {
        person: ", ".join(map(" ".join, values.items())) for person, values in facts(group).items()
    }
    articles = [f"{person}\n{values}" for person, values in known.items()]
    return Retriever(articles, LocalEncoder(articles))


def search(group: str, queries: list[str], topk: int) -> list[list[str]]:
    """Return the `topk` best articles of a group for each query, best first."""
    return [[article for article, _ in row] for row in retriever(group).search(queries, topk)]
