#!/usr/bin/env python
"""Make train.jsonl and valid.jsonl of Chinese poems and sayings from the files of Debian's package fortunes-zh.

    python examples/chinese/make_corpus.py SOURCE FOLDER     # SOURCE: the folder that holds tang300, song100, chinese

In a file of `fortune`, lines with a single % separate the documents. What holds Latin letters (computers, for the
most part) is left out, colours and indentation are removed, and every 20th document is held out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FILES = ("tang300", "song100", "chinese")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNWANTED = re.compile(r"[A-Za-z\u2500-\u257f]")  # Latin letters, and the lines of tables
HELD_OUT = 20


def documents(text: str) -> list[str]:
    """The documents of one file, without colours, indentation and blank lines."""
    plain = COLOUR.sub("", text).replace("\u00a0", " ")
    parts = re.split(r"^%$", plain, flags=re.MULTILINE)
    cleaned = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in parts]
    return [part for part in cleaned if part and not UNWANTED.search(part)]


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    source, folder = map(Path, sys.argv[1:])
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        sys.exit(f"{source} has no file {missing[0]}: give the folder of fortunes-zh that holds {', '.join(FILES)}")
    found = [part for name in FILES for part in documents((source / name).read_text(encoding="utf-8"))]
    unique = list(dict.fromkeys(found))
    parts = {"train": [text for number, text in enumerate(unique) if number % HELD_OUT], "valid": unique[::HELD_OUT]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in parts.items():
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"wrote {folder / name}.jsonl: {len(texts):,} documents, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
