"""Controls that are no feature. Each replaces one part of the project, and then trains.

    python benchmarks/controls.py shuffled --env frozenlake --seed 501 --out out/shuffled

The first word is the control, the rest are flags of train.py.

shuffled         The decay factors are permuted among the entries of the buffer at each refresh. The
                 draws are as concentrated as FreshPER's, and know nothing of freshness.
oracle           The true drift KL_i of an entry replaces its age: its factor is exp(-c KL_i). Every
                 fourth iteration a forward pass over the buffer measures KL_i, the k3 estimate of
                 KL(pi_mu || pi_theta) over the action tokens. In between it grows at the mean rate.
                 c makes the draws as concentrated as those by age. The run's folder gets
                 age_and_drift.csv, a row per entry and pass.
constant         The learning rate stays as it is after the warm-up.
buffer_maximum   IS weights are relative to the largest of the buffer, not of the batch.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common  # noqa: F401
import numpy as np
from scipy.optimize import brentq
from scipy.stats import pearsonr, spearmanr

import train
from freshper.buffer import SMALLEST_LEAF, Replay, ReplayBuffer
from freshper.diagnostics import read
from freshper.episode import Episode, collate
from freshper.is_weights import importance_weights
from freshper.reinforce import MAX_LOG_RATIO
from freshper.trainer import WARMUP_STEPS, TorchTrainer

PASS_EVERY = 4  # iterations
EPISODES_AT_ONCE = 256
LOG_C = 12.0  # the bounds of log c are -LOG_C and LOG_C
TABLE = "age_and_drift.csv"


class ShuffledBuffer(ReplayBuffer):
    """A buffer whose decay factors belong to other entries."""

    def __init__(self, capacity: int, alpha: float, decay: Any, eviction: str, seed: int):
        super().__init__(capacity, alpha, decay, eviction, seed)
        self.seed = seed

    def refresh(self, step: int) -> None:
        """Recompute all leaves. The permutation follows from seed and time, so that a resumed run
        has the same one."""
        self.now = max(self.now, step)
        n = len(self)
        factors = self.decay(self.now - self.collected_at[:n])
        rng = np.random.default_rng((self.seed, self.now))
        self.tree.fill((self.base_priorities[:n] * rng.permutation(factors)) ** self.alpha)


def true_drift(trainer: TorchTrainer, episodes: list[Episode]) -> np.ndarray:
    """Return KL_i of stored episodes: k3 of pi_mu against pi_theta, summed over action tokens, [N],
    in nats."""
    drift = []
    for first in range(0, len(episodes), EPISODES_AT_ONCE):
        batch = collate(episodes[first : first + EPISODES_AT_ONCE])
        log_ratio = trainer.logprobs(batch) - batch.behavior_logprobs  # [B, T], 0 off the mask
        log_ratio = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k3 = log_ratio.exp() - log_ratio - 1.0
        drift.append(k3.sum(1).numpy())
    return np.concatenate(drift)


def effective_number(weights: np.ndarray) -> float:
    """Return how many equally likely entries are as concentrated as these weights: Kish's form."""
    return weights.sum() ** 2 / (weights**2).sum()


def drift_factors(drift: np.ndarray, of_age: np.ndarray, alpha: float) -> np.ndarray:
    """Return exp(-c KL_i), the least KL taken as 0, [N].

    With this c the draws of equal base priorities, P(i) ~ factor^alpha, are as concentrated as
    those by the factors `of_age`. If even the largest c concentrates them less, it is taken."""
    above_least = drift - drift.min()
    wanted = effective_number(of_age**alpha)

    def excess(log_c: float) -> float:
        return effective_number(np.exp(-alpha * np.exp(log_c) * above_least)) - wanted

    log_c = LOG_C
    if excess(LOG_C) < 0.0 < excess(-LOG_C):
        log_c = brentq(excess, -LOG_C, LOG_C)
    return np.exp(-np.exp(log_c) * above_least)


