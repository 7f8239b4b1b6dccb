"""docs/tour.py runs from its first cell to its last solution, and docs/tour.md is a page made of it."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
SOURCE = (DOCS / "tour.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tour():
    sys.path.insert(0, str(DOCS))
    import render_tour

    yield render_tour
    sys.path.remove(str(DOCS))


def code_blocks(page):
    return re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)


def test_every_cell_runs_on_short_runs(tour, tmp_path, monkeypatch):
    """Solutions assert what they claim, so a wrong one fails here."""
    monkeypatch.setenv("TOUR_ITERATIONS", "3")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path / "runs"))
    page = tour.render(SOURCE, tmp_path)
    code = [text for kind, text in tour.cells(SOURCE) if kind != "markdown"]
    assert code_blocks(page) == code
    images = re.findall(r"!\[(.+)\]\((tour-\d\.png)\)", page)
    assert len(images) == 3
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for _, name in images)
    assert "episodes" in page.split("```text")[1]


def test_every_exercise_has_a_solution(tour):
    kinds = [kind for kind, _ in tour.cells(SOURCE)]
    titles = re.findall(r"^# ### Exercise (\d+)$", SOURCE, re.MULTILINE)
    assert titles == [str(n + 1) for n in range(8)]
    assert kinds.count("solution") == 8
    after = [kind for (_, before), kind in zip(tour.cells(SOURCE), kinds[1:], strict=False) if "### Exercise" in before]
    assert after == ["solution"] * 8


def test_the_page_is_of_this_tour(tour):
    """Same prose and code; made by long runs; with its pictures, which are small."""
    page = (DOCS / "tour.md").read_text(encoding="utf-8")
    assert code_blocks(page) == [text for kind, text in tour.cells(SOURCE) if kind != "markdown"]
    for kind, text in tour.cells(SOURCE):
        assert kind != "markdown" or tour.prose(text) in page
    iterations = int(re.search(r'TOUR_ITERATIONS", "(\d+)"', SOURCE)[1])
    episodes = 32 * iterations
    assert page.count(f" {episodes} episodes, {3 * iterations} updates") == 2
    for name in re.findall(r"\]\((tour-\d\.png)\)", page):
        assert (DOCS / name).stat().st_size < 100_000
