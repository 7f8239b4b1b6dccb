"""The command line for a person: a real process with its stdin."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from envs import ENVS
from envs.play import main


def run(*flags, typed=""):
    command = [sys.executable, "-m", "envs.play", *flags]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, input=typed, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_episode_from_start_to_goal_and_on_to_the_next_seed():
    """Bare words in any case, tagged replies, a reply that cannot be read; then q leaves."""
    way = [
        "up",
        "nonsense",
        "<Answer>RIGHT</Answer>",
        *["Right"] * 10,
        "<think>down now</think><answer>Down</answer>",
    ]
    shown = run("cliffwalking", "--seed", "4", typed="\n".join([*way, "Up", "q", "never read"]))
    read = [("", "-1"), ("Your last reply could not be read. ", "-1.15"), *[("", "-1")] * 13]
    assert re.findall(r"> (Your .*? read\. )?Reward: (\S+)\.\nTurn", shown) == read
    assert "P C C C C C C C C C C G" in shown  # the full style is a person's default
    assert "\nsuccess after 14 turns, return -14.15\n\nEpisode of seed 5" in shown
    assert shown.splitlines()[-1] == "left"


def test_images_are_saved_where_the_command_says():
    shown = run("frozenlake_vlm", "--seed", "3")
    path = Path(re.search(r"image: (.*)", shown)[1])
    assert (
        np.asarray(Image.open(path))
        == ENVS["frozenlake_vlm"](style="full").reset(seed=3)[0].images[0]
    ).all()
    path.unlink()


def test_a_negative_seed_is_named_in_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["frozenlake", "--seed", "-1"])
    assert capsys.readouterr().err.endswith(
        "error: Seed must be greater or equal to zero, actual value: -1\n"
    )
