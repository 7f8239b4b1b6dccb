"""The solutions of docs/exercises.md that need no run print what the page says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/exercises.md"


def test_solutions_print_what_the_page_says():
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False)
    assert failed == 0 < attempted
