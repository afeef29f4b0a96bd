"""Inspect, reshard and convert checkpoints. See megalite/checkpoint/."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.checkpoint.options import read_options, usage
from megalite.config.errors import UserError


def lines(command: str, given: Namespace) -> Iterator[str]:
    """Carry out a command; yields the lines to print."""
    from megalite.checkpoint.average import average
    from megalite.checkpoint.huggingface import compare, export, load
    from megalite.checkpoint.huggingface.hub import local_folder
    from megalite.checkpoint.inspection import describe_checkpoint, report_lines
    from megalite.checkpoint.megatron.load import megatron_to_megalite
    from megalite.checkpoint.rewrite import reshard, write_single_file
    from megalite.checkpoint.storage import find_checkpoint
    from megalite.models.whole import build_whole, outputs

    if command == "hf-to-megalite":
        given.hf = Path(local_folder(str(given.hf), given.hub))
        yield from load.huggingface_to_megalite(given.hf, given.save, build_whole, given.ignore_config_field)
    if command == "megatron-to-megalite":
        rows = given.model_vocab_size
        yield from megatron_to_megalite(given.megatron, given.save, build_whole, step=given.ckpt_step, vocab_size=rows)
        return
    if command == "average":
        averaged = average(given.load, given.steps, given.save)
        yield f"{averaged} = average of iterations {', '.join(map(str, sorted(given.steps)))}"
        return
    root = given.save if command == "hf-to-megalite" else given.load
    checkpoint = find_checkpoint(root, vars(given).get("ckpt_step"))
    if checkpoint is None:
        raise UserError(f"--load {root} holds no checkpoint")
    if checkpoint.note:
        print(checkpoint.note, file=sys.stderr)
    if command == "inspect":
        facts = describe_checkpoint(checkpoint)
        yield from [json.dumps(facts)] if given.json else report_lines(facts)
    elif command == "to-torch":
        yield write_single_file(checkpoint, given.out, optimizer=given.optimizer)
    elif command == "reshard":
        yield f"{checkpoint.path} = {reshard(checkpoint, given.save, files=given.files)}"
    else:
        notes = export.megalite_to_huggingface(checkpoint, given.hf) if command == "megalite-to-hf" else []
        yield from [f"{checkpoint.path} = {given.hf}", *notes]
        if not given.no_compare:
            yield compare.compare_with_transformers(checkpoint, given.hf, build_whole, outputs)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    for line in lines(*read_options(arguments)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
