"""Who makes the others wait."""

from __future__ import annotations

import re
import socket

from megalite.distributed.mesh import single_process_mesh
from megalite.pipeline.schedules import Action
from megalite.training.stragglers import ComputeTime, _Computed, straggler_line
from tests.e2e.runs import MICRO, run


def test_a_rank_is_compared_with_those_of_its_stage() -> None:
    times = {0: (0, 10.0), 1: (0, 30.0), 2: (1, 40.0), 3: (1, 40.0), 4: (0, 10.0)}
    line = straggler_line([_Computed(rank, stage, f"h{rank}", ms) for rank, (stage, ms) in times.items()], 80.0, 3)
    slowest, fastest = (part.split("; ") for part in line.strip(" |").split(" | ")[1:])
    assert [part.removeprefix("slowest ") for part in slowest] == [
        "rank 2 on h2: 40.0 ms = 50% of the step, 1.00 x its stage's median",
        "rank 3 on h3: 40.0 ms = 50% of the step, 1.00 x its stage's median",
        "rank 1 on h1: 30.0 ms = 38% of the step, 3.00 x its stage's median",
    ]
    assert [part.split(":")[0] for part in fastest] == ["fastest rank 4 on h4", "rank 0 on h0", "rank 1 on h1"]


def test_only_forwards_and_backwards_count() -> None:
    mine = ComputeTime(single_process_mesh())
    for kind, milliseconds in (("forward", 1.0), ("wait_forward", 100.0), ("backward", 2.0), ("send_forward", 100.0)):
        mine(Action(kind, 0, 0), 5.0, 5.0 + milliseconds)
    assert f"rank 0 on {socket.gethostname()}: 1.5 ms = 50% of the step" in mine.report(2, 3.0, 1)
    mine(Action("backward_weight", 0, 0), 5.0, 5.25)
    assert "0.2 ms = 8% of the step" in mine.report(1, 3.0, 1)


def test_a_slow_rank_is_named_at_each_log_line() -> None:
    """Of two replicas, which wait for each other at the end of a step."""
    flags = f"{MICRO} --log-interval 2 --train-iters 4 --log-straggler --timing-log-level 1"
    out = run(flags, 2, fault="slow:1:200").out
    found = re.findall(r"computing \| slowest rank (\d) on .*?: ([\d.]+) ms = (\d+)% .*\| fastest rank (\d)", out)
    assert [(slowest, fastest) for slowest, *_, fastest in found] == [("1", "0")] * 2
    assert all(float(milliseconds) > 200 and int(share) <= 100 for _, milliseconds, share, _ in found)
