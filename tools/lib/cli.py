"""What the command-line tools share: the flags to read a corpus, and exit status and error message.

The key idea: a mistake is one line on stderr, and the exit status says what kind it was.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from megalite.config.errors import FlagError, UserError
from megalite.config.flags import to_float, to_int


def run_tool(main: Callable[[list[str]], int]) -> int:
    """Calls `main` with the command line's words and returns the exit status.

    0: whatever `main` says. 2: FlagError. 1: UserError, or the operating system's refusal (a full disk). 130: Ctrl-C,
    143: SIGTERM, 141: nobody reads the output any more. These print one line, without a traceback; any other exception
    is a fault of the program and passes. SIGTERM unwinds the stack, so that temporary files are removed.
    """
    program = os.path.basename(sys.argv[0])
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except (FlagError, UserError) as error:
        return _end(f"{program}: error: {error}", 2 if isinstance(error, FlagError) else 1)
    except KeyboardInterrupt:
        return _end(f"{program}: interrupted", 130)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it a place where that works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _end(f"{program}: error: {error}", 1)


def add_input_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add `--input`, `--json-keys` and `--text-documents`: what text a tool reads. Returns their group."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or glob patterns, read in order: JSON lines or plain text (.txt), also compressed (.gz, .zst)",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="JSON keys to read (default: text)"
    )
    group.add_argument(
        "--text-documents",
        default="file",
        choices=("file", "paragraph", "line"),
        help="what is one document in plain text; paragraphs end at blank lines (default: file)",
    )
    return group


def at_least_one(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = to_int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def below_one(text: str) -> float:
    """A number from 0 to below 1, for argparse."""
    number = to_float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to below 1")
    return number


def _end(message: str, status: int) -> int:
    sys.stderr.write(message + "\n")
    return status


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
