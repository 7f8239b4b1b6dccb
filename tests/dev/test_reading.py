"""The reading edition: its links resolve, it loads nothing from elsewhere, and it shows every line
of code."""

import ast
import html
import re

import pytest

import docs.build
from docs.build import SOURCES, Edition, build, module_name


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp("reading")
    build(out)
    return {path.name: path.read_text(encoding="utf-8") for path in out.iterdir()}


def test_links_resolve_and_formulas_are_mathml(pages):
    anchors = {name: re.findall(r' id="([^"]+)"', page) for name, page in pages.items()}
    for name, page in pages.items():
        assert len(anchors[name]) == len(set(anchors[name])), name
        for link in re.findall(r'<[^>]* (?:href|src)="?([^"> ]+)', page):
            target, _, anchor = link.partition("#")
            assert link.startswith("https://") or target in pages, f"{name}: {link}"
            assert not anchor or anchor in anchors[target], f"{name}: {link}"

    # A command that the converter does not know stays as it is.
    for formula in re.findall(r"<math.*?</math>", pages["index.html"], re.DOTALL):
        assert "\\" not in html.unescape(formula)


def docstring_lines(tree):
    """Return the lines of the docstrings of a module, its classes, methods and functions. That of a
    function in a function is shown as code."""
    lines = set()
    owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in [tree, *sum((owner.body for owner in owners), [])]:
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_all_code_is_shown_and_functions_stand_together(pages):
    for path in SOURCES:
        module = module_name(path)
        blocks = re.findall(r"</div><pre>(.*?)</pre></section>", pages[f"{module}.html"], re.DOTALL)
        blocks = [html.unescape(re.sub(r"<[^>]+>", "", block)) for block in blocks]
        shown = [line for line in "\n".join(blocks).splitlines() if line.strip()]

        text = path.read_text(encoding="utf-8")
        hidden = docstring_lines(ast.parse(text))
        lines = enumerate(text.splitlines(), 1)
        assert shown == [line for n, line in lines if n not in hidden and line.strip()], path
        if module == "train":
            (loop,) = (block for block in blocks if "for iteration in" in block)
            for n in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12):
                assert f"# {n}: " in loop


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
