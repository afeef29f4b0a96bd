#!/usr/bin/env python
"""Draw the picture of docs/precision.md again: python docs/pictures/draw.py"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).resolve().parent
WIDE, HALF, EIGHT, GEMM = "#8cc08a", "#7fb2e5", "#f2b36b", "#e3e3e3"
COLUMNS = {"main": 0.0, "given": 2.4, "cast": 5.4, "gemm": 8.5, "result": 11.6}
WIDTH, HEIGHT = 1.8, 0.62


def box(ax: Axes, column: str, row: float, text: str, color: str) -> None:
    """A box of one tensor or product, in the middle of its row."""
    shape = FancyBboxPatch(
        (COLUMNS[column], row - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0.04", facecolor=color, linewidth=0.8
    )
    ax.add_patch(shape)
    ax.text(COLUMNS[column] + WIDTH / 2, row, text, ha="center", va="center", fontsize=8.5)


def arrow(ax: Axes, start: tuple[str, float], end: tuple[str, float], text: str = "") -> None:
    """From the right side of a box to the left side of another."""
    (x, y), (to_x, to_y) = (COLUMNS[start[0]] + WIDTH + 0.06, start[1]), (COLUMNS[end[0]] - 0.06, end[1])
    ax.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "->", "linewidth": 1.0})
    ax.text((x + to_x) / 2, (y + to_y) / 2 + 0.07, text, ha="center", fontsize=7.5)


def casts() -> None:
    """The three products of a linear layer: what is cast to eight bits, and what comes out in which format."""
    figure = Figure(figsize=(11.5, 4.8))
    ax = figure.subplots()
    box(ax, "main", 3.0, "main parameters\nfp32", WIDE)
    box(ax, "given", 4.2, "input x\nbf16", HALF)
    box(ax, "given", 3.0, "weight W\nbf16", HALF)
    box(ax, "given", 1.2, "gradient g of y\nbf16", HALF)
    box(ax, "cast", 4.2, "x in E4M3, scale", EIGHT)
    box(ax, "cast", 3.0, "W in E4M3, scale", EIGHT)
    box(ax, "cast", 1.2, "g in E5M2, scale", EIGHT)
    box(ax, "gemm", 4.2, "x W$^T$\nsums in fp32", GEMM)
    box(ax, "gemm", 2.4, "g W\nsums in fp32", GEMM)
    box(ax, "gemm", 1.0, "g$^T$ x\nsums in fp32", GEMM)
    box(ax, "result", 4.2, "output y\nbf16", HALF)
    box(ax, "result", 2.4, "gradient of x\nbf16", HALF)
    box(ax, "result", 1.0, "main gradient\nfp32", WIDE)
    arrow(ax, ("main", 3.0), ("given", 3.0))
    for row in (4.2, 3.0, 1.2):
        arrow(ax, ("given", row), ("cast", row), "amax, cast")
    for cast, gemm in ((4.2, 4.2), (3.0, 4.05), (3.0, 2.5), (1.2, 2.3), (1.2, 0.92)):
        arrow(ax, ("cast", cast), ("gemm", gemm))
    arrow(ax, ("cast", 4.1), ("gemm", 1.12))
    arrow(ax, ("gemm", 4.2), ("result", 4.2), "scaled back")
    arrow(ax, ("gemm", 2.4), ("result", 2.4), "scaled back")
    arrow(ax, ("gemm", 1.0), ("result", 1.0), "added")
    ax.text(0, 4.85, "green: fp32    blue: bf16    orange: eight bits    grey: a matrix product", fontsize=9)
    for row, text in ((4.2, "forward"), (2.4, "backward"), (1.0, "backward")):
        ax.text(13.65, row, text, va="center", fontsize=8.5, style="italic")
    ax.set_xlim(-0.2, 14.7)
    ax.set_ylim(0.5, 5.1)
    ax.set_axis_off()
    figure.savefig(FOLDER / "fp8_linear.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    casts()
