"""The exception of `checkpoint/`, and how all ranks raise the same one.

Key idea: a rank never fails alone. What went wrong on it is exchanged before anyone goes on, so no other rank is left
waiting in a collective, and every rank's message names the same rank and file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from megalite.config.errors import UserError, listed
from megalite.distributed.collectives import all_gather_objects, all_reduce, broadcast_object
from megalite.distributed.mesh import Group, Mesh


class CheckpointError(UserError):
    """A checkpoint could not be written, or is missing, damaged or of another network. Names the file or the keys."""

    everywhere = True  # raised by `agree`, or from what all ranks read alike


def reason(error: BaseException) -> str:
    """What the operating system said, where `error` hides it: to torch's writer a full disk is a wrong position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


@contextmanager
def naming(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Raise a `CheckpointError` that names a file (or says `what` failed) where the operating system refuses something
    in the block, or one of the errors `kinds` is raised."""
    refused: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except CheckpointError:
        raise
    except refused as error:
        raise CheckpointError(f"{what}: {reason(error)}") from error


def attempt(function: Callable[[], object]) -> str | None:
    """Run `function`; the message of what went wrong with the file system or a file, None where nothing did."""
    try:
        function()
    except (UserError, OSError) as error:
        return str(error)
    return None


def agree(error: str | None, group: Group) -> None:
    """Raise the same `CheckpointError` on every member where any of them has an error. Collective."""
    errors = all_gather_objects(error, group)
    first: dict[str, int] = {}
    for rank, text in zip(group.ranks, errors, strict=True):
        if text is not None:
            first.setdefault(text, rank)
    if first and all(text == errors[0] for text in errors):
        raise CheckpointError(str(errors[0]))
    if first:
        lines = [f"rank {rank}: {text}" for text, rank in first.items()]
        raise CheckpointError(listed(lines, shown=4, before="\n").lstrip())


def on_first_rank(function: Callable[[], object], group: Group) -> None:
    """Run `function` on the group's first member; all return once it's done, or raise what it raised. Collective."""
    error = broadcast_object(attempt(function) if group.rank == 0 else None, group)
    if error is not None:
        raise CheckpointError(error)


def wanted_by_none(names: Sequence[str], wanted: Collection[str], mesh: Mesh) -> list[str]:
    """Those of `names`, which all ranks give alike, that are among no rank's `wanted`. Collective over the world."""
    flags = torch.tensor([name in wanted for name in names], dtype=torch.uint8, device=mesh.device)
    all_reduce(flags, mesh.world, "max")
    return [name for name, flag in zip(names, flags.tolist(), strict=True) if not flag]
