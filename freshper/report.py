"""What a run prints and writes: header, progress bar, tables and pages. Not in the paper.

    config.json        every setting
    metrics.csv        one row per iteration
    replay.csv         one row per replayed trajectory
    curve.png          success against episodes, as in Fig. 3
    diagnostics.png    staleness by age (freshper/diagnostics.py)
    episodes.html      held-out episodes of the last evaluation

Columns of metrics.csv are means over the updates of an iteration; row 0 is the evaluation before
training:

    train_*             of the policy before the updates of the row
    eval_*              on held-out seeds, after them
    turns               replies per episode
    invalid             share of replies that could not be read
    cut                 share of replies that --max_new_tokens ended
    truncated           share of episodes cut by --max_tokens
    mismatch            mean |engine - trainer log-prob|
    clip_fraction, kl   share of clipped tokens; k3 of pi_mu against pi_theta: 0 in the first epoch
    nonzero_advantages  share of action tokens whose advantage is not 0
    replay_*            of replayed batches
    ess, ess_token      ESS / n of trajectories and of tokens (eq. 5)
    rollout_s           the iteration's remaining time
    wall_s              time since the first evaluation, with later ones and checkpoints

Replayed batches are measured as drawn, not weighted by 1 / P(i). A batch has an ESS / n of at least
1 / B, so compare `ess` between runs of one --batch_size only.
"""

import base64
import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import jinja2
import numpy as np
import pandas
import torch
from tqdm import tqdm

from envs import ENVS
from envs.base import EVAL_SEEDS, TextEnv
from freshper import diagnostics
from freshper.buffer import Replay, ReplayBuffer
from freshper.config import Config
from freshper.episode import Episode, compressed
from freshper.errors import Ending
from freshper.models import Policy
from freshper.rollout import Engine, evaluate
from freshper.trainer import TorchTrainer, Update

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from freshper.backends import Loaded

Row = dict[str, Any]  # numbers by the name of their column
COLUMNS = """iteration step episodes wall_s train_success train_reward eval_success eval_reward
turns invalid cut truncated mismatch loss grad_norm clip_fraction kl nonzero_advantages replay_loss
replay_grad_norm replay_clip_fraction replay_kl replay_nonzero_advantages replay_success replay_age
ess ess_token buffer_size lr rollout_s logprobs_s update_s replay_s sync_s""".split()
# Every run whose mean of ten iterations fell below it failed (docs/log.md).
LEAST_ESS = 0.3
SLOW = 4.0  # times as long as the fastest iteration


