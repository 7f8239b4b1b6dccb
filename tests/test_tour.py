"""docs/tour.py runs from its first cell to its last solution, and docs/tour.md is the page made of
it."""

import re
from pathlib import Path

import pytest

from docs.render_tour import TOUR, cells, main, prose

SOURCE = TOUR.read_text(encoding="utf-8")


def test_every_cell_runs_on_short_runs(tmp_path, monkeypatch):
    """Solutions assert what they claim, so a wrong one fails here."""
    monkeypatch.setenv("TOUR_ITERATIONS", "2")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path / "runs"))
    out = tmp_path / "not/yet/there"
    monkeypatch.setattr("sys.argv", ["render_tour.py", "--out", str(out)])
    main()
    images = re.findall(r"!\[.+\]\((tour-\d\.png)\)", (out / "tour.md").read_text(encoding="utf-8"))
    assert len(images) == 2
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in images)


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["render_tour.py", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        main()
    assert "file, but must be a folder that can be made: File exists" in capsys.readouterr().err


def test_the_page_has_the_text_and_code_of_the_tour():
    page = Path(TOUR.parent / "tour.md").read_text(encoding="utf-8")
    assert cells(SOURCE)
    for kind, text in cells(SOURCE):
        assert (prose(text) if kind == "markdown" else text) in page
