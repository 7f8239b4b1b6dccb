"""The command line for a person: a real process with its stdin."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*flags, typed="", encoding="utf-8"):
    """Return what the command printed until the end of its input."""
    command = [sys.executable, "-m", "envs.play", *flags]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    pipes = {"input": typed.encode("latin-1"), "capture_output": True}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, **pipes)
    return done.stdout.decode(encoding)


def test_an_episode_from_start_to_goal_and_on_to_the_next_seed():
    """Bare words in any case, tagged replies, and a reply that cannot be read."""
    episode = ["up", "nonsense", "<Answer>RIGHT</Answer>", *["Right"] * 10]
    episode.append("<think>down now</think><answer>Down</answer>")
    shown = run("cliffwalking", "--seed", "4", typed="\n".join([*episode, "Up"]))
    rewards = [("", "-1"), ("Your last reply could not be read. ", "-1.15"), *[("", "-1")] * 13]
    assert shown.count("This reply could not be read: <answer>nonsense</answer>\n") == 1
    form = r"> (?:The end:\n|This .*\n)?(Your .*? read\. )?Reward: (\S+)\.\nTurn"
    assert re.findall(form, shown) == rewards
    assert "\nsuccess after 14 turns, return -14.15\n\nEpisode of seed 5" in shown


def test_a_sentence_is_a_reply_where_the_question_asks_for_one():
    assert "\nsuccess after 1 turns" in run("gsm8k", typed="Mia has 17 fish now.")


def test_a_terminal_that_is_not_utf_8():
    """It has no √ and no °."""
    shown = run("frozenlake", typed="Up\n", encoding="ascii")
    assert "X you in a hole, ? you on the goal" in shown
