"""Line plots as SVG, written by hand: both axes in powers of two, nothing to install, the same bytes for the same data."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 44, 44
COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c", "#ad1a72", "#64473a")
Series = dict[str, list[tuple[float, float]]]


def lines(title: str, unit: str, series: Series) -> str:
    """One line per series of (tokens, value); log axes, a legend on the right."""
    series = {name: sorted(points) for name, points in series.items() if points}
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x_low, x_high = _span(xs)
    y_low, y_high = _span(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - x_low) / (x_high - x_low)
        up = (math.log2(y) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for power in range(x_low, x_high + 1):
        x, bottom = place(2.0**power, 2.0**y_low)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#eee"/>')
        out.append(
            f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" fill="#555">{_tokens(2**power)}</text>'
        )
    for power in range(y_low, y_high + 1):
        _, y = place(2.0**x_low, 2.0**power)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{2.0**power:g}</text>')
    out.append(f'<text x="{LEFT}" y="{TOP - 6}" fill="#555">{escape(unit)}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="#555">tokens of context</text>')
    for i, (name, points) in enumerate(series.items()):
        out += _line(name, [place(x, y) for x, y in points], COLOURS[i % len(COLOURS)], i)
    return "\n".join([*out, "</svg>"]) + "\n"


def _line(name: str, places: list[tuple[float, float]], colour: str, row: int) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    label, _, how = name.partition(" (")
    y = TOP + 12 + 34 * row
    out.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{y - 9}" width="12" height="4" fill="{colour}"/>')
    out.append(f'<text x="{WIDTH - RIGHT + 34}" y="{y - 3}">{escape(label)}</text>')
    if how:
        out.append(
            f'<text x="{WIDTH - RIGHT + 34}" y="{y + 11}" font-size="10" fill="#555">{escape(how.rstrip(")"))}</text>'
        )
    return out


def _span(values: list[float]) -> tuple[int, int]:
    """Powers of two around the values, at least one apart."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return low, max(high, low + 1)


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)
