"""The command line in a folder of its own, as the tests of the other commands have it."""

from tests.cli.conftest import cli

__all__ = ["cli"]
