"""What a run prints and shows: rows, pages, figures and sentences. Not in the paper.

docs/runs.md says what the columns of metrics.csv mean. Replayed batches are measured as drawn, not
weighted by 1 / P(i). A batch has an ESS / n of at least 1 / B, so compare `ess` between runs of one
--batch_size only.
"""

import base64
import contextlib
import resource
import shlex
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

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
from freshper.run import Row, Run, write
from freshper.trainer import TorchTrainer, Update

# Every run whose mean of ten iterations fell below it failed (docs/log.md).
MIN_ESS = 0.3

# -- what is printed


@contextlib.contextmanager
def narrated(run: Run, policy: Policy) -> Iterator[None]:
    """Print before the block what will run, and after it how it ended. Then draw the figures."""
    config = run.config
    env = run.envs[0]
    levels = policy_levels(env, config.eval_episodes)
    levels_text = ", ".join(f"{name} policy {value:.2f}" for name, value in levels.items())
    run.say(title(config))
    run.say(f"{type(policy.model).__name__}, {policy.model.num_parameters():,} parameters")
    run.say(f"backend {config.backend} on {config.device}, threads {torch.get_num_threads()}")
    for split, rows in env.rows.items():
        run.say(f"{split}: {len(rows)} rows of {config.data}")
    run.say(f"success on held-out seeds: {levels_text}")
    if not run.saved:
        run.say(f"the policy is evaluated on {config.eval_episodes} of them before it is trained")

    try:
        yield
    except BaseException as error:
        run.say(f"stopped after iteration {run.done}: {error}")
        raise
    finally:
        last = run.metrics["eval_success"][1:].dropna()[-3:]
        if len(last):
            of = f"mean of the last {len(last)} evaluations" if len(last) > 1 else "last evaluation"
            run.say(f"held-out success, {of}: {last.mean():.2f} ({levels_text})")
        if run.done:
            try:
                draw(run, levels)
            except OSError as failure:
                run.say(f"figures could not be written to {run.folder}: {failure}")
        # Otherwise a new folder is removed.
        if not run.metrics.empty:
            run.say(f"written to {run.folder}, with at most {peak_memory():.1f} GB of memory")
            if run.done < config.iterations:
                command = f"python train.py --resume {shlex.quote(str(run.folder))}"
                run.say(f"continue with: {command} --iterations {config.iterations}")


def watched(run: Run, ending: Ending) -> Iterator[int]:
    """Yield the numbers of the iterations to come, with a progress bar, until a signal ends them.
    Say what a user should know of each."""
    total = run.config.iterations
    bar = tqdm(ending.iterations(run.done, total), initial=run.done, total=total)
    for iteration in bar:
        yield iteration
        metrics = run.metrics
        evaluation = metrics["eval_success"].dropna().iloc[-1]
        bar.set_postfix(success=metrics["train_success"].iloc[-1], held_out=evaluation)
        for sentence in warnings(metrics):
            run.say(sentence)


def warnings(metrics: pandas.DataFrame) -> Iterator[str]:
    """Yield what a user should know of the last iteration in metrics.csv."""
    done = len(metrics) - 1
    last = metrics.iloc[-1]
    if done == 1 and last["invalid"] == 1:
        yield (
            "no reply of the first batch could be read, "
            f"{last['cut']:.0%} were cut by --max_new_tokens"
        )

    ess = metrics["ess_token"][-10:].mean()
    if done % 10 == 0 and ess < MIN_ESS:
        yield (
            f"ESS / n of replayed tokens is {ess:.2f}, mean of ten iterations; "
            "lower --lr or --replay_ratio"
        )


def title(config: Config) -> str:
    """Return a run's title on its pages."""
    return f"{task(config)}, {config.method}, preset {config.preset}, seed {config.seed}"


def task(config: Config) -> str:
    """Return the task as plots name it, with the source of its questions."""
    if "data" not in ENVS[config.env].settings:
        return config.env
    return f"{config.env} ({config.data or 'generated questions'})"


# -- means


def policy_levels(env: TextEnv, n_episodes: int) -> Row:
    """Return the mean success of the random policy on the held-out seeds, and of the optimal policy
    where it is known."""
    return means([env.policy_levels(EVAL_SEEDS + k) for k in range(n_episodes)])


def means(rows: list[Row]) -> Row:
    """Return the mean of each column over the rows of a table."""
    return pandas.DataFrame(rows).mean().to_dict()


