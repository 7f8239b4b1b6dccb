"""docs/tour.py runs as a notebook from its first cell to its last solution, and docs/tour.ipynb and
docs/tour.md are made of it."""

import re

import jupytext
import nbformat
import pytest

from docs.render_tour import TOUR, main

CELLS = jupytext.read(TOUR).cells


def test_every_cell_runs_on_short_runs(tmp_path, monkeypatch):
    """Solutions assert what they claim, so a wrong one fails here."""
    monkeypatch.setenv("TOUR_ITERATIONS", "2")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path / "runs"))
    out = tmp_path / "not/yet/there"
    monkeypatch.setattr("sys.argv", ["render_tour.py", "--out", str(out)])
    main()
    page = (out / "tour.md").read_text(encoding="utf-8")
    images = re.findall(r"!\[.+\]\((tour-\d\.png)\)", page)
    assert len(images) == 2
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in images)
    assert page.count("\nage 48.0\n") == 1  # printed by a cell
    nbformat.validate(nbformat.read(out / "tour.ipynb", as_version=4))


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["render_tour.py", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        main()
    assert "file, but must be a folder that can be made: File exists" in capsys.readouterr().err


def test_the_notebook_and_the_page_have_the_text_and_code_of_the_tour():
    file = TOUR.with_suffix(".ipynb")
    notebook = nbformat.read(file, as_version=4)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in CELLS]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert file.stat().st_size <= 1_000_000

    page = TOUR.with_suffix(".md").read_text(encoding="utf-8")
    assert all(cell.source in page for cell in CELLS)
