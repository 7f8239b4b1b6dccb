"""compare.py: real runs side by side, its statistics against known results, and what it does with other runs."""

import csv
import dataclasses
import json
import subprocess

import numpy as np
import pytest
from scipy import stats

import compare
from freshper.diagnostics import read
from freshper.flags import parse_args
from freshper.presets import PRESETS

SHORT = (
    "--rollout_batch_size 8 --eval_episodes 4 --eval_every 1 --max_turns 2 --iterations 2".split()
)


def call(monkeypatch, folder, *flags):
    monkeypatch.setattr("sys.argv", ["compare.py", "--out", str(folder), *flags, *SHORT])
    compare.main()


def test_real_runs_side_by_side(tmp_path, monkeypatch, capsys):
    """A run that diverges is counted, not dropped; finished runs are not repeated; one seed has no interval."""
    arms = ["--arm", "on_policy", "--arm", "freshper --lr 1e30 --batch_size 8", "--seeds", "3"]
    call(monkeypatch, tmp_path, *arms)
    printed = capsys.readouterr().out
    table = [
        row.split(" | ") for row in (tmp_path / "table.md").read_text().strip().splitlines()[2:]
    ]
    assert [row[0] for row in table] == ["| On-policy", "| FreshPER, lr 1e30, batch size 8"]
    assert [row[6] for row in table] == ["0 of 1", "1 of 1"]
    assert table[0][5] == "2"  # updates
    assert int(table[1][5]) < 6
    assert "±" not in printed
    held_out = read(compare.folder_of(tmp_path, "on_policy", 3), "metrics.csv")["eval_success"][1:]
    assert table[0][1] == f"{held_out.mean():.3f}"
    results = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["arm"], row["seed"], row["diverged"]) for row in results] == [
        (arms[1], "3", "0"),
        (arms[3], "3", "1"),
    ]
    assert [float(results[0][name]) for name in ("last", "peak", "episodes")] == [
        held_out.mean(),
        held_out.max(),
        16,
    ]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")}
    call(monkeypatch, tmp_path, *arms)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")} == before
    for flags, sentence in (
        (["--lr", "0.5"], "--lr is 0.5, but must be 0.001 as in"),
        (["--arm", "freshpr --tau 5"], "freshpr"),
        (
            ["--metric", "score"],
            "--metric is score, but must be one of success with --env frozenlake",
        ),
        (["--jobs", "0"], "--jobs is 0, but must be 1 or more"),
        (
            ["--out", str(tmp_path / "table.md")],
            "table.md, but must be a folder that can be made: File exists",
        ),
        (
            ["--arm", "per --seed=5"],
            "--seed is in the flags of per --seed=5, but must be left to compare.py",
        ),
        (
            ["--method", "per"],
            "--method is in the flags of on_policy, but must be left to compare.py",
        ),
    ):
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, tmp_path, *arms, *flags)
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err


