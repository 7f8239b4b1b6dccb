"""docs/tour.py runs from its first cell to its last solution, and docs/tour.md is the page made of it."""

import re
from pathlib import Path

from docs.render_tour import TOUR, cells, prose, render

SOURCE = TOUR.read_text(encoding="utf-8")


def test_every_cell_runs_on_short_runs(tmp_path, monkeypatch):
    """Solutions assert what they claim, so a wrong one fails here."""
    monkeypatch.setenv("TOUR_ITERATIONS", "2")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path / "runs"))
    page = render(SOURCE, tmp_path)
    images = re.findall(r"!\[.+\]\((tour-\d\.png)\)", page)
    assert len(images) == 2
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in images)


def test_the_page_has_the_text_and_code_of_the_tour():
    page = Path(TOUR.parent / "tour.md").read_text(encoding="utf-8")
    assert cells(SOURCE)
    for kind, text in cells(SOURCE):
        assert (prose(text) if kind == "markdown" else text) in page
