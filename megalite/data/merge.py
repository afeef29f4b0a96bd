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
    _check_alike(prefixes)
    origins = [read_origin(prefix) for prefix in prefixes]
    origin = origins[0] if all(each == origins[0] for each in origins) else None
    documents = tokens = 0
    with IndexedDatasetBuilder(output_prefix, IndexedDataset(prefixes[0]).dtype, origin) as builder:
        for prefix in tqdm(prefixes, desc="merge", unit="part", disable=None):
            part = IndexedDataset(prefix)
            builder.add_index(part)
            documents += part.num_documents
            tokens += part.num_tokens
    return len(prefixes), documents, tokens


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


def _check_alike(prefixes: Sequence[str]) -> None:
    """Raise UserError for parts of different dtypes, and where some have a mode for each of their sequences (multimodal
    data) and others none."""
    first = IndexedDataset(prefixes[0]).dtype
    having, lacking = [], []
    for prefix in prefixes:
        part = IndexedDataset(prefix)  # one open at a time: each takes file descriptors
        if part.dtype != first:
            raise UserError(
                f"{prefix} holds {part.dtype.name} tokens and {prefixes[0]} {first.name}: "
                "they come from vocabularies of different sizes and can't be joined"
            )
        if part.sequence_modes is not None:
            having.append(prefix)
        elif len(part):
            lacking.append(prefix)
    if having and lacking:
        raise UserError(
            f"{idx_path(having[0])} has a mode for each sequence (multimodal data) and {idx_path(lacking[0])} has "
            "none: they can't be joined"
        )
