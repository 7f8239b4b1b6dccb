"""All runs behind RESULTS.md, in one command that goes on where it stopped.

    python benchmarks/campaign.py --list           every run, its expected seconds, what is done
    python benchmarks/campaign.py                  all waves, two runs at a time
    python benchmarks/campaign.py --wave 2         one wave
    python benchmarks/campaign.py --short --wave 1 --only cliffwalking    a trial, in minutes

benchmarks/waves.py is the table of runs, docs/plan.md says why. A run is a process of its own, with
one thread, through train.py or, with a control, through benchmarks/controls.py. Ctrl-C or SIGTERM
saves the runs that are under way; after a kill they go on from their last checkpoint. Training code
other than that of the rows is refused: docs/plan.md has the commands for a checkout. --data gets

    runs.csv               a row per run
    runs_curves.csv.gz     a row per held-out evaluation
    runs_drift.csv.gz      of the oracle's runs, a sample of entries: age and true drift, nats
    runs_ages.csv.gz       of runs since wave 8, a row per bin of age: drift and ESS of the draws

Columns of runs.csv: `waves` that the run belongs to; `rate` that multiplies the preset's learning
rate; `commit`, the newest that changed the code of training; `cpu_s` of the training process and
`wall_s` of its iterations; `processes` that a run took (if more than one, `cpu_s` is an estimate: a
kill repeats iterations, or loses count); `last`: mean of the last three evaluations; `peak`: the
highest one; `final`: success of the final policy on `final_n` held-out seeds, 0 if numbers were not
finite; `final_score`: the task's score likewise; `random` and `optimal`: the success of those
policies on 256 of these seeds; `unreadable`: share of replies in the last ten iterations;
`diverged`: 1 if numbers were not finite, or if more than half of those replies were unreadable;
`replay_age`: mean age of replayed episodes in steps; `drift_tau` and `drift_r2`: 1/c of eq. 12 in
steps, below 0 if KL falls with age, and R² of the line, both from KL(pi_theta || pi_mu);
`reverse_tau` and `reverse_r2`: the same from KL(pi_mu || pi_theta), which equals the other to
second order, and in whose estimate no ratio is a factor; these four are empty for the tuning at the
rates 0.5 to 2 and for seed 42; `reverse_r2_all`: R² with the oldest of the twelve bins of age;
`age_rank` and `age_r2`: rank correlation and R² of age against the true drift of stored episodes,
mean over the passes of the oracle; `evaluations`: held-out success of each, the one before training
first; `processor` and `torch`: where the run was made (since wave 8).

Columns of runs_ages.csv.gz: `oldest` age of the bin in steps (the youngest is one above that of
the bin before), `trajectories` drawn and their `effective` number (Kish, weights 1 / P(i)), and, as
freshper/diagnostics.py estimates them, `age`, `ess`, `ess_token`, `kl` (KL(pi_theta || pi_mu)),
`kl_reverse` (KL(pi_mu || pi_theta)) and `k3`, the mean of the k3 estimate of the latter, per
trajectory.
"""

import contextlib
import csv
import dataclasses
import fcntl
import gzip
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import common
import numpy as np
import torch
import waves
from common import SMOLLM2
from controls import TABLE, age_against_drift
from waves import QUESTIONS, Row, Run

from compare import config_of, summary
from envs.base import EVAL_SEEDS
from freshper.backends import load
from freshper.diagnostics import Table, by_age, drift_rate, estimate, read
from freshper.engine_hf import HFEngine, Sampling
from freshper.evaluation import baselines, summarize
from freshper.rollout import rollout

ROOT = Path(__file__).resolve().parents[1]
# These must not change while a campaign runs.
PRODUCT = ("train.py", "sumtree.py", "freshper", "envs")
CONTROLS = "benchmarks/controls.py"
COLUMNS = """task waves arm rate flags seed commit threads processor torch episodes
updates cpu_s wall_s processes last peak final final_n final_score random optimal unreadable
diverged replay_age drift_tau drift_r2 reverse_tau reverse_r2 reverse_r2_all age_rank
age_r2 evaluations""".split()
CURVE_COLUMNS = """task arm rate seed iteration step episodes wall_s eval_success eval_reward
eval_score train_success invalid replay_age replay_kl ess ess_token tau""".split()
DRIFT_COLUMNS = "task arm rate seed step age drift".split()
AGE_COLUMNS = """task arm rate seed oldest trajectories effective age ess ess_token kl kl_reverse
k3""".split()
# The oldest age of each bin, in steps.
AGE_BINS = (3, 6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 192, 288, 384, 576, 768, 1152, 10_000)
ENTRIES = 400  # of the oracle's table, per run
FINAL_EPISODES = {"tiny": 1024, "small": 256}
BATCH = 256  # episodes of the final evaluation at a time
SHORT = """--iterations=6 --rollout_batch_size=16 --eval_every=2 --eval_episodes=16
--save_every=2""".split()


