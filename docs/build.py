"""The reading edition: every module beside the paper, as static HTML. It needs no network, then or later.

    python docs/build.py [folder]            writes out/reading/; begin at index.html

On the left prose (docstrings, and comments on lines of their own) and the paper's mathematics, on the right the code
they belong to, function by function. docs/paper_to_code.md says which place of the paper belongs to which symbol; from
its rows come the equations, the links from either side to the other, and the order of the modules, which is that of
the paper's sections.

Whoever renames a symbol, or cites a label that the paper has not, hears of it here: `build` raises ValueError.
"""

import ast
import io
import re
import shutil
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
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
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("freshper/*.py"), *ROOT.glob("envs/*.py")])
TABLE = ROOT / "docs/paper_to_code.md"
PAGES = [ROOT / "README.md", ROOT / "RESULTS.md", *sorted(set(ROOT.glob("docs/*.md")) - {TABLE})]
KINDS = {
    "eq": "eq.",
    "tab": "table",
    "fig": "fig.",
    "prop": "prop.",
    "sec": "section",
    "app": "appendix",
    "alg": "line",
}
CITED = re.compile(r"\b(eq\.|Tables?|Fig\.|Prop\.|[Ss]ection|[Aa]ppendix|Algorithm 1,? lines?)\s(\w+(?:\.\d)?)")
ANCHOR = re.compile(r'<a id="([^"]+)">')
FORMATTER = HtmlFormatter(nowrap=True, style="friendly")

DOCSTRING = MarkdownIt("commonmark", {"html": False})
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").use(anchors_plugin, max_level=3)
MARKDOWN.use(
    dollarmath_plugin,
    double_inline=True,
    renderer=lambda latex, options: convert(latex, display="block" if options["display_mode"] else "inline"),
)


class Row(NamedTuple):
    """A row of docs/paper_to_code.md."""

    place: str  # (2), Fig. 1, line 8, 3.4, ¶
    label: str
    says: str  # markdown with LaTeX
    code: str
    section: str  # the heading above it


class Part(NamedTuple):
    """Prose and the lines of code beside it."""

    names: list[str]  # symbols that begin here, or line-N of Algorithm 1
    prose: list[str]
    code: list[str]  # HTML


def read_rows() -> Iterator[Row]:
    """The rows of the table, in the order of the paper."""
    section = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if found := re.match(r"\| ([^|`]+) `([\w:]+)` \| (.*) \| (.*) \|$", line):
            yield Row(*found.groups(), section)


