# %% [markdown]
# # A tour of the buffer, on real runs
#
# This page is the output of `docs/tour.py`: two training runs of text FrozenLake on a CPU, and then what their buffers
# hold. `python docs/render_tour.py` writes it again in a few minutes; as a notebook, `docs/tour.py` has a cell at each
# `# %%`. Sections and equations are the paper's. The exercises stand at the end.

# %%
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import matplotlib.pyplot as plt
import numpy as np
import torch

import compare
from freshper import checkpoint, diagnostics
from freshper.buffer import ReplayBuffer
from freshper.is_weights import importance_weights
from freshper.priority import exponential_decay, polynomial_decay
from freshper.reinforce import advantages

ITERATIONS = os.environ.get("TOUR_ITERATIONS", "60")
BELOW = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.2),
    "fontsize": "small",
    "frameon": False,
}
OUT = Path(os.environ.get("TOUR_OUT", "out/tour"))

# %% [markdown]
# ## 1. Two runs that differ in one thing
#
# Everything is the same but the decay: `p_i = |r_i| + epsilon` and `p_i = (|r_i| + epsilon) exp(-age / tau)`. Standard
# PER and FreshPER of Table 5 differ in IS correction as well; here neither run has it. One seed and a seventh of the
# usual length do not show which learns better (RESULTS.md does); they show what happens to the priorities.

# %%
ARMS = {"without decay": "freshper --decay none", "with decay": "freshper --tau 20"}
FLAGS = f"--preset tiny --iterations {ITERATIONS} --eval_every 30 --eval_episodes 128".split()
FLAGS += ["--format_penalty", "0"]  # r is 0 or 1
runs = {name: OUT / f"{name.replace(' ', '-')}-{ITERATIONS}" for name in ARMS}
for name, folder in runs.items():
    compare.run("frozenlake", ARMS[name], 7, folder, FLAGS)
    found = compare.summary(folder)
    print(
        f"{name}: {found['episodes']:.0f} episodes, {found['updates']:.0f} updates, success {found['last']:.2f}"
    )


def load_buffer(folder: Path, alpha: float = 0.6, decay: str | None = None) -> ReplayBuffer:
    """Load the buffer of a run's last checkpoint, its priorities recomputed with alpha and, if given, another decay."""
    config = compare.config_of(folder)
    config = dataclasses.replace(config, decay=decay or config.decay)
    buffer = ReplayBuffer(config.capacity, alpha, config.decay_function())
    state = torch.load(checkpoint.newest(folder).folder / "state.pt", weights_only=True)["buffer"]
    arrays = {name: x.numpy() for name, x in state.items() if isinstance(x, torch.Tensor)}
    buffer.load_state_dict(
        state | arrays | {"episodes": checkpoint.unpack_episodes(state["episodes"])}
    )
    buffer.refresh(buffer.now)
    return buffer


def exact(buffer: ReplayBuffer) -> np.ndarray:
    """Return P(i) of every entry (eq. 2), [N]."""
    return buffer.tree[np.arange(len(buffer))] / buffer.tree.total()


# %% [markdown]
# ## 2. Priority staleness (section 3.3)
#
# Left and middle: what a run holds at its end, one dot per trajectory. Without decay an old success keeps the priority
# of a new one. Right: the ages of the trajectories that were drawn during the run.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for (name, folder), panel in zip(runs.items(), axes[:2], strict=True):
    buffer = load_buffer(folder)
    reward = np.array([e.reward for e in buffer.episodes])
    for chosen, label in ((reward > 0, "successes"), (reward <= 0, "failures")):
        panel.semilogy(
            buffer.ages()[chosen],
            (buffer.tree[np.flatnonzero(chosen)]) ** (1 / 0.6),
            ".",
            label=label,
        )
    panel.set(title=f"p_i {name}", xlabel="age, optimizer steps")
    drawn = diagnostics.read(folder)["age"]
    axes[2].hist(drawn, bins=40, histtype="step", label=name)
    old = np.quantile(buffer.ages(), 0.5)
    print(
        f"{name}: mean age {buffer.ages().mean():.0f} in the buffer, {drawn.mean():.0f} of what was drawn;"
    )
    print(f"    P(the older half of the buffer) = {exact(buffer)[buffer.ages() > old].sum():.4f}")
