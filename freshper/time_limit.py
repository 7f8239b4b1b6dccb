"""An end to every wait for an environment: a step that takes too long is broken off with a sentence.

Not in the paper. What hangs is most often a service behind an environment or a game that never ends, and a run of
days must not stand still unseen. The run ends rather than the episode: what an environment holds after a step that
was cut in the middle, nobody knows, and an episode that the clock truncated would be trained on as the policy's
failure. `--resume` goes on from the last checkpoint, `--override env_timeout` with another limit.

The clock is the kernel's interval timer: a step costs four system calls (7 microseconds) and no thread. Python sees
its signal between two bytecodes: a wait, a sleep, a regular expression or a loop in Python are cut off, a C function
that never returns is not.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Overdue(BaseException):
    """Raised wherever the main thread is when time is up. Not an Exception: an environment that catches those, to
    ask its service once more, must not catch this."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise Overdue


@contextlib.contextmanager
def alarm(handler: Callable[[int, FrameType | None], None], seconds: float, every: float = 0.0) -> Iterator[None]:
    """Call `handler` in the main thread once the block has taken so long, and then again `every` so many seconds (0:
    not again). Afterwards SIGALRM is what it was; two such blocks must not overlap."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, every)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def limited(seconds: float, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What `call` returns. Raises TimeoutError where that takes longer than `seconds`; 0: no limit. In the main
    thread only, and no other use of SIGALRM meanwhile."""
    if not seconds:
        return call(*arguments, **keywords)
    try:
        with alarm(_ring, seconds):
            return call(*arguments, **keywords)
    except Overdue:
        raise TimeoutError(f"the environment took longer than the {seconds:g} s of --env_timeout") from None
