"""NQ Search: answer a question with a search engine, in at most 5 replies.

Paper: appendix D, "NQ Search"; Table env_details (5 actions, binary reward). A reply is `<search> query </search>`,
which is answered by the top 3 passages between `<information>` and `</information>`, or `<answer> ... </answer>`, which
ends the episode; `<think> ... </think>` may come first. Reward 1 for an exact match with any golden answer after
SQuAD's normalisation (case, punctuation, articles, whitespace), else 0. A reply with no action or with several
costs its turn and the format penalty, and leaves everything as it is.

Questions come from `data` (Search-R1's fields `id, question, golden_answers`) with a server at `search_url`; without
`data` they are generated (envs/encyclopaedia.py) and searched in a server of our own, in this process, over HTTP.

Where we differ: the authors score by substring, which gives the answer "." full reward. Retrieved text is not
trusted: angle brackets in it are replaced, so that no passage can close its block, pose as a reply, or write special
tokens. A search that fails for good ends the episode as truncated and is counted in `search_failed`.
"""

import re
import string
import warnings
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from envs import encyclopaedia
from envs.base import FORMAT_PENALTY, Observation, TextEnv, held_out, observations, outside_think, parse_tag, play_out
from envs.data import load_rows, row_for
from envs.search_client import SearchError, check_url, retrieve

TOPK = 3
MAX_QUERY, MAX_PASSAGE = 500, 2000  # characters; Wikipedia's passages have about 600
TAGS = ("search", "answer", "information", "think")

RULES = """\
Answer the question. An encyclopaedia can be searched: <search> query </search> brings its {topk} best passages \
between <information> and </information>. You have {turns} replies; each holds one search or the answer, and the \
answer ends the game. Only the shortest form of the answer counts: a name, a date or a few words, no sentence.
"""
FORM = (
    "Reply with <search> query </search> or <answer> answer </answer>; "
    "you may think first, between <think> and </think>."
)


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, golden_answers: list[str]) -> bool:
    """Whether the answers are the same after normalisation. What leaves nothing (".", "the") matches nothing."""
    said = normalize(answer)
    return bool(said) and said in {normalize(golden) for golden in golden_answers}


def parse_action(reply: str) -> tuple[str, str] | None:
    """("search", query) or ("answer", text), or None unless the reply holds exactly one, outside any thought."""
    spoken = outside_think(reply) or ""
    tags = [tag for tag in TAGS if f"<{tag}>" in spoken or f"</{tag}>" in spoken]
    if len(tags) != 1 or tags[0] not in ("search", "answer"):
        return None
    text = parse_tag(reply, tags[0])
    if not text or (tags[0] == "search" and len(text) > MAX_QUERY):
        return None
    return tags[0], text


def harmless(text: str) -> str:
    """Foreign text without angle brackets: no tag and no special token of any tokenizer survives."""
    return text[:MAX_PASSAGE].replace("<", "‹").replace(">", "›")


@cache
def load_questions(data: str, split: str) -> list[dict[str, Any]]:
    """[{question, golden_answers: list of str}]. Raises ValueError that names file, row and field."""
    rows = load_rows(data, split, ("question", "golden_answers"))
    for row in rows:
        answers = row["golden_answers"]
        if not isinstance(row["question"], str):
            raise ValueError(f"{row['where']}: question must be a string")
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"{row['where']}: golden_answers must be a list of strings")
    return rows


