"""The reading edition: its links resolve, it loads nothing from elsewhere, it shows every line of
code, and it fits a phone."""

import ast
import html
import json
import re
import shutil
import subprocess

import pytest
from test_explore import BROWSERS

import docs.build
from docs.build import ROOT, SOURCES, Edition, build, module_name

# Shows each page in frames of both widths and notes those that can be scrolled to the side.
FRAMES = """<pre></pre><script>
async function measure() {
  const wide = [];
  for (const width of [1280, 390]) {
    for (const name of NAMES) {
      const frame = document.createElement("iframe");
      frame.style = `width: ${width}px; height: 800px; border: 0`;
      frame.src = name;
      document.body.append(frame);
      await new Promise((loaded) => { frame.onload = loaded; });
      const page = frame.contentDocument;
      const formulas = [...page.querySelectorAll(".formula")];
      const boxes = [page.documentElement, ...formulas];
      if (boxes.some((box) => box.scrollWidth > box.clientWidth)) wide.push(`${name} ${width}`);
      frame.remove();
    }
  }
  document.querySelector("pre").textContent = JSON.stringify(wide);
}
measure();
</script>"""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def pages(out):
    return {path.name: path.read_text(encoding="utf-8") for path in out.glob("*.html")}


def test_links_resolve_and_formulas_are_mathml(out, pages):
    anchors = {name: re.findall(r' id="([^"]+)"', page) for name, page in pages.items()}
    for name, page in pages.items():
        assert len(anchors[name]) == len(set(anchors[name])), name
        for link in re.findall(r'<[^>]* (?:href|src)="?([^"> ]+)', page):
            target, _, anchor = link.partition("#")
            assert link.startswith("https://") or (out / (target or name)).is_file(), (name, link)
            assert not anchor or anchor in anchors[target or name], f"{name}: {link}"

    # A command that the converter does not know stays as it is.
    for formula in re.findall(r"<math.*?</math>", pages["paper_to_code.html"], re.DOTALL):
        assert "\\" not in html.unescape(formula)


def test_no_page_is_wider_than_the_screen(out, pages):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, f"none of {BROWSERS} is installed"
    frames = out / "frames.htm"
    frames.write_text(FRAMES.replace("NAMES", json.dumps(list(pages))))
    flags = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --dump-dom"
    flags += f" --virtual-time-budget=60000 --user-data-dir={out}/profile --window-size=1400,900"
    done = subprocess.run([browser, *flags.split(), frames], capture_output=True, text=True)
    (wide,) = re.findall("<pre>(.*)</pre>", done.stdout)
    assert json.loads(wide) == []


def test_each_line_of_algorithm_1_stands_beside_its_statement(pages):
    sections = re.findall("<section class=line>(.*?)</section>", pages["train.html"], re.DOTALL)
    statements = {
        1: "for iteration in",
        2: "rollout(",
        3: "record_behavior_logprobs(",
        4: "buffer.add(",
        5: "trainer.update(",
        6: "refresh_async(",
        7: "for _ in range(",
        8: "buffer.sample(",
        9: "importance_weights(",
        10: "trainer.update(",
        11: "trainer.update(",
        12: "engine.sync(",
        13: "engine.sync(",
    }
    for line, statement in statements.items():
        (section,) = (text for text in sections if f">line {line}</a>" in text)
        assert statement in html.unescape(re.sub("<[^>]+>", "", section)), line


def test_no_box_holds_a_title_only():
    labels = json.loads((ROOT / "tests/data/paper_labels.json").read_text())
    titles = {label: title for label, _, _, title in labels if not label.startswith("alg:")}
    for symbol, rows in Edition().naming.items():
        for row in rows:
            assert row.says != titles.get(row.label), (symbol, row.place)


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


def test_a_wrong_symbol_or_number_stops_the_build(tmp_path, monkeypatch):
    table = docs.build.TABLE.read_text(encoding="utf-8")
    monkeypatch.setattr(docs.build, "TABLE", tmp_path / "table.md")
    docs.build.TABLE.write_text(table.replace("sumtree.SumTree", "sumtree.Tree"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"sumtree\.Tree is not in the code"):
        Edition()
    docs.build.TABLE.write_text(table, encoding="utf-8")
    assert Edition().link("eq. 13") == '<a href="paper_to_code.html#eq:age_decay">eq. 13</a>'
    for wrong in ("eq. 40", "Table 7", "appendix G.1", "Algorithm 1 line 14", "section 3.6"):
        with pytest.raises(ValueError, match=f"cites {wrong}, which"):
            Edition().link(wrong)
