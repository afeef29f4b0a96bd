"""The tensors of a folder's safetensors files, one file or several with an index; and how such a file is written.

Key idea: opening reads the headers alone; a tensor, or a part of it, is read when it is asked for. So what a rank
doesn't hold it never reads, and what is missing is known before anything is loaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError, naming
from megalite.checkpoint.storage import read_json
from megalite.checkpoint.tensor_file import DTYPES, Entry, write_safetensors
from megalite.distributed.param_spec import Shape
from megalite.files import atomic, lfs

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Stored(NamedTuple):
    """A stored tensor. `dtype` is None for a number format that isn't one of the plain ones."""

    shape: Shape
    dtype: torch.dtype | None


class Tensors(Protocol):
    """Named tensors that can be read in parts."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Shape and dtype by name."""
        ...

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of one tensor, on the CPU."""
        ...


class TensorFiles(ExitStack):
    """`Tensors` of a folder, open until the block of its `with` ends. Raises `CheckpointError` naming a file that is
    missing or damaged."""

    def __init__(self, directory: str | Path):
        super().__init__()
        self.directory = Path(directory)
        self._files: dict[str, Any] = {}
        self.file_of: dict[str, str] = {}  # by the tensor's name
        self.stored: dict[str, Stored] = {}
        self._lock = threading.Lock()  # readers of several threads share a file's handle
        self._open()

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        file = self.file_of[name]
        with naming(f"{self.directory / file}: {name}", SafetensorError), self._lock:
            part: Tensor = self._files[file].get_slice(name)[slices]
        return part

    def _open(self) -> None:
        wanted = self._weight_map()
        for file in sorted(set(wanted.values())) if wanted else [SINGLE_FILE]:
            self._open_file(file)
        for name, file in wanted.items():
            if self.file_of.get(name) != file:
                raise CheckpointError(f"{self.directory / file} lacks {name}, which {INDEX_FILE} says it holds")

    def _weight_map(self) -> dict[str, str]:
        """File of each tensor where there is an index; empty for a single file."""
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a folder")
        if (self.directory / SINGLE_FILE).exists():
            return {}
        path = self.directory / INDEX_FILE
        if not path.exists():
            pickled = next(self.directory.glob("pytorch_model*.bin"), None)
            why = f"; {pickled.name} is a pickle, which is never read: save it as safetensors" if pickled else ""
            raise CheckpointError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{why}")
        files = read_json(path).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise CheckpointError(f"{path} has no weight_map")
        for name, file in files.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path}: {name} is in {file!r}, which is not a file in this folder")
        return files

    def _open_file(self, file: str) -> None:
        path = self.directory / file
        if not path.exists():
            raise CheckpointError(f"{path} is missing, and {INDEX_FILE} names it")
        with naming(path, SafetensorError):
            with open(path, "rb") as stream:
                if lfs.is_pointer(stream.read(lfs.LENGTH)):
                    raise CheckpointError(f"{path}: {lfs.WRONG}")
            opened = self.enter_context(safe_open(path, framework="pt"))
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                if name in self.file_of:
                    raise CheckpointError(f"{path} holds {name}, and so does {self.file_of[name]}")
                view = opened.get_slice(name)
                self.stored[name] = Stored(tuple(view.get_shape()), DTYPES.get(view.get_dtype()))
                self.file_of[name] = file
        self._files[file] = opened


def write_weights(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """Write the tensors of each file, and unless it is the `SINGLE_FILE` which of them holds what."""
    for name, entries in files.items():
        with open(folder / name, "xb") as stream:
            write_safetensors(stream, entries, {"format": "pt"})
    if list(files) != [SINGLE_FILE]:
        places = {entry.name: name for name, entries in files.items() for entry in entries}
        nbytes = sum(entry.nbytes for entries in files.values() for entry in entries)
        values = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_absent(target: Path) -> None:
    """Raise where something is in the way of `new_folder`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--hf {target} exists and is not an empty folder: choose a new one")


@contextmanager
def new_model_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` (absent or empty) when the block ends well; else nothing of it stays.

    What the operating system refuses becomes a `CheckpointError` that names the target.
    """
    with naming(f"{target} was not written"), atomic.new_folder(target) as folder:
        yield folder
