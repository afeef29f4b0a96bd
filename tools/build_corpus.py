"""Build the quickstart's corpus from the Python standard library's source. See lib/stdlib_corpus.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.config.flags import FlagParser, parse_namespace


def parser() -> FlagParser:
    flags = FlagParser(
        "build_corpus.py",
        "Write train.jsonl and valid.jsonl from the source of this Python's standard library; no download is needed.",
    )
    flags.add_argument("--output", required=True, metavar="DIR", help="folder for train.jsonl and valid.jsonl")
    flags.add_argument(
        "--source", type=Path, metavar="DIR", help="another folder of .py files (default: the standard library)"
    )
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    from lib.stdlib_corpus import build_corpus

    made = build_corpus(given.output, given.source)
    print(f"wrote {made.train}: {made.train_documents:,} documents, {made.train_bytes / 1e6:.1f} MB of text")
    print(f"wrote {made.valid}: {made.valid_documents:,} documents, {made.valid_bytes / 1e6:.1f} MB of text, held out")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
