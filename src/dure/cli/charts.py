"""Charts as inline SVG, and the page that holds them: one HTML file that needs nothing else.

It must be readable in light and in dark, and cost the installation little; a plotting library would
bring tens of megabytes or a script of several. A chart here is text: its colours are style-sheet
variables of the page, ``c0, c1, ...`` of lines and points, ``p0, p1, ...`` of parts of bars.

Coordinates: the plot lies within fixed margins of a view box; `_Scale` maps values to it. An axis
begins and ends at its first and last tick, and ticks are 1, 2 or 5 times a power of ten (powers of
ten alone on a logarithmic axis), unless the axis brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

WIDTH, HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 46
_LETTER, _GAP = 6.8, 10.0
_MAX_POINTS = 400
_CLOSE = 32  # pixels between bars below which there is no room for a line of text
Colours = Mapping[str, tuple[str, str]]  # variables of a style sheet, each as (light, dark)


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label with unit, how a tick is written, whether it is logarithmic, its ticks.

    Ticks of its own must hold all values: the first is at most the least, the last at least the
    greatest.
    """

    label: str
    show: Callable[[float], str] = lambda value: f"{value:g}"
    log: bool = False
    marks: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Dots:
    """Points of one colour, each with what is shown where the mouse is over it."""

    name: str
    points: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    parts: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values from ``marks[0]`` to ``marks[-1]`` onto pixels from `start` to `end`."""

    marks: Sequence[float]
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5, *, log: bool = False) -> list[float]:
    """Return round numbers, about `count`, whose first is at most `low` and last at least `high`.

    On a logarithmic axis these are powers of ten, and `low` must be positive.
    """
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**e for e in range(first, max(last, first + 1) + 1)]
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Draw lines over a common pair of axes, with a legend.

    Points that a logarithmic axis cannot show (0 or less) are left out. A linear horizontal axis
    begins at 0 at the latest.
    """
    lines = [[p for p in s.points if _shown(p[0], x) and _shown(p[1], y)] for s in series]
    flat = [p for line in lines for p in line] or [(1.0, 1.0)]
    xs, ys = [p[0] for p in flat], [p[1] for p in flat]
    left = min(xs) if x.log else min(0.0, *xs)
    across = _Scale(x.marks or ticks(left, max(xs), log=x.log), _LEFT, WIDTH - _RIGHT, x.log)
    up = _Scale(y.marks or ticks(min(ys), max(ys), log=y.log), HEIGHT - _BOTTOM, _TOP, y.log)
    body = _grid(across, up, x, y) + [
        f'<polyline class="line c{i}" points="{_path(line, across, up)}"/>'
        for i, line in enumerate(lines)
    ]
    return _svg(title, [*body, *_legend([s.name for s in series])])


def scatter_chart(title: str, series: Sequence[Dots], x: Axis, y: Axis, edge: float) -> str:
    """Draw points over a common pair of axes, with a legend, and a dashed line at x = `edge`."""
    points = [point for dots in series for point in dots.points]
    xs, ys = [edge, *(p[0] for p in points)], [p[1] for p in points] or [1.0]
    across = _Scale(ticks(min(0.0, *xs), max(xs)), _LEFT, WIDTH - _RIGHT)
    up = _Scale(ticks(min(ys), max(ys)), HEIGHT - _BOTTOM, _TOP)
    body = _grid(across, up, x, y)
    body.append(f'<path class="edge" d="M{across(edge):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
    for i, dots in reversed(list(enumerate(series))):  # the first are drawn above the others
        body += [
            f'<circle class="fill c{i}" cx="{across(at):.1f}" cy="{up(height):.1f}" r="4">'
            f"<title>{escape(text)}</title></circle>"
            for at, height, text in dots.points
        ]
    return _svg(title, [*body, *_legend([dots.name for dots in series], "c", "fill")])


def stacked_bars(title: str, parts: Sequence[str], bars: Sequence[Bar], x: Axis) -> str:
    """Draw one horizontal bar a `Bar`, cut into its parts, with a legend of the parts' names.

    Each bar's length stands above its end, or where bars are close together behind it.
    """
    longest = max((sum(bar.parts) for bar in bars), default=1.0)
    room = (HEIGHT - _BOTTOM - _TOP) / max(1, len(bars))
    close = room < _CLOSE
    across = _Scale(ticks(0.0, longest * (1.08 if close else 1.0)), _LEFT, WIDTH - _RIGHT)
    body = _vertical_grid(across, x)
    for row, bar in enumerate(bars):
        top, thick = _TOP + (row + 0.28) * room, room * 0.44
        body.append(_text(_LEFT - 8, top + thick / 2 + 4, bar.name, "tick end"))
        at = 0.0
        for i, length in enumerate(bar.parts):
            left, right = across(at), across(at + length)
            body.append(
                f'<rect class="fill p{i}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{thick:.1f}"><title>{escape(parts[i])}: {length:.2f}</title></rect>'
            )
            at += length
        if close:
            body.append(_text(across(at) + 5, top + thick / 2 + 4, f"{at:.1f}", "tick"))
        else:
            body.append(_text(across(at), top - 6, f"{at:.1f}", "tick end"))
    return _svg(title, [*body, *_legend(parts, "p", "fill")])


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(text)}</text>'


