"""Draws what was measured: ``python docs/measured/draw.py`` writes an SVG file beside each JSON file of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WIDTH, MARGIN, LABELS, FIGURES = 860, 24, 300, 90
TOP, LINE, BAR, GAP = 84, 24, 16, 14
BARS = WIDTH - 2 * MARGIN - LABELS - FIGURES

#: Own colours for light and dark surroundings, and a ground of its own: it is readable wherever it is shown.
STYLE = """\
  <style>
    text { font: 13px system-ui, sans-serif; fill: #1f2328; }
    .title { font-size: 17px; font-weight: 600; }
    .group { font-weight: 600; }
    .note { font-size: 12px; fill: #59636e; }
    .ground { fill: #ffffff; }
    .ours { fill: #1a6fd4; }
    .other { fill: #a3abb5; }
    .most { opacity: 0.5; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .note { fill: #9198a1; }
      .ground { fill: #0d1117; }
      .ours { fill: #4f9cf9; }
      .other { fill: #6b7480; }
    }
  </style>"""


def draw(data: Mapping[str, Any]) -> str:
    """Draw a chart of horizontal bars.

    Args:
        data: What a JSON file of this folder holds: a title and groups of bars, each from its least to its most.

    Returns:
        The text of an SVG file.
    """
    bars = [bar for group in data["groups"] for bar in group["bars"]]
    height = TOP + (len(bars) + len(data["groups"])) * LINE + len(data["groups"]) * GAP + MARGIN
    scale = BARS / max(bar["ms"][1] for bar in bars)
    said = "; ".join(f"{each['what']}: {', '.join(map(spoken, each['bars']))}" for each in data["groups"])
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"  <title>{escape(data['title'])}</title>",
        f"  <desc>{escape(said)}</desc>",
        STYLE,
        f'  <rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>',
        text("title", MARGIN, 34, data["title"]),
        text("note", MARGIN, 56, data["subtitle"]),
    ]
    y = TOP
    for group in data["groups"]:
        pieces.append(text("group", MARGIN, y + 13, group["what"]))
        for bar in group["bars"]:
            y += LINE
            pieces += row(bar, y, scale)
        y += LINE + GAP
    pieces.append(text("note", MARGIN, height - 14, data["measured"]))
    return "\n".join([*pieces, "</svg>\n"])


def row(bar: Mapping[str, Any], y: int, scale: float) -> Iterator[str]:
    """Draw one bar with its label and its figure."""
    least, most = (round(figure * scale, 1) for figure in bar["ms"])
    colour, left = "ours" if bar.get("ours") else "other", MARGIN + LABELS
    yield text("who", MARGIN + 12, y + 13, bar["who"])
    yield f'  <rect class="{colour} most" x="{left}" y="{y}" width="{most}" height="{BAR}"/>'
    yield f'  <rect class="{colour}" x="{left}" y="{y}" width="{least}" height="{BAR}"/>'
    yield text("figure", round(left + most + 8, 1), y + 13, figure(bar))


def text(kind: str, x: float, y: float, words: str) -> str:
    """Write words at a place."""
    return f'  <text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def figure(bar: Mapping[str, Any]) -> str:
    """Write a bar's figure as pages show it, too."""
    least, most = bar["ms"]
    return f"{least} ms" if least == most else f"{least} to {most} ms"


def spoken(bar: Mapping[str, Any]) -> str:
    """Write a bar for those who cannot see it."""
    return f"{bar['who']} {figure(bar)}"


def main() -> None:
    """Draw every file of figures anew."""
    for file in sorted(HERE.glob("*.json")):
        file.with_suffix(".svg").write_text(draw(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
