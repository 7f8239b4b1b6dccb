"""The command line that every environment shares: play a task yourself, or see how a random player fares.

Not in the paper.

    python -m envs.frozenlake --play --seed 3
    python -m envs.frozenlake --random 1000 --slippery

A module ends with `if __name__ == "__main__": main(ItsEnvironment)`. The environment's own arguments become flags.
"""

import argparse
import inspect
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from envs.base import TextEnv, play_out

FOR_A_PERSON = {"style": "full", "cell_size": 56}  # where the environment has such arguments


def play(env: TextEnv, seed: int) -> None:
    """One game from the terminal. A line is a reply; one without a tag is put between <answer> tags."""
    folder = Path(tempfile.mkdtemp(prefix="freshper-"))
    observation, _ = env.reset(seed=seed)
    total, turn, ended = 0.0, 0, False
    while True:
        print(observation.text)
        for k, image in enumerate(observation.images):
            path = folder / f"turn{turn + 1}-{k + 1}.png"
            Image.fromarray(image).save(path)
            print(f"picture: {path}")
        if ended:
            break
        try:
            reply = input("> ")
        except EOFError:
            print(f"\nleft after {turn} turns, return {total:g}")
            return
        reply = reply if "<" in reply else f"<answer>{reply}</answer>"
        observation, reward, terminated, truncated, info = env.step(reply)
        total, turn, ended = total + reward, turn + 1, terminated or truncated
        print(f"reward {reward:g}" + ("" if info["valid"] else ", the reply could not be read"))
    outcome = "success" if info["success"] else "no success"
    own = "".join(f", {name} {value:g}" for name, value in info.get("metrics", {}).items())
    print(f"{outcome} after {turn} turns, return {total:g}{own}")


def random_games(env: TextEnv, seeds: range) -> None:
    """Print means over a game of the uniformly random player on each seed, with their standard errors."""
    rng, rows, began = np.random.default_rng(seeds[0]), [], time.perf_counter()
    for seed in seeds:
        total, turns, info = play_out(env, seed, lambda: env.random_reply(rng))
        rows.append({"success": info["success"], "return": total, "turns": turns} | info.get("metrics", {}))
    seconds = time.perf_counter() - began
    print(f"the random player on the seeds {seeds[0]} to {seeds[-1]}, {len(seeds) / seconds:.0f} games/s")
    for name in rows[0]:
        values = np.array([row[name] for row in rows], dtype=float)
        print(f"  {name} {values.mean():.3f} ± {values.std() / len(values) ** 0.5:.3f}")


def main(make_env: Callable[..., TextEnv], argv: list[str] | None = None) -> None:
    """Flags to a game or to statistics. `make_env` is a class, or a function of keyword arguments with defaults."""
    parser = argparse.ArgumentParser(description="Play this task, or see how a random player fares.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--play", action="store_true", help="play it yourself; a line is a reply, or just an action")
    what.add_argument("--random", type=int, metavar="N", help="statistics of the random player over N seeds")
    parser.add_argument("--seed", type=int, default=0, help="of the game, or the first of N (default 0)")
    parameters = inspect.signature(make_env).parameters
    known = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    for name, default in known.items():
        kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
        parser.add_argument(f"--{name}", **kind, help=f"default {default!r}")
    args = vars(parser.parse_args(argv))
    if args["seed"] < 0 or (not args["play"] and args["random"] < 1):
        parser.error(f"--seed must be 0 or more and --random 1 or more, got {args['seed']} and {args['random']}")
    if args.get("cell_size") is not None and args["cell_size"] < 1:
        parser.error(f"--cell_size must be 1 or more, got {args['cell_size']}")
    settings = {name: default for name, default in FOR_A_PERSON.items() if args["play"] and name in known}
    try:
        env = make_env(**settings | {name: args[name] for name in known if args[name] is not None})
    except ValueError as error:
        parser.error(str(error))
    if args["play"]:
        play(env, args["seed"])
    else:
        random_games(env, range(args["seed"], args["seed"] + args["random"]))
