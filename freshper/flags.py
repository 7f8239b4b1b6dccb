"""The command line: flags to a checked `Config`. A wrong flag ends the program at once, with one sentence."""

import argparse
import dataclasses
import json
import os
import re
from glob import glob
from pathlib import Path
from typing import Any, NoReturn, get_args

from envs import ENVS
from freshper.config import Config
from freshper.presets import PRESETS, defaults

# --resume may change these, and nothing else: the stored episodes and states stay those of one problem
MAY_CHANGE = {
    # how long and how often; not --eval_episodes, for the best of all evaluations is kept
    "iterations", "save_every", "eval_every",
    # later draws and updates
    "alpha", "tau", "beta", "replay_ratio", "batch_size", "ppo_epochs", "lr",
    "ratio_clip", "dual_clip", "advantage_clip", "entropy_coef",
    # where
    "micro_batch_size", "engine_memory", "out", "resume",
}  # fmt: skip
ABOVE_0 = """iterations rollout_batch_size group_size batch_size ppo_epochs capacity lr ratio_clip advantage_clip
micro_batch_size temperature epsilon max_new_tokens eval_every eval_episodes""".split()
NOT_NEGATIVE = """replay_ratio seed kl_loss_coef kl_reward_coef entropy_coef top_k format_penalty max_turns
save_every truncated_is""".split()
# of --help: the first setting of each group, and its title
GROUPS = {
    "env": "task",
    "method": "method and replay",
    "iterations": "optimization",
    "temperature": "sampling",
}
GROUPS |= {"backend": "backends", "preset": "the run"}


def validate(c: Config) -> None:
    """Raise ValueError with one sentence, a flag, its value and what is allowed, or a flag that has no effect."""

    def require(good: object, name: str, allowed: str) -> None:
        if not good:
            raise ValueError(f"--{name} is {getattr(c, name)}, but must be {allowed}")

    for name, value in vars(c).items():
        if isinstance(value, float):  # such that float32 can compute with it
            require(
                value == 0 or 1e-30 <= abs(value) <= 1e30,
                name,
                "a finite number: 0, or from 1e-30 to 1e30",
            )
        if isinstance(value, int):
            largest = 2**32 - 1 if name == "seed" else 10**7
            require(value <= largest, name, f"at most {largest}")
    for name in ABOVE_0:
        require(getattr(c, name) > 0, name, "above 0")
    for name in NOT_NEGATIVE:
        require(getattr(c, name) >= 0, name, "0 or more")
    for name in ("alpha", "beta"):
        require(0.0 <= getattr(c, name) <= 1.0, name, "between 0 and 1")

    # an earlier run may have come from a model that is gone
    resolved = c.resume and "auto" not in (c.model, c.preset)
    known = (
        c.model == "tiny"
        or os.path.isfile(f"{c.model}/config.json")
        or re.fullmatch(r"[^./~][^/]*/[^/]+", c.model)
    )
    require(known or resolved, "model", "tiny, a folder with a config.json, or a hub id")
    small = f"tiny or paper; small is for --env {' '.join(PRESETS['small'])} without --data"
    require(c.preset != "small" or (c.env in PRESETS["small"] and not c.data), "preset", small)
    fitting = fitting_presets(c.model, c.env)
    allowed = f"{' or '.join(fitting)} with --env {c.env} and --model {c.model}"
    require(c.preset in fitting or resolved, "preset", allowed)

    unread = c.tiny and c.data and "data" in c.env_settings()
    require(not unread, "data", f"empty with --model {c.model}, which reads generated questions")
    require(
        c.replay_ratio > 0 or c.baseline != "recompute", "baseline", "batch or turn without replay"
    )
    require(
        c.method != "on_policy" or c.replay_ratio == 0, "replay_ratio", "0 with --method on_policy"
    )
    require(c.method != "per" or c.decay == "none", "decay", "none with --method per")
    require(c.resume or not os.path.exists(c.out), "out", "a folder that does not exist yet")
    require(c.tau == "auto" or c.tau > 0, "tau", "above 0, or auto")
    require(
        c.tau != "auto" or c.decay in ("exponential", "none"), "tau", "a number with this --decay"
    )
    require(c.capacity >= max(c.batch_size, c.rollout_batch_size), "capacity", "at least a batch")
    require(0.0 < c.top_p <= 1.0, "top_p", "above 0 and at most 1")
    require(c.dual_clip == 0.0 or c.dual_clip > 1.0, "dual_clip", "0 or above 1")
    require(0.0 < c.engine_memory < 1.0, "engine_memory", "above 0 and below 1")
    require(
        c.zero_stage < 3 or c.backend != "hf+deepspeed",
        "zero_stage",
        "below 3 with --backend hf+deepspeed",
    )
    require(
        c.rollout_batch_size % c.group_size == 0, "group_size", "a divisor of rollout_batch_size"
    )
    require(c.max_new_tokens < c.max_tokens, "max_new_tokens", f"below max_tokens {c.max_tokens}")
    require(c.max_turns <= c.max_tokens, "max_turns", f"at most max_tokens {c.max_tokens}")
    refuse_idle(c)


