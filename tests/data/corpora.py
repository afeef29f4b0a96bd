"""Small real-looking texts, and tokenizers learned from them, for the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from megalite.data.tokenizer_training import TrainingOptions, train_tokenizer

ENGLISH = "The quick brown fox jumps over the lazy dog, and the dog doesn't care.  It's 1984 or 2026.\n\nNext one.\n"
CHINESE = "今天天气很好，我们一起去公园散步。\n小明说：“你好，世界！”然后他笑了。\n"
CODE = "def add(a: int, b: int) -> int:\n    if a > b:\n\t\treturn a\n        # eight blanks\n    return b\n\n\n"
EMOJI = "naïve café 👍🏽 👨‍👩‍👧 𝔘𝔫𝔦 é ñ ‮ \u00a0\u3000\ufeff end\r\n"
SAMPLES = (ENGLISH, CHINESE, CODE, EMOJI, ENGLISH + CODE + CHINESE + EMOJI)
ODD = (
    " ",
    "  leading",
    "trailing   ",
    "\n",
    "\n\n\n",
    "\t\t",
    "\r\r\n",
    "\x00\x07",
    "▁ is a block ▁▁",
    "<s>x</s>",
    "<0x41>",
)


def write_jsonl(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    lines = (json.dumps({key: text}, ensure_ascii=False) for text in texts)
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def sentencepiece_model(folder: Path, **changes: Any) -> str:
    """A model of 400 pieces learned from the samples; `changes` go to TrainingOptions."""
    source = write_jsonl(folder / "learn.jsonl", SAMPLES * 3)
    values: dict[str, Any] = {"inputs": [str(source)], "output_prefix": str(folder / "small"), "vocab_size": 400}
    return train_tokenizer(TrainingOptions(**(values | changes)))


def byte_level(vocab_size: int = 300, *special: str) -> tokenizers.ByteLevelBPETokenizer:
    """A byte-level BPE learned from the samples."""
    learner = tokenizers.ByteLevelBPETokenizer()
    learner.train_from_iterator(SAMPLES * 3, vocab_size=vocab_size, special_tokens=list(special), show_progress=False)
    return learner
