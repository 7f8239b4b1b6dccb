"""The command line: from flags to a checked `Config`.

A wrong flag ends the program at once, with one sentence that names the flag, its value and what is
allowed. So does a flag that has no effect with the others, if RULES has the case.
"""

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from envs import ENVS
from envs.base import UserError
from freshper.config import Config, defaults

# Rules for settings that differ from those of preset and method: names, the sentence if one is
# broken, and a condition on the value and all settings. NaN breaks every range.
RULES: list[tuple[str, str, Callable[[Any, Config], object]]] = [
    ("capacity batch_size epsilon tau iterations rollout_batch_size ppo_epochs lr "
     "advantage_clip micro_batch_size temperature max_tokens max_new_tokens eval_every "
     "eval_episodes",
     "must be above 0 and finite", lambda x, c: 0 < x < math.inf),
    ("max_turns format_penalty replay_ratio kl_loss_coef kl_reward_coef entropy_coef save_every "
     "seed", "must be 0 or more and below 2^63", lambda x, c: 0 <= x < 2**63),
    ("alpha beta", "must be between 0 and 1", lambda x, c: 0 <= x <= 1),
    ("dual_clip", "must be 0 or above 1", lambda x, c: x == 0 or 1 < x < math.inf),
    ("model preset", "--preset tiny takes tiny models only, --preset small and paper take others",
     lambda x, c: c.resume or is_tiny(c.model) == (c.preset == "tiny")),
    ("data", "must be empty with --preset tiny, whose models read generated questions only",
     lambda x, c: c.preset != "tiny" or not x),
    ("zero_stage", "has no effect unless DeepSpeed trains", lambda x, c: c.trainer == "deepspeed"),
    ("zero_stage backend",
     "hf+deepspeed needs --zero_stage 1 or 2, because it generates with whole weights",
     lambda x, c: c.backend != "hf+deepspeed" or c.zero_stage < 3),
    ("out", "must be a folder that does not exist yet",
     lambda x, c: c.resume or not os.path.exists(x)),
    ("replay_ratio", "must be 0 with --method on_policy",
     lambda x, c: c.method != "on_policy" or x == 0),
    ("decay", "must be none with --method per", lambda x, c: c.method != "per" or x == "none"),
    ("capacity batch_size rollout_batch_size",
     "--capacity must be at least --batch_size and --rollout_batch_size",
     lambda x, c: not c.replay_ratio or c.capacity >= max(c.batch_size, c.rollout_batch_size)),
    ("batch_size capacity eviction alpha epsilon base_priority decay tau beta",
     "has no effect without replay (--method on_policy, or --replay_ratio 0)",
     lambda x, c: c.replay_ratio),
    ("tau", "has no effect with --decay none", lambda x, c: c.decay != "none"),
]  # fmt: skip
OF_TASKS = {"slippery", "data", "search_url"}  # flags that a task may list as its `settings`
PATHS = "out resume model data".split()  # their "~" is the home folder
# What may change with --resume: how long, and in how much memory.
MAY_CHANGE = ("iterations", "micro_batch_size")


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
    # By field, the docstring below it
    texts = dict(re.findall(r'(\w+): .*\n    """(.*)"""', inspect.getsource(Config)))
    for field in dataclasses.fields(Config):
        options: dict[str, Any] = {"type": type(field.default), "choices": choices_of(field)}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        if field.name in PATHS:
            options = {"type": os.path.expanduser}
        text = f"{texts.get(field.name, '')} [%(default)s]"
        parser.add_argument(f"--{field.name}", help=text, **options)
    return parser


def choices_of(field: dataclasses.Field) -> Any:
    """Return the allowed values of a setting, None if it is no choice."""
    return ENVS if field.name == "env" else get_args(field.type) or None


def with_flags(flags: dict[str, Any]) -> Config:
    """Return the settings of a preset and a method with the flags over them, or those of the run
    that --resume goes on with. Raises UserError if there is no such run, or with flags for it."""
    if "resume" not in flags:
        named = Config(**flags)
        return Config(**defaults(named) | flags)

    folder = flags["resume"]
    try:
        stored = Config(**json.loads(Path(folder, "config.json").read_bytes()))
        for field in dataclasses.fields(stored):
            value = getattr(stored, field.name)
            choices = choices_of(field) or [value]
            if type(value) is not type(field.default) or value not in choices:
                raise ValueError(f"its {field.name} is {value!r}")
    # A file from someone else may hold anything.
    except Exception as error:
        raise UserError(f"--resume is {folder}, which has no run: {error}") from error

    for name in flags.keys() - {"resume", *MAY_CHANGE}:
        if flags[name] != getattr(stored, name):
            allowed = " and ".join(MAY_CHANGE)
            raise UserError(
                f"--{name} is {flags[name]}, but only {allowed} can change with --resume"
            )
    return dataclasses.replace(stored, **flags)


def check(config: Config) -> None:
    """Raise UserError if a setting that preset and method do not have breaks a rule, or the task
    does not take it."""
    standard = vars(Config(**defaults(config)))
    changed = {name: value for name, value in vars(config).items() if value != standard[name]}
    for names, sentence, holds in RULES:
        for name in names.split():
            if name in changed and not holds(changed[name], config):
                raise UserError(f"--{name} is {changed[name]}, but {sentence}")
    for name in changed.keys() & OF_TASKS - {*ENVS[config.env].settings}:
        raise UserError(f"--{name} has no effect with --env {config.env}")


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line: those of the preset, the method, the flags. A
    wrong flag prints one sentence and exits with status 2."""
    parser = make_parser()
    flags = vars(parser.parse_args(argv))
    wants_help = flags.pop("help", False)
    try:
        config = with_flags(flags)
        if wants_help:
            parser.set_defaults(**vars(config))
            parser.print_help()
            parser.exit()
        check(config)
    except UserError as error:
        parser.error(str(error))
    return config
