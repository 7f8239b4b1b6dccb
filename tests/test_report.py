"""What a run prints and writes: tables against each other and a brute-force ESS, pages against the
episodes."""

import base64
import html
import io
import re
import time
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from conftest import read
from PIL import Image

import train
from envs import ENVS
from freshper.config import Config
from freshper.report import draw, episodes_page, summarize
from freshper.rollout import rollout
from freshper.run import Run
from freshper.tiny import RandomEngine

FLAGS = """--iterations 10 --eval_every 4 --rollout_batch_size 8 --batch_size 4
--eval_episodes 8 --max_turns 3 --ppo_epochs 2 --seed 3""".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run: its folder, what it printed, and the episodes and seconds of each rollout."""
    folder, lines, collected = tmp_path_factory.mktemp("runs") / "run", [], []

    def recorded(*arguments):
        began = time.perf_counter()
        episodes = rollout(*arguments)
        collected.append((episodes, time.perf_counter() - began))
        return episodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "rollout", recorded)
        patch.setattr(ENVS["frozenlake"], "metrics", ("lr",))  # it stays 0
        patch.setattr("freshper.report.MIN_ESS", 1.0)  # healthy batches are just below it
        patch.setattr(Run, "say", staticmethod(lambda text: lines.extend(text.splitlines())))
        assert train.main([*FLAGS, "--out", str(folder)]) == 0
    return folder, lines, collected


def test_the_summary_of_four_episodes_by_hand():
    """Eight replies. No two columns have the same values."""
    columns = {
        "success": [True, True, False, True],
        "truncated": [False, False, True, False],
        "turns": [3, 2, 1, 2],
        "invalid": [1, 0, 0, 0],
        "cut": [2, 0, 0, 1],
        "score": [1.0, 2.0, 3.0, 8.0],
    }
    episodes = []
    for reward, *values in zip([-2.0, -3.0, 1.0, 0.0], *columns.values(), strict=True):
        episodes.append(SimpleNamespace(reward=reward, outcome=dict(zip(columns, values))))
    assert summarize(episodes) == {
        "success": 3 / 4,
        "reward": -1.0,
        "truncated": 1 / 4,
        "turns": 2.0,
        "invalid": 1 / 8,
        "cut": 3 / 8,
        "score": 3.5,
    }


def test_metrics_agree_with_the_trajectories_that_were_replayed(run):
    folder = run[0]
    metrics, replayed = read(folder, "metrics.csv"), read(folder)
    # The task has a metric of that name, too.
    assert metrics["lr"][2] > metrics["train_lr"][2] == metrics["eval_lr"][0] == 0
    assert metrics["step"].tolist() == [*range(0, 44, 4)]  # two epochs and two replay updates
    assert metrics["episodes"].tolist() == [*range(0, 88, 8)]
    assert np.flatnonzero(~np.isnan(metrics["eval_success"])).tolist() == [0, 4, 8, 10]
    for k, (episodes, seconds) in enumerate(run[2], 1):
        assert metrics["rollout_s"][k] == pytest.approx(seconds, abs=2e-3)
        assert metrics["train_reward"][k] == pytest.approx(np.mean([e.reward for e in episodes]))
        assert metrics["train_success"][k] == np.mean([e.outcome["success"] for e in episodes])
    phases = sum(metrics[f"{phase}_s"][1:] for phase in ("rollout", "logprobs", "update", "replay"))
    assert (phases <= np.diff(metrics["wall_s"]) + 1e-3).all()
    for k in range(1, 11):
        batches = np.flatnonzero(replayed["iteration"] == k).reshape(2, 4)  # K, B
        rho = np.exp(replayed["log_ratio"][batches])
        ess = rho.sum(1) ** 2 / (4 * (rho**2).sum(1))
        ratio = replayed["ratio"][batches].sum(1)
        tokens = replayed["tokens"][batches].sum(1)
        ess_token = ratio**2 / tokens / replayed["ratio_sq"][batches].sum(1)
        assert metrics["ess"][k] == pytest.approx(ess.mean(), rel=1e-4)
        assert metrics["ess_token"][k] == pytest.approx(ess_token.mean(), rel=1e-4)
        assert metrics["replay_age"][k] == pytest.approx(replayed["age"][batches].mean())


def test_what_is_printed(run):
    folder, lines, _ = run
    last = read(folder, "metrics.csv")["eval_success"][[4, 8, 10]].mean()
    env = ENVS["frozenlake"](max_turns=3)
    mean = pandas.DataFrame([env.policy_levels(10**9 + k) for k in range(8)]).mean()
    levels = f"(random policy {mean['random']:.2f}, optimal policy {mean['optimal']:.2f})"
    assert f"held-out success, mean of the last 3 evaluations: {last:.2f} {levels}" in lines
    assert "the policy is evaluated on 8 of them before it is trained" in lines
    ess = read(folder, "metrics.csv")["ess_token"][1:].mean()
    (warning,) = [line for line in lines if "ESS" in line]
    assert warning.startswith(f"ESS / n of replayed tokens is {ess:.2f},")
    for name in ("curve.png", "diagnostics.png", "episodes.html", "config.json"):
        assert (folder / name).exists()


def test_the_page_shows_what_was_read_and_sampled(policy):
    """Play the replies of the page again: every turn must show the image and then the text that the
    environment shows then."""
    task = "frozenlake_vlm" if policy.image_processor else "frozenlake"
    envs = [ENVS[task](max_turns=4) for _ in range(3)]
    episodes = rollout(RandomEngine(policy, envs, [0, 1, 2]), envs, [0, 1, 2], 512, 6)
    config = Config(env="gsm8k", data="a < title")
    page = episodes_page(config, policy, episodes)
    assert page.count("a &lt; title") == 2

    shown = re.finditer('base64,([^"]+)|<pre.*?>(.*?)</pre>', page, re.S)

    def text():
        return html.unescape(next(shown)[2])

    for seed, episode in enumerate(episodes):
        observation, _ = envs[0].reset(seed=seed)
        for reward in episode.turn_rewards:
            for expected in observation.images:
                image = Image.open(io.BytesIO(base64.b64decode(next(shown)[1])))
                np.testing.assert_array_equal(np.array(image), expected)
            assert observation.text in text()
            observation, again, *_ = envs[0].step(text())
            assert again == pytest.approx(reward)
    assert next(shown, None) is None


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (("age", "bge"), "cannot be read"),
        (("\n1,2,", "\n1,,"), "has 79 rows, but 80 were replayed"),
        (("\n1,", "\n1,\x85,\n"), "cannot be read"),
    ],
)
def test_a_damaged_table_ends_no_run(run, tmp_path, monkeypatch, damage, sentence):
    """replay.csv is a log, outside the checkpoint."""
    (tmp_path / "replay.csv").write_text((run[0] / "replay.csv").read_text().replace(*damage, 1))
    lines = []
    monkeypatch.setattr(Run, "say", staticmethod(lines.append))
    damaged = Run(Config(resume=str(tmp_path), batch_size=4), [ENVS["frozenlake"]()])
    damaged.metrics = pandas.read_csv(run[0] / "metrics.csv")
    draw(damaged, {})
    assert any(sentence in line for line in lines)
