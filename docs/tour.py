# %% [markdown]
# # A tour of the buffer, on real runs
#
# This page is made by running `docs/tour.py`: two training runs of text FrozenLake on a CPU, and then a look at what
# they left in their buffers. Nothing in it is drawn by hand. Make it anew with
#
#     python docs/render_tour.py              a few minutes, nearly all of them training; writes docs/tour.md
#
# or open `docs/tour.py` as a notebook (its cells start with `# %%`). Sections are the paper's; exercises at the end.

# %%
import json
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
from freshper.config import Config
from freshper.is_weights import importance_weights
from freshper.priority import exponential_decay, polynomial_decay
from freshper.reinforce import advantages

ITERATIONS = os.environ.get("TOUR_ITERATIONS", "60")
OUT = Path(os.environ.get("TOUR_OUT", "out/tour"))

# %% [markdown]
# ## 1. Two runs that differ in one thing
#
# The same seed, the same everything, with `p_i = |r_i| + epsilon` and with `p_i = (|r_i| + epsilon) exp(-age / tau)`.
# (The rows "Standard PER" and "FreshPER" of the paper's Table replay_config differ in IS correction as well; here
# neither run has it.)

# %%
ARMS = {"without decay": "freshper --decay none", "with decay": "freshper --tau 20"}
FLAGS = f"--iterations {ITERATIONS} --eval_every 40 --eval_episodes 128 --format_penalty 0".split()  # r is 0 or 1
runs = {name: OUT / f"{name.replace(' ', '-')}-{ITERATIONS}" for name in ARMS}
for name, folder in runs.items():
    compare.run("frozenlake", ARMS[name], 7, folder, FLAGS)
    came_to = compare.summary(folder)
    print(f"{name}: {came_to['episodes']} episodes, {came_to['updates']} updates, success {came_to['final']:.2f}")


def load_buffer(folder: Path, alpha: float = 0.6, decay: str | None = None) -> ReplayBuffer:
    """The buffer of a run as its last checkpoint has it; another alpha or decay changes nothing but priorities."""
    config = Config(**json.loads((folder / "config.json").read_text()))
    if decay:
        config.decay = decay
    found, _ = checkpoint.find(folder)
    state = checkpoint.read_state(found)
    buffer = ReplayBuffer(config.capacity, alpha, config.decay_function())
    buffer.load_state_dict(state["buffer"] | {"episodes": state["episodes"]})
    buffer.refresh(buffer.now)
    return buffer


def exact(buffer: ReplayBuffer) -> np.ndarray:
    """P(i) of every entry, eq. per_sampling, [N]."""
    return buffer.tree[np.arange(len(buffer))] / buffer.tree.total()


# %% [markdown]
# ## 2. Priority staleness (section 3.3)
#
# Left: what a run holds in the end, one dot a trajectory. Without decay, an old success has the priority of a new one
# for ever. Right: the ages of what was really drawn, over the whole run.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for (name, folder), panel in zip(runs.items(), axes[:2], strict=True):
    buffer = load_buffer(folder)
    reward = np.array([e.reward for e in buffer.episodes])
    for chosen, label in ((reward > 0, "successes"), (reward <= 0, "failures")):
        panel.semilogy(buffer.ages()[chosen], (buffer.tree[np.flatnonzero(chosen)]) ** (1 / 0.6), ".", label=label)
    panel.set(title=f"p_i {name}", xlabel="age, optimizer steps")
    drawn = diagnostics.read(folder)["age"]
    axes[2].hist(drawn, bins=40, histtype="step", label=name)
    old = np.quantile(buffer.ages(), 0.5)
    print(f"{name}: mean age {buffer.ages().mean():.0f} in the buffer, {drawn.mean():.0f} of what was drawn;")
    print(f"    P(the older half of the buffer) = {exact(buffer)[buffer.ages() > old].sum():.4f}")
axes[0].legend(fontsize="small")
axes[2].set(title="ages drawn", xlabel="age, optimizer steps")
axes[2].legend(fontsize="small")
figure.suptitle("Priorities and ages, without and with decay")

# %% [markdown]
# ## 3. Effective sample size and KL divergence against age (section 3.3)
#
# Every replay update notes how far the policy has moved on each trajectory that it drew (`replay.csv`). Grouped by age:
# the share of a sample that still counts, ESS / n, falls; `exp(-KL)` is the paper's upper bound of it (eq. ess_decay).

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
bins = {name: diagnostics.by_age(diagnostics.read(folder), 10) for name, folder in runs.items()}
for name, found in bins.items():
    age = [b.age for b in found]
    (line,) = axes[0].plot(age, [b.ess for b in found], "o-", label=f"ESS / n {name}")
    axes[0].plot(age, [np.exp(-b.kl) for b in found], "--", color=line.get_color(), label="exp(-KL), the bound")
    axes[1].plot(age, [b.kl_reverse for b in found], "o-", label=f"KL(mu||theta) {name}")
    rate = diagnostics.fits(found)["KL(mu||theta) of trajectories"]
    print(f"{name}: KL(mu||theta) = {rate.offset:.2f} + age / {1 / rate.rate:.0f}, R2 {rate.r2:.2f}")
