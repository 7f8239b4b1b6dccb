"""The command line for a person: a real process with its stdin."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from envs import ENVS

COMMAND = [sys.executable, "-m", "envs.play"]
ROOT = Path(__file__).parent.parent


def run(*flags, typed="", status=0, encoding="utf-8"):
    """Return what the command printed, to stderr if it failed."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    typed = typed if isinstance(typed, bytes) else typed.encode()
    command = [*COMMAND, *flags]
    done = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, env=environment)
    shown, errors = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert (done.returncode, bool(errors)) == (status, bool(status))
    return errors or shown


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
    assert shown.startswith("Actions: Up, Right, Down, Left\n")
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


def test_a_terminal_that_is_not_utf_8():
    """It has no √ and no °, and sends bytes that are no text."""
    shown = run("frozenlake", typed=b"m\xfcller\nq\n", encoding="ascii")
    assert "X you in a hole, ? you on the goal" in shown
    assert "could not be read" in shown


@pytest.mark.parametrize("out", ["closed pipe", "/dev/full"])
def test_output_that_nobody_reads_ends_it_quietly(out):
    shell = f"yes Up | {sys.executable} -m envs.play cliffwalking"
    shell += " | head -1" if out == "closed pipe" else f" > {out}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stderr.replace(b"yes: standard output: Broken pipe\n", b"") == b""


def test_ctrl_c_leaves():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*COMMAND, "frozenlake"], cwd=ROOT, text=True, **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=30)
    assert (shown[-6:], errors, process.returncode) == ("\nleft\n", "", 0)


def test_a_negative_seed_is_named_in_one_sentence():
    shown = run("frozenlake", "--seed", "-1", status=2)
    assert shown.endswith("error: Seed must be greater or equal to zero, actual value: -1\n")
