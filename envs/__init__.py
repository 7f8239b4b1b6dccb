"""The nine environments of the paper (section 4.1, appendix D), in seven files.

`ENVS` maps the name behind `--env` to a class, which makes the environment with its defaults.
Keyword arguments (`slippery=True`, `style="full"`) change them.
"""

import gymnasium

from envs.aime import AIME
from envs.base import TextEnv
from envs.cliffwalking import CliffWalking
from envs.frozenlake import FrozenLake, FrozenLakeVLM
from envs.geoqa import GeoQA
from envs.gsm8k import GSM8K
from envs.nq_search import NQSearch
from envs.sokoban import Sokoban, SokobanHard

ENVS: dict[str, type[TextEnv]] = {
    "frozenlake": FrozenLake,
    "frozenlake_vlm": FrozenLakeVLM,
    "sokoban_simple": Sokoban,
    "sokoban_hard": SokobanHard,
    "cliffwalking": CliffWalking,
    "nq_search": NQSearch,
    "gsm8k": GSM8K,
    "aime": AIME,
    "geoqa": GeoQA,
}

for _name, _env in ENVS.items():
    gymnasium.register(f"freshper/{_name}-v0", _env)
