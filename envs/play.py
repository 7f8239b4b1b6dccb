"""Play episodes of an environment yourself: python -m envs.play frozenlake --seed 3. Ours."""

import argparse
import contextlib
import functools
import itertools
import sys
import tempfile

from PIL import Image

from envs import ENVS
from envs.base import TextEnv, play_out


def show(env: TextEnv) -> None:
    """Print the text of the current observation, and the files to which its images are written."""
    text, images = env.observe()
    print(text)
    for image in images:
        _, path = tempfile.mkstemp(".png", "freshper-")
        Image.fromarray(image).save(path)
        print(f"image: {path}")


def ask(env: TextEnv) -> str:
    """Return the reply of a person: a line, between <answer> tags unless it has a tag or is a
    sentence. Raises EOFError at the end of the input."""
    show(env)
    line = input("> ")
    return line if "<" in line or line.endswith(".") else f"<answer>{line}</answer>"


def main() -> None:
    """Play episodes of an environment, one per seed, until the input ends."""
    parser = argparse.ArgumentParser(
        "envs.play",
        description="Play a task with its own settings (the ice of FrozenLake is not slippery). A"
        " line is a reply, or just an action.",
    )
    parser.add_argument("env", choices=ENVS)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--style", choices=("full", "terse"), default="full")
    args = parser.parse_args()

    env = ENVS[args.env](style=args.style)
    # A terminal may have no √.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]

    unread = functools.partial(print, "This reply could not be read:")
    print(f"Actions: {', '.join(env.actions) or 'as the prompt says'}")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for seed in itertools.count(args.seed):
            print(f"Episode of seed {seed}. Ctrl-D leaves.")
            total, info = play_out(env, seed, lambda: ask(env), unread)
            print("The end:")
            show(env)
            result = "success" if info["success"] else "no success"
            print(f"{result} after {env.turn} turns, return {total:g}\n")


if __name__ == "__main__":
    main()
