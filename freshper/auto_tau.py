"""`--tau auto`: the age decay constant, estimated from how fast the policy drifts.

Paper: section 3.3 absorbs the drift rate c into tau = 1/c, "a single tunable hyperparameter";
section 5 leaves tuning it to future work. Ours is one of several possible estimates:

    KL(pi_mu || pi_theta) ~ c Delta       per turn: k3, summed over a trajectory's action tokens,
                                          over its turns
    ESS / n = 1 / (1 + Var[rho]) = exp(-2 c Delta)
                                          if log rho is normal: its variance is twice the KL
    P(i) ~ p_i^alpha ~ exp(-alpha Delta / tau)
    tau = alpha / (2 c)                   P(i) then decays as the effective sample size does
    1 iteration <= tau <= 5 iterations    whatever the drift

The KL divergence is that of a turn, because eq. 4 treats one reply as one action. c is the
slope of the least-squares line through the origin over about 20 replay batches. They count as they
were drawn, not weighted by 1 / P(i) as in freshper/diagnostics.py. The upper bound is an
observation: the best fixed tau did not grow as the drift slowed (docs/log.md).
"""

import numpy as np

from freshper.priority import exponential_decay

MEMORY = 0.95  # weight of earlier replay batches, per batch
ITERATIONS = 5  # the upper bound of tau


class AutoTau:
    """A decay function of age whose tau follows `observe`, starting at its upper bound."""

    def __init__(self, alpha: float, steps_per_iteration: int):
        self.alpha = alpha
        self.steps_per_iteration = steps_per_iteration
        self.sums = np.zeros(2)  # running sums of Delta^2 and of Delta KL

    @property
    def tau(self) -> float:
        """Return alpha / (2 c) in optimizer steps, within the bounds."""
        longest = ITERATIONS * self.steps_per_iteration
        age_age, age_kl = self.sums
        if age_kl <= 0.0:
            return longest
        c = age_kl / age_age
        return np.clip(self.alpha / (2.0 * c), self.steps_per_iteration, longest)

    def __call__(self, age: np.ndarray) -> np.ndarray:
        return exponential_decay(age, self.tau)

    def observe(self, ages: np.ndarray, kl: np.ndarray) -> None:
        """Add a replayed batch: ages [B], and each trajectory's mean KL of a turn [B], in nats."""
        sums_of_batch = np.array([(ages * ages).mean(), (ages * kl).mean()])
        self.sums = MEMORY * self.sums + sums_of_batch

    def state_dict(self) -> dict:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict) -> None:
        # A run that had another --tau before --resume has no sums.
        self.sums = np.asarray(state.get("sums", self.sums))