axes[0].set(xlabel="age, optimizer steps", yscale="log")
axes[1].set(xlabel="age, optimizer steps", title="nats a trajectory")
for panel in axes:
    panel.legend(fontsize="x-small")
figure.suptitle("ESS and KL divergence of replayed trajectories")

# %% [markdown]
# The heuristic of eq. ess_decay_final is a straight line through the right panel, and `1 / c` its slope: the time in
# which the policy moves away by one nat. The `tau` that learns best here is shorter (RESULTS.md).

# %% [markdown]
# ## 4. What alpha and tau do to P(i) (eq. per_sampling, eq. fresh_priority)
#
# The buffer of the run with decay, its priorities recomputed with other settings. The exact share of successes among
# what would be drawn, and the mean age; and the same from 20,000 real draws.

# %%
folder = runs["with decay"]
print("alpha  decay        successes: exact, drawn     mean age: exact, drawn")
for alpha, decay in ((0.0, "none"), (0.6, "none"), (1.0, "none"), (0.6, "exponential"), (1.0, "exponential")):
    buffer = load_buffer(folder, alpha, decay)
    won, p = np.array([e.reward > 0 for e in buffer.episodes]), exact(buffer)
    replay = buffer.sample(20_000)
    drawn = np.mean([e.reward > 0 for e in replay.episodes])
    ages = (p @ buffer.ages(), replay.ages.mean())
    print(f"{alpha:5.1f}  {decay:11s}  {p @ won:.3f}  {drawn:.3f}               {ages[0]:6.1f}  {ages[1]:6.1f}")
    np.testing.assert_allclose([drawn, ages[1]], [p @ won, ages[0]], atol=0.01, rtol=0.01)

# %% [markdown]
# ## 5. What stratification does (section 3.5)
#
# One draw from each of B equal slices of the mass has the same expectation as B independent draws, and less noise: no
# entry can be drawn more than `ceil(B P(i)) + 1` times.

# %%
buffer, batch_size = load_buffer(folder), 64
counts = {"stratified": [], "independent": []}
rng = np.random.default_rng(0)
age = buffer.ages()
for _ in range(2000):
    counts["stratified"].append(age[buffer.tree.stratified_sample(batch_size, rng)].mean())
    masses = rng.random(batch_size) * buffer.tree.total()
    counts["independent"].append(age[buffer.tree.find(masses)].mean())
figure, panel = plt.subplots(figsize=(5, 2.5), layout="constrained")
for name, means in counts.items():
    panel.hist(means, bins=40, histtype="step", label=name)
    print(f"{name}: mean age of a batch {np.mean(means):.2f}, its standard deviation {np.std(means):.2f}")
panel.axvline(exact(buffer) @ age, color="black", linewidth=0.8)
panel.legend(fontsize="small")
figure.suptitle(f"Mean age of a batch of {batch_size}, 2,000 batches")

# %% [markdown]
# ## 6. What beta does (eq. is_weights)
#
# The weights undo the preference of the draw. At `beta = 1` the weighted mean over draws is the plain mean over the
# buffer; at `beta = 0` nothing is undone. FreshPER leaves them off, since they also undo freshness.

# %%
replay = buffer.sample(50_000)
drawn_age = replay.ages
print(f"mean age of the buffer {age.mean():.1f}; of what is drawn, weighted with")
for beta in (0.0, 0.4, 1.0):
    w = importance_weights(replay.probabilities, len(buffer), beta)
    mean = np.average(drawn_age, weights=w)
    print(
        f"    beta {beta:.1f}: {mean:6.1f}   (ESS of the weights: {w.sum() ** 2 / (w @ w) / len(w):.3f} of the batch)"
    )

# %% [markdown]
# ## 7. A law: under exponential decay a refresh changes no P(i)
#
# Every entry loses the same share of its priority per step, so their proportions stay. Polynomial decay has no such
# law. What line 6 of Algorithm 1 is for: *new* entries come in at age 0 beside leaves frozen earlier.

# %%
for name, decay in (("exponential", exponential_decay), ("polynomial", partial(polynomial_decay, power=1.0))):
    buffer = load_buffer(folder)
    buffer.decay = partial(decay, tau=20.0)
    buffer.refresh(buffer.now)
    before = exact(buffer)
    buffer.refresh(buffer.now + 30)
    change = np.abs(exact(buffer) / before - 1).max()
    print(f"{name}: 30 steps later, P(i) has changed by at most {change:.1e} of itself")

buffer = load_buffer(folder)
buffer.add(buffer.newest(32), np.full(32, 0.1), step=buffer.now + 30)  # 32 fresh failures, and no refresh
stale = exact(buffer)[buffer.ages() == 0].sum()
buffer.refresh(buffer.now)
print(
    f"P(32 failures, just collected) = {stale:.4f} beside stale leaves, {exact(buffer)[buffer.ages() == 0].sum():.4f}"
)

