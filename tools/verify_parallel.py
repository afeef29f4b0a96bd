"""Prove that a layout computes what one process computes: in float64, on this machine's CPUs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import at_least_one, below_one, run_tool
from megalite.config.entry import refuse_few_flags
from megalite.config.fields import section_names
from megalite.config.flags import (
    FlagParser,
    build_parser,
    explicit_fields,
    parse_namespace,
    read_run,
)

DESCRIPTION = "Run a layout and one process from the same weights and compare losses and all gradients. Takes the flags of a run of pretrain_gpt.py or finetune.py. Exit status: 0 equal, 1 not equal, 2 bad flags."  # noqa: E501


def parser() -> FlagParser:
    flags = build_parser("verify_parallel.py", DESCRIPTION, section_names(), megatron=True)
    add = flags.add_argument_group("proof", "all other flags are those of a run").add_argument
    add(
        "--shrink",
        action="store_true",
        help="use a small network, layout, batch and data of the same structure; --load-hf gives only the structure",
    )
    add("--keep-layout", action="store_true", help="with --shrink: keep TP, PP and virtual stages as given")
    processes = "processes to start (default: TP x PP x CP, or twice that if this is at most 8)"
    add("--processes", type=at_least_one, metavar="N", help=processes)
    most = "refuse to start more processes (default: 4 per CPU core, but at least 16)"
    add("--most-processes", type=at_least_one, metavar="N", help=most)
    matrix = "prove all layouts of up to N processes instead of the given layout"
    add("--matrix", type=at_least_one, metavar="N", help=matrix)
    tolerance = "largest relative difference that counts as equal (default: 1e-10)"
    add("--tolerance", type=below_one, default=1e-10, metavar="X", help=tolerance)
    add("--steps", type=at_least_one, default=10, metavar="N", help="steps to compare (default: 10)")
    add("--json", metavar="FILE", help="also write the results to this JSON file")
    return flags


def main(arguments: list[str]) -> int:
    given, notes = parse_namespace(parser(), arguments)
    from megalite.distributed.pool import WorkerError, WorkerTimeout
    from megalite.training.prepare import fill_config
    from megalite.verify.report import Size, prove_matrix, prove_one

    config = read_run(given)
    notes += fill_config(config, explicit_fields(given))
    refuse_few_flags(config, "verify_parallel.py")
    size = Size(given.matrix or given.processes, given.shrink, given.keep_layout, given.most_processes)
    prove = prove_one if given.matrix is None else prove_matrix
    try:
        rows = prove(config, size, steps=given.steps, tolerance=given.tolerance, notes=notes)
    except (WorkerError, WorkerTimeout) as error:
        print(f"NOT COMPARED, a run failed: {error}", file=sys.stderr)
        return 1
    if given.json:
        Path(given.json).write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n", "utf-8")
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(run_tool(main))