class Report(contextlib.AbstractContextManager):
    """A context manager around a run. When it closes, everything is on disk.

    It makes or takes the run's folder and locks it. Raises OSError if that fails."""

    say = staticmethod(tqdm.write)  # print a line above the progress bar

    def __init__(self, config: Config, loaded: "Loaded", ending: Ending):
        self.config = config
        self.policy, self.envs, self.saved = loaded
        self.ending = ending
        self.folder = folder_of(config)
        self.title = f"{task(config)}, {config.method}, preset {config.preset}, seed {config.seed}"
        self.command = f"python train.py --resume {shlex.quote(str(self.folder))}"
        self.command += f" --iterations {config.iterations}"
        self.features: dict = {}  # of held-out images, by key
        self.slow = False  # whether the last iterations were

        env = self.envs[0]
        columns = [*COLUMNS]
        for name in env.metrics:
            columns += [f"train_{name}", f"eval_{name}"]
        self.metrics = pandas.DataFrame(columns=columns, dtype=float)  # a row per iteration

        self.folder.mkdir(parents=True, exist_ok=bool(config.resume))
        # The system holds it, so that a crash leaves none behind.
        self.lock = filelock.FileLock(self.folder / ".lock", timeout=0)
        self.lock.acquire()
        if not config.resume:
            self.write_config()

        model = self.policy.model
        self.baselines = baselines(env, config.eval_episodes)
        self.baseline_text = ", ".join(
            f"{name} policy {value:.2f}" for name, value in self.baselines.items()
        )

        self.say(self.title)
        self.say(f"{type(model).__name__}, {model.num_parameters():,} parameters")
        self.say(f"backend {config.backend} on {config.device}, threads {torch.get_num_threads()}")
        for split, rows in env.rows.items():
            self.say(f"{split}: {len(rows)} rows of {config.data}")
        self.say(f"success on held-out seeds: {self.baseline_text}")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error:
            self.say(f"stopped after iteration {self.done}: {error}")
        last = self.metrics["eval_success"][1:].dropna()[-3:]
        if len(last):
            self.say(
                f"held-out success, mean of the last {len(last)} evaluations: "
                f"{last.mean():.2f} ({self.baseline_text})"
            )
        if self.done:
            try:
                self.draw()
            # replay.csv may have been damaged since it was written.
            except Exception as failure:
                self.say(f"plots could not be written to {self.folder}: {failure}")
        self.lock.release()

        self.say(f"written to {self.folder}")
        if self.done < self.config.iterations:
            self.say(f"continue with: {self.command}")

    @property
    def done(self) -> int:
        """Return the number of completed iterations."""
        return max(0, len(self.metrics) - 1)

    # -- a checkpoint's part of the report

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.metrics.to_dict("records"), "features": self.features}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        columns = self.metrics.columns
        self.metrics = pandas.DataFrame(state["rows"], dtype=float)[columns]
        self.features = state["features"]

    # -- an iteration

    def iterations(self, engine: Engine) -> Iterator[int]:
        """Yield the numbers of the iterations to come, with a progress bar. The policy is evaluated
        before the first."""
        if self.metrics.empty:
            first = {"iteration": 0, "step": 0, "episodes": 0, "wall_s": 0.0}
            self.metrics.loc[0] = pandas.Series(first | self.evaluate_if_due(engine))

        # A run that was killed after its last checkpoint has written more rows to both tables.
        self.write_metrics()
        replay = self.folder / "replay.csv"
        if replay.exists():
            rows, _, _ = replay.read_bytes().partition(b"\n%d," % (self.done + 1))
            replay.write_bytes((rows.rstrip() + b"\n").lstrip())

        self.began = time.perf_counter() - self.metrics["wall_s"].iloc[-1]
        total = self.config.iterations
        self.bar = tqdm(range(self.done, total), initial=self.done, total=total)
        for iteration in self.bar:
            self.began_iteration = time.perf_counter()
            yield iteration

    def row(
        self,
        episodes: list[Episode],
        fresh: list[Update],
        replays: list[tuple[Replay, Update]],
        trainer: TorchTrainer,
        buffer: ReplayBuffer,
        measured: Row,
    ) -> Row:
        """Return the row of metrics.csv of an iteration, and write its rows of replay.csv.

        `measured` has the columns of lines 3 and 12."""
        row = {
            "iteration": self.done + 1,
            "step": trainer.step,
            "episodes": (self.done + 1) * len(episodes),
            "lr": trainer.lr,
            "buffer_size": len(buffer),
            "update_s": sum(update.stats["seconds"] for update in fresh),
            "replay_s": sum(update.stats["seconds"] for _, update in replays),
            **measured,
            **means([update.stats for update in fresh]),
        }
        if replays:
            row |= means([self.replay_row(*replay) for replay in replays])
        others = sum(seconds for name, seconds in row.items() if name.endswith("_s"))
        row["rollout_s"] = time.perf_counter() - self.began_iteration - others

        for name, mean in summarize(episodes).items():
            of_training = f"train_{name}"
            row[of_training if of_training in self.metrics else name] = mean
        return row

    def replay_row(self, drawn: Replay, update: Update) -> Row:
        """Append a replay update to replay.csv, and return its columns of metrics.csv."""
        columns = {
            "iteration": self.done + 1,
            "age": drawn.ages,
            "probability": drawn.probabilities,
            "reward": [episode.reward for episode in drawn.episodes],
        }
        rows = pandas.DataFrame(columns | update.drift)
        with open(self.folder / "replay.csv", "a") as file:
            rows.to_csv(file, header=not file.tell(), index=False, float_format="%.6g")

        as_drawn = diagnostics.estimate(rows.assign(probability=1.0))
        return {
            "replay_success": np.mean([episode.success for episode in drawn.episodes]),
            "replay_age": as_drawn["age"],
            "ess": as_drawn["ess"],
            "ess_token": as_drawn["ess_token"],
            **{f"replay_{name}": value for name, value in update.stats.items()},
        }

    def evaluate_if_due(self, engine: Engine) -> Row:
        """Return the columns of an evaluation on the held-out seeds, {} if none is due, and write
        its episodes."""
        config = self.config
        iteration = len(self.metrics)  # whose row is not yet written
        if iteration % config.eval_every and iteration != config.iterations:
            return {}
        lengths = config.max_tokens, config.max_new_tokens
        episodes = evaluate(engine, self.envs, config.eval_episodes, *lengths, self.features)
        self.write_file("episodes.html", episodes_page(episodes, self.policy, self.title))
        return {f"eval_{name}": mean for name, mean in summarize(episodes).items()}

    def write(self, row: Row, engine: Engine) -> None:
        """Write the row of an iteration to metrics.csv. An evaluation completes it, if one is
        due."""
        row |= self.evaluate_if_due(engine)
        row["wall_s"] = time.perf_counter() - self.began
        self.metrics.loc[row["iteration"]] = pandas.Series(row)
        self.write_metrics()
        held_out = self.metrics["eval_success"].dropna().iloc[-1]
        self.bar.set_postfix(success=row["train_success"], held_out=held_out)
        self.warn(row)

    def warn(self, row: Row) -> None:
        """Say what a user should know of the last iterations."""
        if self.done == 1 and row["invalid"] == 1:
            self.say(
                "no reply of the first batch could be read, "
                f"{row['cut']:.0%} were cut by --max_new_tokens"
            )

        ess = self.metrics["ess_token"][-10:].mean()
        if self.done % 10 == 0 and ess < LEAST_ESS:
            self.say(
                f"ESS / n of replayed tokens is {ess:.2f}, mean of ten iterations; "
                "lower --lr or --replay_ratio"
            )

        seconds = self.metrics["wall_s"].diff()
        times = seconds[-3:].median() / seconds.min()
        if times > SLOW and not self.slow:
            self.say(
                f"iterations take {times:.0f} times as long as the fastest one; if other programs "
                f"run, stop with Ctrl-C, then OMP_NUM_THREADS=1 {self.command}"
            )
        self.slow = times > SLOW

    # -- files

    def write_config(self) -> None:
        """Write config.json, the settings of the newest checkpoint, or of a run's beginning."""
        self.write_file("config.json", json.dumps(vars(self.config) | {"resume": ""}, indent=1))

    def write_metrics(self) -> None:
        """Write metrics.csv anew."""
        self.write_file("metrics.csv", self.metrics.to_csv(index=False, float_format="%.8g"))

    def write_file(self, name: str, text: str) -> None:
        """Write a file such that a kill or a reader finds all of it, or what was there before."""
        new = self.folder / f".{name}"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)

    def draw(self) -> None:
        """Draw curve.png and diagnostics.png."""
        path = self.folder / "curve.png"
        episodes = self.metrics["episodes"]
        with drawing(path, self.title, "success", self.baselines) as axes:
            training = self.metrics["train_success"]
            axes.plot(episodes, training, label="training, each iteration", alpha=0.4)
            axes.plot(episodes, self.metrics["eval_success"], "o", label="held-out seeds")

        replay = self.folder / "replay.csv"
        if replay.exists():
            rows = pandas.read_csv(replay, dtype=float)
            diagnostics.plot(self.folder, diagnostics.by_age(rows))


