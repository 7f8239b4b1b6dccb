"""NQ Search: answer a question with the help of a search engine, in at most 5 replies.

Paper: appendix D, "NQ Search"; Table 2 (5 actions, binary reward). A reply is a search, answered by the 3 best
passages (terse: by the best), or an answer, with reward 1 for an exact match after SQuAD's normalisation (the authors':
for a substring). An answer ends the episode; a reply that is neither costs its turn and the format penalty. A server
that fails ends the run, before anything is trained on: an episode without its passages would blame the policy.

Questions come from `data` (Search-R1's fields `question, golden_answers`) with a server at `search_url`
(envs/search_server.py); without `data` they are generated and searched in this process (envs/synthetic_wiki.py).
"""

import re
import string
from typing import Any, Self

import numpy as np

import envs.synthetic_wiki as synthetic_wiki
from envs.base import Observation, TextEnv, outside_think
from envs.data import load_rows, row_for
from envs.search_server import retrieve

TOPK = 3
MAX_TEXT = 2000  # characters of a passage or a query; Wikipedia's passages have about 600

RULES = f"""\
Answer the question. An encyclopaedia can be searched: <search> query </search> returns its {TOPK} best passages \
between <information> and </information>. You have {{budget}}; a reply holds one search or the answer, and the \
answer ends the episode. Only the shortest form of the answer counts: a name, a date or a few words, no sentence.
"""
FORM = "Reply with <search> query </search> or <answer> answer </answer>; you may think first in <think> </think>."


