"""compare.py: real runs side by side, statistics against known results, and failed runs."""

import argparse
import itertools
import re
import shutil
import signal
import time
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
from conftest import read
from matplotlib.figure import Figure
from scipy import stats

import compare
from envs import ENVS
from envs.base import EVAL_SEEDS
from freshper.config import Preset
from freshper.flags import parse_args

SHORT = (
    "--rollout_batch_size 8 --eval_episodes 4 --eval_every 1 --max_turns 2 --iterations 10".split()
)


def call(monkeypatch, folder, *flags):
    monkeypatch.setattr("sys.argv", ["compare.py", "--out", str(folder), *flags, *SHORT])
    return compare.main()


DIVERGES = "freshper --lr 1e30 --batch_size 8"
ONE = ["--arm", "on_policy", "--seeds", "3"]
ARMS = [*ONE, "--arm", DIVERGES]


def close_terminal(metrics, sleep=time.sleep):
    """As soon as some iterations are done. A service manager signals once more."""
    sleep(0.02)
    if metrics.exists() and metrics.read_text().count("\n") > 4:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a comparison of two real runs. A closed terminal saves the first one, and the
    same command goes on with it, here with a second one beside it, which diverges. A table that
    became too short meanwhile is written again."""
    folder = tmp_path_factory.mktemp("compared")
    run = folder / "on_policy-seed3"
    metrics = run / "metrics.csv"
    with pytest.MonkeyPatch.context() as patch:
        # A fast run is shorter than the comparison's pause, so the signals come in this pause.
        patch.setattr("time.sleep", lambda _: close_terminal(metrics))
        assert call(patch, folder, *ONE) == 129
        patch.undo()
        assert (run / "checkpoint/manifest.json").exists()
        done = int(read(run, "metrics.csv")["iteration"][-1])
        assert done < 10
        metrics.write_bytes(metrics.read_bytes()[:-100])
        assert call(patch, folder, *ARMS) == 0
    log = Path(f"{run}.log").read_text()
    assert f"resuming after iteration {done} " in log
    assert read(run, "metrics.csv")["iteration"].tolist() == [*range(11)]
    return folder


def test_real_runs_side_by_side(out):
    """A run that diverges is counted, not dropped; one seed has no interval."""
    text = (out / "table.md").read_text()
    assert "±" not in text
    table = [row.split(" | ") for row in text.splitlines()[2:]]
    assert [row[0] for row in table] == ["| on_policy", f"| {DIVERGES}"]
    assert [row[6] for row in table] == ["0 of 1", "1 of 1"]
    assert table[0][5] == "10"  # updates
    assert int(table[1][5]) < 30
    held_out = read(out / "on_policy-seed3", "metrics.csv")["eval_success"][1:]
    assert table[0][1] == f"{held_out[-3:].mean():.3f}"

    results = pandas.read_csv(out / "results.csv")
    assert results["diverged"].tolist() == [0, 1]
    assert results["last"][0] == pytest.approx(held_out[-3:].mean())
    assert results["peak"][0] == held_out.max()
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_not_repeated(out, monkeypatch, capsys):
    """The one that diverged goes on, and diverges again. The figure shows the random and the
    optimal policy."""
    table = (out / "table.md").read_text()
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    finished = out / "on_policy-seed3/metrics.csv"
    before = finished.stat().st_mtime_ns
    monkeypatch.setattr(compare, "count", lambda start: itertools.repeat(60))  # a second a minute
    assert call(monkeypatch, out, *ARMS) == 0
    assert finished.stat().st_mtime_ns == before
    on_policy, diverged = (out / "table.md").read_text().splitlines()[2:]
    assert on_policy in table and " | 1 of 1 | " in diverged
    printed = capsys.readouterr().out
    assert on_policy in printed
    progress = re.sub(r"\d of 10", "n of 10", printed)
    assert {*re.findall("iterations:.*", progress)} == {
        "iterations: freshper-lr-1e30-batch_size-8-seed3 n of 10"
    }

    env = ENVS["frozenlake"](max_turns=2)
    success = [env.policy_levels(EVAL_SEEDS + k) for k in range(4)]
    lines = {line.get_label(): line.get_ydata() for line in figures[0].axes[0].lines}
    for name in ("random", "optimal"):
        level = np.mean([of_seed[name] for of_seed in success])
        assert lines[f"{name} policy: {level:.3f}"] == pytest.approx([level] * 2)
    assert lines["on_policy"] == pytest.approx(read(finished.parent, "metrics.csv")["eval_success"])


# Further flags, or a file of the finished run and what it holds instead
REFUSED = {
    "on_policy-seed3 is a run with other settings, use another --out": ["--lr", "0.5"],
    "must be one of success with --env frozenlake": ["--metric", "score"],
    "--jobs is 0, but must be above 0": ["--jobs", "0"],
    "--seed is 4, but the comparison sets it": ["--arm", "per --seed 4"],
    "--seeds or --arm names a run twice": ONE[:2],
    "/freshper/config.py'": ["--out=~/config.py"],
    "on_policy-seed3, which has no run: ": ("config.json", "[]"),
    "on_policy-seed3 has a damaged metrics.csv, remove it: it lacks numbers": (
        "metrics.csv",
        "eval_success,step,wall_s\n" + 11 * "0,0,\n",
    ),
    "on_policy-seed3 has a damaged metrics.csv, remove it: ": ("metrics.csv", 12 * "a\n"),
}


def refusal(monkeypatch, capsys, folder, *flags):
    """Return the sentence that a comparison ends with."""
    try:
        status = call(monkeypatch, folder, *ONE, *flags)
    except SystemExit as stop:  # of argparse
        status = stop.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_compared_is_named(out, tmp_path, monkeypatch, capsys, sentence):
    copy = shutil.copytree(out, tmp_path / "out")
    monkeypatch.setenv("HOME", str(Path("freshper").resolve()))
    flags = REFUSED[sentence]
    if isinstance(flags, tuple):
        name, content = flags
        (copy / "on_policy-seed3" / name).write_text(content)
        flags = []
    assert sentence in refusal(monkeypatch, capsys, copy, *flags)


def test_runs_with_different_data_are_not_compared(out, monkeypatch, capsys):
    monkeypatch.setattr(compare, "find_saved", lambda run: Mock(made_with={"data_sha256": run}))
    monkeypatch.setattr(compare, "train_all", lambda *given: setattr(given[2], "training", False))
    assert call(monkeypatch, out, *ARMS) == 2
    assert capsys.readouterr().err.endswith(f"{out} has runs with different rows of --data\n")


def test_a_run_that_fails_ends_the_comparison(tmp_path, monkeypatch, capsys):
    sentence = refusal(monkeypatch, capsys, tmp_path / "out", "--max_tokens", "20")
    log = tmp_path / "out/on_policy-seed3.log"
    assert sentence == f"compare.py: error: a run ended with status 2: see {log}\n"
    assert "--max_tokens is 20, but must be at least" in log.read_text()


@pytest.mark.parametrize("metric, expected", [("success", (0.1, 0.3)), ("score", (-150, -50))])
def test_a_stopped_run_gets_the_lowest_value_for_what_it_missed(tmp_path, metric, expected):
    config = parse_args("--env cliffwalking --iterations 5 --eval_every 1".split())
    # 2 of 5 evaluations are missing
    rows = [f"{k},{k},{k},{k},0,{0.1 * k},{-50 * k}" for k in range(1, 4)]
    header = "iteration,step,episodes,wall_s,invalid,eval_success,eval_score"
    (tmp_path / "metrics.csv").write_text("\n".join([header, "0,0,0,0,,0.9,9", *rows]) + "\n")
    summary = compare.summary(compare.Run("freshper", tmp_path, [], config), metric)
    assert (summary["last"], summary["peak"]) == pytest.approx(expected)
    assert summary["diverged"] == 1
    assert summary["episodes"].tolist() == [0, 64, 128, 192, 256, 320]
    first = 0.9 if metric == "success" else 9
    last = [0 if metric == "success" else -150] * 2
    assert summary["values"][[0, -2, -1]].tolist() == [first, *last]


def test_intervals_of_the_table():
    runs = {"on_policy": np.array([0.1, 0.4, 0.2, 0.5]), "per": np.array([0.5, 0.6, 0.9])}
    rest = {"peak": 1.0, "updates": 2, "wall_s": 3.0, "diverged": 1}
    rows = [rest | {"arm": arm, "last": value} for arm, values in runs.items() for value in values]
    table = compare.table(pandas.DataFrame(rows), 2).splitlines()
    assert table[0].startswith("| arm | evaluations, the last 2, per seed | mean | - on_policy |")
    low, high = stats.t.interval(0.95, 2, scale=stats.sem(runs["per"]))
    mean = f"0.500 0.600 0.900 | 0.667 ± {(high - low) / 2:.3f}"
    assert table[3].startswith(f"| per | {mean} | ")
    assert table[3].endswith("| 1.000 | 2 | 3 of 3 | 3 |")
    welch = stats.ttest_ind(runs["per"], runs["on_policy"], equal_var=False)
    low, high = welch.confidence_interval()
    assert table[3].split(" | ")[3] == f"+0.367 [{low:+.3f}, {high:+.3f}]"
    assert table[2].split(" | ")[3] == ""


def test_arms_whose_seeds_are_all_equal_have_an_interval_of_no_width():
    assert compare.welch_interval(np.ones(3), np.full(5, 0.25)) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("name", compare.EXHIBITS)
@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_arm_of_every_exhibit_is_a_valid_command_with_a_name_of_its_own(preset, name):
    arms = compare.EXHIBITS[name]
    for env in ENVS:
        args = argparse.Namespace(env=env, out=Path("nowhere"), flags=["--preset", preset])
        runs = [compare.plan(args, arm, 0) for arm in arms]
        assert len({run.folder for run in runs}) == len(arms) > 1
        assert [run.config.method for run in runs] == [arm.split()[0] for arm in arms]
