"""One setting of the C library that doubles the training speed on a CPU."""

import ctypes
import sys


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory: giving activations back at every step halves the speed on a CPU."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for parameter, value in ((trim_threshold, 2**31 - 1), (top_pad, 2**28), (mmap_threshold, 2**30)):
            mallopt(parameter, value)
