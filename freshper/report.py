"""What a run prints and writes: header, progress bar, tables, plots, and a page of episodes. Not in the paper.

    config.json     every setting                          curve.png         success against episodes, as in Fig. 3
    metrics.csv     one row per iteration                  diagnostics.png   staleness by age (freshper/diagnostics.py)
    replay.csv      one row per replayed trajectory        episodes.html     held-out episodes of the last evaluation

Columns of metrics.csv: means over the updates of an iteration; row 0 is the evaluation before training. `eval_*`:
held-out seeds. `invalid`: share of replies that could not be read. `cut`: of replies that --max_new_tokens ended.
`truncated`: of episodes cut by --max_tokens. `mismatch`: mean |engine - trainer log-prob|, with quantiles of the ratio.
`kl`: k3 of pi_mu against pi_theta. `replay_*`, `max_age` (steps) and ESS / n (eq. 5) of trajectories (`ess`) and
tokens: replayed batches as drawn. `rollout_s`: the rest.
"""

import base64
import dataclasses
import fcntl
import html
import io
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from envs.base import EVAL_SEEDS, TextEnv
from freshper import diagnostics
from freshper.buffer import Replay, ReplayBuffer
from freshper.config import Config
from freshper.episode import Episode
from freshper.models import Policy
from freshper.rollout import rollout
from freshper.trainer import TorchTrainer, Update

COLUMNS = """iteration step episodes wall_s train_success train_reward eval_success eval_reward turns invalid cut
truncated mismatch mismatch_p01 mismatch_p99 sync_error loss grad_norm clip_fraction kl nonzero_advantages replay_loss
replay_grad_norm replay_clip_fraction replay_kl replay_nonzero_advantages replay_success replay_age max_age ess
ess_token tau buffer_size lr rollout_s logprobs_s update_s replay_s sync_s""".split()
LEAST_ESS = 0.3  # every run that fell below it over ten iterations failed, none that stayed above 0.45 (docs/log.md)
REPLAY_COLUMNS = (
    "iteration age probability reward tokens log_ratio ratio ratio_sq kl clipped".split()
)


