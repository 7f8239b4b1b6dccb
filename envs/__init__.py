"""The environments of the paper (section 4.1, appendix D), one file each.

`ENVS` maps the name behind `--env` to a callable that makes the environment with its defaults.
Keyword arguments (`slippery=True`, `style="full"`) change them.
"""

from importlib import import_module
from typing import Any

import gymnasium

from envs.base import TextEnv


class Task:
    """A class in a module of this package, which is imported when it is used."""

    def __init__(self, module: str, name: str, **arguments: Any):
        self.module = module
        self.name = name
        self.arguments = arguments

    @property
    def env_class(self) -> type[TextEnv]:
        return getattr(import_module(f"envs.{self.module}"), self.name)

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings of train.py that the task takes."""
        return self.env_class.settings

    def __call__(self, **arguments: Any) -> TextEnv:
        return self.env_class(**self.arguments | arguments)


# A class of your own, such as `ENVS["animals"] = Animals`, is as good as a `Task`.
ENVS: dict[str, Task | type[TextEnv]] = {
    "frozenlake": Task("frozenlake", "FrozenLake"),
    "frozenlake_vlm": Task("frozenlake", "FrozenLake", image=True),
    "sokoban_simple": Task("sokoban", "Sokoban"),
    "sokoban_hard": Task("sokoban", "Sokoban", side=8, boxes=2),
    "cliffwalking": Task("cliffwalking", "CliffWalking"),
    "nq_search": Task("nq_search", "NQSearch"),
    "gsm8k": Task("gsm8k", "GSM8K"),
    "aime": Task("aime", "AIME"),
    "geoqa": Task("geoqa", "GeoQA"),
}

for _name, _task in ENVS.items():
    gymnasium.register(f"freshper/{_name}-v0", _task)
