# %% [markdown]
# # A tour of the buffer, on real runs
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/REPOSITORY/blob/main/docs/tour.ipynb)
#
# We train text FrozenLake twice on a CPU, in four minutes, and then look at what the buffers hold.
# Sections and equations are the paper's. [The exercises](exercises.md) go on from here.
#
# On Colab, open this notebook from GitHub, and begin with a cell of these lines. Replace
# OWNER/REPOSITORY, also in the badge's link, by the name of this repository on GitHub:
#
#     !git clone https://github.com/OWNER/REPOSITORY project
#     %pip install -q -e ./project
#     %cd project/docs
#
# This notebook is made of `docs/tour.py`: `jupytext --to ipynb docs/tour.py`, then
# `PYTHONWARNINGS=ignore jupyter execute --inplace docs/tour.ipynb`, twice, so that the runs are
# there.

# %%
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

# A notebook starts in its own folder, a script wherever it is called.
sys.path.extend([str(Path.cwd()), str(Path.cwd().parent)])

import matplotlib.pyplot as plt
import numpy as np
import pandas
import torch

from evidence.style import COLORS, GREY, STYLE, WIDTH
from freshper import diagnostics
from freshper.buffer import ReplayBuffer
from freshper.checkpoint import unpack_episodes
from freshper.priority import exponential_decay, polynomial_decay

ROOT = Path(diagnostics.__file__).parents[1]
ITERATIONS = os.environ.get("TOUR_ITERATIONS", "60")
OUT = Path(os.environ.get("TOUR_OUT", ROOT / "out/tour"))
COLOR = {"without decay": COLORS["no_decay"], "with decay": COLORS["freshper"]}
plt.rcParams.update(STYLE)

# %% [markdown]
# ## 1. Two runs that differ in one thing
#
# Everything is the same but the decay: `p_i = |r_i| + epsilon` and
# `p_i = (|r_i| + epsilon) exp(-age / tau)`. Standard PER and FreshPER of Table 5 differ in IS
# correction as well; here neither run has it. One seed and a sixth of the usual length do not show
# which learns better (RESULTS.md does). They show what happens to the priorities.

