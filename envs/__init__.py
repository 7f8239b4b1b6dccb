"""The environments of the paper, one file each. `ENVS` maps the name behind `--env` to a callable that makes
the environment with its defaults; keyword arguments (`slippery=True`, `style="full"`) change them."""

from collections.abc import Callable
from functools import partial

import gymnasium

from envs.aime import AIME
from envs.base import TextEnv
from envs.frozenlake import FrozenLake
from envs.geoqa import GeoQA
from envs.gsm8k import GSM8K

ENVS: dict[str, Callable[..., TextEnv]] = {
    "frozenlake": FrozenLake,
    "frozenlake_vlm": partial(FrozenLake, image=True),
    "gsm8k": GSM8K,
    "aime": AIME,
    "geoqa": GeoQA,
}

for _name, _make in ENVS.items():
    gymnasium.register(id=f"freshper/{_name}-v0", entry_point=_make)
