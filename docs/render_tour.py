"""Run docs/tour.py as a notebook, and write it as docs/tour.ipynb and as docs/tour.md, with its
figures as docs/tour-<n>.png.

    python docs/render_tour.py [--out FOLDER]

jupytext reads the cells of the percent format (`# %%`), and a Jupyter kernel runs them
(requirements-dev.txt has both). `# %% [markdown]` is text, `# %% solution` is code that the page
folds away. What a cell prints stands below it, and so do its figures.
"""

import argparse
import base64
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TOUR = Path(__file__).parent / "tour.py"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def execute(source: Path) -> NotebookNode:
    """Return the executed notebook. An error in a cell goes on to the caller."""
    notebook = jupytext.read(source)
    notebook.metadata = NotebookNode(kernelspec=KERNEL)
    for number, cell in enumerate(notebook.cells):
        # The ids of jupytext are random.
        cell.id = f"cell-{number}"

    # It starts where a notebook starts, in its own folder.
    place = {"metadata": {"path": source.parent}}
    client = NotebookClient(notebook, timeout=None, resources=place, record_timing=False)
    client.execute()
    for cell in notebook.cells:
        # Warnings of libraries name folders of this machine.
        outputs = cell.get("outputs", [])
        outputs[:] = [output for output in outputs if output.get("name") != "stderr"]
    return notebook


def markdown(notebook: NotebookNode, out: Path) -> str:
    """Return the page, with its figures in `out`. A figure is described by the heading above it."""
    page = []
    heading = ""
    figures = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            page.append(cell.source)
            heading = cell.source.splitlines()[0].lstrip("# ")
            continue

        block = [f"```python\n{cell.source}\n```"]
        printed = "".join(output.get("text", "") for output in cell.outputs)
        if printed:
            block.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                figures += 1
                image = base64.b64decode(output.data["image/png"])
                (out / f"tour-{figures}.png").write_bytes(image)
                block.append(f"![{heading}](tour-{figures}.png)")

        if cell.metadata.get("title") == "solution":
            block = ["<details><summary>Solution</summary>", *block, "</details>"]
        page += block
    return "\n\n".join(page) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make docs/tour.ipynb and docs/tour.md.")
    parser.add_argument("--out", type=Path, default=TOUR.parent)
    out = parser.parse_args().out

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {out}, but must be a folder that can be made: {error.strerror}")

    notebook = execute(TOUR)
    nbformat.write(notebook, out / "tour.ipynb")
    (out / "tour.md").write_text(markdown(notebook, out), encoding="utf-8")


if __name__ == "__main__":
    main()
