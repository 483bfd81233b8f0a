"""What ends a command with one message and an exit code, not a traceback. It refuses to know how that is shown."""

from __future__ import annotations


class CommandError(Exception):
    """`str()` is the message."""

    code = 1


class UserError(CommandError):
    """Something the user can mend: where, what, the nearest thing that works."""

    code = 2


class RunFailed(CommandError):
    """A run that did not come to its end, or a replay that differs."""


class Interrupted(CommandError):
    """Ctrl-C; the message says what there is nevertheless."""

    code = 130
