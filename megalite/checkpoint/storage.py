"""The folder of a run's checkpoints: names, tracker, what is complete, what is kept.

Key idea: a checkpoint is written under another name and renamed when every byte is on the disk, so a folder named
`iter_0000100` is complete, and at each moment of a save, killed or not, the newest complete one can be found. The
tracker says which that is; where it can't be trusted, the folders are looked at. Small files have checksums in a file
beside them; the tensors in data files have their own (`shards.py`).

In object storage nothing can be renamed: a checkpoint is written under its name, and complete once it has its file of
checksums, which is written last. An older one of the same name goes first.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import CheckpointError, naming, reason
from megalite.checkpoint.index import check_files, read_index
from megalite.config.schema import CheckpointConfig, RunConfig
from megalite.files.atomic import publish_folder, remove, remove_leftovers, remove_whole, replacing, sync
from megalite.files.owner import OWNER, check_unowned, owning
from megalite.files.remote import Place, Remote, place

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG_FILE = "config.json"
STATE_FILE = "training_state.json"
DOCUMENTS = (CONFIG_FILE, STATE_FILE)
"""All of a checkpoint that isn't tensors."""
CHECKSUMS, DATA_SUFFIX = "checksums.json", ".safetensors"
_DATA_SUFFIXES = (DATA_SUFFIX, ".distcp")  # the second in checkpoints of older versions
ADAPTER_FILE = "adapter_config.json"
_KINDS = {
    "--load": "holds checkpoints of megalite: did you mean --load {0} (in training, for its weights alone, "
    "--pretrained-checkpoint {0})?",
    "--load-hf": "is a Hugging Face model: did you mean --load-hf {0} (tools/generate.py, finetune.py)?",
    "--adapter": "is an adapter in PEFT's format: did you mean, beside --load-hf MODEL, --adapter {0} "
    "(tools/generate.py) or --load-adapter {0} (finetune.py)?",
}
"""What a folder is, by the flag that takes it."""
_NAME = re.compile(r"iter_(\d{7,})(\.tmp|\.old)?")


@dataclass(frozen=True)
class CheckpointDirectory:
    """A complete checkpoint. `note`: what the user should know of how it was found; empty where all was in order."""

    iteration: int
    path: Place
    note: str = ""

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Retention:
    """Which older checkpoints a new one leaves in place.

    `keep_last`: only so many newest, the new one among them (`--keep-last-checkpoints`). `keep_best`: also so
    many whose validation loss is lowest (`--keep-best`); without `keep_last` these and the newest. `interval`: those at
    its multiples stay in any case, and without the others only the one before the new one goes
    (`--save-retain-interval`, as in Megatron-LM). All None: all stay.
    """

    keep_last: int | None = None
    interval: int | None = None
    keep_best: int | None = None

    @classmethod
    def from_config(cls, config: CheckpointConfig) -> Retention:
        """As the flags say."""
        return cls(config.keep_last_checkpoints, config.save_retain_interval, config.keep_best)

    def to_delete(self, older: list[int], previous: int | None, losses: Mapping[int, float]) -> list[int]:
        """Which of the `older` iterations (ascending) go, now that a newer is complete. `previous`: the tracker's.
        `losses`: of the validations that were made at saved iterations, the newest too."""
        if self.keep_last is not None or self.keep_best is not None:
            older = older[: max(0, len(older) - ((self.keep_last or 1) - 1))]
        else:
            older = [iteration for iteration in older if self.interval is not None and iteration == previous]
        best = sorted(losses, key=lambda iteration: (losses[iteration], -iteration))[: self.keep_best or 0]
        multiple = self.interval or max(older, default=0) + 1
        return [iteration for iteration in older if iteration % multiple and iteration not in best]


def directory_name(iteration: int) -> str:
    """Name of the folder of one checkpoint, as Megatron-LM's."""
    return f"iter_{iteration:07d}"


