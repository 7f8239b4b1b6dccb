"""The command line: from flags to a checked `Config`.

A wrong flag ends the program at once, with one sentence that names the flag, its value and what is
allowed. So does a flag that has no effect with the others.
"""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from envs import ENVS
from envs.base import EVAL_SEEDS
from freshper.config import PAPER, Config, defaults

# --resume may change these, and nothing else: stored episodes and states stay those of one problem
MAY_CHANGE = {
    # how long and how often; not --eval_episodes, for all evaluations are of the same seeds
    "iterations", "save_every", "eval_every",
    # later draws and updates
    "alpha", "tau", "beta", "replay_ratio", "batch_size", "ppo_epochs", "lr",
    "ratio_clip", "dual_clip", "advantage_clip", "entropy_coef",
    # where
    "micro_batch_size", "engine_memory", "resume",
}  # fmt: skip

# What settings must be: names, in words, and as a condition on value and settings. NaN fails all.
RULES: list[tuple[str, str, Callable[[Any, Config], object]]] = [
    ("capacity batch_size epsilon tau iterations rollout_batch_size ppo_epochs lr ratio_clip "
     "advantage_clip micro_batch_size temperature max_new_tokens eval_every eval_episodes",
     "above 0", lambda x, c: 0 < x < math.inf),
    ("max_turns format_penalty replay_ratio kl_loss_coef kl_reward_coef entropy_coef save_every",
     "0 or more", lambda x, c: 0 <= x < math.inf),
    ("alpha beta engine_memory", "between 0 and 1", lambda x, c: 0 <= x <= 1),
    ("dual_clip", "0 or above 1", lambda x, c: x == 0 or 1 < x < math.inf),
    ("seed", f"from 0 to {EVAL_SEEDS - 1}", lambda x, c: 0 <= x < EVAL_SEEDS),
    ("preset", "tiny or small: the task is not in the paper",
     lambda x, c: x != "paper" or c.env in PAPER),
    ("model", "tiny, or a checkpoint of a tiny model, with --preset tiny (--preset small and paper "
     "take pretrained models)", lambda x, c: c.resume or is_tiny(x) == (c.preset == "tiny")),
    ("data", "empty with --preset tiny, whose models read generated questions only",
     lambda x, c: c.preset != "tiny" or not x),
    ("out", "a folder that does not exist yet", lambda x, c: c.resume or not os.path.exists(x)),
    ("out resume", "a name that a file can have here",
     lambda x, c: x.isprintable() and os.fsencode(x) == x.encode()),
    ("replay_ratio", "0 with --method on_policy", lambda x, c: c.method != "on_policy" or x == 0),
    ("decay", "none with --method per", lambda x, c: c.method != "per" or x == "none"),
    ("capacity", "at least the episodes of an iteration and of an update",
     lambda x, c: not c.replay_ratio or x >= max(c.batch_size, c.rollout_batch_size)),
]  # fmt: skip
# Flags without effect: their names, with what, and as a condition on name and settings
NO_EFFECT: list[tuple[str, str, Callable[[str, Config], object]]] = [
    ("batch_size capacity eviction alpha epsilon base_priority decay tau beta", "--replay_ratio 0",
     lambda name, c: c.replay_ratio == 0),
    ("tau", "--decay none", lambda name, c: c.decay == "none"),
    ("epsilon base_priority", "--alpha 0", lambda name, c: c.alpha == 0),
    ("slippery data search_url", "this --env", lambda name, c: name not in ENVS[c.env].settings),
]  # fmt: skip


def is_tiny(model: str) -> bool:
    """Return whether a model is one that freshper/tiny.py builds, or a checkpoint of one."""
    path = Path(model, "config.json")
    # A name that is too long for a file is none, either.
    return model == "tiny" or (
        os.path.isfile(path) and b'"freshper_tiny": true' in path.read_bytes()
    )


def make_parser() -> argparse.ArgumentParser:
    """Make a parser of all flags. It returns only those that were given."""
    parser = argparse.ArgumentParser(
        description="FreshPER (Algorithm 1). In brackets: what runs with the other flags given.",
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text and exit")
    for field in dataclasses.fields(Config):
        choices = ENVS if field.name == "env" else get_args(field.type) or None
        options: dict[str, Any] = {"type": type(field.default), "choices": choices}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        text = f"{field.metadata['help']} [%(default)s]"
        parser.add_argument(f"--{field.name}", help=text, **options)
    return parser


def with_flags(flags: dict[str, Any]) -> Config:
    """Return the settings of a preset and a method, or with --resume those of an earlier run, with
    the flags over them. Raises ValueError if there is no such run, or if a flag may not change."""
    if "resume" not in flags:
        named = Config(**flags)
        settings = defaults(named.preset, named.env, named.method)
        return Config(**settings | flags)

    folder = flags["resume"]
    try:
        settings = json.loads(Path(folder, "config.json").read_bytes())
        types = {field.name: type(field.default) for field in dataclasses.fields(Config)}
        if {name: type(value) for name, value in settings.items()} != types:
            raise ValueError("its settings are those of another version")
    # A file from someone else may hold anything.
    except Exception as error:
        raise ValueError(f"--resume is {folder}, which has no run: {error}") from error
    for name, value in flags.items():
        if name not in MAY_CHANGE and value != settings[name]:
            raise ValueError(f"--{name} is {value}, but must be {settings[name]} as in {folder}")
    return Config(**settings | flags)


def check(config: Config, flags: dict[str, Any]) -> None:
    """Raise ValueError if the value of a setting is not allowed, or a flag has no effect."""
    for names, allowed, holds in RULES:
        for name in names.split():
            value = getattr(config, name)
            if not holds(value, config):
                raise ValueError(f"--{name} is {value}, but must be {allowed}")
    for names, others, applies in NO_EFFECT:
        for name in names.split():
            if name in flags and applies(name, config):
                raise ValueError(f"--{name} is {flags[name]}, but has no effect with {others}")


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line: those of the preset, the method, the flags. A
    wrong flag prints one sentence and exits with status 2."""
    parser = make_parser()
    flags = vars(parser.parse_args(argv))
    wants_help = flags.pop("help", False)
    try:
        for name in flags:
            if flags[name] == []:  # so argparse reads `--tau=--`
                raise ValueError(f"--{name} is --, but must have a value")
        config = with_flags(flags)
        if wants_help:
            parser.set_defaults(**vars(config))
            parser.print_help()
            parser.exit()
        check(config, flags)
    except ValueError as error:
        parser.error(str(error))
    return config
