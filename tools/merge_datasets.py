"""Join token files into one pair. See megalite/data/merge.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import run_tool
from megalite.config.flags import FlagParser, parse_namespace


def parser() -> FlagParser:
    flags = FlagParser("merge_datasets.py", "Join token files into one pair of .bin and .idx.")
    flags.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="prefixes of .bin and .idx files, joined in this order; a folder means all pairs in it, by name",
    )
    flags.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="the result is PREFIX.bin and PREFIX.idx"
    )
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    from megalite.data.merge import merge_datasets

    parts, documents, tokens = merge_datasets(given.input, given.output_prefix)
    print(f"wrote {given.output_prefix}.bin and .idx: {parts:,} parts, {documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
