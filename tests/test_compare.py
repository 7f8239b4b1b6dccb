"""compare.py: real runs side by side, statistics against known results, and failed runs."""

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from freshper.presets import PRESETS
from scipy import stats

import compare
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
    assert (first["arm"], first["seed"], first["diverged"]) == (ARMS[1], "3", "0")
    assert (second["arm"], second["seed"], second["diverged"]) == (ARMS[3], "3", "1")
    assert float(first["last"]) == held_out.mean()
    assert float(first["peak"]) == held_out.max()
    assert float(first["episodes"]) == 16
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_not_repeated(out, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")}
    call(monkeypatch, out, *ARMS)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.csv")} == before
    assert (out / "table.md").read_text() in capsys.readouterr().out


REFUSED = {
    "--lr is 0.5, but must be 0.001 as in": ["--lr", "0.5"],
    "freshpr": ["--arm", "freshpr --tau 5"],
    "must be one of success with --env frozenlake": ["--metric", "score"],
    "--exhibit is tau, but has no effect with --arm": ["--exhibit", "tau"],
    "--jobs is 0, but must be 1 or more": ["--jobs", "0"],
    "compare.py, but must be a folder that can be made: File exists": ["--out", "compare.py"],
    "--seed is in the flags of per --seed=5, but must be left": ["--arm", "per --seed=5"],
    "--method is in the flags of on_policy, but must be left": ["--method", "per"],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_wrong_arguments_are_refused(out, monkeypatch, capsys, sentence):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, out, *ARMS, *REFUSED[sentence])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_flag_that_every_arm_sets_is_refused(tmp_path, monkeypatch, capsys):
    arms = ["--arm", "per --lr=0.1", "--arm", "freshper --lr 0.2"]
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, tmp_path / "out", *arms, "--lr", "0.3")
    assert "--lr has no effect, because every arm sets --lr" in capsys.readouterr().err


def test_two_arms_with_one_folder_are_refused(tmp_path, monkeypatch, capsys):
    arms = ["--arm", "freshper --epsilon 1e-3", "--arm", "freshper --epsilon 1e+3"]
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, tmp_path / "out", *arms)
    sentence = "--arm is freshper --epsilon 1e+3, but must not have the folder of freshper --eps"
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_goes_on_and_a_failed_one_ends_the_comparison(tmp_path, monkeypatch):
    commands = []
    done = subprocess.CompletedProcess([], 1, "stopped: no disk", "")

    def fail(command, **_):
        commands.append(command[1:])
        return done

    monkeypatch.setattr(subprocess, "run", fail)
    settings = vars(parse_args(["--preset", "tiny", "--method", "per"]).config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.csv").write_text("iteration,eval_success\n0,0.2\n1,0.3\n")
    with pytest.raises(SystemExit, match="no disk"):
        compare.run("frozenlake", "per", 42, tmp_path, ["--preset", "tiny"])
    ((program, *flags),) = commands
    assert Path(program).is_file() and Path(program).name == "train.py"
    assert flags == [f"--resume={tmp_path}"]


@pytest.mark.parametrize("metric, expected", [("success", (0.1, 0.3)), ("score", (-150, -50))])
def test_a_stopped_run_gets_the_lowest_value_for_what_it_missed(tmp_path, metric, expected):
    flags = "--env cliffwalking --iterations 5 --eval_every 1".split()
    settings = vars(parse_args(flags).config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    # 2 of 5 evaluations are missing
    rows = [f"{k},{k},{k},{k},0,{0.1 * k},{-50 * k}" for k in range(1, 4)]
    header = "iteration,step,episodes,wall_s,invalid,eval_success,eval_score"
    (tmp_path / "metrics.csv").write_text("\n".join([header, "0,0,0,0,,0.9,9", *rows]) + "\n")
    assert not compare.finished(tmp_path)
    (tmp_path / "stopped.txt").write_text("not finite")
    assert compare.finished(tmp_path)
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
    monkeypatch.setattr(compare, "read", lambda folder, _: tables[int(folder.name[-1])])
    figures = []
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, *_, **__: figures.append(figure))
    results = {"per": [{"seed": 0}, {"seed": 1}]}
    compare.figure(tmp_path, results, "success", "title", {})
    (line,) = [line for line in figures[0].axes[0].lines if line.get_label() == "Standard PER"]
    assert line.get_ydata() == pytest.approx([0.1, 0.5, 0.15, 0.2])


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is no run of this version, remove it: "):
        compare.checked("frozenlake", "per", 42, tmp_path, ["--preset", "tiny"])


def test_methods_have_the_paper_s_colors(tmp_path, monkeypatch):
    figures = []
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, *_, **__: figures.append(figure))
    arms = [*compare.exhibits("tiny", "frozenlake")["ratio"], "per", "freshper"]
    metrics = {"episodes": np.arange(3.0), "eval_success": np.array([0.1, np.nan, 0.4])}
    monkeypatch.setattr(compare, "read", lambda *_: metrics)
    results = {arm: [{"seed": 0}, {"seed": 1}] for arm in arms}
    compare.figure(tmp_path, results, "success", "title", {"random": 0.2})
    (figure,) = figures
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    # captions of Fig. 3 and 4
    assert lines["Standard PER"] == "#FBBC04"
    assert lines["On-policy"] == "#4285F4"
    assert lines["FreshPER"] == "#EA4335"
    assert len({lines[compare.label(arm)] for arm in arms}) == len(arms)


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


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_interval_of_a_difference_covers_95_percent(n, ratio):
    """Two arms of n seeds; `ratio` is that of their standard deviations."""
    rng = np.random.default_rng(n)
    x = rng.normal(0.7, 0.05, (20_000, n))
    y = rng.normal(0.6, 0.05 * ratio, (20_000, n))
    low, high = compare.welch_interval(x, y)
    assert 0.93 <= ((low <= 0.1) & (high >= 0.1)).mean() <= 0.97


def test_arms_whose_seeds_are_all_equal_have_an_interval_of_no_width():
    assert compare.welch_interval(np.ones(3), np.full(5, 0.25)) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_arm_of_every_exhibit_is_a_valid_command_with_a_name_of_its_own(preset):
    env = next(iter(PRESETS[preset]))
    exhibits = compare.exhibits(preset, env)
    flags = ["--preset", preset, "--env", env, "--method"]
    for name, arms in exhibits.items():
        assert len({compare.label(arm) for arm in arms}) == len(arms) > 1, name
        for arm in arms:
            words = arm.split()
            assert parse_args([*flags, *words]).config.method == words[0]
    # Of as many updates per iteration, and of the same mean age, also with other flags.
    changed = compare.exhibits(preset, env, ["--ppo_epochs=2", "--alpha=1", "--tau=10"])
    assert changed["matched"][4] == "on_policy --ppo_epochs 4"
    assert changed["decay"][2] == "freshper --decay limit --tau 20"
    replay = parse_args([*flags, "freshper"]).config
    epochs = parse_args([*flags, *exhibits["matched"][4].split()]).config
    assert epochs.ppo_epochs == replay.ppo_epochs + replay.replay_ratio
