"""What a run prints and writes: header, progress bar, and tables. Not in the paper.

    config.json        every setting
    metrics.csv        one row per iteration
    replay.csv         one row per replayed trajectory
    curve.png          success against episodes, as in Fig. 3
    diagnostics.png    staleness by age (freshper/diagnostics.py)
    episodes.html      held-out episodes of the last evaluation

freshper/evaluation.py plays held-out episodes, freshper/pages.py draws curve.png and episodes.html.

Columns of metrics.csv: means over the updates of an iteration; row 0 is the evaluation before
training. `train_*` is of the policy before the updates of its row, `eval_*` (held-out seeds) after
them. `invalid`: share of replies that could not be read. `cut`: of replies that --max_new_tokens
ended. `truncated`: of episodes cut by --max_tokens. `mismatch`: mean |engine - trainer log-prob|,
with quantiles of the ratio. `kl`: k3 of pi_mu against pi_theta, 0 in the first epoch, as is
`clip_fraction`. `nonzero_advantages`: share of action tokens whose advantage is not 0. `replay_*`,
`max_age` (steps), `ess` and `ess_token` (ESS / n of trajectories and of tokens, eq. 5): replayed
batches as drawn, not weighted by 1 / P(i). A batch has an ESS / n of at least 1 / B, so compare
`ess` between runs of one --batch_size only. `tau`: that of --tau auto, for the next draws.
`rollout_s`: the iteration's remaining time. `wall_s` has evaluations and checkpoints, too.
"""

import csv
import fcntl
import io
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from envs.base import TextEnv
from freshper import diagnostics
from freshper.buffer import Replay, ReplayBuffer
from freshper.config import Config
from freshper.episode import Episode
from freshper.evaluation import Row, baselines, evaluate, means, summarize
from freshper.models import Policy
from freshper.pages import write_pages
from freshper.rollout import Engine
from freshper.trainer import TorchTrainer, Update

COLUMNS = """iteration step episodes wall_s train_success train_reward eval_success eval_reward
turns invalid cut truncated mismatch mismatch_p01 mismatch_p99 sync_error loss grad_norm
clip_fraction kl nonzero_advantages replay_loss replay_grad_norm replay_clip_fraction replay_kl
replay_nonzero_advantages replay_success replay_age max_age ess ess_token tau buffer_size lr
rollout_s logprobs_s update_s replay_s sync_s""".split()
# Every run whose mean of ten iterations fell below it failed. None that stayed above 0.45 did
# (docs/log.md).
LEAST_ESS = 0.3


