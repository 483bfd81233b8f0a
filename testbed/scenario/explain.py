"""From what a model refuses to what a person is told: unknown keys, wrong types and units, missing sections.

Knows the configuration models, their docstrings and units. It refuses to know how files are read and which combinations
work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import annotated_types as at
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from testbed.scenario import aliases, fields, units
from testbed.scenario.base import Section
from testbed.scenario.errors import Fault
from testbed.scenario.source import KeyPath, Source, dotted

EXAMPLES: dict[str, str] = {
    "cluster": "cluster: {gpu: H100, nodes: 8}",
    "model": "model: {type: preset, name: Qwen/Qwen3-8B}",
    "workload": "workload: {type: lengths, reply: {type: fixed, tokens: 4000}, max_response_length: 16384}",
    "placement": "placement: {mode: colocated, num_gpus: 64}",
    "rollout": "rollout: {admission: {type: sync}}",
    "admission": "admission: {type: sync}",
    "weights": (
        "weights: {path: {type: fixed, update_weight_transfer_mode: broadcast}, "
        "transition: {pause_generation_mode: retract, kv: flush}}"
    ),
    "path": "path: {type: fixed, update_weight_transfer_mode: broadcast}",
    "transition": "transition: {pause_generation_mode: retract, kv: flush}",
    "reply": "reply: {type: lognormal, mean: 4000, sigma: 1.0}",
    "nodes": "nodes: 8",
    "num_gpus": "num_gpus: 64",
    "rollout_num_gpus": "rollout_num_gpus: 40",
    "actor_num_gpus": "actor_num_gpus: 24",
    "max_response_length": "max_response_length: 16384",
    "mean": "mean: 4000",
    "tokens": "tokens: 1024",
    "low": "low: 128",
    "high": "high: 1024",
    "size": "size: 1",
    "max_concurrent": "max_concurrent: 256",
    "max_concurrent_per_engine": "max_concurrent_per_engine: 64",
    "trace": "trace: mooncake_conversation",
    "seconds": "seconds: 0.5",
    "mean_s": "mean_s: 2.0",
    "sigma": "sigma: 1.0",
}
"""What to write for a key that is missing."""

WHY_NEEDED: dict[str, str] = {
    "weights": "an update without a declared rule is refused",
    "transition": "what happens to requests in flight and to old KV is declared before an update",
}


HINTS: dict[str, str] = {
    "`sigma` and `capped_share`": "sigma: 1.0",
    "`arrival_rate_per_s`": "arrivals: poisson with arrival_rate_per_s: 4.0, or arrivals: closed without it",
    "`chunked_prefill_size`": "chunked_prefill_size: -1",
    "`file` and `demonstrations`": "demonstrations: 64",
}
"""Part of a message of a section's own check -> what to write instead."""

_CONTAINERS = {"tuple[": "a list", "dict[": "a mapping"}
"""Part of an annotation -> what a person writes for it."""
_BRANCH = re.compile(r"(?P<mapping>dict\[|[A-Z]\w*$)|tuple\[|str$")
"""pydantic's name for the member of a plain union that it tried: a mapping, a section, or something else."""

NO_NUMBERS = ("inf", "infinity", "nan")
"""Text that pydantic would read as a float."""


def describe(field: FieldInfo, name: str) -> str:
    """What a field wants: kind, range and unit. E.g. `a whole number > 0, in tokens`."""
    words = fields.literals_of(field)
    if words:
        return "one of " + ", ".join(words)
    kinds = fields.scalars_of(field)
    if not kinds:
        if fields.sections_of(field):
            return "a section"
        written = str(field.annotation)
        return " or ".join(word for kind, word in _CONTAINERS.items() if kind in written) or "a value"
    kind = (
        "true or false"
        if bool in kinds
        else "a whole number"
        if int in kinds
        else "a number"
        if float in kinds
        else "text"
    )
    low, high = _bounds(field)
    limits = "".join(f" {sign} {units.plain(v)}" for sign, v in (low, high) if v is not None)
    if kind == "a number" and low[1] is not None and high[1] == 1:
        above, below = "above" if low[0] == ">" else "from", "and below" if high[0] == "<" else "to"
        return f"a share {above} {units.plain(low[1])} {below} 1"
    unit = units.unit_of(name) if kinds & {int, float} else None
    return f"{kind}{limits}" + (f", in {unit.name}" if unit is not None else "")


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    for part in getattr(field.annotation, "__args__", ()):
        for meta in getattr(part, "__metadata__", ()):
            yield from getattr(meta, "metadata", (meta,))


