"""Prove that a layout computes what one process computes: in float64, on this machine's CPUs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.cli import run_tool
from megalite.config.fields import section_names
from megalite.config.flags import FlagParser, build_parser, explicit_fields, parse_namespace, read_run

DESCRIPTION = "Run a layout and one process from the same start and compare losses and all gradients. Takes the flags of a run of pretrain_gpt.py or finetune.py. Exit status: 0 equal, 1 not, 2 bad flags."  # noqa: E501


def parser() -> FlagParser:
    flags = build_parser("verify_parallel.py", DESCRIPTION, section_names(), megatron=True)
    add = flags.add_argument_group("proof", "everything else: the flags of a run").add_argument
    add(
        "--shrink",
        action="store_true",
        help="small network, batch and data of the same structure; --load-hf then gives the structure alone",
    )
    add("--processes", type=int, metavar="N", help="processes of the layout (default: TP x PP x CP, twice if 8 allow)")
    add("--matrix", type=int, metavar="N", help="prove all layouts of up to N processes instead of the given one")
    add("--tolerance", type=float, default=1e-10, help="largest relative difference that is equal (default: 1e-10)")
    add("--steps", type=int, default=10, help="steps to compare (default: 10)")
    add("--json", metavar="FILE", help="write the table as JSON")
    return flags


def main(arguments: list[str]) -> int:
    given, notes = parse_namespace(parser(), arguments)
    from megalite.distributed.pool import WorkerError, WorkerTimeout
    from megalite.training.prepare import fill_config
    from megalite.verify.report import prove_matrix, prove_one

    config = read_run(given)
    notes += fill_config(config, explicit_fields(given))
    for note in notes:
        print(note, file=sys.stderr)
    try:
        if given.matrix is not None:
            rows = prove_matrix(config, processes=given.matrix, steps=given.steps, tolerance=given.tolerance)
        else:
            size = {"processes": given.processes, "shrunk": given.shrink}
            rows = prove_one(config, **size, steps=given.steps, tolerance=given.tolerance)
    except (WorkerError, WorkerTimeout) as error:
        print(f"NOT COMPARED, a run failed: {error}", file=sys.stderr)
        return 1
    if given.json:
        Path(given.json).write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n", "utf-8")
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(run_tool(main))