@dataclass
class Report:
    """A context manager around a run. When it closes, everything is on disk.

    It makes or takes the run's folder, locks it and writes config.json. Raises ValueError if that
    fails."""

    config: Config
    policy: Policy
    env: TextEnv  # one of the run's, for its baselines, data and metrics
    notes: tuple[str, ...] = ()  # what else to print at the start

    say = staticmethod(tqdm.write)  # print a line above the progress bar

    def __post_init__(self) -> None:
        self.folder = self.config.folder()
        self.done = 0  # completed iterations
        self.rows: list[Row] = []  # of metrics.csv
        # The next row.
        self.row: Row = {"iteration": 0, "step": 0, "episodes": 0, "wall_s": 0.0}
        self.replayed = 0  # bytes of replay.csv
        self.held_out: list[Episode] = []  # of the last evaluation
        self.features: dict = {}  # of held-out images, by key

        settings = vars(self.config) | {"resume": ""}
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(self.config.resume))
            # The system holds the lock, so that a crash leaves none behind.
            self.lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write("config.json", json.dumps(settings, indent=1) + "\n")

        except OSError as error:
            busy = "another process is writing to it"
            reason = busy if isinstance(error, BlockingIOError) else error
            allowed = f"one to write to: {reason}"
            raise ValueError(f"the run's folder is {self.folder}, but must be {allowed}") from error

    def __enter__(self) -> "Report":
        self.baselines = baselines(self.env, self.config.eval_episodes)
        self.baseline_text = ", ".join(
            f"{name} policy {value:.2f}" for name, value in self.baselines.items()
        )

        model = self.policy.model
        lines = [
            self.config.title(),
            f"{type(model).__name__}, {model.num_parameters():,} parameters",
            *self.notes,
            self.env.data_summary(),
            f"success on held-out seeds: {self.baseline_text}",
        ]
        self.say("\n".join(filter(None, lines)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error:
            self.say(f"stopped after iteration {self.done}: {reason_of(error)}")
        if self.done:
            # The line is printed again, because it is easily missed beside the progress bar.
            self._warn_if_unread()

        last = [success for done, success in self.evaluations().items() if done][-3:]
        if last:
            mean = f"{np.mean(last):.2f} ({self.baseline_text})"
            self.say(f"held-out success, mean of the last {len(last)} evaluations: {mean}")

        try:
            if self.rows:
                title = self.config.title()
                write_pages(self.folder, title, self.baselines, self.held_out, self.policy)
        except OSError as failure:
            self.say(f"plots and pages could not be written to {self.folder}: {failure}")
            raise
        finally:
            os.close(self.lock)

        names = sorted(os.listdir(self.folder))
        self.say(f"written to {self.folder}: {', '.join(names)}")
        if self.done < self.config.iterations:
            self.say(f"continue with: python train.py --resume {self.folder}")

    def evaluations(self) -> dict[int, float]:
        """Return held-out success by completed iterations."""
        return {row["iteration"]: row["eval_success"] for row in self.rows if "eval_success" in row}

    # -- a checkpoint's part of the report

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "replayed": self.replayed, "features": self.features}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises OSError if replay.csv lacks rows of it."""
        self.replayed = state["replayed"]
        path = self.folder / "replay.csv"
        if self.replayed and (size := path.stat().st_size) < self.replayed:
            raise OSError(f"{path} has {size} bytes, but must have at least {self.replayed}")

        self.features = state["features"]
        self.rows = state["rows"]
        self.done = self.rows[-1]["iteration"]
        self.row = {}  # the checkpoint was saved after its row was written

    # -- an iteration

    def iterations(self) -> Iterator[int]:
        """Yield the numbers of the iterations to come, with a progress bar."""
        # The tables have the rows of the checkpoint, no more: a killed run may have written others.
        self._write_metrics()
        path = self.folder / "replay.csv"
        if self.replayed:
            os.truncate(path, self.replayed)
        else:
            path.unlink(missing_ok=True)

        self.began = time.perf_counter() - self.rows[-1]["wall_s"]
        total = self.config.iterations
        self.bar = tqdm(range(self.done, total), initial=self.done, total=total)
        for iteration in self.bar:
            self.began_iteration = time.perf_counter()
            yield iteration

    def log(
        self,
        episodes: list[Episode],
        mismatch: Row,
        fresh: list[Update],
        replays: list[tuple[Replay, Update]],
        sync: Row,
        trainer: TorchTrainer,
        buffer: ReplayBuffer,
    ) -> None:
        """Gather the row of an iteration after line 12 of Algorithm 1.

        `evaluate_if_due` completes and writes it."""
        row = {
            "iteration": self.done + 1,
            "step": trainer.step,
            "episodes": self.rows[-1]["episodes"] + len(episodes),
            "lr": trainer.lr,
            "buffer_size": len(buffer),
            "tau": getattr(buffer.decay, "tau", np.nan),
            "update_s": sum(update.stats["seconds"] for update in fresh),
            "replay_s": sum(update.stats["seconds"] for _, update in replays),
            **mismatch,
            **sync,
            **means([update.stats for update in fresh]),
        }

        if replays:
            row.update(means([self._log_replay(*replay) for replay in replays]))
            row["max_age"] = max(drawn.ages.max() for drawn, _ in replays)
        for name, mean in summarize(episodes).items():
            row[name if name in COLUMNS else f"train_{name}"] = mean

        measured = sum(seconds for name, seconds in row.items() if name.endswith("_s"))
        row["rollout_s"] = time.perf_counter() - self.began_iteration - measured
        self.row = row

    def _log_replay(self, drawn: Replay, update: Update) -> Row:
        """Append a replay update to replay.csv, and return its columns of metrics.csv."""
        ones = np.ones(len(drawn.episodes))
        # This is the order of the columns of replay.csv.
        rows = {
            "iteration": (self.done + 1) * ones,
            "age": drawn.ages,
            "probability": drawn.probabilities,
            "reward": np.array([episode.reward for episode in drawn.episodes]),
            **update.drift,
        }

        with open(self.folder / "replay.csv", "a") as file:
            if not file.tell():
                file.write(",".join(rows) + "\n")
            np.savetxt(file, np.column_stack(list(rows.values())), "%.6g", ",")
            self.replayed = file.tell()

        as_drawn = diagnostics.estimate(rows | {"probability": ones})
        return {
            "replay_success": np.mean([episode.success for episode in drawn.episodes]),
            "replay_age": as_drawn["age"],
            "ess": as_drawn["ess"],
            "ess_token": as_drawn["ess_token"],
            **{f"replay_{name}": value for name, value in update.stats.items()},
        }

    def evaluate_if_due(self, engine: Engine, envs: list[TextEnv]) -> None:
        """Evaluate on the held-out seeds if it is due, and write the row of this iteration."""
        row = self.row
        if not row:
            return

        done = row["iteration"]
        if done % self.config.eval_every == 0 or done == self.config.iterations:
            self.held_out = evaluate(engine, self.policy, envs, self.config, self.features)
            for name, mean in summarize(self.held_out).items():
                row[f"eval_{name}"] = mean

        self.rows.append(row)
        self.done = done
        if done:
            row["wall_s"] = time.perf_counter() - self.began
            *_, held_out = self.evaluations().values()
            self.bar.set_postfix(success=row["train_success"], held_out=held_out)
        self._write_metrics()
        if done == 1:
            self._warn_if_unread()
        if done % 10 == 0:
            self._warn_if_stale()

    # -- lines and files

    def _warn_if_unread(self) -> None:
        """Print a line if no reply of the first iteration could be read."""
        first = self.rows[1]
        if first["invalid"] == 1:
            cut = f"{first['cut']:.0%} were cut by --max_new_tokens"
            self.say(f"no reply of the first batch could be read, {cut}")

    def _warn_if_stale(self) -> None:
        """Print a line if ESS / n of replayed tokens was low over the last ten iterations."""
        ess = np.mean([row.get("ess_token", np.nan) for row in self.rows[-10:]])
        if ess < LEAST_ESS:
            mean = f"ESS / n of replayed tokens is {ess:.2f}, mean of ten iterations"
            self.say(f"{mean}; lower --lr or --replay_ratio")

    def _write_metrics(self) -> None:
        """Write metrics.csv anew."""
        columns = [*COLUMNS]
        for name in self.env.metrics:
            columns += [f"train_{name}", f"eval_{name}"]
        text = io.StringIO()
        table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for row in self.rows:
            cells = {name: f"{value:.8g}" for name, value in row.items() if not np.isnan(value)}
            table.writerow(cells)
        self._write("metrics.csv", text.getvalue())

    def _write(self, name: str, text: str) -> None:
        """Write a file such that a kill leaves all of it or what was there before."""
        new = self.folder / f".{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)


def reason_of(error: BaseException) -> object:
    """Return the error that ended a run, or which flags to lower if the GPU's memory ran out."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    place = "training; lower --micro_batch_size"
    if any(frame.name == "rollout" for frame in traceback.extract_tb(error.__traceback__)):
        place = "rollout; lower --rollout_batch_size"
    return f"the GPU's memory ran out in {place}, --max_tokens or --max_new_tokens"
