"""Which tokenizer made token files: written to `PREFIX.tokenizer.json`, so the pair itself stays as Megatron-LM's is.

Key idea: names of files say little, so tokenizers are compared by their fingerprints; the file is believed as long as
the pair is the one that it was written with.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from megalite.config.schema import TokenizerConfig
from megalite.data.indexed_dataset import bin_path, origin_path
from megalite.data.tokenizer_base import Tokenizer
from megalite.files.remote import place


def origin_of(tokenizer: Tokenizer, config: TokenizerConfig) -> dict[str, Any]:
    """The description of a tokenizer that was built from `config`."""
    plain = copy.copy(tokenizer)
    plain.parse_special_tokens = False  # how texts were read, not what ids mean
    name = " ".join(filter(None, (config.tokenizer_type, config.tokenizer_model or config.vocab_file)))
    return {"tokenizer": name, "vocab_size": tokenizer.vocab_size, "fingerprint": plain.fingerprint()}


def read_origin(prefix: str) -> dict[str, Any] | None:
    """The description of the tokenizer that made a pair; None where that isn't known."""
    try:
        content = json.loads(place(origin_path(prefix)).read_text(encoding="utf-8"))
        return content["origin"] if content["bytes"] == place(bin_path(prefix)).stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def origin_name(origin: dict[str, Any]) -> str:
    """For a message."""
    return f"{origin['tokenizer']} ({origin['vocab_size']:,} ids, {origin['fingerprint'][:8]})"


def origin_note(prefix: str, mine: dict[str, Any]) -> str | None:
    """One line where another tokenizer than `mine` made the pair."""
    origin = read_origin(prefix)
    if origin is None or origin["fingerprint"] == mine["fingerprint"]:
        return None
    return (
        f"warning: {prefix} was written with the tokenizer {origin_name(origin)}, and this one is {origin_name(mine)}"
    )
