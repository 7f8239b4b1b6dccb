"""The runs of the campaign, wave by wave: a plain table. docs/plan.md says why.

An arm is a name of ARMS, further flags of train.py, and perhaps `+control`, one of
benchmarks/controls.py. A run is an arm with a rate, which multiplies the learning rate of the
preset, and a seed. Waves share runs: the same run is made once.
"""

import csv
import gzip
from pathlib import Path
from typing import Any, NamedTuple

import common  # noqa: F401
import numpy as np

from freshper.presets import defaults

Row = dict[str, Any]  # a row of runs.csv

SEEDS = (501, 502, 503, 504, 505)
TUNING_SEEDS = (401, 402)
RATES = (0.5, 1.0, 2.0)
# Of these arms the smallest rate tried was the best one, so smaller ones are tried, too.
LOWER_RATES = {"freshper": (0.25,), "epochs": (0.125, 0.25)}
TUNING_TASKS = ("frozenlake", "nq_search")
TASKS = (
    "frozenlake",
    "nq_search",
    "frozenlake_vlm",
    "sokoban_simple",
    "aime",
    "gsm8k",
    "geoqa",
    "cliffwalking",
    "sokoban_hard",
)
ARMS = {
    "on_policy": "on_policy",
    "epochs": "on_policy --ppo_epochs 3",
    "uniform": "freshper --alpha 0 --decay limit --tau {limit}",
    "no_decay": "per --beta 0",
    "per": "per",
    "freshper": "freshper",
}
# In these tasks 64 episodes are replayed beside 32 fresh ones. The newest 64, each of them once
# per update, are as many episodes per update.
QUEUE = "per --beta 0 --alpha 0 --capacity 64"
QUEUE_TASKS = ("sokoban_simple", "aime", "gsm8k")
# Steps: with this age limit uniform draws have the mean age of FreshPER's (docs/plan.md).
LIMIT = 61
LIMITS = {"gsm8k": 64, "geoqa": 64, "cliffwalking": 64}

# The tasks of wave 3
PAIR = ("frozenlake", "nq_search")
TAUS = ("freshper", "no_decay", "freshper --tau 80", "freshper --tau 5")
# Episodes of the newest 40 iterations. Beyond, the draws of FreshPER have 3 % of their mass.
ORACLE_CAPACITY = {"frozenlake": 1280, "nq_search": 2560}
FACTORS = (
    "freshper --beta 0.4",
    "freshper --advantage_clip 0.2",
    "freshper --dual_clip 0",
    "freshper --kl_loss_coef 0",
    "freshper --kl_loss_coef 0.05 --kl_reward_coef 0.1",
    "freshper --entropy_coef 0.01",
    "freshper --replay_ratio 1",
    "freshper --replay_ratio 4",
    "freshper --decay polynomial",
    "freshper --base_priority advantage",
    "on_policy +constant",
    "freshper +constant",
    "freshper --beta 0.4 +constant",
    "per --epsilon 1e-6",
    "per --epsilon 1e-6 +buffer_maximum",
    "freshper --capacity 640",
    "freshper --capacity 640 --eviction lowest_priority",
)
# Waves 8 and 9: priority |r| or none, age factor or none, all at FreshPER's rate. A constant of 1e6
# drowns every |r|, so the base priorities are equal.
AGE_ALONE = "freshper --epsilon 1e6"
NEITHER = "per --beta 0 --alpha 0"
# Cheap tasks first.
CELL_TASKS = (
    "aime",
    "nq_search",
    "gsm8k",
    "sokoban_simple",
    "frozenlake",
    "frozenlake_vlm",
    "geoqa",
    "sokoban_hard",
    "cliffwalking",
)
SECOND_SEEDS = (506, 507, 508, 509, 510)
SECOND_TASKS = ("aime", "frozenlake", "frozenlake_vlm", "sokoban_simple")
SMALL_ARMS = ("freshper", "on_policy", "epochs", "per")
GOOD_SEED = 403  # of the run that `--model good` starts from
# In the tuning this rate of the arm was as good as its best one, up to 0.001.
SECOND_BEST = ("epochs", 0.5)
README_RUN = ("frozenlake_vlm", "freshper", 1.0, 42)  # its first command, all defaults

