"""The pictures of a comparison as SVG: means with intervals, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from workbench.analysis.comparison import CurvePoint, Row

INK, QUIET, GRID = "#1b2430", "#5a6675", "#e3e8ee"
COLOURS = ("#0b5cad", "#c2410c", "#12703a", "#7a2aa8", "#b3126f", "#007080", "#7a4a00", "#3f4a5a")
WIDTH, LEFT, RIGHT, TOP = 720, 150, 30, 44
LINE = 30
"""Height of a row."""


def intervals_svg(rows: Sequence[Row], title: str) -> str:
    """A line per row: a bar of the interval of its mean, a dot at the mean, a tick at the IQM.

    Rows without an interval but with a mean (`data`, and `random`) are dashed lines through all.
    """
    shown = [row for row in rows if row.mean is not None and row.recipe not in ("data", "random")]
    lines = [row for row in rows if row.mean is not None and row.recipe in ("data", "random")]
    values = [row.mean for row in (*shown, *lines) if row.mean is not None]
    values += [v for row in shown if row.interval for v in (row.interval.low, row.interval.high)]
    values += [row.iqm for row in shown if row.iqm is not None]
    bottom = TOP + LINE * max(1, len(shown))
    axis = _Axis(values or [0.0], LEFT, WIDTH - RIGHT)
    parts = [_text(LEFT, 20, title, size=14, weight="bold")]
    for tick in axis.ticks:
        x = axis(tick)
        parts += [_line(x, TOP, x, bottom, GRID), _text(x, bottom + 18, _label(tick), "middle")]
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, "mean return, 95% interval", "middle")
    )
    for number, row in enumerate(lines):
        x = axis(row.mean or 0.0)
        parts.append(_line(x, TOP, x, bottom, QUIET, dash="4 4"))
        parts.append(_text(x, TOP - 4 - 10 * number, row.recipe, "middle", QUIET, 11))
    for number, row in enumerate(shown):
        y, colour = TOP + LINE * (number + 0.5), COLOURS[number % len(COLOURS)]
        parts.append(_text(LEFT - 10, y + 4, f"{row.recipe} ({row.seeds})", "end"))
        if row.interval is not None:
            ends = axis(row.interval.low), axis(row.interval.high)
            parts.append(_line(ends[0], y, ends[1], y, colour, width=5, opacity=0.55))
        if row.iqm is not None:
            x = axis(row.iqm)
            parts.append(_line(x, y - 9, x, y + 9, INK, width=2))
        parts.append(f'<circle cx="{axis(row.mean or 0.0):.1f}" cy="{y}" r="5" fill="{colour}"/>')
    note = "dot: mean, tick: IQM, in brackets: training seeds"
    parts.append(_text(LEFT, bottom + 58, note, colour=QUIET, size=11))
    return _svg(bottom + 70, parts)


def curves_svg(points: Sequence[CurvePoint], rows: Sequence[Row], title: str) -> str:
    """Mean return over updates: a line with its interval as a band per recipe; `data` and `random`
    as dashed lines."""
    lines = [row for row in rows if row.mean is not None and row.recipe in ("data", "random")]
    ends = [v for p in points for v in (p.interval.low, p.interval.high)]
    ends += [row.mean for row in lines if row.mean is not None]
    bottom = TOP + 280
    across = _Axis([0.0, *(float(p.updates) for p in points)], LEFT, WIDTH - RIGHT)
    up = _Axis(ends or [0.0], bottom, TOP)
    parts = [_text(LEFT, 20, title, size=14, weight="bold")]
    for tick in up.ticks:
        y = up(tick)
        parts += [
            _line(LEFT, y, WIDTH - RIGHT, y, GRID),
            _text(LEFT - 8, y + 4, _label(tick), "end"),
        ]
    for tick in across.ticks:
        parts.append(_text(across(tick), bottom + 18, _label(tick), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, "updates", "middle"))
    for row in lines:
        y = up(row.mean or 0.0)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, QUIET, dash="4 4"))
        parts.append(_text(WIDTH - RIGHT, y - 4, row.recipe, "end", QUIET, 11))
    found = {p.recipe for p in points}
    # In the order of the table, so that a recipe has the same colour in both pictures.
    order = [row.recipe for row in rows if row.mean is not None and row.recipe in found]
    order += sorted(found - set(order))
    for number, recipe in enumerate(order):
        colour = COLOURS[number % len(COLOURS)]
        mine = sorted((p for p in points if p.recipe == recipe), key=lambda p: p.updates)
        low = [(across(p.updates), up(p.interval.low)) for p in mine]
        high = [(across(p.updates), up(p.interval.high)) for p in mine]
        mean = [(across(p.updates), up(p.interval.value)) for p in mine]
        band = _points([*low, *reversed(high)])
        parts.append(f'<polygon points="{band}" fill="{colour}" opacity="0.15"/>')
        parts.append(
            f'<polyline points="{_points(mean)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in mean]
        y = bottom + 58 + 16 * number
        parts += [_line(LEFT, y - 4, LEFT + 24, y - 4, colour, width=3)]
        parts.append(_text(LEFT + 32, y, f"{recipe} ({max(p.seeds for p in mine)})"))
    return _svg(bottom + 66 + 16 * len(found), parts)


class _Axis:
    """Maps values to pixels between `start` and `end`, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or max(1.0, 0.05 * abs(high))
        self.low, self.high = low - margin, high + margin
        self.start, self.end = start, end
        raw = (self.high - self.low) / 6
        base = 10.0 ** math.floor(math.log10(raw))
        step = base * next(m for m in (1, 2, 5, 10) if m * base >= raw)
        first = math.ceil(self.low / step)
        self.ticks = [i * step for i in range(first, math.floor(self.high / step) + 1)]

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
    style = 'font-family="sans-serif" font-size="12"'
    white = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    size = f'width="{WIDTH}" height="{height:.0f}"'
    return "\n".join([f"{head} {size} {style}>", white, *parts, "</svg>", ""])


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str,
    *, width: float = 1, dash: str = "", opacity: float = 1.0,
) -> str:  # fmt: skip
    extra = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" opacity="{opacity}"{extra}/>'
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = INK, size: int = 12,
    weight: str = "normal",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
    )


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _label(value: float) -> str:
    return f"{value:.6g}"
