"""The command line: `testbed run | real | calibrate | validate | compare | report | presets | schema | ...`.

This is where the pieces meet: a command imports the backend or the reports that it needs, and nothing else may. What
needs neither is in `testbed.commands`. A user error is one message and exit code 2; a run that got stuck or a replay
that differs is exit code 1; Ctrl-C is 130.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

# Commands register themselves, in the order in which help shows them.
# ruff: isort: off
from testbed.cli import runs as _runs  # noqa: F401
from testbed.cli import real as _real  # noqa: F401
from testbed.cli import calibrate as _calibrate  # noqa: F401
from testbed.cli import validate as _validate  # noqa: F401
from testbed.cli import published as _published  # noqa: F401
from testbed.cli import ablate as _ablate  # noqa: F401
from testbed.cli import records as _records  # noqa: F401
from testbed.cli import engine_check as _engine_check  # noqa: F401
from testbed.cli import serving as _serving  # noqa: F401
from testbed.cli import about as _about  # noqa: F401

# ruff: isort: on
from testbed.cli.app import app
from testbed.commands.errors import CommandError
from testbed.compiled import warning
from testbed.console import complain


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: turns user errors into one message and an exit code. No arguments: help."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    if old := warning():
        complain(f"testbed: {old}")
    try:
        code = app(args, prog_name="testbed", standalone_mode=False, obj=shlex.join(["testbed", *args]))
        sys.stdout.flush()
    except BrokenPipeError:  # `testbed schema | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        said = _message(error)
        if said is None:
            raise
        complain(f"testbed: {said}")
        sys.exit(error.code if isinstance(error, CommandError) else 2)
    if code == 130:  # Ctrl-C where no command took it up
        complain("testbed: interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str | None:
    """What to tell the user, or None for a bug of ours."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a wrong option or argument
        context = getattr(error, "ctx", None)
        return f"{error.format_message()} (see {context.command_path if context else 'testbed'} --help)"
    if isinstance(error, _user_errors()):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return None


def _user_errors() -> tuple[type[BaseException], ...]:
    from testbed.journal import JournalError
    from testbed.scenario.catalogue import CatalogueError
    from testbed.scenario.errors import ScenarioError

    errors: list[type[BaseException]] = [CommandError, ScenarioError, CatalogueError, JournalError]
    if "sim" in sys.modules:
        from sim.costs.errors import CostModelError
        from testbed.workloads import WorkloadError

        errors += [CostModelError, WorkloadError]
    if "real" in sys.modules:
        from real.errors import RealError

        errors.append(RealError)
    if "reports" in sys.modules:
        from reports.comparison import ComparisonError

        errors.append(ComparisonError)
    return tuple(errors)