# Measured CPU seconds of a run with one thread: one update per batch, and all others (docs/log.md).
SECONDS = {
    "frozenlake": (280, 500),
    "nq_search": (170, 260),
    "frozenlake_vlm": (212, 345),
    "sokoban_simple": (98, 225),
    "aime": (60, 105),
    "gsm8k": (110, 222),
    "geoqa": (200, 362),
    "cliffwalking": (450, 550),
    "sokoban_hard": (200, 336),
    "small": (600, 1100),
}
# How many times as long a run with these flags takes.
SLOWER = {"--replay_ratio 1": 0.75, "--replay_ratio 4": 1.6, "+oracle": 2.5}

QUESTIONS = {
    1: "tuning: which learning rate suits each arm?",
    2: "main: nine tasks, six arms",
    3: "what sets tau: decay against drift, shuffled ages, the oracle of freshness",
    4: "the paper's other claims, one factor each",
    5: "where replay does not pay",
    6: "tuning with SmolLM2-135M",
    7: "a real model: SmolLM2-135M on GSM8K in three attempts",
    8: "the two-by-two: priority or none, age factor or none",
    9: "second stage: five more seeds; drift by age",
    10: "CliffWalking: on-policy training at smaller rates",
    11: "does success keep its maximum at a very long and a very short tau?",
    12: "from a good policy, at a tenth of the rate",
}


class Run(NamedTuple):
    """One run of the campaign. These four fields identify it."""

    task: str  # of --env; "small": gsm8k with --preset small
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        words = self.arm.replace("--", "").replace("+", "").split()
        return f"{self.task}-{'-'.join(words)}-x{self.rate:g}-seed{self.seed}"

    @property
    def control(self) -> str:
        """Return the control of the arm, "" if it has none."""
        return self.arm.partition("+")[2]

    @property
    def preset(self) -> tuple[str, str]:
        """Return --preset and --env."""
        return ("small", "gsm8k") if self.task == "small" else ("tiny", self.task)

    def flags(self) -> list[str]:
        """Return the flags of train.py, but for --seed, --out and the folder of a model."""
        preset, env = self.preset
        name, *others = self.arm.partition(" +")[0].split()
        words = ARMS[name].format(limit=LIMITS.get(env, LIMIT))
        if name == "epochs" and self.task in QUEUE_TASKS:
            words = QUEUE
        method, *arm_flags = words.split()

        flags = [f"--env={env}", f"--method={method}", f"--preset={preset}", *arm_flags, *others]
        if self.task == "small":
            flags += ["--max_turns=3", "--save_every=5"]
        if self.rate != 1.0:
            lr = defaults(preset, env, method)["lr"]
            flags.append(f"--lr={lr * self.rate:g}")
        return flags


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table of docs/reference_runs, [] if there is none yet."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def key(row: Row) -> Run:
    """Return the run of a row of runs.csv."""
    return Run(row["task"], row["arm"], float(row["rate"]), int(row["seed"]))


def tuning_runs(small: bool = False) -> list[Run]:
    """Return the runs of wave 1, or those of wave 6."""
    if small:
        return [Run("small", arm, rate, 401) for arm in SMALL_ARMS for rate in RATES]
    runs = []
    for task in TUNING_TASKS:
        for arm in ARMS:
            for rate in (*LOWER_RATES.get(arm, ()), *RATES):
                runs += [Run(task, arm, rate, seed) for seed in TUNING_SEEDS]
    return runs


def normalized(row: Row) -> float:
    """Return the final success of a run, 0 for the random policy and 1 for the optimal one."""
    random = float(row["random"])
    return (float(row["final"]) - random) / (float(row["optimal"]) - random)


def best_rates(rows: list[Row], small: bool = False) -> dict[str, float]:
    """Return the best rate of each arm whose tuning is complete, by the rule of docs/plan.md.

    It is the one with the largest mean of the normalised final success. Of equal ones the preset's,
    1, is taken first, and then the smaller one."""
    done = {key(row): normalized(row) for row in rows}
    runs = tuning_runs(small)
    best = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        if not done.keys() >= set(of_arm):
            continue
        means = {}
        for rate in sorted({run.rate for run in of_arm}, key=lambda rate: (rate != 1.0, rate)):
            means[rate] = np.mean([done[run] for run in of_arm if run.rate == rate])
        best[arm] = max(means, key=means.__getitem__)
    return best


def of_arms(task: str, arms: tuple[str, ...], best: dict[str, float]) -> list[Run]:
    """Return the runs of a task, arm by arm, each with the best rate of its first word."""
    return [Run(task, arm, best[arm.split()[0]], seed) for arm in arms for seed in SEEDS]