def _bounds(field: FieldInfo) -> tuple[tuple[str, float | None], tuple[str, float | None]]:
    low: tuple[str, float | None] = ("", None)
    high: tuple[str, float | None] = ("", None)
    for meta in _metadata(field):
        if isinstance(meta, at.Gt):
            low = (">", float(meta.gt))  # type: ignore[arg-type]
        elif isinstance(meta, at.Ge):
            low = (">=", float(meta.ge))  # type: ignore[arg-type]
        elif isinstance(meta, at.Lt):
            high = ("<", float(meta.lt))  # type: ignore[arg-type]
        elif isinstance(meta, at.Le):
            high = ("<=", float(meta.le))  # type: ignore[arg-type]
    return low, high


def unit_for(field: FieldInfo, name: str) -> units.Unit | None:
    low, high = _bounds(field)
    if fields.scalars_of(field) >= {float} and low[1] is not None and high[1] == 1:
        return units.SHARE
    return units.unit_of(name)


def shown(value: Any) -> str:
    """A value as the user wrote it, short."""
    text = json.dumps(value) if isinstance(value, (bool, dict, list)) or value is None else str(value)
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def explain(error: ValidationError, source: Source, root: type[Section]) -> list[Fault]:
    """Every fault that pydantic found, with its place in the file, in the order of the file's sections."""
    return [_fault(err, source, root) for err in error.errors(include_url=False) if _meant(err["loc"], source, root)]


def _meant(loc: tuple[str | int, ...], source: Source, root: type[Section]) -> bool:
    """Of a plain union pydantic reports every member; what was written tells which one was meant."""
    return all(
        isinstance(_value(source, _locate(loc[:i], root)[0]), dict) == (branch["mapping"] is not None)
        for i, branch in _branches(loc)
    )


def _branches(loc: Sequence[str | int]) -> Iterator[tuple[int, re.Match[str]]]:
    """Parts of a location that name a member of a plain union; a key of a mapping, which follows one, is none."""
    for i, part in enumerate(loc):
        branch = _BRANCH.match(str(part))
        if branch is not None and not (i and str(loc[i - 1]).startswith("dict[")):
            yield i, branch


def impostors(source: Source, root: type[Section]) -> list[Fault]:
    """Values that pydantic would take for something else: true for 1, text for infinity."""
    return list(_impostors(source, root, source.data, ()))


def _impostors(source: Source, model: type[Section], data: dict[str, Any], done: KeyPath) -> Iterator[Fault]:
    for key, value in data.items():
        field = fields.field_of(model, key)
        if field is None:
            continue
        path = (*done, key)
        numbers = fields.scalars_of(field) & {int, float}
        inner = fields.section_of(field, value)
        if inner is not None:
            yield from _impostors(source, inner, value, path)
        elif numbers and (isinstance(value, bool) or str(value).strip(" +-.").lower() in NO_NUMBERS):
            yield Fault(dotted(path), f"expected {describe(field, key)}, got {shown(value)}", where=source.place(path))


def _locate(loc: tuple[str | int, ...], root: type[Section]) -> tuple[KeyPath, type[Section] | None, FieldInfo | None]:
    """pydantic's location (with the tags of unions in it) -> key path, model that has its last key, and that field."""
    path: KeyPath = ()
    model: type[Section] | None = root
    holder: type[Section] | None = None
    field: FieldInfo | None = None
    tried = {i for i, _ in _branches(loc)}
    parts = [part for i, part in enumerate(loc) if i not in tried]
    while parts:
        part = parts.pop(0)
        path = (*path, part)
        if isinstance(part, int):
            model = fields.item_of(field)
            continue
        holder, field = model, fields.field_of(model, part)
        model = None
        choice = fields.choice_of(field)
        if choice is not None:
            if parts and parts[0] in choice.members:
                model = choice.members[str(parts.pop(0))]
        elif field is not None:
            found = fields.sections_of(field)
            model = found[0] if len(found) == 1 else None
    return path, holder, field


