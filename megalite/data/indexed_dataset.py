"""Token files: `PREFIX.bin` holds token ids back to back, `PREFIX.idx` says where each sequence lies.

Byte-compatible with Megatron-LM. `.idx` is little-endian: a header of 34 bytes (magic `MMIDIDX\\0\\0`, u64 version 1,
u8 dtype code, u64 sequences, u64 documents + 1), then int32 lengths in tokens, int64 byte offsets into `.bin`, int64
document boundaries counted in sequences (the first is 0), and optionally an int8 mode per sequence.

The key idea: `.idx` is the commit. It is written last, so a `.bin` without one is unfinished, and the reader compares
both files' sizes with what the index says before it serves a token.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megalite.config.errors import UserError
from megalite.files.atomic import remove_leftovers, replacing, sync
from megalite.files.owner import owning

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
# Sequences whose byte offsets are in memory at once while an index is written.
_POINTER_CHUNK = 1 << 20


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token type that Megatron-LM picks: uint16 below 65,500 ids (largest possible id + 1), else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str) -> str:
    """The file of tokens."""
    return prefix + ".bin"


def idx_path(prefix: str) -> str:
    """The file of lengths, offsets and document boundaries."""
    return prefix + ".idx"


def origin_path(prefix: str) -> str:
    """The file that tells which tokenizer made both."""
    return prefix + ".tokenizer.json"


def sequence_pointers(lengths: np.ndarray, itemsize: int, start: int = 0) -> np.ndarray:
    """Byte offset of each sequence, int64 [sequences], where the first lies at byte `start`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return start + (ends - lengths) * np.int64(itemsize)


