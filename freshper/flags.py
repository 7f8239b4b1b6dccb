"""The command line: from flags to a checked `Config`.

A wrong flag ends the program at once, with one sentence that names the flag, its value and what is
allowed. So does a flag that has no effect with the others.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from envs import ENVS
from envs.base import EVAL_SEEDS
from freshper.config import Config
from freshper.presets import PRESETS, defaults

# --resume may change these, and nothing else: stored episodes and states stay those of one problem
MAY_CHANGE = {
    # how long and how often; not --eval_episodes, for the best of all evaluations is kept
    "iterations", "save_every", "eval_every",
    # later draws and updates
    "alpha", "tau", "beta", "replay_ratio", "batch_size", "ppo_epochs", "lr",
    "ratio_clip", "dual_clip", "advantage_clip", "entropy_coef",
    # where
    "micro_batch_size", "engine_memory", "out", "resume",
}  # fmt: skip

ABOVE_0 = (
    "capacity", "batch_size", "epsilon", "iterations", "rollout_batch_size", "group_size",
    "ppo_epochs", "lr", "ratio_clip", "advantage_clip", "micro_batch_size", "temperature",
    "max_new_tokens", "eval_every", "eval_episodes",
)  # fmt: skip
# `check_replay` and `check_training` check these.
OTHER_RANGE = ("tau", "dual_clip", "top_p", "engine_memory")
REPLAY_FLAGS = (
    "batch_size", "capacity", "eviction", "alpha", "epsilon", "base_priority", "decay", "tau",
    "beta",
)  # fmt: skip

# The groups of --help: the first setting of each, and its title
GROUPS = {
    "env": "task",
    "method": "method and replay",
    "iterations": "optimization",
    "temperature": "sampling",
    "backend": "backends",
    "preset": "the run",
}


class CommandLine(NamedTuple):
    """Hold the settings of a command line, checked."""

    config: Config
    flags_given: tuple[str, ...]  # the names of its flags
    notes: tuple[str, ...]  # what the run says of its settings


def validate(config: Config, flags_given: tuple[str, ...] = ()) -> None:
    """Raise ValueError with one sentence if a setting's value is not allowed, or if one of the
    `flags_given` has no effect."""

    def require(condition: object, flag: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"--{flag} is {getattr(config, flag)}, but must be {allowed}")

    def refuse_given(*flags: str, because: str) -> None:
        for flag in flags_given:
            if flag in flags:
                raise ValueError(
                    f"--{flag} is {getattr(config, flag)}, but has no effect with {because}"
                )

    check_numbers(config, require)
    check_model_and_preset(config, require)
    check_replay(config, require)
    check_training(config, require)
    check_effects(config, refuse_given)


def check_numbers(config: Config, require: Callable) -> None:
    """Check the range of each number. float32 must be able to compute with it."""
    for name, value in vars(config).items():
        if isinstance(value, str):
            continue
        if isinstance(value, int):
            largest = EVAL_SEEDS - 1 if name == "seed" else 10**7
            require(value <= largest, name, f"at most {largest}")
        elif value != 0:
            allowed = "a finite number: 0, or from 1e-30 to 1e30"
            require(1e-30 <= abs(value) <= 1e30, name, allowed)

        if name in ABOVE_0:
            require(value > 0, name, "above 0")
        elif name in ("alpha", "beta"):
            require(0 <= value <= 1, name, "between 0 and 1")
        elif name not in OTHER_RANGE:
            require(value >= 0, name, "0 or more")


def check_model_and_preset(config: Config, require: Callable) -> None:
    """Check where the model, its numbers and its questions come from, and where the run goes."""
    if config.preset == "small":
        tasks = PRESETS["small"]
        allowed = f"tiny or paper; small is for --env {' '.join(tasks)} without --data"
        require(config.env in tasks and not config.data, "preset", allowed)

    # The model that an earlier run started from may be gone.
    if not config.resume or "auto" in (config.model, config.preset):
        folder = os.path.isfile(f"{config.model}/config.json")
        hub_id = re.fullmatch(r"[^./~][^/]*/[^/]+", config.model)
        allowed = "tiny, a folder with a config.json, or a hub id"
        require(config.model == "tiny" or folder or hub_id, "model", allowed)

        presets = fitting_presets(config.model, config.env)
        allowed = f"{' or '.join(presets)} with --env {config.env} and --model {config.model}"
        require(config.preset in presets, "preset", allowed)

    if not config.resume:
        require(not os.path.exists(config.out), "out", "a folder that does not exist yet")
    if config.tiny and "data" in config.env_settings():
        allowed = f"empty with --model {config.model}, which reads generated questions"
        require(not config.data, "data", allowed)


def check_replay(config: Config, require: Callable) -> None:
    """Check the settings of method and replay buffer."""
    if config.method == "on_policy":
        require(config.replay_ratio == 0, "replay_ratio", "0 with --method on_policy")
    if config.method == "per":
        require(config.decay == "none", "decay", "none with --method per")
    if config.replay_ratio == 0:
        require(config.baseline != "recompute", "baseline", "batch or turn without replay")

    if config.tau == "auto":
        require(config.decay in ("exponential", "none"), "tau", "a number with this --decay")
    else:
        require(config.tau >= 1, "tau", "at least 1, or auto")
        # The refresh is --ppo_epochs steps after an episode was collected.
        drawable = config.decay != "limit" or config.tau >= config.ppo_epochs
        require(drawable, "tau", "at least --ppo_epochs with --decay limit")
    if config.replay_ratio:
        batch = max(config.batch_size, config.rollout_batch_size)
        require(config.capacity >= batch, "capacity", "at least a batch")


def check_training(config: Config, require: Callable) -> None:
    """Check the settings of optimization, sampling and backends."""
    rest = config.rollout_batch_size % config.group_size
    require(rest == 0, "group_size", "a divisor of rollout_batch_size")
    require(config.dual_clip == 0.0 or config.dual_clip > 1.0, "dual_clip", "0 or above 1")

    longest = config.max_tokens
    require(0.0 < config.top_p <= 1.0, "top_p", "above 0 and at most 1")
    require(config.max_new_tokens < longest, "max_new_tokens", f"below max_tokens {longest}")
    require(config.max_turns <= longest, "max_turns", f"at most max_tokens {longest}")

    require(0.0 < config.engine_memory < 1.0, "engine_memory", "above 0 and below 1")


def check_effects(config: Config, refuse_given: Callable) -> None:
    """Refuse the flags that have no effect with the others."""
    of_other_tasks = {"slippery", "data", "search_url"} - config.env_settings().keys()
    refuse_given(*of_other_tasks, because=f"--env {config.env}")
    if config.resume:
        refuse_given("out", because="--resume")

    if config.replay_ratio == 0:
        refuse_given(*REPLAY_FLAGS, because=f"--method {config.method} and --replay_ratio 0")
        # The policy that is updated is the one that acted, so all ratios are 1.
        if config.ppo_epochs == 1:
            because = "--replay_ratio 0 and --ppo_epochs 1"
            refuse_given("ratio_clip", "dual_clip", because=because)
    if config.decay == "none":
        refuse_given("tau", because=f"--method {config.method} and --decay none")

    # All entries are equally likely, unless an age limit excludes some. A flag may repeat "off".
    if config.alpha == 0:
        refuse_given("epsilon", "base_priority", because="--alpha 0")
        if config.decay in ("exponential", "polynomial"):
            refuse_given("decay", "tau", because="--alpha 0")
        if config.beta > 0:
            refuse_given("beta", because="--alpha 0")
        if config.eviction == "lowest_priority":
            refuse_given("eviction", because="--alpha 0")
    episodes = config.iterations * config.rollout_batch_size
    if config.eviction == "lowest_priority" and episodes <= config.capacity:
        refuse_given("eviction", because=f"--capacity {config.capacity} for {episodes} episodes")

    if config.trainer == "torch":
        refuse_given("zero_stage", because=f"--backend {config.backend}")
    if config.engine == "hf":
        refuse_given("engine_memory", because=f"--backend {config.backend}")


def check_unchanged(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError if a setting differs that --resume may not change."""
    for name, value in earlier.items():
        if name not in MAY_CHANGE and now[name] != value:
            raise ValueError(f"--{name} is {now[name]}, but must be {value} as in the earlier run")


