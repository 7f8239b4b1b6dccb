"""What a run leaves behind and what its user sees: progress bar, metrics.csv, curve.png, episodes.html, checkpoint.

Not in the paper, but for the curve (freshper/pages.py) and what replay.csv is for, section 3.3.

    out/config.json     every setting            out/curve.png       success against episodes, with baselines
    out/metrics.csv     one row an iteration     out/episodes.html   a few episodes, turn by turn
    out/replay.csv      one row a replayed trajectory (see freshper/diagnostics.py), and diagnostics.png of them
    out/checkpoint/     the policy and all that `--resume` needs (freshper/checkpoint.py)

Rows are written as they come; the rest when the run ends, also when it is interrupted or fails. A run that is
resumed goes on behind the rows of its checkpoint; later ones are cut off and come again.

No log grows without an end: metrics.csv takes about 0.3 kB an iteration; replay.csv at most REPLAY_ROWS rows (40 MB),
those of every n-th iteration in a run that would have more of them. Neither is kept in memory.

Columns of metrics.csv: `step` optimizer steps; `episodes` collected so far; `train_*` of this iteration's
episodes, `eval_*` on held-out seeds (empty where not evaluated), the environment's own `metrics` among them;
`invalid` share of unreadable replies;
`mismatch` mean |engine - trainer log-prob|, `mismatch_p01` and `mismatch_p99` quantiles of the ratio trainer / engine
over action tokens; `sync_error` the largest difference over a fixed probe, with vLLM, where proven;
`grad_norm`, `clip_fraction` (ratios cut by the PPO clip), `kl`
(k3 of pi_mu against pi_theta) of the on-policy update; `replay_*` means over the K replay updates, where
`replay_age` is in the unit of `--age_unit`, `tau` the estimate of `--tau auto`, `replay_success` the share of successes
drawn and `replay_nonzero_advantages` the share of their action tokens that carry any gradient; `mean_age` over the
buffer.
"""

import contextlib
import csv
import dataclasses
import fcntl
import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from envs.base import EVAL_SEEDS
from freshper import diagnostics
from freshper.backends import BackendError
from freshper.buffer import Replay, ReplayBuffer
from freshper.checkpoint import write_whole
from freshper.config import Config
from freshper.episode import Episode, NonFiniteError
from freshper.models import Policy
from freshper.pages import episodes_page, plot
from freshper.rollout import summarize
from freshper.trainer import TorchTrainer

COLUMNS = """
iteration step episodes wall_s train_success train_reward eval_success eval_reward turns invalid
mismatch mismatch_p01 mismatch_p99 sync_error
loss grad_norm clip_fraction kl nonzero_advantages replay_loss replay_grad_norm replay_clip_fraction replay_kl
replay_nonzero_advantages replay_success replay_age tau buffer_size mean_age lr
""".split()

REPLAY_ROWS = 500_000
REPLAY_COLUMNS = "iteration age probability reward tokens log_ratio ratio ratio_sq kl clipped".split()


def baselines(config: Config) -> dict[str, float]:
    """Mean success of the random player on the held-out seeds and, where the environment knows it, the optimal."""
    env = config.make_env()
    known = [env.baselines(EVAL_SEEDS + k) for k in range(config.eval_episodes)]
    return {name: float(np.mean([b[name] for b in known])) for name in known[0]}


