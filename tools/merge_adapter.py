"""Add a LoRA adapter to a model's weights, in fp32, rounded once. See megalite/peft/merge.py."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.checkpoint.options import add_folder_flags
from megalite.config.errors import FlagError, UserError
from megalite.config.flags import FlagParser, parse_namespace
from megalite.files.remote import place


def parser() -> FlagParser:
    flags = FlagParser("merge_adapter.py", "Merge a LoRA adapter into a model: writes the Hugging Face folder --hf.")
    model = "Hugging Face folder of the model, or OWNER/NAME of one on a hub (or --load)"
    flags.add_argument("--load-hf", metavar="DIR", help=model)
    add_folder_flags(flags.add_argument)
    flags.add_argument("--load", type=place, metavar="DIR", help="folder of a run's checkpoints (or --load-hf)")
    flags.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    adapter = "folder in PEFT's format; default: the adapter is that of the checkpoint of --load, --load-hf its model"
    flags.add_argument("--adapter", type=place, metavar="DIR", help=adapter)
    flags.add_argument("--hf", required=True, type=Path, metavar="DIR", help="new folder for the merged model")
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    if given.adapter is None and given.load is None:
        raise FlagError("give the adapter as --adapter, or as the checkpoint of a run with --peft lora: --load")
    if given.adapter is not None and (given.load_hf is None) == (given.load is None):
        raise FlagError("give the model as either --load-hf or --load")
    if given.ckpt_step is not None and given.load is None:
        raise FlagError(f"--ckpt-step {given.ckpt_step} needs --load")
    from megalite.checkpoint.huggingface.export import megalite_to_huggingface
    from megalite.checkpoint.huggingface.hub import local_folder
    from megalite.checkpoint.storage import find_checkpoint
    from megalite.peft.merge import merge_adapter
    from megalite.peft.merge_checkpoint import merge_checkpoint, model_of

    if given.load is None:
        source = Path(local_folder(given.load_hf, given.hub))
        print(*merge_adapter(source, given.adapter, given.hf, given.ignore_config_field), sep="\n")
        return 0
    checkpoint = find_checkpoint(given.load, given.ckpt_step)
    if checkpoint is None:
        raise UserError(f"--load {given.load} holds no checkpoint")
    if given.adapter is None:
        source = Path(local_folder(given.load_hf or model_of(checkpoint), given.hub))
        lines = merge_checkpoint(checkpoint, source, given.hf, given.ignore_config_field)
        print(*filter(None, [checkpoint.note, *lines]), sep="\n")
        return 0
    given.hf.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.hf.parent, prefix=f".{given.hf.name}.") as folder:
        base = Path(folder) / "base"
        print(*filter(None, [checkpoint.note, *megalite_to_huggingface(checkpoint, base)]), sep="\n")
        print(*merge_adapter(base, given.adapter, given.hf, None), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