class Report:
    """A context manager around a run. When it closes, everything is on disk."""

    say = staticmethod(tqdm.write)  # print a line above the progress bar

    def __init__(
        self,
        config: Config,
        policy: Policy,
        make_env: Callable[[], TextEnv],
        notes: tuple[str, ...] = (),
    ):
        """Make or take the run's folder, lock it and write config.json. Raises ValueError if that fails."""
        self.config, self.policy, self.folder, self.env = (
            config,
            policy,
            config.folder(),
            make_env(),
        )
        self.notes = notes
        self.done, self.rows = (
            0,
            list[dict[str, Any]](),
        )  # completed iterations, rows of metrics.csv
        self.row: dict[str, Any] = {
            "iteration": 0,
            "step": 0,
            "episodes": 0,
            "wall_s": 0.0,
        }  # the next of them
        self.shown: list[Episode] = []  # of the last evaluation
        self.features: dict[bytes, torch.Tensor] = {}  # of held-out images
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(config.resume))
            self.lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(
                self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # the system's: a crash leaves no lock behind
            self._write(
                "config.json",
                json.dumps(dataclasses.asdict(config) | {"resume": ""}, indent=1) + "\n",
            )
        except OSError as error:
            reason = (
                "another process is writing to it" if isinstance(error, BlockingIOError) else error
            )
            raise ValueError(
                f"the run's folder is {self.folder}, but must be one to write to: {reason}"
            ) from error

    def __enter__(self) -> "Report":
        self.baselines = baselines(self.env, self.config.eval_episodes)
        self.known = ", ".join(
            f"{name} policy {value:.2f}" for name, value in self.baselines.items()
        )
        kind, size = type(self.policy.model).__name__, self.policy.model.num_parameters()
        lines = [
            self.config.title(),
            f"{kind}, {size:,} parameters",
            *self.notes,
            self.env.data_summary(),
        ]
        self.say("\n".join(filter(None, [*lines, f"success on held-out seeds: {self.known}"])))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        reason: object = error
        if isinstance(error, torch.OutOfMemoryError):
            in_rollout = "rollout" in (
                frame.name for frame in traceback.extract_tb(error.__traceback__)
            )
            where = (
                "rollout; lower --rollout_batch_size"
                if in_rollout
                else "training; lower --micro_batch_size"
            )
            reason = f"the GPU's memory ran out in {where}, --max_tokens or --max_new_tokens"
        if error:
            self.say(f"stopped after iteration {self.done}: {reason}")
        if self.done:  # again: between lines of the progress bar it is easily missed
            self._say_if_unread(self.rows[1])
        if last := [success for done, success in self.evaluations().items() if done][-3:]:
            self.say(
                f"held-out success, mean of the last {len(last)} evaluations: {np.mean(last):.2f} ({self.known})"
            )
        try:
            if self.shown:
                self._write(
                    "episodes.html", episodes_page(self.shown, self.policy, self.config.title())
                )
            if self.done:
                metrics = diagnostics.read(self.folder, "metrics.csv")
                training = (
                    metrics,
                    "train_success",
                    {"label": "training, each iteration", "alpha": 0.4},
                )
                held_out = metrics, "eval_success", {"label": "held-out seeds", "marker": "o"}
                plot(
                    self.folder / "curve.png",
                    self.config.title(),
                    "success",
                    [training, held_out],
                    self.baselines,
                )
            if self.done and (self.folder / "replay.csv").exists():
                diagnostics.plot(self.folder, diagnostics.by_age(diagnostics.read(self.folder)))
        except OSError as failure:
            self.say(f"plots and pages could not be written to {self.folder}: {failure}")
            raise
        finally:
            os.close(self.lock)
        self.say(
            f"written to {self.folder}: {', '.join(sorted(path.name for path in self.folder.iterdir()))}"
        )
        if self.done < self.config.iterations:
            self.say(f"continue with: python train.py --resume {self.folder}")

    def evaluations(self) -> dict[int, float]:
        """Return held-out success by completed iterations."""
        return {row["iteration"]: row["eval_success"] for row in self.rows if "eval_success" in row}

    def state_dict(self) -> dict[str, Any]:
        path = self.folder / "replay.csv"
        replayed = path.stat().st_size if path.exists() else 0
        return {"rows": self.rows, "replayed": replayed, "features": self.features}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cut_replayed(state["replayed"])
        self.rows, self.row, self.done = state["rows"], {}, state["rows"][-1]["iteration"]
        self.features = state["features"]

    def _cut_replayed(self, size: int) -> None:
        """Cut off what came after `size` bytes of replay.csv."""
        if size:
            os.truncate(self.folder / "replay.csv", size)
        else:
            (self.folder / "replay.csv").unlink(missing_ok=True)

    def iterations(self) -> Iterator[int]:
        """Yield the numbers of the iterations to come, with a progress bar."""
        if not self.done:  # of a run that starts over
            self._cut_replayed(0)
        self.began = time.perf_counter() - self.rows[-1]["wall_s"]
        self.bar = tqdm(
            range(self.done, self.config.iterations),
            initial=self.done,
            total=self.config.iterations,
        )
        for iteration in self.bar:
            self.began_iteration = time.perf_counter()
            yield iteration

    def log(
        self, episodes: list[Episode], mismatch: dict[str, float], fresh: list[Update],
        replays: list[tuple[Replay, Update]], sync: dict[str, float], trainer: TorchTrainer, buffer: ReplayBuffer,
    ) -> None:  # fmt: skip
        """Gather the row of an iteration after line 12 of Algorithm 1; `evaluate_if_due` completes and writes it."""
        row = {
            name if name in COLUMNS else f"train_{name}": mean
            for name, mean in summarize(episodes).items()
        }
        if not self.done:
            self._say_if_unread(row)
        row |= mismatch | sync | means([update.stats for update in fresh])
        row |= means([self._log_replay(*replay) for replay in replays])
        row |= {
            "iteration": self.done + 1,
            "episodes": self.rows[-1]["episodes"] + len(episodes),
            "step": trainer.step,
        }
        row |= {"buffer_size": len(buffer), "lr": trainer.lr}
        row["tau"] = getattr(buffer.decay, "tau", np.nan)
        row["max_age"] = max((replay.ages.max() for replay, _ in replays), default=np.nan)
        recent = [
            earlier["ess_token"] for earlier in (*self.rows[-9:], row) if "ess_token" in earlier
        ]
        if (
            row["iteration"] % 10 == 0
            and len(recent) == 10
            and (ess := np.mean(recent)) < LEAST_ESS
        ):
            self.say(
                f"ESS / n of replayed tokens is {ess:.2f}, mean of ten iterations; lower --lr or --replay_ratio"
            )
        for phase, updates in (
            ("update_s", fresh),
            ("replay_s", [update for _, update in replays]),
        ):
            row[phase] = sum(update.stats["seconds"] for update in updates)
        others = sum(
            row.get(f"{phase}_s", 0.0) for phase in ("logprobs", "update", "replay", "sync")
        )
        self.row = row | {"rollout_s": time.perf_counter() - self.began_iteration - others}

    def _log_replay(self, replay: Replay, update: Update) -> dict[str, float]:
        """Append a replay update to replay.csv, and return its columns of metrics.csv."""
        same, rewards = np.ones(len(replay.episodes)), np.array([e.reward for e in replay.episodes])
        rows = {
            "iteration": (self.done + 1) * same,
            "age": replay.ages,
            "probability": replay.probabilities,
        }
        rows |= {"reward": rewards} | update.drift
        with open(self.folder / "replay.csv", "a") as file:
            if not file.tell():
                file.write(",".join(REPLAY_COLUMNS) + "\n")
            np.savetxt(file, np.column_stack([rows[name] for name in REPLAY_COLUMNS]), "%.6g", ",")
        drawn = diagnostics.estimate(rows | {"probability": same})
        found = update.stats | {
            "success": float(np.mean([e.success for e in replay.episodes])),
            "age": drawn["age"],
        }
        return {f"replay_{name}": x for name, x in found.items()} | {
            name: drawn[name] for name in ("ess", "ess_token")
        }

    def evaluate_if_due(self, engine: Any, policy: Policy, envs: list[TextEnv]) -> None:
        """Play one episode on each held-out seed if an evaluation is due, and write the row of this iteration."""
        config, row = self.config, self.row
        if not row:  # a resumed run: it was written before the checkpoint
            return
        if row["iteration"] % config.eval_every == 0 or row["iteration"] == config.iterations:
            seeds = [EVAL_SEEDS + k for k in range(config.eval_episodes)]
            state = (
                engine.state_dict()
            )  # an evaluation takes no random number and no image feature from training
            policy._features, self.features = self.features, policy._features
            self.shown = rollout(
                engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens
            )
            policy._features, self.features = self.features, policy._features
            engine.load_state_dict(state)
            row |= {f"eval_{name}": mean for name, mean in summarize(self.shown).items()}
        if self.rows:
            row["wall_s"] = time.perf_counter() - self.began
            self.bar.set_postfix(
                success=row["train_success"], held_out=[*self.evaluations().values()][-1]
            )
        self.rows.append(
            {
                name: x if isinstance(x, int) else float(x)
                for name, x in row.items()
                if not np.isnan(x)
            }
        )
        self.done = row["iteration"]
        columns = COLUMNS + [
            f"{phase}_{name}" for phase in ("train", "eval") for name in self.env.metrics
        ]
        table = [
            columns,
            *([f"{row[name]:.8g}" if name in row else "" for name in columns] for row in self.rows),
        ]
        self._write("metrics.csv", "".join(",".join(line) + "\n" for line in table))

    def _say_if_unread(self, first: dict[str, Any]) -> None:
        """Print a line if no reply of the first iteration, with this row, could be read."""
        if first["invalid"] == 1:
            self.say(
                f"no reply of the first batch could be read, {first['cut']:.0%} were cut by --max_new_tokens"
            )

    def _write(self, name: str, text: str) -> None:
        """Write a file such that a kill leaves all of it or what was there before."""
        new = self.folder / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.folder / name)


