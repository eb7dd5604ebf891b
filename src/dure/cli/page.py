"""A page of charts and tables: one HTML file that needs nothing else, in light and in dark.

A page is put together from blocks of HTML that the functions below make of plain text; who makes a
page decides on the colours of its lines (``c0, c1, ...``) and parts of bars (``p0, p1, ...``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

__all__ = [
    "DRAWING",
    "Page",
    "definitions",
    "figure",
    "html_table",
    "section",
    "side_by_side",
    "variables",
]

DRAWING = """\
svg { overflow: visible; }
svg text { fill: var(--soft); }
.label { text-anchor: middle; }
.mid { text-anchor: middle; }
.end { text-anchor: end; }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }"""
"""The style of every chart, but for colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole page.

    Attributes:
        kicker: Whose page it is: the command.
        headline: What came out, in a sentence.
        lead: What it is about.
        colours: Style-sheet variables, by name, each as (in light, in dark).
        style: Rules that use them.
        blocks: HTML, from top to bottom.
    """

    kicker: str
    headline: str
    lead: str
    colours: dict[str, tuple[str, str]]
    style: str
    blocks: Sequence[str]

    def html(self) -> str:
        """Return the file's text."""
        template = Template(files("dure.cli").joinpath("page.html").read_text("utf-8"))
        return template.substitute(
            kicker=escape(self.kicker),
            headline=escape(self.headline),
            lead=escape(self.lead),
            colours=variables(self.colours, dark=False),
            dark_colours=variables(self.colours, dark=True),
            drawing=f"{DRAWING}\n{self.style}",
            body="\n".join(self.blocks),
        )


def variables(colours: dict[str, tuple[str, str]], *, dark: bool) -> str:
    """Return the declarations of a page's colours."""
    return "\n".join(f"  --{name}: {pair[dark]};" for name, pair in colours.items())


def figure(title: str, svg: str) -> str:
    """Return a chart under its title."""
    return f"<figure><h2>{escape(title)}</h2>{svg}</figure>"


def section(content: str, title: str = "") -> str:
    """Return a card of HTML."""
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f"<section>{head}{content}</section>"


def side_by_side(blocks: Sequence[str]) -> str:
    """Return blocks in two columns, or in one where there is no room."""
    return '<div class="grid2">\n' + "\n".join(blocks) + "\n</div>"


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first cell of each row is its name."""
    out = ["<table>", "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in heads) + "</tr>"]
    for name, *cells in rows:
        values = "".join(f"<td>{escape(c)}</td>" for c in cells)
        out.append(f"<tr><th>{escape(name)}</th>{values}</tr>")
    return "\n".join([*out, "</table>"])


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a list of names and their values."""
    items = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    return "<dl>\n" + "\n".join(items) + "\n</dl>"
