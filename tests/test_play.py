"""The shared command line, driven as a person would: a real process with its stdin."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from envs import ENVS
from envs.base import Observation, TextEnv
from envs.play import main

ROOT = Path(__file__).parent.parent


def run(module, *flags, typed=""):
    command = [sys.executable, "-m", f"envs.{module}", *flags]
    return subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=60)


def test_a_game_of_cliffwalking_from_start_to_goal():
    """Bare words, tagged replies, a reply that cannot be read."""
    way = ["Up", "nonsense", "<answer>Right</answer>", *["Right"] * 10, "<think>down now</think><answer>Down</answer>"]
    done = run("cliffwalking", "--play", typed="\n".join([*way, "Left"]) + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    rewards = re.findall(r"reward (\S+?)(?:, (.*))?\n", done.stdout)
    assert rewards == [("-1", "")] + [("-1.15", "the reply could not be read")] + [("-1", "")] * 12
    assert "P C C C C C C C C C C G" in done.stdout  # the full style is a person's default
    assert done.stdout.splitlines()[-1] == "success after 14 turns, return -14.15, score -14"


def test_leaving_a_game_is_not_an_error():
    done = run("cliffwalking", "--play", "--style", "terse", typed="Up\nRight\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == " a4"
    assert done.stdout.splitlines()[-1] == "left after 2 turns, return -2"


def test_pictures_are_saved_where_the_game_says():
    flags = ["--play", "--image", "--seed", "3", "--side", "8", "--boxes", "2", "--cell_size", "20"]
    done = run("sokoban", *flags, typed="Left\nUp\n")
    assert (done.returncode, done.stderr) == (0, "")
    env = ENVS["sokoban_hard_vlm"](cell_size=20)
    expected = [env.reset(seed=3)[0], *(env.step(f"<answer>{a}</answer>")[0] for a in ("Left", "Up"))]
    paths = re.findall(r"picture: (.*)", done.stdout)
    assert len(paths) == 3
    for path, observation in zip(paths, expected, strict=True):
        assert (np.asarray(Image.open(path)) == observation.images[0]).all()
        Path(path).unlink()
    Path(paths[0]).parent.rmdir()


@pytest.mark.parametrize("flags", [[], ["--slippery"]])
def test_random_games_agree_with_the_exact_probability(flags):
    n = 300
    done = run("frozenlake", "--random", str(n), "--seed", "50", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"on the seeds 50 to 349, \d+ games/s", done.stdout)
    numbers = {name: float(value) for name, value in re.findall(r"  (\w+) (\S+) ±", done.stdout)}
    assert list(numbers) == ["success", "return", "turns"]
    assert numbers["success"] == numbers["return"]
    env = ENVS["frozenlake"](slippery=bool(flags))
    p = np.mean([env.baselines(seed)["random"] for seed in range(50, 350)])
    assert abs(numbers["success"] - p) <= 4 * np.sqrt(p * (1 - p) / n)


class Coin(TextEnv):
    """Pays the seed in one turn; its own metric is whether the seed is odd."""

    metrics = ("odd",)

    def __init__(self, bonus: int = 0, **settings):
        super().__init__(**settings)
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return self.observe(), {"success": False}

    def step(self, reply):
        info = {"success": self.seed > 2, "valid": True, "metrics": {"odd": float(self.seed % 2)}}
        return self.observe(), float(self.seed + self.bonus), True, False, info

    def random_reply(self, rng):
        return "<answer>toss</answer>"

    def observe(self):
        return Observation("coin")


def test_means_and_standard_errors(capsys):
    main(Coin, ["--random", "4", "--bonus", "10"])  # seeds 0 to 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "  success 0.250 ± 0.217", "  return 11.500 ± 0.559", "  turns 1.000 ± 0.000", "  odd 0.500 ± 0.250",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--random", "0"], "--seed must be 0 or more and --random 1 or more, got 0 and 0"),
        (["--play", "--seed", "-1"], "--seed must be 0 or more and --random 1 or more, got -1 and None"),
        (["--play", "--style", "loud"], "style must be full or terse, got loud"),
        (["--play", "--cell_size", "0"], "--cell_size must be 1 or more, got 0"),
        ([], "one of the arguments --play --random is required"),
    ],
)
def test_wrong_flags_are_named_in_one_sentence(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(ENVS["frozenlake"], flags)
    assert exit.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")
