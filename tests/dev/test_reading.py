"""The reading edition: its links resolve, it loads nothing from elsewhere, and it shows every line of code."""

import ast
import html
import re

import pytest

import docs.build
from docs.build import ROOT, SOURCES, Edition, build


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    build(out := tmp_path_factory.mktemp("reading"))
    return {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}


def test_links_resolve_and_formulas_are_mathml(pages):
    anchors = {name: re.findall(r' id="([^"]+)"', page) for name, page in pages.items()}
    for name, page in pages.items():
        assert len(anchors[name]) == len(set(anchors[name])), name
        for link in re.findall(r'<[^>]* (?:href|src)="?([^"> ]+)', page):
            target, _, anchor = link.partition("#")
            assert link.startswith("https://") or target in pages, f"{name}: {link}"
            assert not anchor or anchor in anchors[target], f"{name}: {link}"
    for formula in re.findall(r"<math.*?</math>", pages["index.html"], re.DOTALL):
        assert "\\" not in html.unescape(
            formula
        )  # a command that the converter does not know stays as it is


def test_all_code_is_shown_and_functions_stand_together(pages):
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        blocks = re.findall(r"</div><pre>(.*?)</pre></section>", pages[f"{module}.html"], re.DOTALL)
        shown = [html.unescape(re.sub(r"<[^>]+>", "", block)) for block in blocks]
        text, docstrings = path.read_text(encoding="utf-8"), set()
        tree = ast.parse(text)
        methods = [
            node for owner in tree.body if isinstance(owner, ast.ClassDef) for node in owner.body
        ]
        for node in (
            tree,
            *tree.body,
            *methods,
        ):  # the docstring of a function in a function is shown as code
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and ast.get_docstring(node) is not None
            ):
                docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        lines = [
            line
            for n, line in enumerate(text.splitlines(), 1)
            if n not in docstrings and line.strip()
        ]
        assert [line for block in shown for line in block.splitlines() if line.strip()] == lines, (
            path
        )
        if module == "train":
            (loop,) = (block for block in shown if "for iteration in" in block)
            assert all(f"# {n}: " in loop for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12))


def test_a_wrong_symbol_or_number_stops_the_build(tmp_path, monkeypatch):
    table = docs.build.TABLE.read_text(encoding="utf-8")
    monkeypatch.setattr(docs.build, "TABLE", tmp_path / "table.md")
    docs.build.TABLE.write_text(table.replace("sumtree.SumTree", "sumtree.Tree"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"sumtree\.Tree is not in the code"):
        Edition()
    docs.build.TABLE.write_text(table, encoding="utf-8")
    assert Edition().link("eq. 13") == '<a href="index.html#eq:age_decay">eq. 13</a>'
    for wrong in ("eq. 40", "Table 7", "appendix G.1", "Algorithm 1 line 14", "section 3.6"):
        with pytest.raises(ValueError, match=f"cites {wrong}, which"):
            Edition().link(wrong)
