"""The command line in this process, in a folder of its own, with a scenario and a study that run in a blink."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from testbed.cli import main
from tests.support.scenarios import tree


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """`cli("run", "small.yaml")`: the command in `tmp_path`, where `small.yaml`, `other.yaml` and `study.yaml` lie."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(a) for a in args])
        printed = capfd.readouterr()
        assert isinstance(done.value.code, int)
        return Said(done.value.code, printed.out, printed.err)

    return call


def write_inputs(folder: Path) -> None:
    """`small.yaml` (3 steps, one of warm-up), `other.yaml` (slower engines), `study.yaml` (two variants, two seeds)."""
    small = tree(
        name="small",
        question="How long is a step?",
        run__num_rollout=3,
        run__warmup_steps=1,
        workload__reply={"type": "uniform", "low": 20, "high": 80},
    )
    dump(folder / "small.yaml", small)
    other = {**small, "name": "other", "simulation": {"engine_costs": {"type": "linear", "base_s": 0.02}}}
    dump(folder / "other.yaml", other)
    study = {
        "study": "speeds",
        "question": "What do slower engines cost?",
        "base": "small.yaml",
        "seeds": [1, 2],
        "variants": [
            {"name": "fast, 5 ms", "note": "as it is", "set": {}},
            {"name": "slow, 20 ms", "set": {"simulation.engine_costs.base_s": 0.02}},
        ],
    }
    dump(folder / "study.yaml", study)


def dump(path: Path, data: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def tree_of(folder: Path) -> set[str]:
    """Every file and folder below, relative."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


Lines = list[dict[str, Any]]


def lines_of(journal: Path) -> Lines:
    data = zstandard.ZstdDecompressor().decompressobj().decompress(journal.read_bytes())
    return [json.loads(line) for line in data.splitlines()]


def rewrite(journal: Path, change: Callable[[Lines], object]) -> None:
    """Change the lines of a journal."""
    lines = lines_of(journal)
    change(lines)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    journal.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
