"""The command line for a person: a real process with its stdin."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from envs import ENVS
from envs.play import main


def run(*flags, typed=""):
    command = [sys.executable, "-m", "envs.play", *flags]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, input=typed, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_episode_from_start_to_goal_and_on_to_the_next_seed():
    """Bare words in any case, tagged replies, and a reply that cannot be read. Then q leaves."""
    episode = ["up", "nonsense", "<Answer>RIGHT</Answer>", *["Right"] * 10]
    episode.append("<think>down now</think><answer>Down</answer>")
    typed = "\n".join([*episode, "Up", "q", "never read"])
    shown = run("cliffwalking", "--seed", "4", typed=typed)
    rewards = [("", "-1"), ("Your last reply could not be read. ", "-1.15"), *[("", "-1")] * 13]
    form = r"> (?:The end:\n)?(Your .*? read\. )?Reward: (\S+)\.\nTurn"
    assert re.findall(form, shown) == rewards
    assert "P C C C C C C C C C C G" in shown  # the full style is a person's default
    assert "\nsuccess after 14 turns, return -14.15\n\nEpisode of seed 5" in shown
    assert shown.splitlines()[-1] == "left"


def test_images_are_saved_where_the_command_says():
    shown = run("frozenlake_vlm", "--seed", "3")
    path = Path(re.search(r"image: (.*)", shown)[1])
    observation, _ = ENVS["frozenlake_vlm"](style="full").reset(seed=3)
    assert np.array_equal(Image.open(path), observation.images[0])
    path.unlink()


def test_a_person_can_see_what_a_tiny_model_sees():
    shown = run("nq_search", "--style", "terse", "--seed", "3")
    observation, _ = ENVS["nq_search"]().reset(seed=3)
    assert f"\n{observation.text}\n> " in shown


def test_a_sentence_is_a_reply_where_the_question_asks_for_one():
    shown = run("gsm8k", typed="Mia has 17 fish now.")
    assert "Mia has 10 fish and gets 7." in shown
    assert "\nsuccess after 1 turns" in shown


def test_ctrl_c_leaves(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Mock(side_effect=KeyboardInterrupt))
    main(["frozenlake"])
    assert capsys.readouterr().out.endswith("\nleft\n")


def test_a_negative_seed_is_named_in_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["frozenlake", "--seed", "-1"])
    assert capsys.readouterr().err.endswith(
        "error: Seed must be greater or equal to zero, actual value: -1\n"
    )