# -- one run


class StoppedError(Exception):
    """The campaign is stopping: after a signal, or after an error in another thread."""


class Campaign:
    """The folders of a campaign, and the processes that it has started."""

    def __init__(self, out: Path, data: Path, short: bool = False, smollm2: Path = SMOLLM2):
        self.out = out.resolve()
        self.data = data.resolve()
        self.short = short
        self.smollm2 = smollm2
        self.stopping = threading.Event()
        self.failed: list[str] = []

    def folder(self, run: Run) -> Path:
        return self.out / run.name

    @cached_property
    def commit(self) -> str:
        """The newest commit that changed the code of training."""
        return git("log", "-1", "--format=%h", "--abbrev=10", "--", *PRODUCT)

    def rows(self) -> list[Row]:
        """Return the rows of runs.csv."""
        return waves.read_rows(self.data / "runs.csv")

    def missing(self, runs: list[Run], only: str) -> list[Run]:
        """Return the runs of this name that have no row."""
        done = {waves.key(row) for row in self.rows()}
        return [run for run in runs if run not in done and re.search(only, run.name)]

    def best(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the best rates of the arms: of tiny models and of the small one."""
        rows = self.rows()
        return waves.best_rates(rows), waves.best_rates(rows, small=True)

    def flags(self, run: Run) -> list[str]:
        """Return the flags of a run as runs.csv has them."""
        return [*run.flags(), *(SHORT if self.short else [])]

    def command(self, run: Run) -> list[str]:
        """Return the command that starts a run, or goes on with it."""
        program = [CONTROLS, run.control] if run.control else ["train.py"]
        folder = self.folder(run)
        if folder.exists():
            return [sys.executable, *program, f"--resume={folder}"]

        flags = [*self.flags(run), f"--seed={run.seed}", f"--out={folder}"]
        if run.task == "small":
            flags.append(f"--model={self.smollm2}")
        if "good" in flags:
            start = self.folder(waves.good_run(self.best()[0]))
            flags[flags.index("good")] = str(start / "checkpoint")
        return [sys.executable, *program, *flags]

    def train(self, run: Run) -> bool:
        """Train a run, or the rest of it. Returns whether it is complete."""
        folder = self.folder(run)
        if folder.exists() and not (folder / "config.json").exists():
            shutil.rmtree(folder)  # killed before it began
        if folder.exists():
            wait_until_free(folder)
        spent = Spent(self.out / f"{run.name}.json", self.commit)
        if spent.commit != self.commit:
            raise ValueError(f"{folder} is a run of commit {spent.commit}, not of {self.commit}")
        if is_trained(folder):
            if not (folder / "final.json").exists():
                spent.note(0.0)  # nobody has seen how its process ended
            return True

        log = self.out / f"{run.name}.log"
        with open(log, "a") as file:
            process = subprocess.Popen(
                self.command(run),
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which passes it on once.
                start_new_session=True,
            )
            status = self.wait(process, spent)

        if self.stopping.is_set():
            raise StoppedError
        text = log.read_text()
        # A defect ends in a traceback, whatever its message says.
        known = status == 1 and "Traceback" not in text
        if known and re.search("(?m)^stopped after .*finite", text):
            (folder / "stopped.txt").write_text(text[-2000:])
        elif status:
            self.failed.append(f"{run.name} ended with {status}: see {log}")
            return False
        return True

    def wait(self, process: subprocess.Popen, spent: "Spent") -> int:
        """Wait for the end of a training process, and note its CPU seconds meanwhile."""
        told = False
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                spent.note(usage.ru_utime + usage.ru_stime)
                return process.returncode
            if self.stopping.is_set() and not told:
                process.terminate()
                told = True
            spent.note(cpu_seconds(process.pid))
            time.sleep(1.0)

    def make(self, run: Run, wave_list: list[int]) -> None:
        """Train a run, evaluate its final policy and write its row. What is done is not
        repeated."""
        if self.stopping.is_set():
            raise StoppedError
        if not self.train(run):
            return
        folder = self.folder(run)
        final = folder / "final.json"
        if not final.exists():
            count = 64 if self.short else FINAL_EPISODES[run.preset[0]]
            command = [sys.executable, __file__, "--evaluate", str(folder), str(count)]
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                start_new_session=True,
            )
            if done.returncode:
                self.failed.append(f"{run.name}: {done.stderr[-1000:]}")
                return

        row = self.row(run, wave_list)
        tables = curve_rows(run, folder), drift_rows(run, folder), age_rows(run, folder)
        record(self.data, row, *tables)
        remove_state(run, folder)
        result = f"last {row['last']}, final {row['final']}, {row['cpu_s']} CPU seconds"
        print(f"{time.strftime('%d %H:%M')} {run.name}: {result}", flush=True)

    def row(self, run: Run, wave_list: list[int]) -> Row:
        """Return the row of a finished run in runs.csv."""
        folder = self.folder(run)
        metrics = read(folder, "metrics.csv")
        evaluations = metrics["eval_success"][~np.isnan(metrics["eval_success"])]
        result = summary(folder)
        spent = json.loads((self.out / f"{run.name}.json").read_text())
        row = {
            "task": run.task,
            "waves": " ".join(map(str, wave_list)),
            "arm": run.arm,
            "rate": run.rate,
            "flags": " ".join(self.flags(run)),
            "seed": run.seed,
            "threads": 1,
            "processor": processor(),
            "torch": torch.__version__,
            **result,
            "updates": result["updates"],
            "unreadable": result["invalid"],
            **spent,
            **json.loads((folder / "final.json").read_text()),
            **drift(folder),
            "evaluations": " ".join(f"{value:.3f}" for value in evaluations),
        }
        return {name: plain(row.get(name, "")) for name in COLUMNS}


class Spent:
    """The CPU seconds of a run, over all of its processes, in a file beside its folder. Also the
    commit that it began with."""

    def __init__(self, path: Path, commit: str):
        self.path = path
        before = {"cpu_s": 0.0, "processes": 0, "commit": commit}
        if path.exists():
            before = json.loads(path.read_text())
        self.before = before["cpu_s"]
        self.processes = before["processes"] + 1
        self.commit = before["commit"]

    def note(self, seconds: float) -> None:
        """Write what this process has spent so far, and what those before it have."""
        values = {
            "cpu_s": round(self.before + seconds, 2),
            "processes": self.processes,
            "commit": self.commit,
        }
        write(self.path, json.dumps(values).encode())


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process that has not been waited for (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_trained(folder: Path) -> bool:
    """Return whether a run has ended: after its last iteration, or at numbers not finite."""
    if (folder / "final.json").exists() or (folder / "stopped.txt").exists():
        return True
    run = folder / "checkpoint/run.json"
    if not run.exists():
        return False
    return json.loads(run.read_text())["iteration"] == config_of(folder).iterations


def wait_until_free(folder: Path) -> None:
    """Wait for a process of a campaign that was killed, and that still trains this run."""
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)


def remove_state(run: Run, folder: Path) -> None:
    """Remove what is needed no more of a run that has its row: all but its final policy, and that
    of a large model, too."""
    for name in ("checkpoint-before", "checkpoint-best"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "checkpoint/state.pt").unlink(missing_ok=True)
    if run.task == "small":
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)


# -- the final evaluation


def evaluate_final(folder: Path, count: int) -> None:
    """Write final.json: the final policy of a run on the first `count` held-out seeds."""
    config = dataclasses.replace(config_of(folder), resume=str(folder))
    if (folder / "stopped.txt").exists():
        means = {"success": 0.0}
    else:
        policy, make_env, _ = load(config)
        sampling = Sampling(config.temperature, config.top_k, config.top_p)
        engine = HFEngine(policy, sampling, config.seed)
        episodes = []
        for first in range(0, count, BATCH):
            seeds = [EVAL_SEEDS + k for k in range(first, min(first + BATCH, count))]
            envs = [make_env() for _ in seeds]
            lengths = config.max_tokens, config.max_new_tokens
            episodes += rollout(engine, policy, envs, seeds, *lengths)
        means = summarize(episodes)

    levels = baselines(config.make_env(), min(BATCH, count))
    result = {
        "final": float(means["success"]),
        "final_n": count,
        "final_score": float(means["score"]) if "score" in means else "",
        "random": float(levels["random"]),
        "optimal": float(levels.get("optimal", 1.0)),
    }
    write(folder / "final.json", json.dumps(result).encode())


# -- the data


def plain(value: object) -> object:
    """Return a number as text of six digits, NaN as ""."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.6g}"
    return value


def ages_of_bins(rows: Table, bins: int) -> np.ndarray:
    """Return the mean age of each bin of `by_age`, weighted by 1 / P(i) as its other values are.

    At the campaign's commit `by_age` itself takes the plain mean."""
    order = np.argsort(rows["age"], kind="stable")
    groups = np.array_split(order, bins)
    weights = 1.0 / rows["probability"]
    return np.array([np.average(rows["age"][g], weights=weights[g]) for g in groups])


def drift(folder: Path) -> Row:
    """Return the mean age of replayed episodes, and how drift depends on age."""
    result: Row = {}
    if (folder / "replay.csv").exists():
        rows = read(folder)
        estimates = by_age(rows)
        ages = ages_of_bins(rows, len(estimates["age"]))
        result["replay_age"] = rows["age"].mean()
        for name, column in (("drift", "kl"), ("reverse", "kl_reverse")):
            tau, _, r2 = drift_rate(ages[:-1], estimates[column][:-1])
            result |= {f"{name}_tau": tau, f"{name}_r2": r2}
        _, _, result["reverse_r2_all"] = drift_rate(ages, estimates["kl_reverse"])
    if (folder / TABLE).exists():
        result |= age_against_drift(folder)
    return result


def curve_rows(run: Run, folder: Path) -> list[Row]:
    """Return a row per evaluation of a run. What is measured in each iteration is a mean since the
    evaluation before."""
    metrics = read(folder, "metrics.csv")
    rows = []
    first = 0
    for last in np.flatnonzero(~np.isnan(metrics["eval_success"])):
        row: Row = dict(run._asdict())
        for name in CURVE_COLUMNS[4:]:
            if name not in metrics:
                continue
            values = metrics[name][first : last + 1]
            value = values[-1]
            if name in CURVE_COLUMNS[11:] and not np.isnan(values).all():
                value = np.nanmean(values)
            row[name] = value
        rows.append({name: plain(row.get(name, "")) for name in CURVE_COLUMNS})
        first = last + 1
    return rows


def drift_rows(run: Run, folder: Path) -> list[Row]:
    """Return a random sample of the ages and the true drift that a run of the oracle measured, or
    [] of another run."""
    if not (folder / TABLE).exists():
        return []
    entries = read(folder, TABLE)
    total = len(entries["age"])
    sample = np.random.default_rng(run.seed).permutation(total)[:ENTRIES]
    rows = []
    for k in np.sort(sample):
        row: Row = dict(run._asdict())
        row |= {name: values[k] for name, values in entries.items()}
        rows.append({name: plain(row[name]) for name in DRIFT_COLUMNS})
    return rows


def age_rows(run: Run, folder: Path) -> list[Row]:
    """Return how stale the drawn trajectories were, a row per bin of age, [] without replay."""
    if not (folder / "replay.csv").exists():
        return []
    drawn = read(folder)
    bins = np.searchsorted(AGE_BINS, drawn["age"])
    rows = []
    for k in np.unique(bins):
        part = {name: values[bins == k] for name, values in drawn.items()}
        weights = 1.0 / part["probability"]
        row: Row = dict(run._asdict()) | estimate(part)
        row["oldest"] = AGE_BINS[k]
        row["trajectories"] = len(weights)
        row["effective"] = weights.sum() ** 2 / (weights**2).sum()
        row["k3"] = np.average(part["kl"], weights=weights)
        row["age"] = np.average(part["age"], weights=weights)
        rows.append({name: plain(row[name]) for name in AGE_COLUMNS})
    return rows


def processor() -> str:
    """Return the name of the processor (Linux), or of its family."""
    with contextlib.suppress(OSError):
        found = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.machine()


def table(columns: list[str], rows: list[Row]) -> str:
    """Return rows as CSV, in the order of task, arm, rate and seed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    # The sort is stable, so the evaluations of a run keep their order.
    writer.writerows(sorted(rows, key=waves.key))
    return text.getvalue()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of data."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, content: bytes) -> None:
    """Write a file such that a kill leaves all of it or what was there before."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def write_rows(path: Path, columns: list[str], rows: list[Row]) -> None:
    """Write a table, compressed if its name says so."""
    content = table(columns, rows).encode()
    write(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def record(folder: Path, row: Row, curve: list[Row], entries: list[Row], ages: list[Row]) -> None:
    """Write or replace the row of a run, its curve, a sample of its buffer's entries, and the drift
    of what it drew by age."""
    run = waves.key(row)
    with locked(folder):
        for name, columns, rows in (
            ("runs_curves.csv.gz", CURVE_COLUMNS, curve),
            ("runs_drift.csv.gz", DRIFT_COLUMNS, entries),
            ("runs_ages.csv.gz", AGE_COLUMNS, ages),
        ):
            path = folder / name
            others = [other for other in waves.read_rows(path) if waves.key(other) != run]
            if rows or others:
                write_rows(path, columns, [*others, *rows])

        # The row comes last: a run that has one is done.
        runs = folder / "runs.csv"
        rows = [other for other in waves.read_rows(runs) if waves.key(other) != run]
        write_rows(runs, COLUMNS, [*rows, row])


def forget(folder: Path, runs: set[Run]) -> None:
    """Remove the rows of runs, so that they are made again."""
    with locked(folder):
        # The rows of runs.csv go first: a run that has one is done.
        for name, columns in (("runs.csv", COLUMNS), ("runs_curves.csv.gz", CURVE_COLUMNS)):
            path = folder / name
            rows = [row for row in waves.read_rows(path) if waves.key(row) not in runs]
            write_rows(path, columns, rows)


def mark_waves(folder: Path, members: dict[Run, list[int]]) -> None:
    """Write into the rows that are there to which waves their runs belong."""
    with locked(folder):
        path = folder / "runs.csv"
        if not path.exists():
            return
        rows = waves.read_rows(path)
        for row in rows:
            known = set(map(int, row["waves"].split())) | set(members.get(waves.key(row), []))
            row["waves"] = " ".join(map(str, sorted(known)))
        write_rows(path, COLUMNS, rows)


# -- the code that runs


def git(*words: str) -> str:
    """Return what git prints. Exits with a sentence if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"campaign.py: error: git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def check_code(rows: list[Row]) -> None:
    """Exit with a sentence if the product code is not the one of the rows that are there."""
    paths = [*PRODUCT, CONTROLS]
    if changed := git("status", "--porcelain", "--", *paths):
        sys.exit(f"campaign.py: error: commit the product code first; not committed: {changed}")
    for commit in sorted({row["commit"] for row in rows}):
        controlled = any("+" in row["arm"] for row in rows if row["commit"] == commit)
        compared = paths if controlled else PRODUCT
        if changed := git("diff", "--name-only", commit, "--", *compared):
            sys.exit(
                f"campaign.py: error: runs.csv has runs of commit {commit}, but "
                f"{', '.join(changed.split())} differ from it: run the campaign in a checkout of "
                "that commit, or with another --data"
            )


# -- the whole


def known_waves(campaign: Campaign, listed: bool = False) -> dict[int, list[Run]]:
    """Return the runs of each wave whose rates are known. If `listed`, a rate that is not known is
    taken to be the preset's."""
    best, best_small = campaign.best()
    if listed:
        best = dict.fromkeys(waves.ARMS, 1.0) | best
        best_small = dict.fromkeys(waves.SMALL_ARMS, 1.0) | best_small
    result = {}
    for wave in QUESTIONS:
        with contextlib.suppress(KeyError):
            result[wave] = waves.wave_runs(wave, best, best_small)
    return result


def members_of(runs_of_waves: dict[int, list[Run]]) -> dict[Run, list[int]]:
    """Return the waves of each run."""
    members: dict[Run, list[int]] = {}
    for wave, runs in runs_of_waves.items():
        for run in runs:
            members.setdefault(run, []).append(wave)
    return members


def print_list(campaign: Campaign, selected: list[int], only: str, jobs: int) -> None:
    """Print every run with its expected seconds, and what is left of each wave."""
    rows = campaign.rows()
    done = {waves.key(row) for row in rows}
    counted: set[Run] = set()
    total = 0.0
    known = known_waves(campaign)
    for wave, runs in known_waves(campaign, listed=True).items():
        if wave not in selected:
            continue
        left = 0.0
        note = "" if wave in known else " (the rates follow from the tuning, x1 stands for them)"
        print(f"\nwave {wave}, {QUESTIONS[wave]}{note}")
        for run in filter(lambda run: re.search(only, run.name), runs):
            seconds = waves.expected_seconds(run, rows)
            state = "under way" if campaign.folder(run).exists() else ""
            if run in done:
                state = "done"
            elif run in counted:
                state = "in a wave above"
            else:
                left += seconds
            counted.add(run)
            print(f"  {seconds:6.0f} s  {run.name:58} {state}")
        total += left
        print(f"wave {wave}: {len(runs)} runs, {left / 3600:.1f} CPU hours left")
    print(f"\n{total / 3600:.1f} CPU hours left, {total / 3600 / jobs:.1f} hours at --jobs {jobs}")


def make_start(campaign: Campaign, members: dict[Run, list[int]]) -> None:
    """Make the run whose final policy `--model good` stands for, unless it is there.

    Another machine may round otherwise and end with another policy. Then the runs of wave 5 that
    began with the old one are made again."""
    good = waves.good_run(campaign.best()[0])
    folder = campaign.folder(good)
    if (folder / "checkpoint").exists() and is_trained(folder):
        return
    before = {waves.key(row): row["evaluations"] for row in campaign.rows()}
    campaign.make(good, members[good])

    after = {waves.key(row): row["evaluations"] for row in campaign.rows()}
    fifth = waves.unpaid_runs(campaign.best()[0])
    others = {run for run in before if run in fifth and "--model good" in run.arm}
    if good in before and before[good] != after[good] and others:
        print(f"{good.name} has another policy: {len(others)} runs from it are made again")
        forget(campaign.data, others)


def make_all(campaign: Campaign, selected: list[int], only: str, jobs: int) -> None:
    """Make the runs of the selected waves that have no row yet, wave by wave.

    Raises ValueError if the rates of a wave are not known yet, or its model is not."""
    for wave in selected:
        known = known_waves(campaign)
        if wave not in known:
            tuning = 6 if wave == 7 else 1
            raise ValueError(f"--wave is {wave}, but must be {tuning} first, which tunes its arms")
        members = members_of(known)
        mark_waves(campaign.data, members)

        runs = campaign.missing(known[wave], only)
        if any(run.task == "small" for run in runs) and not campaign.smollm2.is_dir():
            allowed = "the folder of SmolLM2-135M-Instruct"
            raise ValueError(f"--smollm2 is {campaign.smollm2}, but must be {allowed}")

        print(f"wave {wave}, {QUESTIONS[wave]}: {len(runs)} runs to make", flush=True)
        if any("--model good" in run.arm for run in runs):
            # They start from its policy, which is not in the tables.
            make_start(campaign, members)
            runs = campaign.missing(known[wave], only)

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(campaign.make, run, members[run]) for run in runs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                # The other threads save what is under way.
                campaign.stopping.set()
                raise


def make_parser() -> "common.argparse.ArgumentParser":
    parser = common.parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the runs, and start none")
    parser.add_argument("--wave", type=int, nargs="+", choices=QUESTIONS, default=[*QUESTIONS])
    parser.add_argument("--only", default="", help="runs whose name has this regular expression")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="of the runs; default: out/campaign")
    parser.add_argument("--data", type=Path, help="of the tables; default: docs/reference_runs")
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, help="model of waves 6 and 7")
    parser.add_argument("--short", action="store_true", help="six iterations each, in out/short")
    parser.add_argument(
        "--evaluate", nargs=2, metavar=("RUN", "N"), help="write final.json of a folder, and end"
    )
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if args.evaluate:
        evaluate_final(Path(args.evaluate[0]), int(args.evaluate[1]))
        return 0
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, but must be 1 or more")

    out = args.out or ROOT / ("out/short" if args.short else "out/campaign")
    data = args.data or (out if args.short else ROOT / "docs/reference_runs")
    campaign = Campaign(out, data, args.short, args.smollm2)
    if args.list:
        print_list(campaign, args.wave, args.only, args.jobs)
        return 0

    check_code(campaign.rows())
    campaign.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: campaign.stopping.set())
    try:
        make_all(campaign, args.wave, args.only, args.jobs)
    except ValueError as error:
        parser.error(str(error))
    except StoppedError:
        print("stopped; the same command goes on")
        return 130
    for sentence in campaign.failed:
        print(sentence, file=sys.stderr)
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
