"""The exception of `checkpoint/`, and how all ranks raise the same one.

Key idea: a rank never fails alone. What went wrong on it is exchanged before anyone goes on, so no other rank is left
waiting in a collective, and every rank's message names the same rank and file.
"""

from __future__ import annotations

from collections.abc import Callable

from megalite.config.errors import UserError
from megalite.distributed.collectives import all_gather_objects, broadcast_object
from megalite.distributed.mesh import Group

_SHOWN = 4


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
    if not first:
        return
    if all(text == errors[0] for text in errors):
        raise CheckpointError(str(errors[0]))
    lines = [f"rank {rank}: {text}" for text, rank in first.items()]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise CheckpointError("\n".join(lines[:_SHOWN] + more))


def on_first_rank(function: Callable[[], object], group: Group) -> None:
    """Run `function` on the group's first member; all return once it's done, or raise what it raised. Collective."""
    error = attempt(function) if group.rank == 0 else None
    error = broadcast_object(error, group)
    if error is not None:
        raise CheckpointError(error)