class IndexedDataset:
    """Reads a pair of token files. `len()` and `[i]` count sequences. Picklable: a copy opens the files again.

    prefix: path without `.bin` and `.idx`. mmap: map `.bin` into memory, or else read it piece by piece.
    Raises UserError, naming the file, where one is missing, isn't a token index, or has the wrong size.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        self.prefix = prefix
        self.mmap = mmap
        self._open()
        held = self.num_tokens * self.dtype.itemsize
        if held != self._bin_size or (len(self) and self.sequence_pointers[0] != 0):
            raise UserError(
                f"{idx_path(prefix)} is damaged: by its lengths there are {held} bytes from byte "
                f"{self.sequence_pointers[0]}, but {bin_path(prefix)} has {self._bin_size}; copy both files again or "
                "write them again"
            )

    def _open(self) -> None:
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            if not os.path.isfile(path):
                raise UserError(_missing(self.prefix, path))
        self._read_index(idx_path(self.prefix))
        self._check_bin(bin_path(self.prefix))
        self._file: BinaryIO | None = None
        self._map: np.ndarray | None = None
        if self.mmap and self._bin_size:
            self._map = np.memmap(bin_path(self.prefix), mode="r", dtype=np.uint8)

    def _read_index(self, path: str) -> None:
        size = os.path.getsize(path)
        with open(path, "rb") as stream:
            header = stream.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            raise UserError(
                f"{path} is not a token index: it does not start with MMIDIDX; write it with preprocess_data.py"
            )
        if len(header) < HEADER.size:
            raise UserError(f"{path} is truncated: {size} bytes, less than its header; write it again")
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{path} has version {version}; only version {VERSION} is known")
        if code not in DTYPES:
            raise UserError(f"{path} has dtype code {code}; known codes are {min(DTYPES)} to {max(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (expected, expected + sequences):
            raise UserError(
                f"{path} has {size} bytes, but by its header ({sequences} sequences, {boundaries - 1} documents) "
                f"it needs {expected}; it is truncated or damaged, write it again"
            )
        self.dtype = DTYPES[code]
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        lengths_end = HEADER.size + 4 * sequences
        pointers_end = lengths_end + 8 * sequences
        self.sequence_lengths: np.ndarray = raw[HEADER.size : lengths_end].view("<i4").view(np.ndarray)
        self.sequence_pointers: np.ndarray = raw[lengths_end:pointers_end].view("<i8").view(np.ndarray)
        self.document_indices: np.ndarray = raw[pointers_end:expected].view("<i8").view(np.ndarray)
        self.sequence_modes: np.ndarray | None = None  # a multimodal index's
        if size > expected:
            self.sequence_modes = raw[expected:].view("i1").view(np.ndarray)
        if boundaries == 0 or self.document_indices[0] != 0 or self.document_indices[-1] != sequences:
            raise UserError(f"{path} is damaged: its document boundaries do not span its {sequences} sequences")

    def _check_bin(self, path: str) -> None:
        self._bin_size = os.path.getsize(path)
        expected = 0
        if len(self):
            expected = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if self._bin_size != expected:
            state = "truncated" if self._bin_size < expected else "not from the same run as its index"
            raise UserError(
                f"{path} is {state}: {self._bin_size} bytes, but by {idx_path(self.prefix)} it needs {expected}; "
                f"copy both files again or write them again"
            )

    def __getstate__(self) -> tuple[str, bool]:
        return self.prefix, self.mmap

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.prefix, self.mmap = state
        self._open()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one sequence, in the file's dtype; read-only where mapped.

        length None: up to the sequence's end. Raises IndexError outside the dataset or the sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        available = int(self.sequence_lengths[index]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(f"tokens [{offset}, {offset + count}) of sequence {index} in {self.prefix}")
        start = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        stop = start + count * self.dtype.itemsize
        if self._map is not None:
            return np.frombuffer(self._map[start:stop], dtype=self.dtype) if count else np.empty(0, self.dtype)
        return np.frombuffer(self._read(start, stop - start), dtype=self.dtype)

    def _read(self, start: int, size: int) -> bytes:
        """Bytes of `.bin`. `pread` has no file position, so forked workers may share the descriptor."""
        if self._file is None:
            self._file = open(bin_path(self.prefix), "rb", buffering=0)  # noqa: SIM115
        parts = []
        while size:
            part = os.pread(self._file.fileno(), size, start)
            if not part:
                raise UserError(f"{bin_path(self.prefix)} became shorter while it was read")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def problems(self) -> Iterator[str]:
        """What is wrong inside the index, a line each, by reading all of it: opening compares sums alone."""
        path, position = idx_path(self.prefix), 0
        for start in range(0, len(self), _POINTER_CHUNK):
            lengths = self.sequence_lengths[start : start + _POINTER_CHUNK]
            pointers = self.sequence_pointers[start : start + _POINTER_CHUNK]
            expected = sequence_pointers(lengths, self.dtype.itemsize, position)
            wrong = np.flatnonzero((lengths < 0) | (pointers != expected))
            if wrong.size:
                sequence, length, pointer = start + int(wrong[0]), lengths[wrong[0]], pointers[wrong[0]]
                yield (
                    f"{path} is damaged: sequence {sequence} has {length} tokens from byte {pointer}, but the "
                    "sequence before it ends elsewhere"
                )
                break
            position += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        falling = np.flatnonzero(self.document_indices[1:] < self.document_indices[:-1])
        if falling.size:
            yield f"{path} is damaged: document {int(falling[0])} ends before it begins"

    @property
    def num_documents(self) -> int:
        """Documents; each is one or more sequences."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.sequence_lengths.sum(dtype=np.int64))


def _missing(prefix: str, path: str) -> str:
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            return f"no file {path}; give the prefix without {suffix}: {prefix[: -len(suffix)]}"
    if os.path.isfile(bin_path(prefix)):
        return f"no file {path} beside {bin_path(prefix)}; an interrupted run leaves no index: preprocess again"
    return f"no file {path}; a data path is the prefix of a .bin and .idx pair"