axes[2].set(title="ages drawn", xlabel="age, optimizer steps")
for panel in axes:
    panel.legend(**BELOW)
figure.suptitle("Priorities and ages, without and with decay")

# %% [markdown]
# ## 3. Effective sample size and KL divergence against age (section 3.3)
#
# Every replay update records how far the policy has moved on each trajectory that it drew (`replay.csv`). Grouped by
# age, ESS / n lies below its upper bound `exp(-KL)` (eq. 11), and both fall.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
bins = {name: diagnostics.by_age(diagnostics.read(folder), 10) for name, folder in runs.items()}
for name, found in bins.items():
    (line,) = axes[0].plot(found["age"], found["ess"], "o-", label=f"ESS / n {name}")
    axes[0].plot(
        found["age"], np.exp(-found["kl"]), "--", color=line.get_color(), label="its bound exp(-KL)"
    )
    axes[1].plot(found["age"], found["kl_reverse"], "o-", label=name)
    tau, offset, r2 = diagnostics.drift_rate(found["age"], found["kl_reverse"])
    print(f"{name}: KL(mu||theta) = {offset:.2f} + age / {tau:.0f}, R2 {r2:.2f}")
axes[0].set(xlabel="age, optimizer steps", yscale="log")
axes[1].set(xlabel="age, optimizer steps", title="KL(mu||theta) of a trajectory, nats")
for panel in axes:
    panel.legend(**BELOW, ncols=2)
figure.suptitle("ESS and KL divergence of replayed trajectories")

# %% [markdown]
# The heuristic of eq. 12 is a straight line in the right panel with slope `c`: the policy drifts by one nat in `1 / c`
# optimizer steps. Which `tau` learns best is another question: see the table for tau in RESULTS.md.

# %% [markdown]
# ## 4. What alpha and tau do to P(i) (eq. 2, eq. 14)
#
# The buffer of the run with decay, its priorities recomputed with other settings: the exact share of successes and the
# exact mean age of a draw, and the same from 20,000 draws.

# %%
folder = runs["with decay"]
print("alpha  decay        successes: exact, drawn     mean age: exact, drawn")
for alpha, decay in (
    (0.0, "none"),
    (0.6, "none"),
    (1.0, "none"),
    (0.6, "exponential"),
    (1.0, "exponential"),
):
    buffer = load_buffer(folder, alpha, decay)
    won, p = np.array([e.reward > 0 for e in buffer.episodes]), exact(buffer)
    replay = buffer.sample(20_000)
    drawn = np.mean([e.reward > 0 for e in replay.episodes])
    ages = (p @ buffer.ages(), replay.ages.mean())
    print(
        f"{alpha:5.1f}  {decay:11s}  {p @ won:.3f}  {drawn:.3f}               {ages[0]:6.1f}  {ages[1]:6.1f}"
    )
    np.testing.assert_allclose([drawn, ages[1]], [p @ won, ages[0]], atol=0.01, rtol=0.01)

# %% [markdown]
# ## 5. What beta does (eq. 3)
#
# IS weights undo the preference of the draw. At `beta = 1` the weighted mean over draws is the plain mean over the
# buffer; at `beta = 0` nothing is undone. FreshPER leaves them off (Table 5), because they also undo freshness.

# %%
buffer = load_buffer(folder)
replay = buffer.sample(50_000)
print(f"mean age of the buffer {buffer.ages().mean():.1f}; of what is drawn, weighted with")
for beta in (0.0, 0.4, 1.0):
    w = importance_weights(replay.probabilities, len(buffer), beta)
    print(f"    beta {beta:.1f}: {np.average(replay.ages, weights=w):6.1f}")

# %% [markdown]
# ## 6. Under exponential decay a refresh changes no P(i)
#
# Every entry loses the same share of its priority per step, so the proportions stay. Polynomial decay has no such law.
# Line 6 of Algorithm 1 matters because *new* entries come in at age 0 beside leaves that were computed earlier.

# %%
for name, decay in (
    ("exponential", exponential_decay),
    ("polynomial", partial(polynomial_decay, power=1.0)),
):
    buffer = load_buffer(folder)
    buffer.decay = partial(decay, tau=20.0)
    buffer.refresh(buffer.now)
    before = exact(buffer)
    buffer.refresh(buffer.now + 30)
    change = np.abs(exact(buffer) / before - 1).max()
    print(f"{name}: 30 steps later, P(i) has changed by at most {change:.1e} of itself")

