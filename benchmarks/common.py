"""What the benchmarks share. To import this module makes the project importable."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freshper.episode import Episode

# tests/engines/pretrained.py puts it there.
CACHE = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))
SMOLLM2 = CACHE / "SmolLM2-135M-Instruct"


def parser(description):
    """Return a parser that shows a module's docstring as it is."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def print_verdict(met, text):
    print("met   " if met else "MISSED", "", text)


def random_episodes(count, length, vocabulary, prompt):
    """Return episodes of one turn with random tokens, the first `prompt` of which are no
    actions."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (count, length)).astype(np.int32)
    rewards = np.random.default_rng(1).random((count, 1)).astype(np.float32)
    mask = np.arange(length) >= prompt
    logprobs = np.zeros(length, np.float32)
    return [
        Episode(row, mask, logprobs, float(reward[0]), reward)
        for row, reward in zip(tokens, rewards, strict=True)
    ]
