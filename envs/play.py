"""The command line that every environment shares: play episodes yourself. Its arguments become flags. Ours.

python -m envs.frozenlake --play --seed 3 --slippery
"""

import argparse
import inspect
import itertools
import tempfile
from collections.abc import Callable

import gymnasium
from PIL import Image

from envs.base import TextEnv, play_out

FOR_A_PERSON = {"style": "full", "cell_size": 56}  # defaults of these flags, for environments that have them


def show(env: TextEnv) -> None:
    """Print the text of the current observation, and the files to which its images are written."""
    text, images = env.observe()
    print(text)
    for image in images:
        with tempfile.NamedTemporaryFile(prefix="freshper-", suffix=".png", delete=False) as file:
            Image.fromarray(image).save(file)
        print(f"image: {file.name}")


def ask(env: TextEnv) -> str:
    """Return the reply of a person: a line, between <answer> tags unless it has a tag. Raises EOFError for `q`."""
    show(env)
    line = input("> ")
    if line.strip().lower() == "q":
        raise EOFError
    return line if "<" in line else f"<answer>{line}</answer>"


def main(make_env: Callable[..., TextEnv], argv: list[str] | None = None) -> None:
    """Play episodes of a class whose arguments all have defaults, one per seed, until `q` or the end of the input."""
    parser = argparse.ArgumentParser(description="Play this task; a line is a reply, or just an action.")
    parser.add_argument("--play", action="store_true", required=True)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parameters = inspect.signature(make_env).parameters
    for name, parameter in parameters.items():
        default = FOR_A_PERSON.get(name, parameter.default)
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
        parser.add_argument(f"--{name}", default=default, help=f"default {default!r}", **kind)
    args = parser.parse_args(argv)
    try:
        env = make_env(**{name: getattr(args, name) for name in parameters})
        for seed in itertools.count(args.seed):
            print(f"Episode of seed {seed}; q or Ctrl-D leaves.")
            total, turns, info = play_out(env, seed, lambda: ask(env))
            show(env)
            own = "".join(f", {name} {value:g}" for name, value in info.get("metrics", {}).items())
            print(f"{'success' if info['success'] else 'no success'} after {turns} turns, return {total:g}{own}\n")
    except EOFError:
        print("\nleft")
    except (ValueError, gymnasium.error.Error) as error:  # the latter: a negative seed
        parser.error(str(error))