def _value(source: Source, path: KeyPath) -> Any:
    data: Any = source.data
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _fault(err: Any, source: Source, root: type[Section]) -> Fault:
    path, holder, field = _locate(err["loc"], root)
    kind: str = err["type"]
    key = dotted(path)
    name = str(path[-1]) if path else ""
    where = source.place(path)
    value = _value(source, path)
    choice = fields.choice_of(field)
    if kind == "extra_forbidden":
        return Fault(key, "unknown key", nearest_key(path, holder, source, root), where)
    if kind == "missing":
        section = dotted(path[:-1]) or "the scenario"
        why = f" ({WHY_NEEDED[name]})" if name in WHY_NEEDED else ""
        return Fault(key, f"missing; {section} needs it{why}", _example(name, field), where)
    if (
        kind in ("union_tag_not_found", "union_tag_invalid", "model_attributes_type", "model_type")
        and choice is not None
    ):
        return _choice_fault(key, name, value, choice, source, path)
    if kind in ("model_type", "model_attributes_type"):
        what = "the section is empty" if value is None else f"expected a section with keys, got {shown(value)}"
        return Fault(key, what, "leave the line out to take the defaults" if value is None else "", where)
    if kind == "value_error":
        said = str(err["ctx"]["error"])
        return Fault(key, said, next((near for part, near in HINTS.items() if part in said), ""), where)
    if field is None or (isinstance(path[-1], int) and kind != "literal_error"):
        return Fault(key, f"{err['msg']}, got {shown(err['input'])}", "", where)
    if kind == "literal_error":
        return Fault(
            key,
            f"{shown(value)} is not {describe(field, name)}",
            _nearest_word(value, fields.literals_of(field)),
            where,
        )
    return _value_fault(
        kind, key, name, field, value if path and not isinstance(path[-1], int) else err["input"], where
    )


def _choice_fault(key: str, name: str, value: Any, choice: fields.Choice, source: Source, path: KeyPath) -> Fault:
    tag, tags = choice.discriminator, list(choice.members)
    if not isinstance(value, dict):
        word = _nearest_word(value, tags)
        what = f"expected a section with `{tag}:`, got {shown(value)}"
        return Fault(key, what, f"{name}: {{{tag}: {word or tags[0]}}}", source.place(path))
    if tag not in value:
        fits = [t for t, m in choice.members.items() if value and all(k in m.model_fields for k in value)]
        near = f"{tag}: {fits[0] if fits else choice.default or tags[0]}"
        return Fault(f"{key}.{tag}", f"missing; one of {', '.join(tags)}", near, source.place(path))
    return Fault(
        f"{key}.{tag}",
        f"unknown {tag} {shown(value[tag])}; one of {', '.join(tags)}",
        _nearest_word(value[tag], tags),
        source.place((*path, tag)),
    )


def _value_fault(kind: str, key: str, name: str, field: FieldInfo, value: Any, where: str) -> Fault:
    wants = describe(field, name)
    first = (field.description or "").split(". ")[0].split("\n")[0].rstrip(".")
    if first and units.unit_of(name) is None and len(first) <= 60:
        wants += f" ({first[0].lower()}{first[1:]})"
    if value is None:
        return Fault(key, f"no value; expected {wants}", "", where)
    if fields.scalars_of(field) & {int, float}:
        if isinstance(value, str):
            return _unit_fault(key, name, field, value, wants, where)
        if isinstance(value, (int, float)):
            return Fault(key, f"expected {wants}, got {shown(value)}", _nearest_number(field, value), where)
    near = f'"{value}"' if str in fields.scalars_of(field) and isinstance(value, (int, float)) else ""
    return Fault(key, f"expected {wants}, got {shown(value)}", near, where)


