"""Sentences with numbers in them, written once and rendered as HTML, Markdown or plain text.

A number in a sentence is a `Number` with its kind, never bare text: so no finding can print a number without saying
what it rests on. Figures that are inputs of a scenario (GPU counts, bounds) are text. It refuses to know what the
sentences say.
"""

from __future__ import annotations

from msgspec import Struct

from reports.kinds import BY_NAME


class Number(Struct, frozen=True):
    text: str
    kind: str


class Letter(Struct, frozen=True):
    """A variant, by its letter."""

    letter: str


class Term(Struct, frozen=True):
    """A word that the glossary defines under `id`."""

    text: str
    id: str


class Mark(Struct, frozen=True):
    """A kind's mark in front of a word."""

    kind: str


Part = str | Number | Letter | Term | Mark
Sentence = tuple[Part, ...]


def say(*parts: Part | Sentence | None) -> Sentence:
    """Join parts and sentences; None is nothing."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, tuple):
            out.extend(part)
        elif part is not None:
            out.append(part)
    return tuple(out)


def joined(sentences: list[Sentence], last: str = " and ") -> Sentence:
    """`a`, `a and b`, `a, b and c` over sentences."""
    out: list[Part] = []
    for i, s in enumerate(sentences):
        if i:
            out.append(last if i == len(sentences) - 1 else ", ")
        out.extend(s)
    return tuple(out)


def as_text(sentence: Sentence) -> str:
    """Without marks."""
    return "".join(
        p if isinstance(p, str) else p.letter if isinstance(p, Letter) else "" if isinstance(p, Mark) else p.text
        for p in sentence
    )


def as_markdown(sentence: Sentence) -> str:
    """With the mark of its kind after each number and letters in bold."""
    out = []
    for p in sentence:
        if isinstance(p, str):
            out.append(p)
        elif isinstance(p, Number):
            out.append(f"{p.text} {BY_NAME[p.kind].mark}")
        elif isinstance(p, Letter):
            out.append(f"**{p.letter}**")
        elif isinstance(p, Mark):
            out.append(f"{BY_NAME[p.kind].mark} ")
        else:
            out.append(p.text)
    return "".join(out)