buffer = load_buffer(folder)
buffer.add(
    buffer.episodes[-32:], np.full(32, 0.1), step=buffer.now + 30
)  # 32 fresh failures, and no refresh
before = exact(buffer)[-32:].sum()
buffer.refresh(buffer.now)
print(
    f"P(32 fresh failures) = {before:.4f} before the refresh, {exact(buffer)[-32:].sum():.4f} after it"
)

# %% [markdown]
# ## Exercises
#
# Each solution ran when this page was made. `won`, `exact`, `load_buffer` and `runs` are those from above.
#
# ### Exercise 1
# At which age does a success (`r = 1`) become less likely to be drawn than a fresh failure (`r = 0`)? Give the formula,
# then the number at `epsilon = 0.1`, `tau = 20`.

# %% solution
# (1 + epsilon) exp(-age / tau) = epsilon. Alpha does not matter: both sides are raised to it.
crossing = 20 * np.log(1.1 / 0.1)
print(f"age {crossing:.1f}")
p = np.array([1.1, 1.1, 0.1]) * exponential_decay(
    np.array([np.floor(crossing), np.ceil(crossing), 0.0]), tau=20.0
)
assert p[0] > p[2] > p[1]

# %% [markdown]
# ### Exercise 2
# Section 3.4 gives the half-life of the *priority*, `tau ln 2`. What is that of the *probability*, at the paper's
# `tau = 500`, `alpha = 0.6`? Check it with two entries in a buffer.

# %% solution
# P(i) ~ (p_base exp(-age / tau))^alpha decays with the constant tau / alpha.
half_life = 500 / 0.6 * np.log(2)
print(f"priority {500 * np.log(2):.0f} steps, probability {half_life:.0f}")
episode = buffer.episodes[0]
two = ReplayBuffer(2, alpha=0.6, decay=partial(exponential_decay, tau=500.0))
two.add([episode], [1.0], step=0)
two.add([episode], [1.0], step=round(half_life))
two.refresh(round(half_life))
assert np.isclose(two.tree[0] / two.tree[1], 0.5, atol=1e-3)

# %% [markdown]
# ### Exercise 3
# Show in your own run that `ESS / n <= exp(-KL(theta||mu))` in every bin of age. Is that a coincidence?

# %% solution
# No: with these estimates it is Jensen's inequality for the sample itself (the head of freshper/diagnostics.py).
for found in bins.values():
    assert (found["ess"] <= np.exp(-found["kl"]) + 1e-9).all()
print(
    "loosest bin:",
    max(round(float((np.exp(-f["kl"]) / f["ess"]).max()), 1) for f in bins.values()),
    "times",
)

# %% [markdown]
# ### Exercise 4
# A replay batch drawn by reward may hold successes only. What is left of the gradient if its advantages are whitened
# over the batch itself (the authors' code)? And if returns are measured against those collected recently?

# %% solution
rewards, mask = torch.ones(8, 1), torch.ones(8, 1, dtype=torch.bool)  # eight successes of one token
print("over itself:", advantages(rewards, mask, clip=20.0).abs().max().item())
recent = torch.tensor([0.3, 0.46])[:, None, None]  # mean and standard deviation at a success of 0.3
print("against recent returns:", round(advantages(rewards, mask, 20.0, recent).max().item(), 2))
assert advantages(rewards, mask, clip=20.0).abs().max() == 0.0

# %% [markdown]
# ### Exercise 5
# Draw 50,000 times from the buffer with decay. Estimate the buffer's mean age from them, once with `beta = 1` and once
# without, and say how many standard errors each is off.

# %% solution
replay = buffer.sample(50_000)
w = importance_weights(replay.probabilities, len(buffer), beta=1.0)
estimate = np.average(replay.ages, weights=w)
error = np.sqrt(np.sum((w * (replay.ages - estimate)) ** 2)) / w.sum()
print(
    f"buffer {buffer.ages().mean():.2f}; weighted {estimate:.2f} +- {error:.2f}; plain {replay.ages.mean():.2f}"
)
assert abs(estimate - buffer.ages().mean()) < 5 * error