def columns_of(
    episodes: list[Episode],
    fresh: list[Update],
    replays: list[tuple[Replay, Update]],
    trainer: TorchTrainer,
    buffer: ReplayBuffer,
) -> Row:
    """Return columns of metrics.csv after the updates of an iteration."""
    played = summarize(episodes)
    row = {
        **{f"train_{name}": mean for name, mean in played.items()},
        **{name: played[name] for name in ("turns", "invalid", "cut", "truncated")},
        "tokens": sum(len(episode.tokens) for episode in episodes),
        "step": trainer.step,
        "lr": trainer.lr,
        "buffer_size": len(buffer),
        "update_s": sum(update.stats["seconds"] for update in fresh),
        "replay_s": sum(update.stats["seconds"] for _, update in replays),
        **means([update.stats for update in fresh]),
    }
    if replays:
        row |= means([replay_columns(*replay) for replay in replays])
    return row


def peak_memory() -> float:
    """Return the most memory so far in GB: torch's on a GPU, else that of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)


def replay_columns(drawn: Replay, update: Update) -> Row:
    """Return the columns of a replay update, measured as drawn."""
    rows = pandas.DataFrame({"age": drawn.ages, "probability": 1.0, **update.drift})
    estimate = diagnostics.estimate(rows)
    return {
        "replay_success": np.mean([episode.outcome["success"] for episode in drawn.episodes]),
        "replay_age": estimate["age"],
        "ess": estimate["ess"],
        "ess_token": estimate["ess_token"],
        **{f"replay_{name}": value for name, value in update.stats.items()},
    }


def evaluation(run: Run, engine: Engine) -> Row:
    """Evaluate the policy on the held-out seeds, write the page of its episodes, and return the
    columns of the evaluation."""
    episodes = evaluate(engine, run.envs, run.config)
    write(run.folder / "episodes.html", episodes_page(run.config, engine.policy, episodes))
    return {f"eval_{name}": mean for name, mean in summarize(episodes).items()}


def summarize(episodes: list[Episode]) -> Row:
    """Return means over episodes of return and outcome, with the environment's own metrics.

    `turns`: replies per episode. `invalid` and `cut`: shares of all replies."""
    rows = [episode.outcome | {"reward": episode.reward} for episode in episodes]
    summary = means(rows)
    summary["invalid"] /= summary["turns"]
    summary["cut"] /= summary["turns"]
    return summary


# -- pages


def draw(run: Run, levels: Row) -> None:
    """Draw curve.png and diagnostics.png from the tables of a run."""
    config = run.config
    episodes = run.metrics["episodes"]
    with drawing(run.folder / "curve.png", title(config), "success", levels) as axes:
        training = run.metrics["train_success"]
        axes.plot(episodes, training, label="training, each iteration", alpha=0.4)
        axes.plot(episodes, run.metrics["eval_success"], "o", label="held-out seeds")

    replay = run.folder / "replay.csv"
    if not replay.exists():
        return
    try:
        rows = pandas.read_csv(replay, dtype=float, usecols=diagnostics.COLUMNS).dropna()
    # It may have been damaged since it was written.
    except ValueError as error:
        return run.say(f"{replay} cannot be read: {error}")
    expected = run.done * config.replay_ratio * config.batch_size
    if len(rows) != expected:
        run.say(f"{replay} has {len(rows)} rows, but {expected} were replayed")
    diagnostics.plot(run.folder, diagnostics.by_age(rows))


@contextlib.contextmanager
def drawing(path: Path, title: str, ylabel: str, levels: Row) -> Iterator[Any]:
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
<h2 class={{ "won" if episode.outcome.success else "lost" }}>seed {{ episode.seed }}:
{{ "success" if episode.outcome.success else "no success" }}, return
{{ "%g" % episode.reward }}</h2>
{% for images, text in parts_of(episode) %}
{% for image in images %}
<img src="data:image/png;base64,{{ image }}">
{% endfor %}
<pre class={{ loop.cycle("read", "sampled") }}>{{ text }}</pre>
{% endfor %}
{% endfor %}
"""
PAGE = jinja2.Template(TEMPLATE, autoescape=True, trim_blocks=True)


def episodes_page(config: Config, policy: Policy, episodes: list[Episode]) -> str:
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

    return PAGE.render(title=title(config), episodes=episodes[:8], parts_of=parts_of)
