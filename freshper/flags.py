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
from typing import Any, Literal, get_args, get_origin

from envs import ENVS
from envs.base import EVAL_SEEDS
from freshper.config import PAPER, Config, defaults

# --resume may change these, and nothing else: stored episodes and states stay those of one problem
MAY_CHANGE = {
    # how long and how often; not --eval_episodes, for the best of all evaluations is kept
    "iterations", "save_every", "eval_every",
    # later draws and updates
    "alpha", "tau", "beta", "replay_ratio", "batch_size", "ppo_epochs", "lr",
    "ratio_clip", "dual_clip", "advantage_clip", "entropy_coef",
    # where
    "micro_batch_size", "engine_memory", "resume",
}  # fmt: skip

# What a number must be: in words, as a condition, and its settings. NaN is in no range.
RANGES: list[tuple[str, Callable[[float], bool], str]] = [
    ("above 0", lambda x: 0 < x < math.inf,
     "capacity batch_size epsilon tau iterations rollout_batch_size ppo_epochs lr ratio_clip "
     "advantage_clip micro_batch_size temperature max_new_tokens eval_every eval_episodes"),
    ("0 or more", lambda x: 0 <= x < math.inf,
     "max_turns format_penalty replay_ratio kl_loss_coef kl_reward_coef entropy_coef top_k "
     "save_every"),
    ("between 0 and 1", lambda x: 0 <= x <= 1, "alpha beta"),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, "top_p engine_memory"),
    ("0 or above 1", lambda x: x == 0 or 1 < x < math.inf, "dual_clip"),
    (f"from 0 to {EVAL_SEEDS - 1}", lambda x: 0 <= x < EVAL_SEEDS, "seed"),
]  # fmt: skip
# What a setting must be together with others: its name, in words, and as a condition
RULES: list[tuple[str, str, Callable[[Config], object]]] = [
    ("preset", "tiny or small: the task is not in the paper",
     lambda c: c.preset != "paper" or c.env in PAPER),
    ("model", "tiny, or a checkpoint of a tiny model, with --preset tiny (--preset small and paper "
     "take pretrained models)", lambda c: c.resume or is_tiny(c.model) == (c.preset == "tiny")),
    ("data", "empty with --preset tiny, whose models read generated questions only",
     lambda c: c.preset != "tiny" or not c.data),
    ("out", "a folder that does not exist yet",
     lambda c: c.resume or not c.out or not os.path.exists(c.out)),
    ("replay_ratio", "0 with --method on_policy",
     lambda c: c.method != "on_policy" or c.replay_ratio == 0),
    ("decay", "none with --method per", lambda c: c.method != "per" or c.decay == "none"),
    # The refresh is --ppo_epochs steps after an episode was collected.
    ("tau", "at least --ppo_epochs with --decay limit",
     lambda c: c.decay != "limit" or c.tau >= c.ppo_epochs),
    ("capacity", "at least the episodes of an iteration and of an update",
     lambda c: not c.replay_ratio or c.capacity >= max(c.batch_size, c.rollout_batch_size)),
]  # fmt: skip
# Flags without effect: their names, with what, and as a condition
NO_EFFECT: list[tuple[str, str, Callable[[Config], object]]] = [
    ("batch_size capacity eviction alpha epsilon base_priority decay tau beta", "--replay_ratio 0",
     lambda c: c.replay_ratio == 0),
    ("tau", "--decay none", lambda c: c.decay == "none"),
    ("epsilon base_priority", "--alpha 0", lambda c: c.alpha == 0),
    ("zero_stage", "a --backend without deepspeed", lambda c: c.trainer != "deepspeed"),
    ("engine_memory", "a --backend without vllm", lambda c: c.engine != "vllm"),
    *((name, "this --env", lambda c, name=name: name not in ENVS[c.env].settings)
      for name in ("slippery", "data", "search_url")),
]  # fmt: skip

# The groups of --help: the first setting of each, and its title
GROUPS = {
    "env": "task",
    "method": "method and replay",
    "iterations": "optimization",
    "temperature": "sampling",
    "backend": "backends",
    "seed": "the run",
}


def is_tiny(model: str) -> bool:
    """Return whether a model is one that freshper/tiny.py builds, or a checkpoint of one."""
    path = Path(model, "config.json")
    return model == "tiny" or (os.path.isfile(path) and '"freshper_tiny": true' in path.read_text())


def validate(config: Config, given: tuple[str, ...] = ()) -> None:
    """Raise ValueError with one sentence if a setting's value is not allowed, or if one of the
    flags `given` has no effect."""
    values = vars(config)
    wrong = [
        (name, allowed)
        for allowed, holds, names in RANGES
        for name in names.split()
        if not holds(values[name])
    ]
    wrong += [(name, allowed) for name, allowed, holds in RULES if not holds(config)]
    for name, allowed in wrong:
        raise ValueError(f"--{name} is {values[name]}, but must be {allowed}")

    for names, others, applies in NO_EFFECT:
        for name in set(names.split()) & set(given):
            if applies(config):
                raise ValueError(f"--{name} is {values[name]}, but has no effect with {others}")


def boolean(text: str) -> bool:
    """Read true or false, in any case. Raises ValueError for another text."""
    return ("false", "true").index(text.lower()) == 1


def make_parser(shown: Config, **options: Any) -> argparse.ArgumentParser:
    """Make a parser of all flags. It returns only those that were given, and raises ArgumentError
    if it cannot read the value of one. --help shows the settings `shown`."""
    parser = argparse.ArgumentParser(
        description="FreshPER (Algorithm 1). In brackets: what runs with the other flags given.",
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        **options,
    )
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])

        options = {"type": type(field.default), "metavar": ""}
        if field.name == "env":
            options = {"choices": ENVS}
        elif get_origin(field.type) is Literal:
            options = {"type": type(field.default), "choices": get_args(field.type)}
        elif field.type is bool:
            options |= {"type": boolean, "nargs": "?", "const": True}
        text = f"{field.metadata['help']} [{getattr(shown, field.name)}]".replace("%", "%%")
        group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text, **options)
    return parser


def new_run(flags: dict[str, Any]) -> Config:
    """Return the settings of a new run: those of preset and method, and the flags over them."""
    config = Config(**flags)
    return Config(**defaults(config.preset, config.env, config.method) | flags)


def resumed_run(flags: dict[str, Any]) -> Config:
    """Return the settings of an earlier run, with the flags over them. Raises ValueError if there
    is no such run, or if a flag may not change."""
    folder = flags["resume"]
    try:
        stored = json.loads(Path(folder, "config.json").read_bytes())
        if stored.keys() != vars(Config()).keys():
            raise ValueError("its config.json is not that of a run of this version")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--resume is {folder}, but must be the folder of a run: {error}"
        ) from error

    for name, value in flags.items():
        if name not in MAY_CHANGE and value != stored[name]:
            raise ValueError(f"--{name} is {value}, but must be {stored[name]} as in {folder}")
    return Config(**stored | flags)


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line. A wrong flag prints one sentence and exits
    with status 2."""
    parser = make_parser(Config(), add_help=False)
    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS)
    try:
        flags = vars(parser.parse_args(argv))
        wants_help = flags.pop("help", False)
        for name, value in flags.items():
            # So argparse reads `--name=--`.
            if value == []:
                raise ValueError(f"--{name} is --, but must have a value")
        config = resumed_run(flags) if "resume" in flags else new_run(flags)
        if wants_help:
            make_parser(config).print_help()
            parser.exit()
        validate(config, tuple(flags))
    except (OSError, ValueError, TypeError, argparse.ArgumentError) as error:
        parser.error(str(error))
    return config