def exact_match(answer: str, golden_answers: list[str]) -> bool:
    """Return whether the answer equals a golden one after SQuAD's normalisation: lower case, no punctuation, no
    articles, single spaces. An answer that is empty then (".") equals none."""

    def normal(text: str) -> str:
        text = text.lower().translate(str.maketrans("", "", string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    return normal(answer) != "" and normal(answer) in map(normal, golden_answers)


def parse_action(reply: str) -> tuple[str, str]:
    """Return ("search", query) or ("answer", text), or ("", "") unless exactly one of them stands outside `<think>`."""
    parts = re.split(
        "<(/?)(search|answer|information)>", outside_think(reply), flags=re.ASCII | re.IGNORECASE
    )
    match [part.strip() for part in parts]:
        case [_, "", kind, text, "/", end, _] if (
            text and kind.lower() == end.lower() != "information"
        ):
            return kind.lower(), text
    return "", ""


def harmless(text: str) -> str:
    """Return foreign text without angle brackets: no tag and no special token of any tokenizer survives."""
    return text[:MAX_TEXT].replace("<", "‹").replace(">", "›")


def from_row(row: dict[str, Any]) -> tuple[str, list[str]]:
    """Return question and golden answers of a row of data, which has a list of them or the only one."""
    answers = (
        row["golden_answers"]
        if isinstance(row["golden_answers"], list)
        else [row["golden_answers"]]
    )
    return harmless(str(row["question"])), list(map(str, answers))


class NQSearch(TextEnv):
    """Questions to answer by searching. Raises ValueError unless data and address come together and can be used."""

    settings = ("data", "search_url")
    max_turns = 5
    metrics = ("searches",)
    words = ("<search>", "</search>", "<information>", "</information>", *synthetic_wiki.WORDS)
    warm_start = ((600, 1), (2400, 4))  # less, and the second name of a chain is not copied right

    def __init__(self, data: str = "", search_url: str = "", **common: Any):
        super().__init__(**common)
        if bool(data) != bool(search_url) or not re.match("https?://|$", search_url):
            raise ValueError(
                f"--data {data!r} and --search_url {search_url!r} need each other and an http:// address"
            )
        self.topk = 1 if self.style == "terse" else TOPK
        self.data, self.place = (
            data,
            search_url,
        )  # where to search: an address, or the group of a generated question
        self.rows = load_rows(data, ("question", "golden_answers"), from_row) if data else {}

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        self.puzzle = None if self.data else synthetic_wiki.question(seed)
        if self.puzzle:
            self.question = self.puzzle.full if self.style == "full" else self.puzzle.terse
            self.golden_answers, self.place = [self.puzzle.answer], self.puzzle.group
        else:
            self.question, self.golden_answers = row_for(self.rows, seed)
        self.turn, self.searches, self.readable = 0, 0, True
        self.passages: list[str] = []  # of the last search
        self.seen = [self.question]  # the question and all passages so far
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        return self.step_many([self], [reply])[0]

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> list[tuple]:
        """Step each environment with its reply; all searches in one place are one call. If the server
        fails, raises ConnectionError before any environment has taken its turn."""
        actions = list(map(parse_action, replies))
        passages: dict[int, list[str]] = {}  # by the index of the environment
        for place in {
            env.place for env, (kind, _) in zip(envs, actions, strict=True) if kind == "search"
        }:
            asking = [
                k for k, env in enumerate(envs) if env.place == place and actions[k][0] == "search"
            ]
            search = synthetic_wiki.search if place in synthetic_wiki.GROUPS else retrieve
            queries = [actions[k][1][:MAX_TEXT] for k in asking]
            passages |= zip(asking, search(place, queries, envs[0].topk), strict=True)
        return [env._take(*actions[k], passages.get(k, [])) for k, env in enumerate(envs)]

    def _take(
        self, kind: str, text: str, passages: list[str]
    ) -> tuple[Observation, float, bool, bool, dict]:
        """Take one turn. `passages`: what a search found."""
        self.turn += 1
        self.readable = kind != ""
        if kind == "search":
            self.searches += 1
            self.passages = list(map(harmless, passages))
            self.seen += self.passages
        success = kind == "answer" and exact_match(text, self.golden_answers)
        reward = float(success) if self.readable else -self.format_penalty
        info = {
            "success": success,
            "valid": self.readable,
            "metrics": {"searches": float(self.searches)},
        }
        return self.observe(), reward, kind == "answer", self.turn >= self.max_turns, info

    def observe(self) -> Observation:
        """Return the passages of the last search, then the question."""
        if self.style == "terse":
            shown = "\n".join(self.passages).replace("\n", "\n ")
            return Observation(
                (f"<information> {shown}</information>" if self.passages else "") + self.question
            )
        opening = RULES.format(budget=self.budget("reply", "replies")) if self.turn == 0 else ""
        if not self.readable:
            opening = "Your last reply could not be read.\n"
        if self.searches:
            opening += (
                "<information>\n"
                + ("\n\n".join(self.passages) or "Nothing was found.")
                + "\n</information>\n"
            )
        return Observation(
            f"{opening}Question: {self.question}\nReplies left: {self.max_turns - self.turn}. {FORM}"
        )

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return a search for a person, or a value as answer, with probability 1/2 each. With `data`,
        return a word of the question as answer: a run's baseline asks no server."""
        search = self.puzzle and rng.random() < 0.5
        tag, named = (
            ("search", synthetic_wiki.PERSON) if search else ("answer", synthetic_wiki.VALUE)
        )
        choices = (
            re.findall(named if self.puzzle else r"\w+", "\n".join(self.seen))
            or synthetic_wiki.VALUES
        )
        choices = list(dict.fromkeys(choices))
        return f"<{tag}> {choices[rng.integers(len(choices))]}</{tag}>"

    def optimal_reply(self) -> str:
        """Return the search for the next person of the chain, if the question is generated, then the answer."""
        for person in self.puzzle.people if self.puzzle else ():
            if not any(passage.startswith(f"{person}\n") for passage in self.seen):
                return f"<search> {person}</search>"
        return f"<answer> {self.golden_answers[0]}</answer>"

    def caption(self) -> str:
        """Return the facts in the passages in random order, ` Ada Finch job cook Bo Hale born Rome ...`, or the person
        asked about if there are none. It never singles out the answer."""
        articles = [passage.split("\n") for passage in self.passages]
        facts = [f" {person} {fact}" for person, values in articles for fact in values.split(", ")]
        return (
            "".join(self.np_random.permutation(facts))
            or f" {synthetic_wiki.PERSON.findall(self.question)[0]}"
        )
