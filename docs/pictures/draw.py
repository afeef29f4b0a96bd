#!/usr/bin/env python
"""Draw the pictures of docs/precision.md and docs/parallelism.md again: python docs/pictures/draw.py"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

FOLDER = Path(__file__).resolve().parent
WIDE, HALF, EIGHT, GEMM = "#8cc08a", "#7fb2e5", "#f2b36b", "#e3e3e3"
COLUMNS = {"main": 0.0, "given": 2.4, "cast": 5.4, "gemm": 8.5, "result": 11.6}
WIDTH, HEIGHT = 1.8, 0.62
RANKS = ("#7fb2e5", "#f2b36b", "#8cc08a", "#c79fd8")


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


def zigzag() -> None:
    """Which chunks of a sequence four context-parallel ranks hold, and which products of queries and keys they make."""
    figure = Figure(figsize=(10, 4.6))
    for ax, title, owner in (
        (figure.add_subplot(1, 2, 1), "in order: rank 3 has seven times the work of rank 0", lambda n: n // 2),
        (figure.add_subplot(1, 2, 2), "zigzag: all ranks have the same work", lambda n: min(n, 7 - n)),
    ):
        for query in range(8):
            ax.add_patch(Rectangle((-1.6, 7 - query), 1.2, 1, facecolor=RANKS[owner(query)], edgecolor="white"))
            ax.text(-1.0, 7.5 - query, f"rank {owner(query)}", ha="center", va="center", fontsize=8)
            color = RANKS[owner(query)]
            for key in range(query):
                ax.add_patch(Rectangle((key, 7 - query), 1, 1, facecolor=color, edgecolor="white"))
            low, high = 7 - query, 8 - query  # of its own keys a chunk sees half
            ax.add_patch(Polygon([(query, low), (query, high), (query + 1, low)], facecolor=color, edgecolor="white"))
        ax.text(4, -0.45, "chunk of keys", ha="center", fontsize=9)
        ax.text(-1.9, 4, "chunk of queries", va="center", ha="center", rotation=90, fontsize=9)
        ax.set_title(title, fontsize=10)
        ax.set_xlim(-2.2, 8.1)
        ax.set_ylim(-0.8, 8.1)
        ax.set_aspect("equal")
        ax.set_axis_off()
    figure.savefig(FOLDER / "zigzag.png", dpi=110, bbox_inches="tight")


def grids() -> None:
    """The ranks of one pipeline stage as attention sees them, and as the experts do."""
    figure = Figure(figsize=(9.5, 2.9))
    dense, experts = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for rank in range(8):
        data, tensor = divmod(rank, 2)
        copy, expert = divmod(rank, 4)
        for ax, column, row, color, text in (
            (dense, data, tensor, RANKS[tensor], f"rank {rank}\nhalf {tensor}"),
            (experts, expert, copy, RANKS[expert], f"rank {rank}\nexperts {2 * expert}, {2 * expert + 1}"),
        ):
            ax.add_patch(Rectangle((column, 1 - row), 1, 1, facecolor=color, edgecolor="white", linewidth=2))
            ax.text(column + 0.5, 1.5 - row, text, ha="center", va="center", fontsize=7.5)
    for ax, title, across, down in (
        (dense, "attention: TP 2 x DP 4, halves of matrices", "data-parallel copies", "tensor parallel"),
        (experts, "8 experts: EP 4 x ETP 1, 2 copies", "expert parallel", "expert-data copies"),
    ):
        ax.set_title(title, fontsize=10)
        ax.text(2, -0.25, across, ha="center", fontsize=8.5)
        ax.text(-0.15, 1, down, va="center", ha="center", rotation=90, fontsize=8.5)
        ax.set_xlim(-0.3, 4.05)
        ax.set_ylim(-0.4, 2.05)
        ax.set_axis_off()
    figure.savefig(FOLDER / "expert_grid.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    casts()
    zigzag()
    grids()
