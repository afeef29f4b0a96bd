"""Every flag of Megatron-LM 0.20 and what megalite says to it: honoured, ignored because, or refused because.

Honoured are the flags that `schema.py` defines and the shorthands below them; the answers to all others are the table
`megatron_flags.tsv`, which also explains its notation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.fields import FINETUNING, Field, all_fields

IGNORED, CHANGES, NOT_BUILT, USE = ANSWERS = ("ignored", "changes results", "not built", "use instead")


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM that isn't ours. `nargs` as in argparse: 0 a switch, None one value, "+" or "*" several.

    `harmless`: values with which a refused flag asks for nothing that we lack.
    """

    names: tuple[str, ...]
    nargs: int | str | None
    harmless: tuple[str, ...]
    answer: str
    reason: str

    def refuses(self, values: Sequence[str]) -> bool:
        """Whether the flag with these values must be refused."""
        if self.answer == IGNORED:
            return False
        if self.nargs == 0:
            return True
        return any(not self._is_harmless(value) for value in values)

    def message(self, name: str, values: Sequence[str]) -> str:
        """One line that says what becomes of the flag, as it was spelt and with its values."""
        shown = " ".join([name, *values])
        if not self.refuses(values):
            reason = self.reason if self.answer == IGNORED else "this value changes nothing"
            return f"{shown} is ignored: {reason}"
        if self.answer == USE:
            return f"{shown}: use {self.reason} instead"
        if self.answer == CHANGES:
            return f"{shown} would change results and is not supported: {self.reason}{self._valid()}"
        return f"{shown} is not built yet: {self.reason}{self._valid()}"

    def _valid(self) -> str:
        values = [value for value in self.harmless if value != "0"]  # which means that there is none
        return "; take it out" + (f", or give {' or '.join(values)}" if values else "")

    def _is_harmless(self, value: str) -> bool:
        if value in self.harmless:
            return True
        try:
            return any(float(value) == float(known) for known in self.harmless)
        except ValueError:
            return False


def _rows(*kinds: str) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, what it is about, and words of the table's rows of these kinds."""
    text = Path(__file__).with_name("megatron_flags.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            kind, about, words = line.split("\t")
            if kind in kinds:
                yield kind, about, words.split()


def _read_flag(token: str, answer: str, reason: str) -> MegatronFlag:
    spelling, takes_value, values = token.partition("=")
    nargs: int | str | None = None if takes_value else 0
    if spelling[-1] in "+*":
        spelling, nargs = spelling[:-1], spelling[-1]
    harmless = tuple(value for value in values.split("|") if value)
    return MegatronFlag(tuple(spelling.split("/")), nargs, harmless, answer, reason)


def current_flags() -> list[MegatronFlag]:
    """The flags of Megatron-LM 0.20 that are ignored or refused."""
    return [_read_flag(word, *row) for *row, words in _rows(*ANSWERS) for word in words]


def earlier_flags() -> list[MegatronFlag]:
    """Flags of older versions that are ignored or refused."""
    rows = _rows(*(f"earlier {answer}" for answer in ANSWERS))
    return [_read_flag(word, kind.removeprefix("earlier "), why) for kind, why, words in rows for word in words]


def shorthands() -> dict[str, tuple[str, str | None]]:
    """Flag → (field's path, value) for the flags that set a field of another name; None: the flag takes the value."""
    pairs = ((flag, about.partition("=")) for _, about, flags in _rows("shorthand") for flag in flags)
    return {flag: (path, value or None) for flag, (path, _, value) in pairs}


def foreign_values() -> dict[str, dict[str, str | None]]:
    """Flag → {value of Megatron-LM that isn't ours: our value of the same meaning, or None}."""
    table: dict[str, dict[str, str | None]] = {}
    for _, flag, words in _rows("value"):
        table[flag] = {value: ours or None for value, _, ours in (word.partition("=") for word in words)}
    return table


def honoured_fields() -> list[Field]:
    """The fields of `schema.py` whose flag Megatron-LM has too."""
    own = {flag for _, _, flags in _rows("own") for flag in flags}
    return [each for each in all_fields().values() if each.option not in own and each.section not in FINETUNING]
