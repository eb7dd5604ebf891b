"""Draws a simulated schedule, as text and as SVG: a row a rank, time from left to right."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from html import escape

from dure.schedules.actions import Action, Kind, Schedule
from dure.schedules.execution import Span
from dure.schedules.simulate import Simulation

__all__ = ["draw_svg", "draw_text"]

_IDLE = "·"


def draw_text(simulation: Simulation) -> str:
    """Return a line for each rank: its actions where they start, and dots where it idles.

    An action is written as `F0`, or with its stage, `2F0`, where a rank has several.

    Args:
        simulation: The result of `simulate`.

    Returns:
        The lines.

    Example:
        ```python
        from dure import schedules

        simulation = schedules.simulate(schedules.gpipe((0, 1), microbatches=2))
        assert len(schedules.draw_text(simulation).splitlines()) >= 2  # one per rank
        ```
    """
    schedule = simulation.schedule
    several = schedule.stages > len(schedule.ranks)
    rows = [[s for s in spans if s.end > s.start] for spans in simulation.spans]
    labels = [[_label(span.action, several) for span in row] for row in rows]
    scale = max(  # columns for a unit of time, so that each label and a space fit
        (
            (len(label) + 1) / (span.end - span.start)
            for row, names in zip(rows, labels, strict=True)
            for span, label in zip(row, names, strict=True)
        ),
        default=1.0,
    )
    lines: list[str] = []
    for rank, (row, names) in enumerate(zip(rows, labels, strict=True)):
        line = ""
        for span, label in zip(row, names, strict=True):
            line = line.ljust(round(span.start * scale) - 1, _IDLE)
            line = line.ljust(round(span.start * scale)) + label
            line = line.ljust(round(span.end * scale) - 1) + " "
        line = line.ljust(round(simulation.step_time * scale), _IDLE)
        lines.append(f"rank {rank:<3} {line.rstrip()}")
    return "\n".join(lines) + "\n"


def _label(action: Action, several: bool) -> str:
    if action.sub_actions is not None:
        return "+".join(_label(part, several) for part in action.sub_actions)
    return str(action) if several else str(action).lstrip("0123456789")


# Hue of each kind, in degrees; a rank's later stages are darker.
_HUES = {
    Kind.FORWARD: (212, "forward"),
    Kind.FULL_BACKWARD: (140, "backward"),
    Kind.BACKWARD_INPUT: (175, "backward for inputs"),
    Kind.BACKWARD_WEIGHT: (38, "backward for weights"),
}
_OTHER = (0, "of a stage")
_ROW, _GAP, _LEFT, _TOP = 32, 4, 62, 34
_NARROWEST = 22  # pixels of the shortest action, so that its number can be read


def draw_svg(simulation: Simulation) -> str:
    """Return a picture: a box for each action, with the number of its microbatch.

    Colours say the kind, and darker ones the later stages of a rank. The two parts of an
    OVERLAP_F_B stand one above the other. Boxes say what they are when pointed at.

    Args:
        simulation: The result of `simulate`.

    Returns:
        The picture, as SVG.

    Example:
        ```python
        assert schedules.draw_svg(simulation).startswith("<svg")
        ```
    """
    schedule, step = simulation.schedule, simulation.step_time
    times = [s.end - s.start for spans in simulation.spans for s in spans if s.end > s.start]
    scale = _NARROWEST / min(times, default=1.0)
    width = round(_LEFT + step * scale + 16)
    bottom = _TOP + len(schedule.ranks) * (_ROW + _GAP)
    height = bottom + 56
    text = (
        f"{schedule.name or 'schedule'}: {schedule.stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.microbatches} microbatches; step {step:.4g}, bubble {simulation.bubble:.1%}"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="20" font-size="14">{escape(text)}</text>',
    ]
    for rank, spans in enumerate(simulation.spans):
        y = _TOP + rank * (_ROW + _GAP)
        lines.append(f'<text x="8" y="{y + _ROW / 2 + 4:g}">rank {rank}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{step * scale:.1f}" height="{_ROW}" fill="#eeeeee"/>'
        )
        for span in spans:
            if span.end > span.start:
                lines += _boxes(schedule, span, y, scale)
    lines += _axis(step, scale, bottom)
    lines += _legend(simulation, bottom + 44)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _boxes(schedule: Schedule, span: Span, y: float, scale: float) -> Iterator[str]:
    parts = span.action.parts
    height = _ROW / len(parts)
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    for i, part in enumerate(parts):
        local = schedule.stages_of(schedule.placement[part.stage]).index(part.stage)
        top = y + i * height
        number = part.kind.value if part.microbatch is None else str(part.microbatch)
        yield (
            f"<g><title>{part}, {span.start:.4g} to {span.end:.4g}</title>"
            f'<rect x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="{height:g}" '
            f'fill="{_colour(part.kind, local)}" stroke="#ffffff"/>'
            f'<text x="{x + width / 2:.1f}" y="{top + height / 2 + 4:g}" '
            f'text-anchor="middle">{number}</text></g>'
        )


def _colour(kind: Kind, local: int) -> str:
    hue = _HUES.get(kind, _OTHER)[0]
    lightness = max(0.55, 0.82 - 0.12 * local)
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness, 0.6)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _axis(step: float, scale: float, y: int) -> Iterator[str]:
    """Draw the axis of time, with a mark about every 60 pixels."""
    unit = 1.0
    while unit * scale < 60:
        unit *= 2
    while unit * scale > 120:
        unit /= 2
    for i in range(int(step / unit) + 1):
        x = _LEFT + i * unit * scale
        yield (
            f'<path d="M{x:.1f} {y}v5" stroke="#555555"/>'
            f'<text x="{x:.1f}" y="{y + 18}" fill="#555555" text-anchor="middle">'
            f"{i * unit:g}</text>"
        )


def _legend(simulation: Simulation, y: int) -> Iterator[str]:
    used = {part.kind for spans in simulation.spans for s in spans for part in s.action.parts}
    x = _LEFT
    for kind, (_, name) in _HUES.items():
        if kind in used:
            yield (
                f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{_colour(kind, 0)}"/>'
                f'<text x="{x + 19}" y="{y}">{kind.value}: {name}</text>'
            )
            x += 70 + 7 * len(name)
