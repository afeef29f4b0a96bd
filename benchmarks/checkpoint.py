"""Saving and loading a checkpoint on one process, against torch.distributed.checkpoint (DCP) on the same tensors.

Both write with two threads to disk (fsync) and alternate in one run. `stall`: how long training stands still where the
checkpoint is written in the background, beside a plain copy of the same tensors into memory that is there already.
`--saves N` also saves so often in the background and prints the memory of the process.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.measure import seconds
from benchmarks.workloads import CPU, OurSteps, Workload
from megalite.checkpoint.checkpoint import Planned, load_checkpoint, plan, write_and_commit
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.storage import Retention
from megalite.config.schema import PrecisionConfig
from megalite.distributed.mesh import single_process_mesh
from megalite.distributed.pieces import Piece
from megalite.training.memory import peak_process_memory

DCP = {"save": "DCP save", "load": "DCP load"}


class Sides:
    """A workload's model with Adam, and what is done with it. `folder`: emptied before each save."""

    def __init__(self, workload: Workload, folder: Path):
        steps = OurSteps(workload, PrecisionConfig(), torch.device("cpu"))
        steps.take(workload.batches(1, 1))
        steps.step()  # so that there are moments
        self.model, self.mesh, self.folder = steps.model, single_process_mesh(), folder
        self.tensors: dict[str, Tensor] = {chunk.key: chunk.read() for chunk in self.planned(folder).chunks}
        self.saver = Saver(self.mesh, lambda line: None, background=True)

    def pieces(self) -> list[Piece]:
        return list(self.model.entries(state=True, frozen=True))

    def planned(self, root: Path) -> Planned:
        return plan(
            root,
            1,
            mesh=self.mesh,
            pieces=self.pieces(),
            config=self.model.config,
            training_state={"training": {"iteration": 1}},
            retain=Retention(),
        )

    def save(self) -> None:
        write_and_commit(self.planned(self.folder / "ours"), self.mesh.world)

    def stall(self) -> None:
        self.saver.save(self.planned(self.folder / "background"))

    @cached_property
    def copies(self) -> dict[str, Tensor]:
        """Memory that is there already."""
        return {key: torch.empty_like(tensor).fill_(1) for key, tensor in self.tensors.items()}

    def copy(self) -> None:
        for key, tensor in self.tensors.items():
            self.copies[key].copy_(tensor)

    def load(self) -> None:
        load_checkpoint(self.folder / "ours" / "iter_0000001", mesh=self.mesh, pieces=self.pieces())

    def dcp_save(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp", single_file_per_rank=False, sync_files=True, thread_count=2)
        dcp.save(self.tensors, storage_writer=writer, no_dist=True)

    def dcp_load(self) -> None:
        dcp.load(self.tensors, checkpoint_id=self.folder / "dcp", no_dist=True)

    def run(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of each, round by round; the first round warms up."""
        sides: dict[str, Callable[[], None]] = {
            DCP["save"]: self.dcp_save,
            "save": self.save,
            "copy": self.copy,
            "stall": self.stall,
            DCP["load"]: self.dcp_load,
            "load": self.load,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats + 1):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            for name, side in sides.items():
                times[name].append(seconds(side, torch.device("cpu")))
                self.saver.wait()
        return {name: own[1:] for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(CPU), default="w1")
    parser.add_argument("--folder", default="runs/checkpoint_benchmark", help="for the files; it is deleted at the end")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--saves", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    sides = Sides(CPU[args.workload], Path(args.folder))
    size = sum(tensor.nbytes for tensor in sides.tensors.values())
    times = sides.run(args.repeats)
    print(f"{size / 1e6:.0f} MB, {args.repeats} alternating repeats\n{'':10} {'ms':>7}   ratio (median, min, max)")
    for name, of in {"save": DCP["save"], "load": DCP["load"], "stall": "save", "copy": "save"}.items():
        ratios = [a / b for a, b in zip(times[name], times[of], strict=True)]
        middle = statistics.median(times[name]) * 1e3
        print(f"{name:10} {middle:7.0f}   {statistics.median(ratios):.2f} {min(ratios):.2f} {max(ratios):.2f} of {of}")
    for number in range(1, args.saves + 1):
        sides.stall()
        if number % max(1, args.saves // 5) == 0:
            sides.saver.wait()
            print(f"after {number} saves: at most {peak_process_memory(sides.mesh) / 1e6:.0f} MB were used")
    sides.saver.wait()
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
