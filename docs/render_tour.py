"""Run docs/tour.py cell by cell and write what came out: docs/tour.md, with its figures as
docs/tour-<n>.png.

    python docs/render_tour.py [--out FOLDER]

Cells are those of the percent format (`# %%`), which editors open as a notebook: `# %% [markdown]`
is text, `# %% solution` is code that the page folds away. What a cell prints stands below it, and
so do its figures.
"""

import argparse
import contextlib
import io
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TOUR = Path(__file__).parent / "tour.py"


def cells(source: str) -> list[tuple[str, str]]:
    """Return (kind, text) of each cell. The kind is "markdown", "solution" or "" (code)."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(kind.strip(" []"), text.strip()) for kind, text in pairs]


def prose(text: str) -> str:
    return re.sub(r"^# ?", "", text, flags=re.MULTILINE)


def render(source: str, out: Path) -> str:
    """Return the page as Markdown, with its figures in `out`. An error in a cell goes on to the
    caller."""
    page = []
    names = {"__name__": "tour"}
    figures = 0
    for kind, text in cells(source):
        if kind == "markdown":
            page.append(prose(text))
            continue

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(TOUR), "exec"), names)
        block = [f"```python\n{text}\n```"]
        if printed.getvalue():
            block.append(f"```text\n{printed.getvalue().rstrip()}\n```")

        for number in plt.get_fignums():
            figures += 1
            figure = plt.figure(number)
            figure.savefig(out / f"tour-{figures}.png", dpi=80)
            block.append(f"![{figure.get_suptitle()}](tour-{figures}.png)")
        plt.close("all")

        if kind == "solution":
            block = ["<details><summary>Solution</summary>", *block, "</details>"]
        page += block
    return "\n\n".join(page) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make docs/tour.md by running docs/tour.py.")
    parser.add_argument("--out", type=Path, default=TOUR.parent)
    out = parser.parse_args().out

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {out}, but must be a folder that can be made: {error.strerror}")

    page = render(TOUR.read_text(encoding="utf-8"), out)
    (out / "tour.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
