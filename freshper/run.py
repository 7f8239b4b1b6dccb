"""The folder of a run: who may write there, what lies there, where it goes on. Not in the paper.

    config.json        every setting
    metrics.csv        one row per iteration; row 0 is the evaluation before training
    replay.csv         one row per replayed trajectory
    checkpoint/        freshper/checkpoint.py
    curve.png          success against episodes, as in Fig. 3
    diagnostics.png    staleness by age (freshper/diagnostics.py)
    episodes.html      held-out episodes of the last evaluation

freshper/report.py makes the rows and the pages, docs/runs.md says what the columns mean.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import filelock
import pandas
from tqdm import tqdm

from envs.base import TextEnv, UserError
from freshper import checkpoint
from freshper.buffer import Replay
from freshper.checkpoint import Parts, Saved
from freshper.config import Config
from freshper.flags import MAY_CHANGE, parse_args
from freshper.trainer import Update

Row = dict[str, Any]  # numbers by the name of their column
COLUMNS = """iteration step episodes wall_s train_success train_reward eval_success eval_reward
turns invalid cut truncated tokens mismatch loss grad_norm clip_fraction kl nonzero_advantages
replay_loss replay_grad_norm replay_clip_fraction replay_kl replay_nonzero_advantages
replay_success replay_age ess ess_token buffer_size lr rollout_s logprobs_s update_s replay_s
sync_s""".split()


class Run:
    """The settings and environments of a run, and a context in which this process alone writes to
    its folder.

    Entering makes the folder, or takes that of --resume. Leaving removes a new folder to which no
    row was written. Raises UserError if the folder cannot be made, or is in use."""

    say = staticmethod(tqdm.write)  # print a line above the progress bar

    def __init__(self, config: Config, envs: list[TextEnv], argv: list[str] | None = None):
        env = envs[0]
        self.config = config
        self.envs = envs
        self.argv = argv  # the command line of the config
        self.folder = folder_of(config)
        self.made_with = vars(config) | {"resume": "", "data_sha256": hash_of(env)}
        names = [f"{split}_{name}" for name in env.metrics for split in ("train", "eval")]
        self.metrics = pandas.DataFrame(columns=[*COLUMNS, *names], dtype=float)

    def __enter__(self) -> Self:
        # The system holds the lock, so that a crash leaves none behind.
        self.lock = filelock.FileLock(self.folder / ".lock", timeout=0)
        with may_fail(self.folder):
            self.folder.mkdir(parents=True, exist_ok=bool(self.config.resume))
            self.lock.acquire()

        if not self.config.resume:
            self.write_config()
        return self

    def __exit__(self, *error: object) -> None:
        if self.metrics.empty and not self.config.resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.release()

    @cached_property
    def saved(self) -> Saved | None:
        """The newest whole checkpoint, None if there is none yet. Raises UserError if it was made
        with other settings or rows of --data, if all are damaged, or if another process has changed
        config.json."""
        # The settings were read before this process had the lock.
        if self.config.resume and parse_args(self.argv) != self.config:
            raise UserError(f"{self.folder} has other settings now: start again")
        saved = checkpoint.find_saved(self.config.resume)
        if saved:
            compare(self.made_with, saved.made_with)
        return saved

    def restore(self, parts: Parts) -> bool:
        """Give the parts the state of the newest checkpoint, cut the tables after it, and write the
        settings that --resume changes.

        Returns whether there is one. Raises UserError if it is not one of this run, or has more
        iterations than --iterations."""
        saved = self.saved
        if saved:
            checkpoint.load(saved, parts | {"metrics": self})
            if self.done > self.config.iterations:
                raise UserError(
                    f"--iterations is {self.config.iterations}, but {self.done} are done"
                )
            if saved.damage:
                self.say(
                    f"the newest checkpoint is damaged ({saved.damage}): the one before is used"
                )
                # The next save would rename it to checkpoint-before, in the place of the whole one.
                shutil.rmtree(self.folder / "checkpoint")
            self.say(f"resuming after iteration {self.done} of {self.config.iterations}")
            self.write_metrics()
            self.began = time.perf_counter() - self.metrics["wall_s"].iloc[-1]
        elif self.config.resume:
            self.say(f"there is no checkpoint in {self.folder} yet: the run starts over")

        self.write_config()
        replay = self.folder / "replay.csv"
        if replay.exists():
            text = replay.read_text(errors="replace")
            rows, _, _ = text.partition(f"\n{self.done + 1},")
            write(replay, f"{rows.rstrip()}\n".lstrip())
        return bool(saved)

    def log(self, iteration: int, row: Row, replays: Sequence[tuple[Replay, Update]] = ()) -> None:
        """Write the rows of an iteration: the replayed trajectories to replay.csv, then the row of
        metrics.csv."""
        for drawn, update in replays:
            columns = {
                "iteration": iteration,
                "age": drawn.ages,
                "probability": drawn.probabilities,
                "reward": [episode.reward for episode in drawn.episodes],
            }
            rows = pandas.DataFrame(columns | update.drift)
            with may_fail(self.folder), open(self.folder / "replay.csv", "a") as file:
                rows.to_csv(file, header=not file.tell(), index=False, float_format="%.6g")

        now = time.perf_counter()
        if iteration == 0:
            self.began = now
        episodes = iteration * self.config.rollout_batch_size
        first = {"step": 0, "iteration": iteration, "episodes": episodes}
        row = first | row | {"wall_s": now - self.began}
        self.metrics.loc[iteration] = pandas.Series(row)
        self.write_metrics()

    def save(self, parts: Parts) -> None:
        """Write a checkpoint of the parts."""
        checkpoint.save(self.folder, parts | {"metrics": self}, self.made_with)

    @property
    def done(self) -> int:
        """Return the number of completed iterations."""
        return max(0, len(self.metrics) - 1)

    def state_dict(self) -> Row:
        return {"rows": self.metrics.to_dict("records")}

    def load_state_dict(self, state: Row) -> None:
        self.metrics = pandas.DataFrame(state["rows"], dtype=float)[self.metrics.columns]

    # -- files

    def write_config(self) -> None:
        """Write config.json."""
        settings = vars(self.config) | {"resume": ""}
        write(self.folder / "config.json", json.dumps(settings, indent=1))

    def write_metrics(self) -> None:
        """Write metrics.csv anew."""
        write(self.folder / "metrics.csv", self.metrics.to_csv(index=False, float_format="%.8g"))


def write(path: Path, text: str) -> None:
    """Write a file such that a kill or a reader finds all of it, or what was there before.

    Raises UserError if the disk does not take it."""
    new = path.with_name(f".{path.name}")
    with may_fail(path.parent):
        new.write_bytes(text.encode())
        new.replace(path)


@contextlib.contextmanager
def may_fail(folder: Path) -> Iterator[None]:
    """Raise UserError if the system cannot write to a folder in the block."""
    try:
        yield
    except filelock.Timeout as error:
        raise UserError(f"{folder} is in use by another process") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error


def compare(now: Row, then: Row) -> None:
    """Raise UserError if a checkpoint was made with other settings, or rows of --data."""
    for name in now.keys() - {"out", *MAY_CHANGE}:
        if now[name] != then.get(name):
            raise UserError(f"{name} is {now[name]}, but {then.get(name)} in the checkpoint")


def folder_of(config: Config) -> Path:
    """Return --resume, or --out, or out/<env>-<method>-<seed>, numbered if it is not new."""
    first = config.resume or config.out or f"out/{config.env}-{config.method}-{config.seed}"
    path, number = Path(first), 1
    while path.exists() and not config.resume:
        number += 1
        path = Path(f"{first}-{number}")
    return path


def hash_of(env: TextEnv) -> str:
    """Return a hash of the rows of --data, which a resumed run must have, too."""
    sums = hashlib.sha256()
    for rows in env.rows.values():
        for row in rows:
            sums.update(repr(row).encode())
    return sums.hexdigest()