class NQSearch(TextEnv):
    """`style` "full" writes the rules out, "terse" shows question and passages alone. Raises ValueError for data or
    an address that are no good, or for data without an address."""

    max_turns = 5
    metrics: ClassVar[tuple[str, ...]] = ("searches", "search_failed")
    words = ("<search>", "</search>", "<information>", "</information>", *encyclopaedia.WORDS)
    warm_start = ((400, 1), (250, 5))  # mostly to read, then to play
    search_timeout, search_attempts = 30.0, 3  # seconds of one attempt; attempts

    def __init__(
        self,
        style: str = "terse",
        format_penalty: float = FORMAT_PENALTY,
        max_turns: int = 0,
        data: str = "",
        search_url: str = "",
    ):
        super().__init__(style, format_penalty, max_turns)
        if data and not search_url:
            raise ValueError("--search_url is empty, but with --data it must name a server, see envs/search_server.py")
        self.search_url = check_url(search_url) if search_url else ""
        self.rows = {split: load_questions(data, split) for split in ("train", "validation")} if data else {}
        self.observation_space = observations(100_000)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        seed = self.episode_seed(seed)
        self.puzzle = None if self.rows else encyclopaedia.question(seed)
        if self.puzzle:
            self.question = self.puzzle.full if self.style == "full" else self.puzzle.terse
            self.golden_answers = [self.puzzle.answer]
        else:
            row = row_for(self.rows["validation" if held_out(seed) else "train"], seed)
            self.question, self.golden_answers = harmless(row["question"]), row["golden_answers"]
        self.turn, self.searches, self.failed = 0, 0, False
        self.readable = True
        self.passages: list[str] = []  # of the last search
        self.seen: list[str] = [self.question]  # the question and all passages so far
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        return self.step_many([self], [reply])[0]

    @classmethod
    def step_many(cls, envs: list[Self], replies: list[str]) -> list[tuple]:
        """As `step` on each, but with one request to a server for all that search."""
        actions = [parse_action(reply) for reply in replies]
        queries: dict[str, dict[int, str]] = {}  # address: {number of the environment: query}
        for k, (env, action) in enumerate(zip(envs, actions, strict=True)):
            if action and action[0] == "search":
                queries.setdefault(env.search_url or encyclopaedia.server_url(), {})[k] = action[1]
        found: dict[int, list[str]] = {}
        for url, asked in queries.items():
            try:
                passages = retrieve(url, list(asked.values()), TOPK, cls.search_timeout, cls.search_attempts)
            except SearchError as error:
                warnings.warn(f"{len(asked)} searches failed, their episodes end here: {error}", stacklevel=2)
            else:
                found |= zip(asked, passages, strict=True)
        return [env._advance(action, found.get(k)) for k, (env, action) in enumerate(zip(envs, actions, strict=True))]

    def _advance(
        self, action: tuple[str, str] | None, passages: list[str] | None
    ) -> tuple[Observation, float, bool, bool, dict]:
        """One turn. `passages` is None where there was no search, or where it failed."""
        self.turn += 1
        kind, text = action or ("", "")
        self.readable, answered = bool(action), kind == "answer"
        success = answered and exact_match(text, self.golden_answers)
        if self.readable and not answered:
            self.searches += 1
            self.failed = passages is None
            self.passages = [harmless(passage) for passage in passages or []]
            self.seen += self.passages
        reward = float(success) if self.readable else -self.format_penalty
        metrics = {"searches": float(self.searches), "search_failed": float(self.failed)}
        info = {"success": success, "valid": self.readable, "metrics": metrics}
        return self.observe(), reward, answered, self.failed or self.turn >= self.max_turns, info

    def observe(self) -> Observation:
        """The passages of the last search, then the question."""
        if self.style == "terse":
            shown = " " + "\n".join(self.passages).replace("\n", "\n ")
            return Observation((f"<information>{shown}</information>" if self.passages else "") + self.question)
        opening = RULES.format(topk=TOPK, turns=self.max_turns) if self.turn == 0 else ""
        if not self.readable:
            opening = "Your last reply could not be read.\n"
        if self.searches:
            shown = "\n\n".join(self.passages) or "Nothing was found."
            opening += f"<information>\n{shown}\n</information>\n"
        left = self.max_turns - self.turn
        return Observation(f"{opening}Question: {self.question}\nReplies left: {left}. {FORM}")

    def random_reply(self, rng: np.random.Generator) -> str:
        """Search or answer with probability 1/2 each: for a person named so far, or with a value named so far (in
        `data`, a word); where none has been named yet, with any of the encyclopaedia's values."""
        text = "\n".join(self.seen)
        people, values = (
            (encyclopaedia.people_in(text), encyclopaedia.values_in(text) or encyclopaedia.VALUES)
            if self.puzzle
            else (re.findall(r"\w+", text) or ["?"],) * 2
        )
        tag, choices = ("search", people) if rng.random() < 0.5 else ("answer", values)
        return f"<{tag}> {choices[rng.integers(len(choices))]}</{tag}>"

    def optimal_reply(self) -> str:
        """For generated questions: look each person of the chain up, then answer. Raises ValueError for others."""
        if not self.puzzle:
            raise ValueError("the best reply is known for generated questions only")
        for person in self.puzzle.people:
            if not any(passage.startswith(f"{person}\n") for passage in self.seen):
                return f"<search> {person}</search>"
        return f"<answer> {self.puzzle.answer}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """One game of the `random` player, and for generated questions one of the `optimal` player."""
        known = super().baselines(seed)
        if self.puzzle:
            known["optimal"] = float(play_out(self, seed, self.optimal_reply)[2]["success"])
        return known

    def has_exact_baselines(self) -> bool:
        return False

    def caption(self) -> str:
        """The question again, backwards, and what the passages say, relation by relation instead of person by
        person: all values, in the order of the passages."""
        return encyclopaedia.retell(self.puzzle, self.passages) if self.puzzle else self.question


if __name__ == "__main__":
    from envs.play import main

    main(NQSearch)
