"""Draws timelines: ranks down, time across, one box per computing action.

Key idea: the kind of action is the hue, the model chunk its shade, the microbatch the number in the box; what is left
white is the bubble.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.errors import FlagError, UserError
from megalite.files.atomic import replacing
from megalite.pipeline.lowering import lower
from megalite.pipeline.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, build_schedule
from megalite.pipeline.simulator import simulate
from megalite.pipeline.timeline import Costs, Span, Timeline, computing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Color = tuple[float, float, float]

NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward: inputs",
    BACKWARD_WEIGHT: "backward: weights",
}
HUES: dict[str, tuple[Color, Color]] = {  # of the first chunk and of the last
    FORWARD: ((0.70, 0.83, 0.96), (0.13, 0.40, 0.72)),
    BACKWARD: ((0.75, 0.90, 0.70), (0.13, 0.50, 0.20)),
    BACKWARD_INPUT: ((0.60, 0.88, 0.82), (0.05, 0.45, 0.42)),
    BACKWARD_WEIGHT: ((0.99, 0.82, 0.58), (0.80, 0.42, 0.05)),
}
OTHER = ((0.85, 0.80, 0.92), (0.42, 0.30, 0.62))
BOX_INCHES, ROW_INCHES, MARGIN_INCHES = 0.26, 0.42, 2.2
WIDTHS = (9.0, 40.0)  # least and greatest, in inches


class Panel(NamedTuple):
    """A timeline to draw. `unit` of time: `ms`, or empty for that of the given costs."""

    title: str
    timeline: Timeline
    unit: str = ""

    def headline(self) -> str:
        """Title, makespan and bubble share."""
        makespan = f"{self.timeline.makespan:.4g} {self.unit}".strip()
        return f"{self.title}: makespan {makespan}, bubble {self.timeline.bubble_share:.1%}"


def simulated(
    name: str,
    stages: int,
    chunks: int,
    microbatches: int,
    *,
    costs: Costs,
    unit: str = "",
    group_size: int | None = None,
) -> Panel:
    """The timeline that a schedule would have. A FlagError where the numbers don't fit it."""
    try:
        schedule = build_schedule(name, stages, chunks, microbatches, group_size=group_size)
    except UserError as error:
        raise FlagError(str(error)) from None
    each = f"{stages} stages x {chunks} chunks" if chunks > 1 else f"{stages} stages"
    title = f"{name}, {each}, {microbatches} microbatches"
    return Panel(title, simulate(lower(schedule, stages, chunks), costs), unit)


def measured(directory: str | Path, steps: Sequence[Timeline], step: int | None = None) -> Panel:
    """Training step `step`, from 1, of a run that wrote `directory`; by default the last. Others raise a UserError."""
    number = len(steps) if step is None else step
    if not 1 <= number <= len(steps):
        raise UserError(f"--step {step}: {directory} holds steps 1 to {len(steps)}")
    return Panel(f"measured, {directory}, step {number} of {len(steps)}", steps[number - 1], "ms")


def draw(panels: Sequence[Panel], path: str | Path) -> None:
    """Write a picture of `panels` under one another; `.png` or `.svg` says which kind; a FlagError otherwise."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise FlagError(f"--out {path}: the name must end in .png or .svg")
    # Imported here since it takes seconds; its Figure needs no display and no state of pyplot's.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [len(panel.timeline.ranks) for panel in panels]
    width = max(_width(panel.timeline) for panel in panels)
    figure = Figure(
        figsize=(width, sum(ROW_INCHES * count + 1.2 for count in rows)), layout=ConstrainedLayoutEngine(hspace=0.1)
    )
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        longest = max(other.timeline.makespan for other in panels if other.unit == panel.unit)
        _draw_panel(ax, panel, longest, inches=width - MARGIN_INCHES)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150, bbox_inches="tight")
    with replacing(path) as file:
        file.write(picture.getbuffer())


def _width(timeline: Timeline) -> float:
    """Inches in which a typical number fits into its box."""
    lengths = [span.end - span.start for spans in timeline.ranks for span in computing(spans)]
    typical = statistics.quantiles([*lengths, *lengths], n=4)[0] if lengths else timeline.makespan
    return min(max(WIDTHS[0], MARGIN_INCHES + BOX_INCHES * timeline.makespan / max(typical, 1e-9)), WIDTHS[1])


def _draw_panel(ax: Axes, panel: Panel, longest: float, *, inches: float) -> None:
    """`longest`: the time across, in the panel's unit; `inches`: how wide that is, about."""
    from matplotlib.patches import Patch, Rectangle

    timeline = panel.timeline
    ranks = [computing(spans) for spans in timeline.ranks]
    chunks = 1 + max((span.action.chunk for spans in ranks for span in spans), default=0)
    for rank, spans in enumerate(ranks):
        for action, start, end in spans:
            color = _color(action.kind, action.chunk, chunks)
            left, length = start - timeline.start, end - start
            ax.add_patch(Rectangle((left, rank - 0.4), length, 0.8, facecolor=color, edgecolor="white", linewidth=0.6))
            size = min(9.0, 72 * inches * length / longest / (0.8 * len(str(action.microbatch))))
            if size >= 4:
                ink = "white" if sum(color) < 1.5 else "black"
                middle = (left + length / 2, rank)
                ax.annotate(str(action.microbatch), middle, ha="center", va="center", fontsize=size, color=ink)
    shares, peaks = timeline.bubble_shares(), timeline.peak_live()
    for rank, (share, peak) in enumerate(zip(shares, peaks, strict=True)):
        ax.annotate(f" idle {share:.0%}, live {peak}", (longest, rank), va="center", fontsize=8)
    ax.set_xlim(0, longest)
    ax.set_ylim(len(ranks) - 0.4, -0.6)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    ax.set_xlabel(f"time ({panel.unit})" if panel.unit else "time", loc="right")
    ax.set_title(panel.headline(), loc="left", fontsize=11)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    patches = [Patch(color=_color(kind, c, chunks), label=_label(kind, c, chunks)) for kind, c in _kinds(ranks)]
    below = (0.0, -0.3 / (ROW_INCHES * len(ranks)))
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=below, ncols=8, frameon=False, fontsize=8, borderpad=0)


def _kinds(ranks: list[list[Span]]) -> list[tuple[str, int]]:
    """(kind, chunk) of what is drawn, in the order of the legend."""
    found = {(span.action.kind, span.action.chunk) for spans in ranks for span in spans}
    order = list(HUES)
    return sorted(found, key=lambda each: (order.index(each[0]) if each[0] in order else len(order), each))


def _label(kind: str, chunk: int, chunks: int) -> str:
    name = NAMES.get(kind, kind)
    return f"{name}, chunk {chunk}" if chunks > 1 else name


def _color(kind: str, chunk: int, chunks: int) -> Color:
    """Between the two colours of the kind, by chunk."""
    first, last = HUES.get(kind, OTHER)
    share = chunk / (chunks - 1) if chunks > 1 else 0.35
    red, green, blue = (a + share * (b - a) for a, b in zip(first, last, strict=True))
    return red, green, blue