def test_an_interrupted_run_goes_on_and_a_failed_one_ends_the_comparison(tmp_path, monkeypatch):
    commands = []
    done = subprocess.CompletedProcess([], 1, "stopped: no disk", "")
    monkeypatch.setattr(
        compare.subprocess, "run", lambda command, **_: commands.append(command[1:]) or done
    )
    settings = dataclasses.asdict(parse_args(["--preset", "tiny", "--method", "per"]).config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.csv").write_text("iteration,eval_success\n0,0.2\n1,0.3\n")
    with pytest.raises(SystemExit, match="no disk"):
        compare.run("frozenlake", "per", 42, tmp_path, ["--preset", "tiny"])
    assert commands == [["train.py", "--resume", str(tmp_path)]]


@pytest.mark.parametrize("metric, expected", [("success", (0.1, 0.3)), ("score", (-150, -50))])
def test_a_stopped_run_gets_the_lowest_value_for_what_it_missed(tmp_path, metric, expected):
    settings = dataclasses.asdict(
        parse_args(["--env", "cliffwalking", "--iterations", "5", "--eval_every", "1"]).config
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    rows = [
        f"{k},{k},{k},{k},0,{0.1 * k},{-50 * k}" for k in range(1, 4)
    ]  # 2 of 5 evaluations are missing
    header = "iteration,step,episodes,wall_s,invalid,eval_success,eval_score"
    (tmp_path / "metrics.csv").write_text("\n".join([header, "0,0,0,0,,0.9,9", *rows]) + "\n")
    (tmp_path / "stopped.txt").write_text("not finite")
    found = compare.summary(tmp_path, metric)
    assert (found["last"], found["peak"]) == pytest.approx(expected)
    assert found["diverged"] == 1


def test_methods_have_the_paper_s_colors(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    arms = [*compare.exhibits("tiny", "frozenlake")["ratio"], "per", "freshper"]
    table = {"episodes": np.arange(3.0), "eval_success": np.array([0.1, np.nan, 0.4])}
    compare.figure(
        tmp_path / "x.png",
        {arm: [table, table] for arm in arms},
        "title",
        {"random": 0.2},
        "success",
    )
    (figure,) = figures
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    paper = {
        "Standard PER": "#FBBC04",
        "On-policy": "#4285F4",
        "FreshPER": "#EA4335",
    }  # captions of Fig. 3 and 4
    assert {name: lines[name] for name in paper} == paper
    assert len({lines[compare.label(arm)] for arm in arms}) == len(arms)


def test_intervals_of_the_table():
    runs = {"on_policy": np.array([0.1, 0.4, 0.2, 0.5]), "per": np.array([0.5, 0.6, 0.9])}
    rest = {"peak": 1.0, "updates": 2, "wall_s": 3.0, "diverged": 1}
    table = compare.table(
        {arm: [rest | {"last": x} for x in values] for arm, values in runs.items()}
    ).splitlines()
    low, high = stats.t.interval(0.95, 2, loc=runs["per"].mean(), scale=stats.sem(runs["per"]))
    assert table[3].startswith(
        f"| Standard PER | 0.500 0.600 0.900 | 0.667 ± {(high - low) / 2:.3f} | "
    )
    assert table[3].endswith("| 1.000 | 2 | 3 of 3 | 3 |")
    low, high = stats.ttest_ind(
        runs["per"], runs["on_policy"], equal_var=False
    ).confidence_interval()
    assert table[3].split(" | ")[3] == f"{low:+.3f} to {high:+.3f}"
    assert table[2].split(" | ")[3] == ""


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_interval_of_a_difference_covers_95_percent(n, ratio):
    """Two arms of n seeds; `ratio` is that of their standard deviations."""
    rng = np.random.default_rng(n)
    low, high = compare.welch_interval(
        rng.normal(0.7, 0.05, (20_000, n)), rng.normal(0.6, 0.05 * ratio, (20_000, n))
    )
    assert 0.93 <= ((low <= 0.1) & (high >= 0.1)).mean() <= 0.97


def test_arms_whose_seeds_are_all_equal_have_an_interval_of_no_width():
    assert compare.welch_interval(np.ones(3), np.full(5, 0.25)) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_arm_of_every_exhibit_is_a_valid_command_with_a_name_of_its_own(preset):
    env = next(iter(PRESETS[preset]))
    found, given = compare.exhibits(preset, env), ["--preset", preset, "--env", env, "--method"]
    for name, arms in found.items():
        assert len({compare.label(arm) for arm in arms}) == len(arms) > 1, name
        for arm in arms:
            method, *flags = arm.split()
            assert parse_args([*given, method, *flags]).config.method == method
    replay, epochs = (parse_args([*given, *found["matched"][k].split()]).config for k in (0, 4))
    assert (
        epochs.ppo_epochs == replay.ppo_epochs + replay.replay_ratio
    )  # as many updates per iteration
