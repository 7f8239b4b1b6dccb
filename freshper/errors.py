"""The errors that end a run with one sentence. Anything else is a defect, with its traceback."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

# The longest wait for vLLM or another rank, in seconds
timeout = os.environ.get("FRESHPER_TIMEOUT", "1800")
if not timeout.isdecimal() or int(timeout) == 0:
    sys.exit(f"FRESHPER_TIMEOUT is {timeout}, but must be a whole number of seconds above 0")
TIMEOUT = int(timeout)


class NonFiniteError(ArithmeticError):
    """A log-prob, loss, gradient or reward is not finite. Names the phase and the episode's
    seed."""


class BackendError(RuntimeError):
    """vLLM or DeepSpeed failed, or did not answer in time. Names the phase."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. `status` is the exit status that a shell expects: 130 or 143."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


@contextlib.contextmanager
def watched(
    phase: str, processes: Mapping[int, str] = {}, errors: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Raise BackendError, naming the phase, if the block raises one of `errors`, if it takes longer
    than TIMEOUT, or if one of `processes` (id -> name) dies.

    A thread watches, and signals the main thread. If that does not react within ten seconds, as
    inside NCCL, the process prints the sentence and exits."""
    deadline = time.monotonic() + TIMEOUT
    over = threading.Event()
    main = threading.get_ident()

    def problem() -> str:
        for pid, name in processes.items():
            if not alive(pid):
                return f"{name} (process {pid}) died in {phase}"
        if time.monotonic() > deadline:
            return f"{phase} took longer than FRESHPER_TIMEOUT, {TIMEOUT:g} s"
        return ""

    def watch() -> None:
        while not over.wait(0.5):
            if problem():
                signal.pthread_kill(main, signal.SIGUSR1)
                if not over.wait(10.0):
                    print(f"\nstopped: {problem()}", file=sys.stderr, flush=True)
                    os._exit(1)

    def interrupt(*_: object) -> None:
        if not over.is_set():
            raise BackendError(problem())

    # The handler stays, and does nothing after the block.
    signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except torch.OutOfMemoryError:
        # The report says which flags to lower.
        raise
    except errors as error:
        # A process that ends closes its connections first.
        time.sleep(1.0)
        reason = " ".join(str(error).split())[:300]
        failed = f"{phase} failed: {type(error).__name__}: {reason}"
        raise BackendError(problem() or failed) from error
    finally:
        over.set()


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
