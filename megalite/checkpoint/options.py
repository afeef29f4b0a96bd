"""The commands of `tools/convert_checkpoint.py` and their flags.

Imports no torch, so that `--help` is instant and a bad flag refused at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.config.errors import FlagError
from megalite.config.flags import FlagParser, parse_namespace
from megalite.config.schema_finetune import HUBS
from megalite.files.remote import place

COMMANDS = {
    "hf-to-megalite": "Read the Hugging Face folder --hf, write a checkpoint of iteration 0 into --save.",
    "megatron-to-megalite": "Read a checkpoint of Megatron-LM, write a checkpoint of iteration 0 into --save. "
    "--megatron is the folder of a run, or of one checkpoint in it, in the format torch_dist or torch (mp_rank_XX), of "
    "any layout. The network comes from the args that it holds. Weights are converted, optimizer state is not.",
    "megalite-to-hf": "Read a checkpoint of any layout, write the Hugging Face folder --hf. A checkpoint of --task "
    "classification becomes a classifier (ForSequenceClassification).",
    "reshard": "Copy a checkpoint into another number of files. All values and the optimizer state stay the same; each "
    "tensor is written in one piece. You don't need this to change the layout: every checkpoint loads at every layout.",
    "average": "Write the average of the weights of several checkpoints of a run. Sums are in fp64; each tensor keeps "
    "its number format. All else is the last one's; optimizer state is left out.",
    "inspect": "Print what a checkpoint holds. Iteration, network, layout, number format, every parameter, sizes; no "
    "tensor is read, so it is fast.",
    "to-torch": "Write a checkpoint's parameters into one file. Tensors are whole, in the checkpoint's number format, "
    "under their global names (decoder.layers.0.mlp.linear_fc1.weight), without vocabulary padding. Fused weights stay "
    "fused: queries, keys and values are [groups, queries per group + key + value, head, hidden], gate and up [2, "
    "inner, hidden]. For transformers' names and shapes use megalite-to-hf.",
}


def add_folder_flags(add: Callable[..., object]) -> None:
    """The flags that belong to a Hugging Face folder; `add`: a parser's `add_argument`."""
    hub = "hub to download OWNER/NAME from (default: huggingface)"
    add("--hub", choices=HUBS, default=HUBS[0], help=hub)
    ignore = "unknown fields of config.json that you know don't change what the model computes (default: none)"
    add("--ignore-config-field", nargs="+", action="extend", default=[], metavar="NAME", help=ignore)


def usage() -> str:
    """The commands, one a line."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {text.partition('. ')[0].rstrip('.')}." for name, text in COMMANDS.items())
    head = "usage: convert_checkpoint.py COMMAND FLAGS, where COMMAND --help shows its flags and COMMAND is\n\n"
    return head + "\n".join(lines)


def parser(command: str) -> FlagParser:
    """The flags of one command."""
    flags = FlagParser(f"convert_checkpoint.py {command}", COMMANDS[command])
    if command not in ("hf-to-megalite", "megatron-to-megalite"):
        flags.add_argument("--load", required=True, type=place, metavar="DIR", help="folder of a run's checkpoints")
    if command not in ("hf-to-megalite", "average"):
        flags.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    if command in ("hf-to-megalite", "megalite-to-hf"):
        flags.add_argument("--hf", required=True, type=Path, metavar="DIR", help="Hugging Face folder")
        compare = "don't compare logits with transformers at the end (default: off)"
        flags.add_argument("--no-compare", action="store_true", help=compare)
    if command == "hf-to-megalite":
        add_folder_flags(flags.add_argument)
    if command == "megatron-to-megalite":
        flags.add_argument("--megatron", required=True, type=Path, metavar="DIR", help="folder of Megatron-LM")
        rows = "rows of the embedding without padding (default: as many as the checkpoint's tokenizer has ids)"
        flags.add_argument("--model-vocab-size", type=int, metavar="N", help=rows)
    if command == "average":
        steps = "iterations to average, at least two"
        flags.add_argument("--steps", required=True, type=int, nargs="+", metavar="N", help=steps)
    if command in ("hf-to-megalite", "megatron-to-megalite", "average", "reshard"):
        flags.add_argument("--save", required=True, type=place, metavar="DIR", help="new folder for the checkpoint")
    if command == "reshard":
        files = "number of data files to write, at most one per tensor (default: 1)"
        flags.add_argument("--files", type=int, default=1, metavar="N", help=files)
    elif command == "inspect":
        flags.add_argument("--json", action="store_true", help="print one JSON object instead (default: off)")
    elif command == "to-torch":
        out = (
            "file to write (an existing one is replaced): NAME.safetensors, written tensor by tensor, or NAME.pt, a "
            "dictionary for torch.load, which needs memory for all tensors at once"
        )
        flags.add_argument("--out", required=True, type=Path, metavar="FILE", help=out)
        state = (
            "also write the optimizer state, as optimizer.KIND.NAME; in half-precision runs KIND main is the fp32 main "
            "parameters (default: off)"
        )
        flags.add_argument("--optimizer", action="store_true", help=state)
    return flags


def read_options(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command and its flags. Raises a FlagError for what is unknown or out of range."""
    command, *words = arguments
    if command not in COMMANDS:
        raise FlagError(f"unknown command {command}; valid: {', '.join(COMMANDS)}")
    given, _ = parse_namespace(parser(command), words)
    if command == "reshard" and given.files < 1:
        raise FlagError(f"--files {given.files} must be at least 1")
    if command == "average" and (len(given.steps) < 2 or len(set(given.steps)) < len(given.steps)):
        raise FlagError(f"--steps {' '.join(map(str, given.steps))}: give two iterations or more, each once")
    return command, given
