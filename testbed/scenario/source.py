"""YAML text -> plain data, with the place (`FILE:LINE`) of every key; and setting one key of such data.

Knows YAML and the discriminators of unions. It refuses to know what a key means and whether a value is any good.
YAML's surprises are off: duplicate keys are errors, `no` and `on` are words, `12:30` is text, `1e3` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from testbed.scenario import fields
from testbed.scenario.base import Section
from testbed.scenario.errors import Fault, ScenarioError

KeyPath = tuple[str | int, ...]

MAX_NODES = 200_000
"""Values in one file, aliases expanded; a file beyond is not a scenario."""


class Loader(yaml.SafeLoader):
    """YAML's core schema: null, true/false, decimal and hexadecimal numbers; everything else is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"])


def dotted(path: KeyPath) -> str:
    """`("a", "b", 2, "c")` -> `a.b[2].c`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else part)
    return out


@dataclass(frozen=True)
class Source:
    """Plain data (dicts with text keys, lists, scalars) and where each key path was written."""

    data: dict[str, Any]
    where: Mapping[KeyPath, str]
    file: str

    def place(self, path: KeyPath) -> str:
        """Where `path` is written, or its nearest enclosing section, or the first line of the file."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.where:
                return self.where[path[:n]]
        return self.where.get((), f"{self.file}:1")

    def sub(self, *path: str | int) -> Source:
        """The mapping below `path` as a source of its own."""
        data: Any = self.data
        for part in path:
            data = data[part]
        n = len(path)
        where = {p[n:]: w for p, w in self.where.items() if p[:n] == path}
        return Source(data, where, self.file)

    def set(
        self, path: tuple[str, ...], value: Any, where: str | Mapping[KeyPath, str], root: type[Section] | None
    ) -> Source:
        """A copy in which `path` is `value`. `root` is the model of the whole: it knows unions and their defaults.

        Mappings are merged key by key; one that names another `type` (or `mode`) replaces the old one altogether, and
        setting `type` alone removes the keys that the new member does not have. A union that was left to its default
        starts from it. `where` is one place for all, or places by paths relative to `path`. Raises `ScenarioError` if
        `path` leads through something that is no section.
        """
        edit = _Edit(dict(self.where), {(): where} if isinstance(where, str) else where)
        data = _copy(self.data)
        edit.assign(data, root, (), path, value)
        return Source(data, edit.at, self.file)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


class _Edit:
    """One assignment: `at` are the places of the data that is changed (in place), `places` those of the new value."""

    def __init__(self, at: dict[KeyPath, str], places: Mapping[KeyPath, str]) -> None:
        self.at = at
        self.places = places

    def assign(
        self,
        data: dict[str, Any],
        model: type[Section] | None,
        done: KeyPath,
        path: tuple[str, ...],
        value: Any,
        below: KeyPath = (),
    ) -> None:
        """data[path] = value, where `data` lies at `done` and `value` at `below` within what is being set."""
        key, rest = path[0], path[1:]
        here = (*done, key)
        field = fields.field_of(model, key)
        choice = fields.choice_of(field)
        if not rest:
            self._put(data, field, choice, here, value, below)
            return
        if data.get(key) is None:
            named = choice is None or choice.default is None or rest[0] == choice.discriminator
            data[key] = {} if named or choice is None else {choice.discriminator: choice.default}
            self.at[here] = self._place(below)
        inner = data[key]
        if not isinstance(inner, dict):
            raise ScenarioError(
                Fault(dotted((*here, *rest)), f"`{dotted(here)}` has no keys", where=self._place(below))
            )
        if choice is not None and rest == (choice.discriminator,) and value in choice.members:
            for extra in [k for k in inner if k not in choice.members[value].model_fields]:
                del inner[extra]
                self._forget((*here, extra))
        self.assign(inner, fields.section_of(field, inner), here, rest, value, below)

    def _put(
        self,
        data: dict[str, Any],
        field: FieldInfo | None,
        choice: fields.Choice | None,
        here: KeyPath,
        value: Any,
        below: KeyPath,
    ) -> None:
        key = str(here[-1])
        old = data.get(key)
        if choice is not None and isinstance(value, dict):
            name = choice.discriminator
            if old is None and choice.default is not None and name not in value:
                old = data[key] = {name: choice.default}
            if name in value and isinstance(old, dict) and value[name] != old.get(name):
                old = None
        if isinstance(value, dict) and isinstance(old, dict):
            self.at[here] = self._place(below)
            for k, v in value.items():
                self.assign(old, fields.section_of(field, old), here, (k,), v, (*below, k))
            return
        self._forget(here)
        data[key] = _copy(value)
        self.at[here] = self._place(below)
        for p, w in self.places.items():
            if len(p) > len(below) and p[: len(below)] == below:
                self.at[(*here, *p[len(below) :])] = w

    def _forget(self, path: KeyPath) -> None:
        for known in [p for p in self.at if p[: len(path)] == path]:
            del self.at[known]

    def _place(self, path: KeyPath) -> str:
        for n in range(len(path), -1, -1):
            if path[:n] in self.places:
                return self.places[path[:n]]
        return ""


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path, shown: str | None = None) -> Source:
    """Read a YAML file whose top level is a mapping. Raises `ScenarioError` with file and line."""
    file = shown or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ScenarioError(Fault("", _cannot_read(err), _nearest_file(path), where=file)) from None
    except UnicodeDecodeError as err:
        line = path.read_bytes()[: err.start].count(b"\n") + 1
        raise ScenarioError(Fault("", "not UTF-8 text", where=f"{file}:{line}")) from None
    return parse(text, file)