def _entries(root: Place, suffix: str) -> dict[int, Place]:
    """Folders of checkpoints with this suffix (.tmp: being written or deleted, .old: being replaced), by iteration."""
    names = root.folders() if isinstance(root, Remote) else [path.name for path in root.iterdir() if path.is_dir()]
    matches = (match for name in names if (match := _NAME.fullmatch(name)) and (match[2] or "") == suffix)
    return dict(sorted((int(match[1]), root / match[0]) for match in matches))


def begin(root: Place, iteration: int) -> Place:
    """Make and return the folder to write a checkpoint into, after clearing away what killed saves left behind.

    Raises a UserError, before anything is touched, where another run owns `root`.
    """
    root.mkdir(parents=True, exist_ok=True)
    check_unowned(root / OWNER, f"--save {root}", but_mine=True)
    folder = temporary(root, iteration)
    if isinstance(root, Remote):
        _remove(folder)
        return folder
    remove_leftovers(root, re.compile(f"{_NAME.pattern}|{re.escape(TRACKER)}"))
    finished = _entries(root, "")
    for number, path in _entries(root, ".old").items():
        if number in finished:
            _remove(path)
        else:
            os.rename(str(path), root / directory_name(number))
    folder.mkdir()
    return folder


def temporary(root: Place, iteration: int) -> Place:
    """Where a checkpoint is written before it is complete: all ranks know it, and the run owns its `root`."""
    return root / (directory_name(iteration) + ("" if isinstance(root, Remote) else ".tmp"))


def abandon(root: Place, iteration: int) -> None:
    """Remove an unfinished checkpoint, as far as that is possible."""
    folder = temporary(root, iteration)
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with suppress(OSError):
            _remove(folder)


def _remove(folder: Place) -> None:
    """Delete a checkpoint so that at no moment a part of it looks like the whole."""
    if isinstance(folder, Path):
        return remove_whole(folder)
    (folder / CHECKSUMS).unlink(missing_ok=True)
    folder.remove_tree()


def documents(config: RunConfig, training_state: dict[str, Any]) -> dict[str, str]:
    """What isn't a tensor, as JSON, by file name. A TypeError where it can't be JSON."""
    values = {CONFIG_FILE: config.to_dict(), STATE_FILE: training_state}
    return {name: json.dumps(value, indent=2) + "\n" for name, value in values.items()}


