"""Write the reading edition: every module beside the paper, as static HTML without a network.

    pip install -e '.[dev]'
    python docs/build.py [--out out/reading]     begin at index.html

A module's page has docstrings and the paper's mathematics on the left, and the code they belong to
on the right, function by function. In train.py each line of Algorithm 1 stands beside its
statement. docs/paper_to_code.md says which place of the paper belongs to which symbol; the build
stops at a symbol that is not in the code, and at a number that the paper does not have.
"""

import argparse
import ast
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
TABLE = DOCS / "paper_to_code.md"
# The order of reading
PAPER = """train freshper/rollout freshper/trainer freshper/episode freshper/priority
freshper/buffer sumtree freshper/is_weights freshper/reinforce freshper/engine_hf freshper/models
freshper/diagnostics"""
IDEA = [ROOT / f"{name}.py" for name in PAPER.split()]
MACHINE = [path for path in sorted(ROOT.glob("freshper/*.py")) if path not in IDEA]
GROUPS = {
    "The paper": IDEA,
    "The machine": [*MACHINE, ROOT / "compare.py"],
    "The tasks": sorted(ROOT.glob("envs/*.py")),
}
KINDS = {"eq": "eq.", "tab": "table", "fig": "fig.", "app": "appendix", "sec": "section"}
MENU = """<nav><a href=index.html>Code</a> <a href=paper_to_code.html>Paper</a>
<a href=explore.html>Play</a></nav>"""

ROW = re.compile(r"^\| ([^|`]+) `([\w:]+)` \| (.*) \| (.*) \|$", re.MULTILINE)
SYMBOL = re.compile(r"`((?:envs|freshper|compare|sumtree|train)(?:\.\w+)*|--\w+)`")
CITED = re.compile(
    r"\b(eq\.|Tables?|Fig\.|[Ss]ection|[Aa]ppendix|Algorithm 1,? lines?)"
    r"\s((?:[A-Z]\b|\d+)(?:\.\d)?)"
)
LINE = re.compile(r"# (?:Algorithm 1, line )?(\d+)\b")
RELATION = re.compile(r" (=|~|<=) ")
INDEX = re.compile(r"_(?:(\w|theta|mu|base)|\{(.*?)\})(?![a-zA-Z_])")
POWER = re.compile(r"\^(\w+)")
GREEK = re.compile(r"(?<![A-Za-z])(alpha|beta|gamma|epsilon|Delta|mu|pi|rho|tau|theta|sum)\b")
SIGNS = {"||": "‖", " * ": " · ", "&lt;=": "≤", "&gt;=": "≥", "-&gt;": "→"}
FORMATTER = HtmlFormatter(nowrap=True, style="friendly")


def mathml(latex: str, options: dict) -> str:
    """Return a formula as MathML. One of its own line can be scrolled on a narrow screen."""
    if not options["display_mode"]:
        return convert(latex)
    return f"<span class=formula>{convert(latex, display='block')}</span>"


def block(_: Any, tokens: list, number: int, *__: Any) -> str:
    """Return an indented block of a docstring: formulas, or code as it is."""
    text = tokens[number].content
    if 2 * len(RELATION.findall(text)) <= text.count("\n"):
        return f"<pre>{escape(text)}</pre>"
    return f"<pre class=formulas>{formula(text)}</pre>"


def formula(text: str) -> str:
    """Return p_i^alpha as HTML, with its index, its power and its Greek letter."""
    text = INDEX.sub(r"<sub>\1\2</sub>", escape(text))
    text = POWER.sub(r"<sup>\1</sup>", text)
    for ascii, sign in SIGNS.items():
        text = text.replace(ascii, sign)
    return GREEK.sub(r"&\1;", text)


MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.use(dollarmath_plugin, double_inline=True, renderer=mathml)
DOCSTRING = MarkdownIt("commonmark", {"html": False})
DOCSTRING.add_render_rule("code_block", block)


class Row(NamedTuple):
    """A row of docs/paper_to_code.md."""

    place: str  # (2), Fig. 1, line 8, 3.4
    label: str
    says: str  # Markdown with LaTeX
    code: str


