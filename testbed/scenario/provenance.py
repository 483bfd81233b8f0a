"""Where a scenario's settings were read, and what each was called there.

A preset repeats the defaults of a framework: this says of which one, in which repository and at which commit, so that
a reader can check the version that they have. It decides nothing: two scenarios that differ in it run alike.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from testbed.scenario.base import Section

Words = Annotated[str, Field(min_length=1)]
Repository = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
"""OWNER/NAME."""
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]


class Citation(Section):
    """One state of one repository."""

    repository: Repository
    commit: Commit


class Setting(Section):
    """What the framework calls a key of this scenario, and what it has there if nobody sets it."""

    option: Words
    """Its option, or what its code does where there is none."""
    default: str = ""
    """The option's default, as the framework writes it; empty: no option, or one that a mode brings with it."""
    path: str = ""
    """File of the repository that says so; empty: its documentation."""
    read_in: Citation | None = None
    """null: where the rest was read."""


class Parts(Section):
    """Where the framework has what every such system has: a map of it, not a list of features."""

    generation: Words
    training: Words
    data: Words
    """Between generation and training."""
    weight_sync: Words


class Provenance(Citation):
    """The framework whose settings these are, and the state of it in which they were read."""

    framework: Words
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """Of the commit."""
    parts: Parts
    settings: Annotated[dict[str, Setting], Field(min_length=1)]
    """Dotted key of this scenario -> its source. Keys that are not here were chosen, not read."""
    left_out: Annotated[tuple[Words, ...], Field(min_length=1)]
    """What the framework does at its defaults and this scenario does not."""