# %%
ARMS = {"without decay": "--decay none", "with decay": "--tau 20"}
# Without a penalty for the format, r is 0 or 1.
FLAGS = "--env frozenlake --preset tiny --seed 7 --format_penalty 0 --eval_every 30"
runs = {name: OUT / f"{name.replace(' ', '-')}-{ITERATIONS}" for name in ARMS}
OUT.mkdir(parents=True, exist_ok=True)
for name, folder in runs.items():
    if not folder.exists():
        flags = f"{FLAGS} {ARMS[name]} --iterations {ITERATIONS}".split()
        command = [sys.executable, "train.py", *flags, "--out", str(folder)]
        log = Path(f"{folder}.log")
        with open(log, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        table = folder / "metrics.csv"
        while process.poll() is None:
            time.sleep(1)
            done = table.read_text().count("\n") - 2 if table.exists() else 0
            print(f"\r{name}: {done} of {ITERATIONS} iterations", end="\r")
        assert process.returncode == 0, log.read_text()
    last = pandas.read_csv(folder / "metrics.csv").iloc[-1]
    print(f"{name}: {last.episodes:.0f} episodes, {last.step:.0f} updates,")
    print(f"    held-out success {last.eval_success:.2f}")


DECAY = partial(exponential_decay, tau=20.0)


def load_buffer(folder: Path, alpha: float = 0.6, decay: partial | None = DECAY) -> ReplayBuffer:
    """Load the buffer of a run's last checkpoint, with priorities of this alpha and this decay."""
    state = torch.load(folder / "checkpoint/state.pt", weights_only=True)["buffer"]
    episodes = unpack_episodes(state["episodes"])
    buffer = ReplayBuffer(2 * len(episodes), alpha, decay)
    for episode, priority in zip(episodes, state["base_priorities"].tolist()):
        buffer.add([episode], [priority], episode.step)
    buffer.refresh(state["now"])
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
# Above: what each run holds at its end, one dot per episode. Without decay an old success keeps the
# priority of a new one. Below: the ages of the episodes that were drawn during the whole run. Young
# ages are frequent there without decay, too, because the buffer itself was younger at first. So we
# print the mean age of a draw from the last buffer.

# %%
figure, axes = plt.subplots(3, 1, figsize=(WIDTH, 8.0), layout="constrained")
decays = {"without decay": None, "with decay": DECAY}
for (name, folder), panel in zip(runs.items(), axes):
    buffer = load_buffer(folder, decay=decays[name])
    ages = buffer.ages()
    won = successes(buffer)
    # The leaves of the tree are p_i^alpha.
    priorities = buffer.tree[np.arange(len(buffer))] ** (1 / 0.6)
    panel.semilogy(ages[won], priorities[won], ".", color=COLOR[name], label="successes")
    panel.semilogy(ages[~won], priorities[~won], ".", color=GREY, label="failures")
    panel.set(title=f"p_i {name}", xlabel="age, optimizer steps", ylabel="priority")
    panel.legend()

    drawn = pandas.read_csv(folder / "replay.csv")["age"]
    axes[2].hist(drawn, bins=40, histtype="step", lw=2, color=COLOR[name], label=name)
    p = exact(buffer)
    old = ages > np.median(ages)
    print(f"{name}: mean age {ages.mean():.0f} in the buffer, {p @ ages:.0f} of a draw from it;")
    print(f"    P(the older half of the buffer) = {p[old].sum():.4f}")

axes[2].set(title="ages drawn", xlabel="age, optimizer steps", ylabel="draws")
axes[2].legend()
plt.show()

# %% [markdown]
# ## 3. KL and effective sample size by age (section 3.3)
#
# Every replay update records how far the policy has moved on each episode that it drew
# (`replay.csv`). The paper argues in three steps, and a point is a step of it for episodes of about
# one age:
#
# - *Above*: the policy drifts. `KL(mu||theta)` grows with age (eq. 12 takes a straight line).
# - *Below*: old episodes say less. ESS / n is the share of a batch that counts (eq. 5), for batches
#   of 32 episodes of about the same age. It falls with age, and lies below `exp(-KL(theta||mu))` of
#   the same batches (eq. 11, dashed). It cannot be below 1 / 32.
#
# Why batches of 32? All episodes of an age together have a few ratios `pi_theta / pi_mu` so large
# that one episode decides the estimate. An update has 32, and this is what it is worth.

# %%
BATCH = 32
BINS = 8
figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 6.0), layout="constrained")
for name, folder in runs.items():
    rows = pandas.read_csv(folder / "replay.csv")
    batches = diagnostics.by_age(rows, len(rows) // BATCH)
    batches["bound"] = np.exp(-batches["kl"])
    means = {}
    for column, values in batches.items():
        means[column] = np.array([part.mean() for part in np.array_split(values, BINS)])

    ages = means["age"]
    axes[0].plot(ages, means["kl_reverse"], "o-", color=COLOR[name], label=name)
    axes[1].plot(ages, means["ess"], "o-", color=COLOR[name], label=f"ESS / n {name}")
    axes[1].plot(ages, means["bound"], "--", color=COLOR[name], label="exp(-KL)")
    shown = f"ages {ages[0]:.0f} to {ages[-1]:.0f}"
    print(f"{name}, {shown}: ESS / n {means['ess'][0]:.2f} to {means['ess'][-1]:.2f}")
    assert (batches["ess"] <= batches["bound"] + 1e-9).all()

axes[0].set(
    xlabel="age, optimizer steps", title="KL(mu||theta) of an episode, nats", ylim=(0, None)
)
axes[1].set(xlabel="age, optimizer steps", title="ESS / n of 32 episodes", ylim=(0, 1))
axes[0].legend()
axes[1].legend()
plt.show()

# %% [markdown]
# Which `tau` learns best is another question: RESULTS.md has an answer, and it does not follow the
# rate of this drift.

# %% [markdown]
# ## 4. What alpha and tau do to P(i) (eq. 2, eq. 14)
#
# We take the buffer of the run with decay and recompute its priorities with other settings. We
# print the exact share of successes and the exact mean age of a draw, and the same from 20,000
# draws. (explore.html has every fourth episode of this run.)

# %%
folder = runs["with decay"]
print("alpha  tau   successes: exact, drawn   mean age: exact, drawn")
for alpha, decay in ((0.0, None), (0.6, None), (1.0, None), (0.6, DECAY), (1.0, DECAY)):
    buffer = load_buffer(folder, alpha, decay)
    p = exact(buffer)
    share = p @ successes(buffer)
    age = p @ buffer.ages()

    replay = buffer.sample(20_000)
    drawn = np.mean([episode.reward > 0 for episode in replay.episodes])
    drawn_age = replay.ages.mean()
    tau = 20 if decay else np.inf
    print(f"{alpha:5.1f}  {tau:3}   {share:10.3f}  {drawn:10.3f}  {age:11.1f}  {drawn_age:9.1f}")
    np.testing.assert_allclose([drawn, drawn_age], [share, age], atol=0.01, rtol=0.01)

# %% [markdown]
# ## 5. Under exponential decay time alone changes no P(i)
#
# Every entry loses the same share of its priority per step, so the proportions stay. Polynomial
# decay has no such law. Line 6 of Algorithm 1 matters because *new* entries come in at age 0 beside
# leaves that were computed earlier.

# %%
polynomial = partial(polynomial_decay, tau=20.0, power=1.0)
for name, decay in {"exponential": DECAY, "polynomial": polynomial}.items():
    buffer = load_buffer(folder, decay=decay)
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
