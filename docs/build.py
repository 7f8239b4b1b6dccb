"""Write the reading edition: every module beside the paper, as static HTML that needs no network.

    python docs/build.py [--out out/reading]         begin at index.html

On the left docstrings and the paper's mathematics, on the right the code they belong to, function by function.
docs/paper_to_code.md says which place of the paper belongs to which symbol: from its rows come the equations, the links
in both directions, and the order of the modules. A symbol that is not in the code, or a number that the paper does not
have, stops the build.
"""

import argparse
import ast
import re
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
KINDS = {
    "eq": "eq.",
    "tab": "table",
    "fig": "fig.",
    "sec": "section",
    "app": "appendix",
    "alg": "line",
}
CITED = re.compile(
    r"\b(eq\.|Tables?|Fig\.|[Ss]ection|[Aa]ppendix|Algorithm 1,? lines?)\s((?:[A-Z]\b|\d+)(?:\.\d)?)"
)
ANCHOR = re.compile(r'<a id="([^"]+)"')
FORMATTER = HtmlFormatter(nowrap=True, style="friendly")

DOCSTRING = MarkdownIt("commonmark", {"html": False})
MARKDOWN = (
    MarkdownIt("commonmark", {"html": False}).enable("table").use(anchors_plugin, max_level=3)
)
MARKDOWN.use(
    dollarmath_plugin,
    double_inline=True,
    renderer=lambda latex, options: convert(
        latex, display="block" if options["display_mode"] else "inline"
    ),
)


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
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if found := re.match(r"\| ([^|`]+) `([\w:]+)` \| (.*) \| (.*) \|$", line):
            yield Row(*found.groups(), section)


