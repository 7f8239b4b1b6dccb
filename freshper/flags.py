"""The command line: flags to a checked `Config`. A wrong flag ends the program at once, with one sentence."""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
from glob import glob
from pathlib import Path
from typing import Any, get_args

from envs import ENVS
from freshper.config import Config
from freshper.presets import PRESETS, defaults

# what the saved state of a run consists of, or what its name says: --resume cannot change these
FIXED = """env method model preset seed capacity eviction base_priority baseline kl_loss_coef kl_reward_coef
truncated_is backend dtype zero_stage""".split()
# of --help: the first setting of each group, and its title
GROUPS = {"env": "task", "method": "method and replay", "iterations": "optimization", "temperature": "sampling"}
GROUPS |= {"backend": "backends", "preset": "the run"}


def validate(c: Config) -> None:
    """Raise ValueError with one sentence: a flag, its value, and what is allowed or with what it has no effect."""
    above_0 = """iterations rollout_batch_size group_size batch_size ppo_epochs capacity lr ratio_clip advantage_clip
    micro_batch_size temperature epsilon max_new_tokens eval_every eval_episodes""".split()
    not_negative = """replay_ratio seed kl_loss_coef kl_reward_coef entropy_coef top_k format_penalty max_turns
    save_every truncated_is""".split()
    known = c.model == "tiny" or os.path.isfile(f"{c.model}/config.json") or re.fullmatch(r"[^./~][^/]*/[^/]+", c.model)
    fitting, small = fitting_presets(c.model, c.env), f"small is for --env {' '.join(PRESETS['small'])} without --data"
    checks = [
        *((name, math.isfinite(x), "a finite number") for name, x in vars(c).items() if isinstance(x, float)),
        *((name, getattr(c, name) > 0, "above 0") for name in above_0),
        *((name, getattr(c, name) >= 0, "0 or more") for name in not_negative),
        *((name, 0.0 <= getattr(c, name) <= 1.0, "between 0 and 1") for name in ("alpha", "beta")),
        ("model", known or c.resume, "tiny, a folder with a config.json, or a hub id"),
        ("preset", c.preset != "small" or (c.env in PRESETS["small"] and not c.data), f"tiny or paper; {small}"),
        ("preset", c.preset in fitting or c.resume, f"{' or '.join(fitting)} with --env {c.env} and --model {c.model}"),
        ("baseline", c.replay_ratio > 0 or c.baseline != "recompute", "batch or turn without replay"),
        ("replay_ratio", c.method != "on_policy" or c.replay_ratio == 0, "0 with --method on_policy"),
        ("decay", c.method != "per" or c.decay == "none", "none with --method per"),
        ("out", c.resume or not os.path.exists(c.out), "a folder that does not exist yet"),
        ("tau", c.tau == "auto" or c.tau > 0, "above 0, or auto"),
        ("tau", c.tau != "auto" or c.decay in ("exponential", "none"), "a number with this --decay"),
        ("capacity", c.capacity >= max(c.batch_size, c.rollout_batch_size), "at least a batch"),
        ("top_p", 0.0 < c.top_p <= 1.0, "above 0 and at most 1"),
        ("dual_clip", c.dual_clip == 0.0 or c.dual_clip > 1.0, "0 or above 1"),
        ("engine_memory", 0.0 < c.engine_memory < 1.0, "above 0 and below 1"),
        ("zero_stage", c.zero_stage < 3 or c.backend != "hf+deepspeed", "below 3 with --backend hf+deepspeed"),
        ("group_size", c.rollout_batch_size % max(1, c.group_size) == 0, "a divisor of rollout_batch_size"),
        ("max_new_tokens", c.max_new_tokens < c.max_tokens, f"below max_tokens {c.max_tokens}"),
    ]  # fmt: skip
    for name, good, allowed in checks:
        if not good:
            raise ValueError(f"--{name} is {getattr(c, name)}, but must be {allowed}")
    replay = "batch_size capacity eviction alpha epsilon base_priority decay tau beta"
    idle = [  # when, which flags, because of what
        (True, " ".join({"slippery", "data", "search_url"} - c.env_settings().keys()), f"--env {c.env}"),
        (c.replay_ratio == 0, replay, f"--method {c.method} and --replay_ratio 0"),
        (c.decay == "none", "tau", f"--method {c.method} and --decay none"),
        (c.alpha == 0, "epsilon base_priority", "--alpha 0"),
        (c.resume, "out", "--resume"),
        (c.trainer == "torch", "zero_stage", f"--backend {c.backend}"),
        (c.engine == "hf", "engine_memory", f"--backend {c.backend}"),
    ]
    for name, (holds, names, reason) in itertools.product(c.given, idle):
        if holds and name in names.split():
            raise ValueError(f"--{name} is {getattr(c, name)}, but has no effect with {reason}")


def _parser() -> argparse.ArgumentParser:
    """Build a parser of all flags, which returns only those that were given."""

    def tau(text: str) -> float | str:
        return text if text == "auto" else float(text)

    def boolean(text: str) -> bool:
        return bool(("false", "true").index(text.lower()))

    says = "FreshPER (Algorithm 1). Defaults in brackets are the paper's; --preset changes them."
    parser = argparse.ArgumentParser(description=says, usage=argparse.SUPPRESS, allow_abbrev=False)
    types = {"tau": tau, "slippery": boolean}
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        choices = list(ENVS) if field.name == "env" else get_args(field.type) if field.name not in types else ()
        options: dict[str, Any] = {"choices": choices} if choices else {"metavar": ""}
        if field.type is bool:
            options |= {"nargs": "?", "const": True}
        options |= {"type": types.get(field.name, type(field.default)), "default": argparse.SUPPRESS}
        group.add_argument(f"--{field.name}", help=f"{field.metadata['help']} [{field.default}]", **options)
    return parser


def fitting_presets(model: str, env: str) -> list[Any]:
    """Return the presets that fit, the default first: tiny for a tiny model, else paper and, if there, small."""
    path = Path(model) / "config.json"
    built = path.is_file() and '"freshper_tiny": true' in path.read_text(encoding="utf-8")
    return ["tiny"] if built or model == "tiny" else ["paper"] + ["small"] * (env in PRESETS["small"])


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
    config = Config(**defaults(preset, known.env, known.method) | given | {"model": model, "preset": preset})
    config.notes = notes
    return config


def _resumed(given: dict[str, Any]) -> Config:
    """Return the settings of an earlier run, and the flags over them."""
    folder = given["resume"]
    try:
        stored = json.loads((Path(folder) / "config.json").read_bytes())
        if stored.keys() != {field.name for field in dataclasses.fields(Config)}:
            raise ValueError("its settings are those of another version of this code")
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume is {folder}, but must be the folder of a run: {error}") from error
    changed = [name for name, value in given.items() if name != "resume" and value != stored[name]]
    if fixed := [name for name in changed if name in FIXED]:
        raise ValueError(f"--{fixed[0]} is {given[fixed[0]]}, but must be {stored[fixed[0]]} as in the earlier run")
    config = Config(**stored | given)
    config.notes = tuple(f"{name} is {given[name]}, was {stored[name]}" for name in changed)
    return config


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line. A wrong flag prints one sentence and exits with status 2."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    try:
        config = _resumed(given) if given.get("resume") else _first_run(given)
        config.given = tuple(name for name in given if name != "resume")
        validate(config)
    except ValueError as error:
        parser.error(str(error))
    return config
