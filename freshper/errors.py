"""What ends a run: a sentence to the user, or a signal. Any other exception is a bug and keeps its
traceback.

`UserError` (envs/base.py) is a sentence to the user. What may go wrong outside of this code is
turned into one where it happens: at a file, a server, a backend, the folder of a model."""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from envs.base import UserError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # they may reach a whole group
STOPPING = b"""
stopping after this iteration, with a checkpoint; Ctrl-C twice stops at once, without one
"""


class NonFiniteError(UserError):
    """A log-prob, loss, gradient or reward is not finite. Names the phase and the episode's
    seed."""


class BackendError(UserError):
    """vLLM or DeepSpeed failed, or vLLM has other weights than the trainer. Names the phase."""


@contextlib.contextmanager
def phase(name: str, errors: type[Exception]) -> Iterator[None]:
    """Raise BackendError, with the phase's name, for `errors` of vLLM or torch.distributed in the
    block."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except errors as error:
        raise BackendError(f"{name} failed: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """Return in one line what went wrong, and the last place in this code, or a fork's, that led
    there."""
    reason = " ".join(str(error).split())[:300]
    if isinstance(error, UserError):
        return reason
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    place = (ours or frames)[-1]  # an installed copy is there, too
    return f"{type(error).__name__}: {reason} ({place.filename}:{place.lineno})"


class Ending(contextlib.ExitStack):
    """A context around a run, or a comparison, that says with which `status` the `program` ends: 0
    done, 1 a backend, a disk, a server or the GPU's memory failed in training, 2 bad input, or such
    a failure before training, 3 numbers that are not finite, 128 + its number after a signal
    (Ctrl-C: 130).

    Ctrl-C, SIGTERM and a closed terminal (SIGHUP) raise KeyboardInterrupt once, a second Ctrl-C
    again. While a run is `training`, the first is only noted in `signal`: the iteration is
    completed and saved, and no other begins."""

    program = "train.py"
    status = 0
    training = False
    signal = 0  # the number of the one that ends the run
    stopping = False  # whether the loop has seen it

    def __enter__(self) -> Self:
        for number in SIGNALS:
            before = signal.getsignal(number)
            # nohup has ignored the end of the terminal.
            if number != signal.SIGHUP or before != signal.SIG_IGN:
                signal.signal(number, self.handle)
                # The end of the context restores the handler.
                self.callback(signal.signal, number, before)
        return self

    def handle(self, number: int, frame: object) -> None:
        first = not self.signal
        twice = number == self.signal == signal.SIGINT
        if first or number == signal.SIGINT:
            self.signal = number
        if twice or (first and not self.training):
            raise KeyboardInterrupt("interrupted")
        if first:
            # `print` may fail here, in the middle of another one. The pipe may be broken, too.
            with contextlib.suppress(OSError):
                os.write(2, STOPPING)

    def iterations(self, done: int, total: int) -> Iterator[int]:
        """Yield the numbers of the iterations to come, none after `must_stop` was true."""
        self.training = True
        for iteration in range(done + 1, total + 1):
            if self.stopping:
                raise KeyboardInterrupt("interrupted")
            yield iteration

    def must_stop(self) -> bool:
        """Return whether a signal has come, so that this iteration is the last."""
        self.stopping = self.signal > 0
        return self.stopping

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        super().__exit__(kind, error, trace)
        match error:
            case KeyboardInterrupt():
                self.status = 128 + self.signal
            case NonFiniteError():
                self.status = 3
            case UserError() | torch.OutOfMemoryError():
                self.status = 1  # `narrated` has printed the error
                if not self.training:
                    print(f"{self.program}: error: {error}", file=sys.stderr)
                    self.status = 2
        return self.status > 0


def protect_output() -> None:
    """Go on if a line cannot be printed, because a pipe is broken, a disk is full, or a file is
    closed. A character that the terminal does not have is printed as "?"."""

    def forgiving(call: Callable) -> Callable:
        def attempt(*arguments: Any) -> Any:
            with contextlib.suppress(OSError, ValueError):
                return call(*arguments)

        return attempt

    for name in ("stdout", "stderr"):
        # Python sets a stream to None if it was closed from the start.
        stream: Any = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):  # not a notebook's
            stream.reconfigure(errors="replace")  # not every terminal has every character
        stream.write = forgiving(stream.write)
        stream.flush = forgiving(stream.flush)
        setattr(sys, name, stream)
