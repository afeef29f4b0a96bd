"""Joins token files into one pair. The key idea: `.bin` files are appended byte by byte and indices shifted, so the
result equals what preprocessing the joined corpora would have written, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tqdm import tqdm

from megalite.config.errors import UserError
from megalite.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, bin_path, idx_path
from megalite.data.origin import read_origin
from megalite.data.text_input import refuse_repeats


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> tuple[int, int, int]:
    """Joins the parts in the order given; of a folder, all pairs in it by name. Returns (parts, documents, tokens).

    Raises UserError for a missing or damaged part, parts of different dtypes, and an output that is among the parts;
    nothing is written then.
    """
    prefixes = expand_prefixes(inputs)
    real = {os.path.realpath(idx_path(prefix)) for prefix in prefixes}
    if os.path.realpath(idx_path(output_prefix)) in real:
        raise UserError(
            f"--output-prefix {output_prefix} is one of the parts; choose another, or remove the old result"
        )
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    _check_alike(parts)
    origins = [read_origin(prefix) for prefix in prefixes]
    origin = origins[0] if all(each == origins[0] for each in origins) else None
    with IndexedDatasetBuilder(output_prefix, parts[0].dtype, origin) as builder:
        for part in tqdm(parts, desc="merge", unit="part", disable=None):
            builder.add_index(part)
    return len(parts), sum(part.num_documents for part in parts), sum(part.num_tokens for part in parts)


def expand_prefixes(inputs: Sequence[str]) -> list[str]:
    """Prefixes that folders and prefixes stand for. Raises UserError for an empty folder, half a pair, or a repeat."""
    prefixes: list[str] = []
    for name in inputs:
        if os.path.isdir(name):
            found = _pairs_in(name)
            if not found:
                raise UserError(f"--input {name}: the folder holds no .idx file")
            prefixes += found
        else:
            prefixes.append(name)
    refuse_repeats(prefixes)
    return prefixes


def _pairs_in(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    stems = {name[:-4] for name in names if name.endswith((".bin", ".idx"))}
    for stem in sorted(stems):
        for path in (bin_path(stem), idx_path(stem)):
            if path not in names:
                raise UserError(f"--input {folder}: {path} is missing; each .bin needs its .idx")
    return [os.path.join(folder, stem) for stem in sorted(stems)]


def _check_alike(parts: Sequence[IndexedDataset]) -> None:
    """Raise UserError for parts of different dtypes, and where some have a mode for each of their sequences (multimodal
    data) and others none."""
    first = parts[0]
    for other in parts[1:]:
        if other.dtype != first.dtype:
            raise UserError(
                f"{other.prefix} holds {other.dtype.name} tokens and {first.prefix} {first.dtype.name}: "
                "they come from vocabularies of different sizes and can't be joined"
            )
    having = [part.prefix for part in parts if part.sequence_modes is not None]
    lacking = [part.prefix for part in parts if part.sequence_modes is None and len(part)]
    if having and lacking:
        raise UserError(
            f"{idx_path(having[0])} has a mode for each sequence (multimodal data) and {idx_path(lacking[0])} has "
            "none: they can't be joined"
        )