def folder_of(config: Config) -> Path:
    """Return --resume, or --out, or out/<env>-<method>-<seed>, numbered if it is not new."""
    first = config.resume or config.out or f"out/{config.env}-{config.method}-{config.seed}"
    path, number = Path(first), 1
    while path.exists() and not config.resume:
        number += 1
        path = Path(f"{first}-{number}")
    return path


def task(config: Config) -> str:
    """Return the task as plots name it, with the source of its questions."""
    if "data" not in ENVS[config.env].settings:
        return config.env
    return f"{config.env} ({config.data or 'generated questions'})"


# -- means


def baselines(env: TextEnv, n_episodes: int) -> Row:
    """Return the mean success of the random policy on the held-out seeds, and of the optimal policy
    where it is known."""
    return means([env.baselines(EVAL_SEEDS + k) for k in range(n_episodes)])


def means(rows: list[Row]) -> Row:
    """Return the mean of each column over the rows of a table."""
    return pandas.DataFrame(rows).mean().to_dict()


SUMMED_UP = ("success", "reward", "truncated", "invalid", "cut")


def summarize(episodes: list[Episode]) -> Row:
    """Return means over episodes, with the environment's own metrics.

    `turns`: replies per episode. `invalid` and `cut`: shares of all replies."""
    rows = []
    for episode in episodes:
        row = {name: getattr(episode, name) for name in SUMMED_UP}
        row["turns"] = len(episode.turn_rewards)
        rows.append(row | episode.metrics)

    summary = means(rows)
    summary["invalid"] /= summary["turns"]
    summary["cut"] /= summary["turns"]
    return summary