def symbols(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield a module (named ""), its classes, their methods and its functions, with their dotted names."""
    yield name, node
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from symbols(child, f"{name}.{child.name}".lstrip("."))


@cache
def split(path: Path) -> list[Part]:
    """Split a module into parts. Settings, constants and the lines of Algorithm 1 get anchors."""
    text = path.read_text(encoding="utf-8")
    lines, shown = (
        text.splitlines(),
        highlight(text, PythonLexer(stripnl=False), FORMATTER).splitlines(),
    )
    starts: dict[int, tuple[str, str]] = {1: ("", "")}  # line: name, docstring
    docstrings: set[int] = set()  # line numbers
    for name, node in symbols(ast.parse(text)):
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) if name else 1
        while start > 1 and lines[start - 2].lstrip().startswith("# "):
            start -= 1  # a comment above a function belongs to it
        if name:
            starts.setdefault(node.end_lineno + 1, ("", ""))
        starts[start] = name, ast.get_docstring(node) or ""
        if ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            for target in getattr(child, "targets", [getattr(child, "target", None)]):
                if isinstance(target, ast.Name) and not isinstance(child, ast.AugAssign | ast.For):
                    anchor = f"{name}.{target.id}".lstrip(".")
                    shown[child.lineno - 1] = f'<a id="{anchor}"></a>{shown[child.lineno - 1]}'
    for n, line in enumerate(lines if path.name == "train.py" else ()):
        if found := re.search(r"# (?:Algorithm 1, line )?(\d+)\b", line):
            link = f'<a id="line-{found[1]}" href="index.html#alg:freshper:{found[1]}">'
            shown[n] = (
                shown[n].replace("# ", f"{link}# ", 1).removesuffix("</span>") + "</a></span>"
            )
    parts = []
    for start, end in zip(sorted(starts), [*sorted(starts)[1:], len(lines) + 1], strict=True):
        code = [shown[n - 1] for n in range(start, end) if n not in docstrings]
        parts.append(Part(*starts[start], "\n".join(code).strip("\n")))
    return [part for part in parts if part.name or part.docstring or part.code.strip()]


class Edition:
    """What links need: the rows by label, the anchor of every symbol, and which rows name it."""

    def __init__(self) -> None:
        self.rows = {row.label: row for row in read_rows()}
        modules = {
            ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
            for p in SOURCES
        }
        self.parts = {module: split(path) for module, path in modules.items()}
        self.anchors = {module: f"{module}.html" for module in modules}
        for module, parts in self.parts.items():
            for name in (
                name for part in parts for name in [part.name, *ANCHOR.findall(part.code)] if name
            ):
                self.anchors[f"{module}.{name}"] = f"{module}.html#{name}"
                self.anchors[name.replace("Config.", "--")] = f"{module}.html#{name}"
        self.labels: dict[str, str] = {}  # label of a place as prose cites it: "eq. 13"
        self.naming: dict[str, list[Row]] = defaultdict(list)  # rows of a symbol
        for row in self.rows.values():
            kind, number = (
                KINDS.get(row.label.partition(":")[0]),
                re.sub(r"^\D+ |[()]", "", row.place),
            )
            numbers = re.findall(
                r"(\d+) `eq:", row.says
            )  # of appendix C, whose sections have a row each
            self.labels |= {f"{kind} {number}": row.label} | {
                f"eq. {n}": row.label for n in numbers
            }
            for symbol in re.findall(
                r"`((?:envs|freshper|compare|sumtree|train)(?:\.\w+)*)`", row.code
            ):
                if symbol not in self.anchors:
                    raise ValueError(
                        f"docs/paper_to_code.md, {row.label}: {symbol} is not in the code"
                    )
                self.naming[symbol].append(row)

    def order(self) -> dict[str, str]:
        """Return the modules in the order in which the paper needs them: module -> the section that first does."""
        found = {"train": "Algorithm 1"}
        for symbol, rows in self.naming.items():
            module = max((m for m in self.parts if f"{symbol}.".startswith(f"{m}.")), key=len)
            if rows[0].section > "3":  # sections 1 and 2 name what others explain
                found.setdefault(module, rows[0].section)
        return found | {module: "Not in the paper" for module in self.parts if module not in found}

    def link(self, prose: str, module: str = "docs") -> str:
        """Return HTML with links from the places of the paper, files and symbols that it mentions."""

        def paper(found: re.Match) -> str:
            label = self.labels.get(f"{found[1].lower().removesuffix('s').split()[-1]} {found[2]}")
            if not label:
                raise ValueError(f"{module} cites {found[0]}, which the paper does not have")
            return f'<a href="index.html#{label}">{found[0]}</a>'

        def code(found: re.Match) -> str:
            name = found[1].replace("/", ".").removesuffix(".py")
            target = self.anchors.get(name) or self.anchors.get(f"{module}.{name}")
            return f'<a href="{target}">{found[0]}</a>' if target else found[0]

        prose = re.sub(r"\b((?:freshper|envs)/\w+\.py)\b", code, CITED.sub(paper, prose))
        return re.sub(r"<code>([\w./-]+)</code>", code, prose)

    def module(self, name: str) -> str:
        """Return the page of a module: a row per part, prose left, code right."""
        out = [f"<h1><code>{name}</code></h1>"]
        for k, part in enumerate(self.parts[name]):
            named = [name] * (k == 0) + [
                f"{name}.{n}" for n in [part.name, *ANCHOR.findall(part.code)]
            ]
            left = f'<a id="{part.name}"></a>' if part.name else ""
            left += self.link(DOCSTRING.render(part.docstring), name)
            for row in {
                row.label: row for symbol in named for row in self.naming.get(symbol, ())
            }.values():
                says = self.link(MARKDOWN.renderInline(row.says))
                left += f'<div class=paper><a href="index.html#{row.label}">{row.place}</a> {says}</div>'
            kind = "head" if k == 0 else "symbol"
            out.append(
                f"<section class={kind}><div>{left}</div><pre>{self.link(part.code, name)}</pre></section>"
            )
        return "\n".join(out)

    def index(self) -> str:
        """Return the list of modules in reading order, and the table with an anchor for every label."""
        out = "<h1>FreshPER, to read beside the paper</h1><ol class=modules>"
        for module, section in self.order().items():
            first = " ".join(self.parts[module][0].docstring.split("\n\n")[0].split()).split(". ")[
                0
            ]
            out += (
                f'<li><a href="{module}.html"><code>{module}</code></a> <small>{section}</small> '
            )
            out += f"{DOCSTRING.renderInline(first)}</li>"
        table = self.link(MARKDOWN.render(TABLE.read_text(encoding="utf-8")))
        for label in self.rows:
            target = self.anchors.get(f"train.line-{label.removeprefix('alg:freshper:')}")
            to = f'<br><a href="{target}">train.py</a>' if target else ""
            cell = f"<code>{label}</code>"
            table = table.replace(f"{cell}</td>", f'<a id="{label}"></a>{cell}{to}</td>')
        return f"{out}</ol>{table}"


def build(out: Path) -> None:
    """Write the edition to a folder. Raises ValueError if the table or a docstring names what is not there."""
    edition = Edition()
    order = list(edition.order())
    pages = {"index": edition.index()} | {name: edition.module(name) for name in order}
    out.mkdir(parents=True, exist_ok=True)
    style = (ROOT / "docs/reading.css").read_text(encoding="utf-8") + FORMATTER.get_style_defs(
        "pre"
    )
    (out / "style.css").write_text(style, encoding="utf-8")

    for name, body in pages.items():
        k = order.index(name) if name in order else len(order)
        near = [("←", other) for other in order[max(k - 1, 0) : k]] + [
            ("→", other) for other in order[k + 1 : k + 2]
        ]
        around = "".join(
            f'<a href="{other}.html">{arrow} {other}</a>' for arrow, other in near if k < len(order)
        )
        body = re.sub(
            r'<a href="[\w/.-]+\.md[^"]*">(.*?)</a>', r"\1", body
        )  # pages that are not part of the edition
        head = f'<meta charset=utf-8><meta name=viewport content="width=device-width"><title>{name}</title>'
        head += f'<link rel=stylesheet href=style.css><nav><a href="index.html">Contents</a>{around}</nav>'
        page = f"<!doctype html><html lang=en>{head}<main class={name}>{body}</main></html>\n"
        (out / f"{name}.html").write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the reading edition: every module beside the paper."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out/reading")
    out = parser.parse_args().out
    build(out)
    print(f"{out}/index.html")


if __name__ == "__main__":
    main()