def refuse_idle(c: Config) -> None:
    """Raise ValueError with one sentence if a flag was given that has no effect with the others."""
    task = {"slippery", "data", "search_url"} - c.env_settings().keys()
    replay = {
        "batch_size",
        "capacity",
        "eviction",
        "alpha",
        "epsilon",
        "base_priority",
        "decay",
        "tau",
        "beta",
    }
    # all entries are equally likely, unless an age limit excludes some
    uniform = {"epsilon", "base_priority"}
    uniform |= {"decay", "tau"} if c.decay in ("exponential", "polynomial") else set()
    uniform |= {"beta"} if c.beta > 0 else set()
    uniform |= {"eviction"} if c.eviction == "lowest_priority" else set()
    idle = [  # when, which flags, because of what
        (True, task, f"--env {c.env}"),
        (c.replay_ratio == 0, replay, f"--method {c.method} and --replay_ratio 0"),
        # the policy that is updated is the one that acted: all ratios are 1
        (
            c.replay_ratio == 0 and c.ppo_epochs == 1,
            {"ratio_clip", "dual_clip"},
            "--replay_ratio 0 and --ppo_epochs 1",
        ),
        (c.decay == "none", {"tau"}, f"--method {c.method} and --decay none"),
        (c.alpha == 0, uniform, "--alpha 0"),
        (c.resume, {"out"}, "--resume"),
        (c.trainer == "torch", {"zero_stage"}, f"--backend {c.backend}"),
        (c.engine == "hf", {"engine_memory"}, f"--backend {c.backend}"),
    ]
    for name in c.given:
        for holds, names, reason in idle:
            if holds and name in names:
                raise ValueError(f"--{name} is {getattr(c, name)}, but has no effect with {reason}")


def check_unchanged(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError if a setting differs that --resume may not change."""
    for name, value in earlier.items():
        if name not in MAY_CHANGE and now[name] != value:
            raise ValueError(f"--{name} is {now[name]}, but must be {value} as in the earlier run")


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors as ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> _Parser:
    """Build a parser of all flags, which returns only those that were given."""

    def tau(text: str) -> float | str:
        return text if text == "auto" else float(text)

    def boolean(text: str) -> bool:
        return bool(("false", "true").index(text.lower()))

    says = "FreshPER (Algorithm 1). Defaults in brackets are the paper's; --preset changes them."
    parser = _Parser(description=says, usage=argparse.SUPPRESS, allow_abbrev=False)
    types = {"tau": tau, "slippery": boolean}
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        choices = (
            list(ENVS)
            if field.name == "env"
            else get_args(field.type)
            if field.name not in types
            else ()
        )
        options: dict[str, Any] = {"choices": choices} if choices else {"metavar": ""}
        if field.type is bool:
            options |= {"nargs": "?", "const": True}
        options |= {
            "type": types.get(field.name, type(field.default)),
            "default": argparse.SUPPRESS,
        }
        group.add_argument(
            f"--{field.name}", help=f"{field.metadata['help']} [{field.default}]", **options
        )
    return parser


def fitting_presets(model: str, env: str) -> list[Any]:
    """Return the presets that fit, the default first: tiny for a tiny model, else paper and, if there, small."""
    path = Path(model) / "config.json"
    built = path.is_file() and '"freshper_tiny": true' in path.read_text(encoding="utf-8")
    return (
        ["tiny"] if built or model == "tiny" else ["paper"] + ["small"] * (env in PRESETS["small"])
    )


def is_here(model: str) -> bool:
    """True if this machine has a GPU, and the model's weights in the Hugging Face cache."""
    if not glob("/dev/nvidia[0-9]*"):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _first_run(given: dict[str, Any]) -> Config:
    """Return the settings of a new run: the preset of the model, then the method, then the flags."""
    known = Config(**given)
    model, preset, notes = known.model, known.preset, tuple[str, ...]()
    paper = PRESETS["paper"].get(known.env, {}).get("model", "tiny")
    if model == preset == "auto":
        model, found = (paper, "") if is_here(paper) else ("tiny", "not both ")
        notes = (f"model {model}: a GPU and the paper's model are {found}on this machine",)
    elif model == "auto":
        model = PRESETS[preset].get(known.env, {}).get("model", "tiny")
    preset = fitting_presets(model, known.env)[0] if preset == "auto" else preset
    config = Config(
        **defaults(preset, known.env, known.method) | given | {"model": model, "preset": preset}
    )
    config.notes = notes
    return config


def _resumed(given: dict[str, Any], parser: _Parser) -> Config:
    """Return the settings of an earlier run, checked as flags are, and the flags over them."""
    folder = given["resume"]
    try:
        stored = json.loads((Path(folder) / "config.json").read_bytes())
        if not isinstance(stored, dict) or stored.keys() != {
            field.name for field in dataclasses.fields(Config)
        }:
            raise ValueError("its settings are those of another version of this code")
        stored = vars(parser.parse_args([f"--{name}={value}" for name, value in stored.items()]))
        validate(Config(**stored | {"resume": folder}))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--resume is {folder}, but must be the folder of a run: {error}"
        ) from error
    check_unchanged(stored, stored | given)
    config = Config(**stored | given)
    changed = [name for name, value in given.items() if name != "resume" and value != stored[name]]
    config.notes = tuple(f"{name} is {given[name]}, was {stored[name]}" for name in changed)
    return config


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line. A wrong flag prints one sentence and exits with status 2."""
    parser = _parser()
    try:
        given = vars(parser.parse_args(argv))
        config = _resumed(given, parser) if given.get("resume") else _first_run(given)
        config.given = tuple(name for name in given if name != "resume")
        validate(config)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    return config