# -- pages


@contextlib.contextmanager
def drawing(path: Path, title: str, ylabel: str, levels: Row) -> Iterator["Axes"]:
    """Write a figure with what the block draws against episodes, the levels of policies, by name,
    as horizontal lines, and the legend below."""
    from matplotlib.figure import Figure  # takes long, and only the end of a run needs it

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="episodes", ylabel=ylabel)
    axes.set_title(title, parse_math=False)  # the name of a file may hold a "$"
    yield axes
    for name, value in levels.items():
        axes.axhline(value, color="black", linestyle=":", label=f"{name} policy: {value:.3f}")
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)


TEMPLATE = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1"><style>
body {font: 16px/1.4 system-ui, sans-serif; max-width: 60em; margin: auto; padding: 0 1em}
img {width: 128px; image-rendering: pixelated}
pre {white-space: pre-wrap; margin: 0 0 .5em}
.sampled {background: #fff3d6}
.won {color: #EA4335}
.lost {color: #666666}
</style><title>{{ title }}</title><h1>{{ title }}</h1>
<p>Held-out episodes: the conversation, with each image before the text of its turn. The policy
sampled what is shaded, and read the rest.
{% if "frozenlake" in title and "preset tiny" in title %}
<p>The fifth row is no part of the lake. It shows the four cells beside the player: left, below,
right and above (dark or #: outside the lake). The shaded edges in an image mark its rows and
columns.
{% endif %}
{% for episode in episodes %}
<h2 class={{ "won" if episode.success else "lost" }}>seed {{ episode.seed }}:
{{ "success" if episode.success else "no success" }}, return {{ "%g" % episode.reward }}</h2>
{% for images, text in parts_of(episode) %}
{% for image in images %}
<img src="data:image/png;base64,{{ image }}">
{% endfor %}
<pre class={{ loop.cycle("read", "sampled") }}>{{ text }}</pre>
{% endfor %}
{% endfor %}
"""
PAGE = jinja2.Template(TEMPLATE, autoescape=True, trim_blocks=True)


def episodes_page(episodes: list[Episode], policy: Policy, title: str) -> str:
    """Return a static page of the first eight episodes."""

    def parts_of(episode: Episode) -> Iterator[tuple[list[str], str]]:
        images = (base64.b64encode(compressed(image).png).decode() for image in episode.images)
        # The parts that were read and those that were sampled take turns.
        ends = np.flatnonzero(np.diff(episode.action_mask)) + 1
        for part in np.split(episode.tokens, ends):
            # Other tokens stand before and behind the placeholders of each image.
            borders = np.diff(part == policy.image_token_id).sum()
            text = policy.tokenizer.decode(part, skip_special_tokens=True)
            yield list(islice(images, borders // 2)), text

    return PAGE.render(title=title, episodes=episodes[:8], parts_of=parts_of)
