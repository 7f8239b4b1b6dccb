"""NQ Search: answer a question with the help of a search engine, in at most 5 replies.

Paper: appendix D, "NQ Search"; Table 2 (5 actions, binary reward).

A reply is either a search or an answer. A search is answered by the 3 best passages (terse: by the
best one). An answer ends the episode, and earns 1 for an exact match after SQuAD's normalisation
(in the authors' code: for a substring). A reply that is neither uses up its turn and costs the
format penalty. A server that fails ends the run before anything is trained on, because an episode
without its passages would blame the policy.

Questions come from `data` (Search-R1's fields `question` and `golden_answers`) with a server at
`search_url` (examples/search_server.py). Without `data` they are generated and searched in this
process (envs/synthetic_wiki.py).
"""

import re
import string
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from envs import synthetic_wiki
from envs.base import Observation, Step, UserError, parse_block
from envs.data import QuestionEnv, as_text
from envs.search import MAX_TEXT, harmless, retrieve
from envs.synthetic_wiki import Question

TOPK = 3

RULES = f"""\
Answer the question. An encyclopaedia can be searched: <search> query </search> returns its {TOPK} \
best passages between <information> and </information>. You have {{budget}} replies; a reply holds \
one search or the answer, and the answer ends the episode. Only the shortest form of the answer \
counts: a name, a date or a few words, no sentence.
"""
FORM = (
    "Reply with <search> query </search> or <answer> answer </answer>; "
    "you may think first in <think> </think>."
)


def normalize(text: str) -> str:
    """Return a text in the form that SQuAD and Search-R1 compare: lower case, no punctuation, no
    articles, single spaces."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, golden_answers: list[str]) -> bool:
    """Return whether a normalised answer equals a normalised golden answer. A sentence around the
    answer is not accepted, because it may hold several answers."""
    return normalize(answer) in map(normalize, golden_answers)


def parse_action(reply: str) -> tuple[str, str]:
    """Return ("search", query) or ("answer", text), or ("", "") unless the reply has exactly one of
    them outside its thought."""
    kind, text = parse_block(reply, "search|answer|information")
    return (kind, text) if text and kind != "information" else ("", "")


class NQSearch(QuestionEnv):
    """Questions to answer by searching. Raises UserError unless `data` and `search_url` come
    together and can be used."""

    settings = ("data", "search_url")
    max_turns = 5
    metrics = ("searches",)
    searches = 0.0
    words = ("<search>", "</search>", "<information>", "</information>", *synthetic_wiki.WORDS)
    warm_start = ((600, 1), (2400, 4))  # with less, the second name of a chain is not copied right

    def __init__(self, data: str = "", search_url: str = "", **common: Any):
        if bool(data) != bool(search_url) or not re.match("http://|$", search_url):
            raise UserError("--data and --search_url need each other and an http:// address")
        super().__init__(data, **common)
        self.topk = 1 if self.style == "terse" else TOPK
        self.search_url = search_url
        self.seen: list[str] = []  # the question and all passages so far

    @staticmethod
    def from_row(row: dict) -> Question:
        """Return the question of a row. Raises UserError if its golden answers are no list of
        texts that can be compared."""
        answers = row.get("golden_answers")
        listed = answers if isinstance(answers, list) else []
        texts = [as_text(answer, "golden_answers") for answer in listed]
        # If nothing is left of one, any article would be right.
        if not texts or not all(map(normalize, texts)):
            allowed = "a list of texts with more than articles and punctuation"
            raise UserError(f"the field golden_answers is {answers}, but must be {allowed}")
        return Question(harmless(as_text(row.get("question"), "question")), texts)

    def generate(self, seed: int) -> Question:
        return synthetic_wiki.question(seed, self.style)

    def start(self, seed: int) -> None:
        super().start(seed)
        self.passages: list[str] = []  # of the last search
        self.seen = [self.question.text]

    def step(self, reply: str) -> Step:
        return self.step_many([self], [reply])[0]

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> list[Step]:
        """Step each environment with its reply. They search one corpus, in one call. If the server
        fails, raises SearchError before any environment has taken its turn."""
        (corpus,) = {env.question.group or env.search_url for env in envs}
        search = retrieve if envs[0].search_url else synthetic_wiki.search
        actions = [parse_action(reply) for reply in replies]
        queries = [text[:MAX_TEXT] for kind, text in actions if kind == "search"]
        found = iter(search(corpus, queries, envs[0].topk) if queries else [])
        return [env.act(kind, text, found) for env, (kind, text) in zip(envs, actions)]

    def act(self, kind: str, text: str, found: Iterator[list[str]]) -> Step:
        """Take one turn, given kind and text of a reply. A search takes its passages from `found`.
        Returns the same values as `step`."""
        valid = kind != ""
        self.feedback = "" if valid else "Your last reply could not be read.\n"
        if kind == "search":
            self.searches += 1
            self.passages = next(found)
            self.seen += self.passages

        success = kind == "answer" and exact_match(text, self.question.answers)
        reward = float(success) if valid else -self.format_penalty
        return self.end_turn(reward, success, kind == "answer", valid)

    def observe(self) -> Observation:
        """Return the passages of the last search, then the question."""
        if self.style == "terse":
            passages = "\n".join(self.passages).replace("\n", "\n ")
            shown = f"<information> {passages}</information>" if passages else ""
            return Observation(shown + self.question.text)

        opening = self.feedback
        if self.turn == 0:
            opening = RULES.format(budget=self.max_turns)
        if self.searches:
            passages = "\n\n".join(self.passages) or "Nothing was found."
            opening += f"<information>\n{passages}\n</information>\n"

        left = self.max_turns - self.turn
        return Observation(f"{opening}Question: {self.question.text}\nReplies left: {left}. {FORM}")

    def random_reply(self, rng: np.random.Generator) -> str:
        """Return a search for a person, or a value as answer, with probability 1/2 each. With
        `data`, it never searches: the random policy asks no server."""
        tag = "answer"
        pattern = synthetic_wiki.VALUE
        if not self.data and rng.random() < 0.5:
            tag = "search"
            pattern = synthetic_wiki.PERSON

        choices = re.findall(pattern, "\n".join(self.seen)) or synthetic_wiki.VALUES
        return f"<{tag}> {rng.choice(list(dict.fromkeys(choices)))}</{tag}>"

    def optimal_reply(self) -> str:
        """Return the search for the next person of the chain, if the question is generated, then
        the answer."""
        for person in self.question.people:
            if not any(passage.startswith(f"{person}\n") for passage in self.seen):
                return f"<search> {person}</search>"
        return f"<answer> {self.question.answers[0]}</answer>"

    def caption(self) -> str:
        """Return the facts of the passages in random order, ` Ada Finch job cook Bo Hale born Rome
        ...`, or the person of the question if there are none. It never singles out the answer."""
        facts = []
        for passage in self.passages:
            person, values = passage.split("\n")
            facts += [f" {person} {fact}" for fact in values.split(", ")]
        return "".join(self.np_random.permutation(facts)) or f" {self.question.people[0]}"
