"""What --resume finds: settings and newest whole checkpoint of an earlier run, and which flags may differ from them.

A run goes on with the settings that its checkpoint holds. Flags on the command line must agree with them, or be
named by --override; those that the saved state is made of, or that the name of the run stands for, are FIXED.
Not in the paper.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args

from freshper.checkpoint import Checkpoint, find

FIXED = """env method preset model seed out capacity eviction age_unit dtype freeze_vision replay_advantage
baseline_window kl_loss_coef kl_reward_coef engine truncated_is""".split()
# those that shape no number of a run, but perhaps its last digits
MACHINE = """out resume override threads save_every save_minutes keep_checkpoints timeout env_timeout rollout_gpus
engine_memory sync_check_every sync_tolerance""".split()


def earlier_run(folder: Path, config: type) -> tuple[dict[str, Any], Checkpoint | None]:
    """Settings and newest whole checkpoint of the run in `folder`; None where it was stopped before its first one.
    `config` is the dataclass of settings. Raises ValueError with a sentence."""
    try:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError
    except OSError as error:  # a name that is too long among them
        raise ValueError(f"--resume is {folder}, but must be the folder of a run, with a config.json") from error
    try:
        found, problems = find(folder)
        stored = found.state["config"] if found else json.loads((folder / "config.json").read_bytes())
        check_settings(stored, config)
    except (ValueError, RecursionError) as error:  # those of JSON among them
        raise ValueError(f"--resume is {folder}, but no run can go on there: {error}") from error
    for problem in problems:
        print(problem, file=sys.stderr)
    start = f"from {found.folder}, after iteration {found.done}" if found else "from the start: it has no checkpoint"
    print(f"{folder} goes on {start}", file=sys.stderr)
    return stored | {"resume": str(folder), "override": []}, found


def check_settings(stored: Any, config: type) -> None:
    """Raises ValueError where settings read from a file are not those of the dataclass. Whole numbers become floats
    where a float is meant."""
    fields = {f.name: f for f in dataclasses.fields(config)}
    if not isinstance(stored, dict) or stored.keys() != fields.keys():
        names = sorted(stored.keys() ^ fields.keys())[:3] if isinstance(stored, dict) else ["everything"]
        raise ValueError(f"its settings are not those of this code, they differ in {', '.join(names)}")
    for name, value in stored.items():
        kind = list if name == "override" else type(fields[name].default)
        if kind is float and type(value) is int and abs(value) < 2**63:
            stored[name] = value = float(value)
        if type(value) is not kind:
            raise ValueError(f"its setting {name} is {value!r}, but must be of type {kind.__name__}")
        choices = get_args(fields[name].type) if kind is str else ()
        if choices and value not in choices:
            raise ValueError(f"its setting {name} is {value!r}, but must be one of {', '.join(choices)}")


def check_overrides(settings: dict[str, Any], stored: dict[str, Any], done: int) -> None:
    """Raises ValueError where settings differ from those of the run that goes on, `done` iterations long, and
    --override does not allow it."""
    for name in settings["override"]:
        if name not in stored or name in (*FIXED, "resume", "override"):
            raise ValueError(f"--override is {name}, but must be a flag other than {', '.join(FIXED)}")
    differing = [n for n, value in settings.items() if n not in ("resume", "override") and value != stored[n]]
    fixed = [name for name in differing if name in FIXED]
    if refused := fixed or [name for name in differing if name not in settings["override"]]:
        given = ", ".join(f"--{name} is {settings[name]}" for name in refused)
        before = ", ".join(str(stored[name]) for name in refused)
        remedy = "a run that goes on cannot change that" if fixed else f"or be named: --override {' '.join(refused)}"
        raise ValueError(f"{given}, but must be {before} as in the run that goes on ({remedy})")
    if settings["iterations"] < done:
        raise ValueError(f"--iterations is {settings['iterations']}, but must be at least the {done} that are done")


def check_repeated(folder: Path, asked: dict[str, Any]) -> None:
    """Raises ValueError where the run in `folder` was made with other settings than those `asked` for, as far as they
    shape its numbers: its results would be taken for theirs."""
    for name, value in json.loads((folder / "config.json").read_bytes()).items():
        if name not in MACHINE and value != asked.get(name):
            raise ValueError(
                f"--{name} is {asked.get(name)}, but must be {value} as in {folder}, or --out another folder"
            )
