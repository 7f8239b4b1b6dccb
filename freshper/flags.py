"""The command line: flags to a checked `Config`. A wrong flag ends the program with one sentence, before anything is
written and before torch is imported.
"""

import argparse
import dataclasses
import inspect
import json
import math
import os
import sys
from glob import glob
from pathlib import Path
from typing import Any, NoReturn, get_args

from envs import ENVS
from freshper.config import Config
from freshper.presets import PRESETS, defaults

# what the saved state of a run consists of, or what its name says: --resume cannot change these
FIXED = """env method model preset seed capacity eviction base_priority replay_advantage kl_loss_coef kl_reward_coef
truncated_is backend dtype zero_stage""".split()
REPLAY = "batch_size capacity eviction alpha epsilon base_priority decay tau beta replay_advantage".split()
GROUPS = {  # of --help: the first setting of each, and its title
    "env": "task",
    "method": "method and replay",
    "iterations": "optimization",
    "temperature": "sampling",
    "backend": "backends",
    "preset": "the run",
}


def validate(c: Config) -> None:
    """Raise ValueError with one sentence that names the flag, its value and what is allowed."""
    above_0 = """iterations rollout_batch_size group_size batch_size ppo_epochs capacity lr ratio_clip advantage_clip
    micro_batch_size temperature epsilon max_new_tokens eval_every eval_episodes""".split()
    not_negative = """replay_ratio seed kl_loss_coef kl_reward_coef entropy_coef top_k format_penalty max_turns
    save_every truncated_is""".split()
    of_type = {name: value for name, value in vars(c).items() if not isinstance(value, str)}
    checks = [(n, v < 2**31, "below 2**31") for n, v in of_type.items() if type(v) is int]
    checks += [(n, math.isfinite(v), "finite") for n, v in of_type.items() if type(v) is float]
    checks += [(name, getattr(c, name) > 0, "above 0") for name in above_0]
    checks += [(name, getattr(c, name) >= 0, "0 or more") for name in not_negative]
    checks += [(name, 0.0 <= getattr(c, name) <= 1.0, "between 0 and 1") for name in ("alpha", "beta")]
    hub_id = "/" in c.model and not c.model.startswith((".", "/", "~"))
    fitting, replays = "tiny" if is_tiny(c.model) else "paper", c.method != "on_policy"
    checks += [
        ("env", c.env in ENVS, f"one of {', '.join(ENVS)}"),
        ("model", c.model == "tiny" or hub_id or os.path.isfile(f"{c.model}/config.json") or bool(c.resume),
         "tiny, a folder with a config.json, or a hub id"),
        ("preset", c.preset == fitting or bool(c.resume), f"{fitting} with --model {c.model}"),
        ("replay_ratio", replays or c.replay_ratio == 0, "0 with --method on_policy"),
        ("decay", c.method != "per" or c.decay == "none", "none with --method per"),
        ("out", bool(c.resume) or not os.path.exists(c.out), "a folder that does not exist yet"),
        ("tau", c.tau == "auto" or c.tau > 0, "above 0, or auto"),
        ("tau", c.tau != "auto" or c.decay in ("exponential", "none"), "a number with this --decay"),
        ("capacity", c.capacity <= 10**8, "at most 100,000,000"),
        ("capacity", c.capacity >= max(c.batch_size, c.rollout_batch_size), "at least a batch"),
        ("top_p", 0.0 < c.top_p <= 1.0, "above 0 and at most 1"),
        ("dual_clip", c.dual_clip == 0.0 or c.dual_clip > 1.0, "0 or above 1"),
        ("engine_memory", 0.0 < c.engine_memory < 1.0, "above 0 and below 1"),
        ("zero_stage", c.zero_stage < 3 or c.backend != "hf+deepspeed",
         "below 3 with --backend hf+deepspeed, whose engine runs on the trainer's own model"),
        ("group_size", c.rollout_batch_size % max(1, c.group_size) == 0, "a divisor of rollout_batch_size"),
        ("max_new_tokens", c.max_new_tokens < c.max_tokens, f"below max_tokens {c.max_tokens}"),
    ]  # fmt: skip
    for name, good, allowed in checks:
        if not good:
            raise ValueError(f"--{name} is {getattr(c, name)}, but must be {allowed}")
    check_used(c)


