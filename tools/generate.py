"""Generate text with a trained model: continue prompts, chat, or serve. See megalite/inference/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.checkpoint.options import add_folder_flags
from megalite.config.flags import FlagParser, add_section, explicit_fields, parse_namespace
from megalite.inference.options import add_generation_flags, check_mode, read_generation_options, read_prompt

if TYPE_CHECKING:
    from megalite.inference.load import LoadedModel


def parser() -> FlagParser:
    flags = FlagParser("generate.py", "Generate text with a trained model: continue prompts, chat, or serve.")
    add = flags.add_argument_group("model", "the folder gives network, tokenizer and number format").add_argument
    add("--load", metavar="DIR", help="folder with a run's checkpoints")
    add("--ckpt-step", type=int, metavar="N", help="iteration of --load (default: the newest)")
    add("--load-hf", metavar="DIR", help="Hugging Face folder, or OWNER/NAME of a model on a hub, instead of --load")
    add_folder_flags(add)
    add("--adapter", metavar="DIR", help="folder of an adapter in PEFT's format to add to the model (default: none)")
    add = flags.add_argument_group("prompts", "independent of each other; may be given several times").add_argument
    text = "a prompt; if it begins with @ or -, write --prompt=@TEXT"
    add("--prompt", dest="prompts", action="append", metavar="TEXT", help=text)
    file = "file that holds one prompt; a line break at its end is removed"
    add("--prompt-file", dest="prompts", action="append", type=read_prompt, metavar="FILE", help=file)
    add = flags.add_argument_group("conversation").add_argument
    add("--chat", action="store_true", help="prompts are user messages; without any, chat here (default: off)")
    add("--chat-template", metavar="FILE", help="chatml, or a template file (default: the tokenizer's own template)")
    add("--system", metavar="TEXT", help="system message that begins each conversation (default: the template's)")
    serve = "serve OpenAI's completions and chat completions on 127.0.0.1 until Ctrl-C; 0: any free port"
    add("--serve", type=int, metavar="PORT", help=f"{serve} (default: off)")
    memory = "memory for the KV cache of all requests of --serve together (default: half of the free memory)"
    add("--serve-memory", type=float, metavar="GIB", help=memory)
    add_generation_flags(flags)
    group = flags.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="JSON lines with prompt, text, tokens (default: off)")
    add_section(flags, "tokenizer")
    add_section(flags, "precision", only=("bf16", "fp16", "fp64"))
    add_section(flags, "layout", only=("device", "threads_per_rank"))
    return flags


def put_adapter(loaded: LoadedModel, folder: str, model: str) -> LoadedModel:
    """On the model, unmerged. `model`: the folder that it came from."""
    from megalite.peft.adapter import load_adapter
    from megalite.peft.files import base_note
    from megalite.precision.policy import Precision

    precision = Precision.from_config(loaded.config.precision)
    kind = load_adapter(loaded.model, folder, mesh=loaded.mesh, precision=precision)
    notes = [f"with the {kind.peft} adapter {folder}", base_note(folder, model)]
    return loaded.with_adapter(folder, filter(None, notes))


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    check_mode(given)
    options = read_generation_options(given, max_new_tokens=64 if given.prompts else 512)
    from megalite.inference import command

    loaded = command.load_model(given, {path: getattr(given, path) for path in explicit_fields(given)})
    if given.adapter is not None:
        loaded = put_adapter(loaded, given.adapter, given.load_hf or given.load)
    command.run(loaded, given, options)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
