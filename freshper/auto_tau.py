"""`--tau auto`: the age decay constant, estimated from how fast the policy drifts.

Paper: section 3.3 absorbs the drift rate c into tau = 1/c, "a single tunable hyperparameter"; section 5 leaves tuning
it to future work. Ours is one of several possible estimates:

    KL(pi_mu || pi_theta) ~ c Delta              of a turn: k3 summed over a trajectory's action tokens, over its turns
    ESS / n = 1 / (1 + Var[rho]) = exp(-2 c Delta)     if log rho is normal: its variance is twice the KL
    P(i) ~ p_i^alpha ~ exp(-alpha Delta / tau)
    tau = alpha / (2 c)                          P(i) then decays as the effective sample size does
    1 iteration <= tau <= 5 iterations           whatever the drift

Of a turn, because the action in rho of eq. 4 is a reply. c is the least-squares line through the origin over about 20
replay batches. The upper bound is an observation: the best fixed tau did not grow as the drift slowed (docs/log.md).
"""

import numpy as np

from freshper.priority import exponential_decay

MEMORY = 0.95  # weight of earlier replay batches, per batch
ITERATIONS = 5  # the upper bound of tau


class AutoTau:
    """A decay function of age whose tau follows `observe`, from its upper bound. `iteration`: steps per iteration."""

    def __init__(self, alpha: float, iteration: int):
        self.alpha, self.iteration = alpha, iteration
        self.sums = np.zeros(2)  # of Delta^2 and of Delta KL, over the window: the state

    @property
    def tau(self) -> float:
        """alpha / (2 c) in optimizer steps, within the bounds."""
        age_age, age_kl = self.sums
        tau = self.alpha / (2.0 * (age_kl / age_age)) if age_kl > 0.0 else np.inf
        return float(np.clip(tau, self.iteration, ITERATIONS * self.iteration))

    def __call__(self, age: np.ndarray) -> np.ndarray:
        return exponential_decay(age, self.tau)

    def observe(self, ages: np.ndarray, kl: np.ndarray) -> None:
        """Add a replayed batch: ages [B], and the mean KL of a turn of each trajectory [B], in nats."""
        ages = np.asarray(ages, dtype=np.float64)
        self.sums = MEMORY * self.sums + np.array([(ages * ages).mean(), (ages * kl).mean()])
