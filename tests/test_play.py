"""The shared command line, driven as a person would: a real process with its stdin."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from envs import ENVS
from envs.play import main

ROOT = Path(__file__).parent.parent


def run(module, *flags, typed=""):
    command = [sys.executable, "-m", f"envs.{module}", *flags]
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_episode_from_start_to_goal_and_on_to_the_next_seed():
    """Bare words in any case, tagged replies, a reply that cannot be read; then q leaves."""
    way = ["up", "nonsense", "<Answer>RIGHT</Answer>", *["Right"] * 10, "<think>down now</think><answer>Down</answer>"]
    shown = run("cliffwalking", "--play", "--seed", "4", typed="\n".join([*way, "Up", "q", "never read"]))
    assert re.findall(r"> (Your .*? read\. )?Reward: (\S+)\.\nTurn", shown) == [
        ("", "-1"), ("Your last reply could not be read. ", "-1.15"), *[("", "-1")] * 13,
    ]  # fmt: skip
    assert "P C C C C C C C C C C G" in shown  # the full style is a person's default
    assert "\nsuccess after 14 turns, return -14.15, score -14\n\nEpisode of seed 5" in shown
    assert shown.splitlines()[-1] == "left"


def test_images_are_saved_where_the_command_says():
    shown = run("frozenlake", "--play", "--image", "--seed", "3", "--cell_size", "20", typed="")
    path = Path(re.search(r"image: (.*)", shown)[1])
    expected = ENVS["frozenlake_vlm"](cell_size=20).reset(seed=3)[0].images[0]
    assert (np.asarray(Image.open(path)) == expected).all()
    path.unlink()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--play", "--style", "loud"], "style must be full or terse, got loud"),
        (["--play", "--seed", "-1"], "Seed must be greater or equal to zero, actual value: -1"),
        ([], "the following arguments are required: --play"),
    ],
)
def test_wrong_flags_are_named_in_one_sentence(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(ENVS["frozenlake"], flags)
    assert exit.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")
