"""Line plots on logarithmic axes as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 36, 48
# Okabe and Ito's colours: told apart by everybody.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#000000")


@dataclass(frozen=True)
class Plot:
    """What is drawn: ``series`` by name as points, ``floors`` as grey dashed lines."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    floors: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


def ticks(low: float, high: float, base: int) -> list[float]:
    """Return powers of ``base`` from ``low`` to ``high``, thinned to at most nine."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    step = max(1, math.ceil((last - first) / 8))
    return [float(base) ** power for power in range(first, last + 1, step)]


def label(value: float) -> str:
    """Return a short number."""
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:g}"


def svg(plot: Plot) -> str:
    """Return the plot as an SVG document."""
    points = [p for line in (*plot.series.values(), *plot.floors.values()) for p in line if p[0] > 0 and p[1] > 0]
    if not points:
        raise ValueError(f"{plot.title}: nothing to draw")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 2), ticks(min(ys), max(ys), 10)
    x0, x1 = math.log(min(xs)), math.log(max(max(xs), min(xs) * 2))
    y0, y1 = math.log(min(*ys, y_ticks[0])), math.log(max(*ys, y_ticks[-1], y_ticks[0] * 10))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (math.log(x) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (math.log(y) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13" font-weight="bold">{escape(plot.title)}</text>',
    ]
    for tick in x_ticks:
        if min(xs) <= tick <= max(xs):
            x, _ = place(tick, max(ys))
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
            out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label(tick)}</text>')
    for tick in y_ticks:
        _, y = place(min(xs), tick)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(tick)}</text>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{centre:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(plot.x_label)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text x="14" y="{middle:.0f}" transform="rotate(-90 14 {middle:.0f})" text-anchor="middle">'
        f"{escape(plot.y_label)}</text>"
    )
    lines = [(name, line, "#999", "5 4") for name, line in plot.floors.items()]
    lines += [(name, line, COLOURS[i % len(COLOURS)], "") for i, (name, line) in enumerate(plot.series.items())]
    for row, (name, line, colour, dashes) in enumerate(lines):
        placed = [place(*point) for point in sorted(line) if point[0] > 0 and point[1] > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        style = f'stroke="{colour}" stroke-width="1.8"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        out.append(f'<polyline points="{path}" fill="none" {style}/>')
        if not dashes:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in placed]
        y = TOP + 8 + 16 * row
        x = WIDTH - RIGHT + 14
        out.append(f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" {style}/>')
        out.append(f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