def oracle_arm(task: str) -> str:
    """Return the arm of the oracle on a task of wave 3."""
    return f"freshper --capacity {ORACLE_CAPACITY[task]} +oracle"


def tau_runs(task: str, rate: float) -> list[Run]:
    """Return the runs of wave 3 on a task. Without decay FreshPER is Standard PER without IS."""
    arms = [(arm, rate) for arm in (*TAUS, "freshper --tau auto", "freshper +shuffled")]
    arms.append((oracle_arm(task), rate))
    arms += [(arm, rate / 4) for arm in TAUS]
    return [Run(task, arm, factor, seed) for arm, factor in arms for seed in SEEDS]


def unpaid_runs(best: dict[str, float]) -> list[Run]:
    """Return the runs of wave 5: a policy that is already good, and three epochs of the fresh batch
    in the tasks whose other control replays the newest 64 episodes."""
    # The first one must be complete when those with its policy begin.
    runs = [good_run(best)]
    runs += of_arms("gsm8k", tuple(f"{arm} --model good" for arm in SMALL_ARMS), best)
    for task in QUEUE_TASKS:
        runs += [Run(task, "on_policy --ppo_epochs 3", best["epochs"], seed) for seed in SEEDS]
    return runs


def good_run(best: dict[str, float]) -> Run:
    """Return the run whose final policy is the start of the arms with `--model good`."""
    return Run("gsm8k", "freshper", best["freshper"], GOOD_SEED)


def cells(best: dict[str, float]) -> list[tuple[str, float]]:
    """Return arms and rate of the two-by-two but FreshPER: age alone, priority alone, neither."""
    return [(arm, best["freshper"]) for arm in (AGE_ALONE, "no_decay", NEITHER)]


def second_runs(best: dict[str, float]) -> list[Run]:
    """Return the runs of wave 9."""
    arms = [(arm, best[arm]) for arm in ("freshper", "on_policy", "uniform")]
    arms += cells(best)[:2]
    runs = [(task, *arm) for task in SECOND_TASKS for arm in arms]
    return [Run(*run, seed) for run in runs for seed in SECOND_SEEDS]


def tenth_runs(best: dict[str, float]) -> list[Run]:
    """Return the runs of wave 12."""
    arms = [(f"{arm} --model good", best[arm] / 10) for arm in SMALL_ARMS]
    return [good_run(best), *(Run("gsm8k", *arm, seed) for arm in arms for seed in SEEDS)]


def wave_runs(wave: int, best: dict[str, float], best_small: dict[str, float]) -> list[Run]:
    """Return the runs of a wave in their order. Raises KeyError if an arm's rate is not known."""
    if wave == 1:
        return tuning_runs()
    if wave == 2:
        runs = [run for task in TASKS for run in of_arms(task, tuple(ARMS), best)]
        runs += [Run(task, *SECOND_BEST, seed) for task in PAIR for seed in SEEDS]
        return [*runs, Run(*README_RUN)]
    if wave == 3:
        return [run for task in PAIR for run in tau_runs(task, best["freshper"])]
    if wave == 4:
        return of_arms("frozenlake", FACTORS, best)
    if wave == 5:
        return unpaid_runs(best)
    if wave == 6:
        return tuning_runs(small=True)
    if wave == 7:
        return of_arms("small", SMALL_ARMS, best_small)
    if wave == 8:
        arms = cells(best)
        return [Run(task, *arm, seed) for task in CELL_TASKS for arm in arms for seed in SEEDS]
    if wave == 9:
        return second_runs(best)
    if wave == 10:
        return [Run("cliffwalking", "on_policy", x, seed) for x in (0.25, 0.5) for seed in SEEDS]
    if wave == 11:
        arms = ("freshper --tau 450", "freshper --tau 1.25")
        return [run for task in PAIR for run in of_arms(task, arms, best)]
    return tenth_runs(best)


def expected_seconds(run: Run, rows: list[Row]) -> float:
    """Return the CPU seconds of a run: the mean of those made, or else the table's."""
    made = []
    for row in rows:
        if (row["task"], row["arm"]) == (run.task, run.arm):
            made.append(float(row["cpu_s"]))
    if made:
        return float(np.mean(made))

    on_policy, others = SECONDS[run.task]
    one_update = run.arm in ("on_policy", "on_policy +constant")
    seconds = on_policy if one_update else others
    for words, factor in SLOWER.items():
        if words in run.arm:
            seconds *= factor
    return float(seconds)