# %% [markdown]
# ## Exercises
#
# Each has a solution that ran when this page was made. `won`, `exact`, `load_buffer` and `runs` are those of above.
#
# ### Exercise 1
# At which age does a success (`r = 1`) become less likely to be drawn than a fresh failure (`r = 0`)? Give the formula,
# then the number at `epsilon = 0.1`, `tau = 20`.

# %% solution
# (1 + epsilon) exp(-age / tau) = epsilon. Alpha does not matter: both sides are raised to it.
crossing = 20 * np.log(1.1 / 0.1)
print(f"age {crossing:.1f}")
p = np.array([1.1, 1.1, 0.1]) * exponential_decay(np.array([np.floor(crossing), np.ceil(crossing), 0.0]), tau=20.0)
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
# By the law seen above (7), exponential decay needs no refresh at all: find leaves that never change and yet give the
# same `P(i)`. Why would nobody store them like that for long?

# %% solution
# Multiply every leaf by exp(now / tau)^alpha, a constant: (p_base exp(t_i / tau))^alpha. It overflows one day.
buffer = load_buffer(folder)
used = slice(0, len(buffer))
static = (buffer.base_priorities[used] * np.exp((buffer.steps[used] - buffer.steps[used].max()) / 20.0)) ** 0.6
assert np.allclose(static / static.sum(), exact(buffer), rtol=1e-9)
print("float64 holds e^709: at tau = 20 that is step", 709 * 20)

# %% [markdown]
# ### Exercise 4
# Without decay, which `epsilon` makes half of what is drawn successes, if a share `s` of the buffer is?

# %% solution
# s ((1 + epsilon) / epsilon)^alpha = 1 - s
won = np.array([e.reward > 0 for e in buffer.episodes])
s = min(won.mean(), 0.49)  # above one half no epsilon can
epsilon = 1 / (((1 - s) / s) ** (1 / 0.6) - 1)
p = s * (1 + epsilon) ** 0.6 / (s * (1 + epsilon) ** 0.6 + (1 - s) * epsilon**0.6)
print(f"s = {s:.2f}: epsilon = {epsilon:.3f}")
assert np.isclose(p, 0.5)

# %% [markdown]
# ### Exercise 5
# The maximum in eq. is_weights is over "j". Over the drawn batch, as here, or over the buffer? Compare the mean weight
# of a drawn success at `beta = 1`, without decay and with the authors' `epsilon = 1e-6`.

# %% solution
plain = ReplayBuffer(10_000, alpha=0.6, decay=None)
plain.add(buffer.episodes, np.where(won, 1.0, 0.0) + 1e-6, step=0)
replay = plain.sample(64)
of_batch = importance_weights(replay.probabilities, len(plain), beta=1.0)
of_buffer = exact(plain).min() / replay.probabilities
success = np.array([e.reward > 0 for e in replay.episodes])
print(
    f"batch {of_batch[success].mean():.4f}, buffer {of_buffer[success].mean():.6f}: a learning rate of almost nothing"
)
assert of_buffer[success].mean() < 0.001 < of_batch[success].mean()

# %% [markdown]
# ### Exercise 6
# Show in your own run that `ESS / n <= exp(-KL(theta||mu))` in every bin of age. Is it luck?

# %% solution
# No: with these estimates it is Jensen's inequality for the sample itself (the head of freshper/diagnostics.py).
for found in bins.values():
    assert all(b.ess <= np.exp(-b.kl) + 1e-9 for b in found)
print("loosest bin:", max(round(float(np.exp(-b.kl) / b.ess), 1) for found in bins.values() for b in found), "times")

# %% [markdown]
# ### Exercise 7
# A replay batch drawn by reward may hold successes only. What is left of the gradient if its advantages are whitened
# over the batch itself (the authors' code)? And measured against the returns collected lately?

# %% solution
rewards, mask = torch.ones(8, 1), torch.ones(8, 1, dtype=torch.bool)  # eight successes of one token
print("over itself:", advantages(rewards, mask, clip=20.0).abs().max().item())
lately = torch.tensor([0.3, 0.46])[:, None, None].expand(2, 8, 1)  # mean and deviation at a success of 0.3
print("against the returns of late:", round(advantages(rewards, mask, 20.0, lately).max().item(), 2))
assert advantages(rewards, mask, clip=20.0).abs().max() == 0.0

# %% [markdown]
# ### Exercise 8
# Draw 50,000 times from the buffer with decay. Estimate the buffer's mean age from them, once with `beta = 1` and once
# without, and say how many standard errors each is off.

# %% solution
replay = buffer.sample(50_000)
w = importance_weights(replay.probabilities, len(buffer), beta=1.0)
estimate = np.average(replay.ages, weights=w)
error = np.sqrt(np.sum((w * (replay.ages - estimate)) ** 2)) / w.sum()
print(f"buffer {buffer.ages().mean():.2f}; weighted {estimate:.2f} +- {error:.2f}; plain {replay.ages.mean():.2f}")
assert abs(estimate - buffer.ages().mean()) < 5 * error