def means(table: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each column over the rows of a table."""
    return {
        name: float(np.mean([row[name] for row in table])) for name in (table[0] if table else ())
    }


def summarize(episodes: list[Episode]) -> dict[str, float]:
    """Return means over episodes, of the environment's own metrics too, and the shares of `invalid` and cut replies."""
    turns = sum(len(e.turn_rewards) for e in episodes)
    each = [
        {"success": e.success, "reward": e.reward, "truncated": e.truncated} | e.metrics
        for e in episodes
    ]
    shares = {name: sum(getattr(e, name) for e in episodes) / turns for name in ("invalid", "cut")}
    return means(each) | {"turns": turns / len(episodes)} | shares


def baselines(env: TextEnv, episodes: int) -> dict[str, float]:
    """Return the mean success of the `random` policy on the held-out seeds and, if known, of the `optimal` one."""
    return means([env.baselines(EVAL_SEEDS + k) for k in range(episodes)])


def plot(
    path: Path, title: str, ylabel: str, lines: list[tuple], baselines: dict[str, float]
) -> None:
    """Draw lines against episodes, each a metrics.csv, its column and a style, and the baselines; legend below."""
    names = [style["label"] for *_, style in lines if "label" in style]
    figure = matplotlib.figure.Figure(figsize=(8, 4.8 + 0.15 * len(names)), layout="constrained")
    axes = figure.subplots()
    for metrics, column, style in lines:
        there = ~np.isnan(metrics[column])
        axes.plot(metrics["episodes"][there], metrics[column][there], **style)
    for (name, value), style in zip(baselines.items(), (":", "--"), strict=False):
        axes.axhline(value, color="black", linestyle=style, label=f"{name} policy: {value:.3f}")
    axes.set(xlabel="episodes", ylabel=ylabel, title=title)
    figure.legend(
        loc="outside lower center", ncols=max(1, 80 // max(24, *map(len, names))), frameon=False
    )
    figure.savefig(path, dpi=120)


STYLE = """body{font:15px sans-serif;max-width:70em;margin:auto} td{width:50%;vertical-align:top}
img{width:128px;image-rendering:pixelated} pre,ruby{white-space:pre-wrap} ruby{background:#fff3d6;padding:0 3px}"""


def episodes_page(episodes: list[Episode], policy: Policy, title: str) -> str:
    """Return a static page of the first eight episodes, turn by turn: the observation, and beside it the sampled reply
    with the engine's log-prob above each token. All text is escaped."""
    title, decode = html.escape(title), policy.tokenizer.decode
    page = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><title>{title}</title><h1>{title}</h1>"
    page += "Held-out episodes. Right: the sampled tokens, each below its log-prob."
    for e in episodes[:8]:
        page += f"<h2>seed {e.seed}: {'success' if e.success else 'no success'}, return {e.reward:g}</h2><table>"
        images, ends = iter(e.images), e.turn_ends() + 1
        turns = [
            np.split(values, ends)[:-1] for values in (e.tokens, e.action_mask, e.behavior_logprobs)
        ]
        for tokens, sampled, logprobs, reward in zip(*turns, e.turn_rewards, strict=True):
            is_image = (tokens == policy.image_token_id) & ~sampled
            page += "<tr><td>"
            for _ in range(
                int((np.diff(is_image, prepend=False) & is_image).sum())
            ):  # runs of placeholders
                Image.fromarray(np.asarray(next(images))).save(stream := io.BytesIO(), "PNG")
                page += f'<img src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}">'
            text = decode(tokens[~is_image & ~sampled], skip_special_tokens=True).strip()
            page += f"<pre>{html.escape(text)}</pre><td>"
            for token, logprob in zip(tokens[sampled], logprobs[sampled], strict=True):
                page += f"<ruby>{html.escape(decode([token]))}<rt>{logprob:.2f}</rt></ruby>"
            page += f"<p>reward {reward:g}"
        page += "</table>"
    return page + "\n"
