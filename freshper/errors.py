"""The errors that end a run with one sentence. Anything else is a defect, with its traceback."""

import contextlib
import signal
from collections.abc import Iterator

import torch


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
