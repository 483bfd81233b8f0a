"""The errors that end a command with one message instead of a traceback. They refuse to know how a message is shown."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: where, what, the nearest thing that works. Exit code 2."""


class RunFailed(Exception):
    """A run that did not come to its end for a reason of its own. Exit code 1."""