def _unit_fault(key: str, name: str, field: FieldInfo, text: str, wants: str, where: str) -> Fault:
    got = units.quantity(text)
    unit = unit_for(field, name)
    if got is None:
        return Fault(key, f"expected {wants}, got {shown(text)}", "", where)
    if unit is None:
        return Fault(key, f"expected {wants}, without a unit, got {shown(text)}", "", where)
    number = got.in_unit(unit)
    if number is None:
        return Fault(key, f"{shown(text)} is a {got.dimension}; expected {wants}", "", where)
    whole = int in fields.scalars_of(field) and float not in fields.scalars_of(field)
    return Fault(
        key,
        f"wrong unit: {shown(text)}; expected {wants}, as a plain number",
        units.plain(round(number) if whole else number),
        where,
    )


def _nearest_number(field: FieldInfo, value: float) -> str:
    """The value moved into the field's range; a percentage becomes a share."""
    (low_sign, low), (high_sign, high) = _bounds(field)
    whole = float not in fields.scalars_of(field)
    if high == 1 and 1 < value <= 100:
        return units.plain(value / 100)
    if low is not None and (value < low or (value == low and low_sign == ">")):
        if whole:
            return units.plain(low + 1 if low_sign == ">" else low)
        return units.plain(low) if low_sign == ">=" else ""
    if high is not None and (value > high or (value == high and high_sign == "<")):
        return units.plain(high) if high_sign == "<=" else ""
    return units.plain(round(value)) if whole else ""


def _nearest_word(value: Any, words: list[str]) -> str:
    text = str(value).strip().replace("-", "_")
    if aliases.VALUES.get(text.lower()) in words:
        return aliases.VALUES[text.lower()]
    return fields.closest(text, words, cutoff=0.5)


def _example(name: str, field: FieldInfo | None) -> str:
    if name in EXAMPLES:
        return EXAMPLES[name]
    if field is None:
        return ""
    words = fields.literals_of(field)
    return f"{name}: {words[0]}" if words else f"{name}: <{describe(field, name)}>"


def nearest_key(path: KeyPath, holder: type[Section] | None, source: Source, root: type[Section]) -> str:
    """The key that was probably meant: by spelling here, in a sibling type, elsewhere, or in another system."""
    name = str(path[-1]).lstrip("-").replace("-", "_")
    here = list(holder.model_fields) if holder is not None else []
    parent = dotted(path[:-1])
    if "." in name:
        return "nested sections: " + ": {".join(name.split(".")) + ": ..." + "}" * name.count(".")
    close = fields.closest(name, here, cutoff=0.85)
    if close:
        return f"{parent}.{close}" if parent else close
    siblings = _siblings(path, name, source, root)
    if siblings:
        return siblings
    elsewhere = fields.paths_of(root).get(name, ())
    if 1 <= len(elsewhere) <= 3:
        return " or ".join(elsewhere)
    if name.lower() in aliases.KEYS:
        return aliases.KEYS[name.lower()]
    close = fields.closest(name, here)
    if close:
        return f"{parent}.{close}" if parent else close
    far = fields.closest(name, fields.paths_of(root), cutoff=0.8)
    if far:
        return fields.paths_of(root)[far][0]
    return f"the keys of {parent or 'a scenario'}: {', '.join(here)}" if here else ""


def _siblings(path: KeyPath, name: str, source: Source, root: type[Section]) -> str:
    """`type: x` if the key belongs to another member of the union that the section is."""
    model: type[Section] | None = root
    choice: fields.Choice | None = None
    data: Any = source.data
    for part in path[:-1]:
        field = fields.field_of(model, str(part))
        data = data[part] if isinstance(data, dict) else None
        choice = fields.choice_of(field)
        model = fields.section_of(field, data)
    if choice is None:
        return ""
    owners = [tag for tag, member in choice.members.items() if name in member.model_fields]
    return (
        f"`{name}` belongs to {dotted(path[:-1])} with {choice.discriminator}: {' or '.join(owners)}" if owners else ""
    )