class OracleBuffer(ReplayBuffer):
    """A buffer that knows how far the policy has moved away from each of its entries."""

    trainer: TorchTrainer
    folder: Path

    def __init__(self, capacity: int, alpha: float, decay: Any, eviction: str, seed: int):
        super().__init__(capacity, alpha, decay, eviction, seed)
        # Per slot: KL_i at the last measurement, and its step.
        self.drift = np.zeros(capacity)
        self.measured_at = np.zeros(capacity, int)
        self.rate = 0.0  # of the drift of all entries, nats per step
        self.written = 0  # bytes of the table

    def add(self, episodes: list[Episode], base_priorities: np.ndarray, step: int) -> None:
        """Store episodes, whose drift is 0, and measure that of all if it is due.

        This is line 4: the policy that is measured is the one that has just acted."""
        super().add(episodes, base_priorities, step)
        n = len(self)
        new = np.flatnonzero(self.arrival[:n] >= self.added - len(episodes))
        self.drift[new] = 0.0
        self.measured_at[new] = step
        if self.added // len(episodes) % PASS_EVERY == 0:
            self.measure(step)

    def measure(self, step: int) -> None:
        """Measure KL_i of all entries, and append ages and drift to the table."""
        n = len(self)
        ages = step - self.collected_at[:n]
        self.drift[:n] = true_drift(self.trainer, self.episodes)
        self.measured_at[:n] = step
        self.rate = (ages @ self.drift[:n]) / (ages @ ages)

        with open(self.folder / TABLE, "a") as file:
            file.truncate(self.written)
            if not self.written:
                file.write("step,age,drift\n")
            rows = np.column_stack([np.full(n, step), ages, self.drift[:n]])
            np.savetxt(file, rows, "%.6g", ",")
            file.seek(0, 2)
            self.written = file.tell()

    def refresh(self, step: int) -> None:
        """Recompute all leaves from the drift of the entries."""
        self.now = max(self.now, step)
        n = len(self)
        drift = self.drift[:n] + self.rate * (self.now - self.measured_at[:n])
        of_age = self.decay(self.now - self.collected_at[:n])
        factors = drift_factors(drift, of_age, self.alpha)
        leaves = (self.base_priorities[:n] * factors) ** self.alpha
        self.tree.fill(np.maximum(leaves, SMALLEST_LEAF))

    def state_dict(self) -> dict:
        own = {"drift": self.drift, "measured_at": self.measured_at}
        own |= {"rate": self.rate, "written": self.written}
        return super().state_dict() | own

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        for name in ("drift", "measured_at", "rate", "written"):
            setattr(self, name, state[name])


def age_against_drift(folder: Path) -> dict[str, float]:
    """Return the rank correlation and R² of age against true drift, means over the passes of a run
    of the oracle."""
    table = read(folder, TABLE)
    ranks = []
    r2 = []
    for step in np.unique(table["step"]):
        rows = table["step"] == step
        ages = table["age"][rows]
        drift = table["drift"][rows]
        if np.ptp(ages) > 0 and np.ptp(drift) > 0:
            ranks.append(spearmanr(ages, drift).statistic)
            r2.append(pearsonr(ages, drift).statistic ** 2)
    return {"age_rank": float(np.mean(ranks)), "age_r2": float(np.mean(r2))}


# -- each control: a context in which train.main trains with it


def shuffled() -> Any:
    return patch.object(train, "ReplayBuffer", ShuffledBuffer)


def oracle() -> Any:
    algorithm = train.train

    def train_with_oracle(config, policy, make_env, trainer, engine, report, signals, saved):
        known = {"trainer": trainer, "folder": report.folder}
        buffer = type("Oracle", (OracleBuffer,), known)
        with patch.object(train, "ReplayBuffer", buffer):
            algorithm(config, policy, make_env, trainer, engine, report, signals, saved)

    return patch.object(train, "train", train_with_oracle)


def constant() -> Any:
    def lr(trainer: TorchTrainer) -> float:
        return trainer.config.lr * min(trainer.step / WARMUP_STEPS, 1.0)

    return patch.object(TorchTrainer, "_scheduled_lr", lr)


def buffer_maximum() -> Any:
    class Buffer(ReplayBuffer):
        def sample(self, batch_size: int, step: int = 0) -> Replay:
            drawn = super().sample(batch_size, step)
            smallest = self.tree.leaves[: len(self)].min() / self.tree.total()
            train.importance_weights = partial(importance_weights, smallest=smallest)
            return drawn

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(train, "importance_weights", importance_weights))
    stack.enter_context(patch.object(train, "ReplayBuffer", Buffer))
    return stack


CONTROLS = {
    "shuffled": shuffled,
    "oracle": oracle,
    "constant": constant,
    "buffer_maximum": buffer_maximum,
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in CONTROLS:
        name = argv[0] if argv else "empty"
        print(f"the control is {name}, but must be one of {', '.join(CONTROLS)}", file=sys.stderr)
        return 2
    with CONTROLS[argv[0]]():
        return train.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
