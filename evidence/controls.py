"""Controls that are no feature. Each replaces one part of the project, and then trains.

    python evidence/controls.py shuffled --env frozenlake --seed 501 --out out/shuffled

The first word is the control, the rest are flags of train.py. The oracle of question d is in
benchmarks/controls.py of commit 4bf5a56.

shuffled         The decay factors are permuted among the entries of the buffer at each refresh. The
                 draws are as concentrated as FreshPER's, and know nothing of freshness.
constant         The learning rate stays as it is after the warm-up.
buffer_maximum   IS weights are relative to the largest of the buffer, not of the batch.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from freshper.buffer import Replay, ReplayBuffer
from freshper.trainer import WARMUP_STEPS, TorchTrainer


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


# -- each control changes what train.main trains with


def shuffled() -> None:
    train.ReplayBuffer = ShuffledBuffer


def constant() -> None:
    def lr(trainer: TorchTrainer) -> float:
        return trainer.config.lr * min(trainer.step / WARMUP_STEPS, 1.0)

    TorchTrainer._scheduled_lr = lr


def buffer_maximum() -> None:
    class Buffer(ReplayBuffer):
        def sample(self, batch_size: int, step: int = 0) -> Replay:
            smallest = self.tree.leaves[: len(self)].min() / self.tree.total()

            def weights(probabilities: np.ndarray, beta: float) -> np.ndarray:
                return (smallest / probabilities) ** beta

            train.importance_weights = weights
            return super().sample(batch_size, step)

    train.ReplayBuffer = Buffer


CONTROLS: dict[str, Callable[[], None]] = {
    "shuffled": shuffled,
    "constant": constant,
    "buffer_maximum": buffer_maximum,
}


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in CONTROLS:
        sys.exit(f"the first word must be one of {', '.join(CONTROLS)}")
    CONTROLS[sys.argv[1]]()
    sys.exit(train.main(sys.argv[2:]))
