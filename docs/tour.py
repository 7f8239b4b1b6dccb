# %% [markdown]
# # A tour of the buffer, on real runs
#
# We train text FrozenLake twice on a CPU, and then look at what the buffers hold. Sections and
# equations are the paper's. The exercises stand at the end. `docs/tour.ipynb` is this tour as an
# executed notebook, and `docs/tour.md` as a page. `python docs/render_tour.py` makes both from
# `docs/tour.py`, in a few minutes.

# %%
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

# A notebook starts in its own folder, a script wherever it is called.
sys.path.extend([str(Path.cwd()), str(Path.cwd().parent)])

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
LEGEND = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.2),
    "fontsize": "small",
    "frameon": False,
}
OUT = Path(os.environ.get("TOUR_OUT", Path(compare.__file__).parent / "out/tour"))
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
COLORS = {
    "without decay": compare.METHOD_COLORS["per --beta 0"],
    "with decay": compare.METHOD_COLORS["freshper"],
}

# %% [markdown]
# ## 1. Two runs that differ in one thing
#
# Everything is the same but the decay: `p_i = |r_i| + epsilon` and
# `p_i = (|r_i| + epsilon) exp(-age / tau)`. Standard PER and FreshPER of Table 5 differ in IS
# correction as well; here neither run has it. One seed and a sixth of the usual length do not show
# which learns better (RESULTS.md does). They show what happens to the priorities.

# %%
ARMS = {"without decay": "freshper --decay none", "with decay": "freshper --tau 20"}
FLAGS = f"--preset tiny --iterations {ITERATIONS} --eval_every 30 --eval_episodes 128".split()
# Without a penalty for the format, r is 0 or 1.
FLAGS += ["--format_penalty", "0"]
runs = {name: OUT / f"{name.replace(' ', '-')}-{ITERATIONS}" for name in ARMS}
for name, folder in runs.items():
    compare.run("frozenlake", ARMS[name], 7, folder, FLAGS)
    summary = compare.summary(folder)
    counts = f"{summary['episodes']:.0f} episodes, {summary['updates']:.0f} updates"
    print(f"{name}: {counts}, success {summary['last']:.2f}")


