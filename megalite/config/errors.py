"""The one exception for mistakes that the user can correct."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in flags, files or data. Its message names the flag, file or line and says what would be valid.

    Entry points print the message without a traceback. `everywhere`: all ranks raise it alike, so one speaks for all.
    """

    everywhere = False


class FlagError(UserError):
    """A bad flag or combination of flags, found before any process group exists. Entry points exit with status 2."""
