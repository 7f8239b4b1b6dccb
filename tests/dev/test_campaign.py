"""The campaign: its runs, rules, rows and controls, and the statistics of its claims."""

import copy
import csv
import gzip
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_episode, speakable_episodes
from scipy import stats as scipy_stats

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import campaign
import controls
import stats
import waves
from waves import Run

from envs.base import EVAL_SEEDS
from freshper.buffer import ReplayBuffer
from freshper.config import Config
from freshper.flags import parse_args
from freshper.is_weights import importance_weights
from freshper.trainer import TorchTrainer

BEST = dict.fromkeys(waves.ARMS, 1.0)
ALL = {wave: waves.wave_runs(wave, BEST, BEST) for wave in waves.QUESTIONS}


def config_of(run):
    """Return the settings of a run, without the policy that `--model good` stands for."""
    flags = [flag for flag in run.flags() if flag not in ("--model", "good")]
    return parse_args([*flags, f"--seed={run.seed}"]).config


# -- the table of runs


def test_every_run_is_a_valid_command_with_a_name_of_its_own():
    runs = {run for of_wave in ALL.values() for run in of_wave}
    assert len({run.name for run in runs}) == len(runs)
    for task, arm, rate in {run[:3] for run in runs}:
        config_of(Run(task, arm, rate, 501))
        assert waves.expected_seconds(Run(task, arm, rate, 501), []) > 0


def test_the_main_table_has_nine_tasks_six_arms_and_five_seeds():
    # three rates, and three lower ones of two arms
    assert len(ALL[1]) == 2 * 2 * (6 * 3 + 3)
    *main, of_readme = [run for run in ALL[2] if (run.arm, run.rate) != waves.SECOND_BEST]
    assert len(main) == len(set(main)) == 9 * 6 * 5
    assert {run.seed for run in main} == {501, 502, 503, 504, 505}
    assert of_readme.flags() == ["--env=frozenlake_vlm", "--method=freshper", "--preset=tiny"]
    assert of_readme.seed == Config().seed
    # waves 2 and 3 share FreshPER and no decay, if these have the same rate
    assert len(set(main) & set(ALL[3])) == 2 * 2 * 5


def test_the_control_makes_as_many_updates_of_as_many_episodes_as_replay():
    for task in waves.TASKS:
        replay = config_of(Run(task, "freshper", 1.0, 501))
        control = config_of(Run(task, "epochs", 1.0, 501))
        updates = replay.ppo_epochs + replay.replay_ratio
        assert control.ppo_epochs + control.replay_ratio == updates
        if control.replay_ratio:
            assert control.batch_size == control.capacity == replay.batch_size
        else:
            assert control.rollout_batch_size >= replay.batch_size

    buffer = ReplayBuffer(64, 0.0, None)
    buffer.add([make_episode(np.random.default_rng(0)) for _ in range(64)], np.ones(64), 0)
    assert sorted(buffer.sample(64).indices) == list(range(64))


def mean_age(config):
    """Return the mean age of the draws of a run whose episodes are all alike."""
    buffer = ReplayBuffer(4096, config.alpha, config.decay_function(), seed=0)
    episode = make_episode(np.random.default_rng(0))
    n = config.rollout_batch_size
    ages = []
    for iteration in range(200):
        step = 3 * iteration
        buffer.add([episode] * n, np.ones(n), step)
        buffer.refresh(step + 1)
        ages += [buffer.sample(config.batch_size, step + k).ages.mean() for k in (1, 2)]
    return np.mean(ages)


@pytest.mark.parametrize("task", ["frozenlake", "gsm8k"])
def test_uniform_draws_below_the_limit_have_freshper_s_mean_age(task):
    uniform = mean_age(config_of(Run(task, "uniform", 1.0, 501)))
    freshper = mean_age(config_of(Run(task, "freshper", 1.0, 501)))
    assert uniform == pytest.approx(freshper, rel=0.05)


def tuning_rows(final):
    """Return rows of wave 1 whose final success is `final(run)`."""
    rows = []
    for run in ALL[1]:
        rows.append(run._asdict() | {"final": final(run), "random": 0.2, "optimal": 1.0})
    return rows


def test_the_best_rate_is_the_one_with_the_best_mean_over_tasks_and_seeds():
    def final(run):
        if run.arm == "per":
            # best on one task, worst on average
            return 0.9 if (run.rate, run.task) == (0.5, "nq_search") else 0.3 * run.rate
        return 0.5

    rows = tuning_rows(final)
    best = waves.best_rates(rows)
    assert best["per"] == 2.0
    assert best["freshper"] == 1.0  # all rates are equal

    missing = [row for row in rows if row["arm"] != "per"] + rows[:1]
    assert waves.best_rates(missing).keys() == BEST.keys() - {"per"}
    with pytest.raises(KeyError):
        waves.wave_runs(2, waves.best_rates(missing), {})