class IndexedDatasetBuilder:
    """Writes a pair of token files in bounded memory (4 bytes a sequence, 8 a document). A context manager.

    Writes temporary files beside both. At the end of the block they get their names, the index last; where the block
    fails they are removed. Until then it owns the prefix: another builder of it gets a UserError that names this
    process (`files.owner`). `origin`: the tokenizer, as `data.origin` describes it; written
    to a third file.
    """

    def __init__(self, prefix: str, dtype: Any = np.int32, origin: Mapping[str, Any] | None = None) -> None:
        self.prefix, self.origin = prefix, origin
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            raise UserError(f"tokens cannot be stored as {self.dtype}")
        self._code = codes[0]
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._modes = array("b")
        with ExitStack() as stack:  # ended first in, last out: the index gets its name after the tokens
            stack.enter_context(owning(Path(f"{prefix}.owner"), f"the output {prefix}"))
            names = re.compile(re.escape(os.path.basename(prefix)) + r"\.(bin|idx|tokenizer\.json)")
            remove_leftovers(Path(prefix).absolute().parent, names)
            self._idx = stack.enter_context(replacing(idx_path(prefix)))
            self._bin = stack.enter_context(replacing(bin_path(prefix)))
            stack.push(self._finish)
            self._open = stack.pop_all()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._open.__exit__(*failure)

    def add_document(self, tokens: Sequence[int] | np.ndarray, sequence_lengths: Iterable[int] | None = None) -> None:
        """Append one document: one sequence, or several whose lengths sum to the number of tokens. It may be empty.

        Raises UserError where a token doesn't fit the file's dtype or the sequence lengths don't add up.
        """
        values = self._as_tokens(tokens)
        lengths = [len(values)] if sequence_lengths is None else [int(length) for length in sequence_lengths]
        if sum(lengths) != len(values) or min(lengths, default=0) < 0:
            raise UserError(
                f"{self.prefix}: sequence lengths sum to {sum(lengths)}, the document has {len(values)} tokens"
            )
        self._bin.write(values.tobytes())
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))

    def _as_tokens(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        values = np.asarray(tokens)
        if values.size and values.dtype != self.dtype and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < limits.min or high > limits.max:
                raise UserError(
                    f"{self.prefix}: token id {high if high > limits.max else low} does not fit {self.dtype.name}; "
                    f"the vocabulary size given for this file is too small"
                )
        return values.astype(self.dtype, copy=False)

    def add_index(self, part: IndexedDataset) -> None:
        """Append all documents of another pair of token files, of the same dtype, with modes as the others or not."""
        assert part.dtype == self.dtype
        with open(bin_path(part.prefix), "rb") as source:
            shutil.copyfileobj(source, self._bin, 16 << 20)
        offset = len(self._lengths)
        for start in range(0, len(part), _POINTER_CHUNK):
            self._lengths.frombytes(part.sequence_lengths[start : start + _POINTER_CHUNK].tobytes())
        if part.sequence_modes is not None:
            self._modes.frombytes(part.sequence_modes.tobytes())
        for start in range(1, len(part.document_indices), _POINTER_CHUNK):
            self._boundaries.frombytes((part.document_indices[start : start + _POINTER_CHUNK] + offset).tobytes())

    def _finish(self, kind: type[BaseException] | None, *failure: Any) -> None:
        """Write the index before the files get their names. A crash in between leaves a `.bin` without `.idx`."""
        if kind is None:
            self._write_index(self._idx)
            sync(self._idx)
            sync(self._bin)  # all is on the disk before the old index goes
            Path(idx_path(self.prefix)).unlink(missing_ok=True)
            self._write_origin()

    def _write_origin(self) -> None:
        path = Path(origin_path(self.prefix))
        path.unlink(missing_ok=True)
        if self.origin is not None:
            content = {"origin": dict(self.origin), "bytes": sum(self._lengths) * self.dtype.itemsize}
            with replacing(path) as stream:
                stream.write(json.dumps(content, indent=2).encode() + b"\n")

    def _write_index(self, index: BinaryIO) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        index.write(HEADER.pack(MAGIC, VERSION, self._code, len(self._lengths), len(self._boundaries)))
        index.write(lengths.tobytes())
        position = 0
        for start in range(0, len(lengths), _POINTER_CHUNK):
            chunk = lengths[start : start + _POINTER_CHUNK]
            index.write(sequence_pointers(chunk, self.dtype.itemsize, position).astype("<i8", copy=False).tobytes())
            position += int(chunk.sum(dtype=np.int64)) * self.dtype.itemsize
        index.write(np.asarray(self._boundaries, dtype="<i8").tobytes())
        index.write(self._modes.tobytes())
