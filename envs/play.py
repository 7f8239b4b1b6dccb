"""The command line that every environment shares: play episodes yourself. Ours.

    python -m envs.frozenlake --play --seed 3 --slippery

A module ends with `if __name__ == "__main__": main(ItsEnvironment)`. The environment's own arguments become flags.
"""

import argparse
import inspect
import tempfile
from collections.abc import Callable

from PIL import Image

from envs.base import TextEnv, play_out

FOR_A_PERSON = {"style": "full", "cell_size": 56}  # defaults of these flags, for environments that have them


def show(env: TextEnv) -> None:
    """Print the text of the current observation, and the files to which its images are written."""
    observation = env.observe()
    print(observation.text)
    for image in observation.images:
        with tempfile.NamedTemporaryFile(prefix="freshper-", suffix=".png", delete=False) as file:
            Image.fromarray(image).save(file)
        print(f"image: {file.name}")


def play(env: TextEnv, seed: int) -> None:
    """Play from the terminal, one episode per seed, until a line `q` or the end of the input. A line is a reply; one
    without a tag is put between <answer> tags."""

    def ask() -> str:
        show(env)
        line = input("> ")
        if line.strip().lower() == "q":
            raise EOFError
        return line if "<" in line else f"<answer>{line}</answer>"

    try:
        while True:
            print(f"Episode of seed {seed}; q or Ctrl-D leaves.")
            total, turns, info = play_out(env, seed, ask)
            show(env)
            own = "".join(f", {name} {value:g}" for name, value in info.get("metrics", {}).items())
            print(f"{'success' if info['success'] else 'no success'} after {turns} turns, return {total:g}{own}\n")
            seed += 1
    except EOFError:
        print("\nleft")


def main(make_env: Callable[..., TextEnv], argv: list[str] | None = None) -> None:
    """Run the command line of an environment: a class whose arguments all have defaults."""
    parser = argparse.ArgumentParser(description="Play this task; a line is a reply, or just an action.")
    parser.add_argument("--play", action="store_true", required=True)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    for name, parameter in inspect.signature(make_env).parameters.items():
        default = FOR_A_PERSON.get(name, parameter.default)
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, help=f"default {default!r}", **kind)
    flags = vars(parser.parse_args(argv))
    seed = flags.pop("seed")
    del flags["play"]
    if seed < 0:
        parser.error(f"--seed must be 0 or more, got {seed}")
    try:
        play(make_env(**flags), seed)
    except ValueError as error:
        parser.error(str(error))
