"""A made-up encyclopaedia and questions about it: GENERATED stand-ins for Wikipedia and Natural Questions.

Not in the paper; it lets the NQ task run without a download, and a tiny model learn it. An article for each of 1,024
people:

    Ada Finch
    born Oslo, job cook, friend Bo Hale

which makes 3,072 facts. A question asks for a place or a job: of a person (one hop), or of a person's friend (two hops:
the friend's name stands in the first article, the answer in the second). Everything follows from a fixed seed.

Questions in training, in evaluation and in the warm start are about different people, and friends are of the same
group, so that an answer on held-out questions is read and not remembered.
"""

import json
import re
import tempfile
import threading
from dataclasses import dataclass
from functools import cache

import numpy as np

from envs.base import WARM_START_SEEDS, held_out

GIVEN = """
Ada Bea Bo Cleo Dan Eva Finn Gus Hana Ivo Jo Kim Leo Mia Ned Olga
Pia Quin Ray Sue Tom Una Vic Wanda Xena Yuri Zoe Amir Boris Clara Diego Elsa
""".split()
FAMILY = """
Finch Hale Stone Marsh Reed Wolf Berg Frost Klein Lind Moss Nash Orr Page Quist Rook
Shaw Tait Ueda Voss Webb Yates Zorn Abel Brook Cole Drew Engel Fox Grant Holt Iqbal
""".split()
PLACES = "Oslo Rome Lima Cairo Delhi Kyoto Quito Perth".split()
JOBS = "cook baker pilot judge nurse tailor miner singer".split()
VALUES = PLACES + JOBS
RELATIONS = ("born", "job", "friend")
WORDS = tuple(f" {word}" for word in (*RELATIONS, *GIVEN, *FAMILY, *VALUES))  # a token each, with its space

FULL = {"born": "Where was {} born?", "job": "What is the job of {}?"}
_PERSON = re.compile(rf"\b(?:{'|'.join(GIVEN)}) (?:{'|'.join(FAMILY)})\b")
_VALUE = re.compile(rf"\b(?:{'|'.join(VALUES)})\b")


@cache
def facts() -> dict[str, dict[str, str]]:
    """person: {relation: value}. Friends form a circle in each group of `subjects`."""
    rng = np.random.default_rng(3)  # with which no rank in a search is a matter of rounding
    friends = dict(pair for group in subjects().values() for pair in zip(group, group[1:] + group[:1], strict=True))
    return {
        person: {"born": PLACES[rng.integers(len(PLACES))], "job": JOBS[rng.integers(len(JOBS))], "friend": friend}
        for person, friend in sorted(friends.items())
    }


def article(person: str) -> str:
    """As the corpus holds it: title, then text."""
    return f"{person}\n" + ", ".join(f"{relation} {facts()[person][relation]}" for relation in RELATIONS)


@cache
def subjects() -> dict[str, list[str]]:
    """Who is asked about: six tenths of the people in training, two each in evaluation and in the warm start."""
    everybody = sorted(f"{given} {family}" for given in GIVEN for family in FAMILY)
    people = np.random.default_rng(7).permutation(everybody).tolist()
    a, b = len(people) * 6 // 10, len(people) * 8 // 10
    return {"train": people[:a], "held-out": people[a:b], "warm start": people[b:]}


@dataclass(frozen=True)
class Question:
    people: tuple[str, ...]  # whose articles answer it, in the order of the hops
    relation: str  # asked of the last of them
    answer: str

    @property
    def terse(self) -> str:
        return f" {self.people[0]}{' friend' * (len(self.people) - 1)} {self.relation}"

    @property
    def full(self) -> str:
        who = self.people[0] if len(self.people) == 1 else f"the friend of {self.people[0]}"
        return FULL[self.relation].format(who)


def question(seed: int) -> Question:
    """The question of this seed: a place or a job, in one hop or in two, all equally likely."""
    rng = np.random.default_rng(seed)
    kind = "held-out" if held_out(seed) else "warm start" if seed >= WARM_START_SEEDS else "train"
    person = subjects()[kind][rng.integers(len(subjects()[kind]))]
    people = (person,) if rng.random() < 0.5 else (person, facts()[person]["friend"])
    relation = ("born", "job")[rng.integers(2)]
    return Question(people, relation, facts()[people[-1]][relation])


def people_in(text: str) -> list[str]:
    """Different people named in a text, in order."""
    return list(dict.fromkeys(_PERSON.findall(text)))


def values_in(text: str) -> list[str]:
    """Different places and jobs named in a text, in order."""
    return list(dict.fromkeys(_VALUE.findall(text)))


def retell(asked: Question, passages: list[str]) -> str:
    """Question and passages in other words: ` job friend Ada Finch born Oslo Rome Lima job cook ...`."""
    told = " ".join(reversed(asked.terse.split()[2:])) + f" {asked.people[0]}"
    for relation in RELATIONS if passages else ():
        found = (re.search(rf"\b{relation} ([\w ]+)", passage) for passage in passages)
        told += f" {relation} " + " ".join(match[1] for match in found if match)
    return f" {told}"


@cache
def server_url() -> str:
    """The address of a server over the articles, started in this process on a free loopback port at the first call."""
    from envs.search_encoders import LocalEncoder  # FAISS is needed from here on only
    from envs.search_server import Corpus, Retriever, SearchServer, build_index

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps({"id": person, "contents": article(person)}) + "\n" for person in facts())
        file.flush()
        corpus = Corpus(file.name)  # stays readable: the file is mapped into memory
    encoder = LocalEncoder(corpus.contents())
    server = SearchServer(Retriever(corpus, encoder, build_index(corpus, encoder)))
    threading.Thread(target=server.serve_forever, name="search server", daemon=True).start()
    return server.url
