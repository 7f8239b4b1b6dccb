"""The reading edition: its links resolve, it shows every line of code, and a browser opens it.

The last needs Debian's package chromium-headless-shell."""

import html
import re
import subprocess
import sys

import pytest

import docs.build
from docs.build import GROUPS, Edition, build, formula, module_name


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def pages(out):
    return {path.name: path.read_text(encoding="utf-8") for path in out.glob("*.html")}


def text(page):
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_links_resolve_and_formulas_are_mathml(out, pages):
    anchors = {name: re.findall(r' id="([^"]+)"', page) for name, page in pages.items()}
    for name, page in pages.items():
        assert len(anchors[name]) == len(set(anchors[name])), name
        for link in re.findall(r'<[^>]* (?:href|src)="?([^"> ]+)', page):
            target, _, anchor = link.partition("#")
            assert (out / (target or name)).is_file(), (name, link)
            assert not anchor or anchor in anchors[target or name], (name, link)

    # The order of reading
    order, page = [], "index.html"
    while following := re.search(r'Next: <a href="(.+?)"', pages[page]):
        page = following[1]
        order.append(page.removesuffix(".html"))
    assert order == [module_name(path) for path in sum(GROUPS.values(), [])]

    # A command that the converter does not know stays as it is.
    for latex in re.findall(r"<math.*?</math>", pages["paper_to_code.html"], re.DOTALL):
        assert "\\" not in html.unescape(latex)


@pytest.fixture(scope="module")
def names(out, pages):
    """All pages of the site, with the tour, as .github/workflows/pages.yml makes it."""
    tour = docs.build.ROOT / "docs/tour.ipynb"
    words = "-m nbconvert --to html --output-dir".split()
    subprocess.run([sys.executable, *words, out, tour], check=True)
    return [*pages, "tour.html"]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_opens_every_page_without_errors_or_scrolling_sideways(out, names, width):
    frames = [f"<iframe src={name} width={width} height=900></iframe>" for name in names]
    script = """onload = () => {
      const wide = (frame) => frame.contentDocument.documentElement.scrollWidth > frame.width;
      const frames = [...document.querySelectorAll("iframe")];
      console.log("wide:", frames.filter(wide).map((frame) => frame.getAttribute("src")).join());
    };"""
    opener = out.parent / "opener.html"
    opener.write_text(f"<base href={out}/>{''.join(frames)}<script>{script}</script>")
    flags = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --dump-dom"
    words = ["chromium-headless-shell", *flags.split(), "--enable-logging=stderr", opener]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    said = re.findall(r"CONSOLE.*?\] (.*)", done.stderr)
    assert len(said) == 1 and said[0].startswith('"wide: "'), said


def test_eq_14_and_each_line_of_algorithm_1_stand_beside_their_code(pages):
    def beside(page, place):
        sections = re.findall("<section>(.*?)</section>", pages[page], re.DOTALL)
        return [text(section) for section in sections if f">{place}</a>" in section]

    calls = "for iteration; rollout(; record_behavior_logprobs(; buffer.add(; trainer.update("
    calls += "; refresh_async(; for _ in range(; buffer.sample(; importance_weights("
    calls += "; trainer.update(; ; engine.sync("
    for line, call in enumerate(calls.split("; "), 1):
        assert not call or any(call in code for code in beside("train.html", f"line {line}"))
    (page,) = (name for name in pages if name != "paper_to_code.html" and beside(name, "(14)"))
    assert "decay(" in beside(page, "(14)")[0]


def test_all_code_is_shown(pages):
    for path in sum(GROUPS.values(), []):
        shown = text(pages[f"{module_name(path)}.html"])
        source = path.read_text(encoding="utf-8")
        docstrings = "".join(re.findall(r'r?""".*?"""', source, re.DOTALL))
        for line in source.splitlines():
            assert line in shown or line.strip() in docstrings, (path, line)


def test_a_formula():
    assert formula("p_i^base * exp(-Delta_i / tau)") == (
        "p<sub>i</sub><sup>base</sup> · exp(-&Delta;<sub>i</sub> / &tau;)"
    )
    assert formula("kl_reward_coef") == "kl_reward_coef"


def test_a_wrong_symbol_or_number_stops_the_build(tmp_path, monkeypatch):
    table = docs.build.TABLE.read_text(encoding="utf-8")
    edition = Edition()
    assert edition.link("eq. 13") == '<a href="paper_to_code.html#eq:age_decay">eq. 13</a>'
    for wrong in ("eq. 40", "Table 7", "appendix G.1", "Algorithm 1 line 14", "section 3.6"):
        with pytest.raises(ValueError, match=f"cites {wrong}, which"):
            edition.link(wrong)
    monkeypatch.setattr(docs.build, "TABLE", tmp_path / "table.md")
    docs.build.TABLE.write_text(table.replace("sumtree.SumTree", "sumtree.Tree"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"sumtree\.Tree is not in the code"):
        Edition()
