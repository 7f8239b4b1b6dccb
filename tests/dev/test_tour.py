"""docs/tour.py runs as a notebook, and docs/tour.ipynb is made of it."""

from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).parents[2] / "docs/tour.py"


def test_every_cell_runs_on_short_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TOUR_ITERATIONS", "4")
    monkeypatch.setenv("TOUR_OUT", str(tmp_path))
    notebook = jupytext.read(TOUR)
    place = {"metadata": {"path": TOUR.parent}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_notebook_has_the_text_and_code_of_the_tour_and_ran_without_warnings():
    notebook = nbformat.read(TOUR.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    tour = [cell.source for cell in jupytext.read(TOUR).cells]
    assert [cell.source for cell in notebook.cells] == tour
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or cell.execution_count
        assert all(output.get("name") != "stderr" for output in cell.get("outputs", []))
