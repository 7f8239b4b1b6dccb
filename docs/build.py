"""Write the reading edition: code and pages beside the paper, as static HTML without a network.

    python docs/build.py [--out out/reading]              begin at index.html
    python docs/build.py --run out/tour/with-decay-60     first put its buffer into explore.html

A module's page has docstrings and the paper's mathematics on the left, and the code they belong to
on the right, function by function. Each line of Algorithm 1 stands beside its statement in `train`.
docs/paper_to_code.md says which place of the paper belongs to which symbol. Its rows give the
equations, the links in both directions, and the order of the modules. The build stops at a symbol
that is not in the code, and at a number that the paper does not have. The project's pages (README,
results, tour and others) are in the edition, and one menu leads to all.
"""

import argparse
import ast
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("freshper/*.py"), *ROOT.glob("envs/*.py")])
TABLE = ROOT / "docs/paper_to_code.md"
READMES = {
    ROOT / "README.md": "index",
    ROOT / "RESULTS.md": "results",
    ROOT / "examples/README.md": "examples",
    ROOT / "docs/reference_runs/README.md": "reference_runs",
}
PAGES = READMES | {path: path.stem for path in sorted(ROOT.glob("docs/*.md"))}
MENU = {
    "index": "Start",
    "train": "Algorithm 1",
    "code": "Code",
    "paper_to_code": "Paper",
    "explore": "Play",
    "tour": "Tour",
    "exercises": "Exercises",
    "lesson": "Lesson",
    "results": "Results",
    "differences": "Differences",
    "own_environment": "Your environment",
    "examples": "Forks",
}
KINDS = {
    "eq": "eq.",
    "tab": "table",
    "fig": "fig.",
    "sec": "section",
    "app": "appendix",
    "alg": "line",
}
CITED = re.compile(
    r"\b(eq\.|Tables?|Fig\.|[Ss]ection|[Aa]ppendix|Algorithm 1,? lines?)"
    r"\s((?:[A-Z]\b|\d+)(?:\.\d)?)"
)
ROW = re.compile(r"\| ([^|`]+) `([\w:]+)` \| (.*) \| (.*) \|$")
SYMBOL = re.compile(r"`((?:envs|freshper|compare|sumtree|train)(?:\.\w+)*)`")
ANCHOR = re.compile(r'<a id="([^"]+)"')
LINE = re.compile(r"# (?:Algorithm 1, line )?(\d+)\b")
LINK = re.compile(r'<a href="([^"]+)">(.*?)</a>', re.DOTALL)
FORMATTER = HtmlFormatter(nowrap=True, style="friendly")


def mathml(latex: str, options: dict) -> str:
    """Return a formula as MathML. A formula of its own line can be scrolled on a narrow screen."""
    if not options["display_mode"]:
        return convert(latex)
    return f"<span class=formula>{convert(latex, display='block')}</span>"


def colored(code: str, language: str, _: str) -> str:
    """Return a page's block of Python as HTML, and "" (as it is) for any other language."""
    return highlight(code, PythonLexer(), FORMATTER) if language == "python" else ""


DOCSTRING = MarkdownIt("commonmark", {"html": False})
MARKDOWN = MarkdownIt("commonmark", {"highlight": colored}).enable("table")
MARKDOWN.use(anchors_plugin, max_level=3)
MARKDOWN.use(dollarmath_plugin, double_inline=True, renderer=mathml)


class Row(NamedTuple):
    """A row of docs/paper_to_code.md."""

    place: str  # (2), Fig. 1, line 8, 3.4
    label: str
    says: str  # markdown with LaTeX
    code: str
    section: str  # the heading above it


class Part(NamedTuple):
    """A function, a class up to its first method, or what stands between them."""

    name: str  # dotted, "" between them
    docstring: str
    code: str  # HTML, without the docstring