def _shown(value: float, axis: Axis) -> bool:
    return not axis.log or value > 0


def _path(line: Sequence[tuple[float, float]], across: _Scale, up: _Scale) -> str:
    """Return the points of a line, thinned where there are more than can be seen."""
    stride = max(1, math.ceil(len(line) / _MAX_POINTS))
    kept = [*line[:-1:stride], *line[-1:]]
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in kept)


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    out = _vertical_grid(across, x)
    for mark in up.marks:
        at = up(mark)
        out.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        out.append(_text(_LEFT - 8, at + 4, y.show(mark), "tick end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    out.append(_text(14, middle, y.label, "label", f' transform="rotate(-90 14 {middle:.0f})"'))
    return out


def _vertical_grid(across: _Scale, x: Axis) -> list[str]:
    out: list[str] = []
    bottom = HEIGHT - _BOTTOM
    for mark in across.marks:
        at = across(mark)
        out.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
        out.append(_text(at, bottom + 17, x.show(mark), "tick mid"))
    out.append(_text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 38, x.label, "label"))
    return out


def _legend(names: Sequence[str], letter: str = "c", kind: str = "line") -> list[str]:
    """Draw a swatch and a name each, in one row above the plot, further left if they are many."""
    out: list[str] = []
    offset = 24 if kind == "line" else 17
    widths = [offset + _LETTER * len(name) + _GAP for name in names]
    at = max(0.0, min(float(_LEFT), WIDTH - _RIGHT + _GAP - sum(widths)))
    for i, name in enumerate(names):
        if kind == "line":
            out.append(f'<path class="line {letter}{i}" d="M{at:.0f} 14h18"/>')
        else:
            out.append(
                f'<rect class="fill {letter}{i}" x="{at:.0f}" y="8" width="12" height="12"/>'
            )
        out.append(_text(at + offset, 18, name, "tick"))
        at += widths[i]
    return out


def _svg(title: str, body: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *body, "</svg>"])


def page(
    command: str, headline: str, lead: str, colours: Colours, blocks: Sequence[str], more: str = ""
) -> str:
    """Return a whole page: a sentence about what came out, one about what it is, blocks of HTML.

    `more` are further rules of style.
    """
    lines = (f".line.{name} {{ stroke: var(--{name}); }}" for name in colours if name[0] == "c")
    fills = (f".fill.{name} {{ fill: var(--{name}); }}" for name in colours)
    template = Template(files("dure.cli").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        kicker=escape(command),
        headline=escape(headline),
        lead=escape(lead),
        colours=_variables(colours, dark=False),
        dark_colours=_variables(colours, dark=True),
        drawing="\n".join([*lines, *fills, more]),
        body="\n".join(blocks),
    )


def _variables(colours: Colours, *, dark: bool) -> str:
    return "\n".join(f"  --{name}: {pair[dark]};" for name, pair in colours.items())


def figure(title: str, svg: str) -> str:
    return f"<figure><h2>{escape(title)}</h2>{svg}</figure>"


def section(content: str, title: str = "") -> str:
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
    items = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)
    return "<dl>\n" + "\n".join(items) + "\n</dl>"
