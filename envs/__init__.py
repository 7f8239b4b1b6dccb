"""The environments of the paper, one file each. `ENVS` maps the name behind `--env` to a callable that makes
the environment with its defaults; keyword arguments (`slippery=True`, `style="full"`) change them."""

from collections.abc import Callable
from functools import partial

import gymnasium

from envs.base import TextEnv
from envs.frozenlake import FrozenLake

ENVS: dict[str, Callable[..., TextEnv]] = {
    "frozenlake": FrozenLake,
    "frozenlake_vlm": partial(FrozenLake, image=True),
}

for _name, _make in ENVS.items():
    gymnasium.register(id=f"freshper/{_name}-v0", entry_point=_make)