def tau(text: str) -> float | str:
    """Read the value of --tau."""
    return text if text == "auto" else float(text)


def boolean(text: str) -> bool:
    """Read true or false, in any case. Raises ValueError for another text."""
    return ("false", "true").index(text.lower()) == 1


def make_parser() -> argparse.ArgumentParser:
    """Make a parser of all flags. It returns only those that were given, and raises ArgumentError
    if it cannot read the value of one."""
    parser = argparse.ArgumentParser(
        description="FreshPER (Algorithm 1). Defaults are the paper's where it names one, except"
        " for --format_penalty and --slippery; --preset changes them.",
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    types = {"tau": tau, "slippery": boolean}
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])

        options: dict[str, Any] = {"type": types.get(field.name, type(field.default))}
        if field.name == "env":
            options["choices"] = ENVS
        elif get_origin(field.type) is Literal:
            options["choices"] = get_args(field.type)
        else:
            options["metavar"] = ""
        if field.type is bool:
            options |= {"nargs": "?", "const": True}
        text = f"{field.metadata['help']} [{field.default}]"
        group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text, **options)
    return parser


def fitting_presets(model: str, env: str) -> list[Any]:
    """Return the presets that fit, the default first: tiny for a tiny model, else paper and, if the
    task has one, small."""
    path = Path(model, "config.json")
    built = path.is_file() and '"freshper_tiny": true' in path.read_text()
    if built or model == "tiny":
        return ["tiny"]
    return ["paper", "small"] if env in PRESETS["small"] else ["paper"]


