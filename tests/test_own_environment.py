"""docs/own_environment.md, as it stands there: its class passes Gymnasium's checks and learns through train.py."""

import csv
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import train
from envs import ENVS

PAGE = (Path(__file__).parent.parent / "docs/own_environment.md").read_text()


@pytest.fixture
def animals_env(tmp_path, monkeypatch):
    """The module of the page's first block, listed under `animals` as its second block says."""
    code, line = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.split('"""', 2)[2].strip().splitlines()) <= 36  # about thirty lines, and blank ones
    assert line.strip() == '"animals": Animals,'
    (tmp_path / "animals.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FRESHPER_CACHE", str(tmp_path / "cache"))
    import animals

    monkeypatch.setitem(ENVS, "animals", animals.Animals)
    yield animals.Animals
    del sys.modules["animals"]


def test_the_page_s_environment_is_one(animals_env, monkeypatch):
    env, rng = animals_env(), np.random.default_rng(0)
    monkeypatch.setattr(type(env.action_space), "sample", lambda *a, **k: env.random_reply(rng))
    env.observation_space = ENVS["frozenlake"]().observation_space
    check_env(env, skip_render_check=True)
    assert inspect.isclass(animals_env)
    wins = np.mean([env.baselines(seed)["random"] for seed in range(2000)])
    assert wins == pytest.approx(1 - (5 / 6) ** 2, abs=0.04)


def test_it_learns_through_train(animals_env, tmp_path):
    """From a third of the animals to nearly all."""
    out = tmp_path / "run"
    flags = ["--iterations", "40", "--eval_every", "20", "--max_tokens", "128", "--lr", "3e-3"]
    assert train.main(["--env", "animals", "--out", str(out), *flags]) == 0
    with open(out / "metrics.csv", newline="") as file:
        found = [float(r["eval_success"]) for r in csv.DictReader(file) if r["eval_success"]]
    assert found[-1] > 0.8
