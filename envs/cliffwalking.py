"""CliffWalking, as text: along the cliff to the goal, one step at a time.

Paper: section 4.1, appendix D "CliffWalking"; Table env_details (200 actions). A control experiment: easy enough that
on-policy training solves it, so replay is not expected to help. The dynamics are Gymnasium's own `CliffWalking-v1`
(Sutton and Barto, example 6.6): a 4x12 grid, -1 a step, -100 for a fall, which leads back to the start. The task is
the same for every seed; held-out seeds differ in nothing but the sampling.

`score` is the sum of Gymnasium's rewards, success is reaching the goal. An unreadable reply costs its turn, -1 (or it
would be the cheapest move of all), and the format penalty, which counts in the return but not in the score.

Where we differ: the paper's optimal score is 0 (its environment comes from a private package); with Gymnasium's
rewards it is -13, the length of the shortest way. A game of 200 turns scores -2079 if played at random, with a success
of 0.023 (exact; `tables`). 200 turns is the paper preset's; the default here is 50, for the tiny models. Seq Len 2048
ends full-style games after some 40 turns in any case.

Exercise: |r| + epsilon is a poor priority here. Good games have a return near -13 and bad ones near -1000, so the
smaller epsilon, the more replay prefers the worst games; the tiny preset's epsilon of 1000 makes them almost equal, and
leaves freshness. Try `--epsilon 0.01` and watch `replay_success`.
"""

from functools import cache

import gymnasium
import numpy as np

from envs.base import Observation, TextEnv, observations, parse_answer
from envs.frozenlake import solve

ACTIONS = ("Up", "Right", "Down", "Left")  # Gymnasium's order
ROWS, COLUMNS = 4, 12
START, SHORTEST = 36, 13  # state, and turns from there to the goal

RULES = """\
You are walking along a cliff, on a grid of 4 rows and 12 columns. You start in row 4, column 1; the goal G is in row \
4, column 12; the cells C between them are the cliff.
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
_ _ _ _ _ _ _ _ _ _ _ _
P C C C C C C C C C C G
Every step costs 1. Stepping over the cliff costs 100 and leads back to the start. At the edge of the grid you stay \
where you are. Reach the goal at the lowest cost; you have {turns} actions.
Actions: Left, Down, Right, Up.
Reply with one action in the form <answer> action </answer>, for example <answer> Right </answer>.
"""


@cache
def tables(horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact values of every state s with h = 0..horizon actions left, by dynamic programming over Gymnasium's table:
    the best return by action [h, s, a], the random player's mean return [h, s] and its probability of success [h, s].
    """
    moves = gymnasium.make("CliffWalking-v1").unwrapped.P
    returns, mean = solve(moves, horizon)
    reached = {s: {a: [(p, t, float(end), end) for p, t, _, end in moves[s][a]] for a in moves[s]} for s in moves}
    return returns, mean, solve(reached, horizon)[1]


def cell_name(state: int) -> str:
    """Column a to l, row 1 to 4 from the top."""
    row, col = divmod(state, COLUMNS)
    return f"{'abcdefghijkl'[col]}{row + 1}"


class CliffWalking(TextEnv):
    """`style` "full" draws the grid once and names row and column at every turn; "terse" shows the cell alone."""

    max_turns = 50
    metrics = ("score",)
    words = (*ACTIONS, *(f" {letter}" for letter in "abcdefghijkl"))
    warm_start = ((200, 10), (20, 50))  # short games first: they are cheap

    observation_space = observations(5000)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Observation, dict]:
        """Always the same start."""
        super().reset(seed=seed)
        self.world = gymnasium.make("CliffWalking-v1", disable_env_checker=True).unwrapped
        self.world.reset(seed=seed)
        self.turn, self.score, self.last_reward = 0, 0.0, 0.0
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        action = parse_answer(reply)
        valid, reward, ended = action in ACTIONS, -1.0, False
        if valid:
            _, reward, ended, _, _ = self.world.step(ACTIONS.index(action))
        self.score += float(reward)
        self.last_reward = float(reward) if valid else reward - self.format_penalty
        info = {"success": bool(ended), "valid": valid, "metrics": {"score": self.score}}
        return self.observe(), self.last_reward, bool(ended), self.turn >= self.max_turns, info

    def random_reply(self, rng: np.random.Generator) -> str:
        return f"<answer>{ACTIONS[rng.integers(4)]}</answer>"

    def optimal_reply(self) -> str:
        """The action that maximises the return of the turns that are left: the shortest way if it fits."""
        best = tables(self.max_turns)[0][self.max_turns - self.turn]
        return f"<answer>{ACTIONS[int(best[self.world.s].argmax())]}</answer>"

    def baselines(self, seed: int) -> dict[str, float]:
        """Exact probability of success for a `random` and an `optimal` player, the same for every seed."""
        random = tables(self.max_turns)[2][-1, START]
        return {"random": float(random), "optimal": float(self.max_turns >= SHORTEST)}

    def caption(self) -> str:
        """The four neighbours: `Up c2 Right d3 Down X Left b3`, where X is the cliff and the edge leads nowhere."""
        ways = zip(ACTIONS, self.world.P[int(self.world.s)].values(), strict=True)
        return " ".join(f"{action} {'X' if cost == -100 else cell_name(t)}" for action, [(_, t, cost, _)] in ways)

    def observe(self) -> Observation:
        if self.style == "terse":
            return Observation(f" {cell_name(int(self.world.s))}")
        row, col = divmod(int(self.world.s), COLUMNS)
        opening = f"Reward: {self.last_reward:g}. " if self.turn else RULES.format(turns=self.max_turns)
        left = self.max_turns - self.turn
        return Observation(
            f"{opening}Turn {self.turn + 1}, actions left: {left}. You: row {row + 1}, column {col + 1}."
        )


if __name__ == "__main__":
    from envs.play import main

    main(CliffWalking)
