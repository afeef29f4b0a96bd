"""Train a SentencePiece tokenizer: PREFIX.model. See megalite/data/tokenizer_training.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megalite") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib.cli import add_input_flags, at_least_one, run_tool
from megalite.config.flags import FlagParser, parse_namespace


def parser() -> FlagParser:
    flags = FlagParser("train_tokenizer.py", "Train a lossless SentencePiece tokenizer: PREFIX.model.")
    group = add_input_flags(flags)
    group.add_argument(
        "--max-bytes",
        type=at_least_one,
        default=100_000_000,
        metavar="N",
        help="train on at most this much text, taken evenly from the input (default: 100000000)",
    )
    group = flags.add_argument_group("model")
    group.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of ids, with 256 bytes and 3 special ids"
    )
    group.add_argument(
        "--model-type",
        default="bpe",
        choices=("bpe", "unigram"),
        help="unigram takes much longer to train (default: bpe)",
    )
    group.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="X",
        help="share of the text covered by characters with their own ids; the rest become bytes (default: 0.9995)",
    )
    group = flags.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="the model is PREFIX.model")
    group.add_argument("--verbose", action="store_true", help="print SentencePiece's own log (default: off)")
    return flags


def main(arguments: list[str]) -> int:
    given, _ = parse_namespace(parser(), arguments)
    from megalite.data.tokenizer_training import TrainingOptions, train_tokenizer

    options = TrainingOptions(
        inputs=given.input,
        output_prefix=given.output_prefix,
        vocab_size=given.vocab_size,
        json_keys=given.json_keys,
        model_type=given.model_type,
        character_coverage=given.character_coverage,
        max_bytes=given.max_bytes,
        text_documents=given.text_documents,
        verbose=given.verbose,
    )
    path = train_tokenizer(options)
    print(f"wrote {path}: use --tokenizer-type SentencePieceTokenizer --tokenizer-model {path}")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