class Report:
    """A context manager around the run: everything is on disk when it closes."""

    def __init__(self, config: Config, policy: Policy):
        """Makes the folder, or takes that of --resume. Raises ValueError where it cannot be written to or another
        process is writing to it."""
        self.config, self.policy, self.folder = config, policy, config.folder()
        settings = dataclasses.asdict(config) | {"resume": "", "override": []}
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(config.resume))
            self.lock = _lock(self.folder)
            try:
                write_whole(self.folder / "config.json", json.dumps(settings, indent=1) + "\n")
            except OSError:
                os.close(self.lock)
                raise
        except OSError as error:
            raise ValueError(
                f"--{'resume' if config.resume else 'out'} is {self.folder}, but must be a folder that "
                f"can be written to: {error}"
            ) from error
        self.file: Any = None  # metrics.csv, once it is open
        self.replay_file: Any = None  # replay.csv, likewise
        self.iteration = 0
        self.values: dict[str, list[float]] = defaultdict(list)
        self.done, self.collected, self.wall_s = 0, 0, 0.0  # iterations, episodes, seconds
        self.recent: deque[float] = deque(maxlen=10)  # success in training
        self.evaluations: list[tuple[int, float]] = []  # after how many iterations, held-out success
        self.rows = ""  # of metrics.csv at the checkpoint that is resumed
        self.baselines: dict[str, float] = {}
        self.episodes: list[Episode] = []

    def __enter__(self) -> "Report":
        env = self.config.make_env()
        self.metrics = env.metrics
        self.baselines = baselines(self.config)
        parameters = sum(p.numel() for p in self.policy.model.parameters())
        if self.config.reason:
            self.say(f"preset {self.config.preset}: {self.config.reason}")
        self.say(f"{self.title()}: {type(self.policy.model).__name__}, {parameters:,} parameters")
        players = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
        how = "exactly" if env.has_exact_baselines() else "one game each"
        self.say(f"players on the {self.config.eval_episodes} held-out seeds, {how}: success {players}")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.say(str(error) or "interrupted")
        elif error:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            name = "" if isinstance(error, NonFiniteError | OSError | BackendError) else f"{type(error).__name__}: "
            self.say(f"stopped in iteration {self.iteration}: {name}{error}{notes}")
        try:
            self._write_pages()
        except OSError as failure:
            self.say(f"curves and pages could not be written to {self.folder}/: {failure}")
            if error is None:
                raise
        os.close(self.lock)
        self.say(f"written to {self.folder}/: {', '.join(sorted(p.name for p in self.folder.iterdir()))}")
        if self.done < self.config.iterations:
            self.say(f"go on with: python train.py --resume {self.folder}")

    def _write_pages(self) -> None:
        if self.file:
            self.file.close()
            if self.replay_file:
                self.replay_file.close()
                diagnostics.plot(self.folder)
        if self.done:
            metrics = diagnostics.read(self.folder, "metrics.csv")
            plot(metrics, self.baselines, self.title(), self.folder / "curve.png")
            write_whole(self.folder / "episodes.html", episodes_page(self.episodes, self.policy, self.title()))

    def state_dict(self) -> dict[str, Any]:
        """With all rows of metrics.csv, so that a run goes on from its checkpoint alone."""
        self.file.seek(0)
        _, _, rows = self.file.read().partition("\n")
        kept = {"recent": list(self.recent), "evaluations": self.evaluations, "rows": rows}
        return {"done": self.done, "wall_s": self.wall_s, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.wall_s, self.rows = state["done"], state["wall_s"], state["rows"]
        self.collected = int(self.rows.splitlines()[-1].split(",")[COLUMNS.index("episodes")])
        self.recent.extend(state["recent"])
        self.evaluations = [(done, success) for done, success in state["evaluations"]]

    def best(self) -> int:
        """After how many iterations held-out success was highest (the first time); 0 before the first evaluation."""
        return max(self.evaluations, key=lambda evaluation: evaluation[1])[0] if self.evaluations else 0

    def _start_metrics(self) -> None:
        """metrics.csv with the rows so far, open for more."""
        columns = COLUMNS + [f"{phase}_{name}" for phase in ("train", "eval") for name in self.metrics]
        write_whole(self.folder / "metrics.csv", ",".join(columns) + "\n" + self.rows)
        self.file = (self.folder / "metrics.csv").open("a+", newline="")
        if self.config.replay_ratio:
            self._start_replay(self.folder / "replay.csv")
        self.writer = csv.DictWriter(self.file, columns, restval="", lineterminator="\n")
        self.began, self.rows = time.perf_counter() - self.wall_s, ""

    def _start_replay(self, path: Path) -> None:
        """replay.csv with the rows of the iterations so far, as far as they are there, open for more."""
        kept = [",".join(REPLAY_COLUMNS) + "\n"]
        if self.done and path.is_file():
            with path.open() as file:
                rows = [line for line in list(file)[1:] if line.endswith("\n")]  # a kill cuts the last one anywhere
            kept += [row for row in rows if int(row.partition(",")[0]) < self.done]
        write_whole(path, "".join(kept))
        self.replay_file = path.open("a", newline="")

    def progress(self) -> Iterator[int]:
        """The numbers of the iterations to come, with a progress bar."""
        self._start_metrics()
        done, total = self.done, self.config.iterations
        self.bar = tqdm(range(done, total), initial=done, total=total, unit="it", dynamic_ncols=True)
        for iteration in self.bar:
            self.iteration = iteration
            self.values.clear()
            yield iteration

    def add(self, stats: dict[str, float]) -> None:
        """Numbers of this iteration; several of a name are averaged."""
        for name, value in stats.items():
            self.values[name].append(value)

    def add_replay(self, replay: Replay, stats: dict[str, float], drift: dict[str, np.ndarray]) -> None:
        """Numbers of one replay update, and of each trajectory in it."""
        own = {
            "iteration": [self.iteration] * len(replay.episodes),
            "age": replay.ages,
            "probability": replay.probabilities,
            "reward": [e.reward for e in replay.episodes],
        }
        columns = own | {name: np.round(values, 6) for name, values in drift.items()}
        rows = zip(*(columns[name] for name in REPLAY_COLUMNS), strict=True)
        in_all = self.config.iterations * self.config.replay_ratio * self.config.batch_size
        if self.iteration % math.ceil(in_all / REPLAY_ROWS) == 0:
            with self._logging():
                csv.writer(self.replay_file, lineterminator="\n").writerows(rows)
        drawn = {"success": np.mean([e.info["success"] for e in replay.episodes]), "age": replay.ages.mean()}
        self.add({f"replay_{name}": float(value) for name, value in (stats | drawn).items()})

    def evaluation_due(self) -> bool:
        done = self.iteration + 1
        return done % self.config.eval_every == 0 or done == self.config.iterations

    def evaluated(self, episodes: list[Episode]) -> None:
        """Take note of games on held-out seeds."""
        summary = summarize(episodes, self.metrics)
        self.add({f"eval_{name}": summary[name] for name in ("success", "reward", *self.metrics)})

    def end_iteration(self, trainer: TorchTrainer, episodes: list[Episode], buffer: ReplayBuffer) -> None:
        """Write the row of this iteration and move the bar."""
        self.episodes = episodes
        self.collected += len(episodes)
        self.wall_s = round(time.perf_counter() - self.began, 2)
        fresh = summarize(episodes, self.metrics)
        row = {name: round(float(np.mean(values)), 6) for name, values in self.values.items()}
        row |= {
            "iteration": self.iteration,
            "step": trainer.step,
            "episodes": self.collected,
            "wall_s": self.wall_s,
            "train_success": round(fresh["success"], 4),
            "train_reward": round(fresh["reward"], 4),
            "turns": round(fresh["turns"], 3),
            "invalid": round(fresh["invalid"], 4),
            **{f"train_{name}": round(fresh[name], 4) for name in self.metrics},
            "buffer_size": len(buffer),
            "mean_age": round(float(buffer.ages().mean()), 2),
            "lr": trainer.optimizer.param_groups[0]["lr"],
        }
        with self._logging():
            self.writer.writerow(row)
            self.file.flush()
            if self.config.replay_ratio:
                self.replay_file.flush()
        self.done = self.iteration + 1
        self.recent.append(row["train_success"])
        if "eval_success" in row:
            self.evaluations.append((self.done, row["eval_success"]))
        held_out = f"held-out {self.evaluations[-1][1]:.2f} " if self.evaluations else ""
        self.bar.set_postfix_str(
            f"success {np.mean(self.recent):.2f} {held_out}"
            f"reward {row['train_reward']:.2f} buffer {len(buffer)} age {row['mean_age']:.0f}"
        )

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        """An OSError that says what could not be written: a full disk does not name the file."""
        try:
            yield
        except OSError as error:
            raise OSError(f"metrics.csv or replay.csv could not be written in {self.folder}/: {error}") from error

    def title(self) -> str:
        c = self.config
        return f"{c.task()}, {c.method}, preset {c.preset}, seed {c.seed}"

    @staticmethod
    def say(line: str) -> None:
        tqdm.write(line)


def _lock(folder: Path) -> int:
    """A handle that keeps other processes out of a run's folder for as long as it is open. Raises OSError where
    another has it. The lock is the operating system's: a crash leaves nothing behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OSError("another process is writing to it") from error
    return handle
