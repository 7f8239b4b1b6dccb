"""compare.py: real runs side by side, its statistics against known results, and what it does with failed runs."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from scipy import stats

import compare
from freshper.config import parse_args
from freshper.presets import PRESETS

ROOT = Path(__file__).parent.parent


def test_arms_and_seeds_through_train(model_folder, tmp_path):
    """Two arms, two seeds; a second call repeats nothing; a run that cannot go on is counted, not dropped."""
    flags = ["--iterations", "2", "--rollout_batch_size", "4", "--batch_size", "4", "--eval_episodes", "4"]
    flags += ["--eval_every", "1", "--model", model_folder["text"], "--format_penalty", "0.15", "--warmup_steps", "0"]
    arms = ["on_policy", "freshper --tau 5", "freshper --lr 1e30"]
    own = [part for arm in arms for part in ("--arm", arm)]
    command = [sys.executable, "compare.py", *own, "--seeds", "3", "4", "--out", str(tmp_path), *flags]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    with open(tmp_path / "results.csv", newline="") as file:
        results = list(csv.DictReader(file))
    assert [(r["arm"], r["seed"]) for r in results] == [(arm, seed) for seed in "34" for arm in arms]
    assert [r["episodes"] for r in results if "1e30" not in r["arm"]] == ["8"] * 4
    assert [r["updates"] for r in results if "1e30" not in r["arm"]] == ["2", "6"] * 2
    assert [r["diverged"] for r in results if "1e30" in r["arm"]] == ["1", "1"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "table.md").read_text().splitlines()) == 5
    config = json.loads((compare.folder_of(tmp_path, arms[1], 4) / "config.json").read_text())
    assert (config["tau"], config["seed"], config["method"]) == (5.0, 4, "freshper")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")}
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")} == before

    for wrong, sentence in (
        (["--iterations", "3"], "--iterations is 3, but must be 2 as in"),  # the flag that comes last counts
        (["--arm", "freshpr --tau 5"], "freshpr"),
        (["--metric", "score"], "--metric is score, but must be one of success with --env frozenlake"),
    ):
        refused = subprocess.run([*command, *wrong], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 2
        assert sentence in refused.stderr
        assert "Traceback" not in refused.stderr

    unfinished = compare.folder_of(tmp_path, arms[0], 3)
    rows = (unfinished / "metrics.csv").read_text().splitlines(keepends=True)
    (unfinished / "metrics.csv").write_text("".join(rows[:-1]))
    assert not compare.finished(unfinished)
    compare.run("frozenlake", arms[0], 3, unfinished, ["--preset", "tiny", *flags])  # goes on from its checkpoint
    assert (unfinished / "metrics.csv").read_text().splitlines(keepends=True) == rows


def test_scores_and_their_players(tmp_path):
    """Sokoban's and CliffWalking's number in the paper is a score, below zero too: a stopped run gets its lowest."""
    config = parse_args(["--env", "cliffwalking", "--preset", "tiny", "--out", str(tmp_path / "none")])
    found = compare.players(config, "score")
    assert found["optimal"] == -13  # Gymnasium: the shortest way
    model = gymnasium.make("CliffWalking-v1").unwrapped.P
    value = np.zeros(48)
    for _ in range(50):  # turns to go
        value = np.array(
            [np.mean([r + (not end) * value[t] for [(_, t, r, end)] in model[s].values()]) for s in range(48)]
        )
    assert found["random"] == pytest.approx(value[36], rel=0.1)  # 256 games
    for metric, player in (("score", found), ("success", {"random": 0.001, "optimal": 1.0})):
        assert compare.players(config, metric) == pytest.approx(player, abs=1e-3)
    settings = vars(config) | {"iterations": 5, "eval_every": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rows = [f"{k},{100 * k},{100 * k},{k},0,0,{0.1 * k},{-50 * k}" for k in range(1, 4)]
    header = "iteration,step,episodes,wall_s,train_success,invalid,eval_success,eval_score"
    (tmp_path / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "stopped.txt").write_text("not finite")
    assert compare.summary(tmp_path, "score") == compare.summary(tmp_path) | {"last": -150, "final": -150, "peak": -50}
    assert compare.summary(tmp_path)["last"] == pytest.approx(0.1)
    assert compare.summary(tmp_path)["peak"] == pytest.approx(0.3)
    compare.figure(tmp_path / "figure.png", {"per": [compare.read(tmp_path, "metrics.csv")]}, "", found, "score")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_methods_have_the_paper_s_colors():
    """Blue, yellow and red in the captions of Fig. 3 and 4, whatever the order of the arms."""
    found = compare.colors(["per", "freshper", "on_policy", "freshper --tau 5", "freshper --tau 80"])
    assert [found[m] for m in ("on_policy", "per", "freshper")] == ["#4285F4", "#FBBC04", "#EA4335"]
    assert len(set(found.values())) == 5


def test_intervals():
    values = np.array([0.5, 0.6, 0.9])
    low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
    assert compare.interval(values) == pytest.approx((high - low) / 2)
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):  # the difference of the means is 0.2; ten seeds an arm
        low, high = compare.difference(rng.normal(0.7, 0.1, 10), rng.normal(0.5, 0.1, 10), draws=1000)
        covered += low <= 0.2 <= high
    assert 0.85 < covered / 300 < 0.98


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_arm_of_every_exhibit_is_a_valid_command(preset, tmp_path):
    for name, arms in compare.exhibits(preset, "frozenlake").items():
        assert len(arms) == len(set(arms)) > 1, name
        for arm in arms:
            method, *flags = arm.split()
            config = parse_args(["--preset", preset, "--method", method, *flags, "--out", str(tmp_path / "none")])
            assert config.method == method
    epochs, _, longer = compare.exhibits(preset, "frozenlake")["controls"][4:7]
    base = parse_args(["--preset", preset, "--out", str(tmp_path / "none")])
    assert epochs.endswith(f"--ppo_epochs {base.replay_ratio + 1}")
    replayed = base.replay_ratio * base.batch_size // base.rollout_batch_size
    assert longer.startswith(f"on_policy --iterations {base.iterations * (replayed + 1)} --eval_every ")


def test_a_run_that_was_made_with_other_flags_is_not_taken_for_this_one(tmp_path):
    """Finished or not. What only concerns the machine may differ."""
    flags = ["--preset", "tiny", "--lr", "0.1"]
    settings = vars(parse_args([*flags, "--seed", "3", "--method", "per"])) | {"threads": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "stopped.txt").write_text("not finite")
    compare.run("frozenlake", "per", 3, tmp_path, flags)
    with pytest.raises(ValueError, match=r"--lr is 0\.2, but must be 0\.1 as in .*, or --out another folder"):
        compare.run("frozenlake", "per --lr 0.2", 3, tmp_path, flags)
    with pytest.raises(ValueError, match=r"--lr is 0\.001, but must be 0\.1 as in "):
        compare.run("frozenlake", "per", 3, tmp_path, flags[:2])