def write_documents(folder: Place, texts: Mapping[str, str]) -> None:
    """Write each text to its file, and, last of all, the checksums of all that isn't a data file."""
    with naming(folder):
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        small = sorted((path for path in folder.iterdir() if path.suffix not in _DATA_SUFFIXES), key=str)
        sums = {path.name: _checksum(path.read_bytes()) for path in small}
        values = {"algorithm": "crc32", "files": sums, "files_checksum": _checksum_of(sums)}
        (folder / CHECKSUMS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _checksum(content: bytes) -> str:
    """CRC-32 (of zlib and zip) of some bytes, as 8 hex digits."""
    return f"{zlib.crc32(content):08x}"


def _checksum_of(sums: dict[str, str]) -> str:
    return _checksum(json.dumps(sums, sort_keys=True).encode())


def _check_small_files(folder: Place) -> None:
    """Raise a `CheckpointError`, naming the file and what to do, where a file that isn't tensors was changed. Older
    versions wrote no sums, or sums of data files too, and only to the disk."""
    path = folder / CHECKSUMS
    if not path.exists():
        if isinstance(folder, Remote):
            raise CheckpointError(f"{path} is missing, which a save writes last")
        return
    advice = "again from a good copy, or load another checkpoint with --ckpt-step"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        sums = dict(values["files"])
        if values["files_checksum"] != _checksum_of(sums) or any(Path(name).name != name for name in sums):
            raise ValueError("its own checksum is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({reason(error)}): copy it {advice}") from error
    for file, expected in ((folder / name, expected) for name, expected in sums.items()):
        with naming(file):
            found = expected if file.suffix in _DATA_SUFFIXES else _checksum(file.read_bytes())
        if found != expected:
            raise CheckpointError(
                f"{file} is damaged or was changed: its checksum is {found}, and {CHECKSUMS} says {expected}. Copy it "
                f"{advice}" + (f"; if you changed it on purpose, delete {path}" if isinstance(path, Path) else "")
            )


def commit(root: Place, iteration: int) -> None:
    """Give the written checkpoint its name, replacing an older one of the same iteration, then move the tracker."""
    if isinstance(root, Remote):
        (root / TRACKER).write_text(str(iteration))
        return
    with replacing(root / TRACKER) as stream:
        stream.write(str(iteration).encode())
        sync(stream)  # before anything is moved: the disk may be full
        publish_folder(root / f"{directory_name(iteration)}.tmp", root / directory_name(iteration))


@contextmanager
def first_checkpoint(root: Place, iteration: int, beside: str) -> Iterator[Place]:
    """The folder to write the first checkpoint in `root` into, for one process; complete when the block ends well.

    `beside`: a folder in `root` that the block may make too. Where the block fails, nothing of all this stays. Raises
    a `CheckpointError` where `root` holds checkpoints already.
    """
    if find_checkpoint(root) is not None:
        raise CheckpointError(f"--save {root} already holds checkpoints: choose a new folder")
    if (root / beside).exists():
        raise CheckpointError(f"{root / beside} exists: choose a new folder for --save")
    made = not root.exists()
    with owning(root / OWNER, f"--save {root}"):
        try:
            yield begin(root, iteration)
            commit(root, iteration)
        except BaseException:
            abandon(root, iteration)
            for folder in (root / beside, *([root] if made else ())):
                with suppress(OSError):
                    remove(folder)
            raise


def tracked_iteration(root: Place) -> int | None:
    """The iteration that the tracker names; None where there is no tracker or it names none."""
    try:
        return int((root / TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def retire(root: Place, iteration: int, previous: int | None, retain: Retention) -> None:
    """Delete what `retain` lets go of, now that `iteration` is complete. Those of later iterations, links and
    incomplete folders stay. A failure is only a warning: the new checkpoint is safe."""
    with _warning(f"not all older checkpoints in {root} could be looked at"):
        entries = _entries(root, "")
        older = [number for number, path in entries.items() if number < iteration and not path.is_symlink()]
        if retain.keep_last is not None or retain.keep_best is not None:
            older = [number for number in older if problem(entries[number]) is None]
        losses = _losses({number: entries[number] for number in (*older, iteration)}) if retain.keep_best else {}
        for number in retain.to_delete(older, previous, losses):
            with _warning(f"{entries[number]} could not be deleted"):
                _remove(entries[number])


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """What the operating system or a store refuses in the block is a warning."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{what}: {reason(error)}", stacklevel=4)


def _losses(folders: Mapping[int, Place]) -> dict[int, float]:
    """Validation losses of those checkpoints, by iteration, that have one."""
    states = {number: read_json(path / STATE_FILE).get("training", {}) for number, path in folders.items()}
    found = {number: state.get("valid_loss") for number, state in states.items()}
    return {number: loss for number, loss in found.items() if isinstance(loss, float) and math.isfinite(loss)}


def read_json(path: Place) -> dict[str, Any]:
    """A JSON file's object. Raises `CheckpointError` naming the file."""
    with naming(path, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values


def refuse_other_kind(folder: Place, wanted: str) -> None:
    """Raise where a folder isn't what the flag `wanted` takes, but what another of these flags does."""
    if (folder / STATE_FILE).exists():  # one checkpoint
        folder = folder.parent
    config = folder / CONFIG_FILE
    is_kind = {
        "--load": folder.is_dir() and bool((folder / TRACKER).exists() or _entries(folder, "")),
        "--load-hf": config.exists() and "model_type" in read_json(config),
        "--adapter": (folder / ADAPTER_FILE).exists(),
    }
    if not is_kind[wanted] and any(is_kind.values()):
        kind = next(flag for flag, it_is in is_kind.items() if it_is)
        raise CheckpointError(f"{folder} {_KINDS[kind].format(folder)}")


def problem(path: Place) -> str | None:
    """Why the checkpoint at `path` can't be loaded, by its small files and the sizes of the large; None if it can."""
    try:
        if not path.is_dir():
            raise CheckpointError(f"{path} is missing")
        _check_small_files(path)
        read_json(path / CONFIG_FILE)
        training = read_json(path / STATE_FILE).get("training")
        check_files(path, read_index(path).files)
    except CheckpointError as error:
        return str(error)
    named = _NAME.fullmatch(path.name)
    stored = training.get("iteration") if isinstance(training, dict) else None
    if named is not None and stored is not None and stored != int(named[1]):
        return (
            f"{path / STATE_FILE}: the iteration is {stored!r}, but the folder is {path.name}: one of them was changed"
        )
    return None


def find_checkpoint(root: str | os.PathLike[str] | Remote, step: int | None = None) -> CheckpointDirectory | None:
    """The checkpoint to load from the run folder `root`: the tracker's, or that of iteration `step`.

    Where the tracker is damaged, or what it names isn't complete, the newest complete one, and the note says so. None
    where `root` holds no checkpoint at all. Raises `CheckpointError` where `step` isn't there, or nothing is complete.
    """
    root = place(root)
    if not root.is_dir():
        if root.exists():
            raise CheckpointError(f"{root} is a file: give the folder that holds the checkpoints (iter_...)")
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: {root} does not exist")
        return None
    found = _entries(root, ".old") | _entries(root, "")
    if not found and _NAME.fullmatch(root.name) and (root / CONFIG_FILE).exists():
        raise CheckpointError(f"{root} is one checkpoint: give its parent folder, and choose with --ckpt-step")
    if step is not None:
        return _chosen(root, step, found)
    if not found and not (root / TRACKER).exists():
        refuse_other_kind(root, "--load")
        return None
    return _newest(root, found)


def _chosen(root: Place, step: int, found: dict[int, Place]) -> CheckpointDirectory:
    wrong = problem(found[step]) if step in found else f"{root} has no checkpoint of this iteration"
    if wrong is None:
        return CheckpointDirectory(step, found[step])
    complete = [str(number) for number, path in found.items() if number != step and problem(path) is None]
    raise CheckpointError(f"--ckpt-step {step}: {wrong}; valid: {', '.join(sorted(complete, key=int)) or 'none'}")


def _newest(root: Place, found: dict[int, Place]) -> CheckpointDirectory:
    """The one that the tracker names, else the newest complete one."""
    path = root / TRACKER
    text = ""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        wrong = f"{path} must hold an iteration number, not {text[:40]!r}"
    except OSError as error:
        wrong = f"{path}: {reason(error)}"
    if text == "release":
        raise CheckpointError(
            f"{path} says release: of Megatron-LM; read it with convert_checkpoint.py megatron-to-megalite"
        )
    tracked = int(text) if text.isascii() and text.isdigit() else None
    if tracked is not None:
        folder = found.get(tracked, root / directory_name(tracked))
        broken = problem(folder)
        if broken is None:
            note = "" if folder.suffix != ".old" else f"a save was interrupted: loading the older copy, {folder}"
            return CheckpointDirectory(tracked, folder, note)
        wrong = f"{path} names iteration {tracked}, which isn't complete: {broken}"
    for iteration, folder in sorted(found.items(), reverse=True):
        if iteration != tracked and problem(folder) is None:
            return CheckpointDirectory(iteration, folder, f"{wrong}; loading the newest complete one, {folder}")
    raise CheckpointError(f"{root} holds no complete checkpoint: {wrong}")