def is_here(model: str) -> bool:
    """Return whether this machine has a GPU, and the Hugging Face cache the model's weights."""
    if not glob("/dev/nvidia[0-9]*"):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def first_run(flags: dict[str, Any]) -> CommandLine:
    """Return the settings of a new run, from the preset of the model, then the method, then the
    flags, with a note on the model if the flags leave it open."""
    config = Config(**flags)
    model, preset = config.model, config.preset
    notes = []
    if model == "auto":
        source = "paper" if preset == "auto" else preset
        model = defaults(source, config.env, config.method).get("model", "tiny")
        if preset == "auto":
            state = "and the paper's model are on"
            if not is_here(model):
                model, state = "tiny", "or the paper's model is missing on"
            notes = [f"model {model}: a GPU {state} this machine"]
    if preset == "auto":
        preset = fitting_presets(model, config.env)[0]

    settings = defaults(preset, config.env, config.method) | flags
    config = Config(**settings | {"model": model, "preset": preset})
    return CommandLine(config, tuple(flags), tuple(notes))


def resumed_run(flags: dict[str, Any]) -> CommandLine:
    """Return the settings of an earlier run, checked as flags are, with the flags over them, and
    notes on what has changed."""
    folder = flags["resume"]
    try:
        stored = json.loads(Path(folder, "config.json").read_bytes())
        if not isinstance(stored, dict) or stored.keys() != vars(Config()).keys():
            raise ValueError("its config.json is not that of a run of this version")
        words = [f"--{name}={value}" for name, value in stored.items()]
        stored = vars(make_parser().parse_args(words))
        stored["resume"] = folder
        validate(Config(**stored))
    except (OSError, ValueError, RecursionError, argparse.ArgumentError) as error:
        raise ValueError(
            f"--resume is {folder}, but must be the folder of a run: {error}"
        ) from error

    settings = stored | flags
    check_unchanged(stored, settings)
    changed = [name for name in flags if flags[name] != stored[name]]
    notes = tuple(f"{name} is {flags[name]}, was {stored[name]}" for name in changed)
    return CommandLine(Config(**settings), tuple(flags), notes)


def parse_args(argv: list[str] | None = None) -> CommandLine:
    """Return a checked command line. A wrong flag prints one sentence and exits with status 2."""
    parser = make_parser()
    try:
        flags = vars(parser.parse_args(argv))
        command_line = resumed_run(flags) if "resume" in flags else first_run(flags)
        validate(command_line.config, command_line.flags_given)
    except (ValueError, argparse.ArgumentError) as error:
        parser.error(str(error))
    return command_line