def parse(text: str, file: str) -> Source:
    """As `read`, from text; `file` is the name used in messages."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as err:
        code = err.character if isinstance(err.character, int) else ord(err.character)
        line = text[: err.position].count("\n") + 1
        raise ScenarioError(Fault("", f"character U+{code:04X} is not allowed", where=f"{file}:{line}")) from None
    except yaml.MarkedYAMLError as err:
        raise ScenarioError(_yaml_fault(err, text, file)) from None
    except RecursionError:
        raise ScenarioError(Fault("", "nested too deeply to be read", where=f"{file}:1")) from None
    if node is None:
        raise ScenarioError(Fault("", "the file is empty", where=f"{file}:1"))
    if not isinstance(node, yaml.MappingNode):
        raise ScenarioError(
            Fault("", "expected sections (`name: value` lines) at the top level", where=_line(node, file))
        )
    builder = _Builder(loader, file)
    data = builder.build(node, ())
    if builder.faults:
        raise ScenarioError(builder.faults)
    return Source(data, builder.where, file)


def value_of(text: str, where: str, key: str) -> Any:
    """The YAML value of a command line's `KEY=text`. Raises `ScenarioError`."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        builder = _Builder(loader, "")
        value = builder.build(node, ())
    except (yaml.YAMLError, ValueError):
        raise ScenarioError(Fault(key, f"`{text}` is not a YAML value", where=where)) from None
    if builder.faults:
        raise ScenarioError(Fault(f"{key}.{f.key}" if f.key else key, f.what, f.nearest, where) for f in builder.faults)
    return value


def _line(node: yaml.Node, file: str) -> str:
    return f"{file}:{node.start_mark.line + 1}"


class _Builder:
    """Nodes -> data, noting the line of each key and every fault met on the way."""

    def __init__(self, loader: Loader, file: str) -> None:
        self._loader = loader
        self._file = file
        self._open: set[int] = set()
        self._count = 0
        self.where: dict[KeyPath, str] = {}
        self.faults: list[Fault] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > MAX_NODES:
            raise ScenarioError(
                Fault("", f"more than {MAX_NODES} values, aliases expanded", where=_line(node, self._file))
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            raise ScenarioError(Fault(dotted(path), "an alias that contains itself", where=_line(node, self._file)))
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                for i, item in enumerate(node.value):
                    self.where[(*path, i)] = _line(item, self._file)
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        first: dict[str, str] = {}
        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        merged_at: dict[KeyPath, str] = {}
        for key_node, value_node in node.value:
            line = _line(key_node, self._file)
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    before = dict(self.where)
                    got = self.build(source, path)
                    added = {p: w for p, w in self.where.items() if before.get(p) != w}
                    self.where = before
                    if not isinstance(got, dict):
                        self.faults.append(Fault(dotted(path), "`<<` merges mappings, this is none", where=line))
                        continue
                    merged = {**got, **merged}
                    merged_at = {**added, **merged_at}
                continue
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not key or key_node.tag == "tag:yaml.org,2002:null":
                self.faults.append(Fault(dotted(path), "a key must be a word", where=line))
                continue
            if key in first:
                what = f"given twice in one section (first in line {first[key].rsplit(':', 1)[-1]})"
                self.faults.append(Fault(dotted((*path, key)), what, where=line))
                continue
            first[key] = line
            self.where[(*path, key)] = line
            out[key] = self.build(value_node, (*path, key))
        for p, w in merged_at.items():
            if len(p) > len(path) and p[len(path)] not in out:
                self.where[p] = w
        return {**{k: v for k, v in merged.items() if k not in out}, **out}

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            what = f"`{node.value}` cannot be read as {node.tag.rsplit(':', 1)[-1].lstrip('!')}"
            self.faults.append(Fault(dotted(path), what, where=_line(node, self._file)))
            return None


def _yaml_fault(err: yaml.MarkedYAMLError, text: str, file: str) -> Fault:
    mark = err.problem_mark or err.context_mark
    line = mark.line if mark is not None else 0
    lines = text.splitlines()
    if line >= len(lines):  # the fault shows at the end of the file: name the last line that says something
        line = max((i for i, content in enumerate(lines) if content.strip()), default=0)
    here = lines[line] if line < len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return Fault("", "a tab indents this line; YAML wants spaces", where=f"{file}:{line + 1}")
    context = f" {err.context}" if err.context else ""
    if err.context_mark is not None and err.context_mark.line != line:
        context += f" that begins in line {err.context_mark.line + 1}"
    return Fault("", f"broken YAML{context}: {err.problem or 'cannot be read'}", where=f"{file}:{line + 1}")


def _cannot_read(err: OSError) -> str:
    if isinstance(err, FileNotFoundError):
        return "no such file"
    return "this is a folder, not a file" if isinstance(err, IsADirectoryError) else f"cannot be read ({err.strerror})"


def _nearest_file(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return ""
    close = fields.closest(path.name, names)
    return str(path.parent / close) if close else ""
