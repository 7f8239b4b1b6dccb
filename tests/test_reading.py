"""The paper-to-code table against the paper's labels, the code and the tests; the reading edition built from it."""

import ast
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import docs.build
from compare import exhibits
from docs.build import ROOT, SOURCES, Edition, build, read_rows
from freshper.config import Config

ROWS = {row.label: row for row in read_rows()}
LABELS = json.loads((ROOT / "tests/data/paper_labels.json").read_text())  # [label, kind, number, title], from the paper
PLACES = {"section": "{}", "paragraph": "¶", "equation": "({})", "figure": "Fig. {}", "table": "Table {}"}
PLACES |= {"algorithm": "Alg. {}", "line": "line {}", "proposition": "Prop. {}"}
EQUATIONS = [label for label, kind, _, _ in LABELS if kind == "equation"]


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module_of(symbol: str) -> str:
    """The longest beginning of a dotted name that is a module, "" where none is."""
    parts = symbol.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if file_of(name).is_file()), "")


def names_of(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", "")] + [target.id for target in targets if isinstance(target, ast.Name)]


def exists(name: str) -> bool:
    """Whether `module.symbol`, `tests/file.py::test`, `--flag` or `--exhibit name` is there."""
    if test := re.fullmatch(r"(tests/\w+\.py)::(\w+)", name):
        return f"\ndef {test[2]}(" in (ROOT / test[1]).read_text()
    if exhibit := re.fullmatch(r"--exhibit (\w+)", name):
        return exhibit[1] in exhibits("tiny", "frozenlake")
    if flag := re.fullmatch(r"--(\w+)( \w+)?", name):
        return flag[1] in Config.__dataclass_fields__
    module = module_of(name)
    found = [ast.parse(file_of(module).read_text())] if module else []  # not imported: some need packages for GPUs
    for part in name.removeprefix(module).split(".")[1:]:
        found = [child for node in found for child in getattr(node, "body", []) if part in names_of(child)]
    return bool(found)


def test_every_label_of_the_paper_has_its_row_in_its_order():
    assert list(ROWS) == [label for label, *_ in LABELS]
    for label, kind, number, title in LABELS:
        assert ROWS[label].place == PLACES[kind].format(number), label
        assert ROWS[label].says.startswith(title), label
        assert ROWS[label].says.count("$$") == 2 * (kind == "equation"), label


@pytest.mark.parametrize("label", ROWS)
def test_every_row_names_code_that_is_there_or_says_why_there_is_none(label):
    row = ROWS[label]
    assert row.code.startswith(("not code, because ", "`")), label
    for name in re.findall(r"`([^`]+)`", row.code) + re.findall(r"`(--\w[^`]*)`", row.says):
        assert exists(name), name
    if label.startswith("eq:") and not row.code.startswith("not code"):  # and the code says which equation it is
        modules = {module_of(name) for name in re.findall(r"`([a-z][\w.]+)`", row.code)}
        assert any(f"eq. {label[3:]}" in file_of(module).read_text() for module in modules), modules


def test_what_is_not_there_is_found_out():
    assert not exists("freshper.buffer.ReplayBuffer.sampel")
    assert not exists("tests/test_buffer.py::test_nothing")
    assert not exists("--taus")


class Page(HTMLParser):
    """Anchors, links, what the browser would load, and formulas of a page; every tag must be closed."""

    VOID = ("meta", "link", "br", "img", "hr")

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.loaded, self.open = [], [], [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        assert self.open == [], path
        self.math = re.findall(r"<math.*?</math>", self.text, re.DOTALL)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        (self.links if tag == "a" else self.loaded).extend(attrs[k] for k in ("href", "src") if k in attrs)
        self.open += [tag] if tag not in self.VOID else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    build(out := tmp_path_factory.mktemp("reading"))
    return out


@pytest.fixture(scope="module")
def pages(folder):
    return {path.name: Page(path) for path in folder.glob("*.html")}


def test_every_link_has_its_target_and_nothing_comes_from_elsewhere(folder, pages):
    assert len(pages) >= len(SOURCES) + 4
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in page.links:
            target, _, anchor = link.partition("#")
            if not link.startswith("https://"):
                assert not anchor or anchor in pages[target or name].ids, f"{name}: {link}"
                assert anchor or (folder / target).is_file(), f"{name}: {link}"
        for file in page.loaded:
            assert (folder / file).is_file(), f"{name}: {file}"


def test_every_formula_became_mathml(pages):
    found = pages["index.html"].math
    assert sum('display="block"' in formula for formula in found) == len(EQUATIONS)
    for formula in found:
        assert "\\" not in html.unescape(formula)  # an unknown command stays as it is
    assert "$" not in re.sub(r"<(code|math).*?</\1>", "", pages["index.html"].text, flags=re.DOTALL)


def test_equations_and_lines_link_to_their_code_and_back(pages):
    modules = {name: page for name, page in pages.items() if name != "index.html"}
    for label, row in ROWS.items():
        assert label in pages["index.html"].ids
        if not row.code.startswith("not code"):
            back = f"index.html#{label}"
            assert any(back in page.links for page in modules.values()), label
        line = re.fullmatch(r"alg:freshper:(\d+)", label)
        if line and not row.code.startswith("not code"):
            assert f"train.html#line-{line[1]}" in pages["index.html"].links, label
            assert f"line-{line[1]}" in pages["train.html"].ids, label
            assert f"index.html#{label}" in pages["train.html"].links, label


def test_all_of_the_code_is_shown(pages):
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        left = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                left |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        lines = [line for n, line in enumerate(path.read_text().splitlines(), 1) if n not in left]
        right = re.findall(r"</div><pre>(.*?)</pre></section>", pages[f"{module}.html"].text, re.DOTALL)
        shown = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(right))).splitlines()
        assert [x for x in shown if x.strip()] == [x for x in lines if x.strip() and not x.lstrip().startswith("#")]


def test_a_symbol_that_moved_and_a_label_that_is_not_stop_the_build(tmp_path, monkeypatch):
    table = docs.build.TABLE.read_text()
    monkeypatch.setattr(docs.build, "TABLE", tmp_path / "table.md")
    docs.build.TABLE.write_text(table.replace("sumtree.SumTree.find", "sumtree.SumTree.seek"))
    with pytest.raises(ValueError, match=r"par:proportional_sampling: sumtree.SumTree.seek is nowhere"):
        Edition()
    docs.build.TABLE.write_text(table)
    edition = Edition()
    for cited, label in (
        ("eq. age_decay", "eq:age_decay"), ("eq. 13", "eq:age_decay"), ("Table 5", "tab:replay_config"),
        ("Section 2", "sec:related"), ("section 3.3", "sec:staleness"), ("appendix A.1", "app:buffer_arch"),
        ("Algorithm 1, line 2", "alg:freshper:2"), ("Fig. 1", "fig:pipeline"), ("Prop. var_chi2", "prop:var_chi2"),
    ):  # fmt: skip
        assert edition.link(cited) == f'<a href="index.html#{label}">{cited}</a>'
    for wrong in ("eq. age_decline", "Table 6", "appendix G.1", "Algorithm 1 line 14", "section 3.6"):
        with pytest.raises(ValueError, match="which the paper has not"):
            edition.link(wrong)