def symbols(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """A module (named ""), and the classes and functions in it, with their dotted names."""
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from symbols(child, f"{name}.{child.name}".lstrip("."))


@cache
def split(path: Path) -> list[Part]:
    """A module in parts: a new one at each function, class and comment on lines of its own."""
    text = path.read_text(encoding="utf-8")
    lines, shown = text.splitlines(), highlight(text, PythonLexer(stripnl=False), FORMATTER).splitlines()
    starts = defaultdict(lambda: Part([], [], [])) | {1: Part([], [], [])}
    moved: set[int] = set()  # lines of docstrings and comments, which stand on the left

    for name, node in symbols(ast.parse(text)):
        if name:
            starts[node.end_lineno + 1].names.clear()  # what follows is a part of its own
        part = starts[min([node.lineno, *(d.lineno for d in node.decorator_list)]) if name else 1]
        part.names.extend([name] if name else [])
        if (docstring := ast.get_docstring(node)) is not None:
            part.prose.append(docstring)
            moved.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            for target in getattr(child, "targets", [getattr(child, "target", None)]):
                if isinstance(target, ast.Name) and not isinstance(child, ast.AugAssign | ast.For):
                    anchor = f"{name}.{target.id}".lstrip(".")
                    shown[child.lineno - 1] = f'<a id="{anchor}"></a>{shown[child.lineno - 1]}'

    first = 0  # line of a comment that may have several
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        n, comment = token.start[0], token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and (line := re.match(r"Algorithm 1, (line) (\d+)", comment)):
            shown[n - 1] = f'<a id="line-{line[2]}"></a>{shown[n - 1]}'
        if token.type == tokenize.COMMENT and lines[n - 1].lstrip().startswith("#"):
            first = first if n - 1 in moved and lines[n - 2].lstrip().startswith("#") else n
            if line := re.match(r"(\d+): ", comment):
                starts[n].names.append(f"line-{line[1]}")
            starts[first].prose.append(re.sub(r"^-- (.+?) -+$", r"### \1", comment))
            moved.add(n)

    parts: list[Part] = []
    for start, end in zip(sorted(starts), [*sorted(starts)[1:], len(lines) + 1], strict=True):
        code = "\n".join(shown[n - 1] for n in range(start, end) if n not in moved).rstrip().lstrip("\n").splitlines()
        if parts and not parts[-1].code:  # a comment right above a function
            before = parts.pop()
            starts[start] = Part(before.names + starts[start].names, [*before.prose, "", *starts[start].prose], code)
        parts.append(starts[start]._replace(code=code))
    return parts


class Edition:
    """What links need to know: the rows by label, the anchor of every symbol, and which rows name it."""

    def __init__(self) -> None:
        self.rows = {row.label: row for row in read_rows()}
        modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
        self.parts = {module: split(path) for module, path in modules.items()}
        self.anchors = {module: f"{module}.html" for module in modules}
        for module, parts in self.parts.items():
            for name in (name for part in parts for name in part.names + ANCHOR.findall("\n".join(part.code))):
                self.anchors[f"{module}.{name}"] = f"{module}.html#{name}"
                if name.startswith("Config."):
                    self.anchors[name.replace("Config.", "--")] = f"{module}.html#{name}"
        self.labels: dict[str, str] = {}  # how prose cites a place: its label
        self.naming: dict[str, list[Row]] = defaultdict(list)  # symbol: rows
        for row in self.rows.values():
            kind, _, short = row.label.partition(":")
            number = re.sub(r"^\D+ |[()]", "", row.place)
            self.labels |= {f"{KINDS.get(kind)} {name}": row.label for name in (short, number)}
            if row.place.startswith("line") and "not code" not in row.code:
                self.naming[f"train.line-{number}"].append(row)
            for symbol in re.findall(r"`((?:envs|freshper|compare|sumtree|train)(?:\.\w+)*)`", row.code):
                if symbol not in self.anchors:
                    raise ValueError(f"docs/paper_to_code.md, {row.label}: {symbol} is nowhere in the code")
                self.naming[symbol].append(row)

    def order(self) -> dict[str, str]:
        """Modules in the order in which the paper needs them: module -> the section that first does."""
        found = {"train": "Algorithm 1"}
        for symbol, rows in self.naming.items():
            module = max((m for m in self.parts if f"{symbol}.".startswith(f"{m}.")), key=len)
            if rows[0].section > "3":  # sections 1 and 2 name what others explain
                found.setdefault(module, rows[0].section)
        return found | {module: "Not in the paper" for module in self.parts if module not in found}

    def link(self, prose: str, module: str = "docs") -> str:
        """HTML with links from what it mentions: places of the paper, files and symbols."""

        def paper(found: re.Match) -> str:
            label = self.labels.get(f"{found[1].lower().removesuffix('s').split()[-1]} {found[2]}")
            if not label and re.search(r"\d|_", found[2]):
                raise ValueError(f"{module} cites {found[0]}, which the paper has not")
            return f'<a href="index.html#{label}">{found[0]}</a>' if label else found[0]

        def code(found: re.Match) -> str:
            name = found[1].replace("/", ".").removesuffix(".py")
            target = self.anchors.get(name) or self.anchors.get(f"{module}.{name}")
            return f'<a href="{target}">{found[0]}</a>' if target else found[0]

        prose = re.sub(r"\b((?:freshper|envs)/\w+\.py)\b", code, CITED.sub(paper, prose))
        return re.sub(r"<code>([\w./-]+)</code>", code, prose)

    def module(self, name: str) -> str:
        """The page of a module: a row a part, prose left, code right."""
        out = [f"<h1><code>{name}</code></h1>"]
        for k, part in enumerate(self.parts[name]):
            code = "\n".join(part.code)
            named = [name] * (k == 0) + [f"{name}.{n}" for n in part.names + ANCHOR.findall(code)]
            rows = {row.label: row for symbol in named for row in self.naming.get(symbol, ())}
            left = "".join(f'<a id="{n}"></a>' for n in part.names)
            left += self.link(DOCSTRING.render("\n".join(part.prose)), name)
            for row in rows.values():
                more = f"; {row.code}" if row.label.startswith("alg:freshper:") else ""
                says = self.link(MARKDOWN.renderInline(row.says + more))
                left += f'<div class=paper><a href="index.html#{row.label}">{row.place}</a> {says}</div>'
            kind = "head" if k == 0 else "symbol" if {n.split("-")[0] for n in part.names} - {"line"} else "more"
            out.append(f"<section class={kind}><div>{left}</div><pre>{self.link(code, name)}</pre></section>")
        return "\n".join(out)

    def index(self) -> str:
        """What there is to read, in order, and the table with an anchor for every label."""
        out = "<h1>FreshPER, to read beside the paper</h1><ol class=modules>"
        for module, section in self.order().items():
            first = " ".join(self.parts[module][0].prose[0].split("\n\n")[0].split()).split(". ")[0]
            out += f'<li><a href="{module}.html"><code>{module}</code></a> <small>{section}</small> '
            out += f"{DOCSTRING.renderInline(first)}</li>"
        out += "</ol><p>" + ", ".join(f'<a href="{p.stem}.html">{p.name}</a>' for p in PAGES) + "</p>"
        table = self.link(MARKDOWN.render(TABLE.read_text(encoding="utf-8")))
        for row in self.rows.values():
            label, line = f"<code>{row.label}</code>", row.label.rpartition(":")[2]
            here = f"train.line-{line}" in self.naming
            to = f'<br><a href="train.html#line-{line}">train.py</a>' if here and row.label.startswith("alg") else ""
            table = table.replace(f"{label}</td>", f'<a id="{row.label}"></a>{label}{to}</td>')
        return out + table


def build(out: Path) -> None:
    """Write the edition to a folder. Raises ValueError where the table or a docstring names what is not there."""
    edition = Edition()
    order = list(edition.order())
    pages = {"index": edition.index()} | {name: edition.module(name) for name in order}
    out.mkdir(parents=True, exist_ok=True)
    for path in PAGES:
        text = re.sub(r"<!--.*?-->\n", "", path.read_text(encoding="utf-8"))
        pages[path.stem] = edition.link(MARKDOWN.render(text))
        for picture in re.findall(r'<img src="([^":]+)"', pages[path.stem]):
            shutil.copy(path.parent / picture, out)
            pages[path.stem] = pages[path.stem].replace(f'src="{picture}"', f'src="{Path(picture).name}"')
    style = (ROOT / "docs/reading.css").read_text(encoding="utf-8") + FORMATTER.get_style_defs("pre")
    (out / "style.css").write_text(style, encoding="utf-8")

    def local(found: re.Match) -> str:
        """A link to a file of the repository: to its page, or no link where it has none."""
        name = found[1].removeprefix("docs/").rpartition(".")[0].replace("/", ".")
        name = {TABLE.stem: "index"}.get(name, name)
        return f'<a href="{name}.html{found[2]}">{found[3]}</a>' if name in pages else found[3]

    for name, body in pages.items():
        k = order.index(name) if name in order else len(order)
        near = [("←", other) for other in order[max(k - 1, 0) : k]] + [("→", other) for other in order[k + 1 : k + 2]]
        around = "".join(f'<a href="{other}.html">{arrow} {other}</a>' for arrow, other in near if k < len(order))
        body = re.sub(r'<a href="(?:\.\./)*([\w/.-]+\.(?!html)\w+)((?:#[^"]*)?)">(.*?)</a>', local, body)
        head = f'<meta charset=utf-8><meta name=viewport content="width=device-width"><title>{name}</title>'
        head += f'<link rel=stylesheet href=style.css><nav><a href="index.html">Contents</a>{around}</nav>'
        page = f"<!doctype html><html lang=en>{head}<main class={name}>{body}</main></html>\n"
        (out / f"{name}.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out/reading"
    build(folder)
    print(f"{folder}/index.html")
