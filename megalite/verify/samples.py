"""Small files of answers and labels from a rule, for proofs of fine-tuning with a network and a tokenizer of their own.

Key idea: texts are ids in decimal, NullTokenizer's words, of many lengths up to a row: so batches are cut to their
longest sample, packs hold several, and microbatches differ in how many of their tokens count.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

_COUNT = 64


def write_samples(folder: Path, task: str, *, length: int, vocab_size: int) -> str:
    """Write a file of prompts and completions, or with the task `classification` of texts and three labels, into
    `folder`; its path. Texts have up to `length` tokens, end of document included, and ids below `vocab_size`."""
    draw = random.Random(f"{task} {length}")

    def words(longest: int) -> str:
        return " ".join(str(draw.randrange(vocab_size)) for _ in range(draw.randint(1, longest)))

    path = folder / f"{task}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(_COUNT):
            if task == "classification":
                sample = {"text": words(length), "label": number % 3}
            else:
                sample = {"prompt": words(length // 2), "completion": f" {words(length // 2 - 1)}"}
            file.write(json.dumps(sample) + "\n")
    return str(path)
