"""Curves of a graph's stages: which stages are seeds of one line, and the files."""

from pathlib import Path

import msgspec
import pytest

from reports.stages import write_stages_report
from reports.stages_curves import lines_of
from testbed.metrics.stages import StagePlan, StagesResult
from testbed.run_files import SUMMARY
from tests.reports.invented import COLOCATED, learning, run


def graph(folder: Path, stages: dict[str, tuple[str, int]]) -> StagesResult:
    """Stage -> (model, seed of its run); KL to the teacher falls."""
    plan = []
    for name, (model, seed) in stages.items():
        plan.append(StagePlan(name, "opd", model, {"0": "teacher"}, [name]))
        r = msgspec.structs.replace(learning(run(name, COLOCATED, seed=seed), [0.0] * 10), rewarded=False)
        for i, step in enumerate(r.steps):
            step.learning["teacher_kl"] = 1.0 / (i + seed)
        (folder / name).mkdir()
        (folder / name / SUMMARY).write_bytes(msgspec.json.encode(r))
    return StagesResult("two", "", "testbed real two.yaml", 0, plan, [], {})


SEEDS = {"opd-1": ("start", 1), "mopd2-1": ("start", 1), "opd-2": ("start", 2), "mopd2-2": ("start", 2)}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"opd": [1, 2], "mopd2": [1, 2]}),
        ({"other": ("start", 1)}, {"opd": [1, 2], "mopd2": [1, 2]}),  # has no second seed
        ({"opd-3": ("opd-2", 3)}, {"mopd2": [1, 2]}),  # another model: opd-1, opd-2, opd-3 are no seeds of one
    ],
)
def test_stages_that_differ_in_the_seed_alone_are_one_line(tmp_path, more, expected):
    lines = lines_of(graph(tmp_path, SEEDS | more), tmp_path)
    found = {line.name: [r.seed for r in line.runs] for line in lines}
    assert found == expected


def test_the_report_writes_and_shows_the_curves(tmp_path):
    write_stages_report(graph(tmp_path, SEEDS), tmp_path)
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"kl.svg", "kl.png"}
    assert 'src="figures/kl.svg"' in (tmp_path / "index.html").read_text()


def test_a_graph_without_runs_has_no_curves(tmp_path):
    plan = [StagePlan("sft", "sft", "tiny-qwen3", {}, ["sft"])]
    write_stages_report(StagesResult("two", "", "testbed real two.yaml", 0, plan, [], {}), tmp_path)
    assert not (tmp_path / "figures").exists() and "Learning curves" not in (tmp_path / "index.html").read_text()
