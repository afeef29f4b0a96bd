"""`@FILE` on a command line is replaced by the words in FILE.

A file holds words as a shell reads them: any number of flags on a line, quotes, backslashes, `#` comments, and `@FILE`
again, relative to the file that says so. Variables and wildcards are not expanded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from megalite.config.errors import FlagError


def expand_argument_files(words: Sequence[str], folder: Path | None = None) -> list[str]:
    """The words with each `@FILE` replaced by what the file says. A FlagError names a file that can't be read."""
    return _expand(words, folder or Path(), ())


def _expand(words: Sequence[str], folder: Path, open_files: tuple[Path, ...]) -> list[str]:
    expanded: list[str] = []
    for word in words:
        if len(word) > 1 and word.startswith("@"):
            path = folder / word[1:]
            resolved = path.resolve()
            if resolved in open_files:
                chain = " -> ".join(str(file) for file in (*open_files, resolved))
                raise FlagError(f"{word} includes itself: {chain}")
            expanded += _expand(_words_of(path, word), path.parent, (*open_files, resolved))
        else:
            expanded.append(word)
    return expanded


def _words_of(path: Path, word: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FlagError(f"{word}: can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FlagError(f"{word}: {path} is not UTF-8 text") from error
    try:
        return shlex.split(_without_comments(text))
    except ValueError as error:
        raise FlagError(f"{word}: {path}: {str(error).lower()}") from error


_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""


def _without_comments(text: str) -> str:
    """Drop `#` to the end of the line where a word could begin, and join lines that end in a backslash.

    `shlex` would take `c#` for a comment too, and the apostrophe of a comment for a quote.
    """
    text = re.sub(rf"({_QUOTED})|(?<!\S)#[^\n]*", r"\1", text, flags=re.DOTALL)
    return re.sub(rf"\\\n|({_QUOTED})", r"\1", text, flags=re.DOTALL)