def check_used(c: Config) -> None:
    """Raise ValueError if a flag was given that has no effect with the others."""
    accepted = inspect.signature(ENVS[c.env]).parameters
    idle = {name: f"--env {c.env}" for name in ("slippery", "data", "search_url") if name not in accepted}
    if c.decay == "none":
        idle["tau"] = f"--method {c.method} and --decay none"
    if c.alpha == 0:
        ages = () if c.decay == "limit" else ("decay", "tau")  # every other decay only scales p, and p^0 = 1
        idle |= dict.fromkeys(("epsilon", "base_priority", *ages), "--alpha 0")
    if c.replay_ratio == 0:
        idle |= dict.fromkeys(REPLAY, f"--method {c.method} and --replay_ratio 0")
    if c.resume:
        idle["out"] = "--resume"
    if c.trainer == "torch":
        idle["zero_stage"] = f"--backend {c.backend}"
    if c.engine == "hf":
        idle["engine_memory"] = f"--backend {c.backend}"
    for name in c.given:
        if name in idle:
            raise ValueError(f"--{name} is {getattr(c, name)}, but has no effect with {idle[name]}")


def _tau(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _parser() -> argparse.ArgumentParser:
    """Build a parser of all flags, which returns only those that were given."""
    parser = argparse.ArgumentParser(
        description="FreshPER (Algorithm 1). Defaults in brackets are the paper's; --preset changes them.",
        usage="%(prog)s [--flag value ...]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for field in dataclasses.fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        choices = get_args(field.type) if field.name != "tau" else ()
        kind: Any = {"tau": _tau, "slippery": _boolean}.get(field.name, type(field.default))
        options = {"type": kind, "metavar": None if choices else "", "choices": choices or None}
        if field.type is bool:
            options |= {"nargs": "?", "const": True}
        group.add_argument(f"--{field.name}", help=f"{field.metadata['help']} [{field.default}]", **options)
    return parser


def is_tiny(model: str) -> bool:
    """True for the name tiny, and for a folder of a model that freshper/tiny.py built, such as a run's checkpoint."""
    path = Path(model) / "config.json"
    return model == "tiny" or (path.is_file() and '"freshper_tiny": true' in path.read_text(encoding="utf-8"))


def default_model(env: str, preset: str) -> tuple[str, str]:
    """Return the model behind `--model auto`, and why, in a few words. Looks at nothing outside this machine."""
    paper = PRESETS["paper"].get(env, {}).get("model")
    if preset == "paper" and paper:
        return paper, ""
    if preset == "tiny" or not paper:
        return "tiny", ""
    if not glob("/dev/nvidia[0-9]*"):
        return "tiny", "model tiny: there is no GPU"
    from huggingface_hub import try_to_load_from_cache  # takes a moment, so only if there is a GPU

    if not isinstance(try_to_load_from_cache(paper, "config.json"), str):
        return "tiny", f"model tiny: {paper} is not in the Hugging Face cache"
    return paper, f"model {paper}: it is in the Hugging Face cache, and there is a GPU"


def _stored(parser: argparse.ArgumentParser, folder: str) -> dict[str, Any]:
    """Read the settings of an earlier run, each checked like a flag. Raises ValueError."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"--resume is {folder}, but must be the folder of a run, with a config.json")
    try:
        stored = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--resume is {folder}, but its config.json cannot be read: {error}") from error
    names = {field.name for field in dataclasses.fields(Config)}
    if not isinstance(stored, dict) or stored.keys() != names:
        different = sorted(names ^ stored.keys())[:3] if isinstance(stored, dict) else ["everything"]
        raise ValueError(f"--resume is {folder}, but its settings differ from this code's in {', '.join(different)}")
    return vars(parser.parse_args([f"--{name}={value}" for name, value in stored.items()]))


def parse_args(argv: list[str] | None = None) -> Config:
    """Return the checked settings of a command line. A wrong flag prints one sentence and exits with status 2; nothing
    has been written by then."""
    parser = _parser()

    def refuse(sentence: str) -> NoReturn:
        parser.exit(2, f"{Path(sys.argv[0]).name}: error: {sentence}\n")

    parser.error = refuse  # type: ignore[method-assign, assignment]
    given = vars(parser.parse_args(argv))
    try:
        if given.get("resume"):
            stored = _stored(parser, given["resume"])
            config = Config(**stored | given)
            changed = {n: v for n, v in given.items() if n not in ("resume", "out") and v != stored[n]}
            for name in FIXED:
                if name in changed:
                    raise ValueError(f"--{name} is {given[name]}, but must be {stored[name]} as in the earlier run")
            config.changes = tuple(f"{n} is {v}, was {stored[n]}" for n, v in changed.items())
        else:
            known = Config(**given)
            if known.env not in ENVS:
                raise ValueError(f"--env is {known.env}, but must be one of {', '.join(ENVS)}")
            model, reason = default_model(known.env, known.preset) if known.model == "auto" else (known.model, "")
            if known.preset == "auto":
                known.preset = "tiny" if is_tiny(model) else "paper"
            settings = defaults(known.preset, known.env, known.method)
            config = Config(**settings | given | {"model": model, "preset": known.preset})
            config.reason = reason
        config.given = tuple(name for name in given if name != "resume")
        validate(config)
    except ValueError as error:
        refuse(str(error))
    return config
