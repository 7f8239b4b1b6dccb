"""What FrozenLake, CliffWalking and Sokoban share: a reply is one of four directions. Paper: appendix D."""

from collections.abc import Callable

from envs.base import Observation, TextEnv, parse_action

UNREADABLE = "Your last reply could not be read. "
FORM = "Reply with one action in the form <answer> action </answer>, for example <answer> Right </answer>."


def cell_name(row: int, col: int) -> str:
    """Return the name of a cell in captions: columns are a, b, ... from the left, rows 1, 2, ... from the top."""
    return f"{'abcdefghijkl'[col]}{row + 1}"


class GridWorld(TextEnv):
    """The base class. Every task defines `start` and `act`. An unreadable reply earns `turn_reward` less the format
    penalty, and leaves the state as it is. `score` is the sum of rewards without these penalties."""

    start: Callable[[int], None]  # set up the task of a seed
    act: Callable[
        [int], tuple[float, bool, bool]
    ]  # take an action: reward, success, end of the episode

    actions = ("Left", "Down", "Right", "Up")
    turn_reward = 0.0  # of a turn without an action

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Observation, dict]:
        super().reset(seed=seed)
        self.turn, self.score = 0, 0.0
        self.start(self.episode_seed(seed))
        return self.observe(), {"success": False}

    def step(self, reply: str) -> tuple[Observation, float, bool, bool, dict]:
        self.turn += 1
        action = parse_action(reply, self.actions)
        valid = action is not None
        reward, success, ended = (
            (self.turn_reward, False, False) if action is None else self.act(action)
        )
        self.score += reward
        reward -= 0.0 if valid else self.format_penalty
        self.feedback = f"{'' if valid else UNREADABLE}Reward: {reward:g}."
        info = {
            "success": success,
            "valid": valid,
            "metrics": dict.fromkeys(self.metrics, self.score),
        }
        return self.observe(), reward, ended, self.turn >= self.max_turns, info

    def prompt(self, rules: str, state: str) -> str:
        """Return the text of the "full" style: rules, or feedback in later turns, then the turn and the state."""
        opening = self.feedback if self.turn else rules
        return (
            f"{opening}\nTurn {self.turn + 1}, actions left: {self.max_turns - self.turn}.\n{state}"
        )
