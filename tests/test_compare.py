"""compare.py: real runs side by side, statistics against known results, and failed runs."""

import csv
import json
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from scipy import stats

import compare
from freshper.config import PRESETS, TINY
from freshper.diagnostics import read
from freshper.flags import parse_args

SHORT = (
    "--rollout_batch_size 8 --eval_episodes 4 --eval_every 1 --max_turns 2 --iterations 2".split()
)


def call(monkeypatch, folder, *flags):
    monkeypatch.setattr("sys.argv", ["compare.py", "--out", str(folder), *flags, *SHORT])
    compare.main()


ARMS = ["--arm", "on_policy", "--arm", "freshper --lr 1e30 --batch_size 8", "--seeds", "3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a comparison of two real runs, the second of which diverges."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        call(patch, folder, *ARMS)
    return folder


def test_real_runs_side_by_side(out):
    """A run that diverges is counted, not dropped; one seed has no interval."""
    text = (out / "table.md").read_text()
    assert "±" not in text
    table = [row.split(" | ") for row in text.splitlines()[2:]]
    assert [row[0] for row in table] == ["| On-policy", "| FreshPER, lr 1e30, batch size 8"]
    assert [row[6] for row in table] == ["0 of 1", "1 of 1"]
    assert table[0][5] == "2"  # updates
    assert int(table[1][5]) < 6
    held_out = read(compare.folder_of(out, "on_policy", 3), "metrics.csv")["eval_success"][1:]
    assert table[0][1] == f"{held_out.mean():.3f}"

    first, second = csv.DictReader((out / "results.csv").open())
    assert [first["diverged"], second["diverged"]] == ["0", "1"]
    assert float(first["last"]) == held_out.mean()
    assert float(first["peak"]) == held_out.max()
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_not_repeated(out, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")}
    call(monkeypatch, out, *ARMS)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")} == before
    assert (out / "table.md").read_text() in capsys.readouterr().out


REFUSED = {
    "--lr is 0.5, but must be 0.001 as in": ["--lr", "0.5"],
    "must be one of success with --env frozenlake": ["--metric", "score"],
    "File exists: 'compare.py'": ["--out", "compare.py"],
}


def refusal(monkeypatch, capsys, folder, *flags):
    """Return the sentence that a comparison ends with."""
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, folder, *ARMS, *flags)
    assert stop.value.code != 0
    return capsys.readouterr().err + str(stop.value.code)


@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_arguments_are_refused(out, monkeypatch, capsys, sentence):
    assert sentence in refusal(monkeypatch, capsys, out, *REFUSED[sentence])


HEADER = "iteration,step,episodes,wall_s,invalid,eval_success"
# What a file of a finished run holds instead.
DAMAGED = {
    "nothing": ("metrics.csv", ""),
    "bytes": ("metrics.csv", "\0\xff" * 50),
    "half a row": ("metrics.csv", HEADER + "\n0,1\n1,2,3,4,5,6\n"),
    "other columns": ("metrics.csv", "iteration,step\n0,0\n2,2\n"),
    "no evaluation": ("metrics.csv", HEADER + "\n0,0,0,0,,\n2,2,8,1,0,\n"),
    "no settings": ("config.json", "[]"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_run_is_named(out, tmp_path, monkeypatch, capsys, kind):
    copy = shutil.copytree(out, tmp_path / "out")
    folder = compare.folder_of(copy, "on_policy", 3)
    name, content = DAMAGED[kind]
    (folder / name).write_text(content)
    sentence = refusal(monkeypatch, capsys, copy)
    assert f"compare.py: error: {folder} is no run of this version, remove it: " in sentence


def test_a_folder_of_something_else_is_named(out, tmp_path, monkeypatch, capsys):
    (compare.folder_of(tmp_path, "on_policy", 3) / "photos").mkdir(parents=True)
    assert "is no run of this version, remove it" in refusal(monkeypatch, capsys, tmp_path)
    copy = shutil.copytree(out, tmp_path / "out")
    (copy / "table.md").unlink()
    (copy / "table.md").mkdir()
    assert "Is a directory" in refusal(monkeypatch, capsys, copy)


def test_an_interrupted_run_goes_on_and_a_failed_one_ends_the_comparison(tmp_path, monkeypatch):
    commands = []

    def fail(command, **_):
        commands.append(command[1:])
        return Mock(returncode=1, communicate=lambda: ("stopped: no disk", None))

    monkeypatch.setattr(subprocess, "Popen", fail)
    settings = vars(parse_args(["--method", "per"]))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.csv").write_text(HEADER + "\n0,0,0,0,,0.2\n1,3,8,1,0,0.3\n")
    with pytest.raises(RuntimeError, match="no disk"):
        compare.train(tmp_path, ["--preset", "tiny"])
    ((program, *flags),) = commands
    assert Path(program).is_file() and Path(program).name == "train.py"
    assert flags == [f"--resume={tmp_path}"]


@pytest.mark.parametrize("metric, expected", [("success", (0.1, 0.3)), ("score", (-150, -50))])
def test_a_stopped_run_gets_the_lowest_value_for_what_it_missed(tmp_path, metric, expected):
    flags = "--env cliffwalking --iterations 5 --eval_every 1".split()
    settings = vars(parse_args(flags))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    # 2 of 5 evaluations are missing
    rows = [f"{k},{k},{k},{k},0,{0.1 * k},{-50 * k}" for k in range(1, 4)]
    header = "iteration,step,episodes,wall_s,invalid,eval_success,eval_score"
    (tmp_path / "metrics.csv").write_text("\n".join([header, "0,0,0,0,,0.9,9", *rows]) + "\n")
    (tmp_path / "stopped.txt").write_text("not finite")
    summary = compare.summary(tmp_path, metric)
    assert (summary["last"], summary["peak"]) == pytest.approx(expected)
    assert summary["diverged"] == 1

    (tmp_path / "stopped.txt").unlink()
    for unreadable, diverged in (("0", 0), ("0.6", 1)):
        cells = [row.replace(",0,", f",{unreadable},", 1) for row in rows]
        (tmp_path / "metrics.csv").write_text("\n".join([header, "0,0,0,0,,0.9,9", *cells]) + "\n")
        assert compare.summary(tmp_path, metric)["diverged"] == diverged


def test_a_stopped_run_falls_to_0_in_the_figure(tmp_path, monkeypatch):
    """As in the table. The other run ends at 0.4."""
    whole = {"episodes": np.arange(4.0), "eval_success": np.array([0.1, 0.2, 0.3, 0.4])}
    stopped = {"episodes": np.arange(2.0), "eval_success": np.array([0.1, 0.8])}
    tables = [whole, stopped]
    monkeypatch.setattr(compare, "read_run", lambda folder: (None, tables[int(folder.name[-1])]))
    figures = []
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, *_, **__: figures.append(figure))
    results = {"per": [{"seed": 0}, {"seed": 1}]}
    compare.figure(tmp_path, results, "success", "title", {})
    (line,) = [line for line in figures[0].axes[0].lines if line.get_label() == "Standard PER"]
    assert line.get_ydata() == pytest.approx([0.1, 0.5, 0.15, 0.2])


def test_intervals_of_the_table():
    runs = {"on_policy": np.array([0.1, 0.4, 0.2, 0.5]), "per": np.array([0.5, 0.6, 0.9])}
    rest = {"peak": 1.0, "updates": 2, "wall_s": 3.0, "diverged": 1}
    results = {}
    for arm, values in runs.items():
        results[arm] = [rest | {"last": value} for value in values]
    table = compare.table(results).splitlines()
    low, high = stats.t.interval(0.95, 2, scale=stats.sem(runs["per"]))
    mean = f"0.500 0.600 0.900 | 0.667 ± {(high - low) / 2:.3f}"
    assert table[3].startswith(f"| Standard PER | {mean} | ")
    assert table[3].endswith("| 1.000 | 2 | 3 of 3 | 3 |")
    welch = stats.ttest_ind(runs["per"], runs["on_policy"], equal_var=False)
    low, high = welch.confidence_interval()
    assert table[3].split(" | ")[3] == f"{low:+.3f} to {high:+.3f}"
    assert table[2].split(" | ")[3] == ""


@pytest.mark.parametrize(("n", "ratio"), [(3, 1), (3, 3), (10, 3)])
def test_the_interval_of_a_difference_covers_95_percent(n, ratio):
    """Two arms of n seeds; `ratio` is that of their standard deviations."""
    rng = np.random.default_rng(n)
    x = rng.normal(0.7, 0.05, (20_000, n))
    y = rng.normal(0.6, 0.05 * ratio, (20_000, n))
    low, high = compare.welch_interval(x, y)
    assert 0.93 <= ((low <= 0.1) & (high >= 0.1)).mean() <= 0.97


def test_arms_whose_seeds_are_all_equal_have_an_interval_of_no_width():
    assert compare.welch_interval(np.ones(3), np.full(5, 0.25)) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("name", compare.EXHIBITS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_arm_of_every_exhibit_is_a_valid_command_with_a_name_of_its_own(preset, name):
    taus = [f"freshper --tau {tau}" for tau in compare.TAUS[preset]]
    arms = [*compare.EXHIBITS[name], *(taus if name == "tau" else [])]
    assert len({compare.label(arm) for arm in arms}) == len(arms) > 1
    assert len({compare.folder_of(Path(), arm, 0) for arm in arms}) == len(arms)
    for env in TINY:
        for arm in arms:
            method, *words = arm.split()
            flags = ["--preset", preset, "--env", env, "--method", method, *words]
            assert parse_args(flags).method == method
