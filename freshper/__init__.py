"""FreshPER: a module per idea of the paper, in the order of README.md, and the machine that runs
them."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_found = find_spec("envs")
if _found is None or str(_ROOT / "envs") not in (_found.submodule_search_locations or ()):
    raise ImportError(
        f"the package envs must be the one in {_ROOT}, but another folder or package of this name "
        "comes first: rename it, or start Python elsewhere"
    )
