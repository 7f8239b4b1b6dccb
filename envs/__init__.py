"""The environments of the paper (section 4.1, appendix D), one file each.

`ENVS` maps the name behind `--env` to a callable that makes the environment with its defaults.
Keyword arguments (`slippery=True`, `style="full"`) change them.
"""

import warnings
from collections.abc import Callable
from functools import partial

import gymnasium

from envs.aime import AIME
from envs.base import TextEnv
from envs.cliffwalking import CliffWalking
from envs.frozenlake import FrozenLake
from envs.geoqa import GeoQA
from envs.gsm8k import GSM8K
from envs.nq_search import NQSearch
from envs.sokoban import Sokoban

# `python -m envs.search_server` runs a module that this package has already imported. Python warns
# of it, but it is harmless here.
warnings.filterwarnings("ignore", "'envs.* found in sys.modules", RuntimeWarning)

ENVS: dict[str, Callable[..., TextEnv]] = {
    "frozenlake": FrozenLake,
    "frozenlake_vlm": partial(FrozenLake, image=True),
    "sokoban_simple": Sokoban,
    "sokoban_hard": partial(Sokoban, side=8, boxes=2),
    "cliffwalking": CliffWalking,
    "nq_search": NQSearch,
    "gsm8k": GSM8K,
    "aime": AIME,
    "geoqa": GeoQA,
}

for _name, _make in ENVS.items():
    gymnasium.register(f"freshper/{_name}-v0", _make)
