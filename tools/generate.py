"""Let a trained model continue prompts. See megalite/inference/."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.cli import run_tool
from megalite.config.errors import FlagError
from megalite.config.flags import FlagParser, add_section, explicit_fields, parse_namespace
from megalite.inference.options import add_generation_flags, read_generation_options


def parser() -> FlagParser:
    flags = FlagParser("generate.py", "Let a trained model continue prompts.")
    group = flags.add_argument_group("model", "network, tokenizer and number format are those of the checkpoint")
    group.add_argument("--load", required=True, metavar="DIR", help="folder that training saved checkpoints in")
    group.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load (default: the newest)")
    add = flags.add_argument_group("prompts", "any number of both, each continued on its own").add_argument
    text = "a prompt; one that begins with @ or - goes behind an equals sign: --prompt=@TEXT"
    add("--prompt", dest="prompts", action="append", metavar="TEXT", help=text)
    file = "file whose text is one prompt; a line break at its end is left out"
    add("--prompt-file", dest="prompts", action="append", type=read_prompt, metavar="FILE", help=file)
    add_generation_flags(flags)
    group = flags.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one object a line: prompt, text, tokens (default: off)")
    add_section(flags, "tokenizer")
    add_section(flags, "precision", only=("bf16", "fp16", "fp64"))
    add_section(flags, "layout", only=("device", "threads_per_rank"))
    return flags


def read_prompt(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    options = read_generation_options(given)
    if not given.prompts:
        raise FlagError("--prompt or --prompt-file is missing: there is nothing to continue")
    from megalite.inference.load import load_for_generation
    from megalite.inference.text import complete

    overrides = {path: getattr(given, path) for path in explicit_fields(given)}
    loaded = load_for_generation(given.load, step=given.ckpt_step, given=overrides)
    print(*loaded.notes, *options.notes(), sep="\n", file=sys.stderr)
    live = len(given.prompts) == 1 and not given.json and sys.stdout.isatty()
    show = (lambda _, text: print(text, end="", flush=True)) if live else None
    results = complete(loaded.model, loaded.tokenizer, given.prompts, options, show=show)
    for number, result in enumerate(results, start=1):
        if given.json:
            print(json.dumps(vars(result)))
            continue
        if len(results) > 1:
            print(f"--- prompt {number} of {len(results)} ---")
        print("" if live else result.prompt + result.text)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
