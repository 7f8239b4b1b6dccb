"""What the benchmarks share. To import this module makes the project importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def print_verdict(met, text):
    print("met   " if met else "MISSED", "", text)
