"""Play episodes of an environment yourself: python -m envs.play frozenlake --seed 3. Ours."""

import argparse
import itertools
import os
import sys
import tempfile
from functools import partial
from typing import Any

import gymnasium
from PIL import Image

from envs import ENVS
from envs.base import TextEnv, play_out
from envs.check import check_environment


def show(env: TextEnv) -> None:
    """Print the text of the current observation, and the files to which its images are written."""
    text, images = env.observe()
    print(text)
    for image in images:
        with tempfile.NamedTemporaryFile(prefix="freshper-", suffix=".png", delete=False) as file:
            Image.fromarray(image).save(file)
        print(f"image: {file.name}")


def ask(env: TextEnv) -> str:
    """Return the reply of a person: a line, between <answer> tags unless it has a tag, or is the
    sentence that the question asks for.

    Raises EOFError for `q`.
    """
    show(env)
    line = input("> ")
    if line.strip() == "q":
        raise EOFError
    question = getattr(env, "question", None)
    sentence = " " in line.strip() and getattr(question, "one_sentence", False)
    return line if "<" in line or sentence else f"<answer>{line}</answer>"


def main(argv: list[str] | None = None) -> None:
    """Play episodes of an environment, one per seed, until `q`, the end of the input, or nobody
    reads the output."""
    parser = argparse.ArgumentParser(
        "envs.play",
        description="Play a task with its own settings (the ice of FrozenLake is not slippery); a"
        " line is a reply, or just an action.",
    )
    parser.add_argument("env", choices=ENVS)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--style", default="full", help="full, or terse: a tiny model's")
    args = parser.parse_args(argv)

    try:
        env = ENVS[args.env](style=args.style)
        check_environment(env)
    except ValueError as error:
        parser.error(str(error))

    # A terminal may have no √, and what is typed may be in another encoding.
    streams: tuple[Any, ...] = (sys.stdin, sys.stdout)
    for stream in streams:
        stream.reconfigure(errors="replace")
    try:
        if env.actions and not hasattr(env, "generate"):
            print(f"Actions: {', '.join(env.actions)}")
        for seed in itertools.count(args.seed):
            print(f"Episode of seed {seed}; q or Ctrl-D leaves.")
            total, turns, info = play_out(env, seed, partial(ask, env))
            print("The end:")
            show(env)
            result = "success" if info["success"] else "no success"
            print(f"{result} after {turns} turns, return {total:g}\n")
    except (EOFError, KeyboardInterrupt):
        print("\nleft")
    except OSError:
        # Nobody reads the output. Python writes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except gymnasium.error.Error as error:  # a negative seed
        parser.error(str(error))


if __name__ == "__main__":
    main()
