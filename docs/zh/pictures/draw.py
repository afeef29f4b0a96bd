#!/usr/bin/env python
"""Draw the pictures of docs/zh/parallel.md again: python docs/zh/pictures/draw.py

The schedules come from tools/plot_schedule.py, which draws what the training really runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).resolve().parent
TOOL = FOLDER.parents[2] / "tools" / "plot_schedule.py"
RANKS = ("#7fb2e5", "#f2b36b")  # rank 0, rank 1
WHOLE = "#d9d9d9"  # what both ranks hold
STATE = {"parameters (bf16)": 2, "main gradients (fp32)": 4, "main parameters (fp32)": 4, "Adam's moments (fp32)": 8}
# Which of these four each strategy cuts over the ranks.
CUT = {"no_shard": [], "optim": [2, 3], "optim_grads": [1, 2, 3], "optim_grads_params": [0, 1, 2, 3]}


def schedules() -> None:
    """Four stages, eight microbatches, in each order."""
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        words = ["--schedule", name, "--stages", "4", "--microbatches", "8", "--out", str(FOLDER / f"{name}.png")]
        chunks = ["--chunks", "2"] if name == "interleaved" else []
        subprocess.run([sys.executable, str(TOOL), *words, *chunks], check=True)


def tensor_parallel() -> None:
    """An MLP on two ranks: the first matrix is cut by columns, the second by rows, and the results are added."""
    figure = Figure(figsize=(9, 2.6))
    ax = figure.subplots()
    # name, left, bottom, width, height, how it is cut over the two ranks
    boxes = [
        ("X", 0, 0.5, 1.2, 2, None),
        ("A", 2.0, 0.9, 2.4, 1.2, "columns"),
        ("gelu(X A)", 5.2, 0.5, 2.4, 2, "columns"),
        ("B", 8.4, 0.3, 1.2, 2.4, "rows"),
        ("partial sums", 10.6, 0.5, 1.2, 2, "copies"),
        ("Y", 13.4, 0.5, 1.2, 2, None),
    ]
    for name, left, bottom, width, height, cut in boxes:
        for rank, color in enumerate(RANKS if cut else (WHOLE,)):
            x, y, w, h = left, bottom, width, height
            if cut == "columns":
                w, x = width / 2, left + rank * width / 2
            elif cut == "rows":
                h, y = height / 2, bottom + (1 - rank) * height / 2
            elif cut == "copies":
                x, y = left + 0.25 * rank, bottom - 0.2 * rank
            ax.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor="black", linewidth=0.8))
        ax.text(left + width / 2, 2.9, name, ha="center", fontsize=10)
    for x, sign in ((1.6, "x"), (4.8, "="), (8.0, "x"), (10.1, "=")):
        ax.text(x, 1.5, sign, ha="center", va="center", fontsize=13)
    arrow = {"arrowstyle": "->", "linewidth": 1.2}
    ax.annotate("", (13.3, 1.5), (12.2, 1.5), arrowprops=arrow)
    ax.text(12.75, 1.7, "all-reduce", ha="center", fontsize=8)
    ax.text(0, -0.45, "blue: rank 0    orange: rank 1    grey: the same on both", fontsize=9)
    ax.set_xlim(-0.2, 14.9)
    ax.set_ylim(-0.7, 3.3)
    ax.set_axis_off()
    figure.savefig(FOLDER / "tensor_parallel.png", dpi=110, bbox_inches="tight")


def sharding() -> None:
    """Bytes a parameter on each of 4 data-parallel ranks, bf16 with Adam (docs/architecture.md has the table)."""
    ranks = 4
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    ax = figure.subplots()
    colors = ("#7fb2e5", "#8cc08a", "#f2b36b", "#c9a7d8")
    for row, cut in enumerate(CUT.values()):
        left = 0.0
        for kind, ((label, size), color) in enumerate(zip(STATE.items(), colors, strict=True)):
            width = size / ranks if kind in cut else size
            ax.barh(row, width, left=left, color=color, edgecolor="white", label=label if row == 0 else None)
            left += width
        ax.text(left + 0.2, row, f"{left:g}", va="center", fontsize=10)
    ax.set_yticks(range(len(CUT)), list(CUT))
    ax.invert_yaxis()
    ax.set_xlim(0, 20)
    ax.set_xlabel(f"bytes per parameter on each of {ranks} data-parallel ranks")
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "zero.png", dpi=110)


def main() -> None:
    tensor_parallel()
    sharding()
    schedules()


if __name__ == "__main__":
    main()
