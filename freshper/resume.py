"""Nothing is lost: a run that was stopped or killed goes on with the very numbers it would have had.
Not in the paper.

`RunState` gathers everything that shapes what comes next, saves it between two iterations and puts it back:
weights, optimizer and schedule, the buffer, the replay baseline, the rows of metrics.csv, and every random number
generator. Environments need no state between iterations, since every episode is reset with its own seed. What an
engine or a trainer needs it says itself, with `state_dict` and `load_state_dict`.

A checkpoint is written every `save_every` iterations, after `save_minutes`, where held-out success is the best so
far, at the end, and on the first Ctrl-C or SIGTERM, when the iteration is through; a second one ends the run at
once, and what was saved before it stays. The clock of `save_minutes` is monotonic: one that is set forward or back
changes nothing.

On a CPU and with the same number of threads a resumed run is the uninterrupted one bit for bit.
"""

import dataclasses
import os
import random
import signal
import time
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
import transformers

from freshper import checkpoint
from freshper.config import Config
from freshper.episode_files import EpisodeFiles
from freshper.models import Policy
from freshper.report import Report


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. `status` is the exit status that a shell expects: 130 or 143."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


class StopSignals:
    """A context manager in which Ctrl-C and SIGTERM raise `Interrupted`: at once, or, while `graceful`, only noting
    the first one in `received`."""

    def __init__(self) -> None:
        self.graceful, self.received = False, 0

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.graceful or self.received:
            raise Interrupted(number)
        self.received = number
        # not print: the signal may have come in the middle of one
        os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once, without\n")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    """`parts` are the objects that hold state, by name."""

    def __init__(self, config: Config, policy: Policy, report: Report, signals: StopSignals, **parts: Stateful):
        self.config, self.policy, self.report, self.signals = config, policy, report, signals
        self.parts: dict[str, Any] = parts | {"report": report}
        self.episode_files = EpisodeFiles()
        transformers.utils.logging.disable_progress_bar()  # of every save, across ours

    def restore(self) -> None:
        """Put back what --resume found, if anything. From here on a first Ctrl-C waits for the iteration to end."""
        found = self.config.checkpoint
        if found:
            state = checkpoint.read_state(found, self.episode_files)
            checkpoint.adopt(found)
            state["buffer"]["episodes"] = state["episodes"]
            for name, part in self.parts.items():
                if name != "tau" or name in state:  # --override decay may have made it automatic only now
                    part.load_state_dict(state[name])
            self.report.episodes = self.parts["buffer"].newest(self.config.rollout_batch_size)
            restore_vision(self.policy, state["vision"])
            restore_generators(state["generators"])
            self.report.say(f"resuming after iteration {found.done} of {self.config.iterations}")
        self.last_save = time.monotonic()
        self.signals.graceful = True

    def save_if_due(self) -> None:
        """Between two iterations: save where it is time to. Raises Interrupted, having saved, after a signal."""
        done, config = self.report.done, self.config
        finished = done == config.iterations
        minutes = (time.monotonic() - self.last_save) / 60
        best = self.report.best()
        due = bool(config.save_every) and done % config.save_every == 0
        late = bool(config.save_minutes) and minutes >= config.save_minutes
        if due or late or best == done or finished or self.signals.received:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            episodes = state["buffer"].pop("episodes")
            state |= {"config": dataclasses.asdict(config), "generators": generators()}
            state["vision"] = vision(self.policy)
            policy, held = self.parts["trainer"].whole_policy(), (episodes, self.episode_files)
            checkpoint.save(self.report.folder, done, policy, state, best, config.keep_checkpoints, *held)
            self.last_save = time.monotonic()
        if self.signals.received and not finished:
            raise Interrupted(self.signals.received)


def generators() -> dict[str, Any]:
    """The state of the global random number generators: of Python, numpy and torch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def restore_generators(state: dict[str, Any]) -> None:
    """The inverse of `generators`; a GPU's are put back where there is one."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def vision(policy: Policy) -> dict[str, Any]:
    """The cached features of a frozen vision tower, [n, 32] hashes and [sum of placeholders, hidden] numbers. They
    could be computed again, but in other batches, and so on some machines with another last bit."""
    features = policy._features
    return {
        "hashes": np.frombuffer(b"".join(features), np.uint8).reshape(-1, 32),
        "lengths": [len(x) for x in features.values()],
        "features": torch.cat(list(features.values())) if features else torch.zeros(0),
    }


def restore_vision(policy: Policy, state: dict[str, Any]) -> None:
    """The inverse of `vision`: fills the policy's cache."""
    parts = state["features"].to(policy.device).split(state["lengths"]) if state["lengths"] else ()
    policy._features.update((h.tobytes(), x.clone()) for h, x in zip(state["hashes"], parts, strict=True))
