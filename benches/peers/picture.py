"""The picture of the bench: cost against the number of descriptors, both axes logarithmic.

Written by hand: what it needs of a drawing library is lines, ticks and a legend.
"""

import math
from xml.sax.saxutils import escape

from tables import dates

WIDTH, HEIGHT, TOP, PANEL, GAP = 960, 440, 48, 390, 70
LEFT, LOW = 60, 300  # of the first panel: its left edge, and its height
# Told apart by most kinds of colour blindness (Okabe and Ito).
COLOURS = ("#000000", "#d55e00", "#e69f00", "#0072b2", "#009e73", "#56b4e9", "#cc79a7")
MARKS = ("circle", "square", "diamond")


class Axis:
    """Where a value lies between two ends, on a logarithmic scale that its ticks begin and end."""

    def __init__(self, ticks, begin, end):
        self.ticks, self.begin, self.end = ticks, begin, end

    def at(self, value):
        low, high = self.ticks[0], self.ticks[-1]
        share = math.log(value / low) / math.log(high / low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)


def decades(values):
    """The powers of ten from below the least value to above the largest."""
    low = math.floor(math.log10(min(values)) + 1e-9)
    high = max(math.ceil(math.log10(max(values)) - 1e-9), low + 1)
    return [10.0**power for power in range(low, high + 1)]


def line(x1, y1, x2, y2, colour="#dddddd"):
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}"/>')


def words(x, y, text, anchor="middle", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def mark(kind, x, y, colour):
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "diamond" else ""
    return (f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}"{turn}/>')


def panel(left, title, curves):
    """One set of axes with its curves: [(style, [(descriptors, cost), ...]), ...]."""
    points = [point for _, curve in curves for point in curve]
    across = Axis(sorted({x for x, _ in points}), left, left + PANEL)
    up = Axis(decades([y for _, y in points]), TOP + LOW, TOP)
    out = [words(left + PANEL / 2, TOP - 14, title, extra=' font-weight="bold"')]
    for x in across.ticks:
        out.append(line(across.at(x), TOP, across.at(x), TOP + LOW))
        out.append(words(across.at(x), TOP + LOW + 18, f"{x:,.0f}"))
    for y in up.ticks:
        out.append(line(left, up.at(y), left + PANEL, up.at(y)))
        out.append(words(left - 6, up.at(y) + 4, f"{y:,.0f}", "end"))
    out.append(words(left + PANEL / 2, TOP + LOW + 36, "descriptors in a transfer"))
    for (colour, kind), curve in curves:
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in curve)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [mark(kind, across.at(x), up.at(y), colour) for x, y in curve]
    return out


def draw(result):
    """The whole picture, as the text of an SVG file."""
    rows = [row for row in result["rows"] if row["line"]]
    styles = [(COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]) for i in range(len(rows))]
    costs = {
        "instructions a descriptor": lambda point: point.get("instructions", {}).get("sum"),
        "nanoseconds a descriptor, median": lambda point: point["ns"],
    }
    height = HEIGHT + 20 * math.ceil(len(rows) / 3)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>']
    panels = 0
    for title, cost in costs.items():
        curves = []
        for style, row in zip(styles, rows):
            curve = sorted((int(size), cost(point)) for size, point in row["points"].items())
            curves.append((style, [(x, y) for x, y in curve if y is not None and y > 0]))
        curves = [(style, curve) for style, curve in curves if curve]
        if curves:
            out += panel(LEFT + panels * (PANEL + GAP), title, curves)
            panels += 1
    for i, ((colour, kind), row) in enumerate(zip(styles, rows)):
        x, y = LEFT + 300 * (i % 3), TOP + LOW + 66 + 20 * (i // 3)
        out += [line(x, y, x + 24, y, colour), mark(kind, x + 12, y, colour),
                words(x + 30, y + 4, row["label"], "start")]
    what = f"{result['op']} of {result['bytes']} B blocks that cannot be merged, null NIC"
    when = ", ".join([what, result["machine"], dates(result)])
    out.append(words(LEFT, height - 10, when, "start"))
    return "\n".join([*out, "</svg>"]) + "\n"
