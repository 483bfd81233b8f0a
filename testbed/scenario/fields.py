"""Looking into the configuration models: keys of a section, members of a union, what is close to a wrong name.

Knows pydantic's models. It refuses to know values, files and messages.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from testbed.scenario.base import Section


@dataclass(frozen=True)
class Choice:
    """A discriminated union: `discriminator` (`type` or `mode`) says which member a mapping is."""

    discriminator: str
    members: Mapping[str, type[Section]]
    default: str | None
    """The member a section that is left out becomes; None if it must be written."""


def _parts(annotation: Any) -> Iterator[Any]:
    """The types an annotation is made of, unions and `Annotated` taken apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _parts(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _discriminator(field: FieldInfo) -> str | None:
    if isinstance(field.discriminator, str):
        return field.discriminator
    nested = [field.annotation, *typing.get_args(field.annotation)]
    for part in nested:
        for meta in getattr(part, "__metadata__", ()):
            found = getattr(meta, "discriminator", None)
            if isinstance(found, str):
                return found
    return None


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """The models a field may hold (empty for plain values)."""
    return [p for p in _parts(field.annotation) if isinstance(p, type) and issubclass(p, Section)]


def choice_of(field: FieldInfo | None) -> Choice | None:
    """The union of a field, or None if the field is no discriminated union."""
    name = _discriminator(field) if field is not None else None
    if field is None or name is None:
        return None
    members = {tag: m for m in sections_of(field) for tag in typing.get_args(m.model_fields[name].annotation)}
    default = getattr(field.default, name, None)
    return Choice(name, members, default if isinstance(default, str) else None)


def field_of(model: type[Section] | None, key: str) -> FieldInfo | None:
    return model.model_fields.get(key) if model is not None else None


def section_of(field: FieldInfo | None, data: Any) -> type[Section] | None:
    """The model of the mapping `data` in `field`; None if it is no section or names no known member."""
    if field is None or not isinstance(data, dict):
        return None
    choice = choice_of(field)
    if choice is not None:
        tag = data.get(choice.discriminator)
        return choice.members.get(tag) if isinstance(tag, str) else None
    found = sections_of(field)
    return found[0] if len(found) == 1 else None


def item_of(field: FieldInfo | None) -> type[Section] | None:
    """The model of the items of a list, or None."""
    if field is not None:
        for part in _parts(field.annotation):
            if typing.get_origin(part) in (list, tuple):
                items = [a for a in typing.get_args(part) if isinstance(a, type) and issubclass(a, Section)]
                return items[0] if items else None
    return None


def literals_of(field: FieldInfo) -> list[str]:
    """The words a field may hold (empty if it is no choice of words)."""
    return [
        str(word)
        for part in (*_parts(field.annotation), *(a for p in _parts(field.annotation) for a in typing.get_args(p)))
        if typing.get_origin(part) is typing.Literal
        for word in typing.get_args(part)
    ]


def scalars_of(field: FieldInfo) -> set[type]:
    """The plain types a field may hold, of bool, int, float and str."""
    return {p for p in _parts(field.annotation) if p in (bool, int, float, str)}


@cache
def paths_of(root: type[Section]) -> Mapping[str, tuple[str, ...]]:
    """Every key name below `root` -> the dotted keys that end in it, in the order of the models."""
    found: dict[str, list[str]] = {}

    def walk(model: type[Section], prefix: str) -> None:
        for name, field in model.model_fields.items():
            key = f"{prefix}{name}"
            if key not in found.setdefault(name, []):
                found[name].append(key)
            for section in sections_of(field):
                walk(section, f"{key}.")

    walk(root, "")
    return {name: tuple(keys) for name, keys in found.items()}


def closest(word: str, among: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar word, or the empty string."""
    known = list(among)
    folded = {k.lower(): k for k in reversed(known)}
    match = difflib.get_close_matches(word.lower(), list(folded), n=1, cutoff=cutoff)
    return folded[match[0]] if match else ""