def test_the_rate_multiplies_the_preset_s():
    assert config_of(Run("nq_search", "per", 0.25, 501)).lr == pytest.approx(5e-4 / 4)
    assert "--lr" not in " ".join(Run("nq_search", "per", 1.0, 501).flags())


# -- rows and curves


def a_row(run, **values):
    columns = dict.fromkeys(campaign.COLUMNS, "")
    return columns | {name: str(value) for name, value in run._asdict().items()} | values


def test_a_row_is_replaced_and_the_bytes_do_not_depend_on_the_order(tmp_path):
    first, second = Run("aime", "per", 1.0, 501), Run("aime", "freshper", 1.0, 502)
    for folder, order in (("a", (first, second, first)), ("b", (second, first))):
        for k, run in enumerate(order):
            values = {"last": "0.5", "waves": "2"} if k == len(order) - 1 else {"last": "0.5"}
            row = a_row(run, **values)
            points = [dict.fromkeys(campaign.CURVE_COLUMNS, "") | run._asdict()] * 2
            entries = [dict.fromkeys(campaign.DRIFT_COLUMNS, "") | run._asdict()]
            campaign.record(tmp_path / folder, row, points, entries if run == first else [])
        campaign.mark_waves(tmp_path / folder, {first: [2, 3], second: [2]})

    for name in ("runs.csv", "runs_curves.csv.gz", "runs_drift.csv.gz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = list(csv.DictReader((tmp_path / "a/runs.csv").open()))
    assert [(waves.key(row), row["waves"]) for row in rows] == [(second, "2"), (first, "2 3")]
    curves = gzip.decompress((tmp_path / "a/runs_curves.csv.gz").read_bytes())
    assert len(curves.splitlines()) == 1 + 4
    assert (tmp_path / "a/runs_curves.csv.gz").read_bytes()[4:8] == bytes(4)  # no time
    assert len(gzip.decompress((tmp_path / "a/runs_drift.csv.gz").read_bytes()).splitlines()) == 2


def test_a_sample_of_the_oracle_s_entries_is_kept(tmp_path):
    run = Run("nq_search", "freshper +oracle", 1.0, 501)
    assert campaign.drift_rows(run, tmp_path) == []
    lines = [f"{k // 100},{k % 100},{k / 8}" for k in range(1000)]
    (tmp_path / controls.TABLE).write_text("\n".join(["step,age,drift", *lines]))
    rows = campaign.drift_rows(run, tmp_path)
    assert len(rows) == campaign.ENTRIES
    assert len({row["drift"] for row in rows}) == campaign.ENTRIES
    for row in rows:
        entry = f"{row['step']},{row['age']},{float(row['drift'])}"
        assert entry in lines
        assert waves.key(row) == run


def test_an_interrupted_campaign_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    """Three real runs: one whole, one stopped after its first evaluation, and its rest."""
    run = Run("gsm8k", "freshper", 1.0, 501)
    whole = campaign.Campaign(tmp_path / "whole", tmp_path / "whole", short=True)
    parts = campaign.Campaign(tmp_path / "parts", tmp_path / "parts", short=True)
    for each in (whole, parts):
        each.out.mkdir()
    whole.make(run, [2])

    saved = parts.folder(run) / "checkpoint/run.json"

    def stop():
        while not saved.exists():
            stopped.wait(0.05)
        parts.stopping.set()

    stopped = threading.Event()
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(campaign.StoppedError):
        parts.make(run, [2])
    thread.join()
    assert not parts.rows()
    parts.stopping.clear()
    parts.make(run, [2])

    (one,), (other,) = whole.rows(), parts.rows()
    assert (one["processes"], other["processes"]) == ("1", "2")
    assert float(one["final_n"]) == 64 and 0 <= float(one["final"]) <= 1
    for name in ("cpu_s", "wall_s", "processes"):
        del one[name], other[name]
    assert one == other
    assert one["updates"] == "18" and one["commit"] and len(one["evaluations"].split()) == 4


def test_the_final_policy_plays_the_first_held_out_seeds(tmp_path, text_policy, monkeypatch):
    played = []

    def rollout(engine, policy, envs, seeds, *_):
        played.extend(seeds)
        return [make_episode(np.random.default_rng(seed)) for seed in seeds]

    (tmp_path / "config.json").write_text(json.dumps(vars(parse_args([]).config)))
    monkeypatch.setattr(campaign, "load", lambda config: (text_policy, config.make_env, None))
    monkeypatch.setattr(campaign, "rollout", rollout)
    campaign.evaluate_final(tmp_path, 300)
    assert played == [EVAL_SEEDS + k for k in range(300)]


def test_other_product_code_than_that_of_the_rows_is_refused(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    for path in ("train.py", "sumtree.py", "freshper/a.py", "envs/a.py", "benchmarks/controls.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    rows = [{"commit": campaign.git("rev-parse", "HEAD"), "arm": "per"}]

    (tmp_path / "benchmarks/controls.py").write_text("2")
    (tmp_path / "README.md").write_text("2")
    git("add", "-A")
    git("commit", "-qm", "what is no product code of this run")
    campaign.check_code(rows)
    controlled = [rows[0] | {"arm": "freshper +oracle"}]
    with pytest.raises(SystemExit, match=r"benchmarks/controls\.py differ"):
        campaign.check_code(controlled)

    (tmp_path / "freshper/a.py").write_text("2")
    with pytest.raises(SystemExit, match="commit the product code first"):
        campaign.check_code([])
    git("commit", "-qam", "second")
    with pytest.raises(SystemExit, match=r"freshper/a\.py differ"):
        campaign.check_code(rows)


def test_a_run_that_another_commit_began_is_refused(tmp_path):
    run = Run("gsm8k", "freshper", 1.0, 501)
    begun = campaign.Campaign(tmp_path, tmp_path, short=True)
    campaign.Spent(tmp_path / f"{run.name}.json", "0123456789").note(1.0)
    with pytest.raises(ValueError, match=f"{run.name} is a run of commit 0123456789, not of"):
        begun.make(run, [2])
    assert not begun.folder(run).exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["gone", "stopped half-way"])
@pytest.mark.parametrize("evaluations, remade", [("0.3 0.9", [503]), ("0.3 0.8", [501, 502, 503])])
def test_a_policy_to_start_from_that_is_not_there_is_made_again(
    tmp_path, monkeypatch, evaluations, remade, stopped
):
    """If it is another one, on another machine, so are the runs that began with the old one."""
    whole = campaign.Campaign(tmp_path / "out", tmp_path)
    good = waves.good_run(BEST)
    if stopped:
        (whole.folder(good) / "checkpoint").mkdir(parents=True)
    made = []

    def make(self, run, numbers):
        made.append(run)
        (self.folder(run) / "checkpoint").mkdir(parents=True, exist_ok=True)
        (self.folder(run) / "final.json").touch()
        row = a_row(run, **levels) | {"evaluations": evaluations}
        campaign.record(self.data, row, [], [])

    monkeypatch.setattr(campaign.Campaign, "make", make)
    levels = {"final": "0.5", "random": "0.2", "optimal": "1", "waves": "1"}
    done = [run for run in ALL[5] if "--model good" in run.arm and run.seed < 503]
    rows = [a_row(run, **levels) for run in (*ALL[1], good, *done)]
    for row in rows:
        row["evaluations"] = "0.3 0.9"
    (tmp_path / "runs.csv").write_text(campaign.table(campaign.COLUMNS, rows))

    only = "model-good-x1-seed50[123]"
    campaign.make_all(whole, [5], only, jobs=1)
    assert made[0] == good and sorted(run.seed for run in made[1:]) == sorted(remade * 4)
    made.clear()
    campaign.make_all(whole, [5], only, jobs=1)
    assert made == []
    campaign.make_all(whole, [5], "model-good-x1-seed504", jobs=1)
    assert [run.seed for run in made] == [504, 504, 504, 504]


# -- controls


def test_shuffled_factors_are_the_same_ones_of_other_entries():
    decay = parse_args([]).config.decay_function()
    shuffled = controls.ShuffledBuffer(64, 0.6, decay, "fifo", seed=1)
    fresh = ReplayBuffer(64, 0.6, decay)
    for buffer in (shuffled, fresh):
        for step in range(0, 48, 3):
            buffer.add([make_episode(np.random.default_rng(step))] * 4, np.ones(4), step)
            buffer.refresh(step + 1)
    ours, theirs = shuffled.tree[np.arange(64)], fresh.tree[np.arange(64)]
    assert np.sort(ours) == pytest.approx(np.sort(theirs))
    assert abs(np.corrcoef(ours, theirs)[0, 1]) < 0.4


@pytest.fixture
def moved(text_policy):
    """A trainer, episodes with the log-probs of its policy, and KL_i after the policy has moved,
    computed from whole forward passes."""
    policy = copy.copy(text_policy)
    policy.model = copy.deepcopy(text_policy.model)
    config = replace(parse_args(["--preset", "tiny"]).config, kl_loss_coef=0.0, lr=0.01)
    trainer = TorchTrainer(policy, config, 100)
    episodes = speakable_episodes(policy, 12)
    trainer.record_behavior_logprobs(episodes)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(0))

    expected = []
    for episode in episodes:
        tokens = torch.tensor(episode.tokens[None].astype(np.int64))
        with torch.no_grad():
            logits = policy.model(input_ids=tokens).logits[0, :-1].clone()
        logits[:, policy.suppressed_ids] = -np.inf
        logprobs = (logits / config.temperature).log_softmax(-1)
        of_tokens = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        mask = episode.action_mask[1:]
        log_ratio = of_tokens[mask] - episode.behavior_logprobs[1:][mask]
        expected.append((np.exp(log_ratio) - 1 - log_ratio).sum())
    return trainer, episodes, np.array(expected)


def test_the_oracle_measures_the_drift_of_every_entry(moved):
    trainer, episodes, expected = moved
    measured = controls.true_drift(trainer, episodes)
    assert measured.min() > 0.01
    assert measured == pytest.approx(expected, rel=1e-3)


def test_the_oracle_draws_by_exp_of_minus_drift_as_concentrated_as_age(moved, tmp_path):
    trainer, episodes, expected = moved
    decay = parse_args([]).config.decay_function()
    buffer = controls.OracleBuffer(16, 0.6, decay, "fifo", 0)
    buffer.trainer, buffer.folder = trainer, tmp_path
    for k in range(0, 12, 4):
        buffer.add(episodes[k : k + 4], np.full(4, 2.0), k)
    buffer.measure(10)
    buffer.refresh(10)

    leaves = buffer.tree[np.arange(12)]
    slopes = np.polyfit(expected, np.log(leaves), 1)
    assert np.log(leaves) == pytest.approx(np.polyval(slopes, expected), abs=1e-3)
    assert slopes[0] < 0
    of_age = decay(buffer.ages()) ** 0.6
    number = controls.effective_number(of_age)
    assert controls.effective_number(leaves) == pytest.approx(number, rel=1e-6)

    other = controls.OracleBuffer(16, 0.6, decay, "fifo", 0)
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    other.refresh(12)
    buffer.refresh(12)
    assert (other.tree[np.arange(12)] == buffer.tree[np.arange(12)]).all()
    table = controls.age_against_drift(tmp_path)
    rank = scipy_stats.spearmanr(10 - np.repeat([0, 4, 8], 4), expected).statistic
    assert table["age_rank"] == pytest.approx(rank)


def test_a_constant_learning_rate_through_train_py(tmp_path):
    flags = "--method per --iterations 12 --rollout_batch_size 2 --batch_size 2 --max_turns 1"
    flags += f" --eval_every 12 --eval_episodes 1 --out {tmp_path / 'run'}"
    before = TorchTrainer._scheduled_lr
    assert controls.main(["constant", *flags.split()]) == 0
    assert TorchTrainer._scheduled_lr is before
    metrics = controls.read(tmp_path / "run", "metrics.csv")
    # ten steps of warm-up
    assert metrics["lr"][1:] == pytest.approx([2e-4, 5e-4, 8e-4] + [1e-3] * 9)


def test_weights_relative_to_the_buffer_s_largest():
    priorities = np.array([1.0] * 60 + [1e-6] * 4)
    with controls.buffer_maximum():
        buffer = controls.train.ReplayBuffer(64, 0.6, None)
        buffer.add([make_episode(np.random.default_rng(0))] * 64, priorities, 0)
        drawn = buffer.sample(16)
        weights = controls.train.importance_weights(drawn.probabilities, 64, 0.4)
    largest = (64 * 1e-6**0.6 / (priorities**0.6).sum()) ** -0.4
    expected = (64 * drawn.probabilities) ** -0.4 / largest
    assert weights == pytest.approx(expected)
    assert controls.train.importance_weights is importance_weights


def test_an_unknown_control_is_refused(capsys):
    assert controls.main(["fresh"]) == 2
    assert "the control is fresh, but must be one of shuffled" in capsys.readouterr().err


# -- statistics


@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_cover_95_percent(n):
    """Of a mean, a difference and an interaction, with standard deviations 1 and 3."""
    rng = np.random.default_rng(n)
    x, y, z = (rng.normal(0.0, spread, (20_000, n)) for spread in (1.0, 1.0, 3.0))
    effects = [
        stats.contrast([x], [1.0]),
        stats.difference(x, y),
        stats.difference(x, z),
        stats.contrast([x, y, z, x[::-1]], [1.0, -1.0, -1.0, 1.0]),
    ]
    for effect in effects:
        assert 0.93 <= ((effect.low <= 0) & (effect.high >= 0)).mean() <= 0.97


def test_the_interval_of_3_runs_beside_10_with_a_third_of_their_spread():
    """The least favourable case that we know."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.0, 3.0, (100_000, 3)), rng.normal(0.0, 1.0, (100_000, 10))
    effect = stats.difference(x, y)
    assert 0.93 <= ((effect.low <= 0) & (effect.high >= 0)).mean() <= 0.97


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("spreads", [(0.05,), (0.02, 0.1, 0.05), (0.02, 0.02, 0.5)])
def test_the_bootstrap_of_interquartile_means_covers_95_percent(n, spreads):
    """Of one arm, and of a difference, on nine tasks."""
    rng = np.random.default_rng(n)
    means = rng.uniform(0.2, 1.0, (9, 1))
    spread = np.resize(spreads, (9, 1))
    many = means + spread * rng.normal(size=(20_000, 9, n))
    expected = stats.interquartile_mean(many).mean()

    def difference(x, y):
        return stats.interquartile_mean(x) - stats.interquartile_mean(y)

    repetitions = 1000
    covered = np.zeros(2)
    for _ in range(repetitions):
        x, y = means + spread * rng.normal(size=(2, 9, n))
        _, low, high = stats.bootstrap(stats.interquartile_mean, [x], draws=300)
        covered[0] += low <= expected <= high
        _, low, high = stats.bootstrap(difference, [x, y], draws=300)
        covered[1] += low <= 0 <= high
    # 0.93 to 0.97, and a standard error of the coverage
    assert all(0.925 <= share <= 0.975 for share in covered / repetitions)


def test_effects_agree_with_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.5, 0.1, 5), rng.normal(0.4, 0.3, 4)
    for effect, test in (
        (stats.difference(x, y), scipy_stats.ttest_ind(x, y, equal_var=False)),
        (stats.contrast([x], [1.0]), scipy_stats.ttest_1samp(x, 0.0)),
        (stats.contrast([x[:4] - y], [1.0]), scipy_stats.ttest_rel(x[:4], y)),
    ):
        assert effect.p == pytest.approx(test.pvalue)
        interval = test.confidence_interval()
        assert effect[1:3] == pytest.approx((interval.low, interval.high))
    equal = stats.difference(np.full(3, 0.5), np.full(3, 0.25))
    assert equal[:3] == (0.25, 0.25, 0.25) and equal.p == 0.0


def test_holm_s_example():
    """Four p-values: 0.005 * 4, then at least as large: 0.01 * 3, 0.03 * 2, 0.04 * 1."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@pytest.mark.parametrize(
    "estimate, p, p_at_least, expected",
    [
        (0.05, 0.01, 0.9, "yes"),
        (0.05, 0.06, 0.9, "undecided"),
        (0.01, 0.5, 0.1, "undecided"),
        (0.015, 0.001, 0.01, "no"),
        (-0.3, 0.001, 0.001, "no"),
    ],
)
def test_the_verdict_follows_the_rule_of_the_plan(estimate, p, p_at_least, expected):
    effect = stats.Effect(estimate, np.nan, np.nan, np.nan)
    assert stats.verdict(effect, p, p_at_least) == expected


def test_the_p_value_of_a_large_effect_agrees_with_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.5, 0.1, 5), rng.normal(0.4, 0.3, 4)
    test = scipy_stats.ttest_ind(x, y + 0.03, equal_var=False, alternative="less")
    assert stats.p_at_least(stats.difference(x, y)) == pytest.approx(test.pvalue)
    equal = stats.difference(np.full(3, 0.5), np.full(3, 0.25))
    assert [stats.p_at_least(equal, smallest) for smallest in (0.2, 0.3)] == [1.0, 0.0]


def test_the_interquartile_mean_leaves_out_the_quarters_of_all_values():
    values = np.array([[0.0, 10.0, 2.0, 3.0], [4.0, 5.0, -99.0, 999.0]])
    assert stats.interquartile_mean(values) == np.mean([2.0, 3.0, 4.0, 5.0])