def read_rows() -> Iterator[Row]:
    """Yield the rows of the table, in the order of the paper."""
    section = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if row := ROW.match(line):
            yield Row(*row.groups(), section)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def statements(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of a module or a class, none of a function."""
    return node.body if isinstance(node, ast.Module | ast.ClassDef) else []


def symbols(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield a module (named ""), its classes, their methods and its functions, with their dotted
    names."""
    yield name, node
    for child in statements(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from symbols(child, f"{name}.{child.name}".lstrip("."))


def settings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module or a class assigns, with their lines."""
    for child in statements(node):
        if isinstance(child, ast.Assign | ast.AnnAssign):
            for target in getattr(child, "targets", None) or [child.target]:
                if isinstance(target, ast.Name):
                    yield target.id, child.lineno


@cache
def split(path: Path) -> list[Part]:
    """Split a module into parts. Settings, constants and the lines of Algorithm 1 get anchors."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    shown = highlight(text, PythonLexer(stripnl=False), FORMATTER).splitlines()
    starts: dict[int, tuple[str, str]] = {1: ("", "")}  # line: name, docstring
    hidden: set[int] = set()  # lines of docstrings

    for name, node in symbols(ast.parse(text)):
        start = 1
        if name:
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            starts.setdefault(node.end_lineno + 1, ("", ""))
        # A comment above a function belongs to it.
        while start > 1 and lines[start - 2].lstrip().startswith("# "):
            start -= 1

        docstring = ast.get_docstring(node) or ""
        starts[start] = (name, docstring)
        if docstring:
            hidden.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for setting, line in settings(node):
            anchor = f"{name}.{setting}".lstrip(".")
            shown[line - 1] = f'<a id="{anchor}"></a>{shown[line - 1]}'

    if path.name == "train.py":
        starts |= lines_of_algorithm(lines, shown)
    parts = []
    for start, end in pairwise([*sorted(starts), len(lines) + 1]):
        code = [shown[n - 1] for n in range(start, end) if n not in hidden]
        part = Part(*starts[start], "\n".join(code).strip("\n"))
        if part.name or part.docstring or part.code.strip():
            parts.append(part)
    return parts


def lines_of_algorithm(lines: list[str], shown: list[str]) -> dict[int, tuple[str, str]]:
    """Return where the lines of Algorithm 1 start, each a part "line-<n>", and link the comments in
    `shown` that name them with the table."""
    starts = {}
    for n, line in enumerate(lines):
        if number := LINE.search(line):
            starts[n + 1] = (f"line-{number[1]}", "")
            # As any citation, "Algorithm 1, line 1" becomes a link later.
            if "Algorithm 1" in line:
                continue
            link = f'<a href="paper_to_code.html#alg:freshper:{number[1]}"># '
            linked = shown[n].replace("# ", link, 1)
            shown[n] = linked.removesuffix("</span>") + "</a></span>"
    return starts


class Edition:
    """What links need: the rows by label, the anchor of every symbol, and which rows name it.

    `files` are those that a page shows or links to."""

    def __init__(self) -> None:
        self.rows = {row.label: row for row in read_rows()}
        self.parts = {module_name(path): split(path) for path in SOURCES}
        self.anchors: dict[str, str] = {}
        self.labels: dict[str, str] = {}  # label of a place as prose cites it: "eq. 13"
        self.naming: dict[str, list[Row]] = defaultdict(list)  # rows of a symbol
        self.files: set[Path] = set()

        for module, parts in self.parts.items():
            self.anchors[module] = f"{module}.html"
            for name in sum(map(names_in, parts), []):
                self.anchors[f"{module}.{name}"] = f"{module}.html#{name}"
                self.anchors[name.replace("Config.", "--")] = f"{module}.html#{name}"

        statement = ""
        for row in self.rows.values():
            kind = KINDS.get(row.label.partition(":")[0])
            number = re.sub(r"^\D+ |[()]", "", row.place)
            self.labels[f"{kind} {number}"] = row.label
            # The sections of appendix C have a row each, which lists their equations.
            for equation in re.findall(r"(\d+) `eq:", row.says):
                self.labels[f"eq. {equation}"] = row.label

            for symbol in SYMBOL.findall(row.code):
                if symbol not in self.anchors:
                    place = f"docs/paper_to_code.md, {row.label}"
                    raise ValueError(f"{place}: {symbol} is not in the code")
                if symbol != "train.train" or kind != "line":
                    self.naming[symbol].append(row)

            if kind == "line":
                # The two "end for" have no statement. They stand behind the one before.
                if f"train.line-{number}" in self.anchors:
                    statement = f"train.line-{number}"
                self.naming[statement].append(row)

    def order(self) -> dict[str, str]:
        """Return the modules in the order in which the paper needs them, each with the section that
        first does."""
        sections = {"train": "Algorithm 1"}
        for symbol, rows in self.naming.items():
            modules = [name for name in self.parts if f"{symbol}.".startswith(f"{name}.")]
            # Sections 1 and 2 name what others explain.
            if rows[0].section > "3":
                sections.setdefault(max(modules, key=len), rows[0].section)
        return sections | {name: "Not in the paper" for name in self.parts if name not in sections}

    def link(self, prose: str, module: str = "docs") -> str:
        """Return HTML with links from the places of the paper, files and symbols that it
        mentions."""

        def paper(citation: re.Match) -> str:
            kind = citation[1].lower().removesuffix("s").split()[-1]
            label = self.labels.get(f"{kind} {citation[2]}")
            if label is None:
                raise ValueError(f"{module} cites {citation[0]}, which the paper does not have")
            return f'<a href="paper_to_code.html#{label}">{citation[0]}</a>'

        return self.mention(CITED.sub(paper, prose), module)

    def mention(self, prose: str, module: str) -> str:
        """Return HTML with links from the files and symbols that it mentions."""

        def code(mention: re.Match) -> str:
            name = mention[1].replace("/", ".").removesuffix(".py")
            target = self.anchors.get(name) or self.anchors.get(f"{module}.{name}")
            # A plain word of a page is seldom the name of a function.
            if module == "docs" and re.fullmatch("[a-z]+", mention[1]):
                return mention[0]
            return f'<a href="{target}">{mention[0]}</a>' if target else mention[0]

        prose = re.sub(r"\b((?:freshper|envs)/\w+\.py)\b(?!</a>)", code, prose)
        return re.sub(r"<code>([\w./-]+)</code>", code, prose)

    def module(self, name: str) -> str:
        """Return the page of a module: a row per part, prose left, code right."""
        page = [f"<h1><code>{name}</code></h1>"]
        for k, part in enumerate(self.parts[name]):
            rows = {row.label: row for row in self.naming.get(name, ())} if k == 0 else {}
            for symbol in names_in(part):
                rows |= {row.label: row for row in self.naming.get(f"{name}.{symbol}", ())}

            left = f'<a id="{part.name}"></a>' if part.name else ""
            left += self.link(DOCSTRING.render(part.docstring), name)
            for row in rows.values():
                place = f'<a href="paper_to_code.html#{row.label}">{row.place}</a>'
                says = self.link(MARKDOWN.renderInline(row.says))
                left += f"<div class=paper>{place} {says}</div>"

            kind = "line" if part.name.startswith("line-") else "symbol"
            kind = "head" if k == 0 else kind
            code = self.link(part.code, name)
            page.append(f"<section class={kind}><div>{left}</div><pre>{code}</pre></section>")
        return "\n".join(page)

    def code(self) -> str:
        """Return the list of modules in reading order."""
        page = "<h1>The code, in the order of the paper</h1>"
        for section, modules in groupby(self.order().items(), key=lambda item: item[1]):
            page += f"<h2>{section}</h2><ul class=modules>"
            for module, _ in modules:
                paragraph = self.parts[module][0].docstring.split("\n\n")[0]
                # The dot of "Fig. 3" ends no sentence.
                sentence = re.split(r"(?<!Fig)\. ", " ".join(paragraph.split()))[0].rstrip(".")
                page += f'<li><a href="{module}.html"><code>{module}</code></a> '
                page += f"{DOCSTRING.renderInline(sentence)}.</li>"
            page += "</ul>"
        return page

    def page(self, path: Path) -> str:
        """Return a page of the project as HTML, with links within the edition."""
        text = path.read_text(encoding="utf-8")
        html = MARKDOWN.render(text)
        html = LINK.sub(lambda link: self.inside(path, link), html)
        for image in re.findall(r'<img src="([^"]+)"', html):
            self.files.add(path.parent / image)
            html = html.replace(f'<img src="{image}"', f'<img src="{Path(image).name}"')
        # Other pages number their own sections.
        cites = path in (TABLE, ROOT / "docs/differences.md")
        return self.link(html) if cites else self.mention(html, "docs")

    def inside(self, path: Path, link: re.Match) -> str:
        """Return a link of a page, changed to where the edition has its target."""
        target, text = link.groups()
        if target.startswith(("#", "https://")):
            return link[0]
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve()
        if file in PAGES:
            return f'<a href="{PAGES[file]}.html{anchor and "#"}{anchor}">{text}</a>'
        if file in SOURCES:
            return f'<a href="{module_name(file)}.html">{text}</a>'
        if not file.is_file():
            return text
        self.files.add(file)
        return f'<a href="{file.name}">{text}</a>'

    def table(self) -> str:
        """Return the page of the table, with an anchor for every label."""
        table = self.page(TABLE)
        for label in self.rows:
            cell = f"<code>{label}</code>"
            target = self.anchors.get(f"train.line-{label.removeprefix('alg:freshper:')}")
            link = f'<br><a href="{target}">train.py</a>' if target else ""
            table = table.replace(f"{cell}</td>", f'<a id="{label}"></a>{cell}{link}</td>')
        return table


def names_in(part: Part) -> list[str]:
    """Return the dotted names of a part and of the anchors in it."""
    names = [part.name, *ANCHOR.findall(part.code)]
    return [name for name in names if name]


def menu(name: str) -> str:
    """Return the menu, in which the page's own entry is marked."""
    entries = []
    for page, title in MENU.items():
        here = " aria-current=page" if page == name else ""
        entries.append(f'<a href="{page}.html"{here}>{title}</a>')
    return f"<nav>{' '.join(entries)}</nav>"


def build(out: Path) -> None:
    """Write the edition to a folder. Raises ValueError if the table or a docstring names what is
    not there."""
    edition = Edition()
    pages = {name: edition.page(path) for path, name in PAGES.items()}
    pages |= {"code": edition.code(), "paper_to_code": edition.table()}
    order = list(edition.order())
    for before, name, after in zip(["code", *order], order, [*order[1:], "code"], strict=False):
        ways = f'<a href="{before}.html">← {before}</a> <a href="{after}.html">{after} →</a>'
        pages[name] = f"<p class=ways>{ways}</p>{edition.module(name)}"

    out.mkdir(parents=True, exist_ok=True)
    style = (ROOT / "docs/reading.css").read_text(encoding="utf-8")
    style += FORMATTER.get_style_defs("pre")
    (out / "style.css").write_text(style, encoding="utf-8")
    for file in edition.files:
        shutil.copy(file, out)
    for name, body in pages.items():
        page = (
            "<!doctype html><html lang=en><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            f"<title>FreshPER: {MENU.get(name, name)}</title><link rel=stylesheet href=style.css>"
            f"{menu(name)}<main class={name}>{body}</main></html>\n"
        )
        (out / f"{name}.html").write_text(page, encoding="utf-8")

    # This page has a style of its own. Of the edition's it gets the menu's.
    rules = "\n".join(rule for rule in style.splitlines() if rule.startswith("nav"))
    page = (ROOT / "docs/explore.html").read_text(encoding="utf-8")
    page = page.replace("<h1>", f"<style>{rules}</style>{menu('explore')}<h1>", 1)
    (out / "explore.html").write_text(page, encoding="utf-8")


def main() -> None:
    description = "Write the reading edition: every module beside the paper."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=ROOT / "out/reading")
    parser.add_argument("--run", type=Path, help="a run whose buffer docs/explore.html shows")
    args = parser.parse_args()
    if args.run:
        # Only this needs torch.
        from docs import explore

        try:
            explore.write(args.run)
        except ValueError as error:
            parser.error(str(error))
    build(args.out)
    print(f"{args.out}/index.html")


if __name__ == "__main__":
    main()
