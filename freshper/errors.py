"""What ends a run: errors with one sentence, signals. Anything else is a defect, with its
traceback."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

STOPPING = b"""
stopping after this iteration, with a checkpoint; once more stops at once, without
"""


class NonFiniteError(ArithmeticError):
    """A log-prob, loss, gradient or reward is not finite. Names the phase and the episode's
    seed."""


class BackendError(OSError):
    """vLLM or DeepSpeed failed, or vLLM has other weights than the trainer. Names the phase."""


@contextlib.contextmanager
def phase(name: str, errors: type[Exception]) -> Iterator[None]:
    """Raise BackendError, with the phase's name, for `errors` of vLLM or torch.distributed in the
    block."""
    try:
        yield
    except (BackendError, NonFiniteError, torch.OutOfMemoryError):
        # The report has a sentence for each.
        raise
    except errors as error:
        reason = " ".join(str(error).split())[:300]
        raise BackendError(f"{name} failed: {type(error).__name__}: {reason}") from error


class Ending(contextlib.ExitStack):
    """A context around a run, or a comparison, that says with which `status` the `program` ends: 0
    done, 1 a backend, a disk or a server failed in training, 2 bad input, such a failure before
    training, or a run of a comparison failed, 3 numbers that are not finite, 130 Ctrl-C, 143
    SIGTERM.

    Ctrl-C and SIGTERM raise KeyboardInterrupt. While a run is `training`, the first one is noted in
    `signal`, and the run ends after its iteration."""

    program = "train.py"
    status = 0
    training = False
    signal = 0  # the number of the last one

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self.handle)
            # The end of the context restores the handler.
            self.callback(signal.signal, number, before)
        return self

    def handle(self, number: int, frame: object) -> None:
        at_once = self.signal or not self.training
        self.signal = number
        if at_once:
            raise KeyboardInterrupt("interrupted")
        # `print` may fail here, in the middle of another one. The pipe may be broken, too.
        with contextlib.suppress(OSError):
            os.write(2, STOPPING)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        super().__exit__(kind, error, trace)
        match error:
            case KeyboardInterrupt():
                self.status = 128 + self.signal
            case NonFiniteError():
                self.status = 3
            case ValueError() | OSError() if not self.training:
                print(f"{self.program}: error: {error}", file=sys.stderr)
                self.status = 2
            case OSError() | torch.OutOfMemoryError():
                self.status = 1  # the report has printed the error
        return self.status > 0


def protect_output() -> None:
    """Let no output end this program, if it cannot be written: a broken pipe, a full disk, a closed
    file. A character that the terminal does not have becomes "?"."""

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