def load_buffer(folder: Path, alpha: float = 0.6, decay: str | None = None) -> ReplayBuffer:
    """Load the buffer of a run's last checkpoint, and recompute its priorities with this alpha and,
    if it is not None, this decay."""
    config = compare.config_of(folder)
    config = dataclasses.replace(config, decay=decay or config.decay)
    buffer = ReplayBuffer(config.capacity, alpha, config.decay_function())

    state = torch.load(checkpoint.newest(folder).folder / "state.pt", weights_only=True)["buffer"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.numpy()
    state["episodes"] = checkpoint.unpack_episodes(state["episodes"])
    buffer.load_state_dict(state)
    buffer.refresh(buffer.now)
    return buffer


def exact(buffer: ReplayBuffer) -> np.ndarray:
    """Return P(i) of every entry (eq. 2), [N]."""
    return buffer.tree[np.arange(len(buffer))] / buffer.tree.total()


def successes(buffer: ReplayBuffer) -> np.ndarray:
    """Return which entries have a positive reward, [N]."""
    return np.array([episode.reward > 0 for episode in buffer.episodes])


# %% [markdown]
# ## 2. Priority staleness (section 3.3)
#
# Left and middle: what a run holds at its end, one dot per trajectory (the README's episode).
# Without decay an old success keeps the priority of a new one. Right: the ages of the trajectories
# that were drawn during the whole run. Young ages are frequent there without decay, too, because
# the buffer itself was younger at first. So we print the mean age of a draw from the last buffer.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for (name, folder), panel in zip(runs.items(), axes[:2], strict=True):
    buffer = load_buffer(folder)
    ages = buffer.ages()
    won = successes(buffer)
    # The leaves of the tree are p_i^alpha.
    priorities = buffer.tree[np.arange(len(buffer))] ** (1 / 0.6)
    panel.semilogy(ages[won], priorities[won], ".", label="successes")
    panel.semilogy(ages[~won], priorities[~won], ".", label="failures")
    panel.set(title=f"p_i {name}", xlabel="age, optimizer steps", ylabel="priority")

    drawn = diagnostics.read(folder)["age"]
    axes[2].hist(drawn, bins=40, histtype="step", color=COLORS[name], label=name)
    older = ages > np.quantile(ages, 0.5)
    p = exact(buffer)
    print(f"{name}: mean age {ages.mean():.0f} in the buffer, {p @ ages:.0f} of a draw from it;")
    print(f"    P(the older half of the buffer) = {p[older].sum():.4f}")

axes[2].set(title="ages drawn", xlabel="age, optimizer steps", ylabel="draws")
for panel in axes:
    panel.legend(**LEGEND)
figure.suptitle("Priorities and ages, without and with decay")
plt.show()

# %% [markdown]
# ## 3. Effective sample size and KL divergence against age (section 3.3)
#
# Every replay update records how far the policy has moved on each trajectory that it drew
# (`replay.csv`). We group the draws by age into ten bins of equal size. In every bin ESS / n lies
# below its upper bound `exp(-KL)` (eq. 11).
#
# The two panels use two different KL divergences. The bound on the left has `KL(theta||mu)`, as in
# eq. 11. It is a mean under today's policy, so the ratios `rho = pi_theta / pi_mu` are its weights.
# On the right is the reverse, `KL(mu||theta)`: minus the mean of `log rho` over the trajectories as
# they were collected.
#
# The right panel grows with age. ESS is irregular, because a few large ratios decide it. Hollow
# marks are bins in which a single draw has more than half of the sum of `rho^2`. So the left panel
# does not show that decay lowers or raises ESS: one such draw decides it in a bin of some 400.

# %%
BINS = 10


def largest_share(rows: diagnostics.Table) -> np.ndarray:
    """Return for each bin of age which share one trajectory has of the sum of rho^2, [bins]."""
    # A draw counts 1 / P(i) times, as in `diagnostics.estimate`.
    squares = np.exp(2 * rows["log_ratio"]) / rows["probability"]
    order = np.argsort(rows["age"], kind="stable")
    return np.array([squares[i].max() / squares[i].sum() for i in np.array_split(order, BINS)])


figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
bins = {}
for name, folder in runs.items():
    rows = diagnostics.read(folder)
    bins[name] = means = diagnostics.by_age(rows, BINS)
    ages = means["age"]
    alone = largest_share(rows) > 0.5
    color = COLORS[name]
    axes[0].plot(ages, means["ess"], "o-", color=color, label=f"ESS / n {name}")
    axes[0].plot(ages[alone], means["ess"][alone], "o", mfc="white", color=color)
    axes[0].plot(ages, np.exp(-means["kl"]), "--", color=color, label="exp(-KL(theta||mu))")
    axes[1].plot(ages, means["kl_reverse"], "o-", color=color, label=name)

    tau, offset, r2 = diagnostics.drift_rate(ages[:-1], means["kl_reverse"][:-1])
    print(f"{name}: KL(mu||theta) = {offset:.2f} + age / {tau:.0f}, R2 {r2:.2f}")
    print(f"    one trajectory has most of the sum of rho^2 in {alone.sum()} of {BINS} bins;")
    print(f"    the largest ratio is exp({rows['log_ratio'].max():.1f})")

axes[0].set(xlabel="age, optimizer steps", title="ESS / n and its bound")
axes[0].set(ylabel="ESS / n", yscale="log")
axes[1].set(xlabel="age, optimizer steps", title="KL(mu||theta) of a trajectory", ylabel="nats")
for panel in axes:
    panel.legend(**LEGEND, ncols=2)
figure.suptitle("ESS and KL divergence of replayed trajectories")
plt.show()

# %% [markdown]
# The heuristic of eq. 12 is a straight line in the right panel with slope `c`: the policy drifts by
# one nat in `1 / c` optimizer steps. Which `tau` learns best is another question: see the table for
# tau in RESULTS.md. Its `c` is smaller: there a run is six times as long, at half of the learning
# rate. The printed line leaves out the oldest bin, in which few trajectories count.

# %% [markdown]
# ## 4. What alpha and tau do to P(i) (eq. 2, eq. 14)
#
# We take the buffer of the run with decay and recompute its priorities with other settings. We
# print the exact share of successes and the exact mean age of a draw, and the same from 20,000
# draws. (explore.html has every fourth episode of this run.)

# %%
folder = runs["with decay"]
print("alpha  decay        successes: exact, drawn     mean age: exact, drawn")
settings = (
    (0.0, "none"),
    (0.6, "none"),
    (1.0, "none"),
    (0.6, "exponential"),
    (1.0, "exponential"),
)
for alpha, decay in settings:
    buffer = load_buffer(folder, alpha, decay)
    p = exact(buffer)
    share = p @ successes(buffer)
    age = p @ buffer.ages()

    replay = buffer.sample(20_000)
    drawn = np.mean([episode.reward > 0 for episode in replay.episodes])
    drawn_age = replay.ages.mean()
    print(f"{alpha:5.1f}  {decay:11s}  {share:.3f}  {drawn:.3f}", end="")
    print(f"               {age:6.1f}  {drawn_age:6.1f}")
    np.testing.assert_allclose([drawn, drawn_age], [share, age], atol=0.01, rtol=0.01)

# %% [markdown]
# ## 5. What beta does (eq. 3)
#
# IS weights undo the preference of the draw. At `beta = 1` the weighted mean over draws is the
# plain mean over the buffer; at `beta = 0` nothing is undone. By Table 5 FreshPER's default has
# no IS correction, and the paper gives no reason. One effect is seen here: the weights also
# undo the preference for fresh trajectories.

# %%
buffer = load_buffer(folder)
replay = buffer.sample(50_000)
print(f"mean age of the buffer {buffer.ages().mean():.1f}; of what is drawn, weighted with")
for beta in (0.0, 0.4, 1.0):
    w = importance_weights(replay.probabilities, len(buffer), beta)
    print(f"    beta {beta:.1f}: {np.average(replay.ages, weights=w):6.1f}")

# %% [markdown]
# ## 6. Under exponential decay time alone changes no P(i)
#
# Every entry loses the same share of its priority per step, so the proportions stay. Polynomial
# decay has no such law. Line 6 of Algorithm 1 matters because *new* entries come in at age 0 beside
# leaves that were computed earlier.

# %%
decays = {
    "exponential": partial(exponential_decay, tau=20.0),
    "polynomial": partial(polynomial_decay, tau=20.0, power=1.0),
}
for name, decay in decays.items():
    buffer = load_buffer(folder)
    buffer.decay = decay
    buffer.refresh(buffer.now)
    before = exact(buffer)

    buffer.refresh(buffer.now + 30)
    change = np.abs(exact(buffer) / before - 1).max()
    print(f"{name}: 30 steps later, P(i) has changed by at most {change:.1e} of itself")

buffer = load_buffer(folder)
# Add 32 fresh failures without a refresh.
buffer.add(buffer.episodes[-32:], np.full(32, 0.1), step=buffer.now + 30)
before = exact(buffer)[-32:].sum()
buffer.refresh(buffer.now)
after = exact(buffer)[-32:].sum()
print(f"P(32 fresh failures) = {before:.4f} before the refresh, {after:.4f} after it")

# %% [markdown]
# ## Exercises
#
# Each solution ran when this page was made. It uses names from above: `successes`, `exact`,
# `load_buffer`, `runs`, `bins`, `folder`, `buffer`.
#
# ### Exercise 1
# At which age does a success (`r = 1`) become less likely to be drawn than a fresh failure
# (`r = 0`)? Give the formula, then the number at `epsilon = 0.1`, `tau = 20`.

# %% solution
# (1 + epsilon) exp(-age / tau) = epsilon. Alpha does not matter: both sides are raised to it.
crossing = 20 * np.log(1.1 / 0.1)
print(f"age {crossing:.1f}")
ages = np.array([np.floor(crossing), np.ceil(crossing)])
successes_then = 1.1 * exponential_decay(ages, tau=20.0)
assert successes_then[0] > 0.1 > successes_then[1]

# %% [markdown]
# ### Exercise 2
# Section 3.4 gives the half-life of the *priority*, `tau ln 2`. What is the half-life of the
# *probability*, at the paper's `tau = 500`, `alpha = 0.6`? Check it with two entries in a buffer.

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
# Show in your own run that `ESS / n <= exp(-KL(theta||mu))` in every bin of age. Is that a
# coincidence?

# %% solution
# No: with these estimates it is Jensen's inequality for the sample itself (the head of
# freshper/diagnostics.py).
ratios = np.concatenate([np.exp(-means["kl"]) / means["ess"] for means in bins.values()])
assert (ratios >= 1 - 1e-9).all()
print(f"loosest bin: {ratios.max():.1f} times")

# %% [markdown]
# ### Exercise 4
# A replay batch drawn by reward may hold successes only. What is left of the gradient if its
# advantages are whitened over the batch itself (the authors' code)? And if returns are measured
# against those collected recently?

# %% solution
# Eight successes of one token each.
rewards = torch.ones(8, 1)
mask = torch.ones(8, 1, dtype=torch.bool)
whitened = advantages(rewards, mask, clip=20.0).abs().max().item()
print(f"over itself: {whitened}")
assert whitened == 0.0

# Mean and standard deviation of the returns at a success of 0.3.
recent = torch.tensor([0.3, 0.46])[:, None, None]
largest = advantages(rewards, mask, 20.0, recent).max().item()
print(f"against recent returns: {largest:.2f}")

# %% [markdown]
# ### Exercise 5
# Load the buffer of the run with decay again (section 6 has added to it), and draw 50,000 times.
# Estimate the buffer's mean age from the draws, once with weights at `beta = 1` and once without.
# How many standard errors is each estimate off?

# %% solution
buffer = load_buffer(folder)
replay = buffer.sample(50_000)
mean = buffer.ages().mean()
print(f"mean age of the buffer: {mean:.2f}")
off = {}
for beta in (1.0, 0.0):
    w = importance_weights(replay.probabilities, len(buffer), beta)
    estimate = np.average(replay.ages, weights=w)
    error = np.sqrt(np.sum((w * (replay.ages - estimate)) ** 2)) / w.sum()
    off[beta] = abs(estimate - mean) / error
    print(f"beta {beta:.0f}: {estimate:.2f} +- {error:.2f}, {off[beta]:.1f} standard errors off")
assert off[1.0] < 5
