"""Turn text into token files: PREFIX_KEY_document.bin and .idx. See megalite/data/preprocess.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import add_input_flags, at_least_one, run_tool
from megalite.config.flags import FlagParser, add_section, parse_namespace, read_section


def parser() -> FlagParser:
    flags = FlagParser("preprocess_data.py", "Turn text into token files: PREFIX_KEY_document.bin and .idx.")
    group = add_input_flags(flags)
    group.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip"),
        help="if a document can't be read: stop and write nothing, or skip and count it (default: stop)",
    )
    group = flags.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="start of the output files' names")
    group.add_argument("--append-eod", action="store_true", help="end each document with the EOD id (default: off)")
    group.add_argument(
        "--prepend-bos",
        action="store_true",
        help="begin each document with the first ids of the tokenizer's own template, or its BOS id (default: off)",
    )
    group = flags.add_argument_group("runtime")
    group.add_argument("--workers", type=at_least_one, default=1, metavar="N", help="tokenizing processes (default: 1)")
    group.add_argument(
        "--log-interval",
        type=at_least_one,
        default=1000,
        metavar="N",
        help="documents between progress lines, if there is no terminal for a progress bar (default: 1000)",
    )
    accepted = "accepted, as in Megatron-LM; the output doesn't depend on it"
    group.add_argument("--partitions", type=int, default=1, metavar="N", help=f"{accepted} (default: 1)")
    group.add_argument("--keep-sequential-samples", action="store_true", help=f"{accepted} (default: off)")
    add_section(flags, "tokenizer")
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    from tqdm import tqdm

    from megalite.data.preprocess import PreprocessOptions, preprocess

    names = ("output_prefix", "json_keys", "append_eod", "prepend_bos", "workers", "on_error", "text_documents")
    options = PreprocessOptions(
        given.input, log_interval=given.log_interval, **{name: getattr(given, name) for name in names}
    )
    summary = preprocess(options, read_section(given, "tokenizer"), lambda line: tqdm.write(line, file=sys.stderr))
    print(summary)
    for key in given.json_keys:
        prefix = f"{given.output_prefix}_{key}_document"
        print(f"wrote {prefix}.bin and .idx: use --data-path {prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
