"""What ends a run: errors with one sentence, signals. Anything else is a defect, with its
traceback."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Self, TextIO

import torch

STOPPING = b"""
stopping after this iteration, with a checkpoint; once more stops at once, without
"""


class NonFiniteError(ArithmeticError):
    """A log-prob, loss, gradient or reward is not finite. Names the phase and the episode's
    seed."""


class BackendError(RuntimeError):
    """vLLM or DeepSpeed failed, or vLLM has other weights than the trainer. Names the phase."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. `status` is the exit status that a shell expects: 130 or 143."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


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
    """A context around a run that says with which `status` the program ends: 0 done, 1 a backend, a
    disk or a server failed, 2 bad input, 3 numbers that are not finite, 130 Ctrl-C, 143 SIGTERM.

    Ctrl-C and SIGTERM raise `Interrupted`. While a run is `training`, the first one is noted in
    `signal`, and the run ends after its iteration."""

    status = 0
    training = False
    signal = 0  # the number of the first one

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self.handle)
            # The end of the context restores the handler.
            self.callback(signal.signal, number, before)
        self.enter_context(contextlib.redirect_stdout(Unbreakable(sys.stdout)))
        self.enter_context(contextlib.redirect_stderr(Unbreakable(sys.stderr)))
        return self

    def handle(self, number: int, frame: object) -> None:
        if self.signal or not self.training:
            raise Interrupted(number)
        self.signal = number
        # `print` may fail here, in the middle of another one. The pipe may be broken, too.
        with contextlib.suppress(OSError):
            os.write(2, STOPPING)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        match error:
            case Interrupted():
                self.status = error.status
            case NonFiniteError():
                self.status = 3
            case ValueError() | OSError() | BackendError() if not self.training:
                print(f"train.py: error: {error}", file=sys.stderr)
                self.status = 2
            case OSError() | BackendError() | torch.OutOfMemoryError():
                self.status = 1  # the report has printed the error
        super().__exit__(kind, error, trace)
        return self.status > 0


class Unbreakable:
    """A stream whose failures end no run: a broken pipe, a full disk, a closed file."""

    def __init__(self, stream: TextIO | None):
        # Python sets a stream to None if it was closed from the start.
        self.stream = stream or open(os.devnull, "w")  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal has every character

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()
