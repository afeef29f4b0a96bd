"""Draw the timeline of a pipeline schedule: simulated, measured, or both."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from lib.plot import Panel, draw, measured, simulated
from megalite.config.errors import FlagError
from megalite.config.flags import FlagParser, parse_namespace
from megalite.pipeline.schedules import SCHEDULES
from megalite.pipeline.simulator import stage_costs
from megalite.pipeline.timeline import Timeline, median_costs, read_steps


def parser() -> FlagParser:
    flags = FlagParser("plot_schedule.py", "Draw the timeline of a pipeline schedule, simulated or measured.")
    flags.add_argument("--out", required=True, metavar="FILE", help="picture to write; its name ends in .png or .svg")
    add = flags.add_argument_group("simulated").add_argument
    add("--schedule", choices=SCHEDULES, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    add("--stages", type=positive, metavar="P", help="pipeline stages (default: each measured rank is one)")
    add("--chunks", type=positive, default=1, metavar="V", help="model chunks of each rank (default: 1)")
    add("--microbatches", type=positive, metavar="M", help="microbatches per step")
    add("--group-size", type=positive, metavar="G", help="interleaved: microbatches in a group (default: stages)")
    add = flags.add_argument_group("costs", "time of one microbatch on all chunks of a rank, in any unit").add_argument
    add("--forward-cost", type=float, default=1.0, metavar="X", help="a forward (default: 1)")
    add("--backward-cost", type=float, default=2.0, metavar="X", help="a whole backward (default: 2)")
    add("--weight-cost", type=float, metavar="X", help="the part of the backward for weight gradients (default: half)")
    add("--transfer-cost", type=float, default=0.0, metavar="X", help="sending one message (default: 0)")
    add("--measured-costs", action="store_true", help="use the median times of --timeline instead (default: off)")
    add = flags.add_argument_group("measured").add_argument
    add("--timeline", metavar="DIR", help="folder that a run wrote with --timeline DIR")
    add("--step", type=positive, metavar="N", help="training step to draw, from 1 (default: the last)")
    return flags


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def simulation(given: argparse.Namespace, steps: list[Timeline]) -> Panel:
    stages = given.stages or (len(steps[0].ranks) if steps else None)
    if stages is None or given.microbatches is None:
        raise FlagError("--schedule needs --stages and --microbatches")
    if given.measured_costs:
        costs, unit = median_costs(steps), "ms"
    else:
        weight = given.backward_cost / 2 if given.weight_cost is None else given.weight_cost
        backward = {"backward_input": given.backward_cost - weight, "backward_weight": weight}
        costs = stage_costs(given.chunks, forward=given.forward_cost, **backward, transfer=given.transfer_cost)
        unit = ""
    numbers = (given.schedule, stages, given.chunks, given.microbatches)
    return simulated(*numbers, group_size=given.group_size, costs=costs, unit=unit)


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    if not given.schedule and not given.timeline:
        raise FlagError("give --schedule, --timeline or both")
    if given.measured_costs and not given.timeline:
        raise FlagError("--measured-costs needs --timeline")
    steps = read_steps(given.timeline, given.stages) if given.timeline else []
    panels = [simulation(given, steps)] if given.schedule else []
    panels += [measured(given.timeline, steps, given.step)] if given.timeline else []
    draw(panels, given.out)
    print("\n".join([*(panel.headline() for panel in panels), f"wrote {given.out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
