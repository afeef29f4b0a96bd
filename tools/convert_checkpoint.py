"""Between a Hugging Face folder and megalite's checkpoints. See megalite/checkpoint/huggingface/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.cli import run_tool
from megalite.config.errors import FlagError, UserError
from megalite.config.flags import FlagParser, parse_namespace

COMMANDS = {
    "hf-to-megalite": "Read the Hugging Face folder --hf, write a checkpoint of iteration 0 into --save.",
    "megalite-to-hf": "Read a checkpoint of any layout from --load, write the Hugging Face folder --hf.",
}


def parser(command: str) -> FlagParser:
    flags = FlagParser(f"convert_checkpoint.py {command}", COMMANDS[command])
    flags.add_argument("--hf", required=True, type=Path, metavar="DIR", help="Hugging Face folder")
    if command == "hf-to-megalite":
        flags.add_argument("--save", required=True, type=Path, metavar="DIR", help="new folder for the checkpoint")
    else:
        flags.add_argument("--load", required=True, type=Path, metavar="DIR", help="folder of a run's checkpoints")
        flags.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    no_compare = "don't compare logits with transformers at the end (default: off)"
    flags.add_argument("--no-compare", action="store_true", help=no_compare)
    return flags


def build(config: Any, vocab_size: int, mesh: Any) -> Any:
    from megalite.models.gpt import GPTStage
    from megalite.models.stages import whole_model
    from megalite.nn.attention_backend import choose_backend
    from megalite.nn.module import Build
    from megalite.precision.policy import Precision

    parts = Build(config.model, mesh, Precision.from_config(config.precision))
    return GPTStage(parts, vocab_size, whole_model(config.model.num_layers), choose_backend(config, "cpu")).eval()


def logits(model: Any, tokens: Any) -> Any:
    from megalite.models.gpt import plain_info

    return model.logits(model(tokens, plain_info(tokens))).transpose(0, 1)


def main(arguments: list[str]) -> int:
    command, *words = arguments or ["--help"]
    if command in ("-h", "--help"):
        print("usage: convert_checkpoint.py COMMAND FLAGS, where COMMAND --help shows its flags and COMMAND is\n")
        print("\n".join(f"  {name}  {text}" for name, text in COMMANDS.items()))
        return 0
    if command not in COMMANDS:
        raise FlagError(f"unknown command {command}; valid: {', '.join(COMMANDS)}")
    given, _ = parse_namespace(parser(command), words)
    from megalite.checkpoint.huggingface import compare, convert, export
    from megalite.checkpoint.storage import find_checkpoint

    if command == "hf-to-megalite":
        convert.huggingface_to_megalite(given.hf, given.save, build)
    root = given.save if command == "hf-to-megalite" else given.load
    checkpoint = find_checkpoint(root, vars(given).get("ckpt_step"))
    if checkpoint is None:
        raise UserError(f"--load {root} holds no checkpoint")
    notes = export.megalite_to_huggingface(checkpoint, given.hf) if command == "megalite-to-hf" else []
    print(*filter(None, [checkpoint.note, f"{checkpoint.path} = {given.hf}", *notes]), sep="\n")
    if not given.no_compare:
        print(compare.compare_with_transformers(checkpoint, given.hf, build, logits))
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
