"""`testbed check-engine` on recorded traces: what it prints, its exit code, and bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Cli

TRACES = Path(__file__).parents[1] / "data" / "sglang_scheduler_traces"


def write(path: Path, trace: Any) -> Path:
    with gzip.open(path, "wt") as f:
        json.dump(trace, f)
    return path


def read(name: str) -> Any:
    with gzip.open(TRACES / f"{name}.json.gz", "rt") as f:
        return json.load(f)


def test_recorded_traces_are_replayed_without_an_engine(cli: Cli, tmp_path: Path) -> None:
    said = cli("check-engine", "--trace", TRACES / "victims.json.gz", "--json", "f.json")
    assert said.code == 0, said.err
    assert "victims: SGLang 0.5.23" in said.out
    assert "1 case, 173 batches, 0 with differences" in said.out
    [case] = json.loads((tmp_path / "f.json").read_text())["cases"]
    assert (case["batches"], case["differences"], case["rule"]) == (173, [], None)
    assert case["counts"]["retracted"] == 6


def test_an_engine_of_another_version_with_another_rule_is_named(cli: Cli, tmp_path: Path) -> None:
    """An engine that keeps the request with the fewest outputs: what version it is, what it did, which rule that is."""
    trace = read("victims")
    trace["sglang"] = "0.6.0"
    retract = next(e for e in trace["events"] if e["e"] == "retract")
    retract["out"].reverse()
    said = cli("check-engine", "--trace", write(tmp_path / "other.json.gz", trace), "--json", "f.json")
    assert said.code == 1
    assert "other: SGLang 0.6.0: DIFFERENT" in said.out
    assert "rule 'retraction order': the model says: fewest outputs first" in said.out
    assert "batches before:" in said.out
    assert "other (SGLang 0.6.0): retraction order of SGLang 0.5.23; first: iteration" in said.err
    [case] = json.loads((tmp_path / "f.json").read_text())["cases"]
    assert case["rule"] == "retraction order"
    assert "reached iteration" in case["around"]


def test_rules_and_what_is_not_modelled_are_listed(cli: Cli) -> None:
    said = cli("check-engine", "--rules")
    assert said.code == 0
    assert "retraction order: fewest outputs first" in said.out
    assert "speculative_algorithm: several tokens a step" in said.out


def test_bad_input_is_one_message(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "no.json.gz").write_text("nothing")
    write(tmp_path / "empty.json.gz", {"a": 1})
    (tmp_path / "none").mkdir()
    mixed = read("victims")
    mixed["engine"]["speculative_algorithm"] = "EAGLE"
    write(tmp_path / "eagle.json.gz", mixed)
    for args, text in (
        (("--trace", "nil.json.gz"), "--trace nil.json.gz: no such file (nearest: no.json.gz)"),
        (("--trace", "no.json.gz"), "--trace no.json.gz: not a trace"),
        (("--trace", "empty.json.gz"), "not a trace: it has no engine, events, requests, sglang"),
        (("--trace", "none"), "--trace none: the folder holds no trace"),
        (("--trace", "eagle.json.gz"), "eagle: speculative_algorithm 'EAGLE' is not modelled: several tokens a step"),
        (("victims", "--trace", "no.json.gz"), "--trace: no engine is started (nearest: leave out the cases"),
        (("--json", "none", "--rules"), ""),
        (("--json", "none", "--trace", "no.json.gz"), "--json none: this is a folder"),
    ):
        said = cli("check-engine", *args)
        assert said.code == (2 if text else 0), args
        assert text in said.err
        assert "Traceback" not in said.err
