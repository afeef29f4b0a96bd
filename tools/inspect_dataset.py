"""Show what token files hold: header, lengths of documents, and the first documents as text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.config.fields import section_fields
from megalite.config.flags import FlagParser, add_section, parse_namespace, read_section


def parser() -> FlagParser:
    flags = FlagParser("inspect_dataset.py", "Show what token files hold: header, document lengths, first documents.")
    flags.add_argument("--input", required=True, metavar="PREFIX", help="prefix of the .bin and .idx files")
    flags.add_argument("--documents", type=int, default=2, metavar="N", help="documents to show (default: 2)")
    flags.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of each to show (default: 64)")
    names = (field.name for field in section_fields("tokenizer") if field.name != "parse_special_tokens")
    add_section(flags, "tokenizer", only=names)
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    from megalite.data.inspection import describe_dataset
    from megalite.data.tokenizers import build_tokenizer

    config = read_section(given, "tokenizer")
    tokenizer = build_tokenizer(config) if config.tokenizer_type else None
    for line in describe_dataset(given.input, tokenizer, given.documents, given.tokens):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