class Part(NamedTuple):
    """A row of a page: a docstring, or "", beside the code of these symbols."""

    prose: str
    symbols: list[str]
    code: str  # HTML, without docstring and imports


class Module(NamedTuple):
    """A source file."""

    symbols: dict[str, int]  # the line of each; "" is the module, "line-8" a line of Algorithm 1
    imports: str  # HTML
    parts: list[Part]


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def parts(node: Documented, prefix: str = "") -> Iterator[tuple[Documented | None, dict, int]]:
    """Yield the parts of a module or class: itself with the statements up to its first function,
    each function, each class in the same way, and the statements between them.

    A part is the node whose docstring it shows, the symbols it defines and the line of each, and
    its last line."""
    documented: Documented | None = node
    end = getattr(node, "lineno", 0)
    symbols = {prefix.rstrip("."): end or 1}
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield documented, symbols, end
            documented, symbols = None, {}
            name = prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from parts(child, f"{name}.")
            else:
                yield child, {name: child.lineno}, child.end_lineno
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in getattr(child, "targets", None) or [child.target]:
                symbols[prefix + ast.unparse(target)] = child.lineno
        end = child.end_lineno
    yield documented, symbols, end


def read_module(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    shown = highlight(text, PythonLexer(stripnl=False), FORMATTER).splitlines()
    code = {n: line and f'<span id="L{n}">{line}</span>' for n, line in enumerate(shown, 1)}

    def taken(node: ast.stmt) -> str:
        """Return the lines of a statement, which the code beside the prose is without."""
        return "\n".join(code.pop(n) for n in range(node.lineno, node.end_lineno + 1))

    imports = []
    for node in tree.body:
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_types or isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(taken(node))
    module = Module({}, "\n".join(imports), [])

    def add(prose: str, symbols: dict[str, int], numbers: range) -> None:
        module.symbols.update(symbols)
        lines = "\n".join(code[n] for n in numbers if n in code)
        module.parts.append(Part(prose, list(symbols), lines.strip("\n")))

    lines = text.splitlines()
    start = 1
    for documented, symbols, end in parts(tree):
        prose = (documented and ast.get_docstring(documented)) or ""
        if prose:
            taken(documented.body[0])
        # A line of Algorithm 1 is a part of its own.
        for n in range(start, end + 1):
            number = LINE.search(lines[n - 1]) if path.name == "train.py" else None
            if number:
                add(prose, symbols, range(start, n))
                prose, symbols, start = "", {f"line-{number[1]}": n}, n
        add(prose, symbols, range(start, end + 1))
        start = end + 1
    return module


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class Edition:
    """What links need: the modules, the place of every symbol, and the rows that name it."""

    def __init__(self) -> None:
        paths = sum(GROUPS.values(), [])
        self.modules = {module_name(path): read_module(path) for path in paths}
        self.places: dict[str, str] = {}  # of a symbol or a flag
        for name, module in self.modules.items():
            for symbol, line in module.symbols.items():
                place = f"{name}.html#L{line}" if symbol else f"{name}.html"
                self.places[f"{name}.{symbol}".rstrip(".")] = place
                self.places[symbol.replace("Config.", "--")] = place

        self.labels: dict[str, str] = {}  # of a place as prose cites it: "eq. 13"
        self.rows: dict[str, list[Row]] = defaultdict(list)  # of a symbol
        for row in map(Row._make, ROW.findall(TABLE.read_text(encoding="utf-8"))):
            kind, _, name = row.label.partition(":")
            number = re.sub(r"^\D+ |[()]", "", row.place)
            self.labels[f"{KINDS.get(kind, 'line')} {number}"] = row.label
            if name.startswith("freshper:"):
                self.rows[f"train.line-{number}"].append(row)
            for symbol in SYMBOL.findall(row.code):
                if symbol not in self.places:
                    raise ValueError(f"{TABLE.name}, {row.label}: {symbol} is not in the code")
                self.rows[symbol].append(row)

    def link(self, prose: str, module: str = "") -> str:
        """Return HTML with links from the places of the paper and the symbols that it mentions."""

        def paper(citation: re.Match) -> str:
            kind = citation[1].lower().removesuffix("s").split()[-1]
            label = self.labels.get(f"{kind} {citation[2]}")
            if label is None:
                raise ValueError(f"{module} cites {citation[0]}, which the paper does not have")
            return f'<a href="paper_to_code.html#{label}">{citation[0]}</a>'

        def code(mention: re.Match) -> str:
            name = mention[1].replace("/", ".").removesuffix(".py")
            place = self.places.get(f"{module}.{name}") or self.places.get(name)
            return f'<a href="{place}">{mention[0]}</a>' if place else mention[0]

        prose = CITED.sub(paper, prose)
        prose = re.sub(r"\b((?:freshper|envs)/\w+\.py)\b", code, prose)
        return re.sub(r"<code>([\w./-]+)</code>", code, prose)

    def module(self, name: str) -> str:
        """Return the page of a module: a row per part, prose left, code right."""
        module = self.modules[name]
        page = [f"<h1><code>{name}</code></h1>"]
        for part in module.parts:
            left = self.link(DOCSTRING.render(part.prose), name)
            boxes = {}
            for symbol in part.symbols:
                boxes |= {row.label: row for row in self.rows[f"{name}.{symbol}".rstrip(".")]}
            for row in boxes.values():
                place = f'<a href="paper_to_code.html#{row.label}">{row.place}</a>'
                says = self.link(MARKDOWN.renderInline(row.says))
                left += f"<div class=paper>{place} {says}</div>"

            if part is module.parts[0]:
                imports = f"<pre>{module.imports}</pre>"
                left += f"<details><summary>imports</summary>{imports}</details>"
            if left or part.code:
                right = self.link(part.code, name)
                page.append(f"<section><div>{left}</div><pre>{right}</pre></section>")
        return "\n".join(page)

    def index(self) -> str:
        """Return the list of modules in the order of reading."""
        page = "<h1>FreshPER, to read beside the paper</h1>"
        for title, paths in GROUPS.items():
            page += f"<h2>{title}</h2><ol>"
            for name in map(module_name, paths):
                paragraph = self.modules[name].parts[0].prose.partition("\n\n")[0]
                page += f'<li><a href="{name}.html"><code>{name}</code></a> '
                page += f"{DOCSTRING.renderInline(paragraph)}</li>"
            page += "</ol>"
        return page

    def table(self) -> str:
        """Return the page of the table, with an anchor for every label."""
        page = MARKDOWN.render(TABLE.read_text(encoding="utf-8"))
        label = re.compile(r"<code>(\w+:[\w:]+)</code></td>")
        return self.link(label.sub(r'<code id="\1">\1</code></td>', page))


def build(out: Path) -> None:
    """Write the edition to a folder.

    Raises ValueError if the table or a docstring names what is not there."""
    edition = Edition()
    pages = {"index": edition.index(), "paper_to_code": edition.table()}
    pages |= {name: edition.module(name) for name in edition.modules}
    tables = (ROOT / "freshper/tables.toml").read_text(encoding="utf-8")
    pages["freshper.config"] += f"<h2>tables.toml</h2><pre>{escape(tables)}</pre>"
    for name, following in pairwise(["index", *edition.modules]):
        pages[name] += f'<p>Next: <a href="{following}.html"><code>{following}</code></a></p>'

    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(DOCS / "explore.html", out)
    style = (DOCS / "reading.css").read_text(encoding="utf-8") + FORMATTER.get_style_defs("pre")
    (out / "style.css").write_text(style, encoding="utf-8")
    for name, body in pages.items():
        page = f"""<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1"><title>FreshPER: {name}</title>
<link rel=stylesheet href=style.css>{MENU}<main class={name}>{body}</main></html>
"""
        (out / f"{name}.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the reading edition.")
    parser.add_argument("--out", type=Path, default=ROOT / "out/reading")
    folder = parser.parse_args().out
    build(folder)
    print(folder / "index.html")
