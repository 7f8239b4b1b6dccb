"""Controls that are no feature. Each replaces one part of the project, and then trains.

    python evidence/controls.py shuffled --env frozenlake --seed 501 --out out/shuffled

The first word is the control, the rest are flags of train.py.

shuffled         The decay factors are permuted among the entries of the buffer at each refresh. The
                 draws are as concentrated as FreshPER's, and know nothing of freshness.
oracle           The true drift KL_i of an entry replaces its age: its factor is exp(-c KL_i). Every
                 fourth iteration a forward pass over the buffer measures KL_i, the k3 estimate of
                 KL(pi_mu || pi_theta) over the action tokens. In between it grows at the mean rate.
                 c makes the draws as concentrated as those by age.
constant         The learning rate stays as it is after the warm-up.
buffer_maximum   IS weights are relative to the largest of the buffer, not of the batch.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from freshper.buffer import SMALLEST_LEAF, Replay, ReplayBuffer
from freshper.episode import Episode, collate
from freshper.reinforce import MAX_LOG_RATIO
from freshper.trainer import WARMUP_STEPS, TorchTrainer

PASS_EVERY = 4  # iterations
EPISODES_AT_ONCE = 256
LOG_C = 12.0  # the bounds of log c are -LOG_C and LOG_C


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

    def __init__(self, capacity: int, alpha: float, decay: Any, eviction: str, seed: int):
        super().__init__(capacity, alpha, decay, eviction, seed)
        # Per slot: KL_i at the last measurement, and its step.
        self.drift = np.zeros(capacity)
        self.measured_at = np.zeros(capacity, int)
        self.rate = 0.0  # of the drift of all entries, nats per step

    def add(self, episodes: list[Episode], base_priorities: np.ndarray, step: int) -> None:
        """Store episodes, whose drift is 0, and measure that of all if it is due.

        This is line 4: the policy that is measured is the one that has just acted."""
        super().add(episodes, base_priorities, step)
        n = len(self)
        new = np.flatnonzero(self.arrival[:n] >= self.added - len(episodes))
        self.drift[new] = 0.0
        self.measured_at[new] = step
        if self.added // len(episodes) % PASS_EVERY == 0:
            ages = step - self.collected_at[:n]
            self.drift[:n] = true_drift(self.trainer, self.episodes)
            self.measured_at[:n] = step
            self.rate = (ages @ self.drift[:n]) / (ages @ ages)

    def refresh(self, step: int) -> None:
        """Recompute all leaves from the drift of the entries."""
        self.now = max(self.now, step)
        n = len(self)
        drift = self.drift[:n] + self.rate * (self.now - self.measured_at[:n])
        of_age = self.decay(self.now - self.collected_at[:n])
        leaves = (self.base_priorities[:n] * drift_factors(drift, of_age, self.alpha)) ** self.alpha
        self.tree.fill(np.maximum(leaves, SMALLEST_LEAF))

    def state_dict(self) -> dict:
        own = {"drift": self.drift, "measured_at": self.measured_at, "rate": self.rate}
        return super().state_dict() | own

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        for name in ("drift", "measured_at", "rate"):
            setattr(self, name, state[name])


# -- each control changes what train.main trains with


def shuffled() -> None:
    train.ReplayBuffer = ShuffledBuffer


def oracle() -> None:
    record = TorchTrainer.record_behavior_logprobs

    def record_and_keep(trainer: TorchTrainer, episodes: list[Episode]) -> Any:
        OracleBuffer.trainer = trainer
        return record(trainer, episodes)

    TorchTrainer.record_behavior_logprobs = record_and_keep
    train.ReplayBuffer = OracleBuffer


def constant() -> None:
    def lr(trainer: TorchTrainer) -> float:
        return trainer.config.lr * min(trainer.step / WARMUP_STEPS, 1.0)

    TorchTrainer._scheduled_lr = lr


def buffer_maximum() -> None:
    class Buffer(ReplayBuffer):
        def sample(self, batch_size: int, step: int = 0) -> Replay:
            smallest = self.tree.leaves[: len(self)].min() / self.tree.total()

            def weights(probabilities: np.ndarray, size: int, beta: float) -> np.ndarray:
                return (smallest / probabilities) ** beta

            train.importance_weights = weights
            return super().sample(batch_size, step)

    train.ReplayBuffer = Buffer


CONTROLS: dict[str, Callable[[], None]] = {
    "shuffled": shuffled,
    "oracle": oracle,
    "constant": constant,
    "buffer_maximum": buffer_maximum,
}


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in CONTROLS:
        sys.exit(f"the first word must be one of {', '.join(CONTROLS)}")
    CONTROLS[sys.argv[1]]()
    sys.exit(train.main(sys.argv[2:]))
